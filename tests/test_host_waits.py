"""On a device the host does not wait: no product after the first and no Lanczos step reads a value.

The device is a stand-in (``stand_in_device``): it computes on the CPU, refuses to mix, and counts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.engines.late_checks import Answer
from curvatlas.errors import NonFiniteError
from curvatlas.spectra.eigenpairs import Following
from curvatlas.spectra.krylov import KrylovBasis
from curvatlas.spectra.quadrature import recurrences
from stand_in_device import DEVICE, Waits, stand_in_device

OPERATORS: dict[str, Callable[..., ca.LinearOperator]] = {
    "Hessian": ca.Hessian,
    "GaussNewton": ca.GaussNewton,
    "FunctionalHessian": ca.FunctionalHessian,
}


@functools.cache
def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = zoo.GPTConfig(vocabulary=11, context=6, d_model=8, n_heads=2, n_layers=2)
    return zoo.GPT(sizes).eval()


@functools.cache
def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(1))


def problem_on(device: torch.device | str) -> ca.Problem:
    data = tokens().to(device)
    moved = copy.deepcopy(model()).to(device)
    return ca.Problem(moved, "cross_entropy", (data[:, :-1], data[:, 1:]))


@functools.cache
def small() -> nn.Module:
    torch.manual_seed(0)
    sizes = zoo.GPTConfig(vocabulary=5, context=4, d_model=4, n_heads=2, n_layers=1)
    return zoo.GPT(sizes).eval()


def small_on(device: torch.device | str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    data = tokens()[:, :5].remainder(5).to(device)
    return copy.deepcopy(small()).to(device), (data[:, :-1], data[:, 1:])


def small_problem_on(device: torch.device | str) -> ca.Problem:
    moved, data = small_on(device)
    return ca.Problem(moved, "cross_entropy", data)


def vector(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(2))


def same(there: Tensor, here: Tensor, *, roundings: float = 100) -> bool:
    eps = torch.finfo(here.dtype).eps
    return float((there.cpu() - here).norm()) <= roundings * eps * float(here.norm())


@pytest.fixture
def waits() -> Iterator[Waits]:
    with stand_in_device() as counted:
        yield counted


# --- the stand-in itself --------------------------------------------------------------------------


WAITING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "copied to main memory": lambda x: torch.empty(4).copy_(x),
    "sent to the device": lambda x: torch.tensor([1.0], device=x.device),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: torch.unique(x),
    "a mask": lambda x: x[x > 0],
    "an index of main memory": lambda x: x[[0, 2]],
    "eigh": lambda x: torch.linalg.eigh(torch.diag(x)),
    "cholesky": lambda x: torch.linalg.cholesky(torch.diag(x + 4)),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_stand_in_counts_what_waits(name: str, waits: Waits) -> None:
    x = torch.arange(4.0, device=DEVICE)
    assert waits.count == 0
    WAITING[name](x)
    assert waits.count >= 1, name


def test_the_stand_in_refuses_to_mix_and_lets_the_rest_go_on(waits: Waits) -> None:
    x = torch.arange(4.0, device=DEVICE)
    with pytest.raises(RuntimeError, match="cpu"):
        x + torch.ones(4)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=DEVICE, generator=torch.Generator())
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    y = torch.where(x > 1, x.exp(), 0.0)[1:] + 2.0
    y[0] = 3.0
    x.to("cpu", non_blocking=True)
    assert waits.count == 0, str(waits)
    assert y.device == DEVICE
    assert y.tolist() == pytest.approx([3.0, 2.0 + 2.718281828**2, 2.0 + 2.718281828**3])


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["tangent", "autograd"])
@pytest.mark.parametrize("name", OPERATORS)
def test_products_after_the_first_read_nothing(name: str, engine: str, waits: Waits) -> None:
    here = OPERATORS[name](problem_on("cpu"), engine=engine)
    there = OPERATORS[name](problem_on(DEVICE), engine=engine)
    v = vector(here.shape[0])
    moved, columns = v.to(DEVICE), torch.stack([v, v.flip(0)], 1).to(DEVICE)
    some = slice(3, 40)
    view = there[some, 50:90]
    for product in (lambda: there @ moved, lambda: there @ columns, lambda: view @ moved[:40]):
        product()
        waits.clear()
        results = [product() for _ in range(3)]  # of the hand-written passes: a tape is recorded
        assert waits.count == 0, str(waits)
        assert all(result.device == DEVICE for result in results)
    assert same(there @ moved, here @ v)
    assert same((there @ columns)[:, 1], here @ v.flip(0))
    assert same(view @ moved[:40], here[some, 50:90] @ v[:40])


@pytest.mark.parametrize("kind", ["exact", "mc", "empirical"])
def test_products_with_the_fisher_read_nothing(kind: Any, waits: Waits) -> None:
    here, there = (ca.Fisher(problem_on(device), kind=kind) for device in ("cpu", DEVICE))
    v = vector(here.shape[0])
    moved = v.to(DEVICE)
    there @ moved
    waits.clear()
    result = there @ moved
    assert waits.count == 0, str(waits)
    assert same(result, here @ v)


# --- what is noticed all the same -----------------------------------------------------------------


def behind(there: ca.Problem) -> None:
    """Change a weight as no version counter sees it."""
    next(there.model.parameters()).data.mul_(1.5)


def doubled() -> ca.Problem:
    changed = small_problem_on("cpu")
    next(changed.model.parameters()).data.mul_(1.5)
    return changed


@pytest.mark.parametrize("engine", ["tangent", "autograd"])
def test_weights_changed_behind_pytorch_give_nan_and_an_error(engine: Any, waits: Waits) -> None:
    problem = small_problem_on(DEVICE)
    there = ca.Hessian(problem, engine=engine)
    v = vector(problem.size).to(DEVICE)
    there @ v
    there.confirm()  # nothing to say
    behind(problem)
    waits.clear()
    product = there @ v
    assert waits.count == 0
    assert bool(product.isnan().all())
    with pytest.raises(NonFiniteError, match=r"changed in a way .* earlier products are NaN"):
        (2.0 * there[:, :]).confirm()  # through operators made of it
    assert same(there @ v, ca.Hessian(doubled(), engine=engine) @ v.cpu())


class _Foreign(torch.optim.Optimizer):
    """Writes as fused kernels do: no version counter moves."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].data.mul_(1.5)


def test_a_step_of_an_optimizer_is_followed_at_once(waits: Waits) -> None:
    problem = small_problem_on(DEVICE)
    there = ca.Hessian(problem)
    v = vector(problem.size).to(DEVICE)
    there @ v
    _Foreign(problem.model.parameters()).step()
    assert same(there @ v, ca.Hessian(doubled()) @ v.cpu())


def test_a_counted_change_is_followed_at_once(waits: Waits) -> None:
    problem = small_problem_on(DEVICE)
    there = ca.Hessian(problem)
    v = vector(problem.size).to(DEVICE)
    there @ v
    with torch.no_grad():
        next(problem.model.parameters()).mul_(1.5)
    assert same(there @ v, ca.Hessian(doubled()) @ v.cpu())


def test_an_answer_that_comes_in_time_saves_the_product(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose queue is short: the change is known before the product is returned."""
    monkeypatch.setattr(Answer, "arrived", True)
    monkeypatch.setattr(Answer, "read", lambda self: self.values.tolist())
    problem = small_problem_on(DEVICE)
    there = ca.Hessian(problem)
    v = vector(problem.size).to(DEVICE)
    there @ v
    behind(problem)
    assert same(there @ v, ca.Hessian(doubled()) @ v.cpu())


def test_a_product_that_is_not_finite_is_told_of_at_the_next(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = small_problem_on(DEVICE)
    there = ca.Hessian(problem)
    v = vector(problem.size).to(DEVICE)
    there @ v
    bad = v.clone()
    bad[3] = torch.nan
    assert bool((there @ bad).isnan().any())
    monkeypatch.setattr(Answer, "arrived", True)
    monkeypatch.setattr(Answer, "read", lambda self: self.values.tolist())
    there._late._answer = Answer(there._late._wrong)  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteError, match="vector of an earlier product holds NaN"):
        there @ v
    assert bool(torch.isfinite(there @ v).all())


# --- Lanczos and other iterations -----------------------------------------------------------------


class Matrix(ca.LinearOperator):
    """A symmetric matrix known by its products."""

    def __init__(self, matrix: Tensor) -> None:
        n = len(matrix)
        super().__init__(
            (n, n), dtype=matrix.dtype, device=matrix.device, tags=ca.Tags(symmetric=True)
        )
        self.matrix = matrix

    def _columns(self, columns: Tensor) -> Tensor:
        return self.matrix @ columns


@functools.cache
def symmetric(size: int = 300, *, distinct: int | None = None) -> Tensor:
    """Eigenvalues from 0.1 to 3 and a few beyond; or a diagonal with so many different ones."""
    draw = torch.Generator().manual_seed(size)
    basis = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64)).Q
    values = torch.linspace(0.1, 3.0, size, dtype=torch.float64)
    values[-3:] += torch.tensor([3.0, 5.0, 9.0], dtype=torch.float64)
    if distinct is not None:
        return torch.diag(1.0 + torch.arange(size, dtype=torch.float64) % distinct)
    return (basis * values) @ basis.T


def test_lanczos_steps_are_read_together(waits: Waits) -> None:
    """Sixteen products, one look of the host; relation (1) holds, and C is that of the CPU."""
    matrix = symmetric()
    start = torch.ones(len(matrix), dtype=torch.float64)
    here, there = (
        KrylovBasis(Matrix(matrix.to(device)), 40) for device in (torch.device("cpu"), DEVICE)
    )
    for basis in (here, there):
        basis.add(start.to(basis.rows.device))
    for _ in range(16):
        here.advance(16)  # one product each
    waits.clear()
    there.advance(16)
    assert waits.count == 1, str(waits)
    assert there.products == there.multiplied == here.multiplied == 16
    basis, images = there.multiplied_columns()
    error = matrix @ basis.cpu() - images.cpu()
    assert float(error.norm()) < 1e-12 * float(matrix.norm())
    gap = here.coefficients[:17, :16] - there.coefficients[:17, :16]
    assert abs(gap).max() < 1e-10


def test_an_invariant_space_is_noticed_when_the_steps_are_read(waits: Waits) -> None:
    matrix = symmetric(60, distinct=5)
    basis = KrylovBasis(Matrix(matrix.to(DEVICE)), 40)
    basis.add(torch.ones(60, dtype=torch.float64, device=DEVICE))
    assert basis.advance(12)[-1] == 0.0
    assert (basis.multiplied, basis.count, basis.pending) == (5, 5, 0)
    assert basis.ritz().values == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])
    assert basis.ritz().residuals.max() < 1e-12


def test_a_direction_that_ends_leaves_the_other_pending_rows_in_place(waits: Waits) -> None:
    """The newest of two rows is followed into an invariant space: relation (1) goes on to hold."""
    matrix = torch.diag(1.0 + torch.arange(60.0, dtype=torch.float64))
    basis = KrylovBasis(Matrix(matrix.to(DEVICE)), 40)
    start = torch.zeros(60, dtype=torch.float64)
    start[:50] = 1.0
    basis.add(start.to(DEVICE))
    basis.advance(4)
    start = torch.zeros(60, dtype=torch.float64)
    start[50:53] = 1.0
    basis.add(start.to(DEVICE))
    added = basis.advance(6, newest=True)
    assert len(added) == 3
    assert added[-1] == 0.0
    assert (basis.multiplied, basis.count, basis.products) == (7, 8, 10)
    basis.advance(5)
    columns, images = basis.multiplied_columns()
    assert float((matrix @ columns.cpu() - images.cpu()).norm()) < 1e-11
    gram = columns.T @ columns
    assert float((gram.cpu() - torch.eye(12)).norm()) < 1e-12


def test_steps_that_were_made_count_when_a_product_fails(waits: Waits) -> None:
    op = Matrix(symmetric().to(DEVICE))
    basis = KrylovBasis(op, 40)
    basis.add(torch.ones(300, dtype=torch.float64, device=DEVICE))

    def stop() -> None:
        if op.products == 3:
            raise KeyboardInterrupt

    op.before_product = stop
    with pytest.raises(KeyboardInterrupt):
        basis.advance(8)
    assert (basis.products, basis.multiplied, basis.pending) == (3, 3, 1)


def test_recurrences_of_many_probes_are_read_every_few_steps(waits: Waits) -> None:
    matrix = symmetric()
    starts = torch.randn(300, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = recurrences(Matrix(matrix), starts, 24)
    op, starts = Matrix(matrix.to(DEVICE)), starts.to(DEVICE)
    waits.clear()
    alphas, betas, products = recurrences(op, starts, 24)
    steps_and_ends = 2 * 24 // 8 + 8  # two values every eighth step; symmetry at first, the result
    assert waits.count <= steps_and_ends, str(waits)
    assert products == expected[2]
    assert abs(alphas - expected[0]).max() < 1e-9
    assert abs(betas - expected[1]).max() < 1e-9


ITERATIONS: dict[str, Callable[[ca.LinearOperator, Tensor], Any]] = {
    "eigenpairs": lambda op, b: ca.eigenpairs(op, k=3, which="largest", tol=1e-6),
    "conjugate gradients": lambda op, b: ca.solve(op, b, damping=0.1, method="cg"),
    "MINRES": lambda op, b: ca.solve(op, b, damping=0.1, method="minres"),
    "f(A) v": lambda op, b: ca.matrix_function(op, b, lambda x: 1 / (1 + x)),
    "a quadratic form": lambda op, b: ca.quadratic_form(op, b, damping=1.0),
}


@pytest.mark.parametrize("name", ITERATIONS)
def test_an_iteration_looks_at_few_of_its_steps(name: str, waits: Waits) -> None:
    """As right as on the CPU, by at most a look's distance more products."""
    matrix, b = symmetric(700), torch.ones(700, dtype=torch.float64)
    here = ITERATIONS[name](Matrix(matrix), b)
    op, moved = Matrix(matrix.to(DEVICE)), b.to(DEVICE)
    waits.clear()
    there = ITERATIONS[name](op, moved)
    assert there.converged
    assert there.products <= here.products + 16
    assert waits.count <= there.products // 2 + 8, str(waits)
    ours = getattr(there, "values", None)
    ours = there.value if ours is None else ours
    theirs = getattr(here, "values", None)
    theirs = here.value if theirs is None else theirs
    ours, theirs = torch.as_tensor(ours).cpu(), torch.as_tensor(theirs)
    assert float((ours - theirs).norm()) <= 1e-3 * float(theirs.norm())


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_a_solve_that_meets_nan_between_two_looks_says_so(method: Any, waits: Waits) -> None:
    matrix = symmetric().clone()
    matrix[4, 4] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        ca.solve(Matrix(matrix.to(DEVICE)), torch.ones_like(matrix[0]).to(DEVICE), method=method)


def test_negative_curvature_between_two_looks_stops_conjugate_gradients(waits: Waits) -> None:
    matrix = symmetric() - 1.0 * torch.eye(300, dtype=torch.float64)
    b = torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    here = ca.solve(Matrix(matrix), b, method="cg")
    there = ca.solve(Matrix(matrix.to(DEVICE)), b.to(DEVICE), method="cg")
    assert "negative curvature" in here.message
    assert there.message == here.message
    assert same(there.value, here.value, roundings=1e6)  # x as it was when that was met


# --- what is stored follows to another device -----------------------------------------------------


def test_an_estimate_begun_on_the_cpu_is_finished_on_the_device(
    waits: Waits, tmp_path: Path
) -> None:
    matrix, file = symmetric(700), tmp_path / "eigenpairs.safetensors"
    here = Matrix(matrix)

    def stop() -> None:
        if here.products == 12:
            raise KeyboardInterrupt

    here.before_product = stop
    options: dict[str, Any] = {"k": 2, "tol": 1e-8, "checkpoint": file}
    with pytest.raises(KeyboardInterrupt):
        ca.eigenpairs(here, **options)
    there = Matrix(matrix.to(DEVICE))
    pairs = ca.eigenpairs(there, **options)
    assert there.products == pairs.products - 12
    assert pairs.vectors.device == DEVICE
    assert torch.allclose(pairs.values, torch.linalg.eigvalsh(matrix)[[-1, -2]], rtol=1e-8)


def test_eigenvectors_that_are_followed_come_back_on_the_device(waits: Waits) -> None:
    matrix = symmetric(700)
    before = Following(k=2, which="largest", tol=1e-6)
    before.measure(Matrix(matrix), torch.zeros(3))
    before.measure(Matrix(matrix), torch.ones(3))
    after = Following(k=2, which="largest", tol=1e-6)
    after.restore(before.state())
    pairs = after.measure(Matrix(matrix.to(DEVICE)), torch.full((3,), 2.0, device=DEVICE))
    assert torch.allclose(pairs.values, torch.linalg.eigvalsh(matrix)[[-1, -2]], rtol=1e-5)


# --- everything else follows the model's device ---------------------------------------------------


ESTIMATES: dict[str, Callable[[ca.LinearOperator], Any]] = {
    "eigenpairs": lambda op: ca.eigenpairs(op, k=2, tol=1e-3, max_products=60).values,
    "spectral_density": lambda op: ca.spectral_density(op, max_products=24).negative_mass,
    "trace": lambda op: ca.trace(op, max_products=24).value,
    "diagonal": lambda op: ca.diagonal(op, max_products=24).values,
    "frobenius_norm": lambda op: ca.frobenius_norm(op, max_products=24).value,
    "spectral_norm": lambda op: ca.spectral_norm(op).value,
    "solve": lambda op: ca.solve(op, torch.ones(op.shape[0], device=op.device), damping=5.0).value,
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_an_estimate_of_a_model_on_the_device_mixes_nothing(name: str, waits: Waits) -> None:
    """The same numbers as on the CPU: probes come from the same seeds."""
    here, there = (
        torch.as_tensor(
            ESTIMATES[name](ca.GaussNewton(ca.Problem(moved, "cross_entropy", data)))
        ).cpu()
        for moved, data in (small_on("cpu"), small_on(DEVICE))
    )
    assert float((here - there).norm()) <= 1e-2 * float(here.norm()) + 1e-6


def tiny_on(device: torch.device | str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    sizes = zoo.GPTConfig(vocabulary=3, context=2, d_model=2, n_heads=1, n_layers=1, d_ff=2)
    data = torch.tensor([[0, 2, 1]], device="cpu").to(device)
    return zoo.GPT(sizes).eval().to(device), (data[:, :-1], data[:, 1:])


def test_the_atlas_and_the_propagation_mix_nothing(waits: Waits) -> None:
    def numbers(device: torch.device | str) -> list[Tensor]:
        moved, data = tiny_on(device)
        atlas = ca.atlas(ca.Problem(moved, "cross_entropy", data))
        flow = ca.CurvaturePropagationAnalyzer(moved, "cross_entropy").analyze_curvature_flow(*data)
        total = flow["blocks.0.attention"].total
        assert total is not None
        return [atlas.frobenius["total"].values, total]

    for here, there in zip(numbers("cpu"), numbers(DEVICE), strict=True):
        assert float((here - there.cpu()).norm()) <= 1e-4 * float(here.norm())


def test_the_monitor_mixes_nothing(waits: Waits) -> None:
    def edge(device: torch.device | str) -> float:
        moved, data = tiny_on(device)
        monitor = ca.Monitor(moved, "cross_entropy", data, every=1, budget=1.0, tol=1e-4)
        optimizer = torch.optim.SGD(moved.parameters(), lr=0.1)
        for _ in range(2):
            loss = nn.functional.cross_entropy(moved(data[0]).flatten(0, 1), data[1].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step()
        return monitor.history.snapshots[-1].sharpness

    assert edge(DEVICE) == pytest.approx(edge("cpu"), rel=1e-3)
