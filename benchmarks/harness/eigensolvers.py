"""Every library that finds the eigenvalues at both ends of a Hessian, each on its own model.

A solver returns values (2k,), the largest first, vectors (n, 2k) and the products it took.
PyHessian knows only the largest, by power iteration one after the other: it takes part with those.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.spectra.quadrature import jacobi
from harness.cases import Case
from harness.contestants import FlatLogits

ENDS = 5
TOLERANCE = 1e-4
Solver = Callable[[], tuple[Tensor, Tensor, int]]


def eigen_contestants(case: Case, without: Collection[str] = ()) -> dict[str, Solver]:
    """Every library that can run here, on its own copy of the model."""
    found: dict[str, Solver] = {"curvatlas": _ours(case), "scipy eigsh": _scipy(case)}
    makers = {
        "curvlinops": _curvlinops,
        "hessian_eigenthings": _eigenthings,
        "pyhessian": _pyhessian,
    }
    for module, make in makers.items():
        if module not in without and importlib.util.find_spec(module) is not None:
            found[module.replace("_", "-")] = make(case.clone())
    return found


def problem_of(case: Case) -> ca.Problem:
    return ca.Problem(case.model, "cross_entropy", (case.inputs, case.targets))


def _ours(case: Case) -> Solver:
    operator = ca.Hessian(problem_of(case))

    def run() -> tuple[Tensor, Tensor, int]:
        found = ca.eigenpairs(operator, k=ENDS, which="both", tol=TOLERANCE)
        return found.values, found.vectors, found.products

    return run


def _by_eigsh(shape: tuple[int, int], product: Callable[[np.ndarray], np.ndarray]) -> Solver:
    """ARPACK for each end; its tolerance is relative to each value, so the low end is given ten."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    def run() -> tuple[Tensor, Tensor, int]:
        count = 0

        def counted(vector: np.ndarray) -> np.ndarray:
            nonlocal count
            count += 1
            return product(vector.astype(np.float32))

        operator = LinearOperator(shape, matvec=counted, dtype=np.float32)
        high, up = eigsh(operator, k=ENDS, which="LA", tol=TOLERANCE)
        ratio = 10.0  # the low end is about a tenth of λmax or less: an easier goal there
        low, down = eigsh(operator, k=ENDS, which="SA", tol=min(TOLERANCE * ratio, 1e-2))
        values = np.concatenate([high[::-1], low[::-1]])
        vectors = np.concatenate([up[:, ::-1], down[:, ::-1]], axis=1)
        return torch.from_numpy(values.copy()), torch.from_numpy(vectors.copy()), count

    return run


def _scipy(case: Case) -> Solver:
    """On double backward through a kept graph, the fastest product without a library."""
    own = case.clone()
    kept = torch.autograd.grad(own.value(), own.parameters, create_graph=True)

    def product(vector: np.ndarray) -> np.ndarray:
        pieces = own.split(torch.from_numpy(vector.reshape(-1)))
        images = torch.autograd.grad(kept, own.parameters, pieces, retain_graph=True)
        return torch.cat([image.reshape(-1) for image in images]).numpy()

    return _by_eigsh((own.size, own.size), product)


def _curvlinops(case: Case) -> Solver:
    from curvlinops import HessianLinearOperator

    model = FlatLogits(case.model)
    operator = HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()),
        [(case.inputs, case.targets.flatten())], check_deterministic=False,
    )  # fmt: skip
    product = lambda v: (operator @ torch.from_numpy(v.reshape(-1))).detach().numpy()  # noqa: E731
    return _by_eigsh((case.size, case.size), product)


def _eigenthings(case: Case) -> Solver:
    from hessian_eigenthings.algorithms.lanczos import lanczos, lanczos_tridiagonal
    from hessian_eigenthings.operators import HessianOperator

    data = [(case.inputs, case.targets)]
    operator = HessianOperator(case.model, data, lambda model, batch: case.loss(model(batch[0])))

    def end(which: str, steps: int) -> Any:
        return lanczos(operator, k=ENDS, which=which, max_iter=steps, reorthogonalize=True, seed=0)

    # One long run tells how many steps each end needs: its leading blocks are the shorter runs.
    start = torch.randn(operator.size, generator=torch.Generator().manual_seed(0))
    long = lanczos_tridiagonal(operator, start, min(160, operator.size - 1), reorthogonalize=True)
    alphas, betas = long.alphas.double().numpy(), long.betas.double().numpy()

    def enough(which: str) -> int:
        for steps in range(16, len(alphas) - 1, 8):
            values, vectors = np.linalg.eigh(jacobi(alphas[:steps], betas[: steps - 1]))
            ends = slice(-ENDS, None) if which == "LA" else slice(0, ENDS)
            residuals = betas[steps - 1] * np.abs(vectors[-1, ends])
            if residuals.max() <= TOLERANCE * np.abs(values).max():
                return steps
        return len(alphas)

    steps = {which: enough(which) for which in ("LA", "SA")}

    def run() -> tuple[Tensor, Tensor, int]:
        high, low = (end(which, count) for which, count in steps.items())
        values = torch.cat([high.eigenvalues, low.eigenvalues.flip(0)])
        vectors = torch.cat([high.eigenvectors, low.eigenvectors.flip(0)]).T
        return values, vectors, sum(steps.values())

    return run


def _pyhessian(case: Case) -> Solver:
    """Power iteration with deflation, as its users call it, with a tolerance of 1e-6."""
    from pyhessian.hessian import hessian

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its backward(create_graph=True) warns of a leak
        computer = hessian(
            case.model, lambda outputs, _: case.loss(outputs), data=(case.inputs, case.targets),
            cuda=False,
        )  # fmt: skip

    def run() -> tuple[Tensor, Tensor, int]:
        loaded: Any = sys.modules["pyhessian.hessian"]  # the package hides it behind the class
        original, count = loaded.hessian_vector_product, 0

        def counted(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            return original(*arguments)

        loaded.hessian_vector_product = counted
        torch.manual_seed(0)
        try:
            values, vectors = computer.eigenvalues(maxIter=200, tol=1e-6, top_n=ENDS)
        finally:
            loaded.hessian_vector_product = original
        columns = [torch.cat([part.reshape(-1) for part in vector]) for vector in vectors]
        return torch.tensor(values), torch.stack(columns, 1).detach(), count

    return run
