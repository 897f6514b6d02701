"""SIGTERM, SIGHUP and Ctrl-C while training: the step at hand is saved first, then the signal takes its course."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
from accelerate import Accelerator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAID = "\n{}: ending once this step is saved; the same again ends at once\n"


class Stop:
    """Notes a signal instead of obeying it. Use as a context manager; a second signal is obeyed at once.

    Signals that the process ignores (SIGHUP under nohup) stay ignored, and outside the main thread nothing changes.

    Args:
        accelerator: of the stage. A signal to one process is one to all.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if kind is None and self._number is not None:  # it came after the last question
            self.obey()

    def wanted(self) -> bool:
        """Whether a signal came to any process. Every process must ask after every step."""
        if self._accelerator.num_processes == 1:
            return self._number is not None
        came = torch.tensor([self._number == number for number in _SIGNALS], device=self._accelerator.device)
        counts = self._accelerator.reduce(came.long(), "sum").tolist()
        agreed = next((number for number, count in zip(_SIGNALS, counts, strict=True) if count), None)
        self._number = agreed or self._number  # one that came meanwhile counts in the next step
        return agreed is not None

    def obey(self) -> None:
        """Let the signal do what it would have done when it came."""
        assert self._number is not None, "no signal came"
        number, self._number = self._number, None
        self._restore()
        signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._number is not None:
            self._restore()
            signal.raise_signal(number)
        self._number = number
        if self._accelerator.is_main_process:  # not by print, which may be what was interrupted
            os.write(2, _SAID.format(signal.Signals(number).name).encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
