"""Makes transformers' Auto classes know converted models, and loads models. Imports neither torch nor transformers.

Registration is by name only: the class of a family is derived, and its source files imported, when a checkpoint of the
family is loaded.
"""

import importlib
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sse_convert.compat import add_config, add_model, is_loading
from sse_convert.errors import CheckpointError, DependencyError, SSEConvertError
from sse_convert.modeling.arch_spec import SSE_PREFIX, ArchSpec
from sse_convert.modeling.architectures import ARCHITECTURES, IMAGE_TEXT, further_tokens
from sse_convert.process_memory import memory_for
from sse_convert.trust import trusts_code

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_CONFIG_MODULE = "transformers.models.auto.configuration_auto"
_MODEL_MODULE = "transformers.models.auto.modeling_auto"
_CONFIGURATIONS = "sse_convert.modeling.configuration"


class _LazyModule:
    """Stands for modules of ours in transformers' tables; imported in turn when a class is asked of it."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __getattr__(self, attribute: str) -> Any:
        for name in self._names:
            if (found := getattr(importlib.import_module(name), attribute, None)) is not None:
                return found
        raise AttributeError(attribute)


def register() -> None:
    """Enter all families' converted models in AutoConfig and the auto classes of models. Imports transformers;
    repeatable."""
    _register_configs(importlib.import_module(_CONFIG_MODULE))
    _register_models(importlib.import_module(_MODEL_MODULE))


def register_on_import() -> None:
    """Register now if transformers' Auto classes are loaded, else when they are."""
    for name, action in _ACTIONS.items():
        if (module := sys.modules.get(name)) is not None and not is_loading(module):
            action(module)
    if not any(isinstance(finder, _AutoFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoFinder())


def auto_class(model_type: str) -> Any:
    """Which of transformers' auto classes makes models of this type, plain or converted, with their head."""
    import transformers

    spec = IMAGE_TEXT.get(model_type.removeprefix(SSE_PREFIX))
    return getattr(transformers, "AutoModelForCausalLM" if spec is None else spec.auto_class)


def _mend(path: str | Path, model_type: str) -> str:
    """What to do about weights that do not load."""
    converted = model_type.startswith(SSE_PREFIX)
    return f"sse-convert verify {shlex.quote(str(path))}" if converted else "download the checkpoint again"


def load_pretrained(
    path: str | Path,
    dtype: "torch.dtype | str | None" = None,
    device: Any = None,
    *,
    sse: dict[str, Any] | None = None,
) -> "PreTrainedModel":
    """Load a converted or a plain checkpoint, in evaluation mode.

    Args:
        path: local folder or hub id.
        dtype: of the weights; None takes the checkpoint's.
        device: where the model goes; None stays on the CPU.
        sse: takes the place of a converted checkpoint's field `sse`; None keeps it.

    Raises:
        CheckpointError: the folder holds no such checkpoint, or tensors are missing, unexpected or of another shape.
        DependencyError: its weights are quantised by a library that is not installed.
        HardwareError: there is too little memory.
    """
    register()
    from sse_convert.modeling.sink_attention import use_kernels

    model, info = _read(path, dtype, sse)
    _check_tensors(path, model, info)
    use_kernels(model)
    return (model if device is None else model.to(device)).eval()


def _read(
    path: str | Path, dtype: "torch.dtype | str | None", sse: dict[str, Any] | None
) -> "tuple[PreTrainedModel, dict[str, Any]]":
    """The model as its files have it, and what transformers says of their tensors. Errors as of `load_pretrained`."""
    from transformers import PreTrainedConfig

    model_type = ""
    try:
        with memory_for(f"loading {path}"):
            model_type = str(PreTrainedConfig.get_config_dict(path)[0].get("model_type"))
            model, info = auto_class(model_type).from_pretrained(
                path,
                dtype="auto" if dtype is None else dtype,
                output_loading_info=True,
                trust_remote_code=trusts_code(),
                **({} if sse is None else {"sse": sse}),
            )
    except SSEConvertError:
        raise
    except ImportError as error:
        raise DependencyError(
            f"{path} needs a package that is not installed: {error}", fix="install the library that quantised it"
        ) from error
    except Exception as error:  # transformers promises no set of exceptions for files that are wrong
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise CheckpointError(
            f"{path}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}",
            expected="a causal language model checkpoint with config.json and safetensors weights",
            fix=_mend(path, model_type),
        ) from error
    return model, info


def _check_tensors(path: str | Path, model: "PreTrainedModel", info: dict[str, Any]) -> None:
    """Refuse files that lack tensors of the model or have others, but for those that predict further tokens."""
    model_type = model.config.model_type
    unexpected = set(info["unexpected_keys"])
    if model_type.removeprefix(SSE_PREFIX) in ARCHITECTURES | IMAGE_TEXT:
        further = further_tokens(model.config)
        unexpected = {name for name in unexpected if not re.search(further, name)}
    kinds = {
        "missing_keys": info["missing_keys"],
        "unexpected_keys": unexpected,
        "mismatched_keys": info["mismatched_keys"],
    }
    problems = [f"{kind}: {', '.join(sorted(map(str, names))[:5])}" for kind, names in kinds.items() if names]
    if problems:
        raise CheckpointError(
            f"{path}: {'; '.join(problems)}",
            expected="exactly the tensors of the model",
            fix=_mend(path, model_type),
        )


def _register_configs(auto: ModuleType) -> None:
    module = _LazyModule(_CONFIGURATIONS)
    for spec in _known():
        add_config(auto.CONFIG_MAPPING, spec.hybrid_type, spec.hybrid_config, module)


def _register_models(auto: ModuleType) -> None:
    module = _LazyModule(_CONFIGURATIONS, "sse_convert.modeling.hybrid")
    for spec in _known():
        for auto_class, name in spec.auto_classes.items():
            add_model(getattr(auto, auto_class), spec.hybrid_type, spec.hybrid_config, name, module)


def _known() -> list[ArchSpec]:
    """The families that the installed transformers has."""
    configurations = sys.modules[_CONFIG_MODULE].CONFIG_MAPPING
    return [spec for spec in (ARCHITECTURES | IMAGE_TEXT).values() if spec.model_type in configurations]


_ACTIONS = {_CONFIG_MODULE: _register_configs, _MODEL_MODULE: _register_models}


class _AutoFinder(MetaPathFinder):
    """Runs a registration right after transformers loads the module it concerns."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _ACTIONS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterLoading(spec.loader)
        return spec


class _AfterLoading(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _ACTIONS[module.__name__](module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
