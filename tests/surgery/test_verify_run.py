"""All steps of a run: what is read once for all of them."""

import collections
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sse_convert.checkpoints.manifest import write_manifest
from sse_convert.checkpoints.provenance import FILE
from sse_convert.surgery import originals
from sse_convert.surgery.convert import ONLY_SHARD, convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.surgery.verify_run import verify_folder
from tests.surgery.models import recipe, save_source

STEPS = ("1-distill", "2-long")
WIDER = "model.norm.weight"


@pytest.fixture
def run(tmp_path):
    """A teacher, and a run of two trained steps that store one of its tensors in another dtype."""
    save_source(tmp_path / "teacher", shard_size="5GB")
    first = convert_checkpoint(Job.of(recipe(tmp_path / "teacher")), tmp_path / "run" / STEPS[0]).out
    tensors = load_file(first / ONLY_SHARD)
    save_file({**tensors, WIDER: tensors[WIDER].to(torch.float64)}, first / ONLY_SHARD, {"format": "pt"})
    provenance = json.loads((first / FILE).read_text())
    (first / FILE).write_text(json.dumps({**provenance, "stage": "distill"}))
    write_manifest(first)
    shutil.copytree(first, first.with_name(STEPS[1]))
    return tmp_path


@pytest.fixture
def reads(run, monkeypatch):
    """How often the teacher is opened, and tensors of it digested."""
    counts = collections.Counter()
    opened, digest = originals.open_checkpoint, originals.tensor_digest

    def counted_open(source):
        counts["opened"] += 1
        return opened(source)

    def counted_digest(files, *rest):
        counts["digested"] += files.folder == run / "teacher"
        return digest(files, *rest)

    monkeypatch.setattr(originals, "open_checkpoint", counted_open)
    monkeypatch.setattr(originals, "tensor_digest", counted_digest)
    return counts


@pytest.mark.parametrize("named", [True, False])
def test_the_teacher_is_opened_and_digested_once(run, reads, named):
    checks = verify_folder(run / "run", teacher=run / "teacher" if named else None).checks
    found = [check.detail for check in checks if check.name in [f"{step}: teacher" for step in STEPS]]
    assert found == [f"47 of 47 tensors identical to {run / 'teacher'}, 1 of them in another dtype"] * len(STEPS)
    assert reads == {"opened": 1, "digested": 1}
