"""The cases of curvlinops' suite (github.com/f-dangel/curvlinops), in our words."""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import curvatlas as ca
import oracles
from curvatlas.errors import ConvergenceError, ProblemError
from peers.cases import GROUPS
from peers.matrices import Opaque, drawn, error, turned
from peers.table import Table

table = Table("curvlinops", GROUPS)

LOSSES = {
    "cross-entropy": nn.CrossEntropyLoss,
    "MSE": nn.MSELoss,
    "BCE": nn.BCEWithLogitsLoss,
}


class ReadsDict(nn.Module):
    """forward(data) takes one mapping."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, outputs))

    def forward(self, data: Mapping[str, Tensor]) -> Tensor:
        result: Tensor = self.net(data["x"])
        return result


class ClassesFirst(nn.Module):
    """Sequences of logits in the layout of torch's cross-entropy, (B, classes, L)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).movedim(-1, 1)


def _function(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    hidden = functional.relu(functional.linear(x, parameters["W1"], parameters["b1"]))
    return functional.linear(hidden, parameters["W2"], parameters["b2"])


@dataclass
class Setup:
    """A model, its loss and two uneven batches; outputs and loss of all data at once."""

    model: Any
    loss: nn.Module
    batches: list[tuple[Any, Tensor]]
    parameters: dict[str, Tensor] | None = None

    def problem(self, **options: Any) -> ca.Problem:
        return ca.Problem(
            self.model, self.loss, self.batches, parameters=self.parameters, **options
        )

    def leaves(self) -> list[Tensor]:
        if self.parameters is not None:
            return [p.requires_grad_() for p in self.parameters.values()]
        return list(self.model.parameters())

    def outputs(self) -> Tensor:
        first = self.batches[0][0]
        if isinstance(first, Mapping):
            inputs: Any = {"x": torch.cat([x["x"] for x, _ in self.batches])}
        else:
            inputs = torch.cat([x for x, _ in self.batches])
        if self.parameters is not None:
            return _function(dict(zip(self.parameters, self.leaves(), strict=True)), inputs)
        result: Tensor = self.model(inputs)
        return result

    def targets(self) -> Tensor:
        return torch.cat([y for _, y in self.batches])

    def value(self, outputs: Tensor | None = None) -> Tensor:
        result: Tensor = self.loss(self.outputs() if outputs is None else outputs, self.targets())
        return result

    def hessian(self) -> Tensor:
        return oracles.hessian(self.value(), self.leaves())

    def gauss_newton(self) -> Tensor:
        return oracles.outer_hessian(self.outputs(), self.value, self.leaves())

    def empirical_fisher(self) -> Tensor:
        """(1/N) Σ g gᵀ (Σ for a sum) over the targets' own losses, the mean over outputs inside."""
        outputs, targets, leaves = self.outputs(), self.targets(), self.leaves()
        if isinstance(self.loss, nn.CrossEntropyLoss):
            outputs = outputs.movedim(1, -1)
            targets = targets.reshape(-1)
        else:
            targets = targets.reshape(-1, targets.shape[-1])
        own = type(self.loss)(reduction=self.loss.reduction)
        slopes = []
        for z, y in zip(outputs.reshape(-1, outputs.shape[-1]), targets, strict=True):
            slope = torch.autograd.grad(own(z[None], y[None]), leaves, retain_graph=True)
            slopes.append(oracles.flat(slope, leaves))
        rows = torch.stack(slopes)
        total = rows.T @ rows
        return total / len(rows) if self.loss.reduction == "mean" else total


def setup(name: str) -> Setup:
    """The problem of that name: tiny, float64, batches of 3 and 4 samples."""
    torch.manual_seed(0)
    kind = next(key for key in LOSSES if key in name)
    reduction = "sum" if name.endswith("sum") else "mean"
    outputs = 1 if "one output" in name else 2 if kind == "BCE" else 3
    shape = (5,) if "sequences" in name else ()
    net: Any = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, outputs))
    if "dict" in name:
        net = ReadsDict(outputs)
    elif shape and kind == "cross-entropy":
        net = ClassesFirst(net)
    batches: list[tuple[Any, Tensor]] = []
    for place, size in enumerate((3, 4)):
        x: Any = torch.rand(size, *shape, 6, dtype=torch.float64)
        if kind == "cross-entropy":
            y = torch.randint(0, outputs, (size, *shape))
        else:
            y = torch.rand(size, *shape, outputs, dtype=torch.float64)
        if "dict" in name:
            x = UserDict({"x": x}) if place == 0 else {"x": x}
        batches.append((x, y))
    loss = LOSSES[kind](reduction=reduction)
    if "function" in name:
        shapes = {"W1": (4, 6), "b1": (4,), "W2": (3, 4), "b2": (3,)}
        parameters = {n: torch.rand(s, dtype=torch.float64) for n, s in shapes.items()}
        return Setup(_function, loss, batches, parameters)
    return Setup(net.double(), loss, batches)


def _agree(op: ca.LinearOperator, want: Tensor) -> None:
    """The matrix, and products with a vector, columns and rows."""
    assert op.shape == tuple(want.shape)
    scale = float(want.abs().max()) + 1e-300
    right, left = drawn(want.shape[1], 2, seed=1), drawn(2, want.shape[0], seed=2)
    for got, expected in [
        (op.dense(), want),
        (op @ right, want @ right),
        (op @ right[:, 0], want @ right[:, 0]),
        (left @ op, left @ want),
    ]:
        assert float((got - expected).abs().max()) <= 1e-12 * scale * max(want.shape)


# --- operators of a problem -----------------------------------------------------------------------


@table.right("Hessian")
def test_hessians_agree_with_double_backward(case: str) -> None:
    _agree(ca.Hessian(setup(case).problem()), setup(case).hessian())


@table.right("Gauss-Newton matrix")
def test_gauss_newton_matrices_agree_with_their_definition(case: str) -> None:
    _agree(ca.GaussNewton(setup(case).problem()), setup(case).gauss_newton())


@table.right("sampled Gauss-Newton matrix, in expectation")
def test_sampled_matrices_approach_the_exact_one(case: str) -> None:
    """The error of 100 samples is 0.085 ± 0.02 where it is largest: 0.2 lies 5 deviations off."""
    name, how = case.split("; ")
    problem, want = setup(name).problem(), setup(name).gauss_newton()
    samples, seeds = (100, 1) if how == "many samples" else (25, 4)
    drawn_ones = [
        ca.Fisher(problem, kind="mc", samples=samples, seed=seed).dense() for seed in range(seeds)
    ]
    assert error(torch.stack(drawn_ones).mean(0), want) < 0.2
    if seeds > 1:
        assert error(drawn_ones[0], drawn_ones[1]) > 1e-3  # seeds differ


@table.right("empirical Fisher")
def test_empirical_fishers_agree_with_their_definition(case: str) -> None:
    problem = setup(case).problem()
    _agree(ca.Fisher(problem, kind="empirical"), setup(case).empirical_fisher())


@table.right("Jacobian")
def test_jacobians_agree_with_backward_passes(case: str) -> None:
    whole = setup(case)
    want = oracles.jacobian(whole.outputs(), whole.leaves())
    _agree(ca.Jacobian(setup(case).problem()), want)


@table.right("Jacobian, transposed")
def test_transposed_jacobians_agree_with_backward_passes(case: str) -> None:
    whole = setup(case)
    want = oracles.jacobian(whole.outputs(), whole.leaves())
    _agree(ca.Jacobian(setup(case).problem()).T, want.T)


@table.right("diagonal of the Gauss-Newton matrix")
def test_diagonals_of_gauss_newton_are_exact(case: str) -> None:
    found = ca.diagonal(ca.GaussNewton(setup(case).problem()))
    assert found.exact
    assert error(found.values.double(), setup(case).gauss_newton().diagonal()) < 1e-11


@table.right("gradient and loss")
def test_gradients_and_losses_agree_with_one_backward_pass(case: str) -> None:
    problem, whole = setup(case).problem(), setup(case)
    value = whole.value()
    want = oracles.gradient(whole.value(), whole.leaves())
    assert problem.value() == pytest.approx(float(value.detach()), rel=1e-13)
    assert error(problem.gradient(), want) < 1e-13


@functools.cache
def _operator(name: str, kind: str) -> tuple[ca.LinearOperator, Tensor]:
    problem = setup(name).problem()
    op = ca.Fisher(problem, kind="empirical") if kind == "Fisher" else getattr(ca, kind)(problem)
    return op, op.dense()


@table.right("submatrices by index")
def test_submatrices_are_those_of_the_matrix(case: str) -> None:
    name, kind, pattern = case.split("; ")
    op, matrix = _operator(name, kind)
    n = len(matrix)
    every = {
        "even": list(range(0, n, 2)),
        "odd": list(range(1, n, 2)),
        "every third": list(range(0, n, 3)),
    }
    rows, columns = (every[part] for part in pattern.split(" × "))
    _agree(op[rows, columns], matrix[rows][:, columns])


@table.right("indices that cannot be")
def test_impossible_indices_are_refused_and_repeated_ones_repeat(case: str) -> None:
    op = ca.Hessian(setup("MSE, mean").problem())
    rows, columns = {
        "floats as rows": ([0.0], [0]),
        "floats as columns": ([0], [0.0]),
        "a row twice": ([2, 1, 2], [3]),
        "a column twice": ([3], [2, 1, 2]),
        "a row out of bounds": ([1_000_000_000_000, 5], [2]),
        "a column out of bounds": ([6, 5], [-1 - op.shape[1]]),
    }[case]
    if "twice" in case:
        _agree(op[rows, columns], op.dense()[rows][:, columns])
        return
    with pytest.raises(TypeError if "floats" in case else IndexError):
        op[rows, columns]


# --- the loss at the outputs ----------------------------------------------------------------------


def _of_outputs(case: str) -> tuple[ca.Problem, Tensor]:
    """A problem whose outputs are its parameters, and ∂²ℓ/∂Z² by double backward."""
    kind, reduction, shape_text = case.split(", ", 2)
    shape = tuple(int(n) for n in shape_text.removeprefix("outputs ").strip("(),").split(", "))
    torch.manual_seed(0)
    z = torch.randn(1, *shape, dtype=torch.float64)
    if kind == "cross-entropy":
        y = torch.randint(0, shape[0], (1, *shape[1:]))
    else:
        y = torch.rand(1, *shape, dtype=torch.float64)
    loss = LOSSES[kind](reduction=reduction)
    leaf = z.clone().requires_grad_()
    want = oracles.hessian(loss(leaf, y), [leaf])
    inputs = torch.zeros(1, 1, dtype=torch.float64)
    problem = ca.Problem(lambda p, x: p["z"] + 0 * x.sum(), loss, (inputs, y), parameters={"z": z})
    return problem, want


@table.right("the Hessian of a loss at the outputs")
def test_the_hessian_of_a_loss_at_the_outputs_is_exact(case: str) -> None:
    problem, want = _of_outputs(case)
    assert error(ca.GaussNewton(problem).dense(), want) < 1e-13
    assert error(ca.Hessian(problem).dense(), want) < 1e-13


@table.right("sampled slopes of a loss have its Hessian as their second moment")
def test_sampled_slopes_have_the_right_second_moment(case: str) -> None:
    problem, want = _of_outputs(case)
    got = ca.Fisher(problem, kind="mc", samples=400).dense()
    assert float((got - want).abs().max()) < 0.3 * float(want.abs().max())


# --- forms of vectors -----------------------------------------------------------------------------


@table.right("vectors and matrices in every form come back in theirs")
def test_products_come_back_in_the_form_they_were_given(case: str) -> None:
    problem = setup("MSE, mean").problem()
    op, dense = ca.Hessian(problem), ca.Hessian(problem).dense()
    columns = drawn(problem.size, 3)
    flat = columns if "columns" in case or "matrix" in case else columns[:, 0]
    if "list" not in case:
        got = op @ flat
        assert got.shape == flat.shape
    else:
        tensors = problem.layout.shaped(flat)
        pieces = op @ tensors
        assert [p.shape for p in pieces] == [t.shape for t in tensors]
        got = problem.layout.flat(pieces)
    assert error(got, dense @ flat) < 1e-13


@table.right("inputs that do not fit are refused")
def test_inputs_that_do_not_fit_are_refused(case: str) -> None:
    problem = setup("MSE, mean").problem()
    op, n = ca.Hessian(problem), problem.size
    zeros = problem.layout.shaped(torch.zeros(n, dtype=torch.float64))
    wide = [z.unsqueeze(-1).expand(*z.shape, k) for z, k in zip(zeros, (6, 6, 7, 6), strict=True)]
    vector: Any = {
        "a vector that is too short": torch.zeros(n - 1, dtype=torch.float64),
        "a matrix that is too short": torch.zeros(n - 1, 6, dtype=torch.float64),
        "a tensor of another shape": [zeros[0].T, *zeros[1:]],
        "different numbers of columns": wide,
        "too few tensors": zeros[:1],
        "numbers in a list": [1.0, 2.0, 3.0],
    }[case]
    with pytest.raises((ValueError, TypeError)):
        op @ vector


@table.right("operators without entries")
def test_operators_without_entries_are_refused(case: str) -> None:
    shape = {"no rows and columns": (0, 0), "no rows": (0, 3), "no columns": (3, 0)}[case]
    op = ca.MatrixOperator(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"empty|square"):
        ca.eigenpairs(op, k=1)


# --- data -----------------------------------------------------------------------------------------


@table.right("a dict as input needs no word on the batch size")
def test_a_mapping_as_input_needs_no_word_on_the_batch_size(case: str) -> None:
    whole = setup("a dict as input, MSE")
    kind = {"dict": dict, "UserDict": UserDict}[case]
    whole.batches = [(kind({"x": x["x"]}), y) for x, y in whole.batches]
    _agree(ca.Hessian(whole.problem()), setup("a dict as input, MSE").hessian())


def _loader(sizes: int, batch: int, **options: Any) -> torch.utils.data.DataLoader[Any]:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.rand(sizes, 6, dtype=torch.float64), torch.randint(0, 3, (sizes,))
    )
    return torch.utils.data.DataLoader(data, batch_size=batch, **options)


@table.right("randomness is not averaged over in silence")
def test_randomness_is_refused_or_frozen(case: str) -> None:
    torch.manual_seed(0)
    middle = {"dropout": nn.Dropout(), "batch normalisation": nn.BatchNorm1d(4)}
    layers = [nn.Linear(6, 4), middle.get(case, nn.ReLU()), nn.Linear(4, 3)]
    model = nn.Sequential(*layers).double()
    if case in middle:
        problem = ca.Problem(model, "cross_entropy", _loader(12, 3))
        with pytest.raises(ProblemError, match=r"model\.eval\(\)"):
            ca.Hessian(problem) @ drawn(problem.size)
        return
    problem = ca.Problem(model, "cross_entropy", _loader(12, 5, shuffle=True, drop_last=True))
    assert error(ca.Hessian(problem).dense(), ca.Hessian(problem).dense()) == 0
    assert problem.total_count == 10


@table.right("batches that change from pass to pass")
def test_batches_that_change_from_pass_to_pass_are_kept_as_they_were(case: str) -> None:
    class Permuted:
        def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
            for x, y in setup("MSE, mean").batches:
                order = torch.randperm(len(y))
                yield x[order], y[order]

    problem = ca.Problem(setup("MSE, mean").model, nn.MSELoss(), Permuted())
    _agree(ca.Hessian(problem), setup("MSE, mean").hessian())


@table.right("what a model may be")
def test_models_are_modules_or_functions(case: str) -> None:
    x, y = drawn(3, 2), drawn(3, 1, seed=1)
    module = nn.Linear(2, 1).double()
    want = 2 / 3 * x.T @ x
    if "string" in case:
        with pytest.raises(ProblemError, match="Module"):
            ca.Problem("not a model", nn.MSELoss(), [(x, y)])  # type: ignore[arg-type]
        return
    weights: Any = {"weight": module.weight}
    model: Any = module
    if "function" in case:
        model, weights = lambda p, inputs: inputs @ p["w"], {"w": drawn(2, 1, seed=2)}
    elif "list" in case:
        weights = [module.weight]
    problem = ca.Problem(model, nn.MSELoss(), [(x, y)], parameters=weights)
    assert error(ca.Hessian(problem).dense(), want) < 1e-14


@pytest.mark.filterwarnings("ignore:the budget of 1 kB")
@table.right("models that mix their batch")
def test_a_model_that_mixes_its_batch_is_not_cut(case: str) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x).tanh()
            return hidden - hidden.mean()

    torch.manual_seed(0)
    model, x, y = Centred().double(), drawn(5, 4), drawn(5, 2, seed=1)
    want = oracles.hessian((model(x) - y).pow(2).mean(), list(model.parameters()))
    problem = ca.Problem(model, "mse", (x, y))
    for budget in (None, "1GB", "1KB"):
        assert error(ca.Hessian(problem, budget=budget).dense(), want) < 1e-12


# --- algebra --------------------------------------------------------------------------------------

A, B = torch.linspace(1, 10, 20, dtype=torch.float64).reshape(5, 4), drawn(5, 4, seed=3)


@table.right("sums of operators")
def test_sums_of_operators(case: str) -> None:
    left, right = ca.MatrixOperator(A), ca.MatrixOperator(B)
    _agree(left + right if "+" in case else left - right, A + B if "+" in case else A - B)


@table.right("multiples of operators")
def test_multiples_of_operators(case: str) -> None:
    op = ca.MatrixOperator(A)
    got = {"c · A": 0.1 * op, "A · c": op * 0.1, "A / c": op / 10.0}[case]
    _agree(got, A / 10)


@table.right("chains of operators")
def test_chains_of_operators(case: str) -> None:
    second, third = drawn(4, 3, seed=4), drawn(3, 2, seed=5)
    left, right = ca.MatrixOperator(A), ca.MatrixOperator(third)
    if case == "three factors":
        chain = left @ ca.MatrixOperator(second) @ right
        _agree(chain, A @ second @ third)
        assert len(chain.members) == 3
        return
    bad = ca.MatrixOperator(second.float() if "dtype" in case else second.T)
    with pytest.raises(TypeError if "dtype" in case else ValueError):
        left @ bad


@table.right("diagonal operators")
def test_diagonal_operators(case: str) -> None:
    d, e = drawn(11, seed=1).abs() + 0.1, drawn(11, seed=2)
    left, right = ca.DiagonalOperator(d), ca.DiagonalOperator(e)
    got, want = {
        "products": (left, d),
        "sum": (left + right, d + e),
        "difference": (left - right, d - e),
        "c · D": (0.1 * left, 0.1 * d),
        "D · c": (left * 0.1, 0.1 * d),
        "D / c": (left / 0.1, d / 0.1),
        "D @ E": (left @ right, d * e),
        "damped inverse": (ca.inverse(left, damping=1.0), 1 / (d + 1)),
    }[case]
    assert isinstance(got, ca.DiagonalOperator)
    _agree(got, torch.diag(want))


def _psd(n: int, seed: int) -> Tensor:
    root = drawn(n, n, seed=seed)
    matrix = root @ root.T + 0.1 * torch.eye(n, dtype=torch.float64)
    return (matrix + matrix.T) / 2


def _properties(case: str, op: ca.LinearOperator, matrix: Tensor) -> None:
    """Trace, determinants and Frobenius norm of a square positive definite operator."""
    if case == "trace":
        assert ca.trace(op).value == pytest.approx(float(matrix.trace()), rel=1e-12)
    elif case == "Frobenius norm":
        assert ca.frobenius_norm(op).value == pytest.approx(float(matrix.norm()), rel=1e-10)
    else:
        want = float(torch.logdet(matrix))
        got = ca.log_determinant(op).value
        assert got == pytest.approx(want, rel=1e-10)
        if case == "determinant":
            assert np.exp(got) == pytest.approx(float(torch.det(matrix)), rel=1e-9)


def _composed(
    make: Callable[..., ca.LinearOperator], dense: Callable[..., Tensor], case: str
) -> None:
    if "rectang" in case:
        parts = [drawn(3, 2, seed=1), drawn(4, 3, seed=2), drawn(2, 5, seed=3)]
        op = make([ca.MatrixOperator(part) for part in parts])
        if "no" in case.split():
            with pytest.raises(ValueError, match="square"):
                ca.trace(op) if "trace" in case else ca.log_determinant(op)
            return
        _agree(op, dense(parts))
        assert ca.frobenius_norm(op).value == pytest.approx(float(dense(parts).norm()), rel=1e-10)
        return
    parts = [_psd(2, 1), _psd(4, 2), _psd(3, 3)]
    op, matrix = make([ca.MatrixOperator(part) for part in parts]), dense(parts)
    if case.startswith("square"):
        _agree(op, matrix)
    elif case == "damped inverse":
        eye = torch.eye(len(matrix), dtype=torch.float64)
        want = torch.linalg.inv(matrix + 1e-3 * eye)
        assert error(ca.inverse(op, damping=1e-3, rtol=1e-12).dense(), want) < 1e-8
    elif case == "damped by factor":
        inverses = [ca.inverse(ca.MatrixOperator(part), damping=1e-3) for part in parts]
        damped = [p + 1e-3 * torch.eye(len(p), dtype=torch.float64) for p in parts]
        assert error(make(inverses).dense(), torch.linalg.inv(dense(damped))) < 1e-10
    else:
        _properties(case, op, matrix)


@table.right("block-diagonal operators")
def test_block_diagonal_operators(case: str) -> None:
    _composed(ca.BlockDiagonalOperator, lambda parts: torch.block_diag(*parts), case)


@table.right("Kronecker products")
def test_kronecker_products(case: str) -> None:
    _composed(ca.KroneckerOperator, lambda p: torch.kron(torch.kron(p[0], p[1]), p[2]), case)


@table.right("operators from eigenpairs")
def test_operators_from_eigenpairs(case: str) -> None:
    values = torch.rand(6, dtype=torch.float64) + 1e-3
    vectors = torch.linalg.qr(drawn(6, 6))[0]
    matrix = vectors @ torch.diag(values) @ vectors.T
    basis = ca.MatrixOperator(vectors)
    op = basis @ ca.DiagonalOperator(values) @ basis.T
    assert op.tags == ca.Tags(symmetric=True, psd=True)
    if case == "products":
        _agree(op, matrix)
    elif case == "damped inverse":
        want = torch.linalg.inv(matrix + 1e-4 * torch.eye(6, dtype=torch.float64))
        assert error(ca.inverse(op, damping=1e-4, rtol=1e-12).dense(), want) < 1e-8
    else:
        _properties(case, op, (matrix + matrix.T) / 2)


@table.right("eigenpairs that do not fit together")
def test_eigenpairs_that_do_not_fit_together(case: str) -> None:
    values, vectors = torch.zeros(4), torch.zeros(4, 4)
    if case == "values in two axes":
        values = torch.zeros(4, 1)
    elif case == "vectors in one axis":
        vectors = torch.zeros(4)
    elif case == "vectors not square":
        vectors = torch.zeros(4, 5)
    else:
        values = torch.zeros(5)
    with pytest.raises(ValueError, match=r"diagonal|axes|undefined"):
        ca.MatrixOperator(vectors) @ ca.DiagonalOperator(values)


# --- inverses -------------------------------------------------------------------------------------


@table.right("the damped inverse of the Gauss-Newton matrix")
def test_damped_inverses_of_gauss_newton(case: str) -> None:
    name, how = case.split("; ")
    problem, matrix = setup(name).problem(), setup(name).gauss_newton()
    damping = 2e-2 * float(matrix.diagonal().mean())
    shifted = matrix + damping * torch.eye(len(matrix), dtype=torch.float64)
    op = ca.GaussNewton(problem)
    options: dict[str, Any] = {"method": "lsmr" if how == "LSMR" else "cg"}
    if how == "Jacobi preconditioner":
        options["preconditioner"] = ca.DiagonalOperator(1 / shifted.diagonal())
    made = ca.inverse(op, damping=damping, rtol=1e-11, **options)
    columns = drawn(len(matrix), 3)
    assert error(made @ columns, torch.linalg.solve(shifted, columns)) < 1e-7


_TOY = torch.eye(3, dtype=torch.float64) + torch.tensor(
    [[0, 1 / 2, 1 / 4], [5 / 7, 0, 1 / 7], [3 / 10, 3 / 5, 0]], dtype=torch.float64
)
_DOMINANT = torch.tensor([[5, 1, 1], [1, 4, 1], [1, 1, 3]], dtype=torch.float64)


@table.right("inverses by series")
def test_inverses_that_a_series_may_or_may_not_reach(case: str) -> None:
    if "series" in case:
        matrix = _TOY if "converges" in case else 2 * _TOY
        got = ca.inverse(Opaque(matrix), rtol=1e-12).dense()
    else:
        matrix = _DOMINANT
        diagonal = torch.full((3,), 0.3).double() if "identity" in case else 1 / matrix.diagonal()
        preconditioner = ca.DiagonalOperator(diagonal)
        got = ca.inverse(Opaque(matrix), preconditioner=preconditioner, rtol=1e-12).dense()
    assert error(got, torch.linalg.inv(matrix)) < 1e-10


@table.refused("inverses by series")
def test_inverses_that_are_refused(case: str) -> None:
    if case == "Gauss-Seidel preconditioner":
        lower = ca.MatrixOperator(torch.linalg.inv(_DOMINANT.tril()))
        with pytest.raises(ValueError, match="symmetric"):
            ca.inverse(Opaque(_DOMINANT), preconditioner=lower)
        return
    n = 40
    op = Opaque(turned(torch.linspace(1e-3, 1, n, dtype=torch.float64)), psd=True)
    with pytest.raises(ConvergenceError, match="residual"):
        ca.inverse(op, max_products=20 * n) @ torch.eye(n, dtype=torch.float64)


@table.right("KFAC as preconditioner where it is exact")
def test_exact_preconditioners_solve_in_a_step(case: str) -> None:
    torch.manual_seed(0)
    problem = ca.Problem(
        nn.Linear(3, 2, bias=False).double(), "mse", (drawn(6, 3), drawn(6, 2, seed=1))
    )
    op, damping, b = ca.GaussNewton(problem), 1e-3, drawn(6, seed=2)
    if case == "the dense inverse":
        made = ca.inverse(ca.MatrixOperator(op.dense()), damping=damping)
    else:
        made = getattr(ca, case)(problem).inverse(damping)
    eye = torch.eye(6, dtype=torch.float64)
    assert error(made.dense(), torch.linalg.inv(op.dense() + damping * eye)) < 1e-9
    found = ca.solve(op, b, damping=damping, preconditioner=made, rtol=1e-9)
    assert found.converged
    assert found.iterations <= 2


# --- estimators -----------------------------------------------------------------------------------


def _mean_over_seeds(estimate: Callable[[int], Tensor], want: Tensor, seeds: int = 200) -> None:
    """The estimates of many seeds scatter about the truth: within 4 standard errors of it."""
    values = torch.stack([estimate(seed) for seed in range(seeds)])
    spread = float((values.std(0) / seeds**0.5).norm())
    assert float((values.mean(0) - want).norm()) < 4 * spread + 1e-12
    assert spread < 0.3 * float(want.norm())


def _products(case: str) -> int:
    return int(case.split()[0])


def _trace(case: str, n: int) -> None:
    matrix = torch.rand(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    op, budget = Opaque(matrix), _products(case)

    def estimate(seed: int) -> Tensor:
        return torch.tensor(ca.trace(op, max_products=budget, seed=seed).value)

    _mean_over_seeds(estimate, matrix.trace())


@table.right("trace, Hutchinson")
def test_traces_in_place_of_hutchinson(case: str) -> None:
    _trace(case, 10)


@table.right("trace, Hutch++")
def test_traces_in_place_of_hutch_plus_plus(case: str) -> None:
    _trace(case, 10)


@table.right("trace, XTrace")
def test_traces_in_place_of_xtrace(case: str) -> None:
    _trace(case, 15)


def _diagonal(case: str) -> None:
    matrix = torch.rand(30, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    op, budget = Opaque(matrix), _products(case)

    def estimate(seed: int) -> Tensor:
        return ca.diagonal(op, max_products=budget, seed=seed).values.double()

    _mean_over_seeds(estimate, matrix.diagonal())


@table.right("diagonal, Hutchinson")
def test_diagonals_in_place_of_hutchinson(case: str) -> None:
    _diagonal(case)


@table.right("diagonal, XDiag")
def test_diagonals_in_place_of_xdiag(case: str) -> None:
    _diagonal(case)


@table.right("squared Frobenius norm, Hutchinson")
def test_squared_frobenius_norms(case: str) -> None:
    matrix = torch.rand(10, 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    op, budget = Opaque(matrix), _products(case)

    def estimate(seed: int) -> Tensor:
        return torch.tensor(ca.frobenius_norm(op, max_products=budget, seed=seed).value ** 2)

    _mean_over_seeds(estimate, matrix.pow(2).sum())


@table.right("the ends of a spectrum")
def test_the_ends_of_a_spectrum(case: str) -> None:
    values = torch.tensor([-2.0, -1.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    op = Opaque(torch.diag(values))
    if case == "largest magnitude":
        assert ca.spectral_norm(op).value == pytest.approx(5.0, rel=1e-10)
        assert float(ca.eigenpairs(op, k=1, which="magnitude").values[0]) == pytest.approx(5.0)
        return
    found = ca.eigenpairs(op, k=1, which=case)
    assert float(found.values[0]) == pytest.approx(-2.0 if case == "smallest" else 5.0, rel=1e-10)
    assert found.spectrum_within[0] <= -2.0 + 1e-9
    assert found.spectrum_within[1] >= 5.0 - 1e-9


@table.refused("the ends of a spectrum")
def test_ends_that_the_caller_gives_are_not_taken(case: str) -> None:
    op = Opaque(torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)))
    with pytest.raises(TypeError, match="boundaries"):
        ca.spectral_density(op, boundaries=(0.0, 10.0))  # type: ignore[call-arg]


@table.right("spectral density of a known matrix")
def test_the_density_of_a_known_matrix(case: str) -> None:
    bulk = torch.linspace(-0.1, 0.1, 190, dtype=torch.float64)
    values = torch.cat([bulk, torch.arange(1, 11, dtype=torch.float64)])
    found = ca.spectral_density(Opaque(turned(values)))
    nodes, weights = np.asarray(found.nodes), np.asarray(found.weights)
    assert weights[np.abs(nodes) < 0.5].sum() == pytest.approx(190 / 200, abs=0.01)
    for outlier in range(1, 11):
        assert np.abs(nodes - outlier).min() < 1e-3
