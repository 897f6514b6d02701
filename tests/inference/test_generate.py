import itertools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sse_convert.errors import CheckpointError, UsageError
from sse_convert.inference import generate as generation
from sse_convert.inference.generate import Conversation
from sse_convert.inference.sampling import Sampling

OWN = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "num_beams": 2, "suppress_tokens": list(range(2, 60))}
"""settings of a model's generation that change what it writes"""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    special = ["<|im_end|>", "<|im_start|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def model(checkpoint):
    return generation.load_model(checkpoint, device="cpu")


@pytest.fixture
def tokenizer(checkpoint):
    return generation.load_tokenizer(checkpoint)


@torch.no_grad()
def greedy(model, ids, count):
    """Brute force: a full forward pass per token."""
    ids = list(ids)
    for _ in range(count):
        ids.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
        if ids[-1] == 0:
            break
    return ids


def test_greedy_text_equals_full_forward_passes(checkpoint, model, tokenizer):
    report = generation.generate_text(checkpoint, "Once upon", sampling=Sampling(max_new_tokens=12), device="cpu")
    ids = tokenizer("Once upon").input_ids
    expected = greedy(model, ids, 12)[len(ids) :]
    assert report.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert report.new_tokens == len(expected)
    assert report.stopped == ("end" if expected[-1] == 0 else "length")
    assert report.prompt_tokens == 9
    assert report.to_dict()["tokens_per_s"] == pytest.approx(report.new_tokens / report.seconds)


def test_sampling_repeats_with_its_seed(checkpoint):
    def text(seed):
        sampling = Sampling(max_new_tokens=20, temperature=1.5, top_p=0.95, seed=seed)
        return generation.generate_text(checkpoint, "Once", sampling=sampling, device="cpu").text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_sampling_leaves_the_global_generator_alone(model, tokenizer):
    state = torch.get_rng_state()
    talk(model, tokenizer, ["Hello"], temperature=1.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_requests_are_named(checkpoint, tmp_path):
    with pytest.raises(UsageError, match="prompt is empty"):
        generation.generate_text(checkpoint, "")
    with pytest.raises(UsageError, match=r"500 prompt tokens and 13 new ones exceed"):
        generation.generate_text(checkpoint, "a" * 500, sampling=Sampling(max_new_tokens=13))
    with pytest.raises(UsageError, match="top_p is 0"):
        Sampling(top_p=0)
    with pytest.raises(UsageError, match="temperature is -1"):
        Sampling(temperature=-1)
    with pytest.raises(CheckpointError, match="does not exist"):
        generation.generate_text(tmp_path / "absent", "hello")
    with pytest.raises(UsageError, match="no chat template"):
        generation.chat_in_terminal(checkpoint, system="Be brief.")


@pytest.fixture
def own_settings(checkpoint, tmp_path):
    """A copy of the checkpoint with a generation_config.json of these settings."""

    def written(settings):
        folder = shutil.copytree(checkpoint, tmp_path / "own")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **settings}))
        return folder

    return written


@pytest.mark.parametrize("settings", [OWN, {"bad_words_ids": 3}, {"no_repeat_ngram_size": "x"}], ids=str)
def test_how_tokens_are_chosen_is_not_the_model_s_affair(checkpoint, own_settings, settings):
    texts = {
        generation.generate_text(folder, "Once upon", sampling=Sampling(max_new_tokens=12), device="cpu").text
        for folder in (checkpoint, own_settings(settings))
    }
    assert len(texts) == 1


@pytest.mark.parametrize("settings", [{"max_new_tokens": []}, {"suppress_tokens": 3}, {"pad_token_id": "x"}], ids=str)
def test_settings_that_transformers_cannot_read_are_named(own_settings, settings):
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be used: "):
        generation.generate_text(own_settings(settings), "Once upon", device="cpu")


def talk(model, tokenizer, messages, **settings):
    """Run a conversation over given messages; what was written, and the report."""
    written = []
    source = iter(messages)

    def read():
        try:
            message = next(source)
        except StopIteration:
            raise EOFError from None
        if isinstance(message, BaseException):
            raise message
        return message

    conversation = Conversation(model, tokenizer, settings.pop("system", None))
    report = conversation.run(Sampling(**{"max_new_tokens": 8, **settings}), read, written.append)
    return "".join(written), report, conversation


@pytest.mark.parametrize(("device", "converted"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_a_gpu_that_compiles_first_is_told_of(monkeypatch, capsys, device, converted):
    model = SimpleNamespace(device=torch.device(device), **({"sse_layers": dict} if converted else {}))
    monkeypatch.setattr(generation, "load_model", lambda checkpoint, device: model)
    assert generation._loaded("hybrid", None) is model
    told = capsys.readouterr().err
    assert told.startswith("the first answer compiles kernels: ") == ((device, converted) == ("cuda", True))


def test_plain_continuation_keeps_the_cache(model, tokenizer):
    written, report, conversation = talk(model, tokenizer, ["Hello", "  ", "and then?"])
    first = greedy(model, tokenizer("Hello").input_ids, 8)
    second = greedy(model, first + tokenizer("\nand then?").input_ids, 8)
    assert conversation._ids == second
    assert report.turns == 2
    assert report.reused_tokens == len(first) - 1
    assert report.ended == "user"
    assert tokenizer.decode(first[5:], skip_special_tokens=True) in written


def test_chat_template_turns_continue_the_cache(model, tokenizer):
    tokenizer.chat_template = TEMPLATE
    _, report, conversation = talk(model, tokenizer, ["Hi", "Why?"], system="Be brief.")
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    first = greedy(model, tokenizer(start).input_ids, 8)
    end = "" if first[-1] == 0 else "<|im_end|>"
    assert report.reused_tokens == len(first) - 1
    more = tokenizer(f"{end}\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n").input_ids
    assert conversation._ids == greedy(model, first + more, 8)


def test_a_template_that_rewrites_history_starts_the_cache_anew(model, tokenizer):
    tokenizer.chat_template = "{% for m in messages[-1:] %}[{{ m.content }}]{% endfor %}"
    _, report, conversation = talk(model, tokenizer, ["Hi", "Why?"])
    assert report.reused_tokens == 0
    assert conversation._ids == greedy(model, tokenizer("[Why?]").input_ids, 8)


def test_ctrl_c_at_the_prompt_ends_and_in_an_answer_ends_that_answer(model, tokenizer, monkeypatch):
    calls = itertools.count()
    real = type(model).forward

    def interrupted(self, *args, **kwargs):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", interrupted)
    _, report, conversation = talk(model, tokenizer, ["Hello", "go on", KeyboardInterrupt()])
    monkeypatch.undo()
    first = greedy(model, tokenizer("Hello").input_ids, 3)
    assert conversation._ids == greedy(model, first + tokenizer("\ngo on").input_ids, 8)
    assert (report.turns, report.ended, report.reused_tokens) == (2, "user", 0)


def test_a_full_context_ends_the_talk(model, tokenizer):
    _, report, _ = talk(model, tokenizer, ["a" * 250, "b" * 250], max_new_tokens=8)
    assert (report.turns, report.ended) == (1, "context full")
    assert report.lines()[0].endswith("; the context is full")


def test_streamed_pieces_add_up_to_the_answer(checkpoint, monkeypatch, capsys):
    lines = iter(["Hello\n", ""])
    monkeypatch.setattr("sys.stdin", type("In", (), {"isatty": lambda _: False, "readline": lambda _: next(lines)})())
    report = generation.chat_in_terminal(checkpoint, sampling=Sampling(max_new_tokens=10), device="cpu")
    expected = generation.generate_text(checkpoint, "Hello", sampling=Sampling(max_new_tokens=10), device="cpu").text
    assert report.turns == 1
    assert capsys.readouterr().out == expected + "\n\n"
