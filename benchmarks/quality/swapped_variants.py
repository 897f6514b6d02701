"""What is compared: sets of variants, each a mixer and what it changes in the recipe."""

import dataclasses as dc
from typing import Any

SSE = "mixers.sse"
RATE = 3e-3


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to swap the layers."""

    mixer: str = "sse"
    """name of the mixer in the recipe"""
    set: dict[str, Any] = dc.field(default_factory=dict)
    """recipe keys and their values"""
    rate: float = RATE
    """peak learning rate"""


def _sse(**fields: Any) -> Variant:
    return Variant(set={f"{SSE}.{name}": value for name, value in {"state_heads": "query", **fields}.items()})


def _gate(write: bool, read: bool) -> Variant:
    return _sse(num_partitions=16, gate={"write": write, "read": read})


_BESIDE = {
    "mixers.sse+sliding.num_partitions": 16,
    "mixers.sse+sliding.state_heads": "query",
    "mixers.sse+sliding.window": 128,
}

SETS: dict[str, dict[str, Variant]] = {
    "capacity": {
        "gla": Variant(mixer="gla", set={"mixers.gla.state_heads": "query"}),
        "sse N=4": _sse(num_partitions=4),
        "sse N=16": _sse(num_partitions=16),
        "sse N=64": _sse(num_partitions=64),
        "sse N=16 k=2": _sse(num_partitions=16, top_k=2),
        "sse N=16 k=4": _sse(num_partitions=16, top_k=4),
    },
    "gates": {
        "write and read": _gate(True, True),
        "write": _gate(True, False),
        "read": _gate(False, True),
        "none": _gate(False, False),
    },
    "keys": {
        name: _sse(num_partitions=16, k_feature_map=name) for name in ("softmax", "silu", "relu", "l2", "identity")
    },
    "rows": {
        "all rows": _sse(num_partitions=16),
        **{f"{rows} of 64": _sse(num_partitions=16, row_top_k=rows) for rows in (4, 16, 32)},
    },
    "parameters": {
        "shared, rank 64": _sse(num_partitions=4),
        "shared, rank 0": _sse(num_partitions=4, qk_rank=0),
        "separate": _sse(num_partitions=4, shared_params=False, qk_rank=0),
        "own decay": _sse(num_partitions=4, decay_params="separate"),
    },
    "initialisation": {
        "calibrated": _sse(num_partitions=16),
        "decay not calibrated": Variant(set={f"{SSE}.num_partitions": 16, "calibrate.decay": False}),
        "scale not calibrated": Variant(set={f"{SSE}.num_partitions": 16, "calibrate.output_scale": "none"}),
        "neither": Variant(set={f"{SSE}.num_partitions": 16, "calibrate.enabled": False}),
        "k-means router": Variant(set={f"{SSE}.num_partitions": 16, "calibrate.router": "kmeans"}),
        "rope kept": _sse(num_partitions=16, rope="keep"),
        "state per key-value head": _sse(num_partitions=16, state_heads="kv"),
    },
    "mixers": {
        "gla": Variant(mixer="gla", set={"mixers.gla.state_heads": "query"}),
        "gdn": Variant(mixer="gdn", set={"mixers.gdn.state_heads": "query"}),
        "mom": Variant(mixer="mom", set={"mixers.mom.state_heads": "query"}),
        "sse": _sse(num_partitions=4),
        "sse, delta rule": _sse(num_partitions=4, update="delta", k_feature_map="l2"),
    },
    "windows": {
        "sse+sliding": Variant(mixer="sse+sliding", set=_BESIDE),
        "sse+sliding, scale not calibrated": Variant(
            mixer="sse+sliding", set={**_BESIDE, "calibrate.output_scale": "none"}
        ),
        "sliding": Variant(mixer="sliding", set={"mixers.sliding.window": 128}),
    },
}  # fmt: skip
