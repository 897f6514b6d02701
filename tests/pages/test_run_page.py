"""`report` from the command line: every section of a finished run, and what is said of those without data."""

import dataclasses as dc
import json
import re
import shutil

import pytest

from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.pages.blocks import Missing, Paragraph
from sse_convert.pages.collect import collect
from sse_convert.pages.sections.routers import routers
from sse_convert.pages.sections.summary import summary

TITLES = ["Summary", "Quality", "Needles by depth and length", "Memory and speed", "Layers", "Training", "Routers"]
TITLES += ["Samples", "Recipe", "Provenance"]


@pytest.fixture
def does(capsys):
    """Run a command; exit code and JSON."""

    def run(*arguments):
        capsys.readouterr()
        code = run_app(app, [*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        return code, json.loads(out)

    return run


def test_a_finished_run(made, tmp_path, does):
    code, answer = does("report", made / "out", "-o", tmp_path / "page.html")
    assert code == 0
    result = answer["result"]
    text = (tmp_path / "page.html").read_text()
    assert result["bytes"] == (tmp_path / "page.html").stat().st_size
    assert result["sections"] == TITLES
    assert list(result["missing"]) == ["Samples"]
    assert "--prompt" in result["missing"]["Samples"]
    for anchor in ("quality", "needles", "resources", "layers", "training", "routers", "provenance"):
        assert f'<section id="{anchor}"' in text
    figures = re.findall(r'<figure class="\w+" id="figure-([^"]+)"', text)
    assert len(figures) == len(set(figures)) == text.count("<svg ")
    wanted = {"loss-by-context", "needles-number-1", "loss-03-distill", "router-entropy", "routing-at-the-end"}
    assert wanted <= set(figures)
    evaluation = json.loads((made / "out" / "evaluation.json").read_text())
    assert f"{evaluation['student']['held_out'][0]['loss']:.3f} ±" in text
    assert collect(made / "out").model.recipe_hash in text
    assert "01-calibrate/evaluation.json" in text  # how to measure the untrained model


def test_the_page_of_an_unfinished_run_stands_beside_it(place, does):
    shutil.rmtree(place / "out")
    for name in ("03-distill", "04-eval", "05-export"):
        shutil.rmtree(place / "out.stages" / name)
    (place / "out.stages" / "recipe.yaml").unlink()  # the export step writes it
    work = place / "out.stages" / "03-distill.work"
    line = (place / "out.stages" / "02-align" / "metrics.jsonl").read_text().splitlines()[0]
    (work / "metrics.jsonl").write_text(line + "\n" + line[:20])
    code, answer = does("report", place / "out.stages")
    assert code == 0
    text = (place / "out.report.html").read_text()
    assert "Not finished: distill. Continue with: sse-convert run RECIPE" in text
    assert set(answer["result"]["missing"]) >= {"Quality", "Needles by depth and length", "Samples"}
    assert "distill (unfinished)" in text


def test_a_checkpoint_that_was_only_converted(place, does):
    shutil.move(place / "out.stages" / "00-convert", place / "plain")
    code, answer = does("report", place / "plain")
    assert code == 0
    missing = answer["result"]["missing"]
    assert {"Quality", "Training", "Routers", "Samples"} <= set(missing)
    assert "Recipe" not in missing


@pytest.mark.parametrize(
    ("layers", "routes"), [(["sse", "sliding", "full"], True), (["full", "sliding", "full"], False)]
)
def test_a_page_says_why_there_are_no_routers(made, layers, routes):
    run = dc.replace(collect(made / "out"), steps=())
    (block,) = routers(dc.replace(run, model=dc.replace(run.model, layers=layers))).blocks
    if routes:
        assert isinstance(block, Missing)
        assert block.command.startswith("sse-convert run ")
    else:
        assert isinstance(block, Paragraph)
        assert "No layer of this model routes." in block.text


def test_prompts_fill_a_section_and_stay(place, does):
    prompt = "the keeper <b>of</b>"
    asked = ("--prompt", prompt, "--max-new-tokens", 4)
    code, answer = does("report", place / "out", *asked)
    assert code == 0
    assert answer["result"]["missing"] == {}
    samples = json.loads((place / "out.stages" / "samples.json").read_text())
    assert [model["label"] for model in samples["models"]] == ["teacher", "untrained", "student"]
    assert len(samples["samples"][0]["texts"]) == 3
    assert "the keeper &lt;b&gt;of&lt;/b&gt;" in (place / "out.report.html").read_text()
    assert does("report", place / "out")[1]["result"]["missing"] == {}


def test_the_verdict_names_the_untrained_model(place, edit):
    stored = place / "out.stages" / "04-eval" / "evaluation.json"
    shutil.copyfile(stored, place / "out.stages" / "01-calibrate" / "evaluation.json")

    def worse(data):
        data["loss_gaps"][0] |= {"gap": 8.1, "gap_se": 0.01}

    edit(stored, worse)
    texts = [block.text for block in summary(collect(place / "out")).blocks if isinstance(block, Paragraph)]
    (verdict,) = [text for text in texts if text.startswith("Verdict: ")]
    assert verdict.startswith("Verdict: destroyed: loss 8.100 ± 0.020 nats above the teacher's at 64 tokens")
    assert verdict.endswith("; not offered for push.")


def test_other_models_beside(place, edit, does):
    shutil.copy(place / "out" / "evaluation.json", place / "windows.json")
    edit(place / "windows.json", lambda data: data["conditions"].update(text="other.txt"))
    assert does("report", place / "out", "--beside", place / "windows.json")[0] == 0
    text = (place / "out.report.html").read_text()
    assert '<th scope="col">windows.json</th>' in text
    assert "[b] text other.txt" in text


def test_mistakes(made, place, does, tmp_path):
    for arguments, code, what in (
        ((tmp_path / "none",), 2, "does not exist"),
        ((made / "teacher",), 2, "is a plain llama checkpoint"),
        ((made / "out", "--beside", made / "teacher"), 2, "was not evaluated"),
        ((made / "out", "--beside", made / "text.txt"), 4, "cannot be read"),
        ((made / "out", "-o", made / "text.txt" / "page.html"), 8, "cannot be written"),
        ((place / "out", "--prompt", ""), 2, "the prompt is empty"),
    ):
        found, answer = does("report", *arguments)
        assert found == code, answer
        assert what in answer["error"]["what"]
        assert answer["error"]["expected"] or answer["error"]["fix"]
    assert not list(tmp_path.glob("*.html"))


def test_a_card_shows_the_figures(made):
    folder = made / "out"
    card = (folder / "README.md").read_text()
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", card)
    wanted = {"figures/loss-by-context.png", "figures/loss-03-distill.png", "figures/needles-number-1.png"}
    assert wanted <= set(pictures)
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
