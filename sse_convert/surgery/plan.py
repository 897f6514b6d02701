"""What a recipe does to its model, from config and headers alone: layers, parameters, cache, FLOPs, memory.

A recipe that cannot work is refused here, before any weights are downloaded or read.
"""

import functools
from collections.abc import Callable

import torch

from sse_convert.checkpoints.config_only import has_weights
from sse_convert.checkpoints.load_model import context_limit
from sse_convert.checkpoints.meta_model import left_out_tensors, skeleton
from sse_convert.checkpoints.safetensors_io import ITEM_BYTES
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.data.rows import is_missing
from sse_convert.mixers import FULL, Mixer, SSEMixer, SSESlidingMixer, WindowMixer
from sse_convert.recipe import Recipe, recipe_hash, resolve
from sse_convert.recipe.checks import check_run
from sse_convert.recipe.choosing import draft_recipe, open_choice, probe_rows
from sse_convert.recipe.pattern import named_heads, pattern_unit
from sse_convert.recipe.schema import Stage
from sse_convert.report import format_number
from sse_convert.surgery import budget
from sse_convert.surgery.budget import Geometry, Mixers
from sse_convert.surgery.choice_cost import choice_effort, cpu_hours
from sse_convert.surgery.compatibility import check_fit
from sse_convert.surgery.costs import costs_of
from sse_convert.surgery.cpu_speed import forward_flops_per_second
from sse_convert.surgery.job import Job
from sse_convert.surgery.memory import GPU_GIB, StageMemory, cpu_rows
from sse_convert.surgery.plan_report import CacheRow, ChoiceRow, LayerRow, NextStep, Plan, StageRow
from sse_convert.surgery.speed import evaluation_flops, nearest_speed, training_flops
from sse_convert.surgery.stage_memory import compiles_layers, stage_memory, still_the_teachers, trained_parameters

CALIBRATION = 10
"""passes that take as long as calibration does: two with all weights of attention written out, in rows of 2K"""


def make_plan(job: Job, *, cpu: bool = False) -> Plan:
    """Plan a recipe.

    Args:
        job: the recipe, and its model, whose config may do (`config_only.open_for_planning`).
        cpu: it is to run on this machine's CPU.

    Raises:
        RecipeError: the recipe does not fit the model.
        CheckpointError: the teacher cannot be converted.
        HubError: the hub refused or cannot be reached.
    """
    recipe, teacher, geometry = job.recipe, job.teacher(), job.geometry()
    draft = draft_recipe(recipe, teacher.num_layers, teacher.separable_heads)
    names, mixers = resolve(draft, teacher.num_layers)
    check_fit(draft, teacher, mixers)
    by_layer: Mixers = [None if name == FULL else mixers[name] for name in names]
    rows = [_layer_row(geometry, i, name, mixer) for i, (name, mixer) in enumerate(zip(names, by_layer, strict=True))]
    plain: Mixers = [None] * len(names)
    added = sum(row.added_parameters for row in rows)
    return Plan(
        model=recipe.model,
        revision=teacher.files.revision,
        model_type=teacher.files.model_type,
        recipe_hash=recipe_hash(recipe),
        mixers=mixers,
        layers=rows,
        choice=_choice_row(recipe, teacher, geometry, cpu=cpu),
        parameters=teacher.files.parameters,
        active_parameters=geometry.active_parameters,
        active_bytes=geometry.matmul_parameters * ITEM_BYTES[teacher.dtype],
        added_parameters=added,
        new_shard_bytes=added * ITEM_BYTES[teacher.dtype],
        cache=[
            CacheRow(
                length=length,
                teacher_bytes=budget.cache_bytes(geometry, plain, length),
                hybrid_bytes=budget.cache_bytes(geometry, by_layer, length),
                teacher_flops=budget.forward_flops(geometry, plain, length),
                hybrid_flops=budget.forward_flops(geometry, by_layer, length),
            )
            for length in budget.table_lengths(context_limit(teacher.config))
        ],
        break_even=budget.break_even(geometry, by_layer),
        stages=[_stage_row(recipe, stage, geometry, by_layer, cpu=cpu) for stage in recipe.stages],
        cpu_beside_hours=_cpu_beside(recipe, geometry) if cpu else None,
        costs=costs_of(recipe, teacher, geometry, mixers, by_layer, added),
        next_step=_next_step(recipe, teacher),
        notes=_notes(recipe, teacher, names, by_layer),
    )


def _layer_row(geometry: Geometry, index: int, name: str, mixer: Mixer | None) -> LayerRow:
    window = geometry.windows[index]
    linear = index in geometry.linear
    constant, growth = budget.constant_and_growth(geometry, index, mixer)
    return LayerRow(
        index=index,
        source="linear" if linear else "full" if window is None else f"sliding {window}",
        mixer=name,
        added_parameters=budget.added_parameters(geometry.at(index).dims, mixer),
        bytes_per_token=growth,
        constant_bytes=constant,
    )


def _choice_row(recipe: Recipe, teacher: Teacher, geometry: Geometry, *, cpu: bool) -> ChoiceRow | None:
    choice = open_choice(recipe, teacher.num_layers, teacher.separable_heads)
    if choice is None:
        return None
    by = "heads" if choice.span > 1 else "layers"
    wanted = probe_rows(recipe, teacher.text.max_position_embeddings)
    effort = choice_effort(geometry, wanted, by=by, keep=choice.keep, among=len(choice.units), cpu=cpu)
    speed = nearest_speed("kl", geometry.dims.hidden, effort.rows.length, whole=True, experts=geometry.has_experts)
    return ChoiceRow(
        keep=choice.keep,
        among=list(choice.units),
        what="key-value heads" if by == "heads" else "softmax layers",
        passes=effort.sets,
        tokens=effort.rows.tokens,
        flops=effort.flops,
        gpu_hours=speed.hours(effort.flops),
        cpu_hours=cpu_hours(effort, teacher.dtype) if cpu else None,
        bytes=teacher.files.parameters * ITEM_BYTES[teacher.dtype],
    )


def _stage_row(recipe: Recipe, stage: Stage, geometry: Geometry, mixers: Mixers, *, cpu: bool) -> StageRow:
    train = recipe.train
    memory = functools.partial(
        stage_memory,
        geometry,
        mixers,
        stage,
        lora_rank=train.lora_rank,
        bf16=train.mixed_precision != "no",
        cuda_graphs=train.cuda_graphs is True,
        compiled=compiles_layers(stage, train),
        shared=still_the_teachers(recipe.stages, stage),
    )
    plain, checkpointed = memory(checkpointing=False), memory(checkpointing=True)
    flops = stage.tokens * training_flops(stage, geometry, mixers)
    least = checkpointed if stage.gradient_checkpointing else plain  # auto can have it, where it must
    return StageRow(
        name=stage.name,
        loss=stage.loss,
        tokens=stage.tokens,
        steps=-(-stage.tokens // stage.batch_tokens),
        seq_len=stage.seq_len,
        flops=flops,
        trained_parameters=trained_parameters(geometry, mixers, stage, recipe.train.lora_rank),
        cpu_bytes=_cpu_bytes(stage, memory, low=train.mixed_precision == "bf16") if cpu else None,
        cpu_hours=flops / forward_flops_per_second(torch.float32) / 3600 if cpu else None,
        memory_bytes=round(least.least(stage.seq_len, 1 if stage.micro_batch == "auto" else stage.micro_batch)),
        longest={
            str(gib): {"plain": plain.longest(gib), "checkpointing": checkpointed.longest(gib)} for gib in GPU_GIB
        },
    )


def _cpu_beside(recipe: Recipe, geometry: Geometry) -> float:
    """Hours of this machine's CPU for calibrating and measuring, teacher and hybrid."""
    own = recipe.calibrate
    plain: Mixers = [None] * geometry.layers
    tokens = CALIBRATION * own.rows * own.seq_len * own.enabled
    flops = evaluation_flops(recipe, geometry) + tokens * budget.forward_flops(geometry, plain, own.seq_len)
    return flops / forward_flops_per_second(torch.float32) / 3600


def _cpu_bytes(stage: Stage, memory: Callable[..., StageMemory], *, low: bool) -> int:
    """Of a stage on this machine's CPU, in float32 unless the recipe says otherwise, and not compiled."""
    rows = max(1, stage.batch_tokens // stage.seq_len)
    rows = cpu_rows(stage.seq_len, rows) if stage.micro_batch == "auto" else stage.micro_batch
    again = stage.gradient_checkpointing is True
    return round(memory(bf16=low, cuda_graphs=False, compiled=False, checkpointing=again).on_cpu(stage.seq_len, rows))


def _next_step(recipe: Recipe, teacher: Teacher) -> NextStep:
    """What can be done now: `run`, or where that lacks text, `convert`."""
    missing = "" if has_weights(teacher.files) else teacher.files.name
    converted = f"{recipe.export.dir}-converted" if list(check_run(recipe)) else None
    return NextStep(weights_missing_in=missing, converted=converted)


def _wide_states(teacher: Teacher, mixers: Mixers) -> list[str]:
    """Layers whose heads are wider than the Triton kernels take."""
    from sse_convert.kernels.triton.config import MAX_DIM

    recurrent = [i for i, mixer in enumerate(mixers) if isinstance(mixer, SSEMixer)]
    widths = {i: max(dims.head_dim, dims.value_dim) for i in recurrent if (dims := teacher.dims_of(i))}
    if not (wide := [i for i, width in widths.items() if width > MAX_DIM]):
        return []
    return [
        f"layers {', '.join(map(str, wide))}: heads are {widths[wide[0]]} wide, and Triton kernels take at most "
        f"{MAX_DIM}, so these layers run slower in PyTorch"
    ]


def _idle_branches(recipe: Recipe, mixers: Mixers) -> list[str]:
    """Stages whose rows the window beside SSE covers whole."""
    windows = {mixer.window + mixer.sinks for mixer in mixers if isinstance(mixer, SSESlidingMixer)}
    return [
        f"stage {stage.name}: rows of {stage.seq_len} tokens lie within what windows of sse+sliding layers see "
        f"({max(windows)} tokens, sinks included): SSE beside such a window learns nothing that the window cannot do; "
        "raise seq_len, or lower the window"
        for stage in recipe.stages
        if windows and stage.seq_len <= max(windows)
    ]


def _not_used_or_missing(recipe: Recipe, names: list[str]) -> list[str]:
    """What the recipe names and no layer uses, or this machine lacks."""
    given = [name for name in recipe.layers.overrides.values() if isinstance(name, str)]
    used = {*(named_heads(name)[0] for name in names), *pattern_unit(recipe.layers), *given}
    missing = {source.path: None for source in (*recipe.data.train, *recipe.data.valid) if is_missing(source)}
    return [
        *(f"mixers.{name} is the mixer of no layer" for name in recipe.mixers if name not in used),
        *(f"{path} does not exist here: `run` needs it" for path in missing),
    ]


def _notes(recipe: Recipe, teacher: Teacher, names: list[str], mixers: Mixers) -> list[str]:
    notes = [f"`run` refuses this recipe: {problem.message}" for problem in check_run(recipe) if recipe.stages]
    notes += _not_used_or_missing(recipe, names)
    for i, mixer in enumerate(mixers):
        if isinstance(mixer, WindowMixer) and (native := teacher.windows[i]) is not None and mixer.window > native:
            notes.append(f"layer {i}: window {mixer.window} is wider than the teacher's own {native}")
    if any(isinstance(mixer, SSEMixer) for mixer in mixers) and not recipe.stages:
        notes.append("no training stages: the new layers keep their initial values")
    notes += _wide_states(teacher, mixers)
    notes += _idle_branches(recipe, mixers)
    notes += [
        f"stage {stage.name}: {stage.context_parallel} GPUs hold a row together and share the weights (FSDP2); the "
        f"memory is that of one of them. Processes a multiple of {stage.context_parallel} processes"
        for stage in recipe.stages
        if stage.context_parallel > 1
    ]
    if left_out := left_out_tensors(teacher, skeleton(teacher.config)):
        size = format_number(sum(teacher.files.tensors[name].numel for name in left_out))
        notes.append(
            f"{len(left_out)} tensors ({size} parameters, such as {left_out[0]}) are left out by transformers, as "
            "layers that predict further tokens are: conversion keeps them in the files, training stages do not"
        )
    if not has_weights(teacher.files):
        notes.append(f"{teacher.files.name} holds no weights: sizes are those that its config.json calls for")
    return notes
