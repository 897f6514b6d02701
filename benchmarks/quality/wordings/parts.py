"""What is run: a teacher, which layers stay softmax attention, and what planted rows look like."""

import dataclasses as dc
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from sse_convert.recipe import load_recipe
from sse_convert.recipe.schema import LearningRates

ROOT = Path(__file__).parents[3]
PURE = "recipes/teacher-qwen3-32m-pure.yaml"
KEPT = "recipes/teacher-qwen3-32m.yaml"
LENGTHS = (2048, 8192)
WORDS = "teacher-qwen3-32m/needle_words.json"


@dc.dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher and the wording that it answers."""

    folder: str
    """below the folder of checkpoints"""
    ruler: bool
    """asked in RULER's wording; if not, in that of our own needles"""
    layouts: dict[str, tuple[int, ...]]
    """softmax layers by the name of the layout; `select` are those that `select` chooses, `even` are spread evenly"""


TEACHERS = {
    "qwen": Teacher("teacher-qwen3-32m", False, {"none": (), "blind": (4, 9), "select": (0, 7), "even": (4, 9)}),
    "llama": Teacher("teacher-llama-30m", True, {"none": (), "blind": (2, 8), "select": (0, 4)}),
}
REST = {KEPT: (1.0e-4, 3.0e-5), PURE: (2.0e-4, 8.0e-5)}
"""rates of what is not converted, by recipe and stage, where that is trained"""


@dc.dataclass(frozen=True, slots=True)
class Variant:
    """What is trained, and on what."""

    changes: tuple[str, ...]
    """of the recipe: which rows are planted, where their answers come from, rates where they are others"""
    frozen: bool = False
    """train converted layers alone"""


_ROW = ("data.needles.share=0.45", "data.needles.answers=row")
_TEACHER = ("data.needles.share=0.45", "data.needles.answers=teacher")
_TEXT = ("data.needles.share=0", "stages.1.needle_keys=null")
_FACTS = (
    "data.needles.share=0.9",
    "data.needles.answers=row",
    "data.needles.forms={facts: 2, table: 1}",
    "data.needles.kinds=[number, code]",
)
VARIANTS = {
    "row": Variant(_ROW),
    "teacher": Variant(_TEACHER),
    "facts": Variant(_FACTS),
    "induction": Variant((*_ROW, "data.needles.forms={copy: 4, numbered: 1, table: 1, facts: 2}")),
    "text": Variant(_TEXT),
    "frozen": Variant(_ROW, frozen=True),
    "frozenteacher": Variant(_TEACHER, frozen=True),
    "frozentext": Variant(_TEXT, frozen=True),
    "frozenfacts": Variant(_FACTS, frozen=True),
}
"""by name: answers of planted rows from the row or from the teacher, other weights of their forms, or no such rows"""
RECOMMENDED = ("select", "even")
"""layouts with the recommended mixer beside their softmax layers; the others have one for models without any"""
TOKENS = {"none": 26, "blind": 26, "select": 9, "even": 26, "teacher": 0}
"""training tokens in millions by layout, where a name says nothing else"""
FIRST = 0.6
"""share of them in the first stage"""
CHEAP = 9
"""millions of tokens, for comparisons of variants"""


@dc.dataclass(frozen=True, slots=True)
class Part:
    """One training and its measurement, or with the layout `teacher` what the teacher itself does."""

    teacher: str
    layout: str
    variant: str
    tokens: int
    """training tokens in millions"""

    @property
    def name(self) -> str:
        """For files and folders."""
        pieces = (self.teacher, self.layout, self.variant)
        usual = self.tokens == TOKENS[self.layout]
        return "-".join(pieces[: 2 if self.layout == "teacher" else 3]) + ("" if usual else f"-{self.tokens}M")

    @property
    def stages(self) -> tuple[str, str]:
        """Training tokens of both stages, as recipes write them."""
        first = round(FIRST * self.tokens)
        return f"{first}M", f"{self.tokens - first}M"

    @property
    def samples(self) -> dict[int, int]:
        """Questions of each task by context length; 500 where 99% are to be told from 98%."""
        if self.layout in ("none", "blind") and self.tokens <= CHEAP:
            return {LENGTHS[0]: 128, LENGTHS[1]: 64}
        most = 500 if self.layout in ("select", "teacher") else 200
        return {LENGTHS[0]: most, LENGTHS[1]: most if not TEACHERS[self.teacher].ruler else 100}


def parse(name: str) -> Part:
    """The part of a name such as `qwen-none-row`, `llama-none-row-16M` (of so many training tokens) or `llama-teacher`.

    Raises:
        ValueError: there is none.
    """
    found = re.fullmatch(r"(\w+)-(\w+?)(?:-(\w+?))?(?:-(\d+)M)?", name)
    teacher, layout, variant, tokens = found.groups("") if found else ("", "", "", "")
    if teacher not in TEACHERS or layout not in ("teacher", *TEACHERS[teacher].layouts):
        raise ValueError(f"{name}: expected a teacher of {list(TEACHERS)} and a layout, as in qwen-none-row")
    if layout != "teacher" and variant not in VARIANTS:
        raise ValueError(f"{name}: the variant is {variant!r}, expected one of {', '.join(VARIANTS)}")
    return Part(teacher, layout, variant, int(tokens or TOKENS[layout]))


def all_parts(variants: list[str], *, cheap: bool) -> list[str]:
    """Names of the parts of both teachers: the teacher's own score, then the longest trainings first."""
    layouts = ("none",) if cheap else ("none", "blind", "select")
    trained = [
        "-".join((teacher, layout, variant)) + (f"-{CHEAP}M" if cheap else "")
        for layout, variant, teacher in itertools.product(layouts, variants, TEACHERS)
    ]
    return ["llama-teacher", *trained]


@dc.dataclass(frozen=True, slots=True)
class Place:
    """Folders."""

    checkpoints: Path
    """of both teachers"""
    books: Path
    """with train/ and valid/"""
    model: Path
    """of the part's model"""


def overrides(part: Part, place: Place, samples: dict[int, int]) -> tuple[str, list[str]]:
    """The recipe of a part, and what to change in it; `samples` are questions of each task by context length."""
    teacher = TEACHERS[part.teacher]
    kept = list(teacher.layouts[part.layout])
    most = max(samples.values())
    needle = f"{{lengths: {list(samples)}, samples: {most}, kinds: [number, code], keys: [1, 4, 8]}}"
    recipe, variant = KEPT if part.layout in RECOMMENDED else PURE, VARIANTS[part.variant]
    return str(ROOT / recipe), [
        f"model={place.checkpoints / teacher.folder}",
        f"layers={{pattern: [sse+sliding], keep: {kept}}}",
        f"data.train=[{{path: {place.books}/train}}]",
        f"data.valid=[{{path: {place.books}/valid}}]",
        f"data.needles.words={place.checkpoints / WORDS}",
        *(("data.needles.keys=[1, 8, 32]",) if recipe == KEPT else ()),
        *_trained(recipe, frozen=variant.frozen),
        *variant.changes,
        *(f"stages.{i}.tokens={n}" for i, n in enumerate(part.stages)),
        *(f"stages.{i}.checkpoint_steps=500" for i in range(2)),
        "train.cuda_graphs=true",
        "train.compile=false",  # a minute for each part, which graphs of a small model hardly gain back
        "eval.needle=" + ("null" if teacher.ruler else needle),
        f"export.dir={place.model}",
    ]


def _trained(recipe: str, *, frozen: bool) -> Iterator[str]:
    """Changes that train converted layers alone, or all weights, at the recipe's rates."""
    for i, (stage, rest) in enumerate(zip(load_recipe(ROOT / recipe).stages, REST[recipe], strict=True)):
        assert isinstance(stage.lr, LearningRates)
        rates = {"mixers": stage.lr.mixers, "new": stage.lr.new} | ({} if frozen else {"rest": rest})
        yield f"stages.{i}.train={'mixers' if frozen else 'all'}"
        yield f"stages.{i}.lr={{{', '.join(f'{group}: {rate:.1e}' for group, rate in rates.items())}}}"
