"""A converted model runs without the libraries that make models, and the operator with torch alone."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from tests.modeling.tiny import LAYOUT, tiny_model

ROOT = Path(__file__).parents[1]
PROMPTS = [[5, 6, 7, 8, 9], [0, 0, 0, 12, 13]]
ALONE = [PROMPTS[0], PROMPTS[1][3:]]
RUNNING = f"""
import json, sys
from importlib.machinery import PathFinder

MAKING = {{"typer", "rich", "datasets", "accelerate", "peft", "matplotlib", "jinja2"}}

class Without(PathFinder):
    missing = MAKING | {{"transformers", "safetensors", "yaml"}}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.missing else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without

import torch
from sse_convert.kernels.dispatch import sse_attention
x = torch.ones(5, 2, 8)
o, _ = sse_attention(x, x, x, -x, torch.ones(5, 4), top_k=1)
assert o.isfinite().all()

Without.missing = MAKING  # yaml is transformers' own
import sse_convert
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
mask = [[1] * 5, [0] * 3 + [1] * 2]
inputs = dict(attention_mask=torch.tensor(mask), do_sample=False, max_new_tokens=4, pad_token_id=0)
print(json.dumps(model.generate(torch.tensor({PROMPTS}), **inputs).tolist()))
assert not MAKING & sys.modules.keys()
"""


def test_a_model_loads_and_generates_without_what_makes_models(tmp_path):
    """Padded rows, through the cache. Its own process is the one place that has not imported the others yet."""
    model = tiny_model("qwen3", LAYOUT)
    model.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RUNNING, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    alone = [model.generate(torch.tensor([row]), do_sample=False, max_new_tokens=4, pad_token_id=0) for row in ALONE]
    assert [row[-4:] for row in json.loads(done.stdout)] == [row[0, -4:].tolist() for row in alone]
