"""The end-to-end benchmark on a tiny model on the CPU, and the reading of its figures."""

import json
import math

import pytest
import torch
from transformers import Qwen3Config

from benchmarks.kernels import hybrid, hybrid_checks, hybrid_decoding, hybrid_measure, plot_hybrid
from benchmarks.kernels.hybrid_decoding import OWN, prefill, step_attention
from benchmarks.kernels.hybrid_models import build, subject, subject_of_folder
from benchmarks.kernels.hybrid_training import Trainer, next_token_loss, random_ids
from sse_convert.inference.cuda_graphs import TokenStep
from sse_convert.kernels import dispatch
from sse_convert.training.compiling import compile_layers

CPU = torch.device("cpu")
DRY_RUN = ["--shapes", "tiny", "--device", "cpu", "--backend", "varlen", "--step-tokens", "96", "--decode-tokens", "96",
           "--seconds", "0", "--groups"]  # fmt: skip


def tiny(model, **options):
    return build(subject("tiny"), model, device=CPU, dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("hybrid") / "report.json"
    with pytest.MonkeyPatch.context() as patch:
        for module, name, fewer in ((hybrid_decoding, "BLOCKS", 1), (hybrid_decoding, "STEPS", 1),
                                    (hybrid_decoding, "WARM_UP", 0), (hybrid_checks, "LENGTH", 140)):  # fmt: skip
            patch.setattr(module, name, fewer)
        hybrid.main(["--out", str(out), *DRY_RUN, "check", "train", "decode"])
    assert not list(out.parent.glob("*.tmp"))
    return json.loads(out.read_text())


def test_dry_run_measures_every_model(report):
    assert not [row for section in ("training", "prefill", "decoding") for row in report[section] if "error" in row]
    assert [row["model"] for row in report["training"]] == ["teacher", "hybrid-kv", "hybrid-query"]
    assert [(row["model"], row["batch"], row["attention"]) for row in report["decoding"]] == [
        *(("teacher", batch, choice) for batch in (1, 2) for choice in ("own", "default")),
        *((model, batch, "own") for model in ("hybrid-kv", "hybrid-query") for batch in (1, 2)),
    ]
    assert all(row["tokens_per_s"] > 0 for row in report["training"] + report["decoding"])
    first = report["training"][0]
    assert first["tokens_per_s"] == pytest.approx(96 / first["seconds"])
    assert report["environment"]["commit"]


def test_the_cache_of_a_hybrid_holds_what_its_layers_need(report):
    softmax, state = 2 * 2 * 48 * 8 * 4, 5 * 8 * 8 * 4
    sizes = {row["model"]: row["cache_gib"] * 2**30 for row in report["decoding"] if row["batch"] == 1}
    counters = 6 * 8
    assert sizes["teacher"] == pytest.approx(5 * softmax, abs=counters)
    assert sizes["hybrid-kv"] == pytest.approx(softmax + 4 * 2 * state, abs=counters)
    assert sizes["hybrid-query"] == pytest.approx(softmax + 4 * 4 * state, abs=counters)


def test_everything_was_compared_before_it_was_timed(report):
    checks = report["checks"]["tiny"]
    assert all(check["ok"] for check in checks)
    assert sum("varlen against reference" in check["what"] for check in checks) == 8
    assert sum("attention, against forward" in check["what"] for check in checks) == 6
    assert all(check["error"] > 0 for check in checks)


def test_nothing_is_timed_if_a_backend_is_wrong(tmp_path, monkeypatch):
    name, (right, note) = "reference", dispatch._BACKENDS["reference"]

    def wrong(x):
        o, final = right(x)
        return o * torch.linspace(1, 1.01, o.shape[-1]), final

    monkeypatch.setitem(dispatch._BACKENDS, name, (wrong, note))
    monkeypatch.setattr(hybrid_checks, "LENGTH", 140)
    out = tmp_path / "report.json"
    with pytest.raises(SystemExit, match="nothing was timed"):
        hybrid.main(["--out", str(out), *DRY_RUN, "check", "train"])
    assert "training" not in json.loads(out.read_text())


def test_a_failing_row_says_why_and_the_others_go_on(tmp_path, monkeypatch):
    step = Trainer.step

    def broken(self, ids):
        if hasattr(self.model, "sse_layers"):
            raise torch.OutOfMemoryError("no room")
        step(self, ids)

    monkeypatch.setattr(Trainer, "step", broken)
    out = tmp_path / "report.json"
    hybrid.main(["--out", str(out), *DRY_RUN, "train", "--models", "hybrid-kv", "teacher"])
    rows = json.loads(out.read_text())["training"]
    assert [row.get("error") for row in rows] == ["out of memory", None]


def test_nothing_starts_past_the_deadline(tmp_path):
    out = tmp_path / "report.json"
    hybrid.main(["--out", str(out), *DRY_RUN, "train", "--deadline", "-1"])
    assert "training" not in json.loads(out.read_text())


def test_a_resumed_run_measures_what_its_commit_has_not(tmp_path, monkeypatch):
    """A figure of the same commit stays, one of another commit is replaced, what is not asked for is left alone."""
    out, measured = tmp_path / "report.json", []
    monkeypatch.setattr(Trainer, "measure", lambda self, *args, **options: measured.append(1) or {"tokens_per_s": 1.0})
    command = ["--out", str(out), *DRY_RUN, "train", "--models", "teacher", "hybrid-kv"]
    for commit, models, resumed, expected in (
        ("first", ["teacher", "hybrid-kv"], [], {"teacher": "first", "hybrid-kv": "first"}),
        ("first", ["teacher", "hybrid-kv"], ["--resume"], {"teacher": "first", "hybrid-kv": "first"}),
        ("second", ["hybrid-kv"], ["--resume"], {"teacher": "first", "hybrid-kv": "second"}),
    ):
        monkeypatch.setenv("COMMIT", commit)
        hybrid.main([*command[:-2], *models, *resumed])
        report = json.loads(out.read_text())
        assert {row["model"]: row["commit"] for row in report["training"]} == expected
    assert len(measured) == 3
    assert [run["commit"] for run in report["earlier"]] == ["first", "first"]
    assert report["environment"]["commit"] == "second"
    assert "| second |" in plot_hybrid.markdown(report)


def test_a_figure_that_fails_later_is_not_lost(tmp_path, monkeypatch):
    out = tmp_path / "report.json"
    monkeypatch.setattr(Trainer, "measure", lambda self, *args, **options: {"tokens_per_s": 1.0})
    command = ["--out", str(out), *DRY_RUN, "train", "--models", "teacher"]
    monkeypatch.setenv("COMMIT", "first")
    hybrid.main(command)
    monkeypatch.setenv("COMMIT", "second")
    hybrid.main([*command, "--resume"])
    monkeypatch.setenv("COMMIT", "third")
    monkeypatch.setattr(Trainer, "measure", lambda self, *args, **options: 1 / 0)
    hybrid.main([*command, "--resume"])
    rows = json.loads(out.read_text())["training"]
    assert [(row["commit"], "error" in row) for row in rows] == [("second", False), ("third", True)]


def test_softmax_layers_attend_to_every_slot_on_request():
    """The keys of a slot that nothing filled are zeros: seen under `default`, hidden under `own`."""
    model = tiny("teacher")
    ids = random_ids(model, 1, 20)
    found = {}
    for slots in (20, 30):
        for choice in (OWN, "default"):
            with torch.no_grad():
                step = TokenStep(model, prefill(model, ids[:, :-1]), ids[:, -1:], slots)
                with step_attention(model, choice):
                    found[choice, slots] = step()
    assert torch.allclose(found[OWN, 20], found[OWN, 30], atol=1e-6)
    assert torch.allclose(found[OWN, 20], found["default", 20], atol=1e-6)
    assert not torch.allclose(found["default", 20], found["default", 30], atol=1e-4)


@pytest.mark.smoke
def test_teacher_and_hybrid_share_their_first_weights_and_the_loss_starts_at_chance():
    teacher, student = tiny("teacher"), tiny("hybrid-kv")
    assert torch.equal(teacher.get_input_embeddings().weight, student.get_input_embeddings().weight)
    ids = random_ids(teacher, 2, 30)
    for model in (teacher, student):
        assert next_token_loss(model, ids).item() == pytest.approx(math.log(97), rel=0.05)


def test_a_step_trains_every_weight():
    model = tiny("hybrid-query", backend="varlen")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    Trainer(model).step(random_ids(model, 2, 40))
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []


def test_compiled_layers_are_inside_their_checkpoints(monkeypatch):
    model = tiny("hybrid-kv", backend="varlen")
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda call, **_: compiled.append(call) or call)
    compile_layers(model)
    assert len(compiled) == 5


def test_a_folder_with_a_config_alone_is_measured_with_random_weights(tmp_path):
    Qwen3Config(num_hidden_layers=5, max_position_embeddings=8192).save_pretrained(tmp_path)
    found = subject_of_folder(tmp_path)
    assert (found.weights, found.training) == (None, (2048, 8192))


def test_a_slow_first_run_counts_only_where_nothing_is_compiled(monkeypatch):
    times = iter([9.0, 1.0, 3.0, 2.0])
    monkeypatch.setattr(hybrid_measure, "timed", lambda run, device: next(times))
    timing = hybrid_measure.measure(lambda: None, CPU, budget=100)
    assert (timing.seconds, timing.repeats, timing.spread, timing.warm) == (2.0, 3, 3.0, True)
    times = iter([9.0])
    timing = hybrid_measure.measure(lambda: None, CPU, budget=100, cold_limit=8)
    assert (timing.seconds, timing.repeats, timing.warm) == (9.0, 1, False)


def row(section, model, context, **figures):
    entry = {"shape": "0.6b", "model": model, "context": context, "batch": 1, "attention": "flash", "compiled": False}
    return section, {**entry, **figures}


def figures(*rows):
    environment = dict.fromkeys(("device", "torch", "triton", "transformers", "commit", "date", "command"), "x")
    made = {"environment": environment}
    for section, entry in rows:
        made.setdefault(section, []).append(entry)
    return made


def test_a_hybrid_gets_the_kernel_that_was_best_for_the_teacher(tmp_path):
    run = hybrid.Run(hybrid.parse(["--out", str(tmp_path / "r.json"), "--device", "cpu"]))
    case = subject("0.6b")
    assert run.best_kernel(case, 8192) == "default"
    for context, kernel, compiled, speed in ((2048, "flash", False, 9.0), (8192, "flash", False, 1.0),
                                             (8192, "cudnn", False, 2.0), (8192, "flash", True, 3.0)):  # fmt: skip
        _, entry = row("training", "teacher", context, tokens_per_s=speed)
        run.report.setdefault("training", []).append({**entry, "attention": kernel, "compiled": compiled})
    found = [run.best_kernel(case, context) for context in (2048, 8192, 2**17)]
    assert found == ["flash", "cudnn", "cudnn"]


def test_verdicts_take_the_best_of_both_sides():
    made = figures(
        row("training", "teacher", 2**15, tokens_per_s=100.0),
        row("training", "teacher", 2**15, tokens_per_s=120.0),
        row("training", "hybrid-kv", 2**15, tokens_per_s=240.0),
        row("training", "hybrid-query", 2**15, tokens_per_s=239.0),
        row("training", "hybrid-kv", 2**15, error="out of memory"),
        row("decoding", "teacher", 2**17, tokens_per_s=10.0, peak_gib=20.0, step_ms=1.0, least_read_gib=1.0),
        row("decoding", "hybrid-kv", 2**17, tokens_per_s=29.0, peak_gib=7.0, step_ms=1.0, least_read_gib=1.0),
    )
    found = [(name, target.what, round(ratio, 3), target.met(ratio)) for _, name, _, target, ratio
             in plot_hybrid.verdicts(made)]  # fmt: skip
    assert found == [
        ("hybrid-kv", "training tokens/s at 32k", 2.0, True),
        ("hybrid-query", "training tokens/s at 32k", 1.992, False),
        ("hybrid-kv", "decode tokens/s at 128k", 2.9, False),
        ("hybrid-kv", "decode memory at 128k", 0.35, True),
    ]
    text = plot_hybrid.markdown(made)
    assert "| training tokens/s at 32k ≥ 2x | 0.6b | hybrid-kv | 1 | 2.00x | met |" in text
    assert "| 0.6b | hybrid-kv | 32k | 1 | flash |  | x | out of memory |  |" in text


def test_the_picture(report, tmp_path, capsys):
    source, picture = tmp_path / "r.json", tmp_path / "r.png"
    source.write_text(json.dumps(report))
    plot_hybrid.main([str(source), "--png", str(picture), "--shape", "tiny"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| tiny | hybrid-query | 48 | 2 |" in capsys.readouterr().out
