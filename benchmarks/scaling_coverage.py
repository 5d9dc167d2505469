"""Scaling laws on synthetic grids: how often their intervals cover the true exponents.

    python benchmarks/scaling_coverage.py [--grids 100]

Grids of 4 × 4 sizes and 3 seeds with known exponents, of several laws and kinds of noise.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
from typing import Any

import numpy as np

from curvatlas.fits import plane_power_law, scaling_law
from harness.results import keep, requirement

SEEDS = 3
MISSED = 0.07  # most of the intervals that may miss: they cover in 93 % or more

# name → (E, A, B, α, β), scatter between seeds (of log L), and whether small data scatter more
LAWS: dict[str, tuple[tuple[float, ...], float, bool]] = {
    "no floor to speak of": ((0.2, 20.0, 10.0, 0.5, 0.5), 0.02, False),
    "high floor": ((1.7, 20.0, 10.0, 0.35, 0.4), 0.02, False),
    "model hardly matters": ((1.5, 5.0, 8.0, 0.3, 0.6), 0.01, False),
    "noise falls with D": ((0.2, 20.0, 10.0, 0.5, 0.5), 0.02, True),
}


def coverage(grids: int) -> list[dict[str, Any]]:
    """How many of so many grids have each true exponent inside its interval."""
    random = np.random.default_rng(0)
    n, d = (
        np.tile(v.ravel(), SEEDS) for v in np.meshgrid([1e3, 3e3, 1e4, 3e4], [1e2, 3e2, 1e3, 3e3])
    )
    rows = []
    for name, ((e, a, b, alpha, beta), scatter, uneven) in LAWS.items():
        spread = scatter * (d.max() / d) ** 0.25 if uneven else scatter * np.ones_like(d)
        hits = np.zeros(4)
        for _ in range(grids):
            noise = np.exp(spread * random.standard_normal(len(n)))
            law = scaling_law(n, d, (e + a * n**-alpha + b * d**-beta) * noise, replicas=5)
            plane = plane_power_law(n, d, 3 * n**alpha * d**-beta * noise)
            pairs = (
                (law.alpha_interval, alpha),
                (law.beta_interval, beta),
                (plane.parameters_interval, alpha),
                (plane.samples_interval, -beta),
            )
            hits += [low <= truth <= high for (low, high), truth in pairs]
        names = ("alpha", "beta", "plane_N", "plane_D")
        shares = {key: round(float(hit) / grids, 3) for key, hit in zip(names, hits, strict=True)}
        rows.append({"law": name, "grids": grids, **shares})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--grids", type=int, default=100)
    covered = coverage(parser.parse_args().grids)
    missed = 1 - min(row[name] for row in covered for name in ("alpha", "beta"))
    lines = [requirement("share of the loss law's 95 % intervals that miss", missed, MISSED)]
    print(keep("scaling_coverage", {"rows": covered, "requirements": lines}))


if __name__ == "__main__":
    main()
