"""Make tests/fixtures/exported_0_1: tiny checkpoints as commit 38ccf3a exported them, and what they computed there.

    git worktree add --detach OLD 38ccf3a
    PYTHONPATH=OLD python tools/make_exported_fixtures.py tests/fixtures/exported_0_1

Each was converted and exported through the public API. Of an export it keeps config, weights and provenance; the code
that travels with it is the same for all and kept once, as code.tar.xz. defaults.json has the defaults of that commit.
"""

import dataclasses as dc
import io
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from model_outputs import compute
from safetensors.torch import save_file
from tiny_checkpoints import Case, convert
from transformers import AutoModelForCausalLM

from sse_convert import api

KEPT = ("config.json", "model.safetensors", "sse_convert.json")
STORED = ("padded", "tokens", "loss")
"""what is stored of the results, all in float32; the code that travels computes the rest anew"""
SIZES = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 8, "max_position_embeddings": 128}
WINDOW = {"window": 4, "sinks": 2}
STAGE = {"name": "distill", "loss": "kl", "tokens": 4096, "seq_len": 64, "batch_tokens": 64, "lr": 1e-3}
BFLOAT16 = {"dir": "exported", "dtype": "bfloat16"}
TRAINED = {"export": BFLOAT16, "stages": [STAGE], "data": {"train": [{"kind": "teacher", "rows": 4}]}}
OTHER_TRAINING = {
    **TRAINED,
    "stages": [
        {**STAGE, "hidden_loss": 0.5},
        {**STAGE, "name": "align", "loss": "layer_mse", "layers_at_once": 1},
    ],
    "calibrate": {"seq_len": 64, "router": "kmeans"},
}  # fmt: skip
"""keys that only training and calibration read"""
PAPER = {
    "kind": "sse", "qk_rank": 4, "num_partitions": 6, "top_k": 2, "read_top_k": 3, "gate": {"renormalise": True},
    "row_top_k": 3, "shared_params": False, "decay_params": "separate", "balance": "bias", "output_gate": True,
}  # fmt: skip
RARE = {
    "kind": "sse+sliding", "qk_rank": 4, **WINDOW, "state_heads": "query", "rope": "keep", "decay": "scalar",
    "router_bias": True, "branch_dropout": 0.5, "k_feature_map": "silu", "balance_coef": 0.1,
}  # fmt: skip


def case(name: str, family: str, *layers: str, recipe: dict[str, Any] = TRAINED, **mixers: dict[str, Any]) -> Case:
    """A fixture; mixers that are not given have their kind's defaults."""
    settings = {layer: {"kind": layer, **mixers.get(layer, {})} for layer in layers if layer != "full"}
    options = {**SIZES, **({"head_dim": 4} if family in ("qwen3", "llama") else {}), "num_hidden_layers": len(layers)}
    return Case(name=name, family=family, layers=list(layers), mixers=settings, options=options, recipe=recipe)


CASES = (
    case("sse", "qwen3", "sse", "full"),
    case("windows", "qwen3", "sse+sliding", "sliding", "full", recipe=OTHER_TRAINING,
         **{"sse+sliding": {"qk_rank": 4, **WINDOW}, "sliding": WINDOW}),
    case("baselines", "llama", "gla", "gdn", "mom"),
    case("delta", "gpt_neox", "delta", delta={"kind": "sse", "qk_rank": 4, "update": "delta", "k_feature_map": "l2"}),
    case("paper-settings", "qwen2", "paper", paper=PAPER),
    case("rare-settings", "qwen3", "rare", rare=RARE),
    case("qk_rank_on", "qwen3", "sse", sse={"qk_rank": 4, "qk_rank_on": "sparse"}),
    case("decay_rank", "qwen3", "sse", sse={"qk_rank": 4, "decay_rank": 4}),
    case("decay_normalizer", "qwen3", "sse", sse={"qk_rank": 4, "decay_normalizer": 4.0}),
    case("output_norm", "qwen3", "sse", sse={"qk_rank": 4, "output_norm": "none"}),
)  # fmt: skip
"""the last four are named after the setting that is not its default"""


def main(out: Path) -> None:
    """Make every fixture in a new folder."""
    from sse_convert.mixers import MIXER_TYPES

    out.mkdir(parents=True)
    code: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as work:
        for made in CASES:
            recipe, converted = convert(made, Path(work) / made.name)
            exported = Path("exported").resolve()
            api.export(recipe, converted, exported)
            results = compute(AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval())
            expected = {name: results[name].contiguous() for name in STORED}
            (out / made.name).mkdir()
            for name in KEPT:
                shutil.copyfile(exported / name, out / made.name / name)
            save_file(expected, out / made.name / "expected.safetensors", metadata={"torch": torch.__version__})
            own = {path.name: path.read_text(encoding="utf-8") for path in exported.glob("*.py")}
            assert code in ({}, own), "the code that travels differs between checkpoints"
            code = own
    _write_code(code, out / "code.tar.xz")
    defaults = {kind: dc.asdict(mixer()) for kind, mixer in MIXER_TYPES.items()}
    (out / "defaults.json").write_text(json.dumps(defaults, indent=1) + "\n", encoding="utf-8")


def _write_code(code: dict[str, str], archive: Path) -> None:
    """The same bytes for the same files: neither owner nor time is stored."""
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for name, text in sorted(code.items()):
            data = text.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]).resolve())
