import dataclasses as dc
import json
import math
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index

from sse_convert.export.card import model_card
from sse_convert.recipe.schema import LearningRates, Source, Stage
from tests.evaluation.test_report import make_report


@pytest.fixture
def config(student_folder):
    return json.loads((student_folder / "config.json").read_text())


def test_metadata_is_read_back(recipe, config):
    data = dc.replace(recipe.data, train=[Source(path="someone/books"), Source(path="./local.txt")])
    settings = dc.replace(recipe, model="someone/teacher-1b", data=data).to_dict()
    card = ModelCard(model_card("tiny", config, settings, None, 12345))
    assert card.data.base_model == "someone/teacher-1b"
    assert card.data.base_model_relation == "finetune"
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.license == "mit"
    assert card.data.datasets == ["someone/books"]
    assert {"sse-convert", "custom_code", "linear-attention"} <= set(card.data.tags)
    assert card.text.strip().startswith("# tiny")
    assert "[someone/teacher-1b](https://huggingface.co/someone/teacher-1b) with 1 of its 2" in card.text


def test_a_model_that_chats_is_asked_in_its_template(recipe, config):
    cards = [model_card("tiny", config, recipe.to_dict(), None, 1, chats=chats) for chats in (False, True)]
    assert ["Once upon a time" in card for card in cards] == [True, False]
    for card in cards:
        compile(card.partition("```python")[2].partition("```")[0], "card", "exec")
    assert 'chat = [{"role": "user", "content": "What is a rainbow?"}]' in cards[1]


def test_measured_figures_are_the_model_index(recipe, config):
    report = make_report()
    card = ModelCard(model_card("tiny", config, recipe.to_dict(), report, 12345))
    index = eval_results_to_model_index(card.data.model_name, card.data.eval_results)
    assert index[0]["name"] == "tiny"
    text = Path(recipe.data.valid[0].path).name
    found = {(r.dataset_name, r.metric_type, r.metric_value) for r in card.data.eval_results}
    loss = report.student.held_out[0]
    assert (f"{text}, windows of 129 tokens", "loss", loss.loss) in found
    assert ("needles: number, 1 in 512 tokens", "accuracy", 0.75) in found
    assert all(isinstance(value, float) and math.isfinite(value) for *_, value in found)
    assert {r.task_type for r in card.data.eval_results} == {"text-generation"}


def test_what_was_not_measured_is_no_result(recipe, config):
    assert not ModelCard(model_card("tiny", config, recipe.to_dict(), None, 12345)).data.eval_results
    broken = make_report(student_sums=(math.nan, 400.0))
    card = ModelCard(model_card("tiny", config, recipe.to_dict(), broken, 12345))
    assert "loss" not in {r.metric_type for r in card.data.eval_results}


@pytest.mark.parametrize(
    ("own", "license_", "link"), [(None, "other", "https://example.org/terms"), ("mit", "mit", None)]
)
def test_languages_are_the_teachers_and_the_licence_the_recipes_or_its(recipe, config, tmp_path, own, license_, link):
    card = tmp_path / "README.md"
    card.write_text(
        "---\nlanguage: [en, fr]\nlicense: other\nlicense_link: https://example.org/terms\n---\n# Teacher\n"
    )
    settings = dc.replace(recipe, export=dc.replace(recipe.export, license=own)).to_dict()
    data = ModelCard(model_card("tiny", config, settings, None, 12345, teacher_card=card)).data
    assert (data.language, data.license, data.license_link) == (["en", "fr"], license_, link)


def test_a_local_teacher_is_named_without_its_path(recipe, config):
    card = ModelCard(model_card("tiny", config, recipe.to_dict(), None, 12345))
    assert card.data.base_model is None
    assert str(recipe.model) not in card.text
    assert f"`{Path(recipe.model).name}`" in card.text


def test_body_says_what_a_reader_needs(recipe, config):
    stage = Stage(name="distill", loss="kl", tokens=2_000_000, seq_len=512, lr=LearningRates(mixers=1e-3, rest=1e-4))
    settings = dc.replace(recipe, stages=[stage]).to_dict()
    text = model_card("tiny", config, settings, make_report(), 12345)
    assert "trust_remote_code=True" in text
    assert "| 0 | full | softmax attention, unchanged |" in text
    assert "| 1 | sse | sse num_partitions=2, top_k=1, qk_rank=4 |" in text
    assert "| 129 | 3.031 | 3.141 | +0.110 | 1.500 | 1.500 |" in text
    assert "| 512 | number | 1 | 20 | 100.0% (84-100) | 75.0% (53-89) | 75.0% |" in text
    assert "| distill | kl | 2M | 512 | 0.001 (mixers), 0.0001 (rest) | all |" in text
    assert "arXiv:2507.16577" in text
    verdict = make_report().verdict()
    assert f"Verdict: {verdict.text}.\n\n{verdict.notes[0]}" in text
    assert "One softmax layer is left, with keys and values of every token." in text


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": LearningRates(mixers=1e-3, new=4e-3, rest=1e-4)}, "0.001 (mixers), 0.004 (new), 0.0001 (rest)"),
        ({"lr": LearningRates(mixers=1e-3, new=4e-3), "optimizer": "muon"}, "0.001 (mixers), 0.004 (new), Muon"),
        ({"lr": 2e-3}, "0.002"),
        ({"lr": 2e-3, "optimizer": "muon"}, "0.002, Muon"),
    ],
)
def test_learning_rates_are_told_by_group(recipe, config, settings, told):
    stage = Stage(name="s", loss="kl", tokens=1_000_000, seq_len=512, **settings)
    text = model_card("tiny", config, dc.replace(recipe, stages=[stage]).to_dict(), None, 12345)
    assert f"| s | kl | 1M | 512 | {told} | all |" in text


def test_a_window_beside_sse_is_told_apart_from_training_settings(recipe, config):
    mixer = {"kind": "sse+sliding", "num_partitions": 2, "window": 32, "sinks": 1}
    beside = {**config, "sse": {**config["sse"], "layers": ["x", "x"], "mixers": {"x": mixer}}}
    text = model_card("tiny", beside, recipe.to_dict(), None, 12345)
    told = "SSE beside softmax attention with window 32 and 1 sinks: num_partitions=2, top_k=1"
    assert f"| 0-1 | x | {told} |" in text


def test_figures_that_are_not_numbers_are_dashes(recipe, config):
    figures = make_report(student_sums=(math.nan, 400.0))
    text = model_card("tiny", config, recipe.to_dict(), figures, 12345)
    assert "| 129 | 3.031 | - | - | 1.500 | 1.500 |" in text


def test_an_unmeasured_and_untrained_model_says_so(recipe, config):
    text = model_card("tiny", config, recipe.to_dict(), None, 12345)
    assert "Not measured." in text
    assert "None: converted only." in text


def test_the_limits_name_the_parallelism_that_is_refused(recipe, config):
    text = model_card("tiny", config, recipe.to_dict(), None, 12345)
    limits = " ".join(text.partition("## Limits")[2].split())
    assert "Tensor, context and sequence parallelism of transformers and Accelerate are refused." in limits
    assert "long rows are shared by GPUs with `context_parallel` of sse-convert" in limits
