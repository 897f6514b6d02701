"""How much GPU memory a training stage takes: an estimate from sizes alone.

Fixed, in bytes per parameter: 4 for every weight (float32 masters), 2 for autocast's copies of them (of frozen ones,
with gradient checkpointing, a layer's and the head's at a time), and for the trained ones 4 for the gradient and 8 for
AdamW's moments, 4 for Muon's one of a layer's matrix (experts are not told apart, and count as AdamW's). A frozen
matrix takes 2 and has no copy under autocast, but for embeddings, and where weights are shared out. A teacher takes 2
under bfloat16, else 4, and nothing for frozen matrices that are its own. `layer_mse` has the attention of converted
layers alone on the GPU. The losses hold a chunk of logits, of the student and of a teacher, in the compute dtype, and
the head's gradient. Softmax layers of packed rows have a mask of all pairs of tokens of a row where no kernel knows
documents, and where scores are bounded 8 bytes a pair, head and layer.

Several processes: DDP has all of that on each, gradients being views of its buckets, and 4 more bytes for each trained
parameter, which the peaks of benchmarks/training show. FSDP2 shares out all but autocast's copies, and each process has
whole, for as long as it needs them: embedding and head, 2 bytes for each of student and teacher and 4 for the sum of
their gradients; two layers (the next is gathered while one works), 2 bytes each; and one layer's gradient, 2 and 4.

Activations are those of `activations`, layer by layer; where converted layers alone are trained, less what frozen
matrices do not need, but for layers that are compiled, computed twice or have experts: there the measured peaks show
nothing less. With gradient checkpointing a layer keeps its input (4 d) and one layer's activations exist at a time,
when the loss and its chunk of logits are done with: the larger of the two counts. `layer_mse` keeps each layer's input
and target (2 a d) and one layer's activations. CUDA graphs, where there are any, have activations of their own, beside
those of plain passes. Where several processes hold a row, each keeps its part of all this, but for the windows' masks,
which are of whole rows, and the mask of pairs, which nobody has. Under FSDP weights have the compute dtype, and so has
the residual stream: 10 d less of a layer, 20 d of SSE beside a window, 2 d of a layer's kept input. Of this, 6 d of a
converted layer and 10 d of another are what frozen matrices do not need anyway.
"""

import dataclasses as dc
import itertools
from collections.abc import Iterable
from typing import Any

from sse_convert.mixers import SSEMixer, WindowMixer
from sse_convert.modeling.logits import FUSED_BYTES
from sse_convert.recipe.schema import Stage, Train
from sse_convert.surgery.activations import SCORE_BYTES, block_keys, kept_by_attention, kept_by_layer, spared_by_layer
from sse_convert.surgery.budget import Geometry, Mixers, added_parameters
from sse_convert.surgery.memory import StageMemory

_PAIR_BYTES = 4
"""of a mask: a boolean, and its copy in the compute dtype with room to spare, as attention kernels want it"""
COMPILED_SHARE, COMPILED_LAYER = 0.57, 0.7
"""of the activations, what compiled layers with fused kernels keep, and what a layer computed twice has at once. The
peaks of benchmarks/training, less the bytes that do not depend on the rows, give 0.55 to 0.6, and 0.66 to 0.7"""
COMPILED_STEPS = 50
"""steps of a stage from which on compiling pays"""


def compiles_layers(stage: Stage, train: Train) -> bool:
    """Whether a stage's layers are compiled on a GPU: as asked, or where it pays.

    Args:
        stage: its steps are counted; rows that processes hold together are not compiled unless that is asked for.
        train: what is asked.
    """
    if train.compile != "auto":
        return train.compile
    step = -(-stage.batch_tokens // stage.seq_len) * stage.seq_len
    enough = -(-stage.tokens // step) >= COMPILED_STEPS
    return enough and stage.loss != "layer_mse" and stage.context_parallel == 1


def trained_parameters(geometry: Geometry, mixers: Mixers, stage: Stage, lora_rank: int) -> int:
    """Parameters that a stage trains: everything but what sees images, or new tensors and projections of converted
    layers (plus LoRA)."""
    added = added_elements(geometry, mixers)
    if stage.train == "all":
        return geometry.parameters - geometry.image_parameters + added
    trained = added + _converted_attention(geometry, mixers)
    if stage.train == "lora":
        dense = 3 * (geometry.dims.hidden + geometry.intermediate)
        trained += lora_rank * sum(geometry.at(i).dims.projected + dense for i in range(geometry.layers))
    return trained


def _converted_attention(geometry: Geometry, mixers: Mixers) -> int:
    """Parameters that the attention of converted layers has from the teacher."""
    return sum(geometry.at(i).attention_parameters for i, mixer in enumerate(mixers) if mixer is not None)


def added_elements(geometry: Geometry, mixers: Mixers) -> int:
    """Elements of all new tensors."""
    return sum(added_parameters(geometry.at(i).dims, mixer) for i, mixer in enumerate(mixers))


def still_the_teachers(stages: Iterable[Stage], stage: Stage) -> bool:
    """Whether what a stage does not train is the model's own: no stage before it trained more than converted layers.

    Args:
        stages: of the recipe.
        stage: one of them, by name.
    """
    return all(one.train == "mixers" for one in itertools.takewhile(lambda one: one.name != stage.name, stages))


def stage_memory(
    geometry: Geometry,
    mixers: Mixers,
    stage: Stage,
    *,
    lora_rank: int,
    bf16: bool,
    checkpointing: bool,
    cuda_graphs: bool,
    compiled: bool = False,
    shared: bool = False,
) -> StageMemory:
    """Memory of a stage on one GPU.

    Args:
        geometry: the model's sizes.
        mixers: mixer of each layer.
        stage: loss and trained parameters are read; lengths are arguments of the result.
        lora_rank: of the recipe.
        bf16: autocast to bfloat16.
        checkpointing: gradient checkpointing.
        cuda_graphs: passes are recorded, where the stage can have that.
        compiled: decoder layers are compiled on a GPU.
        shared: frozen matrices are still those of the model itself (`still_the_teachers`).
    """
    return _Estimate(
        geometry=geometry,
        mixers=mixers,
        stage=stage,
        lora_rank=lora_rank,
        bf16=bf16,
        checkpointing=checkpointing,
        cuda_graphs=cuda_graphs,
        compiled=compiled,
        taught=stage.loss != "ce",
        shared=shared,
    ).memory()


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class _Estimate:
    """What `stage_memory` is given."""

    geometry: Geometry
    mixers: Mixers
    stage: Stage
    lora_rank: int
    bf16: bool
    checkpointing: bool
    cuda_graphs: bool
    compiled: bool
    taught: bool
    """the teacher runs beside the student"""
    shared: bool

    @property
    def element(self) -> int:
        """Bytes of an activation, and of a teacher's weight."""
        return 2 if self.bf16 else 4

    @property
    def alone(self) -> bool:
        """Converted layers' attention is all that runs."""
        return self.stage.loss == "layer_mse"

    @property
    def frozen(self) -> bool:
        """Layers keep less, since converted attention is all that is trained; see the top of this file."""
        as_before = self.alone or self.checkpointing or self.compiled or self.geometry.has_experts
        return self.stage.train == "mixers" and not as_before

    def memory(self) -> StageMemory:
        """All of it."""
        whole = self.stage.train == "all" and not self.alone
        chunked_by, per_logit = _logit_bytes(self.stage, self.element)
        return StageMemory(
            **self._weights(),
            **self._kept(),
            head=4 * self.geometry.vocabulary * self.geometry.dims.hidden if whole else 0,
            chunked_by=chunked_by,
            per_logit=per_logit,
            vocabulary=self.geometry.vocabulary,
            per_pair=self._per_pair(),
            ranks=self.stage.context_parallel,
        )

    def _weights(self) -> dict[str, Any]:
        """Fields that do not depend on rows."""
        geometry, added = self.geometry, added_elements(self.geometry, self.mixers)
        trained = trained_parameters(geometry, self.mixers, self.stage, self.lora_rank)
        if self.alone:
            trained = added + _converted_attention(geometry, self.mixers)
        weights = trained if self.alone else geometry.parameters + added
        copies = frozen = 0
        if self.bf16:
            copies = 2 * _copied(geometry, added, weights, trained, checkpointing=self.checkpointing)
            frozen = _frozen_matrices(geometry, self.mixers, self.stage)
        twice = 2 if self.shared and self.taught else 1
        told = geometry.parameters * self.element * self.taught
        whole = self.stage.train == "all"
        return {
            "weights": weights * 4 + copies + trained * 4 + self._moments(trained) + told,
            "copies": copies,
            "held_low": 2 * frozen * twice + max(0, copies - 2 * (weights - frozen)),
            "gathered": _gathered_bytes(
                geometry, added, self.element, taught=self.taught, alone=self.alone, all_trained=whole
            ),
            "ddp": 4 * trained,
        }

    def _moments(self, trained: int) -> int:
        """Bytes of the optimizer's state; norms, and what else Muon leaves to AdamW inside layers, are too few."""
        geometry, whole = self.geometry, self.stage.train == "all" and not self.alone
        if self.stage.optimizer != "muon" or (whole and geometry.has_experts):
            return 8 * trained
        return 4 * trained + 4 * _around(geometry) * whole

    def _kept(self) -> dict[str, Any]:
        """Fields of activations."""
        again_only, ranks = self.checkpointing, self.stage.context_parallel
        share = (COMPILED_LAYER if again_only else COMPILED_SHARE) if self.compiled else 1
        kept, again = _activations(
            self.geometry, self.mixers, self.element, alone=self.alone, checkpointing=again_only, share=share
        )
        if self.frozen:
            kept -= sum(
                spared_by_layer(self.geometry.at(i), mixer, self.element) for i, mixer in enumerate(self.mixers)
            )
        narrower = 0.0
        if self.bf16 and not self.alone:
            narrower = (1 if again_only else share) * _narrower(
                self.geometry, self.mixers, checkpointing=again_only, frozen=self.frozen
            )
        masks = sum({(m.window, m.sinks): block_keys(m) for m in self.mixers if isinstance(m, WindowMixer)}.values())
        sets = 2 if self.cuda_graphs and self.stage.loss == "kl" and not again_only else 1
        return {
            "per_token": sets * (kept / ranks + masks),
            "again": again / ranks,
            "narrower": sets * narrower / ranks,
        }

    def _per_pair(self) -> int:
        """Bytes of a mask of all pairs, and of scores."""
        no_kernel = not self.bf16 and (self.compiled or self.cuda_graphs)  # see `training.context.choose_attention`
        document_masks = self.geometry.document_masks
        masked = (document_masks or no_kernel) and self.stage.context_parallel == 1
        softmax = self.taught or any(mixer is None for mixer in self.mixers)
        run = [] if self.alone else self.mixers
        scores = _score_bytes(self.geometry, run, taught=self.taught, checkpointing=self.checkpointing)
        return (_PAIR_BYTES if softmax and masked else 0) + scores


def _score_bytes(geometry: Geometry, mixers: Mixers, *, taught: bool, checkpointing: bool) -> int:
    """Bytes per pair of tokens of a row for scores that attention writes out: those that wait for the backward pass,
    and those of the layer at work.

    Args:
        geometry: of the student.
        mixers: of the layers that run.
        taught: the layer at work of the teacher has scores too.
        checkpointing: gradient checkpointing.
    """
    full = sum(mixer is None for mixer in mixers)
    kept = min(full, 1) if checkpointing else full + (full > 0)
    own = geometry.scores_written * geometry.dims.query_heads * kept
    beside = taught * geometry.scores_written * geometry.dims.query_heads
    return SCORE_BYTES * max(own, beside)


def _activations(
    geometry: Geometry, mixers: Mixers, element: int, *, alone: bool, checkpointing: bool, share: float
) -> tuple[float, float]:
    """`StageMemory.per_token` and `StageMemory.again` of the student in one process, without windows' masks.

    Args:
        geometry: the model's sizes.
        mixers: mixer of each layer.
        element: bytes of an activation.
        alone: converted layers' attention is all that runs.
        checkpointing: gradient checkpointing.
        share: part of activations, or of the one layer's, that compilation leaves.
    """
    hidden, sizes = geometry.dims.hidden, [geometry.at(i) for i in range(len(mixers))]
    if alone:
        attention = [kept_by_attention(at, mixer, element) for at, mixer in zip(sizes, mixers, strict=True) if mixer]
        return 2.0 * element * hidden * len(attention), max(attention)
    layers = [kept_by_layer(at, mixer, element) for at, mixer in zip(sizes, mixers, strict=True)]
    return (4.0 * hidden * len(layers), share * max(layers)) if checkpointing else (share * sum(layers), 0.0)


def _narrower(geometry: Geometry, mixers: Mixers, *, checkpointing: bool, frozen: bool) -> float:
    """`StageMemory.narrower` of the student in one process, where nothing is compiled."""
    if checkpointing:
        return 2.0 * geometry.dims.hidden * len(mixers)
    both = sum(isinstance(mixer, SSEMixer) and isinstance(mixer, WindowMixer) for mixer in mixers)
    gone = sum(10 if mixer is None else 6 for mixer in mixers) if frozen else 0
    return geometry.dims.hidden * (10.0 * (len(mixers) + both) - gone)


def _copied(geometry: Geometry, added: int, weights: int, trained: int, *, checkpointing: bool) -> int:
    """Weights of which autocast's copies exist at a time. It keeps those of trained ones; those of frozen ones stay for
    the backward pass alone, which gradient checkpointing does layer by layer."""
    head = geometry.vocabulary * geometry.dims.hidden
    return min(weights, trained + head + _layer_parameters(geometry, added)) if checkpointing else weights


def _frozen_matrices(geometry: Geometry, mixers: Mixers, stage: Stage) -> int:
    """Elements of matrices that a stage does not train, without an embedding and what sees images."""
    if stage.train == "all" or stage.loss == "layer_mse":
        return 0
    others = geometry.image_parameters + geometry.embedding_parameters + _converted_attention(geometry, mixers)
    return geometry.parameters - others


def _layer_parameters(geometry: Geometry, added: int) -> int:
    """Mean of the decoder layers."""
    return (geometry.parameters - _around(geometry) + added) // geometry.layers


def _gathered_bytes(
    geometry: Geometry, added: int, element: int, *, taught: bool, alone: bool, all_trained: bool
) -> int:
    """Bytes that a process has whole at a time under FSDP; see the top of this file.

    Args:
        geometry: the model's sizes.
        added: new parameters.
        element: bytes of a gathered weight.
        taught: the teacher runs as well.
        alone: of the student, converted layers' attention is on the GPU alone.
        all_trained: embedding and head are trained too.
    """
    own = 0 if alone else _around(geometry) * (element + 4 * all_trained)
    layers = _layer_parameters(geometry, added) * (2 * element + element + 4)
    return own + taught * _around(geometry) * element + layers


def _around(geometry: Geometry) -> int:
    """Parameters of embedding and head."""
    return geometry.embedding_parameters * (1 if geometry.tied else 2)


def _logit_bytes(stage: Stage, element: int) -> tuple[int, int]:
    """Bytes per logit that chunks are cut for, and that one takes: in one kernel, the student's and a teacher's."""
    if stage.loss == "layer_mse":
        return 0, 0
    return FUSED_BYTES, element * (1 if stage.loss == "ce" else 2)
