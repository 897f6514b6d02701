"""The token mixers a layer can have, as frozen dataclasses. Pure Python: recipes, checkpoints and models read these.

`full` is the teacher's softmax attention, untouched, and has no settings. Field names are recipe keys; the paper's
value is the default. Source: arXiv:2507.16577, sections "SSE" and "Ablation Study".
"""

import dataclasses as dc
from typing import Any, Literal

FULL = "full"
HOMOGENEOUS = ("relu", "identity")
"""feature maps with phi(c k) = c phi(k) for c > 0: a scale of the keys only scales the output, which has its own"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Where the partition gate e multiplies (paper, Table gate ablation)."""

    write: bool = True
    """scale what a token writes by e"""
    read: bool = True
    """scale what a token reads by e"""
    renormalise: bool = False
    """divide e by its sum over the partitions that a token writes (for the write gate) or reads (for the read gate)"""


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
    router_bias: bool = False
    """add a learned bias to the router's logits; `expand` sets it, to bring new partitions in quietly"""
    gate: Gate = dc.field(default_factory=Gate)
    """write and read gate"""
    update: Literal["gla", "delta"] = "gla"
    """how a token writes: gated linear attention adds k v; the gated delta rule takes out what k reads first, by a
    learned strength in (0, 1) which the write gate multiplies, so that normalised keys do not cancel the gate"""
    k_feature_map: Literal["softmax", "silu", "relu", "l2", "identity"] = "softmax"
    """phi, applied to each key over its head dimension; l2 is SiLU scaled to unit norm"""
    row_top_k: int | None = None
    """keep only this many entries of each key before the feature map; unset keeps all"""
    row_decay: Literal["all", "selected"] = "all"
    """decay every state row (the equation) or only the rows a key selects (Proposition 4)"""
    shared_partition: bool = True
    """add the always-selected, ungated partition"""
    qk_rank: int = 64
    """rank of the low-rank side path on q and k; 0 for none. With it the shared partition can use other keys than the
    sparse ones; without it almost nothing was retrieved with 16 partitions (one layer, one seed)"""
    qk_rank_on: Literal["shared", "sparse"] = "shared"
    """which partitions the side path serves (the paper: shared)"""
    shared_params: bool = True
    """one projection set for all partitions; false adds one (zero-initialised) projection offset per partition"""
    shared_queries: bool = False
    """with shared_params: false, leave out the offsets of q: the partitions differ in k and v"""
    decay: Literal["gla", "scalar", "none"] = "gla"
    """data-dependent decay per key channel, per head, or none: a state that forgets nothing blurs"""
    decay_params: Literal["shared", "separate"] = "shared"
    """one projection of decay (and of the delta rule's write strength) for sparse and shared partitions, or one each"""
    decay_rank: int = 16
    """low rank of the per-channel decay projection"""
    decay_normalizer: float = 16.0
    """log decay = logsigmoid(.) / decay_normalizer"""
    state_heads: Literal["kv", "query"] = "kv"
    """one state per key-value head, or one per query head (own decay and own low-rank key), since query heads look back
    differently far: more memory; on one layer no more was retrieved"""
    rope: Literal["none", "keep"] = "none"
    """rotate q and k with the teacher's rotary embedding before the feature map; none, since decays tell distance
    already and rotated keys did worse"""
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
        varies = (self.gate.write and self.top_k > 1) or (self.gate.read and read > 1)
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
            (
                self.num_partitions > 1 and self.gate.renormalise and not varies,
                "gate.renormalise makes the gate of a single partition 1 and the router learns nothing: use a larger "
                "top_k (or read_top_k) with its gate on, or renormalise: false",
            ),
            (
                self.gate.renormalise and self.partition_gate != "softmax",
                f"gate.renormalise is for the softmax gate, whose sum is not 0, and partition_gate is "
                f"'{self.partition_gate}'",
            ),
            (
                self.update == "delta" and self.k_feature_map not in ("l2", "softmax"),
                f"k_feature_map is '{self.k_feature_map}' with update: delta, whose states grow without bound unless "
                "keys have norm 1 or less: use l2 or softmax",
            ),
            (
                self.shared_queries and self.shared_params,
                "shared_queries is true but shared_params is true: there are no offsets to leave out",
            ),
        ]


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class _Baseline:
    """Settings that the baselines share with SSE, of which each of them is a special case."""

    kind: str
    """mixer type"""
    k_feature_map: Literal["softmax", "silu", "relu", "l2", "identity"] = "l2"
    """phi, applied to each key over its head dimension; l2 is SiLU scaled to unit norm"""
    decay: Literal["gla", "scalar", "none"] = "scalar"
    """data-dependent decay per key channel, per head, or none: a state that forgets nothing blurs"""
    decay_rank: int = 16
    """low rank of the decay projection"""
    decay_normalizer: float = 16.0
    """log decay = logsigmoid(.) / decay_normalizer"""
    state_heads: Literal["kv", "query"] = "kv"
    """one state (of each partition) per key-value head, or per query head, since query heads look back differently far,
    for more memory"""
    rope: Literal["none", "keep"] = "none"
    """rotate q and k with the teacher's rotary embedding before the feature map; none, since decays tell distance
    already and rotated keys did worse"""
    output_norm: Literal["rms", "none"] = "rms"
    """per-head normalisation of the output, followed by a learned scale"""
    output_gate: bool = False
    """multiply the output by a low-rank sigmoid gate"""

    def __post_init__(self) -> None:
        self.as_sse()

    def as_sse(self) -> SSEMixer:
        """The same layer as a case of SSE."""
        raise NotImplementedError

    def _own(self) -> dict[str, Any]:
        """The fields, all of which SSE has under the same names."""
        return {f.name: getattr(self, f.name) for f in dc.fields(self) if f.name != "kind"}


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class GLAMixer(_Baseline):
    """Plain gated linear attention, the paper's baseline: one ungated partition that every token writes and reads."""

    kind: Literal["gla"] = "gla"
    """mixer type"""
    k_feature_map: Literal["softmax", "silu", "relu", "l2", "identity"] = "softmax"
    """phi, applied to each key over its head dimension; l2 is SiLU scaled to unit norm"""
    decay: Literal["gla", "scalar", "none"] = "gla"
    """data-dependent decay per key channel, per head, or none: a state that forgets nothing blurs"""

    def as_sse(self) -> SSEMixer:
        """The same layer as the N = 1, k = 1, no-shared-partition case of SSE."""
        return SSEMixer(num_partitions=1, shared_partition=False, qk_rank=0, balance="none", **self._own())


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class GDNMixer(_Baseline):
    """Gated delta rule (Gated DeltaNet, arXiv:2412.06464): one state, decayed per head and corrected by each write.

    The decay is logsigmoid(.) / decay_normalizer, as for the other kinds, in place of the paper's exp(A_log) softplus:
    it has the same range, and calibration sets it from the teacher's attention distances. Keys have unit norm; queries
    are the teacher's, since their norm cancels in the output norm. The short convolution is left out.
    """

    kind: Literal["gdn"] = "gdn"
    """mixer type"""
    k_feature_map: Literal["l2", "softmax"] = "l2"
    """phi, applied to each key over its head dimension; l2 (the paper's) is SiLU scaled to unit norm"""
    decay: Literal["gla", "scalar", "none"] = "scalar"
    """data-dependent decay per key channel (Kimi Linear), per head (the paper's), or none (DeltaNet): a state that
    forgets nothing blurs, even where a write takes out what it replaces"""

    def as_sse(self) -> SSEMixer:
        """The same layer as the N = 1, k = 1, no-shared-partition case of SSE under the delta rule."""
        return SSEMixer(
            update="delta", num_partitions=1, shared_partition=False, qk_rank=0, balance="none", **self._own()
        )


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class MoMMixer(_Baseline):
    """Mixture of memories (arXiv:2502.13685): memories with own keys and values, read through a softmax router.

    The outputs of the selected memories are mixed by their router weights, renormalised over the selected; writes are
    not weighted. The shared memory takes every token and has the teacher's projections; the others have those plus
    offsets of their own, zero at first. Decay and write strength are common to the memories.
    """

    kind: Literal["mom"] = "mom"
    """mixer type"""
    num_partitions: int = 4
    """memories beside the shared one"""
    top_k: int = 2
    """memories a token writes and reads; at least 2, unless there is one memory"""
    shared_partition: bool = True
    """add the memory that every token writes and reads"""
    update: Literal["gla", "delta"] = "delta"
    """how a token writes: gated delta rule (the paper's main experiments), or gated linear attention"""
    balance: Literal["aux_loss", "bias", "none"] = "aux_loss"
    """how memories are kept in use: loss term, selection bias, or nothing"""
    balance_coef: float = 0.01
    """weight of the balance loss, or the bias step when balance is `bias`"""

    def as_sse(self) -> SSEMixer:
        """The same layer as SSE with own keys and values per partition and a renormalised read gate."""
        gate = Gate(write=False, read=True, renormalise=True)
        return SSEMixer(gate=gate, shared_params=False, shared_queries=True, qk_rank=0, **self._own())


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


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class SSESlidingMixer(SSEMixer):
    """SSE beside the teacher's softmax attention in a window: what the window misses is what SSE learns.

    Per head, the output is sse_window_scale * window + norm(SSE) * sse_out_scale, then the teacher's output projection.
    Both branches use the teacher's projections. The window's scale is 1 at first and SSE's is calibrated by least
    squares to what the window misses of the teacher's output: a head that does not point there yet starts small.
    Without calibration of scales it begins at 0.01, which is nearly none in most heads.
    """

    kind: Literal["sse+sliding"] = "sse+sliding"  # type: ignore[assignment]
    """mixer type"""
    window: int = 128
    """tokens a query of the window branch sees, itself included"""
    sinks: int = 4
    """first tokens of the document that stay visible to the window branch"""
    branch_dropout: float = 0.0
    """probability that a training step leaves out a layer's window branch: what a window that is always there does
    well, SSE need not learn, and it may stay idle"""

    def _checks(self) -> list[tuple[bool, str]]:
        return [
            *SSEMixer._checks(self),
            (self.window < 1, f"window is {self.window}, expected at least 1"),
            (self.sinks < 0, f"sinks is {self.sinks}, expected 0 or more"),
            (
                not 0 <= self.branch_dropout < 1,
                f"branch_dropout is {self.branch_dropout}, expected at least 0 and less than 1",
            ),
        ]


WindowMixer = SlidingMixer | SSESlidingMixer
"""mixers with softmax attention in a window"""
RecurrentMixer = SSEMixer | SSESlidingMixer | GLAMixer | GDNMixer | MoMMixer
"""mixers with a recurrent state; one layer runs them all, as SSE"""
Mixer = RecurrentMixer | SlidingMixer
MIXER_TYPES: dict[str, type[Mixer]] = {
    "sse": SSEMixer,
    "sse+sliding": SSESlidingMixer,
    "gla": GLAMixer,
    "gdn": GDNMixer,
    "mom": MoMMixer,
    "sliding": SlidingMixer,
}


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


def changed_settings(mixer: Mixer) -> dict[str, Any]:
    """The settings of `mixer` that are not its kind's defaults, by name; of a nested group, those that are not."""
    return _changed(dc.asdict(mixer), dc.asdict(type(mixer)()))


def _changed(own: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _changed(value, default[name]) if isinstance(value, dict) else value
        for name, value in own.items()
        if value != default[name]
    }
