"""What depends on the device: memory, float64, what a group can send. No GPU is needed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import curvatlas as ca
from curvatlas import budget, parallel, precision
from stand_in_device import DEVICE, stand_in_device


def test_the_budget_on_cuda_is_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free on the device, and held by PyTorch without being used."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * 10**9, 16 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10**9)
    assert budget.available_bytes(torch.device("cuda", 0)) == 6 * 10**9
    assert budget.default_budget(torch.device("cuda", 0)) == 3 * 2**30  # of 16 GB, free or not
    assert budget.available_bytes(torch.device("cpu")) != 6 * 10**9


# --- a device without float64 -------------------------------------------------------------------


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", frozenset({"mps", DEVICE.type}))
    with stand_in_device(float64=False):
        yield


def test_float64_is_looked_for_where_a_device_has_it() -> None:
    mps, cuda = torch.device("mps"), torch.device("cuda", 1)
    assert not precision.has_float64(mps)
    assert precision.float64_device(mps) == torch.device("cpu")
    assert precision.float64_device(cuda) == cuda
    assert precision.in_float64(torch.ones(2)).dtype == torch.float64


def test_the_emulated_device_refuses_float64(without_float64: None) -> None:
    """What the tests below rest on."""
    there = torch.ones(2, device=DEVICE)
    with pytest.raises(TypeError, match="float64"):
        there.double()
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(2, dtype=torch.float64, device=DEVICE)
    with pytest.raises(RuntimeError, match="cpu"):
        there + torch.ones(2)
    in_main_memory = precision.in_float64(there)
    assert in_main_memory.device.type == "cpu"
    assert in_main_memory.tolist() == [1.0, 1.0]


class Known(ca.LinearOperator):
    """A symmetric matrix known by its products."""

    def __init__(self, matrix: Tensor) -> None:
        n = len(matrix)
        tags = ca.Tags(symmetric=True, psd=True)
        super().__init__((n, n), dtype=matrix.dtype, device=matrix.device, tags=tags)
        self.matrix = matrix

    def _columns(self, columns: Tensor) -> Tensor:
        return self.matrix @ columns


Estimator = Callable[[ca.LinearOperator, Tensor], Any]
ESTIMATORS: dict[str, Estimator] = {
    "trace": lambda op, v: ca.trace(op, max_products=40).value,
    "eigenpairs": lambda op, v: ca.eigenpairs(op, k=2).values,
    "eigenpairs in bfloat16": lambda op, v: (
        ca.eigenpairs(op, k=2, tol=1e-2, storage=torch.bfloat16).values
    ),
    "density": lambda op, v: ca.spectral_density(op, max_products=40).negative_mass,
    "diagonal": lambda op, v: ca.diagonal(op, max_products=40).values,
    "frobenius_norm": lambda op, v: ca.frobenius_norm(op, max_products=40).value,
    "spectral_norm": lambda op, v: ca.spectral_norm(op).value,
    "solve": lambda op, v: ca.solve(op, v, damping=0.1).value,
    "least_squares": lambda op, v: ca.least_squares(op, v, damping=0.1).value,
    "inverse_diagonal": lambda op, v: ca.inverse_diagonal(op, damping=1.0, max_products=80).values,
    "log_determinant": lambda op, v: ca.log_determinant(op, damping=1.0, max_products=40).value,
    "quadratic_form": lambda op, v: ca.quadratic_form(op, v, damping=1.0).value,
    "newton_step": lambda op, v: ca.newton_step(op, v, radius=0.1).value,
    "matrix_function": lambda op, v: ca.matrix_function(op, v, lambda x: x**2).value,
    "cholesky_preconditioner": lambda op, v: (
        ca.cholesky_preconditioner(op, rank=5, damping=0.1) @ v
    ),
}


@functools.cache
def matrix_of(size: int) -> Tensor:
    draw = torch.Generator().manual_seed(size)
    basis = torch.linalg.qr(torch.randn(size, size, generator=draw)).Q
    matrix = (basis * torch.linspace(0.1, 3.0, size)) @ basis.T
    return (matrix + matrix.T) / 2


@pytest.mark.parametrize("size", [60, 600])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimate_needs_no_float64_of_the_device(
    name: str, size: int, without_float64: None
) -> None:
    """The same numbers as on the CPU, up to the rounding of another order of sums."""
    estimate = ESTIMATORS[name]
    matrix, vector = matrix_of(size), torch.ones(size)
    here = torch.as_tensor(estimate(Known(matrix), vector))
    there = torch.as_tensor(estimate(Known(matrix.to(DEVICE)), vector.to(DEVICE))).cpu()
    error = float((here - there).norm())
    assert error <= 1e-3 * float(here.norm()) + 1e-6


@pytest.mark.parametrize("name", ["trace", "diagonal", "frobenius_norm", "density"])
def test_a_matrix_at_hand_needs_no_float64_of_the_device(name: str, without_float64: None) -> None:
    matrix = matrix_of(50)
    tags = ca.Tags(symmetric=True)
    here = ESTIMATORS[name](ca.MatrixOperator(matrix, tags=tags), torch.ones(50))
    there = ESTIMATORS[name](ca.MatrixOperator(matrix.to(DEVICE), tags=tags), torch.ones(50))
    here, there = torch.as_tensor(here), torch.as_tensor(there).cpu()
    assert float((here - there).norm()) <= 1e-5 * float(here.norm()) + 1e-9


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["trace", "eigenpairs", "diagonal", "frobenius_norm", "density"])
def test_numbers_that_are_none_are_noticed_off_the_cpu(
    name: str, bad: float, without_float64: None
) -> None:
    matrix = matrix_of(600).clone()
    matrix[3, 5] = matrix[5, 3] = bad
    with pytest.raises((FloatingPointError, ValueError), match=r"NaN or infinity|not finite"):
        ESTIMATORS[name](Known(matrix.to(DEVICE)), torch.ones(600))


def test_a_problem_needs_no_float64_of_the_device(without_float64: None) -> None:
    """Value, products, exact diagonal, KFAC and atlas as on the CPU."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)
    model = torch.nn.Sequential(*layers)
    inputs, targets = torch.randn(5, 3), torch.randint(0, 3, (5,))
    vector = torch.randn(31)

    def numbers(device: torch.device) -> list[Tensor]:
        moved = copy.deepcopy(model).to(device)
        data = (inputs.to(device), targets.to(device))
        problem = ca.Problem(moved, "cross_entropy", data)
        outer = ca.GaussNewton(problem)
        return [
            torch.tensor(problem.value()),
            *(op @ vector.to(device) for op in (ca.Hessian(problem), outer, ca.KFAC(problem))),
            ca.diagonal(outer).values,
            ca.atlas(problem).frobenius["total"].values,
        ]

    for here, there in zip(numbers(torch.device("cpu")), numbers(DEVICE), strict=True):
        assert float((here - there.cpu()).norm()) <= 1e-5 * float(here.norm())


# --- what a process group can send --------------------------------------------------------------


@pytest.mark.parametrize(
    ("backends", "tensor", "sent"),
    [
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda:2"),
        ("cuda:nccl", None, "cuda:2"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", None, "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cpu:gloo", "mps", "cpu"),
    ],
)
def test_a_tensor_is_sent_from_where_the_group_reaches_it(
    backends: str, tensor: str | None, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL sends from CUDA only, on the device that this process has chosen."""
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    device = None if tensor is None else torch.device(tensor)
    assert parallel.carrier(device) == torch.device(sent)
