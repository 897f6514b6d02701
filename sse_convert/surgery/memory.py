"""How much GPU memory a training stage takes, and the rows that fit: estimates, from sizes alone.

Fixed, in bytes per parameter: 4 for every weight (float32 masters), 2 for autocast's copies of them (of frozen ones,
with gradient checkpointing, a layer's and the head's at a time), and for the trained ones 4 for the gradient and 8 for
AdamW's moments (Muon's one moment of a matrix, 4, is counted as 8). A frozen matrix takes 2 and has no copy under
autocast, but for embeddings, and where weights are shared out. A teacher takes 2 under bfloat16, else 4, and nothing
for frozen matrices that are its own. `layer_mse` has the attention of converted layers alone on the GPU. The
losses hold a chunk of logits, of the student and of a teacher, in the compute dtype, and the head's gradient. Softmax
layers of packed rows have a mask of all pairs of tokens of a row where no kernel knows documents, and where scores are
bounded 8 bytes a pair, head and layer.

Several processes: DDP has all of that on each, gradients being views of its buckets, and 4 more bytes for each trained
parameter, which the peaks of benchmarks/training show. FSDP2 shares out all but autocast's copies, and each process has
whole, for as long as it needs them: embedding and head, 2 bytes for each of student and teacher and 4 for the sum of
their gradients; two layers (the next is gathered while one works), 2 bytes each; and one layer's gradient, 2 and 4.

Activations kept for the backward pass, in bytes per token and layer (d width, m feed-forward width, q = Hq*D,
kv = Hkv*D, a = 2 under bfloat16 autocast or 4):
    norms and residual      24 d + 2 d if a = 2, and 6 (q + kv) where q and k are normalised
    feed-forward            4 a m
    softmax attention       2 a (q + kv)
    window (w, s sinks)     4 a q + (2 a q s / w) + a (2 w + s) beside that: two copies of keys and values, and the mask
                            of a block, which is once more kept for all layers, with a byte for each entry
    SSE                     see `_sse_bytes`
With gradient checkpointing a layer keeps its input (4 d) and one layer's activations exist at a time, when the loss and
its chunk of logits are done with: the larger of the two counts. `layer_mse` keeps each layer's input and target (2 a d)
and one layer's activations. CUDA graphs, where there are any, have activations
of their own, beside those of plain passes. Where several processes hold a row, each keeps its part of all this, but for
the windows' masks, which are of whole rows, and the mask of pairs, which nobody has. Under FSDP weights have the
compute dtype, and so has the residual stream: 10 d less of a layer, 20 d of SSE beside a window, 2 d of a layer's kept
input. The constants were fitted to what autograd saves (tests/surgery/test_memory.py holds them to it).
"""

import dataclasses as dc
import itertools
from collections.abc import Iterable

from sse_convert.mixers import Mixer, SSEMixer, WindowMixer
from sse_convert.modeling.logits import FUSED_BYTES, logits_at_once
from sse_convert.modeling.tensors import state_heads
from sse_convert.recipe.schema import Lora, Stage, Train
from sse_convert.surgery.budget import Geometry, Mixers, added_parameters

GIB = 1 << 30
GPU_GIB = (24, 48, 80, 141)
"""memory sizes of the tables"""
USABLE = 0.92
"""share of a GPU's memory that training can use; the rest is the driver's, the library's and fragmentation"""
MOST_TOKENS = 65536
"""tokens of a pass beyond which more of them no longer make a GPU faster"""
_PAIR_BYTES = 4
"""of a mask: a boolean, and its copy in the compute dtype with room to spare, as attention kernels want it"""
_SCORE_BYTES = 8
"""of a pair of tokens and a head, where attention writes scores out: what autograd keeps of them"""
COMPILED_SHARE, COMPILED_LAYER = 0.57, 0.7
"""of the activations, what compiled layers with fused kernels keep, and what a layer computed twice has at once. The
peaks of benchmarks/training, less the bytes that do not depend on the rows, give 0.55 to 0.6, and 0.66 to 0.7"""
COMPILED_STEPS = 50
"""steps of a stage from which on compiling pays"""
STATE_CHUNK = 64
"""tokens per chunk of the torch backends, which keep one state per chunk"""


@dc.dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a stage, each with a GPU."""

    count: int = 1
    sharded: bool = False
    """they share the weights (FSDP2); else each has all of them (DDP)"""


ONE = Processes()


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Memory of one training stage as a function of its rows, of its processes and of the GPU."""

    weights: int
    """bytes of weights, gradients, optimizer and teacher"""
    copies: int = 0
    """of these, copies for autocast, which FSDP makes of what it gathers"""
    held_low: int = 0
    """bytes of `weights` that frozen matrices take less, where weights are not shared out"""
    gathered: int = 0
    """bytes that a process has whole at a time under FSDP"""
    ddp: int = 0
    """bytes that DDP takes beside the gradients"""
    head: int
    """bytes of the head's gradient, which the losses hold whole"""
    chunked_by: int
    """bytes per logit that chunks are cut for"""
    per_logit: int
    """bytes per logit that a chunk takes"""
    vocabulary: int
    """logits per token"""
    per_token: float
    """activation bytes per token that are kept from the forward to the backward pass"""
    again: float = 0
    """activation bytes per token, beside those, of one layer that is computed when no logits are there"""
    narrower: float = 0
    """bytes of `per_token` that FSDP spares: its weights have the compute dtype, and so has the residual stream"""
    per_pair: int
    """bytes per pair of tokens of a row: the mask of packed rows"""
    ranks: int = 1
    """processes that hold a row together, and share the weights at least among themselves"""

    def fixed(self, processes: Processes = ONE) -> float:
        """Bytes of a process that its rows do not change, the head's gradient included."""
        count = max(processes.count, self.ranks)
        if self._shares_out(processes):
            return (self.weights - self.copies) / count + self.gathered + self.head
        return self.weights - self.held_low + self.head + (self.ddp if count > 1 else 0)

    def total(self, seq_len: int, rows: int, gpu_bytes: int, processes: Processes = ONE) -> float:
        """Bytes of one process for a forward and backward pass.

        Args:
            seq_len: tokens of a row.
            rows: rows of the pass.
            gpu_bytes: memory of the whole GPU, which decides on the logits that exist at a time.
            processes: how many, and whether they share the weights.
        """
        tokens = rows * seq_len
        some = tokens // self.ranks * self.vocabulary
        logits = min(logits_at_once(gpu_bytes, self.chunked_by), some) if self.chunked_by else 0
        spared = self.narrower if self._shares_out(processes) else 0
        kept = tokens * (self.per_token - spared + self.per_pair * seq_len)
        return self.fixed(processes) + kept + max(self.per_logit * logits, tokens * self.again)

    def _shares_out(self, processes: Processes) -> bool:
        return processes.sharded or self.ranks > 1

    def least(self, seq_len: int, rows: int, processes: Processes = ONE) -> float:
        """Bytes on the smallest of the usual GPUs that this fits, or on the largest of them."""
        needed = {gib: self.total(seq_len, rows, gib * GIB, processes) for gib in GPU_GIB}
        return next((total for gib, total in needed.items() if total <= gib * GIB * USABLE), needed[GPU_GIB[-1]])

    def longest(self, gpu_gib: int) -> int:
        """Tokens of the longest single row that fits a GPU, a multiple of 256; 0 if the model itself does not fit."""
        room = gpu_gib * GIB * USABLE
        low, high = 0, 1 << 24
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.total(middle * 256, 1, gpu_gib * GIB) <= room
            low, high = (middle, high) if fits else (low, middle)
        return low * 256


def most_rows(estimate: StageMemory, seq_len: int, rows: int, gpu_bytes: int, room: float, processes: Processes) -> int:
    """Rows of the largest pass that fits and goes evenly into `rows`; 0 if none does.

    Args:
        estimate: of the stage.
        seq_len: tokens of a row.
        rows: of one step and process.
        gpu_bytes: memory of the whole GPU.
        room: bytes that may be used.
        processes: how many, and whether they share the weights.
    """
    fitting = (n for n in even_parts(rows) if estimate.total(seq_len, n, gpu_bytes, processes) <= room)
    most = MOST_TOKENS * estimate.ranks
    return max((n for n in fitting if n == 1 or n * seq_len <= most), default=0)


def even_parts(rows: int) -> list[int]:
    """The numbers that go evenly into a number of rows, in rising order."""
    return [n for n in range(1, rows + 1) if rows % n == 0]


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


def trained_parameters(geometry: Geometry, mixers: Mixers, stage: Stage, lora: Lora) -> int:
    """Parameters that a stage trains: everything but what sees images, or new tensors and projections of converted
    layers (plus LoRA)."""
    added = added_elements(geometry, mixers)
    if stage.train == "all":
        return geometry.parameters - geometry.image_parameters + added
    trained = added + _converted_attention(geometry, mixers)
    if stage.train == "lora":
        dense = 3 * (geometry.dims.hidden + geometry.intermediate)
        trained += lora.rank * sum(geometry.at(i).dims.projected + dense for i in range(geometry.layers))
    return trained


def _converted_attention(geometry: Geometry, mixers: Mixers) -> int:
    """Parameters that the attention of converted layers has from the teacher."""
    return sum(geometry.at(i).attention_parameters for i, mixer in enumerate(mixers) if mixer is not None)


def added_elements(geometry: Geometry, mixers: Mixers) -> int:
    """Elements of all new tensors."""
    return sum(added_parameters(geometry.at(i).dims, mixer) for i, mixer in enumerate(mixers))


def stage_memory(
    geometry: Geometry,
    mixers: Mixers,
    stage: Stage,
    *,
    lora: Lora,
    bf16: bool,
    checkpointing: bool,
    cuda_graphs: bool,
    compiled: bool = False,
    teacher: Geometry | None = None,
    shared: bool = False,
) -> StageMemory:
    """Memory of a stage on one GPU.

    Args:
        geometry: the model's sizes.
        mixers: mixer of each layer.
        stage: loss and trained parameters are read; lengths are arguments of the result.
        lora: LoRA settings of the recipe.
        bf16: autocast to bfloat16 or float16.
        checkpointing: gradient checkpointing.
        cuda_graphs: passes are recorded, where the stage can have that.
        compiled: decoder layers are compiled on a GPU.
        teacher: sizes of another model that the stage learns from; None is the model itself.
        shared: frozen matrices are still those of the model itself (`still_the_teachers`).
    """
    element = 2 if bf16 else 4
    trained = trained_parameters(geometry, mixers, stage, lora)
    added = added_elements(geometry, mixers)
    alone = stage.loss == "layer_mse"
    if alone:
        trained = added + _converted_attention(geometry, mixers)
    weights = trained if alone else geometry.parameters + added
    copies = 2 * _copied(geometry, added, weights, trained, checkpointing=checkpointing) if bf16 else 0
    frozen = _frozen_matrices(geometry, mixers, stage) if bf16 else 0
    head = geometry.vocabulary * geometry.dims.hidden * 4 if stage.train == "all" else 0
    beside = stage.loss != "ce"
    twice = 2 if shared and beside and teacher is None else 1
    other = teacher or geometry
    share = (COMPILED_LAYER if checkpointing else COMPILED_SHARE) if compiled else 1
    kept, again = _activations(geometry, mixers, element, alone=alone, checkpointing=checkpointing, share=share)
    narrower = _narrower(geometry, mixers, checkpointing=checkpointing) if bf16 and not alone else 0.0
    masks = sum({(m.window, m.sinks): _block_keys(m) for m in mixers if isinstance(m, WindowMixer)}.values())
    sets = 2 if cuda_graphs and stage.loss == "kl" and not checkpointing else 1
    no_kernel = not bf16 and (compiled or cuda_graphs)  # see `training.context.choose_attention`
    document_masks = geometry.document_masks or (beside and other.document_masks)
    masked = (document_masks or no_kernel) and stage.context_parallel == 1
    softmax = beside or any(mixer is None for mixer in mixers)
    scores = _score_bytes(geometry, [] if alone else mixers, other if beside else None, checkpointing=checkpointing)
    if teacher is not None and beside:  # its pass comes first; of it the last hidden states stay
        again = max(again, _layer_bytes(teacher.at(0), None, element) - kept)
        kept += element * teacher.dims.hidden
    chunked_by, per_logit = _logit_bytes(stage, element)
    return StageMemory(
        weights=weights * 4 + copies + trained * 12 + other.parameters * element * beside,
        copies=copies,
        held_low=2 * frozen * twice + max(0, copies - 2 * (weights - frozen)),
        gathered=_gathered_bytes(
            geometry, added, element, other if beside else None, alone=alone, all_trained=stage.train == "all"
        ),
        ddp=4 * trained,
        head=0 if alone else head,
        chunked_by=chunked_by,
        per_logit=per_logit,
        vocabulary=geometry.vocabulary,
        per_token=sets * (kept / stage.context_parallel + masks),
        again=again / stage.context_parallel,
        narrower=sets * (1 if checkpointing else share) * narrower / stage.context_parallel,
        per_pair=(_PAIR_BYTES if softmax and masked else 0) + scores,
        ranks=stage.context_parallel,
    )


def _score_bytes(geometry: Geometry, mixers: Mixers, other: Geometry | None, *, checkpointing: bool) -> int:
    """Bytes per pair of tokens of a row for scores that attention writes out: those that wait for the backward pass,
    and those of the layer at work.

    Args:
        geometry: of the student.
        mixers: of the layers that run.
        other: the teacher, whose layer at work has scores too; None for none.
        checkpointing: gradient checkpointing.
    """
    full = sum(mixer is None for mixer in mixers)
    kept = min(full, 1) if checkpointing else full + (full > 0)
    own = geometry.scores_written * geometry.dims.query_heads * kept
    beside = 0 if other is None else other.scores_written * other.dims.query_heads
    return _SCORE_BYTES * max(own, beside)


def still_the_teachers(stages: Iterable[Stage], stage: Stage) -> bool:
    """Whether what a stage does not train is the model's own: no stage before it trained more than converted layers.

    Args:
        stages: of the recipe.
        stage: one of them, by name.
    """
    return all(one.train == "mixers" for one in itertools.takewhile(lambda one: one.name != stage.name, stages))


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
        attention = [_attention_bytes(at, mixer, element) for at, mixer in zip(sizes, mixers, strict=True) if mixer]
        return 2.0 * element * hidden * len(attention), max(attention)
    layers = [_layer_bytes(at, mixer, element) for at, mixer in zip(sizes, mixers, strict=True)]
    return (4.0 * hidden * len(layers), share * max(layers)) if checkpointing else (share * sum(layers), 0.0)


def _narrower(geometry: Geometry, mixers: Mixers, *, checkpointing: bool) -> float:
    """`StageMemory.narrower` of the student in one process, where nothing is compiled."""
    if checkpointing:
        return 2.0 * geometry.dims.hidden * len(mixers)
    both = sum(isinstance(mixer, SSEMixer) and isinstance(mixer, WindowMixer) for mixer in mixers)
    return 10.0 * geometry.dims.hidden * (len(mixers) + both)


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
    geometry: Geometry, added: int, element: int, teacher: Geometry | None, *, alone: bool, all_trained: bool
) -> int:
    """Bytes that a process has whole at a time under FSDP; see the top of this file.

    Args:
        geometry: the model's sizes.
        added: new parameters.
        element: bytes of a gathered weight.
        teacher: sizes of the teacher that runs as well, if one does.
        alone: of the student, converted layers' attention is on the GPU alone.
        all_trained: embedding and head are trained too.
    """
    own = 0 if alone else _around(geometry) * (element + 4 * all_trained)
    layers = _layer_parameters(geometry, added) * (2 * element + element + 4)
    if teacher is None:
        return own + layers
    return own + _around(teacher) * element + max(layers, _layer_parameters(teacher, 0) * 2 * element)


def _around(geometry: Geometry) -> int:
    """Parameters of embedding and head."""
    return geometry.embedding_parameters * (1 if geometry.tied else 2)


def _logit_bytes(stage: Stage, element: int) -> tuple[int, int]:
    """Bytes per logit that chunks are cut for, and that one takes: in one kernel, the student's and a teacher's."""
    if stage.loss == "layer_mse":
        return 0, 0
    return FUSED_BYTES, element * (1 if stage.loss == "ce" else 2)


def _layer_bytes(geometry: Geometry, mixer: Mixer | None, element: int) -> float:
    """Activation bytes per token of a whole decoder layer."""
    norms = (24 + 2 * (element == 2)) * geometry.dims.hidden
    return norms + 4 * element * geometry.intermediate + _attention_bytes(geometry, mixer, element)


def _norm_bytes(geometry: Geometry) -> float:
    return 6 * geometry.qk_norm * (geometry.dims.query_heads + geometry.dims.kv_heads) * geometry.dims.head_dim


def _attention_bytes(geometry: Geometry, mixer: Mixer | None, element: int) -> float:
    dims = geometry.dims
    state = _sse_bytes(geometry, mixer, element) if isinstance(mixer, SSEMixer) else 0.0
    if state and not isinstance(mixer, WindowMixer):
        return state
    softmax = element * (dims.query_heads + dims.kv_heads) * (dims.head_dim + dims.value_dim) + _norm_bytes(geometry)
    return state + softmax + (_window_bytes(geometry, mixer, element) if isinstance(mixer, WindowMixer) else 0)


def _block_keys(mixer: WindowMixer) -> int:
    """Keys that a query is compared with."""
    return 2 * mixer.window + mixer.sinks


def _window_bytes(geometry: Geometry, mixer: WindowMixer, element: int) -> float:
    heads, keys = geometry.dims.query_heads, _block_keys(mixer)
    copied = heads * (geometry.dims.head_dim + geometry.dims.value_dim) / mixer.window
    return keys * (element * (1 + copied) + _SCORE_BYTES * heads * geometry.scores_written)


def _sse_bytes(geometry: Geometry, mixer: SSEMixer, element: int) -> float:
    dims = geometry.dims
    heads = state_heads(dims, mixer)
    query, state = dims.query_heads * dims.head_dim, heads * dims.head_dim
    output, value = dims.query_heads * dims.value_dim, heads * dims.value_dim
    used = max(mixer.top_k, mixer.read_top_k or mixer.top_k)
    slots = used + mixer.shared_partition
    operator = slots * (4 * (query + 2 * state + value) + 4 * state * dims.value_dim / STATE_CHUNK)
    routed = used * 4 * (query + state)
    own = 1 if mixer.shared_params else mixer.num_partitions
    key_sets, query_sets = own + mixer.shared_partition, (1 if mixer.shared_queries else own) + mixer.shared_partition
    norms = 6 * geometry.qk_norm
    maps = key_sets * (8 + norms) * state + query_sets * norms * query + element * (query + state)
    values = 4 * value * (1 if mixer.shared_params else own + 1)
    return operator + routed + maps + values + 16 * output
