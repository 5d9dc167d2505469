"""Third derivatives along a line against finite differences of the true loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvatlas.layers.structure import WEIGHT_NAMES, BlockSpec
from curvatlas.theory import reference
from curvatlas.theory.reference import KINDS, draw_case
from curvatlas.theory.third_order import directional_derivatives
from theory_cases import stack_output, true_hessian


def _stack(seed: int) -> tuple[list[tuple[BlockSpec, dict[str, Tensor]]], Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    spec = BlockSpec(d_model=4, n_heads=2, d_ff=5, norm_first=seed % 2 == 1, eps=0.1)
    layers = [(spec, reference.draw_weights(spec, g, bias=True)) for _ in range(2)]
    x, y = torch.randn(2, 1, 3, 4, generator=g, dtype=torch.float64)
    return layers, x, y


@pytest.mark.parametrize("seed", [0, 1])
def test_a_stack_along_weights_and_input_matches_finite_differences(seed: int) -> None:
    layers, x, y = _stack(seed)
    g = torch.Generator().manual_seed(50 + seed)
    total = sum(w.numel() for _, weights in layers for w in weights.values())
    direction = torch.randn(total, generator=g, dtype=torch.float64) / total**0.5
    move = torch.randn(x.shape, generator=g, dtype=torch.float64)
    found = directional_derivatives(layers, x, y, direction, input_direction=move)

    def loss(t: float) -> float:
        start, moved = 0, []
        for spec, weights in layers:
            new = {}
            for name in (n for n in WEIGHT_NAMES if n in weights):
                size = weights[name].numel()
                new[name] = weights[name] + t * direction[start : start + size].view_as(
                    weights[name]
                )
                start += size
            moved.append((spec, new))
        return float(reference.loss_of("mse", y)(stack_output(moved, x + t * move)))

    h = 4e-3
    f = {k: loss(k * h) for k in range(-3, 4)}
    third = (f[-3] - 8 * f[-2] + 13 * f[-1] - 13 * f[1] + 8 * f[2] - f[3]) / (8 * h**3)
    second = (-f[2] + 16 * f[1] - 30 * f[0] + 16 * f[-1] - f[-2]) / (12 * h**2)
    assert found.value == pytest.approx(f[0], rel=1e-12)
    assert found.second == pytest.approx(second, rel=1e-5, abs=1e-7)
    assert found.third == pytest.approx(third, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_derivative_is_the_quadratic_form_of_the_hessian(kind: str) -> None:
    case = draw_case(torch.Generator().manual_seed(11), kind)
    hessian = true_hessian(case)
    v = torch.randn(len(hessian), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = directional_derivatives(
        (case.spec, case.weights), case.x, case.target, v, loss=case.loss
    )
    assert found.second == pytest.approx(float(v @ hessian @ v), rel=1e-10)


def test_one_name_moves_only_its_weight() -> None:
    case = draw_case(torch.Generator().manual_seed(12), "post-norm")
    name = "value_weight"
    found = directional_derivatives(
        (case.spec, case.weights), case.x, case.target, {name: case.weights[name]}, loss=case.loss
    )
    weights = reference.tracked(case.weights)
    z = reference.block_output(case.spec, weights, case.x)
    grad = torch.autograd.grad(reference.loss_of(case.loss, case.target)(z), weights[name])[0]
    assert found.first == pytest.approx(float((grad * case.weights[name]).sum()), rel=1e-10)


def test_the_polynomial_adds_its_terms() -> None:
    case = draw_case(torch.Generator().manual_seed(13), "attention")
    v = {n: torch.ones_like(w) for n, w in case.weights.items()}
    found = directional_derivatives(
        (case.spec, case.weights), case.x, case.target, v, loss=case.loss
    )
    t = 0.3
    assert found.predict(t, order=1) == pytest.approx(found.value + t * found.first)
    assert found.predict(t) == pytest.approx(
        found.value + t * found.first + t**2 * found.second / 2 + t**3 * found.third / 6
    )


def test_a_direction_of_the_wrong_size_is_refused() -> None:
    layers, x, y = _stack(0)
    with pytest.raises(ValueError, match="one number a parameter"):
        directional_derivatives(layers, x, y, torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="as many directions"):
        directional_derivatives(layers, x, y, {"up_weight": layers[0][1]["up_weight"]})


@pytest.mark.parametrize(
    "options", [{"rope_base": 100.0}, {"eps": 0.0}], ids=["rotary positions", "no epsilon"]
)
def test_rotary_positions_and_norms_without_epsilon_have_their_derivatives(
    options: dict[str, float],
) -> None:
    g = torch.Generator().manual_seed(3)
    spec = BlockSpec(d_model=4, n_heads=2, d_k=2, d_ff=5, **options)  # type: ignore[arg-type]
    weights = reference.draw_weights(spec, g, bias=True)
    x, y = torch.randn(2, 1, 3, 4, generator=g, dtype=torch.float64)
    move = {n: torch.randn(w.shape, generator=g, dtype=torch.float64) for n, w in weights.items()}
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    moved = {n: w + t * move[n] for n, w in weights.items()}
    truth = [reference.loss_of("mse", y)(reference.block_output(spec, moved, x))]
    for _ in range(3):
        truth += torch.autograd.grad(truth[-1], t, create_graph=True)
    found = directional_derivatives((spec, weights), x, y, move)
    for got, want in zip((found.first, found.second, found.third), truth[1:], strict=True):
        assert got == pytest.approx(float(want.detach()), rel=1e-9)
