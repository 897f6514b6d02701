"""Checkpoints on the hub, against a stand-in server. In processes of their own: the hub library keeps its settings."""

import json
import socket
import threading
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from sse_convert.checkpoints import hub
from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.errors import HubError
from tests.elsewhere import beside_hub
from tests.fake_hub import FakeHub, RefusedError, Repo
from tests.surgery import models, synthetic

COMMIT = "c0ffee" + "0" * 34


class HubServer(FakeHub):
    """Serves folders by repository name; `sent` counts the bytes of each file that were delivered."""

    def __init__(self, folders, gated=()):
        super().__init__()
        self.gated, self.sent = gated, {}
        for name, folder in folders.items():
            files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
            self.repos[name] = Repo(False, {"main": [(COMMIT, "all", files)]})

    def _repo(self, request, *, write=False):
        if request["repo"] in self.gated:
            raise RefusedError(403, "GatedRepo", "Access to this model is restricted")
        return super()._repo(request, write=write)

    def _resolve(self, request):
        status, headers, content = super()._resolve(request)
        if request["handler"].command == "GET":
            self.sent[request["file"]] = self.sent.get(request["file"], 0) + len(content)
        return status, headers, content


SCRIPT = """
import json, sys
from sse_convert.errors import SSEConvertError
from sse_convert.checkpoints.open import download, open_checkpoint
try:
    files = open_checkpoint(sys.argv[1], sys.argv[2] or None)
    if sys.argv[3:] == ["download"]:
        files = download(files)
    print(json.dumps([files.remote, files.revision, files.parameters, sorted(p.name for p in files.folder.iterdir())]))
except SSEConvertError as error:
    print(json.dumps(error.to_dict()))
"""


def ask(hub, tmp_path, repo_id, revision="", *more, **environment):
    (tmp_path / "ask.py").write_text(SCRIPT)
    done = beside_hub(["ask.py", repo_id, revision, *more], tmp_path, hub.endpoint, **environment)
    assert done.code == 0, done.error
    return json.loads(done.out)


@pytest.fixture
def repos(tmp_path):
    config = {**synthetic.LLAMA, "hidden_size": 512, "intermediate_size": 1024}
    sharded = synthetic.checkpoint(tmp_path / "sharded", config, shards=3)
    (sharded / "tokenizer.json").write_text("{}")
    (sharded / "original").mkdir()
    (sharded / "original" / "consolidated.safetensors").write_bytes(b"x")
    single = synthetic.checkpoint(tmp_path / "single", config)
    pickled = synthetic.checkpoint(tmp_path / "pickled", config)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    broken = synthetic.checkpoint(tmp_path / "broken", config)
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    return {"a/sharded": sharded, "a/single": single, "a/pickled": pickled, "a/broken": broken}


def test_planning_reads_headers_alone(tmp_path, repos):
    with HubServer(repos) as hub:
        for name, shards in (("a/sharded", 3), ("a/single", 1)):
            remote, revision, parameters, files = ask(hub, tmp_path, name)
            assert remote
            assert revision == COMMIT
            assert parameters == open_checkpoint(repos[name]).parameters
            assert not any(file.endswith(".safetensors") for file in files)
            sent = [count for file, count in hub.sent.items() if file.endswith(".safetensors")]
            assert len(sent) == shards
            assert all(count <= 100_001 for count in sent)
            hub.sent.clear()


def test_download_then_offline(tmp_path, repos):
    with HubServer(repos) as hub:
        remote, _, parameters, files = ask(hub, tmp_path, "a/sharded", "", "download")
        assert not remote
        assert "original/consolidated.safetensors" not in hub.sent
        assert "tokenizer.json" in files
        assert sum(file.endswith(".safetensors") for file in files) == 3
        assert ask(hub, tmp_path, "a/sharded", HF_HUB_OFFLINE="1") == [False, COMMIT, parameters, files]


@pytest.mark.parametrize(
    ("repo_id", "revision", "kind", "what"),
    [
        ("a/nothing", "", "hub", "a/nothing is neither a local folder nor a model on the hub"),
        ("a/single", "v9", "hub", "a/single has no revision v9"),
        ("a/gated", "", "hub", "a/gated is gated"),
        ("a/pickled", "", "checkpoint", "a/pickled holds its weights as pickles (pytorch_model.bin)"),
        ("a/broken", "", "checkpoint", "shard model.safetensors of a/broken is not a valid safetensors file"),
    ],
)
def test_refusals(tmp_path, repos, repo_id, revision, kind, what):
    with HubServer(repos, gated=("a/gated",)) as hub:
        error = ask(hub, tmp_path, repo_id, revision)
    assert error["kind"] == kind
    assert what in error["what"]
    assert error["fix"]


def test_unreachable(tmp_path):
    with HubServer({}) as hub:
        pass
    error = ask(hub, tmp_path, "a/single")
    assert (error["kind"], "cannot be reached for a/single" in error["what"]) == ("hub", True)


def convert(hub, tmp_path, recipe):
    command = ["-m", "sse_convert", "convert", recipe, "-o", tmp_path / "out", "--json"]
    return json.loads(beside_hub(command, tmp_path, hub.endpoint).out)


@pytest.mark.slow
def test_conversion_links_the_cache_and_downloads_only_what_will_be_used(tmp_path):
    source = models.save_source(tmp_path / "source", hidden_size=256, intermediate_size=512, shard_size="1MB")
    with HubServer({"a/tiny": source}) as hub:
        wrong = models.recipe_file(tmp_path / "wrong.yaml", "a/tiny", layers={"pattern": ["sse"], "keep": [9]})
        answer = convert(hub, tmp_path, wrong)
        assert "layers.keep: 9 is out of range" in answer["error"]["what"]
        headers = {file: count for file, count in hub.sent.items() if file.endswith(".safetensors")}
        assert max(headers.values()) <= 100_001
        assert sum(headers.values()) < sum(path.stat().st_size for path in source.glob("*.safetensors"))
        answer = convert(hub, tmp_path, models.recipe_file(tmp_path / "r.yaml", "a/tiny"))
        assert answer["ok"], answer
    shards = sorted(source.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        ours = tmp_path / "out" / shard.name
        assert not ours.is_symlink()
        assert ours.stat().st_nlink == 2  # the data in the cache, not the symbolic link to it
        assert ours.read_bytes() == shard.read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["sse"]["base_model"], config["sse"]["base_revision"]) == ("a/tiny", COMMIT)


@pytest.mark.parametrize(
    ("text", "can_be"),
    [
        ("gpt2", True),
        ("Qwen/Qwen3-0.6B", True),
        ("a_b/c_", True),
        ("a/b/c", False),
        ("a--b/c", False),
        ("a/b..c", False),
        ("a/b.git", False),
        ("a/b.", False),
        ("-a/b", False),
        ("a/" + "b" * 95, False),
        ("a/\u0663", False),
        ("C:\\models", False),
        ("", False),
    ],
)
def test_what_can_be_a_hub_id(text, can_be):
    assert hub.looks_like_id(text) == can_be


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 418, 429, 451, 500, 502, 503])
@pytest.mark.parametrize("asked", ["listing", "file"])
def test_whatever_the_hub_answers(status, asked):
    asked_of = {"url": "http://hub/api?token=secret", "headers": {}, "request": None}
    answer = HfHubHTTPError("no", response=SimpleNamespace(status_code=status, **asked_of))

    def request():
        if asked == "listing":
            raise answer
        raise LocalEntryNotFoundError("not here") from answer

    with pytest.raises(HubError, match=rf"\({status} from http://hub/api\)") as caught:
        hub._asking("a/b", None, request)
    assert ("log in" in caught.value.fix) == (status in (401, 403))


def test_a_token_that_cannot_be_sent_and_a_server_that_is_no_hub():
    for error, told in (
        (UnicodeEncodeError("ascii", "ä", 0, 1, "no"), "other characters than ASCII"),
        (KeyError("id"), "none of the hub's"),
    ):

        def request(error=error):
            raise error

        with pytest.raises(HubError, match=told):
            hub._asking("a/b", None, request)


def test_a_hub_that_takes_the_question_and_does_not_answer_is_left(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Timer(2, server.close).start()  # ends what would wait for ever
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.1)
        with pytest.raises(HubError, match=r"\(ReadTimeout\)"):
            hub.listing("owner/name", None)
