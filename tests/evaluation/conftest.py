import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sse_convert.mixers import mixer_from_dict
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.hybrid import model_class_for
from sse_convert.recipe.schema import Data, Eval, Export, Layers, NeedleEval, Recipe, Source

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


SSE = {"kind": "sse", "num_partitions": 2, "qk_rank": 4}


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory, tokenizer, llama):
    folder = tmp_path_factory.mktemp("teacher")
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def student_folder(tmp_path_factory, tokenizer, llama):
    """The teacher with its second layer converted, its own weights kept."""
    config = build_config(llama.config, {"layers": ["full", "sse"], "mixers": {"sse": SSE}})
    torch.manual_seed(1)
    model = model_class_for(LlamaForCausalLM)(config)
    left = model.load_state_dict(llama.state_dict(), strict=False)
    assert all("sse_" in name for name in left.missing_keys)
    folder = tmp_path_factory.mktemp("student")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(teacher_folder, tmp_path):
    text = tmp_path / "valid.txt"
    text.write_text(TEXT * 40)
    return Recipe(
        recipe_version=1,
        model=str(teacher_folder),
        layers=Layers(pattern=["full", "sse"]),
        mixers={"sse": mixer_from_dict(SSE)},
        data=Data(valid=[Source(path=str(text))]),
        eval=Eval(
            lengths=[128],
            tokens=1000,
            needle=NeedleEval(lengths=[256], samples=5, kinds=["number"], keys=[1, 2]),
            throughput=[64],
        ),
        export=Export(dir=str(tmp_path / "out"), license="mit"),
    )
