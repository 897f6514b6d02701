"""The paper's comparisons: what each claims, the variants that test it, and the order that the claim predicts.

The base is SSE with N = 16, k = 1, ReLU keys and a state per query head; `keys_paper` has the N = 4 of the paper.
Baselines are cases of SSE, so that they can be set beside it: none has a short convolution or an output gate.
"""

import dataclasses as dc
from itertools import pairwise
from typing import Any

from benchmarks.quality.swapped_variants import SETS, Variant, mixer_keys

Pair = tuple[str, str]
"""names of two variants, the better one first"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A claim of the paper and what tests it."""

    claim: str
    """what the paper says"""
    source: str
    """where it says so"""
    differ_in: tuple[str, ...]
    """settings of SSE in which variants differ; all others are the same"""
    variants: dict[str, Variant]
    """by name"""
    ahead: tuple[Pair, ...]
    """the first should be better"""
    not_behind: tuple[Pair, ...] = ()
    """the first should not be worse"""
    beside: tuple[str, ...] = ()
    """variants for orientation, which differ in more"""
    layers: tuple[int, ...] = (7,)
    """layers of the 32M teacher that are swapped"""
    most_seeds: int = 8
    """more are not run"""


def _sse(**fields: Any) -> Variant:
    """The base with other settings."""
    base = SETS["pieces"]["base"]
    return dc.replace(base, set={**base.set, **mixer_keys("paper", fields)})


def _baseline(mixer: str, **fields: Any) -> Variant:
    """Another mixer with the base's states per query head."""
    return Variant(mixer=mixer, set=mixer_keys(mixer, {"state_heads": "query", **fields}))


def _grows(*names: str) -> dict[str, tuple[Pair, ...]]:
    """The order of a claim that the last is ahead of the first, and no step on the way goes down."""
    return {"ahead": ((names[-1], names[0]),), "not_behind": tuple((b, a) for a, b in pairwise(names))}


def _gates(*, write: bool, read: bool) -> Variant:
    return _sse(top_k=2, gate={"write": write, "read": read})


def _keys(**fields: Any) -> dict[str, Variant]:
    return {name: _sse(k_feature_map=name, **fields) for name in ("softmax", "silu", "relu", "identity")}


def _parameters(**fields: Any) -> dict[str, Variant]:
    return {
        "shared, side path": _sse(**fields),
        "shared": _sse(qk_rank=0, **fields),
        "separate": _sse(qk_rank=0, shared_params=False, **fields),
    }


_GLA = _baseline("gla", k_feature_map="relu")
_KEYS = Comparison(
    claim="softmax keys recall more than SiLU keys",
    source="section Ablation Study, table feature_map_ablation",
    differ_in=("k_feature_map",),
    variants=_keys(),
    ahead=(("softmax", "silu"),),
)
_PARAMETERS = Comparison(
    claim="parameters common to all partitions recall more than separate ones",
    source="section Ablation Study, table params_ablation",
    differ_in=("qk_rank", "shared_params"),
    variants=_parameters(num_partitions=4),
    ahead=(("shared, side path", "separate"),),
)
_CONVERSION = Comparison(
    claim="SSE recalls more than GLA after conversion, and than GDN and MoM",
    source="tables 1b_convert for GLA and language_modeling, from scratch, for GDN and MoM",
    differ_in=(
        *("num_partitions", "top_k", "shared_partition", "qk_rank", "balance", "gate", "shared_params"),
        *("shared_queries", "update", "k_feature_map", "decay"),
    ),
    variants={
        "GLA": _GLA,
        "GDN": _baseline("gdn"),
        "KDA": _baseline("gdn", decay="gla"),
        "MoM": _baseline("mom", num_partitions=16, top_k=2, update="gla", decay="gla", k_feature_map="relu"),
        "SSE": _sse(top_k=2),
        "SSE, delta rule": _sse(top_k=2, update="delta", k_feature_map="l2", decay="scalar"),
    },
    ahead=(("SSE", "GLA"), ("SSE", "GDN"), ("SSE", "MoM")),
)
"""KDA (arXiv:2510.26692) is the gated delta rule with a decay per key channel; the paper has no figures of it"""


COMPARISONS: dict[str, Comparison] = {
    "states": Comparison(
        claim="recall grows with the number of states n",
        source="section Ablation Study, figure state_scale",
        differ_in=("num_partitions",),
        variants={"GLA": _GLA, **{f"N = {n}": _sse(num_partitions=n) for n in (1, 2, 4, 8, 16)}},
        **_grows(*(f"N = {n}" for n in (1, 2, 4, 8, 16))),
        beside=("GLA",),
    ),
    "ratio": Comparison(
        claim="at a constant k/n, recall grows about in proportion to n",
        source="section Ablation Study, figure state_scale, (1)",
        differ_in=("num_partitions", "top_k"),
        variants={f"N = {4 * k}, k = {k}": _sse(num_partitions=4 * k, top_k=k) for k in (1, 2, 4)},
        **_grows(*(f"N = {4 * k}, k = {k}" for k in (1, 2, 4))),
    ),
    "top_k": Comparison(
        claim="at a constant n, recall grows with k while k/n is moderate (at most a half)",
        source="section Ablation Study, figure state_scale, (2)",
        differ_in=("top_k",),
        variants={f"k = {k}": _sse(top_k=k) for k in (1, 2, 3, 4)},
        **_grows(*(f"k = {k}" for k in (1, 2, 3, 4))),
    ),
    "keys": _KEYS,
    "keys_paper": dc.replace(
        _KEYS, claim="softmax keys recall more than SiLU keys, with four partitions", variants=_keys(num_partitions=4)
    ),
    "gates": Comparison(
        claim="a gate on writing and reading recalls more than one on either alone, or none",
        source="section Ablation Study, table gate_ablation",
        differ_in=("gate",),
        variants={
            "both": _gates(write=True, read=True),
            "write alone": _gates(write=True, read=False),
            "read alone": _gates(write=False, read=True),
            "none": _gates(write=False, read=False),
        },
        ahead=tuple(("both", other) for other in ("write alone", "read alone", "none")),
    ),
    "parameters": _PARAMETERS,
    "parameters_16": dc.replace(
        _PARAMETERS,
        claim="parameters common to all partitions recall more than separate ones, with 16 partitions",
        variants=_parameters(),
    ),
    "rows": Comparison(
        claim="updating a quarter of the rows of a state recalls more than updating all",
        source="section Row-Sparse Update, figure mqa_topk",
        differ_in=("row_top_k",),
        variants={**{f"{k} of 64 rows": _sse(row_top_k=k) for k in (8, 16, 32)}, "dense": _sse()},
        ahead=(("16 of 64 rows", "dense"),),
    ),
    "conversion": _CONVERSION,
    "hybrid": dc.replace(
        _CONVERSION,
        claim="the same with eight of ten layers converted",
        layers=(0, 1, 2, 3, 5, 6, 7, 8),
        most_seeds=3,
    ),
}
