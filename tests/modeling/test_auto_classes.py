"""Every auto class that fits a converted model loads it: with the package, and with the code in the checkpoint."""

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from tokenizers.models import WordLevel
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, pipeline

from sse_convert.modeling.architectures import ARCHITECTURES
from sse_convert.modeling.auto import register
from sse_convert.modeling.hybrid import model_class_for
from tests.elsewhere import without_package
from tests.modeling.tiny import BESIDE, FAMILIES, LAYOUT, prompts, tiny_model, tiny_source

CLASSIFIERS = tuple(name for name in FAMILIES if ARCHITECTURES[name].classifier_class)
DEEP = ("llama", "gemma3_text", "gpt2", "gpt_neox")
"""one with transformers' common classifier, and those with another"""


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def saved(folder: Path, model_type: str, layers: tuple[str, ...] = LAYOUT) -> PreTrainedModel:
    model = tiny_model(model_type, layers)
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    words = {word: index for index, word in enumerate(("<pad>", "<s>", "</s>", "a", "b", "c"))}
    backend = tokenizers.Tokenizer(WordLevel(words, "<pad>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>").save_pretrained(folder)


@pytest.mark.parametrize("model_type", DEEP)
def test_auto_model_is_the_backbone(model_type: str, tmp_path: Path) -> None:
    model = saved(tmp_path, model_type, BESIDE)
    backbone, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(backbone).__name__ == ARCHITECTURES[model_type].hybrid_backbone
    assert type(backbone) is type(model.base_model)
    assert not info["missing_keys"]
    ids, mask = prompts()
    with torch.no_grad():
        found = backbone.eval()(ids, attention_mask=mask).last_hidden_state
        assert torch.equal(found, model.base_model(ids, attention_mask=mask).last_hidden_state)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_has_its_classes(model_type: str) -> None:
    config, spec = tiny_model(model_type).config, ARCHITECTURES[model_type]
    assert type(AutoModel.from_config(config)).__name__ == spec.hybrid_backbone
    if model_type in CLASSIFIERS:
        assert type(AutoModelForSequenceClassification.from_config(config)).__name__ == spec.hybrid_classifier


@pytest.mark.parametrize("model_type", DEEP)
def test_a_classifier_has_converted_layers(model_type: str, tmp_path: Path) -> None:
    model = saved(tmp_path, model_type)
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, output_loading_info=True
    )
    assert type(classifier).__name__ == ARCHITECTURES[model_type].hybrid_classifier
    assert info["missing_keys"] == {"score.weight"}
    assert list(classifier.sse_layers()) == list(model.sse_layers())
    ids, mask = prompts(side="right")
    with torch.no_grad():
        hidden = model.base_model(ids, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(2), mask.sum(1) - 1]
        found = classifier.eval()(ids, attention_mask=mask).logits
        torch.testing.assert_close(found, last @ classifier.score.weight.T)
    out = classifier.train()(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    plain = torch.nn.functional.cross_entropy(out.logits, torch.tensor([0, 2]))
    torch.testing.assert_close(out.loss, plain + classifier.sse_balance_loss())
    classifier.save_pretrained(tmp_path / "again")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(again(ids, attention_mask=mask).logits, found)


def test_a_family_without_a_classifier_says_so(tmp_path: Path) -> None:
    saved(tmp_path, "granite")
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_the_tables_of_the_auto_classes_can_be_listed() -> None:
    model_class_for(transformers.Gemma3ForConditionalGeneration)  # images and text: has no line in these tables
    for mapping in (transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING):
        ours = {config.__name__: config for config in mapping if config.__name__.startswith("SSE")}
        assert {"SSELlamaConfig", "SSEGPT2Config"} <= ours.keys()
        assert all(mapping[config].config_class is config for config in ours.values())


def test_plain_models_load_as_before(tmp_path: Path) -> None:
    tiny_source("qwen3").save_pretrained(tmp_path)
    assert type(AutoModel.from_pretrained(tmp_path)) is transformers.Qwen3Model


def test_features_are_extracted(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3")
    save_tokenizer(tmp_path)
    assert isinstance(AutoTokenizer.from_pretrained(tmp_path), transformers.PreTrainedTokenizerFast)
    features = pipeline("feature-extraction", model=str(tmp_path))("a")
    assert len(features[0][0]) == 32


@pytest.mark.slow
def test_the_code_in_the_checkpoint_serves_every_auto_class(tmp_path: Path) -> None:
    model = saved(tmp_path / "qwen3", "qwen3", BESIDE)
    saved(tmp_path / "gpt2", "gpt2")
    save_tokenizer(tmp_path / "qwen3")
    ids, mask = prompts()
    with torch.no_grad():
        hidden = model.base_model(ids, attention_mask=mask).last_hidden_state
    torch.save({"ids": ids, "mask": mask, "hidden": hidden}, tmp_path / "expected.pt")
    without_package(_REMOTE, tmp_path)


_REMOTE = """
from transformers import (AutoModel, AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments,
                          default_data_collator, pipeline)

tokenizer = AutoTokenizer.from_pretrained("qwen3")  # nobody is there to answer a question
assert not [name for name in sys.modules if name.startswith("transformers_modules")]

expected = torch.load("expected.pt")
ids, mask = expected["ids"], expected["mask"]
classifier = AutoModelForSequenceClassification.from_pretrained("gpt2", trust_remote_code=True, num_labels=2)
assert type(classifier).__name__ == "SSEGPT2ForSequenceClassification"
classifier = AutoModelForSequenceClassification.from_pretrained("qwen3", trust_remote_code=True, num_labels=2).eval()
assert type(classifier).__module__.startswith("transformers_modules."), type(classifier)
with torch.no_grad():
    assert torch.equal(classifier.model(ids, attention_mask=mask).last_hidden_state, expected["hidden"])
classifier.save_pretrained("classifier")
again = AutoModelForSequenceClassification.from_pretrained("classifier", trust_remote_code=True).eval()
with torch.no_grad():
    assert torch.equal(again(ids, attention_mask=mask).logits, classifier(ids, attention_mask=mask).logits)
backbone = AutoModel.from_pretrained("qwen3", trust_remote_code=True).eval()
with torch.no_grad():
    assert torch.equal(backbone(ids, attention_mask=mask).last_hidden_state, expected["hidden"])
extract = pipeline("feature-extraction", model="qwen3", trust_remote_code=True)
assert len(extract("a")[0][0]) == 32

model = AutoModelForCausalLM.from_pretrained("qwen3", trust_remote_code=True)
options = dict(output_dir="run", max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
               learning_rate=0.0, save_strategy="no", disable_tqdm=True, logging_steps=1)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 97, (2, 12))]
smooth = 0.25
trainer = Trainer(model=model, args=TrainingArguments(label_smoothing_factor=smooth, **options), train_dataset=rows,
                  data_collator=default_data_collator)
batch = default_data_collator(rows)
with torch.no_grad():
    found = trainer.compute_loss(model.eval(), dict(batch))
    logp = model(batch["input_ids"]).logits[:, :-1].log_softmax(-1)
nll = -logp.gather(-1, batch["labels"][:, 1:, None]).mean()
torch.testing.assert_close(found, (1 - smooth) * nll - smooth * logp.mean())
"""
