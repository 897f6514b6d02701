"""Calibration against brute force: distances, head sizes, half-lives, and what the calibrated layers then do."""

import dataclasses as dc
import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from sse_convert.calibration import calibrate
from sse_convert.calibration.attention_statistics import Collector, LayerStatistics
from sse_convert.calibration.calibrate import calibrate_checkpoint, load_as_teacher
from sse_convert.calibration.initial_values import (
    MIN_SCALE,
    SPREAD,
    decay_values,
    half_life_bias,
    half_lives,
    output_scale,
)
from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.checkpoints.provenance import FILE
from sse_convert.checkpoints.teacher import source_view
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, DataError, OutputError, RecipeError
from sse_convert.mixers import DECAY_NORMALIZER, SSEMixer, SSESlidingMixer
from sse_convert.modeling.architectures import source_spec
from sse_convert.modeling.attention_dims import AttentionDims
from sse_convert.modeling.auto import load_pretrained
from sse_convert.modeling.layout import document_starts, row_layout
from sse_convert.modeling.window.masks import packed_arguments
from sse_convert.modeling.window.sliding import attention_mask_for, training_mask
from sse_convert.surgery.compatibility import calibration_problems
from sse_convert.surgery.convert import NEW_SHARD, convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.surgery.verify_run import verify_folder
from tests.modeling.tiny import FAMILIES, tiny_source
from tests.surgery.models import digests, recipe, recipe_file, save_source, tokens

PACKED = torch.tensor([[*range(10), *range(14)], [*range(24)]])
"""positions of two rows, the first of two documents"""


def batches():
    return [{"input_ids": tokens(2, 24), "position_ids": PACKED}]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A teacher and its conversion."""
    folder = tmp_path_factory.mktemp("calibrate")
    save_source(folder / "teacher")
    convert_checkpoint(Job.of(recipe(folder / "teacher")), folder / "converted")
    return folder


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "gemma2"])
def test_statistics_by_brute_force(model_type):
    model = tiny_source(model_type)
    collector = Collector(model, source_spec(model_type), [0, 2])
    (batch,) = batches()
    collector.run(batch)
    with torch.no_grad():
        attentions = model(**batch, use_cache=False, output_attentions=True).attentions
    for layer, statistics in collector.statistics.items():
        for head in range(4):
            total = weight = 0.0
            for row, t in itertools.product(range(2), range(24)):
                for s in range(t + 1):
                    same = PACKED[row, t] - PACKED[row, s] == t - s
                    if same and PACKED[row, s] > 0:
                        weight += float(attentions[layer][row, head, t, s])
                        total += float(attentions[layer][row, head, t, s]) * (t - s)
            assert float(statistics.mean_distance()[head]) == pytest.approx(total / weight, rel=1e-4)
        assert statistics.tokens == 48


def test_packed_documents_do_not_mix_where_a_family_does_not_look():
    """gpt-oss, whose backbone does not separate documents: packed they give what they give one by one."""
    model = tiny_source("gpt_oss")
    ids = tokens(1, 24)
    packed, apart = (Collector(model, source_spec("gpt_oss"), [0, 1], windows={1: (4, 1)}) for _ in range(2))
    packed.run({"input_ids": ids, "position_ids": PACKED[:1]})
    for part in (slice(10), slice(10, None)):
        apart.run({"input_ids": ids[:, part], "position_ids": PACKED[:1, part]})
    for layer, expected in apart.statistics.items():
        found = packed.statistics[layer]
        assert found.tokens == expected.tokens
        for name in ("distance_H", "weight_H", "square_H", "missed_square_H"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-9)


def test_output_rms_by_brute_force():
    model = tiny_source("qwen3")
    seen = []
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    collector = Collector(model, source_spec("qwen3"), [1])
    (batch,) = batches()
    collector.run(batch)
    expected = seen[0].view(48, 4, 8).square().mean((0, 2)).sqrt()
    assert torch.allclose(collector.statistics[1].output_rms().float(), expected)


def test_hooks_are_gone_after_a_failure():
    model = tiny_source("qwen3")
    collector = Collector(model, source_spec("qwen3"), [0])
    with pytest.raises(IndexError):
        collector.run({"input_ids": tokens() + 1000, "position_ids": PACKED})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("half_life", [0.01, 1.0, 30.0, 4096.0])
def test_decay_bias_gives_the_half_life(half_life):
    bias = half_life_bias(torch.tensor([half_life]), 1).double()
    log_decay = torch.nn.functional.logsigmoid(bias) / DECAY_NORMALIZER
    assert float(torch.exp(log_decay * half_life)) == pytest.approx(0.5, rel=1e-5)


def test_channels_are_spread_around_the_half_life():
    bias = half_life_bias(torch.tensor([20.0, 40.0]), 8).view(2, 8).double()
    half = math.log(0.5) * 16 / torch.nn.functional.logsigmoid(bias)
    assert torch.allclose(half.log().mean(1).exp(), torch.tensor([20.0, 40.0]).double(), rtol=1e-5)
    assert half[0, 0].item() == pytest.approx(20 / SPREAD, rel=1e-4)
    assert half[0, -1].item() == pytest.approx(20 * SPREAD, rel=1e-4)


def test_decays_have_the_mean_distance_as_half_life():
    dims = AttentionDims(hidden=16, query_heads=2, kv_heads=2, head_dim=8, value_dim=8)
    sums = {field.name: torch.ones(2).double() for field in dc.fields(LayerStatistics) if field.name != "tokens"}
    statistics = LayerStatistics(**{**sums, "distance_H": torch.tensor([20.0, 300.0]).double()})
    (bias,) = decay_values(SSEMixer(decay="scalar"), dims, statistics).values()
    assert torch.equal(bias, half_life_bias(torch.tensor([20.0, 300.0]).double(), 1))


def test_half_lives_of_shared_states_and_their_bounds():
    assert half_lives(torch.tensor([4.0, 16.0, 0.1, 1e6]), 2).tolist() == pytest.approx([8.0, 64.0])
    assert half_lives(torch.tensor([4.0, 16.0, 0.1, 1e6]), 4).tolist() == pytest.approx([4.0, 16.0, 1.0, 4096.0])


def test_only_new_tensors_change(made, tmp_path):
    before = digests(made / "converted")
    report = calibrate_checkpoint(
        Job.of(recipe(made / "teacher")), made / "converted", tmp_path / "out", rows=batches()
    )
    assert digests(made / "converted") == before
    after = digests(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} == {NEW_SHARD}
    assert all((tmp_path / "out" / name).samefile(made / "converted" / name) for name in before if name != NEW_SHARD)
    old, new = (load_file(folder / NEW_SHARD) for folder in (made / "converted", tmp_path / "out"))
    assert old.keys() == new.keys()
    changed = {name.partition(".self_attn.")[2] for name in old if not torch.equal(old[name], new[name])}
    assert changed == {"sse_decay_up.bias", "sse_out_scale"}
    assert (report.rows, report.tokens, [layer.index for layer in report.layers]) == (2, 48, [0, 2])
    assert "written by" not in report.lines()[0]
    assert json.loads((tmp_path / "out" / FILE).read_text())["stage"] == "calibrate"
    others = {path.name for path in (made / "converted").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == others
    assert all(check.passed for check in verify_folder(tmp_path / "out").checks)


def test_settings_choose_what_changes(made, tmp_path):
    nothing = {"output_scale": "none"}
    calibrate_checkpoint(
        Job.of(recipe(made / "teacher", calibrate=nothing)), made / "converted", tmp_path / "same", rows=batches()
    )
    old, new = (load_file(folder / NEW_SHARD) for folder in (made / "converted", tmp_path / "same"))
    changed = {name.partition(".self_attn.")[2] for name in old if not torch.equal(old[name], new[name])}
    assert changed == {"sse_decay_up.bias"}


@pytest.mark.parametrize("model_type", ["llama", "phi3", "qwen3_next", "deepseek_v3", "gemma4_text"])
def test_calibrated_heads_are_as_large_as_the_teachers(tmp_path, model_type):
    """On the calibration text itself, layer by layer on the teacher's inputs, before the output projection."""
    source = save_source(tmp_path / "teacher", model_type)
    mixers = {"sse": {"kind": "sse", "qk_rank": 4}}
    asked = recipe(
        source,
        mixers=mixers,
        layers={"pattern": ["full", "sse", "sse", "full"]},
        calibrate={"rows": 2, "seq_len": 32, "output_scale": "size"},
    )
    convert_checkpoint(Job.of(asked), tmp_path / "converted")
    batch = {"input_ids": tokens(2, 24), "position_ids": torch.arange(24).expand(2, -1)}
    calibrate_checkpoint(Job.of(asked), tmp_path / "converted", tmp_path / "out", rows=[batch])
    teacher, student = load_pretrained(source), load_pretrained(tmp_path / "out")
    sizes = {}

    def measure(name):
        return lambda module, args: sizes.__setitem__(
            name, args[0].unflatten(-1, (4, -1)).flatten(0, -3).square().mean((0, 2)).sqrt()
        )

    for layer, new in student.sse_layers().items():
        old = teacher.model.layers[layer].self_attn
        old.o_proj.register_forward_pre_hook(measure(("teacher", layer)))
        new.o_proj.register_forward_pre_hook(measure(("student", layer)))

        def both(module, args, kwargs, new=new):
            new(kwargs["hidden_states"], kwargs["position_embeddings"], sse_layout=row_layout(2, 24, None))

        old.register_forward_pre_hook(both, with_kwargs=True)
    with torch.no_grad():
        teacher(**batch, use_cache=False)
    for layer in (1, 2):
        assert torch.allclose(sizes["student", layer], sizes["teacher", layer], rtol=1e-3)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_source_model_loads_from_a_converted_checkpoint(tmp_path, model_type, caplog):
    source = save_source(tmp_path / "teacher", model_type)
    convert_checkpoint(Job.of(recipe(source)), tmp_path / "converted")
    model = load_as_teacher(source_view(open_checkpoint(tmp_path / "converted")))
    plain = load_pretrained(source)
    plain.set_attn_implementation(model.config._attn_implementation)
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, plain(tokens()).logits)
    assert "UNEXPECTED" not in caplog.text


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_without_units_for_bfloat16_measures_in_float32(tmp_path, monkeypatch, fast, dtype):
    """It took eight times as long in the other; what is written has the checkpoint's dtype."""
    monkeypatch.setattr(calibrate, "fast_in_bfloat16", lambda device: fast)
    tiny_source("llama").to(torch.bfloat16).save_pretrained(tmp_path / "teacher")
    convert_checkpoint(Job.of(recipe(tmp_path / "teacher")), tmp_path / "converted")
    files = open_checkpoint(tmp_path / "converted")
    assert load_as_teacher(source_view(files)).dtype == dtype
    calibrate_checkpoint(Job.of(recipe(tmp_path / "teacher")), files.folder, tmp_path / "out", rows=batches())
    assert load_pretrained(tmp_path / "out", dtype=None).dtype == torch.bfloat16


def test_from_text_on_the_command_line(made, tmp_path, capsys):
    (tmp_path / "train.txt").write_text(" ".join(f"w{i % 90 + 3}" for i in range(2000)))
    data = {"train": [{"path": str(tmp_path / "train.txt")}]}
    mixers = {"sse": {"kind": "sse", "decay_params": "separate", "state_heads": "query", "decay": "scalar"}}
    file = recipe_file(tmp_path / "r.yaml", made / "teacher", data=data, mixers=mixers, layers={"pattern": ["sse"]})
    assert run_app(app, ["convert", str(file), "-o", str(tmp_path / "converted")]) == 0
    capsys.readouterr()
    assert (
        run_app(app, ["calibrate", str(file), "-c", str(tmp_path / "converted"), "-o", str(tmp_path / "out"), "--json"])
        == 0
    )
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["rows"], result["tokens"]) == (2, 64)
    assert len(result["layers"]) == 4
    new = load_file(tmp_path / "out" / NEW_SHARD)
    attention = "model.layers.1.self_attn"
    assert torch.equal(new[f"{attention}.sse_decay_up.bias"], new[f"{attention}.sse_shared_decay_up.bias"])


def test_refusals(made, tmp_path):
    asked = recipe(made / "teacher")
    with pytest.raises(CheckpointError, match="is a plain qwen3 checkpoint"):
        calibrate_checkpoint(Job.of(asked), made / "teacher", tmp_path / "out", rows=batches())
    with pytest.raises(RecipeError, match="was converted with other layers or mixers"):
        calibrate_checkpoint(
            Job.of(recipe(made / "teacher", layers={"pattern": ["sse"]})),
            made / "converted",
            tmp_path / "out",
            rows=batches(),
        )
    with pytest.raises(DataError, match="no calibration rows"):
        calibrate_checkpoint(Job.of(asked), made / "converted", tmp_path / "out", rows=[])
    with pytest.raises(OutputError, match="exists"):
        calibrate_checkpoint(Job.of(asked), made / "converted", made / "teacher", rows=batches())
    convert_checkpoint(Job.of(asked), tmp_path / "trained")
    data = json.loads((tmp_path / "trained" / FILE).read_text())
    (tmp_path / "trained" / FILE).write_text(json.dumps({**data, "stage": "align"}))
    with pytest.raises(CheckpointError, match="was written by stage align: its weights are no longer the teacher's"):
        calibrate_checkpoint(Job.of(asked), tmp_path / "trained", tmp_path / "out", rows=batches())
    assert not (tmp_path / "out").exists()


def test_interrupted_calibration_leaves_nothing(made, tmp_path):
    def rows():
        yield from batches()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(Job.of(recipe(made / "teacher")), made / "converted", tmp_path / "out", rows=rows())
    assert list(tmp_path.iterdir()) == []


BESIDE = {"pattern": ["sse+sliding", "sse", "sse+sliding", "full"]}
SMALL = {"sse": {"qk_rank": 4}}
WINDOW = {"kind": "sse+sliding", "qk_rank": 4, "window": 4, "sinks": 2}


@pytest.mark.parametrize(
    "model_type", ["qwen3", "phi3", "gpt_neox", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "gemma4_text"]
)
def test_what_a_window_misses_by_brute_force(model_type):
    """The heads of the teacher minus those of a teacher limited to the window in that layer."""
    native = {"sliding_window": 64} if model_type in ("gemma2", "gpt_oss", "gemma4_text") else {}
    model, spec = tiny_source(model_type, **native), source_spec(model_type)
    (batch,) = batches()
    collector = Collector(model, spec, [0, 1], windows={0: (4, 2)})
    collector.run(batch)
    attention, heads = model.get_submodule(spec.attention_path(0)), []
    getattr(attention, spec.output).register_forward_pre_hook(lambda module, args: heads.append(args[0]))
    sees = training_mask(None, document_starts(PACKED, 2), (2, 24), 4, 2, PACKED.device)
    limited = attention_mask_for("eager", sees, torch.float32)
    batch |= packed_arguments(model, PACKED)
    with torch.no_grad():
        model(**batch, use_cache=False)
        handle = attention.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": limited}), with_kwargs=True
        )
        model(**batch, use_cache=False)
        handle.remove()
    expected = (heads[0] - heads[1]).view(48, 4, -1).square().mean((0, 2)).sqrt()
    torch.testing.assert_close(collector.statistics[0].missed_rms().float(), expected)
    assert not collector.statistics[1].missed_square_H.any()


def test_distances_beside_a_window_are_those_beyond_it():
    model, windows = tiny_source("qwen3"), {0: (4, 2)}
    collector = Collector(model, source_spec("qwen3"), [0, 1], windows=windows)
    plain = Collector(model, source_spec("qwen3"), [0, 1])
    (batch,) = batches()
    for each in (collector, plain):
        each.run(batch)
    assert (collector.statistics[0].mean_distance() >= 4).all()
    assert (collector.statistics[0].mean_distance() > plain.statistics[0].mean_distance()).all()
    assert torch.equal(collector.statistics[1].mean_distance(), plain.statistics[1].mean_distance())


def heads_of_layer_0(model, scale=None):
    """[48, 4, 8] before the output projection, on the calibration text; `scale` replaces that of the new branch."""
    attention, heads = model.model.layers[0].self_attn, []
    if scale is not None:
        attention.sse_out_scale.data.fill_(scale)
    handle = attention.o_proj.register_forward_pre_hook(lambda module, args: heads.append(args[0]))
    with torch.no_grad():
        model(**batches()[0], use_cache=False)
    handle.remove()
    return heads[0].reshape(48, 4, -1).double()


@pytest.mark.parametrize("kind", ["fit", "size"])
@pytest.mark.parametrize(
    "mixer",
    [
        {"kind": "sse", "qk_rank": 4},
        {"kind": "sse", "qk_rank": 4, "state_heads": "query"},
        {"kind": "gla"},
        {"kind": "gdn"},
        WINDOW,
    ],
)
def test_branch_against_what_it_is_to_give(mixer, kind, tmp_path):
    """`fit` leaves an error that is orthogonal to the branch, `size` a branch as large as what it is to give."""
    save_source(tmp_path / "teacher")
    asked = recipe(
        tmp_path / "teacher",
        mixers={"x": mixer},
        layers={"pattern": ["full"], "overrides": {"0": "x"}},
        calibrate={"rows": 2, "seq_len": 32, "output_scale": kind},
    )
    convert_checkpoint(Job.of(asked), tmp_path / "converted")
    calibrate_checkpoint(Job.of(asked), tmp_path / "converted", tmp_path / "out", rows=batches())
    student = load_pretrained(tmp_path / "out")
    scale = student.model.layers[0].self_attn.sse_out_scale.detach().clone().view(4, 8)
    assert torch.equal(scale, scale[:, :1].expand(4, 8))
    whole, window = heads_of_layer_0(student), heads_of_layer_0(student, 0.0)
    target, branch = heads_of_layer_0(load_pretrained(tmp_path / "teacher")) - window, whole - window
    if kind == "size":
        torch.testing.assert_close(branch.square().mean((0, 2)), target.square().mean((0, 2)), rtol=1e-4, atol=0)
        return
    error, alone = ((target - part).square().sum((0, 2)) for part in (branch, 0))
    correlation = (target * branch).sum((0, 2)) / (alone * branch.square().sum((0, 2))).sqrt()
    fitted = scale[:, 0] > MIN_SCALE
    assert torch.equal(fitted, correlation > 0)
    torch.testing.assert_close(error[fitted], (alone * (1 - correlation**2))[fitted], rtol=1e-4, atol=0)
    assert (error <= alone * 1.01).all()


def statistics(product, square):
    """Of four heads over one token."""
    zeros = torch.zeros(4, dtype=torch.float64)
    return LayerStatistics(
        distance_H=zeros,
        weight_H=zeros,
        square_H=zeros,
        missed_square_H=zeros,
        student_square_H=torch.tensor(square, dtype=torch.float64),
        student_product_H=torch.tensor(product, dtype=torch.float64),
        tokens=1,
    )


def test_fitted_scales_of_known_heads():
    """The target itself, twice it, orthogonal to it, and silent."""
    dims = AttentionDims(hidden=4, query_heads=4, kv_heads=4, head_dim=1, value_dim=1)
    known = output_scale("fit", SSEMixer(), dims, statistics([1, 2, 0, 0], [1, 4, 1, 0]))
    assert known["sse_out_scale"].tolist() == pytest.approx([1, 0.5, MIN_SCALE, MIN_SCALE])
    opposed = output_scale("fit", SSEMixer(), dims, statistics([-1] * 4, [1] * 4))
    assert opposed["sse_out_scale"].tolist() == pytest.approx([MIN_SCALE] * 4)


@pytest.mark.parametrize("value", [True, False])
def test_the_former_switch_is_refused(value):
    with pytest.raises(RecipeError, match=r"calibrate\.output_scale: expected one of fit, size, none, got"):
        recipe("x", calibrate={"output_scale": value})


def test_calibration_rows_must_be_longer_than_the_window(tmp_path):
    save_source(tmp_path / "teacher")
    settings = recipe(tmp_path / "teacher", layers=BESIDE, mixers={"sse+sliding": {**WINDOW, "window": 17}, **SMALL})
    with pytest.raises(RecipeError) as caught:
        convert_checkpoint(Job.of(settings), tmp_path / "converted")
    assert caught.value.what == (
        "calibrate.seq_len is 32, at least 34 for mixers.sse+sliding with a window of 17: what the window misses sets "
        "SSE's output scale; raise calibrate.seq_len to 34, or lower mixers.sse+sliding.window to 16, or keep "
        "convert's output scale (calibrate.output_scale: none)"
    )


def beside(window, sinks=2, **mixer):
    return {"sse+sliding": SSESlidingMixer(window=window, sinks=sinks, **mixer), "sse": SSEMixer()}


@pytest.mark.parametrize(
    ("settings", "window", "asked"),
    [
        ({}, 16, None),
        ({}, 17, 34),
        ({"output_scale": "none"}, 17, None),
        ({"output_scale": "none"}, 29, None),
        ({"output_scale": "none"}, 30, 33),
    ],
)
def test_rows_need_to_be_as_long_as_what_is_measured(settings, window, asked):
    calibration = recipe("x", calibrate={"rows": 2, "seq_len": 32, **settings})
    problems = calibration_problems(calibration, beside(window), 256)
    assert len(problems) == (asked is not None)
    if asked:
        assert (
            f"calibrate.seq_len is 32, at least {asked} for mixers.sse+sliding with a window of {window}" in problems[0]
        )
        assert f"raise calibrate.seq_len to {asked}, or lower mixers.sse+sliding.window to " in problems[0]


def test_a_window_above_half_the_positions_has_ways_out_that_work():
    rows = {"rows": 2, "seq_len": 256}
    (problem,) = calibration_problems(recipe("x", calibrate=rows), beside(255), 256)
    assert "calibrate.seq_len is 256, at least 510 for mixers.sse+sliding with a window of 255" in problem
    assert "raise" not in problem
    assert problem.endswith(
        "sets SSE's output scale and decay; lower mixers.sse+sliding.window to 128, or keep convert's output scale and "
        "decay (calibrate.output_scale: none, calibrate.enabled: false)"
    )
    assert not calibration_problems(recipe("x", calibrate=rows), beside(128), 256)


def test_calibrate_itself_refuses_rows_that_show_nothing(tmp_path):
    save_source(tmp_path / "teacher")
    settings = {"layers": BESIDE, "mixers": {"sse+sliding": {**WINDOW, "window": 16}, **SMALL}}
    convert_checkpoint(Job.of(recipe(tmp_path / "teacher", **settings)), tmp_path / "converted")
    for rows, message in (
        (31, "is 31, at least 32 for mixers.sse.sliding with a window of 16"),
        (257, "256 positions"),
    ):
        short = recipe(tmp_path / "teacher", **settings, calibrate={"rows": 1, "seq_len": rows})
        with pytest.raises(RecipeError, match=message):
            calibrate_checkpoint(Job.of(short), tmp_path / "converted", tmp_path / "out")


def test_documents_within_the_window_leave_its_layers_alone(tmp_path):
    """Rows are longer than two windows, but their documents are not longer than one."""
    save_source(tmp_path / "teacher")
    asked = recipe(tmp_path / "teacher", layers=BESIDE, mixers={"sse+sliding": {**WINDOW, "window": 14}, **SMALL})
    convert_checkpoint(Job.of(asked), tmp_path / "converted")
    positions = torch.cat([torch.arange(14), torch.arange(16)])[None]
    report = calibrate_checkpoint(
        Job.of(asked),
        tmp_path / "converted",
        tmp_path / "out",
        rows=[{"input_ids": tokens(1, 30), "position_ids": positions}],
    )
    assert [(layer.measured, layer.output_scale is None) for layer in report.layers] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    assert report.lines()[-1].startswith("note: no document reaches beyond the window of layers 0, 2; their decays")
    old, new = (load_file(tmp_path / name / NEW_SHARD) for name in ("converted", "out"))
    changed = {name.split(".")[2] for name in old if not torch.equal(old[name], new[name])}
    assert changed == {"1"}
