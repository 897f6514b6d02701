"""Models of images and text: what sees images stays, the language model inside is a hybrid like any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor, DynamicCache, StaticCache

from sse_convert.checkpoints.auxiliary_files import copy_auxiliary_files
from sse_convert.errors import CheckpointError, UsageError
from sse_convert.modeling.architectures import IMAGE_TEXT, backbone_of
from sse_convert.modeling.auto import register
from sse_convert.modeling.head import Head
from tests.modeling.tiny import prompts
from tests.modeling.tiny_images import (
    IMAGE,
    IMAGE_MODELS,
    RUNNING_MODELS,
    image_prompts,
    tiny_image_config,
    tiny_image_model,
    tiny_image_source,
)
from tests.surgery.models import save_teacher

NOTHING = ("full",) * 4
BESIDE = ("sse+sliding", "sliding", "sse", "full")


def alone(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One of two prompts with its image, without padding."""
    real = inputs["attention_mask"][row].bool()
    return {
        name: value[row, real][None] if value.shape == inputs["input_ids"].shape else value.chunk(2)[row]
        for name, value in inputs.items()
    }


def test_every_entry_has_a_line() -> None:
    assert set(IMAGE_MODELS) == IMAGE_TEXT.keys()


@pytest.mark.parametrize("model_type", RUNNING_MODELS)
@torch.no_grad()
def test_nothing_converted_is_the_source_to_the_bit(model_type: str) -> None:
    """With images and without, in one piece and token by token after left padding."""
    source, model = tiny_image_source(model_type), tiny_image_model(model_type, NOTHING)
    inputs = image_prompts(model_type)
    assert torch.equal(model(**inputs).logits, source(**inputs).logits)
    ids, mask = prompts()
    assert torch.equal(model(ids, attention_mask=mask).logits, source(ids, attention_mask=mask).logits)
    choice = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    made, theirs = model.generate(**inputs, **choice), source.generate(**inputs, **choice)
    assert all(map(torch.equal, made.logits, theirs.logits))


@pytest.mark.parametrize("model_type", RUNNING_MODELS)
@torch.no_grad()
def test_a_hybrid_sees_images_and_generates_from_its_cache(model_type: str) -> None:
    """Features of images are the source's to the bit; padded rows generate what each does alone by whole forwards."""
    source = tiny_image_source(model_type, dtype=torch.float64)
    model = tiny_image_model(model_type, BESIDE, dtype=torch.float64)
    inputs = image_prompts(model_type, dtype=torch.float64)
    sight = {name: inputs[name] for name in ("pixel_values", "image_grid_thw", "image_sizes") if name in inputs}
    assert all(map(torch.equal, features(model, sight), features(source, sight)))
    choice = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    made = model.generate(**inputs, **choice, suppress_tokens=[IMAGE])
    assert not torch.allclose(made.logits[0], source.generate(**inputs, **choice).logits[0])
    blind = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, -1]
    assert not torch.allclose(made.logits[0].double(), blind)
    for row in range(2):
        one = alone(inputs, row)
        for step in range(4):
            want = model(**one, use_cache=False).logits[0, -1]
            torch.testing.assert_close(made.logits[step][row].double(), want, atol=1e-6, rtol=0)
            one = extended(one, made.sequences[row, 14 + step])


def features(model: Any, sight: dict[str, Tensor]) -> Any:
    """Of images, as they go to the language model; Llama 4 projects them later."""
    seen = model.get_image_features(**sight)
    return seen.get("pooler_output", seen.last_hidden_state)


def extended(inputs: dict[str, Tensor], token: Tensor) -> dict[str, Tensor]:
    """A prompt with one more token of text."""
    length = inputs["input_ids"].shape
    last = {"input_ids": token, "attention_mask": torch.ones_like(token)}
    return {
        name: torch.cat([value, last.get(name, torch.zeros_like(token)).view(1, 1)], 1)
        if value.shape == length
        else value
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("model_type", RUNNING_MODELS)
@torch.no_grad()
def test_fixed_caches_and_text_after_an_image(model_type: str) -> None:
    """A static cache gives the tokens of a dynamic one; so do two turns over one cache those of one."""
    model, inputs = tiny_image_model(model_type, BESIDE), image_prompts(model_type)
    choice = {"max_new_tokens": 4, "do_sample": False}
    made = model.generate(**inputs, **choice)
    static = StaticCache(config=model.config.text_config, max_cache_len=32)
    assert torch.equal(model.generate(**inputs, **choice, past_key_values=static), made)
    cache = DynamicCache(config=model.config.text_config)
    model.generate(**inputs, max_new_tokens=1, do_sample=False, past_key_values=cache)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    rest = model.generate(made[:, :15], attention_mask=mask, max_new_tokens=3, do_sample=False, past_key_values=cache)
    assert torch.equal(rest, made)


@pytest.mark.parametrize("model_type", RUNNING_MODELS)
@torch.no_grad()
def test_the_language_model_by_itself_is_the_path_of_text(model_type: str) -> None:
    """Stages run it alone, packed documents too, and the head that losses use."""
    model, (ids, _) = tiny_image_model(model_type, BESIDE), prompts((12, 12))
    hidden = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(Head.of(model).logits(hidden), model(ids, use_cache=False).logits)
    positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1)
    packed = model(ids, position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(part, use_cache=False).logits for part in ids.split([7, 5], 1)], 1)
    if not IMAGE_TEXT[model_type].linear_layers:  # whose states documents share, as in transformers
        torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-4)
    masked = model(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(masked, packed)
    inside = backbone_of(model)(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    torch.testing.assert_close(Head.of(model).logits(inside), packed)


@pytest.mark.parametrize("model_type", RUNNING_MODELS)
@torch.no_grad()
def test_it_loads_through_its_auto_classes_and_as_nothing_else(model_type: str, tmp_path: Path) -> None:
    register()
    model, inputs = tiny_image_model(model_type), image_prompts(model_type)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(loaded.eval()(**inputs).logits, model(**inputs).logits)
    body = AutoModel.from_pretrained(tmp_path).eval()
    assert type(body) is type(model.base_model)
    assert torch.equal(body(**inputs)[0], model.base_model(**inputs)[0])
    with pytest.raises(Exception, match="load it with AutoModelForImageTextToText"):
        getattr(transformers, IMAGE_TEXT[model_type].causal_lm_class).from_pretrained(tmp_path)


def test_a_photograph_goes_through_the_processor_that_travels(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (20, 20), "red")
    source = save_teacher(tiny_image_source("gemma3"), tmp_path / "source")
    words = {"boi_token": "w92", "image_token": f"w{IMAGE}", "eoi_token": "w93"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"), unk_token="w0", extra_special_tokens=words
    )
    sight = transformers.Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
    transformers.Gemma3Processor(sight, tokenizer, image_seq_length=4).save_pretrained(source)
    model = tiny_image_model("gemma3")
    model.save_pretrained(tmp_path / "model")
    assert "processor_config.json" in copy_auxiliary_files(source, tmp_path / "model")
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    inputs = processor(images=image, text="w92 w5 w6", return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[92, *[IMAGE] * 4, 93, 5, 6]]
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape == (1, 11)


def test_another_language_model_inside_is_refused() -> None:
    config = tiny_image_config("mistral3")
    config.text_config = transformers.Qwen2Config(num_hidden_layers=4)
    with pytest.raises(
        CheckpointError, match=r"inside this mistral3 model is a qwen2\nexpected: mistral or ministral3"
    ):
        tiny_image_model("mistral3", config=config)


@pytest.mark.parametrize("model_type", IMAGE_MODELS)
def test_masks_of_ones_own_are_refused_as_ever(model_type: str) -> None:
    with pytest.raises(UsageError, match="cannot follow a custom mask"):
        tiny_image_model(model_type)(prompts()[0], attention_mask=torch.ones(2, 1, 11, 11))
