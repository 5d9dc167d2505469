r"""A part of a model that is left to autograd: y = f(θ), with kept graphs of y and of Jᵀu at u = δ.

Between the hand-written blocks and the ends of a model stand parts of many shapes: a pooler, a
masked-language head, a convolutional patch embedding. They are small beside the blocks, and their
products compose with the hand-written ones exactly: g(θ, u) = J(θ)ᵀu is differentiated by u for
J v and by θ for the part that bends, Σ_y δ_y ∂²y v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvatlas.engines.graphs import pull


class Remainder:
    """Outputs y of ``inputs`` (leaves by name), linearised at the slopes δ = ∂ℓ/∂y.

    Slopes that themselves depend on the inputs (a head in chunks) stay in the graph.
    """

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Mapping[str, Tensor], slopes: Sequence[Tensor]
    ) -> None:
        self._outputs = list(outputs)
        self._u = [s if s.requires_grad else s.detach().requires_grad_(True) for s in slopes]
        reached = [y for y in self._outputs if y.requires_grad]
        pairs = zip(self._u, self._outputs, strict=True)
        along = [u for u, y in pairs if y.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(inputs)
        if reached and inputs:
            grads = torch.autograd.grad(
                reached, list(inputs.values()), along, create_graph=True, allow_unused=True
            )
        named = zip(inputs, grads, strict=True)
        self._adjoints = {name: grad for name, grad in named if grad is not None}
        self._inputs = {name: inputs[name] for name in self._adjoints}

    @property
    def names(self) -> frozenset[str]:
        """The inputs that reach an output."""
        return frozenset(self._inputs)

    def adjoint(self, name: str) -> Tensor | None:
        """∂ℓ/∂(an input), None: zero."""
        grad = self._adjoints.get(name)
        return None if grad is None else grad.detach()

    def roots(self) -> list[Tensor]:
        """What holds the graphs, for counting their memory."""
        return [*self._outputs, *self._adjoints.values()]

    def push(
        self, dots: Mapping[str, Tensor], rows: Sequence[str], *, bends: bool
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """J v at the outputs (K, *y), and where it ``bends`` Σ_y δ_y ∂²y v at ``rows``."""
        used = [name for name in dots if name in self._adjoints]
        if not used:
            return [None] * len(self._u), {}
        wanted = [name for name in rows if name in self._inputs] if bends else []
        both = pull(
            [self._adjoints[name] for name in used],
            [*self._u, *(self._inputs[name] for name in wanted)],
            [dots[name] for name in used],
        )
        bent = zip(wanted, both[len(self._u) :], strict=True)
        return both[: len(self._u)], {name: rate for name, rate in bent if rate is not None}

    def pull(self, rates: Sequence[Tensor | None], rows: Sequence[str]) -> dict[str, Tensor]:
        """Jᵀ of rates (K, *y) at ``rows``; None is zero."""
        wanted = [name for name in rows if name in self._inputs]
        some = [(y, rate) for y, rate in zip(self._outputs, rates, strict=True) if rate is not None]
        if not (wanted and some):
            return {}
        outputs, seeds = zip(*some, strict=True)
        pulled = pull(list(outputs), [self._inputs[name] for name in wanted], list(seeds))
        named = zip(wanted, pulled, strict=True)
        return {name: rate for name, rate in named if rate is not None}
