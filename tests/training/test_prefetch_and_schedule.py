"""Steps cut from rows, for any number of processes; learning rates; the records that guard inputs."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch

from sse_convert.checkpoints.identity import checkpoint_identity, write_sealed
from sse_convert.data import RowReader
from sse_convert.errors import DataError, OutputError, TrainingError
from sse_convert.recipe.schema import Source, Stage
from sse_convert.training.context import Place
from sse_convert.training.prefetch import Background, steps
from sse_convert.training.schedule import Schedule
from sse_convert.training.stage_record import changes, finished, record_of


def stage(**settings):
    return Stage(
        **{"name": "s", "loss": "ce", "tokens": 4096, "seq_len": 64, "lr": 1.0, "batch_tokens": 512} | settings
    )


def feed(text_folder, tokenizer, rank, processes, micro_batch=2):
    rows = RowReader([Source(path=str(text_folder))], tokenizer, 64, 0).rows()
    return steps(rows, rows_per_step=8, micro_batch=micro_batch, place=Place(rank, processes, 0, 1))


def rows_of(step):
    return {tuple(row.tolist()) for batch in step.batches for row in batch["input_ids"]}


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_a_step_has_the_same_rows_for_any_number_of_processes(text_folder, tokenizer, processes):
    alone = list(itertools.islice(feed(text_folder, tokenizer, 0, 1), 3))
    shared = [list(itertools.islice(feed(text_folder, tokenizer, r, processes), 3)) for r in range(processes)]
    for i, whole in enumerate(alone):
        assert rows_of(whole) == set().union(*(rows_of(own[i]) for own in shared))
        assert all(own[i].position == whole.position for own in shared)
        assert {len(own[i].batches) for own in shared} == {-(-8 // processes // 2) or 1}


def test_micro_batches_cut_the_same_rows(text_folder, tokenizer):
    ones, threes = (next(feed(text_folder, tokenizer, 0, 1, micro_batch)) for micro_batch in (1, 3))
    assert [len(batch["targets"]) for batch in threes.batches] == [3, 3, 2]
    assert torch.equal(*(torch.cat([b["input_ids"] for b in step.batches]) for step in (ones, threes)))


def test_background_hands_on_steps_and_errors_and_stops():
    def source():
        yield from ["a", "b"]
        raise DataError("bad byte")

    before = threading.active_count()
    with Background(source()) as found:
        assert [next(found), next(found)] == ["a", "b"]
        with pytest.raises(DataError, match="bad byte"):
            next(found)
    began = time.monotonic()
    with Background(itertools.repeat("x")) as found:
        assert next(found) == "x"
    assert time.monotonic() - began < 2
    assert threading.active_count() == before


def test_schedule_counts_and_rates():
    schedule = Schedule.of(stage(warmup=0.25, min_lr=0.1))
    assert (schedule.steps, schedule.rows, schedule.step_tokens) == (8, 8, 512)
    rates = [schedule.factor(step) for step in range(8)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2] == 1.0
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert np.isclose(rates[-1], 0.1)
    assert Schedule.of(stage(tokens=4097)).steps == 9
    assert Schedule.of(stage(tokens=512, warmup=0.0)).factor(0) == 1.0


def test_rows_that_processes_cannot_share_are_refused():
    Schedule.of(stage()).check_processes(4)
    with pytest.raises(TrainingError, match="8 rows of 64 tokens, for 3 processes") as caught:
        Schedule.of(stage()).check_processes(3)
    assert "384 or 576" in caught.value.fix


def test_changes_name_the_keys():
    before = {"stage": {"lr": {"mixers": 1e-3}}, "data": {"train": [{"path": "a", "rows": 2}]}, "keys": [1, 2]}
    now = {"stage": {"lr": 2e-3}, "data": {"train": [{"path": "b", "rows": 2}]}, "keys": [1, 3]}
    assert changes(before, before) == []
    assert changes(before, now) == [
        "data.train.0.path was 'a', is 'b'",
        "keys was [1, 2], is [1, 3]",
        "stage.lr was 'unset', is 0.002",
        "stage.lr.mixers was 0.001, is 'unset'",
    ]


def test_a_retired_key_that_nobody_had_set_is_no_change():
    now = {"train": {"seed": 0}, "mixers": {"sse": {"top_k": 1}}}
    before = {"train": {"seed": 0, "backend": "auto"}, "mixers": {"sse": {"top_k": 1, "output_gate": False}}}
    assert changes(before, now) == []
    before["mixers"]["sse"]["output_gate"] = before["mixers"]["sse"]["other"] = True
    assert changes(before, now) == [
        "mixers.sse.other was True, is 'unset'",
        "mixers.sse.output_gate was True, is 'unset'",
    ]


def test_records_guard_a_folder(tmp_path):
    inputs = {"overrides": {"0": "sse", "2-3": "full"}, "lr": 1e-3}
    assert finished(tmp_path / "none", inputs) is None
    write_sealed(tmp_path / "stage.json", record_of(inputs, {"loss": float("nan")}))
    assert finished(tmp_path, inputs) == {"loss": None}
    with pytest.raises(TrainingError, match=r"lr was 0\.001, is 0\.002"):
        finished(tmp_path, {**inputs, "lr": 2e-3})
    (tmp_path / "stage.json").unlink()
    with pytest.raises(OutputError, match="exists"):
        finished(tmp_path, inputs)


def test_identity_of_checkpoints(tmp_path, teacher_folder):
    assert checkpoint_identity("owner/model", "main") == "owner/model@main"
    first = checkpoint_identity(teacher_folder)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in teacher_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert checkpoint_identity(copy) == first
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert checkpoint_identity(copy) != first
