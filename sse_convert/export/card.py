"""The model card: metadata a hub understands, and what a reader must know before loading the model."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sse_convert.evaluation.report import EvalReport
from sse_convert.evaluation.tables import interval, percent
from sse_convert.export.card_metadata import base_model, card_metadata
from sse_convert.mixers import BUILT_IN, SSE_KINDS, SlidingMixer, SSESlidingMixer, mixer_from_dict, mixer_to_dict
from sse_convert.modeling.arch_spec import LENT_FILE, TEACHER_VARIABLE
from sse_convert.modeling.architectures import source_spec
from sse_convert.report import format_bytes, format_number, format_rate

if TYPE_CHECKING:
    from sse_convert.modeling.loading import Lent

CARD = "README.md"
"""file of an export that people read"""
_RECIPE = """## Recipe

`recipe.yaml` in this folder is the whole conversion: `sse-convert run recipe.yaml` repeats it. Names that begin with
`./` were files and folders of the machine that made the model: put yours there."""
CITATION = """```bibtex
@article{pan2025sse,
  title   = {Scaling Linear Attention with Sparse State Expansion},
  author  = {Pan, Yuqi and An, Yongqi and Li, Zheng and others},
  journal = {arXiv preprint arXiv:2507.16577},
  year    = {2025}
}
```"""


def model_card(
    name: str,
    config: dict[str, Any],
    recipe: dict[str, Any],
    report: EvalReport | None,
    parameters: int,
    teacher_card: Path | None = None,
    *,
    chats: bool = False,
    lent: "Lent | None" = None,
) -> str:
    """The README.md of an exported model.

    Args:
        name: title, usually the folder name.
        config: config.json of the converted model, with its `sse` field.
        recipe: the resolved recipe, with the stages that took place alone.
        report: what was measured, None for nothing.
        parameters: number of parameters.
        teacher_card: the teacher's README.md, None where it is not at hand.
        chats: whether the tokenizer has a chat template, in which the example asks.
        lent: what a small checkpoint takes from its teacher.
    """
    images = _sees_images(config)
    sections = [
        f"# {name}",
        _introduction(config, recipe, parameters),
        _loading(name, images=images, chats=chats),
        "" if lent is None else small_note(lent),
        "## Layers\n\n" + _table(("layers", "kind", "settings"), list(_layer_rows(config["sse"]))),
        _results(report),
        _training(recipe),
        _limits(config),
        _RECIPE,
        "## Citation\n\n" + CITATION,
    ]
    metadata = card_metadata(name, recipe, report, teacher_card, images=images)
    return f"---\n{metadata}\n---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def _sees_images(config: dict[str, Any]) -> bool:
    return bool(source_spec(str(config["model_type"])).text_types)


def _introduction(config: dict[str, Any], recipe: dict[str, Any], parameters: int) -> str:
    layers = config["sse"]["layers"]
    converted = sum(layer != "full" for layer in layers)
    return (
        f"{_linked(recipe['model'])} with {converted} of its {len(layers)} softmax attention layers replaced, by "
        f"`sse-convert`. {format_number(parameters)} parameters. SSE layers (Sparse State Expansion, "
        "[arXiv:2507.16577](https://arxiv.org/abs/2507.16577)) are linear attention with a large, sparsely updated "
        "state: their memory does not grow with the context, and their time grows linearly." + _choice(recipe)
    )


def _linked(model: str) -> str:
    """A hub id, also with @REVISION, as a link; a folder by its name."""
    named = base_model({"model": model})
    return f"[{named}](https://huggingface.co/{named.partition('@')[0]})" if named else f"`{Path(model).name}`"


def _choice(recipe: dict[str, Any]) -> str:
    """Which layers stay softmax, where that was left to a choice."""
    select = recipe["layers"].get("select")
    if not select:
        return ""
    chosen = select["chosen"]
    if isinstance(chosen, list):
        return f" Layers {', '.join(map(str, chosen))} stay softmax."
    heads = "; ".join(f"{', '.join(map(str, own))} of layer {layer}" for layer, own in chosen.items())
    return f" Key-value heads stay softmax: {heads}."


_PLAIN = """inputs = tokenizer("Once upon a time", return_tensors="pt")"""
_CHAT = """chat = [{{"role": "user", "content": "What is a rainbow?"}}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""
_TEXT = """from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{name}"  # this folder, or the hub id
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
{asking}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))"""
_IMAGES = """from transformers import AutoModelForImageTextToText, AutoProcessor

folder = "{name}"  # this folder, or the hub id
model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
content = [{{"type": "image", "path": "photo.jpg"}}, {{"type": "text", "text": "What is this?"}}]
options = {{"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}}
inputs = processor.apply_chat_template([{{"role": "user", "content": content}}], **options)
print(processor.decode(model.generate(**inputs, max_new_tokens=40)[0]))"""


def _loading(name: str, *, images: bool, chats: bool) -> str:
    text = _TEXT.replace("{asking}", _CHAT if chats else _PLAIN)
    return f"""## Use

```python
{(_IMAGES if images else text).format(name=name)}
```

Only `torch` and `transformers` are needed. Where `sse-convert` is installed, `import sse_convert` registers the model
and brings kernels for GPUs, and `trust_remote_code` is not needed."""


def small_note(lent: "Lent") -> str:
    """The section that a whole checkpoint's card lacks."""
    where = f"`{lent.teacher}`, a folder: put it beside this one, or set `{TEACHER_VARIABLE}` to it"
    if lent.revision:
        where = f"{_linked(f'{lent.teacher}@{lent.revision}')}: loading downloads it, and takes it from the cache later"
    return f"""## A small checkpoint

This folder holds what differs from the original model. The rest comes from {where}. Each tensor's SHA-256 must be the
one in `{LENT_FILE}`. vLLM and other tools that read weight files want a whole checkpoint, as
`sse-convert join` makes it."""


def _layer_rows(sse: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Runs of equal neighbours: indices, kind, settings that differ from the defaults."""
    layers: list[str] = sse["layers"]
    start = 0
    for i in range(1, len(layers) + 1):
        if i == len(layers) or layers[i] != layers[start]:
            span = str(start) if i - start == 1 else f"{start}-{i - 1}"
            yield span, layers[start], _settings(sse["mixers"].get(layers[start]))
            start = i


def _settings(mixer: dict[str, Any] | None) -> str:
    if mixer is None:
        return "softmax attention, unchanged"
    built = mixer_from_dict(mixer)
    if isinstance(built, SlidingMixer):
        heads = f"; key-value heads {list(built.full_heads)} see the whole row" if built.full_heads else ""
        return f"softmax attention, window {built.window}, {built.sinks} sinks{heads}"
    default = type(built)() if built.kind in SSE_KINDS else BUILT_IN[built.kind]  # SSE as it differs from the paper's
    kind, told = str(built.kind), {"kind"}
    if isinstance(built, SSESlidingMixer):
        kind = f"SSE beside softmax attention with window {built.window} and {built.sinks} sinks:"
        told |= {"window", "sinks"}
    changed = [
        f"{key}={value}"
        for key, value in mixer_to_dict(built).items()
        if key not in told and (key in ("num_partitions", "top_k") or getattr(built, key) != getattr(default, key))
    ]
    return f"{kind} " + ", ".join(changed) if changed else kind


def _results(report: EvalReport | None) -> str:
    if report is None:
        return "## Quality\n\nNot measured."
    verdict = report.verdict()
    parts = ["## Quality, beside the model it was made from", f"Verdict: {verdict.text}.", *verdict.notes]
    teacher, student = report.teacher, report.student
    losses = [
        (t.length, *map(_nats, (t.loss, s.loss)), _nats(gap.gap, "+"), *map(_nats, (t.bits_per_byte, s.bits_per_byte)))
        for t, s, gap in zip(teacher.held_out, student.held_out, report.loss_gaps, strict=True)
    ]
    if losses:
        columns = ("window (tokens)", "teacher loss", "loss", "gap", "teacher bits/byte", "bits/byte")
        parts += ["Held-out loss in nats per token:", _table(columns, losses)]
    needles = [
        (t.length, t.kind, t.keys, t.total.samples, *map(interval, (t.total, s.total)), percent(row.share) or "-")
        for row, t, s in zip(report.retention(), teacher.needles, student.needles, strict=True)
    ]
    if needles:
        header = ("context", "value", "needles", "samples", "teacher", "this model", "retention")
        parts += ["Needle retrieval, exact answers, 95% intervals in brackets:", _table(header, needles)]
    cache = [(row.length, format_bytes(row.teacher_bytes), format_bytes(row.student_bytes)) for row in report.cache]
    if cache:
        parts += ["Cache of one sequence:", _table(("context", "teacher", "this model"), cache)]
    parts.append("All figures, with their conditions, are in `evaluation.json`.")
    return "\n\n".join(parts)


def _training(recipe: dict[str, Any]) -> str:
    if not recipe["stages"]:
        return "## Training\n\nNone: converted only."
    rows = [
        (s["name"], s["loss"], format_number(s["tokens"]), s["seq_len"], format_rate(s), s["train"])
        for s in recipe["stages"]
    ]
    table = _table(("stage", "loss", "tokens", "row length", "learning rate", "trained"), rows)
    return "\n\n".join(["## Training", table])


_IMAGES_LIMIT = """- Conversion trains on text alone. What sees images is the original model's. Converted layers read
  the tokens of an image from first to last, also where the original layers see all of them at once.
"""


def _limits(config: dict[str, Any]) -> str:
    softmax = sum(layer == "full" for layer in config["sse"]["layers"])
    memory = (
        f"{_counted(softmax)} left, with keys and values of every token."
        if softmax
        else "No softmax layer over the whole context is left, so exact recall is limited by the size of the state."
    )
    return f"""## Limits

- A converted model can be worse than its teacher where exact recall of distant tokens matters; see the figures above.
- {memory}
- Tensor, context and sequence parallelism of transformers and Accelerate are refused. In training, long rows are shared
  by GPUs with `context_parallel` of sse-convert.
- Batches with padding give the results of single rows exactly in float64; in lower precision a rounding difference can
  send a token to another partition.
{_IMAGES_LIMIT if _sees_images(config) else ""}- Biases and licence terms of the original model carry over."""


def _counted(softmax: int) -> str:
    return "One softmax layer is" if softmax == 1 else f"{softmax} softmax layers are"


def _table(header: tuple[str, ...], rows: list[Any]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _nats(value: float, sign: str = "") -> str:
    return f"{value:{sign}.3f}" if math.isfinite(value) else "-"
