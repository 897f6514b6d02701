"""Every use of a private API of a library, apart from those that travel inside checkpoints (`modeling.compat`).

An update of a library that breaks something is mended here. Nothing heavy is imported before it is needed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def is_loading(module: ModuleType) -> bool:
    """Whether Python is still executing a module (importlib says so in its spec alone)."""
    return bool(getattr(module.__spec__, "_initializing", False))


def add_config(mapping: Any, model_type: str, name: str, module: Any) -> None:
    """Enter a configuration class by name in transformers' CONFIG_MAPPING, whose `register` wants the class itself.

    Args:
        mapping: the table.
        model_type: of config.json.
        name: of the class.
        module: has the class as an attribute.
    """
    mapping._mapping[model_type] = name
    mapping._modules[model_type] = module


def add_model(auto_class: Any, model_type: str, config_name: str, name: str, module: Any) -> None:
    """Enter a model class by name in the table of an auto class of transformers. Arguments as of `add_config`."""
    mapping = auto_class._model_mapping
    mapping._reverse_config_mapping[config_name] = model_type
    mapping._model_mapping[model_type] = name
    mapping._modules[model_type] = module


def ignored_on_loading(model: Any) -> list[str]:
    """Patterns of stored names that a model's class leaves out without a word."""
    return list(model._keys_to_ignore_on_load_unexpected or ())


def mxfp4_weights(blocks: "torch.Tensor", scales: "torch.Tensor") -> "torch.Tensor":
    """Weights of experts as transformers unpacks them: bfloat16 [experts, columns, rows].

    Args:
        blocks: uint8 [experts, rows, groups, 16], two 4-bit numbers each.
        scales: uint8 [experts, rows, groups], exponents of two.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights: torch.Tensor = convert_moe_packed_tensors(blocks, scales)
    return weights


@contextmanager
def attending_by(model: "PreTrainedModel", name: str, function: Callable[..., Any]) -> Iterator[None]:
    """In this block, softmax attention of a model calls a function, with the masks that its own is given.

    Args:
        model: whose attention is set, and put back.
        name: under which transformers finds the function from now on.
        function: as transformers' attention functions.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def is_compiled(forward: Callable[..., Any]) -> bool:
    """Whether torch.compile made a function."""
    return hasattr(forward, "_torchdynamo_orig_callable")


def has_compiled_part(model: "torch.nn.Module") -> bool:
    """Whether torch.compile made a model's forward, or that of one of its modules."""
    return is_compiled(model.forward) or any(part._compiled_call_impl is not None for part in model.modules())


def has_cpp_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler, which it needs on CPUs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def configure_compile(programs: int) -> None:
    """Let torch.compile make this many programs of a function, and leave out what a forward writes on Python's side, as
    routers do, when a gradient checkpoint repeats it."""
    import torch

    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    torch._dynamo.config.recompile_limit = max(programs, torch._dynamo.config.recompile_limit)


def default_code_folder() -> str:
    """Where torch.compile keeps compiled code unless the environment says where. Looking it up, it writes it there."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def compiled_since(moment: float) -> list[tuple[float, str]]:
    """Seconds and reason of each program that torch.compile made after a moment of `time.time()`."""
    from torch._dynamo.utils import get_compilation_metrics

    made = [one for one in get_compilation_metrics() if (one.start_time_us or 0) >= 1e6 * moment]
    spent = [((one.end_time_us or 0) - (one.start_time_us or 0)) / 1e6 for one in made]
    why = [
        one.recompile_reason or ("backward pass" if one.is_forward is False else f"new: {one.co_name}") for one in made
    ]
    return [(max(0.0, seconds), reason) for seconds, reason in zip(spent, why, strict=True)]


def of_any_length(tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor, after telling torch.compile to make its first program for any number of rows already."""
    import torch

    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


def end_allocation(device: int, pool: Any) -> None:
    """End the allocation of a failed CUDA graph capture in its pool, which torch 2.11 would go on with.

    Raises:
        RuntimeError: it has ended.
        AttributeError: this torch has another way.
    """
    import torch

    torch._C._cuda_endAllocateToPool(device, pool)


def compile_error() -> type[Exception]:
    """What all errors of torch.compile are."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def cut_graphs_at(operator: str) -> None:
    """Have vLLM cut compiled models at an operator, as at those of its own attention; repeatable.

    Args:
        operator: qualified name.
    """
    from vllm.config import CompilationConfig

    operators = CompilationConfig._attention_ops
    if operator not in operators:
        operators.append(operator)
