"""The example of reinforcement learning: its reward, its loss, its way of generating, and the curve that it left."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.hybrid import model_class_for
from tests.evaluation.conftest import build_llama, build_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def grpo():
    pytest.importorskip("trl", reason="TRL is not installed")
    from examples.rl import grpo

    return grpo


@pytest.mark.parametrize(
    ("text", "share", "reward"),
    [
        (" 1234567.", 1, 2),
        ("0123456", 1, 2),
        ("1234566", 5 / 6, 5 / 6),
        ("7654321", 0, 0),
        ("12345", 0, 0),
        ("one", 0, 0),
    ],
)
def test_the_reward_is_what_a_program_can_check(grpo, text, share, reward):
    assert grpo.rising(text) == pytest.approx(share)
    assert grpo.reward([text], prompts=["x"]) == [pytest.approx(reward)]


def test_held_out_keys_are_not_those_of_training(grpo):
    trained, asked = ({q["prompt"] for q in grpo.questions(300, 0, held_out=held)} for held in (False, True))
    assert not trained & asked
    assert grpo.questions(5, 1) == grpo.questions(5, 1) != grpo.questions(5, 2)


def test_steps_keep_the_balance_loss_and_generate_through_the_cache(grpo, tmp_path, monkeypatch):
    tokenizer = build_tokenizer()
    source = build_llama(len(tokenizer))
    config = build_config(source.config, {"layers": ["full", "sse"], "mixers": {"sse": {"kind": "sse", "qk_rank": 4}}})
    model = model_class_for(LlamaForCausalLM)(config)
    columns, real = [], type(model).forward

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            columns.append(kwargs["input_ids"].shape[1])
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    given = argparse.Namespace(steps=2, questions=1, tokens=5, rate=1e-3, every=1, seed=0)
    curve = grpo.train(model, tokenizer, tmp_path, given)
    assert [step["step"] for step in curve["steps"]] == [1, 2]
    assert [score["step"] for score in curve["held_out"]] == [0, 1, 2]
    balance = [step["balance_loss"] for step in curve["steps"]]
    assert all(loss > 0 for loss in balance)
    assert curve["steps"][0]["loss"] == pytest.approx(balance[0], abs=1e-4)  # advantages of a group sum to nothing
    assert columns.count(1) > len(columns) / 2  # prompts are read once, then token by token


def test_the_committed_curve_rises():
    curve = json.loads((ROOT / "examples" / "rl" / "curve.json").read_text())
    first, last = curve["held_out"][0], curve["held_out"][-1]
    assert last["low"] > first["high"]
    assert curve["steps"][-1]["step"] == last["step"] == len(curve["steps"])
    assert (ROOT / "examples" / "rl" / "curve.png").read_bytes().startswith(b"\x89PNG")
