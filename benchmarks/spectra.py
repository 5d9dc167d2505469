"""Eigenpairs, density and trace beside the peers: products, seconds and true errors.

    python benchmarks/spectra.py [--quick] [--cases vit-2.8k gpt-100k gpt-1m]

One process, one thread, contestants in turn. Eigenpairs: the five largest and the five smallest to
a residual of 1e-4·λmax, residuals recomputed afterwards with the same reference operator for all.
hessian-eigenthings is given the smallest number of steps (in steps of 8) that reaches it, which its
user would not know. Density and trace have an exact truth on the trained ViT.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.spectra.deflated import DeflatedSampler
from curvatlas.spectra.quadrature import jacobi, wasserstein
from curvatlas.zoo.datasets import digits
from curvatlas.zoo.training import train
from curvatlas.zoo.vit import ViT, ViTConfig
from harness.cases import CASES, Case
from harness.results import keep, requirement

ENDS = 5
TOLERANCE = 1e-4
Solver = Callable[[], tuple[Tensor, Tensor, int]]  # values (2k,), vectors (n, 2k), products


def trained_vit() -> Case:
    """The ViT of about 2.8 k parameters after 600 steps on the handwritten digits."""
    torch.manual_seed(0)
    model, data = ViT(ViTConfig(d_ff=32)), digits()
    train(model, data, steps=600)
    return Case(
        "trained ViT 2.8 k", model.eval(), data.train.inputs[:128], data.train.targets[:128]
    )


# --- eigenpairs -----------------------------------------------------------------------------------


def eigen_contestants(case: Case) -> dict[str, Solver]:
    """Every library that can run here, on its own copy of the model."""
    found: dict[str, Solver] = {"curvatlas": _ours(case), "scipy eigsh": _scipy(case)}
    makers = {"curvlinops": _curvlinops, "hessian_eigenthings": _eigenthings}
    for module, make in makers.items():
        if importlib.util.find_spec(module) is not None:
            found[module.replace("_", "-")] = make(case.clone())
    return found


def _problem(case: Case) -> ca.Problem:
    return ca.Problem(case.model, "cross_entropy", (case.inputs, case.targets))


def _ours(case: Case) -> Solver:
    operator = ca.Hessian(_problem(case))

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
    operator = ca.Hessian(_problem(case.clone()))
    return _by_eigsh(operator.shape, lambda v: operator @ v.reshape(-1))


class _Flat(nn.Module):
    """Logits as (targets, classes), the shape curvlinops' losses take."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs)
        return logits.flatten(0, -2)


def _curvlinops(case: Case) -> Solver:
    from curvlinops import HessianLinearOperator

    model = _Flat(case.model)
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


def compare_eigenpairs(case: Case, *, rounds: int) -> dict[str, Any]:
    reference = ca.Hessian(_problem(case.clone()))
    contestants = eigen_contestants(case)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            values, vectors, products = run()
            seconds[name].append(time.perf_counter() - start)
            images = reference @ vectors.to(reference.dtype)
            residuals = (images - vectors * values.to(vectors.dtype)).norm(dim=0)
            rows[name] = {
                "products": products,
                "worst_residual": float(residuals.max() / values.abs().max()),
                "values": [float(f"{v:.5g}") for v in values],
            }
    ours = statistics.median(seconds["curvatlas"])
    for name, row in rows.items():
        middle = statistics.median(seconds[name])
        row |= {"seconds": round(middle, 3), "times_ours": round(middle / ours, 2)}
    return {"case": case.name, "parameters": case.size, "contestants": rows}


# --- density and trace on the trained ViT ---------------------------------------------------------


def compare_density(values: Tensor, matrix: Tensor, *, trials: int) -> list[dict[str, Any]]:
    """W1 of the nodes to the exact spectrum, ours and plain quadrature with its best split."""
    truth, n = values.numpy(), len(values)
    flat = np.full(n, 1 / n)
    nothing = wasserstein(truth, flat, np.zeros(1), np.ones(1))
    operator = ca.MatrixOperator(matrix, tags=ca.Tags(symmetric=True))
    rows = []
    for products in (100, 300, 1000):
        plain = {}
        for probes in {100: (1, 2, 4), 300: (3, 6, 10), 1000: (10, 20, 33)}[products]:
            options = {"deflate": 0, "probes": probes, "steps": products // probes}
            plain[f"{probes} × {products // probes}"] = _distance(
                operator, products, truth, flat, trials, options
            )[0]
        ours, bound = _distance(operator, products, truth, flat, trials, {})
        rows.append(
            {
                "products": products,
                "curvatlas": ours / nothing,
                "curvatlas_95_bound": bound / nothing,
                "plain_quadrature": {k: v / nothing for k, v in plain.items()},
                "all_mass_at_zero": 1.0,
            }
        )
    return rows


def _distance(
    operator: ca.MatrixOperator, products: int, truth: np.ndarray, flat: np.ndarray, trials: int,
    options: dict[str, int],
) -> tuple[float, float]:  # fmt: skip
    found = [
        ca.spectral_density(operator, max_products=products, seed=seed, **options)
        for seed in range(trials)
    ]
    distances = [wasserstein(f.nodes.numpy(), f.weights.numpy(), truth, flat) for f in found]
    return float(np.mean(distances)), float(np.mean([f.wasserstein_error for f in found]))


class _Hidden(ca.LinearOperator):
    """The matrix behind products only, so that nothing is read off it."""

    def __init__(self, matrix: Tensor) -> None:
        tags = ca.Tags(symmetric=True)
        super().__init__(tuple(matrix.shape), dtype=matrix.dtype, tags=tags)
        self._matrix = matrix

    def _columns(self, columns: Tensor) -> Tensor:
        return self._matrix @ columns


def xtrace(matrix: Tensor, products: int, seed: int) -> float:
    """XTrace with resphering (Epperly, Tropp and Webber 2024), the peers' best estimator."""
    random = torch.Generator().manual_seed(seed)
    n, k = matrix.shape[0], products // 2
    probes = torch.randn(n, k, generator=random, dtype=matrix.dtype)
    probes *= n**0.5 / probes.norm(dim=0)
    images = matrix @ probes
    q, r = torch.linalg.qr(images)
    twice = matrix @ q
    left_out = torch.linalg.inv(r).T
    left_out /= left_out.norm(dim=0)
    core, inside = q.T @ twice, q.T @ probes
    total = 0.0
    for i in range(k):
        s = left_out[:, i]
        a = inside[:, i] - s * (s @ inside[:, i])
        rest, image = probes[:, i] - q @ a, images[:, i] - twice @ a
        scale = (n - k + 1) / float(rest @ rest)
        total += float(core.trace() - s @ core @ s) + scale * float(rest @ image)
    return total / k


def compare_trace(matrix: Tensor, *, trials: int, peer: int) -> dict[str, Any]:
    """RMS error at the peers' product count, and what an interval of ± 1 % at 95 % takes."""
    truth = float(matrix.trace())
    operator = _Hidden(matrix)
    at_equal = []
    for seed in range(trials):
        sampler = DeflatedSampler(operator, peer, torch.Generator().manual_seed(seed))
        sampler.probe(peer * 2 // 5)
        sampler.deflate(peer - sampler.products)
        at_equal.append(float(np.trace(sampler.captured) + sampler.rest().values.mean()) - truth)
    theirs = [xtrace(matrix, peer, seed) - truth for seed in range(trials)]
    found = [ca.trace(operator, rtol=0.01, seed=seed) for seed in range(trials)]
    covered = sum(f.interval[0] <= truth <= f.interval[1] for f in found)
    return {
        "products": peer,
        "rms_error_curvatlas": _rms(at_equal) / abs(truth),
        "rms_error_xtrace": _rms(theirs) / abs(truth),
        "products_for_1_percent_at_95": statistics.median(f.products for f in found),
        "intervals_covering": covered / trials,
        "rms_error_then": _rms([f.value - truth for f in found]) / abs(truth),
    }


def _rms(errors: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, few trials, not kept")
    parser.add_argument("--cases", nargs="*", default=["vit-2.8k", "gpt-100k", "gpt-1m"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    vit = trained_vit()
    eigen = []
    for name in options.cases:
        case = vit if name == "vit-2.8k" else CASES[name]()
        rounds = 1 if options.quick or name == "gpt-1m" else 3
        eigen.append(compare_eigenpairs(case, rounds=rounds))
        print(eigen[-1], flush=True)
    exact = vit.clone(torch.float64)
    hessian, outer = (kind(_problem(exact)).dense() for kind in (ca.Hessian, ca.GaussNewton))
    hessian = (hessian + hessian.T) / 2
    trials = 2 if options.quick else 8
    density = compare_density(torch.linalg.eigvalsh(hessian), hessian, trials=trials)
    print(density, flush=True)
    traces = {
        name: compare_trace(matrix, trials=5 if options.quick else 40, peer=peer)
        for name, matrix, peer in (("H", hessian, 63), ("H_o", outer, 36))
    }
    print(traces, flush=True)
    lines = [
        requirement(
            f"{row['case']}: time against the fastest peer",
            1 / min(v["times_ours"] for k, v in row["contestants"].items() if k != "curvatlas"),
            1.0,
        )
        for row in eigen
    ]
    if options.cases[0] == "vit-2.8k":
        products = eigen[0]["contestants"]["curvatlas"]["products"]
        lines.append(requirement("top and bottom 5 of the ViT, products", products, 55))
    for row in density:
        best = min(row["plain_quadrature"].values())
        lines.append(
            requirement(f"W1 at {row['products']} products", row["curvatlas"], round(best, 4))
        )
    for name, row in traces.items():
        lines.append(
            requirement(
                f"trace of {name}: rms error at {row['products']} products",
                row["rms_error_curvatlas"],
                row["rms_error_xtrace"],
            )
        )
    for line in lines:
        print(line)
    if not options.quick:
        print(keep("spectra", {"eigenpairs": eigen, "density": density, "trace": traces,
                               "requirements": lines}))  # fmt: skip


if __name__ == "__main__":
    main()
