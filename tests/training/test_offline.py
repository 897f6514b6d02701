"""The teacher's predictions on disk: what they are, that nobody mixes them up, and that training needs no teacher."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from sse_convert.data import RowReader, stack
from sse_convert.errors import CheckpointError, OutputError, RecipeError, TrainingError
from sse_convert.modeling.auto import load_pretrained
from sse_convert.recipe.stage_settings import Offline
from sse_convert.training import loop, offline, stage
from sse_convert.training.topk_kl import NAMES
from tests.training.conftest import losses, make_llama
from tests.training.test_resume import Killed, same, steps_then

V = 320


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def distill(train, folder):
    """Distils from the cache in `folder`."""

    def run(out="result", *, top_k=8, **settings):
        return train("distill", out, offline={"top_k": top_k, "dir": str(folder)}, **settings)

    return run


def shards(folder):
    return {path.name: load_file(path) for path in sorted(folder.glob("rows-*.safetensors"))}


def test_what_is_stored(distill, make, tokenizer, folder, monkeypatch):
    monkeypatch.setattr(offline, "MOST_ROWS", 10)
    distill()
    found = shards(folder)
    assert [len(shard["teacher_index"]) for shard in found.values()] == [10, 10, 4]
    recipe = make("distill")
    rows = RowReader(recipe.data.train, tokenizer, 32, 0).rows()
    batch = stack([next(rows) for _ in range(24)])
    with torch.no_grad():
        teacher = load_pretrained(recipe.model)
        logits = teacher(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    exact = logits.double().log_softmax(-1)
    index, log_p, log_rest = (torch.cat([shard[name] for shard in found.values()]) for name in NAMES)
    assert (index.dtype, log_p.dtype, log_rest.dtype) == (torch.int32, torch.float16, torch.float32)
    assert torch.equal(index.long(), logits.topk(8, -1).indices)
    torch.testing.assert_close(log_p.double(), exact.gather(-1, index.long()), rtol=2**-11, atol=1e-5)
    rest = 1 - exact.gather(-1, index.long()).exp().sum(-1)
    torch.testing.assert_close(log_rest.double().exp(), rest, rtol=1e-4, atol=1e-6)
    data = sum(value.numel() * value.element_size() for shard in found.values() for value in shard.values())
    assert data == 24 * 32 * Offline(top_k=8).bytes_per_token


def test_losses_are_those_of_the_teacher_beside_the_student(distill, train):
    _, beside = train("distill", "beside")
    _, whole = distill("whole", top_k=V)
    assert whole.loss_first == pytest.approx(beside.loss_first, rel=1e-3)
    assert whole.loss_last == pytest.approx(beside.loss_last, rel=1e-2)


def test_a_complete_cache_needs_no_teacher(distill, monkeypatch):
    first, report = distill("first")
    assert report.loss_last < report.loss_first
    monkeypatch.setattr(stage, "load_teacher", lambda *args, **kwargs: pytest.fail("loaded"))
    again, _ = distill("again", micro_batch=1)
    assert losses(again)[0] == pytest.approx(losses(first)[0], rel=1e-5)
    twice, _ = distill("twice")
    assert same(first, twice)


def test_interrupted_and_continued(distill, monkeypatch):
    whole, _ = distill("whole", checkpoint_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 3, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            distill("stopped", checkpoint_steps=2)
    folder, _ = distill("stopped", checkpoint_steps=2)
    assert losses(folder) == losses(whole)
    assert same(folder, whole)


def test_killed_while_writing_goes_on_with_what_is_missing(distill, folder, monkeypatch):
    monkeypatch.setattr(offline, "MOST_ROWS", 10)
    with monkeypatch.context() as patch:
        patch.setattr(offline, "save_file", steps_then(offline.save_file, 2, Killed()))
        with pytest.raises(Killed):
            distill()
    assert list(shards(folder)) == ["rows-000000.safetensors", "rows-000010.safetensors"]
    calls = []
    real = offline.TeacherCache._save
    monkeypatch.setattr(
        offline.TeacherCache, "_save", lambda self, first, tensors: calls.append(first) or real(self, first, tensors)
    )
    distill()
    assert calls == [20]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_longer_stage_adds_to_the_cache(distill, folder, monkeypatch):
    monkeypatch.setattr(offline, "MOST_ROWS", 10)
    distill("short", tokens=512)
    before = shards(folder)
    distill("long")
    after = shards(folder)
    assert [len(shard["teacher_index"]) for shard in after.values()] == [10, 10, 4]
    for name, value in before["rows-000000.safetensors"].items():
        assert torch.equal(value, after["rows-000000.safetensors"][name])


def test_a_cache_of_other_inputs_is_refused(distill, make, train, folder, teacher_folder, text_folder, tmp_path):
    distill(tokens=128)
    with pytest.raises(TrainingError, match="top_k was 8, is 9"):
        distill("other", tokens=128, top_k=9)
    with pytest.raises(TrainingError, match="seq_len was 32, is 16"):
        distill("other", tokens=128, seq_len=16)
    settings = {"tokens": 128, "offline": {"top_k": 8, "dir": str(folder)}}
    data = {"train": [{"path": str(text_folder)}], "seed": 5}
    recipe = make(("distill", settings), data=data)
    with pytest.raises(TrainingError, match=r"data\.seed was 0, is 5"):
        train("distill", "other", recipe=recipe)
    other = tmp_path / "teacher"
    shutil.copytree(teacher_folder, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    recipe = make(("distill", settings), model=str(other))
    with pytest.raises(TrainingError, match="model was"):
        train("distill", "other", recipe=recipe)
    assert not (tmp_path / "other").exists()


def test_more_tokens_than_there_are_is_refused(distill, make, train, tmp_path):
    with pytest.raises(RecipeError, match="top_k is 321, the model has 320 tokens"):
        distill(top_k=321)
    make_llama(vocab=64).save_pretrained(tmp_path / "other")
    with pytest.raises(RecipeError, match="the student predicts 320 tokens, the teacher 64"):
        train("distill", recipe=make(("distill", {"offline": {}}), model=str(tmp_path / "other")))


def test_a_folder_with_something_else_is_refused(distill, folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="no cache of a teacher's predictions"):
        distill()


def test_damage_to_a_cache_is_mended_or_named(distill, folder):
    whole, _ = distill("whole", tokens=128)
    path = folder / "rows-000000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    mended, _ = distill("mended", tokens=128)
    assert losses(mended) == losses(whole)
    assert path.read_bytes() == content
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 64]) + content[-8:])
    with pytest.raises(CheckpointError, match=r"rows-000000\.safetensors is damaged"):
        distill("flipped", tokens=128)
    (folder / "inputs.json").write_text("{")
    with pytest.raises(OutputError, match=r"inputs\.json is damaged"):
        distill("other", tokens=128)


def test_too_little_room_is_found_before_the_teacher_is_loaded(distill, monkeypatch):
    monkeypatch.setattr(stage, "load_teacher", lambda *args, **kwargs: pytest.fail("loaded"))
    monkeypatch.setattr(offline.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(OutputError, match=r"1 B free; the teacher's predictions take 39.9 kB"):
        distill()


def test_the_default_folder_is_named_by_the_inputs(train, tmp_path, monkeypatch):
    monkeypatch.setenv("SSE_CONVERT_CACHE", str(tmp_path / "own"))
    train("distill", "a", tokens=128, offline={"top_k": 4})
    train("distill", "b", tokens=128, offline={"top_k": 5})
    train("distill", "c", tokens=256, offline={"top_k": 5})
    folders = [path for path in (tmp_path / "own" / "teacher-logits").iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert all((path / "inputs.json").is_file() for path in folders)
