"""Make `results.csv` from the JSON of all runs, kept in `raw-*.tar.xz` and `raw/`.

    python -m benchmarks.quality.collect                                          # what is kept, read again
    python -m benchmarks.quality.collect out/run.json                             # a report of convert.py besides
    python -m benchmarks.quality.collect out/NAME.json --recipe R --set a.b=c     # a report of `sse-convert eval`
    python -m benchmarks.quality.collect --pack 0.2                               # raw/ into raw-0.2.tar.xz

A report of `eval` does not say how its model was made, so it needs the recipe; COMMIT names its commit.
What no JSON tells stands in `about.yaml`, by the file's name. A copy of each new file goes to `raw/`.
"""

import argparse
import io
import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.quality import rows

FOLDER = Path(__file__).parent
TABLE = FOLDER / "results.csv"
MADE = ("softmax_layers", "other_layers", "training", "tokens")
"""columns that tell how a model was made"""


def raw_files(folder: Path = FOLDER) -> Iterator[tuple[str, bytes]]:
    """Name and content of every kept JSON file: archives first, then `raw/`, each sorted."""
    for archive in sorted(folder.glob("raw-*.tar.xz")):
        with tarfile.open(archive) as tar:
            for member in sorted(tar.getmembers(), key=lambda member: member.name):
                content = tar.extractfile(member)
                if content is not None:
                    yield member.name, content.read()
    for path in sorted(folder.glob("raw/*.json")):
        yield path.name, path.read_bytes()


def reports(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """The kept JSON files by name without suffix."""
    return {name.removesuffix(".json"): json.loads(text) for name, text in raw_files(folder) if name.endswith(".json")}


def collected(folder: Path = FOLDER) -> list[rows.Row]:
    """The rows of all kept files, those of a file together."""
    about: dict[str, dict[str, Any]] = yaml.safe_load((folder / "about.yaml").read_text(encoding="utf-8"))
    kept = reports(folder)
    if unknown := about.keys() - kept.keys():
        raise ValueError(f"about.yaml names runs that are not kept: {sorted(unknown)}")
    return [row for name in kept for row in rows.rows_of(name, kept[name], _columns(name, about, kept))]


def _columns(name: str, about: dict[str, dict[str, Any]], kept: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `about.yaml` says of a run; with `like`, how its model was made is what another run's JSON says."""
    columns = dict(about.get(name, {}))
    if "like" not in columns:
        return columns
    other = columns.pop("like")
    like = next(row for row in rows.rows_of(other, kept[other], about.get(other, {})) if row.model == "trained")
    return {column: getattr(like, column) for column in MADE} | columns


def with_recipe(report: dict[str, Any], recipe_file: str, overrides: list[str], command: str) -> dict[str, Any]:
    """A report of `eval` in the form of `convert.py`, whose recipe, layers and tokens are those of a recipe."""
    from benchmarks.quality.convert import commit
    from sse_convert import api
    from sse_convert.recipe import load_recipe

    recipe = load_recipe(recipe_file, overrides)
    return {
        "schema": 1,
        "command": command,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "training_tokens": sum(stage.tokens for stage in recipe.stages),
        "recipe": recipe.to_dict(),
        "layers": [row["mixer"] for row in api.plan(recipe).to_dict()["layers"]],
        "after": report,
    }


def pack(version: str, folder: Path = FOLDER) -> Path:
    """Move the files of `raw/` into an archive, the same to the byte for the same files."""
    archive = folder / f"raw-{version}.tar.xz"
    paths = sorted(folder.glob("raw/*"))
    with tarfile.open(archive, "x:xz", preset=9) as tar:
        for path in paths:
            member = tarfile.TarInfo(path.name)
            member.size = path.stat().st_size
            tar.addfile(member, io.BytesIO(path.read_bytes()))
    for path in paths:
        path.unlink()
    return archive


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("reports", nargs="*", type=Path, metavar="REPORT.json")
    arguments.add_argument("--recipe", help="how the models of reports of `eval` were made")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    arguments.add_argument("--command", default="", help="what measured the reports of `eval`")
    arguments.add_argument("--pack", metavar="VERSION", help="put the files of raw/ into an archive")
    return arguments


def main() -> None:
    options = parser().parse_args()
    for path in options.reports:
        report = json.loads(path.read_text(encoding="utf-8"))
        if "student" in report:
            if options.recipe is None:
                raise SystemExit(f"{path} is a report of `eval`: say with --recipe how its model was made")
            report = with_recipe(report, options.recipe, options.set, options.command)
        if path.stem in reports():
            raise SystemExit(f"a run {path.stem} is kept already; choose another name")
        (FOLDER / "raw").mkdir(exist_ok=True)
        (FOLDER / "raw" / path.name).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.pack:
        pack(options.pack)
    found = collected()
    rows.write(TABLE, found)
    print(f"{len(found)} rows in {TABLE.name}")


if __name__ == "__main__":
    main()
