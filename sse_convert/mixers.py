"""The token mixers a layer can have, as frozen dataclasses. Pure Python: recipes, checkpoints and models read these.

`full` is the teacher's softmax attention, untouched, and has no settings. Field names are recipe keys. A recipe's mixer
starts from the built-in one that its `kind` names (`BUILT_IN`): for SSE, what is recommended beside kept heads. What is
recommended beside whole layers, `recipe/recommended.py` says. The defaults of the dataclasses are the paper's values;
they complete the mixers of old checkpoints, so they never change.
Source: arXiv:2507.16577, sections "SSE" and "Ablation Study".
"""

import dataclasses as dc
import functools
import math
import typing
from typing import Any, Literal

LARGEST = 2**20
"""of every whole number among the settings"""
FULL: Literal["full"] = "full"
BASIC = (
    "kind",
    "num_partitions",
    "top_k",
    "update",
    "k_feature_map",
    "qk_rank",
    "state_heads",
    "window",
    "sinks",
)
"""settings that recipes give as they are; all others, which hardly anyone needs, stand under `advanced`"""
BY_LAYER = "full_heads"
"""the setting that a recipe gives with its layers, not with its mixers"""
DECAY_NORMALIZER = 16.0
"""log decay = logsigmoid(.) / DECAY_NORMALIZER"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Where the partition gate e multiplies (paper, Table gate ablation)."""

    write: bool = True
    """scale what a token writes by e"""
    read: bool = True
    """scale what a token reads by e"""


FIXED: dict[str, dict[str, Any]] = {
    "gla": {
        "num_partitions": 1,
        "top_k": 1,
        "shared_partition": False,
        "qk_rank": 0,
        "balance": "none",
        "update": "gla",
    },
    "gdn": {
        "num_partitions": 1,
        "top_k": 1,
        "shared_partition": False,
        "qk_rank": 0,
        "balance": "none",
        "update": "delta",
    },
}
"""the settings of SSE that make it one of the baselines"""


def _check_types(mixer: Any) -> None:
    """Make sure that settings have the types of their fields: a checkpoint's may come from anywhere.

    Which kinds there are, `BUILT_IN` says.

    Raises:
        ValueError: naming the first one that has not.
    """
    for name, annotation in _annotations(mixer.__class__).items():
        value = getattr(mixer, name)
        if name != "kind" and not _fits(annotation, value):
            options = typing.get_args(annotation) or (annotation,)
            names = ", ".join(getattr(option, "__name__", str(option)) for option in options)
            raise ValueError(f"{name} is {value!r:.80}, expected {names.replace('NoneType', 'null')}")
        if type(value) is int and abs(value) > LARGEST:
            raise ValueError(f"{name} is {value!r:.80}, expected at most {LARGEST}")


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fits(annotation: Any, value: Any) -> bool:
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return isinstance(value, str) and value in options
    if typing.get_origin(annotation) is tuple:
        return isinstance(value, tuple) and all(type(item) is int for item in value)
    if options:
        return any(_fits(option, value) for option in options)
    if annotation is float:
        return type(value) in (int, float) and math.isfinite(value)
    if annotation is Gate:
        return isinstance(value, Gate) and all(type(flag) is bool for flag in dc.astuple(value))
    return type(value) is annotation


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class SSEMixer:
    """Sparse State Expansion linear attention, of which gated linear attention and others are special cases."""

    kind: Literal["sse", "paper", "gla", "gdn"] = "sse"
    """built-in mixer whose settings hold where the recipe gives none"""
    num_partitions: int = 4
    """N, sparse state partitions beside the shared one; several are kept in use by `balance: aux_loss`"""
    top_k: int = 1
    """k, partitions a token writes to and reads from"""
    update: Literal["gla", "delta"] = "gla"
    """how a token writes: gated linear attention adds k v, the gated delta rule replaces what k reads"""
    k_feature_map: Literal["softmax", "silu", "relu", "l2", "identity"] = "softmax"
    """phi, applied to each key over its head dimension; l2 is SiLU scaled to unit norm"""
    qk_rank: int = 64
    """rank of the low-rank side path that gives the shared partition queries and keys of its own; 0 for none"""
    state_heads: Literal["kv", "query"] = "kv"
    """one state per key-value head, or one per query head for more memory"""
    gate: Gate = dc.field(default_factory=Gate)
    """write and read gate"""
    shared_partition: bool = True
    """add the always-selected, ungated partition"""
    decay: Literal["gla", "scalar"] = "gla"
    """data-dependent decay, per key channel or per head"""
    decay_params: Literal["shared", "separate"] = "shared"
    """one projection of decay (and of the delta rule's write strength) for sparse and shared partitions, or one each"""
    balance: Literal["aux_loss", "none"] = "aux_loss"
    """how partitions are kept in use: by a loss term, or not"""
    balance_coef: float = 0.01
    """weight of the balance loss"""

    def __post_init__(self) -> None:
        _check_types(self)
        problems = [message for bad, message in self._checks() if bad]
        if problems:
            raise ValueError("; ".join(problems))

    def _checks(self) -> list[tuple[bool, str]]:
        gate, one = self.gate, self.num_partitions > 1 and self.top_k == 1
        return [
            *(
                (getattr(self, name) != value, f"{name} is {getattr(self, name)}, kind {self.kind} has {value}")
                for name, value in FIXED.get(self.kind, {}).items()
            ),
            (self.num_partitions < 1, f"num_partitions is {self.num_partitions}, expected at least 1"),
            (
                not 1 <= self.top_k <= self.num_partitions,
                f"top_k is {self.top_k}, expected 1 to num_partitions ({self.num_partitions})",
            ),
            (self.qk_rank < 0, f"qk_rank is {self.qk_rank}, expected 0 or more"),
            (
                self.qk_rank > 0 and not self.shared_partition,
                "qk_rank serves the shared partition but shared_partition is false: set qk_rank: 0, or "
                "advanced: {shared_partition: true}",
            ),
            (
                self.decay_params == "separate" and not self.shared_partition,
                "decay_params is 'separate' but shared_partition is false: there is nothing to separate from",
            ),
            (self.balance_coef < 0, f"balance_coef is {self.balance_coef}, expected 0 or more"),
            (
                one and not gate.write and gate.read and not self.shared_partition,
                "a read gate alone on one partition, without shared partition, cancels in the output norm and the "
                "router learns nothing: turn the write gate on, or use a larger top_k",
            ),
            (
                self.update == "delta" and self.k_feature_map not in ("l2", "softmax"),
                f"k_feature_map is '{self.k_feature_map}' with update: delta, whose states grow without bound unless "
                "keys have norm 1 or less: use l2 or softmax, or update: gla",
            ),
        ]


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class SlidingMixer:
    """The teacher's softmax attention limited to a window, plus attention sinks (the first tokens of a document)."""

    kind: Literal["sliding"] = "sliding"
    """mixer type"""
    window: int = 128
    """tokens a query sees, itself included"""
    sinks: int = 4
    """first tokens of the document that stay visible"""
    full_heads: tuple[int, ...] = ()
    """key-value heads that see the whole row, with the query heads that read them"""

    def __post_init__(self) -> None:
        _check_types(self)
        if problems := [message for bad, message in _window_checks(self) if bad]:
            raise ValueError("; ".join(problems))


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class SSESlidingMixer(SSEMixer):
    """SSE beside the teacher's softmax attention in a window: what the window misses is what SSE learns.

    Per head, the output is sse_window_scale * window + norm(SSE) * sse_out_scale, then the teacher's output projection.
    Both branches use the teacher's projections. The window's scale is 1 at first and SSE's is calibrated to what the
    window misses of the teacher's output; without calibration of scales it begins at 0.01.
    """

    kind: Literal["sse+sliding"] = "sse+sliding"  # type: ignore[assignment]
    """built-in mixer whose settings hold where the recipe gives none"""
    window: int = 128
    """tokens a query of the window branch sees, itself included"""
    sinks: int = 4
    """first tokens of the document that stay visible to the window branch"""
    full_heads: tuple[int, ...] = ()
    """key-value heads that see the whole row, with the query heads that read them; the others have SSE and a window"""

    def _checks(self) -> list[tuple[bool, str]]:
        return [*SSEMixer._checks(self), *_window_checks(self)]


WindowMixer = SlidingMixer | SSESlidingMixer
"""mixers with softmax attention in a window"""


def _window_checks(mixer: WindowMixer) -> list[tuple[bool, str]]:
    heads = mixer.full_heads
    return [
        (mixer.window < 1, f"window is {mixer.window}, expected at least 1"),
        (mixer.sinks < 0, f"sinks is {mixer.sinks}, expected 0 or more"),
        (
            any(head < 0 for head in heads) or list(heads) != sorted(set(heads)),
            f"full_heads is {list(heads)}, expected key-value heads in ascending order, each once",
        ),
    ]


Mixer = SSEMixer | SSESlidingMixer | SlidingMixer
_ONE_STATE: dict[str, Any] = {**FIXED["gdn"], "k_feature_map": "l2", "state_heads": "query"}
"""one state per query head under the delta rule, which measured best beside kept heads on real models"""
BUILT_IN: dict[str, Mixer] = {
    "sse": SSEMixer(**_ONE_STATE),
    "sse+sliding": SSESlidingMixer(**_ONE_STATE),
    "sliding": SlidingMixer(),
    "paper": SSEMixer(kind="paper"),
    "gla": SSEMixer(kind="gla", **FIXED["gla"], k_feature_map="silu"),
    "gdn": SSEMixer(kind="gdn", **FIXED["gdn"], k_feature_map="l2", decay="scalar"),
}
"""the mixers that recipes know by name, in the order of the reference"""
SSE_KINDS = ("sse", "sse+sliding", "paper")
"""those with sparse partitions as the paper has them; the others are baselines"""
RETIRED: dict[str, Any] = {
    "router": "hidden",
    "router_bias": False,
    "rope": "none",
    "renormalise": False,
    "read_top_k": None,
    "row_top_k": None,
    "output_gate": False,
    "partition_gate": "softmax",
    "shared_params": True,
    "shared_queries": False,
}
"""settings that older recipes and checkpoints have, and the one value of each that layers still have"""


def _class_of(kind: Any) -> type[Mixer]:
    if kind == "mom":
        raise _retired("kind", "mom", "gdn is the baseline that is left")
    if not isinstance(kind, str) or kind not in BUILT_IN:
        raise ValueError(f"mixer kind is {kind!r:.80}, expected one of {sorted(BUILT_IN)}")
    return type(BUILT_IN[kind])


def _retired(name: str, value: Any, left: str) -> ValueError:
    return ValueError(
        f"{name} is {value!r:.80}, which was retired ({left}): load it with its own code, "
        "AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True), without sse_convert"
    )


def mixer_from_dict(data: dict[str, Any]) -> Mixer:
    """Rebuild a mixer from the plain dict that a config.json, a report or a recipe stores.

    A setting that it lacks gets the value that layers had before there was the setting, never a new default.

    Raises:
        ValueError: the kind is unknown, a field is, or a retired one has a value that layers no longer offer.
    """
    if not isinstance(data, dict) or not isinstance(data.get("advanced", {}), dict):
        raise ValueError(f"a mixer is {data!r:.80}, expected a mapping of settings")
    kind = data.get("kind")
    cls = _class_of(kind)
    values = {**data, **data.get("advanced", {})}
    values.pop("advanced", None)
    for name in sorted(RETIRED.keys() & values.keys()):
        if (value := values.pop(name)) != RETIRED[name]:
            raise _retired(name, value, f"only {RETIRED[name]!r} is left")
    if values.get("balance") == "bias":
        raise _retired("balance", "bias", "'aux_loss' and 'none' are left")
    if isinstance(values.get(BY_LAYER), list):
        values[BY_LAYER] = tuple(values[BY_LAYER])
    known = {f.name for f in dc.fields(cls)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"mixer {kind} has unknown fields {unknown}, expected some of {sorted(known)}")
    if values.get("decay") == "none":
        raise _retired("decay", "none", "'gla' and 'scalar' are left")
    if isinstance(values.get("gate"), dict):
        gate = dict(values["gate"])
        if gate.pop("renormalise", False):
            raise _retired("gate.renormalise", True, "only False is left")
        values["gate"] = Gate(**gate)
    if kind == "gdn":
        return dc.replace(BUILT_IN[kind], **values)
    return cls(**{**FIXED.get(str(kind), {}), **values})


def mixer_to_dict(mixer: Mixer) -> dict[str, Any]:
    """The mixer as plain JSON-ready data."""
    data = dc.asdict(mixer)
    heads = data.pop(BY_LAYER, ())
    return {**data, BY_LAYER: list(heads)} if heads else data


def recipe_entry(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by name as a recipe gives them: those of `BASIC`, and the others under `advanced`."""
    plain = (*BASIC, BY_LAYER)
    advanced = {name: value for name, value in settings.items() if name not in plain}
    basic = {name: value for name, value in settings.items() if name in plain}
    return {**basic, "advanced": advanced} if advanced else basic


def changed_settings(mixer: Mixer) -> dict[str, Any]:
    """The settings of `mixer` that are not its built-in one's, as a recipe gives them."""
    return recipe_entry(_changed(mixer_to_dict(mixer), mixer_to_dict(BUILT_IN[mixer.kind])))


def _changed(own: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _changed(value, default[name]) if isinstance(value, dict) else value
        for name, value in own.items()
        if value != default.get(name)
    }
