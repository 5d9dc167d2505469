"""Every option mixed at random: the dense Hessian and its parts against double backward."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batched_oracles import parts
from curvatlas.closed_form.hessian import BlockDerivatives
from curvatlas.closed_form.modules import TransformerBlockHessian
from curvatlas.closed_form.zeros import structural_zeros
from curvatlas.layers.losses import (
    LinearHeadCrossEntropy,
    OutputLoss,
    PooledCrossEntropy,
    TokenCrossEntropy,
    TokenSquaredError,
)
from reference_block import Case, block, options_of, pairs_of, random_case

TOLERANCE = 1e-12
# Of 220 random mixtures these hold every pair of options that stands together in one of them, 9,257
# pairs, and 98 of 100 triples.
SEEDS = [
    0, 2, 3, 5, 6, 9, 11, 15, 16, 17, 20, 22, 23, 25, 27, 28, 32, 38, 40, 41, 42, 45, 66, 69, 74,
    77, 84, 86, 92, 95, 97, 99, 102, 103, 104, 113, 115, 116, 119, 120, 123, 128, 129, 130, 134,
    138, 140, 141, 145, 152, 155, 157, 158, 159, 161, 168, 170, 178, 180, 185, 190, 194, 195, 200,
    218, 219,
]  # fmt: skip
PER_GROUP = 11


def random_loss(
    seed: int, outputs: Tensor
) -> tuple[OutputLoss, Tensor, Callable[[Tensor], Tensor]]:
    """A loss object, its targets, and the same loss in plain torch.

    Logits stay moderate: on a saturated softmax the closed form keeps its digits and double
    backward does not (relative error 0.7 at a probability of 1e-27), so it is no reference there.
    """
    n, length, d = outputs.shape
    g = torch.Generator().manual_seed(1000 + seed)
    largest = max(1.0, float(outputs.abs().max()))
    head = torch.randn(3, d, generator=g, dtype=torch.float64) / largest
    bias = torch.randn(3, generator=g, dtype=torch.float64)
    kind = 0 if seed % 5 == 1 and largest > 8 else seed % 5
    if kind == 0:
        y = torch.randn(n, length, d, generator=g, dtype=torch.float64)
        return TokenSquaredError(), y, lambda z: (z - y).pow(2).mean()
    if kind == 1:
        t = torch.randint(0, d, (n, length), generator=g)
        if n * length > 1:
            t[0, 0] = -100
        return TokenCrossEntropy(), t, lambda z: F.cross_entropy(z.flatten(0, 1), t.flatten())
    if kind == 2:
        t = torch.randint(0, 3, (n, length), generator=g)
        loss = LinearHeadCrossEntropy(head, bias)
        return loss, t, lambda z: F.cross_entropy((z @ head.T + bias).flatten(0, 1), t.flatten())
    t = torch.randint(0, 3, (n,), generator=g)
    if kind == 3:
        return (
            PooledCrossEntropy(head, bias),
            t,
            lambda z: F.cross_entropy(z.mean(1) @ head.T + bias, t),
        )
    return (
        PooledCrossEntropy(head, pooling="first"),
        t,
        lambda z: F.cross_entropy(z[:, 0] @ head.T, t),
    )


def prepare(seed: int) -> tuple[Case, BlockDerivatives, dict[str, Tensor]]:
    case = random_case(seed)
    x = case.x.detach()
    outputs = block(case.spec, case.weights, x, case.keys)
    loss, targets, plain = random_loss(seed, outputs.detach())
    reference = parts(outputs, plain, list(case.weights.values()))
    module = TransformerBlockHessian.from_weights(case.spec, case.weights)
    padding = None if case.keys is None else ~case.keys
    found = module.derivatives(
        x, targets, loss=loss, key_padding_mask=padding, budget=budget_of(seed)
    )
    return case, found, reference


def budget_of(seed: int) -> str | None:
    """One piece, and every fifth in pieces: of larger blocks these take 3 and 5 times as long."""
    return {0: "20kB", 5: "60kB"}.get(seed % 10, random.Random(seed).choice([None, "200kB"]))


def test_the_sweep_mixes_every_pair_of_options_that_chance_mixes() -> None:
    cases = {
        seed: options_of(random_case(seed), loss=seed % 5, budget=budget_of(seed))
        for seed in range(220)
    }
    assert pairs_of(cases[seed] for seed in SEEDS) == pairs_of(cases.values())


def distance(got: Tensor, want: Tensor, whole: Tensor) -> float:
    """‖got − want‖/‖want‖; a part that is rounding noise of the whole is measured by the whole."""
    scale = max(float(torch.linalg.norm(want)), 1e-4 * float(torch.linalg.norm(whole)), 1e-30)
    return float(torch.linalg.norm(got - want)) / scale


@pytest.mark.parametrize("group", range(len(SEEDS) // PER_GROUP))
def test_dense_hessian_and_its_parts_equal_double_backward(group: int) -> None:
    for seed in SEEDS[group * PER_GROUP : (group + 1) * PER_GROUP]:
        case, found, reference = prepare(seed)
        for part in ("total", "outer", "functional"):
            matrix = found.dense(part)  # type: ignore[arg-type]
            error = distance(matrix, reference[part], reference["total"])
            assert error <= TOLERANCE, f"seed {seed}, {part}: {error:.1e}, {case.spec}"


@pytest.mark.parametrize("seed", [50, *(s for s in range(300, 320) if s != 306)])
def test_diagonal_norms_blocks_and_products_equal_the_dense_matrix(seed: int) -> None:
    case, found, reference = prepare(seed)
    pick = random.Random(seed)
    whole = reference["total"]
    for part in ("total", "outer", "functional"):
        want = reference[part]
        scale = float(torch.linalg.norm(whole)) + 1e-30

        def error(got: Tensor, reference: Tensor, scale: float = scale) -> float:
            return float(torch.linalg.norm(got - reference)) / scale

        assert error(found.diagonal(part), want.diagonal()) <= TOLERANCE, case.spec
        starts = {name: slice(s, s + size) for name, (s, size) in found.offsets.items()}
        norms = found.frobenius(part)
        for i, a in enumerate(found.names):
            for j, b in enumerate(found.names):
                block_norm = torch.linalg.norm(want[starts[a], starts[b]])
                # A norm from Gram matrices is a root of a sum: half the digits near zero.
                squares = abs(float(norms[i, j] ** 2 - block_norm**2))
                assert squares <= TOLERANCE * scale**2, (a, b, case.spec)
        a, b = pick.choice(found.names), pick.choice(found.names)
        piece = want[starts[a], starts[b]]
        assert error(found.block(a, b, part), piece) <= TOLERANCE, (a, b, case.spec)
        v = torch.randn(piece.shape[1], 2, dtype=piece.dtype)
        product = found.block_product(a, b, part) @ v
        assert error(product, piece @ v) <= TOLERANCE * 10, (a, b, case.spec)
        trace = float(want[starts[a], starts[a]].trace())
        assert abs(found.traces(part)[a] - trace) <= TOLERANCE * 10 * scale, (a, case.spec)


@pytest.mark.parametrize("seed", range(400, 412))
def test_zero_structure_is_exactly_the_pattern_of_generic_weights(seed: int) -> None:
    case, found, reference = prepare(seed)
    zeros = structural_zeros(case.spec, found.names, length=case.x.shape[1])
    starts = {name: slice(s, s + size) for name, (s, size) in found.offsets.items()}
    floor = 1e-14 * float(torch.linalg.norm(reference["total"]))
    for part in ("total", "outer", "functional"):
        for a, b in zeros[part]:
            # Proven: not one entry may differ from zero by more than rounding of the reference.
            assert float(torch.linalg.norm(reference[part][starts[a], starts[b]])) <= floor, (a, b)
            if case.spec.rope_base is None:
                assert float(found.block(a, b, part).abs().max()) == 0.0, (a, b, part, case.spec)
