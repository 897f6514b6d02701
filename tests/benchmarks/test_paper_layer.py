"""The paper's comparisons on one layer: what they compare, how they are judged, and what the README says of them."""

import json
import os
import re
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

from benchmarks.paper import layer
from benchmarks.paper.comparisons import COMPARISONS
from benchmarks.quality import swapped_layers


def settings(given, name):
    """The layer that each variant makes, as SSE and as a dict."""
    options = layer.parser().parse_args(
        [name, "--out", "x", "--recipe", str(given), "--layers", "1", "--set", "mixers={}"]
    )
    found = {}
    for variant, own in COMPARISONS[name].variants.items():
        mixer = swapped_layers._recipe(options, own, 0).mixers[own.mixer]
        found[variant] = {key: getattr(mixer, key) for key in mixer.__slots__ if key != "kind"}
    return found


def different(a, b):
    return {key for key in a if a[key] != b[key]}


@pytest.mark.parametrize("name", sorted(COMPARISONS))
def test_variants_differ_in_what_is_compared_and_nothing_else(given, name):
    comparison, found = COMPARISONS[name], settings(given, name)
    compared = [own for variant, own in found.items() if variant not in comparison.beside]
    assert set().union(*(different(compared[0], own) for own in compared[1:])) == set(comparison.differ_in)
    assert all(different(a, b) for i, a in enumerate(compared) for b in compared[:i])
    assert {variant.rate for variant in comparison.variants.values()} == {3e-3}
    assert {name for pair in (*comparison.ahead, *comparison.not_behind) for name in pair} <= set(found)


def test_gla_is_the_single_state_without_the_shared_partition(given):
    found = settings(given, "states")
    assert different(found["GLA"], found["N = 1"]) == {"shared_partition", "qk_rank", "balance"}


def test_separate_parameters_are_two_steps_from_the_paper_s_sse(given):
    found = settings(given, "parameters")
    assert different(found["shared, side path"], found["shared"]) == {"qk_rank"}
    assert different(found["shared"], found["separate"]) == {"shared_params"}


@pytest.mark.smoke
def test_both_rules_are_expanded_alike(given):
    """SSE is GLA with more states, and SSE over the delta rule is the gated delta rule with the same."""
    found = settings(given, "conversion")
    expansion = {"num_partitions", "top_k", "shared_partition", "qk_rank", "balance"}
    assert different(found["GLA"], found["SSE"]) == expansion
    assert different(found["GDN"], found["SSE, delta rule"]) == expansion
    assert different(found["MoM"], found["SSE"]) == {"gate", "shared_params", "shared_queries", "qk_rank"}
    assert different(found["GDN"], found["KDA"]) == {"decay"}


def test_variants_of_a_claim_at_another_size_differ_from_the_first_in_that_size_alone(given):
    for name, other in (("keys", "keys_paper"), ("parameters", "parameters_16")):
        first, second = settings(given, name), settings(given, other)
        assert all(different(first[variant], second[variant]) == {"num_partitions"} for variant in first)
    assert COMPARISONS["hybrid"].variants == COMPARISONS["conversion"].variants


def entry(name, seed, *, found, gap):
    """A run with 100 needles at each of two lengths."""
    needles = [{"length": n, "samples": 100, "accuracy": found, "teacher": 1.0} for n in (2048, 8192)]
    text = [{"length": n, "gap": gap} for n in (2048, 8192)]
    cache = [{"length": n, "hybrid_bytes": 5 * n + 300} for n in (4096, 8192)]
    return {"name": name, "seed": seed, "needles": needles, "text": text, "cache": cache}


def judge(entries, name="keys"):
    return layer.verdicts(COMPARISONS[name], layer.measures(entries))


def judged(runs, name="keys"):
    return judge([entry(variant, seed, found=found, gap=gap) for variant, seed, found, gap in runs], name)


def test_figures_that_agree_with_a_claim_or_do_not():
    runs = [("softmax", 0, 0.8, 0.10), ("softmax", 1, 0.82, 0.102), ("silu", 0, 0.3, 0.2), ("silu", 1, 0.31, 0.201)]
    found = judged(runs)
    assert (found["needles"], found["loss"]) == ("holds", "holds")
    swapped = [("silu" if name == "softmax" else "softmax", *rest) for name, *rest in runs]
    assert (judged(swapped)["needles"], judged(swapped)["loss"]) == ("fails", "fails")
    near = [(*run[:2], 0.5 + run[2] / 100, 0.1 + (-1) ** i * 0.01) for i, run in enumerate(runs)]
    assert (judged(near)["needles"], judged(near)["loss"]) == ("undecided", "undecided")


def test_the_loss_of_answers_is_judged_where_all_runs_have_it():
    losses = {("softmax", 0): 0.50, ("softmax", 1): 0.52, ("silu", 0): 0.90, ("silu", 1): 0.93}
    entries = [entry(*run, found=0.0, gap=0.1) for run in losses]
    for own in entries:
        own["needles"] = [{**n, "answer_loss": losses[own["name"], own["seed"]]} for n in own["needles"]]
    found = judge(entries)
    assert {kind: found[kind] for kind in ("needles", "answers", "loss")} == {
        "needles": "undecided", "answers": "holds", "loss": "undecided"
    }  # fmt: skip
    (difference,) = next(row for row in found["measures"] if row["measure"] == "answers")["ahead"]
    assert difference["by"] == pytest.approx(0.405)
    del entries[0]["needles"][1]["answer_loss"]
    assert "answers" not in judge(entries)


def test_only_seeds_that_all_variants_have_count():
    runs = [("softmax", 0, 0.8, 0.1), ("softmax", 1, 0.0, 0.9), ("silu", 0, 0.3, 0.2)]
    found = judged(runs)
    assert found["needles"] == "undecided"
    (difference,) = found["measures"][0]["ahead"]
    assert (difference["by"], difference["doubt"]) == (pytest.approx(0.5), None)
    assert judged([("softmax", 0, 0.8, 0.1), ("silu", 1, 0.3, 0.2)])["measures"][0]["ahead"][0]["by"] is None


def test_a_step_that_falls_stops_growth_from_holding():
    shares = {"k = 1": 0.2, "k = 2": 0.9, "k = 3": 0.5, "k = 4": 0.6}
    runs = [(name, seed, share + seed / 100, 0.1) for name, share in shares.items() for seed in (0, 1)]
    assert judged(runs, "top_k")["needles"] == "mixed"


def test_variants_for_orientation_decide_nothing():
    """Their seeds hardly differ, which would narrow the interval of the others."""
    names = COMPARISONS["states"].variants
    runs = [(name, seed, 0.1 * i + 0.04 * (i % 2 == seed), 0.1) for i, name in enumerate(names) for seed in (0, 1)]
    others = [run for run in runs if run[0] != "GLA"]
    assert judged(runs, "states") == judged(others, "states")
    assert judged([*others, ("GLA", 0, 0.9, 0.0), ("GLA", 1, 0.9, 0.0)], "states") == judged(others, "states")


def test_states_are_what_does_not_grow():
    assert layer.state_bytes(entry("a", 0, found=0, gap=0)["cache"]) == 300


def call(given, out, *names):
    return [*names, "--recipe", str(given), "--layers", "1", "--tiny", "--out", str(out)]


def test_a_comparison_runs_and_goes_on(given, tmp_path, capsys):
    two = [*call(given, tmp_path, "keys"), "--variants", "softmax", "silu"]
    assert layer.main([*two, "--seeds", "1"]) == 0
    assert json.loads((tmp_path / "keys.json").read_text())["verdicts"]["needles"] == "undecided"
    assert layer.main([*two, "--seeds", "2", "--resume"]) == 0
    report = json.loads((tmp_path / "keys.json").read_text())
    assert [(run["name"], run["seed"]) for run in report["variants"]] == [
        ("softmax", 0), ("silu", 0), ("softmax", 1), ("silu", 1)
    ]  # fmt: skip
    assert (report["claim"], report["differ_in"]) == (COMPARISONS["keys"].claim, ["k_feature_map"])
    assert report["settings"]["overrides"] == ["data.needles.early=0.7"]
    assert set(report["figures"]) == {"teacher", "softmax", "silu"}
    assert all(row["ahead"][0]["doubt"] is not None for row in report["verdicts"]["measures"])
    assert (tmp_path / "keys.png").stat().st_size > 0
    assert "softmax keys recall more than SiLU keys" in capsys.readouterr().err


def test_a_variant_that_stands_in_several_comparisons_runs_once(given, tmp_path, monkeypatch):
    """k = 4 with N = 16 is in `ratio` and `top_k`; one that an earlier run has written counts as well."""
    made = []
    measure = swapped_layers._measure
    monkeypatch.setattr(swapped_layers, "_measure", lambda *given: made.append(1) or measure(*given))
    options = layer.parser().parse_args([*call(given, tmp_path, "top_k", "ratio"), "--seeds", "1", "--resume"])
    few = {
        name: {key: COMPARISONS[name].variants[key]} for name, key in (("top_k", "k = 4"), ("ratio", "N = 16, k = 4"))
    }
    reports = []
    for _ in range(2):
        runner = swapped_layers.Runner(options)
        reports.append([runner.run(name, variants, tmp_path / f"{name}.json") for name, variants in few.items()])
    assert reports[0] == reports[1]
    assert len(made) == 1
    (first,), (second,) = (report["variants"] for report in reports[0])
    assert second == {**first, "name": "N = 16, k = 4", "run_of": "top_k: k = 4"}


def test_trainings_side_by_side_are_the_trainings_one_by_one(given, tmp_path, capsys):
    """In processes that share the rows. With no time nothing begins, and --resume makes up for it."""
    two = ["--variants", "softmax", "silu", "--seeds", "1", "--resume"]
    runs = {jobs: [*call(given, tmp_path / jobs, "keys"), *two, "--jobs", jobs] for jobs in ("1", "2")}
    assert layer.main([*runs["2"], "--minutes", "0"]) == 0
    assert "keys: 2 variants and seeds are left" in capsys.readouterr().err
    assert not (tmp_path / "2").exists()
    reports = {}
    for jobs, run in runs.items():
        assert layer.main(run) == 0
        found = json.loads((tmp_path / jobs / "keys.json").read_text())["variants"]
        reports[jobs] = {own["name"]: (own["text"], own["needles"], own["trained"]) for own in found}
    assert reports["1"] == reports["2"]
    assert re.search(r"keys +1 +undecided +undecided +undecided", capsys.readouterr().err)


def test_a_training_without_memory_beside_others_is_run_alone(given, tmp_path, monkeypatch, capsys):
    measure, own = swapped_layers._measure, os.getpid()

    def measured(recipe, bed, variant, *rest):
        if "silu" in variant.set.values() and os.getpid() != own:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return measure(recipe, bed, variant, *rest)

    monkeypatch.setattr(swapped_layers, "_measure", measured)
    two = ["--variants", "softmax", "silu", "--seeds", "1", "--jobs", "2"]
    assert layer.main([*call(given, tmp_path, "keys"), *two]) == 0
    found = json.loads((tmp_path / "keys.json").read_text())["variants"]
    assert [entry["name"] for entry in found] == ["softmax", "silu"]
    assert "left out" not in capsys.readouterr().err


def test_a_bed_reaches_processes_that_are_not_forked(given):
    """Those beside a GPU are spawned: rows, states and the teacher are pickled, tensors as handles."""
    options = layer.parser().parse_args(call(given, "x", "keys"))
    recipe = swapped_layers._recipe(options, COMPARISONS["keys"].variants["silu"], 0)
    bed = swapped_layers._bed(recipe, options, torch.device("cpu"), swapped_layers.TINY_SIZES)
    size = sum(x.nbytes for x in (*bed.teacher.parameters(), *(x.first_RTD for x in bed.train.values())))
    assert len(ForkingPickler.dumps(bed)) < size / 2


def test_a_figure_without_the_loss_of_answers_is_measured_again(given, tmp_path):
    run = [*call(given, tmp_path, "keys"), "--variants", "silu", "--seeds", "1", "--resume"]
    assert layer.main(run) == 0
    out = tmp_path / "keys.json"
    first = json.loads(out.read_text())
    out.write_text(re.sub(r'\s*"answer_loss": [^,]*,', "", out.read_text()))
    assert layer.main(run) == 0
    again = json.loads(out.read_text())
    assert again["variants"][0]["needles"] == first["variants"][0]["needles"]


PAPER = Path("benchmarks/paper")


@pytest.mark.parametrize("name", sorted(name for name in COMPARISONS if (PAPER / f"{name}.json").is_file()))
def test_the_stored_verdicts_are_those_of_the_stored_figures(name):
    report = json.loads((PAPER / f"{name}.json").read_text())
    judged_again = layer.verdicts(COMPARISONS[name], layer.measures(report["variants"]))
    assert report["verdicts"]["measures"]
    for own, again in zip(report["verdicts"]["measures"], judged_again["measures"], strict=True):
        assert own["outcome"] == again["outcome"]
