import json

import pytest

from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.checkpoints.provenance import FILE
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.inspect import inspect_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.surgery.plan import make_plan
from tests.surgery.models import recipe, save_source


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    save_source(folder / "teacher", "gemma3_text")
    convert_checkpoint(Job.of(recipe(folder / "teacher")), folder / "out")
    return folder


def test_a_converted_checkpoint_is_what_was_planned(made):
    report, plan = inspect_checkpoint(made / "out"), make_plan(Job.of(recipe(made / "teacher"), open_for_planning))
    assert report.converted
    assert report.model_type == "sse_gemma3_text"
    assert report.layers == plan.layer_names
    assert report.new_parameters == plan.added_parameters
    assert report.parameters == plan.parameters + plan.added_parameters
    assert report.constant_bytes == [row.constant_bytes for row in plan.layers]
    assert list(report.cache.values()) == [row.hybrid_bytes for row in plan.cache]
    assert (report.base_model, report.recipe_hash) == (str(made / "teacher"), plan.recipe_hash)
    assert report.provenance is not None
    assert report.provenance.stage == "convert"


def test_a_plain_checkpoint(made):
    report = inspect_checkpoint(made / "teacher")
    assert (report.converted, report.layers, report.new_parameters) == (False, ["full"] * 4, 0)
    assert "a plain checkpoint, not converted" in report.lines()
    assert list(report.cache.values()) == [
        row.teacher_bytes for row in make_plan(Job.of(recipe(made / "teacher"), open_for_planning)).cache
    ]


def test_on_the_command_line(made, capsys):
    assert run_app(app, ["inspect", str(made / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["mixers"].keys() == {"sse", "sliding", "gla"}
    assert run_app(app, ["inspect", str(made / "out")]) == 0
    assert "converted from" in capsys.readouterr().err


def test_damaged_provenance(made, tmp_path):
    convert_checkpoint(Job.of(recipe(made / "teacher")), tmp_path / "out")
    (tmp_path / "out" / FILE).write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match=r"sse_convert\.json cannot be read: unknown format"):
        inspect_checkpoint(tmp_path / "out")
