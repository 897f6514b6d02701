"""Conversion of saved checkpoints of real classes, through the real command line."""

import errno
import json
import os
import shutil
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sse_convert.checkpoints import manifest
from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.checkpoints.manifest import read_manifest
from sse_convert.checkpoints.open import INDEX, open_checkpoint
from sse_convert.checkpoints.provenance import read_provenance
from sse_convert.checkpoints.teacher import is_new_tensor, open_teacher
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, OutputError, RecipeError, UsageError
from sse_convert.files import digest
from sse_convert.modeling.auto import load_pretrained
from sse_convert.surgery import convert as converting
from sse_convert.surgery.convert import NEW_SHARD, ONLY_SHARD, convert_checkpoint, convert_layers
from sse_convert.surgery.geometry import geometry_of
from sse_convert.surgery.job import Job
from sse_convert.surgery.plan import make_plan
from sse_convert.surgery.verify_run import verify_folder
from tests.elsewhere import without_package
from tests.modeling.tiny import FAMILIES, tiny_source
from tests.surgery.models import digests, recipe, recipe_file, save_source, tokens


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A tiny Qwen3 in several shards. Tests must not write here."""
    return save_source(tmp_path_factory.mktemp("teacher") / "qwen3")


def run(capsys, *arguments):
    code = run_app(app, [*map(str, arguments), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (code == 0), answer
    return code, answer.get("result") or answer["error"]


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "gpt_neox", "mixtral", "phimoe"])
def test_families_through_the_command_line(tmp_path, capsys, model_type):
    """plan, convert, verify, load, generate; the teacher's files stay what they are. What is stored under other names,
    or expert by expert, is loaded to the bit."""
    source = save_source(tmp_path / "teacher", model_type)
    before = digests(source)
    file = recipe_file(tmp_path / "r.yaml", source)
    code, plan = run(capsys, "plan", file)
    assert (code, [row["mixer"] for row in plan["layers"]]) == (0, ["sse", "sliding", "gla", "full"])
    code, result = run(capsys, "convert", file, "-o", tmp_path / "out", "--check")
    assert (code, result["added_parameters"], result["unused_tensors"]) == (0, plan["added_parameters"], [])
    assert "hard" not in result["teacher_shards"].values()
    code, proof = run(capsys, "verify", tmp_path / "out")
    assert (code, all(check["passed"] for check in proof["checks"])) == (0, True)
    assert digests(source) == before
    after = digests(tmp_path / "out")
    assert set(before.values()) < set(after.values())
    model = load_pretrained(tmp_path / "out")
    assert type(model).__name__.startswith("SSE")
    ids = tokens()
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        assert torch.equal(made[:, 24], model(ids).logits[:, -1].argmax(-1))
    kept = {name: value for name, value in model.state_dict().items() if "sse_" not in name}
    for name, value in tiny_source(model_type).state_dict().items():
        assert torch.equal(kept[name], value), name


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_converted_layer_gives_the_same_logits(tmp_path, model_type):
    source = save_source(tmp_path / "teacher", model_type)
    convert_layers(open_teacher(source), ["full"] * 4, {}, tmp_path / "out", recipe=recipe(source))
    ids = tokens()
    with torch.no_grad():
        theirs, ours = (load_pretrained(folder)(ids).logits for folder in (source, tmp_path / "out"))
    assert torch.equal(theirs, ours)
    assert not (tmp_path / "out" / NEW_SHARD).exists()


def test_files_of_a_conversion(teacher, tmp_path):
    convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "out")
    ours, theirs = open_checkpoint(tmp_path / "out"), open_checkpoint(teacher)
    assert ours.shard_bytes.keys() == theirs.shard_bytes.keys() | {NEW_SHARD}
    assert not any((tmp_path / "out" / shard).samefile(teacher / shard) for shard in theirs.shard_bytes)
    new = {name for name, info in ours.tensors.items() if info.shard == NEW_SHARD}
    assert new == set(filter(is_new_tensor, ours.tensors))
    assert {name.rsplit(".self_attn.", 1)[0] for name in new} == {"model.layers.0", "model.layers.2"}
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in ours.tensors.values())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (teacher / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [2, 5]
    assert (tmp_path / "out" / "sse_code" / "modeling_sse.py").is_file()


def test_config_changes_only_what_it_must(teacher, tmp_path):
    convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "out")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (teacher, tmp_path / "out"))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == {"model_type", "architectures", "auto_map", "sse", "plain_class_guard"}
    assert (after["model_type"], after["architectures"]) == ("sse_qwen3", ["SSEQwen3ForCausalLM"])
    assert after["sse"]["layers"] == ["sse", "sliding", "gla", "full"]
    assert after["sse"]["base_model"] == str(teacher)
    assert after["layer_types"] == before["layer_types"]


def test_provenance(teacher, tmp_path):
    asked = recipe(teacher)
    convert_checkpoint(Job.of(asked), tmp_path / "out", check=True)
    sizes = {path.name: path.stat().st_size for path in teacher.glob("*.safetensors")}
    provenance = read_provenance(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert provenance is not None
    assert (provenance.stage, provenance.recipe_hash) == ("convert", config["sse"]["recipe_hash"])
    assert provenance.teacher_folder == str(teacher)
    assert {shard.source: shard.bytes for shard in provenance.shards.values()} == sizes
    assert provenance.manifest


def test_manifest(teacher, tmp_path):
    """Every file is in it with its SHA-256, but the manifest itself."""
    convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "out")
    records = read_manifest(tmp_path / "out")
    paths = (path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name != "manifest.json")
    files = {path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in paths}
    found = {name: (record.bytes, record.sha256, record.origin) for name, record in records.items()}
    assert found == {name: (len(data), sha256(data).hexdigest(), "computed") for name, data in files.items()}
    assert {"config.json", "tokenizer.json", "sse_code/modeling_sse.py", "sse_convert.json", NEW_SHARD} < found.keys()


def test_digests_of_teacher_shards_can_wait(teacher, tmp_path):
    convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "out", defer_digests=True)
    records = read_manifest(tmp_path / "out")
    assert {name for name, record in records.items() if record.sha256 is None} == digests(teacher).keys()
    assert {record.origin for record in records.values() if record.sha256 is None} == {"deferred"}


def test_an_edit_of_the_result_leaves_the_teacher_alone(teacher, tmp_path):
    before = digests(teacher)
    convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "out")
    for shard in before:
        with (tmp_path / "out" / shard).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
    assert digests(teacher) == before


def test_links_where_they_are_asked_for(teacher, tmp_path):
    report = convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "out", link="hard")
    assert set(report.teacher_shards.values()) == {"hard"}
    assert all((tmp_path / "out" / shard).samefile(teacher / shard) for shard in report.teacher_shards)


def test_shards_of_the_hub_cache_are_linked_and_their_digests_known(teacher, tmp_path, monkeypatch):
    """The cache calls a large file by its SHA-256 and a small one by its id in git."""
    large, small = sorted(digests(teacher).items())[:2]
    blobs, snapshot = (tmp_path / "models--a--b" / part for part in ("blobs", "snapshots/1"))
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in teacher.iterdir():
        blob = {large[0]: large[1], small[0]: "0" * 40}.get(path.name)
        if blob is None:
            shutil.copyfile(path, snapshot / path.name)
        else:
            shutil.copyfile(path, blobs / blob)
            (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    read = []
    monkeypatch.setattr(manifest, "digest", lambda path, *seen: read.append(path.name) or digest(path, *seen))
    report = convert_checkpoint(Job.of(recipe(snapshot)), tmp_path / "out")
    records = read_manifest(tmp_path / "out")
    assert [report.teacher_shards[name] for name, _ in (large, small)] == ["hard", "hard"]
    assert (tmp_path / "out" / large[0]).samefile(blobs / large[1])
    assert (records[large[0]].sha256, records[large[0]].origin) == (large[1], "hub cache")
    assert (records[small[0]].sha256, records[small[0]].origin) == (small[1], "computed")
    assert large[0] not in read
    assert small[0] in read
    with (blobs / large[1]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(CheckpointError, match=f"shard {large[0]} of .* in the hub's cache has SHA-256"):
        convert_checkpoint(Job.of(recipe(snapshot)), tmp_path / "checked", check=True)


def test_a_lone_shard_is_renamed_so_that_the_index_counts(tmp_path):
    source = save_source(tmp_path / "teacher", shard_size="5GB")
    assert (source / "model.safetensors").is_file()
    convert_checkpoint(Job.of(recipe(source)), tmp_path / "out", link="hard")
    assert sorted(digests(tmp_path / "out")) == [ONLY_SHARD, NEW_SHARD]
    assert (tmp_path / "out" / ONLY_SHARD).samefile(source / "model.safetensors")
    model = load_pretrained(tmp_path / "out")
    stored = load_file(tmp_path / "out" / NEW_SHARD)
    assert stored
    assert all(torch.equal(model.state_dict()[name], value) for name, value in stored.items())


def test_plain_loading_is_refused(teacher, tmp_path):
    from transformers import Qwen3ForCausalLM

    convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "out")
    with pytest.raises(Exception, match="SSE layers"):
        Qwen3ForCausalLM.from_pretrained(tmp_path / "out")


REMOTE = """
from safetensors.torch import load_file
ours = load_file("ours.safetensors")
model = AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True).eval()
with torch.no_grad():
    assert torch.equal(model(ours["ids"]).logits, ours["logits"])
"""


def test_remote_code_gives_the_same_logits(teacher, tmp_path):
    """In a process that cannot import sse_convert."""
    convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "out")
    ids = tokens()
    with torch.no_grad():
        save_file({"ids": ids, "logits": load_pretrained(tmp_path / "out")(ids).logits}, tmp_path / "ours.safetensors")
    without_package(REMOTE, tmp_path)


def test_conversion_is_deterministic_and_seeded(teacher, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        convert_checkpoint(Job.of(recipe(teacher, train={"seed": seed})), tmp_path / name)
    a, b, c = ((tmp_path / name / NEW_SHARD).read_bytes() for name in "abc")
    assert a == b != c


def test_a_layer_keeps_its_start_whatever_the_others_get(teacher, tmp_path):
    convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "a")
    convert_checkpoint(Job.of(recipe(teacher, layers={"pattern": ["full", "full", "gla", "sse"]})), tmp_path / "b")
    a, b = (load_file(tmp_path / name / NEW_SHARD) for name in "ab")
    shared = [name for name in a if ".2." in name]
    assert shared
    assert all(torch.equal(a[name], b[name]) for name in shared)


def test_new_tensors_take_the_teachers_dtype(tmp_path):
    source = save_source(tmp_path / "teacher", dtype=torch.bfloat16)
    convert_checkpoint(Job.of(recipe(source)), tmp_path / "out")
    assert {dtype for dtype, _ in open_checkpoint(tmp_path / "out").headers.values()} == {"BF16"}
    assert load_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_copies_on_request_or_where_links_are_impossible(teacher, tmp_path, monkeypatch):
    report = convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "copied", link="copy")
    assert set(report.teacher_shards.values()) == {"copy"}

    def cross_device(*args):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", cross_device)
    assert set(convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "crossed").teacher_shards.values()) == {"copy"}
    before = digests(teacher)
    for name in ("copied", "crossed"):
        after = digests(tmp_path / name)
        assert {shard: after[shard] for shard in before} == before
        assert not any((tmp_path / name / shard).samefile(teacher / shard) for shard in before)


def test_names_without_the_backbone(tmp_path):
    """The original GPT-2 stores `h.0.attn...` where the model says `transformer.h.0.attn...`, and old mask tables."""
    source = save_source(tmp_path / "teacher", "gpt2", shard_size="5GB")
    stored = load_file(source / "model.safetensors")
    stored = {name.removeprefix("transformer."): value for name, value in stored.items()}
    save_file({**stored, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, source / "model.safetensors", {"format": "pt"})
    report = convert_checkpoint(Job.of(recipe(source)), tmp_path / "out", check=True)
    assert report.unused_tensors == ["h.0.attn.bias"]
    model, plain = load_pretrained(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(source)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert all(name.startswith("h.") for name in load_file(tmp_path / "out" / NEW_SHARD))


@pytest.mark.parametrize("failing", ["write_shard", "write_index", "write_remote_code", "copy_auxiliary_files"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_interrupted_or_out_of_space_leaves_nothing(teacher, tmp_path, monkeypatch, failing, failure):
    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr(converting, failing, fail)
    expected = OutputError if isinstance(failure, OSError) else KeyboardInterrupt
    before = digests(teacher)
    with pytest.raises(expected):
        convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert digests(teacher) == before


def test_output_is_checked_before_the_teacher_is_opened(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="exists"):
        convert_checkpoint(Job.of(recipe(tmp_path / "no-such-teacher")), tmp_path / "out")


def test_a_converted_checkpoint_is_refused(teacher, tmp_path):
    convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "once")
    with pytest.raises(CheckpointError, match="already converted"):
        convert_checkpoint(Job.of(recipe(tmp_path / "once")), tmp_path / "twice")


def test_nothing_converted_is_refused(teacher, tmp_path):
    with pytest.raises(RecipeError, match="nothing is converted"):
        convert_checkpoint(Job.of(recipe(teacher, layers={"pattern": ["sse"], "keep": ["0-3"]})), tmp_path / "out")


def test_nan_weights_are_found_on_request(tmp_path):
    source = save_source(tmp_path / "teacher", shard_size="5GB")
    state = load_file(source / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"NaN or Inf weights: model\.norm\.weight \(1 of 32\)"):
        convert_checkpoint(Job.of(recipe(source)), tmp_path / "out", check=True)
    assert not (tmp_path / "out").exists()
    convert_checkpoint(Job.of(recipe(source)), tmp_path / "out")


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_next", "mtp.fc.weight"),
        ("qwen3_5_text", "mtp.fc.weight"),
        ("glm4_moe", "model.layers.4.eh_proj.weight"),
        ("deepseek_v3", "model.layers.4.eh_proj.weight"),
        ("minimax_m2", "model.mtp.fc.weight"),
    ],
)
def test_layers_that_predict_further_tokens_stay_in_the_files(model_type, name, tmp_path, caplog):
    source = save_source(tmp_path / "teacher", model_type, shard_size="5GB")
    plain = make_plan(Job.of(recipe(source, layers={"pattern": ["sse", "gla", "sliding", "full"]}), open_for_planning))
    state = load_file(source / "model.safetensors")
    save_file(state | {name: torch.ones(4, 8)}, source / "model.safetensors", {"format": "pt"})
    asked = recipe(source, layers={"pattern": ["sse", "gla", "sliding", "full"]})
    plan = make_plan(Job.of(asked, open_for_planning))
    assert any(note.startswith(f"1 tensors (32 parameters, such as {name}) are left out") for note in plan.notes)
    assert plan.active_parameters == plain.active_parameters
    assert geometry_of(open_teacher(source)).has_experts is (model_type != "qwen3_5_text")
    report = convert_checkpoint(Job.of(asked), tmp_path / "out")
    assert report.unused_tensors == report.further_tensors == [name]
    said = "kept in the files, neither converted nor loaded: 1 tensor of layers that predict further tokens"
    assert any(line.startswith(said) for line in report.lines())
    verify_folder(tmp_path / "out", teacher=source)
    assert name in open_checkpoint(tmp_path / "out").tensors
    assert name not in load_pretrained(tmp_path / "out").state_dict()
    assert "UNEXPECTED" not in caplog.text
    assert name not in load_pretrained(source).state_dict()


def test_drafts_of_layers_that_predict_further_tokens_are_refused(teacher, tmp_path):
    convert_checkpoint(Job.of(recipe(teacher)), tmp_path / "out")
    model = load_pretrained(tmp_path / "out")
    with pytest.raises(UsageError, match="use_mtp"):
        model.generate(tokens(1, 4), max_new_tokens=2, use_mtp=True)


def test_a_mixer_for_a_layer_of_linear_attention_is_refused(tmp_path):
    source = save_source(tmp_path / "teacher", "qwen3_next")
    with pytest.raises(RecipeError, match=r"gives layers 3 a mixer.* layers with softmax are 0, 1, 2"):
        convert_checkpoint(Job.of(recipe(source, layers={"pattern": ["full", "full", "sse", "sse"]})), tmp_path / "out")
