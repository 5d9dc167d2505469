"""What depends on the device: whose memory is planned for. No GPU is needed."""

from __future__ import annotations

import pytest
import torch

from curvatlas import budget


def test_the_budget_on_cuda_is_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free on the device, and held by PyTorch without being used."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * 10**9, 16 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10**9)
    assert budget.available_bytes(torch.device("cuda", 0)) == 6 * 10**9
    assert budget.default_budget(torch.device("cuda", 0)) == 3 * 2**30  # of 16 GB, free or not
    assert budget.available_bytes(torch.device("cpu")) != 6 * 10**9
