"""The three losses as stages: they learn, train what they should, count exactly, and write checkpoints that load."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from torch._dynamo.utils import counters
from torch._inductor.exc import InvalidCxxCompiler
from transformers import AutoTokenizer

from sse_convert.data import RowReader, stack
from sse_convert.errors import (
    CheckpointError,
    DataError,
    DependencyError,
    OutputError,
    RecipeError,
    TrainingError,
)
from sse_convert.modeling.auto import load_pretrained
from sse_convert.modeling.head import Head
from sse_convert.modeling.layer import SSEAttention
from sse_convert.recipe.schema import Source
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.training import loop
from sse_convert.training.held_out import HeldOut
from sse_convert.training.prefetch import with_targets
from sse_convert.training.setup import converted_attention
from sse_convert.training.stage import pick_stage
from sse_convert.training.uptrain import UptrainLoss
from tests.surgery.synthetic import edit_config
from tests.training.conftest import MIXERS, losses
from tests.training.running import run_alone


def tensors(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def changed(before, after):
    """Names of tensors that training changed."""
    old, new = (
        load_pretrained(before, dtype=torch.float32).state_dict(),
        load_pretrained(after, dtype=torch.float32).state_dict(),
    )
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


def test_align_brings_every_layer_closer(train):
    _, report = train("align", tokens=4096, batch_tokens=256, seq_len=64)
    layers = report.details["layers"]
    assert set(layers) == {"0", "1"}
    for layer in layers.values():
        assert layer["after"] < 0.95 * layer["before"]
    assert report.loss_last < report.loss_first
    assert "error before" in "\n".join(report.lines())


def test_align_trains_mixers_of_converted_layers_only(train, converted):
    folder, _ = train("align", tokens=256)
    mixers = ("model.layers.0.self_attn.", "model.layers.1.self_attn.")
    assert changed(converted, folder) == {name for name in tensors(folder) if name.startswith(mixers)}


def test_align_errors_are_those_of_the_layers(train, make, converted, tokenizer):
    """The errors of the first step against their definition, from the two models as a user would load them."""
    recipe = make(("align", {"tokens": 128, "lr": 1e-9}))
    folder, report = train("align", recipe=recipe)
    rows = RowReader(recipe.data.train, tokenizer, 32, 0).rows()
    batch = stack([next(rows) for _ in range(4)])
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    teacher, student = load_pretrained(recipe.model), load_pretrained(converted)
    wanted, found = {}, {}

    def note(outputs, i, replacement=None):
        def hook(module, args, output):
            outputs[i] = output[0]
            return None if replacement is None else (replacement[i], *output[1:])

        return hook

    for i in (0, 1):
        teacher.model.layers[i].self_attn.register_forward_hook(note(wanted, i))
        student.model.layers[i].self_attn.register_forward_hook(note(found, i, wanted))
    with torch.no_grad():
        teacher(**inputs, use_cache=False)
        student(**inputs, use_cache=False)
    for i in (0, 1):
        error = ((found[i] - wanted[i]).square().sum() / wanted[i].square().sum()).item()
        assert report.details["layers"][str(i)]["before"] == pytest.approx(error, rel=1e-4)
        assert losses(folder, f"error_{i}")[0] == pytest.approx(error, rel=1e-4)


def test_distill_lowers_the_divergence_and_logs_health(train):
    folder, report = train("distill", tokens=4096)
    assert report.loss_last < 0.8 * report.loss_first
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 < record["load_entropy"] <= 1
    assert record["dead_partitions"] >= 0
    assert record["gate_grad_norm"] > 0
    assert len(record["routers"]["0"]["load"]) == 4
    assert record["balance"] > 0


def test_uptrain_lowers_the_loss(train):
    _, report = train("uptrain", tokens=4096)
    assert report.loss_last < report.loss_first - 0.5
    assert report.text_passes == [0]


def test_repeated_text_is_reported(make, train, tmp_path):
    (tmp_path / "short.txt").write_text("the keeper walked down to the harbor " * 20)
    recipe = make(("uptrain", {"tokens": 512}), data={"train": [{"path": str(tmp_path / "short.txt")}]})
    _, report = train("uptrain", recipe=recipe)
    assert report.text_passes[0] >= 1
    assert any("text was repeated" in line for line in report.lines())


def test_a_step_with_nothing_to_predict_is_refused(make, train, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "who walked down?"}]}))
    recipe = make(("uptrain", {"loss_mask": "assistant"}), data={"train": [{"path": str(path), "kind": "chat"}]})
    with pytest.raises(DataError, match="no token to predict"):
        train("uptrain", recipe=recipe)


def test_divergence_of_an_unconverted_model_would_be_zero(
    make, train, teacher_folder, text_folder, tmp_path, converted
):
    """A window longer than the text changes nothing, so the first step's divergence is zero."""
    recipe = make(("distill", {"tokens": 128}), mixers={"sliding": {"window": 64}}, layers={"pattern": ["sliding"]})
    convert_checkpoint(Job.of(recipe), tmp_path / "same")
    _, report = train("distill", recipe=recipe, checkpoint=tmp_path / "same")
    assert abs(report.loss_first) < 1e-5


@pytest.mark.parametrize("name", ["distill", "uptrain"])
def test_train_mixers_freezes_the_rest(train, converted, name):
    folder, _ = train(name, tokens=256, train="mixers", lr=1e-3)
    assert all(".self_attn." in n and not n.startswith("model.layers.2") for n in changed(converted, folder))


def test_two_learning_rates(train, converted):
    folder, _ = train("uptrain", tokens=128, lr={"mixers": 1e-2, "rest": 1e-5})
    before, after = load_pretrained(converted).state_dict(), load_pretrained(folder).state_dict()
    step = {name: (after[name] - before[name]).abs().max().item() for name in before}
    mixers = tuple(f"{path}." for path in converted_attention(load_pretrained(converted)).values())
    assert all(1e-3 < size <= 1.1e-2 for name, size in step.items() if name.startswith(mixers) and size)
    assert all(size <= 1.1e-5 for name, size in step.items() if not name.startswith(mixers))


def test_compiled_layers_train_alike(make, train, text_folder, monkeypatch):
    """Traced, but not translated to C++, which takes a minute; checkpointed, with rows of one to three documents. Looks
    at held-out text compile nothing."""
    look, added, layers = HeldOut.after_update, [], []

    def counted(self, *args, **more):
        before = counters["stats"]["unique_graphs"]
        found = look(self, *args, **more)
        added.append(counters["stats"]["unique_graphs"] - before)
        return found

    monkeypatch.setattr(HeldOut, "after_update", counted)
    data = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder / "5.txt")}]}
    whole = torch.nn.Module.compile

    def traced(module):
        layers.append(module.self_attn.layer_idx)
        whole(module, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    torch.compiler.reset()
    counters.clear()
    settings = {"tokens": 512, "gradient_checkpointing": True}
    found = []
    for compiled in (False, True):
        assert counters["stats"]["unique_graphs"] == 0
        every = 128 if compiled else None
        recipe = make(("distill", settings), data=data, train={"compile": compiled, "validate_every": every})
        found.append(losses(train("distill", f"compiled {compiled}", recipe=recipe)[0]))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert counters["stats"]["unique_graphs"] >= 4  # of student and teacher: SSE, window and full layers, the teacher's
    assert sorted(layers) == sorted([*set(layers)] * 2)  # each layer of both
    assert not counters["graph_break"]
    assert added == [0] * 4


def test_compiled_layers_need_a_compiler(train, make, monkeypatch):
    def none():
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    with pytest.raises(DependencyError, match=r"train.compile needs a C\+\+ compiler"):
        train("uptrain", recipe=make("uptrain", train={"compile": True}))


def test_result_loads_and_keeps_what_belongs_to_it(train, converted, tokenizer):
    folder, report = train("uptrain", tokens=256)
    model = load_pretrained(folder)
    assert model.dtype == torch.float32
    assert len(AutoTokenizer.from_pretrained(folder)) == len(tokenizer)
    written = {path.name for path in folder.iterdir()}
    code = {path.name for path in converted.glob("*.py")}
    assert code | {"chat_template.jinja", "stage.json", "sse_convert.json", "metrics.jsonl", "config.json"} <= written
    assert json.loads((folder / "sse_convert.json").read_text())["stage"] == "uptrain"
    before, after = (json.loads((path / "config.json").read_text()) for path in (converted, folder))
    assert {key for key in before | after if before.get(key) != after.get(key)} <= {"dtype", "transformers_version"}
    before, after = (json.loads((path / "generation_config.json").read_text()) for path in (converted, folder))
    assert before == after
    assert report.steps == len(losses(folder)) == 2


@pytest.mark.parametrize("name", ["align", "distill", "uptrain"])
def test_tied_embeddings_are_stored_once(train, name):
    folder, _ = train(name, tokens=256)
    assert "model.embed_tokens.weight" in tensors(folder)
    assert "lm_head.weight" not in tensors(folder)


@pytest.mark.parametrize("name", ["align", "distill", "uptrain"])
def test_accumulation_is_exact(make, train, tmp_path, name):
    """12 x 1 and 1 x 12 rows give one curve to 6 digits in float32, with ragged numbers of targets.

    Without the balance loss, whose product of means over a forward pass is not a sum over tokens.
    """
    mixers = {"sse": {**MIXERS["sse"], "balance": "none"}, "sliding": MIXERS["sliding"]}
    curves = []
    for micro_batch in (12, 1):
        recipe = make((name, {"tokens": 1152, "batch_tokens": 384, "micro_batch": micro_batch}), mixers=mixers)
        if not curves:
            convert_checkpoint(Job.of(recipe), tmp_path / "unbalanced")
        folder, _ = train(name, f"{micro_batch}", recipe=recipe, checkpoint=tmp_path / "unbalanced")
        curves.append(torch.tensor(losses(folder), dtype=torch.float64))
    assert len(set(curves[0].tolist())) == 3
    torch.testing.assert_close(*curves, rtol=2e-6, atol=0)


def test_gradient_checkpointing_changes_nothing(train):
    plain, _ = train("distill", "plain", tokens=512)
    saved, _ = train("distill", "saved", tokens=512, gradient_checkpointing=True)
    assert losses(plain) == losses(saved)


def test_every_new_tensor_gets_a_gradient(converted, text_folder, tokenizer):
    model = load_pretrained(converted).train()
    batch = stack([next(RowReader([Source(path=str(text_folder))], tokenizer, 32, 0).rows())])
    sums = UptrainLoss(model)(**with_targets(batch))
    (sums["loss"] + sums["balance"]).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == []
    assert Head.of(model).weight.grad is not None


def test_chat_fine_tuning_counts_assistant_tokens(make, train, tmp_path):
    talk = [{"role": "user", "content": "who walked down?"}, {"role": "assistant", "content": "the keeper did"}]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps({"messages": talk}) for _ in range(200)))
    data = {"train": [{"path": str(path), "kind": "chat"}]}
    counts = {}
    for mask in ("all", "assistant"):
        recipe = make(("uptrain", {"tokens": 2048, "loss_mask": mask}), data=data)
        folder, report = train("uptrain", mask, recipe=recipe)
        counts[mask] = losses(folder, "predicted")[0]
        assert report.loss_last < report.loss_first
    assert 0 < counts["assistant"] < 0.6 * counts["all"]


def test_steps_that_are_not_finite_are_skipped_then_refused(train, monkeypatch, capsys):
    real = loop._gradients
    calls = []

    def poisoned(objective, batches, schedule):
        values, tokens = real(objective, batches, schedule)
        calls.append(1)
        if bad(len(calls)):
            for parameter in objective.parts[0].module.parameters():
                parameter.grad = torch.full_like(parameter, float("nan"))
        return values, tokens

    monkeypatch.setattr(loop, "_gradients", poisoned)
    bad = {2, 3}.__contains__
    folder, report = train("uptrain", "skips")
    assert report.skipped_steps == 2
    assert report.steps == 6
    assert losses(folder, "grad_norm")[1:3] == [None, None]
    assert "not finite, weights left as they are" in capsys.readouterr().err
    assert all(torch.isfinite(value).all() for value in tensors(folder).values())

    calls.clear()
    bad = lambda n: n > 1  # noqa: E731
    with pytest.raises(TrainingError, match="10 steps in a row were not finite"):
        train("uptrain", "fails", tokens=128 * 20)


def test_a_finished_stage_is_not_repeated_and_not_mixed(make, train, converted, tmp_path):
    folder, report = train("uptrain", tokens=256)
    again = train("uptrain", tokens=256)[1]
    assert again.already_done
    assert again.loss_last == report.loss_last
    train("uptrain", tokens=256, micro_batch=1, checkpoint_steps=7)  # these do not decide the result
    with pytest.raises(TrainingError, match=r"stage\.weight_decay was 0\.0, is 0\.5"):
        train("uptrain", tokens=256, weight_decay=0.5)
    with pytest.raises(TrainingError, match="checkpoint was"):
        train("uptrain", tokens=256, checkpoint=folder)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(OutputError, match="other exists"):
        train("uptrain", "other", tokens=256)


def test_bad_data_is_found_before_the_models_are_loaded(make, train, tmp_path, monkeypatch):
    monkeypatch.setattr("sse_convert.training.attempt.load_student", lambda *args: pytest.fail("loaded"))
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="byte 0xe9 at offset 3"):
        train("uptrain", recipe=make("uptrain", data={"train": [{"path": str(tmp_path / "bad.txt")}]}))
    assert not (tmp_path / "result.work").exists()


def test_rows_beyond_the_context_are_refused(train):
    with pytest.raises(RecipeError, match="seq_len is 1024, the model has 512 positions"):
        train("uptrain", seq_len=1024, batch_tokens=2048, tokens=2048)


def test_pick_stage(make):
    recipe = make("align", ("uptrain", {"name": "one"}), ("uptrain", {"name": "two"}))
    assert pick_stage(recipe, "layer_mse").name == "align"
    assert pick_stage(recipe, "ce", "two").name == "two"
    with pytest.raises(RecipeError, match="2 stages with loss ce"):
        pick_stage(recipe, "ce")
    with pytest.raises(RecipeError, match="no stage 'three'"):
        pick_stage(recipe, "ce", "three")
    with pytest.raises(RecipeError, match="0 stages with loss kl"):
        pick_stage(recipe, "kl")


def test_an_unconverted_checkpoint_is_refused(make, tmp_path, teacher_folder):
    recipe = make("uptrain")
    with pytest.raises(CheckpointError, match="is a plain llama checkpoint"):
        run_alone(recipe, recipe.stages[0], teacher_folder, tmp_path / "x")


def test_quantised_weights_are_refused(train, converted, tmp_path):
    folder = shutil.copytree(converted, tmp_path / "quantised")
    edit_config(folder, quantization_config={"quant_method": "torchao"})
    with pytest.raises(CheckpointError, match=r"is quantised \(torchao\)") as caught:
        train("distill", checkpoint=folder, tokens=512)
    assert "that this was made from" in caught.value.fix


def test_a_stage_says_that_pytorch_makes_gradients(train, monkeypatch, capsys):
    said = "uptrain: PyTorch makes the gradients, slowly: the kernels are on strike"
    train("uptrain", "as usual", tokens=256)
    assert said not in capsys.readouterr().err
    monkeypatch.setattr(SSEAttention, "trains_on_torch", lambda self, device: "the kernels are on strike")
    train("uptrain", "left", tokens=256)
    assert capsys.readouterr().err.count(said) == 1
