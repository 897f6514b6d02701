"""Windows that two processes read together give the losses of one."""

import pytest
import torch
import torch.distributed as dist
from accelerate import debug_launcher

from sse_convert.evaluation.long_rows import LongRows
from sse_convert.evaluation.perplexity import held_out_loss, make_windows
from sse_convert.modeling.context import Shard
from tests.modeling.tiny import HEADS, VOCAB, tiny_model


@pytest.fixture(autouse=True)
def _one_thread():
    """A process that is forked off has none of the threads that matrix products would wait for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def read(model, windows, expected):
    """What each process does: windows of half the length alone, the others together."""
    seen = []
    gather = Shard.whole
    Shard.whole = lambda shard, x: seen.append(shard.shape) or gather(shard, x)
    together = LongRows(length=64, size=2, group=dist.group.WORLD)
    for one, before in zip(windows, expected, strict=True):
        seen.clear()
        found = held_out_loss(model, one, together=together)
        assert found.loss == pytest.approx(before.loss, rel=1e-12)
        assert found.window_sums == pytest.approx(before.window_sums, rel=1e-12)
        assert ((2, 64) in seen) == (one.input_ids.shape[1] == 64)
    assert model.config._attn_implementation == "sdpa"


def test_two_processes_read_long_windows_together(tokenizer):
    model = tiny_model("llama", HEADS, dtype=torch.float64)
    ids = torch.randint(3, VOCAB, (2, 64), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(20), torch.arange(44)]).expand(2, -1)
    windows = [make_windows(ids, tokenizer, positions), make_windows(ids[:, :32], tokenizer)]
    expected = [held_out_loss(model, one) for one in windows]
    debug_launcher(read, (model, windows, expected), num_processes=2)
