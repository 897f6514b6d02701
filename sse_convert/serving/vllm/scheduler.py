"""vLLM's scheduler with chunks of prompts that end where states are kept."""

from inspect import signature
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class BlockScheduler(Scheduler):
    """Prefix caching keeps a state as that after a whole number of blocks, so a chunk must end there.

    Where the engine runs in a process of its own, as in `vllm serve`, vLLM 0.32 completes the configuration a second
    time when the engine is built, and on CPUs that puts the block size back to 128, by which chunks are cut. Then a
    state is kept under a prefix that it is not of. vLLM 0.33 sets the block size after that, and loses nothing here.
    """

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Tokens of the next chunk, which ends at a multiple of the blocks that are allocated."""
        self.cache_config.block_size = self.block_size
        tokens: int = super()._mamba_block_aligned_split(
            request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
        )
        return tokens


def overrides() -> bool:
    """Whether vLLM's scheduler has the method that `BlockScheduler` overrides, with these parameters."""
    ours = BlockScheduler._mamba_block_aligned_split
    theirs = getattr(Scheduler, ours.__name__, None)
    return theirs is not None and [*signature(theirs).parameters] == [*signature(ours).parameters]
