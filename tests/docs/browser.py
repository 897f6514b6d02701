"""The system's Chromium, headless, driven by Playwright: what a page looks like, asks for and complains about."""

import dataclasses as dc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
EXECUTABLE = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(
    EXECUTABLE is None or find_spec("playwright") is None, reason=f"needs playwright and one of {', '.join(NAMES)}"
)
PHONE = 600
"""narrower windows are those of phones"""


@dc.dataclass
class Tab:
    """A file that the browser shows."""

    page: Any
    requests: list[str]
    """addresses the page asked for"""
    complaints: list[str]
    """what it wrote to the console, and errors"""

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return self.page.evaluate(expression)


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser with an empty profile, ended afterwards."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def shown(browser: Any, path: Path, *, width: int, height: int = 900, dark: bool = False) -> Iterator[Tab]:
    """Show a file at a size and in a colour scheme, loaded."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        is_mobile=width < PHONE,
        color_scheme="dark" if dark else "light",
    )
    tab = Tab(context.new_page(), [], [])
    tab.page.on("request", lambda request: tab.requests.append(request.url))
    tab.page.on("console", lambda message: tab.complaints.append(message.text))
    tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    try:
        tab.page.goto(path.resolve().as_uri())
        yield tab
    finally:
        context.close()
