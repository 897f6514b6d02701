"""Figures as SVG that fits a page, and as PNG."""

import re
import xml.etree.ElementTree as ET

import pytest

from sse_convert.pages.collect import collect
from sse_convert.pages.figures.drawing import INK, LINE, LONGEST_LABEL, VARIABLES, Drawing, new_figure, plain, styled
from sse_convert.pages.figures.evaluation import curves, heat_maps, resource_drawings
from sse_convert.pages.figures.training import POINTS, averaged, loss_curves, router_drawings


def drawing(name="one", label="a $b$ <i>"):
    figure, (axis,) = new_figure()
    axis.plot([1, 2], [1, 2], color="#0072b2", label=plain(label))
    axis.legend()
    return Drawing(name=name, title='Title "quoted"', about="What it <shows>.", figure=figure)


def test_svg_is_one_element_with_colours_of_the_page():
    with styled(page=True):
        svg = drawing().svg()
    root = ET.fromstring(svg)
    assert root.get("aria-label") == 'Title "quoted". What it <shows>.'
    assert "var(--s1)" in svg
    assert "var(--ink)" in svg
    assert not any(colour in svg for colour in VARIABLES)
    assert "http://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)
    assert "a $b$ <i>" in "".join(root.itertext())


def test_ids_of_two_figures_do_not_meet():
    with styled(page=True):
        ids = [re.findall(r'\bid="([^"]+)"', drawing(name).svg()) for name in ("one", "two")]
    assert ids[0]
    assert not set(ids[0]) & set(ids[1])
    with styled(page=True):
        svg = drawing().svg()
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
    assert used <= set(re.findall(r'\bid="([^"]+)"', svg))


def test_the_same_figure_gives_the_same_bytes():
    with styled(page=True):
        assert drawing().svg() == drawing().svg()


def test_held_out_text_is_drawn_beside_the_loss(made):
    run = collect(made / "out")
    for drawing, step in zip(loss_curves(run.trained), run.trained, strict=True):
        key = "valid_kl" if step.name == "distill" else "valid_loss"
        (axis,) = drawing.figure.axes
        line = next(line for line in axis.lines if line.get_label() == "held-out text")
        assert list(line.get_ydata()) == [record[key] for record in step.metrics]
        assert "; on held-out text from " in drawing.about


def test_stand_in_colours_are_not_those_of_a_figure():
    assert len({INK, LINE, *VARIABLES}) == len(VARIABLES)


@pytest.mark.parametrize("page", [True, False])
def test_a_run_is_drawn(made, tmp_path, page):
    run = collect(made / "out")
    with styled(page=page):
        found = [
            *curves(run.evaluations),
            *heat_maps(run.student),
            *resource_drawings(run.student),
            *loss_curves(run.trained),
            *router_drawings(run.trained),
        ]
        names = [each.name for each in found]
        for each in found:
            if page:
                ET.fromstring(each.svg())
            else:
                each.write_png(tmp_path / f"{each.name}.png")
                assert (tmp_path / f"{each.name}.png").read_bytes().startswith(b"\x89PNG")
    assert names == [
        *("loss-by-context", "needles-by-length", "needles-number-1", "cache-by-length", "speed-by-length"),
        *("loss-02-align", "loss-03-distill", "router-entropy", "routing-at-the-end"),
    ]


def test_long_names_are_cut_in_the_middle():
    assert plain("short") == "short"
    cut = plain("a-long-name-of-a-run-" * 4)
    assert len(cut) == LONGEST_LABEL
    assert cut.startswith("a-long-name")
    assert cut.endswith("of-a-run-")


def test_long_logs_are_averaged():
    records = [{"tokens": i, "loss": float(i % 2)} for i in range(10 * POINTS)]
    x, y, size = averaged(records, "loss")
    assert (len(x), size) == (POINTS, 10)
    assert x[-1] == records[-1]["tokens"]
    assert set(y) == {0.5}
