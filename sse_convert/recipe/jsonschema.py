"""JSON schema of recipes for editors, from the dataclasses; descriptions are the docstring lines of the fields."""

import ast
import dataclasses as dc
import inspect
import textwrap
import types
import typing
from typing import Any

from sse_convert.mixers import MIXER_TYPES
from sse_convert.recipe.schema import Recipe

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
    annotations, docs = typing.get_type_hints(cls), field_docs(cls)
    properties: dict[str, Any] = {}
    for field in dc.fields(cls):
        schema = _schema(annotations[field.name], definitions)
        if "$ref" in schema:
            schema = {"allOf": [schema]}  # draft 7 ignores what stands beside $ref
        properties[field.name] = {"description": docs[field.name], **schema, **_default(field)}
    required = [f.name for f in dc.fields(cls) if f.default is dc.MISSING and f.default_factory is dc.MISSING]
    return {
        "description": inspect.getdoc(cls),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _default(field: "dc.Field[Any]") -> dict[str, Any]:
    if field.default is not dc.MISSING:
        return {"default": field.default}
    if field.default_factory is not dc.MISSING:
        value = field.default_factory()
        return {"default": dc.asdict(value) if dc.is_dataclass(value) and not isinstance(value, type) else value}
    return {}


def _mixers(definitions: dict[str, Any]) -> dict[str, Any]:
    """Names that are kinds need no `kind`; any other name does."""
    references = {kind: _reference(cls, definitions) for kind, cls in MIXER_TYPES.items()}
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
    if origin is dict and set(typing.get_args(arguments[1])) == set(MIXER_TYPES.values()):
        return _mixers(definitions)
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if dc.is_dataclass(annotation) and isinstance(annotation, type):
        return _reference(annotation, definitions)
    if annotation is int:
        return _COUNT
    return {"type": {str: "string", float: "number", bool: "boolean", type(None): "null"}[annotation]}
