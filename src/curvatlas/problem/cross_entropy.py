"""Softmax cross-entropy, of whole logits or of logits in factors; negative log-likelihood."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvatlas.errors import ProblemError
from curvatlas.precision import has_float64, in_float64
from curvatlas.problem.large_heads import ChunkedSoftmax, HiddenLogits, chunked_product
from curvatlas.problem.losses import IGNORE_INDEX, Loss, Rebuild, Uniform, main_tensor

Reduction = Literal["mean", "sum"]


def positions_more(logits: Sequence[int], targets: Tensor) -> int:
    """How many positions logits (B, n + L, classes) have before those of labels (B, L); else 0."""
    if len(logits) != 3 or targets.ndim != 2 or logits[0] != targets.shape[0]:
        return 0
    return max(logits[1] - targets.shape[1], 0)


class CrossEntropy(Loss):
    r"""Softmax cross-entropy with targets of class indices or of class probabilities.

    Target i puts the mass m_i ≥ 0 on the classes, s_i = Σ_c m_ic, and n is the normaliser:

        ℓ = Σ_i (s_i log Σ_c exp Z_ic − m_i·Z_i) / n
        δ_i = (s_i π_i − m_i)/n,   Λ_i = s_i (diag π_i − π_i π_iᵀ)/n.

    Class y_i, weights w, smoothing ε over C classes:  m_i = (1 − ε) w_y e_y + (ε/C) w, n = Σ_i w_y,
    both zero where y_i is ``ignore_index``. Probabilities q_i:  m_i = w ⊙ ((1 − ε) q_i + ε/C) and
    n counts the targets. This is what ``torch.nn.functional.cross_entropy`` computes.

    Logits are (..., C) and classes (...); with ``classes_first`` torch's own layout (B, C, ...) is
    read wherever the shapes allow it, also where they allow both.
    """

    name = "cross_entropy"
    convex = True
    additive = True
    likelihood = True

    def __init__(
        self,
        *,
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
        class_weights: Tensor | None = None,
        classes_first: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        if class_weights is not None and bool((class_weights < 0).any()):
            raise ProblemError(f"{self.name} takes class weights of at least zero.")
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.class_weights = class_weights
        self.classes_first = classes_first
        self.summed = reduction == "sum"

    @property
    def factored(self) -> bool:
        # Weights and smoothing together give every token its own mixture of targets.
        return self.class_weights is None or not self.label_smoothing

    def tensors(self) -> list[Tensor]:
        return [] if self.class_weights is None else [self.class_weights]

    # --- shapes ----------------------------------------------------------------------------------

    def outputs_of(self, raw: Any) -> Tensor:
        return main_tensor(raw, self.name)

    def class_axis(self, shape: torch.Size, targets: Any) -> int:
        """Where the classes lie in logits of this shape: 1 or −1."""
        if not self.classes_first or len(shape) < 3 or not isinstance(targets, Tensor):
            return -1
        places = shape if targets.is_floating_point() else (shape[0], *shape[2:])
        return 1 if tuple(places) == tuple(targets.shape) else -1

    def arranged(self, outputs: Tensor, targets: Any) -> Tensor:
        axis = self.class_axis(outputs.shape, targets)
        return outputs if axis == -1 else outputs.movedim(axis, -1)  # no node where nothing moves

    def check(self, outputs: Tensor | HiddenLogits, targets: Any) -> None:
        if not isinstance(targets, Tensor):
            raise ProblemError(
                f"{self.name} takes a tensor of classes or of class probabilities as targets, got "
                f"{type(targets).__name__}."
            )
        classes = outputs.shape[-1]
        if self.class_weights is not None and self.class_weights.shape != (classes,):
            raise ProblemError(
                f"{self.name} has class weights of shape {tuple(self.class_weights.shape)} and the "
                f"model {classes} classes."
            )
        if targets.is_floating_point():
            self._check_probabilities(outputs, targets)
            return
        if tuple(outputs.shape[:-1]) != tuple(targets.shape):
            hint = "" if self.classes_first else " (for logits (B, classes, ...) pass the torch.nn "
            hint += "" if self.classes_first else "module as the loss)"
            more = positions_more(outputs.shape, targets)
            if more:
                hint = (
                    f" (for a prompt of {more} before the tokens put {more} times "
                    f"{self.ignore_index} before every row of labels, and say shift=)"
                )
            raise ProblemError(
                f"{self.name} takes logits (..., classes) and targets (...): logits of shape "
                f"{tuple(outputs.shape)} expect targets {tuple(outputs.shape[:-1])}, "
                f"got {tuple(targets.shape)}{hint}."
            )
        valid = targets[targets != self.ignore_index]
        if valid.numel() and (int(valid.min()) < 0 or int(valid.max()) >= classes):
            raise ProblemError(
                f"class targets must lie in 0..{classes - 1}, got values from "
                f"{int(valid.min())} to {int(valid.max())} (ignore_index is {self.ignore_index})."
            )

    def _check_probabilities(self, outputs: Tensor | HiddenLogits, targets: Tensor) -> None:
        if tuple(self._probabilities(targets).shape) != tuple(outputs.shape):
            raise ProblemError(
                f"{self.name} takes integer class targets (torch.long), or probabilities of the "
                f"logits' shape {tuple(outputs.shape)}; got {targets.dtype} targets of shape "
                f"{tuple(targets.shape)}."
            )
        if self.ignore_index >= 0:
            raise ProblemError(
                f"ignore_index={self.ignore_index} has no meaning for targets that are class "
                "probabilities: leave it out."
            )
        if bool((targets < 0).any()):
            raise ProblemError(f"{self.name} takes class probabilities of at least zero.")

    def _probabilities(self, targets: Tensor) -> Tensor:
        """Class probabilities with the classes on the last axis."""
        return targets.movedim(1, -1) if self.classes_first and targets.ndim > 2 else targets

    # --- masses ----------------------------------------------------------------------------------

    def count(self, targets: Any) -> float:
        if not isinstance(targets, Tensor):
            return 1.0  # ``check`` will say what is wrong with it
        if targets.is_floating_point():
            return float(self._probabilities(targets)[..., 0].numel())
        precise = torch.float64 if has_float64(targets.device) else torch.float32
        return float(in_float64(self._row_weights(targets, precise)).sum())

    def _classes(self, targets: Tensor) -> Tensor:
        """Class indices with a class in range where a target is ignored."""
        return torch.where(targets == self.ignore_index, 0, targets).long()

    def _row_weights(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """w_y of every target, zero where it is ignored."""
        valid = targets != self.ignore_index
        if self.class_weights is None:
            return valid.to(dtype)
        weights = self.class_weights.to(device=targets.device, dtype=dtype)
        classes = self._classes(targets).clamp(0, len(weights) - 1)  # ``check`` names bad classes
        return weights[classes] * valid

    def _masses(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """s (...) and n."""
        dtype = outputs.dtype
        count = self.count(targets)
        weights = None if self.class_weights is None else self.class_weights.to(outputs)
        if targets.is_floating_point():
            mass = self._probabilities(targets).to(dtype)
            if self.label_smoothing:
                smooth = self.label_smoothing / mass.shape[-1]
                mass = mass * (1 - self.label_smoothing) + smooth
            return (mass if weights is None else mass * weights).sum(-1), count
        rows = self._row_weights(targets, dtype)
        if weights is None or not self.label_smoothing:
            return rows, count
        valid = (targets != self.ignore_index).to(dtype)
        mean = weights.mean()
        return (1 - self.label_smoothing) * rows + self.label_smoothing * mean * valid, count

    # --- value and curvature ---------------------------------------------------------------------

    def value(self, outputs: Tensor | HiddenLogits, targets: Tensor) -> Tensor:
        if isinstance(outputs, HiddenLogits):
            return self.chunked(outputs, targets).value(outputs)
        weights = None if self.class_weights is None else self.class_weights.to(outputs)
        rows = outputs.reshape(-1, outputs.shape[-1])
        if targets.is_floating_point():
            mass = self._probabilities(targets).reshape(rows.shape).to(rows)
            return F.cross_entropy(rows, mass, weight=weights, label_smoothing=self.label_smoothing)
        if not self.label_smoothing and _is_saturated(rows.detach()):
            return self._saturated_value(rows, targets.reshape(-1))
        return F.cross_entropy(
            rows,
            targets.reshape(-1).long(),
            weight=weights,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def _saturated_value(self, rows: Tensor, targets: Tensor) -> Tensor:
        r"""ℓ_i = Z_m − Z_y + log(1 + Σ_{c≠m} exp(Z_c − Z_m)) with m the likeliest class.

        The same number as torch's, but with derivatives that are right to rounding of themselves:
        torch takes them as differences such as π_m − 1, of which nothing is left in float32 where
        the other classes have 1e-8 together.
        """
        likeliest = rows.detach().argmax(-1, keepdim=True)
        top = rows.gather(-1, likeliest)
        classes = self._classes(targets).unsqueeze(-1)
        # Where m = y the difference is zero in its derivatives too, and must not be rounded to it.
        behind = torch.where(likeliest == classes, 0.0, top - rows.gather(-1, classes))
        others = (rows - top).exp().scatter(-1, likeliest, 0.0).sum(-1)
        weights = self._row_weights(targets, rows.dtype)
        return (weights * (behind.squeeze(-1) + others.log1p())).sum() / weights.sum()

    def softmax_factors(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """π (..., C) and s/n (...) of Λ = (s/n)(diag π − ππᵀ); None where π saturates."""
        if _is_saturated(outputs.detach()):
            return None
        mass, count = self._masses(outputs, targets)
        return outputs.detach().softmax(-1), mass / count

    def curvature(self, outputs: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        mass, count = self._masses(outputs, targets)
        scale = (mass / count).unsqueeze(-1)  # (..., 1)
        probabilities = outputs.detach().softmax(-1)
        likeliest = None
        if _is_saturated(outputs.detach()):
            likeliest = probabilities.argmax(-1, keepdim=True)

        def product(w: Tensor) -> Tensor:
            if likeliest is not None:
                # Λ 1 = 0: about w_m, the difference below is one of small numbers.
                w = w - w.gather(-1, likeliest.expand(*w.shape[:-1], 1))
            weighted = probabilities * w
            weighted.addcmul_(probabilities, weighted.sum(-1, keepdim=True), value=-1)
            return weighted.mul_(scale)

        return product

    def root_product(self, outputs: Tensor, targets: Tensor, noise: Tensor) -> Tensor | None:
        # B = diag √π − π √πᵀ: B Bᵀ = diag π − π πᵀ because √π has length one.
        mass, count = self._masses(outputs, targets)
        probabilities = outputs.detach().softmax(-1)
        root = probabilities.sqrt().mul_(noise)
        root.addcmul_(probabilities, root.sum(-1, keepdim=True), value=-1)
        return root.mul_((mass / count).sqrt_().unsqueeze(-1))

    def chunked(self, outputs: HiddenLogits, targets: Tensor) -> ChunkedSoftmax:
        """The same loss of logits in factors."""
        rows = self._row_weights(targets, outputs.dtype)
        return ChunkedSoftmax(
            self._classes(targets),
            rows / rows.sum(),
            smoothing=self.label_smoothing,
            rows_at_once=ChunkedSoftmax.rows_that_fit(outputs),
        )

    def fixed_slopes(
        self, outputs: list[Tensor], rebuild: Rebuild, targets: Tensor
    ) -> tuple[float, list[Tensor]]:
        logits = rebuild(outputs)
        if not isinstance(logits, HiddenLogits):
            return super().fixed_slopes(outputs, rebuild, targets)
        chunked = self.chunked(logits, targets)
        with torch.no_grad():
            value = float(chunked.value(logits))
        # The slopes at h and W depend on W and h: that is the head's own part of H_f.
        slopes = chunked.fixed_slopes(logits)
        present = [slopes[i] for i in present_factors(logits, outputs)]
        return value, [slope for slope in present if slope is not None]

    # --- single targets --------------------------------------------------------------------------

    def residual_classes(
        self, outputs: HiddenLogits, targets: Tensor, levels: list[Tensor] | None = None
    ) -> tuple[ChunkedSoftmax, list[Tensor]]:
        """The weights and classes of ``residual`` (or, with uniform ``levels``, of samples)."""
        rows = self._row_weights(targets, outputs.dtype)
        chunked = self.chunked(outputs, targets)
        if levels is None:
            chunked.scale = (rows.square() / rows.sum()).reshape(-1)
            return chunked, [chunked.targets]
        chunked.scale = (rows / (rows.sum() * len(levels))).reshape(-1)
        chunked.smoothing = 0.0
        return chunked, [chunked.drawn_classes(outputs, level) for level in levels]

    def residual(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        classes = outputs.shape[-1]
        weights = outputs.new_ones(classes)
        if self.class_weights is not None:
            weights = self.class_weights.to(outputs)
        smooth = weights * (self.label_smoothing / classes)
        if targets.is_floating_point():
            truth = self._probabilities(targets).to(outputs) * weights
            target_mass = truth * (1 - self.label_smoothing) + smooth
        else:
            truth = F.one_hot(self._classes(targets), classes).to(outputs.dtype)
            own = self._row_weights(targets, outputs.dtype).unsqueeze(-1)
            valid = (targets != self.ignore_index).to(outputs.dtype).unsqueeze(-1)
            target_mass = truth * own * (1 - self.label_smoothing) + smooth * valid
        total = target_mass.sum(-1, keepdim=True)
        return outputs.detach().softmax(-1) * total - target_mass, 1

    def target_count(self, outputs: Tensor, targets: Tensor) -> float:
        return self.count(targets)

    def sample_residual(self, outputs: Tensor, targets: Any, uniform: Uniform) -> Tensor:
        probabilities = outputs.detach().softmax(-1)
        cumulative = probabilities.cumsum(-1)
        level = uniform(outputs.shape[:-1]).to(outputs).unsqueeze(-1) * cumulative[..., -1:]
        drawn = torch.searchsorted(cumulative, level).clamp_max(outputs.shape[-1] - 1)
        truth = torch.zeros_like(probabilities).scatter_(-1, drawn, 1.0)
        mass, _ = self._masses(outputs, targets)
        return (probabilities - truth) * mass.sqrt().unsqueeze(-1)


def _is_saturated(logits: Tensor) -> bool:
    """Whether almost nothing is left beside the likeliest class, in the mean over targets.

    Some 64 of the targets are looked at first, which is enough to say no.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    # Mapped over samples (vmap), values cannot be looked at.
    if rows.shape[1] < 2 or not len(rows) or _is_mapped(rows):
        return False
    limit = torch.finfo(rows.dtype).eps ** (1 / 3)
    for some in (rows[:: max(1, len(rows) // 64)], rows):
        rest = 1 - some.softmax(-1).amax(-1)
        if not bool(rest.mean() < limit):
            return False
    return True


def _is_mapped(tensor: Tensor) -> bool:
    """Whether a transform of ``torch.func`` is at work on the tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


class NegativeLogLikelihood(CrossEntropy):
    r"""``nn.NLLLoss``: −Σ_i w_y Z_iy / Σ_i w_y of log-probabilities Z; linear in Z, so Λ = 0."""

    name = "nll"
    likelihood = False
    linear = True

    @property
    def factored(self) -> bool:
        return False

    def check(self, outputs: Tensor | HiddenLogits, targets: Any) -> None:
        if isinstance(targets, Tensor) and targets.is_floating_point():
            raise ProblemError(f"nll takes integer classes (torch.long), got {targets.dtype}.")
        super().check(outputs, targets)

    def value(self, outputs: Tensor | HiddenLogits, targets: Tensor) -> Tensor:
        assert isinstance(outputs, Tensor)
        rows = self._row_weights(targets, outputs.dtype)
        picked = outputs.gather(-1, self._classes(targets).unsqueeze(-1)).squeeze(-1)
        # An ignored place may hold an infinite log-probability: it must not become 0 · ∞.
        return -(rows * picked.masked_fill(rows == 0, 0.0)).sum() / rows.sum()

    def curvature(self, outputs: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        return torch.zeros_like

    def root_product(self, outputs: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
        return torch.zeros_like(noise)

    def residual(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        truth = F.one_hot(self._classes(targets), outputs.shape[-1]).to(outputs.dtype)
        return -truth * self._row_weights(targets, outputs.dtype).unsqueeze(-1), 1

    def sample_residual(self, outputs: Tensor, targets: Any, uniform: Uniform) -> Tensor:
        return Loss.sample_residual(self, outputs, targets, uniform)


def present_factors(logits: HiddenLogits, leaves: list[Tensor]) -> list[int]:
    """Which of hidden, weight and bias are among ``leaves``, in that order."""
    return [i for i in range(3) if any(logits[i] is leaf for leaf in leaves)]


# --- the curvature of the outputs, Λ = ∂²ℓ/∂Z² ----------------------------------------------------


def differentiable_leaves(outputs: Any) -> tuple[list[Tensor], Rebuild]:
    """The tensors of an output tree that carry gradients, and the way back to the tree."""
    if isinstance(outputs, Tensor):
        return [outputs], lambda leaves: leaves[0]
    flat, spec = tree_flatten(outputs)
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def rebuild(leaves: list[Tensor]) -> Any:
        filled = list(flat)
        for place, leaf in zip(places, leaves, strict=True):
            filled[place] = leaf
        return tree_unflatten(filled, spec)

    return [flat[i] for i in places], rebuild


def output_curvature(
    loss: Loss, leaves: list[Tensor], rebuild: Rebuild, targets: Any
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Λ as a product on lists of output tensors: closed form if known, else double backward.

    Every tensor carries one leading axis of columns: (K, *outputs).
    """
    logits = rebuild(leaves)
    if isinstance(logits, HiddenLogits) and isinstance(loss, CrossEntropy):
        return factored_product(
            logits,
            leaves,
            lambda factors, directions: loss.chunked(logits, targets).product(
                factors, directions, outer=True, functional=False
            ),
        )
    if len(leaves) == 1:
        closed = loss.curvature(leaves[0].detach(), targets)
        if closed is not None:
            return lambda columns: [closed(columns[0])]
    fresh = [leaf.detach().requires_grad_(True) for leaf in leaves]
    with torch.enable_grad():
        value = loss.value(rebuild(fresh), targets)
        slopes = torch.autograd.grad(value, fresh, create_graph=True, materialize_grads=True)
    curved = [i for i, slope in enumerate(slopes) if slope.requires_grad]

    def product(columns: list[Tensor]) -> list[Tensor]:
        if not curved:
            return [torch.zeros_like(c) for c in columns]
        results = [
            torch.autograd.grad(
                [slopes[i] for i in curved],
                fresh,
                [columns[i][k] for i in curved],
                retain_graph=True,
                materialize_grads=True,
            )
            for k in range(columns[0].shape[0])
        ]
        return [torch.stack(parts) for parts in zip(*results, strict=True)]

    return product


def factored_product(
    logits: HiddenLogits, leaves: list[Tensor], one: Callable[[Any, Any], Any]
) -> Callable[[list[Tensor]], list[Tensor]]:
    """A product at the logits, as one on those of hidden, weight and bias that vary.

    one: ((hidden, weight, bias), directions) → the three results, all tokens in one axis.
    """
    present = present_factors(logits, leaves)
    hidden = logits.hidden.detach().reshape(-1, logits.hidden.shape[-1])
    bias = None if logits.bias is None else logits.bias.detach()
    factors = (hidden, logits.weight.detach(), bias)
    return chunked_product(
        logits, [i in present for i in range(3)], lambda directions: one(factors, directions)
    )
