"""Recipe keys of training in groups of their own: early stop, offline teacher, RoPE, guards. Read with `schema.py`."""

import dataclasses as dc
from collections.abc import Iterable
from typing import Literal

from sse_convert.recipe.problems import suggest

ROPE_NOT_BUILT = {
    "dynamic": "its frequencies depend on the longest row seen so far, so a run could not be continued to the bit",
    "longrope": "its factors per dimension come from a search that sse-convert does not do",
}
"""rope types that transformers has and recipes refuse by name"""
_ROPE_KEYS = {
    None: ("rope_theta",),
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "yarn": (
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
    ),
    "llama3": ("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
_ROPE_REQUIRED = {
    None: ("rope_theta",),
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _raise(checks: Iterable[tuple[bool, str]]) -> None:
    """ValueError with the message of every check that holds."""
    if problems := [message for bad, message in checks if bad]:
        raise ValueError("; ".join(problems))


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStop:
    """When an aligned layer has had enough; it is then left as it is, and the stage ends when all have."""

    window: int = 50
    """optimizer steps whose mean relative error is judged"""
    improvement: float | None = 0.01
    """stop when the mean error of a window is not lower than that of the window before by this share; null never"""
    below: float = 0.0
    """stop when the mean error of a window is below this"""

    def __post_init__(self) -> None:
        share = self.improvement
        _raise(
            [
                (self.window < 1, f"window is {self.window}, expected at least 1"),
                (share is not None and not 0 <= share < 1, f"improvement is {share}, expected 0 to less than 1"),
                (self.below < 0, f"below is {self.below}, expected 0 or more"),
                (share is None and self.below == 0, "never stops: set improvement or below"),
            ]
        )


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Offline:
    """The teacher's predictions from a cache on disk: its likeliest tokens, and the mass of all others together."""

    top_k: int = 64
    """tokens kept per position"""
    dtype: Literal["float16", "bfloat16"] = "float16"
    """type of the stored log probabilities; indices are int32"""
    dir: str | None = None
    """folder of the cache; unset means one below the user's cache folder, named by a hash of all its inputs"""

    def __post_init__(self) -> None:
        _raise([(self.top_k < 1, f"top_k is {self.top_k}, expected at least 1")])

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk of one position: log probabilities, int32 indices, the other tokens' log mass in float32."""
        return self.top_k * (2 + 4) + 4


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary embedding of the student from a stage on, in transformers' `rope_parameters`; stored in config.json."""

    rope_type: str | None = None
    """default, linear, yarn or llama3; unset keeps the model's own type"""
    rope_theta: float | None = None
    """base of the frequencies; unset keeps the model's"""
    factor: float | None = None
    """positions the model is stretched to, as a multiple of those it was trained for"""
    original_max_position_embeddings: int | None = None
    """yarn, llama3: positions it was trained for; unset means the model's own number"""
    attention_factor: float | None = None
    """yarn: scale of the attention; unset computes it from factor"""
    beta_fast: float | None = None
    """yarn: rotations from which a dimension is left alone; unset means 32"""
    beta_slow: float | None = None
    """yarn: rotations below which a dimension is interpolated in full; unset means 1"""
    truncate: bool | None = None
    """yarn: round the bounds of the ramp to whole dimensions; unset means true"""
    low_freq_factor: float | None = None
    """llama3: wavelengths above original positions / this are stretched in full"""
    high_freq_factor: float | None = None
    """llama3: wavelengths below original positions / this are left alone"""

    def given(self) -> dict[str, float | int | bool | str]:
        """The keys that are set."""
        return {key: value for key, value in dc.asdict(self).items() if value is not None}

    def __post_init__(self) -> None:
        kind = self.rope_type
        if kind in ROPE_NOT_BUILT:
            raise ValueError(f"rope_type '{kind}' is not offered: {ROPE_NOT_BUILT[kind]} (use yarn, or rope_theta)")
        if kind not in _ROPE_KEYS:
            raise ValueError(
                f"unknown rope_type '{kind}'" + suggest(kind, filter(None, _ROPE_KEYS)).replace(";", ",", 1)
            )
        given, name = self.given().keys() - {"rope_type"}, f"rope_type {kind}" if kind else "without rope_type"
        low, high = self.low_freq_factor or 0.0, self.high_freq_factor or 0.0
        _raise(
            [
                *((True, f"{name} needs {key}") for key in _ROPE_REQUIRED[kind] if key not in given),
                *((True, f"{name} has no {key}, remove it") for key in sorted(given - {*_ROPE_KEYS[kind]})),
                (self.rope_theta is not None and self.rope_theta <= 1, f"rope_theta is {self.rope_theta}, not over 1"),
                (self.factor is not None and self.factor < 1, f"factor is {self.factor}, expected at least 1"),
                (kind == "llama3" and not 0 < low < high, f"low_freq_factor is {low}, high_freq_factor {high}"),
            ]
        )


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Spikes:
    """Steps that are left out: loss or gradient not finite and, with `zscore`, a loss far above the ones before.

    `zscore` is off by default, because on small teachers no limit parted bad steps from good ones. Under `ce` rows of
    another kind of text score as high as steps of random tokens, and left out they would never be learned. Under
    `layer_mse` and `kl` the teacher does not know random tokens either, and they hardly stand out. A step at too large
    a rate shows in the steps after it alone: trained on they heal it, left out it stays and the stage ends. Choose a
    limit by your own losses: with `zscore: 1.0e+9` the metrics have every score, and no step is left out.
    """

    zscore: float | None = None
    """leave out a loss this many robust standard deviations (1.4826 * MAD) above the median; null never does. 20 suits
    stages of ce on text of one kind; no limit is known to suit layer_mse and kl"""
    window: int = 100
    """accepted steps that median and deviation are taken over; nothing is judged before there are as many"""
    in_a_row: int = 10
    """steps left out one after the other after which the stage stops"""
    total: int | None = None
    """steps left out in the whole stage after which it stops; unset means no limit"""

    def __post_init__(self) -> None:
        _raise(
            [
                (self.zscore is not None and self.zscore <= 0, f"zscore is {self.zscore}, expected more than 0"),
                (self.window < 8, f"window is {self.window}, expected at least 8"),
                (self.in_a_row < 1, f"in_a_row is {self.in_a_row}, expected at least 1"),
                (self.total is not None and self.total < 1, f"total is {self.total}, expected at least 1"),
            ]
        )


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Collapse:
    """When a layer's router counts as collapsed: nearly all tokens go to the same partitions."""

    entropy: float = 0.2
    """bound on the load's entropy, which is 0 with all tokens on the same partitions and 1 with an even load"""
    looks: int = 5
    """looks in a row, one every 10 steps, that must find it so"""
    action: Literal["warn", "stop"] = "warn"
    """say so, in metrics and report; or end the stage with an error as well"""

    def __post_init__(self) -> None:
        _raise(
            [
                (not 0 <= self.entropy < 1, f"entropy is {self.entropy}, expected 0 to less than 1"),
                (self.looks < 1, f"looks is {self.looks}, expected at least 1"),
            ]
        )
