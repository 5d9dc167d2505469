"""The cases of matfree's suite (github.com/pnkraemer/matfree), in our words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.spectra.krylov import KrylovBasis
from curvatlas.spectra.preconditioners import partial_cholesky
from peers.cases import GROUPS
from peers.matrices import Opaque, drawn, error, rectangular, turned
from peers.table import Table
from spectra.spectrum_operators import most_misses

table = Table("matfree", GROUPS)


def _eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def _hilbert(rows: int, columns: int) -> Tensor:
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    return 1 / (1 + i + j).double()


# --- decompositions -------------------------------------------------------------------------------


@table.right("Lanczos decomposition")
def test_lanczos_satisfies_its_equation(case: str) -> None:
    if case == "a Hilbert matrix":
        matrix, steps = _hilbert(12, 12), 9
    else:
        matrix = turned(torch.linspace(1, 2, 12, dtype=torch.float64))
        steps = 12 if case.startswith("all") else int(case.split()[1])
    basis = KrylovBasis(Opaque(matrix), 14)
    basis.add(torch.arange(12, 0, -1).double())
    while basis.multiplied < steps and basis.pending:
        basis.expand()
    m, r = basis.multiplied, basis.count
    rows = basis.rows[:r]
    small = torch.from_numpy(basis.coefficients[:r, :m].copy())
    assert float((rows @ rows.T - _eye(r)).abs().max()) < 1e-12
    # A Qᵀ = Qᵀ C: what lies outside of the multiplied rows is the residual
    assert error(matrix @ rows[:m].T, rows.T @ small) < 1e-12
    if case.startswith("all"):
        assert error(rows[:m].T @ small[:m] @ rows[:m], matrix) < 1e-12


@table.refused("decompositions of what is not symmetric")
def test_what_is_not_symmetric_is_refused(case: str) -> None:
    matrix = drawn(7, 7)
    if case == "Hessenberg form":
        tagged = Opaque(matrix)
        tagged.tags = ca.Tags(symmetric=True)  # a false promise is noticed too
        with pytest.raises(ValueError, match="not symmetric"):
            ca.eigenpairs(tagged, k=2)
        return
    with pytest.raises(ValueError, match="symmetric"):
        ca.eigenpairs(Opaque(matrix), k=2)


@table.right("numbers of products")
def test_numbers_of_products(case: str) -> None:
    values = torch.linspace(1, 2, 13, dtype=torch.float64)
    op = Opaque(turned(values))
    if "refused" in case:
        with pytest.raises(ValueError, match="max_products"):
            ca.eigenpairs(op, k=2, max_products=-1)
        return
    budget = {"as many as entries": 13, "half as many": 6}.get(case, 14)
    found = ca.eigenpairs(op, k=2, max_products=budget, tol=1e-10)
    assert found.products <= budget
    if budget >= 13:
        assert torch.allclose(found.values.sort().values, values[-2:], rtol=1e-10)
    else:  # cut short: what is given lies within its own bounds
        low, high = found.interval
        for a, b in zip(low, high, strict=True):
            assert bool(((values >= a - 1e-12) & (values <= b + 1e-12)).any())


@table.refused("numbers of products")
def test_no_product_is_no_answer(case: str) -> None:
    with pytest.raises(ValueError, match="max_products"):
        ca.eigenpairs(Opaque(_eye(5)), k=1, max_products=0)


@table.right("eigenpairs of a symmetric matrix")
def test_eigenpairs_of_a_symmetric_matrix(case: str) -> None:
    values = torch.arange(1, 9, dtype=torch.float64)
    matrix = turned(values)
    if "tensors" in case:
        torch.manual_seed(0)
        problem = ca.Problem(nn.Linear(3, 2).double(), "mse", (drawn(9, 3), drawn(9, 2, seed=1)))
        found = ca.eigenpairs(ca.Hessian(problem), k=2)
        pieces = problem.layout.shaped(found.vectors)
        assert [tuple(p.shape) for p in pieces] == [(2, 3, 2), (2, 2)]
        return
    k = 8 if case == "all of them" else 4
    found = ca.eigenpairs(Opaque(matrix), k=k)
    assert found.values.shape == (k,)
    assert found.vectors.shape == (8, k)
    rebuilt = found.vectors @ torch.diag(found.values) @ found.vectors.T
    best = turned(torch.where(values > 8 - k, values, 0.0))
    assert error(rebuilt, best) < 1e-9


@table.refused("eigenpairs of a symmetric matrix")
def test_no_eigenpairs_are_refused(case: str) -> None:
    with pytest.raises(ValueError, match="k"):
        ca.eigenpairs(Opaque(_eye(5)), k=0)


@table.right("singular values and vectors")
def test_singular_values(case: str) -> None:
    if "Hilbert" in case:
        rows, columns = (int(n) for n in case.removeprefix("a Hilbert matrix ").split(" × "))
        matrix, k = _hilbert(rows, columns), 3
    elif "four" in case:
        small = torch.full((49,), 1e-3)
        small[:4] = torch.arange(10, 14).float()
        matrix, k = rectangular(small, 50, 49), 4
    else:
        matrix, k = rectangular(torch.tensor([1.0, 2.0, 3.0]), 10, 3), 2 if "two" in case else 3
    op = ca.MatrixOperator(matrix)
    want = torch.linalg.svdvals(matrix)[:k]
    gram = op.T @ op
    found = ca.eigenpairs(gram, k=k, tol=1e-10)
    assert torch.allclose(found.values.sqrt(), want, rtol=1e-6)
    left = (matrix @ found.vectors) / found.values.sqrt()
    assert float((left.T @ left - _eye(k)).abs().max()) < 1e-6
    assert ca.spectral_norm(op).value == pytest.approx(float(want[0]), rel=2e-3)


# --- functions of matrices ------------------------------------------------------------------------


@table.right("f(A) v")
def test_functions_times_vectors(case: str) -> None:
    low = 0.01 if "Lanczos" in case else -0.99
    matrix, v = turned(torch.linspace(low, 0.99, 12, dtype=torch.float64)), drawn(12)
    found = ca.matrix_function(Opaque(matrix), v, np.sin, rtol=1e-6, max_products=8)
    values, vectors = torch.linalg.eigh(matrix)
    want = vectors @ (torch.sin(values) * (vectors.T @ v))
    assert error(found.value, want) < 1e-6


@table.refused("f(A) v")
def test_functions_of_general_matrices_are_refused(case: str) -> None:
    with pytest.raises(ValueError, match="symmetric"):
        ca.matrix_function(Opaque(drawn(11, 11)), drawn(11), np.exp)


@table.right("log-determinants and vᵀ log(A) v")
def test_log_determinants(case: str) -> None:
    if case == "a symmetric matrix":
        values = torch.full((200,), 1e-3, dtype=torch.float64)
        values[:30] = 1 + torch.arange(30) / 200
        got = ca.log_determinant(Opaque(turned(values), psd=True))
        assert got.value == pytest.approx(float(values.log().sum()), rel=1e-2)
    elif case == "a product AᵀA":
        matrix = rectangular(torch.arange(1, 31, dtype=torch.float64), 50, 30)
        op = ca.MatrixOperator(matrix)
        want = float(torch.logdet(matrix.T @ matrix))
        assert ca.log_determinant(op.T @ op).value == pytest.approx(want, rel=1e-8)
    elif case.startswith("vᵀ"):
        values = torch.arange(1, 51, dtype=torch.float64)
        v = drawn(50) + 10
        if "AᵀA" in case:
            root = ca.MatrixOperator(rectangular(values.sqrt(), 50, 50))
            op: ca.LinearOperator = root.T @ root
        else:
            op = Opaque(turned(values))
        lam, vectors = torch.linalg.eigh(op.dense())
        want = float(((vectors.T @ v) ** 2 * lam.log()).sum())
        found = ca.quadratic_form(op, v, function=np.log, rtol=1e-9)
        assert found.value == pytest.approx(want, rel=1e-7)
    else:
        values = torch.arange(1, 5, dtype=torch.float64)
        found = ca.log_determinant(Opaque(turned(values), psd=True))
        low, high = 4 * np.log(1.0), 4 * np.log(float(values.mean()))  # Jensen
        assert low < found.value < high
        assert found.value == pytest.approx(np.log(24.0), rel=1e-10)


@table.right("Schatten norms")
def test_schatten_norms(case: str) -> None:
    power, seed = int(case.split()[1].strip(",")), int(case.split()[-1])
    values = torch.arange(1, 31, dtype=torch.float64)
    op = ca.MatrixOperator(rectangular(values, 30, 30, seed=seed))
    found = ca.trace_function(op.T @ op, lambda x: np.maximum(x, 0) ** (power / 2), seed=seed)
    assert found.value == pytest.approx(float((values**power).sum()), rel=1e-2)


# --- low rank -------------------------------------------------------------------------------------


@table.right("partial Cholesky decompositions")
def test_partial_cholesky_decompositions(case: str) -> None:
    n = 10
    matrix = turned(1.5 ** torch.arange(-n // 2, n // 2, dtype=torch.float64), seed=1)
    op = Opaque(matrix, psd=True)
    if "shape" in case:
        assert partial_cholesky(op, 4).shape == (n, 4)
    elif "full rank" in case:
        factor = partial_cholesky(op, n)
        assert error(factor @ factor.T, matrix) < 1e-13
    elif "better" in case:
        factor = partial_cholesky(op, 5)
        plain = torch.linalg.cholesky(matrix)[:, :5]
        assert error(factor @ factor.T, matrix) < error(plain @ plain.T, matrix)
    else:
        b = torch.arange(1, n + 1).double()
        made = ca.cholesky_preconditioner(op, rank=n, damping=0.1)
        assert error(made @ b, torch.linalg.solve(matrix + 0.1 * _eye(n), b)) < 1e-11


@table.refused("partial Cholesky decompositions")
def test_pivots_are_not_optional(case: str) -> None:
    with pytest.raises(TypeError, match="pivot"):
        ca.cholesky_preconditioner(Opaque(_eye(5)), pivot=False)  # type: ignore[call-arg]


@table.right("Nyström approximations")
def test_nystrom_approximations(case: str) -> None:
    n, rank = 20, 5
    root = drawn(n, rank if "rank" in case else n)
    matrix = root @ root.T
    matrix = (matrix + matrix.T) / 2
    columns = 8 if "beyond" in case or "smaller" in case else 4
    made = ca.nystrom_preconditioner(Opaque(matrix, psd=True), rank=columns, damping=0.5)
    approximate = made.vectors @ torch.diag(made.values) @ made.vectors.T
    if "semidefinite" in case:
        assert bool((made.values >= 0).all())
        assert bool((torch.linalg.eigvalsh(matrix - approximate) > -1e-10).all())
    elif "own columns" in case:
        # its range is that of A Ω: there, for the inverse as well, nothing is left out
        inside = torch.linalg.pinv(matrix) @ made.vectors
        assert error(approximate @ inside, matrix @ inside) < 1e-6
    elif "exact" in case:
        assert error(approximate, matrix) < 1e-7
        assert error(made.dense(), torch.linalg.inv(matrix + 0.5 * _eye(n))) < 1e-6
    else:
        above = made.values > 1e-6 * made.values.max()
        assert int(above.sum()) == min(columns, rank)


# --- least squares --------------------------------------------------------------------------------


@table.right("least squares")
def test_least_squares(case: str) -> None:
    m, n = {"tall": (6, 3), "wide": (3, 6), "square": (3, 3)}.get(case.split(",")[0], (5, 3))
    matrix, b = drawn(m, n, seed=1), drawn(m, seed=2)
    if "zeros" in case:
        found = ca.least_squares(ca.MatrixOperator(matrix), torch.zeros(m, dtype=torch.float64))
        assert float(found.value.abs().max()) == 0
        return
    start: Tensor | None = None
    damping = 0.0
    if "guess" in case or "SciPy" in case:
        start = drawn(n, seed=3)
    if "damped" in case or "SciPy" in case:
        damping = 0.3
    if "low rank" in case:
        matrix[:, 1] = 0
        matrix[1, :] = 0
    found = ca.least_squares(ca.MatrixOperator(matrix), b, damping=damping, start=start, rtol=1e-12)
    assert found.converged
    if "SciPy" in case:
        want = scipy.sparse.linalg.lsmr(
            matrix.numpy(),
            b.numpy(),
            damp=damping**0.5,
            atol=1e-14,
            btol=1e-14,
            x0=start.numpy() if start is not None else None,
        )[0]
        assert np.allclose(found.value.numpy(), want, atol=1e-8)
    elif damping:
        want = torch.linalg.solve(matrix.T @ matrix + damping * _eye(n), matrix.T @ b)
        assert error(found.value, want) < 1e-9
    else:
        origin = torch.zeros(n, dtype=torch.float64) if start is None else start
        want = origin + torch.linalg.pinv(matrix) @ (b - matrix @ origin)
        assert error(found.value, want) < 1e-9


# --- estimators -----------------------------------------------------------------------------------


def _jacobian(seed: int, n: int = 4) -> Tensor:
    """∂f/∂x of sin(flip(cos x) + 1) ⊙ sin x at a random x."""
    x = drawn(n, seed=seed)

    def f(y: Tensor) -> Tensor:
        return torch.sin(torch.cos(y).flip(0) + 1) * torch.sin(y)

    return torch.autograd.functional.jacobian(f, x)


@table.right("trace, diagonal and Frobenius norm of a function's Jacobian")
def test_small_jacobians_are_settled_exactly(case: str) -> None:
    what, seed = case.split(", seed ")
    matrix = _jacobian(int(seed))
    op = Opaque(matrix)
    if what in ("trace", "both"):
        assert ca.trace(op).value == pytest.approx(float(matrix.trace()), rel=1e-12)
    if what in ("diagonal", "both"):
        assert error(ca.diagonal(op).values.double(), matrix.diagonal()) < 1e-12
    if what == "Frobenius norm":
        assert ca.frobenius_norm(op).value == pytest.approx(float(matrix.norm()), rel=1e-2)


@table.refused("trace, diagonal and Frobenius norm of a function's Jacobian")
def test_complex_operators_are_refused(case: str) -> None:
    op = Opaque(_jacobian(1).to(torch.complex128))
    estimate: Any = {"trace": ca.trace, "diagonal": ca.diagonal}.get(
        case.split(",")[0], ca.frobenius_norm
    )
    with pytest.raises(ValueError, match="float32 or float64"):
        estimate(op)


@table.right("standard errors")
def test_standard_errors(case: str) -> None:
    matrix = turned(torch.linspace(-1, 1, 80, dtype=torch.float64) + 0.3)
    want = float(matrix.trace())
    found = [ca.trace(Opaque(matrix), max_products=40, rtol=1e-9, seed=s) for s in range(60)]
    if "mean" in case:
        values = np.array([f.value for f in found])
        # Student's with 59 degrees of freedom lies further out once in 20,000.
        assert abs(values.mean() - want) < 4.4 * values.std() / 60**0.5
        assert all(f.interval[0] <= f.value <= f.interval[1] for f in found)
        return
    inside = sum(f.interval[0] <= want <= f.interval[1] for f in found)
    assert inside >= 60 - most_misses(60)


@table.right("squared norms of rows and columns")
def test_squared_norms_of_rows_and_columns(case: str) -> None:
    matrix = drawn(6, 6) if "square" in case.split(", ")[-1] else drawn(6, 10)
    op = Opaque(matrix)
    gram = op.T @ op if case == "columns" else op @ op.T
    values = ca.diagonal(gram).values.double()
    want = matrix.pow(2).sum(0 if case == "columns" else 1)
    assert error(values, want) < 1e-12
    assert float(values.sum()) == pytest.approx(float(matrix.norm() ** 2), rel=1e-12)


@table.right("traces and diagonals that few products settle")
def test_traces_and_diagonals_that_few_products_settle(case: str) -> None:
    what, how = case.split(", ", 1)
    budget = None
    if "entries" in how and "more" not in how:
        n = budget = int(how.split()[-2])
        matrix = torch.block_diag(torch.ones(n // 3, n // 3), torch.ones(n - n // 3, n - n // 3))
        matrix = matrix.double().tril()
    elif "more" in how:
        matrix, budget = drawn(10, 10), 11
    elif "rank" in how:
        rank, n = int(how.split()[1]), int(how.split()[3])
        matrix, budget = drawn(n, rank) @ drawn(rank, n, seed=1), 2 * (rank + 1)
    elif "decay" in how:
        matrix, budget = turned(0.7 ** torch.arange(400, dtype=torch.float64)), 70
    else:
        values = torch.full((400,), 1e-3, dtype=torch.float64)
        values[:50] = 1
        matrix, budget = turned(values), 120
    op = Opaque(matrix)
    if what == "diagonal":
        found = ca.diagonal(op, max_products=budget, rtol=1e-9)
        tolerance = 1e-2 if "decay" in how else 1e-12
        gap = float((found.values - matrix.diagonal()).abs().max())
        assert gap < tolerance * float(matrix.diagonal().abs().max())
        return
    want = float(matrix.trace())
    estimate = ca.trace(op, max_products=budget, rtol=1e-9)
    assert estimate.products <= max(budget or 0, op.shape[0])
    if "equal values" in how:
        assert not estimate.converged
        low, high = estimate.interval
        assert low <= want <= high
        assert estimate.value == pytest.approx(want, rel=0.05)
        return
    tolerance = 1e-5 if "decay" in how else 1e-10
    assert estimate.value == pytest.approx(want, rel=tolerance, abs=1e-11)
