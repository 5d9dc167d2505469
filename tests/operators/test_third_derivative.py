"""ThirdDerivative against differences of H v, plain triple backward and definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
import families
from oracles import finite_difference_product, relative_error, with_hand_written_norms


def _problem(name: str, **options: Any) -> ca.Problem:
    model, batch, loss = families.make(name)
    return ca.Problem(model, loss, [batch], **options)


def _directions(problem: ca.Problem, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(count, problem.size, generator=generator, dtype=torch.float64)
    return list(drawn / drawn.norm(dim=1, keepdim=True))


def _hessian_product_at(problem: ca.Problem, vector: Tensor) -> Callable[[Tensor], Tensor]:
    """θ ↦ H(θ) vector by plain double backward, without the operators of the library."""
    layout = problem.layout

    def product(weights: Tensor) -> Tensor:
        leaf = weights.detach().requires_grad_(True)
        pieces = torch.split(leaf, list(layout.sizes))
        leaves = {
            n: p.reshape(s) for n, p, s in zip(layout.names, pieces, layout.shapes, strict=True)
        }
        total = leaf.new_zeros(())
        with problem.evaluating():
            for batch in problem.batches():
                value = problem.loss.value(problem.outputs(batch, leaves), batch.targets)
                total = total + batch.count * value / problem.normaliser
            (slope,) = torch.autograd.grad(total, leaf, create_graph=True)
            return torch.autograd.grad(slope @ vector, leaf)[0]

    return product


def _by_differences(problem: ca.Problem, u: Tensor, v: Tensor, *, step: float = 1e-3) -> Tensor:
    """d/ds H(θ + s v) u, central differences of order eight."""
    return finite_difference_product(
        _hessian_product_at(problem, u), problem.parameters, v, step=step
    )


@pytest.mark.parametrize(
    "name",
    [
        "zoo gpt pre-norm",
        "zoo gpt rms swiglu rope tied",
        "zoo vit pre-norm",
        "zoo vit post-norm",
        "torch encoder pre-norm",
        "torch multihead",
        "hf gpt2",
        "hf llama",
    ],
)
def test_contractions_equal_differences_of_hessian_products(name: str) -> None:
    problem = _problem(name)
    u, v = _directions(problem)
    third = ca.ThirdDerivative(problem)
    assert relative_error(third(v), _by_differences(problem, v, v)) < 1e-9
    assert relative_error(third[u, v, :], _by_differences(problem, u, v)) < 1e-9


def test_kinks_of_relu_leave_the_pieces_between_them() -> None:
    problem = _problem("zoo gpt post-norm relu")
    (v,) = _directions(problem, 1)
    want = _by_differences(problem, v, v, step=1e-5)
    assert relative_error(ca.ThirdDerivative(problem)(v), want) < 1e-7


def test_a_padding_row_that_gets_no_gradient_is_held_fixed() -> None:
    problem = _problem("hf bert")
    (v,) = _directions(problem, 1)
    moved = v.clone()
    moved[: problem.layout.shapes[0][1]] = 0.0  # padding_idx=0: the first row of the first weight
    want = _by_differences(problem, moved, moved, step=1e-5)
    third = ca.ThirdDerivative(problem)
    assert relative_error(third(moved), want) < 1e-6
    assert relative_error(third(v), third(moved)) < 1e-12


def test_triple_backward_through_the_fused_norm_would_be_wrong() -> None:
    problem = _problem("zoo vit pre-norm")
    (v,) = _directions(problem, 1)
    leaf = problem.parameters.requires_grad_(True)
    pieces = torch.split(leaf, list(problem.layout.sizes))
    shapes = zip(problem.layout.names, pieces, problem.layout.shapes, strict=True)
    leaves = {n: p.reshape(s) for n, p, s in shapes}
    batch = next(problem.batches())
    with problem.evaluating():
        value = problem.loss.value(problem.outputs(batch, leaves), batch.targets)
    for _ in range(2):
        value = torch.autograd.grad(value, leaf, create_graph=True)[0] @ v
    (plain,) = torch.autograd.grad(value, leaf)
    assert relative_error(plain, ca.ThirdDerivative(problem)(v)) > 1e-3


def test_the_tensor_is_symmetric_in_all_three_places() -> None:
    problem = _problem("zoo gpt pre-norm")
    u, v, w = _directions(problem, 3)
    third = ca.ThirdDerivative(problem)
    values = [third(u, v) @ w, third(v, w) @ u, third(w, u) @ v, third(v, u) @ w]
    spread = max(values) - min(values)
    assert float(spread) < 1e-12 * float(third(u, v).norm())


def test_uneven_batches_equal_the_concatenated_batch() -> None:
    model, (inputs, targets), loss = families.make("zoo gpt pre-norm")
    whole = ca.Problem(model, loss, [(inputs, targets)])
    parts = ca.Problem(model, loss, [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])])
    u, v = _directions(whole)
    got, want = ca.ThirdDerivative(parts)(u, v), ca.ThirdDerivative(whole)(u, v)
    assert relative_error(got, want) < 1e-13


def test_some_parameters_give_their_part_of_the_tensor() -> None:
    chosen = ["blocks.0.attention.*", "*norm*"]
    whole, some = _problem("zoo vit pre-norm"), _problem("zoo vit pre-norm", parameters=chosen)
    u, v = _directions(some)
    starts = dict(zip(whole.layout.names, whole.layout.starts, strict=True))
    sizes = dict(zip(whole.layout.names, whole.layout.sizes, strict=True))
    places = torch.cat([torch.arange(starts[n], starts[n] + sizes[n]) for n in some.layout.names])
    wide_u, wide_v = whole.parameters.new_zeros(2, whole.size)
    wide_u[places], wide_v[places] = u, v
    want = ca.ThirdDerivative(whole)(wide_u, wide_v)[places]
    assert relative_error(ca.ThirdDerivative(some)(u, v), want) < 1e-12


def test_the_hessian_along_a_direction_is_an_operator_with_views() -> None:
    problem = _problem("zoo vit post-norm")
    u, v = _directions(problem)
    third = ca.ThirdDerivative(problem)
    along = third.along(v)
    assert relative_error(
        along @ torch.stack([u, v], 1), torch.stack([third(u, v), third(v)], 1)
    ) < (1e-12)
    places = torch.arange(40, 80)
    block = along[places, places].dense()
    assert relative_error(block, block.T) < 1e-12
    unit = torch.zeros_like(u)
    unit[41] = 1.0
    assert relative_error(block[:, 1], third(unit, v)[places]) < 1e-12


def test_it_follows_the_weights_after_a_step() -> None:
    problem = _problem("zoo vit post-norm")
    (v,) = _directions(problem, 1)
    third = ca.ThirdDerivative(problem)
    before = third(v)
    with torch.no_grad():
        problem.model.get_parameter(problem.layout.names[-2]).mul_(1.5)
    fresh = ca.ThirdDerivative(problem)(v)
    assert relative_error(third(v), fresh) < 1e-14
    assert relative_error(before, fresh) > 1e-3


def test_float32_agrees_with_float64() -> None:
    model, (inputs, targets), loss = families.make("zoo vit pre-norm")
    double = ca.Problem(model, loss, [(inputs, targets)])
    (v,) = _directions(double, 1)
    want = ca.ThirdDerivative(double)(v)
    single = ca.Problem(model.float(), loss, [(inputs.float(), targets)])
    got = ca.ThirdDerivative(single)(v)
    assert got.dtype == torch.float32
    assert relative_error(got.double(), want) < 1e3 * torch.finfo(torch.float32).eps


class _Fused(nn.Module):
    """Calls the norm's kernel where no replacement sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.ones(6))
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.native_layer_norm(self.first(x), [6], self.gain, self.shift, 1e-5)[0]
        result: Tensor = self.last(hidden.tanh())
        return result


def test_a_kernel_with_a_wrong_third_derivative_is_refused() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 1]))]
    problem = ca.Problem(_Fused().double(), "cross_entropy", data)
    (v,) = _directions(problem, 1)
    with pytest.raises(ca.errors.DifferentiationError, match="third derivative"):
        ca.ThirdDerivative(problem)(v)


def test_a_quadratic_loss_has_none() -> None:
    data = [(torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64))]
    problem = ca.Problem(nn.Linear(4, 2).double(), "mse", data)
    (v,) = _directions(problem, 1)
    assert float(ca.ThirdDerivative(problem)(v).abs().max()) == 0.0


def test_wrong_vectors_are_refused_by_name() -> None:
    problem = _problem("torch multihead")
    third = ca.ThirdDerivative(problem)
    v = torch.ones(problem.size, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"v has shape \(3,\), the parameters are a flat vector"):
        third(v, v[:3])
    with pytest.raises(ca.errors.NonFiniteError, match="u holds NaN"):
        third(v * float("nan"))
    with pytest.raises(TypeError, match=r"T\[u, v\] takes two vectors, got 1"):
        third[v]
    model, batch, loss = families.make("zoo gpt pre-norm")
    checkpointed = ca.Problem(model, loss, [batch], checkpoint_activations=True)
    with pytest.raises(ca.errors.ProblemError, match="not three times"):
        ca.ThirdDerivative(checkpointed).along(torch.ones(checkpointed.size))


def test_eigenvalue_rates_of_a_multiple_eigenvalue_are_those_of_its_branches() -> None:
    # L = ½|θ|² + c θ₁³/6 + e θ₁ θ₂²/2: H = I at 0 splits along θ₁ at rates c and e.
    class Cubic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            a, b, _ = self.theta
            cubic = 2.0 * a**3 / 6 + 0.5 * a * b**2 / 2
            return (0.5 * self.theta.square().sum() + cubic) * x

    problem = ca.Problem(Cubic(), lambda z, _: z.mean(), [(torch.ones(1, 1).double(),) * 2])
    basis = torch.eye(3, dtype=torch.float64)
    rates = ca.ThirdDerivative(problem).eigenvalue_rate(basis, basis[0])
    assert torch.allclose(rates, torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64), atol=1e-14)


def test_hand_written_norms_change_nothing() -> None:
    model, batch, loss = families.make("hf vit")
    problem = ca.Problem(model, loss, [batch])
    (v,) = _directions(problem, 1)
    got = ca.ThirdDerivative(problem)(v)
    written = ca.Problem(with_hand_written_norms(model), loss, [batch])
    assert relative_error(got, ca.ThirdDerivative(written)(v)) < 1e-12
