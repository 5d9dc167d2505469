"""The Jacobian and its transpose against backward passes, row after row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
import families
import oracles
from curvatlas.errors import DifferentiationError, NonFiniteError


def _main(raw: object) -> Tensor:
    return raw if isinstance(raw, Tensor) else raw.logits  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name",
    ["zoo gpt pre-norm", "torch encoder post-norm", "zoo vit post-norm", "hf gpt2", "hf llama"],
)
def test_both_products_are_those_of_the_dense_jacobian(name: str) -> None:
    model, batch, loss = families.make(name)
    problem = ca.Problem(model, loss, batch)
    jacobian = ca.Jacobian(problem)
    inputs = next(problem.batches()).inputs
    with problem.evaluating():
        outputs = _main(model(**inputs) if isinstance(inputs, dict) else model(inputs))
        assert jacobian.shape == (outputs.numel(), problem.size)
        assert jacobian.output_shapes == [[outputs.shape]]
        varying = dict(model.named_parameters())
        rows = torch.randperm(outputs.numel())[:7]
        want = oracles.jacobian(
            outputs.reshape(-1)[rows], [varying[n] for n in problem.parameter_names]
        )
    v = torch.randn(problem.size, 3, dtype=torch.float64)
    scale = float(want.norm())
    assert float(((jacobian @ v)[rows] - want @ v).norm()) < 1e-13 * scale * float(v.norm())
    u = torch.zeros(len(outputs.reshape(-1)), 2, dtype=torch.float64)
    u[rows] = torch.randn(7, 2, dtype=torch.float64)
    assert oracles.relative_error(jacobian.T @ u, want.T @ u[rows]) < 1e-13


def _mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def _regression(sizes: tuple[int, ...] = (5, 2, 3)) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in sizes]


def test_rows_are_stacked_in_the_order_of_the_data() -> None:
    model, data = _mlp(), _regression()
    jacobian = ca.Jacobian(ca.Problem(model, "mse", data))
    outputs = model(torch.cat([x for x, _ in data]))
    want = oracles.jacobian(outputs, list(model.parameters()))
    assert oracles.relative_error(jacobian.dense(), want) < 1e-14
    assert oracles.relative_error(jacobian.T.dense(), want.T) < 1e-14
    assert [shapes[0][0] for shapes in jacobian.output_shapes] == [5, 2, 3]


def test_gauss_newton_is_the_jacobian_with_the_losss_hessian_between() -> None:
    problem = ca.Problem(_mlp(), "mse", _regression())
    jacobian = ca.Jacobian(problem)
    gram = (2 / jacobian.shape[0]) * (jacobian.T @ jacobian)
    assert gram.tags.psd
    assert oracles.relative_error(gram.dense(), ca.GaussNewton(problem).dense()) < 1e-13
    kernel = jacobian @ jacobian.T  # the empirical tangent kernel
    values = torch.linalg.eigvalsh(kernel.dense()).flip(0)[:5] * 2 / jacobian.shape[0]
    top = ca.eigenpairs(ca.GaussNewton(problem), k=5).values
    assert torch.allclose(values, top, rtol=1e-10)


def test_batches_whose_targets_are_all_ignored_have_rows_too() -> None:
    model = _mlp()
    x = torch.randn(2, 3, 3, dtype=torch.float64)
    data = [(x[0], torch.full((3,), -100)), (x[1], torch.tensor([0, 1, 0]))]
    jacobian = ca.Jacobian(ca.Problem(model, "cross_entropy", data))
    want = oracles.jacobian(model(torch.cat([x[0], x[1]])), list(model.parameters()))
    assert oracles.relative_error(jacobian.dense(), want) < 1e-14


def test_parameters_that_are_fixed_or_unused_have_no_say() -> None:
    model = _mlp()
    model.register_parameter("idle", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    data = _regression()
    some = ["1.weight", "3.bias", "idle"]
    jacobian = ca.Jacobian(ca.Problem(model, "mse", data, parameters=some))
    params = dict(model.named_parameters())
    names = [name for name in params if name in some]
    want = oracles.jacobian(model(torch.cat([x for x, _ in data])), [params[n] for n in names])
    assert oracles.relative_error(jacobian.dense(), want) < 1e-14
    last = jacobian[[0, 7], "3.bias"].dense()
    assert torch.allclose(last, torch.eye(2, dtype=torch.float64)[[0, 1]], atol=1e-15)


def test_several_output_tensors_are_stacked_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x).tanh(), self.two(x).exp()

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return (outputs[0].sum(1) * outputs[1][:, 0] - targets).pow(2).mean()

    torch.manual_seed(0)
    model, x = Two().double(), torch.randn(4, 3, dtype=torch.float64)
    problem = ca.Problem(model, loss, (x, torch.randn(4, dtype=torch.float64)))
    outputs = torch.cat([z.reshape(-1) for z in model(x)])
    want = oracles.jacobian(outputs, list(model.parameters()))
    assert oracles.relative_error(ca.Jacobian(problem).dense(), want) < 1e-14


def test_rows_follow_the_models_axes_also_where_classes_come_first() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv1d(2, 3, 2).double(), torch.randn(2, 2, 5, dtype=torch.float64)
    problem = ca.Problem(model, nn.CrossEntropyLoss(), (x, torch.randint(0, 3, (2, 4))))
    want = oracles.jacobian(model(x), list(model.parameters()))
    assert oracles.relative_error(ca.Jacobian(problem).dense(), want) < 1e-14


def test_a_small_budget_builds_graphs_anew_and_gives_the_same() -> None:
    problem = ca.Problem(_mlp(), "mse", _regression())
    rich, poor = ca.Jacobian(problem), ca.Jacobian(problem, budget=1)
    assert torch.allclose(rich.dense(), poor.dense(), rtol=0, atol=1e-15)
    assert (len(rich._kept), len(poor._kept)) == (3, 0)


def test_batches_that_are_streamed_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvatlas.problem.problem.HOLD_BYTES", 0)
    problem = ca.Problem(_mlp(), "mse", _regression())
    assert not problem.held
    jacobian = ca.Jacobian(problem)
    held = _mlp()(torch.cat([x for x, _ in _regression()]))
    assert jacobian.dense().shape == (held.numel(), problem.size)
    assert not jacobian._kept


def test_changed_weights_are_followed() -> None:
    model = _mlp()
    jacobian = ca.Jacobian(ca.Problem(model, "mse", _regression()))
    before = jacobian.dense()
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    fresh = ca.Jacobian(ca.Problem(model, "mse", _regression())).dense()
    assert oracles.relative_error(jacobian.dense(), fresh) < 1e-15
    assert oracles.relative_error(before, fresh) > 1e-2


def test_tensors_by_parameter_enter_and_outputs_come_out() -> None:
    problem = ca.Problem(_mlp(), "mse", _regression())
    jacobian = ca.Jacobian(problem)
    v = torch.randn(problem.size, dtype=torch.float64)
    assert torch.equal(jacobian @ problem.layout.shaped(v), jacobian @ v)


def test_a_wrong_double_backward_is_noticed() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, slope: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * slope.detach()  # the graph of u ↦ Jᵀu is cut

    class Cut(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Wrong.apply(super().forward(x)) + super().forward(x)

    torch.manual_seed(0)
    problem = ca.Problem(Cut(3, 2).double(), "mse", _regression())
    with pytest.raises(DifferentiationError, match="double backward"):
        ca.Jacobian(problem) @ torch.ones(problem.size, dtype=torch.float64)


def test_vectors_that_are_not_finite_are_refused() -> None:
    problem = ca.Problem(_mlp(), "mse", _regression())
    with pytest.raises(NonFiniteError, match="NaN"):
        ca.Jacobian(problem) @ torch.full((problem.size,), float("nan"), dtype=torch.float64)
