"""Which quantisations that need a GPU run on a converted model: the demo's teacher, converted on the spot, untrained.

    pip install --no-deps torchao && python -m benchmarks.quality.quantised_gpu --out FILE.json       # under a minute

Each is loaded, measured on random tokens beside the same model in bfloat16, saved, loaded again, and generates.
A failure is written in its library's words. COMMIT names the commit where the checkout has no git.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from benchmarks.kernels.hybrid_measure import environment
from benchmarks.quality.quantised import float8, int8, new_weights, versions
from sse_convert import api
from sse_convert.errors import HardwareError
from sse_convert.files import write_text
from sse_convert.modeling.auto import register
from sse_convert.recipe import load_recipe


def float8_activations() -> Any:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig

    return TorchAoConfig(Float8DynamicActivationFloat8WeightConfig())


def int4() -> Any:
    from torchao.quantization import Int4WeightOnlyConfig

    return TorchAoConfig(Int4WeightOnlyConfig(group_size=32, int4_packing_format="tile_packed_to_4d"))


METHODS: dict[str, Callable[[], Any]] = {
    "int8 weights": int8,
    "float8 weights": float8,
    "float8 weights and activations": float8_activations,
    "int4 weights, tile_packed_to_4d": int4,
}


@torch.no_grad()
def check(source: Path, settings: Any, ids: torch.Tensor, whole: torch.Tensor, again: Path) -> dict[str, Any]:
    """What a quantised model does beside the whole one's logits [1, T, V]."""
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, device_map="cuda", quantization_config=settings
    )
    found = model(ids).logits.float()
    plain = all(type(weight.data) is torch.Tensor for weight in new_weights(model))
    generated = model.generate(ids[:, :32], max_new_tokens=8, do_sample=False)
    model.save_pretrained(again)
    loaded = AutoModelForCausalLM.from_pretrained(again, device_map="cuda")
    return {
        "relative_difference": float((found - whole).norm() / whole.norm()),
        "new_weights_left_alone": plain,
        "generated": generated.shape[1] - 32,
        "equal_after_saving": torch.equal(loaded(ids).logits.float(), found),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise HardwareError("no CUDA device", expected="a GPU; benchmarks.quality.quantised measures on a CPU")
    register()
    result: dict[str, Any] = {**environment(torch.device("cuda")), "versions": versions(), "methods": {}}
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "hybrid"
        api.convert(load_recipe("demo/recipe.yaml", ["layers.select.chosen=[0, 4]"]), source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, device_map="cuda")
        ids = torch.randint(5, 2000, (1, 512), generator=torch.Generator().manual_seed(0)).cuda()
        with torch.no_grad():
            whole = model(ids).logits.float()
        for name, make in METHODS.items():
            try:
                result["methods"][name] = check(source, make(), ids, whole, Path(place) / name)
            except (RuntimeError, ImportError, AssertionError, NotImplementedError) as error:
                result["methods"][name] = {"error": str(error).strip().splitlines()[-1][:300]}
            print(name, json.dumps(result["methods"][name]), flush=True)
    write_text(asked.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
