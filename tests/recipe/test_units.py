import pytest

from sse_convert.recipe.units import format_count, parse_count, spelled_float


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4K", 4096),
        ("128k", 131072),
        ("100M", 100_000_000),
        ("1.5M", 1_500_000),
        ("1B", 10**9),
        ("0.5K", 512),
        ("8.2M", 8_200_000),
    ],
)
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "4", "4KB", "K", "-4K", "4 000", "1.0001K", "1e6", "4K tokens"])
def test_not_counts(text):
    assert parse_count(text) is None


@pytest.mark.parametrize("count", [1, 512, 4096, 1000, 1_500_000, 100_000_000, 10**9, 131072, 65536 * 3])
def test_format_count_is_read_back(count):
    text = format_count(count)
    assert (int(text) if text.isdigit() else parse_count(text)) == count


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("3e-4", "3.0e-4"),
        ("1.5e3", "1.5e+3"),
        ("1E5", "1.0e+5"),
        (".5e2", ".5e+2"),
        ("1.e2", "1.e+2"),
        ("lr", None),
        ("3.0", None),
    ],
)
def test_the_spelling_that_yaml_reads(text, spelled):
    assert spelled_float(text) == spelled
