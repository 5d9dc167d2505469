"""Density and trace estimates against an exact spectrum, beside the peers' estimators.

The matrix is Q diag(λ) Qᵀ with a fast orthogonal Q (random signs, cosine transforms), λ the exact
eigenvalues of a trained model: as hard for random probes as the model's own, and cheap enough for
hundreds of trials.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.fft import dct, idct
from scipy.stats import t as student
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.spectra.quadrature import wasserstein
from curvatlas.spectra.trace import TraceSampler

PEERS = ("plain_quadrature", "curvlinops", "hessian_eigenthings", "pyhessian")
SPLITS = {100: (1, 2, 4), 300: (3, 6, 10), 1000: (10, 20, 33)}  # probes tried for each budget


class Rotated(ca.LinearOperator):
    """Q diag(values) Qᵀ known through products."""

    def __init__(self, values: Tensor, *, psd: bool = False) -> None:
        n = len(values)
        tags = ca.Tags(symmetric=True, psd=psd)
        super().__init__((n, n), dtype=values.dtype, tags=tags)
        random = np.random.default_rng(0)
        self._values = values.numpy()[:, None]
        self._signs = [random.choice([-1.0, 1.0], size=(n, 1)) for _ in range(2)]

    def _columns(self, columns: Tensor) -> Tensor:
        x = columns.numpy()
        for signs in self._signs:
            x = dct(signs * x, axis=0, norm="ortho")
        x = self._values * x
        for signs in reversed(self._signs):
            x = signs * idct(x, axis=0, norm="ortho")
        return torch.from_numpy(np.ascontiguousarray(x)).to(columns.dtype)


def compare_density(values: Tensor, *, trials: int) -> list[dict[str, Any]]:
    """W1 of the nodes to the exact spectrum; the peers with the best of three splits.

    All numbers in units of the distance that all mass at zero has.
    """
    truth, n = values.numpy(), len(values)
    flat = np.full(n, 1 / n)
    nothing = wasserstein(truth, flat, np.zeros(1), np.ones(1))
    operator = Rotated(values)
    rows = []
    for products, splits in SPLITS.items():
        found = [
            ca.spectral_density(operator, max_products=products, seed=s) for s in range(trials)
        ]
        ours = [wasserstein(f.nodes.numpy(), f.weights.numpy(), truth, flat) for f in found]
        bounds = [f.wasserstein_error for f in found]
        row: dict[str, Any] = {
            "products": products,
            "trials": trials,
            "curvatlas": float(np.mean(ours)) / nothing,
            "curvatlas_95_bound": float(np.mean(bounds)) / nothing,
            "bounds_covering": float(np.mean(np.array(ours) <= bounds)),
        }
        for peer, rule in _rules(operator).items():
            means = [
                np.mean(
                    [wasserstein(*rule(k, products // k, s), truth, flat) for s in range(trials)]
                )
                for k in splits
            ]
            row[peer] = float(min(means)) / nothing
        rows.append(row | {"all_mass_at_zero": 1.0})
    return rows


def _rules(operator: Rotated) -> dict[str, Any]:
    """peer → rule(probes, steps, seed) → nodes and weights."""
    n = operator.shape[0]

    def plain(probes: int, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        found = ca.spectral_density(
            operator, max_products=probes * steps, deflate=0, probes=probes, steps=steps, seed=seed
        )
        return found.nodes.numpy(), found.weights.numpy()

    rules: dict[str, Any] = {"plain_quadrature": plain}
    if importlib.util.find_spec("hessian_eigenthings") is not None:
        from hessian_eigenthings.algorithms.spectral_density import spectral_density
        from hessian_eigenthings.operators.base import LambdaOperator

        theirs = LambdaOperator(lambda v: operator @ v, n, dtype=operator.dtype)

        def eigenthings(probes: int, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
            found = spectral_density(
                theirs, num_runs=probes, lanczos_steps=steps, num_grid_points=2, seed=1000 * seed
            )
            kept = torch.isfinite(found.raw_eigenvalues)
            weights = found.raw_weights[kept].numpy()
            return found.raw_eigenvalues[kept].numpy(), weights / weights.sum()

        rules["hessian_eigenthings"] = eigenthings
    if importlib.util.find_spec("curvlinops") is not None:
        from curvlinops.papyan2020traces.spectrum import fast_lanczos

        def curvlinops(probes: int, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
            torch.manual_seed(seed)
            runs = [fast_lanczos(_AsTheirs(operator), steps) for _ in range(probes)]
            nodes = torch.cat([values for values, _ in runs])
            weights = torch.cat([vectors[0] ** 2 for _, vectors in runs]) / probes
            return nodes.double().numpy(), weights.double().numpy()

        rules["curvlinops"] = curvlinops
    if importlib.util.find_spec("pyhessian") is not None:
        rules["pyhessian"] = _pyhessian_rule(operator)
    return rules


def _pyhessian(operator: Rotated) -> Any:
    """PyHessian's estimators on our matrix: its loop over a data loader asks for Hv alone."""
    from pyhessian.hessian import hessian

    computer: Any = object.__new__(hessian)
    computer.model, computer.device, computer.full_dataset = nn.Identity(), "cpu", True
    computer.params = [torch.zeros(operator.shape[0], dtype=operator.dtype)]
    computer.dataloader_hv_product = lambda v: (0.0, [operator @ v[0].to(operator.dtype)])
    return computer


def _pyhessian_rule(operator: Rotated) -> Any:
    """Its density calls torch.eig, which is gone: it is lent one for the symmetric T it passes."""

    def eig(matrix: Tensor, eigenvectors: bool) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(matrix)
        return values.unsqueeze(1), vectors

    def rule(probes: int, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        torch.manual_seed(seed)
        with mock.patch.object(torch, "eig", eig, create=True):
            nodes, weights = _pyhessian(operator).density(iter=steps, n_v=probes)
        flat = np.concatenate(weights).astype(np.float64)
        return np.concatenate(nodes).astype(np.float64), flat / flat.sum()

    return rule


def pyhessian_trace(operator: Rotated, seed: int) -> tuple[float, int]:
    """Its trace as called by default: value and products; it stops believing 0.1 %."""
    torch.manual_seed(seed)
    found = _pyhessian(operator).trace()
    return float(np.mean(found)), len(found)


class _AsTheirs:
    """What curvlinops' Lanczos asks of an operator."""

    def __init__(self, operator: Rotated) -> None:
        self._operator = operator
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device

    def __matmul__(self, vector: Tensor) -> Tensor:
        result: Tensor = self._operator @ vector
        return result

    def infer_dtype(self) -> torch.dtype:
        return self.dtype


def xtrace(operator: Rotated, products: int, seed: int) -> tuple[float, float]:
    """XTrace with resphering (Epperly, Tropp and Webber 2024): value and 95 % half-width.

    The half-width is Student's, from the scatter of the leave-one-out estimates, as its authors
    propose for the standard error.
    """
    random = torch.Generator().manual_seed(seed)
    n, k = operator.shape[0], products // 2
    probes = torch.randn(n, k, generator=random, dtype=operator.dtype)
    probes *= n**0.5 / probes.norm(dim=0)
    images = operator @ probes
    q, r = torch.linalg.qr(images)
    twice = operator @ q
    left_out = torch.linalg.inv(r).T
    left_out /= left_out.norm(dim=0)
    core, inside = q.T @ twice, q.T @ probes
    removed = inside - left_out * (left_out * inside).sum(0)  # (k, k)
    rest, image = probes - q @ removed, images - twice @ removed
    scale = (n - k + 1) / (rest * rest).sum(0)
    captured = core.trace() - (left_out * (core @ left_out)).sum(0)
    single = captured + scale * (rest * image).sum(0)
    half = float(student.ppf(0.975, k - 1)) * float(single.std()) / k**0.5
    return float(single.mean()), half


def compare_trace(values: Tensor, *, trials: int, peer: int) -> dict[str, Any]:
    """RMS error at the peers' product count, and what an interval of ± 1 % at 95 % takes."""
    truth = float(values.sum())
    operator = Rotated(values)
    at_equal = []
    for seed in range(trials):
        random = torch.Generator().manual_seed(seed)
        sampler = TraceSampler(operator, peer, random, room=5 * peer + 64)
        sampler.probe(peer * 2 // 5)
        sampler.goal = peer - sampler.products
        while sampler.deflating:
            sampler.grow()
        at_equal.append(float(np.trace(sampler.captured) + sampler.rest().values.mean()) - truth)
    theirs = [xtrace(operator, peer, seed)[0] - truth for seed in range(trials)]
    found = [ca.trace(operator, rtol=0.01, seed=seed) for seed in range(trials)]
    covered = sum(f.interval[0] <= truth <= f.interval[1] for f in found)
    stops = [_xtrace_until(operator, 0.01, seed) for seed in range(trials)]
    return {
        "products": peer,
        "trials": trials,
        "rms_error_curvatlas": _rms(at_equal) / abs(truth),
        "rms_error_xtrace": _rms(theirs) / abs(truth),
        "products_for_1_percent_at_95": statistics.median(f.products for f in found),
        "intervals_covering": covered / trials,
        "rms_error_then": _rms([f.value - truth for f in found]) / abs(truth),
        "xtrace_products_for_1_percent_at_95": statistics.median(p for p, _, _ in stops),
        "xtrace_intervals_covering": sum(abs(v - truth) <= h for _, v, h in stops) / trials,
        "xtrace_rms_error_then": _rms([v - truth for _, v, _ in stops]) / abs(truth),
        **_pyhessian_default(operator, truth, trials),
    }


def _pyhessian_default(operator: Rotated, truth: float, trials: int) -> dict[str, Any]:
    if importlib.util.find_spec("pyhessian") is None:
        return {}
    found = [pyhessian_trace(operator, seed) for seed in range(trials)]
    errors = [value - truth for value, _ in found]
    return {
        "pyhessian_products": statistics.median(products for _, products in found),
        "pyhessian_rms_error": _rms(errors) / abs(truth),
        "pyhessian_within_its_0.1_percent": sum(abs(e) <= 1e-3 * abs(truth) for e in errors)
        / trials,
    }


def structured_trace(problem: ca.Problem, truth: dict[str, float], *, trials: int) -> list[Any]:
    """``trace`` as users call it, on the model itself: H_o from the factors of its samples.

    Products are equivalents: what the factors cost in forward and backward passes is counted in.
    """
    rows = []
    for name, kind in (("H", ca.Hessian), ("H_o", ca.GaussNewton)):
        operator = kind(problem)
        column = torch.randn(problem.size, 1, dtype=operator.dtype)
        found = ca.trace(operator, rtol=0.01)  # the first call also imports and warms up
        clock = time.process_time()
        found = [ca.trace(operator, rtol=0.01, seed=seed) for seed in range(trials)]
        ours = (time.process_time() - clock) / trials
        clock = time.process_time()
        for _ in range(10):
            operator @ column
        product = (time.process_time() - clock) / 10
        true = truth[name]
        rows.append(
            {
                "matrix": name,
                "trials": trials,
                "method": found[0].method,
                "products": statistics.median(f.products for f in found),
                "most_products": max(f.products for f in found),
                "processor_time_in_products": round(ours / product, 1),
                "intervals_covering": sum(f.interval[0] <= true <= f.interval[1] for f in found)
                / trials,
                "rms_error": _rms([f.value - true for f in found]) / abs(true),
            }
        )
    return rows


def _xtrace_until(operator: Rotated, rtol: float, seed: int) -> tuple[int, float, float]:
    """The first even product count whose 95 % half-width is within rtol, searched upwards."""
    products = 12
    while True:
        value, half = xtrace(operator, products, seed)
        if half <= rtol * abs(value) or products >= operator.shape[0]:
            return products, value, half
        products += 4


def _rms(errors: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))
