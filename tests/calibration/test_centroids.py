"""Centroids of keys: where keys lie, and what calibration makes of them."""

import torch
import torch.nn.functional as F

from sse_convert.calibration.calibrate import calibrate_checkpoint
from sse_convert.calibration.centroids import key_centroids
from sse_convert.modeling.auto import load_pretrained
from sse_convert.modeling.layout import row_layout
from sse_convert.surgery.convert import convert_checkpoint
from tests.calibration.test_calibrate import recipe, save_source, tokens

KEYS = {"kind": "sse", "qk_rank": 0, "advanced": {"router": "keys", "balance": "none", "shared_partition": False}}


def test_clusters_are_found():
    """Three far directions for each of two heads, of any length."""
    generator = torch.Generator().manual_seed(1)
    centres_HND = F.normalize(torch.randn(2, 3, 16, generator=generator), dim=-1)
    which_TH = torch.randint(3, (400, 2), generator=generator)
    noise_THD = 0.05 * torch.randn(400, 2, 16, generator=generator)
    keys_THD = centres_HND[torch.arange(2), which_TH] + noise_THD
    keys_THD *= torch.rand(400, 1, 1, generator=generator) + 0.1
    found_HND = key_centroids(keys_THD, 6)
    assert torch.allclose(found_HND.norm(dim=-1), torch.ones(2, 6))
    nearest_HN = (centres_HND @ found_HND.mT).amax(-1)
    assert (nearest_HN > 0.99).all()


def test_fewer_keys_than_partitions():
    keys_THD = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2))
    found_HND = key_centroids(keys_THD, 5)
    assert found_HND.shape == (3, 5, 8)
    assert torch.allclose(found_HND.norm(dim=-1), torch.ones(3, 5))


def test_calibration_stores_the_centroids_of_the_layers_own_keys(tmp_path):
    source = save_source(tmp_path / "teacher", "qwen3")
    asked = recipe(
        source,
        mixers={"sse": KEYS},
        layers={"pattern": ["full", "sse", "sse", "full"]},
        calibrate={"rows": 1, "seq_len": 32, "output_scale": "size"},
    )
    convert_checkpoint(asked, tmp_path / "converted")
    batch = {"input_ids": tokens(2, 24), "position_ids": torch.arange(24).expand(2, -1)}
    calibrate_checkpoint(asked, tmp_path / "converted", tmp_path / "out", rows=[batch])
    teacher, student = load_pretrained(source), load_pretrained(tmp_path / "out")
    seen = {}
    for layer in (1, 2):
        teacher.model.layers[layer].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, layer=layer: seen.__setitem__(layer, kwargs["hidden_states"]), with_kwargs=True
        )
    with torch.no_grad():
        teacher(**batch, use_cache=False)
        for layer, new in student.sse_layers().items():
            x = row_layout(2, 24, None).pack(seen[layer])
            expected = key_centroids(new.operator_inputs(x, None)["k"], new.mixer.num_partitions)
            assert torch.allclose(new.sse_centroids, expected, atol=1e-5)
