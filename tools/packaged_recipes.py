"""Write the packaged recipes of hub models anew, after a change of the measured recipe or of the rule that scales it.

    python -m tools.packaged_recipes

Each is what `sse-convert recipes new` writes for its model; configurations are those in tests/fixtures/configs.
"""

from sse_convert.recipe.presets import presets_folder
from sse_convert.recipe.recommended import MEASURED_SIZE
from sse_convert.surgery.new_recipe import Wanted, new_recipe
from tests.model_configs import model_config
from tests.surgery.synthetic import teacher_from_config

_GATED = "The weights are gated: accept the licence on the hub and log in with `hf auth login`."
_MXFP4 = "The published weights are in mxfp4. Make a bfloat16 copy first; `plan` on the original says with which call."
_HALO = "HALO (arXiv:2601.22156) chose these for this model: --set 'layers.select={{keep: {n}, chosen: {chosen}}}'"


def _halo(chosen: str) -> str:
    return _HALO.format(n=chosen.count(",") + 1, chosen=chosen)


MODELS = {
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M", "apache-2.0", ""),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "Qwen3-0.6B", "apache-2.0", ""),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", "Qwen3-1.7B", "apache-2.0", _halo("[2,3,6,8,9,21,25]")),
    "qwen3-4b": ("Qwen/Qwen3-4B", "Qwen3-4B", "apache-2.0", _halo("[0,1,7,14,15,22,24,33,34]")),
    "qwen3-8b": ("Qwen/Qwen3-8B", "Qwen3-8B", "apache-2.0", _halo("[1,2,4,6,7,10,24,33,34]")),
    "qwen3-14b": ("Qwen/Qwen3-14B", "Qwen3-14B", "apache-2.0", ""),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B", "apache-2.0", ""),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B", "llama3.2", _GATED),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", "Llama-3.2-3B", "llama3.2", _GATED),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "Llama 3.1 8B", "llama3.1", _GATED),
    "gpt-oss-20b": ("gpt-oss-20b-bf16", "gpt-oss-20b", "apache-2.0", _MXFP4),
}
"""name -> hub id or folder, title, licence, note"""


def packaged_text(name: str) -> str:
    """The text of a packaged recipe as it should be."""
    model, title, license_, note = MODELS[name]
    teacher = teacher_from_config(model_config(name), model)
    size = MEASURED_SIZE if name == "smollm2-135m" else None
    wanted = Wanted(model=model, name=name, title=title, command=name, license=license_, note=note, weight_size=size)
    return new_recipe(teacher, wanted).text


def main() -> None:
    """Write all of them."""
    for name in MODELS:
        (presets_folder() / f"{name}.yaml").write_text(packaged_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
