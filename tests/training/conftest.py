import os
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sse_convert.training.data.teacher import CACHE_VARIABLE

TEXT = "the keeper of lighthouse walked down to harbor before dawn and wrote each ship that passed his ledger"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_text(words, seed=0):
    rng = random.Random(seed)
    return " ".join(rng.choice(TEXT.split()) for _ in range(words)) + "."


def make_tokenizer(*, bos=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>", "<bos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([make_text(2000)], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast


def make_llama(*, layers=2, hidden=32, vocab=320, seed=0, tie=False):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.2,
        tie_word_embeddings=tie,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizer():
    return make_tokenizer(bos=True)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Six documents of about 6 kB."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(6):
        (folder / f"{i}.txt").write_text(make_text(1000, seed=i))
    return folder


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory, tokenizer):
    """A tiny Llama with its tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    make_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, os.environ.get("SSE_TEST_CACHE") or str(tmp_path_factory.mktemp("cache")))
