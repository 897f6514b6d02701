"""Text from a checkpoint: continue a prompt once, or talk with it turn by turn while its cache is kept."""

import dataclasses as dc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sse_convert.checkpoints.load_model import context_limit, load_model, load_tokenizer
from sse_convert.console import say
from sse_convert.data.documents import rendered
from sse_convert.errors import CheckpointError, UsageError
from sse_convert.files import text_from
from sse_convert.inference.sampling import Sampling, as_asked
from sse_convert.kernels.triton_backend import GPU
from sse_convert.report import FieldsReport, counted

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationReport:
    """One continued prompt."""

    prompt: str
    """the prompt"""
    text: str
    """what follows it"""
    prompt_tokens: int
    """tokens of the prompt"""
    new_tokens: int
    """generated tokens"""
    seconds: float
    """prefill and generation"""
    stopped: Literal["end", "length"]
    """whether the model ended the text or the limit did"""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the speed."""
        return {**dc.asdict(self), "tokens_per_s": self.new_tokens / self.seconds}

    def lines(self) -> list[str]:
        """The generated text."""
        return self.text.split("\n")


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ChatReport(FieldsReport):
    """One conversation."""

    turns: int
    """answers given"""
    new_tokens: int
    """generated tokens"""
    reused_tokens: int
    """tokens that later turns took from the cache instead of reading them again"""
    seconds: float
    """time spent generating"""
    ended: Literal["user", "context full"]
    """who ended it"""

    def lines(self) -> list[str]:
        """One line of figures."""
        speed = f"{self.new_tokens / self.seconds:.1f} tokens/s" if self.seconds else "nothing generated"
        full = "; the context is full" if self.ended == "context full" else ""
        return [f"{counted(self.turns, 'turn')}, {counted(self.new_tokens, 'token')}, {speed}{full}"]


def generate_text(
    checkpoint: str | Path, prompt: str, *, sampling: Sampling | None = None, device: str | None = None
) -> GenerationReport:
    """Continue a text.

    Args:
        checkpoint: folder or hub id, converted or not.
        prompt: the text; the tokenizer adds its special tokens.
        sampling: defaults are greedy, 128 tokens.
        device: unset picks the accelerator, or the CPU.

    Raises:
        UsageError: the prompt is empty, or prompt and answer exceed the model's context.
        CheckpointError, HubError, HardwareError: the checkpoint cannot be loaded.
    """
    sampling = sampling or Sampling()
    tokenizer = load_tokenizer(checkpoint)
    ids = list(tokenizer(prompt)["input_ids"])
    if not ids:
        raise UsageError("the prompt is empty", expected="at least one token")
    model = _loaded(checkpoint, device)
    _check_ids(ids, model)
    limit = context_limit(model.config)
    if limit is not None and len(ids) + sampling.max_new_tokens > limit:
        raise UsageError(
            f"{len(ids)} prompt tokens and {sampling.max_new_tokens} new ones exceed the model's context",
            expected=f"at most {limit} together",
            fix="shorten the prompt or lower max_new_tokens",
        )
    start = time.perf_counter()
    new = _continue(model, tokenizer, ids, sampling, seed=sampling.seed)
    seconds = time.perf_counter() - start
    return GenerationReport(
        prompt=prompt,
        text=_decode(tokenizer, new),
        prompt_tokens=len(ids),
        new_tokens=len(new),
        seconds=seconds,
        stopped="end" if new[-1] in _end_ids(model) else "length",
    )


def _loaded(checkpoint: str | Path, device: str | None) -> "PreTrainedModel":
    """The model; says so where its first answer may take long."""
    model = load_model(checkpoint, device=device)
    if model.device.type == GPU and hasattr(model, "sse_layers"):
        say("the first answer compiles kernels: about half a minute, unless an earlier one on this machine did")
    return model


def _check_ids(ids: list[int], model: "PreTrainedModel") -> None:
    """Make sure that a model knows all tokens of a prompt.

    Raises:
        CheckpointError: its tokenizer gave one that the model does not embed.
    """
    if (highest := max(ids)) >= (rows := model.get_input_embeddings().num_embeddings):
        raise CheckpointError(
            f"the tokenizer gave token {highest}, the model embeds {rows}",
            expected=f"token ids below {rows}",
            fix="use the tokenizer that belongs to the model",
        )


def chat_in_terminal(
    checkpoint: str | Path,
    *,
    sampling: Sampling | None = None,
    device: str | None = None,
    system: str | None = None,
    read: Callable[[], str] | None = None,
    write: Callable[[str], None] | None = None,
) -> ChatReport:
    """Talk with a checkpoint until end of input or Ctrl-C at the prompt. Ctrl-C during an answer ends that answer.

    Args:
        checkpoint: folder or hub id, converted or not. Without a chat template every line is plainly continued.
        sampling: defaults are temperature 0.7, top_p 0.9, 512 tokens.
        device: unset picks the accelerator, or the CPU.
        system: system message, for checkpoints with a chat template.
        read: returns the next user message, raises EOFError at the end; unset reads stdin.
        write: shows pieces of the answer as they come; unset writes to stdout.

    Raises:
        UsageError: a system message without a chat template.
        CheckpointError, HubError, HardwareError: the checkpoint cannot be loaded.
    """
    tokenizer = load_tokenizer(checkpoint)
    if system is not None and not tokenizer.chat_template:
        raise UsageError(
            f"{checkpoint} has no chat template, so a system message has no place",
            fix="leave the system message out, or put it in front of your first line",
        )
    talk = Conversation(_loaded(checkpoint, device), tokenizer, system)
    return talk.run(
        sampling or Sampling(max_new_tokens=512, temperature=0.7, top_p=0.9), read or _read_line, write or _write
    )


class Conversation:
    """The tokens so far and the cache that holds them."""

    def __init__(
        self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", system: str | None = None
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._ids: list[int] = []
        self._text = ""
        self._cache: Cache | None = None
        self._turns = self._new_tokens = self._reused = 0
        self._seconds = 0.0

    def run(self, sampling: Sampling, read: Callable[[], str], write: Callable[[str], None]) -> ChatReport:
        """Read, answer, repeat."""
        ended: Literal["user", "context full"] = "user"
        while True:
            try:
                message = read()
            except (EOFError, KeyboardInterrupt):
                write("\n")
                break
            if not message.strip():
                continue
            if not self.answer(message, sampling, write):
                ended = "context full"
                break
            write("\n")
        return ChatReport(
            turns=self._turns,
            new_tokens=self._new_tokens,
            reused_tokens=self._reused,
            seconds=self._seconds,
            ended=ended,
        )

    def answer(self, message: str, sampling: Sampling, write: Callable[[str], None]) -> bool:
        """Answer one message; False where it does not fit the model's context any more."""
        ids, text = self._next_turn(message)
        limit = context_limit(self._model.config)
        if limit is not None and len(ids) + sampling.max_new_tokens > limit:
            return False
        if self._cache is not None:
            self._reused += len(self._ids) - 1
        else:
            self._cache = _empty_cache(self._model)
        new: list[int] = []
        start = time.perf_counter()
        try:
            _continue(
                self._model,
                self._tokenizer,
                ids,
                sampling,
                seed=sampling.seed + self._turns,
                cache=self._cache,
                write=write,
                collect=new,
            )
        except KeyboardInterrupt:
            self._cache = None  # the model stopped inside a step, so what the cache holds is not known
        self._seconds += time.perf_counter() - start
        self._turns += 1
        self._new_tokens += len(new)
        self._ids = ids + new
        self._text = text + str(self._tokenizer.decode(new, clean_up_tokenization_spaces=False))
        self._messages.append({"role": "assistant", "content": _decode(self._tokenizer, new)})
        return True

    def _next_turn(self, message: str) -> tuple[list[int], str]:
        """All tokens up to the answer, and their text; drops the cache where they do not continue what it holds."""
        if not self._tokenizer.chat_template:
            text = message if not self._ids else "\n" + message
            return self._ids + list(self._tokenizer(text, add_special_tokens=not self._ids)["input_ids"]), ""
        self._messages.append({"role": "user", "content": message})
        text = rendered(self._tokenizer, self._messages, "this chat", prompt=True)
        known = self._text if self._ids and text.startswith(self._text) else ""
        if not known:
            self._ids, self._cache = [], None
        return self._ids + list(self._tokenizer(text[len(known) :], add_special_tokens=False)["input_ids"]), text


def _continue(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    ids: list[int],
    sampling: Sampling,
    *,
    seed: int,
    cache: "Cache | None" = None,
    write: Callable[[str], None] | None = None,
    collect: list[int] | None = None,
) -> list[int]:
    """New token ids after `ids`, also put into `collect` one by one so that an interrupt loses none."""
    import torch
    from transformers import TextStreamer

    from sse_convert.inference.cuda_graphs import graphed
    from sse_convert.modeling.compat import CACHE

    new = [] if collect is None else collect

    class Follower(TextStreamer):
        """Gathers tokens and passes on text at word boundaries."""

        def put(self, value: torch.Tensor) -> None:
            if not self.next_tokens_are_prompt:
                new.extend(value.flatten().tolist())
            super().put(value)  # type: ignore[no-untyped-call]

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if write is not None:
                write(text)

    choice: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        choice = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    row = torch.tensor([ids], device=model.device)
    devices = [] if model.device.type == "cpu" else [model.device]
    rng = torch.random.fork_rng(devices, device_type=model.device.type if devices else "cuda")
    with rng, as_asked(model), graphed(model, slots=len(ids) + sampling.max_new_tokens):
        torch.manual_seed(seed)
        model.generate(  # type: ignore[operator]
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=sampling.max_new_tokens,
            pad_token_id=_pad_id(model, tokenizer),
            streamer=Follower(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **{CACHE: cache, **choice},
        )
    return new


def _empty_cache(model: "PreTrainedModel") -> "Cache":
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _end_ids(model: "PreTrainedModel") -> list[int]:
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def _pad_id(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """A pad token only silences a warning here: there is one row, so nothing is ever padded."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return _end_ids(model)[0]


def _decode(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _read_line() -> str:
    if sys.stdin.isatty():
        return input("> ")
    line = text_from(sys.stdin.readline, "standard input")
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
