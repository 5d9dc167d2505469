"""Sums, multiples, products and submatrices of operators against the same of dense matrices."""

from __future__ import annotations

import operator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
import oracles

EPS = torch.finfo(torch.float64).eps


def _matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def _psd(size: int, seed: int = 0) -> Tensor:
    root = _matrix(size, size + 2, seed)
    matrix = root @ root.T
    return (matrix + matrix.T) / 2


def _problem(seed: int = 0) -> ca.Problem:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = [(torch.randn(n, 4, dtype=torch.float64), torch.randint(0, 3, (n,))) for n in (6, 3)]
    return ca.Problem(model, "cross_entropy", data)


def _agree(op: ca.LinearOperator, want: Tensor) -> None:
    """The operator's matrix, its products with columns and rows, and its transpose's."""
    scale = float(torch.linalg.norm(want)) + 1
    right, left = _matrix(want.shape[1], 3, 7), _matrix(2, want.shape[0], 8)
    for got, expected in [
        (op.dense(), want),
        (op @ right, want @ right),
        (op @ right[:, 0], want @ right[:, 0]),
        (left @ op, left @ want),
        (left[0] @ op, left[0] @ want),
        (op.T @ left.T, want.T @ left.T),
        (op.T.dense(), want.T),
    ]:
        assert got.shape == expected.shape
        assert float((got - expected).abs().max()) <= 200 * EPS * scale * 10


A, B = _matrix(5, 4, 1), _matrix(5, 4, 2)


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda a, b: a + b, A + B),
        (lambda a, b: a - b, A - B),
        (lambda a, b: -a, -A),
        (lambda a, b: 0.3 * a, 0.3 * A),
        (lambda a, b: a * 0.3, 0.3 * A),
        (lambda a, b: a / 0.3, A / 0.3),
        (lambda a, b: np.float32(2) * a, 2 * A),
        (lambda a, b: torch.tensor(2.0) * a, 2 * A),
        (lambda a, b: a @ b.T, A @ B.T),
        (lambda a, b: a.T @ b, A.T @ B),
        (lambda a, b: a.transpose() @ b @ a.T @ b, A.T @ B @ A.T @ B),
        (lambda a, b: sum([a, b, a]), 2 * A + B),
        (lambda a, b: (a + 2 * b).T, (A + 2 * B).T),
        (lambda a, b: (a @ b.T)[[4, 1], 1:3], (A @ B.T)[[4, 1], 1:3]),
        (lambda a, b: (a - b)[:, [3, 0, 3]], (A - B)[:, [3, 0, 3]]),
        (lambda a, b: (2 * a.T)[1:, -2], (2 * A.T)[1:, [-2]]),
    ],
)
def test_algebra_of_operators_is_that_of_their_matrices(make, want: Tensor) -> None:
    _agree(make(ca.MatrixOperator(A), ca.MatrixOperator(B)), want)


def test_numpy_arrays_multiply_from_either_side() -> None:
    op = ca.MatrixOperator(A) + ca.MatrixOperator(B)
    left = np.arange(10.0).reshape(2, 5)
    assert np.allclose(left @ op, left @ (A + B).numpy(), atol=1e-12)
    assert np.allclose(op @ left[0, :4], (A + B).numpy() @ left[0, :4], atol=1e-12)


def test_the_hessian_minus_gauss_newton_is_the_functional_hessian() -> None:
    problem = _problem()
    rest = (ca.Hessian(problem) - ca.GaussNewton(problem)).dense()
    want = ca.FunctionalHessian(problem).dense()
    assert oracles.relative_error(rest, want) < 1e-12
    assert float(want.norm()) > 1e-3  # the difference is not of nothing


def test_symmetry_and_positivity_follow_the_algebra() -> None:
    psd = ca.MatrixOperator(_psd(4, 1), tags=ca.Tags(symmetric=True, psd=True))
    other = ca.MatrixOperator(_psd(4, 2), tags=ca.Tags(symmetric=True, psd=True))
    general = ca.MatrixOperator(_matrix(4, 4))
    wide = ca.MatrixOperator(_matrix(4, 6))
    cases = {
        "sum": (psd + other, True, True),
        "difference": (psd - other, True, False),
        "with a general one": (psd + general, False, False),
        "positive multiple": (2 * psd, True, True),
        "negative multiple": (-psd, True, False),
        "twice negative": (-(-1 * psd), True, True),
        "product of two": (psd @ other, False, False),
        "square": (psd @ psd, True, True),
        "congruence": (wide.T @ psd @ wide, True, True),
        "congruence of a difference": (wide.T @ (psd - other) @ wide, True, False),
        "Gram matrix": (wide @ wide.T, True, True),
        "general product": (general @ general, False, False),
        "diagonal block": (psd[[0, 2]], True, True),
        "other block": (psd[[0, 1], [2, 3]], False, False),
    }
    for name, (op, symmetric, is_psd) in cases.items():
        assert (op.tags.symmetric, op.tags.psd) == (symmetric, is_psd), name
        if symmetric:
            dense = op.dense()
            assert oracles.relative_error(dense, dense.T) < 1e-14, name


def test_diagonal_operators_stay_diagonal() -> None:
    d, e = torch.rand(6, dtype=torch.float64) + 0.5, torch.rand(6, dtype=torch.float64) + 0.5
    left, right = ca.DiagonalOperator(d), ca.DiagonalOperator(e)
    for op, want in [
        (left, d),
        (left + right, d + e),
        (left - right, d - e),
        (0.1 * left, 0.1 * d),
        (left / 0.1, d / 0.1),
        (left @ right, d * e),
        (-left, -d),
        (left[2:5], d[2:5]),
    ]:
        assert isinstance(op, ca.DiagonalOperator)
        _agree(op, torch.diag(want))
    assert (left.tags.psd, (-left).tags.psd) == (True, False)
    assert ca.trace(left).value == pytest.approx(float(d.sum()), rel=1e-15)
    assert ca.frobenius_norm(left).value == pytest.approx(float(d.norm()), rel=1e-14)


def test_block_diagonal_and_kronecker_operators_are_their_matrices() -> None:
    parts = [_matrix(3, 2, 1), _matrix(4, 3, 2), _matrix(2, 5, 3)]
    blocks = ca.BlockDiagonalOperator([ca.MatrixOperator(p) for p in parts])
    _agree(blocks, torch.block_diag(*parts))
    product = ca.KroneckerOperator([ca.MatrixOperator(p) for p in parts])
    _agree(product, torch.kron(torch.kron(parts[0], parts[1]), parts[2]))
    assert not blocks.tags.symmetric
    psd = [ca.MatrixOperator(_psd(n, n), tags=ca.Tags(symmetric=True, psd=True)) for n in (2, 3)]
    assert ca.BlockDiagonalOperator(psd).tags == ca.KroneckerOperator(psd).tags == psd[0].tags
    with pytest.raises(TypeError, match="at least one operator"):
        ca.KroneckerOperator([])
    with pytest.raises(TypeError, match="MatrixOperator"):
        ca.BlockDiagonalOperator([A])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="float32"):
        ca.BlockDiagonalOperator([psd[0], ca.IdentityOperator(2)])


def test_damping_by_the_identity_shifts_the_spectrum() -> None:
    matrix = _psd(5)
    op = ca.MatrixOperator(matrix)
    damped = op + 0.25 * ca.IdentityOperator.like(op)
    _agree(damped, matrix + 0.25 * torch.eye(5, dtype=torch.float64))
    assert op @ ca.IdentityOperator.like(op) is op


def test_diagonal_times_operator_scales_rows_and_columns() -> None:
    d = torch.rand(5, dtype=torch.float64)
    op = ca.DiagonalOperator(d) @ ca.MatrixOperator(A)
    _agree(op, d[:, None] * A)


def test_products_are_counted_on_every_part() -> None:
    one, two = ca.MatrixOperator(A), ca.MatrixOperator(B)
    total = one + 2 * two
    total @ _matrix(4, 3)
    assert (total.products, one.products, two.products) == (3, 3, 3)
    total.T @ _matrix(5, 2)
    assert (one.products, two.products) == (5, 5)


def test_what_has_no_sum_or_product_is_refused_in_words() -> None:
    one, two = ca.MatrixOperator(A), ca.MatrixOperator(A.T)
    with pytest.raises(ValueError, match="different shapes"):
        one + two
    with pytest.raises(ValueError, match="4 columns meet 5 rows"):
        one @ one
    with pytest.raises(TypeError, match="float32"):
        one + ca.MatrixOperator(A.float())
    with pytest.raises(TypeError, match="float32"):
        two @ ca.MatrixOperator(A.float())
    with pytest.raises(TypeError, match=r"IdentityOperator\.like"):
        one + 1.0
    with pytest.raises(TypeError, match="MatrixOperator"):
        A + one
    with pytest.raises(TypeError, match="by @"):
        one * two
    with pytest.raises(TypeError, match="DiagonalOperator"):
        one * torch.ones(4)
    with pytest.raises(TypeError, match="complex"):
        one * 1j
    with pytest.raises(ValueError, match="nan"):
        one * float("nan")
    with pytest.raises(ZeroDivisionError):
        one / 0
    with pytest.raises(TypeError):
        iter(one)
    with pytest.raises(TypeError, match="real"):
        one @ np.ones(4, dtype=complex)


def _expression(random: Random, depth: int, leaves: list[Any]) -> tuple[str, Any, Tensor]:
    """A random expression: its text, the operator and the matrix."""
    if depth == 0:
        return random.choice(leaves)
    text, op, matrix = _expression(random, depth - 1, leaves)
    kind = random.choice(["+", "−", "@", "·", "/", "ᵀ", "[]"])
    if kind in ("+", "−", "@"):
        other, right, dense = _expression(random, depth - 1, leaves)
        fits = matrix.shape[1] == dense.shape[0] if kind == "@" else matrix.shape == dense.shape
        if not fits:
            return text, op, matrix
        made = {"+": operator.add, "−": operator.sub, "@": operator.matmul}[kind]
        return f"({text} {kind} {other})", made(op, right), made(matrix, dense)
    if kind in ("·", "/"):
        number = random.choice([-1.5, 0.5, 2.0])
        made = operator.mul if kind == "·" else operator.truediv
        return f"({text} {kind} {number})", made(op, number), made(matrix, number)
    if kind == "ᵀ":
        return f"{text}ᵀ", op.T, matrix.T
    rows, columns = (
        [random.randrange(n) for _ in range(random.randint(1, n))] for n in matrix.shape
    )
    if matrix.shape[0] == matrix.shape[1] and random.random() < 0.4:
        columns = rows
    return f"{text}[{rows}, {columns}]", op[rows, columns], matrix[rows][:, columns]


@pytest.mark.parametrize("seed", range(60))
def test_random_expressions_and_their_tags_are_those_of_matrices(seed: int) -> None:
    problem = _problem()
    n = problem.size
    jacobian = ca.Jacobian(problem)
    ops = {
        "H": ca.Hessian(problem),
        "G": ca.GaussNewton(problem),
        "JᵀJ": jacobian.T @ jacobian,
        "1": ca.IdentityOperator(n, dtype=torch.float64),
        "D": ca.DiagonalOperator(_matrix(n, 1).squeeze(1)),
        "M": ca.MatrixOperator(_matrix(n, n)),
    }
    leaves = [(name, op, op.dense()) for name, op in ops.items()]
    random = Random(seed)
    text, op, matrix = _expression(random, random.randint(1, 4), leaves)
    scale = 1 + float(matrix.abs().max())
    right, left = _matrix(matrix.shape[1], 2, 7), _matrix(2, matrix.shape[0], 8)
    pairs = [(op @ right, matrix @ right), (left @ op, left @ matrix), (op.dense(), matrix)]
    for got, want in pairs:
        assert float((got - want).abs().max()) < 1e-11 * scale, text
    if op.tags.symmetric:
        assert float((matrix - matrix.T).abs().max()) < 1e-11 * scale, text
    if op.tags.psd:
        assert float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[0]) > -1e-11 * scale, text


# --- one tensor a parameter -----------------------------------------------------------------------


def test_tensors_by_parameter_go_in_and_come_out() -> None:
    problem = _problem()
    op = ca.Hessian(problem) + 0.5 * ca.IdentityOperator(problem.size, dtype=torch.float64)
    layout = problem.layout
    for columns in (torch.randn(problem.size).double(), torch.randn(problem.size, 3).double()):
        tensors = layout.shaped(columns)
        extra = columns.shape[1:]
        assert [t.shape for t in tensors] == [(*s, *extra) for s in layout.shapes]
        want = layout.shaped(op @ columns)
        as_list = op @ tensors
        as_tuple = op @ tuple(tensors)
        as_dict = op @ dict(reversed(list(zip(layout.names, tensors, strict=True))))
        assert (type(as_list), type(as_tuple), list(as_dict)) == (list, tuple, list(layout.names))
        for a, b, c, w in zip(as_list, as_tuple, as_dict.values(), want, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)
            assert torch.allclose(a, w, rtol=0, atol=1e-14)
    from_left = tensors @ op
    assert torch.allclose(from_left[0], want[0], rtol=0, atol=1e-13)


def test_tensors_that_do_not_fit_the_parameters_are_refused_by_name() -> None:
    problem = _problem()
    op = ca.Hessian(problem)
    tensors = problem.layout.shaped(torch.zeros(problem.size, dtype=torch.float64))
    with pytest.raises(ValueError, match="4 varying parameters, got 3"):
        op @ tensors[:3]
    # the same number of entries in another order was once taken as it came
    with pytest.raises(ValueError, match=r"'0.weight' has the shape \(5, 4\)"):
        op @ [tensors[0].T, *tensors[1:]]
    with pytest.raises(ValueError, match="different numbers of columns"):
        op @ [
            t.unsqueeze(-1).expand(*t.shape, k) for t, k in zip(tensors, (2, 2, 3, 2), strict=True)
        ]
    named = dict(zip(problem.layout.names, tensors, strict=True))
    with pytest.raises(ValueError, match=r"missing \['2.bias'\], unknown \['2.offset'\]"):
        op @ {("2.offset" if name == "2.bias" else name): t for name, t in named.items()}
    with pytest.raises(TypeError, match="parameters of a Problem"):
        ca.MatrixOperator(A) @ [torch.zeros(4)]
    with pytest.raises(TypeError, match="needs a tensor"):
        op @ [1.0, 2.0, 3.0, 4.0]
