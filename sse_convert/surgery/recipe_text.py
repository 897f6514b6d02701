"""The text of a new recipe: what the files that were given hold, how many tokens that is, and chats for who chats."""

import dataclasses as dc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.load_model import has_tokenizer, stored_tokenizer
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.console import progress
from sse_convert.data.columns import column_keys, source_keys, text_columns
from sse_convert.data.documents import Document, Encoder
from sse_convert.data.hub_datasets import first_example
from sse_convert.data.rows import is_local, open_files
from sse_convert.data.text_files import BYTES_PER_TOKEN, find_files, passed_over
from sse_convert.errors import DataError, HubError
from sse_convert.recipe.schema import Source

HUB_TRAIN = (
    {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT", "streaming": True, "weight": 0.8},
    {"path": "emozilla/pg19", "streaming": True, "weight": 0.2},
)
"""web pages, and books: documents longer than the context"""
HUB_VALID = ({"path": "Salesforce/wikitext", "name": "wikitext-103-raw-v1", "split": "validation"},)
HUB_CHATS = {"path": "HuggingFaceTB/smoltalk", "name": "all", "kind": "chat", "streaming": True}
"""conversations, some with a system turn, most with several questions"""
CHAT_SHARE = 0.2
"""of rows, beside web pages and books, as recipe smollm2-135m-heads has it"""
TRAIN_SPLITS, HELD_OUT_SPLITS = ("train",), ("validation", "test")
"""of a dataset that is named without one, best first"""
MOST_PASSES = 4
"""over the same text, up to which it teaches nearly as much as new text would (arXiv:2305.16264)"""
SAMPLED = 16
"""stretches of a source that are read to count its tokens"""
ENCODED = 1 << 18
"""characters of these that are tokenized"""
MOST_SOURCES = 16
"""that a folder of several kinds of files becomes"""
_TALK = [
    {"role": role, "content": "Hello." if role == "assistant" else "Say hello."}
    for role in ("system", "user", "assistant", "user", "assistant")
]


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class RecipeText:
    """What a new recipe says of text."""

    train: tuple[dict[str, Any], ...] = HUB_TRAIN
    """sources of training text"""
    valid: tuple[dict[str, Any], ...] = HUB_VALID
    """held-out sources"""
    chats: bool = False
    """there are conversations to train on, of which the model's own turns count"""
    tokens: int | None = None
    """about, of the files given; None without any"""
    share: float = 1.0
    """of all rows, those drawn from these files"""
    held_out: int | None = None
    """tokens of held-out files, about; None where there are others than files"""
    remarks: tuple[str, ...] = ()
    """what the user is told"""

    @property
    def most_tokens(self) -> float:
        """That are worth training on."""
        return float("inf") if self.tokens is None else MOST_PASSES * self.tokens / self.share

    def passes(self, tokens: int) -> float:
        """Over the files given, of so many tokens of training."""
        return 0.0 if not self.tokens else tokens * self.share / self.tokens


WEB_TEXT = RecipeText()
"""web pages and books, measured on Wikipedia"""


def recipe_text(teacher: Teacher, text: Sequence[Path | str], held_out: Sequence[Path | str]) -> RecipeText:
    """Text for a model.

    Args:
        teacher: its tokenizer and chat template are read, where it has them.
        text: files, folders and hub datasets to train on; without any, web pages and books, and chats for who chats.
        held_out: to measure on; without any, samples of the model where `text` is given, else a public set.

    Raises:
        DataError: one is neither here nor a name that a hub could have, or cannot be read by this model.
    """
    reader = _Reader(teacher)
    given, held = reader.given(text, TRAIN_SPLITS), reader.given(held_out, HELD_OUT_SPLITS)
    chats = any(source.get("kind") == "chat" for source in given.sources)
    train, valid = given.sources, held.sources or ({"kind": "teacher"},)
    remarks: list[str] = []
    if not text:
        chats, remarks = reader.talks()
        train = (*_weighted(HUB_TRAIN, 1 - CHAT_SHARE), {**HUB_CHATS, "weight": CHAT_SHARE}) if chats else HUB_TRAIN
    elif reader.template and not chats:
        remarks = ["the model chats, and this text has no conversations (a column messages)"]
    if chats and text and not held_out:
        remarks = ["measured on samples of the model; --held-out CHATS.jsonl measures on conversations"]
    if not text and not held_out:
        valid = (*HUB_VALID, {**HUB_CHATS, "split": "test"}) if chats else HUB_VALID
    return RecipeText(
        train=train,
        valid=valid,
        chats=chats,
        tokens=given.tokens,
        share=given.share,
        held_out=held.tokens if held.share == 1 else None,
        remarks=(*given.remarks, *held.remarks, *remarks),
    )


@dc.dataclass(frozen=True, slots=True)
class _Given:
    """Sources of what was given."""

    sources: tuple[dict[str, Any], ...]
    tokens: int | None
    """of the files among them"""
    share: float
    """of rows, drawn from these files"""
    remarks: tuple[str, ...] = ()
    """what the user is told"""


class _Reader:
    """Reads text as a model would."""

    def __init__(self, teacher: Teacher) -> None:
        tokenizer = stored_tokenizer(teacher.files) if has_tokenizer(teacher.files) else None
        self._encoder = None if tokenizer is None else Encoder(tokenizer, teacher.text.vocab_size)
        self.template = tokenizer is not None and tokenizer.chat_template is not None

    def talks(self) -> tuple[bool, list[str]]:
        """Whether the template takes conversations of any kind, and what to tell where it takes some alone."""
        if not self.template or self._encoder is None:
            return False, []
        try:
            self._encoder.encode([Document(messages=_TALK, where="a conversation of two questions")])
        except DataError as error:
            return False, [f"no public chats, though the model chats: {error.what}. Give your own with --text"]
        return True, []

    def given(self, paths: Sequence[Path | str], splits: Sequence[str]) -> _Given:
        """Files by what they hold, each with its share of their tokens as its weight; hub datasets have weight 1.

        Args:
            paths: of files, folders and hub datasets.
            splits: of a dataset, best first.

        Raises:
            DataError: see `recipe_text`.
        """
        files: list[tuple[dict[str, Any], int]] = []
        others: list[dict[str, Any]] = []
        remarks: list[str] = []
        for path in map(str, paths):
            if not is_local(Source(path=path)):
                others.append({"path": path, "streaming": True})
                try:
                    others[-1] |= self._dataset(path, splits)
                except HubError as error:
                    if "/" in path and Path(path).parent.is_dir():  # a file of it, rather than an owner's dataset
                        raise _absent(path) from error
                    remarks.append(f"{path} is taken for text in a column text, since {error.what}")
                continue
            if not Path(path).expanduser().exists():
                raise _absent(path)
            remarks += passed_over(Path(path))
            files += [(source, self._tokens(Source(**source))) for source in self._sources(path.rstrip("/") or "/")]
        if not files:
            return _Given(tuple(others), None, 1.0, tuple(remarks))
        tokens = sum(count for _, count in files)
        weighted = [_weighted((source,), max(count / tokens, 1e-3))[0] for source, count in files]
        alone = len(files) == 1
        sources = [source for source, _ in files] if alone else weighted
        return _Given((*sources, *others), tokens, 1 / (1 + len(others)), tuple(remarks))

    def _dataset(self, path: str, splits: Sequence[str]) -> dict[str, str]:
        """What a source says of a hub dataset beside its path.

        Raises:
            DataError: the hub has none of the name, or it holds nothing that can be read.
            HubError: the hub cannot be asked.
        """
        with progress(f"asking the hub for {path}", 1):
            named, example = first_example(path, splits)
        return named | column_keys(text_columns(example), f"dataset {path}", chats=self.template)

    def _sources(self, path: str) -> list[dict[str, Any]]:
        """A source for a file or a folder; one for each file of a folder whose files hold different things."""
        files = find_files(Path(path))
        kinds = {str(file): source_keys(file, chats=self.template) for file in files}
        parquet = {file.suffix == ".parquet" for file in files}
        if len(parquet) == 1 and len({tuple(keys.items()) for keys in kinds.values()}) == 1:
            return [{"path": path, **kinds[str(files[0])]}]
        if len(files) > MOST_SOURCES:
            raise DataError(
                f"{path} has {len(files)} files of several kinds",
                expected=f"files of one kind in a folder, or {MOST_SOURCES} files at most",
                fix="put conversations, text and each kind of records into folders of their own, and name them all",
            )
        return [{"path": file, **keys} for file, keys in kinds.items()]

    def _tokens(self, source: Source) -> int:
        """Tokens of files, about: of some stretches of them.

        Raises:
            DataError: they cannot be used.
        """
        corpus = open_files(source, seq_len=1)
        units = corpus.units or 1
        read = sorted({i * (units - 1) // max(1, SAMPLED - 1) for i in range(SAMPLED)})
        documents = [document for unit in read for document in corpus.read(unit)]
        characters = sum(document.characters for document in documents)
        if self._encoder is None or not characters:
            return max(1, characters * units // len(read) // BYTES_PER_TOKEN)
        sample = list(_first(documents, ENCODED))
        encoded = self._encoder.encode(sample)
        per_character = sum(len(one.ids) for one in encoded) / max(1, sum(one.characters for one in sample))
        return max(1, round(per_character * characters * units / len(read)))


def _absent(path: str) -> DataError:
    return DataError(
        f"{path} does not exist",
        expected="a text file, a folder of them, or a hub dataset such as emozilla/pg19",
        fix="correct the path",
    )


def _first(documents: Sequence[Document], characters: int) -> Iterator[Document]:
    """Every so many-th document, so that they come from everywhere, of about so many characters in all."""
    whole = sum(document.characters for document in documents)
    yield from documents[:: max(1, whole // characters)]


def _weighted(sources: Sequence[dict[str, Any]], weight: float) -> tuple[dict[str, Any], ...]:
    """Sources with their weights times a number."""
    return tuple({**source, "weight": float(f"{source.get('weight', 1) * weight:.3g}")} for source in sources)
