"""What a stage's losses say."""

import random

import pytest

from sse_convert.training.stage_report import StageReport, rises


def noisy(start, end, steps=40, noise=0.05, seed=0):
    rng = random.Random(seed)
    return [start + (end - start) * i / (steps - 1) + rng.gauss(0, noise) for i in range(steps)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (noisy(3.0, 2.5), False),
        (noisy(3.0, 4.0), True),
        ([2.9 * 1.4**i for i in range(20)], True),
        (noisy(3.0, 2.5)[:-3] + [900.0] * 3, True),
        ([3.0, 9.0], False),
        ([], False),
    ],
)
def test_a_loss_that_ends_above_its_start_is_seen(losses, expected):
    assert rises(losses) is expected


def test_noise_alone_is_rarely_taken_for_a_rise():
    taken = sum(rises(noisy(3.0, 3.0, seed=seed)) for seed in range(400))
    assert taken < 0.05 * 400  # 2 standard deviations, one side: 2.3% and the noise of the estimate


def report(**settings):
    plain = {"name": "distill", "loss": "kl", "out": "out", "steps": 40, "tokens": 4000, "skipped_steps": 0}
    figures = {"loss_first": 3.0, "loss_last": 2.0, "seconds": 1.0, "text_passes": [0], "details": {}}
    return StageReport(**plain | figures | settings)


def test_warnings_are_lines_of_the_report():
    assert report().warnings() == []
    assert report(rose=True).lines()[1] == (
        "warning: distill: the loss ended above its start; lower lr, or lengthen the warmup"
    )
    looks = {name: {"step": 1, "value": 0.02} for name in ("first", "last", "best")}
    judged = report(rose=True, held_out={"judged": "kl", **looks})
    assert judged.warnings() == []  # held-out text judges where there is any
    assert report(steps=10).warnings() == []
    assert "hardly trained by 9 steps" in report(steps=9).lines()[1]
    assert report(steps=0, loss_first=None, loss_last=None).warnings() == []
