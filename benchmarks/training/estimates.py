"""The memory that `plan` estimates beside the peaks that were measured: one row for each measured stage.

`peaks.py` and `throughput.py` measure; the documentation's page "What it costs" has the table, a test holds it.
Peaks are what the driver reports, so the CUDA context and what the allocator keeps free are in them.
"""

import dataclasses as dc
import functools
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from sse_convert.mixers import FULL
from sse_convert.recipe import recipe_from_dict, resolve
from sse_convert.recipe.presets import preset_text
from sse_convert.recipe.schema import Recipe, Stage
from sse_convert.surgery.budget import Geometry, Mixers
from sse_convert.surgery.geometry import geometry_of
from sse_convert.surgery.memory import Processes
from sse_convert.surgery.speed import gpu_hours, training_flops
from sse_convert.surgery.stage_memory import stage_memory
from tests.model_configs import model_config
from tests.surgery.synthetic import teacher_from_config

HERE = Path(__file__).parent
PEAKS = HERE / "peaks.json"
THROUGHPUT = {"qwen3-0.6b": "qwen3-0.6b", "qwen3-1.7b": "qwen3-0.6b", "qwen3-8b": "qwen3-8b"}
"""shape -> the recipe beside this file whose stages `throughput.py` timed"""
SMOLLM2 = HERE / "smollm2.json"
FSDP, CONTEXT = HERE / "fsdp_qwen3-0.6b.json", HERE / "context_parallel.json"
TRL = "trl-uptrain"
PEERS = ("plain", "plain-uptrain", TRL)
"""parts of `throughput.py` that are not of a recipe"""
PEAK = 989e12
"""dense bf16 FLOP/s of an H100 and an H200, by their data sheets"""
H200_MIB = 143_771
"""of a GPU, where a record does not say"""
NEAR = 0.15
"""how far an estimate may be from what was measured"""


@dc.dataclass(frozen=True)
class _Planned:
    """What estimates are made of."""

    recipe: Recipe
    stage: Stage
    geometry: Geometry
    layers: Mixers


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
    def tokens_per_second(self) -> float:
        """As its record has it, else of the median step after the first ones, which compile; of all GPUs."""
        if "tokens_per_second" in self.record:
            return float(self.record["tokens_per_second"])
        compiling = 2 if self.record["chosen"]["compile"] else 1
        return self._planned.stage.batch_tokens / statistics.median(self.record["step_seconds"][compiling:])

    @property
    def estimated_tokens_per_second(self) -> float:
        """What GPU hours are reckoned by; of all GPUs."""
        found, stage = self._planned, self._as_it_ran
        return self.record["chosen"]["processes"] * stage.tokens / gpu_hours(stage, found.geometry, found.layers) / 3600

    @property
    def flops_per_token(self) -> float:
        """Of the stage as it ran, what was computed twice included."""
        return training_flops(self._as_it_ran, self._planned.geometry, self._planned.layers)

    @property
    def share_of_peak(self) -> float:
        """Of all its GPUs, nothing computed twice."""
        flops = training_flops(self._planned.stage, self._planned.geometry, self._planned.layers)
        return self.tokens_per_second * flops / PEAK / int(self.record["chosen"]["processes"])

    @property
    def as_long(self) -> bool:
        """Whether it ran as a long stage does: compiled, or with rows split."""
        return bool(self.record["chosen"]["compile"]) or self._planned.stage.context_parallel > 1

    @property
    def train(self) -> str:
        """What the stage trained."""
        return self._planned.stage.train

    @property
    def gpu(self) -> str:
        """Name of the GPU: as its record has it, else as the file of its shape."""
        every = self.record.get("gpus") or _read(HERE / f"throughput_{self.record['recipe']}.json")["gpus"]
        return str(every[0])

    @property
    def layers(self) -> int:
        """Decoder layers of what was measured."""
        return self._planned.geometry.layers

    @property
    def all_layers(self) -> int:
        """Decoder layers of the recipe's model."""
        return int(model_config(self.record["recipe"])["num_hidden_layers"])

    @property
    def has_experts(self) -> bool:
        """Whether the model has a mixture of experts."""
        return self._planned.geometry.has_experts

    @property
    def hidden_size(self) -> int:
        """The model's width."""
        return self._planned.geometry.dims.hidden

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self._planned.stage.seq_len

    @property
    def _as_it_ran(self) -> Stage:
        return dc.replace(self._planned.stage, gradient_checkpointing=self.record["chosen"]["gradient_checkpointing"])

    @property
    def estimated(self) -> float:
        """Bytes of a GPU with the passes that the stage chose."""
        chosen, found = self.record["chosen"], self._planned
        estimate = stage_memory(
            found.geometry,
            found.layers,
            found.stage,
            lora_rank=found.recipe.train.lora_rank,
            bf16=True,
            checkpointing=chosen["gradient_checkpointing"],
            cuda_graphs=False,
            compiled=chosen["compile"],
            shared=True,
        )
        gpu = min(self.record["gpu_mib"] or [H200_MIB]) << 20
        processes = Processes(chosen["processes"], self.record["sharded"])
        return estimate.total(found.stage.seq_len, chosen["micro_batch"], gpu, processes)

    @functools.cached_property
    def _planned(self) -> "_Planned":
        preset = yaml.safe_load(preset_text(self.record["recipe"]))
        measured = {key: self.record[key] for key in ("layers", "mixers")}
        recipe = recipe_from_dict({**preset, **measured, "stages": [self.record["stage"]]})
        teacher = teacher_from_config(model_config(self.record["recipe"], self.record["config"]), self.name)
        names, mixers = resolve(recipe, teacher.num_layers)
        layers = [None if name == FULL else mixers[name] for name in names]
        return _Planned(recipe, recipe.stages[0], geometry_of(teacher), layers)

    @property
    def passes(self) -> str:
        """Rows and layers, for a person."""
        chosen, stage = self.record["chosen"], self.record["stage"]
        said = [f"{chosen['micro_batch']} x {self._planned.stage.seq_len >> 10}K tokens"]
        said += ["computed twice"] * chosen["gradient_checkpointing"] + ["compiled"] * chosen["compile"]
        shared = "FSDP2" if self.record["sharded"] else "DDP"
        way = "context_parallel" if stage.get("context_parallel", 1) > 1 else shared
        said += [f"{way} x {chosen['processes']}"] * (chosen["processes"] > 1)
        layers = self.record["config"].get("num_hidden_layers")
        return ", ".join(said + [f"{layers} layers"] * (layers is not None))


def rows() -> list[Row]:
    """Every stage of which a peak was measured."""
    peaks = (Row(name, record) for name, record in _peaks().items() if record["peak_mib"])
    return [*_throughput(), *peaks, *_sharded(), *_split()]


def real_rows() -> list[Row]:
    """Stages of a real model, of which the speed was measured and no peak."""
    return [Row(name, record) for name, record in _read(SMOLLM2)["rows"].items()]


def beside() -> dict[str, float]:
    """Seconds of a run beside its steps."""
    return {name: seconds for name, seconds in _read(SMOLLM2)["beside"].items() if name != "from"}


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _recipe(name: str) -> Any:
    return yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))


def _peaks() -> dict[str, Any]:
    """Stages of `peaks.py` that took a second step: at their peak in the first, AdamW's moments are not there yet."""
    found = _read(PEAKS)["settings"]
    return {name: record for name, record in found.items() if record["chosen"] and len(record["step_seconds"]) > 1}


def _throughput() -> Iterator[Row]:
    for shape, name in THROUGHPUT.items():
        for part, record in _read(HERE / f"throughput_{shape}.json")["parts"].items():
            if part not in PEERS:
                stage, _, way = part.partition("-")
                split = way == "context"
                rows = {key: record[key] for key in ("seq_len", "batch_tokens")} | {"context_parallel": 1 + split}
                yield _row(
                    f"{shape}-{part}", record, _recipe(name), shape, stage, sharded=split or "fsdp" in way, changes=rows
                )


def _sharded() -> Iterator[Row]:
    """Stages of `fsdp_smoke.py` on two GPUs."""
    record = _read(FSDP)
    for stage, loss, part in (
        ("distill", "kl", record["parts"]["distill-resumed"]["after"]),
        ("uptrain", "ce", record["parts"]["uptrain-fsdp"]),
    ):
        run = {**part, "commit": record["commit"]}
        yield _row(f"0.6b-{loss}-fsdp", run, record, record["recipe"], stage, sharded=True)


def _split() -> Iterator[Row]:
    """Stages of `context_parallel_smoke.py`."""
    record = _read(CONTEXT)
    for part, shape, stage, processes in (
        ("layers-one", "qwen3-8b", "uptrain", 1),
        ("layers-two", "qwen3-8b", "uptrain", 2),
        ("distill-two", "qwen3-0.6b", "distill", 2),
    ):
        run = {"commit": record["commit"], **record["parts"][part]}
        split = {"seq_len": record["row"], "batch_tokens": record["row"], "context_parallel": processes}
        config = record["configs"][part.partition("-")[0]]
        name = f"{shape}-{part}"
        yield _row(name, run, _recipe(shape), shape, stage, sharded=processes > 1, changes=split, config=config)


def _row(
    name: str,
    run: dict[str, Any],
    recipe: dict[str, Any],
    shape: str,
    stage: str,
    *,
    sharded: bool,
    changes: Mapping[str, Any] = MappingProxyType({}),
    config: Mapping[str, Any] = MappingProxyType({}),
) -> Row:
    """A stage of a recipe that ran in some shape: with what was changed of the stage and of the shape's config.json."""
    kept = next(one for one in recipe["stages"] if one["name"] == stage)
    layout = {key: recipe[key] for key in ("layers", "mixers")}
    more = {"recipe": shape, "config": dict(config), "stage": {**kept, **changes}, "sharded": sharded, "gpu_mib": []}
    return Row(name, {**run, **more, **layout})
