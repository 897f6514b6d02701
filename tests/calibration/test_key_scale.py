"""The fitted temperature of keys: known ones are found, errors fall, and where none matters it is refused."""

import pytest
import torch

from sse_convert.calibration.attention_statistics import Collector
from sse_convert.calibration.calibrate import calibrate_checkpoint
from sse_convert.calibration.initial_values import KEY_SCALES, MIN_SCALE, best_key_scale, output_scale, scales
from sse_convert.checkpoints.safetensors_io import read_header
from sse_convert.errors import RecipeError
from sse_convert.mixers import GDNMixer, GLAMixer, SlidingMixer, SSEMixer, SSESlidingMixer
from sse_convert.modeling.architectures import attention_dims, source_spec
from sse_convert.modeling.auto import load_pretrained
from sse_convert.modeling.initialise import fresh_sse_tensors
from sse_convert.modeling.layout import row_layout
from sse_convert.modeling.tensors import as_sse, state_heads
from sse_convert.modeling.window.window_branch import attention_layer
from sse_convert.selection.layer_swap import calibrated_layers
from sse_convert.surgery.compatibility import calibration_problems
from sse_convert.surgery.convert import NEW_SHARD, convert_checkpoint
from tests.calibration.test_calibrate import WINDOW, batches, beside, heads_of_layer_0, statistics
from tests.modeling.tiny import tiny_source
from tests.surgery.models import digests, recipe, save_source, tokens

FIT = {"rows": 2, "seq_len": 32, "key_scale": "fit"}
KNOWN = (4.0, 0.25, 16.0, 0.5)
SMALL = {"qk_rank": 4}


def new_layer(model, mixer, key_scale=1.0):
    """An untrained layer on the modules of layer 0, float64, output scales of one."""
    spec, dims = source_spec(model.config.model_type), attention_dims(model.config)
    layer = attention_layer(model.get_submodule(spec.attention_path(0)), model.config, 0, spec=spec, mixer=mixer)
    layer.load_state_dict(fresh_sse_tensors(dims, mixer, torch.Generator().manual_seed(0)), strict=False)
    layer.requires_grad_(False).double()
    layer.sse_k_scale.copy_(torch.as_tensor(key_scale))
    return layer


@pytest.mark.parametrize(
    "mixer",
    [
        SSEMixer(**SMALL),
        SSEMixer(**SMALL, state_heads="query", row_top_k=3),
        SSEMixer(**SMALL, k_feature_map="silu", rope="keep", output_norm="none"),
        SSEMixer(qk_rank=0, shared_params=False, num_partitions=2),
        GLAMixer(state_heads="query"),
        GDNMixer(),
    ],
)
def test_known_temperatures_are_found(mixer):
    """A teacher whose heads are those of a new layer with known key scales."""
    model = tiny_source("qwen3", dtype=torch.float64)
    attention = model.model.layers[0].self_attn
    heads = state_heads(attention_dims(model.config), as_sse(mixer))
    known, given = new_layer(model, mixer, KNOWN[:heads]), []
    attention.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    attention.o_proj.register_forward_pre_hook(lambda module, args: (heads_of(known, given[-1]),))
    spec = source_spec("qwen3")
    collector = Collector(model, spec, [0], students={0: new_layer(model, mixer)}, key_scales={0: KEY_SCALES})
    collector.run({"input_ids": tokens(2, 24), "position_ids": torch.arange(24).expand(2, -1)})
    rows = best_key_scale(collector.statistics[0], heads)
    assert torch.tensor(KEY_SCALES)[rows].tolist() == list(KNOWN[:heads])
    fitted = output_scale("fit", as_sse(mixer), collector.statistics[0])
    chosen = fitted.gather(0, rows.repeat_interleave(4 // heads)[None])
    torch.testing.assert_close(chosen, torch.ones_like(chosen))


def heads_of(layer, kwargs):
    """[B, T, Hq * D] of the teacher's layer inputs."""
    x = kwargs["hidden_states"]
    layout = row_layout(*x.shape[:2], None)
    return layer.heads(x, kwargs["position_embeddings"], layout, {}, x.dtype)[0].view(*x.shape[:2], -1)


def test_the_choice_among_known_sums():
    """The first two query heads read one state: the louder decides. A head that nothing helps keeps 1."""
    product = [[1, 1, -1, 0], [3, 0.5, -2, 0], [0, 2, -3, 0]]
    found = statistics(product, [[1, 1, 1, 0]] * 3)
    assert best_key_scale(found, 2).tolist() == [1, 0]
    assert best_key_scale(found, 4).tolist() == [1, 2, 0, 0]
    dims = attention_dims(tiny_source("qwen3").config)
    settings = recipe("x", calibrate={"key_scale": "fit"})
    values = scales(settings, SSEMixer(), dims, found)
    assert values["sse_k_scale"].tolist() == [KEY_SCALES[1], KEY_SCALES[0]]
    expected = torch.tensor([3, 0.5, 1e-4, 1e-4])  # of the second, second, first and first row
    torch.testing.assert_close(values["sse_out_scale"].view(4, -1), expected[:, None].expand(4, 8))


def calibrated(folder, mixer, name="out", **settings):
    """The report of a calibration of layer 0 alone."""
    if not (folder / "teacher").exists():
        save_source(folder / "teacher")
    layers = {"pattern": ["full"], "overrides": {"0": "x"}}
    calibration = {**FIT, **settings}
    asked = recipe(folder / "teacher", mixers={"x": mixer}, layers=layers, calibrate=calibration)
    if not (folder / "converted").exists():
        convert_checkpoint(asked, folder / "converted")
    return calibrate_checkpoint(asked, folder / "converted", folder / name, rows=batches())


@pytest.mark.parametrize(
    "mixer",
    [
        {"kind": "sse", **SMALL},
        {"kind": "sse", **SMALL, "k_feature_map": "silu", "rope": "keep", "state_heads": "query"},
        {"kind": "gdn"},
        {"kind": "mom"},
        WINDOW,
    ],
)
def test_the_error_that_is_left_falls_and_scales_fit_the_chosen_keys(mixer, tmp_path):
    teacher, left = heads_of_layer_0(load_pretrained(save_source(tmp_path / "teacher"))), {}
    for kind in ("none", "fit"):
        calibrated(tmp_path, mixer, kind, key_scale=kind)
        student = load_pretrained(tmp_path / kind)
        (layer,) = student.sse_layers().values()
        chosen, scale = layer.sse_k_scale.detach(), layer.sse_out_scale.detach().view(4, 8)[:, 0].clone()
        whole, without = heads_of_layer_0(student), heads_of_layer_0(student, 0.0)
        error, branch = teacher - whole, whole - without
        left[kind] = error.square().sum((0, 2)).view(len(chosen), -1).sum(1)
        fitted = scale > MIN_SCALE
        assert (((error * branch).sum((0, 2)) / branch.square().sum((0, 2)))[fitted].abs() < 1e-3).all()
    assert fitted.any()
    changed = chosen != 1
    assert changed.any()
    assert (left["fit"][changed] < left["none"][changed]).all()
    torch.testing.assert_close(left["fit"][~changed], left["none"][~changed])


def test_only_scales_change_twice_alike_and_not_at_all_by_default(tmp_path):
    mixer = {"kind": "sse", **SMALL}
    reports = {name: calibrated(tmp_path, mixer, name) for name in "ab"}
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    calibrated(tmp_path, mixer, "none", key_scale="none")
    fit, none = (load_pretrained(tmp_path / name).sse_layers()[0].state_dict() for name in ("a", "none"))
    assert {name for name in fit if not torch.equal(fit[name], none[name])} == {"sse_k_scale", "sse_out_scale"}
    assert (none["sse_k_scale"] == 1).all()
    assert recipe("x").calibrate.key_scale == "none"
    assert read_header(tmp_path / "a" / NEW_SHARD) == read_header(tmp_path / "none" / NEW_SHARD)
    smallest, largest = fit["sse_k_scale"].min(), fit["sse_k_scale"].max()
    assert reports["a"].layers[0].key_scale == (smallest, largest)
    assert "  key scale  " in reports["a"].lines()[1]
    assert f"{smallest:.3g} to {largest:.3g}" in reports["a"].lines()[3]


def test_without_output_scales(tmp_path):
    """Beside a window that starts almost silent."""
    report = calibrated(tmp_path, WINDOW, output_scale="none", decay=False)
    (layer,) = report.layers
    assert layer.output_scale is None
    assert layer.key_scale != (1, 1)


def test_layers_whose_map_cancels_it_are_left_alone(tmp_path):
    save_source(tmp_path / "teacher")
    mixers = {"soft": {"kind": "sse", **SMALL}, "hard": {"kind": "sse", **SMALL, "k_feature_map": "relu"}}
    layers = {"pattern": ["full"], "overrides": {"0": "soft", "1": "hard"}}
    asked = recipe(tmp_path / "teacher", mixers=mixers, layers=layers, calibrate=FIT)
    convert_checkpoint(asked, tmp_path / "converted")
    report = calibrate_checkpoint(asked, tmp_path / "converted", tmp_path / "out", rows=batches())
    assert [layer.key_scale is None for layer in report.layers] == [False, True]
    assert "unchanged" in report.lines()[4]
    assert (load_pretrained(tmp_path / "out").sse_layers()[1].sse_k_scale == 1).all()


def test_a_fit_that_no_layer_has_a_use_for_is_refused(tmp_path):
    save_source(tmp_path / "teacher")
    mixers = {"hard": {"kind": "sse", **SMALL, "k_feature_map": "relu"}}
    asked = recipe(tmp_path / "teacher", mixers=mixers, layers={"pattern": ["hard", "full"]}, calibrate=FIT)
    with pytest.raises(RecipeError) as caught:
        convert_checkpoint(asked, tmp_path / "converted")
    assert caught.value.what == (
        "calibrate.key_scale is fit, and mixers.hard.k_feature_map is relu: scaled keys only scale the output, which "
        "has a scale of its own; use calibrate.key_scale: none, or another k_feature_map"
    )


@pytest.mark.parametrize(
    ("mixers", "refused"),
    [
        ({"a": SSEMixer(k_feature_map="relu"), "b": GLAMixer(k_feature_map="identity")}, True),
        ({"a": SSEMixer(k_feature_map="relu"), "b": GLAMixer()}, False),
        ({"a": GDNMixer()}, False),
        ({"a": SlidingMixer()}, False),
    ],
)
def test_who_is_refused(mixers, refused):
    assert bool(calibration_problems(recipe("x", calibrate=FIT), mixers, 256)) == refused
    assert not calibration_problems(recipe("x", calibrate={**FIT, "key_scale": "none"}), mixers, 256)


def test_rows_must_show_what_a_window_misses():
    settings = {**FIT, "output_scale": "none", "decay": False}
    (problem,) = calibration_problems(recipe("x", calibrate=settings), beside(17), 256)
    assert problem.endswith(
        "sets SSE's key scale; raise calibrate.seq_len to 34, or lower mixers.sse+sliding.window to 16, or keep "
        "convert's key scale (calibrate.key_scale: none)"
    )
    relu = {**beside(17, k_feature_map="relu"), "other": SSESlidingMixer(window=8)}
    assert not calibration_problems(recipe("x", calibrate=settings), relu, 256)


def test_stand_ins_have_them_too():
    asked = recipe("x", calibrate=FIT)
    with torch.no_grad():
        made = calibrated_layers(tiny_source("qwen3"), SSEMixer(**SMALL), asked, tokens())
    chosen = torch.stack([layer.sse_k_scale for layer in made])
    assert chosen.unique().numel() > 1
    assert set(chosen.flatten().tolist()) <= set(KEY_SCALES)
