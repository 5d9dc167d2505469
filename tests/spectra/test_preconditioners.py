"""Preconditioned solves, least squares, inverses and functions of operators, against dense ones."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse.linalg
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.errors import ConvergenceError
from curvatlas.spectra.preconditioners import partial_cholesky
from spectra.spectrum_operators import DenseOperator, SpectrumOperator, rotated

EPS = torch.finfo(torch.float64).eps


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _decaying(n: int, ratio: float = 0.85) -> Tensor:
    return ratio ** torch.arange(n, dtype=torch.float64)


def _error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


# --- preconditioned conjugate gradients -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["nystrom", "cholesky"])
def test_preconditioners_from_products_save_most_steps(kind: str) -> None:
    # 30 values above a flat floor: ill-conditioned, but not beyond a few directions
    values = torch.cat([torch.logspace(4, 0, 18, dtype=torch.float64), torch.full((180,), 1e-3)])
    matrix, b, damping = rotated(values.double()), _drawn(198, 2), 1e-2
    want = torch.linalg.solve(matrix + damping * torch.eye(198, dtype=torch.float64), b)
    plain = ca.solve(DenseOperator(matrix, psd=True), b, damping=damping, rtol=1e-9)
    better = ca.solve(
        DenseOperator(matrix, psd=True), b, damping=damping, rtol=1e-9, preconditioner=kind
    )
    assert better.converged
    assert _error(better.value, want) < 1e-6
    assert better.iterations < plain.iterations / 3
    assert better.method == "conjugate gradients, preconditioned"


def test_products_of_the_preconditioner_are_counted_and_within_the_budget() -> None:
    op = SpectrumOperator(_decaying(100, 0.9), psd=True)
    found = ca.solve(op, _drawn(100), damping=1e-3, preconditioner="nystrom", max_products=50)
    assert found.products == op.products <= 50
    assert found.iterations <= 50 - 20


def test_the_exact_inverse_as_preconditioner_needs_one_step() -> None:
    matrix = rotated(_decaying(40))
    op = DenseOperator(matrix, psd=True)
    exact = ca.inverse(ca.MatrixOperator(matrix), damping=0.1)
    for preconditioner in (exact, lambda columns: exact @ columns):
        found = ca.solve(op, _drawn(40, 3), damping=0.1, preconditioner=preconditioner, rtol=1e-9)
        assert found.converged
        assert found.iterations <= 2


def test_a_jacobi_preconditioner_undoes_bad_scaling() -> None:
    scales = torch.logspace(-3, 3, 60, dtype=torch.float64)
    well = rotated(1 + _decaying(60))
    matrix = scales[:, None] * well * scales
    op, b = DenseOperator(matrix, psd=True), _drawn(60)
    plain = ca.solve(op, b, rtol=1e-8)
    jacobi = ca.DiagonalOperator(1 / matrix.diagonal())
    better = ca.solve(op, b, rtol=1e-8, preconditioner=jacobi)
    assert better.converged
    assert better.iterations < 40
    assert not plain.converged or plain.iterations > 3 * better.iterations


def test_kfac_is_the_best_preconditioner_where_it_is_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()  # a linear model's Gauss-Newton matrix is a Kronecker product
    x = _drawn(64, 6) * torch.logspace(-2, 2, 6, dtype=torch.float64)
    problem = ca.Problem(model, "mse", (x, _drawn(64, 3, seed=1)))
    op, b, damping = ca.GaussNewton(problem), _drawn(problem.size), 1e-3
    found = ca.solve(op, b, damping=damping, preconditioner=ca.KFAC(problem).inverse(damping))
    assert found.converged
    assert found.iterations <= 2
    assert ca.solve(op, b, damping=damping).iterations >= 6


def test_nystrom_is_exact_for_an_operator_of_its_rank() -> None:
    values = torch.cat([torch.linspace(1, 5, 6, dtype=torch.float64), torch.zeros(24).double()])
    matrix = rotated(values)
    made = ca.nystrom_preconditioner(DenseOperator(matrix, psd=True), rank=8, damping=0.3)
    want = torch.linalg.inv(matrix + 0.3 * torch.eye(30, dtype=torch.float64))
    assert _error(made.dense(), want) < 1e-7


@pytest.mark.parametrize("rank", [3, 12])
def test_partial_cholesky_equals_the_inverse_of_its_own_factor(rank: int) -> None:
    matrix = rotated(_decaying(12))
    op = DenseOperator(matrix, psd=True)
    factor = partial_cholesky(op, rank, diagonal=matrix.diagonal())
    made = ca.cholesky_preconditioner(op, rank=rank, damping=0.1, diagonal=matrix.diagonal())
    approximate = factor @ factor.T + 0.1 * torch.eye(12, dtype=torch.float64)
    assert _error(made.dense(), torch.linalg.inv(approximate)) < 1e-12
    if rank == 12:
        assert _error(factor @ factor.T, matrix) < 1e-13


def test_pivots_by_an_estimated_diagonal_still_factor_the_matrix() -> None:
    matrix = rotated(_decaying(90, 0.6))
    factor = partial_cholesky(DenseOperator(matrix, psd=True), 25)
    assert _error(factor @ factor.T, matrix) < 1e-3


def test_preconditioners_refuse_what_they_cannot_serve() -> None:
    indefinite = SpectrumOperator(torch.linspace(-1, 1, 30, dtype=torch.float64))
    for make in (ca.nystrom_preconditioner, ca.cholesky_preconditioner):
        with pytest.raises(ValueError, match="not positive semidefinite"):
            make(indefinite, rank=30)
        with pytest.raises(ValueError, match="rank must lie between 1 and 30"):
            make(indefinite, rank=31)
        with pytest.raises(ValueError, match="at least zero"):
            make(indefinite, damping=-1.0)
    b, op = _drawn(30), SpectrumOperator(_decaying(30), psd=True)
    with pytest.raises(ValueError, match="'nystrom', 'cholesky'"):
        ca.solve(op, b, preconditioner="jacobi")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='for method="cg"'):
        ca.solve(op, b, method="minres", preconditioner="nystrom")
    with pytest.raises(ValueError, match="another shape"):
        ca.solve(op, b, preconditioner=ca.IdentityOperator(29, dtype=torch.float64))
    with pytest.raises(TypeError, match="float32"):
        ca.solve(op, b, preconditioner=ca.IdentityOperator(30))
    with pytest.raises(ValueError, match="gives"):
        ca.solve(op, b, preconditioner=lambda columns: columns[:3])
    skewed = ca.MatrixOperator(torch.eye(30, dtype=torch.float64).triu() + _drawn(30, 30).triu())
    for asymmetric in (skewed, lambda columns: skewed @ columns):
        with pytest.raises(ValueError, match="not symmetric"):
            ca.solve(op, b, preconditioner=asymmetric)
    bad = ca.solve(op, b, preconditioner=-1.0 * ca.IdentityOperator(30, dtype=torch.float64))
    assert not bad.converged
    assert "not positive definite" in bad.message


# --- LSMR -----------------------------------------------------------------------------------------


def test_lsmr_solves_what_is_not_symmetric() -> None:
    matrix = torch.eye(25, dtype=torch.float64) + 0.3 * _drawn(25, 25) / 5
    b = _drawn(25, 2)
    op = ca.MatrixOperator(matrix)
    for damping in (0.0, 0.5):
        found = ca.solve(op, b, damping=damping, method="lsmr", rtol=1e-11)
        want = torch.linalg.solve(matrix + damping * torch.eye(25, dtype=torch.float64), b)
        assert found.converged
        assert _error(found.value, want) < 1e-9
    with pytest.raises(ValueError, match="symmetric"):
        ca.solve(op, b)


def test_lsmr_leaves_columns_alone_that_have_ended() -> None:
    # eigenvectors end after one step each, the last column after many
    values = torch.linspace(1, 40, 30, dtype=torch.float64)
    matrix = rotated(values)
    b = torch.cat([torch.linalg.eigh(matrix)[1], _drawn(30, 1), torch.zeros(30, 1).double()], 1)
    found = ca.solve(DenseOperator(matrix), b, method="lsmr", rtol=1e-11)
    assert found.converged
    assert _error(found.value, torch.linalg.solve(matrix, b)) < 1e-9


@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (5, 5), (40, 12)])
@pytest.mark.parametrize("damping", [0.0, 0.7])
@pytest.mark.parametrize("begin", [False, True])
def test_least_squares_agree_with_the_dense_minimiser(shape, damping: float, begin: bool) -> None:
    m, n = shape
    matrix, b = _drawn(m, n), _drawn(m, 2, seed=1)
    start = _drawn(n, 2, seed=2) if begin else None
    found = ca.least_squares(ca.MatrixOperator(matrix), b, damping=damping, start=start, rtol=1e-12)
    origin = torch.zeros(n, 2, dtype=torch.float64) if start is None else start
    rows = torch.cat([matrix, damping**0.5 * torch.eye(n, dtype=torch.float64)])
    right = torch.cat([b - matrix @ origin, torch.zeros(n, 2, dtype=torch.float64)])
    want = origin + torch.linalg.pinv(rows) @ right
    assert found.converged
    assert _error(found.value, want) < 1e-9
    reference = scipy.sparse.linalg.lsmr(
        matrix.numpy(),
        b[:, 0].numpy(),
        damp=damping**0.5,
        atol=1e-14,
        btol=1e-14,
        x0=None if start is None else start[:, 0].numpy(),
    )[0]
    assert np.allclose(found.value[:, 0].numpy(), reference, atol=1e-8)


def test_least_squares_of_a_rank_deficient_operator_is_the_shortest() -> None:
    matrix = _drawn(8, 3) @ _drawn(3, 6, seed=1)
    b = _drawn(8)
    found = ca.least_squares(ca.MatrixOperator(matrix), b, rtol=1e-12)
    assert _error(found.value, torch.linalg.pinv(matrix) @ b) < 1e-8


def test_a_zero_right_hand_side_gives_zero() -> None:
    op = ca.MatrixOperator(_drawn(5, 3))
    found = ca.least_squares(op, torch.zeros(5, dtype=torch.float64))
    assert float(found.value.abs().max()) == 0.0
    assert found.converged


def test_the_least_squares_step_of_a_linear_model_is_its_regression() -> None:
    model = nn.Linear(4, 1, bias=False).double()
    x, y = _drawn(20, 4), _drawn(20, 1, seed=1)
    problem = ca.Problem(model, "mse", [(x[:11], y[:11]), (x[11:], y[11:])])
    with torch.no_grad():
        rest = (y - model(x)).reshape(-1)
    step = ca.least_squares(ca.Jacobian(problem), rest, rtol=1e-12).value
    want = torch.linalg.lstsq(x, y).solution.reshape(-1)
    assert _error(problem.parameters + step, want) < 1e-10


def test_least_squares_out_of_products_says_so() -> None:
    op = ca.MatrixOperator(torch.diag(_decaying(60, 0.7)))
    found = ca.least_squares(op, torch.ones(60, dtype=torch.float64), rtol=1e-10, max_products=20)
    assert not found.converged
    assert "exhausted" in found.message
    assert found.products <= 20
    with pytest.raises(ValueError, match="negative"):
        ca.least_squares(op, torch.ones(60, dtype=torch.float64), damping=-1.0)


# --- inverses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("psd", [True, False])
def test_the_inverse_operator_is_the_dense_inverse(psd: bool) -> None:
    values = _decaying(30) if psd else torch.linspace(-2, 3, 30, dtype=torch.float64)
    matrix = rotated(values)
    made = ca.inverse(DenseOperator(matrix, psd=psd), damping=0.4, rtol=1e-11)
    want = torch.linalg.inv(matrix + 0.4 * torch.eye(30, dtype=torch.float64))
    assert _error(made.dense(), want) < 1e-8
    assert made.tags == ca.Tags(symmetric=True, psd=psd)
    assert _error(made @ _drawn(30), want @ _drawn(30)) < 1e-8


def test_inverses_of_operators_that_are_not_symmetric_go_through_lsmr() -> None:
    matrix = torch.eye(12, dtype=torch.float64) + 0.2 * _drawn(12, 12)

    class Hidden(ca.LinearOperator):
        def _columns(self, columns: Tensor) -> Tensor:
            return matrix @ columns

        def _adjoint_columns(self, columns: Tensor) -> Tensor:
            return matrix.T @ columns

    made = ca.inverse(Hidden((12, 12), dtype=torch.float64), rtol=1e-12)
    want = torch.linalg.inv(matrix)
    assert _error(made.dense(), want) < 1e-9
    assert _error(made.T.dense(), want.T) < 1e-9


def test_closed_forms_are_inverted_in_closed_form() -> None:
    diagonal = ca.inverse(ca.DiagonalOperator(torch.tensor([1.0, 3.0])), damping=1.0)
    assert isinstance(diagonal, ca.DiagonalOperator)
    assert diagonal.diagonal.tolist() == [0.5, 0.25]
    matrix = torch.eye(4, dtype=torch.float64) + 0.3 * _drawn(4, 4)
    assert _error(ca.inverse(ca.MatrixOperator(matrix)).dense(), torch.linalg.inv(matrix)) < 1e-14
    with pytest.raises(ValueError, match="zero on its diagonal"):
        ca.inverse(ca.DiagonalOperator(torch.zeros(3)))
    with pytest.raises(ValueError, match="singular"):
        ca.inverse(ca.MatrixOperator(torch.zeros(3, 3)))


def test_a_product_that_did_not_converge_is_no_product() -> None:
    op = SpectrumOperator(torch.logspace(-8, 0, 300, dtype=torch.float64), psd=True)
    with pytest.raises(ConvergenceError, match="more max_products"):
        ca.inverse(op, max_products=20) @ _drawn(300)


def test_inverses_combine_with_other_operators_and_parameter_lists() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    problem = ca.Problem(model, "mse", (_drawn(30, 4), _drawn(30, 2, seed=1)))
    hessian = ca.Hessian(problem)
    newton = ca.inverse(hessian, damping=1e-3, rtol=1e-12)
    shifted = hessian + 1e-3 * ca.IdentityOperator.like(hessian)
    assert _error((newton @ shifted).dense(), torch.eye(10, dtype=torch.float64)) < 1e-9
    pieces = newton @ problem.layout.shaped(problem.gradient())
    assert [tuple(p.shape) for p in pieces] == [(2, 4), (2,)]


# --- f(A) v ---------------------------------------------------------------------------------------

FUNCTIONS = {
    "exp": np.exp,
    "sqrt": lambda x: np.sqrt(np.maximum(x, 0.0)),
    "log": lambda x: np.log(x + 0.1),
    "inverse": lambda x: 1 / (x + 0.5),
    "sin": np.sin,
    "power": lambda x: x**3 - 2 * x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_functions_times_vectors_agree_with_the_eigendecomposition(name: str, dtype) -> None:
    values = torch.linspace(0.05, 3, 80, dtype=torch.float64)
    matrix = rotated(values)
    v = _drawn(80, 2)
    rtol = 1e-9 if dtype == torch.float64 else 1e-4
    op = DenseOperator(matrix.to(dtype))
    found = ca.matrix_function(op, v.to(dtype), FUNCTIONS[name], rtol=rtol)
    images, vectors = torch.linalg.eigh(matrix)
    want = vectors @ (torch.from_numpy(FUNCTIONS[name](images.numpy()))[:, None] * (vectors.T @ v))
    error = _error(found.value.double(), want)
    assert found.converged
    assert error < rtol
    assert error < 10 * found.error + 1e3 * torch.finfo(dtype).eps
    assert found.products == op.products
    if name == "exp":
        assert found.products < 80  # far less than the matrix
        assert _error(want, torch.from_numpy(scipy.linalg.expm(matrix.numpy())) @ v) < 1e-12


@pytest.mark.parametrize("products", [5, 8, 12, 20])
def test_the_error_of_an_unfinished_function_is_not_understated(products: int) -> None:
    values = torch.logspace(-3, 1, 200, dtype=torch.float64)
    matrix, v = rotated(values), _drawn(200)
    op = DenseOperator(matrix)
    found = ca.matrix_function(op, v, lambda x: 1 / (x + 1e-3), rtol=1e-10, max_products=products)
    want = torch.linalg.solve(matrix + 1e-3 * torch.eye(200, dtype=torch.float64), v)
    assert not found.converged
    assert "NOT converged" in str(found)
    assert found.products <= products
    assert found.error > 1e-3  # as the true error is
    assert _error(found.value, want) > 1e-3


def test_a_polynomial_is_exact_after_as_many_steps_as_its_degree() -> None:
    matrix, v = rotated(torch.linspace(-1, 1, 60, dtype=torch.float64)), _drawn(60)
    found = ca.matrix_function(DenseOperator(matrix), v, lambda x: x**2 + 1, rtol=1e-12)
    assert _error(found.value, matrix @ matrix @ v + v) < 1e-13
    assert found.products <= 7


def test_functions_refuse_what_has_no_value() -> None:
    op = SpectrumOperator(torch.linspace(-1, 1, 20, dtype=torch.float64))
    with pytest.raises(ValueError, match="not finite at the eigenvalue"):
        ca.matrix_function(op, _drawn(20), np.log)
    with pytest.raises(ValueError, match="symmetric"):
        ca.matrix_function(ca.MatrixOperator(_drawn(4, 4)), _drawn(4), np.exp)
    with pytest.raises(ValueError, match="v must be"):
        ca.matrix_function(op, _drawn(19), np.exp)
    zero = ca.matrix_function(op, torch.zeros(20, dtype=torch.float64), np.exp)
    assert zero.converged
    assert float(zero.value.abs().max()) == 0
