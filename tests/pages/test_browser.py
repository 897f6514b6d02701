"""The page in a real browser, where there is one: nothing overflows, loads or fails, and all can be read."""

import json

import pytest

from sse_convert.pages.compare import compare_runs
from sse_convert.pages.generate import make_samples
from sse_convert.pages.run_page import write_report
from tests.pages.browser import needs_browser, open_browser, shown

pytestmark = needs_browser

CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const channels = colour => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => [r, g, b].map(c => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = channels(getComputedStyle(element).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll('h1, h2 a, h3, p, li, li span, td, th, caption, pre, dt, dd b,'
      + ' dd span, nav a, summary, figcaption, figcaption strong, footer')) {
    const [a, b] = [channels(getComputedStyle(element).color), behind(element)].map(luminance);
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) found.push([element.tagName, element.textContent.trim().slice(0, 40), ratio]);
  }
  return found;
})()
"""
"""elements whose text has less than 4.5 to 1 against what is behind it (WCAG 2, AA)"""
FIGURES = """
[...document.querySelectorAll('figure')].map(figure => {
  const box = figure.querySelector('svg').getBoundingClientRect();
  return [figure.id, box.width, box.height, figure.querySelector('svg').getAttribute('aria-label')];
})
"""
SMALL_LETTERS = """
[...document.querySelectorAll('svg text')].map(text => {
  const box = text.ownerSVGElement;
  return parseFloat(getComputedStyle(text).fontSize) * box.getBoundingClientRect().width / box.viewBox.baseVal.width;
}).filter(size => size < 5).length
"""
FIGURE_TEXT = "getComputedStyle(document.querySelector('figure svg text')).fill"
WIDER = """
[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right
  > document.documentElement.clientWidth + 1).map(e => e.tagName)
"""


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(made, tmp_path_factory):
    """A full report, and a comparison with a very long name."""
    from sse_convert.pages.collect import collect

    folder = tmp_path_factory.mktemp("pages")
    make_samples(collect(made / "out"), ["the keeper of " * 20, "x" * 300], max_new_tokens=8, device=None)
    try:
        write_report(made / "out", out=folder / "report.html")
    finally:
        (made / "out.stages" / "samples.json").unlink()
    other = folder / ("a-very-long-name-without-a-place-to-break-" * 3 + ".json")
    other.write_text((made / "out" / "evaluation.json").read_text())
    compare_runs([made / "out", other], out=folder / "compare.html")
    return folder


@pytest.mark.parametrize("name", ["report", "compare"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page(browser, pages, name, width, dark):
    path = pages / f"{name}.html"
    with shown(browser, path, width=width, dark=dark) as tab:
        assert tab.value("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
        assert tab.value(WIDER) == []
        assert tab.complaints == []
        assert [address for address in tab.requests if not address.startswith("data:")] == [path.as_uri()]
        figures = tab.value(FIGURES)
        assert len(figures) == path.read_text(encoding="utf-8").count("<figure ") >= 2
        assert all(w > 200 and h > 100 and label for _, w, h, label in figures), figures
        assert tab.value(CONTRAST) == []
        assert tab.value(SMALL_LETTERS) == 0
        assert tab.value(FIGURE_TEXT) == ("rgb(231, 234, 237)" if dark else "rgb(28, 31, 35)")
        assert tab.value("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == tab.value(
            "document.querySelectorAll('[id]').length"
        )


def test_sections_open_by_their_anchors(browser, pages):
    with shown(browser, pages / "report.html", width=1280) as tab:
        links = tab.value("[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))")
        assert len(links) == 10
        assert all(tab.value(f"document.querySelector({json.dumps(link)}) !== null") for link in links)


def test_wide_tables_scroll_inside(browser, pages):
    with shown(browser, pages / "compare.html", width=390) as tab:
        assert tab.value("[...document.querySelectorAll('.scroll')].some(e => e.scrollWidth > e.clientWidth)")
