"""Memory does not grow with the model: peak resident memory of whole processes, as Linux counts it."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import large
from docs import warm
from sse_convert import api
from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.checkpoints.safetensors_io import ITEM_BYTES
from sse_convert.surgery.inspect import inspect_checkpoint
from tests.model_configs import model_config
from tests.surgery import models, synthetic

GB = 10**9
QWEN3 = model_config("qwen3-0.6b")
COMMAND = """
import re
from pathlib import Path
from sse_convert.cli.app import main
try:
    main()
finally:
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
    Path("peak").write_text(peak)
"""
"""VmHWM begins with what the process was forked from: the imported libraries, which it would have itself"""
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def stored_bytes(layout):
    return sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in layout.values())


def measured(folder: Path, *arguments: str | Path) -> tuple[dict[str, Any], float]:
    """Run a command in a process of its own: its result, and its peak resident memory in GB."""
    (folder / "command.py").write_text(COMMAND)
    out, error = folder / "out.json", folder / "err.txt"
    out.write_text("")
    code = warm.run(["command.py", *map(str, arguments), "--json"], folder, os.environ, out, error, timeout=300)
    assert code == 0, out.read_text() + error.read_text()
    return json.loads(out.read_text())["result"], int((folder / "peak").read_text()) * 1024 / GB


@pytest.mark.slow
def test_a_large_checkpoint_in_many_shards(tmp_path):
    """8 billion parameters, 16 GB in 8 sparse files: planned and converted in under 1 GB of memory."""
    config = {**synthetic.LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 8192}
    layout = synthetic.llama_layout(config)
    assert stored_bytes(layout) > 16 * GB
    source = synthetic.checkpoint(tmp_path / "teacher", config, shards=8)
    recipe = models.recipe_file(tmp_path / "r.yaml", source)
    plan, planning = measured(tmp_path, "plan", recipe)
    report, converting = measured(
        tmp_path, "convert", recipe, "-o", tmp_path / "out", "--link", "hard", "--defer-digests"
    )
    assert planning < 1
    assert converting < 1
    assert (len(plan["layers"]), len(report["teacher_shards"])) == (32, 8)
    made = open_checkpoint(tmp_path / "out")
    assert made.parameters == plan["parameters"] + plan["added_parameters"]
    assert {name: info for name, info in made.headers.items() if name in layout} == layout


def test_seventy_billion_parameters_as_measured():
    """What benchmarks/checkpoints/large.py found: plan in under 3 s and convert in seconds, both under 1 GB."""
    found = json.loads((Path(large.__file__).parent / "large.json").read_text())
    assert found["parameters"] == 70_553_706_496
    plan, convert = found["commands"]["plan"], found["commands"]["convert"]
    assert max(plan["peak_rss_gb"], convert["peak_rss_gb"]) < 1
    assert plan["cpu_seconds_after_imports"] < 3
    assert convert["cpu_seconds"] < 10


@pytest.mark.experiment
def test_the_measurement_of_seventy_billion_parameters_at_toy_size(tmp_path):
    toy = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 8}
    found = large.measure(tmp_path, {**toy, "vocab_size": 128}, shards=3)
    assert found["shards"] == 3
    assert found["added_parameters"] > 0
    assert all(cost["peak_rss_gb"] < 1 for cost in found["commands"].values())
    assert len(list((tmp_path / "converted").glob("model-*.safetensors"))) == 3


@pytest.mark.experiment
def test_streaming_all_weights_takes_no_more_memory(tmp_path):
    """One of the tensors is larger than the limit by itself."""
    config = {
        **synthetic.LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "vocab_size": 300_000,
    }
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True}
    layout = synthetic.llama_layout(config)
    assert stored_bytes({"embedding": layout["model.embed_tokens.weight"]}) > 1.2 * GB
    source = synthetic.checkpoint(tmp_path / "teacher", config, shards=3)
    recipe = models.recipe_file(tmp_path / "r.yaml", source)
    report, converting = measured(tmp_path, "convert", recipe, "-o", tmp_path / "out", "--check")
    assert report["checked"]
    _, verifying = measured(tmp_path, "verify", tmp_path / "out")
    _, exporting = measured(tmp_path, "export", recipe, "-c", tmp_path / "out", "-o", tmp_path / "final")
    assert max(converting, verifying, exporting) < 1


@pytest.mark.slow
def test_true_shapes_of_qwen3(tmp_path):
    """Qwen3-0.6B as published, with weights of zero, by the packaged recipe's pattern."""
    layout = synthetic.llama_layout(QWEN3)
    source = synthetic.checkpoint(tmp_path / "teacher", QWEN3, layout=layout)
    mixers = {"sse": {"kind": "sse"}, "sliding": {"kind": "sliding"}}
    layers = {"pattern": ["sse", "sliding", "sse", "sliding", "full"], "keep": [0, -1]}
    recipe = models.recipe_file(tmp_path / "r.yaml", source, mixers=mixers, layers=layers)
    plan = api.plan(recipe)
    assert plan.parameters == 596_049_920
    report = api.convert(recipe, tmp_path / "out", link="hard", defer_digests=True)
    assert report.added_parameters == plan.added_parameters
    found = inspect_checkpoint(tmp_path / "out")
    assert found.layers == [row.mixer for row in plan.layers]
    assert found.parameters == plan.parameters + plan.added_parameters
