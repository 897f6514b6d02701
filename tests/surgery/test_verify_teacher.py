"""Converted checkpoints whose vocabulary was changed, beside the model that they were converted from."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sse_convert.checkpoints.open import SINGLE
from sse_convert.checkpoints.provenance import FILE
from sse_convert.errors import VerificationError
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.surgery.verify_run import verify_folder
from tests.modeling.tiny import VOCAB
from tests.surgery.models import recipe, save_source
from tests.surgery.synthetic import edit_config

LARGER, SMALLER = VOCAB + 13, VOCAB - 13
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def resized(folder, size, model_type="qwen3", **options):
    """A teacher, and its conversion with another number of tokens as transformers saves it; the latter's folder."""
    save_source(folder / "teacher", model_type, **options)
    made = convert_checkpoint(Job.of(recipe(folder / "teacher")), folder / "made").out
    model = AutoModelForCausalLM.from_pretrained(made)
    model.resize_token_embeddings(size)
    model.save_pretrained(folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    return resized(tmp_path_factory.mktemp("larger"), LARGER)


@pytest.fixture
def out(larger, tmp_path):
    """A copy beside the teacher."""
    shutil.copytree(larger.with_name("teacher"), tmp_path / "teacher")
    return shutil.copytree(larger, tmp_path / "out")


def compared(folder):
    checks = verify_folder(folder, teacher=folder.with_name("teacher")).checks
    return next(check.detail for check in checks if check.name == "teacher")


def refused(folder):
    with pytest.raises(VerificationError) as error:
        compared(folder)
    return error.value.what


def rewrite(folder, change):
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def trained(folder, made, train):
    """Let a checkpoint look like the result of a stage, whose provenance is otherwise that of `made`."""
    provenance = json.loads((made / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**provenance, "stage": "distill", "manifest": False}))
    sse = json.loads((folder / "config.json").read_text())["sse"]
    stages = [{"name": "distill", "loss": "kl", "train": train}]
    edit_config(folder, sse={**sse, "recipe": {**sse["recipe"], "stages": stages}})


GREW = f"the vocabulary grew from {VOCAB} to {LARGER}"


@pytest.mark.parametrize(
    ("model_type", "options", "count"),
    [("qwen3", {}, 47), ("qwen3", {"tie_word_embeddings": True}, 46), ("gpt_neox", {}, 52)],
    ids=["untied", "tied", "gpt_neox"],
)
def test_rows_of_new_tokens_are_no_difference(tmp_path, model_type, options, count):
    out = resized(tmp_path, LARGER, model_type, **options)
    assert compared(out) == f"{count} of {count} tensors identical to {tmp_path / 'teacher'}; {GREW}"


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_a_row_that_both_have_is_compared(out, name):
    rewrite(out, lambda tensors: tensors[name][VOCAB - 1, -1].add_(1))
    assert refused(out) == f"teacher: 1 of 47 tensors differ from {out.with_name('teacher')}: {name}"


def test_what_was_trained_may_differ(larger, out):
    """Rows of tokens too, where more than converted layers was trained."""

    def change(tensors):
        tensors[EMBEDDING][0, 0] += 1
        tensors[HEAD] = tensors[HEAD].double()

    rewrite(out, change)
    trained(out, larger.with_name("made"), "mixers")
    assert f"1 tensors outside converted attention layers, which alone were trained, differ from {out.parent}" in (
        refused(out)
    )
    assert refused(out).endswith(f": {EMBEDDING}")
    trained(out, larger.with_name("made"), "all")
    beside = f"46 of 47 tensors identical to {out.with_name('teacher')}, 1 of them in another dtype"
    assert compared(out) == f"{beside}; {GREW}"


def test_a_smaller_vocabulary_is_refused(tmp_path):
    out = resized(tmp_path, SMALLER)
    told = f"teacher: 2 of 47 tensors are missing or of another shape in {tmp_path / 'teacher'}: "
    names, sizes = refused(out).removeprefix(told).split("; ")
    assert refused(out).startswith(told)
    assert {EMBEDDING, HEAD} == set(names.split(", "))
    assert sizes == f"it has {VOCAB} tokens, the checkpoint {SMALLER}"
