"""The baseline KDA beside KDA's equation, which stands in for fla-core."""

import json
import sys
from types import ModuleType

import pytest
import torch

from benchmarks.paper import kda


def recurrence(q, k, v, g, beta):
    """Decay each channel, take out of v what the key reads, write; as in arXiv:2510.26692."""
    state = q.new_zeros(*q.shape[::2], q.shape[-1], v.shape[-1])[0]
    outs = []
    for t in range(q.shape[1]):
        state = g[0, t].exp()[..., None] * state
        missing = v[0, t] - torch.einsum("hk,hkv->hv", k[0, t], state)
        state = state + beta[0, t, :, None, None] * k[0, t, ..., None] * missing[:, None]
        outs.append(torch.einsum("hk,hkv->hv", q[0, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(outs)[None], state


@pytest.fixture
def fla(monkeypatch):
    """A package with the operator, which a test may replace."""
    made = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.kda")}
    made["fla.ops.kda"].chunk_kda = recurrence
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kda, "find_spec", lambda name: name)
    monkeypatch.setattr(kda.metadata, "version", lambda name: "0.6.0")
    return made["fla.ops.kda"]


def run(tmp_path):
    return kda.main(["--out", str(tmp_path / "kda.json"), "--tokens", "24", "--heads", "2", "--dim", "8"])


@pytest.mark.smoke
def test_our_baseline_is_kda(fla, tmp_path):
    assert run(tmp_path) == 0
    found = json.loads((tmp_path / "kda.json").read_text())["relative_errors"]
    assert set(found["ours"]) == {"o", "dq", "dk", "dv", "dlog_decay", "dstrength"}
    assert max(*found["ours"].values(), *found["fla-core"].values()) < 1e-4


def test_another_rule_is_told_apart(fla, tmp_path, capsys):
    fla.chunk_kda = lambda q, k, v, g, beta: recurrence(q, k, v, g.mean(-1, keepdim=True).expand_as(g), beta)
    assert run(tmp_path) == 6
    assert "fla-core's KDA is" in capsys.readouterr().err


def test_without_fla_core_it_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kda, "find_spec", lambda name: None)
    assert run(tmp_path) == 11
    assert "fla-core is missing" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
