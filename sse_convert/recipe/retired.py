"""Keys that recipes had, and what to do in their place. Those of mixers stand in `sse_convert.mixers`."""

from sse_convert.mixers import RETIRED as RETIRED_OF_MIXERS

RETIRED = {
    "controls": "run once more with --set layers.pattern=[sliding] --set export.dir=OTHER, and use sse-convert compare",
    "eval.gate": "evaluation.json has the figures and, under verdict, a grade to judge by; remove it",
    "eval.generation": "ask the lm-evaluation-harness, with eval.lm_eval.tasks: [gsm8k] or a task over your own file",
    "eval.ruler": "ask the lm-evaluation-harness for its tasks, with eval.lm_eval.tasks: [niah]",
    "data.separator": 'make a .jsonl file with a line for each document, such as {"text": "..."}',
    "eval.perplexity": "eval.tokens: 0 measures no held-out loss; remove it",
    "export.language": "the card has the languages of the teacher's, and can be edited; remove it",
    "export.max_shard_size": "shards have 5 GB at most; remove it",
    "stages.clip": "gradients of each part have a norm of 1 at most; remove it",
    "stages.teacher": "a stage learns from the recipe's model, the one that is converted; remove it",
    "layers.ratio": "write it as a pattern: {sse: 5, full: 1} is pattern: [sse*5, full]",
    "stages.rope_type": "a factor alone means yarn; remove it",
    "stages.needle_keys": "data.needles.keys counts for every stage, and short rows take as many as fit; remove it",
    "train.backend": "the fastest that this machine has is taken, as `sse-convert doctor` says; remove it",
    "train.keep": "a stage hands on its last weights; where held-out text got worse, lower its tokens or lr; remove it",
    "train.lora": "write train.lora_rank for its rank; alpha is twice that, and all linear modules get an adapter",
    "train.trackers": "metrics.jsonl and the card of the model have the figures of every step; remove it",
}
"""section and key -> what to do"""
RETIRED_FORMS = ("chain", "copy", "quote", "questions")
"""of planted rows; recipes that plant none were written out with them"""
DEFAULTS = {
    **RETIRED_OF_MIXERS,
    "backend": "auto",
    "max_shard_size": "5GB",
    "controls": [],
    "generation": None,
    "perplexity": True,
    "ratio": None,
    "clip": 1.0,
    "teacher": None,
    "keep": "last",
    "needle_keys": None,
    "lora": {"rank": 16, "alpha": 32.0, "targets": None},
}
"""what keys were where nobody set them: a run that began with them goes on, and its recipe is read"""
