import copy

import pytest

from sse_convert import api
from sse_convert.analysis.analysis_report import AnalysisReport, LayerAnalysis, LeftOut
from sse_convert.analysis.plot import _printable, draw
from tests.evaluation.test_plot import size_in_pixels


@pytest.fixture(scope="module")
def report(converted, source, words):
    return api.analyze(converted, words, teacher=source, length=128).to_dict()


def test_draws_what_there_is(report, tmp_path):
    names = draw(report, tmp_path)
    assert len(names) == 5
    for name in names:
        width, height = size_in_pixels(tmp_path / name)
        assert width >= 600
        assert height >= 300
    thin = copy.deepcopy(report)
    for layer in thin["layers"]:
        for name in ("routing", "tokens", "output_error"):
            layer.pop(name, None)
    (tmp_path / "thin").mkdir()
    assert set(names) - set(draw(thin, tmp_path / "thin")) == {"routing.png", "tokens.png", "output_error.png"}


def test_many_layers_and_partitions_with_gaps(report, tmp_path):
    layer = copy.deepcopy(report["layers"][0])
    N = 20
    layer["partitions"] = N
    layer["routing"] |= {"load": [1 / N] * N, "dead": [3, 19]}
    layer["tokens"]["top"] = [[]] * 19 + [[{"id": 1, "text": "\n$x$ \u4e2d", "count": 1, "of": 2}]]
    layer["branches"] |= {"sparse_share_by_head": [None, 0.5]}
    layer["half_life"]["sparse"] |= {"p90": None}
    layers = [{**copy.deepcopy(layer), "index": i} for i in range(26)]
    assert len(draw({**report, "layers": layers}, tmp_path)) == 5
    assert max(size_in_pixels(path)[0] for path in tmp_path.iterdir()) < 3500


def test_tokens_are_printable():
    assert _printable(" the") == "' the'"
    assert _printable("\n") == r"'\n'"
    assert _printable("$x$") == r"'\$x\$'"
    assert _printable("\u4e2d\ufffd") == "'??'"
    assert _printable("incomprehensible") == "'incompre\u2026'"


def test_numbers_in_the_table():
    def layer(index, **quantities):
        return LayerAnalysis(index=index, mixer="sse", sizes={"kind": "sse"}, quantities=quantities)

    full = LayerAnalysis(index=2, mixer="full", sizes={"kind": "full"}, quantities={})
    conditions = {"tokens": 1024, "text": "[a].txt", "length": 512, "device": "cpu", "dtype": "float32"}
    lines = AnalysisReport(
        model="m",
        teacher=None,
        conditions=conditions,
        layers=(
            layer(0, routing={"dead": [1, 3], "load_entropy": 0.5, "gate_entropy": float("nan")}),
            layer(
                1,
                branches={"sparse_share": 0.423},
                half_life={"sparse": {"median": float("inf")}, "shared": None},
            ),
            full,
        ),
        left_out=(LeftOut(layers=(2,), quantities=("a", "b"), reason="none"),),
    ).lines()
    assert lines[0] == "m: 2 of 3 layers converted"
    assert lines[1] == "1,024 tokens of [a].txt in rows of 512; cpu, float32"
    assert lines[5].split() == ["0", "sse", "-", "-", "0.500", "-", "1,3", "-", "-"]
    assert lines[6].split() == ["1", "sse", "inf", *"-" * 4, "42.3%", "-"]
    assert lines[-1] == "left out in layer 2: a, b (none)"
