import json

import pytest

from sse_convert.checkpoints import hub
from sse_convert.checkpoints.config_only import has_weights, open_for_planning
from sse_convert.checkpoints.open import INDEX, open_checkpoint
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.errors import CheckpointError, HubError
from tests.surgery import synthetic


def config_alone(folder, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**synthetic.LLAMA, **changes}))
    return folder


def test_a_config_alone_has_the_shapes_of_the_checkpoint(tmp_path):
    whole = open_teacher(synthetic.checkpoint(tmp_path / "whole"))
    alone = open_for_planning(config_alone(tmp_path / "alone"))
    assert alone.files.headers == whole.files.headers
    assert (alone.dims, alone.dtype, alone.windows) == (whole.dims, "BF16", whole.windows)
    assert has_weights(whole.files)
    assert not has_weights(alone.files)
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_teacher(tmp_path / "alone")


def test_an_index_whose_shards_are_elsewhere(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m", shards=3)
    first, *others = sorted(folder.glob("*.safetensors"))
    for path in others:
        path.unlink()
    with pytest.raises(CheckpointError, match="lacks 2 of 3 shards"):
        open_for_planning(folder)
    first.unlink()
    assert (folder / INDEX).is_file()
    assert open_for_planning(folder).files.headers == synthetic.llama_layout(synthetic.LLAMA)


def test_pickles_are_weights(tmp_path):
    (config_alone(tmp_path / "m") / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="holds its weights as pickles"):
        open_for_planning(tmp_path / "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "unheard-of"}, "unheard-of"),
        ({"num_attention_heads": 5}, "multiple of the number of attention heads"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
    ],
)
def test_a_config_that_makes_no_teacher(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        open_for_planning(config_alone(tmp_path / "m", **changes))


def test_without_a_hub_the_cache_s_config_is_enough(tmp_path, monkeypatch):
    def unreachable(*_):
        raise HubError("no hub")

    monkeypatch.setattr(hub, "listing", unreachable)
    monkeypatch.setattr(hub, "cached", lambda *_: config_alone(tmp_path / "snapshot"))
    assert open_for_planning("some/model").files.revision == "snapshot"
    (tmp_path / "snapshot/config.json").unlink()
    (tmp_path / "snapshot").rmdir()
    with pytest.raises(HubError, match="no hub"):
        open_checkpoint("some/model")


def test_a_repository_without_weights(tmp_path, monkeypatch):
    listing = hub.Listing("some/model", None, "c0ffee", {"config.json": 9})
    monkeypatch.setattr(hub, "listing", lambda *_: listing)
    monkeypatch.setattr(hub, "cached", lambda *_: None)
    monkeypatch.setattr(hub, "download_snapshot", lambda *_, **__: config_alone(tmp_path / "c0ffee"))
    assert open_for_planning("some/model").files.revision == "c0ffee"
