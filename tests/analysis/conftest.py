import pytest

from sse_convert import api
from tests.surgery.models import recipe, save_source


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A tiny model with tokenizer and 256 positions."""
    return save_source(tmp_path_factory.mktemp("analysis") / "source")


@pytest.fixture(scope="session")
def converted(source, tmp_path_factory):
    """The same with the layers sse, sliding, gla, full."""
    out = tmp_path_factory.mktemp("analysis") / "converted"
    api.convert(recipe(source), out)
    return out


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """A text of 600 tokens for these models."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(f"w{(7 * i + i // 11) % 90 + 3}" for i in range(600)))
    return path
