"""How often the reported 95 % intervals hold the truth: seeded trials on exact spectra.

    python benchmarks/coverage.py [--quick] [--trials 200] [--parts trace diagonal ...]

Every estimator meets indefinite, degenerate, rank-deficient and heavy-tailed spectra and that of a
trained ViT, all with exact truth and none of them used in the tests. A rate within 90-99 % is asked
for; intervals that are certain rather than statistical (a residual, a pair of quadrature rules, an
exact value) hold always. Parts can be measured one at a time: what was kept of the others stays.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.functions import log_determinant, quadratic_form
from curvatlas.spectra.quadrature import wasserstein
from harness.chosen_spectra import ChosenSpectrum, Sampled, chosen_spectra, rotation
from harness.results import RESULTS, keep, requirement

Trial = Callable[[int], tuple[float, float, bool]]  # seed → share covered, relative width, exact
CERTAIN = ("eigenvalues", "quadratic")  # by a residual, or by two quadrature rules
BOUNDS = ("density", "spectral")  # one-sided: more than 95 % is no fault
DAMPING = 0.05


def trace(values: Tensor) -> Trial:
    truth = float(values.sum())
    return lambda seed: _held(ca.trace(ChosenSpectrum(values), rtol=0.05, seed=seed), truth)


def frobenius(values: Tensor) -> Trial:
    truth = float(values.norm())
    return lambda seed: _held(
        ca.frobenius_norm(ChosenSpectrum(values), rtol=0.05, seed=seed), truth
    )


def spectral(values: Tensor) -> Trial:
    truth = float(values.abs().max())

    def trial(seed: int) -> tuple[float, float, bool]:
        return _held(ca.spectral_norm(ChosenSpectrum(values), rtol=0.01, seed=seed), truth)

    return trial


def diagonal(values: Tensor) -> Trial:
    """Entry by entry: the share of entries covered."""
    operator = ChosenSpectrum(values, basis=rotation(len(values)))
    truth = operator.matrix().diagonal()

    def trial(seed: int) -> tuple[float, float, bool]:
        found = ca.diagonal(operator, rtol=0.2, seed=seed, max_products=len(values) // 2)
        low, high = found.interval
        inside = ((low <= truth) & (truth <= high)).double().mean()
        return float(inside), float((high - low).norm() / 2 / truth.norm()), found.exact

    return trial


def negative_mass(values: Tensor) -> Trial:
    truth = float((values < -1e-10 * values.abs().max()).double().mean())

    def trial(seed: int) -> tuple[float, float, bool]:
        found = _density(values, seed)
        low, high = found.negative_mass_interval
        return float(low <= truth <= high), (high - low) / 2, found.exact

    return trial


def effective_rank(values: Tensor) -> Trial:
    truth = float(values.abs().sum() ** 2 / values.square().sum())

    def trial(seed: int) -> tuple[float, float, bool]:
        found = _density(values, seed)
        low, high = found.effective_rank_interval
        return float(low <= truth <= high), (high - low) / 2 / truth, found.exact

    return trial


def density_distance(values: Tensor) -> Trial:
    """The bound on W1 is one-sided, and a bound: it should hold nearly always."""
    truth, flat = values.numpy(), np.full(len(values), 1 / len(values))

    def trial(seed: int) -> tuple[float, float, bool]:
        found = _density(values, seed)
        reached = wasserstein(found.nodes.numpy(), found.weights.numpy(), truth, flat)
        scale = float(np.abs(truth).mean())
        return (
            float(reached <= found.wasserstein_error),
            found.wasserstein_error / scale,
            found.exact,
        )

    return trial


def log_det(values: Tensor) -> Trial:
    positive = values.abs()
    truth = float((positive + DAMPING).log().sum())

    def trial(seed: int) -> tuple[float, float, bool]:
        operator = ChosenSpectrum(positive, psd=True)
        return _held(
            log_determinant(operator, damping=DAMPING, rtol=0.02, seed=seed, max_products=600),
            truth,
        )

    return trial


def quadratic(values: Tensor) -> Trial:
    """bᵀ(A + λI)⁻¹ b of a positive semidefinite matrix: the interval is certain."""
    positive = values.abs()

    def trial(seed: int) -> tuple[float, float, bool]:
        b = torch.randn(len(values), generator=_random(seed), dtype=torch.float64)
        truth = float((b * b / (positive + DAMPING)).sum())
        operator = ChosenSpectrum(positive, psd=True)
        found = quadratic_form(operator, b, damping=DAMPING, rtol=1e-3, max_products=40)
        return _held(found, truth)

    return trial


def eigenvalues(values: Tensor) -> Trial:
    """Each interval contains an eigenvalue, by its residual."""

    def trial(seed: int) -> tuple[float, float, bool]:
        found = ca.eigenpairs(ChosenSpectrum(values), k=3, which="both", seed=seed)
        low, high = found.interval
        inside = (values >= low[:, None]) & (values <= high[:, None])
        width = float((high - low).max()) / 2 / float(values.abs().max())
        return float(inside.any(1).all()), width, found.exact

    return trial


def data_trace(values: Tensor) -> Trial:
    """Batches are drawn anew in every trial: does the interval hold the trace of all data?"""
    return _data(values, lambda op, seed: ca.trace(op, rtol=0.01, seed=seed), float(values.sum()))


def data_frobenius(values: Tensor) -> Trial:
    norm = float(values.norm())
    return _data(values, lambda op, seed: ca.frobenius_norm(op, rtol=0.02, seed=seed), norm)


def data_sharpness(values: Tensor) -> Trial:
    def find(op: Sampled, seed: int) -> Any:
        return ca.eigenpairs(op, k=1, seed=seed)

    return _data(values, find, float(values.max()))


def _data(values: Tensor, find: Callable[[Sampled, int], Any], truth: float) -> Trial:
    def trial(seed: int) -> tuple[float, float, bool]:
        low, high = (
            float(np.ravel(end)[0]) for end in find(Sampled(values, seed), seed).data_interval
        )
        return float(low <= truth <= high), (high - low) / 2 / abs(truth), False

    return trial


PARTS: dict[str, tuple[str, Callable[[Tensor], Trial]]] = {
    "trace": ("trace", trace),
    "diagonal": ("diagonal, entry by entry", diagonal),
    "frobenius": ("Frobenius norm", frobenius),
    "spectral": ("spectral norm", spectral),
    "eigenvalues": ("three eigenvalues at each end", eigenvalues),
    "negative": ("share of negative eigenvalues", negative_mass),
    "rank": ("effective rank", effective_rank),
    "density": ("bound on the density's W1", density_distance),
    "logdet": ("log-determinant", log_det),
    "quadratic": ("quadratic form of the inverse", quadratic),
    "data-trace": ("data interval of the trace", data_trace),
    "data-frobenius": ("data interval of the Frobenius norm", data_frobenius),
    "data-sharpness": ("data interval of λmax", data_sharpness),
}


def _held(found: Any, truth: float) -> tuple[float, float, bool]:
    low, high = found.interval
    return float(low <= truth <= high), (high - low) / 2 / max(abs(truth), 1e-300), found.exact


_densities: dict[tuple[int, int], SpectralDensity] = {}


def _density(values: Tensor, seed: int) -> SpectralDensity:
    """One computation serves the three intervals it reports."""
    key = id(values), seed
    if key not in _densities:
        operator = ChosenSpectrum(values)
        _densities[key] = ca.spectral_density(operator, max_products=150, seed=seed)
    return _densities[key]


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def measure(part: str, name: str, values: Tensor, trials: int) -> dict[str, Any]:
    """One cell of the table."""
    words, make = PARTS[part]
    trial = make(values)
    found = [trial(10_000 + seed) for seed in range(trials)]
    return {
        "part": part,
        "interval": words,
        "spectrum": name,
        "size": len(values),
        "trials": trials,
        "covered": round(statistics.fmean(covered for covered, _, _ in found), 4),
        "median_half_width": float(f"{statistics.median(w for _, w, _ in found):.3g}"),
        "kind": _kind(part, all(exact for _, _, exact in found)),
    }


def _kind(part: str, exact: bool) -> str:
    if exact:
        return "exact"
    return "certain" if part in CERTAIN else "bound" if part in BOUNDS else "interval"


def requirements(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The contract's lines: too narrow, and too wide."""
    missed = {
        kind: 1 - min([row["covered"] for row in rows if row["kind"] == kind], default=1.0)
        for kind in ("interval", "bound", "certain", "exact")
    }
    intervals = [row["covered"] for row in rows if row["kind"] == "interval"]
    wide = sum(covered > 0.99 for covered in intervals) / max(len(intervals), 1)
    return [
        requirement("95 % intervals: trials missed, in the worst cell", missed["interval"], 0.1),
        requirement("95 % intervals: share of cells that hold in over 99 %", wide, 0.0),
        requirement("95 % bounds: trials missed, in the worst cell", missed["bound"], 0.1),
        requirement("certain and exact intervals: trials missed",
                    max(missed["certain"], missed["exact"]), 0.0),
    ]  # fmt: skip


def kept() -> list[dict[str, Any]]:
    path = RESULTS / "coverage.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows: list[dict[str, Any]] = found.get("rows", [])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few trials, not kept")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--parts", nargs="*", default=list(PARTS))
    parser.add_argument("--spectra", nargs="*", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spectra = chosen_spectra()
    rows = [] if options.quick else kept()
    for part in options.parts:
        for name in options.spectra or spectra:
            row = measure(part, name, spectra[name], 5 if options.quick else options.trials)
            print(row, flush=True)
            rows = [r for r in rows if (r["part"], r["spectrum"]) != (part, name)] + [row]
            if not options.quick:
                keep("coverage", {"rows": rows, "requirements": requirements(rows)})
    for line in requirements(rows):
        print(line)


if __name__ == "__main__":
    main()
