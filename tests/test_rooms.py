"""The house holds together: packages depend downwards only, and a name means one thing."""

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "sse_convert"
ROOMS = [
    "errors",
    "trust",
    "mixers",
    "report",
    "console",
    "files",
    "process_memory",
    "compat",
    "recipe",
    "kernels",
    "modeling",
    "checkpoints",
    "data",
    "surgery",
    "calibration",
    "training",
    "inference",
    "serving",
    "evaluation",
    "selection",
    "results",
    "export",
    "pipeline",
    "doctor",
    "api",
    "cli",
]
"""packages and modules of the top level, each below those that may import it"""
RUNS = {"errors", "trust", "mixers", "process_memory", "compat", "kernels", "modeling", "inference", "serving"}
"""what a converted model runs on"""
MAKES = {f"{PACKAGE}.inference.generate"}
"""stands among them, for those who make models"""
NEEDED = {"torch", "triton", "transformers", "safetensors", "vllm"}
"""libraries that a converted model runs on, and the one that it is a plugin of"""
PRIVATE_BUT_USUAL = ("_attn_implementation", "_foreach_", "_replace", "_fields")
"""what transformers' own models read, torch's only fused updates of many tensors, and public names of named tuples"""
COMPAT = {f"{PACKAGE}.compat", f"{PACKAGE}.modeling.compat"}
STAND_IN = f"{PACKAGE}.modeling.left_out"
MOST_OF_A_BASENAME = 2


@cache
def modules(root: Path) -> dict[str, ast.Module]:
    """Every module of the package below `root` by dotted name, parsed."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text("utf-8"))
    return found


def imports(module: str, tree: ast.Module, known: set[str]) -> Iterator[tuple[str, int]]:
    """Modules that a module imports, anywhere in it and lazily too, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name if name in known else str(node.module), node.lineno) for name in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((argument.value, node.lineno) for argument in node.args if isinstance(argument, ast.Constant))


def imported_at_once(module: str, trees: dict[str, ast.Module]) -> set[str]:
    """Modules that importing a module imports, whichever package they are of: what functions import is not among them,
    nor what only type checkers see."""
    found: set[str] = set()
    waiting = {module}
    while waiting:
        name = waiting.pop()
        found.add(name)
        if name in trees:
            parents = {name.rpartition(".")[0]} & trees.keys()
            eager = [node for node in trees[name].body if isinstance(node, ast.Import | ast.ImportFrom)]
            targets = {target for target, _ in imports(name, ast.Module(eager, []), set(trees))}
            waiting |= (parents | targets) - found
    return found


def room(module: str) -> str:
    """The part of the top level that a module belongs to."""
    return module.split(".")[1]


def upward(root: Path) -> list[str]:
    """Imports that go from a room to one above it."""
    trees = modules(root)
    found = []
    for module, tree in trees.items():
        if module in (PACKAGE, f"{PACKAGE}.__main__"):
            continue  # the root itself offers the API, and lends `__version__` to all
        for target, line in imports(module, tree, set(trees)):
            if (
                target.startswith(f"{PACKAGE}.")
                and target != f"{PACKAGE}.__version__"
                and ROOMS.index(room(target)) > ROOMS.index(room(module))
            ):
                found.append(f"{module}:{line} imports {target}")
    return found


def public_names(root: Path) -> dict[str, set[str]]:
    """Public top-level functions and classes, and the modules that define them; a stand-in has the names of others."""
    found = defaultdict(set)
    for module, tree in modules(root).items():
        if module == STAND_IN:
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(module.removeprefix(f"{PACKAGE}."))
    return found


def test_every_room_has_its_place():
    found = {room(module) for module in modules(ROOT) if module not in (PACKAGE, f"{PACKAGE}.__main__")}
    assert found == set(ROOMS)


def test_no_import_goes_upwards():
    """Rooms in one order without an upward import have no cycle either."""
    assert upward(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "import sse_convert.training.loop",
        "from sse_convert.training.loop import train",
        "from sse_convert import training",
        "def lazily():\n    from sse_convert.training import loop",
        'import importlib\nloop = importlib.import_module("sse_convert.training.loop")',
    ],
)
def test_an_upward_import_is_found(tmp_path, line):
    for name, text in (("surgery/plan.py", line), ("training/loop.py", ""), ("training/__init__.py", "")):
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert len(upward(tmp_path)) == 1


def test_what_a_model_runs_on_imports_nothing_that_makes_models():
    """Lazily neither; what it needs besides torch and transformers would be missing where only a model runs."""
    trees = modules(ROOT)
    found = {
        f"{module}:{line} imports {target}"
        for module, tree in trees.items()
        if module not in MAKES | {PACKAGE, f"{PACKAGE}.__main__"} and room(module) in RUNS
        for target, line in imports(module, tree, set(trees))
        if not _runs(target)
    }
    assert found == set()


def _runs(target: str) -> bool:
    """Whether a model that runs may import this."""
    root = target.partition(".")[0]
    if root == PACKAGE:
        return target not in MAKES and room(target) in RUNS
    return root in NEEDED | sys.stdlib_module_names


def test_no_basename_more_than_twice():
    names = Counter(path.name for path in (ROOT / PACKAGE).rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > MOST_OF_A_BASENAME] == []


def test_a_public_name_means_one_thing():
    assert {name: where for name, where in public_names(ROOT).items() if len(where) > 1} == {}


def test_no_modules_import_each_other():
    trees = modules(ROOT)
    graph = {
        module: {target for target, _ in imports(module, tree, set(trees)) if target in trees and target != PACKAGE}
        for module, tree in trees.items()
        if module != PACKAGE
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("module", ["api", "doctor", "checkpoints.open", "export.push", "results.compare"])
def test_what_loads_no_model_imports_no_models(module):
    """transformers' models take three seconds of every process that imports them."""
    found = imported_at_once(f"{PACKAGE}.{module}", modules(ROOT))
    assert f"{PACKAGE}.errors" in found
    assert {name.partition(".")[0] for name in found} & {"transformers", "accelerate", "datasets", "peft"} == set()


@pytest.mark.parametrize("module", ["surgery.plan", "surgery.family_guard", "surgery.inspect"])
def test_what_plans_imports_nothing_that_trains(module):
    """The configuration of a model costs torch and much of transformers already: nothing else is imported beside it."""
    found = imported_at_once(f"{PACKAGE}.{module}", modules(ROOT))
    assert f"{PACKAGE}.checkpoints.teacher" in found
    assert {name.partition(".")[0] for name in found} & {"accelerate", "datasets", "peft", "jinja2"} == set()
    rooms = {room(name) for name in found if name.startswith(f"{PACKAGE}.")}
    assert max(map(ROOMS.index, rooms)) == ROOMS.index("surgery")


def test_what_hashes_files_imports_no_torch():
    found = imported_at_once(f"{PACKAGE}.checkpoints.manifest", modules(ROOT))
    assert f"{PACKAGE}.files" in found
    assert "torch" not in {name.partition(".")[0] for name in found}


def test_one_writer_of_files():
    """Who renames a file that is written (`path.replace(other)`, `os.replace`) is `files.py`, or says why not."""
    renaming = {
        module
        for module, tree in modules(ROOT).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "replace"
        if ast.unparse(node.func) == "os.replace" or (len(node.args) == 1 and not node.keywords)
    }
    assert renaming == {f"{PACKAGE}.{name}" for name in ("files", "modeling.remote_code")}, "the second one travels"


def test_the_source_archive_holds_what_its_files_import():
    """Tests read folders that only a checkout has, so they stay out of it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    shipped = {Path(name) for name in settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    assert all((ROOT / name).exists() for name in shipped)
    texts = [path.read_text("utf-8") for name in shipped for path in (ROOT / name).rglob("*.py")]
    imported = {Path(name) for text in texts for name in re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)}
    assert Path(PACKAGE) in imported
    assert {name for name in imported - shipped if (ROOT / name).is_dir()} == set()


def own_names(trees: dict[str, ast.Module]) -> set[str]:
    """Names that the package itself defines or assigns."""
    found = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def private_parts(tree: ast.Module) -> Iterator[str]:
    """Names with an underscore that a module imports from libraries or reads from what is not itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith((PACKAGE, "__")):
            yield from (part for part in (*str(node.module).split("."), *(alias.name for alias in node.names)))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield from (str(part.value) for part in node.args[1:2] if isinstance(part, ast.Constant))


def test_private_names_of_libraries_stand_in_compat():
    trees = modules(ROOT)
    own = own_names({module: tree for module, tree in trees.items() if module not in COMPAT})
    found = {
        f"{module}: {part}"
        for module, tree in trees.items()
        if module not in COMPAT
        for part in private_parts(tree)
        if part.startswith("_") and not part.startswith("__")
        if part not in own and not part.startswith(PRIVATE_BUT_USUAL)
    }
    assert found == set()
