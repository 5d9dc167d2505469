r"""Which weights can go (magnitude, Optimal Brain Damage, Surgeon), and what that does to the loss.

The curvature that chooses is the Gauss-Newton matrix: positive semidefinite, and equal to H up to
terms in the residual, so that a saliency is never negative. What the whole change δ then costs is
predicted by gᵀδ + ½ δᵀHδ with the exact H, and said to hold or not by the loss on the way there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvatlas.anatomy import Slice, anatomy_of
from curvatlas.errors import ProblemError
from curvatlas.operators import GaussNewton, Hessian
from curvatlas.operators.per_sample import exact_outer_diagonal
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.problem.evaluation import evaluated, listed
from curvatlas.results import Interval, Result
from curvatlas.spectra.checkpoint import Checkpoint, fingerprint
from curvatlas.spectra.diagonal import diagonal, read_diagonal
from curvatlas.training.surgeon import operate, weights_at

Method = Literal["magnitude", "obd", "obs"]
Layers = Literal["curvature", "uniform"]

# Roles that are matrices doing the work; norms, biases and embeddings stay.
PRUNED_ROLES = ("query", "key", "value", "output", "up", "gate", "down")
_LEAST_KEPT = 0.6  # of the weights still there, in one stage of the surgeon


# --- what a change of the weights costs -----------------------------------------------------------

_MIDWAY = (0.25, 0.5)  # of the way to the new weights, where the loss is looked at
_IN_RANGE = 0.25  # of the terms up to second order, that those beyond may make up


@dataclass(frozen=True, kw_only=True)
class ChangedWeights(Result):
    r"""New weights θ + δ, what the derivatives at θ say of the loss there, and what it is.

    φ(t) = L(θ + tδ): ``predicted_rise`` is φ'(0) + ½ φ''(0), exact. Beyond the second order, φ at a
    quarter and at half of the way gives the terms of third and fourth order; ``predicted_interval``
    holds the predictions of all three orders, and beyond them twice what the last two differ by.
    The change is outside the quadratic range where these terms may be more than a quarter of
    |gᵀδ| + ½ |δᵀHδ|: that number is then no prediction, only the interval is.
    """

    weights: dict[str, Tensor]  # parameter name → new values
    predicted_rise: float  # gᵀδ + ½ δᵀHδ
    linear_rise: float  # gᵀδ alone: not small where the model is not at a minimum
    predicted_interval: Interval  # for the loss on the same data
    in_quadratic_range: bool
    loss_before: float
    loss_after: float  # on the same data, measured
    segment: Tensor  # (2, points) t in [0, 1] and φ(t)

    @property
    def rise(self) -> float:
        """The measured rise."""
        return self.loss_after - self.loss_before

    def apply(self, model: nn.Module) -> None:
        """Write the new weights into the model."""
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self.weights.items():
                named[name].copy_(value)

    def _prediction(self) -> str:
        low, high = self.predicted_interval
        words = "" if self.in_quadratic_range else "; OUTSIDE THE QUADRATIC RANGE"
        if abs(self.linear_rise) > abs(self.predicted_rise - self.linear_rise):
            # Saliencies know the curvature alone: they choose well for trained weights.
            words += f"; the model is not at a minimum: gradient's part {self.linear_rise:+.3g}"
        return (
            f"loss {self.loss_before:.4g} → {self.loss_after:.4g}, rise {self.rise:+.3g} "
            f"(predicted {self.predicted_rise:+.3g}, [{low:.3g}, {high:.3g}]{words})"
        )


def value_at(problem: Problem, theta: Tensor) -> float:
    """The loss with other weights; the model's own are put back."""
    with weights_at(problem, theta):
        return problem.value()


class Changes:
    """Predicted and measured rise of the loss for changes of a problem's weights."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.theta = problem, problem.parameters
        self.gradient, self.loss = problem.gradient(), problem.value()
        self.hessian = Hessian(problem)

    def terms(self, delta: Tensor) -> tuple[float, float]:
        """gᵀδ and ½ δᵀHδ."""
        if not bool(delta.any()):
            return 0.0, 0.0
        wide = in_float64(delta)
        bend = float(wide @ in_float64(self.hessian @ delta))
        return float(in_float64(self.gradient) @ wide), 0.5 * bend

    def rise(self, delta: Tensor) -> float:
        """L(θ + δ) − L(θ)."""
        return value_at(self.problem, self.theta + delta) - self.loss

    def fields(self, new: Tensor) -> dict[str, Any]:
        """Those of ``ChangedWeights`` but for the weights, for new weights (P,)."""
        delta = new - self.theta
        linear, bent = self.terms(delta)
        rise, midway = self.rise(delta), [self.rise(t * delta) for t in _MIDWAY]
        # φ(t) − φ(0) − t φ' − ½ t² φ'' = c₃ t³ + c₄ t⁴ at a quarter and at half of the way
        quarter, half = (
            value - t * linear - t * t * bent for t, value in zip(_MIDWAY, midway, strict=True)
        )
        quadratic = linear + bent
        cubic = quadratic + 8 * half
        quartic = quadratic + (128 * quarter - 8 * half) + (32 * half - 256 * quarter)
        # Rounding of the losses, as far as the differences above enlarge it.
        rounding = 400 * torch.finfo(delta.dtype).eps * max(abs(self.loss), abs(self.loss + rise))
        orders, room = (quadratic, cubic, quartic), 2 * abs(quartic - cubic) + rounding
        interval = (min(orders) - room, max(orders) + room)
        away = max(abs(order - quadratic) for order in orders) + abs(quartic - cubic)
        losses = [self.loss + change for change in (0.0, *midway, rise)]
        return {
            "predicted_rise": quadratic,
            "linear_rise": linear,
            "predicted_interval": interval,
            "in_quadratic_range": away <= _IN_RANGE * (abs(linear) + abs(bent)) + 2 * rounding,
            "loss_before": self.loss,
            "loss_after": self.loss + rise,
            "segment": torch.tensor([[0.0, *_MIDWAY, 1.0], losses], dtype=torch.float64),
        }


# --- pruning --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pruning(ChangedWeights):
    """A mask and new values for the pruned parameters, and what it costs."""

    method: str
    sparsity: float  # share of the prunable weights that is removed
    layers: str = "curvature"  # how many go from each part: as the saliencies say, or alike
    masks: dict[str, Tensor]  # parameter name → True where the weight stays
    role_sparsity: dict[str, float]
    part_sparsity: dict[str, float]  # a role of a layer ("blocks.0.query") → share removed
    role_saliency: dict[str, float]  # what this role's removals were said to cost when chosen
    stages: int = 1
    products: int  # for an exact diagonal from the outputs and for "obs": gradients of samples
    curvature: dict[str, Tensor]  # parameter name → [H_o]_ii, for "obd"; pass it to prune again

    def __str__(self) -> str:
        roles = ", ".join(f"{role} {share:.0%}" for role, share in self.role_sparsity.items())
        return f"{self.method} at {self.sparsity:.0%}: {self._prediction()}; removed {roles}"


def pruning_problem(
    model: nn.Module | Problem, loss: Any, data: Any, roles: Sequence[str]
) -> tuple[Problem, list[Slice]]:
    """The problem in the parameters that hold these roles, and their slices."""
    whole = model if isinstance(model, Problem) else Problem(model, loss, data)
    slices = whole.anatomy.slices
    names = list(dict.fromkeys(piece.parameter for piece in slices if piece.role in roles))
    named, varying = list(whole.all_parameters), set(whole.parameter_names)
    frozen = [
        piece.name
        for piece in (anatomy_of(whole.model, named).slices if len(varying) < len(named) else ())
        if piece.role in roles and piece.parameter not in varying
    ]
    if not names:
        present = ", ".join(sorted({piece.role for piece in slices}))
        held = f" ({listed(frozen)} are frozen)" if frozen else ""
        raise ProblemError(
            f"no parameter has one of the roles {tuple(roles)}{held}: it has {present}. Say which "
            "of them may change by roles=, or what a parameter is by Problem(roles=...)."
        )
    if frozen:
        warnings.warn(f"frozen, left as they are: {listed(frozen)}.", stacklevel=4)
    problem = whole.with_data(whole.data, parameters=names)
    return problem, [piece for piece in problem.anatomy.slices if piece.role in roles]


def places_of(piece: Slice, device: torch.device) -> Tensor:
    """The piece's places in the flat vector as a matrix (out, in), however it is stored."""
    places = piece.indices.to(device)
    if len(piece.shape) < 2:
        return places.view(1, -1)
    matrix = places.view(piece.shape[0], -1)
    return matrix.mT if piece.transposed else matrix


@evaluated
def prune(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    sparsity: float,
    method: Method = "obs",
    layers: Layers = "curvature",
    roles: Sequence[str] = PRUNED_ROLES,
    stages: int | None = None,
    start: Pruning | None = None,
    exact_diagonal: bool | None = None,
    curvature: Mapping[str, Tensor] | None = None,
    max_products: int = 200,
    samples: int = 512,
    block_size: int = 128,
    damping: float = 1e-2,
    seed: int = 0,
    memory: int | str | None = None,
    checkpoint: str | Path | None = None,
) -> Pruning:
    """Choose the weights whose removal costs the least; the model is left as it is.

    model: a model with its loss and data, or a ``Problem`` alone.
    method: "magnitude" |w|; "obd" ½ [H_o]_ii w_i²; "obs" moves the remaining weights as well, by
        blocks of ``block_size`` of the curvature (``samples`` gradients with sampled targets) and
        exact products (``training/surgeon.py``).
    layers: "curvature": the cheapest weights of all layers go, so that each layer loses what it can
        spare; "uniform": the same share of every part (a role of a layer).
    stages: of "obs": curvature and gradient are taken anew at the weights reached, and the next
        weights go. Default: as many as keep 60 % of the weights that are left each time.
    start: go on from an earlier pruning of the same model, whose removed weights stay removed.
        Losses and predictions are still those from the model's own weights.
    exact_diagonal: for "obd"; False: within ``max_products``, exact where it costs no more and
        estimated elsewhere; True: exact at any price; default: True up to ``max_products``
        parameters, False beyond.
    curvature: for "obd", the diagonal of an earlier pruning of the same weights (its
        ``curvature``), so that several sparsities are compared for the price of one.
    memory: of "obs", such as "500MB" (default: a quarter of the machine's); less takes more passes.
    checkpoint: of "obs", a file that keeps what every stage reached: the same call goes on there.
    """
    if not 0.0 <= sparsity < 1.0:
        raise ValueError(f"sparsity is a share in [0, 1), got {sparsity}.")
    if method not in ("magnitude", "obd", "obs"):
        raise ValueError(f"method is 'magnitude', 'obd' or 'obs', got {method!r}.")
    if layers not in ("curvature", "uniform"):
        raise ValueError(f"layers is 'curvature' or 'uniform', got {layers!r}.")
    for name, number in (("stages", stages), ("samples", samples), ("block_size", block_size)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}.")
    if not 0 < damping < math.inf:
        raise ValueError(f"damping must be a positive number, got {damping}.")
    problem, chosen = pruning_problem(model, loss, data, roles)
    problem.check()
    parts = [places_of(piece, problem.device).reshape(-1) for piece in chosen]
    theta = problem.parameters
    first, alive = _start_of(problem, start)
    entries = theta.new_zeros(0)
    taken = 1
    if method == "obs":
        plan = _stage_plan(parts, alive, sparsity, stages, layers)
        new, alive, saliency, products = _surgery(
            problem,
            first,
            alive,
            parts,
            plan,
            {
                "samples": samples,
                "block_size": min(block_size, max(map(len, parts))),
                "damping": damping,
                "memory": memory,
            },
            seed=seed,
            checkpoint=checkpoint,
        )
        taken = len(plan)
    else:
        products = 0
        if method == "obd" and curvature is not None:
            entries = _flat(problem, curvature, "curvature")
        elif method == "obd":
            entries, products = _diagonal(problem, exact_diagonal, max_products, seed)
        scores = first.abs() if method == "magnitude" else 0.5 * entries * first.square()
        gone = _cheapest(scores.masked_fill(~alive, -1.0), parts, sparsity, layers)
        alive = alive.clone()
        alive[gone] = False
        saliency = torch.where(alive, 0.0, scores)
        new = torch.where(alive, first, 0.0)
    return _report(
        problem,
        chosen,
        new,
        alive,
        saliency,
        {
            "method": method,
            "layers": layers,
            "stages": taken,
            "products": products,
            "curvature": named_weights(problem, entries) if len(entries) else {},
        },
    )


def _cheapest(scores: Tensor, parts: Sequence[Tensor], sparsity: float, layers: str) -> Tensor:
    """Places of the lowest scores, of all parts or of each."""
    groups = parts if layers == "uniform" else [torch.cat(list(parts))]
    return torch.cat([g[torch.argsort(scores[g])[: round(sparsity * len(g))]] for g in groups])


def _start_of(problem: Problem, start: Pruning | None) -> tuple[Tensor, Tensor]:
    """The weights to begin with, and which of them are still there."""
    theta = problem.parameters
    if start is None:
        return theta, torch.ones_like(theta, dtype=torch.bool)
    return _flat(problem, start.weights, "start"), _flat(problem, start.masks, "start").bool()


def _flat(problem: Problem, tensors: Mapping[str, Tensor], what: str) -> Tensor:
    shapes = dict(zip(problem.layout.names, problem.layout.shapes, strict=True))
    wrong = [n for n, s in shapes.items() if n not in tensors or tensors[n].shape != s]
    if wrong:
        raise ValueError(
            f"{what} does not fit the parameter {wrong[0]}: pass the {what} of a pruning of "
            "the same model with the same roles."
        )
    return torch.cat([tensors[n].reshape(-1) for n in shapes]).to(problem.parameters)


def named_weights(problem: Problem, flat: Tensor) -> dict[str, Tensor]:
    """Parameter name → its piece of a flat vector (P,)."""
    pieces = problem.layout.split(flat.unsqueeze(1))
    return {n: p.squeeze(0).clone() for n, p in zip(problem.layout.names, pieces, strict=True)}


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


def _stage_plan(
    parts: Sequence[Tensor], alive: Tensor, sparsity: float, stages: int | None, layers: str
) -> list[list[int]]:
    """How many weights are gone after each stage: in all, or of every part for "uniform"."""
    groups = parts if layers == "uniform" else [torch.cat(list(parts))]
    before = [1 - float(in_float64(alive[group]).mean()) for group in groups]
    if min(before) >= sparsity:
        return []  # as much is gone already
    if stages is None:
        ratio = math.log((1 - sparsity) / (1 - min(before))) / math.log(_LEAST_KEPT)
        stages = max(1, math.ceil(ratio - 1e-9))
    plan = []
    for stage in range(1, stages + 1):
        # The share that is left falls by the same factor every time.
        shares = [1 - (1 - b) * ((1 - sparsity) / (1 - b)) ** (stage / stages) for b in before]
        plan.append([round(s * len(g)) for s, g in zip(shares, groups, strict=True)])
    return plan


def _surgery(
    problem: Problem,
    weights: Tensor,
    alive: Tensor,
    parts: Sequence[Tensor],
    plan: Sequence[Sequence[int]],
    options: dict[str, Any],
    *,
    seed: int,
    checkpoint: str | Path | None,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """New weights, which stay, the cost of each removal in its place, and gradients used."""
    saliency, gradients, done = torch.zeros_like(weights), 0, 0
    mark = {
        **options,
        "plan": [list(p) for p in plan],
        "seed": seed,
        "start": _sum_of(weights),
    }
    file = Checkpoint(checkpoint, fingerprint(GaussNewton(problem), **mark))
    stored = file.load()
    if stored is not None:
        tensors, numbers = stored
        weights, saliency = tensors["weights"].to(weights), tensors["saliency"].to(weights)
        alive = tensors["alive"].to(alive)
        done, gradients = int(numbers["stages"]), int(numbers["gradients"])
    for stage, targets in enumerate(plan):
        if stage < done:
            continue
        groups = parts if len(targets) > 1 else [torch.cat(list(parts))]
        wanted = [
            max(0, number - int((~alive[group]).sum()))
            for number, group in zip(targets, groups, strict=True)
        ]
        found = operate(
            problem,
            weights,
            alive,
            parts,
            wanted,
            seed=seed + 10**6 * stage,
            **options,
        )
        weights, alive, saliency = found.weights, found.alive, saliency + found.saliency
        gradients += found.gradients
        state = {"weights": weights, "alive": alive, "saliency": saliency}
        file.save(state, {"stages": stage + 1, "gradients": gradients})
    return weights, alive, saliency, gradients


def _sum_of(weights: Tensor) -> str:
    """A number that tells one start from another."""
    return float(in_float64(weights).abs().sum()).hex()


def _report(
    problem: Problem,
    chosen: Sequence[Slice],
    new: Tensor,
    alive: Tensor,
    saliency: Tensor,
    fields: dict[str, Any],
) -> Pruning:
    def share(pieces: Sequence[Slice]) -> float:
        gone = sum(float((~piece.view(alive)).sum()) for piece in pieces)
        return gone / sum(piece.size for piece in pieces)

    by_role: dict[str, list[Slice]] = {}
    by_part: dict[str, list[Slice]] = {}
    for piece in chosen:
        by_role.setdefault(piece.role, []).append(piece)
        by_part.setdefault(piece.name, []).append(piece)
    return Pruning(
        sparsity=share(chosen),
        masks=named_weights(problem, alive),
        weights=named_weights(problem, new),
        role_sparsity={role: share(pieces) for role, pieces in by_role.items()},
        part_sparsity={part: share(pieces) for part, pieces in by_part.items()},
        role_saliency={
            role: sum(float(p.view(saliency).sum()) for p in pieces)
            for role, pieces in by_role.items()
        },
        **Changes(problem).fields(new),
        **fields,
    )


# --- rounding -------------------------------------------------------------------------------------


def step_sizes(matrix: Tensor, bits: int, group: int | None = None) -> Tensor:
    """The distance of two values for each weight (out, in): symmetric, the largest one is kept.

    group: inputs of an output that share a scale (the last ones of a row may be fewer); None: all.
    """
    levels = 2 ** (bits - 1) - 1
    width = matrix.shape[1] if group is None else min(group, matrix.shape[1])
    padded = nn.functional.pad(matrix.abs(), (0, -matrix.shape[1] % width))
    largest = padded.reshape(len(matrix), -1, width).amax(2).repeat_interleave(width, 1)
    steps: Tensor = largest[:, : matrix.shape[1]].clamp_min(torch.finfo(matrix.dtype).tiny) / levels
    return steps


def round_to(weights: Tensor, bits: int, group: int | None = None) -> Tensor:
    """Nearest of 2^bits − 1 evenly spaced values, symmetric about zero, a scale a row or group."""
    rows = weights.reshape(weights.shape[0], -1) if weights.ndim > 1 else weights.reshape(1, -1)
    levels, steps = 2 ** (bits - 1) - 1, step_sizes(rows, bits, group)
    rounded: Tensor = (rows / steps).round().clamp(-levels, levels) * steps
    return rounded.reshape(weights.shape)


def rounding_of(
    pieces: Sequence[Slice], theta: Tensor, bits: int, group: int | None = None
) -> Tensor:
    """δ (P,) that rounds the pieces to the nearest of so many bits."""
    delta = torch.zeros_like(theta)
    for piece in pieces:
        places = places_of(piece, theta.device)
        delta[places] = round_to(theta[places], bits, group) - theta[places]
    return delta


def check_bits(bits: Sequence[int], group: int | None = None) -> tuple[int, ...]:
    """The bits from the fewest on; refused where they are no grid."""
    if not bits or any(bit < 2 for bit in bits):
        raise ValueError(f"at least 2 bits are needed for a sign and a step, got {tuple(bits)}.")
    if group is not None and group < 1:
        raise ValueError(f"group is a number of inputs of at least 1, or None, got {group}.")
    return tuple(sorted(set(bits)))


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
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    bits: Sequence[int] = (8, 4, 3),
    group: int | None = None,
    roles: Sequence[str] = PRUNED_ROLES,
) -> QuantizationSensitivity:
    """Round each role's weights (symmetric, a scale a row or ``group``) and say what it costs."""
    check_bits(bits, group)
    problem, chosen = pruning_problem(model, loss, data, roles)
    present = tuple(role for role in roles if any(piece.role == role for piece in chosen))
    changes = Changes(problem)
    predicted, measured = [], []
    for role in present:
        pieces = [piece for piece in chosen if piece.role == role]
        for bit in bits:
            delta = rounding_of(pieces, changes.theta, bit, group)
            predicted.append(sum(changes.terms(delta)))
            measured.append(changes.rise(delta))
    shape = (len(present), len(bits))
    return QuantizationSensitivity(
        bits=tuple(bits),
        roles=present,
        predicted=torch.tensor(predicted, dtype=torch.float64).reshape(shape),
        measured=torch.tensor(measured, dtype=torch.float64).reshape(shape),
        loss=changes.loss,
    )
