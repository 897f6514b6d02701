"""Files that GitHub and PyPI read: well formed, and true of this version."""

from pathlib import Path

import pytest
import yaml

import sse_convert

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def read(file: Path) -> dict:
    return yaml.load(file.read_text(), yaml.BaseLoader)  # the key `on` stays a string


def test_the_citation_names_this_version_and_licence() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == sse_convert.__version__
    assert citation["license"] in (ROOT / "pyproject.toml").read_text()
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


@pytest.mark.parametrize("file", [f for f in TEMPLATES if f.name != "config.yml"], ids=lambda f: f.stem)
def test_an_issue_form_has_what_github_wants(file: Path) -> None:
    form = read(file)
    assert form["name"]
    assert form["description"]
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields) > 0
    assert all(part["attributes"]["label"] for part in fields)


def test_a_tag_runs_the_tests_before_it_publishes() -> None:
    workflow = read(ROOT / ".github/workflows/release.yml")
    assert workflow["on"]["push"]["tags"] == ["v*"]
    jobs = workflow["jobs"]
    assert jobs["publish"]["needs"] == "build"
    steps = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert steps.index(".ci/run") < next(i for i, step in enumerate(steps) if "twine check" in step)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
