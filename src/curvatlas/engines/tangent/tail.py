r"""From a model's last block to its loss: δ = ∂ℓ/∂z, and products with the Hessian of (z, θ).

Three forms of one thing. ``ReadoutTail``: final norm, pooling and linear head by hand, then Λ of
the outputs. ``ChunkedTail``: the same with a vocabulary whose logits are never held whole.
``AutogradTail``: anything else (poolers, masked-language heads, a decoder).

A product takes ż (K, N, d) and the parameters' tangents (``push``) and gives Rδ_z of the total,
outer or functional part (``pull``); the parameters' rates go into slots. One push may be pulled as
functional part first and as outer part after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvatlas.engines.tangent.head import LinearisedReadout, Readout, ReadoutTangent
from curvatlas.engines.tangent.linear import BackwardPass, Buffers, stand_in
from curvatlas.engines.tangent.remainder import Remainder
from curvatlas.engines.tangent.stem import Slots
from curvatlas.layers.losses import softmax_curvature
from curvatlas.linear_operator import Part
from curvatlas.problem.cross_entropy import (
    CrossEntropy,
    differentiable_leaves,
    output_curvature,
)
from curvatlas.problem.large_heads import HiddenLogits
from curvatlas.problem.losses import Loss

_FUSED_CLASSES = 64  # fewer: the loss's own product is as fast


class _TwoWays:
    """A tail whose product goes forward and back at once."""

    push: Callable[..., Any]
    pull: Callable[..., Tensor | None]

    def product(
        self,
        moved: Tensor | None,
        dots: Mapping[str, Tensor],
        part: Part,
        slots: Slots,
        space: Buffers,
    ) -> Tensor | None:
        """Rδ_z (K, N, d) of ż ``moved``."""
        return self.pull(self.push(moved, dots, space), part, slots, space)


class _Readout(_TwoWays):
    """Norm, pooling and linear head at the last block's tokens z (N, d), whatever loss follows.

    ``parameters``: names of ``Readout`` → names in the model.
    """

    def __init__(
        self, readout: Readout, parameters: Mapping[str, str], z: Tensor, *, samples: int
    ) -> None:
        self._parameters = dict(parameters)
        self._layer = LinearisedReadout(readout, z, samples=samples)

    def attach(self, weights: Mapping[str, Tensor]) -> None:
        """Multiply with the head among these weights of the model, until ``detach``."""
        own = {ours: weights[name] for ours, name in self._parameters.items() if name in weights}
        self._layer.attach(own)

    def detach(self) -> None:
        """Let go of the head's matrix: products need it ``attach``ed."""
        self._layer.detach()

    def _recorded(self, slope: Tensor) -> Tensor:
        """δ_z (1, N, d) from the outputs' δ (1, N', C); the adjoints are kept."""
        backward = BackwardPass(Buffers(keep=False), frozenset(), record=True)
        delta = self._layer.pull(slope, None, backward)
        assert delta is not None
        return delta

    @property
    def names(self) -> frozenset[str]:
        """The parameters in here."""
        return frozenset(self._parameters.values())

    def _push(
        self, moved: Tensor | None, dots: Mapping[str, Tensor], space: Buffers
    ) -> ReadoutTangent:
        own = {ours: dots[name] for ours, name in self._parameters.items() if name in dots}
        return self._layer.push(moved, own, space)

    def _pull(
        self, rate: Tensor | None, state: ReadoutTangent | None, slots: Slots, space: Buffers
    ) -> Tensor | None:
        names = self._parameters.items()
        into = {ours: slots.into[name] for ours, name in names if name in slots.into}
        backward = BackwardPass(space, frozenset(into), into, accumulate=slots.accumulate)
        rate = self._layer.pull(rate, state, backward)
        slots.written.update(self._parameters[ours] for ours in backward.rates)
        return rate


class ReadoutTail(_Readout):
    """Norm, pooling and linear head, and the loss behind them.

    ``shape``: the model's outputs. ``share``: these samples' share of the batch's loss.
    """

    def __init__(
        self,
        readout: Readout,
        parameters: Mapping[str, str],
        z: Tensor,
        *,
        samples: int,
        shape: Sequence[int],
        loss: Loss,
        targets: Any,
        share: float,
    ) -> None:
        super().__init__(readout, parameters, z, samples=samples)
        outputs = self._layer.give_output().reshape(shape)
        self._shape, self._share = tuple(shape), share
        with torch.enable_grad():
            self.value, slopes = loss.fixed_slopes([outputs], lambda z: z[0], targets)
        self._curvature = _curvature(loss, outputs, targets)
        slope = slopes[0].reshape(1, -1, outputs.shape[-1])
        self.delta = self._recorded(slope * share if share != 1 else slope)  # (1, N, d)

    def push(
        self, moved: Tensor | None, dots: Mapping[str, Tensor], space: Buffers
    ) -> ReadoutTangent:
        """The tangents of ż ``moved`` up to the outputs."""
        return self._push(moved, dots, space)

    def pull(
        self, state: ReadoutTangent, part: Part, slots: Slots, space: Buffers
    ) -> Tensor | None:
        """Rδ_z (K, N, d); of the outer and total part over the outputs' tangent."""
        rate: Tensor | None = None
        if part != "functional" and state.output is not None:
            rate = self._outputs_rate(state.output)
        return self._pull(rate, None if part == "outer" else state, slots, space)

    def _outputs_rate(self, moved: Tensor) -> Tensor:
        """Λ times the outputs' tangent (K, N', C)."""
        # The head's output has a buffer of its own; without a head ``moved`` is needed again.
        free = self._layer.linear is not None
        shaped = moved.view(moved.shape[0], *self._shape)
        rate = self._curvature(shaped if free else shaped.clone()).reshape(moved.shape)
        return rate.mul_(self._share) if self._share != 1 else rate


def _curvature(loss: Loss, outputs: Tensor, targets: Any) -> Callable[[Tensor], Tensor]:
    """w ↦ Λ w for w (K, *outputs), which may be written over."""
    if type(loss) is CrossEntropy and outputs.shape[-1] >= _FUSED_CLASSES:
        softmax = loss.softmax_factors(outputs, targets)
        if softmax is not None:
            return lambda w: softmax_curvature(softmax[0], softmax[1], w)
    product = output_curvature(loss, [outputs], lambda z: z[0], targets)
    return lambda w: product([w])[0]


@dataclass
class ChunkedTangent:
    """What the way back through a chunked head needs of the way forward."""

    readout: ReadoutTangent
    logits: tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden states, weight, bias


class ChunkedTail(_Readout):
    """Cross-entropy of a large vocabulary behind norm and pooling: logits only in chunks.

    ``head``: the names of the linear head's weight and bias in the model.
    """

    def __init__(
        self,
        readout: Readout,
        parameters: Mapping[str, str],
        z: Tensor,
        *,
        samples: int,
        logits: HiddenLogits,
        head: tuple[str, str | None],
        loss: CrossEntropy,
        targets: Tensor,
        share: float,
    ) -> None:
        super().__init__(readout, parameters, z, samples=samples)
        self._head, self._share = head, share
        hidden = self._layer.output.reshape(-1, self._layer.output.shape[-1])
        self._factors = (hidden, logits.weight.detach(), _detached(logits.bias))
        self._softmax = loss.chunked(logits, targets)
        self.value = float(self._softmax.loss(*self._factors))
        slope, _, _ = self._softmax.slopes(*self._factors)
        self.delta = self._recorded(slope.mul_(share).unsqueeze(0))

    def attach(self, weights: Mapping[str, Tensor]) -> None:
        super().attach(weights)
        hidden, _, bias = self._factors
        self._factors = (hidden, weights[self._head[0]], bias)

    def detach(self) -> None:
        super().detach()
        hidden, weight, bias = self._factors
        self._factors = (hidden, stand_in(weight), bias)

    @property
    def names(self) -> frozenset[str]:
        return super().names.union(name for name in self._head if name is not None)

    def push(
        self, moved: Tensor | None, dots: Mapping[str, Tensor], space: Buffers
    ) -> ChunkedTangent:
        """The tangents of ż ``moved`` up to the hidden states, and those of the head."""
        state = self._push(moved, dots, space)
        weight_dot, bias_dot = (None if n is None else dots.get(n) for n in self._head)
        return ChunkedTangent(state, (state.output, weight_dot, bias_dot))

    def pull(
        self, state: ChunkedTangent, part: Part, slots: Slots, space: Buffers
    ) -> Tensor | None:
        """Rδ_z (K, N, d)."""
        moving = next((t for t in state.logits if t is not None), None)
        rate: Tensor | None = None
        if moving is not None:
            rate = self._logits_rate(state.logits, len(moving), part, slots, space)
        return self._pull(rate, None if part == "outer" else state.readout, slots, space)

    def _logits_rate(
        self,
        tangents: Sequence[Tensor | None],
        count: int,
        part: Part,
        slots: Slots,
        space: Buffers,
    ) -> Tensor:
        """Rδ of the hidden states (K, N', d), column by column; the head's rates on the way."""
        hidden = self._factors[0]
        rate = space.take("tail.hidden", count, *hidden.shape, like=hidden)
        for k in range(count):
            directions = [None if t is None else t[k] for t in tangents]
            if directions[0] is not None:
                directions[0] = directions[0].reshape(hidden.shape)
            products = self._softmax.product(
                self._factors,
                directions,
                outer=part != "functional",
                functional=part != "outer",
            )
            torch.mul(products[0], self._share, out=rate[k])
            for name, product in zip(self._head, products[1:], strict=True):
                if name is not None and name in slots.into and product is not None:
                    slots.to_add(name)[k].add_(product, alpha=self._share)
        return rate


class AutogradTail(_TwoWays):
    """Anything else between z and the loss: ``outputs`` in the graph of ``leaves`` and of z.

    ``z`` (a leaf) is the last block's output in the axes of the model; ``tokens`` and ``axes`` turn
    it into (…, N, d) and back, a linear rearrangement.
    """

    def __init__(
        self,
        outputs: Any,
        z: Tensor,
        leaves: Mapping[str, Tensor],
        *,
        tokens: Callable[[Tensor], Tensor],
        axes: Callable[[Tensor], Tensor],
        loss: Loss,
        targets: Any,
        share: float,
    ) -> None:
        tensors, rebuild = differentiable_leaves(outputs)
        self.value, slopes = loss.fixed_slopes(tensors, rebuild, targets)
        slopes = [slope * share for slope in slopes] if share != 1 else slopes
        self._share = share
        self._remainder = Remainder(tensors, {_Z: z, **leaves}, slopes)
        self._curvature = output_curvature(loss, tensors, rebuild, targets)
        self._tensors, self._tokens, self._axes = tensors, tokens, axes
        delta = self._remainder.adjoint(_Z)
        self.delta = tokens((torch.zeros_like(z) if delta is None else delta).unsqueeze(0))
        self.names = self._remainder.names - {_Z}

    def graph(self) -> list[Tensor]:
        """What holds the kept graph."""
        return self._remainder.roots()

    def push(
        self, moved: Tensor | None, dots: Mapping[str, Tensor], space: Buffers
    ) -> dict[str, Tensor]:
        """The tangents that come in: autograd pushes and pulls in one pass."""
        own = {name: dot for name, dot in dots.items() if name in self.names}
        return own if moved is None else {**own, _Z: self._axes(moved)}

    def pull(
        self, own: dict[str, Tensor], part: Part, slots: Slots, space: Buffers
    ) -> Tensor | None:
        """Rδ_z (K, N, d)."""
        rows = [_Z, *(name for name in self.names if name in slots.into)]
        outputs, rates = self._remainder.push(own, rows, bends=part != "outer")
        if part != "functional" and any(y is not None for y in outputs):
            count = next(len(y) for y in outputs if y is not None)
            tangents = [
                z.new_zeros(count, *z.shape) if y is None else y
                for y, z in zip(outputs, self._tensors, strict=True)
            ]
            weighted = [
                rate * self._share if self._share != 1 else rate
                for rate in self._curvature(tangents)
            ]
            for name, rate in self._remainder.pull(weighted, rows).items():
                rates[name] = rates[name] + rate if name in rates else rate
        rate_z = rates.pop(_Z, None)
        slots.add(rates)
        return None if rate_z is None else self._tokens(rate_z)


_Z = "last block's output"  # no parameter has a space in its name


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


Tail = ReadoutTail | ChunkedTail | AutogradTail
