"""Reference pages made of the code itself: commands, exit codes and model families, as Markdown."""

import dataclasses as dc
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from docs.causal_lms import left_out, supported
from docs.markdown import prose, table
from sse_convert.cli.app import app
from sse_convert.cli.runner import EXIT_CODES
from sse_convert.errors import SSEConvertError
from sse_convert.modeling.architectures import ARCHITECTURES, ArchSpec
from sse_convert.recipe.jsonschema import field_docs


def commands_page() -> str:
    """Every command with its arguments and options."""
    group = get_command(app)
    lines = ["# Commands", "", group.help or "", ""]
    lines += table(("option", "meaning"), _parameters(group))
    for name, command in _leaves(group, ()):
        usage = " ".join(
            ["sse-convert", *name, *command.collect_usage_pieces(command.make_context("", [], **_LENIENT))]
        )
        lines += ["", f"## {' '.join(name)}", "", f"    {usage}", "", _paragraphs(command.help), ""]
        lines += table(("option", "meaning"), _parameters(command))
    return "\n".join([*lines, ""])


_LENIENT = {"resilient_parsing": True}


def _leaves(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(command, (*path, name))
        else:
            yield (*path, name), command


def _parameters(command: Any) -> list[tuple[str, str]]:
    context = command.make_context("", [], **_LENIENT)
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    return [(f"`{names}`", prose(meaning)) for names, meaning in filter(None, records)]


def _paragraphs(text: str | None) -> str:
    return "\n".join(line.strip() for line in (text or "").splitlines())


def errors_page() -> str:
    """Exit codes and the error classes behind them."""
    classes = {cls.exit_code: cls for cls in reversed(SSEConvertError.__subclasses__())}
    rows = []
    for code, meaning in EXIT_CODES.items():
        cls = classes.get(code)
        link = f"[`{cls.__name__}`](../api/errors.md#{cls.__module__}.{cls.__name__})" if cls else ""
        rows.append((str(code), link if cls and cls.__module__ == SSEConvertError.__module__ else "", meaning))
    return "\n".join(
        [
            "# Exit codes",
            "",
            "A mistake of the user ends in a message that says what is wrong, what was expected and how to mend it,",
            "and in one of these codes. With `--json` the same stands in one object on stdout.",
            "",
            *table(("code", "Python exception", "meaning"), rows),
            "",
        ]
    )


_REST = """\
What a conversion does with the rest of a model:

- **Experts** stay the teacher's bytes. transformers merges what is stored expert by expert when it loads a model,
  by its model type; the converted type has the same rules, both ways. Stages of the whole model train routers and
  experts, with the family's own balance loss where the checkpoint says `output_router_logits: true`. LoRA leaves
  experts alone.
- **Layers of linear attention**, or with a state space, stay as they are; a pattern names them `full`. Documents
  packed into one row share their states, as they do in transformers.
- **Layers that predict further tokens** (multi-token prediction: parts called `mtp`, or layers beyond the model's own)
  are neither converted nor loaded. `convert` names them and leaves their bytes in the files, `plan` counts them apart,
  training stages write checkpoints without them, and `generate(use_mtp=True)` is refused.
- **Quantised checkpoints** are refused. `sse-convert dequantize MODEL -o FOLDER` makes a bfloat16 copy of fp8 and mxfp4
  ones, in the memory of one tensor. For other formats, such as GPTQ or AWQ, the message says what to do.
- **Latent attention** (DeepSeek, Kimi Linear) keeps its low-rank projections as they are. They give each head its q, k
  and v, and SSE takes these; values may have another size than keys. [Why so](../extend/family.md#latent-attention).
- **Chunked attention** (Llama 4) is a window to its caches, and counted as one."""


def families_page() -> str:
    """The model families that can be converted."""
    docs = field_docs(ArchSpec)
    shown = [f for f in dc.fields(ArchSpec) if f.name not in ("config_class", "backbone_class", "model_type")]
    lines = [
        "# Model families",
        "",
        "A family is an entry in `sse_convert/modeling/architectures.py`, recognised by `model_type` in `config.json`.",
        "[Add a family](../extend/family.md) shows how to write one.",
        "",
    ]
    lines += [_REST, ""]
    rows = []
    for spec in ARCHITECTURES.values():
        special = [
            f"{f.name}: {getattr(spec, f.name)}"
            for f in shown
            if f.default is not dc.MISSING and getattr(spec, f.name) != f.default
        ]
        rows.append((f"`{spec.model_type}`", f"`{spec.causal_lm_class}`", f"`{spec.hybrid_causal_lm}`", special))
    lines += table(
        ("model_type", "class", "converted class", "what differs from the defaults"),
        [(*row, "; ".join(f"`{s}`" for s in special)) for *row, special in rows],
    )
    lines += ["", "The fields of an entry:", ""]
    defaults = [
        "required" if f.default is dc.MISSING else f"`{'none' if f.default is None else f.default}`"
        for f in dc.fields(ArchSpec)
    ]
    fields = [
        (f"`{f.name}`", default, prose(docs[f.name])) for f, default in zip(dc.fields(ArchSpec), defaults, strict=True)
    ]
    lines += [*table(("field", "default", "meaning"), fields), ""]
    return "\n".join([*lines, *_left_out()])


def _left_out() -> list[str]:
    """The causal language models of transformers that have no entry, with reasons."""
    titles = {"refused": "Refused", "not_softmax_decoder": "Not decoders with softmax attention"}
    same = [f"`{name}` is read as `{entry}`" for name, entry in supported().items() if name != entry]
    lines = [
        "## All causal language models of transformers",
        "",
        f"{len(supported())} model types convert ({'; '.join(same)}). The others are refused by name. So is a",
        "checkpoint of a known family whose attention has a module, parameter, buffer, argument or config switch",
        "that the entry does not name: `plan` and `convert` say which, before any weight is read.",
        "",
    ]
    for kind, groups in left_out().items():
        rows = [(group.reason, ", ".join(f"`{name}`" for name in group.families)) for group in groups]
        lines += [f"### {titles[kind]}: {sum(len(group.families) for group in groups)}", ""]
        lines += [*table(("why", "model types"), rows), ""]
    return lines
