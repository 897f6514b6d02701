import pytest
import torch
from transformers import AutoConfig

from sse_convert.checkpoints import mapped_model as mapped
from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.checkpoints.teacher import config_object
from sse_convert.modeling.architectures import has_experts
from sse_convert.modeling.auto import load_pretrained
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from tests.surgery.models import recipe, save_source, tokens


@pytest.fixture(scope="module", params=["gemma3_text", "gpt_neox", "gpt2", "qwen3_moe", "gpt_oss"])
def converted(request, tmp_path_factory):
    """Conversions of families with a tied head, a renamed one, and weights stored the other way round;
    experts stored one by one, and together."""
    folder = tmp_path_factory.mktemp(request.param)
    save_source(folder / "teacher", request.param)
    convert_checkpoint(Job.of(recipe(folder / "teacher")), folder / "out")
    return folder / "out"


def opened(folder):
    files = open_checkpoint(folder)
    return mapped.mapped_model(files, config_object(files.config))


def logits_of(folder):
    with opened(folder) as model:
        return model(tokens(), use_cache=False).logits


@pytest.mark.parametrize("piece_bytes", [mapped.PIECE_BYTES, 2000])
def test_logits_are_those_of_the_loaded_model(converted, monkeypatch, piece_bytes):
    """Bit for bit where no product is cut into pieces, and none is of experts, which round by where they lie."""
    monkeypatch.setattr(mapped, "PIECE_BYTES", piece_bytes)
    found = logits_of(converted)
    with torch.no_grad():
        expected = load_pretrained(converted)(tokens(), use_cache=False).logits
    if piece_bytes == 2000 or has_experts(AutoConfig.from_pretrained(converted)):
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


def test_nothing_is_loaded_whole(converted, monkeypatch):
    monkeypatch.setattr(mapped, "load_pretrained", lambda folder: pytest.fail("loaded whole"))
    logits_of(converted)


def test_weights_that_are_merged_in_another_way_are_loaded(converted, monkeypatch):
    monkeypatch.setattr(mapped, "_stored_parts", lambda *_: None)
    monkeypatch.setattr(mapped, "load_pretrained", lambda folder: f"{folder} loaded")
    with opened(converted) as model:
        assert model == f"{converted} loaded"
