import pytest
import torch
from transformers import CONFIG_MAPPING

from sse_convert.checkpoints import mapped_model as mapped
from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.modeling.auto import load_pretrained
from sse_convert.surgery.convert import convert_checkpoint
from tests.surgery.models import recipe, save_source, tokens


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text", "gpt_neox", "gpt2"])
def converted(request, tmp_path_factory):
    """Conversions of families with a tied head, a renamed one, and weights stored the other way round."""
    folder = tmp_path_factory.mktemp(request.param)
    save_source(folder / "teacher", request.param)
    convert_checkpoint(recipe(folder / "teacher"), folder / "out")
    return folder / "out"


def logits_of(folder):
    files = open_checkpoint(folder)
    config = CONFIG_MAPPING[files.model_type].from_dict(files.config)
    with mapped.mapped_model(files, config) as model:
        return model(tokens(), use_cache=False).logits


@pytest.mark.parametrize("piece_bytes", [mapped.PIECE_BYTES, 2000])
def test_logits_are_those_of_the_loaded_model(converted, monkeypatch, piece_bytes):
    """Bit for bit where no product is cut into pieces."""
    monkeypatch.setattr(mapped, "PIECE_BYTES", piece_bytes)
    found = logits_of(converted)
    with torch.no_grad():
        expected = load_pretrained(converted)(tokens(), use_cache=False).logits
    if piece_bytes == 2000:
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


def test_weights_that_are_merged_on_loading_are_loaded(converted, monkeypatch):
    monkeypatch.setattr(mapped, "_stored_names", lambda *_: None)
    monkeypatch.setattr(mapped, "load_pretrained", lambda folder: load_pretrained(folder, torch.float64))
    assert logits_of(converted).dtype == torch.float64
