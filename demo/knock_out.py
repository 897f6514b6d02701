"""Which layers of the demo teacher retrieve: a short window in one layer, or in all layers but one. No training.

    python demo/knock_out.py

A layer becomes a sliding window of 64 tokens and 4 sinks; loss and needles are measured on text sampled from the
teacher. Writes `knock_out.json` beside this file.
"""

import json
import tempfile
from pathlib import Path

import torch

from sse_convert import api
from sse_convert.checkpoints.load_model import load_model, tokenizer_of
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.console import progress
from sse_convert.evaluation.evaluate import measure_model
from sse_convert.evaluation.tasks import make_tasks
from sse_convert.recipe import Recipe, load_recipe
from sse_convert.report import table
from sse_convert.surgery.job import Job

HERE = Path(__file__).parent
SETTINGS = [
    "mixers.sliding={window: 64, sinks: 4}",
    "data.valid=[{kind: teacher, rows: 64, length: 256}]",
    "eval={lengths: [512], tokens: 16K, needle: {lengths: [1K], samples: 50, kinds: [number], keys: [4]}}",
]


def windows_in(layers: list[int]) -> Recipe:
    """The demo's recipe with a window in these layers and the teacher's attention in all others."""
    overrides = ", ".join(f"{layer}: sliding" for layer in layers)
    return load_recipe(
        HERE / "recipe.yaml",
        [f"model={HERE / 'teacher'}", f"layers={{pattern: [full], overrides: {{{overrides}}}}}", *SETTINGS],
    )


def main() -> None:
    """Measure every case, print the table, write the JSON file."""
    layers = list(range(open_teacher(str(HERE / "teacher")).num_layers))
    cases = {"nowhere": []} | {f"in layer {i}": [i] for i in layers} | {"everywhere": layers}
    cases |= {f"everywhere but layer {i}": [j for j in layers if j != i] for i in layers}
    recipe = windows_in(layers)
    job = Job.of(recipe)
    tasks = make_tasks(job, tokenizer_of(job.files()))
    results = []
    with tempfile.TemporaryDirectory() as folder, progress("knocking out layers", len(cases) * tasks.steps) as bar:
        for name, chosen in cases.items():
            source = recipe.model
            if chosen:
                source = str(Path(folder) / name.replace(" ", "-"))
                api.convert(windows_in(chosen), Path(source))
            model = load_model(source, dtype=torch.float32)
            scores = measure_model(model, tasks, name=name, sizes=job.geometry(), bar=bar)
            results.append({"windows": name, "loss": scores.held_out[0].loss, **scores.needles[0].total.to_dict()})
    print(
        "\n".join(
            table(
                ("windows", "loss", "needles found", "of"),
                [(r["windows"], r["loss"], r["correct"], r["samples"]) for r in results],
            )
        )
    )
    (HERE / "knock_out.json").write_text(json.dumps({"settings": SETTINGS, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
