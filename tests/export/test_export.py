import dataclasses as dc
import errno
import json
import shutil

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

from sse_convert.checkpoints.provenance import Provenance
from sse_convert.errors import CheckpointError, OutputError, RecipeError
from sse_convert.export import export as exporting
from sse_convert.export import shards
from sse_convert.export.export import export_checkpoint
from sse_convert.export.published import published
from sse_convert.export.push import check_folder
from sse_convert.modeling.auto import load_pretrained
from sse_convert.modeling.remote_code import remote_code
from sse_convert.recipe import load_recipe, recipe_from_dict
from sse_convert.recipe.schema import Layers, LMEval, Needles, Source, Stage
from sse_convert.surgery.job import Job
from sse_convert.surgery.verify_run import verify_folder
from tests.evaluation.test_report import make_report
from tests.surgery.synthetic import edit_config

IDS = torch.randint(2, 300, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(folder, **settings):
    return load_pretrained(folder, **settings)(IDS, use_cache=False).logits


def stored(folder):
    types = {}
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            types |= {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    return types


@pytest.fixture
def trained(student_folder, tmp_path):
    """A copy of the converted checkpoint that a test may change."""
    return shutil.copytree(student_folder, tmp_path / "trained")


def test_round_trip_is_equal_to_the_bit(recipe, student_folder, tmp_path):
    report = export_checkpoint(Job.of(recipe), student_folder, tmp_path / "final", shard_bytes=20_000)
    out = report.out
    assert torch.equal(logits(out), logits(student_folder))
    assert len(report.shards) > 2
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(report.shards) == {p.name for p in out.glob("*.safetensors")}
    sizes = {name: (out / name).stat().st_size for name in report.shards}
    assert sizes == report.shards
    assert all(size < 23_000 or count(out / name) == 1 for name, size in sizes.items())
    names = {
        "README.md",
        "config.json",
        "recipe.yaml",
        "sse_convert.json",
        "tokenizer.json",
        "sse_code/modeling_sse.py",
    }
    assert names <= set(report.files)
    assert load_recipe(out / "recipe.yaml") == recipe_from_dict(published(recipe.to_dict()), "published")
    assert report.lines()[0].startswith(f"wrote {out}: ")


def count(shard):
    with safe_open(shard, "pt") as file:
        return len(list(file.keys()))


@pytest.mark.parametrize(
    ("wrote", "told"), [("convert", 0), ("calibrate", 0), ("distill", 1), ("long", 2), ("renamed", 0)]
)
def test_a_card_has_the_stages_that_took_place(recipe, trained, tmp_path, wrote, told):
    stages = [Stage(name=name, loss="kl", tokens=20480, seq_len=512, lr=1e-3) for name in ("distill", "long")]
    origin = {"recipe_hash": None, "teacher": recipe.model, "teacher_folder": "", "teacher_revision": None}
    Provenance(stage=wrote, shards={}, **origin).write(trained)
    out = export_checkpoint(Job.of(dc.replace(recipe, stages=stages)), trained, tmp_path / "final").out
    card = (out / "README.md").read_text()
    assert [f"| {stage.name} | kl |" in card for stage in stages] == [told > 0, told > 1]
    assert ("None: converted only." in card) == (told == 0)
    again = export_checkpoint(Job.of(dc.replace(recipe, stages=stages)), out, tmp_path / "again").out
    assert (again / "README.md").read_text() == card.replace("final", "again")


def test_other_types(recipe, student_folder, tmp_path):
    out = export_checkpoint(Job.of(recipe), student_folder, tmp_path / "bf16", dtype="bfloat16").out
    assert set(stored(out).values()) == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(logits(out), logits(student_folder, dtype=torch.bfloat16))
    with pytest.raises(RecipeError, match="dtype is 'int3'"):
        export_checkpoint(Job.of(recipe), student_folder, tmp_path / "no", dtype="int3")


def test_keep_means_the_teachers_types(recipe, teacher_folder, trained, tmp_path):
    teacher = shutil.copytree(teacher_folder, tmp_path / "teacher")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(teacher / "model.safetensors").items()}
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    out = export_checkpoint(Job.of(dc.replace(recipe, model=str(teacher))), trained, tmp_path / "final").out
    types = stored(out)
    assert types.pop("model.norm.weight") == torch.float32
    assert set(types.values()) == {torch.bfloat16}
    assert any("sse_router" in name for name in types)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_generation_settings_tokenizer_and_template_survive(recipe, trained, tmp_path):
    GenerationConfig(eos_token_id=[0, 5], temperature=0.6, do_sample=True).save_pretrained(trained)
    (trained / "chat_template.jinja").write_text("{{ messages }}")
    (trained / "LICENSE").write_text("Do good.")
    (trained / "optimizer.pt").write_bytes(b"no")
    out = export_checkpoint(Job.of(recipe), trained, tmp_path / "final").out
    assert GenerationConfig.from_pretrained(out).eos_token_id == [0, 5]
    assert load_pretrained(out).generation_config.temperature == 0.6
    assert AutoTokenizer.from_pretrained(out).chat_template == "{{ messages }}"
    assert (out / "LICENSE").read_text() == "Do good."
    assert not (out / "optimizer.pt").exists()
    assert set(check_folder(out)) == {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}


def test_code_of_an_older_version_is_named_no_longer(recipe, trained, tmp_path):
    config = json.loads((trained / "config.json").read_text())
    old = {auto: entry.removeprefix("sse_code/") for auto, entry in config["auto_map"].items()}
    assert old != config["auto_map"]
    (trained / "config.json").write_text(json.dumps({**config, "auto_map": old}))
    out = export_checkpoint(Job.of(recipe), trained, tmp_path / "final").out
    assert json.loads((out / "config.json").read_text())["auto_map"] == config["auto_map"]


def test_exporting_an_export_renews_its_code_and_keeps_the_rest(recipe, teacher_folder, trained, tmp_path, monkeypatch):
    (trained / "evaluation.json").write_text(json.dumps(make_report().to_dict()))
    today, new = remote_code(), tmp_path / "new"
    older = {"modeling_backbone.py": "raise ImportError('written for an older transformers')"}
    code = {name.rpartition("/")[2]: text for name, text in today.items() if name.endswith(".py")}
    with monkeypatch.context() as then:
        then.setattr("sse_convert.modeling.remote_code._from_package", lambda: code | older)
        old = export_checkpoint(Job.of(recipe), trained, tmp_path / "old").out
    assert "not that of this version" in "\n".join(verify_folder(old, teacher=None).lines())
    stored = load_recipe(old / "recipe.yaml", [f"model={teacher_folder}"])
    assert export_checkpoint(Job.of(stored), old, new).evaluated
    assert "not that of this version" not in "\n".join(verify_folder(new, teacher=None).lines())
    assert {name: (new / name).read_text() for name in today} == today
    for name in ("model.safetensors", "evaluation.json"):
        assert (new / name).read_bytes() == (old / name).read_bytes()


def test_nothing_tells_where_this_machine_keeps_its_files(recipe, teacher_folder, trained, tmp_path, monkeypatch):
    """Absolute paths wherever one can stand, with the home folder's name in each."""
    home = tmp_path / "home of ada"
    monkeypatch.setenv("HOME", str(home))
    shutil.copytree(teacher_folder, home / "teacher")
    here = shutil.copytree(trained, home / "trained")
    settings = json.loads((here / "tokenizer_config.json").read_text())
    (here / "tokenizer_config.json").write_text(json.dumps({**settings, "name_or_path": str(home / "teacher")}))
    figures = make_report().to_dict()
    figures["teacher"]["name"], figures["student"]["name"] = str(home / "teacher"), str(here)
    figures["conditions"]["text"] = f"{home / 'valid text.txt'}, {home / 'more.txt'}"
    data = {"train": [Source(path=str(home / "train text.txt"))], "valid": [Source(path=str(home / "valid text.txt"))]}
    data = dc.replace(recipe.data, **data, needles=Needles(share=0.1, words=str(home / "words.json")))
    measured = dc.replace(recipe.eval, lm_eval=LMEval(tasks=["own"], include_path=str(home / "tasks")))
    stage = Stage(name="s", loss="kl", tokens=65536, seq_len=512, lr=1e-3)
    there = dc.replace(
        recipe,
        model=str(home / "teacher"),
        data=data,
        stages=[stage],
        eval=measured,
        export=dc.replace(recipe.export, dir=str(home / "final")),
    )
    (home / "figures.json").write_text(json.dumps(figures))
    out = export_checkpoint(Job.of(there), here, home / "final", evaluation=home / "figures.json").out
    for path in out.rglob("*"):
        assert path.is_dir() or b"home of ada" not in path.read_bytes(), path
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), path
    assert json.loads((out / "sse_convert.json").read_text())["teacher"] == "./teacher"
    assert json.loads((out / "config.json").read_text())["sse"]["recipe"]["model"] == "./teacher"
    told = json.loads((out / "evaluation.json").read_text())
    assert (told["conditions"]["text"], told["student"]["name"]) == ("./valid text.txt, ./more.txt", "./trained")
    again = load_recipe(out / "recipe.yaml")
    assert (again.model, again.data.needles.words, again.export.dir) == ("./teacher", "./words.json", "./final")
    assert again.eval.lm_eval.include_path == "./tasks"
    assert all(check.passed for check in verify_folder(out).checks)


def test_a_folder_that_tells_paths_is_not_published(recipe, student_folder, tmp_path):
    out = export_checkpoint(Job.of(recipe), student_folder, tmp_path / "final").out
    (out / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    with pytest.raises(CheckpointError, match=r"recipe\.yaml tells where a machine keeps its files: /"):
        check_folder(out)
    (out / "recipe.yaml").write_bytes(b"\xff: [")
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        check_folder(out)
    (out / "recipe.yaml").unlink()
    (out / "sse_convert.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"sse_convert\.json"):
        check_folder(out)


def test_an_exported_folder_verifies(recipe, student_folder, teacher_folder, tmp_path):
    out = export_checkpoint(Job.of(recipe), student_folder, tmp_path / "final").out
    assert "not compared" in "\n".join(verify_folder(out, teacher=None).lines())
    assert "identical to" in "\n".join(verify_folder(out, teacher=teacher_folder).lines())


def test_figures_travel_with_the_model(recipe, trained, tmp_path):
    assert not export_checkpoint(Job.of(recipe), trained, tmp_path / "none").evaluated
    figures = make_report().to_dict()
    (trained / "evaluation.json").write_text(json.dumps(figures))
    report = export_checkpoint(Job.of(recipe), trained, tmp_path / "found")
    assert report.evaluated
    assert json.loads((report.out / "evaluation.json").read_text()) == figures
    (trained / "evaluation.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"evaluation\.json cannot be read"):
        export_checkpoint(Job.of(recipe), trained, tmp_path / "bad")


def test_weights_that_are_not_finite_are_refused(recipe, trained, tmp_path):
    weights = load_file(trained / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 1e6)
    save_file(weights, trained / "model.safetensors", metadata={"format": "pt"})
    export_checkpoint(Job.of(recipe), trained, tmp_path / "fine")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* is NaN or infinite as F16"):
        export_checkpoint(Job.of(recipe), trained, tmp_path / "small", dtype="float16")
    assert {p.name for p in tmp_path.iterdir()} >= {"fine"}
    assert not [p for p in tmp_path.iterdir() if "small" in p.name]


def test_what_cannot_be_exported(recipe, teacher_folder, trained, tmp_path):
    with pytest.raises(CheckpointError, match="is a plain llama checkpoint"):
        export_checkpoint(Job.of(recipe), teacher_folder, tmp_path / "a")
    with pytest.raises(RecipeError, match="layer 0: sse in the recipe, full in the checkpoint"):
        export_checkpoint(Job.of(dc.replace(recipe, layers=Layers(pattern=["sse"]))), trained, tmp_path / "a")
    (trained / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds PEFT adapters"):
        export_checkpoint(Job.of(recipe), trained, tmp_path / "a")
    (trained / "adapter_config.json").unlink()
    (trained / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="truncated"):
        export_checkpoint(Job.of(recipe), trained, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_output_troubles(recipe, trained, tmp_path, monkeypatch):
    with pytest.raises(OutputError, match="exists"):
        export_checkpoint(Job.of(recipe), trained, trained)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards, "write_shard", full)
    with pytest.raises(OutputError, match="disk is full"):
        export_checkpoint(Job.of(recipe), trained, tmp_path / "full")
    assert not [p for p in tmp_path.iterdir() if "full" in p.name]


def test_interrupt_leaves_nothing(recipe, trained, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "write_remote_code", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(Job.of(recipe), trained, tmp_path / "half")
    assert not [p for p in tmp_path.iterdir() if "half" in p.name]


def test_quantised_weights_are_refused(recipe, trained, tmp_path):
    edit_config(trained, quantization_config={"quant_method": "torchao"})
    with pytest.raises(CheckpointError, match=r"is quantised \(torchao\)"):
        export_checkpoint(Job.of(recipe), trained, tmp_path / "final")
