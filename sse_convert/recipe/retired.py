"""Keys that recipes had, and what to do in their place. Those of mixers stand in `sse_convert.mixers`."""

RETIRED = {
    "eval.ruler": "ask the lm-evaluation-harness for its tasks, with eval.lm_eval.tasks: [niah]",
    "data.separator": 'make a .jsonl file with a line for each document, such as {"text": "..."}',
    "export.max_shard_size": "shards have 5 GB at most; remove it",
    "train.trackers": "metrics.jsonl and the page of `sse-convert report` have the figures of every step; remove it",
}
"""section and key -> what to do"""
