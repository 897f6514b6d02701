"""Count lines of code: of Python files, without blank lines, comments and docstrings.

python tools/count_code.py                  # sse_convert of this checkout, by package
python tools/count_code.py OTHER/sse_convert
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Lines of a module that hold code. A docstring, also one below a field, is an expression that is a string."""
    silent = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {line for t in tokens if t.type not in SILENT for line in range(t.start[0], t.end[0] + 1)}
    return len(found - silent)


def by_package(root: Path) -> Counter[str]:
    """Lines of code below a folder, by the first part of the path in it."""
    found: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        found[path.relative_to(root).parts[0]] += code_lines(path.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Print a line per package, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent / "sse_convert")
    found = by_package(parser.parse_args().root)
    for name, lines in found.most_common():
        print(f"{lines:7,}  {name}")
    print(f"{found.total():7,}  in all")


if __name__ == "__main__":
    main()
