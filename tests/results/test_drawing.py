"""Figures of a run, as PNG."""

from sse_convert.results.collect import collect
from sse_convert.results.figures.drawing import styled
from sse_convert.results.figures.evaluation import curves, heat_maps
from sse_convert.results.figures.training import POINTS, averaged, loss_curves


def test_held_out_text_is_drawn_beside_the_loss(made):
    run = collect(made / "out")
    for drawing, step in zip(loss_curves(run.trained), run.trained, strict=True):
        key = "valid_kl" if step.name == "distill" else "valid_loss"
        (axis,) = drawing.figure.axes
        line = next(line for line in axis.lines if line.get_label() == "held-out text")
        assert list(line.get_ydata()) == [record[key] for record in step.metrics]
        assert "; on held-out text from " in drawing.about


def test_a_run_is_drawn(made, tmp_path):
    run = collect(made / "out")
    with styled():
        found = [
            *curves(run.evaluation),
            *heat_maps(run.evaluation),
            *loss_curves(run.trained),
        ]
        for each in found:
            each.write_png(tmp_path / f"{each.name}.png")
            assert (tmp_path / f"{each.name}.png").read_bytes().startswith(b"\x89PNG")
    names = [each.name for each in found]
    assert names == [
        *("loss-by-context", "speed-by-length", "needles-number-1"),
        *("loss-02-align", "loss-03-distill"),
    ]


def test_long_logs_are_averaged():
    records = [{"tokens": i, "loss": float(i % 2)} for i in range(10 * POINTS)]
    x, y, size = averaged(records, "loss")
    assert (len(x), size) == (POINTS, 10)
    assert x[-1] == records[-1]["tokens"]
    assert set(y) == {0.5}
