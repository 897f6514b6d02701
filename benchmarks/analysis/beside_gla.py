"""The paper's figures of states, for SSE beside gated linear attention: two conversions of one teacher.

    python -m benchmarks.analysis.beside_gla --out benchmarks/analysis/beside_gla.json     # one CPU core, minutes
    python -m benchmarks.analysis.beside_gla --tokens 0 --out out/beside_gla.json          # calibrated, not trained

Both models keep the same layers softmax and see the same text, once after calibration and once after a short
distillation. What `sse-convert analyze` and `paper_states` find in them is kept, and each sentence of the paper about
states is judged layer by layer. --resume keeps what the JSON has.
COMMIT names the commit where the checkout has no git.
"""

import argparse
import dataclasses as dc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.analysis.beside_gla_plot import draw
from benchmarks.analysis.paper_states import paper_states
from benchmarks.kernels.hybrid_measure import environment
from benchmarks.paper.row_sparse.results import Outcome
from sse_convert import api
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.errors import UsageError
from sse_convert.files import write_json
from sse_convert.recipe import Recipe, load_recipe

MODELS = {
    "SSE": ["layers.pattern=[paper]", "mixers.paper={state_heads: query}"],
    "GLA": ["layers.pattern=[gla]", "mixers.gla={state_heads: query}"],
}
"""the paper's SSE (N = 4, k = 1, softmax keys) and its GLA (SiLU keys), both with a state per query head"""
KEPT = ("entropy", "similarity", "row_sparsity", "receptive_field", "half_life", "routing", "output_error", "attention")
"""quantities of `analyze` and of `paper_states` that are kept"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """What the paper says of the states of SSE beside those of GLA."""

    claim: str
    """in words"""
    source: str
    """figure of the paper"""
    path: tuple[str, str]
    """quantity and value"""
    more: bool
    """whether SSE is said to have more of it, or less"""
    margin: float = 0.0
    """smaller differences decide nothing"""


SENTENCES = (
    Sentence(
        claim="states of SSE have a higher singular value entropy than those of GLA",
        source="figure state_entropy",
        path=("entropy", "stacked"),
        more=True,
    ),
    Sentence(
        claim="rows of SSE's states are less alike than those of GLA's",
        source="figure state_sim",
        path=("similarity", "within"),
        more=False,
    ),
    Sentence(
        claim="softmax keys leave rows of SSE's states alone, SiLU keys of GLA do not",
        source="figure row_sparsity",
        path=("row_sparsity", "sparse"),
        more=True,
        margin=0.01,
    ),
    Sentence(
        claim="SSE has larger receptive fields than GLA",
        source="figure crf",
        path=("receptive_field", "mean"),
        more=True,
    ),
)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="JSON file to write; the plot lies beside it")
    p.add_argument("--recipe", default="recipes/teacher-qwen3-32m.yaml", help="teacher, text and the first stage")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    p.add_argument("--keep", type=int, nargs="+", default=[4, 9], help="layers that stay softmax")
    p.add_argument("--tokens", type=int, default=65536, help="of the distillation, 0 for none")
    p.add_argument("--rows", type=int, default=512, help="tokens of its rows, of which a step has two")
    p.add_argument("--text", type=Path, help="what the models read; default: a file of the recipe's held-out text")
    p.add_argument("--read", type=int, default=8192, help="tokens that they read")
    p.add_argument("--length", type=int, default=1024, help="tokens per row that they read")
    p.add_argument("--resume", action="store_true", help="keep the models that the JSON has")
    return p


def recipe_of(options: argparse.Namespace, model: str) -> Recipe:
    """The recipe of a model, with a distillation of the asked length as its only stage."""
    first = load_recipe(options.recipe, options.set).stages[0]
    rates = first.lr if isinstance(first.lr, float) else dc.asdict(first.lr)
    stage = {
        "name": "distill", "loss": "kl", "tokens": max(options.tokens, 2 * options.rows), "seq_len": options.rows,
        "batch_tokens": 2 * options.rows, "train": first.train, "lr": rates, "warmup": first.warmup,
    }  # fmt: skip
    own = [*MODELS[model], f"layers.keep={json.dumps(options.keep)}", f"stages={json.dumps([stage])}"]
    return load_recipe(options.recipe, [*options.set, *own])


def analysed(options: argparse.Namespace, recipe: Recipe, checkpoint: Path) -> dict[str, Any]:
    """What `analyze` finds in the converted layers, without what is large."""
    found = api.analyze(
        checkpoint, _text(options, recipe), teacher=recipe.model, tokens=options.read, length=options.length
    ).to_dict()
    states = paper_states(checkpoint, _text(options, recipe), tokens=options.read, length=options.length)
    converted = [{**layer, **states[layer["index"]]} for layer in found["layers"] if layer["kind"] != "full"]
    layers = [{name: layer[name] for name in ("index", "kind", *KEPT) if name in layer} for layer in converted]
    return {"conditions": found["conditions"], "layers": layers}


def _text(options: argparse.Namespace, recipe: Recipe) -> Path:
    path = options.text or Path(str(recipe.data.valid[0].path))
    return min(path.iterdir()) if path.is_dir() else path


def models(options: argparse.Namespace, kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every model, calibrated and distilled, those of `kept` as they are; the JSON is written after each."""
    found = list(kept)
    for name in MODELS:
        wanted = [tokens for tokens in dict.fromkeys((0, options.tokens)) if not _pick(found, name, tokens)]
        if not wanted:
            continue
        recipe = recipe_of(options, name)
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            api.convert(recipe, folder / "converted")
            api.calibrate(recipe, folder / "converted", folder / "calibrated")
            for tokens in wanted:
                began = time.monotonic()
                if tokens:
                    api.distill(recipe, folder / "calibrated", folder / "distilled")
                own = analysed(options, recipe, folder / ("distilled" if tokens else "calibrated"))
                seconds = round(time.monotonic() - began, 1)
                found.append({"model": name, "tokens": tokens, "seconds": seconds, **own})
                write(options, found)
                say(f"{name}, {tokens:,} tokens of training: {seconds:.0f} s")
    return found


def sentences(found: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Each sentence with both models' means over layers, the layers in which it is true and false, and the outcome."""
    sse, gla = (_pick(found, name, tokens) for name in ("SSE", "GLA"))
    rows = []
    for sentence in SENTENCES if sse and gla else ():
        own, other = ([value(layer, sentence) for layer in model["layers"]] for model in (sse, gla))
        ahead = [(a - b) * (1 if sentence.more else -1) for a, b in zip(own, other, strict=True)]
        true, false = sum(x > sentence.margin for x in ahead), sum(x < -sentence.margin for x in ahead)
        rows.append(
            {
                "claim": sentence.claim, "source": sentence.source, "sse": sum(own) / len(own),
                "gla": sum(other) / len(other), "true": true, "false": false, "layers": len(own),
                "outcome": outcome(true, false, len(own)),
            }
        )  # fmt: skip
    return rows


def value(layer: dict[str, Any], sentence: Sentence) -> float:
    """What a sentence is about, of a layer."""
    quantity, name = sentence.path
    own = layer[quantity]
    return float(own["sparse"][name] if quantity == "receptive_field" else own[name])


def outcome(true: int, false: int, layers: int) -> Outcome:
    """holds where true in all layers, fails where false in all, mixed where true in some and false in others."""
    if true and false:
        return "mixed"
    return "holds" if true == layers else "fails" if false == layers else "undecided"


def _pick(found: list[dict[str, Any]], model: str, tokens: int) -> dict[str, Any]:
    return next((own for own in found if (own["model"], own["tokens"]) == (model, tokens)), {})


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "recipe": options.recipe, "set": options.set, "keep": options.keep, "rows": options.rows, "mixers": MODELS,
        "text": None if options.text is None else str(options.text), "read": options.read, "length": options.length,
    }  # fmt: skip


def _kept(options: argparse.Namespace) -> list[dict[str, Any]]:
    if not options.resume or not options.out.is_file():
        return []
    report = json.loads(options.out.read_text(encoding="utf-8"))
    if report["settings"] != _settings(options):
        raise UsageError(f"{options.out} was measured with other settings", fix="leave out --resume")
    models: list[dict[str, Any]] = report["models"]
    return models


def write(options: argparse.Namespace, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of the models there are."""
    report = {
        "schema": 1,
        "environment": environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "settings": _settings(options),
        "sentences": {str(tokens): sentences(found, tokens) for tokens in sorted({own["tokens"] for own in found})},
        "models": found,
    }
    write_json(options.out, report)
    return report


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    hush_libraries()
    report = write(options, models(options, _kept(options)))
    draw(report, options.out.with_suffix(".png"))
    for tokens, rows in report["sentences"].items():
        say(f"after {int(tokens):,} tokens of training:")
        for row in rows:
            say(
                f"    {row['claim']}: {row['outcome']}, true in {row['true']} of {row['layers']} layers "
                f"({row['sse']:.3g} and {row['gla']:.3g})"
            )


if __name__ == "__main__":
    sys.exit(main())
