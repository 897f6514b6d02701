import json
import os
import random

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sse_convert.data.teacher_samples import CACHE_VARIABLE
from sse_convert.recipe import recipe_from_dict
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.training.metrics import read
from tests.recipe.recipes import entries
from tests.training.running import run_alone

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


def make_llama(*, layers=3, hidden=32, vocab=320, seed=0, tie=False):
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
    """A tiny Llama with its tokenizer, its embeddings tied: the harder case for checkpoints and sharding."""
    folder = tmp_path_factory.mktemp("teacher")
    make_llama(tie=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A source of conversations; every third asks so long that some rows of 32 tokens hold no answer."""
    path = tmp_path_factory.mktemp("chats") / "chat.jsonl"
    asked = ["who walked down?", "who wrote?", "the keeper walked down to the harbor before dawn and wrote " * 4]
    talks = [[("user", asked[i % 3]), ("assistant", "the keeper did")] for i in range(200)]
    turns = [[{"role": role, "content": text} for role, text in talk] for talk in talks]
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in turns))
    return {"path": str(path), "kind": "chat"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, os.environ.get("SSE_TEST_CACHE") or str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """Accelerate keeps its state per process; tests must not see each other's, nor that of tests elsewhere."""

    def forget():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    yield
    forget()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


MIXERS = {"sse": {"qk_rank": 4}, "sliding": {"window": 8, "sinks": 1}}
STAGES = {
    "align": {"loss": "layer_mse", "train": "mixers", "lr": 3e-3},
    "distill": {"loss": "kl", "lr": {"mixers": 3e-3, "rest": 1e-3}},
    "uptrain": {"loss": "ce", "lr": 3e-3},
}


def recipe_for(teacher, text, out, *, stages=(), **settings):
    """A recipe for the tiny teacher; each stage is a name of STAGES, or (name, settings)."""
    built = []
    for stage in stages:
        name, own = (stage, {}) if isinstance(stage, str) else stage
        size = {"tokens": 768, "seq_len": 32, "batch_tokens": 128, "warmup": 0.0}
        stage = {"name": name, **size, **STAGES[name], **own}
        whole = max(1, min(4, stage["batch_tokens"] // stage["seq_len"]))
        built.append({"micro_batch": whole, **stage})
    data = {
        "recipe_version": 1,
        "model": str(teacher),
        "layers": {"pattern": ["sse", "sliding", "full"]},
        "mixers": MIXERS,
        "stages": built,
        "data": {"train": [{"path": str(text)}]},
        "eval": {"tokens": 0},
        "export": {"dir": str(out)},
    }
    found = {**data, **settings}
    return recipe_from_dict({**found, "mixers": entries(found["mixers"])})


@pytest.fixture(scope="session")
def converted(tmp_path_factory, teacher_folder, text_folder):
    """The tiny Llama with an SSE, a sliding and a full layer."""
    folder = tmp_path_factory.mktemp("converted") / "model"
    convert_checkpoint(Job.of(recipe_for(teacher_folder, text_folder, "unused")), folder)
    return folder


@pytest.fixture
def make(teacher_folder, text_folder, tmp_path):
    """Builds recipes for the tiny teacher."""

    def build(*stages, **settings):
        return recipe_for(teacher_folder, text_folder, tmp_path / "out", stages=stages, **settings)

    return build


@pytest.fixture
def train(make, converted, tmp_path):
    """Runs one stage from the converted checkpoint into a new folder; returns its folder and report."""

    def run(name, out="result", *, checkpoint=None, recipe=None, **settings):
        recipe = recipe or make((name, settings))
        report = run_alone(recipe, recipe.stages[0], checkpoint or converted, tmp_path / out)
        return tmp_path / out, report

    return run


def losses(folder, key="loss"):
    """One value per step of a finished or unfinished stage."""
    return [record[key] for record in read(folder / "metrics.jsonl")]
