"""The token mixers a layer can have, as frozen dataclasses. Pure Python: recipes, checkpoints and models read these.

`full` is the teacher's softmax attention, untouched, and has no settings. Field names are recipe keys; the paper's
value is the default. Source: arXiv:2507.16577, sections "SSE" and "Ablation Study".
"""

import dataclasses as dc
from typing import Any, Literal

FULL = "full"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Where the partition gate e multiplies (paper, Table gate ablation)."""

    write: bool = True
    """scale what a token writes by e"""
    read: bool = True
    """scale what a token reads by e"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class SSEMixer:
    """Sparse State Expansion linear attention."""

    kind: Literal["sse"] = "sse"
    """mixer type"""
    num_partitions: int = 4
    """N, sparse state partitions beside the shared one"""
    top_k: int = 1
    """k, partitions a token writes to"""
    read_top_k: int | None = None
    """k', partitions a token reads from; unset means top_k"""
    gate: Gate = dc.field(default_factory=Gate)
    """write and read gate"""
    k_feature_map: Literal["softmax", "silu", "relu", "identity"] = "softmax"
    """phi, applied to each key over its head dimension"""
    row_top_k: int | None = None
    """keep only this many entries of each key before the feature map; unset keeps all"""
    row_decay: Literal["all", "selected"] = "all"
    """decay every state row (the equation) or only the rows a key selects (Proposition 4)"""
    shared_partition: bool = True
    """add the always-selected, ungated partition"""
    qk_rank: int = 64
    """rank of the low-rank side path on q and k; 0 for none"""
    qk_rank_on: Literal["shared", "sparse"] = "shared"
    """which partitions the side path serves (the paper: shared)"""
    shared_params: bool = True
    """one projection set for all partitions; false adds one (zero-initialised) projection offset per partition"""
    decay: Literal["gla", "scalar", "none"] = "gla"
    """data-dependent decay per key channel, per head, or none"""
    decay_params: Literal["shared", "separate"] = "shared"
    """one decay projection for sparse and shared partitions, or one each"""
    decay_rank: int = 16
    """low rank of the per-channel decay projection"""
    decay_normalizer: float = 16.0
    """log decay = logsigmoid(.) / decay_normalizer"""
    state_heads: Literal["kv", "query"] = "kv"
    """one state per key-value head, or one per query head (own decay and own low-rank key)"""
    rope: Literal["none", "keep"] = "none"
    """rotate q and k with the teacher's rotary embedding before the feature map"""
    output_norm: Literal["rms", "none"] = "rms"
    """per-head normalisation of the output, followed by a learned scale"""
    output_gate: bool = False
    """multiply the output by a low-rank sigmoid gate"""
    balance: Literal["aux_loss", "bias", "none"] = "aux_loss"
    """how partitions are kept in use: loss term, selection bias, or nothing"""
    balance_coef: float = 0.01
    """weight of the balance loss, or the bias step when balance is `bias`"""
    partition_gate: str = "softmax"
    """e as a function of the router logits; other names must be registered with `register_partition_gate`"""

    def __post_init__(self) -> None:
        problems = [message for bad, message in self._checks() if bad]
        if problems:
            raise ValueError("; ".join(problems))

    def _checks(self) -> list[tuple[bool, str]]:
        read = self.top_k if self.read_top_k is None else self.read_top_k
        cancels = not self.gate.write and self.gate.read and read == 1 and not self.shared_partition
        return [
            (self.num_partitions < 1, f"num_partitions is {self.num_partitions}, expected at least 1"),
            (
                not 1 <= self.top_k <= self.num_partitions,
                f"top_k is {self.top_k}, expected 1 to num_partitions ({self.num_partitions})",
            ),
            (
                not 1 <= read <= self.num_partitions,
                f"read_top_k is {read}, expected 1 to num_partitions ({self.num_partitions})",
            ),
            (self.row_top_k is not None and self.row_top_k < 1, f"row_top_k is {self.row_top_k}, expected at least 1"),
            (
                self.row_decay == "selected" and self.row_top_k is None,
                "row_decay is 'selected' but row_top_k is unset: set row_top_k, or use row_decay: all",
            ),
            (self.qk_rank < 0, f"qk_rank is {self.qk_rank}, expected 0 or more"),
            (
                self.qk_rank > 0 and self.qk_rank_on == "shared" and not self.shared_partition,
                "qk_rank_on is 'shared' but shared_partition is false: set qk_rank: 0 or qk_rank_on: sparse",
            ),
            (self.decay_rank < 1, f"decay_rank is {self.decay_rank}, expected at least 1"),
            (self.decay_normalizer <= 0, f"decay_normalizer is {self.decay_normalizer}, expected more than 0"),
            (
                self.decay_params == "separate" and not self.shared_partition,
                "decay_params is 'separate' but shared_partition is false: there is nothing to separate from",
            ),
            (self.balance_coef < 0, f"balance_coef is {self.balance_coef}, expected 0 or more"),
            (
                self.num_partitions > 1 and cancels and self.output_norm == "rms",
                "a read gate alone on one partition, without shared partition, cancels in the output norm and the "
                "router learns nothing: turn the write gate on, read more partitions, or set output_norm: none",
            ),
        ]


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class GLAMixer:
    """Plain gated linear attention, the paper's baseline: one ungated partition that every token writes and reads."""

    kind: Literal["gla"] = "gla"
    """mixer type"""
    k_feature_map: Literal["softmax", "silu", "relu", "identity"] = "softmax"
    """phi, applied to each key over its head dimension"""
    decay: Literal["gla", "scalar", "none"] = "gla"
    """data-dependent decay per key channel, per head, or none"""
    decay_rank: int = 16
    """low rank of the per-channel decay projection"""
    decay_normalizer: float = 16.0
    """log decay = logsigmoid(.) / decay_normalizer"""
    state_heads: Literal["kv", "query"] = "kv"
    """one state per key-value head, or one per query head"""
    rope: Literal["none", "keep"] = "none"
    """rotate q and k with the teacher's rotary embedding before the feature map"""
    output_norm: Literal["rms", "none"] = "rms"
    """per-head normalisation of the output, followed by a learned scale"""
    output_gate: bool = False
    """multiply the output by a low-rank sigmoid gate"""

    def as_sse(self) -> SSEMixer:
        """The same layer as the N = 1, k = 1, no-shared-partition case of SSE."""
        own = {f.name: getattr(self, f.name) for f in dc.fields(self) if f.name != "kind"}
        return SSEMixer(num_partitions=1, shared_partition=False, qk_rank=0, balance="none", **own)


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class SlidingMixer:
    """The teacher's softmax attention limited to a window, plus attention sinks (the first tokens of a document)."""

    kind: Literal["sliding"] = "sliding"
    """mixer type"""
    window: int = 128
    """tokens a query sees, itself included"""
    sinks: int = 4
    """first tokens of the document that stay visible"""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}, expected at least 1")
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}, expected 0 or more")


Mixer = SSEMixer | GLAMixer | SlidingMixer
MIXER_TYPES: dict[str, type[Mixer]] = {"sse": SSEMixer, "gla": GLAMixer, "sliding": SlidingMixer}
NOT_BUILT = ("gdn", "mom", "sse+sliding")
"""mixer kinds that are planned and rejected by name until they exist"""


def mixer_from_dict(data: dict[str, Any]) -> Mixer:
    """Rebuild a mixer from the plain dict a checkpoint's config.json stores.

    Raises:
        ValueError: the kind is unknown or a field is.
    """
    kind = data.get("kind")
    if kind not in MIXER_TYPES:
        raise ValueError(f"mixer kind is {kind!r}, expected one of {sorted(MIXER_TYPES)}")
    known = {f.name for f in dc.fields(MIXER_TYPES[kind])}
    if unknown := sorted(data.keys() - known):
        raise ValueError(f"mixer {kind} has unknown fields {unknown}, expected some of {sorted(known)}")
    values = dict(data)
    if isinstance(values.get("gate"), dict):
        values["gate"] = Gate(**values["gate"])
    return MIXER_TYPES[kind](**values)


def mixer_to_dict(mixer: Mixer) -> dict[str, Any]:
    """The mixer as plain JSON-ready data."""
    return dc.asdict(mixer)
