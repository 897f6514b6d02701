"""Answers to some requests of a command, from what is no hub, is down, or stands behind a proxy."""

import contextlib
import dataclasses as dc
import functools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import huggingface_hub
from huggingface_hub import constants
from hypothesis import strategies as st

from sse_convert.data import hub_datasets
from tests.fake_hub import FakeHub, Repo
from tests.fuzz import judges, reading
from tests.fuzz.outcome import Outcome, run_command
from tests.fuzz.places import copied
from tests.fuzz.values import JSON_ONLY, changed, json_text, odd_values

COMMIT = "c0ffee" + "0" * 34
SECONDS = 0.3
"""that a command waits for an answer here"""
HTML = b"<!DOCTYPE html><html><body>Please log in to the network</body></html>"
ROUTES = (
    r"/api/models/a/qwen3.*",
    r".*/(tree|paths-info)/.*",
    r".*/resolve/.*config\.json",
    r".*/resolve/.*tokenizer.*",
    r".*/resolve/.*\.safetensors",
    r".*/resolve/.*index\.json",
    r".*/resolve/.*",
    r"/api/datasets/.*",
    r"/api/whoami-v2",
    r"/api/repos/create",
    r"/api/models/user/.*",
    r".*/preupload/.*",
    r".*/commit/.*",
    r".*",
)
"""of requests that are answered in another way"""
COMMANDS = {
    "plan": ["plan", "bare.yaml", "--set", "model=a/qwen3"],
    "generate": ["generate", "a/qwen3", "w5", "--max-new-tokens", "1"],
    "inspect": ["inspect", "a/qwen3"],
    "push": ["push", "hybrid", "made", "--anyway"],
    "dataset": ["plan", "bare.yaml", "--set", "data.train=[{path: a/text}]"],
    "read": ["read", "a/text", "{}", "qwen3"],
}
STATUSES = (
    *(None, None, 200, 204, 206, 301, 302, 304, 400, 401, 403, 404, 405, 409),
    *(410, 416, 418, 422, 429, 451, 500, 502, 503, 504, 599),
)
BODIES = ("real", "real", "empty", "html", "less", "cut", "other", "other", "bytes")


@dc.dataclass(frozen=True)
class Answer:
    """One that is not the hub's, or not all of it."""

    route: str
    """which requests get it"""
    status: int | None
    """None for the hub's own"""
    body: str
    """one of BODIES"""
    headers: tuple[tuple[str, str], ...]
    """beside the hub's own"""
    data: Any
    """what `other` sends, as JSON"""
    slow: bool
    """whether it takes longer than a command waits"""


class OddHub(FakeHub):
    """A hub with one model and no dataset, that gives other answers to some requests."""

    def __init__(self, model: Path, answers: list[Answer]) -> None:
        super().__init__(tokens={"hf_writer": "user"})
        files = {path.name: path.read_bytes() for path in model.iterdir()}
        self.repos["a/qwen3"] = Repo(False, {"main": [(COMMIT, "all", files)]})
        self._answers = answers
        self._server.handle_error = lambda *_: None  # a command that hangs up is no news

    def reply(self, handler: Any) -> tuple[int, dict[str, str], bytes]:
        """The hub's own answer, changed where one of the others is for its path."""
        status, headers, content = super().reply(handler)
        path = handler.path.partition("?")[0]
        answer = next((answer for answer in self._answers if re.fullmatch(answer.route, path)), None)
        if answer is None:
            return status, headers, content
        if answer.slow:
            time.sleep(2 * SECONDS)
        content = _spoilt(answer, content)
        if answer.body == "cut":
            headers["Content-Length"] = str(len(content) + 100)
            handler.close_connection = True
        given = {name: value.replace("HUB", self.endpoint) for name, value in answer.headers}
        return answer.status or status, {**headers, **given}, content


def _spoilt(answer: Answer, content: bytes) -> bytes:
    match answer.body:
        case "empty":
            return b""
        case "html":
            return HTML
        case "less" | "cut":
            return content[: len(content) // 2]
        case "other":
            return json_text(answer.data).encode("utf-8", "surrogatepass")
        case "bytes":
            return b"\xff\x00" + content
    return content


def answer_cases() -> st.SearchStrategy[Any]:
    """A command, and the answers it gets."""
    names = {
        "Content-Type": ("text/html", "application/json; charset=utf-9", ""),
        "Location": ("HUB/", "HUB/api/models/a/qwen3", "/x", "http://127.0.0.1:9/", "", "ftp://x/", "http://[", "//"),
        "X-Error-Code": ("RepoNotFound", "RevisionNotFound", "EntryNotFound", "GatedRepo", "?"),
        "X-Error-Message": ("Access to this resource is disabled.", "\u00e4", "x" * 5000),
        "X-Repo-Commit": ("", "../..", "x"),
        "ETag": ("", '"', "../../x", 'W/"a"'),
        "X-Linked-Size": ("-1", "x", "99999999999999999999"),
        "X-Linked-Etag": ("", "../x"),
        "Content-Encoding": ("gzip", "x"),
        "Content-Range": ("bytes 0-1/2", "x"),
        "Retry-After": ("1", "-1", "x"),
        "Link": ('<HUB/api/x>; rel="next"', "x"),
    }
    header = st.sampled_from(sorted(names)).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(names[name])))
    info = {"id": "a/qwen3", "sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": 3}], "private": False}
    tree = [{"type": "file", "path": "a", "size": 1, "oid": "x"}]
    values = odd_values(JSON_ONLY)
    data = st.one_of(values, changed(info, values), changed(tree, values))
    answer = st.builds(
        Answer,
        route=st.sampled_from(ROUTES),
        status=st.sampled_from(STATUSES),
        body=st.sampled_from(BODIES),
        headers=st.lists(header, max_size=2).map(tuple),
        data=data,
        slow=st.sampled_from((*[False] * 19, True)),
    )
    return st.tuples(st.sampled_from(sorted(COMMANDS)), st.lists(answer, min_size=1, max_size=2))


def answered(root: Path, case: tuple[str, list[Answer]]) -> Outcome:
    """A command with a hub that answers so."""
    command, answers = case
    with copied(root, "qwen3", "hybrid", "bare.yaml") as folder, OddHub(root / "qwen3", answers) as hub, _asked(hub):
        (folder / "hybrid" / "README.md").write_text("---\n---\n")
        commands = {"commands": reading.app} if command == "read" else {}
        return run_command(
            COMMANDS[command], judges.no_number_missing, refusal=functools.partial(_names_the_hub, hub), **commands
        )


def _names_the_hub(hub: OddHub, error: dict[str, Any]) -> str | None:
    """An error of the hub names its address, and what to do."""
    if error["kind"] != "hub" or "not logged in" in error["what"]:
        return None
    whole = all((hub.endpoint in error["what"] or "127.0.0.1:9" in error["what"], error["fix"]))
    return None if whole else f"no address of the hub, or nothing to do: {error}"


@contextlib.contextmanager
def _asked(hub: OddHub) -> Iterator[None]:
    """Let the hub's library ask this hub, with an empty cache and no patience."""
    cache = Path("cache").resolve()
    settings = {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_ETAG_TIMEOUT": SECONDS,
        "HF_HUB_DOWNLOAD_TIMEOUT": SECONDS,
        "HF_HUB_DISABLE_XET": True,
    }
    from huggingface_hub.utils import _http

    of_datasets = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": False, "HF_DATASETS_CACHE": str(cache)}
    hasty = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})
    with (
        mock.patch.multiple(constants, **settings),
        mock.patch.object(_http, "time", hasty),
        mock.patch.multiple(datasets.config, **of_datasets),
        mock.patch.dict(os.environ, {"HF_TOKEN": "hf_writer"}),
    ):
        huggingface_hub.close_session()
        hub_datasets._ask.cache_clear()
        yield
