"""Memory does not grow with the model: peak resident memory of whole processes, as Linux counts it.

Read from VmHWM, which starts anew with a program; ru_maxrss begins with what the parent process had when it forked.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.checkpoints.safetensors_io import ITEM_BYTES
from sse_convert.surgery.inspect import inspect_checkpoint
from tests.surgery import models, synthetic

GB = 10**9
QWEN3 = json.loads((Path(__file__).parent.parent / "fixtures/configs/qwen3-0.6b.json").read_text())
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
RUN = """
import re, sys
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
code = run_app(app, sys.argv[1:])
status = open("/proc/self/status").read()
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024, file=sys.stderr)
sys.exit(code)
"""


def run(*arguments):
    """The result of a command in its own process, and the bytes of memory it took at its peak."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    peak = int(done.stderr.splitlines()[-1])
    print(f"{arguments[0]}: {peak / GB:.2f} GB")
    return json.loads(done.stdout)["result"], peak


def stored_bytes(layout):
    return sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in layout.values())


@pytest.mark.slow
def test_a_large_checkpoint_in_many_shards(tmp_path):
    """8 billion parameters, 16 GB in 8 sparse files: planned, converted and checked in under 1 GB of memory."""
    config = {**synthetic.LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 8192}
    layout = synthetic.llama_layout(config)
    assert stored_bytes(layout) > 16 * GB
    source = synthetic.checkpoint(tmp_path / "teacher", config, shards=8)
    recipe = models.recipe_file(tmp_path / "r.yaml", source)
    plan, planning = run("plan", recipe)
    report, converting = run("convert", recipe, "-o", tmp_path / "out")
    assert planning < GB
    assert converting < GB
    assert (len(plan["layers"]), len(report["teacher_shards"])) == (32, 8)
    made = open_checkpoint(tmp_path / "out")
    assert made.parameters == plan["parameters"] + plan["added_parameters"]
    assert {name: info for name, info in made.headers.items() if name in layout} == layout


@pytest.mark.slow
def test_streaming_all_weights_takes_no_more_memory(tmp_path):
    """One of the tensors is larger than the limit by itself."""
    config = {
        **synthetic.LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "vocab_size": 300_000,
    }
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True}
    layout = synthetic.llama_layout(config)
    assert stored_bytes({"embedding": layout["model.embed_tokens.weight"]}) > 1.2 * GB
    source = synthetic.checkpoint(tmp_path / "teacher", config, shards=3)
    recipe = models.recipe_file(tmp_path / "r.yaml", source)
    report, peak = run("convert", recipe, "-o", tmp_path / "out", "--check")
    assert report["checked"]
    assert peak < GB


@pytest.mark.slow
def test_true_shapes_of_qwen3(tmp_path):
    """Qwen3-0.6B as published, with weights of zero, by the packaged recipe's pattern."""
    layout = synthetic.llama_layout(QWEN3)
    source = synthetic.checkpoint(tmp_path / "teacher", QWEN3, layout=layout)
    mixers = {"sse": {"kind": "sse"}, "sliding": {"kind": "sliding"}}
    layers = {"pattern": ["sse", "sliding", "sse", "sliding", "full"], "keep": [0, -1]}
    recipe = models.recipe_file(tmp_path / "r.yaml", source, mixers=mixers, layers=layers)
    plan, planning = run("plan", recipe)
    assert plan["parameters"] == 596_049_920
    report, converting = run("convert", recipe, "-o", tmp_path / "out")
    assert max(planning, converting) < GB
    assert report["added_parameters"] == plan["added_parameters"]
    found = inspect_checkpoint(tmp_path / "out")
    assert found.layers == [row["mixer"] for row in plan["layers"]]
    assert found.parameters == plan["parameters"] + plan["added_parameters"]
