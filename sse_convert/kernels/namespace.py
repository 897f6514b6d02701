"""Names of custom operators that stay apart when this code is loaded twice, from the package and from a checkpoint."""

import re


def operator_name(module: str, name: str) -> str:
    """The qualified name under which a module registers an operator with torch.

    Args:
        module: `__name__` of the registering module.
        name: name of the operator.
    """
    return f"sse_{re.sub(r'[^A-Za-z0-9]', '_', module)}::{name}"
