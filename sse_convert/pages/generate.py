"""Texts of the teacher, the untrained conversion and the result from the same prompts, kept in the run."""

from collections.abc import Sequence

from sse_convert.errors import UsageError
from sse_convert.files import check_writable, write_json
from sse_convert.pages.collect import SAMPLES_FILE, SAMPLES_SCHEMA, STUDENT, UNTRAINED, UNTRAINED_LABEL, Run


def make_samples(run: Run, prompts: Sequence[str], *, max_new_tokens: int, device: str | None) -> None:
    """Continue each prompt with each model, greedily, and write `samples.json` into the run; an older one is replaced.

    Args:
        run: with a recipe and a checkpoint.
        prompts: texts to continue.
        max_new_tokens: of each continuation.
        device: unset picks the accelerator, or the CPU.

    Raises:
        UsageError: an empty prompt, one that does not fit the context, or a run without a checkpoint.
        CheckpointError, HubError, HardwareError: a model cannot be loaded.
        OutputError: the file cannot be written.
    """
    if run.model is None or run.recipe is None:
        raise UsageError(f"{run.out} has no converted checkpoint yet", expected="one, to generate texts with")
    check_writable(run.root / SAMPLES_FILE)
    from sse_convert.inference.generate import generate_text
    from sse_convert.inference.sampling import Sampling

    sampling = Sampling(max_new_tokens=max_new_tokens)
    models = _models(run)
    texts = [
        [generate_text(source, prompt, sampling=sampling, device=device).text for _, source in models]
        for prompt in prompts
    ]
    data = {
        "schema": SAMPLES_SCHEMA,
        "max_new_tokens": max_new_tokens,
        "models": [{"label": label, "source": source} for label, source in models],
        "samples": [{"prompt": prompt, "texts": found} for prompt, found in zip(prompts, texts, strict=True)],
    }
    write_json(run.root / SAMPLES_FILE, data)


def _models(run: Run) -> list[tuple[str, str]]:
    """Labels and checkpoints: the teacher, what training started from, the newest checkpoint."""
    assert run.model is not None
    assert run.recipe is not None
    untrained = [step.folder for step in run.steps if step.name in UNTRAINED and step.record is not None]
    found = [("teacher", str(run.recipe["model"]))]
    if untrained and run.trained:
        found.append((UNTRAINED_LABEL, str(untrained[-1])))
    return [*found, (STUDENT, run.model.name)]
