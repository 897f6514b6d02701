"""Keys that recipes had, and what to do in their place. Those of mixers stand in `sse_convert.mixers`."""

RETIRED = {
    "eval.ruler": "ask the lm-evaluation-harness for its tasks, with eval.lm_eval.tasks: [niah]",
}
"""section and key -> what to do"""
