"""Whether two models have the same tokens, so that one can learn from the other's predictions."""

from typing import Any

from sse_convert.checkpoints.load_model import stored_tokenizer
from sse_convert.checkpoints.open import CheckpointFiles
from sse_convert.errors import RecipeError
from sse_convert.recipe.problems import shortened

_FILES = ("tokenizer.json", "tokenizer_config.json")


def has_tokenizer(files: CheckpointFiles) -> bool:
    """Whether a tokenizer lies beside the config; a hub's small files have it before the weights are there."""
    return any((files.folder / name).is_file() for name in _FILES)


def check_same_tokens(model: CheckpointFiles, teacher: CheckpointFiles, stage: str) -> None:
    """Make sure that each token has the same id in both tokenizers. Padding of the embedding plays no part.

    Args:
        model: the model that learns.
        teacher: the one that it learns from.
        stage: name, for the message.

    Raises:
        RecipeError: names the first id that differs.
        CheckpointError: one of them has no tokenizer that loads.
    """
    own, theirs = (_tokens(stored_tokenizer(files)) for files in (model, teacher))
    different = [index for index in own.keys() | theirs.keys() if own.get(index) != theirs.get(index)]
    if not different:
        return
    first = min(different)
    raise RecipeError(
        f"stage {stage}: token {first} is {_named(own.get(first))} for {model.name}, {_named(theirs.get(first))} for "
        f"its teacher {teacher.name} ({len(different):,} tokens differ of {len(own):,} and {len(theirs):,})",
        expected="a teacher with the same tokens under the same ids, as models of one family mostly have",
        fix=f"name another teacher, or remove it: the stage then learns from {model.name} itself",
    )


def _tokens(tokenizer: Any) -> dict[int, str]:
    """Id -> token, added ones among them."""
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _named(token: str | None) -> str:
    return "no token" if token is None else shortened(repr(token))
