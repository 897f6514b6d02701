"""JSON schema of recipes for editors, from the dataclasses; descriptions are the docstring lines of the fields."""

import ast
import dataclasses as dc
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Hashable
from typing import Annotated, Any

from sse_convert.mixers import BASIC, BUILT_IN, BY_LAYER, FIXED, Mixer, SSEMixer
from sse_convert.recipe.ranges import Range
from sse_convert.recipe.schema import Recipe

ADVANCED = "advanced_mixer"
_ADVANCED = "Settings for experts, such as the paper's variants; most recipes have none."
MEANING = {
    "sse": "Sparse State Expansion with the settings we recommend: one state per query head under the delta rule.",
    "sse+sliding": "The same beside the teacher's softmax attention in a window. The mixer we recommend.",
    "sliding": "The teacher's softmax attention limited to a window and attention sinks.",
    "paper": "SSE as the paper has it: over gated linear attention, with softmax keys and four partitions.",
    "gla": "Plain gated linear attention (the paper's baseline): one ungated partition that every token uses.",
    "gdn": "Gated DeltaNet (arXiv:2412.06464): one state under the delta rule. The decay is ours, for its calibration, "
    "in place of exp(A_log) softplus; the short convolution is left out.",
}
"""what each of them is"""
_COUNT = {
    "anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^\d+(\.\d+)?\s*[KMBkmb]$"}],
}


def json_schema() -> dict[str, Any]:
    """The recipe schema (JSON Schema draft 7, the one editors support best)."""
    definitions: dict[str, Any] = {}
    root = _reference(Recipe, definitions)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "sse-convert recipe",
        "allOf": [root],
        "definitions": dict(sorted(definitions.items())),
    }


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The docstring line under each field of a dataclass, those of its bases included, by field name."""
    return _field_docs(typing.cast(Hashable, cls))


@functools.cache
def _field_docs(cls: type[Any]) -> dict[str, str]:
    docs = {name: doc for base in cls.__bases__ if base is not object for name, doc in field_docs(base).items()}
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for node, after in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[node.target.id] = " ".join(str(after.value.value).split())
    return docs


def _reference(cls: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A reference to the schema of a dataclass, which is added to `definitions`."""
    if cls.__name__ not in definitions:
        definitions[cls.__name__] = {}  # holds the place, should a class refer to itself
        definitions[cls.__name__] = _object(cls, definitions)
    return {"$ref": f"#/definitions/{cls.__name__}"}


def _object(cls: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    properties = {
        field.name: _property(cls, field.name, definitions) | _default(field.default, field.default_factory)
        for field in dc.fields(cls)
    }
    required = [f.name for f in dc.fields(cls) if f.default is dc.MISSING and f.default_factory is dc.MISSING]
    return {
        "description": inspect.getdoc(cls),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _property(cls: type[Any], name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    schema = _schema(typing.get_type_hints(cls, include_extras=True)[name], definitions)
    if "$ref" in schema:
        schema = {"allOf": [schema]}  # draft 7 ignores what stands beside $ref
    return {"description": field_docs(cls)[name], **schema}


def _default(default: Any, factory: Any = dc.MISSING) -> dict[str, Any]:
    if factory is not dc.MISSING:
        default = factory()
    if default is dc.MISSING:
        return {}
    return {"default": dc.asdict(default) if dc.is_dataclass(default) and not isinstance(default, type) else default}


def mixer_definition(kind: str) -> str:
    """Name of the definition of a built-in mixer."""
    return f"{kind.replace('+', '_')}_mixer"


def _mixer(kind: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """A reference to the schema of a built-in mixer, which is added to `definitions`; what makes it one is left out."""
    built_in = BUILT_IN[kind]
    names = [field.name for field in dc.fields(built_in) if field.name not in ("kind", BY_LAYER, *FIXED.get(kind, {}))]
    properties: dict[str, Any] = {
        "kind": {"description": field_docs(type(built_in))["kind"], "enum": [kind], "default": kind}
    }
    properties |= _settings(built_in, [name for name in BASIC if name in names], definitions)
    if isinstance(built_in, SSEMixer):
        properties["advanced"] = {"allOf": [_advanced(definitions)], "description": _ADVANCED, "default": {}}
    found = {"description": MEANING[kind], "type": "object", "properties": properties, "additionalProperties": False}
    definitions[mixer_definition(kind)] = found
    return {"$ref": f"#/definitions/{mixer_definition(kind)}"}


def _advanced(definitions: dict[str, Any]) -> dict[str, Any]:
    """A reference to what all linear mixers have under `advanced`; defaults are those of `sse`."""
    built_in = BUILT_IN["sse"]
    names = [field.name for field in dc.fields(built_in) if field.name not in BASIC]
    definitions[ADVANCED] = {
        "description": f"{_ADVANCED} The defaults are those of `sse` and `sse+sliding`.",
        "type": "object",
        "properties": _settings(built_in, names, definitions),
        "additionalProperties": False,
    }
    return {"$ref": f"#/definitions/{ADVANCED}"}


def _settings(mixer: Mixer, names: list[str], definitions: dict[str, Any]) -> dict[str, Any]:
    return {name: _property(type(mixer), name, definitions) | _default(getattr(mixer, name)) for name in names}


def _mixers(definitions: dict[str, Any]) -> dict[str, Any]:
    """Names that are kinds need no `kind`; any other name does."""
    references = {kind: _mixer(kind, definitions) for kind in BUILT_IN}
    named = [{"allOf": [reference], "required": ["kind"]} for reference in references.values()]
    return {"type": "object", "properties": references, "additionalProperties": {"anyOf": named}}


def _schema(annotation: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(option, definitions) for option in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is dict and arguments[1] == Mixer:
        return _mixers(definitions)
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if dc.is_dataclass(annotation) and isinstance(annotation, type):
        return _reference(annotation, definitions)
    if origin is Annotated:
        return _bounded(_schema(arguments[0], definitions), arguments[1])
    if annotation is int:
        return _COUNT
    return {"type": {str: "string", float: "number", bool: "boolean", type(None): "null"}[annotation]}


def _bounded(schema: dict[str, Any], rule: Any) -> dict[str, Any]:
    """The schema of a number within its range; text with a count's unit is left to the loader."""
    if not isinstance(rule, Range):
        return schema
    if "anyOf" in schema:
        return {"anyOf": [_bounded(schema["anyOf"][0], rule), *schema["anyOf"][1:]]}
    return {**schema, "exclusiveMinimum" if rule.more else "minimum": rule.low, "maximum": rule.high}
