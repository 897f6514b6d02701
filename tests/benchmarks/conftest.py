"""What several benchmarks need."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What experiments do is tested by hand, with `make test-experiments`; of each a `smoke` test always runs."""
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("smoke"):
            item.add_marker("experiment")
