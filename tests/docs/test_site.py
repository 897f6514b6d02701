"""The built site: complete, without warnings, and without anything from the network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sse_convert
from docs.examples import ROOT
from tests.docs.browser import needs_browser, open_browser, shown

pytest.importorskip("mkdocs", reason="needs the extra docs")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # not --quiet, which hides the warnings from --strict as well
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"""<(?:script|img|iframe|source)[^>]* src=["']?(?:https?:)?//[^>]*>""", text), page
        assert not re.findall(r"""<link[^>]* href=["']?(?:https?:)?//[^>]*>""", text), page
    for style in site.rglob("*.css"):
        assert not re.findall(r"""(?:@import|url\()\s*["']?(?:https?:)?//""", style.read_text(encoding="utf-8")), style


def test_formulas_are_mathml(site: Path) -> None:
    assert "arithmatex" not in (text := (site / "concepts.html").read_text(encoding="utf-8"))
    assert text.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block"') >= 5


def test_docstrings_become_the_api_pages(site: Path) -> None:
    text = (site / "api/sse_convert.html").read_text(encoding="utf-8")
    shown = set(re.findall(r'<h[1-3] id="([^"]+)" class="doc', text))
    names = {f"sse_convert.{name}" for name in sse_convert.__all__ if name != "__version__"}
    assert shown == names | {"sse_convert.SSEAttention.forward"}
    assert "a multiple of H" in text
    assert 'id="sse_convert.api.convert"' in (site / "api/api.html").read_text(encoding="utf-8")


def test_results_come_with_their_files(site: Path) -> None:
    assert (site / "files/benchmarks/kernels/operator_h200.png").is_file()
    assert 'src="../files/benchmarks/kernels/operator_h200.png"' in (site / "results/speed.html").read_text()


@needs_browser
def test_the_search_works_from_disk(site: Path) -> None:
    with open_browser() as browser, shown(browser, site / "index.html", width=1280) as tab:
        tab.page.goto(f"{(site / 'index.html').as_uri()}?q=decay")
        tab.page.wait_for_selector(".md-search-result__item", state="attached")


@needs_browser
def test_no_page_scrolls_sideways_on_a_phone(site: Path) -> None:
    with open_browser() as browser, shown(browser, site / "index.html", width=390) as tab:
        for page in sorted(site.rglob("*.html")):
            tab.page.goto(page.as_uri())
            assert tab.value("document.documentElement.scrollWidth") == 390, page
