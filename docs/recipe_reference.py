"""Reference pages made of the recipe schema and the packaged recipes, as Markdown."""

import json
import math
from collections.abc import Iterator
from typing import Any

from docs.markdown import anchor, prose, table
from sse_convert.mixers import BUILT_IN, FULL
from sse_convert.recipe.jsonschema import ADVANCED, json_schema, mixer_definition
from sse_convert.recipe.presets import preset_names, preset_summary, preset_text
from sse_convert.recipe.schema import Recipe

Schema = dict[str, Any]
_LARGEST_BOUND = 1


def recipe_page() -> str:
    """Every key of a recipe: type, default and meaning, one section per mapping."""
    definitions = json_schema()["definitions"]
    headings = _headings(definitions)
    lines = [
        "# Recipe keys",
        "",
        "A recipe is a YAML file. Unknown keys are refused with a suggestion, all problems at once. A key without a",
        "default is required. Counts of tokens may be written `100M` or `4K`. `sse-convert recipes schema` prints all",
        "this as a JSON schema for editors.",
    ]
    for name, heading in headings.items():
        lines += ["", f"## {heading}", "", prose(definitions[name]["description"]), ""]
        lines += _keys(definitions[name], headings)
    lines += ["", f"`{FULL}` is the teacher's attention, untouched, and has no keys."]
    return "\n".join([*lines, ""])


def recipes_page() -> str:
    """The packaged recipes, in full."""
    lines = [
        "# Packaged recipes",
        "",
        "`sse-convert recipes list` prints this table, `sse-convert recipes copy NAME` gives a file to edit.",
        "",
        *table(
            ("recipe", "what it does"),
            [(f"[{name}](#{anchor(name)})", prose(preset_summary(name))) for name in preset_names()],
        ),
    ]
    for name in preset_names():
        lines += ["", f"## {name}", "", "```yaml", preset_text(name).rstrip(), "```"]
    return "\n".join([*lines, ""])


def _headings(definitions: dict[str, Schema]) -> dict[str, str]:
    """The heading of each definition, in the order in which a reader of the top level meets them.

    A mapping is headed by the path of the first key that holds it, as in `data.train[]`.
    """
    kinds = {mixer_definition(kind): f"mixers: kind {kind}" for kind in BUILT_IN}
    kinds[ADVANCED] = "mixers: advanced"
    paths = {Recipe.__name__: ""}
    for owner in (queue := [Recipe.__name__]):
        for key, schema in definitions[owner]["properties"].items():
            path = f"{paths[owner]}.{key}".lstrip(".") + ("[]" if schema.get("type") == "array" else "")
            for name in _references(schema):
                if name not in paths:
                    paths[name] = kinds.get(name, path)
                    queue.append(name)
    return {name: path or "Top level" for name, path in paths.items()}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _keys(definition: Schema, headings: dict[str, str]) -> list[str]:
    rows = [
        (f"`{key}`", _type(schema, headings), _default(schema), prose(schema["description"]))
        for key, schema in definition["properties"].items()
    ]
    return table(("key", "type", "default", "meaning"), rows)


def _default(schema: Schema) -> str:
    if "default" not in schema:
        return "required"
    return "its defaults" if "allOf" in schema else f"`{_yaml(schema['default'])}`"


def _yaml(value: Any) -> str:
    return "unset" if value is None else json.dumps(value).replace('"', "")


def _type(schema: Schema, headings: dict[str, str]) -> str:
    """A type in words, with links to the sections of mappings."""
    match schema:
        case {"allOf": [inner]}:
            return _type(inner, headings)
        case {"$ref": reference}:
            heading = headings[reference.rpartition("/")[2]]
            return f"[{heading.removeprefix('mixers: kind ')}](#{anchor(heading)})"
        case {"enum": values}:
            return " or ".join(f"`{_yaml(value)}`" for value in values)
        case {"anyOf": [{"type": "integer"}, {"pattern": _}]}:
            return "count"
        case {"anyOf": options}:
            return " or ".join(_type(option, headings) for option in options if option.get("type") != "null")
        case {"type": "array", "items": items}:
            return f"list of {_type(items, headings)}"
        case {"type": "object", "properties": properties}:
            return "name to " + " or ".join(_type(option, headings) for option in properties.values())
        case {"type": "object", "additionalProperties": values}:
            return f"mapping to {_type(values, headings)}"
    return {"string": "text", "boolean": "true or false"}.get(schema["type"], schema["type"]) + _range(schema)


def _range(schema: Schema) -> str:
    """The bounds of a share or a rate in words; nothing where the upper one only keeps out nonsense."""
    if schema.get("maximum", math.inf) > _LARGEST_BOUND:
        return ""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    return f", {'more than ' if 'exclusiveMinimum' in schema else ''}{low:g} to {schema['maximum']:g}"
