"""Calibrate a hybrid that is in memory; the teacher is made of its own weights, without copies."""

import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.calibration.calibrate import calibrated_values
from sse_convert.checkpoints.load_model import context_limit
from sse_convert.checkpoints.meta_model import filled_model
from sse_convert.checkpoints.teacher import SourceModel, build_source_config, is_new_tensor
from sse_convert.checkpoints.weights import require_finite
from sse_convert.data.documents import Document, Encoder
from sse_convert.data.packing import Cursor, Packer, packed_rows
from sse_convert.errors import DataError, UsageError
from sse_convert.mixers import SSEMixer
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import source_fields, source_spec
from sse_convert.modeling.attention_dims import attention_dims
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.tensors import new_tensors
from sse_convert.recipe.schema import Calibrate
from sse_convert.surgery.compatibility import MAX_CALIBRATION_LENGTH
from sse_convert.surgery.guessing_teacher import guesses_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def calibrate_model(
    student: PreTrainedModel,
    texts: "Sequence[str] | Sequence[Tensor] | Tensor",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> None:
    """Set the new tensors of a hybrid in memory, in place, from what the original's attention does on some text:
    decays by how far heads look back, output scales by what each head is to give. Call it before training.

    The original is made of the hybrid's own weights for the while, so memory grows by the attention weights of one
    batch alone. The command `calibrate` does the same to a folder.

    Args:
        student: from `convert_model`, or loaded, and not trained yet.
        texts: strings, which are packed into rows of at most 512 tokens, and the first eight rows count, as with the
            command; or rows of token ids, int64 [T] each (or [R, T] in one tensor), all of which count.
        tokenizer: the model's; needed for strings.

    Raises:
        UsageError: the model is not converted, or texts are of another kind or come without a tokenizer.
        DataError: there is no text, rows have unknown tokens or are longer than the context, or none is longer than a
            layer's window, so that nothing is known of what the window misses.
        CheckpointError: the model has weights that are not finite.
    """
    layers = _converted_layers(student)
    mixers: dict[int, SSEMixer] = {
        i: mixer for i, mixer in enumerate(layer_mixers(student.config)) if isinstance(mixer, SSEMixer)
    }
    rows = _rows(student, texts, tokenizer)
    source, teacher = _original(student)
    for warning in guesses_of(teacher, rows[0]):
        warnings.warn(warning, stacklevel=2)

    def fresh(layer: int, mixer: SSEMixer) -> dict[str, Tensor]:
        state = layers[layer].state_dict()
        return {new.name: state[new.name] for new in new_tensors(source.dims_of(layer), mixer)}

    values, statistics = calibrated_values(teacher, source, mixers, fresh, rows, Calibrate().output_scale)
    if short := [i for i in mixers if not statistics[i].measured]:
        raise DataError(
            f"no document of the texts reaches beyond the window of layers {', '.join(map(str, short))}, so nothing is "
            "known of what it misses",
            expected="texts of at least two windows each",
            fix="give longer texts, or convert with a smaller window",
        )
    for i, layer in layers.items():
        layer.load_state_dict(values[i], strict=False)


def _converted_layers(student: Any) -> dict[int, SSEAttention]:
    if not hasattr(student, "sse_layers"):
        raise UsageError(
            f"model is a {type(student).__name__}, which is not converted",
            expected="a hybrid as `convert_model` gives it",
            fix="convert first: student = sse_convert.convert_model(model, keep=[...])",
        )
    found: dict[int, SSEAttention] = student.sse_layers()
    return found


def _original(student: PreTrainedModel) -> tuple[SourceModel, PreTrainedModel]:
    """What an untrained hybrid was converted from, on the hybrid's own tensors."""
    name = student.name_or_path or type(student).__name__
    config = build_source_config(source_fields(student.config.to_dict()), name)
    kept = {name: tensor for name, tensor in student.state_dict().items() if not is_new_tensor(name)}
    teacher = filled_model(config, kept, like=student).eval().requires_grad_(False)
    require_finite(teacher, name)
    spec = source_spec(config.model_type).of(config)
    return SourceModel(name=name, spec=spec, config=config, dims=attention_dims(config)), teacher


def _rows(
    student: PreTrainedModel, texts: Sequence[str] | Sequence[Tensor] | Tensor, tokenizer: Any
) -> list[dict[str, Tensor]]:
    """One batch for each row, on the model's device."""
    items = [] if isinstance(texts, str) else list(texts)
    kinds = {type(item) for item in items}
    if kinds not in ({str}, {Tensor}):
        raise UsageError(
            f"texts is a {type(texts).__name__}" + (f" of {len(items)} items" if items else ""),
            expected="a list of strings, or of int64 tensors [T] of token ids",
            fix="give texts=[...]",
        )
    vocabulary = decoder_config(student.config).vocab_size
    longest = min(context_limit(student.config) or MAX_CALIBRATION_LENGTH, MAX_CALIBRATION_LENGTH)
    if kinds == {Tensor}:
        made = list(_given(items, vocabulary, longest))
    elif tokenizer is None:
        raise UsageError("texts are strings, and there is no tokenizer", expected="the model's", fix="give tokenizer=")
    else:
        made = _packed(items, Encoder(tokenizer, vocabulary), min(Calibrate().seq_len, longest))
    return [{name: tensor[None].to(student.device) for name, tensor in row.items()} for row in made]


def _given(rows: list[Tensor], vocabulary: int, longest: int) -> Iterator[dict[str, Tensor]]:
    """Rows of token ids, one document each."""
    for row in rows:
        if row.dim() != 1 or row.dtype != torch.int64 or not 1 <= len(row) <= longest:
            raise DataError(
                f"a row of token ids is {row.dtype} of shape {list(row.shape)}",
                expected=f"int64 [T] of 1 to {longest} tokens",
                fix="give tokenizer(...).input_ids as tensors, cut to that length",
            )
        if not 0 <= int(row.min()) <= int(row.max()) < vocabulary:
            raise DataError(
                f"a row has token ids from {int(row.min())} to {int(row.max())}",
                expected=f"0 to {vocabulary - 1}",
                fix="use the model's tokenizer",
            )
        yield {"input_ids": row, "position_ids": torch.arange(len(row), device=row.device)}


class _Texts:
    """Strings as one unit of a corpus."""

    units = 1

    def __init__(self, texts: Sequence[str]) -> None:
        self._documents = [Document(text=text, where=f"text {i}") for i, text in enumerate(texts)]

    def read(self, unit: int) -> list[Document]:
        """All of them."""
        return self._documents

    def fingerprint(self) -> dict[str, Any]:
        """Nothing: nobody resumes."""
        return {}


def _packed(texts: Sequence[str], encoder: Encoder, length: int) -> list[dict[str, Tensor]]:
    """The first rows of packed documents; all of them in one shorter row where they do not fill one."""
    corpus = _Texts(texts)
    packer = Packer(corpus, encoder, length, seed=None, passes=1, cursor=Cursor())
    rows = list(islice(packed_rows(packer), Calibrate().rows))
    if not rows:
        return _packed(texts, encoder, sum(len(document.ids) for document in encoder.encode(corpus.read(0))))
    return [
        {"input_ids": torch.from_numpy(row.ids).long(), "position_ids": torch.from_numpy(row.positions).long()}
        for row in rows
    ]
