import dataclasses as dc
import json

import jsonschema
import pytest
import yaml

from sse_convert import mixers
from sse_convert.recipe import schema
from sse_convert.recipe.jsonschema import field_docs, json_schema
from sse_convert.recipe.presets import preset_names, preset_text
from tests.recipe.recipes import small

VALIDATOR = jsonschema.Draft7Validator(json_schema())


def test_it_is_a_schema():
    jsonschema.Draft7Validator.check_schema(json_schema())
    json.dumps(json_schema(), allow_nan=False)


@pytest.mark.parametrize("name", preset_names())
def test_packaged_recipes_fit(name):
    VALIDATOR.validate(yaml.safe_load(preset_text(name)))


@pytest.mark.parametrize(
    "changes",
    [
        {"modle": 1},
        {"mixers": {"mine": {"window": 3}}},
        {"mixers": {"sse": {"window": 3}}},
        {"stages": [{"name": "a"}]},
        {"export": {}},
        {"train": {"mixed_precision": False}},
        {"data": {"train": [{"kind": "txt"}]}},
    ],
)
def test_mistakes_are_underlined(changes):
    VALIDATOR.validate(small())
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(small(**changes))


@pytest.mark.parametrize(
    "cls",
    [
        cls
        for module in (schema, mixers)
        for cls in vars(module).values()
        if isinstance(cls, type) and dc.is_dataclass(cls) and cls.__module__ == module.__name__
    ],
)
def test_every_key_is_described(cls):
    assert cls.__doc__
    assert set(field_docs(cls)) == {field.name for field in dc.fields(cls)}
