"""What the operator benchmark measures: the cases of each group and who takes part in each.

The group `figure` has the setting of the paper's Figure "ops_speed": 8 heads, head dim 128, two sequences of half the
tokens each, N partitions and a shared one.
"""

import dataclasses as dc
import random
from typing import Any

OURS = "ours"
VARLEN, MASK = "published-varlen", "published-mask"
LOOP = "published-loop"
"""measured once, by `git show 4e9b63e1:benchmarks/kernels/operator_published.py`"""
GLA, GLA_TWICE = "gla", "gla-2x"
FLASH, CUDNN = "flash", "cudnn"
RECURRENT, FLA_STEP = "torch-recurrent", "fla-recurrent"
GLA_SLOTS, KDA_SLOTS, GDN_SLOTS, FLASH_QLA = "gla-slots", "kda-slots", "gdn-slots", "flash-qla"
KDA_ENGINE, GDN_ENGINE, QLA_ENGINE = "kda-engine", "gdn-engine", "flash-qla-engine"
ENGINES = {KDA_ENGINE: KDA_SLOTS, GDN_ENGINE: GDN_SLOTS, QLA_ENGINE: FLASH_QLA}
"""SSE over the delta rule, ordering included, and the library whose function does the rest"""
SSE = (OURS, VARLEN, MASK)
DELTA_SLOTS = (KDA_SLOTS, GDN_SLOTS, FLASH_QLA)
"""of the delta rule, the last two with one decay per head"""
CANDIDATES = (*SSE, GLA, GLA_TWICE, FLASH, CUDNN, RECURRENT, FLA_STEP, GLA_SLOTS, *DELTA_SLOTS, *ENGINES)

TARGET_TOKENS = (2**16, 2**18, 2**13, 2**10)
"""first, so that a run that is cut off has them; and 64k before all, since fla tunes its kernels on their first call"""
MASK_TOKENS = 2**14
"""more fails: N + 1 copies of everything"""
PROFILED_TOKENS = (2**10, 2**16)
"""where launches are counted in the group figure"""


@dc.dataclass(frozen=True, kw_only=True)
class Case:
    """One setting of the operator. D = V."""

    group: str
    lengths: tuple[int, ...]
    """tokens of each packed sequence"""
    candidates: tuple[str, ...]
    partitions: int = 4
    top_k: int = 1
    heads: int = 8
    """of the states, keys and values"""
    query_heads: int = 8
    dim: int = 128
    busiest: float | None = None
    """share of the tokens whose first choice is partition 0; None for even routing"""
    backward: bool = True
    """whether forward + backward is measured too"""
    note: str = ""
    k_map: str = "identity"
    """of raw keys; identity gets keys that are softmaxed already (of unit norm, for the delta rule)"""
    normalizer: float | None = None
    """of gate logits in bfloat16; None for log decays in float32"""
    delta: bool = False
    """whether states are written by the delta rule"""
    shared: bool = True
    """whether there is a shared partition"""
    scalar: bool = False
    """one decay for all channels of a head"""
    strong: float = 0.0
    """share of the chunks of 64 tokens whose decays are too strong for the fast path"""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def profiled(self) -> bool:
        """Whether launches are counted."""
        return self.group != "figure" or self.tokens in PROFILED_TOKENS

    def key(self) -> dict[str, int | float | str | bool | None]:
        """What tells a case from the others, as JSON."""
        lengths = {"sequences": len(self.lengths), "shortest": min(self.lengths), "longest": max(self.lengths)}
        rest = {f.name: getattr(self, f.name) for f in dc.fields(self) if f.name not in ("lengths", "candidates")}
        return {"group": self.group, "tokens": self.tokens, **lengths, **rest}


def _halves(tokens: int) -> tuple[int, int]:
    return tokens // 2, tokens - tokens // 2


def _figure() -> list[Case]:
    more = (2**6, 2**8, 2**11, 2**12, 2**14, 2**15)
    cases = []
    for tokens in (*TARGET_TOKENS, *more):
        published = [VARLEN, *([MASK] if tokens <= MASK_TOKENS else [])]
        everyone = (*published, GLA, GLA_TWICE, FLASH, CUDNN, OURS)
        cases.append(Case(group="figure", lengths=_halves(tokens), candidates=everyone))
    cases.append(Case(group="figure", lengths=_halves(2**20), candidates=(OURS,), backward=False))
    for partitions, top_k in ((64, 1), (16, 1), (4, 2), (1, 1), (16, 2), (64, 2)):
        for tokens in (*TARGET_TOKENS, 2**6, 2**8, 2**12, 2**14):
            cases.append(Case(group="figure", lengths=_halves(tokens), candidates=(VARLEN, OURS),
                              partitions=partitions, top_k=top_k))  # fmt: skip
    return cases


def _skewed() -> list[Case]:
    return [Case(group="skewed", lengths=_halves(tokens), candidates=(VARLEN, OURS), partitions=partitions, busiest=0.9)
            for partitions in (4, 64) for tokens in (2**16, 2**13)]  # fmt: skip


def _short() -> list[Case]:
    """32k tokens in sequences of 128 to 1024."""
    draw, lengths = random.Random(0), list[int]()
    while sum(lengths) < 2**15:
        lengths.append(min(draw.randint(128, 1024), 2**15 - sum(lengths)))
    return [Case(group="short", lengths=tuple(lengths), candidates=(VARLEN, *peers, OURS), partitions=partitions)
            for partitions, peers in ((4, (GLA,)), (64, ()))]  # fmt: skip


def _shapes() -> list[Case]:
    """Grouped heads of real models: states per key-value head, and per query head."""
    models = {"Qwen3-0.6B": (16, 8, 128), "Qwen3-4B, Qwen3-8B": (32, 8, 128), "Llama-3.2-1B": (32, 8, 64)}
    return [
        Case(group="shapes", lengths=_halves(tokens), query_heads=queries, heads=heads, dim=dim, note=f"{name}, {kind}",
             candidates=(FLASH, CUDNN, OURS))
        for tokens in (2**16, 2**13)
        for name, (queries, kv, dim) in models.items()
        for kind, heads in (("state_heads: kv", kv), ("state_heads: query", queries))
    ]  # fmt: skip


def _models() -> list[Case]:
    """What models run, one layer at a time: the recommended recipe on the hub, the paper's keys, the delta rule, more
    partitions used and more to choose from, short documents, strong decays; beside the figure's shape, and other
    libraries on as many slots."""
    pair: dict[str, Any] = {"query_heads": 16, "normalizer": 16.0}
    hub: dict[str, Any] = {**pair, "k_map": "relu", "partitions": 16, "top_k": 2}
    paper: dict[str, Any] = {**pair, "k_map": "softmax"}
    figure: dict[str, Any] = {}
    settings: list[tuple[str, dict[str, Any]]] = [
        ("figure", figure), ("hub", hub), ("paper", paper), ("paper, K = 2", {**paper, "top_k": 2}),
        ("paper, N = 16, K = 4", {**paper, "partitions": 16, "top_k": 4}),
        ("paper, N = 60, K = 4", {**paper, "partitions": 60, "top_k": 4}),
        ("1% strong chunks", {"strong": 0.01}), ("all chunks strong", {"strong": 1.0}), ("delta rule", {"delta": True}),
    ]  # fmt: skip
    cases = [Case(group="models", lengths=_halves(tokens), note=note, **changes,
                  candidates=(OURS, *(DELTA_SLOTS if "delta" in changes else (GLA_SLOTS,))))
             for tokens in (2**15, 2**13) for note, changes in settings]  # fmt: skip
    documents = next(case for case in _short()).lengths
    cases += [Case(group="models", lengths=documents, candidates=(OURS, GLA_SLOTS), note=f"{note}, short documents",
                   **changes) for note, changes in (("hub", hub), ("paper", paper))]  # fmt: skip
    delta = (OURS, *DELTA_SLOTS)
    cases += [Case(group="models", lengths=_halves(2**16), candidates=delta, note="delta rule", delta=True)]
    return cases


def _engine_settings() -> list[dict[str, Any]]:
    """Heads of SmolLM2 and of Qwen3-0.6B under the recommended mixer (one state for each query head, which a document
    begins anew) and under 16 partitions and a shared one; with the mixer's decays, and with one for each head."""
    own: dict[str, Any] = {"delta": True, "k_map": "l2", "normalizer": 16.0}
    states: dict[str, dict[str, Any]] = {"one state": {"partitions": 1, "shared": False}, "N = 16": {"partitions": 16}}
    models = {"SmolLM2": (9, 64), "Qwen3-0.6B": (16, 128)}
    return [
        {**own, **state, "scalar": scalar, "heads": heads, "query_heads": heads, "dim": dim, "note": f"{model}, {kind}"}
        for kind, state in states.items() for scalar in (False, True) for model, (heads, dim) in models.items()
    ]  # fmt: skip


def _engines() -> list[Case]:
    documents = next(case for case in _short()).lengths
    rows = [_halves(2**15), _halves(2**18), _halves(2**12), documents, _halves(2**16), _halves(2**14)]
    return [Case(group="engines", lengths=lengths, candidates=(OURS, *_engines_of(settings)), **settings)
            for lengths in rows for settings in _engine_settings()]  # fmt: skip


def _engines_of(settings: dict[str, Any]) -> tuple[str, ...]:
    """Those whose decays are the setting's; FlashQLA has kernels for heads of 128."""
    if not settings["scalar"]:
        return (KDA_ENGINE,)
    return (GDN_ENGINE, QLA_ENGINE) if settings["dim"] == 128 else (GDN_ENGINE,)


def _decode() -> list[Case]:
    everyone = (VARLEN, FLA_STEP, RECURRENT, OURS)
    cases = [Case(group="decode", lengths=(1,) * batch, partitions=partitions, candidates=everyone, backward=False)
             for partitions in (4, 64) for batch in (64, 1, 8, 256)]  # fmt: skip
    return cases + [Case(group="decode", lengths=(1,) * batch, candidates=(FLA_STEP, RECURRENT, OURS), backward=False,
                         **settings)
                    for batch in (1, 64) for settings in _engine_settings() if not settings["scalar"]]  # fmt: skip


GROUPS = {
    "figure": _figure,
    "decode": _decode,
    "skewed": _skewed,
    "short": _short,
    "shapes": _shapes,
    "models": _models,
    "engines": _engines,
}
SECONDS = {"figure": 290.0, "decode": 50.0, "skewed": 30.0, "short": 30.0, "shapes": 120.0, "models": 420.0,
           "engines": 200.0}  # fmt: skip
"""by group: after so long nothing new starts"""
