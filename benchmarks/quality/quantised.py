"""What quantising costs: held-out loss of a converted model and of its teacher, quantised by libraries in the same way.

    python -m benchmarks.quality.quantised MODEL --teacher TEACHER --text FOLDER --out benchmarks/quality/quantised.json

Every library runs with its defaults, so what conversion added keeps its precision. A third figure rounds that as well,
with the same method: the new projections, routers and decays among them, which libraries would take for linear layers.
The text is one row from the middle of every file. Libraries that are not installed are left out, and named;
what stands in the file of --out is not measured again.
COMMIT names the commit where the checkout has no git.
"""

import argparse
import dataclasses as dc
import importlib.metadata
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from benchmarks.kernels.hybrid_measure import commit, environment
from sse_convert.checkpoints.load_model import load_tokenizer
from sse_convert.evaluation.perplexity import HeldOutLoss, Windows, held_out_loss, loss_gap, make_windows
from sse_convert.files import write_text
from sse_convert.modeling.auto import register
from sse_convert.modeling.initialise import NewProjection

DTYPE = torch.bfloat16
GROUP = 32
"""weights with a scale of their own, where a method has groups; fewer where a new projection has fewer inputs"""
NAN = "NaN"
"""in the place of figures: rounding gave weights that are no numbers"""
LIBRARIES = ("torchao", "bitsandbytes", "llmcompressor")


@dc.dataclass(frozen=True)
class Method:
    """One way to quantise."""

    library: str
    name: str
    settings: Callable[..., Any]
    """what `from_pretrained` takes, or llm-compressor's recipe"""

    def load(self, source: str) -> Any:
        """The model, quantised."""
        if self.library != "llmcompressor":
            return AutoModelForCausalLM.from_pretrained(source, dtype=DTYPE, quantization_config=self.settings())
        from llmcompressor import oneshot

        model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPE)
        oneshot(model=model, recipe=self.settings())
        return model

    def round_new(self, model: Any) -> bool:
        """Round the weights of the new projections too, by torchao; whether that can be done."""
        if self.library != "torchao":
            return False
        from torchao.quantization import quantize_

        for weight in new_weights(model):
            linear = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
            linear.weight.data.copy_(weight)
            quantize_(linear, self.settings(min(GROUP, weight.shape[1])).quant_type)
            weight.data.copy_(linear.weight.dequantize())
        return True


def new_weights(model: nn.Module) -> list[nn.Parameter]:
    """Of the projections that conversion added."""
    return [module.weight for module in model.modules() if isinstance(module, NewProjection)]


def int8(group: int = GROUP) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def float8(group: int = GROUP) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return TorchAoConfig(Float8WeightOnlyConfig())


def int4(group: int = GROUP) -> Any:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group)))


def four_bits() -> Any:
    """Without calibration."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])


METHODS = (
    Method("torchao", "int8 weights", int8),
    Method("torchao", "float8 weights", float8),
    Method("torchao", "int4 weights, groups of 32", int4),
    Method("bitsandbytes", "8 bits", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    Method(
        "bitsandbytes",
        "4 bits (nf4)",
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
    ),
    Method("llmcompressor", "int4 weights, groups of 128", four_bits),
)


def windows_of(folder: Path, source: str, length: int) -> Windows:
    """A row of `length` tokens from the middle of every text file that has one."""
    tokenizer, rows = load_tokenizer(source), []
    for path in sorted(folder.glob("*.txt")):
        ids = tokenizer(path.read_text("utf-8"), add_special_tokens=False).input_ids
        if len(ids) > length:
            rows.append(ids[(len(ids) - length) // 2 :][:length])
    return make_windows(torch.tensor(rows), tokenizer)


def versions() -> dict[str, str]:
    """Of the libraries that are installed."""
    found = {}
    for name in (*LIBRARIES, "compressed-tensors"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> str:
    """The processor."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.machine()


def rise(found: HeldOutLoss, whole: HeldOutLoss) -> dict[str, float | None]:
    """Loss above that without quantisation, nats per token, with its standard error over rows."""
    gap, error = loss_gap(found, whole)
    return {"loss": found.loss, "rise": gap, "se": error}


def measure(method: Method, sources: dict[str, str], whole: dict[str, HeldOutLoss], windows: Windows) -> dict[str, Any]:
    """One row of the result."""
    row: dict[str, Any] = {"library": method.library, "method": method.name, "commit": commit()}
    for who, source in sources.items():
        model = method.load(source).eval()
        row[who] = rise(held_out_loss(model, windows, batch_tokens=4096), whole[who])
        if who == "converted" and method.round_new(model):
            finite = all(bool(torch.isfinite(parameter).all()) for parameter in new_weights(model))
            row["everything"] = rise(held_out_loss(model, windows, batch_tokens=4096), whole[who]) if finite else NAN
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="converted model")
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--text", type=Path, required=True, help="folder of held-out .txt files")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--training", default="", help="how the model was trained, for readers")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    register()
    installed = versions()
    sources = {"teacher": asked.teacher, "converted": asked.model}
    windows = windows_of(asked.text, asked.teacher, asked.length)
    result: dict[str, Any] = {
        **environment(torch.device("cpu")),
        "hardware": hardware(),
        "versions": installed,
        "training": asked.training,
        "dtype": str(DTYPE).removeprefix("torch."),
        "rows_of_text": len(windows.input_ids),
        "length": asked.length,
        "missing": [name for name in LIBRARIES if name not in installed],
    }
    before = json.loads(asked.out.read_text("utf-8")) if asked.out.exists() else {"rows": []}
    result["rows"] = before["rows"]
    done = {(row["library"], row["method"]) for row in result["rows"]}
    whole = {}
    for who, source in sources.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPE).eval()
        whole[who] = held_out_loss(model, windows, batch_tokens=4096)
        if (figures := before.get(who)) is None:
            precise = held_out_loss(model.float(), windows, batch_tokens=4096)
            figures = {"loss": whole[who].loss, "float32": precise.loss, "tokens": whole[who].tokens}
        assert figures["loss"] == whole[who].loss, f"{asked.out} is of another model or text"
        result[who] = figures
        print(who, figures, flush=True)
    for method in METHODS:
        if method.library in installed and (method.library, method.name) not in done:
            result["rows"].append(measure(method, sources, whole, windows))
            print(json.dumps(result["rows"][-1]), flush=True)
            write_text(asked.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
