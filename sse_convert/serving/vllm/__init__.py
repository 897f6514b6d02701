"""The plugin that lets vLLM serve converted models: vLLM finds `register_plugin` by its entry point."""

import logging

TESTED = ("0.32", "0.33")
"""versions of vLLM that the tests ran with; others are tried with a word of warning"""

_log = logging.getLogger(__name__)


def register_plugin() -> None:
    """Tell vLLM of converted models; in each of its processes, any number of times.

    Whatever fails here must not keep vLLM from serving other models, so it is said and left: converted models are then
    refused by vLLM itself, as architectures that it does not know.
    """
    try:
        import vllm

        from sse_convert.serving.vllm.families import register_families

        if not vllm.__version__.startswith(tuple(f"{version}." for version in TESTED)):
            _log.warning("sse-convert was tested with vLLM %s, this is %s", " and ".join(TESTED), vllm.__version__)
        register_families()
    except Exception as error:  # another vLLM lacks modules, classes or fields that we ask for
        _log.warning(
            "sse-convert cannot serve with this vLLM: %r; it was tested with vLLM %s", error, " and ".join(TESTED)
        )
