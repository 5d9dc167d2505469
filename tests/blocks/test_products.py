"""Products of one block against double backward through an independent block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvatlas.blocks.losses import MeanSquaredError
from curvatlas.blocks.products import linearise
from oracles import flat, relative_error
from reference_block import Case, block, random_case

TOLERANCE = 1e-12


def _directions(case: Case, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, *leaf.shape, generator=generator, dtype=leaf.dtype)
        for leaf in case.leaves
    ]


def _oracle(case: Case, target: Tensor, directions: list[Tensor]) -> dict[str, Tensor]:
    """Gradient, J v, Jᵀ(J v) · 2/size, and H v, flat, by reverse over reverse."""
    z = block(case.spec, case.weights, case.x, case.keys)
    loss = (z - target).pow(2).sum() / z.numel()
    options = {"retain_graph": True, "allow_unused": True}
    grads = torch.autograd.grad(loss, case.leaves, create_graph=True, **options)
    u = torch.zeros_like(z, requires_grad=True)
    pulled = torch.autograd.grad(z, case.leaves, u, create_graph=True, **options)
    total, outer, moved = [], [], []
    for i in range(len(directions[0])):
        pairs = [(g, v[i]) for g, v in zip(grads, directions, strict=True) if g is not None]
        inner = sum((g * v).sum() for g, v in pairs)
        row = torch.autograd.grad(inner, case.leaves, **options)
        total.append(flat(row, case.leaves))
        pairs = [(g, v[i]) for g, v in zip(pulled, directions, strict=True) if g is not None]
        (jv,) = torch.autograd.grad(sum((g * v).sum() for g, v in pairs), u, retain_graph=True)
        moved.append(jv)
        back = torch.autograd.grad(z, case.leaves, 2 / z.numel() * jv, **options)
        outer.append(flat(back, case.leaves))
    return {
        "gradient": flat(grads, case.leaves).detach(),
        "moved": torch.stack(moved),
        "outer": torch.stack(outer),
        "total": torch.stack(total),
        "output": z.detach(),
    }


def _flat(found: dict[str, Tensor], rate_x: Tensor, count: int) -> Tensor:
    return torch.cat([t.reshape(count, -1) for t in [*found.values(), rate_x]], dim=1)


@pytest.mark.parametrize("start", range(0, 160, 10))
def test_products_equal_double_backward_for_any_mixture_of_options(start: int) -> None:
    for seed in range(start, start + 10):
        case = random_case(seed)
        count = 1 + seed % 3
        directions = _directions(case, count, seed)
        target = torch.randn_like(case.x.detach())
        want = _oracle(case, target, directions)
        got = linearise(case.spec, case.weights, case.x, case.keys)
        seeds = MeanSquaredError().seeds(got.output, target)
        tangents = dict(zip(case.weights, directions[:-1], strict=True))
        grads, delta_x = got.gradient(seeds.delta)
        scale = torch.linalg.norm(want["total"])
        checks = {
            "output": (got.output, want["output"]),
            "gradient": (flat([*grads.values(), delta_x], case.leaves), want["gradient"]),
            "moved": (got.jvp(tangents, directions[-1]), want["moved"]),
        }
        for part in ("total", "outer", "functional"):
            found = got.hvp(tangents, directions[-1], curvature=seeds.product, part=part)
            functional = want["total"] - want["outer"]
            checks[part] = (_flat(*found, count), want.get(part, functional))
        for name, (left, right) in checks.items():
            error = relative_error(left, right)
            if name in ("total", "outer", "functional"):
                error = float(torch.linalg.norm(left - right) / scale)
            assert error <= TOLERANCE, (seed, name, error, case.spec, list(case.weights))
