"""What brings lost needles back, in miniature."""

import json

import pytest
import torch

from benchmarks.quality import lost_needles
from benchmarks.quality.lost_needles import CHANGES, Places, Watch, places
from sse_convert import api
from sse_convert.checkpoints.load_model import load_model
from sse_convert.data.needle import NeedleSample
from sse_convert.recipe import load_recipe

NEEDLE = json.dumps({"lengths": [256], "samples": 5, "kinds": ["number"], "keys": [1]})
_ADVANCED = {"router": "keys", "balance": "none", "shared_partition": False, "decay_params": "shared",
             "gate": {"renormalise": True}}  # fmt: skip
BY_KEYS = {"num_partitions": 4, "top_k": 2, "qk_rank": 0, "advanced": _ADVANCED}
CHANGED = ["layers.pattern=[sse, full, full, full]", f"eval.needle={NEEDLE}"]
AT = Places(value=slice(100, 104), answer=slice(251, 255), tokens=256)


@pytest.fixture(scope="module", params=[None, BY_KEYS], ids=["one choice", "keys choose"])
def hybrid(request, given, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost") / "hybrid"
    own = [] if request.param is None else [f"mixers.sse={json.dumps(request.param)}"]
    changes = [*CHANGED, *own]
    api.convert(load_recipe(given, changes), folder)
    return folder, [part for change in changes for part in ("--set", change)]


@pytest.mark.smoke
def test_every_kind_of_needle_is_looked_at(given, hybrid, tmp_path):
    folder, changes = hybrid
    out = tmp_path / "lost.json"
    assert lost_needles.main([str(folder), "--recipe", str(given), *changes, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    (part,) = report["parts"]
    assert report["settings"]["layer"] == 0
    assert (part["samples"], part["kind"], part["keys"], part["length"]) == (5, "number", 1, 256)
    assert part["found"].keys() == part["brought_back"].keys() == CHANGES.keys()
    assert part["brought_back"]["as it is"] == 0
    assert sum(part["first_wrong"].values()) == 5
    lost = 5 - part["found"]["as it is"]["correct"]
    assert (part["read"]["lost"] is None) == (lost == 0)


def test_a_layer_that_stays_softmax_is_refused(given, hybrid, tmp_path, capsys):
    folder, changes = hybrid
    asked = [str(folder), "--recipe", str(given), *changes, "--out", str(tmp_path / "lost.json"), "--layer", "1"]
    assert lost_needles.main(asked) == 2
    assert "--layer 1" in capsys.readouterr().err


def test_the_fact_is_where_the_answer_stands_last():
    row = (5, 6, 9, 9, 7, 8, 9, 9, 3, 4, 9, 9)
    found = places(NeedleSample(kind="number", keys=1, depth=0.0, token_ids=row, answer_len=2))
    assert found == Places(value=slice(6, 8), answer=slice(9, 11), tokens=12)
    with pytest.raises(ValueError, match="no fact"):
        places(NeedleSample(kind="number", keys=1, depth=0.0, token_ids=(1, 2, 3), answer_len=1))


@torch.no_grad()
def test_each_change_does_what_it_says(hybrid):
    """What was written far away is gone when nothing else is written; states keep it when nothing fades."""
    model = load_model(hybrid[0], device="cpu", dtype=torch.float32)
    _, layer = lost_needles.recurrent_layer(model, None)
    ids = torch.arange(256)[None] % 90 + 3
    other = ids.clone()
    other[:, 20:40] = 5  # neither fact nor question
    read = {}
    for name, change in CHANGES.items():
        watch = Watch(layer)
        with watch.changing(change, AT):
            read[name] = [_output(model, layer, rows)[-1] for rows in (ids, other)]
    assert not torch.allclose(*read["as it is"])
    assert not torch.allclose(*read["no decay"])
    torch.testing.assert_close(*read["nothing else written"])
    assert not torch.allclose(read["reads all"][0], read["as it is"][0])
    assert not torch.allclose(read["no decay"][0], read["as it is"][0])
    assert not torch.allclose(read["nothing else written"][0], read["as it is"][0])


@torch.no_grad()
def test_partitions_are_counted(hybrid):
    """A row of one token over and over: all its writes are in the same partitions, and all of them are read."""
    model = load_model(hybrid[0], device="cpu", dtype=torch.float32)
    _, layer = lost_needles.recurrent_layer(model, None)
    watch = Watch(layer)
    with watch.changing(CHANGES["as it is"], AT):
        model(torch.full((1, 256), 7))
    assert watch.crowd(AT) == pytest.approx(layer.mixer.num_partitions / layer.mixer.top_k)
    if layer.mixer.router != "keys":
        assert watch.share_read(AT) == 1


def _output(model, layer, rows):
    kept = []
    handle = layer.register_forward_hook(lambda module, args, output: kept.append(output[0][0]))
    model(rows)
    handle.remove()
    return kept[0]
