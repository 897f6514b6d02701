"""Checkpoints that 38ccf3a exported keep their meaning: same results today, by the code that travels with them and
after saving again; keys that a config omits mean what they meant then; what is no longer offered is refused by name.
"""

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sse_convert import api
from sse_convert.errors import CheckpointError, RecipeError
from tests.elsewhere import without_package
from tools.model_outputs import compute

FIXTURES = Path(__file__).parents[1] / "fixtures" / "exported_0_1"
TOOLS = Path(__file__).parents[2] / "tools"
KEPT = ("sse", "windows", "baselines", "delta")
"""fixtures with every key that was retired at its old default: every version has to load them"""
SETTINGS = {
    "paper-settings": (),
    "rare-settings": (),
    "qk_rank_on": ("qk_rank_on",),
    "decay_rank": ("decay_rank",),
    "decay_normalizer": ("decay_normalizer",),
    "output_norm": ("output_norm",),
}
DROPS_WINDOWS = "rare-settings"
"""the fixture with branch_dropout, which only training read and which was retired: it trains otherwise"""
WITHOUT_TRAINING = ("padded", "packed", "tokens", "generated")
ALL = (*KEPT, *SETTINGS)
Results = dict[str, Tensor]
BY_TRANSFORMERS = "qk_rank_on"
"""the fixture that is loaded as a user would, with trust_remote_code; the others share one import of the same code"""
OWN_CODE = """
import importlib, inspect, json
from pathlib import Path
from safetensors.torch import save_file
from transformers.masking_utils import create_causal_mask
knows_caches = "past_key_values" in inspect.signature(create_causal_mask).parameters
sys.path[:0] = [".", sys.argv[1]]
from model_outputs import compute
code = importlib.import_module("exported_code.modeling_sse")
for folder in sys.argv[2:]:
    config = json.loads(Path(folder, "config.json").read_text())
    if Path(folder, "modeling_sse.py").exists():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules."), type(model)
    else:
        model = getattr(code, config["architectures"][0]).from_pretrained(folder, dtype=torch.float32)
        assert type(model).__module__.startswith("exported_code."), type(model)
    model.config.use_cache = model.generation_config.use_cache = knows_caches
    results = compute(model.eval())
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, f"{folder}.safetensors")
assert "sse_convert" not in sys.modules
"""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the process that runs the exported code: the number of threads decides the order of some sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def own_code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """What each fixture computes here, in a process without sse_convert, by the code that was exported with it."""
    folder = tmp_path_factory.mktemp("own-code")
    for name in ALL:
        shutil.copytree(FIXTURES / name, folder / name)
    with tarfile.open(FIXTURES / "code.tar.xz") as code:
        for place in (BY_TRANSFORMERS, "exported_code"):
            code.extractall(folder / place, filter="data")
    without_package(OWN_CODE, folder, str(TOOLS), *ALL)
    return {name: load_file(folder / f"{name}.safetensors") for name in ALL}


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """Makes copies of a fixture with other settings of its mixers."""

    def make(name: str, mixers: dict[str, dict[str, Any]]) -> Path:
        folder = shutil.copytree(FIXTURES / name, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        config["sse"]["mixers"] = mixers
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def stored_mixers(name: str) -> dict[str, dict[str, Any]]:
    return json.loads((FIXTURES / name / "config.json").read_text())["sse"]["mixers"]


def results(folder: Path) -> Results:
    return compute(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def unless_refused(call: Callable[[], Any], error: type[Exception]) -> Any:
    """What `call` returns, or the text of its error."""
    try:
        return call()
    except error as refusal:
        return str(refusal)


def complaint(text: str) -> str:
    """The part of an error that says what is wrong; the list of what is expected names many keys."""
    return text.partition("expected")[0]


STEPPED = {"generated"}
"""of steps of one token, whose sums have another order since states change in place"""


def assert_same(found: Results, expected: Results) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in expected.keys() - STEPPED if not torch.equal(found[name], expected[name])]
    for name in expected.keys() & STEPPED:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_the_code_that_travels_still_gives_the_stored_results(name: str, own_code: dict[str, Results]) -> None:
    for key, expected in load_file(FIXTURES / name / "expected.safetensors").items():
        # stored on another machine, perhaps with another torch: float32 sums of other orders
        torch.testing.assert_close(own_code[name][key], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", KEPT)
def test_the_package_gives_the_same_bits(name: str, own_code: dict[str, Results]) -> None:
    assert_same(results(FIXTURES / name), own_code[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_give_the_same_bits_or_are_refused_by_name(name: str, own_code: dict[str, Results]) -> None:
    found = unless_refused(lambda: results(FIXTURES / name), CheckpointError)
    if isinstance(found, dict):
        expected = own_code[name]
        if name == DROPS_WINDOWS:
            found, expected = ({key: x[key] for key in WITHOUT_TRAINING} for x in (found, expected))
        assert_same(found, expected)
    else:
        unusual = [key for mixer in stored_mixers(name).values() for key in omitted_defaults(mixer)]
        assert any(key in complaint(found) for key in SETTINGS[name] or unusual), found
        assert "trust_remote_code" in found


@pytest.mark.parametrize("name", KEPT)
def test_saving_again_changes_nothing(name: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    assert_same(compute(again.eval()), compute(model.eval()))


def omitted_defaults(mixer: dict[str, Any]) -> dict[str, Any]:
    """A stored mixer without what was its kind's default at that commit, as an older or hand-written config has it."""
    defaults = json.loads((FIXTURES / "defaults.json").read_text())[mixer["kind"]]
    return {key: value for key, value in mixer.items() if key == "kind" or value != defaults[key]}


@pytest.mark.parametrize("name", KEPT)
def test_omitted_keys_have_the_defaults_of_that_time(
    name: str, changed: Callable[..., Path], own_code: dict[str, Results]
) -> None:
    shorter = {key: omitted_defaults(mixer) for key, mixer in stored_mixers(name).items()}
    assert sum(map(len, shorter.values())) < 4 * len(shorter) + 2, "hardly anything is omitted, so this tests nothing"
    assert_same(results(changed(name, shorter)), own_code[name])


def test_a_setting_that_never_was_is_refused_by_name(changed: Callable[..., Path]) -> None:
    mixers = {key: {**mixer, "colour": "red"} for key, mixer in stored_mixers("sse").items()}
    with pytest.raises(CheckpointError, match="colour"):
        AutoModelForCausalLM.from_pretrained(changed("sse", mixers))


@pytest.mark.parametrize("name", KEPT)
def test_inspect_tells_the_same_layers(name: str) -> None:
    layers = json.loads((FIXTURES / name / "config.json").read_text())["sse"]["layers"]
    assert api.inspect(FIXTURES / name).to_dict()["layers"] == layers


def partitions(folder: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return [layer.mixer.num_partitions for layer in model.sse_layers().values()]


def test_the_stored_recipe_still_serves(tmp_path: Path) -> None:
    api.expand(FIXTURES / "sse", tmp_path / "grown", num_partitions=8)
    assert partitions(tmp_path / "grown") == [8]
    entries = json.loads((tmp_path / "grown" / "config.json").read_text())["auto_map"]
    assert {entry.partition(".")[0] for entry in entries.values()} == {
        f"sse_code/{name}_sse" for name in ("configuration", "modeling")
    }


def test_a_stored_recipe_with_other_training_serves_or_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "grown"
    found = unless_refused(lambda: api.expand(FIXTURES / "windows", out, num_partitions=8), RecipeError)
    if isinstance(found, str):
        assert any(key in complaint(found) for key in ("router", "hidden_loss", "layers_at_once")), found
    else:
        assert partitions(tmp_path / "grown") == [8]
