r"""How the loss landscape settles as samples are added, with the control that tells what it means.

>>> found = landscape_convergence(problem)                                        # doctest: +SKIP
>>> print(found)                                                                  # doctest: +SKIP

At fixed weights L_{k+1} − L_k = (ℓ_{k+1} − L_k)/(k+1): a slope of −1 is arithmetic. What is about
curvature is the size of the differences of Hessians, how it compares with the Hessian itself, and
from which k on the landscape is stable to a tolerance.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

from curvatlas.analysis.landscape.convergence_result import (
    Bins,
    Bounds,
    Curve,
    LandscapeConvergence,
    SpectrumAt,
    StableSize,
    curve,
    differ,
    differences,
    first_stable,
    matched_noise,
    matched_vectors,
    random_orders,
    squared_steps,
    stable_size,
)
from curvatlas.analysis.landscape.line import Displacement, flat_displacement
from curvatlas.fits import Array
from curvatlas.linear_operator import LinearOperator, Tags
from curvatlas.operators.curvature import Hessian
from curvatlas.operators.per_sample import (
    SampleQuantities,
    sample_losses,
    sample_quantities,
    subset,
)
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.norms import spectral_norm
from curvatlas.spectra.summary import compare_densities

_SHARE = 0.05  # of ‖θ‖: length of the default displacement
_BOUND_SAMPLES = 6  # whose Hessian norms are computed for M


def landscape_convergence(
    problem: Problem,
    *,
    displacement: Displacement | None = None,
    orders: int = 40,
    limit: int | None = None,
    outliers: int = 4,
    probes: int = 6,
    tolerance: float = 1e-3,
    curvature_tolerance: float = 1e-2,
    spectra: int = 4,
    spectrum_samples: int = 1024,
    seed: int = 0,
) -> LandscapeConvergence:
    """Loss and curvature differences against the number of samples k, over random orders.

    displacement: from w* (the present weights) to the w at which losses are compared (default: a
        random direction, 5 % of ‖θ‖ long).
    limit: most samples;  orders: random orders of them.
    outliers, probes: ‖H_{k+1} − H_k‖_F is exact on the ``outliers`` top eigenvectors and sampled by
        ``probes`` vectors on the rest; each sample costs outliers + probes + 1 Hessian products.
    tolerance, curvature_tolerance: relative to L_n and ‖H_n‖_F, for the smallest stable k.
    spectra: sizes k (up to ``spectrum_samples``) whose spectra are compared with the last one.
    """
    if not isinstance(problem, Problem):
        raise TypeError(
            f"landscape_convergence takes a Problem, got a {type(problem).__name__}: "
            "ca.Problem(model, loss, data)."
        )
    if orders < 5 or outliers < 0 or probes < 2:
        raise ValueError("need orders ≥ 5, outliers ≥ 0 and probes ≥ 2.")
    move = _displacement(problem, displacement, seed)
    directions = _directions(problem, move, outliers, probes, spectrum_samples, seed)
    found = sample_quantities(problem, directions, limit=limit)
    samples = len(found.losses)
    if samples < 20:
        raise ValueError(f"convergence with k needs at least 20 samples, got {samples}.")
    there = sample_losses(_at(problem, 1.0, move), limit=samples)
    terms = {
        "difference": there,
        "value": found.losses,
        "gradient": found.slopes[:, -1],
        "curvature": found.curvatures[:, -1, -1] / 2,
    }
    terms["rest"] = there - terms["value"] - terms["gradient"] - terms["curvature"]
    bins = Bins(samples)
    losses, stable_loss = _loss_curves(terms, found.counts, bins, orders, tolerance, seed)
    hessian, stable_hessian, ratio, probe_error = _hessian_curves(
        found, outliers, probes, bins, orders, curvature_tolerance, seed
    )
    return LandscapeConvergence(
        samples=samples,
        orders=orders,
        parameters=problem.size,
        displacement_norm=float(move.norm()),
        difference=losses["difference"],
        terms={name: losses[name] for name in ("value", "gradient", "curvature", "rest")},
        null=losses["null"],
        against_null=differ(losses["difference"], losses["null"]),
        hessian=hessian[0],
        hessian_null=hessian[1],
        hessian_against_null=differ(*hessian),
        heterogeneity=ratio,
        probe_error=probe_error,
        stable_loss=stable_loss,
        stable_hessian=stable_hessian,
        bounds=_bounds(problem, move, found, bins),
        spectra=_spectra(problem, min(samples, spectrum_samples), spectra, seed),
        products=samples * directions.shape[1],
    )


def _displacement(problem: Problem, given: Displacement | None, seed: int) -> Tensor:
    if given is not None:
        return flat_displacement(problem, given)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(problem.size, generator=generator, dtype=torch.float64, device="cpu")
    drawn = drawn.to(problem.parameters)
    scaled: Tensor = _SHARE * drawn / drawn.norm() * problem.parameters.norm()
    return scaled


def _directions(
    problem: Problem, move: Tensor, outliers: int, probes: int, most: int, seed: int
) -> Tensor:
    """Columns (P, outliers + probes + 1): top eigenvectors, Gaussian probes beyond, the move."""
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = torch.randn(
        problem.size, probes, generator=generator, dtype=torch.float64, device="cpu"
    ).to(move)
    columns = [drawn, move[:, None]]
    if outliers:
        # any orthonormal columns give an unbiased norm: a rough basis from some samples will do
        some = subset(problem, torch.arange(min(most, 256)))
        top = eigenpairs(Hessian(some), k=outliers, which="magnitude", tol=1e-2, seed=seed).vectors
        columns = [top, drawn - top @ (top.T @ drawn), move[:, None]]
    return torch.cat(columns, dim=1)


def _at(problem: Problem, share: float, move: Tensor) -> Problem:
    """The problem with its weights moved by share · move; the user's model stays as it is."""
    model = copy.deepcopy(problem.model)
    named = dict(model.named_parameters())
    with torch.no_grad():
        pieces = problem.layout.split(move)
        for name, piece in zip(problem.layout.names, pieces, strict=True):
            named[name].add_(piece.squeeze(0), alpha=share)
    return problem.with_model(model)


def _loss_curves(
    terms: dict[str, Tensor], counts: Tensor, bins: Bins, orders: int, tolerance: float, seed: int
) -> tuple[dict[str, Curve], StableSize]:
    samples = len(counts)
    rows: dict[str, list[Array]] = {name: [] for name in (*terms, "null")}
    draw = matched_noise(terms["difference"], seed + 2)
    level = tolerance * abs(float((counts * terms["difference"]).sum() / counts.sum()))
    firsts: list[int | None] = []
    for order in random_orders(samples, orders, seed):
        for name, values in terms.items():
            series = differences(values, counts, order).abs().numpy()
            rows[name].append(bins.mean(series))
            if name == "difference":
                firsts.append(first_stable(series, level))
        rows["null"].append(bins.mean(differences(draw(), counts, order).abs().numpy()))
    curves = {name: curve(name, np.stack(found), bins) for name, found in rows.items()}
    return curves, stable_size("loss", firsts, level, samples)


def _hessian_curves(
    found: SampleQuantities, outliers: int, probes: int, bins: Bins, orders: int,
    tolerance: float, seed: int,
) -> tuple[tuple[Curve, Curve], StableSize, float, float]:  # fmt: skip
    """‖H_{k+1} − H_k‖_F (root mean square over a bin) for the samples and for noise like them."""
    width = outliers + probes
    upper = torch.triu_indices(width, width)
    sketches = found.curvatures[:, upper[0], upper[1]]  # (n, e): a kilobyte a sample stays
    weights = _square_weights(upper, outliers, probes)
    counts = found.counts
    mean = (counts[:, None] * sketches).sum(0) / counts.sum()
    norm = float((weights * mean**2).sum().clamp_min(0).sqrt())
    spread = (sketches**2).mean(0) - 2 * mean * sketches.mean(0) + mean**2  # about the mean Hessian
    deviation = float((weights * spread).sum().clamp_min(0).sqrt())
    rows: tuple[list[Array], list[Array]] = ([], [])
    draw = matched_vectors(sketches, seed + 3)
    firsts: list[int | None] = []
    for order in track(random_orders(len(counts), orders, seed), "orders", total=orders):
        for place, vectors in enumerate((sketches.__getitem__, draw)):
            square = squared_steps(vectors, counts, order, weights)
            rows[place].append(np.sqrt(bins.mean(square)))
            if place == 0:
                firsts.append(first_stable(np.sqrt(square), tolerance * norm))
    names = ("‖H(k+1) − H(k)‖_F", "noise with the same moments")
    real, null = (curve(n, np.stack(r), bins) for n, r in zip(names, rows, strict=True))
    stable = stable_size("Hessian", firsts, tolerance * norm, len(counts))
    error = _probe_error(spread, upper, outliers, probes)
    return (real, null), stable, deviation / max(norm, 1e-300), error


def _square_weights(upper: Tensor, outliers: int, probes: int) -> Tensor:
    r"""ω with ‖A‖_F² ≈ Σ_e ω_e s_e² over the entries s of WᵀAW, W = [V, QZ], Q = I − VVᵀ.

    ‖A‖_F² = ‖VᵀAV‖² + 2‖QAV‖² + ‖QAQ‖²; the second by Gaussian z on one side, the third by pairs of
    different z on both: each unbiased.
    """
    rows, columns = upper
    weights = torch.zeros(rows.numel(), dtype=torch.float64)
    inside = columns < outliers
    weights[inside] = torch.where(rows[inside] == columns[inside], 1.0, 2.0).double()
    weights[(rows < outliers) & (columns >= outliers)] = 2.0 / probes
    pair = (rows >= outliers) & (columns > rows)
    weights[pair] = 2.0 / (probes * (probes - 1))
    return weights


def _probe_error(squares: Tensor, upper: Tensor, outliers: int, probes: int) -> float:
    """Relative standard error of the level of ‖h_i − H‖_F that the probes cause (jackknife).

    squares: (e,) mean squares of the entries of Wᵀ(h_i − H)W over samples.
    """
    if probes < 3:
        return float("nan")
    rows, columns = upper
    levels = []
    for left_out in range(outliers, outliers + probes):
        keep = (rows != left_out) & (columns != left_out)
        names = torch.stack([rows[keep], columns[keep]])
        # the entries that remain are those of a sketch with one probe fewer
        names = names - (names > left_out).long()
        weights = _square_weights(names, outliers, probes - 1)
        levels.append(float((weights * squares[keep]).sum().clamp_min(0).sqrt()))
    array = np.array(levels)
    spread = np.sqrt((probes - 1) / probes * ((array - array.mean()) ** 2).sum())
    return float(spread / max(array.mean(), 1e-300))


def _bounds(problem: Problem, move: Tensor, found: SampleQuantities, bins: Bins) -> Bounds:
    """Theorem 7 as printed and as corrected, with M from the samples with the largest curvature."""
    strongest = found.curvatures.flatten(1).norm(dim=1).topk(min(_BOUND_SAMPLES, len(found.losses)))
    norms = []
    for share in (0.0, 0.5, 1.0):
        moved = problem if share == 0 else _at(problem, share, move)
        norms.append(
            max(
                spectral_norm(
                    Hessian(subset(moved, index[None]), checks=False), rtol=0.02, max_products=40
                ).value
                for index in strongest.indices
            )
        )
    largest, length = float(found.losses.max()), float(move.norm())
    gradient = float(found.gradient_norms.max())
    k = bins.centres
    return Bounds(
        printed=torch.from_numpy((2 * largest + norms[0] * length**2) / k),
        corrected=torch.from_numpy((largest + 2 * gradient * length + max(norms) * length**2) / k),
        largest_loss=largest,
        largest_gradient=gradient,
        hessian_at_optimum=norms[0],
        hessian_on_segment=max(norms),
        hessian_samples=len(strongest.indices),
    )


class _OneMore(LinearOperator):
    """H_{k+1} − H_k = (h_{k+1} − H_k) c_{k+1}/C_{k+1}."""

    def __init__(self, before: Hessian, sample: Hessian) -> None:
        super().__init__(
            before.shape, dtype=before.dtype, device=before.device, tags=Tags(symmetric=True)
        )
        counts = before.problem.total_count, sample.problem.total_count
        self._share = counts[1] / sum(counts)
        self._before, self._sample = before, sample

    def _columns(self, columns: Tensor) -> Tensor:
        found: Tensor = self._share * (self._sample @ columns - self._before @ columns)
        return found


def _spectra(problem: Problem, most: int, count: int, seed: int) -> tuple[SpectrumAt, ...]:
    """Distance to the spectrum of ``most`` samples, and ‖H_{k+1} − H_k‖₂, at a few k."""
    if count < 1 or most < 16:
        return ()
    sizes = [most // 2**j for j in range(count + 1) if most // 2**j >= 4]
    order = torch.randperm(most, generator=torch.Generator().manual_seed(seed), device="cpu")
    reference, rows = None, []
    for size in track(sizes, "spectra", total=len(sizes)):
        operator = Hessian(subset(problem, order[:size]))
        density = spectral_density(operator, max_products=64, seed=seed)
        top = eigenpairs(operator, k=1, which="largest", tol=1e-3, seed=seed)
        reference = reference or density
        apart = compare_densities(density, reference)
        step = None
        if size < most:
            one = Hessian(subset(problem, order[size : size + 1]), checks=False)
            step = spectral_norm(_OneMore(operator, one), rtol=0.05, seed=seed, max_products=60)
        rows.append(
            SpectrumAt(
                k=size,
                wasserstein=apart.wasserstein,
                wasserstein_interval=apart.interval,
                largest=top.value,
                negative_mass=density.negative_mass,
                effective_rank=density.effective_rank,
                step_norm=None if step is None else step.value,
                step_norm_interval=None if step is None else step.interval,
            )
        )
    return tuple(reversed(rows))
