import json

import pytest

from sse_convert.recipe.schema import Stage
from sse_convert.surgery.speed import MEASURED, gpu_hours, measured_line, measured_speeds, training_flops
from tests.surgery.test_memory import geometry
from tools.measured_speed import BENCHMARK, packaged


def test_the_package_has_what_the_benchmark_measured():
    assert json.loads(MEASURED.read_text()) == packaged()


def test_hours_are_tokens_by_flops_at_the_measured_speed():
    stage = Stage(name="s", loss="ce", tokens=10**9, seq_len=4096, lr=1e-3)
    measured = measured_speeds()["ce"]
    scale = training_flops(stage, geometry(), [None, None]) / measured.flops_per_token
    expected = 10**9 * scale / measured.tokens_per_second / 3600
    assert gpu_hours(stage, geometry(), [None, None]) == pytest.approx(expected)


def test_the_measurement_is_named():
    assert BENCHMARK in measured_line()
    assert f"{measured_speeds()['kl'].tokens_per_second:,.0f} (kl)" in measured_line()
    assert "Qwen3-0.6B shapes on one NVIDIA H200" in measured_line()
