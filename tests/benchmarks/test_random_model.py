"""A folder of random weights to train from."""

import json

import pytest

from benchmarks.training import random_model
from tests.surgery.models import save_source


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_source(tmp_path_factory.mktemp("shape") / "teacher", "llama")


@pytest.mark.smoke
def test_a_seed_is_a_model(teacher, tmp_path, capsys):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        made = [str(teacher), "--tokenizer", str(teacher), "--out", str(tmp_path / name), "--seed", str(seed)]
        assert random_model.main(made) == 0
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert random_model.main(made) == 8
    assert "exists" in capsys.readouterr().err


def test_a_vocabulary_too_small_and_a_missing_config_are_refused(teacher, tmp_path, capsys):
    config = json.loads((teacher / "config.json").read_text()) | {"vocab_size": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path, message in ((tmp_path / "config.json", "as large"), (tmp_path / "none", "no config.json")):
        assert random_model.main([str(path), "--tokenizer", str(teacher), "--out", str(tmp_path / "out")]) == 4
        assert message in capsys.readouterr().err
