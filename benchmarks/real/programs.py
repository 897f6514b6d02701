"""Programs that pass their tests: python -m benchmarks.real.programs OUT.json --models NAME=FOLDER --sets NAME=FILE

Each model answers HumanEval or MBPP in its chat template, greedily, once (pass@1). Programs run in a process of their
own, for some seconds and in little memory, but not in a sandbox: on a machine that holds nothing else.
"""

import argparse
import concurrent.futures
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.kernels.hybrid_measure import environment
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.files import write_json

REQUEST = "Complete this Python function. Answer with the whole function in one block of code.\n```python\n{}\n```"
BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
SECONDS, MEMORY = 10, 4 << 30
"""that a program may take"""
Problem = dict[str, Any]
"""id, prompt, test, entry_point"""


def turn(problem: Problem) -> list[dict[str, str]]:
    """What is asked, as a conversation."""
    return [{"role": "user", "content": REQUEST.format(problem["prompt"].strip())}]


def program(problem: Problem, answer: str) -> str:
    """What stands above the asked function, the answer's code, and the tests."""
    found = BLOCK.search(answer)
    code, name = (found[1] if found else answer), problem["entry_point"]
    above, _, _ = problem["prompt"].partition(f"def {name}(")
    if f"def {name}(" not in code:
        code = problem["prompt"] + code
    return f"{above}\n{code}\nasked = {name}\n{problem['test']}\ncheck(asked)\n"


def passes(text: str, seconds: float = SECONDS) -> bool:
    """Whether a program ends well in time."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, "-I", "-S", str(file)]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
                preexec_fn=limit,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def passing(texts: Sequence[str], seconds: float = SECONDS) -> list[bool]:
    """Whether each program ends well in time."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(partial(passes, seconds=seconds), texts))


class Writer:
    """A model that answers in its chat template.

    Args:
        model: in evaluation mode.
        tokenizer: pads on the left.
        batch: answers at a time.
        new: tokens of an answer at most.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch: int, new: int) -> None:
        self.model, self.tokenizer, self.batch, self.new = model, tokenizer, batch, new

    def answers(self, problems: Sequence[Problem]) -> dict[str, str]:
        """id -> answer, prompts of like length together."""
        turns = {problem["id"]: turn(problem) for problem in problems}
        asked = {
            name: self.tokenizer.apply_chat_template(t, add_generation_prompt=True, tokenize=False)
            for name, t in turns.items()
        }
        order = sorted(asked, key=lambda name: len(asked[name]))
        return {
            name: text
            for part in _parts(order, self.batch)
            for name, text in zip(part, self._batch([asked[name] for name in part]), strict=True)
        }

    @torch.inference_mode()
    def _batch(self, texts: list[str]) -> list[str]:
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(
            self.model.device
        )
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}
        found = self.model.generate(**inputs, max_new_tokens=self.new, **greedy)
        return self.tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _parts(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


def judged(writer: Writer, problems: Sequence[Problem]) -> dict[str, Any]:
    """Passed or not, in the order of the problems."""
    answers = writer.answers(problems)
    good = passing([program(problem, answers[problem["id"]]) for problem in problems])
    return {"passed": sum(good), "of": len(good), "each": "".join("01"[one] for one in good)}


def run(options: argparse.Namespace) -> None:
    """Judge each model on each set."""
    report: dict[str, Any] = {**environment(torch.device(options.device)), "new_tokens": options.new, "models": {}}
    sets = {}
    for name, file in (named.split("=", 1) for named in options.sets):
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        sets[name] = [json.loads(line) for line in lines][options.first : options.last]
    for name, folder in (named.split("=", 1) for named in options.models):
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(options.device).eval()
        writer = Writer(model, tokenizer, batch=options.batch, new=options.new)
        report["models"][name] = {}
        for kind, problems in sets.items():
            found = report["models"][name][kind] = judged(writer, problems)
            write_json(options.out, report)
            say(f"{name}, {kind}: {found['passed']} of {found['of']}")


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path, help="JSON file to write")
    p.add_argument("--models", nargs="+", required=True, metavar="NAME=FOLDER")
    p.add_argument("--sets", nargs="+", required=True, metavar="NAME=FILE", help="JSON lines")
    p.add_argument("--first", type=int, help="problem of each set; MBPP's tests are 10 to 509")
    p.add_argument("--last", type=int)
    p.add_argument("--new", type=int, default=384, help="tokens of an answer at most")
    p.add_argument("--batch", type=int, default=64, help="answers at a time")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = p.parse_args(arguments)
    hush_libraries()
    run(options)


if __name__ == "__main__":
    sys.exit(main())
