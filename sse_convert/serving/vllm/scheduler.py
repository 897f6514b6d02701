"""vLLM's scheduler with chunks of prompts that end where states are kept."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class BlockScheduler(Scheduler):
    """Prefix caching keeps a state as that after a whole number of blocks, so a chunk must end there.

    Where the engine runs in a process of its own, as in `vllm serve`, vLLM 0.32 completes the configuration a second
    time when the engine is built, and on CPUs that puts the block size back to 128, by which chunks are cut. Then a
    state is kept under a prefix that it is not of.
    """

    def _mamba_block_aligned_split(self, *args: Any, **kwargs: Any) -> int:
        """Tokens of the next chunk, which ends at a multiple of the blocks that are allocated."""
        self.cache_config.block_size = self.block_size
        tokens: int = super()._mamba_block_aligned_split(*args, **kwargs)
        return tokens
