"""What is named as a file is there: in the package, tests, tools, the documentation and what surrounds them."""

import re
from pathlib import Path

from sse_convert.modeling.remote_code import remote_code

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`([\w./-]+\.py)`")
PLACES = ("sse_convert", "tests", "tools", "docs", "demo", "examples", "recipes")
ELSEWHERE = {
    "convert_hf_to_gguf.py",  # of llama.cpp
    *(Path(name).name for name in remote_code()),  # of an exported model
}
"""files of other projects, and those that a model travels with"""


def test_files_that_are_named_are_there():
    """By name, or by the end of a path. What left is named in a line with the commit that has it."""
    texts = [path for place in PLACES for end in ("py", "md", "yaml") for path in (ROOT / place).rglob(f"*.{end}")]
    there = {path.relative_to(ROOT) for place in (*PLACES, "benchmarks") for path in (ROOT / place).rglob("*.py")}
    ends = {"/".join(path.parts[i:]) for path in [*there, Path("cli.py")] for i in range(len(path.parts))}
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*texts, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for line in path.read_text(encoding="utf-8").splitlines()
        if "commit" not in line
        for name in NAMED.findall(line)
        if name not in ends | ELSEWHERE
    ]
    assert found == []
