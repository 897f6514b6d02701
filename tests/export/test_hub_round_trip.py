import torch

from sse_convert.export.export import export_checkpoint
from sse_convert.modeling.auto import load_pretrained
from sse_convert.surgery.job import Job
from tests.elsewhere import beside_hub
from tests.fake_hub import FakeHub

TOKEN = "hf_roundTripSecret0123456789"
PUSH = """
import sys
from sse_convert.export.push import push_folder
print(push_folder(sys.argv[1], sys.argv[2], private=True).url)
"""
LOAD = """
import sys, torch
sys.modules["sse_convert"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("The keeper walked down", return_tensors="pt").input_ids
torch.save((ids, model(ids, use_cache=False).logits.detach()), sys.argv[2])
model.generate(ids, max_new_tokens=4, do_sample=False)
"""


def test_a_pushed_model_loads_from_the_hub_where_sse_convert_is_not_installed(recipe, student_folder, tmp_path):
    out = export_checkpoint(Job.of(recipe), student_folder, tmp_path / "final", shard_bytes=40_000).out
    with FakeHub({TOKEN: "ada"}) as hub:
        for code, arguments in ((PUSH, [out, "ada/tiny-sse"]), (LOAD, ["ada/tiny-sse", tmp_path / "logits.pt"])):
            (tmp_path / "script.py").write_text(code)
            done = beside_hub(["script.py", *arguments], tmp_path, hub.endpoint, HF_TOKEN=TOKEN)
            assert done.code == 0, done.error
            assert TOKEN not in done.out + done.error
        assert hub.repos["ada/tiny-sse"].private
        assert sum(name.endswith(".safetensors") for name in hub.files("ada/tiny-sse")) > 1
    ids, logits = torch.load(tmp_path / "logits.pt")
    with torch.no_grad():
        assert torch.equal(load_pretrained(out)(ids, use_cache=False).logits, logits)
