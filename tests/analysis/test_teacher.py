import math

import pytest
import torch

from sse_convert.analysis import teacher as teachers
from sse_convert.analysis.teacher import LayerOutputError, attention_distances, check_pair, output_errors
from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.checkpoints.teacher import open_teacher, source_view
from sse_convert.console import Bar
from sse_convert.errors import CheckpointError
from sse_convert.modeling.layout import row_layout
from tests.analysis.cases import text
from tests.modeling.tiny import FAMILIES, tiny_model, tiny_source
from tests.surgery.models import save_source, tokens

BAR = Bar(None, "test", 1)


def test_output_error():
    error = LayerOutputError()
    error.add(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0]))
    error.add(torch.tensor([0.0]), torch.tensor([0.0]))
    assert error.result() == {"relative": pytest.approx(16 / 25), "cosine": pytest.approx(3 / 5)}
    silent = LayerOutputError()
    silent.add(torch.zeros(3), torch.zeros(3))
    assert all(math.isnan(value) for value in silent.result().values())


def pair(layers, mixers=None, **options):
    """A student and its teacher, which share all of the teacher's weights."""
    teacher = tiny_source("qwen3", **options)
    student = tiny_model("qwen3", layers, mixers, **options)
    student.load_state_dict(teacher.state_dict(), strict=False)
    return student, teacher


def test_a_window_over_everything_has_no_error():
    student, teacher = pair(
        ("sliding", "wide", "full", "sliding"), {"wide": {"kind": "sliding", "window": 64, "sinks": 0}}
    )
    errors = output_errors(student, teacher, text(tokens(3, 40)), rows=2, bar=BAR)
    assert list(errors) == [0, 1, 3]
    assert errors[1]["relative"] < 1e-10
    assert errors[1]["cosine"] == pytest.approx(1)
    assert 0.01 < errors[0]["relative"] < 2


def test_errors_are_of_the_layer_given_its_teachers_input():
    student, teacher = pair(("sse", "full", "sse", "full"))
    ids = tokens(3, 40)
    errors = output_errors(student, teacher, text(ids), rows=2, bar=BAR)
    layer, original, seen = student.model.layers[2].self_attn, teacher.model.layers[2].self_attn, {}
    original.register_forward_hook(lambda m, a, kw, out: seen.update(x=kw["hidden_states"], y=out[0]), with_kwargs=True)
    with torch.no_grad():
        teacher(ids)
        mine = layer(seen["x"], sse_layout=row_layout(3, 40, None))[0]
    expected = ((mine - seen["y"]).square().sum() / seen["y"].square().sum()).item()
    assert errors[2]["relative"] == pytest.approx(expected, rel=1e-4)
    assert len(original._forward_hooks) == 1, "only this test's own hook is left"


def uniform(length):
    """Mean distance where every token attends evenly to what it sees, the first token left out."""
    weight = sum(t / (t + 1) for t in range(length))
    return sum((t - s) / (t + 1) for t in range(length) for s in range(1, t + 1)) / weight


@pytest.mark.parametrize(("limit", "length"), [(2**27, 40), (4 * 25**2, 25)])
def test_distance_of_even_attention(monkeypatch, limit, length):
    monkeypatch.setattr(teachers, "ATTENTION_AT_ONCE", limit)
    _, teacher = pair(("sse", "full", "full", "full"))
    for block in teacher.model.layers:
        block.self_attn.q_proj.weight.data.zero_()
    distances, used = attention_distances(teacher, text(tokens(3, 40)), bar=BAR)
    assert used == length
    assert list(distances) == [0, 1, 2, 3]
    assert distances[1] == pytest.approx([uniform(length)] * 4, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_hidden_layers": 2}, "qwen3 of 2 layers"),
        ({"hidden_size": 48}, "width 48"),
        ({"num_key_value_heads": 4}, "4 query and 4 key heads of 8"),
        ({"model_type": "llama"}, "llama of 4 layers"),
    ],
)
def test_another_models_teacher(converted, source, tmp_path, change, what):
    student = source_view(open_checkpoint(converted))
    check_pair(open_teacher(source), student)
    other = open_teacher(save_source(tmp_path / "other", **change))
    with pytest.raises(CheckpointError, match=what) as error:
        check_pair(other, student)
    assert "a qwen3 of 4 layers, width 32, 4 query and 2 key heads of 8" in error.value.expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    teacher = tiny_source(family)
    student = tiny_model(family, ("sse", "sliding", "full", "gla"), {"gla": {"kind": "gla"}})
    student.load_state_dict(teacher.state_dict(), strict=False)
    rows = text(tokens(2, 40))
    errors = output_errors(student, teacher, rows, rows=2, bar=BAR)
    assert list(errors) == [0, 1, 3]
    assert all(0.001 < error["relative"] < math.inf and abs(error["cosine"]) <= 1 for error in errors.values()), errors
    distances, _ = attention_distances(teacher, rows, bar=BAR)
    assert all(0 < distance < 40 for layer in distances.values() for distance in layer)
