"""The processes that choose layers together: each measures its share, and all know all that was measured."""

import dataclasses as dc
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

T = TypeVar("T")


@dc.dataclass(frozen=True, slots=True)
class Team:
    """One process of several that do the same."""

    index: int = 0
    """of this process"""
    count: int = 1
    """of all"""

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Team":
        """The processes that were launched; each must ask the same of its team."""
        return cls(int(accelerator.process_index), int(accelerator.num_processes))

    @property
    def leads(self) -> bool:
        """Whether this process writes and says what was found."""
        return self.index == 0

    def share(self, work: list[T]) -> list[T]:
        """What this process is to do of it."""
        return work[self.index :: self.count]

    def together(self, found: list[T]) -> list[T]:
        """What all processes found, in the order of processes; plain data that can be sent."""
        if self.count == 1:
            return found
        gathered: list[T] = gather_object(found)
        return gathered


ALONE = Team()
