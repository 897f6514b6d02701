"""A stage may begin with a converted checkpoint of the hub."""

import pickle

from tests.elsewhere import beside_hub
from tests.fake_hub import FakeHub
from tests.training.conftest import recipe_for

TOKEN = "hf_stageSecret0123456789"
TRAIN = """
import pickle, sys
from pathlib import Path
from sse_convert import api
from sse_convert.export.push import push_folder
from sse_convert.export.export import export_checkpoint
from sse_convert.surgery.job import Job
recipe = pickle.loads(Path(sys.argv[1]).read_bytes())
push_folder(export_checkpoint(Job.of(recipe), sys.argv[2], Path("final")).out, "ada/tiny-sse")
print(api.uptrain(recipe, "ada/tiny-sse", "trained").tokens)
"""


def test_a_stage_begins_with_a_checkpoint_of_the_hub(teacher_folder, text_folder, converted, tmp_path):
    stages = [("uptrain", {"tokens": 128})]
    recipe = recipe_for(teacher_folder, text_folder, tmp_path / "out", stages=stages)
    (tmp_path / "recipe.pickle").write_bytes(pickle.dumps(recipe))
    (tmp_path / "script.py").write_text(TRAIN)
    with FakeHub({TOKEN: "ada"}) as hub:
        done = beside_hub(["script.py", "recipe.pickle", converted], tmp_path, hub.endpoint, HF_TOKEN=TOKEN)
    assert done.code == 0, done.error
    assert done.out.endswith("128\n")
    assert (tmp_path / "trained" / "model.safetensors").is_file()
