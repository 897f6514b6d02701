"""Pages of the Python API, filled by mkdocstrings. What is not on them may change without notice."""

SHOWN = {
    "sse_convert": (
        "convert_model",
        "calibrate",
        "kl_loss",
        "peft_targets",
        "sse_attention",
        "SSEAttention",
    ),
    "sse_convert.api": (),
    "sse_convert.errors": (),
}
"""module of each page -> its names in the order of the page; all public ones where none are listed"""
_MEMBERS = "\n    options:\n      members: [forward]"
"""of a class, beside what its docstring says"""


def api_pages() -> dict[str, str]:
    """Markdown of each page, by its address."""
    return {f"api/{module.rpartition('.')[2]}.md": _page(module, names) for module, names in SHOWN.items()}


def _page(module: str, names: tuple[str, ...]) -> str:
    if not names:
        return f"::: {module}\n    options:\n      heading_level: 1\n"
    parts = [f"::: {module}.{name}{_MEMBERS if name[0].isupper() else ''}" for name in names]
    return "\n\n".join([f"# {module}", "Models in memory, and what they are made of.", *parts, ""])
