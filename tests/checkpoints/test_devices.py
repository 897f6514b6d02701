"""Which device is taken: Apple's GPUs by name alone, and where torch may compute on the CPU what they lack."""

import pytest
import torch

from sse_convert.checkpoints.load_model import MPS_FALLBACK, pick_device
from sse_convert.errors import HardwareError


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.delenv(MPS_FALLBACK, raising=False)


@pytest.mark.usefixtures("mac")
def test_a_mac_takes_its_cpu() -> None:
    assert pick_device() == torch.device("cpu")
    assert pick_device("cpu") == torch.device("cpu")
    for name in ("mps", "mps:0"):
        with pytest.raises(HardwareError, match=f"{name}.*have not been tried on Apple's GPUs[^$]*{MPS_FALLBACK}=1"):
            pick_device(name)


@pytest.mark.usefixtures("mac")
def test_a_mac_takes_its_gpu_where_the_cpu_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MPS_FALLBACK, "1")
    assert pick_device("mps") == torch.device("mps")
    assert pick_device() == torch.device("cpu")


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_other_accelerators_are_taken_unnamed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    assert pick_device().type == kind
    with pytest.raises(HardwareError, match="'mps' is not on this machine"):
        pick_device("mps")
