"""Which weights can go (magnitude, Optimal Brain Damage, Surgeon), and what rounding them costs.

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
from curvatlas.operators import GaussNewton, Hessian
from curvatlas.operators.per_sample import exact_outer_diagonal, sampled_gradients
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.problem.evaluation import evaluated
from curvatlas.results import Result
from curvatlas.spectra.diagonal import diagonal, read_diagonal


@dataclass(frozen=True)
class Removals:
    """For each block the order in which weights go, and what each removal adds to the loss."""

    order: Tensor  # (blocks, size) places within the block, first removed first
    cost: Tensor  # (blocks, size) rise of the loss by that removal


def inverse_blocks(factor: Tensor, *, damping: float) -> Tensor:
    """(B + damping·mean(diag B)·I)⁻¹ for B = FᵀF, factor F: (blocks, samples, size)."""
    blocks = factor.transpose(1, 2) @ factor  # (blocks, size, size)
    scale = blocks.diagonal(dim1=1, dim2=2).mean()
    blocks.diagonal(dim1=1, dim2=2).add_(damping * scale.clamp_min(torch.finfo(factor.dtype).tiny))
    return torch.cholesky_inverse(torch.linalg.cholesky(blocks))


def remove_all(weights: Tensor, inverse: Tensor) -> Removals:
    r"""Take every weight out of every block, cheapest first; weights: (blocks, size).

    Removing weight q of a block with curvature B raises the loss by s_q = w_q² / (2 [B⁻¹]_qq) when
    the other weights of the block move to the best place, δw = −w_q / [B⁻¹]_qq · B⁻¹ e_q (Hassibi
    and Stork 1993). The inverse without row and column q is one rank-one update away. All blocks go
    at once.
    """
    blocks, size = weights.shape
    order = torch.empty(blocks, size, dtype=torch.long, device=weights.device)
    cost = torch.empty_like(weights)
    state, inverse = weights.clone(), inverse.clone()
    alive = torch.ones_like(weights, dtype=torch.bool)
    rows = torch.arange(blocks, device=weights.device)
    for turn in range(size):
        price = state.square() / (2 * inverse.diagonal(dim1=1, dim2=2))
        chosen = price.masked_fill(~alive, torch.inf).argmin(1)  # (blocks,)
        order[:, turn], cost[:, turn] = chosen, price[rows, chosen]
        _remove(state, inverse, alive, rows, chosen)
    return Removals(order, cost)


def remove_first(weights: Tensor, inverse: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """The weights after the first ``counts[b]`` removals of ``order[b]`` in each block b."""
    state, inverse = weights.clone(), inverse.clone()
    alive = torch.ones_like(weights, dtype=torch.bool)
    for turn in range(int(counts.max())):
        rows = (counts > turn).nonzero().squeeze(1)
        _remove(state, inverse, alive, rows, order[rows, turn])
    return state.masked_fill(~alive, 0.0)


def _remove(state: Tensor, inverse: Tensor, alive: Tensor, rows: Tensor, chosen: Tensor) -> None:
    column = inverse[rows, :, chosen]  # (rows, size): B⁻¹ e_q
    pivot = column.gather(1, chosen[:, None])  # [B⁻¹]_qq
    state[rows] -= state[rows].gather(1, chosen[:, None]) / pivot * column
    inverse[rows] -= column.unsqueeze(2) * column.unsqueeze(1) / pivot.unsqueeze(2)
    alive[rows, chosen] = False
    state[rows, chosen] = 0.0
    # Rounding leaves crumbs where the row and column should be exactly zero; the pivot stays
    # positive so that removed weights never divide by zero.
    inverse[rows, chosen, :] = 0.0
    inverse[rows, :, chosen] = 0.0
    inverse[rows, chosen, chosen] = 1.0


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
    # Σ of the saliencies: second order, removals independent; "magnitude": gᵀδ + ½ δᵀHδ
    predicted_rise: float
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


@evaluated
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
    slices = Problem(model, loss, data).anatomy.slices
    names = list(dict.fromkeys(piece.parameter for piece in slices if piece.role in roles))
    if not names:
        present = ", ".join(sorted({piece.role for piece in slices}))
        raise ProblemError(f"no parameter has one of the roles {tuple(roles)}: it has {present}.")
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
            entries = _earlier_diagonal(problem, curvature)
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
        diagonal_of_samples = exact_outer_diagonal(problem)
        if diagonal_of_samples is not None:
            values, products = diagonal_of_samples
            return values.clamp_min(0).to(problem.parameters), products
    operator = GaussNewton(problem)
    if exact:
        values = read_diagonal(operator)
    else:
        values = diagonal(operator, rtol=0.01, max_products=max_products, seed=seed).values
    return values.clamp_min(0).to(problem.parameters), operator.products


def _earlier_diagonal(problem: Problem, curvature: Mapping[str, Tensor]) -> Tensor:
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
        predicted_rise=(
            _second_order(problem, new - theta) if method == "magnitude" else float(saliency.sum())
        ),
        loss_before=before,
        loss_after=after,
        products=products,
        curvature=named(entries) if len(entries) else {},
    )


def _second_order(problem: Problem, delta: Tensor) -> float:
    """gᵀδ + ½ δᵀHδ."""
    return float(problem.gradient() @ delta + 0.5 * (delta @ (Hessian(problem) @ delta)))


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


@dataclass(frozen=True, kw_only=True)
class QuantizationSensitivity(Result):
    """Predicted and measured rise of the loss when one role is rounded to so many bits."""

    bits: tuple[int, ...]
    roles: tuple[str, ...]
    predicted: Tensor  # (roles, bits): gᵀδ + ½ δᵀHδ
    measured: Tensor  # (roles, bits): L(θ + δ) − L(θ)
    loss: float

    def __str__(self) -> str:
        lines = [f"loss {self.loss:.4g}; rise by role, predicted (measured)"]
        for row, role in enumerate(self.roles):
            cells = [
                f"{bit} bits {float(self.predicted[row, col]):.2g} "
                f"({float(self.measured[row, col]):.2g})"
                for col, bit in enumerate(self.bits)
            ]
            lines.append(f"  {role}: " + ", ".join(cells))
        return "\n".join(lines)


@evaluated
def quantization_sensitivity(
    model: nn.Module,
    loss: Any,
    data: Any,
    *,
    bits: Sequence[int] = (8, 4, 3),
    roles: Sequence[str] = PRUNED_ROLES,
) -> QuantizationSensitivity:
    """Round each role's weights (symmetric, one scale a row) and say what it costs."""
    if any(bit < 2 for bit in bits):
        raise ValueError(f"at least 2 bits are needed for a sign and a step, got {tuple(bits)}.")
    problem = Problem(model, loss, data)
    present = tuple(r for r in roles if any(s.role == r for s in problem.anatomy.slices))
    if not present:
        raise ValueError(f"the model has none of the roles {tuple(roles)}.")
    theta, gradient, base = problem.parameters, problem.gradient(), problem.value()
    columns = []
    for role in present:
        for bit in bits:
            delta = torch.zeros_like(theta)
            for piece in problem.anatomy.select(role=role):
                weights = piece.view(theta)
                delta[piece.indices] = (round_to(weights, bit) - weights).reshape(-1)
            columns.append(delta)
    stacked = torch.stack(columns, 1)
    curved = Hessian(problem) @ stacked
    predicted = gradient @ stacked + 0.5 * (stacked * curved).sum(0)
    measured = [value_at(problem, theta + delta) - base for delta in columns]
    shape = (len(present), len(bits))
    return QuantizationSensitivity(
        bits=tuple(bits),
        roles=present,
        predicted=in_float64(predicted).reshape(shape),
        measured=torch.tensor(measured, dtype=torch.float64).reshape(shape),
        loss=base,
    )


def round_to(weights: Tensor, bits: int) -> Tensor:
    """Nearest of 2^bits − 1 evenly spaced values, symmetric about zero, one scale a row."""
    rows = weights.reshape(weights.shape[0], -1) if weights.ndim > 1 else weights.reshape(1, -1)
    levels: int = 2 ** (bits - 1) - 1
    scale = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny) / levels
    rounded: Tensor = (rows / scale).round().clamp(-levels, levels) * scale
    return rounded.reshape(weights.shape)
