"""The cases of hessian-eigenthings' suite (github.com/noahgolmant/pytorch-hessian-eigenthings)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import curvatlas as ca
import oracles
from curvatlas.errors import ProblemError
from peers.cases import GROUPS
from peers.matrices import Opaque, drawn, error, turned, wishart
from peers.table import Table

table = Table("hessian-eigenthings", GROUPS)


def _mlp(outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def _regression() -> tuple[nn.Sequential, Tensor, Tensor]:
    return _mlp(), drawn(8, 3, seed=1), drawn(8, 2, seed=2)


def _classification() -> tuple[nn.Sequential, Tensor, Tensor]:
    labels = torch.randint(0, 4, (6,), generator=torch.Generator().manual_seed(3))
    return _mlp(4), drawn(6, 3, seed=1), labels


def _hessian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return oracles.hessian(functional.mse_loss(model(x), y), list(model.parameters()))


# --- models whose curvature is known --------------------------------------------------------------


def _linear_model(name: str) -> tuple[nn.Linear, Any, tuple[Tensor, Tensor], Tensor]:
    """A model, a loss, data, and its Hessian in closed form."""
    x = drawn(14, 4, seed=1)
    if name == "linear regression":
        model = nn.Linear(4, 1, bias=False).double()
        return model, nn.MSELoss(), (x, drawn(14, 1, seed=2)), 2 / 14 * x.T @ x
    if name == "binary logistic regression":
        model = nn.Linear(4, 1, bias=False).double()
        p = torch.sigmoid(model(x).detach())[:, 0]
        y = (drawn(14, 1, seed=2) > 0).double()
        return model, nn.BCEWithLogitsLoss(), (x, y), (x.T * (p * (1 - p))) @ x / 14
    model = nn.Linear(4, 3, bias=False).double()
    p = torch.softmax(model(x).detach(), -1)
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    want = torch.einsum("nab,ni,nj->aibj", blocks, x, x).reshape(12, 12) / 14
    y = torch.randint(0, 3, (14,), generator=torch.Generator().manual_seed(2))
    return model, nn.CrossEntropyLoss(), (x, y), want


@table.right("closed forms of linear models")
def test_linear_models_have_their_closed_forms(case: str) -> None:
    name, which = case.split("; ")
    torch.manual_seed(0)
    model, loss, data, want = _linear_model(name)
    problem = ca.Problem(model, loss, data)
    if which == "both agree":
        difference = (ca.Hessian(problem) - ca.GaussNewton(problem)).dense()
        assert float(difference.abs().max()) < 1e-14
        return
    assert error(getattr(ca, which)(problem).dense(), want) < 1e-13


# --- operators ------------------------------------------------------------------------------------


@table.right("batch statistics")
def test_batch_statistics_are_refused_by_name(case: str) -> None:
    torch.manual_seed(0)
    y = drawn(8, 2, seed=1)
    x = drawn(8, 1, 4, 4) if "2d" in case else drawn(8, 4)
    if "2d" in case:
        layers = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)]
    else:
        middle = nn.LayerNorm(6) if case == "LayerNorm" else nn.BatchNorm1d(6)
        layers = [nn.Linear(4, 6), middle, nn.Linear(6, 2)]
    model = nn.Sequential(*layers).double()
    if case in ("LayerNorm", "BatchNorm1d in evaluation"):
        problem = ca.Problem(model.eval(), "mse", (x, y))
        plain = oracles.hessian((model(x) - y).pow(2).mean(), list(model.parameters()))
        assert error(ca.Hessian(problem).dense(), plain) < 1e-12
        return
    with pytest.raises(ProblemError, match=r"batch normalisation .* in 1\b"):
        ca.Hessian(ca.Problem(model, "mse", (x, y))).dense()


@table.right("the Hessian of an MLP")
def test_the_hessian_of_an_mlp(case: str) -> None:
    model, x, y = _regression()
    want = _hessian(model, x, y)
    if case == "over batches":
        want = 0.5 * (_hessian(model, x[:4], y[:4]) + _hessian(model, x[4:], y[4:]))
        problem = ca.Problem(model, functional.mse_loss, [(x[:4], y[:4]), (x[4:], y[4:])])
        assert error(ca.Hessian(problem).dense(), want) < 1e-13
    elif "filter" in case:
        problem = ca.Problem(model, "mse", (x, y), parameters="2.*")
        assert ca.Hessian(problem).shape == (12, 12)
        assert error(ca.Hessian(problem).dense(), want[20:, 20:]) < 1e-13
    elif case == "products":
        op = ca.Hessian(ca.Problem(model, "mse", (x, y)))
        for seed in range(5):
            v = drawn(op.shape[1], seed=seed)
            assert error(op @ v, want @ v) < 1e-12
    else:
        op = ca.Hessian(ca.Problem(model, "mse", (x, y)))
        with pytest.raises(ValueError, match="takes a vector"):
            op @ torch.zeros(op.shape[1] + 1, dtype=torch.float64)


@table.refused("the Hessian of an MLP")
def test_an_operator_is_one_matrix(case: str) -> None:
    model, x, y = _regression()
    problem = ca.Problem(model, "mse", [(x[:4], y[:4]), (x[4:], y[4:])])
    with pytest.raises(TypeError, match="full_dataset"):
        ca.Hessian(problem, full_dataset=False)  # type: ignore[call-arg]
    alone = [op.dense() for _, op in ca.Hessian(problem).per_batch()]
    assert error(alone[1], _hessian(model, x[4:], y[4:])) < 1e-13


@table.right("products by finite differences")
def test_products_leave_the_parameters_alone(case: str) -> None:
    model, x, y = _regression()
    before = [p.detach().clone() for p in model.parameters()]

    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("out of order")

    op = ca.Hessian(ca.Problem(model, fails if "fails" in case else "mse", (x, y)))
    if "fails" in case:
        with pytest.raises(RuntimeError, match="out of order"):
            op @ drawn(op.shape[1])
    else:
        op @ drawn(op.shape[1])
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None


@table.refused("products by finite differences")
def test_there_are_no_products_by_differences(case: str) -> None:
    model, x, y = _regression()
    option = {"method": "finite_difference"} if "place" in case else {"fd_eps": 1e-5}
    with pytest.raises(TypeError, match=next(iter(option))):
        ca.Hessian(ca.Problem(model, "mse", (x, y)), **option)  # type: ignore[arg-type]


@table.right("the Gauss-Newton matrix of an MLP")
def test_the_gauss_newton_matrix_of_an_mlp(case: str) -> None:
    model, x, y = _classification()
    loss: Any = "cross_entropy"
    if case == "MSE":
        y, loss = drawn(6, 4, seed=2), "mse"
    value = functional.mse_loss if case == "MSE" else functional.cross_entropy
    want = oracles.outer_hessian(model(x), lambda z: value(z, y), list(model.parameters()))
    data: Any = [(x[:3], y[:3]), (x[3:], y[3:])] if case == "over batches" else (x, y)
    if "closed form" in case:

        def loss(z: Tensor, t: Tensor) -> Tensor:
            return functional.cross_entropy(z, t) * 1.0

    if case == "float32":
        problem = ca.Problem(model.float(), loss, (x.float(), y))
        assert error(ca.GaussNewton(problem).dense().double(), want) < 1e-5
        return
    op = ca.GaussNewton(ca.Problem(model, loss, data))
    if "refused" in case:
        with pytest.raises(ValueError, match="takes a vector"):
            op @ torch.zeros(op.shape[1] + 1, dtype=torch.float64)
    elif "curvature" in case:
        for seed in range(20):
            v = drawn(op.shape[1], seed=seed)
            assert float(v @ (op @ v)) >= -1e-14
    elif "length" in case:
        size = float(case.split()[-1])
        v = drawn(op.shape[1])
        assert error((op @ (size * v)) / size, want @ v) < 1e-12
    else:
        assert error(op.dense(), want) < 1e-12


@table.right("the empirical Fisher of an MLP")
def test_the_empirical_fisher_of_an_mlp(case: str) -> None:
    model, x, y = _regression()
    parameters = list(model.parameters())
    slopes = torch.stack(
        [
            oracles.gradient((model(a) - b).pow(2).mean(), parameters)
            for a, b in zip(x, y, strict=True)
        ]
    )
    want = slopes.T @ slopes / 8
    data: Any = [(x[:4], y[:4]), (x[4:], y[4:])] if case == "over batches" else (x, y)
    op = ca.Fisher(ca.Problem(model, "mse", data), kind="empirical")
    if "refused" in case:
        with pytest.raises(ValueError, match="takes a vector"):
            op @ torch.zeros(op.shape[1] + 1, dtype=torch.float64)
    elif "curvature" in case:
        for seed in range(20):
            v = drawn(op.shape[1], seed=seed)
            assert float(v @ (op @ v)) >= -1e-14
    else:
        assert error(op.dense(), want) < 1e-13


# --- eigenpairs -----------------------------------------------------------------------------------


def _by_magnitude(matrix: Tensor, k: int) -> Tensor:
    values = torch.linalg.eigvalsh(matrix)
    return values[values.abs().argsort(descending=True)[:k]]


@table.right("eigenpairs of an MLP's Hessian")
def test_eigenpairs_of_an_mlps_hessian(case: str) -> None:
    model, x, y = _regression()
    matrix = _hessian(model, x, y)
    op = ca.Hessian(ca.Problem(model, "mse", (x, y)))
    found = ca.eigenpairs(op, k=3, which="magnitude", tol=1e-9)
    if "vectors" in case:
        residual = matrix @ found.vectors - found.vectors * found.values
        assert float(residual.norm(dim=0).max()) < 1e-8 * float(found.values.abs().max())
        return
    ordered = found.values[found.values.abs().argsort(descending=True)]
    assert torch.allclose(ordered, _by_magnitude(matrix, 3), rtol=1e-8)


@table.right("eigenpairs of random matrices, Lanczos")
def test_eigenpairs_of_random_matrices(case: str) -> None:
    matrix = wishart(40, seed=1) - 0.5 * torch.eye(40, dtype=torch.float64)
    matrix = (matrix + matrix.T) / 2
    op = Opaque(matrix)
    values = torch.linalg.eigvalsh(matrix)
    if case == "k = 0 is refused":
        with pytest.raises(ValueError, match="k"):
            ca.eigenpairs(op, k=0)
        return
    if case == "k beyond the size is refused":
        with pytest.raises(ValueError, match="k"):
            ca.eigenpairs(op, k=41)
        return
    if case == "the budget is kept":
        assert ca.eigenpairs(op, k=3, max_products=15, tol=1e-9).products <= 15
        return
    which = {"largest magnitude": "magnitude", "smallest": "smallest"}.get(case, "largest")
    budget = 60 if case.startswith("a budget beyond") else None
    found = ca.eigenpairs(op, k=4, which=which, tol=1e-9, max_products=budget, seed=42)
    if case == "largest magnitude":
        ordered = found.values[found.values.abs().argsort(descending=True)]
        assert torch.allclose(ordered, _by_magnitude(matrix, 4), rtol=1e-8)
    elif case == "smallest":
        assert torch.allclose(found.values.sort().values, values[:4], rtol=1e-8)
    elif case == "vectors solve the equation":
        residual = matrix @ found.vectors - found.vectors * found.values
        assert float(residual.norm(dim=0).max()) < 1e-8 * float(values.abs().max())
    elif case == "vectors are orthonormal":
        assert error(found.vectors.T @ found.vectors, torch.eye(4, dtype=torch.float64)) < 1e-10
    elif case == "residuals are numbers":
        assert found.residuals.shape == (4,)
        assert bool(torch.isfinite(found.residuals).all() and (found.residuals >= 0).all())
    elif case == "a seed repeats the result":
        again = ca.eigenpairs(Opaque(matrix), k=4, tol=1e-9, seed=42)
        assert torch.equal(again.values, found.values)
    else:
        assert torch.allclose(found.values.sort().values, values[-4:], rtol=1e-8)


@table.right("eigenpairs of random matrices, power iteration")
def test_eigenpairs_in_place_of_power_iteration(case: str) -> None:
    matrix = wishart(50, seed=2)
    op = Opaque(matrix, psd=True)
    values = torch.linalg.eigvalsh(matrix).flip(0)
    if "refused" in case:
        with pytest.raises(ValueError, match="k"):
            ca.eigenpairs(op, k=0 if "0" in case else 51)
        return
    k = 1 if case in ("the largest value", "its vector solves the equation") else 5
    found = ca.eigenpairs(op, k=k, tol=1e-8, seed=42)
    if "vector solves" in case:
        v = found.vectors[:, 0]
        assert float((matrix @ v - found.values[0] * v).norm()) < 1e-7 * float(values[0])
    elif "orthogonal" in case:
        gram = found.vectors.T @ found.vectors
        assert float((gram - torch.diag(gram.diagonal())).abs().max()) < 1e-10
    elif "residuals" in case:
        assert bool((found.residuals >= 0).all())
    elif "seed" in case:
        assert torch.equal(
            ca.eigenpairs(Opaque(matrix, psd=True), k=k, tol=1e-8, seed=42).values, found.values
        )
    else:
        assert torch.allclose(found.values.sort(descending=True).values, values[:k], rtol=1e-8)


# --- parameters and losses ------------------------------------------------------------------------


@table.right("which parameters vary")
def test_which_parameters_vary(case: str) -> None:
    model, x, y = _regression()
    names = [name for name, _ in model.named_parameters()]
    wanted: Any = {
        "a glob": "0.*",
        "several globs": ["*.bias", "0.weight"],
        "a regular expression": re.compile(r"^2\."),
        "an empty selection is refused": "nonexistent.*",
    }.get(case)
    expected = {
        "a glob": ["0.weight", "0.bias"],
        "several globs": ["0.weight", "0.bias", "2.bias"],
        "a regular expression": ["2.weight", "2.bias"],
        "frozen ones stay out": ["2.weight", "2.bias"],
    }.get(case, names)
    if case == "frozen ones stay out":
        model[0].requires_grad_(False)
    if "empty" in case:
        with pytest.raises((ProblemError, KeyError), match="nonexistent"):
            ca.Problem(model, "mse", (x, y), parameters=wanted)
        return
    problem = ca.Problem(model, "mse", (x, y), parameters=wanted)
    layout = problem.layout
    if "vector" in case and "refused" in case:
        bad = torch.zeros(3) if "length" in case else torch.zeros(2, 2, 2)
        with pytest.raises((ValueError, RuntimeError)):
            layout.shaped(bad)
        return
    assert list(problem.parameter_names) == expected
    if case == "the total size":
        assert problem.size == sum(p.numel() for p in model.parameters())
    elif case == "to a vector and back":
        pieces = layout.shaped(problem.parameters)
        for piece, parameter in zip(pieces, model.parameters(), strict=True):
            assert torch.equal(piece, parameter)
        assert torch.equal(layout.flat(pieces), problem.parameters)


@table.right("losses")
def test_losses(case: str) -> None:
    if "Hugging Face" in case:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        model = GPT2LMHeadModel(config).eval()
        tokens = torch.randint(0, 13, (2, 5))
        problem = ca.Problem(model, "cross_entropy", {"input_ids": tokens, "labels": tokens})
        own = model(input_ids=tokens, labels=tokens).loss
        assert problem.value() == pytest.approx(float(own.detach()), rel=1e-6)
        return
    mlp, x, y = _classification()
    problem = ca.Problem(mlp, functional.cross_entropy, (x, y))
    assert problem.value() == pytest.approx(
        float(functional.cross_entropy(mlp(x), y).detach()), rel=1e-13
    )
    if "number" in case:
        return
    parameters = list(mlp.parameters())
    if "Hessian" in case:
        want = oracles.hessian(functional.cross_entropy(mlp(x), y), parameters)
        assert error(ca.Hessian(problem).dense(), want) < 1e-12
    elif "Gauss-Newton" in case:
        want = oracles.outer_hessian(mlp(x), lambda z: functional.cross_entropy(z, y), parameters)
        assert error(ca.GaussNewton(problem).dense(), want) < 1e-12
    else:
        rows = [
            oracles.gradient(functional.cross_entropy(mlp(a[None]), b[None]), parameters)
            for a, b in zip(x, y, strict=True)
        ]
        slopes = torch.stack(rows)
        fisher = ca.Fisher(problem, kind="empirical").dense()
        assert error(fisher, slopes.T @ slopes / len(rows)) < 1e-12


# --- estimators -----------------------------------------------------------------------------------


@table.right("spectral density")
def test_spectral_densities(case: str) -> None:
    if "refused" in case:
        with pytest.raises(ValueError, match="max_products"):
            ca.spectral_density(Opaque(torch.eye(10)), max_products=0)
        return
    if "MLP" in case:
        model, x, y = _regression()
        values = torch.linalg.eigvalsh(_hessian(model, x, y))
        found = ca.spectral_density(ca.Hessian(ca.Problem(model, "mse", (x, y))))
        assert float(np.min(np.asarray(found.nodes))) == pytest.approx(float(values[0]), rel=1e-6)
        assert float(np.max(np.asarray(found.nodes))) == pytest.approx(float(values[-1]), rel=1e-6)
        return
    if case == "two clusters":
        spectrum = torch.tensor([1.0] * 200 + [5.0] * 200)
    elif "even" in case:
        spectrum = torch.linspace(0, 10, 400)
    else:
        spectrum = torch.linspace(1, 5, 50 if "more steps" in case else 400)
    op = Opaque(turned(spectrum))
    budget = 60 if "more steps" in case else 200
    found = ca.spectral_density(op, max_products=budget, seed=42)
    nodes, weights = np.asarray(found.nodes), np.asarray(found.weights)
    assert weights.sum() == pytest.approx(1.0, abs=1e-9)
    grid, density = np.asarray(found.grid), np.asarray(found.density)
    assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=0.05)
    if case == "two clusters":
        assert weights[nodes < 3].sum() == pytest.approx(0.5, abs=0.1)
        assert all(min(abs(node - 1), abs(node - 5)) < 1e-6 for node in nodes[weights > 1e-6])
    elif "even" in case:
        quarters = [weights[(nodes >= low) & (nodes < low + 2.5)].sum() for low in (0, 2.5, 5, 7.5)]
        assert min(quarters) > 0.5 * max(quarters)
    elif "seed" in case:
        again = ca.spectral_density(Opaque(turned(spectrum)), max_products=budget, seed=42)
        assert np.array_equal(np.asarray(again.nodes), nodes)
        assert np.array_equal(np.asarray(again.weights), weights)
    elif "more steps" in case:
        assert np.sort(nodes) == pytest.approx(spectrum.numpy(), rel=1e-6)


@table.right("trace")
def test_traces(case: str) -> None:
    if "refused" in case:
        with pytest.raises(ValueError, match="max_products"):
            ca.trace(Opaque(torch.eye(10)), max_products=0)
        return
    if "MLP" in case:
        model, x, y = _regression()
        want = float(_hessian(model, x, y).trace())
        found = ca.trace(ca.Hessian(ca.Problem(model, "mse", (x, y))))
        assert found.value == pytest.approx(want, rel=0.02)
        return
    if "diagonal" in case:
        diagonal = torch.linspace(1, 5, 50, dtype=torch.float64)
        assert ca.trace(ca.DiagonalOperator(diagonal)).value == pytest.approx(float(diagonal.sum()))
        return
    n = 200
    matrix = turned(1 / torch.arange(1, n + 1, dtype=torch.float64), seed=3)
    want = float(matrix.trace())
    if "closer" in case:
        ours, theirs = [], []
        for seed in range(30):
            found = ca.trace(Opaque(matrix), max_products=60, rtol=1e-9, seed=seed)
            ours.append(abs(found.value - want))
            signs = drawn(n, 60, seed=1000 + seed).sign()
            theirs.append(abs(float((signs * (matrix @ signs)).sum() / 60) - want))
        assert np.mean(ours) < np.mean(theirs)
        return
    budget = 99 if "99" in case else 150
    found = ca.trace(Opaque(matrix), max_products=budget, rtol=1e-9)
    assert found.value == pytest.approx(want, rel=0.05)
    low, high = found.interval
    assert low - (high - low) / 2 <= want <= high + (high - low) / 2


# --- cross-entropy at the logits ------------------------------------------------------------------


def _logits(name: str) -> tuple[Tensor, Tensor]:
    if "vocabulary" in name:
        size = int(name.split()[-1])
        logits = drawn(4 if size < 60_000 else 2, size).float()
    else:
        logits = drawn(5, 11)
    targets = torch.arange(len(logits)) % logits.shape[1]
    if name == "one valid token among many":
        targets = torch.full_like(targets, -100)
        targets[2] = 4
    elif name == "a logit of 50":
        logits = torch.zeros(5, 11, dtype=torch.float64)
        logits[:, 3] = 50
    elif name == "all logits equal":
        logits = torch.zeros(5, 11, dtype=torch.float64)
    return logits, targets


def _of_logits(logits: Tensor, targets: Tensor) -> ca.Problem:
    inputs = torch.eye(len(logits), dtype=logits.dtype)
    return ca.Problem(
        lambda p, x: x @ p["logits"],
        "cross_entropy",
        (inputs, targets),
        parameters={"logits": logits},
    )


@table.right("the Hessian of cross-entropy at the logits")
def test_the_hessian_of_cross_entropy_at_the_logits(case: str) -> None:
    logits, targets = _logits(case)
    u = drawn(*logits.shape, seed=5).to(logits.dtype)
    valid = (targets != -100)[:, None]
    p = torch.softmax(logits.double(), -1)
    about = u.double() - u.double().gather(-1, logits.argmax(-1, keepdim=True))  # Λ 1 = 0
    want = valid * (p * about - p * (p * about).sum(-1, keepdim=True)) / valid.sum()
    problem = _of_logits(logits, targets)
    op = ca.GaussNewton(problem)
    got = (op @ u.reshape(-1)).reshape(logits.shape)
    tolerance = 1e-5 if logits.dtype == torch.float32 else 1e-12
    assert error(got.double(), want) < tolerance
    if case == "the dense matrix":
        leaf = logits.clone().requires_grad_()
        value = functional.cross_entropy(leaf, targets)
        assert error(op.dense(), oracles.hessian(value, [leaf])) < 1e-13
    if case == "one valid token among many":
        assert float(got[[0, 1, 3, 4]].abs().max()) == 0


@table.refused("the Hessian of cross-entropy at the logits")
def test_no_targets_and_half_precision_are_refused(case: str) -> None:
    logits, targets = drawn(5, 11), torch.arange(5)
    if case == "no valid token":
        with pytest.raises(ProblemError, match="no valid target"):
            _of_logits(logits, torch.full_like(targets, -100))
        return
    problem = _of_logits(logits.to(getattr(torch, case)), targets)
    with pytest.raises(ProblemError, match="float32 or float64"):
        ca.GaussNewton(problem) @ torch.ones(problem.size, dtype=problem.dtype)
