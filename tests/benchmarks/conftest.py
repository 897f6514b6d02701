"""What several benchmarks need."""

from pathlib import Path

import pytest

from tests.surgery.models import recipe_file, save_source

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What experiments do is tested by hand, with `make test-experiments`; of each a `smoke` test always runs."""
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("smoke"):
            item.add_marker("experiment")


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """A recipe over a tiny model whose context holds the rows of --tiny."""
    folder = tmp_path_factory.mktemp("benchmarks")
    source = save_source(folder / "teacher", "llama", max_position_embeddings=512)
    for name in ("train", "valid"):
        (folder / f"{name}.txt").write_text(" ".join(f"w{i * 7 % 90 + 3}" for i in range(4000)))
    data = {name: [{"path": str(folder / f"{name}.txt")}] for name in ("train", "valid")}
    data["needles"] = {"share": 0.5, "keys": [1]}
    return recipe_file(folder / "recipe.yaml", source, data=data, calibrate={"rows": 1, "seq_len": 64})
