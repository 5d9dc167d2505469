r"""How good Gauss-Newton is, and what stands in for it: KFAC, EKFAC, Adam, the block diagonal.

    λmax(H_o) / λmax(H),   ‖H_f‖_F / ‖H‖_F by role,   ‖P − A‖_F / ‖A‖_F for A = H and A = H_o,

and how well P conditions A as a preconditioner, with δ = damping · ‖A‖₂ so that null directions of
A do not decide:

    κ = largest / smallest eigenvalue of (P + δI)⁻¹ (|A| + δI),   |A| of the same eigenvectors as A.

P is one of: the outer product H_o itself; its block diagonal over roles and layers (biases with
their weights); KFAC and EKFAC of it; Adam's diagonal √v, v the mean square of a sample's gradient,
brought to the trace of |A| for κ; nothing (I). Up to ``DENSE_UP_TO`` parameters all of it is exact;
beyond it distances are estimated from random probes with 95 % intervals, and κ by Lanczos on
(P + δI)^{−½} (A + δI) (P + δI)^{−½}: with an interval for A = H_o, for |H|, whose products nobody
has, as a lower bound from |xᵀHx| ≤ xᵀ|H|x ≤ ‖x‖ ‖Hx‖.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.linalg
import torch
from scipy import stats
from torch import Tensor, nn

from curvatlas.analysis.atlas.exact import dense_parts
from curvatlas.analysis.atlas.result import AtlasBlock, blocks_of
from curvatlas.errors import ProblemError
from curvatlas.linear_operator import LinearOperator, Tags
from curvatlas.operators.curvature import CurvatureParts, GaussNewton, Hessian
from curvatlas.operators.kfac import EKFAC, KFAC
from curvatlas.operators.per_sample import pieces
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Interval, Result
from curvatlas.runs import Run
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.trace import trace
from curvatlas.studies.claims import Claim, claim
from curvatlas.studies.comparisons import Spread, spread_of
from curvatlas.studies.growth import probed_block, random_signs
from curvatlas.surveying import Step, recorded
from curvatlas.zoo import MLP, MLPConfig, reference_vit, train
from curvatlas.zoo.datasets import Dataset, digits

DENSE_UP_TO = 2048  # parameters: a dozen dense eigenproblems, a minute
_PARTS = {"hessian": "total", "outer": "outer"}  # what is approximated
NAMES = {
    "gauss_newton": "Gauss-Newton H_o",
    "block_diagonal": "block diagonal of H_o",
    "ekfac": "EKFAC",
    "kfac": "KFAC",
    "adam": "Adam's diagonal",
    "identity": "nothing",
}


@dataclass(frozen=True, kw_only=True)
class Distance(Result):
    """‖P − A‖_F / ‖A‖_F, and the same with P at its best scale, min_c ‖cP − A‖_F / ‖A‖_F."""

    value: float
    interval: Interval  # 95 % over probes; the value itself where it is exact
    at_best_scale: float

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.3f}" if low == high else f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


@dataclass(frozen=True, kw_only=True)
class Approximation(Result):
    """One stand-in for the Hessian: how far it is, and how well it conditions."""

    name: str
    to_hessian: Distance | None  # None: it is no approximation (I)
    to_outer: Distance | None
    condition_hessian: float | None  # κ of P⁻¹|H|, None where it is not known
    condition_outer: float | None  # κ of P⁻¹H_o
    condition_hessian_interval: Interval | None = None  # holds κ; None: exact
    condition_outer_interval: Interval | None = None
    condition_hessian_is_bound: bool = False  # a lower one
    condition_outer_is_bound: bool = False


@dataclass(frozen=True, kw_only=True)
class GaussNewtonQuality(Result):
    """What Gauss-Newton and its approximations miss of one problem's Hessian."""

    size: int
    loss: float
    largest: float  # λmax(H)
    largest_interval: Interval
    largest_outer: float  # λmax(H_o)
    largest_outer_interval: Interval
    functional_share: dict[str, Distance]  # "model", then every role: ‖H_f‖_F / ‖H‖_F
    approximations: dict[str, Approximation]
    damping: float
    exact: bool

    @property
    def ratio(self) -> float:
        """λmax(H_o) / λmax(H): 1 where Gauss-Newton knows the sharpest direction."""
        return self.largest_outer / self.largest if self.largest > 0 else math.nan

    @property
    def ratio_interval(self) -> Interval:
        (low, high), (outer_low, outer_high) = self.largest_interval, self.largest_outer_interval
        return outer_low / high if high > 0 else 0.0, outer_high / low if low > 0 else math.inf

    def __getitem__(self, key: str) -> Any:
        """A field, or an approximation by its name."""
        return self.approximations[key] if key in self.approximations else super().__getitem__(key)

    def __str__(self) -> str:
        low, high = self.ratio_interval
        model = self.functional_share["model"]
        lines = [
            f"λmax(H_o)/λmax(H) = {self.ratio:.3f} [{low:.3f}, {high:.3f}], "
            f"‖H_f‖/‖H‖ = {model} ({self.size} parameters, loss {self.loss:.4g})",
            "by role: "
            + ", ".join(
                f"{r} {d.value:.2f}" for r, d in self.functional_share.items() if r != "model"
            ),
            f"{'':22s} {'distance to H':>22s} {'to H_o':>22s} {'κ of P⁻¹|H|':>12s} {'P⁻¹H_o':>10s}",
        ]
        for name, one in self.approximations.items():
            cells = [str(d) if d is not None else "–" for d in (one.to_hessian, one.to_outer)]
            kappas = [
                _told(one.condition_hessian, bound=one.condition_hessian_is_bound),
                _told(one.condition_outer, bound=one.condition_outer_is_bound),
            ]
            lines.append(
                f"{NAMES[name]:22s} {cells[0]:>22s} {cells[1]:>22s} "
                f"{kappas[0]:>12s} {kappas[1]:>10s}"
            )
        return "\n".join(lines)


def _told(kappa: float | None, *, bound: bool) -> str:
    return "–" if kappa is None else f"{'≥ ' if bound else ''}{kappa:.3g}"


def gauss_newton_quality(
    problem: Problem,
    *,
    damping: float = 1e-3,
    probes: int = 24,
    seed: int = 0,
    budget: int | str | None = None,
    output: str | os.PathLike[str] | Run | None = None,
) -> GaussNewtonQuality:
    """λmax and norms that Gauss-Newton misses, by role, and how far KFAC, EKFAC and Adam are.

    damping: δ / ‖A‖₂ of the condition numbers, at which null directions are cut.
    probes: for distances of models beyond 2048 parameters; below, everything is exact.
    output: a run folder, or an open ``Run``: finished parts are stored, the same call resumes.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"gauss_newton_quality takes a Problem, got a {type(problem).__name__}.")
    problem.require_one_process("gauss_newton_quality")
    if not 0 < damping < 1:
        raise ValueError(f"damping is a share of ‖A‖ between 0 and 1, got {damping!r}.")
    if probes < 3:
        raise ValueError(f"an interval over probes needs 3 or more, got {probes}.")
    options = {"command": "gauss-newton", "damping": damping, "probes": probes, "seed": seed}

    def work(step: Step) -> GaussNewtonQuality:
        def measured() -> GaussNewtonQuality:
            if problem.size <= DENSE_UP_TO:
                return _exact(problem, damping, budget, step)
            return _probed(problem, damping, probes, seed, budget, step)

        result: GaussNewtonQuality = step("gauss_newton", measured)
        return result

    return recorded(problem, output, options, work)


# --- exact --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class QualityPart(Result):
    """What one step of a run has measured; the steps together are a ``GaussNewtonQuality``."""

    shares: dict[str, Distance]
    approximations: dict[str, Approximation]
    largest: tuple[float, ...] = ()  # λmax(H) and its interval, λmax(H_o) and its interval


def _exact(
    problem: Problem, damping: float, budget: int | str | None, step: Step
) -> GaussNewtonQuality:
    @functools.cache
    def matrices() -> tuple[Tensor, Tensor, Tensor]:
        parts = dense_parts(CurvatureParts(problem, budget=budget))
        return tuple(_symmetric(parts[part]) for part in ("total", "outer", "functional"))  # type: ignore[return-value]

    @functools.cache
    def targets() -> dict[str, _Target]:
        hessian, outer, _ = matrices()
        return {"hessian": _Target(hessian, damping), "outer": _Target(outer, damping)}

    def judged(name: str) -> Approximation:
        make = _dense_approximations(problem, matrices()[1])[name]
        return _judged(name, make(), targets())

    def shares() -> QualityPart:
        hessian, _, functional = matrices()
        found = {"model": _ratio(functional, hessian)}
        for role, places in _by_role(problem).items():
            chosen = torch.cat(places)
            found[role] = _ratio(functional[chosen][:, chosen], hessian[chosen][:, chosen])
        tops = [targets()[name].largest for name in ("hessian", "outer")]
        return QualityPart(
            shares=found, approximations={}, largest=tuple(top for t in tops for top in (t, t, t))
        )

    roles: QualityPart = step("gauss_newton.shares", shares)
    approximations = {
        name: step(f"gauss_newton.{name}", functools.partial(judged, name)) for name in NAMES
    }
    return _quality(problem, roles.shares, roles.largest, approximations, damping, exact=True)


def _quality(
    problem: Problem,
    shares: dict[str, Distance],
    largest: tuple[float, ...],
    approximations: dict[str, Approximation],
    damping: float,
    *,
    exact: bool,
) -> GaussNewtonQuality:
    return GaussNewtonQuality(
        size=problem.size,
        loss=problem.value(),
        largest=largest[0],
        largest_interval=(largest[1], largest[2]),
        largest_outer=largest[3],
        largest_outer_interval=(largest[4], largest[5]),
        functional_share=shares,
        approximations={name: approximations[name] for name in NAMES if name in approximations},
        damping=damping,
        exact=exact,
    )


def _symmetric(matrix: Tensor) -> Tensor:
    matrix = in_float64(matrix).cpu()
    return (matrix + matrix.T) / 2


def _by_role(problem: Problem) -> dict[str, list[Tensor]]:
    """Role → the places of its blocks in all layers, biases with their weights."""
    groups: dict[str, list[Tensor]] = {}
    for block in blocks_of(problem.anatomy, biases=False):
        groups.setdefault(block.role, []).append(block.indices)
    return groups


def _ratio(top: Tensor, bottom: Tensor) -> Distance:
    under = float(bottom.norm())
    value = float(top.norm()) / under if under > 0 else math.nan
    return Distance(value=value, interval=(value, value), at_best_scale=value)


class _Target:
    """A matrix A that is approximated, with |A| + δI."""

    def __init__(self, matrix: Tensor, damping: float) -> None:
        values, vectors = torch.linalg.eigh(matrix)
        self.matrix, self.norm = matrix, float(matrix.norm())
        self.largest, self.trace = float(values[-1]), float(values.abs().sum())
        self.delta = damping * float(values.abs().max())
        self.damped = ((vectors * (values.abs() + self.delta)) @ vectors.T).numpy()

    def distance(self, other: Tensor) -> Distance:
        inner, square = float((other * self.matrix).sum()), float(other.pow(2).sum())
        value = float((other - self.matrix).norm()) / self.norm
        cosine = inner / math.sqrt(square) / self.norm if square > 0 else 0.0
        best = math.sqrt(max(1 - max(cosine, 0.0) ** 2, 0.0))
        return Distance(value=value, interval=(value, value), at_best_scale=best)

    def condition(self, other: Tensor, *, scaled: bool) -> float:
        """κ of (P + δI)⁻¹ (|A| + δI); scaled: P first brought to the trace of |A|."""
        matrix = other * (self.trace / float(other.trace())) if scaled else other
        damped = matrix + self.delta * torch.eye(len(matrix), dtype=matrix.dtype)
        values = scipy.linalg.eigvalsh(self.damped, damped.numpy(), check_finite=False)
        return float(values[-1] / values[0])


def _dense_approximations(problem: Problem, outer: Tensor) -> dict[str, Callable[[], Tensor]]:
    def block_diagonal() -> Tensor:
        result = torch.zeros_like(outer)
        for block in blocks_of(problem.anatomy, biases=False):
            places = block.indices
            result[places[:, None], places] = outer[places[:, None], places]
        return result

    def kronecker(kind: type[KFAC]) -> Tensor:
        return _symmetric(kind(problem).dense())

    return {
        "gauss_newton": lambda: outer,
        "block_diagonal": block_diagonal,
        "ekfac": lambda: kronecker(EKFAC),
        "kfac": lambda: kronecker(KFAC),
        "adam": lambda: adam_diagonal(problem).diag(),
        "identity": lambda: torch.eye(len(outer), dtype=outer.dtype),
    }


def adam_diagonal(problem: Problem) -> Tensor:
    """√v (P,), v the mean over samples of the squared gradient: Adam's, at batches of one."""
    total = torch.zeros(problem.size, dtype=torch.float64)
    count = 0
    for piece in pieces(problem, 1):
        total += in_float64(problem.with_batches([piece]).gradient()).cpu().square()
        count += 1
    return (total / count).sqrt()


def _judged(name: str, matrix: Tensor, targets: dict[str, _Target]) -> Approximation:
    plain = name == "identity"
    scaled = name in ("adam", "identity")
    hessian, outer = targets["hessian"], targets["outer"]
    return Approximation(
        name=name,
        to_hessian=None if plain else hessian.distance(matrix),
        to_outer=None if plain else outer.distance(matrix),
        condition_hessian=hessian.condition(matrix, scaled=scaled),
        condition_outer=outer.condition(matrix, scaled=scaled),
    )


# --- from probes --------------------------------------------------------------------------------


def _probed(
    problem: Problem,
    damping: float,
    probes: int,
    seed: int,
    budget: int | str | None,
    step: Step,
) -> GaussNewtonQuality:
    operator = CurvatureParts(problem, budget=budget)
    kronecker = functools.cache(lambda: {"ekfac": EKFAC(problem), "kfac": KFAC(problem)})
    adam = functools.cache(lambda: adam_diagonal(problem))

    def distances() -> QualityPart:
        return _distances(problem, operator, kronecker(), adam(), probes, seed)

    def ends() -> QualityPart:
        tops = [
            eigenpairs(kind(problem, budget=budget), k=1, which="largest", tol=1e-4, seed=seed)
            for kind in (Hessian, GaussNewton)
        ]
        numbers = [
            (float(t.values[0]), float(t.interval[0][0]), float(t.interval[1][0])) for t in tops
        ]
        return QualityPart(shares={}, approximations={}, largest=(*numbers[0], *numbers[1]))

    part: QualityPart = step("gauss_newton.distances", distances)
    tops: QualityPart = step("gauss_newton.ends", ends)
    conditions = _Conditions(problem, damping, tops.largest, seed, budget)
    approximations = {}
    for name in NAMES:
        far = part.approximations.get(name)

        def judged(name: str = name, far: Approximation | None = far) -> Approximation:
            if name in ("ekfac", "kfac"):
                return conditions.of(name, far, BlockRoot(kronecker()[name]))
            diagonal = adam() if name == "adam" else torch.ones(problem.size, dtype=torch.float64)
            return conditions.of(name, far, DiagonalRoot(diagonal))

        if name in ("gauss_newton", "block_diagonal"):
            assert far is not None
            # its own root is not at hand; H_o conditions itself perfectly
            known = 1.0 if name == "gauss_newton" else None
            approximations[name] = replace(far, condition_outer=known)
        else:
            approximations[name] = step(f"gauss_newton.{name}", judged)
    return _quality(problem, part.shares, tops.largest, approximations, damping, exact=False)


def _distances(
    problem: Problem,
    operator: CurvatureParts,
    kronecker: dict[str, KFAC],
    adam: Tensor,
    probes: int,
    seed: int,
) -> QualityPart:
    """How far every approximation is, and the shares of H_f, from random probes."""
    sums: dict[str, list[Any]] = {}  # probe by probe

    def add(name: str, values: Any) -> None:
        sums.setdefault(name, []).append(values)

    groups = random_signs(operator, problem.size, probes, seed)
    for signs, images in probed_block(operator, None, groups):
        columns = {"gauss_newton": images["outer"], "adam": signs * adam.to(signs)}
        columns |= {name: (matrix @ signs.T).T for name, matrix in kronecker.items()}
        add("functional", _lengths(images["functional"]))
        for target, part in _PARTS.items():
            add(target, _lengths(images[part]))
            for name, image in columns.items():
                add(f"{name} to {target}", _lengths(image - images[part]))
                add(f"{name} times {target}", _inner(image, images[part]))
                add(f"{name} for {target}", _lengths(image))
    found = {name: np.concatenate(values) for name, values in sums.items()}
    squares = {target: found[target] for target in _PARTS}
    approximations = {}
    for name in ("gauss_newton", "ekfac", "kfac", "adam"):
        distances = {
            target: _estimated(
                found[f"{name} to {target}"],
                squares[target],
                found[f"{name} times {target}"],
                found[f"{name} for {target}"],
            )
            for target in _PARTS
        }
        approximations[name] = _far(name, distances)
    blocks = blocks_of(problem.anatomy, biases=False)
    shares, diagonal_distances = _block_shares(operator, blocks, probes, seed, squares)
    approximations["block_diagonal"] = _far("block_diagonal", diagonal_distances)
    shares = {"model": _estimated(found["functional"], squares["hessian"]), **shares}
    return QualityPart(shares=shares, approximations=approximations)


def _far(name: str, distances: dict[str, Distance]) -> Approximation:
    return Approximation(
        name=name,
        to_hessian=distances["hessian"],
        to_outer=distances["outer"],
        condition_hessian=None,
        condition_outer=None,
    )


# --- condition numbers without dense matrices -----------------------------------------------------

_END_PRODUCTS = 80  # for one end of a preconditioned spectrum
_END_TOLERANCE = 1e-6  # of its norm: the small end is a small part of that


class DiagonalRoot:
    """P = diag(p), by (scale · P + δI)^{−½} on columns."""

    def __init__(self, diagonal: Tensor) -> None:
        self.diagonal = diagonal
        self.trace, self.largest = float(diagonal.sum()), float(diagonal.max())

    def root(self, delta: float, scale: float) -> Callable[[Tensor], Tensor]:
        factor = (scale * self.diagonal + delta).rsqrt()
        return lambda columns: columns * factor.to(columns)[:, None]


class BlockRoot:
    """The same of KFAC or EKFAC, in the eigenbases of their blocks."""

    def __init__(self, operator: KFAC) -> None:
        self.operator = operator
        self.trace, self.largest = operator.exact_trace(), operator.exact_largest()

    def root(self, delta: float, scale: float) -> Callable[[Tensor], Tensor]:
        assert scale == 1.0
        return self.operator.power(-0.5, delta).__matmul__


class _Balanced(LinearOperator):
    """R M R of a symmetric M and R = (P + δI)^{−½}: the eigenvalues of (P + δI)⁻¹ M."""

    def __init__(
        self,
        like: LinearOperator,
        root: Callable[[Tensor], Tensor],
        middle: Callable[[Tensor], Tensor],
    ) -> None:
        tags = Tags(symmetric=True)
        super().__init__(like.shape, dtype=like.dtype, device=like.device, tags=tags)
        self.root, self.middle = root, middle

    def _columns(self, columns: Tensor) -> Tensor:
        return self.root(self.middle(self.root(columns)))


class _Conditions:
    """κ of (P + δI)⁻¹ (|A| + δI) for A = H and A = H_o, by Lanczos."""

    def __init__(
        self,
        problem: Problem,
        damping: float,
        largest: tuple[float, ...],
        seed: int,
        budget: int | str | None,
    ) -> None:
        self.hessian, self.outer = (kind(problem, budget=budget) for kind in (Hessian, GaussNewton))
        self.damping, self.largest, self.seed = damping, largest, seed

    @functools.cached_property
    def norms(self) -> dict[str, tuple[float, float]]:
        """‖H‖₂ and ‖H_o‖₂, and how far they may be off."""
        smallest = eigenpairs(
            self.hessian, k=1, which="smallest", tol=1e-4, seed=self.seed, data_error=False
        )
        top, _, high, top_outer, _, high_outer = self.largest
        low, least = float(smallest.values[0]), float(smallest.interval[0][0])
        whole = (top, high - top) if top >= -low else (-low, low - least)
        return {"hessian": whole, "outer": (top_outer, high_outer - top_outer)}

    @functools.cached_property
    def traces(self) -> dict[str, tuple[float, float]]:
        """Σ|λ| of both, which Adam's diagonal and the identity are brought to, and its error."""
        density = spectral_density(self.hessian, max_products=_END_PRODUCTS, seed=self.seed)
        whole = density.size * float(density.weights @ density.nodes.abs())
        own = trace(self.outer, rtol=0.01, seed=self.seed, data_error=False)
        return {"hessian": (whole, 0.0), "outer": (own.value, own.interval[1] - own.value)}

    def of(
        self, name: str, far: Approximation | None, stand_in: DiagonalRoot | BlockRoot
    ) -> Approximation:
        """The approximation with both condition numbers."""
        found: dict[str, Any] = {}
        for target, measure in (("hessian", self._total), ("outer", self._outer)):
            norm, off = self.norms[target]
            scale, doubt = 1.0, off / norm
            if isinstance(stand_in, DiagonalRoot):
                total, error = self.traces[target]
                scale, doubt = total / stand_in.trace, doubt + error / total
            delta = self.damping * norm
            root = stand_in.root(delta, scale)
            # what no eigenvalue of (P + δI)⁻¹ (|A| + δI) lies beyond
            floor = delta / (scale * stand_in.largest + delta)
            ceiling = (norm + delta) / delta
            value, high, bound = measure(root, delta, floor, ceiling)
            # ‖A‖ and tr|A| set δ and P's scale; κ changes by no larger a share than they do
            found |= {
                f"condition_{target}": value,
                f"condition_{target}_interval": (value / (1 + doubt), high * (1 + doubt)),
                f"condition_{target}_is_bound": bound,
            }
        if far is not None:
            return replace(far, **found)
        return Approximation(name=name, to_hessian=None, to_outer=None, **found)

    def _ends(self, operator: LinearOperator, which: Any) -> Any:
        most = min(_END_PRODUCTS, operator.shape[0])
        options: Any = {"tol": _END_TOLERANCE, "max_products": most, "seed": self.seed}
        return eigenpairs(operator, k=1, which=which, data_error=False, **options)

    def _outer(
        self, root: Callable[[Tensor], Tensor], delta: float, floor: float, ceiling: float
    ) -> tuple[float, float, bool]:
        """κ with H_o, an upper limit, and whether κ is only a lower bound.

        Ritz values lie between the ends: their ratio never exceeds κ.
        """
        balanced = _Balanced(self.outer, root, lambda x: self.outer @ x + delta * x)
        ends = self._ends(balanced, "both")
        top, bottom = (float(ends.values[k]) for k in (0, -1))
        settled = bool(ends.converged)
        low = max(float(ends.interval[0][-1]), floor) if settled else floor
        high = min(float(ends.interval[1][0]), ceiling) if settled else ceiling
        return top / max(bottom, floor), high / low, not settled

    def _total(
        self, root: Callable[[Tensor], Tensor], delta: float, floor: float, ceiling: float
    ) -> tuple[float, float, bool]:
        """A lower bound of κ with |H| and an upper limit, without a product with |H|.

        xᵀ|H|x is at least |xᵀHx| and at most ‖x‖ ‖Hx‖, and H²/‖H‖ ≤ |H|: the first bounds the
        largest eigenvalue from below, the others the smallest from above and from below.
        """
        product = self.hessian.__matmul__
        norm = sum(self.norms["hessian"])  # its upper end
        tops = [
            float(self._ends(_Balanced(self.hessian, root, middle), "largest").values[0])
            for middle in (lambda x: delta * x + product(x), lambda x: delta * x - product(x))
        ]
        squared = _Balanced(self.hessian, root, lambda x: product(product(x)) / norm + delta * x)
        small = self._ends(squared, "smallest")
        direction = small.vectors[:, :1].to(self.hessian.dtype)
        x = root(direction)
        size = float(x.norm())
        bottom = (size * float(product(x).norm()) + delta * size**2) / float(direction.norm()) ** 2
        least = float(small.interval[0][0]) if small.converged else floor
        return max(tops) / max(bottom, floor), ceiling / max(least, floor), True


def _lengths(rows: Tensor) -> Any:
    return _inner(rows, rows)


def _inner(left: Tensor, right: Tensor) -> Any:
    return in_float64((left * right).sum(1)).cpu().numpy()


def _estimated(top: Any, bottom: Any, inner: Any = None, lengths: Any = None) -> Distance:
    """√(mean top / mean bottom) over probes, its interval by the jackknife in logarithms."""
    count = len(top)
    if not top.sum() > 0:
        return Distance(value=0.0, interval=(0.0, 0.0), at_best_scale=0.0)
    value = math.sqrt(top.mean() / bottom.mean())
    others = 0.5 * np.log((top.sum() - top) / (bottom.sum() - bottom))
    error = math.sqrt((count - 1) / count * float(((others - others.mean()) ** 2).sum()))
    reach = math.exp(float(stats.t.ppf(0.975, count - 1)) * error)
    best = value
    if inner is not None and lengths is not None:
        cosine = inner.mean() / math.sqrt(lengths.mean() * bottom.mean())
        best = math.sqrt(max(1 - max(cosine, 0.0) ** 2, 0.0))
    return Distance(value=value, interval=(value / reach, value * reach), at_best_scale=best)


def _block_shares(
    operator: CurvatureParts,
    blocks: Sequence[AtlasBlock],
    probes: int,
    seed: int,
    squares: dict[str, Any],
) -> tuple[dict[str, Distance], dict[str, Distance]]:
    """‖H_f‖/‖H‖ of every role, and the distances of H_o's block diagonal to H and to H_o.

    With B the block diagonal of H_o:  ‖B − A‖² = ‖A‖² − 2 Σ_b ⟨A_bb, B_bb⟩ + Σ_b ‖B_bb‖².
    """
    count = min(probes, 8)  # of each block: there are many
    sums: dict[str, dict[str, Any]] = {}
    inner, own = np.zeros(count), np.zeros(count)
    for number, block in enumerate(track(blocks, "blocks")):
        groups = random_signs(operator, block.size, count, seed + 7919 * (number + 1))
        rows: dict[str, list[Any]] = {"total": [], "functional": [], "outer": [], "inner": []}
        for _, images in probed_block(operator, block, groups):
            rows["inner"].append(_inner(images["total"], images["outer"]))
            for part, image in images.items():
                rows[part].append(_lengths(image))
        table = sums.setdefault(block.role, {})
        for part in ("total", "functional"):
            table[part] = table.get(part, 0.0) + np.concatenate(rows[part])
        inner += np.concatenate(rows["inner"])
        own += np.concatenate(rows["outer"])
    shares = {role: _estimated(t["functional"], t["total"]) for role, t in sums.items()}
    distances = {}
    for name, products in (("hessian", inner), ("outer", own)):
        excess, whole = own - 2 * products, squares[name]
        share = float(excess.mean() / whole.mean())
        error = math.hypot(
            _standard_error(excess) / float(whole.mean()),
            share * _standard_error(whole) / float(whole.mean()),
        )
        reach = float(stats.t.ppf(0.975, count - 1)) * error
        value, low, high = (
            math.sqrt(max(v, 0.0)) for v in (1 + share, 1 + share - reach, 1 + share + reach)
        )
        cosine = products.mean() / math.sqrt(own.mean() * whole.mean())
        best = math.sqrt(max(1 - min(max(cosine, 0.0), 1.0) ** 2, 0.0))
        distances[name] = Distance(value=value, interval=(low, high), at_best_scale=best)
    return shares, distances


def _standard_error(values: Any) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values)))


# --- a Transformer against an MLP ---------------------------------------------------------------

STAGES = ("initialisation", "training")
QUANTITIES: dict[str, Callable[[GaussNewtonQuality], float]] = {
    "λmax(H_o)/λmax(H)": lambda one: one.ratio,
    "‖H_f‖/‖H‖": lambda one: one.functional_share["model"].value,
    "KFAC to H_o": lambda one: _distance(one, "kfac"),
    "EKFAC to H_o": lambda one: _distance(one, "ekfac"),
    "block diagonal to H_o": lambda one: _distance(one, "block_diagonal"),
}


def _distance(one: GaussNewtonQuality, name: str) -> float:
    found = one.approximations[name].to_outer
    return math.nan if found is None else found.value


@dataclass(frozen=True, kw_only=True)
class SeedOfGaussNewton(Result):
    """One seed: model → stage → quality, and the held-out accuracy after training."""

    qualities: dict[str, dict[str, GaussNewtonQuality]]
    accuracies: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class GaussNewtonComparison(Result):
    """A Transformer against an MLP of equal size, at initialisation and trained, over seeds."""

    seeds: tuple[int, ...]
    sizes: dict[str, int]
    rows: dict[str, dict[str, Spread]]  # "Transformer at initialisation" → quantity → spread
    claims: tuple[Claim, ...]

    @property
    def verdict(self) -> str:
        """Of the talk's words, λmax of Gauss-Newton is worse than for MLPs, at initialisation."""
        return self.claims[0].verdict

    def __str__(self) -> str:
        names = list(self.rows)
        table = [["", *names]]
        table += [[q, *(str(self.rows[n][q]) for n in names)] for q in QUANTITIES]
        widths = [max(len(row[k]) for row in table) for k in range(len(names) + 1)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in table]
        return "\n".join([*lines, *(str(one) for one in self.claims)])


def compare_gauss_newton(
    make: Callable[[int], nn.Module] | None = None,
    data: Dataset | tuple[Tensor, Tensor] | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 200,
    samples: int = 64,
    damping: float = 1e-3,
    output: str | os.PathLike[str] | Run | None = None,
) -> GaussNewtonComparison:
    """Is Gauss-Newton worse for Transformers than for MLPs? The talk says so; this measures it.

    make: seed → a Transformer that classifies (default: a ViT of width 8 for digits). data: real
    inputs and classes (default: digits). The MLP has two hidden layers and as many parameters.
    steps: of training, of both alike. samples: of the data that curvature is measured on.
    output: a run folder or an open ``Run``: every finished seed of either model is kept, the same
    call resumes.
    """
    if len(seeds) < 2:
        raise ValueError(f"an interval over seeds needs at least 2 seeds, got {len(seeds)}.")
    maker = make or (lambda seed: reference_vit(seed=seed, d_model=8))
    chosen = digits() if data is None else data
    train_set = chosen.train if isinstance(chosen, Dataset) else chosen
    inputs, labels = train_set[0], train_set[1]
    _require_numbers(inputs, labels)
    model = maker(seeds[0])
    size = sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        classes = int(model(inputs[:1]).shape[-1])
    config = MLPConfig(inputs=inputs[0].numel(), outputs=classes).of_size(size)

    def mlp(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return MLP(config)

    makers = {"Transformer": maker, "MLP": mlp}
    options = {
        "command": "gauss-newton-comparison",
        "seeds": list(seeds),
        "steps": steps,
        "samples": samples,
        "damping": damping,
    }

    def one(seed: int, name: str) -> SeedOfGaussNewton:
        network = makers[name](seed)
        few = inputs[:samples], labels[:samples]
        stages: dict[str, GaussNewtonQuality] = {}
        accuracy = math.nan
        for stage in STAGES:
            if stage == "training":
                history = train(network, chosen, steps=steps, seed=seed)
                accuracy = history.validation_accuracy or math.nan
            problem = Problem(network.eval(), "cross_entropy", few)
            with warnings.catch_warnings():
                # The layers of an MLP go by their own names: that is no news here.
                warnings.filterwarnings("ignore", ".*have no role that is known")
                stages[stage] = gauss_newton_quality(problem, damping=damping, seed=seed)
        return SeedOfGaussNewton(qualities={name: stages}, accuracies={name: accuracy})

    def work(step: Step) -> GaussNewtonComparison:
        runs = []
        for seed in track(list(seeds), "seeds"):
            models = [
                step(f"seed{seed}.{name.lower()}.gauss_newton", functools.partial(one, seed, name))
                for name in makers
            ]
            runs.append(
                SeedOfGaussNewton(
                    qualities={n: stages for m in models for n, stages in m.qualities.items()},
                    accuracies={n: value for m in models for n, value in m.accuracies.items()},
                )
            )
        sizes = {"Transformer": size, "MLP": config.parameters}
        result: GaussNewtonComparison = step(
            "gauss_newton.comparison", lambda: _compared(tuple(seeds), sizes, runs)
        )
        return result

    problem = Problem(model, "cross_entropy", (inputs[:samples], labels[:samples]))
    return recorded(problem, output, options, work)


def _require_numbers(inputs: Any, labels: Any) -> None:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or labels.ndim != 1:
        raise ProblemError(
            "a matched MLP reads numbers and gives one class a sample: compare on images or other "
            "real inputs with one label each, not on tokens."
        )


def matched_inputs(batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The inputs and labels of all batches, which an MLP can read too."""
    for batch in batches:
        _require_numbers(batch.inputs, batch.targets)
    inputs, labels = ([getattr(b, field) for b in batches] for field in ("inputs", "targets"))
    return torch.cat(inputs), torch.cat(labels)


def _compared(
    seeds: tuple[int, ...], sizes: dict[str, int], runs: Sequence[SeedOfGaussNewton]
) -> GaussNewtonComparison:
    rows = {
        f"{name} at {stage}": {
            quantity: spread_of(read(run.qualities[name][stage]) for run in runs)
            for quantity, read in QUANTITIES.items()
        }
        for name in sizes
        for stage in STAGES
    }
    claims = []
    told = {
        "λmax(H_o)/λmax(H)": ("λmax of Gauss-Newton", "|1 − λmax(H_o)/λmax(H)|", _miss),
        "‖H_f‖/‖H‖": ("Gauss-Newton", "‖H_f‖/‖H‖", QUANTITIES["‖H_f‖/‖H‖"]),
        "KFAC to H_o": ("KFAC", "‖KFAC − H_o‖/‖H_o‖", QUANTITIES["KFAC to H_o"]),
    }
    for what, figure, read in told.values():
        for stage in STAGES:
            differences = [
                read(run.qualities["Transformer"][stage]) - read(run.qualities["MLP"][stage])
                for run in runs
            ]
            found = claim(
                f"{what} is worse than for MLPs at {stage}",
                f"{what} is worse for the Transformer than for an MLP of equal size at {stage}",
                "Ormaniec et al., talk",
                f"{figure}, Transformer − MLP",
                differences,
                0.0,
                {},
                ratio=False,
            )
            claims.append(found)
    return GaussNewtonComparison(seeds=seeds, sizes=sizes, rows=rows, claims=tuple(claims))


def _miss(one: GaussNewtonQuality) -> float:
    return abs(1 - one.ratio)
