"""Measure retrieval in wordings that training never saw, several parts side by side on one machine.

    python -m benchmarks.quality.wordings --checkpoints ../shared/checkpoints --books out/classic-books --out out/w
    python -m benchmarks.quality.wordings ... --cheap --variants row,teacher,induction   # 9M tokens, no softmax layer
    python -m benchmarks.quality.wordings ... --parts qwen-none-row-16M,llama-none-row-16M,llama-teacher --reserve 120

A part writes OUT/PART.json when it is finished. The same command again continues what was cut off. With `--reserve`
trainings end that many seconds before the limit, and are measured as they are; the same command later trains on, and
with `--cut` it measures once more. Last comes a table of shares of the teachers' scores (`--table`: only that).
"""

import argparse
import sys
from pathlib import Path

from benchmarks.quality.wordings import jobs, parts, shares
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--checkpoints", type=Path, required=True, help="folder of both teachers")
    arguments.add_argument("--books", type=Path, required=True, help="folder with train/ and valid/")
    arguments.add_argument("--out", type=Path, required=True, help="folder for JSON and logs")
    arguments.add_argument("--work", type=Path, help="folder for models (default: OUT/work)")
    arguments.add_argument("--parts", help="names, separated by commas (default: all of --variants)")
    arguments.add_argument("--variants", default="row", help=f"of {', '.join(parts.VARIANTS)}, separated by commas")
    arguments.add_argument("--cheap", action="store_true", help="9M tokens, without softmax layers")
    arguments.add_argument("--jobs", type=int, default=3, help="parts side by side")
    arguments.add_argument("--limit", type=float, default=570, help="seconds for all")
    arguments.add_argument("--reserve", type=float, default=0, help="seconds of them to measure what was cut short")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change all recipes")
    arguments.add_argument("--lengths", default="2048,8192", help="context lengths of the questions")
    arguments.add_argument("--samples", help="questions of each task by length, as 128,64 (default: what targets need)")
    arguments.add_argument("--one", help=argparse.SUPPRESS)
    arguments.add_argument("--cut", action="store_true", help="train no further: measure what earlier calls left")
    arguments.add_argument("--table", action="store_true", help="show what is finished, run nothing")
    return arguments


def samples_of(part: parts.Part, lengths: str, samples: str | None) -> dict[int, int]:
    """Questions of each task by context length."""
    asked = [int(length) for length in lengths.split(",")]
    counts = [part.samples[length] for length in asked] if samples is None else [int(n) for n in samples.split(",")]
    return dict(zip(asked, counts, strict=True))


def run_one(options: argparse.Namespace) -> None:
    """Run a part in this process."""
    from benchmarks.quality.wordings.measure import run

    part, work = parts.parse(options.one), (options.work or options.out / "work")
    place = parts.Place(options.checkpoints, options.books, work / part.name)
    samples = samples_of(part, options.lengths, options.samples)
    run(part, place, samples, options.set, options.out / f"{part.name}.json", cut=options.cut)


@reporting_errors
def main() -> None:
    options = parser().parse_args()
    hush_libraries()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one:
        run_one(options)
        return
    if not options.table:
        chosen = options.parts.split(",") if options.parts else None
        names = chosen or parts.all_parts(options.variants.split(","), cheap=options.cheap)
        for name in names:
            parts.parse(name)
        jobs.Runner(options.out, sys.argv[1:], options.jobs, options.limit, options.reserve).run(names)
    say("\n".join(shares.lines(options.out)))


if __name__ == "__main__":
    sys.exit(main())
