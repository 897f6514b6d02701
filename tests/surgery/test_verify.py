import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sse_convert.checkpoints.identity import write_sealed
from sse_convert.checkpoints.manifest import FILE as MANIFEST
from sse_convert.checkpoints.manifest import read_manifest
from sse_convert.checkpoints.open import INDEX
from sse_convert.checkpoints.provenance import FILE
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, HubError, VerificationError
from sse_convert.surgery.convert import NEW_SHARD, ONLY_SHARD, convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.surgery.verify_run import verify_folder
from sse_convert.training.stage_record import record_of
from tests.surgery.models import recipe, save_source
from tests.surgery.synthetic import edit_config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A teacher in one shard and its conversion. Tests work on copies."""
    folder = tmp_path_factory.mktemp("verify")
    save_source(folder / "teacher", shard_size="5GB")
    convert_checkpoint(Job.of(recipe(folder / "teacher")), folder / "out")
    return folder


@pytest.fixture
def out(made, tmp_path):
    shutil.copytree(made / "out", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def unrecorded(out):
    """The conversion as older versions made it: without a manifest."""
    (out / MANIFEST).unlink()
    edit_provenance(out, manifest=False)
    return out


def edit_provenance(folder, **changes):
    (folder / FILE).write_text(json.dumps({**json.loads((folder / FILE).read_text()), **changes}))


def flip(path, at=-1):
    """Change one bit of the byte at a position, which may count from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def write_index(folder):
    names = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def details(report):
    return {check.name: check.detail for check in report.checks}


def test_a_sound_checkpoint(made):
    found = details(verify_folder(made / "out"))
    assert found["names and shapes"] == "62 tensors in 2 shards, 15 of them new"
    assert found["dtypes"] == "float32"
    assert found["logits"] == "finite on a 32-token input"
    assert found["teacher"] == f"47 of 47 tensors identical to {made / 'teacher'}"


def test_a_copied_checkpoint_is_compared_bit_by_bit(made, out):
    assert "47 of 47" in details(verify_folder(out, teacher=made / "teacher"))["teacher"]


def test_without_its_teacher(unrecorded):
    edit_provenance(unrecorded, teacher_folder=str(unrecorded / "gone"))
    assert details(verify_folder(unrecorded))["teacher"].startswith("not compared")


def test_one_changed_bit_in_a_kept_tensor(out):
    rewrite(out / ONLY_SHARD, lambda tensors: tensors["model.norm.weight"][0].mul_(-1))
    with pytest.raises(VerificationError, match=r"teacher: 1 of 47 tensors differ from .*: model\.norm\.weight"):
        verify_folder(out)


def test_training_may_change_kept_tensors(unrecorded):
    rewrite(unrecorded / ONLY_SHARD, lambda tensors: tensors["model.norm.weight"][0].mul_(-1))
    edit_provenance(unrecorded, stage="distill")
    assert details(verify_folder(unrecorded))["teacher"].startswith("46 of 47 tensors identical")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Models that nothing was converted from: with other weights, fewer layers, and a wider embedding."""
    folder = tmp_path_factory.mktemp("others")
    for name, options in (("weights", {}), ("layers", {"num_hidden_layers": 2}), ("vocabulary", {"vocab_size": 120})):
        torch.manual_seed(7)
        save_source(folder / name, shard_size="5GB", **options)
    rewrite(folder / "weights" / "model.safetensors", lambda tensors: [t.add_(0.5) for t in tensors.values()])
    return folder


def trained(folder, *stages, stage=None):
    """Let a conversion look like the result of stages, each `(name, loss, train)`."""
    entries = [{"name": name, "loss": loss, "train": train} for name, loss, train in stages]
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, sse={**config["sse"], "recipe": {**config["sse"]["recipe"], "stages": entries}})
    edit_provenance(folder, stage=stage or (stages[-1][0] if stages else "distill"))
    return folder


MIXERS = ("distill", "kl", "mixers")
ALL = ("long", "ce", "all")


def refused(folder, teacher):
    with pytest.raises(VerificationError) as error:
        verify_folder(folder, teacher=teacher)
    return error.value


def test_another_model_is_not_the_teacher_of_trained_mixers(made, others, unrecorded):
    error = refused(trained(unrecorded, MIXERS), others / "weights")
    found = (
        r"teacher: \d\d tensors outside converted attention layers, which alone were trained, differ from .*weights: "
    )
    assert re.match(found + r"\S+, \S+, \S+ and \d+ more$", error.what)
    assert error.fix.startswith(f"give the model that it was converted from: {made / 'teacher'}; ")


@pytest.mark.parametrize("name", ["layers", "vocabulary"])
def test_a_model_of_other_shapes_is_not_the_teacher(others, unrecorded, name):
    error = refused(trained(unrecorded, ALL), others / name)
    assert re.match(r"teacher: \d+ of 47 tensors are missing or of another shape in ", error.what)


def test_no_tensor_of_the_teacher_and_no_record_of_stages(others, unrecorded):
    assert "teacher: 47 of 47 tensors differ from" in refused(trained(unrecorded), others / "weights").what


def test_training_of_everything_may_change_everything(others, unrecorded):
    found = details(verify_folder(trained(unrecorded, MIXERS, ALL, stage="export"), teacher=others / "weights"))
    assert found["teacher"].startswith("0 of 47 tensors identical")


def test_stages_that_are_still_to_come_do_not_count(others, unrecorded):
    assert (
        "which alone were trained"
        in refused(trained(unrecorded, MIXERS, ALL, stage="distill"), others / "weights").what
    )


def test_alignment_trains_converted_layers_alone(others, unrecorded):
    assert (
        "which alone were trained" in refused(trained(unrecorded, ("a", "layer_mse", "all")), others / "weights").what
    )


def test_a_stage_of_another_recipe_says_itself_what_it_trained(others, unrecorded):
    trained(unrecorded, MIXERS)
    write_sealed(unrecorded / "stage.json", record_of({"stage": {"loss": "ce", "train": "all"}}, {}))
    assert details(verify_folder(unrecorded, teacher=others / "weights"))["teacher"].startswith("0 of 47")


def test_trained_mixers_may_differ_and_dtypes_as_well(made, unrecorded):
    def change(tensors):
        tensors["model.layers.0.self_attn.q_proj.weight"].add_(1)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double()

    rewrite(unrecorded / ONLY_SHARD, change)
    found = details(verify_folder(trained(unrecorded, MIXERS), teacher=made / "teacher"))["teacher"]
    assert found == f"46 of 47 tensors identical to {made / 'teacher'}, 1 of them in another dtype"


def test_a_teacher_that_cannot_be_opened_is_the_teachers_fault(out, capsys):
    assert run_app(app, ["verify", str(out), "--teacher", str(out / "nope")]) == CheckpointError.exit_code
    told = capsys.readouterr().err
    assert "nope does not exist" in told
    assert "fix: correct --teacher" in told
    assert run_app(app, ["verify", str(out.parent), "--teacher", str(out / "nope")]) == CheckpointError.exit_code
    assert "fix: correct --teacher" in capsys.readouterr().err
    with pytest.raises(HubError) as error:
        verify_folder(out, teacher="nope")
    assert error.value.fix.startswith("correct --teacher, or ")


def test_every_file_is_as_recorded(made):
    count = len(read_manifest(made / "out"))
    assert details(verify_folder(made / "out"))["files"] == f"{count} are as manifest.json records them"


def test_a_folder_of_an_older_version(unrecorded):
    assert details(verify_folder(unrecorded))["files"].startswith("not recorded: there is no manifest.json")


def test_a_manifest_that_was_removed(out):
    (out / MANIFEST).unlink()
    with pytest.raises(VerificationError, match=r"files: manifest\.json is missing, though sse_convert\.json says"):
        verify_folder(out)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "sse_code/modeling_sse.py", FILE, INDEX, MANIFEST])
def test_a_changed_bit_is_named(out, name):
    flip(out / name, at=(out / name).stat().st_size // 2)
    with pytest.raises(VerificationError, match=rf"files: .*{re.escape(name)} is not"):
        verify_folder(out)


def test_a_changed_bit_of_a_new_tensor(out):
    """Nothing but the manifest knows what its value was."""
    flip(out / NEW_SHARD)
    with pytest.raises(VerificationError) as error:
        verify_folder(out)
    assert error.value.what == f"files: {NEW_SHARD} is not what was written (another SHA-256)"


def test_no_model_is_built_from_a_changed_config(out):
    """A changed digit may stand for a million layers."""
    edit_config(out, num_hidden_layers=10**7)
    with pytest.raises(VerificationError) as error:
        verify_folder(out)
    assert error.value.what.startswith("files: config.json has ")
    assert "\n" not in error.value.what


def test_all_changed_files_are_named_together(out):
    (out / "tokenizer.json").unlink()
    (out / "chat_template.jinja").write_text("")
    edit_config(out, bos_token_id=3)
    with pytest.raises(VerificationError) as error:
        verify_folder(out)
    assert error.value.what.startswith("files: chat_template.jinja has 0 bytes")
    assert "; config.json has" in error.value.what
    assert "; tokenizer.json is missing" in error.value.what


@pytest.mark.parametrize(
    "name", ["model.safetensors", "modeling_other.py", "sse_code/other.py", "added_tokens.json", "adapter_config.json"]
)
def test_a_file_that_would_be_loaded_must_be_recorded(out, name):
    (out / name).write_bytes((out / NEW_SHARD).read_bytes() if name == "model.safetensors" else b"{}")
    with pytest.raises(VerificationError, match=f"files: {name} is not in manifest.json, and would be loaded"):
        verify_folder(out)


def test_what_people_may_change(out):
    (out / "README.md").write_text("my model")
    (out / "notes.txt").write_text("my notes")
    assert details(verify_folder(out))["files"].endswith("; not recorded: notes.txt")


def test_deferred_digests_are_named(made, tmp_path):
    convert_checkpoint(Job.of(recipe(made / "teacher")), tmp_path / "out", defer_digests=True)
    found = details(verify_folder(tmp_path / "out"))["files"]
    assert found.endswith(f"; SHA-256 was deferred, so only their size is known: {ONLY_SHARD}")


def nan(tensors):
    tensors["model.layers.0.self_attn.sse_out_scale"][0] = float("nan")


def narrow(tensors):
    tensors["model.layers.0.self_attn.sse_out_scale"] = tensors["model.layers.0.self_attn.sse_out_scale"][1:].clone()


def drop(tensors):
    del tensors["model.layers.0.self_attn.sse_out_scale"]


def stray(tensors):
    tensors["model.layers.3.self_attn.sse_out_scale"] = torch.ones(32)


def integer(tensors):
    tensors["model.layers.0.self_attn.sse_out_scale"] = torch.ones(32, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nan, r"weights: .*1 tensor with NaN or Inf weights: model\.layers\.0\.self_attn\.sse_out_scale \(1 of 32\)"),
        (narrow, r"names and shapes: tensor model\.layers\.0\.self_attn\.sse_out_scale of .* has shape \[31\]"),
        (drop, r"names and shapes: .*lacks 1 tensor .*sse_out_scale"),
        (stray, r"names and shapes: no layer has 1 new tensor: model\.layers\.3\.self_attn\.sse_out_scale"),
        (integer, r"dtypes: tensor .* is stored as I32"),
    ],
)
def test_damaged_new_tensors(out, change, message):
    rewrite(out / NEW_SHARD, change)
    write_index(out)
    with pytest.raises(VerificationError, match=message):
        verify_folder(out)


def test_all_failures_are_reported_together(out):
    rewrite(out / NEW_SHARD, nan)
    (out / "sse_code" / "modeling_sse.py").unlink()
    with pytest.raises(VerificationError) as error:
        verify_folder(out)
    assert {line.split(":")[0] for line in error.value.what.splitlines()} == {
        "files",
        "weights",
        "code",
        "logits",
    }


def test_no_auto_map(out):
    edit_config(out, auto_map=None)
    with pytest.raises(VerificationError, match=r"code: config\.json has no auto_map"):
        verify_folder(out)


def test_plain_checkpoints_are_not_verified(made):
    with pytest.raises(CheckpointError, match="is a plain qwen3 checkpoint"):
        verify_folder(made / "teacher")


def test_exit_code(out, capsys):
    rewrite(out / NEW_SHARD, nan)
    assert run_app(app, ["verify", str(out)]) == VerificationError.exit_code
    assert "NaN or Inf" in capsys.readouterr().err
