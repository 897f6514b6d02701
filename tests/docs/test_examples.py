"""The blocks of a page, what their marks mean, and how outputs are compared."""

from pathlib import Path

import pytest

from docs import examples
from docs.examples import PythonCall, Workplace, agrees, blocks, commands, without_figures
from docs.parsing import check
from docs.refresh import refreshed

PAGE = """# Page

```yaml title="a/recipe.yaml"
key: 1
```

!!! hub "Needs the hub"
    Text.

    ```console
    $ sse-convert push out/x ME/X
    ```

```{ .console .figures }
$ cat a/recipe.yaml
key: 2
$ echo a \\
  b
gone
```
"""
NO_CLASSES: frozenset[str] = frozenset()


def test_blocks_know_their_language_title_classes_and_admonition() -> None:
    file, hub, run = blocks(PAGE)
    assert (file.language, file.title, file.body) == ("yaml", "a/recipe.yaml", "key: 1\n")
    assert (hub.admonition, hub.is_run, hub.body) == ("hub", False, "$ sse-convert push out/x ME/X\n")
    assert (run.language, run.classes, run.admonition, run.is_run) == ("console", {"figures"}, "", True)
    assert [block.line for block in (file, hub, run)] == [3, 10, 14]


def test_a_block_that_needs_an_extra_is_run_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, extra = blocks("```console\n$ ls\n```\n\n```{ .console .eval }\n$ ls\n```\n")
    for installed in (True, False):
        monkeypatch.setattr(examples, "find_spec", lambda name, found=installed: found or None)
        assert [plain.is_run_here, extra.is_run_here, extra.is_run] == [True, installed, True]


def test_a_block_after_an_admonition_is_outside_of_it() -> None:
    (block,) = blocks("!!! gpu\n    Text.\n\nMore text:\n\n    ```console\n    $ ls\n    ```\n")
    assert block.admonition == ""
    assert block.is_run


def test_commands_and_what_they_print() -> None:
    first, second = commands("$ one \\\n  more\nx\ny\n$ two\n")
    assert (first.text, first.output) == ("one \\\n  more", "x\ny\n")
    assert (second.text, second.output) == ("two", "")
    with pytest.raises(ValueError, match="begins with 'text'"):
        commands("text\n$ ls\n")


def test_outputs_are_compared_as_exactly_as_asked() -> None:
    shown, other = "loss  0.51 in 8 steps\n", "loss 0.498 in 12 steps\n"
    assert agrees(shown, shown, NO_CLASSES)
    assert not agrees(shown, other, NO_CLASSES)
    assert agrees(shown, other, frozenset({"figures"}))
    assert not agrees(shown, "gain 0.51 in 8 steps\n", frozenset({"figures"}))
    assert not agrees(shown, shown + shown, frozenset({"figures"}))
    assert agrees(shown, "anything\n", frozenset({"sample"}))
    assert not agrees(shown, "\n", frozenset({"sample"}))


@pytest.mark.parametrize("said", ["8 passes (below 1 min on one GPU{})\n", "choosing 2 layers: 8 passes{}\n"])
def test_time_on_the_machine_at_hand_is_nobody_else_s(said: str) -> None:
    assert agrees(said.format(""), said.format(", about 3 min on this CPU"), NO_CLASSES)
    assert not agrees(said.format(""), said.format(", about 3 min on this GPU"), NO_CLASSES)


def test_numbers_and_hashes_are_figures() -> None:
    text = "1,024 tokens  -3.5e-4 99.5% recipe 2f14e27ee6b9\n-----  ---\n"
    assert without_figures(text) == ["# tokens # # recipe #", "-- --"]


def test_refreshing_writes_what_commands_print_and_nothing_else(tmp_path: Path) -> None:
    text = refreshed(PAGE, Workplace(tmp_path))
    assert text == PAGE.replace("key: 2\n", "key: 1\n").replace("gone\n", "a b\n")


def test_a_failing_command_is_an_error_and_a_succeeding_one_where_it_should_fail(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    with pytest.raises(RuntimeError, match="exit code 3 of: exit 3"):
        place.run("exit 3")
    assert place.run("echo no; exit 3", fails=True) == "no\n"
    with pytest.raises(RuntimeError, match="exit code 0 of: true"):
        place.run("true", fails=True)


@pytest.mark.parametrize(
    ("command", "call"),
    [
        ("sse-convert plan 'a b' > x.txt", PythonCall(["-m", "sse_convert", "plan", "a b"], "x.txt", False, "")),
        ("python a.py 2>&1 | grep 'b|c'", PythonCall(["a.py"], None, True, "grep 'b|c'")),
        ("sse-convert plan \\\n  --json", PythonCall(["-m", "sse_convert", "plan", "--json"], None, False, "")),
        ("python -c 'print(1)'", None),
        ("sse-convert plan $RECIPE", None),
        ("sse-convert plan x && ls", None),
        ("ls out | grep -v sse_", None),
    ],
)
def test_python_processes_at_the_head_of_a_command(command: str, call: PythonCall | None) -> None:
    assert PythonCall.parse(command) == call


def test_a_warm_process_is_a_process_of_its_own(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    lines = ["import os, sys", "print(sys.argv[1:], os.getcwd() == sys.path[0], __name__, flush=True)"]
    lines += ["print('aside', os.environ['COLUMNS'], file=sys.stderr)", "sys.exit(len(sys.argv) - 1)"]
    (place.folder / "script.py").write_text("\n".join(lines))
    assert place.run("python script.py") == "[] True __main__\naside 120\n"
    with pytest.raises(RuntimeError, match=r"exit code 2 of: python script\.py a b"):
        place.run("python script.py a b")
    assert place.run("python script.py a | tr a-z A-Z", fails=True) == "aside 120\n['A'] TRUE __MAIN__\n"
    assert place.run("python script.py a 2>&1 | grep -c .", fails=True) == "2\n"
    assert place.run("python script.py > out.txt") == "aside 120\n"
    assert (place.folder / "out.txt").read_text() == "[] True __main__\n"


@pytest.mark.parametrize(
    "command",
    [
        "sse-convert plan qwen3-0.6b --set a=b --json",
        "sse-convert recipes copy qwen3-0.6b",
        "accelerate launch --num_processes 8 -m sse_convert run x.yaml",
        "python demo/run.py --out there",
        "python -m benchmarks.kernels.decoding_step --out there  # a comment",
        "python -m benchmarks.real.heads model books out.json --samples 3",
        "COMMIT=1 make demo",
        "pip install '.[eval,docs]'",
        "sse-convert plan qwen3-0.6b 2>&1 | sed 1q",
    ],
)
def test_commands_that_parse(command: str) -> None:
    check(command)


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("sse-convert plan x.yaml --sett a=b", "--sett"),
        ("sse-convert convert x.yaml", "out"),
        ("sse-convert plam x.yaml", "plam"),
        ("sse-convert recipes drop x", "drop"),
        ("accelerate launch -m sse_convert run", "recipe"),
        ("python demo/run.py --output there", "--output"),
        ("python -m benchmarks.kernels.missing", "missing"),
        ("python -m benchmarks.kernels.decoding_step --in there", "--in"),
        ("python -m benchmarks.real.heads model books out.json --samples few", "heads refuses model"),
        ("python benchmarks/training/step_profile.py x --out out.json --steps 3", "step_profile refuses x"),
        ("make nothing", "nothing"),
        ("pip install .[none]", "none"),
        ("rm -rf out", "no check is known"),
    ],
)
def test_commands_that_do_not(command: str, complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        check(command)
