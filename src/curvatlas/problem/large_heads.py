r"""Cross-entropy of Z = h Wᵀ + b without Z: tokens × vocabulary exist a few rows at a time.

Every derivative the operators need is written out in h, W and b, so that nothing of the size of Z
is ever kept. With s_i the weight of token i, π = softmax(Z), q the targets' distribution:

    ℓ = Σ_i s_i (log Σ exp Z_i − q_i·Z_i)          δ_i = ∂ℓ/∂Z_i = s_i (π_i − q_i)
    slopes      ∂ℓ/∂h = δ W,   ∂ℓ/∂W = δᵀ h,   ∂ℓ/∂b = Σ_i δ_i
    tangent     Ż = ȧ_h Wᵀ + h ȧ_Wᵀ + ȧ_b          of directions ȧ
    curvature   δ̇ = Λ Ż,  Λ_i = s_i (diag π_i − π_i π_iᵀ)
    outer       (δ̇ W, δ̇ᵀ h, Σ δ̇)                  the part of H_o that the head sees
    functional  (δ ȧ_W, δᵀ ȧ_h, 0)                 Z is bilinear: the head's share of H_f

A product recomputes Z: 7 products of the size of the head instead of 6, and no memory for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from curvatlas.budget import parse_bytes

# --- finding the head -----------------------------------------------------------------------------


_CHUNKS = 2**26  # bytes for the buffers of a chunk, unless the budget is tight
_SHARE = 16  # of a budget, at most one part in so many goes to chunks of logits


@dataclass(frozen=True)
class Head:
    """A linear layer with its parameters' names (None: no bias)."""

    module: nn.Linear
    weight: str
    bias: str | None


def logit_room(budget: int | str | None) -> int:
    """Bytes for parts of the logits under a memory budget."""
    return _CHUNKS if budget is None else max(min(_CHUNKS, parse_bytes(budget) // _SHARE), 1)


def largest_logits(model: nn.Module, targets: Any, itemsize: int) -> int:
    """The most bytes the logits of these targets can take: widest linear layer × targets."""
    if not isinstance(targets, Tensor):
        return 0
    widest = max((m.out_features for m in model.modules() if isinstance(m, nn.Linear)), default=0)
    return int(targets.numel()) * widest * itemsize


class HeadSearch:
    """A model's head, looked for once, when logits are large."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._looked = False
        self._found: Head | None = None

    def beyond(
        self,
        size: int,
        targets: Any,
        named: Mapping[str, Tensor],
        small_call: Callable[[], Callable[[], Any]],
        *,
        itemsize: int,
    ) -> Head | None:
        """The head if its logits of these targets take more than ``size`` bytes.

        named: the model's parameters;  small_call: prepares a call of the model on one sample;
        itemsize: bytes of a logit.
        """
        if largest_logits(self._model, targets, itemsize) <= size:
            return None
        if not self._looked:
            with torch.no_grad():
                self._found = find_head(self._model, named, small_call())
            self._looked = True
        head = self._found
        if head is None or targets.numel() * head.module.out_features * itemsize <= size:
            return None
        return head


def factored_logits(
    head: Head, hidden: Tensor, named: Mapping[str, Tensor], leaves: Mapping[str, Tensor], room: int
) -> HiddenLogits:
    """Logits as hidden states and the head's weights; those not in ``leaves`` stay fixed."""

    def value(name: str) -> Tensor:
        return leaves[name] if name in leaves else named[name].detach()

    bias = None if head.bias is None else value(head.bias)
    return HiddenLogits(hidden, value(head.weight), bias, room, (head.weight, head.bias))


def find_head(model: nn.Module, named: Mapping[str, Tensor], run: Callable[[], Any]) -> Head | None:
    """The linear layer whose result ``run`` returns untouched, or None."""
    seen: dict[nn.Module, list[Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda module, _inputs, result: seen.setdefault(module, []).append(result)
        )
        for module in model.modules()
        if plain_linear(module)
    ]
    try:
        returned = run()
    finally:
        for handle in handles:
            handle.remove()
    for module, results in seen.items():
        if len(results) == 1 and results[0] is returned and isinstance(module, nn.Linear):
            weight = _name_of(module.weight, named)
            bias = None if module.bias is None else _name_of(module.bias, named)
            if weight is None or (module.bias is not None and bias is None):
                return None
            return Head(module, weight, bias)
    return None


def _name_of(parameter: Tensor, named: Mapping[str, Tensor]) -> str | None:
    return next((name for name, p in named.items() if p is parameter), None)


@contextlib.contextmanager
def without(head: Head) -> Iterator[None]:
    """Inside, the head passes its input through: the model returns hidden states."""
    module: Any = head.module
    own = module.__dict__.get("forward")
    module.forward = _pass_through
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _pass_through(hidden: Tensor) -> Tensor:
    return hidden


def plain_linear(module: nn.Module) -> bool:
    """Whether the layer's product is the usual one: no hooks, no overridden forward."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
        and not hooked
    )


# Buffers of the size of a chunk of Z that are alive together: Z, π, Ż and δ̇.
_BUFFERS = 4

Triple = tuple[Tensor, Tensor, "Tensor | None"]


class HiddenLogits(NamedTuple):
    """Logits Z = hidden weightᵀ + bias in factors; ``room`` bytes may be spent on parts of Z."""

    hidden: Tensor  # (..., d)
    weight: Tensor  # (V, d)
    bias: Tensor | None  # (V,)
    room: int
    names: tuple[str, str | None] | None = None  # of weight and bias in the model

    @property
    def shape(self) -> torch.Size:
        """The shape Z would have."""
        return torch.Size([*self.hidden.shape[:-1], self.weight.shape[0]])

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def whole(self) -> Tensor:
        """Z itself, for what has no chunked form."""
        return torch.nn.functional.linear(self.hidden, self.weight, self.bias)


class ChunkedSoftmax:
    """Softmax cross-entropy of ``HiddenLogits`` against fixed targets, chunk by chunk.

    targets: (N,) classes, any value where ``scale`` is zero;  scale: (N,) the s_i.
    """

    def __init__(
        self, targets: Tensor, scale: Tensor, *, smoothing: float, rows_at_once: int
    ) -> None:
        self.targets = targets.reshape(-1).long().clamp_min(0)
        self.scale = scale.reshape(-1)
        self.smoothing = smoothing
        self.rows_at_once = max(1, rows_at_once)

    @staticmethod
    def rows_that_fit(logits: HiddenLogits) -> int:
        """Tokens of a chunk such that its buffers stay within the room."""
        return max(1, logits.room // (_BUFFERS * logits.weight.shape[0] * logits.dtype.itemsize))

    # --- the loss as a function of h, W and b, twice differentiable ------------------------------

    def value(self, logits: HiddenLogits) -> Tensor:
        """ℓ as a scalar in the autograd graph."""
        result: Tensor = _Value.apply(self, *_flat(logits))  # type: ignore[no-untyped-call]
        return result

    def fixed_slopes(self, logits: HiddenLogits) -> tuple[Tensor, Tensor, Tensor | None]:
        """(δ W, δᵀ h, Σ δ) in the graph of h and W, with δ held at its present value."""
        h, weight, bias = _flat(logits)
        slopes = _Slopes.apply(self, True, h, weight, bias)  # type: ignore[no-untyped-call]
        return slopes[0].view(logits.hidden.shape), slopes[1], slopes[2]

    # --- chunks ----------------------------------------------------------------------------------

    def _chunks(self, h: Tensor) -> Iterator[slice]:
        for start in range(0, h.shape[0], self.rows_at_once):
            yield slice(start, min(start + self.rows_at_once, h.shape[0]))

    def _residual(self, probabilities: Tensor, rows: slice) -> Tensor:
        """π ↦ π − q in place."""
        if self.smoothing:
            probabilities -= self.smoothing / probabilities.shape[-1]
        truth = self.targets[rows].unsqueeze(1)
        amount = torch.full_like(truth, -(1 - self.smoothing), dtype=probabilities.dtype)
        return probabilities.scatter_add_(1, truth, amount)

    def _delta(self, z: Tensor, rows: slice) -> Tensor:
        return self._residual(z.softmax(-1), rows).mul_(self.scale[rows].unsqueeze(1))

    def loss(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """ℓ, without a graph."""
        total = h.new_zeros(())
        for rows in self._chunks(h):
            z = _logits(h[rows], weight, bias)
            picked = z.gather(1, self.targets[rows].unsqueeze(1)).squeeze(1)
            expected = (1 - self.smoothing) * picked
            if self.smoothing:
                expected = expected + self.smoothing * z.mean(-1)
            per_token = torch.logsumexp(z, -1) - expected
            scale = self.scale[rows]
            total += (scale * torch.where(scale > 0, per_token, per_token.new_zeros(()))).sum()
        return total

    def slopes(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Triple:
        """(δ W, δᵀ h, Σ δ), without a graph."""
        into = _Sums(h, weight, bias)
        for rows in self._chunks(h):
            delta = self._delta(_logits(h[rows], weight, bias), rows)
            torch.mm(delta, weight, out=into.h[rows])
            into.add(delta, h[rows])
        return into.result()

    def product(
        self,
        factors: tuple[Tensor, Tensor, Tensor | None],
        directions: Sequence[Tensor | None],
        *,
        outer: bool,
        functional: bool,
    ) -> Triple:
        """(outer + functional) of the header, for one direction each of h, W and b."""
        h, weight, bias = factors
        a_h, a_weight, a_bias = directions
        into = _Sums(h, weight, bias)
        for rows in self._chunks(h):
            z = _logits(h[rows], weight, bias)
            if outer:
                pi = z.softmax(-1)
                move = _tangent(h[rows], weight, a_h, a_weight, a_bias, rows, out=z)
                change = move.mul_(pi)
                change.addcmul_(pi, change.sum(-1, keepdim=True), value=-1)
                change.mul_(self.scale[rows].unsqueeze(1))
                torch.mm(change, weight, out=into.h[rows])
                into.add(change, h[rows])
            else:
                pi = z.softmax(-1)
            if functional:
                delta = self._residual(pi, rows).mul_(self.scale[rows].unsqueeze(1))
                if a_weight is not None:
                    into.h[rows].addmm_(delta, a_weight)
                if a_h is not None:
                    into.weight.addmm_(delta.T, a_h[rows])
        return into.result()

    def rank_one(
        self,
        factors: tuple[Tensor, Tensor, Tensor | None],
        directions: Sequence[Tensor | None],
        targets: Sequence[Tensor],
    ) -> Triple:
        """Σ_t r_t r_tᵀ Ż weighted by s and pulled back, r_t = π − q_t for each of ``targets``."""
        h, weight, bias = factors
        into = _Sums(h, weight, bias)
        for rows in self._chunks(h):
            z = _logits(h[rows], weight, bias)
            pi = z.softmax(-1)
            a_h, a_weight, a_bias = directions
            move = _tangent(h[rows], weight, a_h, a_weight, a_bias, rows, out=z)
            change = torch.zeros_like(pi)
            for drawn in targets:
                truth = drawn.reshape(-1)[rows].unsqueeze(1)
                amount = torch.full_like(truth, -(1 - self.smoothing), dtype=pi.dtype)
                residual = pi.scatter_add(1, truth, amount)
                if self.smoothing:
                    residual -= self.smoothing / pi.shape[-1]
                change.addcmul_(residual, (residual * move).sum(-1, keepdim=True))
            change.mul_(self.scale[rows].unsqueeze(1))
            torch.mm(change, weight, out=into.h[rows])
            into.add(change, h[rows])
        return into.result()

    def drawn_classes(self, logits: HiddenLogits, level: Tensor) -> Tensor:
        """Classes (N,) drawn from π by the uniform numbers ``level`` (N,)."""
        h, weight, bias = _flat(logits)
        places = torch.empty_like(self.targets)
        with torch.no_grad():
            for rows in self._chunks(h):
                cumulative = _logits(h[rows], weight, bias).softmax(-1).cumsum(-1)
                at = level.reshape(-1)[rows].to(cumulative).unsqueeze(-1) * cumulative[:, -1:]
                place = torch.searchsorted(cumulative, at).clamp_max(weight.shape[0] - 1)
                places[rows] = place.squeeze(-1)
        return places


class _Sums:
    """What a pass over the chunks adds up: (N, d), (V, d) and (V,)."""

    def __init__(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.h = torch.zeros_like(h)
        self.weight = torch.zeros_like(weight)
        self.bias = None if bias is None else torch.zeros_like(bias)

    def add(self, delta: Tensor, h: Tensor) -> None:
        self.weight.addmm_(delta.T, h)
        if self.bias is not None:
            self.bias += delta.sum(0)

    def result(self) -> Triple:
        return self.h, self.weight, self.bias


def _flat(logits: HiddenLogits) -> tuple[Tensor, Tensor, Tensor | None]:
    return logits.hidden.reshape(-1, logits.hidden.shape[-1]), logits.weight, logits.bias


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return h @ weight.T if bias is None else torch.addmm(bias, h, weight.T)


def _tangent(
    h: Tensor,
    weight: Tensor,
    a_h: Tensor | None,
    a_weight: Tensor | None,
    a_bias: Tensor | None,
    rows: slice,
    *,
    out: Tensor,
) -> Tensor:
    """Ż of one chunk, written over ``out``."""
    if a_h is None:
        out.zero_()
    else:
        torch.mm(a_h[rows], weight.T, out=out)
    if a_weight is not None:
        out.addmm_(h, a_weight.T)
    if a_bias is not None:
        out += a_bias
    return out


class _Value(torch.autograd.Function):
    """ℓ(h, W, b) with slopes that can be differentiated once more."""

    @staticmethod
    def forward(
        ctx: Any, softmax: ChunkedSoftmax, h: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.softmax = softmax
        ctx.save_for_backward(h, weight, bias)
        return softmax.loss(h, weight, bias)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        slopes = _Slopes.apply(  # type: ignore[no-untyped-call]
            ctx.softmax, False, *ctx.saved_tensors
        )
        needed = ctx.needs_input_grad[1:]
        return (
            None,
            *(
                slope * cotangent if wanted and slope is not None else None
                for slope, wanted in zip(slopes, needed, strict=True)
            ),
        )


class _Slopes(torch.autograd.Function):
    """(h, W, b) ↦ (∂ℓ/∂h, ∂ℓ/∂W, ∂ℓ/∂b); ``fixed`` holds δ, so that only bilinearity is left."""

    @staticmethod
    def forward(
        ctx: Any,
        softmax: ChunkedSoftmax,
        fixed: bool,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Any:
        ctx.softmax, ctx.fixed = softmax, fixed
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, weight, bias)
        return softmax.slopes(h, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *directions: Tensor | None) -> Any:
        product = ctx.softmax.product(
            ctx.saved_tensors, directions, outer=not ctx.fixed, functional=True
        )
        needed = ctx.needs_input_grad[2:]
        return (
            None,
            None,
            *(part if wanted else None for part, wanted in zip(product, needed, strict=True)),
        )


# The graph's custom nodes that are ours, tested against double backward.
TRUSTED_NODES = frozenset({"_ValueBackward", "_SlopesBackward"})


def chunked_product(
    logits: HiddenLogits,
    present: Sequence[bool],
    one: Callable[[Sequence[Tensor | None]], Triple],
) -> Callable[[list[Tensor]], list[Tensor]]:
    """``one`` as a product on lists of (K, *factor) for the factors that are ``present``."""
    places = [i for i, there in enumerate(present) if there]

    def product(columns: list[Tensor]) -> list[Tensor]:
        results = [torch.empty_like(column) for column in columns]
        for k in range(columns[0].shape[0]):
            directions: list[Tensor | None] = [None, None, None]
            for place, column in zip(places, columns, strict=True):
                directions[place] = column[k]
            if directions[0] is not None:
                directions[0] = directions[0].reshape(-1, logits.hidden.shape[-1])
            products = one(directions)
            for place, result in zip(places, results, strict=True):
                part = products[place]
                assert part is not None
                result[k] = part.view(result.shape[1:])
        return results

    return product
