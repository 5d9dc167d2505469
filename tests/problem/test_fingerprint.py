"""Fingerprints of values: any change is noticed, equal values have the same one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvatlas.problem.fingerprint import LiveTensors

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
SIZES = [1, 7, 4099, 300_001]


def holder(*tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for place, tensor in enumerate(tensors):
        module.register_buffer(f"tensor{place}", tensor)
    return module


def drawn(size: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 50
    return values.to(dtype) if dtype.is_floating_point else values.abs().to(dtype)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_single_entry_counts(size: int, dtype: torch.dtype) -> None:
    values = drawn(size, dtype)
    live = LiveTensors(holder(torch.ones(3), values, torch.ones(2)))
    before = live.fingerprint()
    bits = values.view(torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        place = int(torch.randint(len(bits), (1,), generator=generator))
        mask = 1 << int(torch.randint(8, (1,), generator=generator))
        bits[place] ^= mask  # as small a change as there is
        assert live.fingerprint() != before, (place, mask)
        bits[place] ^= mask
        assert live.fingerprint() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 4099, 70_000])
def test_permutations_and_signs_are_noticed(size: int, dtype: torch.dtype) -> None:
    values = drawn(size, dtype)
    live = LiveTensors(holder(values))
    before = live.fingerprint()
    original = values.clone()
    changes = {
        "rolled": original.roll(1),
        "reversed": original.flip(0),
        "negated": -original,
        "doubled": original * 2,
        "even entries negated": torch.where(torch.arange(size) % 2 == 0, -original, original),
        "odd entries negated": torch.where(torch.arange(size) % 2 == 1, -original, original),
    }
    for name, changed in changes.items():
        values.copy_(changed)
        assert live.fingerprint() != before, name
    for first in range(0, size - 9, max(1, size // 50)):  # pairs within and across words
        for second in (first + 1, first + 2, first + 8, size - 1):
            values.copy_(original)
            values[[first, second]] = -original[[first, second]]
            assert live.fingerprint() != before, (first, second)
            values[[first, second]] = original[[second, first]]
            if original[first] != original[second]:
                assert live.fingerprint() != before, (first, second)
            values.copy_(original)
            values[first] += 8
            values[second] -= 8
            assert live.fingerprint() != before, (first, second)


def test_infinities_do_not_hide_their_neighbours() -> None:
    mask = torch.full((64, 64), float("-inf")).triu(1)
    mask += torch.arange(64.0)
    live = LiveTensors(holder(mask))
    before = live.fingerprint()
    mask[5, :2].neg_()
    mask[7, :4:2].neg_()
    assert live.fingerprint() != before


def test_equal_values_have_equal_fingerprints_in_other_memory() -> None:
    module: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    live = LiveTensors(module)
    before = live.fingerprint()
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    module[1].running_mean = module[1].running_mean.clone()
    module[0].bias.data = module[0].bias.data.clone()
    assert live.fingerprint() == before


def test_tensors_with_gaps_and_turned_ones_are_read() -> None:
    base = torch.randn(6, 8)
    module = holder(base[:, ::2], base.T, torch.randn(1).expand(5))
    live = LiveTensors(module)
    before = live.fingerprint()
    base[3, 3] += 1e-3  # only in the turned one
    middle = live.fingerprint()
    assert middle != before
    base[3, 4] += 1e-3
    assert live.fingerprint() not in (before, middle)


def test_added_and_removed_tensors_are_noticed() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2))
    live = LiveTensors(module)
    before = live.fingerprint()
    module[0].register_buffer("table", torch.zeros(2))
    assert live.fingerprint() != before
    del module[0].table
    assert live.fingerprint() == before
    module.append(nn.Linear(2, 2))
    assert live.fingerprint() != before


def test_complex_empty_and_scalar_tensors_are_read() -> None:
    spectrum = torch.randn(4, dtype=torch.complex64)
    scale = torch.tensor(2.0)
    live = LiveTensors(holder(spectrum, torch.empty(0, 3), scale))
    before = live.fingerprint()
    spectrum[2] = spectrum[2].conj()
    middle = live.fingerprint()
    scale.mul_(2)
    assert len({before, middle, live.fingerprint()}) == 3


GLOBAL_WEIGHTS = torch.ones(3)


def test_tensors_that_a_callable_uses_are_found() -> None:
    weights = torch.ones(3)

    class Scaled:
        def __init__(self) -> None:
            self.scale = weights

        def method(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(outputs * self.scale, targets)

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return self.method(outputs, targets)

    def by_default(outputs: Tensor, targets: Tensor, scale: Tensor = weights) -> Tensor:
        return F.mse_loss(outputs * scale, targets)

    module = nn.Linear(3, 3)
    module.weight.data = weights.diag()
    used: list[Any] = [
        lambda outputs, targets: F.mse_loss(outputs * weights, targets),
        functools.partial(F.cross_entropy, weight=weights),
        Scaled(),
        Scaled().method,
        by_default,
        nn.CrossEntropyLoss(weight=weights),
        [weights],
    ]
    for item in used:
        live = LiveTensors(item)
        before = live.fingerprint()
        weights.data[1] += 1
        assert live.fingerprint() != before, item
    live = LiveTensors(lambda outputs: outputs * GLOBAL_WEIGHTS)
    before = live.fingerprint()
    GLOBAL_WEIGHTS.data.mul_(2)
    assert live.fingerprint() != before


def test_a_variable_that_a_callable_closes_over_may_be_bound_anew() -> None:
    weights = torch.ones(3)

    def loss(outputs: Tensor) -> Tensor:
        return (outputs * weights).sum()

    live = LiveTensors(loss)
    before = live.fingerprint()
    weights = torch.full((3,), 2.0)
    assert live.fingerprint() != before
