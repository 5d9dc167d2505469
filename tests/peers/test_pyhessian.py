"""What PyHessian's example and tutorial show (github.com/amirgholami/PyHessian), in our words."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
import oracles
from curvatlas.errors import ProblemError
from peers.cases import GROUPS
from peers.matrices import Opaque, drawn, error
from peers.table import Table

table = Table("PyHessian", GROUPS)


def _network(*, normalised: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(2)] if normalised else []
    layers = [nn.Conv2d(1, 2, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers).double().eval()
    if normalised:
        model[1].running_mean += 0.1
    return model


def _data(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 1, 4, 4, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]


def _sizes(case: str) -> tuple[int, ...]:
    return (6, 2) if "different" in case else (4, 4) if "list" in case else (8,)


def _dense(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The Hessian of the mean over all samples, by double backward."""
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    loss = nn.functional.cross_entropy(model(x), y)
    return oracles.hessian(loss, [p for p in model.parameters() if p.requires_grad])


def _problem(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> ca.Problem:
    return ca.Problem(model, nn.CrossEntropyLoss(), data if len(data) > 1 else data[0])


@table.right("top eigenvalues of a network")
def test_top_eigenvalues_of_a_network(case: str) -> None:
    model = _network(normalised="normalisation" in case)
    data = _data(*_sizes(case))
    matrix = _dense(model, data)
    wrapped: Any = nn.DataParallel(model) if "DataParallel" in case else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the wrapper is taken off
        problem = _problem(wrapped, data)
    k = 1 if case == "one batch, the first" else 2
    found = ca.eigenpairs(ca.Hessian(problem), k=k, which="magnitude", tol=1e-9)
    values = torch.linalg.eigvalsh(matrix)
    want = values[values.abs().argsort(descending=True)[:k]]
    got = found.values[found.values.abs().argsort(descending=True)]
    assert torch.allclose(got, want, rtol=1e-7)
    assert error(found.vectors.T @ found.vectors, torch.eye(k, dtype=torch.float64)) < 1e-10


@table.right("trace of a network's Hessian")
def test_the_trace_of_a_networks_hessian(case: str) -> None:
    model, data = _network(), _data(*_sizes(case))
    found = ca.trace(ca.Hessian(_problem(model, data)))
    want = float(_dense(model, data).trace())
    assert found.value == pytest.approx(want, rel=0.02)
    assert found.interval[0] - abs(want) * 0.01 <= want <= found.interval[1] + abs(want) * 0.01


@table.right("eigenvalue density of a network's Hessian")
def test_the_density_of_a_networks_hessian(case: str) -> None:
    model, data = _network(), _data(*_sizes(case))
    matrix = _dense(model, data)
    found = ca.spectral_density(ca.Hessian(_problem(model, data)))
    nodes, weights = np.asarray(found.nodes), np.asarray(found.weights)
    if case == "a figure of it":
        assert found.plot().axes
    elif "sum" in case:
        assert weights.sum() == pytest.approx(1.0, abs=1e-12)
        assert (weights >= 0).all()
    elif "moments" in case:
        for power in (1, 2, 3):
            want = float(torch.linalg.matrix_power(matrix, power).trace()) / len(matrix)
            assert (weights * nodes**power).sum() == pytest.approx(want, rel=1e-8)
    else:
        values = torch.linalg.eigvalsh(matrix)
        assert nodes.min() == pytest.approx(float(values[0]), abs=1e-10)
        assert nodes.max() == pytest.approx(float(values[-1]), abs=1e-10)


@table.right("a matrix that is only multiplied")
def test_a_matrix_that_is_only_multiplied(case: str) -> None:
    root = drawn(120, 120)
    matrix = root @ root.T
    op = Opaque((matrix + matrix.T) / 2, psd=True)
    if case == "top eigenvalue":
        want = float(torch.linalg.eigvalsh(matrix)[-1])
        assert float(ca.eigenpairs(op, k=1).values[0]) == pytest.approx(want, rel=1e-6)
    elif case == "trace":
        assert ca.trace(op).value == pytest.approx(float(matrix.trace()), rel=0.02)
    else:
        assert error(ca.diagonal(op).values.double(), matrix.diagonal()) < 0.15


@table.right("the loss along directions")
def test_the_loss_along_directions(case: str) -> None:
    model, data = _network(), _data(8)
    problem = _problem(model, data)
    hessian = ca.Hessian(problem)
    if case == "top eigenvector":
        direction = ca.eigenpairs(hessian, k=1).vectors[:, 0]
    elif case == "the gradient":
        direction = problem.gradient() / problem.gradient().norm()
    else:
        direction = drawn(problem.size) / drawn(problem.size).norm()
    step = 1e-3
    before = problem.value()
    moved = []
    for sign in (1, -1):
        weights = problem.parameters + sign * step * direction
        pieces = dict(zip(problem.parameter_names, problem.layout.shaped(weights), strict=True))
        outputs = torch.func.functional_call(model, pieces, (data[0][0],))
        moved.append(float(nn.functional.cross_entropy(outputs, data[0][1])))
    curvature = float(direction @ (hessian @ direction))
    assert (sum(moved) - 2 * before) / step**2 == pytest.approx(curvature, rel=1e-3, abs=1e-6)


@table.right("data, or a loader, but not both")
def test_one_batch_or_a_loader(case: str) -> None:
    model, data = _network(), _data(8)
    loader: Any = data[0]
    if case == "a loader":
        pairs = torch.utils.data.TensorDataset(*data[0])
        loader = torch.utils.data.DataLoader(pairs, batch_size=3)
    problem = ca.Problem(model, "cross_entropy", loader)
    assert error(ca.Hessian(problem).dense(), _dense(model, data)) < 1e-12


@table.refused("data, or a loader, but not both")
def test_no_data_are_refused(case: str) -> None:
    with pytest.raises(ProblemError, match=r"empty|no data"):
        ca.Problem(_network(), "cross_entropy", [])


@table.right("parameters that are frozen")
def test_frozen_parameters_are_left_out(case: str) -> None:
    model, data = _network(), _data(8)
    model[0].requires_grad_(False)
    problem = _problem(model, data)
    assert all(not name.startswith("0.") for name in problem.parameter_names)
    assert error(ca.Hessian(problem).dense(), _dense(model, data)) < 1e-12
