from collections.abc import Callable

BLOCKS: dict[str, Callable[[], str]] = {}
