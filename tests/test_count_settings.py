"""The number of settings is held."""

from sse_convert.recipe.jsonschema import json_schema
from tools.count_settings import MOST, settings


def test_there_are_few_enough_settings() -> None:
    assert sum(map(len, settings().values())) <= MOST


def test_every_key_of_the_schema_is_counted() -> None:
    accepted = {key for part in json_schema()["definitions"].values() for key in part["properties"]}
    assert accepted == {key for keys in settings().values() for key in keys}
