"""Layers swapped inside their frozen teacher, in miniature."""

import json

import pytest
import torch

from benchmarks.quality import swapped_layers
from benchmarks.quality.swapped_scores import needle_scores, text_scores
from benchmarks.quality.swapped_states import Sizes, make_bed
from benchmarks.quality.swapped_training import Phase, train
from benchmarks.quality.swapped_variants import SETS
from sse_convert import api
from sse_convert.checkpoints.load_model import load_tokenizer
from sse_convert.modeling.auto import load_pretrained
from sse_convert.recipe import load_recipe

SIZES = Sizes(lengths=(64, 96, 192), rows=(4, 2, 2), text_rows=1, samples=2, needles=(("number", 1),))
SHORT = (Phase(64, 6, 2), Phase(192, 2, 1), Phase(96, 50, 2))
"""the last one sees the same two rows in every step"""


def bed_and_student(given, *changes):
    """Layer 1 swapped."""
    recipe = load_recipe(given, ["layers.pattern=[full]", *changes])
    teacher = load_pretrained(recipe.model, dtype=torch.float32).requires_grad_(False)
    bed = make_bed(teacher, load_tokenizer(recipe.model), recipe, 1, SIZES)
    return bed, swapped_layers._student(recipe, torch.device("cpu"))


def arguments(given, out, *more):
    return ["capacity", "--recipe", str(given), "--layers", "1", "--tiny", "--out", str(out), *more]


@pytest.mark.smoke
def test_every_variant_is_trained_and_scored_and_a_run_goes_on(given, tmp_path, capsys):
    out = tmp_path / "result.json"
    assert swapped_layers.main(arguments(given, out, "--variants", "gla")) == 0
    first = json.loads(out.read_text())
    (entry,) = first["variants"]
    assert (entry.pop("optimizer"), entry.pop("finer")) == ("adamw", 1)  # reports from before there was a choice
    out.write_text(json.dumps(first))
    assert swapped_layers.main(arguments(given, out, "--variants", "sse N=4", "gla", "--resume")) == 0
    report = json.loads(out.read_text())
    assert [(entry["name"], entry["seed"]) for entry in report["variants"]] == [("gla", 0), ("sse N=4", 0)]
    assert report["variants"][0] == first["variants"][0]
    for entry in report["variants"]:
        assert entry["trained"]["steps"] == 7
        assert entry["text"][0]["loss"] != entry["before"][0]["loss"]
        assert entry["text"][0]["teacher"] == entry["before"][0]["teacher"]
        assert len(entry["needles"]) == len(entry["needles_reset"]) == 4
    assert (tmp_path / "result.png").stat().st_size > 0
    assert "sse N=4 (seed 0" in capsys.readouterr().err


def test_muon_in_finer_steps_stands_in_the_report(given, tmp_path):
    out, name = tmp_path / "result.json", "N=64, Muon, steps of half the rows"
    assert swapped_layers.main(["muon", *arguments(given, out, "--variants", name)[1:]]) == 0
    (entry,) = json.loads(out.read_text())["variants"]
    assert (entry["optimizer"], entry["finer"], entry["rate"]) == ("muon", 2, 3e-3)
    assert (entry["trained"]["steps"], entry["trained"]["tokens"]) == (12, 6 * 128 + 4 * 192 + 2 * 384)


def test_finer_steps_have_a_row_at_least():
    phase = Phase(64, 6, 5)
    assert [phase.finer(times) for times in (1, 2, 8)] == [phase, Phase(64, 6, 2), Phase(64, 6, 1)]


def test_variants_of_muon_differ_in_how_they_are_trained():
    """Each of the two layers is the best of `long`."""
    for size in ("N=64", "N=128"):
        own = {name: variant for name, variant in SETS["muon"].items() if name.startswith(size)}
        assert own.pop(size) == SETS["long"][f"{size}, k=4, own decay, delta rule"]
        for name, variant in own.items():
            assert variant.set == SETS["muon"][size].set
            assert variant.optimizer == ("muon" if "Muon" in name else "adamw")


def test_a_report_goes_on_though_its_set_has_lost_a_variant(given, tmp_path):
    out = tmp_path / "result.json"
    assert swapped_layers.main(arguments(given, out, "--variants", "gla")) == 0
    out.write_text(out.read_text().replace('"name": "gla"', '"name": "older"'))
    assert swapped_layers.main(arguments(given, out, "--variants", "gla", "--resume")) == 0
    assert [entry["name"] for entry in json.loads(out.read_text())["variants"]] == ["older", "gla"]


def test_a_variant_without_memory_is_left_out(given, tmp_path, monkeypatch):
    """The next one is measured, and a later run with --resume makes up for it."""
    measure, out = swapped_layers._measure, tmp_path / "result.json"

    def measured(recipe, bed, variant, *rest):
        if variant.mixer == "gla":
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore words.")
        return measure(recipe, bed, variant, *rest)

    said: list[str] = []
    monkeypatch.setattr(swapped_layers, "_measure", measured)
    monkeypatch.setattr(swapped_layers, "say", said.append)
    assert swapped_layers.main(arguments(given, out, "--variants", "gla", "sse N=4")) == 0
    assert [entry["name"] for entry in json.loads(out.read_text())["variants"]] == ["sse N=4"]
    assert said[0] == "gla (seed 0): left out, CUDA out of memory."


def test_bad_requests_are_refused(given, tmp_path, capsys):
    out = tmp_path / "result.json"
    assert swapped_layers.main(arguments(given, out, "--variants", "gal")) == 2
    assert "variant 'gal'" in capsys.readouterr().err
    assert not out.exists()


def test_a_window_as_long_as_the_rows_is_the_teacher(given):
    bed, student = bed_and_student(given, "layers.overrides={1: sliding}", "mixers.sliding.window=192")
    for entry in text_scores(student, bed):
        assert entry["loss"] == pytest.approx(entry["teacher"], abs=1e-6)
    for entry in needle_scores(student, bed):
        assert entry["accuracy"] == entry["teacher"]
        assert entry["answer_loss"] == pytest.approx(entry["teacher_answer_loss"], abs=1e-5)


def test_the_loss_of_answers_is_the_models_own_on_their_tokens(given):
    bed, student = bed_and_student(given, "layers.overrides={1: gla}")
    for (samples, states), entry in zip(bed.needles, needle_scores(student, bed), strict=True):
        ids = states.ids_RT.long()
        with torch.no_grad():
            logits = student(input_ids=ids, use_cache=False).logits
        count = samples[0].answer_len
        expected = torch.nn.functional.cross_entropy(
            logits[:, -count - 1 : -1].flatten(0, 1), ids[:, -count:].flatten()
        )
        assert all(sample.answer_len == count for sample in samples)
        assert entry["answer_loss"] == pytest.approx(float(expected), abs=1e-5)
        assert entry["answer_loss"] != pytest.approx(entry["teacher_answer_loss"], abs=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_only_the_swapped_attention_moves(given, optimizer):
    bed, student = bed_and_student(given, "layers.overrides={1: gla}")
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    trained = train(student, bed, rate=1e-2, seed=0, phases=SHORT, optimizer=optimizer)
    moved = {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all(name.startswith("model.layers.1.self_attn.") for name in moved)
    assert (trained.steps, trained.tokens) == (30, 6 * 64 + 2 * 192 + 50 * 96)
    assert trained.curve[-1] < trained.curve[2]  # tenths of 3 steps


def test_muon_moves_the_matrices_and_adamw_the_rest(given):
    """In the first step all but matrices move to the bit as with AdamW, which sees the same gradients."""
    after = {}
    for optimizer in ("adamw", "muon"):
        bed, student = bed_and_student(given, "layers.overrides={1: sse}", "mixers.sse.update=delta")
        attention = {name: p for name, p in student.named_parameters() if ".layers.1.self_attn." in name}
        before = {name: p.detach().clone() for name, p in attention.items()}
        train(student, bed, rate=1e-2, seed=0, phases=(Phase(64, 2, 2),), optimizer=optimizer)
        after[optimizer] = {name: p for name, p in attention.items() if not torch.equal(p, before[name])}
    assert after["adamw"].keys() == after["muon"].keys()
    matrices = {name for name, p in after["muon"].items() if p.dim() == 2}
    differing = {name for name, p in after["muon"].items() if not torch.equal(p, after["adamw"][name])}
    assert differing == matrices
    assert 5 < len(matrices) < len(after["muon"])


def test_resetting_states_changes_a_recurrent_layer_and_no_window(given):
    changes = {}
    for mixer in ("gla", "sliding"):
        bed, student = bed_and_student(given, f"layers.overrides={{1: {mixer}}}")
        whole, reset = (text_scores(student, bed, reset_every=every) for every in (None, 8))
        changes[mixer] = max(abs(a["loss"] - b["loss"]) for a, b in zip(whole, reset, strict=True))
    assert changes["gla"] > 1e-6
    assert changes["sliding"] == 0


@pytest.mark.parametrize("name", sorted(SETS))
def test_every_variant_of_every_set_is_a_valid_recipe(given, name):
    options = swapped_layers.parser().parse_args([*arguments(given, "x"), "--layers", "1", "7"])
    for variant in SETS[name].values():
        recipe = swapped_layers._recipe(options, variant, 0)
        first = variant.mixer if variant.only is None else "sliding"
        assert recipe.layers.overrides == {"1": first, "7": variant.mixer}


@pytest.mark.shared
def test_a_state_in_one_layer_and_one_in_each_of_eight_have_the_same_bytes():
    """What the set `bytes` is for, worked out from the plan of the small teacher."""
    sizes = {}
    for name, variant in SETS["bytes"].items():
        options = swapped_layers.parser().parse_args(["bytes", "--out", "x", "--layers", *"01235678"])
        recipe = swapped_layers._recipe(options, variant, 0)
        sizes[name] = api.plan(recipe).to_dict()["cache"][0]["hybrid_bytes"]
    alone = sizes.pop("windows in all")
    assert len(set(sizes.values())) == 1
    assert min(sizes.values()) > alone
