import json
import math

import pytest
import torch
from safetensors.torch import save_file

from sse_convert.checkpoints.manifest import file_record, write_manifest
from sse_convert.errors import CheckpointError, HubError, UsageError, VerificationError
from sse_convert.export.push import check_folder, push_folder
from sse_convert.modeling.remote_code import remote_code
from tests.elsewhere import beside_hub
from tests.evaluation.test_report import make_report
from tests.fake_hub import FakeHub

TOKEN = "hf_writerSecretSecretSecret0123"
STRANGER = "hf_strangerSecretSecret4567"
CARD = "---\nlicense: mit\ntags:\n- custom_code\n---\n\n# tiny\n"
PUSH = """
import json, os, sys
from sse_convert.errors import SSEConvertError
from sse_convert.export.push import push_folder
own = os.environ["HF_TOKEN"]
for settings in json.loads(sys.argv[1]):
    os.environ["HF_TOKEN"] = settings.pop("token", own)
    try:
        report = push_folder(sys.argv[2], **settings)
        print("\\n".join(report.lines()), file=sys.stderr)
        print(json.dumps(report.to_dict()))
    except SSEConvertError as error:
        print(str(error), file=sys.stderr)
        print(json.dumps({"error": error.to_dict()}))
"""


MODELING, CONFIGURATION = "sse_code/modeling_sse.py", "sse_code/configuration_sse.py"


def write_code(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(remote_code()[name])


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "sse_llama"}')
    (folder / "README.md").write_text(CARD)
    write_code(folder, MODELING)
    (folder / ".hidden.tmp").write_text("left over")
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def figures(gap):
    """An evaluation.json of a student `gap` nats above its teacher."""
    return json.dumps(make_report(student_sums=(384.0 + 128 * gap, 392.0 + 128 * gap)).to_dict())


def run(hub, folder, *pushes, home, **extra):
    """Push in a process of its own to the stand-in hub, with a token each or TOKEN; the results, and what it wrote."""
    settings = {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": TOKEN, **extra}
    script = home.parent / "push.py"
    script.write_text(PUSH)
    done = beside_hub([script, json.dumps(pushes), folder], home.parent, hub.endpoint, **settings)
    assert done.code == 0, done.error
    for place in (home, folder):
        for path in place.rglob("*"):
            assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
    assert TOKEN not in done.out + done.error
    return [json.loads(line) for line in done.out.splitlines()], done.error


def test_upload_replaces_branches_and_pull_requests(folder, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    with FakeHub({TOKEN: "ada"}) as hub:
        (first,), shown = run(hub, folder, {"repo_id": "ada/tiny", "private": True, "message": "first"}, home=home)
        assert set(first["files"]) == {"README.md", "config.json", "model.safetensors", MODELING}
        assert first["total_bytes"] == sum(first["files"].values())
        assert set(hub.files("ada/tiny")) == {*first["files"], ".gitattributes"}
        assert hub.files("ada/tiny")["README.md"].decode() == CARD
        assert hub.repos["ada/tiny"].private
        assert hub.repos["ada/tiny"].branches["main"][-1][:2] == (first["commit"], "first")
        assert first["url"].endswith(f"/ada/tiny/commit/{first['commit']}")
        assert "uploaded" in shown

        (folder / MODELING).unlink()
        write_code(folder, CONFIGURATION)
        (folder / "evaluation.json").write_text(figures(3000.0))
        results, _ = run(
            hub,
            folder,
            {"repo_id": "ada/destroyed"},
            *(
                {"anyway": True, **asked}
                for asked in (
                    {"repo_id": "ada/tiny"},
                    {"repo_id": "ada/tiny", "revision": "v2"},
                    {"repo_id": "ada/tiny", "create_pr": True},
                    {"repo_id": "ada/tiny", "revision": "main"},
                    {"repo_id": "named-by-user"},
                )
            ),
            home=home,
        )
        destroyed, taken, branch, pull, again, own = results
        assert destroyed["error"]["exit_code"] == 6
        assert "ada/destroyed" not in hub.repos
        assert taken["error"]["kind"] == "hub"
        assert taken["error"]["what"] == "ada/tiny exists and holds 5 files"
        assert branch["commit"] == hub.repos["ada/tiny"].commit("v2")[0]
        assert MODELING not in hub.files("ada/tiny", "v2")
        assert {CONFIGURATION, "evaluation.json"} <= set(hub.files("ada/tiny", "refs/pr/1"))
        assert pull["url"].endswith("/ada/tiny/discussions/1")
        assert set(hub.files("ada/tiny", again["commit"])) == {*again["files"], ".gitattributes"}
        assert own["repo_id"] == "ada/named-by-user"
        assert not hub.repos["ada/named-by-user"].private


def test_refusals_say_why(folder, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    with FakeHub({TOKEN: "ada", STRANGER: "eve"}) as hub:
        asked = {"repo_id": "ada/tiny", "revision": "main"}
        results, _ = run(
            hub,
            folder,
            {"repo_id": "ada/tiny"},
            {**asked, "token": STRANGER},
            {"repo_id": "bob/tiny", "token": STRANGER},
            {**asked, "token": "hf_wrong"},
            {**asked, "private": True},
            {"repo_id": "ada/none", "create_pr": True},
            home=home,
        )
        write, create, wrong, public, absent = [result["error"]["what"] for result in results[1:]]
        assert write == f"the token may not write to ada/tiny (403 from {hub.endpoint}/api/models/ada/tiny/commit/main)"
        assert create == f"the token may not write to bob/tiny (403 from {hub.endpoint}/api/repos/create)"
        assert f"does not accept the token (401 from {hub.endpoint}/" in wrong
        assert public == "ada/tiny exists and is public"
        assert absent == "ada/none does not exist"
        requests = len(hub.requests)
        (offline, nobody), _ = run(hub, folder, asked, {**asked, "token": ""}, home=home, HF_HUB_OFFLINE="1")
        assert "(OfflineModeIsEnabled)" in offline["error"]["what"]
        assert nobody["error"]["what"] == "not logged in to the hub"
        assert len(hub.requests) == requests
    (gone,), _ = run(hub, folder, asked, home=home)
    assert "the hub cannot be reached" in gone["error"]["what"]
    assert gone["error"]["exit_code"] == HubError.exit_code


def test_dry_run_lists_files_and_needs_neither_hub_nor_token(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: pytest.fail("a dry run asks for no token"))
    report = push_folder(folder, "ada/tiny", dry_run=True, private=True)
    assert report.dry_run
    assert report.commit is None
    assert report.files["README.md"] == len(CARD)
    assert ".hidden.tmp" not in report.files
    assert report.lines()[-1].startswith("would upload ")


def test_bad_folders_are_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        check_folder(tmp_path / "absent")
    (folder / "optimizer.pt").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"holds pickles: optimizer\.pt"):
        check_folder(folder)
    (folder / "optimizer.pt").unlink()
    save_file({"w": torch.zeros(4)}, folder / "extra.safetensors")
    with pytest.raises(CheckpointError, match=r"index does not name: extra\.safetensors"):
        check_folder(folder)
    (folder / "extra.safetensors").unlink()
    (folder / "README.md").write_text("no metadata")
    with pytest.raises(CheckpointError, match="has no model card"):
        check_folder(folder)
    (folder / "README.md").write_text(CARD)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        check_folder(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds a llama model"):
        check_folder(folder)


def test_bad_requests_are_refused(folder):
    with pytest.raises(UsageError, match="'a/b/c' is not a repository name"):
        push_folder(folder, "a/b/c", dry_run=True)
    for name in ("/tmp/some/path", "a b", "", "ada/--x", "x" * 97):
        with pytest.raises(UsageError) as error:
            push_folder(folder, name, dry_run=True)
        assert error.value.what == f"{name!r} is not a repository name"
        assert error.value.expected.startswith("owner/name: ")
        assert "YOU/NAME" in error.value.fix
        assert "repo_type" not in str(error.value)
    with pytest.raises(UsageError, match="both given"):
        push_folder(folder, "ada/tiny", revision="v2", create_pr=True)


def test_a_destroyed_model_is_refused(folder):
    (folder / "evaluation.json").write_text(figures(3000.0))
    with pytest.raises(VerificationError, match=r"^destroyed: .*not offered for push") as caught:
        push_folder(folder, "ada/tiny", dry_run=True)
    assert caught.value.exit_code == 6
    assert "--anyway" in caught.value.fix


def test_weights_that_are_not_finite_are_refused(folder):
    (folder / "evaluation.json").write_text(figures(0.0))
    save_file({"w": torch.tensor([0.0, math.nan])}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError, match=r"w of .* is NaN or infinite") as caught:
        push_folder(folder, "ada/tiny", dry_run=True)
    assert caught.value.exit_code == 6
    remarks = push_folder(folder, "ada/tiny", dry_run=True, anyway=True).remarks
    assert remarks[0] == "NaN or Inf in 1 tensor"


def test_what_is_known_of_the_quality_is_said(folder):
    report = push_folder(folder, "ada/tiny", dry_run=True)
    assert report.remarks == (f"nothing was measured: {folder} has no evaluation.json",)
    assert report.remarks[0] in report.lines()
    (folder / "evaluation.json").write_text(figures(0.0))
    (remark,) = push_folder(folder, "ada/tiny", dry_run=True).remarks
    assert remark.startswith("verdict: loses a part of the teacher's quality: ")


def test_files_that_were_changed_since_the_export_are_refused(folder):
    write_manifest(folder)
    assert len(push_folder(folder, "ada/tiny", dry_run=True).remarks) == 1
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    save_file({"w": torch.ones(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    for dry_run in (True, False):
        with pytest.raises(
            VerificationError, match=r"^2 files of .*: config\.json has .*; model\.safetensors is not"
        ) as error:
            push_folder(folder, "ada/tiny", dry_run=dry_run)
        assert error.value.exit_code == 6
        assert "--anyway" in error.value.fix
    report = push_folder(folder, "ada/tiny", dry_run=True, anyway=True)
    assert report.remarks[0].startswith("config.json has ")
    assert "manifest.json" in report.files


@pytest.mark.parametrize("recorded", [False, True])
def test_an_edited_card_is_not_refused(folder, recorded):
    write_manifest(folder, {"README.md": file_record(folder / "README.md")} if recorded else {})
    (folder / "README.md").write_text(CARD + "my own words\n")
    assert len(push_folder(folder, "ada/tiny", dry_run=True).remarks) == 1 + recorded
