"""Reference pages made of the code itself: commands, exit codes and model families, as Markdown."""

import dataclasses as dc
from collections.abc import Iterator
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from typer.main import get_command

from docs.causal_lms import left_out, supported
from docs.markdown import prose, table
from sse_convert.cli.app import app
from sse_convert.cli.runner import EXIT_CODES
from sse_convert.errors import SSEConvertError
from sse_convert.modeling.arch_spec import SSE_PREFIX, ArchSpec
from sse_convert.modeling.architectures import ARCHITECTURES, IMAGE_TEXT
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
    lines = [
        "# Model families",
        "",
        "A family is an entry in `sse_convert/modeling/architectures.py`, recognised by `model_type` in `config.json`.",
        "[Add a family](../extend/family.md) shows how to write one.",
        "",
    ]
    lines += [_REST, ""]
    rows = [
        (f"`{spec.model_type}`", f"`{spec.causal_lm_class}`", f"`{spec.hybrid_causal_lm}`", _special(spec))
        for spec in ARCHITECTURES.values()
    ]
    lines += table(("model_type", "class", "converted class", "what differs from the defaults"), rows)
    lines += ["", *_images(), "The fields of an entry:", ""]
    defaults = [
        "required" if f.default is dc.MISSING else f"`{'none' if f.default is None else f.default}`"
        for f in dc.fields(ArchSpec)
    ]
    fields = [
        (f"`{f.name}`", default, prose(docs[f.name])) for f, default in zip(dc.fields(ArchSpec), defaults, strict=True)
    ]
    lines += [*table(("field", "default", "meaning"), fields), ""]
    return "\n".join([*lines, *_left_out()])


def _special(spec: ArchSpec) -> str:
    """What an entry says beside names and defaults."""
    found = {f.name: getattr(spec, f.name) for f in dc.fields(ArchSpec) if f.name not in _NAMES}
    defaults = {f.name: f.default for f in dc.fields(ArchSpec) if f.default is not dc.MISSING}
    return "; ".join(f"`{name}: {value}`" for name, value in found.items() if value != defaults.get(name, value))


_NAMES = ("config_class", "backbone_class", "model_type")
_IMAGES = """\
## Vision-language models

The language model inside a model of images and text converts in place. A recipe names the whole checkpoint, and every
command takes it as it takes a language model:

```yaml
model: Qwen/Qwen3-VL-2B-Instruct
layers: {pattern: [sse+sliding*3, full]}
```

```bash
sse-convert plan my-recipe.yaml
sse-convert run my-recipe.yaml
```

The result is a model of images and text again. `AutoModelForImageTextToText` loads it, with the code that travels in
the folder where `sse-convert` is not installed:

```python
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
```

- **What converts**: decoder layers of the language model. With no layer converted, logits of images and text are the
  teacher's to the bit.
- **What stays**: the vision tower and the projector, byte for byte, through every stage, `train: all` and LoRA
  included. Files of the processor travel with tokenizer and chat template. `plan` counts what sees images among the
  parameters and not among those that a token of text meets.
- **Training is on text.** Teacher and student read it through the language model alone. Rows with images are not
  offered; `data` reads text. `calibrate`, `select`, `eval`, `generate` and `chat` read text as well.
- **Features of an image** go to the layers where the teacher has them: into the embeddings, and with Qwen3-VL's
  DeepStack behind the first layers, converted or not.
- **Rotation by time, height and width** (M-RoPE): SSE does not know where in the image a token is; the softmax layers
  that are left and windows do.
- **Attention in both directions**: in Gemma 3 the tokens of an image see each other. Softmax layers that are left do
  that as before. SSE layers and converted windows read an image from its first token to its last.
- **CUDA graphs** are not used in generation: positions after an image are counted in Python.
"""


def _images() -> list[str]:
    """Models of images and text: what a conversion does with them, those with an entry, and the others."""
    rows = [
        (
            f"`{spec.model_type}`",
            ", ".join(f"`{name}`" for name in spec.text_types),
            f"`{spec.causal_lm_class}`",
            f"`{spec.hybrid_causal_lm}`",
        )
        for spec in IMAGE_TEXT.values()
    ]
    known = [name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if not name.startswith(SSE_PREFIX)]
    others = [f"`{name}`" for name in known if name not in supported()]
    return [
        _IMAGES,
        *table(("model_type", "language model inside", "class", "converted class"), rows),
        "",
        "Another language model inside one of these is refused by name. The other types that transformers loads with",
        "`AutoModelForImageTextToText` have no entry, and are refused by name: " + ", ".join(others) + ".",
        "",
    ]


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
