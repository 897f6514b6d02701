"""The versions that converted models were tried with, for the page *Work with a hub*."""

from collections.abc import Callable, Mapping

from docs.markdown import table
from sse_convert.doctor import SUPPORTED
from sse_convert.modeling.tried import TRIED


def tried() -> str:
    """Each library, the lowest version that is served, and the newest one tried."""
    lowest = {name: ".".join(map(str, low)) for name, (low, _) in SUPPORTED.items()}
    rows = [(name, lowest.get(name, ""), version) for name, version in TRIED.items()]
    return "\n".join(table(("library", "from", "tried up to"), rows))


BLOCKS: Mapping[str, Callable[[], str]] = {"tried": tried}
