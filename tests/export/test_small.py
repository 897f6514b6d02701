"""Small checkpoints: what differs from the teacher, and how that is put together again."""

import dataclasses as dc
import errno
import json
import re
import shutil
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from sse_convert import api
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, OutputError
from sse_convert.evaluation.evaluate import evaluate_checkpoint
from sse_convert.export.export import export_checkpoint
from sse_convert.export.join import join_checkpoint
from sse_convert.export.push import push_folder
from sse_convert.inference.generate import generate_text
from sse_convert.inference.sampling import Sampling
from sse_convert.modeling.auto import load_pretrained
from sse_convert.modeling.remote_code import remote_code
from sse_convert.surgery.job import Job
from sse_convert.surgery.verify_run import verify_folder
from tests.elsewhere import beside_hub, without_package
from tests.fake_hub import FakeHub, Repo

ROOT = Path(__file__).parents[2]

IDS = torch.randint(2, 300, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model):
    return model.eval()(IDS, use_cache=False).logits


def change(folder, edit):
    """Edit the tensors of a folder with one shard."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def teacher(teacher_folder, tmp_path):
    """A copy of the teacher that a test may change, in the folder where the checkpoints are."""
    return shutil.copytree(teacher_folder, tmp_path / "teacher")


@pytest.fixture
def exported(recipe, student_folder, teacher, tmp_path):
    """The whole and the small export of a student that was trained a little."""
    student = shutil.copytree(student_folder, tmp_path / "student")
    change(student, lambda tensors: tensors["model.layers.1.self_attn.o_proj.weight"].mul_(1.5))
    recipe = dc.replace(recipe, model=str(teacher))
    whole = export_checkpoint(Job.of(recipe), student, tmp_path / "whole").out
    return whole, export_checkpoint(Job.of(recipe), student, tmp_path / "small", delta=True).out


def test_what_is_new_or_changed_is_stored_alone(exported, teacher):
    whole, small = (load_file(folder / "model.safetensors") for folder in exported)
    new = {name for name in whole if "sse_" in name}
    assert new
    assert small.keys() == new | {"model.layers.1.self_attn.o_proj.weight"}
    lent = json.loads((exported[1] / "sse_delta.json").read_text())
    assert lent["teacher"] == "./teacher"
    assert lent["revision"] is None
    assert lent["files"]["model.safetensors"].keys() == whole.keys() - small.keys()
    assert sum((exported[1] / name).stat().st_size for name in ("model.safetensors",)) < 0.6 * teacher_bytes(teacher)


def test_a_recipe_asks_for_it_too(exported, recipe, student_folder, teacher, tmp_path):
    asked = dc.replace(recipe, model=str(teacher), export=dc.replace(recipe.export, delta=True))
    out = export_checkpoint(Job.of(asked), tmp_path / "student", tmp_path / "asked").out
    assert (out / "model.safetensors").read_bytes() == (exported[1] / "model.safetensors").read_bytes()
    assert torch.equal(*(logits(AutoModelForCausalLM.from_pretrained(folder)) for folder in (out, exported[0])))


def teacher_bytes(teacher):
    return (teacher / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    "settings", [{}, {"device_map": "cpu"}, {"dtype": torch.bfloat16}, {"low_cpu_mem_usage": True}]
)
def test_it_loads_as_the_whole_one_to_the_bit(exported, settings):
    whole, small = (AutoModelForCausalLM.from_pretrained(folder, **settings) for folder in exported)
    assert {name: t for name, t in small.state_dict().items() if not torch.equal(t, whole.state_dict()[name])} == {}
    assert torch.equal(logits(small), logits(whole))
    assert small.config.sse.keys() == whole.config.sse.keys()
    assert small.config.sse["format"] == whole.config.sse["format"]


def test_loading_says_that_nothing_is_missing_and_saving_again_writes_a_whole_one(exported, tmp_path):
    model, info = AutoModelForCausalLM.from_pretrained(exported[1], output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model.save_pretrained(tmp_path / "again")
    shutil.rmtree(tmp_path / "teacher")
    again = load_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))


def test_other_classes_join_too(exported):
    whole, small = (AutoModel.from_pretrained(folder) for folder in exported)
    assert torch.equal(small(IDS).last_hidden_state, whole(IDS).last_hidden_state)
    model, info = AutoModelForSequenceClassification.from_pretrained(exported[1], output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"}
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, whole.layers[0].mlp.up_proj.weight)


def test_weights_on_disk_are_the_teachers_and_its_own(exported, tmp_path):
    places = {"model": "disk", "lm_head": "cpu"}
    loaded = AutoModelForCausalLM.from_pretrained(exported[1], device_map=places, offload_folder=tmp_path / "offload")
    assert torch.equal(logits(loaded), logits(load_pretrained(exported[0])))


def test_shards_of_both_are_joined(recipe, exported, teacher, tmp_path):
    from transformers import LlamaForCausalLM

    LlamaForCausalLM.from_pretrained(teacher).save_pretrained(tmp_path / "pieces", max_shard_size=40_000)
    (teacher / "model.safetensors").unlink()
    for path in (tmp_path / "pieces").glob("model*"):
        shutil.copy(path, teacher)
    assert len(list(teacher.glob("*.safetensors"))) > 2
    recipe = dc.replace(recipe, model=str(teacher))
    report = export_checkpoint(
        Job.of(recipe), tmp_path / "student", tmp_path / "pieces-small", shard_bytes=2_000, delta=True
    )
    assert len(report.shards) > 2
    assert torch.equal(logits(load_pretrained(report.out)), logits(load_pretrained(exported[0])))


def test_it_loads_where_the_package_is_not(exported, tmp_path):
    model = load_pretrained(exported[0])
    torch.save((IDS, logits(model)), tmp_path / "expected.pt")
    without_package(
        """
ids, expected = torch.load("expected.pt")
model = AutoModelForCausalLM.from_pretrained("small", trust_remote_code=True).eval()
assert torch.equal(model(ids, use_cache=False).logits, expected)
assert "sse_convert" not in sys.modules
import os
os.rename("teacher", "hidden")
try:
    AutoModelForCausalLM.from_pretrained("small", trust_remote_code=True)
except Exception as error:
    assert "its teacher ./teacher is not at hand" in str(error), error
else:
    raise SystemExit("loaded without its teacher")
os.environ["SSE_TEACHER"] = "hidden"
model = AutoModelForCausalLM.from_pretrained("small", trust_remote_code=True).eval()
assert torch.equal(model(ids, use_cache=False).logits, expected)
""",
        tmp_path,
    )


def test_a_teacher_that_changed_is_refused_by_its_tensors(exported, teacher):
    change(teacher, lambda tensors: tensors["model.embed_tokens.weight"][3].add_(1))
    with pytest.raises(CheckpointError, match=r"1 tensors that .*small takes .* are others in .*: model.embed_tokens"):
        AutoModelForCausalLM.from_pretrained(exported[1])
    change(teacher, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"2 tensors .*: model.embed_tokens.weight, model.norm.weight"):
        load_pretrained(exported[1])


def test_a_tensor_of_the_same_bytes_and_another_shape_is_another(exported, teacher):
    change(teacher, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].view(2, -1)}))
    with pytest.raises(CheckpointError, match=r"1 tensors .*: model.norm.weight"):
        load_pretrained(exported[1])


def test_a_missing_teacher_is_named_with_what_to_do(exported, teacher, tmp_path, monkeypatch):
    teacher.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"small is small, and its teacher ./teacher is not at hand") as caught:
        AutoModelForCausalLM.from_pretrained(exported[1])
    assert "set SSE_TEACHER to a folder" in caught.value.fix
    monkeypatch.setenv("SSE_TEACHER", str(tmp_path / "elsewhere"))
    assert torch.equal(logits(load_pretrained(exported[1])), logits(load_pretrained(exported[0])))
    monkeypatch.setenv("SSE_TEACHER", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="is not at hand"):
        load_pretrained(exported[1])


@pytest.mark.parametrize(
    ("command", "way"),
    [("join", "give --teacher FOLDER"), ("chat", "make it whole: `sse-convert join --teacher FOLDER`")],
)
def test_commands_name_the_option(exported, teacher, tmp_path, capsys, command, way):
    teacher.rename(tmp_path / "elsewhere")
    assert run_app(app, [command, str(exported[1]), *(["-o", str(tmp_path / "out")] if command == "join" else [])]) == 4
    assert f"set SSE_TEACHER to a folder with the teacher's files; or {way}\n" in capsys.readouterr().err


def test_a_hub_that_does_not_answer_is_asked_once(exported, monkeypatch):
    lent = json.loads((exported[1] / "sse_delta.json").read_text())
    (exported[1] / "sse_delta.json").write_text(json.dumps({**lent, "teacher": "ada/teacher", "revision": "c" * 40}))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))
    with pytest.raises(CheckpointError, match=r"is not at hand: model.safetensors is not in the cache, nor on a hub"):
        load_pretrained(exported[1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(json.dumps({"teacher": "./teacher", "revision": None, "files": {"../a": {}}})),
        lambda path: path.write_text(json.dumps({"teacher": 1, "revision": None, "files": {}})),
        lambda path: path.write_text(json.dumps({"teacher": "./teacher", "revision": None, "files": {"a": 1}})),
    ],
)
def test_a_damaged_note_is_refused(exported, damage):
    damage(exported[1] / "sse_delta.json")
    with pytest.raises(CheckpointError, match=r"sse_delta\.json"):
        AutoModelForCausalLM.from_pretrained(exported[1])


def test_a_version_of_transformers_that_loads_otherwise_is_refused(exported, monkeypatch):
    from transformers import PreTrainedModel

    cls = type(load_pretrained(exported[0]))
    monkeypatch.setattr(cls, "_load_pretrained_model", PreTrainedModel._load_pretrained_model, raising=False)
    with pytest.raises(CheckpointError, match="without its teacher"):
        AutoModelForCausalLM.from_pretrained(exported[1])


def test_versions_that_know_no_small_checkpoints_refuse_their_format(exported):
    sse = json.loads((exported[1] / "config.json").read_text())["sse"]
    assert sse["delta"] == "sse_delta.json"
    assert sse["format"] == 3


def test_where_nothing_is_the_same_it_says_so(recipe, exported, tmp_path):
    change(tmp_path / "student", lambda tensors: [tensor.add_(0.5) for tensor in tensors.values()])
    with pytest.raises(CheckpointError, match="has no tensor as its teacher"):
        export_checkpoint(Job.of(recipe), tmp_path / "student", tmp_path / "none", delta=True)
    assert not (tmp_path / "none").exists()


def test_join_makes_what_export_would_have(recipe, exported, tmp_path):
    whole, small = exported
    (small / "notes.txt").write_text("mine")
    report = join_checkpoint(small, tmp_path / "joined")
    assert report.own + report.lent == len(load_file(whole / "model.safetensors"))
    tensors, expected = (load_file(folder / "model.safetensors") for folder in (report.out, whole))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    files = {p.relative_to(report.out).as_posix() for p in report.out.rglob("*") if p.is_file()}
    assert files == {p.relative_to(whole).as_posix() for p in whole.rglob("*") if p.is_file()}
    card = re.sub(r"\bwhole\b(?! conversion)", "small", (whole / "README.md").read_text())
    assert (report.out / "README.md").read_text() == card
    assert "A small checkpoint" in (small / "README.md").read_text()
    config, theirs = (json.loads((folder / "config.json").read_text()) for folder in (report.out, whole))
    config["sse"] |= {key: theirs["sse"][key] for key in ("recipe", "recipe_hash")}
    assert config == theirs
    verify_folder(report.out, teacher=tmp_path / "teacher")
    again = export_checkpoint(
        Job.of(dc.replace(recipe, model=str(tmp_path / "teacher"))), report.out, tmp_path / "again"
    ).out
    assert torch.equal(logits(load_pretrained(again)), logits(load_pretrained(whole)))


def test_join_takes_a_teacher_and_refuses_whole_ones_and_others(exported, teacher, tmp_path):
    with pytest.raises(CheckpointError, match="whole is no small checkpoint"):
        join_checkpoint(exported[0], tmp_path / "joined")
    teacher.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"teacher \./teacher is not at hand"):
        join_checkpoint(exported[1], tmp_path / "joined")
    assert join_checkpoint(exported[1], tmp_path / "joined", tmp_path / "elsewhere").lent > 0
    change(tmp_path / "elsewhere", lambda tensors: tensors["model.norm.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"are others in .*elsewhere: model\.norm\.weight"):
        join_checkpoint(exported[1], tmp_path / "other", tmp_path / "elsewhere")
    assert not (tmp_path / "other").exists()


def test_a_full_disk_leaves_nothing_of_a_join(exported, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("sse_convert.export.join.write_weights", fail)
    before = set(tmp_path.iterdir())
    with pytest.raises(OutputError, match="the disk is full"):
        join_checkpoint(exported[1], tmp_path / "joined")
    assert set(tmp_path.iterdir()) == before


def test_commands_that_want_all_tensors_say_how_to_get_them(recipe, exported, tmp_path):
    tries = [
        lambda: export_checkpoint(Job.of(recipe), exported[1], tmp_path / "no"),
        lambda: verify_folder(exported[1]),
        lambda: api.inspect(exported[1]),
        lambda: api.calibrate(recipe, exported[1], tmp_path / "no"),
    ]
    for attempt in tries:
        with pytest.raises(CheckpointError, match="is a small checkpoint") as caught:
            attempt()
        assert caught.value.fix == f"make it whole: sse-convert join {exported[1]} --out WHOLE"


def test_it_generates_and_is_measured(recipe, exported):
    assert generate_text(exported[1], "The keeper", sampling=Sampling(max_new_tokens=4)).text
    losses = [evaluate_checkpoint(Job.of(recipe), folder).student.held_out for folder in exported]
    assert losses[0] == losses[1]


def test_a_small_one_whose_teacher_is_a_folder_is_not_pushed(exported):
    with pytest.raises(CheckpointError, match=r"its teacher \./teacher is a folder of this machine") as caught:
        push_folder(exported[1], "ada/small", dry_run=True)
    assert "sse-convert join" in caught.value.fix


EXPORT_AND_PUSH = """
import sys
from sse_convert.export.export import export_checkpoint
from sse_convert.export.push import push_folder
from sse_convert.recipe import load_recipe
from sse_convert.surgery.job import Job
out = export_checkpoint(Job.of(load_recipe(sys.argv[1])), sys.argv[2], sys.argv[3], delta=True)
print(out.lines())
push_folder(sys.argv[3], "ada/small")
"""
LOAD = """
import sys, torch
if sys.argv[3] == "without":
    sys.modules["sse_convert"] = None
else:
    import sse_convert
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=sys.argv[3] == "without").eval()
ids = torch.arange(2, 42)[None]
torch.save((ids, model(ids, use_cache=False).logits.detach()), sys.argv[2])
"""
JOIN = "from sse_convert import api; api.join('ada/small', 'joined')"


@pytest.mark.slow
def test_a_pushed_one_fetches_its_teacher_at_its_commit(recipe, exported, teacher, tmp_path):
    commit, served = "c0ffee" + "0" * 34, {path.name: path.read_bytes() for path in teacher.iterdir()}
    recipe = dc.replace(recipe, model="ada/teacher")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    ids = torch.arange(2, 42)[None]
    with torch.no_grad():
        expected = load_pretrained(exported[0])(ids, use_cache=False).logits

    def run(code, *arguments, home, **environment):
        (tmp_path / "script.py").write_text(code)
        settings = {"HF_HOME": str(tmp_path / home), **environment}
        return beside_hub(["script.py", *arguments], tmp_path, hub.endpoint, **settings)

    def found():
        return torch.load(tmp_path / "logits.pt")[1]

    with FakeHub({"hf_secret": "ada"}) as hub:
        newer = {**served, "model.safetensors": served["model.safetensors"][:-4] + b"\0\0\0\0"}
        hub.repos["ada/teacher"] = Repo(False, {"main": [(commit, "first", served)]})
        made = run(EXPORT_AND_PUSH, "recipe.yaml", "student", "hub-small", HF_TOKEN="hf_secret", home="home")
        assert made.code == 0, made.error
        lent = json.loads(hub.files("ada/small")["sse_delta.json"])
        assert (lent["teacher"], lent["revision"]) == ("ada/teacher", commit)
        hub.repos["ada/teacher"].branches["main"].append(("f" * 40, "second", newer))
        for package in ("with", "without"):
            done = run(LOAD, "ada/small", "logits.pt", package, home=package)
            assert done.code == 0, done.error
            assert torch.equal(found(), expected)
            (tmp_path / "logits.pt").unlink()
            done = run(LOAD, "ada/small", "logits.pt", package, home=package, HF_HUB_OFFLINE="1")
            assert torch.equal(found(), expected), done.error
            (tmp_path / "logits.pt").unlink()
        done = run(JOIN, home="with")
        assert done.code == 0, done.error
        with torch.no_grad():
            assert torch.equal(load_pretrained(tmp_path / "joined")(ids, use_cache=False).logits, expected)
        offline = {"home": "empty", "HF_HUB_OFFLINE": "1"}
        done = run(LOAD, tmp_path / "hub-small", "logits.pt", "without", **offline)
        assert f"its teacher ada/teacher at revision {commit} is not at hand" in done.error
        assert (
            f"`hf download ada/teacher --revision {commit}` where there is a network, or set SSE_TEACHER" in done.error
        )
        done = run(LOAD, tmp_path / "hub-small", "logits.pt", "with", **offline, SSE_TEACHER=str(teacher))
        assert torch.equal(found(), expected), done.error


def test_the_code_that_travels_joins(exported):
    assert "sse_code/modeling_loading.py" in remote_code()
    assert (exported[1] / "sse_code" / "modeling_loading.py").is_file()
