"""Which weights can go: magnitude, Optimal Brain Damage, Optimal Brain Surgeon.

The curvature is the Gauss-Newton matrix: positive semidefinite, and equal to H up to terms in the
residual, so a saliency is never negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvatlas.anatomy import Slice
from curvatlas.errors import ProblemError
from curvatlas.operators import GaussNewton
from curvatlas.operators.outer_diagonal import exact_outer_diagonal
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.results import Result
from curvatlas.spectra.diagonal import diagonal, read_diagonal
from curvatlas.training.gradients import sampled_gradients
from curvatlas.training.surgeon import inverse_blocks, remove_all, remove_first

Method = Literal["magnitude", "obd", "obs"]

# Roles that are matrices doing the work; norms, biases and embeddings stay.
PRUNED_ROLES = ("query", "key", "value", "output", "up", "gate", "down")


@dataclass(frozen=True, kw_only=True)
class Pruning(Result):
    """A mask and new values for the pruned parameters, and what it costs."""

    method: str
    sparsity: float  # share of the prunable weights that is removed
    masks: dict[str, Tensor]  # parameter name → True where the weight stays
    weights: dict[str, Tensor]  # parameter name → values after pruning
    role_sparsity: dict[str, float]
    role_saliency: dict[str, float]  # predicted rise of the loss from this role's removals
    predicted_rise: float  # Σ of the saliencies: second order, removals independent
    loss_before: float
    loss_after: float  # on the same data, measured
    products: int  # for an exact diagonal from the outputs and for "obs": gradients of samples
    curvature: dict[str, Tensor]  # parameter name → [H_o]_ii, for "obd"; pass it to prune again

    def apply(self, model: nn.Module) -> None:
        """Write the pruned weights into the model."""
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self.weights.items():
                named[name].copy_(value)

    def __str__(self) -> str:
        roles = ", ".join(f"{role} {share:.0%}" for role, share in self.role_sparsity.items())
        return (
            f"{self.method} at {self.sparsity:.0%}: loss {self.loss_before:.4g} → "
            f"{self.loss_after:.4g} (predicted rise {self.predicted_rise:.3g}); removed {roles}"
        )


def prune(
    model: nn.Module,
    loss: Any,
    data: Any,
    *,
    sparsity: float,
    method: Method = "obs",
    roles: Sequence[str] = PRUNED_ROLES,
    exact_diagonal: bool | None = None,
    curvature: Mapping[str, Tensor] | None = None,
    max_products: int = 200,
    samples: int = 512,
    block_size: int = 128,
    damping: float = 1e-2,
    seed: int = 0,
) -> Pruning:
    """Choose the weights whose removal costs the least; the model is left as it is.

    method: "magnitude" |w|; "obd" ½ [H_o]_ii w_i²; "obs" with updates of the remaining weights in
        blocks of ``block_size`` (curvature from ``samples`` gradients with sampled targets).
    exact_diagonal: for "obd"; False: within ``max_products``, exact where it costs no more and
        estimated elsewhere; True: exact at any price; default: True up to ``max_products``
        parameters, False beyond.
    curvature: for "obd", the diagonal of an earlier pruning of the same weights (its
        ``curvature``), so that several sparsities are compared for the price of one.
    """
    if not 0.0 <= sparsity < 1.0:
        raise ValueError(f"sparsity is a share in [0, 1), got {sparsity}.")
    if method not in ("magnitude", "obd", "obs"):
        raise ValueError(f"method is 'magnitude', 'obd' or 'obs', got {method!r}.")
    whole = Problem(model, loss, data)
    pieces = [piece for piece in whole.anatomy.slices if piece.role in roles]
    if not pieces:
        known = ", ".join(sorted({piece.role for piece in whole.anatomy.slices}))
        raise ProblemError(f"no parameter has one of the roles {tuple(roles)}: it has {known}.")
    names = list(dict.fromkeys(piece.parameter for piece in pieces))
    problem = Problem(model, loss, data, parameters=names)
    chosen = [piece for piece in problem.anatomy.slices if piece.role in roles]
    places = torch.cat([piece.indices for piece in chosen]).to(problem.device)
    theta = problem.parameters
    wanted = round(sparsity * len(places))
    entries = theta.new_zeros(0)
    if method == "obs":
        new, saliency, products = _surgery(
            problem, theta, places, wanted, samples, block_size, damping, seed
        )
    else:
        products = 0
        if method == "obd" and curvature is not None:
            entries = _known_diagonal(problem, curvature)
        elif method == "obd":
            entries, products = _diagonal(problem, exact_diagonal, max_products, seed)
        scores = theta.abs() if method == "magnitude" else 0.5 * entries * theta.square()
        keep = torch.ones_like(theta, dtype=torch.bool)
        keep[places[torch.argsort(scores[places])[:wanted]]] = False
        saliency = torch.where(keep, 0.0, scores)
        new = torch.where(keep, theta, 0.0)
    return _report(problem, chosen, places, theta, new, saliency, entries, method, products)


def _diagonal(
    problem: Problem, exact: bool | None, max_products: int, seed: int
) -> tuple[Tensor, int]:
    """diag H_o, never negative, and the products it took."""
    if exact is None:
        exact = problem.size <= max_products
    if exact:
        values, products = exact_outer_diagonal(problem) or _column_by_column(problem)
    else:
        operator = GaussNewton(problem)
        values = diagonal(operator, rtol=0.01, max_products=max_products, seed=seed).values
        products = operator.products
    return values.clamp_min(0).to(problem.parameters), products


def _column_by_column(problem: Problem) -> tuple[Tensor, int]:
    operator = GaussNewton(problem)
    return read_diagonal(operator), operator.products


def _known_diagonal(problem: Problem, curvature: Mapping[str, Tensor]) -> Tensor:
    shapes = dict(zip(problem.layout.names, problem.layout.shapes, strict=True))
    wrong = [n for n, s in shapes.items() if n not in curvature or curvature[n].shape != s]
    if wrong:
        raise ValueError(
            f"curvature does not fit the parameter {wrong[0]}: pass the curvature of a pruning of "
            "the same model with the same roles."
        )
    return torch.cat([curvature[n].reshape(-1) for n in shapes]).to(problem.parameters)


def _surgery(
    problem: Problem,
    theta: Tensor,
    places: Tensor,
    wanted: int,
    samples: int,
    block_size: int,
    damping: float,
    seed: int,
) -> tuple[Tensor, Tensor, int]:
    """New weights, the predicted cost of each removal in its place, and gradients used."""
    gradients = sampled_gradients(problem, samples=samples, seed=seed)[:, places]  # (n, m)
    blocks = -(-len(places) // block_size)
    padded = blocks * block_size
    # The last block is filled with weights of infinite price that are never among the cheapest.
    factor = theta.new_zeros(len(gradients), padded)
    factor[:, : len(places)] = gradients / len(gradients) ** 0.5
    weights = theta.new_full((padded,), torch.finfo(theta.dtype).max ** 0.25)
    weights[: len(places)] = theta[places]
    weights = weights.view(blocks, block_size)
    grouped = factor.view(len(gradients), blocks, block_size).transpose(0, 1)
    inverse = inverse_blocks(grouped, damping=damping)
    removals = remove_all(weights, inverse)
    # A removal is only possible after those before it: its price is the dearest so far.
    price = removals.cost.cummax(1).values
    cheapest = torch.argsort(price.reshape(-1), stable=True)[:wanted]
    counts = torch.bincount(cheapest // block_size, minlength=blocks)
    pruned = remove_first(weights, inverse, removals.order, counts).reshape(-1)[: len(places)]
    new, saliency = theta.clone(), torch.zeros_like(theta)
    new[places] = pruned
    turn = torch.arange(block_size, device=theta.device)
    spent = torch.where(turn < counts[:, None], removals.cost, 0.0)
    by_place = torch.zeros_like(weights).scatter_(1, removals.order, spent).reshape(-1)
    saliency[places] = by_place[: len(places)]
    return new, saliency, len(gradients)


def _report(
    problem: Problem,
    chosen: Sequence[Slice],
    places: Tensor,
    theta: Tensor,
    new: Tensor,
    saliency: Tensor,
    entries: Tensor,
    method: str,
    products: int,
) -> Pruning:
    removed = torch.zeros_like(theta, dtype=torch.bool)
    removed[places] = new[places] == 0
    by_role: dict[str, list[Slice]] = {}
    for piece in chosen:
        by_role.setdefault(piece.role, []).append(piece)
    before = problem.value()
    after = value_at(problem, new)

    def named(flat: Tensor) -> dict[str, Tensor]:
        pieces = problem.layout.split(flat.unsqueeze(1))
        return {n: p.squeeze(0).clone() for n, p in zip(problem.layout.names, pieces, strict=True)}

    return Pruning(
        method=method,
        sparsity=float(in_float64(removed[places]).mean()),
        masks=named(~removed),
        weights=named(new),
        role_sparsity={
            role: sum(float(p.view(removed).sum()) for p in pieces) / sum(p.size for p in pieces)
            for role, pieces in by_role.items()
        },
        role_saliency={
            role: sum(float(p.view(saliency).sum()) for p in pieces)
            for role, pieces in by_role.items()
        },
        predicted_rise=float("nan") if method == "magnitude" else float(saliency.sum()),
        loss_before=before,
        loss_after=after,
        products=products,
        curvature=named(entries) if len(entries) else {},
    )


def value_at(problem: Problem, theta: Tensor) -> float:
    """The loss with other weights; the model's own are put back."""
    parameters = dict(problem.model.named_parameters())
    pieces = problem.layout.split(theta.unsqueeze(1))
    saved = {name: parameters[name].detach().clone() for name in problem.layout.names}
    try:
        with torch.no_grad():
            for name, piece in zip(problem.layout.names, pieces, strict=True):
                parameters[name].copy_(piece.squeeze(0))
        return problem.value()
    finally:
        with torch.no_grad():
            for name, value in saved.items():
                parameters[name].copy_(value)
