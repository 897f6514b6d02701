"""The memory that `plan` estimates beside the peaks that were measured: one row for each measured stage.

`peaks.py` and `throughput.py` measure; the documentation's page "What it costs" has the table, a test holds it.
Peaks are what the driver reports, so the CUDA context and what the allocator keeps free are in them.
"""

import dataclasses as dc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from sse_convert.checkpoints.config_only import with_shapes
from sse_convert.checkpoints.open import CheckpointFiles
from sse_convert.checkpoints.teacher import as_teacher
from sse_convert.mixers import FULL
from sse_convert.recipe import recipe_from_dict, resolve
from sse_convert.recipe.presets import preset_text
from sse_convert.surgery.memory import Processes, stage_memory
from sse_convert.surgery.plan import geometry_of

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PEAKS, THROUGHPUT = HERE / "peaks_h200.json", HERE / "throughput_qwen3-0.6b.json"
PARTS = ("distill", "uptrain")
H200_MIB = 143_771
"""of a GPU, where a record does not say"""
NEAR = 0.15
"""how far an estimate may be from what was measured"""


@dc.dataclass(frozen=True)
class Row:
    """A measured stage."""

    name: str
    record: dict[str, Any]
    """recipe, config (changes), layers, mixers, stage, chosen, sharded, peak_mib, gpu_mib, commit"""

    @property
    def measured(self) -> int:
        """Bytes of the fullest GPU."""
        return max(self.record["peak_mib"]) << 20

    @property
    def estimated(self) -> float:
        """Bytes of a GPU with the passes that the stage chose."""
        chosen, layout = self.record["chosen"], {key: self.record[key] for key in ("layers", "mixers")}
        preset = yaml.safe_load(preset_text(self.record["recipe"]))
        recipe = recipe_from_dict({**preset, **layout, "stages": [self.record["stage"]]})
        (stage,) = recipe.stages
        raw = json.loads((ROOT / f"tests/fixtures/configs/{self.record['recipe']}.json").read_text(encoding="utf-8"))
        config = {key: value for key, value in (raw | self.record["config"]).items() if value is not None}
        files = CheckpointFiles(name=self.name, folder=Path(), config=config, tensors={}, shard_bytes={})
        teacher = as_teacher(with_shapes(files))
        names, mixers = resolve(recipe, teacher.num_layers)
        estimate = stage_memory(
            geometry_of(teacher),
            [None if name == FULL else mixers[name] for name in names],
            stage,
            lora=recipe.train.lora,
            bf16=True,
            checkpointing=chosen["gradient_checkpointing"],
            cuda_graphs=False,
            compiled=chosen["compile"],
        )
        gpu = min(self.record["gpu_mib"] or [H200_MIB]) << 20
        processes = Processes(chosen["processes"], self.record["sharded"])
        return estimate.total(stage.seq_len, chosen["micro_batch"], gpu, processes)

    @property
    def passes(self) -> str:
        """Rows and layers, for a person."""
        chosen, stage = self.record["chosen"], self.record["stage"]
        said = [f"{chosen['micro_batch']} x {stage['seq_len']} tokens"]
        said += ["computed twice"] * chosen["gradient_checkpointing"] + ["compiled"] * chosen["compile"]
        said += [f"FSDP2 x {chosen['processes']}"] * self.record["sharded"]
        layers = self.record["config"].get("num_hidden_layers")
        return ", ".join(said + [f"{layers} layers"] * (layers is not None))


def rows() -> list[Row]:
    """Every stage of which a peak was measured."""
    return [*_throughput(), *(Row(name, record) for name, record in _peaks().items() if record["peak_mib"])]


def _peaks() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PEAKS.read_text(encoding="utf-8"))["settings"]
    return {name: record for name, record in found.items() if record["chosen"] and record["step_seconds"]}


def _throughput() -> Iterator[Row]:
    recipe = yaml.safe_load((HERE / "qwen3-0.6b.yaml").read_text(encoding="utf-8"))
    parts = json.loads(THROUGHPUT.read_text(encoding="utf-8"))["parts"]
    for part in PARTS:
        stage = next(stage for stage in recipe["stages"] if stage["name"] == part)
        more = {"recipe": "qwen3-0.6b", "config": {}, "stage": stage, "sharded": False, "gpu_mib": []}
        layout = {key: recipe[key] for key in ("layers", "mixers")}
        yield Row(f"0.6b-{part}", {**parts[part], **more, **layout})
