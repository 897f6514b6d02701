"""Files of kernels say what they compute as an equation, their grid and their bytes, and no signature is endless."""

import ast
from collections.abc import Iterator
from pathlib import Path

import sse_convert

PACKAGE = Path(sse_convert.__file__).parent
MOST_PARAMETERS = 40
SAID = "=", "grid", "byte"
UNSAID = {
    "chunk_state.py", "delta_rule_kernels.py", "fused_recurrent.py", "logit_losses.py", "norm.py", "precise_linear.py",
    "ring_attention.py", "routing.py", "slot_sort_kernels.py", "state_slots.py", "token_attention.py",
}  # fmt: skip
"""files of kernels whose header still lacks one of these; none may join them"""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_no_signature_is_endless() -> None:
    long = [
        f.name
        for file in PACKAGE.rglob("*.py")
        for f in functions(ast.parse(file.read_text()))
        if len([*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]) > MOST_PARAMETERS
    ]
    assert not long


def test_headers_of_kernels_say_equation_grid_and_bytes() -> None:
    trees = {file.name: ast.parse(file.read_text()) for file in (PACKAGE / "kernels" / "triton").rglob("*.py")}
    kernels = {name: t for name, t in trees.items() if any(f.name.endswith("_kernel") for f in functions(t))}
    assert len(kernels) > len(UNSAID)
    lacking = {name for name, t in kernels.items() if any(w not in (ast.get_docstring(t) or "").lower() for w in SAID)}
    assert lacking <= UNSAID
