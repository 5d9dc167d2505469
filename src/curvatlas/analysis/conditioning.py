r"""How well conditioned a loss is at one point: both ends of the spectrum, the bulk, each layer.

The Hessian of a Transformer is indefinite and exactly singular (key biases, shifts of layer norm),
so λmax/λmin says nothing. What decides the speed of gradient descent is how far the largest
eigenvalue stands above the others: κ = λmax / mean|λ|, together with the share of negative ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from curvatlas.anatomy import Slice
from curvatlas.operators.curvature import Hessian
from curvatlas.problem import Problem
from curvatlas.results import Interval, Number, Result
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.summary import condition_density, condition_number


@dataclass(frozen=True, kw_only=True)
class LayerSharpness(Result):
    """The diagonal block of one layer (or of embedding, head, …)."""

    name: str
    layer: int | None
    parameters: int
    sharpness: float  # λmax of the block
    interval: Interval  # certified
    gradient_norm: float

    @property
    def value(self) -> float:
        return self.sharpness


@dataclass(frozen=True, kw_only=True)
class EffectiveConditioning(Result):
    """Conditioning of the loss at the present weights."""

    loss: float
    gradient_norm: float
    largest: float  # λmax
    largest_interval: Interval  # certified
    smallest: float  # λmin
    smallest_interval: Interval
    condition_number: float  # λmax / mean |λ|
    interval: Interval  # 95 %, of the condition number
    negative_mass: float  # share of negative eigenvalues
    negative_mass_interval: Interval
    effective_rank: float
    alignment: float  # gᵀHg / (‖g‖² λmax): 1 when the gradient lies in the sharpest direction
    learning_rate: float | None
    stability: float | None  # η λmax / 2: above one, plain gradient descent is unstable here
    layers: tuple[LayerSharpness, ...]
    heterogeneity: float  # largest ratio of sharpnesses of two parts of like size
    heterogeneity_interval: Interval
    products: int
    converged: bool
    grad_mean: float = float("nan")  # of the gradient's entries
    grad_std: float = float("nan")
    weights_norm: float = float("nan")  # ‖θ‖

    also = ("grad_norm", "eff_condition_number")

    @property
    def value(self) -> float:
        return self.condition_number

    @property
    def grad_norm(self) -> float:
        """‖∇L‖, by the article's name."""
        return self.gradient_norm

    @property
    def eff_condition_number(self) -> float:
        """λmax / mean|λ| of the true Hessian, by the article's name."""
        return self.condition_number

    @property
    def indefiniteness(self) -> float:
        """|λmin| / λmax when λmin is negative, else 0."""
        return max(-self.smallest, 0.0) / max(self.largest, 1e-300)

    def __str__(self) -> str:
        largest = Number(self.largest, *self.largest_interval)
        negative = Number(self.negative_mass, *self.negative_mass_interval)
        text = (
            f"loss {self.loss:.5g}, λmin {Number(self.smallest, *self.smallest_interval)}, λmax "
            f"{largest}, condition number λmax/mean|λ| = "
            f"{Number(self.condition_number, *self.interval)}, {negative:%} negative, "
            f"gradient-curvature alignment {self.alignment:.2f}"
        )
        if self.layers:
            differ = Number(self.heterogeneity, *self.heterogeneity_interval)
            text += f", parts of like size differ by × {differ}"
        if self.learning_rate is not None and self.stability is not None:
            half = self.learning_rate / 2
            low, high = (half * end for end in self.largest_interval)
            text += f", η·λmax/2 = {Number(self.stability, low, high)}"
        return text


def effective_conditioning(
    problem: Problem,
    *,
    learning_rate: float | None = None,
    products: int = 80,
    layers: bool = True,
    seed: int = 0,
) -> EffectiveConditioning:
    """Both ends of the spectrum, κ = λmax/mean|λ|, negative share, alignment and layers."""
    return conditioning_and_ends(
        problem, learning_rate=learning_rate, products=products, layers=layers, seed=seed
    )[0]


def conditioning_and_ends(
    problem: Problem, *, learning_rate: float | None, products: int, layers: bool, seed: int
) -> tuple[EffectiveConditioning, Eigenpairs]:
    """``effective_conditioning`` with the eigenvectors it was read from."""
    operator = Hessian(problem)
    ends = eigenpairs(operator, k=1, which="both", tol=1e-3, seed=seed)
    density = condition_density(operator, max_products=products, seed=seed)
    conditioning = conditioning_of(
        problem, operator, ends, density, learning_rate=learning_rate, layers=layers, seed=seed
    )
    return conditioning, ends


def conditioning_of(
    problem: Problem,
    operator: Hessian,
    ends: Eigenpairs,
    density: SpectralDensity,
    *,
    learning_rate: float | None,
    layers: bool,
    seed: int,
    max_products: int | None = None,
    memory: int | None = None,
) -> EffectiveConditioning:
    """The same from both ends and a density that are already known; only layers cost products.

    max_products, memory: for each layer's sharpness.
    """
    gradient = problem.gradient()
    top, bottom = float(ends.values[0]), float(ends.values[-1])
    low, high = ([float(v) for v in (bound[0], bound[-1])] for bound in ends.interval)
    condition, interval = condition_number((low[0], top, high[0]), density)
    square = float(gradient @ gradient)
    along = float(gradient @ (operator @ gradient))
    sharpnesses: tuple[LayerSharpness, ...] = ()
    products = 1  # along the gradient
    if layers:
        sharpnesses, spent = layer_curvatures(
            problem, operator, gradient, seed, max_products, memory
        )
        products += spent
    ratio, ratio_interval = heterogeneity(sharpnesses)
    return EffectiveConditioning(
        loss=problem.value(),
        gradient_norm=square**0.5,
        grad_mean=float(gradient.mean()),
        grad_std=float(gradient.std()) if len(gradient) > 1 else 0.0,
        weights_norm=float(torch.linalg.vector_norm(problem.parameters)),
        largest=top,
        largest_interval=(low[0], high[0]),
        smallest=bottom,
        smallest_interval=(low[1], high[1]),
        condition_number=condition,
        interval=interval,
        negative_mass=density.negative_mass,
        negative_mass_interval=density.negative_mass_interval,
        effective_rank=density.effective_rank,
        alignment=along / max(square * top, 1e-300),
        learning_rate=learning_rate,
        stability=None if learning_rate is None else learning_rate * top / 2,
        layers=sharpnesses,
        heterogeneity=ratio,
        heterogeneity_interval=ratio_interval,
        # Not the operator's own count: it also counts what else was done with it since it was made,
        # which is less in a resumed run.
        products=ends.products + density.products + products,
        converged=ends.converged,
    )


def layer_curvatures(
    problem: Problem,
    operator: Hessian,
    gradient: torch.Tensor,
    seed: int,
    max_products: int | None = None,
    memory: int | None = None,
) -> tuple[tuple[LayerSharpness, ...], int]:
    """λmax of each layer's diagonal block, and of what lies outside the stack by sublayer.

    Returns also the products they took.
    """
    groups: dict[tuple[int | None, str], list[Slice]] = {}
    for piece in problem.anatomy.slices:
        name = piece.sublayer if piece.layer is None else f"layer {piece.layer}"
        groups.setdefault((piece.layer, name), []).append(piece)
    rows, products = [], 0
    for (layer, name), slices in groups.items():
        limits: Any = {"max_products": max_products, "memory": memory}
        top = eigenpairs(operator[slices], k=1, which="largest", tol=1e-2, seed=seed, **limits)
        products += top.products
        squares = sum(float(piece.view(gradient).pow(2).sum()) for piece in slices)
        rows.append(
            LayerSharpness(
                name=name,
                layer=layer,
                parameters=sum(piece.size for piece in slices),
                sharpness=top.value,
                interval=(float(top.interval[0][0]), float(top.interval[1][0])),
                gradient_norm=squares**0.5,
            )
        )
    return tuple(rows), products


_LIKE = 4  # times as many parameters, up to which two parts are of like size


def sharpest_pair(
    layers: Sequence[LayerSharpness],
) -> tuple[LayerSharpness, LayerSharpness] | None:
    """The two parts of like size whose sharpnesses (where positive) differ most, sharper first.

    λmax of a block grows with its size alone: the ratio between an embedding and the 64 gains of a
    norm would say how large they are, not how curved.
    """
    positive = [layer for layer in layers if layer.sharpness > 0]
    pairs = [
        (top, low)
        for top in positive
        for low in positive
        if top is not low
        and top.sharpness >= low.sharpness
        and max(top.parameters, low.parameters) <= _LIKE * min(top.parameters, low.parameters)
    ]
    return max(pairs, key=lambda pair: pair[0].sharpness / pair[1].sharpness, default=None)


def heterogeneity(layers: Sequence[LayerSharpness]) -> tuple[float, Interval]:
    """Largest ratio of the sharpnesses of two parts of like size, with its interval."""
    pair = sharpest_pair(layers)
    if pair is None:
        return 1.0, (1.0, 1.0)
    top, low = pair
    return top.sharpness / low.sharpness, (
        max(top.interval[0], 0.0) / low.interval[1],
        top.interval[1] / max(low.interval[0], 1e-300),
    )
