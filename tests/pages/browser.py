"""A headless Chromium driven over its debugging pipe: what a page looks like, asks for and complains about."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
EXECUTABLE = next((found for name in NAMES if (found := shutil.which(name))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)
SECONDS = 60


class Page:
    """One tab."""

    def __init__(self, browser, session):
        self._browser = browser
        self._session = session
        self.requests = []
        """addresses the page asked for"""
        self.complaints = []
        """what it wrote to the console, and errors"""

    def call(self, method, **parameters):
        return self._browser.call(method, parameters, self._session)

    def hear(self, method, parameters):
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(parameters)

    def open(self, path, *, width, height=900, dark=False):
        """Show a file at a size and in a colour scheme, and wait until it is loaded."""
        self.requests, self.complaints = [], []
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._browser.loaded = False
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        self._browser.wait(lambda: self._browser.loaded)

    def value(self, expression):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path):
        """The whole page as a PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(answer["data"]))


class Browser:
    """The process and its two pipes."""

    def __init__(self, process, write, read):
        self._process, self._write, self._read = process, write, read
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._answers = {}
        self._pages = {}
        self.loaded = False

    def page(self):
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        return page

    def call(self, method, parameters, session=None):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        self.wait(lambda: number in self._answers)
        answer = self._answers.pop(number)
        assert "error" not in answer, answer
        return answer["result"]

    def wait(self, done):
        """Handle messages until `done()`."""
        end = time.monotonic() + SECONDS
        while not done():
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser has not answered for {SECONDS} seconds"
            data = os.read(self._read, 1 << 16)
            assert data, f"the browser ended with {self._process.poll()}"
            *messages, self._buffer = (self._buffer + data).split(b"\0")
            for message in map(json.loads, messages):
                self._handle(message)

    def _handle(self, message):
        if "id" in message:
            self._answers[message["id"]] = message
            return
        if message["method"] == "Page.loadEventFired":
            self.loaded = True
        if message.get("sessionId") in self._pages:
            self._pages[message["sessionId"]].hear(message["method"], message["params"])


@contextlib.contextmanager
def open_browser():
    """A browser with an empty profile, ended afterwards."""
    theirs_in, write = os.pipe()
    read, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # the browser reads from descriptor 3 and writes to 4
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "browser", EXECUTABLE, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(process, write, read)
        finally:
            os.close(write)
            os.close(read)
            process.terminate()
            process.wait(SECONDS)
