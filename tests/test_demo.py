"""The demo: its teacher is the model that was scored, its recipe plans, and a miniature of it runs from end to end."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import warm
from sse_convert.mixers import mixer_from_dict
from sse_convert.recipe import load_recipe
from sse_convert.recipe.checks import check_run
from sse_convert.recipe.recommended import MIXER, recommended_layers, recommended_mixer
from tests.training.conftest import make_llama, make_tokenizer

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "demo"
TEACHER = DEMO / "teacher"
SIZE_LIMIT = 6_000_000


@pytest.fixture(scope="module")
def scores() -> dict[str, Any]:
    return json.loads((DEMO / "scores.json").read_text())


def test_the_demo_on_a_real_model_would_run() -> None:
    """All but the download: its text is here, and `run` accepts it."""
    recipe = load_recipe(DEMO / "real.yaml")
    assert list(check_run(recipe)) == []
    assert all((ROOT / source.path).is_dir() for source in (*recipe.data.train, *recipe.data.valid))
    assert "demo/real.yaml" in (ROOT / "Makefile").read_text()


@pytest.fixture(scope="module")
def documents(sampled: Path) -> list[list[int]]:
    """16 documents of 256 tokens sampled from the teacher."""
    from transformers import AutoTokenizer

    from sse_convert.checkpoints.open import open_checkpoint
    from sse_convert.data.rows import RowReader
    from sse_convert.data.teacher_samples import SamplingTeacher
    from sse_convert.recipe.schema import Source

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSE_CONVERT_CACHE", str(sampled))
        reader = RowReader(
            [Source(kind="teacher", rows=16, length=256)],
            AutoTokenizer.from_pretrained(TEACHER),
            256,
            0,
            role="valid",
            teacher=SamplingTeacher(str(TEACHER), None, lambda: open_checkpoint(TEACHER)),
        )
        return [row.input_ids.tolist() for row in reader.rows()]


def test_the_demo_folder_is_small() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= SIZE_LIMIT


def test_the_teacher_is_the_model_its_card_describes(scores: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TEACHER)
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.num_parameters() == scores["parameters"]
    assert model.config.max_position_embeddings >= 2048
    assert len(tokenizer) == model.config.vocab_size == scores["data"]["vocab_size"]
    assert tokenizer.decode(tokenizer("Ünïcode, 12 lines.\n")["input_ids"]) == "Ünïcode, 12 lines.\n"
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == 0


def test_the_scores_are_those_of_a_model_that_reads_and_retrieves(scores: dict[str, Any]) -> None:
    assert scores["books"]["held_out"]["loss"] < scores["books_ngrams"]["loss"] - 0.3
    for entry in scores["books"]["needles"]:
        assert entry["samples"] >= 200
        assert entry["accuracy"] >= 0.9, entry
        if entry["kind"] == "number" and entry["keys"] == 1:
            assert entry["accuracy"] >= 0.98, entry


@pytest.mark.slow
def test_measured_scores_match_the_file(scores: dict[str, Any], documents: list[list[int]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sse_convert.data.needle import load_words
    from sse_convert.evaluation.intervals import wilson
    from sse_convert.evaluation.perplexity import held_out_loss, make_windows
    from sse_convert.evaluation.retrieval import needle_samples, needle_score
    from sse_convert.recipe.schema import NeedleEval

    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    loss = held_out_loss(model, make_windows(torch.tensor(documents), tokenizer))
    stored = scores["own_text"]["held_out"]
    assert loss.loss_se is not None
    assert abs(loss.loss - stored["loss"]) < 4 * math.hypot(loss.loss_se, stored["loss_se"])

    haystack = [token for row in documents for token in row]
    settings = NeedleEval(lengths=[512], samples=12, kinds=["number"], keys=[1])
    found = needle_score(model, needle_samples(settings, haystack, tokenizer, load_words())[0]).total
    low, high = wilson(found.correct, found.samples)
    stored = next(e for e in scores["own_text"]["needles"] if (e["keys"], e["length"]) == (1, 512))
    assert low <= stored["high"]
    assert stored["low"] <= high


def test_the_recipe_plans() -> None:
    from sse_convert import api

    plan = api.plan(DEMO / "recipe.yaml", overrides=[f"model={TEACHER}"])
    assert sorted(row.mixer for row in plan.layers) == ["full"] * 2 + ["sse+sliding"] * 4
    assert plan.choice is not None, "`run` chooses which two"


def test_its_choice_and_mixer_are_those_of_new_recipes_that_keep_whole_layers() -> None:
    recipe = yaml.safe_load((DEMO / "recipe.yaml").read_text())
    assert recipe["mixers"] == {MIXER: recommended_mixer()}
    assert recipe["layers"] == recommended_layers([True] * 6)


def test_the_report_has_what_the_demo_promises() -> None:
    """Needles within three points of the teacher's up to 2,048 tokens, loss within 0.01; training helped."""
    report = json.loads((DEMO / "report.json").read_text())
    teacher, trained = (report["evaluation"][name] for name in ("teacher", "student"))
    needles = list(zip(teacher["needles"], trained["needles"], strict=True))
    assert max(theirs["length"] for theirs, _ in needles) == 2048
    for theirs, ours in needles:
        assert theirs["accuracy"] >= 0.9
        assert ours["accuracy"] >= theirs["accuracy"] - 0.03, ours["length"]
    assert [gap["length"] for gap in report["evaluation"]["loss_gaps"] if gap["gap"] <= 0.01] == [512]
    assert trained["held_out"][0]["loss"] < report["converted"]["held_out"][0]["loss"]


def test_the_report_is_one_of_the_recipe() -> None:
    recipe = load_recipe(DEMO / "recipe.yaml", [f"model={TEACHER}"])
    report = json.loads((DEMO / "report.json").read_text())
    plan, steps = report["plan"], [step["name"] for step in report["run"]["steps"]]
    assert {name: mixer_from_dict(mixer) for name, mixer in plan["mixers"].items()} == recipe.mixers
    assert [(s["name"], s["tokens"], s["seq_len"]) for s in plan["stages"]] == [
        (stage.name, stage.tokens, stage.seq_len) for stage in recipe.stages
    ]
    assert steps == ["select", "convert", "calibrate", "distill", "eval", "export"]


def run_demo(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run the script in a folder: exit code, stdout and stderr."""
    out, error = folder / "out.txt", folder / "err.txt"
    environment = {**os.environ, "SSE_CONVERT_CACHE": str(folder / "cache")}
    code = warm.run([str(DEMO / "run.py"), *arguments], folder, environment, out, error, timeout=600)
    return code, out.read_text(), error.read_text()


def test_a_miniature_of_the_demo_runs(tmp_path: Path) -> None:
    """Its steps and files, with a teacher that knows nothing; what the real one learns and finds is in the tutorial."""
    make_llama(tie=True).save_pretrained(tmp_path / "teacher")
    make_tokenizer().save_pretrained(tmp_path / "teacher")
    changes = [
        f"model={tmp_path / 'teacher'}",
        "layers.select.chosen=[1]",
        "stages.0.tokens=2K",
        "calibrate.rows=2",
        *(f"data.{part}.0.{key}" for part in ("train", "valid") for key in ("rows=16", "length=64")),
        "eval={lengths: [128], tokens: 256, needle: {lengths: [256], samples: 5, keys: [1]}, throughput: [64]}",
    ]
    code, out, error = run_demo(tmp_path, "--out", "demo", *(part for change in changes for part in ("--set", change)))
    assert code == 0, error
    assert "after training" in out
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    models = (report["evaluation"]["teacher"], report["converted"], report["evaluation"]["student"])
    assert len({model["held_out"][0]["loss"] for model in models}) == len({model["name"] for model in models}) == 3
    assert all(model["needles"][0]["samples"] == 5 for model in models)
    assert [step["name"] for step in report["run"]["steps"]] == ["convert", "calibrate", "distill", "eval", "export"]
    assert (tmp_path / "demo" / "model" / "model.safetensors.index.json").is_file() or list(
        (tmp_path / "demo" / "model").glob("*.safetensors")
    )


def test_a_mistake_gives_a_message_and_an_exit_code(tmp_path: Path) -> None:
    code, _, error = run_demo(tmp_path, "--out", "demo", "--set", "layers.keep=[9]")
    assert code == 3
    assert "Traceback" not in error
    assert "9" in error
