"""What is compared: sets of variants, each a mixer and what it changes in the recipe."""

import dataclasses as dc
from typing import Any, Literal

from sse_convert.mixers import BASIC

Optimizer = Literal["adamw", "muon"]
"""as of `stages[].optimizer` in recipes"""
RATE = 3e-3


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to swap the layers."""

    mixer: str = "paper"
    """name of the mixer in the recipe"""
    only: tuple[int, ...] | None = None
    """layers that get the mixer; other swapped layers get windows alone. None: all get the mixer"""
    set: dict[str, Any] = dc.field(default_factory=dict)
    """recipe keys and their values"""
    rate: float = RATE
    """peak learning rate"""
    optimizer: Optimizer = "adamw"
    """adamw, or muon for matrices and adamw for the rest, at the same rate. Reports without it are of adamw"""
    finer: int = 1
    """steps have so many times fewer rows, but one at least; the rows of all steps together stay the same"""

    def mixer_of(self, layer: int) -> str:
        """Name of the mixer that a swapped layer gets."""
        return self.mixer if self.only is None or layer in self.only else "sliding"


_QUERY = {"num_partitions": 16, "top_k": 1, "k_feature_map": "relu", "state_heads": "query"}


def mixer_keys(mixer: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Recipe keys of a mixer's settings."""
    return {f"mixers.{mixer}.{'' if name in BASIC else 'advanced.'}{name}": value for name, value in fields.items()}


def _sse(**fields: Any) -> Variant:
    return Variant(set=mixer_keys("paper", {"state_heads": "query", **fields}))


def _piece(rate: float = RATE, calibrate: dict[str, Any] | None = None, **fields: Any) -> Variant:
    """SSE with 16 partitions and ReLU keys, and what differs from it."""
    own = mixer_keys("paper", {**_QUERY, **fields})
    return Variant(set={**own, **{f"calibrate.{name}": value for name, value in (calibrate or {}).items()}}, rate=rate)


def _wide(rate: float = RATE, calibrate: dict[str, Any] | None = None, **fields: Any) -> Variant:
    """The same with 64 partitions, of which a token takes four."""
    return _piece(rate, calibrate, **{"num_partitions": 64, "top_k": 4, **fields})


def _beside(output_scale: str = "fit", only: tuple[int, ...] | None = None, **fields: Any) -> Variant:
    """SSE with 16 partitions and ReLU keys beside a window."""
    plain = {"update": "gla", "decay_params": "shared"}
    own = mixer_keys("sse+sliding", {**plain, **_QUERY, "window": 128, **fields})
    windows = {"mixers.sliding.window": 128, "calibrate.output_scale": output_scale}
    return Variant(mixer="sse+sliding", only=only, set={**own, **windows})


_GLA = {"num_partitions": 1, "top_k": 1, "shared_partition": False, "qk_rank": 0, "balance": "none"}
"""SSE that is gated linear attention: one state per head"""
_DELTA = {"update": "delta", "k_feature_map": "l2"}
_FAR = {"rows": 2, "seq_len": 4096}
"""calibration on the longest rows that it takes: half-lives grow with the rows they are measured on"""
_BEST = _wide(decay_params="separate", **_DELTA)
_BEST_128 = _wide(decay_params="separate", num_partitions=128, **_DELTA)
_MUON, _MUON_128 = (dc.replace(best, optimizer="muon") for best in (_BEST, _BEST_128))
_WINDOW = _beside("size", num_partitions=64, top_k=4, decay_params="separate", **_DELTA)
_MUON_WINDOW = dc.replace(_WINDOW, optimizer="muon", finer=4)


SETS: dict[str, dict[str, Variant]] = {
    "capacity": {
        "gla": Variant(mixer="gla", set={"mixers.gla.state_heads": "query", "mixers.gla.k_feature_map": "softmax"}),
        "sse N=4": _sse(num_partitions=4),
        "sse N=16": _sse(num_partitions=16),
        "sse N=64": _sse(num_partitions=64),
    },
    "long": {
        "N=64, k=4": _wide(),
        "N=64, k=4, own decay": _wide(decay_params="separate"),
        "N=64, k=4, own decay, delta rule": _BEST,
        "N=64, k=4, own decay, delta rule, calibrated on 4k": _wide(calibrate=_FAR, decay_params="separate", **_DELTA),
        "N=64, k=8, own decay, delta rule": _wide(decay_params="separate", top_k=8, **_DELTA),
        "N=128, k=4, own decay, delta rule": _BEST_128,
        "N=128, k=8, own decay, delta rule": _wide(decay_params="separate", num_partitions=128, top_k=8, **_DELTA),
    },
    "muon": {
        "N=64": _BEST,
        "N=64, steps of half the rows": dc.replace(_BEST, finer=2),
        "N=64, Muon": _MUON,
        "N=64, Muon, rate 1e-3": dc.replace(_MUON, rate=1e-3),
        "N=64, Muon, rate 9e-3": dc.replace(_MUON, rate=9e-3),
        "N=64, Muon, steps of half the rows": dc.replace(_MUON, finer=2),
        "N=64, Muon, steps of a quarter of the rows": dc.replace(_MUON, finer=4),
        "beside a window, N=64, Muon, steps of a quarter of the rows": _MUON_WINDOW,
        "N=128": _BEST_128,
        "N=128, Muon": _MUON_128,
        "N=128, Muon, steps of half the rows": dc.replace(_MUON_128, finer=2),
        "N=128, Muon, steps of a quarter of the rows": dc.replace(_MUON_128, finer=4),
    },
    "pieces": {
        "base": _piece(),
        "k=2": _piece(top_k=2),
        "k=4": _piece(top_k=4),
        "k=8": _piece(top_k=8),
        "N=64": _piece(num_partitions=64),
        "softmax keys": _piece(k_feature_map="softmax"),
        "unit keys": _piece(k_feature_map="l2"),
        "keys as they are": _piece(k_feature_map="identity"),
        "write gate alone": _piece(gate={"write": True, "read": False}),
        "no gates": _piece(gate={"write": False, "read": False}),
        "no balance loss": _piece(balance="none"),
        "output gate": _piece(output_gate=True),
        "RoPE kept": _piece(rope="keep"),
        "no decay": _piece(decay="none"),
        "own decay": _piece(decay_params="separate"),
        "no side path": _piece(qk_rank=0),
        "no shared partition": _piece(shared_partition=False, qk_rank=0),
        "own parameters": _piece(shared_params=False, qk_rank=0, num_partitions=4),
        "state per key-value head": _piece(state_heads="kv"),
        "calibrated on 4k": _piece(calibrate=_FAR),
        "scale not calibrated": _piece(calibrate={"output_scale": "none"}),
        "nothing calibrated": _piece(calibrate={"enabled": False}),
        "delta rule": _piece(**_DELTA),
        "delta rule, k=2": _piece(**_DELTA, top_k=2),
        "rate 1e-2": _piece(rate=1e-2),
    },
    "wide": {
        "N=64, k=4": _wide(),
        "N=64, k=8": _wide(top_k=8),
        "N=64, k=2": _wide(top_k=2),
        "N=128, k=4": _wide(num_partitions=128),
        "N=128, k=8": _wide(num_partitions=128, top_k=8),
        "N=32, k=4": _wide(num_partitions=32),
        "renormalised": _wide(gate={"renormalise": True}),
        "read gate alone": _wide(gate={"write": False}),
        "read gate alone, renormalised": _wide(gate={"write": False, "renormalise": True}),
        "write gate alone": _wide(gate={"read": False}),
        "renormalised, k=8": _wide(top_k=8, gate={"renormalise": True}),
        "reads 8": _wide(read_top_k=8),
        "softmax keys": _wide(k_feature_map="softmax"),
        "unit keys": _wide(k_feature_map="l2"),
        "no decay": _wide(decay="none"),
        "one decay per head": _wide(decay="scalar"),
        "balance loss 0.001": _wide(balance_coef=0.001),
        "balance by bias": _wide(balance="bias", balance_coef=0.001),
        "side path of rank 128": _wide(qk_rank=128),
        "rate 1e-2": _wide(rate=1e-2),
        "rate 6e-3": _wide(rate=6e-3),
    },
    "bytes": {
        "GLA in all": _beside("size", **_GLA),
        "SSE in 7, N=7": _beside("size", only=(7,), num_partitions=7, top_k=2),
        "SSE in 7, N=7, delta rule": _beside("size", only=(7,), num_partitions=7, top_k=2, **_DELTA),
        "windows in all": Variant(mixer="sliding", set={"mixers.sliding.window": 128}),
    },
    "mixers": {
        "gla": Variant(mixer="gla", set={"mixers.gla.state_heads": "query", "mixers.gla.k_feature_map": "softmax"}),
        "gdn": Variant(mixer="gdn", set={"mixers.gdn.state_heads": "query"}),
        "mom": Variant(mixer="mom", set={"mixers.mom.state_heads": "query"}),
        "sse": _piece(top_k=2),
        "sse, delta rule": _piece(top_k=2, **_DELTA),
    },
    "windows": {
        "window": Variant(mixer="sliding", set={"mixers.sliding.window": 128}),
        "GLA beside, scale by size": _beside("size", **_GLA),
        "beside, k=1": _beside(),
        "beside, k=4": _beside(top_k=4),
        "beside, k=4, scale by size": _beside("size", top_k=4),
        "beside, k=4, scale not calibrated": _beside("none", top_k=4),
        "beside, N=64, k=4, scale by size": _beside("size", num_partitions=64, top_k=4),
        "beside, N=64, k=4, scale by size, own decay": _beside(
            "size", num_partitions=64, top_k=4, decay_params="separate"
        ),
        "beside, N=64, k=4, scale by size, own decay, delta rule": _WINDOW,
        "beside, N=64, k=8, scale by size": _beside("size", num_partitions=64, top_k=8),
        "beside, N=64, k=4, scale by size, renormalised": _beside(
            "size", num_partitions=64, top_k=4, gate={"renormalise": True}
        ),
    },
}
