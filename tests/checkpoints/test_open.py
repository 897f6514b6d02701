import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import torch

from sse_convert.checkpoints.open import INDEX, open_checkpoint
from sse_convert.checkpoints.tensor_data import TORCH_DTYPES
from sse_convert.checkpoints.weights import check_weights
from sse_convert.errors import CheckpointError
from tests.surgery import synthetic


@pytest.mark.parametrize("shards", [1, 3])
def test_headers_of_a_local_checkpoint(tmp_path, shards):
    folder = synthetic.checkpoint(tmp_path / "m", shards=shards)
    files = open_checkpoint(folder)
    assert files.headers == synthetic.llama_layout(synthetic.LLAMA)
    assert len(files.shard_bytes) == shards
    assert set(files.index.values()) == set(files.shard_bytes)
    assert files.parameters == sum(info.numel for info in files.tensors.values())
    assert not files.remote


def test_opening_does_not_import_torch(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m", shards=2)
    code = (
        "import sys\n"
        "from sse_convert.checkpoints.open import open_checkpoint\n"
        f"open_checkpoint({str(folder)!r})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_model_safetensors_wins_over_an_index(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"gone": "gone.safetensors"}}))
    assert open_checkpoint(folder).shard_bytes.keys() == {"model.safetensors"}


def test_folder_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"checkpoint folder .*nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")


def test_the_result_of_a_run_that_goes_on(tmp_path, monkeypatch):
    """Not taken for the name of a repository, though it looks like one."""
    (tmp_path / "out" / "hybrid.stages").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"out/hybrid does not exist yet: .* not come to its end"):
        open_checkpoint("out/hybrid")


def test_file_instead_of_folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_no_config(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]"])
def test_damaged_config(tmp_path, content):
    folder = synthetic.checkpoint(tmp_path / "m")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json (cannot be read|is not a JSON object)"):
        open_checkpoint(folder)


def test_no_model_type(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m")
    synthetic.edit_config(folder, model_type=None)
    with pytest.raises(CheckpointError, match="has no model_type"):
        open_checkpoint(folder)


def test_no_weights(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(folder)


def test_missing_shard(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 3 shards: model-00002-of-00003"):
        open_checkpoint(folder)


def test_truncated_shard(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m", shards=2)
    with (folder / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is truncated: 5000 bytes"):
        open_checkpoint(folder)


def change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_index_names_an_absent_tensor(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m", shards=2)
    change_index(folder, lambda m: m.update({"model.layers.9.x": "model-00001-of-00002.safetensors"}))
    with pytest.raises(CheckpointError, match=r"says tensor model\.layers\.9\.x is in .*, which does not hold it"):
        open_checkpoint(folder)


def test_index_lacks_a_tensor(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m", shards=2)
    change_index(folder, lambda m: m.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor that the shards hold: model\.norm\.weight"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_unusable_index(tmp_path, content):
    folder = synthetic.checkpoint(tmp_path / "m", shards=2)
    (folder / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="no usable weight_map"):
        open_checkpoint(folder)


def test_an_index_whose_metadata_is_no_object(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m", shards=2)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "metadata": []}))
    with pytest.raises(CheckpointError, match=r"index\.json: metadata is \[\]"):
        open_checkpoint(folder)


def test_empty_index(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m", shards=2)
    (folder / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="names no tensors"):
        open_checkpoint(folder)


def test_tensor_in_two_shards(tmp_path):
    folder = synthetic.checkpoint(tmp_path / "m", shards=2)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "copy.safetensors")
    change_index(folder, lambda m: m.update({"extra": "copy.safetensors"}))
    with pytest.raises(CheckpointError, match="is in two shards"):
        open_checkpoint(folder)


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_pickles_are_refused(tmp_path, capsys):
    folder = synthetic.checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save({"a": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"weights as pickles \(pytorch_model\.bin\)") as error:
        open_checkpoint(folder)
    assert "save_pretrained" in error.value.fix
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("F32", "nan"), ("BF16", "nan"), ("F16", "nan"), ("F64", "nan"), ("BF16", "inf"), ("F16", "-inf")],
)
def test_nan_and_inf_are_found(tmp_path, dtype, value):
    layout = synthetic.llama_layout(synthetic.LLAMA, dtype)
    folder = synthetic.checkpoint(tmp_path / "m", shards=2, layout=layout)
    expected = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
    assert check_weights(open_checkpoint(folder)) == expected
    info = open_checkpoint(folder).tensors["model.layers.1.mlp.up_proj.weight"]
    bad = torch.tensor([float(value)] * 2, dtype=TORCH_DTYPES[dtype])
    with (folder / info.shard).open("r+b") as file:
        file.seek(info.start)
        file.write(bad.view(torch.uint8).numpy().tobytes())
    with pytest.raises(
        CheckpointError, match=r"NaN or Inf weights: model\.layers\.1\.mlp\.up_proj\.weight \(2 of 1536\)"
    ):
        check_weights(open_checkpoint(folder))
