"""How results are written for a person."""

import pytest

from sse_convert.mixers import BUILT_IN, Gate, SlidingMixer, SSEMixer, mixer_to_dict
from sse_convert.recipe import recipe_from_dict
from sse_convert.report import counted, format_mixer


@pytest.mark.parametrize(
    ("mixer", "text"),
    [
        (SlidingMixer(window=64), "sliding {window: 64}"),
        (
            SSEMixer(kind="paper", num_partitions=16, gate=Gate(read=False)),
            "paper {num_partitions: 16, advanced: {gate: {read: false}}}",
        ),
        *((mixer, f"{name} (defaults)") for name, mixer in BUILT_IN.items()),
    ],
)
def test_a_mixer_is_written_as_what_differs_from_its_defaults(mixer, text):
    assert format_mixer(mixer_to_dict(mixer)) == text


def test_what_is_written_is_a_recipe_again():
    import yaml

    mixer = SSEMixer(num_partitions=8, top_k=2, decay="scalar", gate=Gate(write=False))
    kind, _, settings = format_mixer(mixer_to_dict(mixer)).partition(" ")
    recipe = recipe_from_dict(
        {
            "recipe_version": 1,
            "model": "m",
            "layers": {"pattern": [kind]},
            "mixers": {kind: yaml.safe_load(settings)},
            "export": {"dir": "out"},
        }
    )
    assert recipe.mixers[kind] == mixer


@pytest.mark.parametrize(("count", "words"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1234, "1,234 rows")])
def test_counted(count, words):
    assert counted(count, "row") == words
