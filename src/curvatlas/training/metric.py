r"""The optimizer's own edge of stability: λmax(P⁻¹H) against what its update rule survives.

An update θ ← θ − η P⁻¹ m with momentum m multiplies the error along an eigenvector of P⁻¹H, of
eigenvalue λ, by the roots of a quadratic. They leave the unit circle, and the error grows, above

    plain gradient          2 / η
    heavy ball, μ           2 (1 + μ) / η                 v ← μ v + g
    averaged gradient, β    2 (1 + β) / ((1 − β) η)       m ← β m + (1 − β) g      (Adam)
    with Nesterov's look    each of the last two divided by 1 + 2μ

P is what the optimizer's state says it divides by at present (Cohen et al. 2022 for Adam). Parts of
the model with another rate or momentum are weighed by the ratio of the thresholds, so that one
number stands against one threshold. Weight decay is left out: it is small beside either.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvatlas.linear_operator import LinearOperator, Tags
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.problem.parameters import Layout
from curvatlas.training.directions import newton_schulz_gain

State = Mapping[str, Any]
Group = Mapping[str, Any]


@dataclass(frozen=True)
class Piece:
    """P^(−1/2) on one parameter, and the largest eigenvalue of P⁻¹H that its update survives.

    root: a factor for every entry (the parameter's shape), or left and right factors of a matrix.
    """

    threshold: float
    root: Tensor | tuple[Tensor, Tensor] | None = None  # None: the identity
    law: bool = True  # False: the update is no linear map of the gradient, the edge only a guide

    def apply(self, rows: Tensor, factor: float) -> Tensor:
        """(K, *shape) → factor · P^(−1/2) of each."""
        if self.root is None:
            return rows * factor
        if isinstance(self.root, Tensor):
            return rows * (factor * self.root).to(rows)
        left, right = (side.to(rows) for side in self.root)
        flat = rows.reshape(len(rows), left.shape[0], right.shape[0])
        return (factor * (left @ flat @ right)).reshape(rows.shape)


def critical(rate: float, momentum: float, *, averaged: bool, nesterov: bool) -> float:
    """The largest λ(P⁻¹H) at which the update does not grow; see the table above."""
    if rate <= 0:
        return math.inf
    edge = 2 * (1 + momentum) / rate
    return edge / ((1 - momentum) if averaged else 1.0) / ((1 + 2 * momentum) if nesterov else 1.0)


# --- rules: what each optimizer divides by --------------------------------------------------------


def _sgd(group: Group, parameter: Tensor, state: State) -> Piece | None:
    rate = float(group["lr"]) * (1.0 - float(group["dampening"]))
    if not group["momentum"]:
        rate = float(group["lr"])
    return Piece(critical(rate, group["momentum"], averaged=False, nesterov=group["nesterov"]))


def _adam(group: Group, parameter: Tensor, state: State) -> Piece | None:
    if "exp_avg_sq" not in state:
        return None
    steps, (first, second) = float(state["step"]), group["betas"]
    square = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    return adam_piece(square, steps, float(group["lr"]), (first, second), float(group["eps"]))


def adam_piece(
    square: Tensor, steps: float, rate: float, betas: tuple[float, float], eps: float
) -> Piece:
    """P = (1 − β₁ᵗ) (√(v / (1 − β₂ᵗ)) + ε), the threshold 2 (1 + β₁) / ((1 − β₁) η)."""
    size = (in_float64(square) / (1 - betas[1] ** steps)).sqrt()
    threshold = critical(rate, betas[0], averaged=True, nesterov=False)
    return Piece(threshold, _inverse_root(size, eps, 1 - betas[0] ** steps))


def _inverse_root(size: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """(factor · (size + ε))^(−1/2); 0 for entries that never had a gradient and stand still.

    Rows of tokens that training has not met yet would otherwise count 1/ε.
    """
    return torch.where(size > 0, (factor * (size + eps)).rsqrt(), 0.0)


def _rmsprop(group: Group, parameter: Tensor, state: State) -> Piece | None:
    if "square_avg" not in state:
        return None
    square = in_float64(state["square_avg"])
    if group["centered"]:
        square = (square - in_float64(state["grad_avg"]) ** 2).clamp_min(0)
    threshold = critical(float(group["lr"]), group["momentum"], averaged=False, nesterov=False)
    return Piece(threshold, _inverse_root(square.sqrt(), float(group["eps"])))


def _adagrad(group: Group, parameter: Tensor, state: State) -> Piece | None:
    steps = float(state.get("step", 0))
    if not steps:
        return None
    rate = float(group["lr"]) / (1 + (steps - 1) * float(group["lr_decay"]))
    size = in_float64(state["sum"]).sqrt()
    threshold = critical(rate, 0.0, averaged=False, nesterov=False)
    return Piece(threshold, _inverse_root(size, float(group["eps"])))


def _adafactor(group: Group, parameter: Tensor, state: State) -> Piece | None:
    """α/ρ over √(row × column variance), clipped to root mean square d where a gradient is left."""
    steps = float(state.get("step", 0))
    if not steps:
        return None
    least, floor = group["eps"]
    least = torch.finfo(parameter.dtype).eps if least is None else float(least)
    if state.get("row_var") is not None:
        rows, columns = in_float64(state["row_var"]), in_float64(state["col_var"])
        variance = rows @ columns / rows.mean(dim=-2, keepdim=True).clamp_min(least)
    else:
        variance = in_float64(state["variance"])
    inverse = variance.clamp_min(least**2).rsqrt()
    relative = max(floor, float(parameter.detach().norm()) / parameter.numel() ** 0.5)
    if parameter.grad is not None:
        update = (inverse * parameter.grad).square().mean().sqrt()
        relative /= max(1.0, float(update) / float(group["d"]))
    rate = min(float(group["lr"]), steps**-0.5)
    threshold = critical(rate, 0.0, averaged=False, nesterov=False)
    return Piece(threshold, (relative * inverse).sqrt())


def _muon(group: Group, parameter: Tensor, state: State) -> Piece | None:
    if "momentum_buffer" not in state:
        return None
    tall, wide = parameter.shape
    ratio = 0.2 * max(tall, wide) ** 0.5
    if group["adjust_lr_fn"] in (None, "original"):
        ratio = max(1.0, tall / wide) ** 0.5
    rate = float(group["lr"]) * ratio
    return muon_piece(
        state["momentum_buffer"],
        rate,
        group["momentum"],
        nesterov=group["nesterov"],
        iterations=group["ns_steps"],
        coefficients=group["ns_coefficients"],
    )


def muon_piece(
    momentum: Tensor,
    rate: float,
    keep: float,
    *,
    nesterov: bool,
    iterations: int,
    coefficients: tuple[float, float, float],
) -> Piece | None:
    r"""P⁻¹G = L G R with P⁻¹M = the orthogonalised momentum, as far as that is linear.

    M = U Σ Vᵀ, s = Σ/‖M‖, f the Newton-Schulz polynomial: L = U √(f(s)/s) Uᵀ / √‖M‖, R alike. The
    true map also turns with the gradient, so this edge is a guide and not a law.
    """
    matrix = in_float64(momentum.reshape(len(momentum), -1))
    size = float(matrix.norm())
    if not size > 0:
        return None
    threshold = critical(rate, keep, averaged=True, nesterov=nesterov)
    return Piece(
        threshold,
        (
            _gram_root(matrix @ matrix.mT, size, iterations, coefficients),
            _gram_root(matrix.mT @ matrix, size, iterations, coefficients),
        ),
        law=False,
    )


def _gram_root(
    gram: Tensor, size: float, iterations: int, coefficients: tuple[float, float, float]
) -> Tensor:
    """(f(s)/s)^(1/4) of the Gram matrix' singular values, over ‖M‖^(1/4)."""
    values, vectors = torch.linalg.eigh(gram)
    gain = newton_schulz_gain(values.clamp_min(0).sqrt() / size, iterations, coefficients)
    root: Tensor = (vectors * (gain / size) ** 0.25) @ vectors.mT
    return root


Rule = Callable[[Group, Tensor, State], Piece | None]
_RULES: dict[str, Rule] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "RMSprop": _rmsprop,
    "Adagrad": _adagrad,
    "Adafactor": _adafactor,
    "Muon": _muon,
}


def _rule(optimizer: Optimizer) -> Rule | None:
    """The rule of a ``torch.optim`` class or of a subclass that has not replaced its step."""
    own = getattr(optimizer, "metric_piece", None)
    if own is not None:
        rule: Rule = own
        return rule
    step = inspect.unwrap(type(optimizer).step)
    for name, known in _RULES.items():
        base = getattr(torch.optim, name, None)
        if (
            base is not None
            and isinstance(optimizer, base)
            and inspect.unwrap(base.step) is step
            and not any(group.get("maximize") for group in optimizer.param_groups)
        ):
            return known
    return None


# --- the metric of a whole problem ----------------------------------------------------------------


def unwrapped(optimizers: Any) -> list[Optimizer]:
    """One optimizer or several, out of what Accelerate or Lightning put around them."""
    several = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    bare = []
    for optimizer in several:
        while not hasattr(optimizer, "metric_piece") and isinstance(
            getattr(optimizer, "optimizer", None), Optimizer
        ):
            optimizer = optimizer.optimizer
        bare.append(optimizer)
    return bare


@dataclass(frozen=True)
class Metric:
    """P⁻¹ of every parameter of a problem, and the threshold of λmax(P⁻¹H)."""

    name: str  # "AdamW", "Muon + AdamW", "plain"
    threshold: float | None  # None: no learning rate is known
    pieces: tuple[
        Piece | None, ...
    ]  # of the problem's parameters; None: the parameter stands still
    note: str = ""  # why it is the plain one

    @property
    def plain(self) -> bool:
        """Whether λmax(P⁻¹H) is λmax(H)."""
        return not self.pieces

    @property
    def law(self) -> bool:
        """Whether every update is linear in the gradient, so that the threshold is one."""
        return all(piece is None or piece.law for piece in self.pieces) and not self.note

    def root(self, columns: Tensor, layout: Layout) -> Tensor:
        """(P, K) → P^(−1/2) of the columns."""
        threshold = self.threshold or math.inf
        rows = [
            torch.zeros_like(row)
            if piece is None
            else piece.apply(row, _factor(threshold, piece.threshold))
            for row, piece in zip(layout.split(columns), self.pieces, strict=True)
        ]
        return torch.cat([row.flatten(1) for row in rows], dim=1).T


_AMPLIFIED = 30.0  # times the median of P⁻¹: where rounding in H could be taken for curvature
_ROUNDING = 100.0  # units in the last place of ‖H‖


class Preconditioned(LinearOperator):
    """P^(−1/2) H P^(−1/2): symmetric, with the eigenvalues of P⁻¹H.

    A key's bias has no gradient by theory, so that Adam divides it by its ε: a factor of 1e8 on
    what is rounding alone. Parts whose P⁻¹ stands out are therefore probed once (one product), and
    those where H vanishes to rounding are left out.

    scale: |λ|max of H.
    """

    def __init__(
        self, operator: LinearOperator, problem: Problem, metric: Metric, *, scale: float
    ) -> None:
        super().__init__(
            operator.shape,
            dtype=operator.dtype,
            device=operator.device,
            tags=Tags(symmetric=True),
        )
        self._operator, self._layout, self._metric = operator, problem.layout, metric
        self.before_product = operator.before_product
        self._without = self._vanishing(problem, scale)  # positions left out

    def _vanishing(self, problem: Problem, scale: float) -> Tensor | None:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (self.shape[0], 1), generator=generator, device="cpu")
        probe = (2.0 * signs - 1.0).to(dtype=self.dtype, device=self.device)
        size = self._metric.root(probe, self._layout).square().squeeze(1)
        usual = size[size > 0].median() if bool((size > 0).any()) else size.max()
        suspects = [
            piece
            for piece in problem.anatomy.slices
            if float(piece.view(size).mean()) > _AMPLIFIED * float(usual)
        ]
        if not suspects:
            return None
        inside = torch.zeros_like(probe)
        for piece in suspects:
            places = piece.indices.to(self.device)
            inside[places] = probe[places] / piece.size**0.5
        image: Tensor = self._operator @ inside
        floor = _ROUNDING * torch.finfo(self.dtype).eps * scale * len(suspects) ** 0.5
        empty = [
            p.indices for p in suspects if float(image[p.indices.to(self.device)].norm()) <= floor
        ]
        return torch.cat(empty).to(self.device) if empty else None

    def root(self, columns: Tensor) -> Tensor:
        """(P, K) → P^(−1/2) of the columns, nothing where H vanishes."""
        rows = self._metric.root(columns, self._layout)
        if self._without is not None:
            rows = rows.index_fill(0, self._without, 0.0)
        return rows

    def _columns(self, columns: Tensor) -> Tensor:
        image: Tensor = self._operator @ self.root(columns).contiguous()
        return self.root(image)


def _factor(whole: float, own: float) -> float:
    """√(whole / own): how much a part with its own threshold counts; 1 where no rate is set."""
    if math.isinf(own):
        return 1.0 if math.isinf(whole) else 0.0
    return math.sqrt(whole / own)


def metric_of(problem: Problem, optimizers: Sequence[Optimizer], rate: float | None) -> Metric:
    """The metric of the optimizers' present state; the plain one, with a reason, if unknown."""
    plain = None if rate is None else critical(rate, 0.0, averaged=False, nesterov=False)
    if not optimizers:
        return Metric("plain", plain, (), "no optimizer was given" if plain else "")
    names = " + ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    found: dict[int, Piece] = {}
    for optimizer in optimizers:
        rule = _rule(optimizer)
        if rule is None:
            note = f"the metric of {type(optimizer).__name__} is not known"
            return Metric("plain", plain, (), note)
        for parameter, group in _parameters(optimizer):
            piece = rule(group, parameter, optimizer.state.get(parameter, {}))
            if piece is not None:
                found[id(parameter)] = piece
    named = dict(problem.model.named_parameters())
    pieces = tuple(found.get(id(named[name])) for name in problem.layout.names)
    moving = [piece for piece in pieces if piece is not None]
    if not moving:
        return Metric("plain", plain, (), f"{names} has made no step on these parameters yet")
    threshold = min(piece.threshold for piece in moving)
    if len(moving) == len(pieces) and all(
        piece.root is None and piece.threshold == threshold for piece in moving
    ):
        return Metric(names, threshold, ())
    return Metric(names, threshold, pieces)


def _parameters(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Group]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, group
