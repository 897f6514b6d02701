"""The needles that a recipe's evaluation asks for, without the rest of it."""

import dataclasses as dc
from collections.abc import Sequence

from sse_convert.checkpoints.load_model import load_tokenizer
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.data.needle import NeedleSample
from sse_convert.evaluation.tasks import make_tasks
from sse_convert.recipe import Recipe


def needle_rows(recipe: Recipe) -> Sequence[Sequence[NeedleSample]]:
    """Rows of `eval.needle`: a list for each length, kind and number of keys.

    Raises:
        DataError: needles do not fit a length, or the text is too short.
    """
    alone = dc.replace(recipe.eval, perplexity=False, ruler=None, generation=None, lm_eval=None, tokens=1)
    vocabulary = open_teacher(recipe.model, recipe.revision).text.vocab_size
    return make_tasks(dc.replace(recipe, eval=alone), load_tokenizer(recipe.model, recipe.revision), vocabulary).needles
