import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = (
    "The keeper of the lighthouse walked down to the harbor before dawn. He carried a lantern and a ledger, and wrote "
    "down each ship that passed.\nWhat did he see? "
)
NEEDLE = " One of the special magic numbers for acorn is: 1234567.\nWhat is the special magic number for acorn?"


def build_tokenizer(vocab_size=384, bos=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|end|>", "<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, NEEDLE] * 4, trainer)
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<s>", pad_token="<|end|>", model_max_length=2048
    )


def build_llama(vocab_size=512, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizer():
    return build_tokenizer(bos=True)


@pytest.fixture(scope="session")
def llama(tokenizer):
    return build_llama(len(tokenizer))


@pytest.fixture(scope="session")
def haystack(tokenizer):
    return tokenizer(TEXT * 40, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="session")
def make_llama():
    return build_llama
