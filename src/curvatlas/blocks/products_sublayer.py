r"""A sublayer: attention or feed-forward with its residual path and its norm.

    post-norm  y = norm(x + f(x))        pre-norm  y = x + f(norm(x))        bare  y = f(x)

A block is two of these in a row and a stack is many, so the chain rule is written once, here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from curvatlas.blocks.products_attention import Attention, AttentionTangent
from curvatlas.blocks.products_feed_forward import FeedForward, FeedForwardTangent
from curvatlas.blocks.products_linear import add
from curvatlas.blocks.products_norm import Normalization, NormTangent
from curvatlas.blocks.products_workspace import Way, Workspace, stage_number

# A value or tangent that the way back forms again in a workspace, or already has (K, N, d).
Formed = Callable[[Workspace], Tensor]
FormedTangent = Callable[[Workspace], "Tensor | None"]


def _forgotten(_: Workspace) -> Tensor:
    raise ValueError("this sublayer's output was given away.")


@dataclass
class SublayerTangent:
    """What the way back needs of the way forward, and the output's tangent."""

    output: Tensor | None  # (K, N, d)
    output_again: FormedTangent  # the same on the way back
    inner_dot: FormedTangent  # the inner map's input tangent on the way back
    inner: AttentionTangent | FeedForwardTangent
    norm: NormTangent | None


class Sublayer:
    """One sublayer at its input x (N, d).

    ``make_inner`` builds the inner map at its input; ``make_norm`` the norm (None: no norm).
    ``norm_name`` is the prefix of the norm's weights, ``names`` are the inner map's weights.
    ``x_again`` gives x once more when a product needs it.
    """

    def __init__(
        self,
        x: Tensor,
        x_again: Formed,
        make_inner: Callable[[Tensor], Attention | FeedForward],
        make_norm: Callable[[Tensor], Normalization] | None,
        *,
        norm_name: str,
        names: frozenset[str],
        norm_first: bool,
        residual: bool,
        turn: int = 0,
    ) -> None:
        self.norm_first, self.residual, self.names = norm_first, residual, names
        self.norm_names = frozenset({f"{norm_name}_weight", f"{norm_name}_bias"})
        self._shared = f"{norm_name}.pulled{turn}"  # free until the way back
        self._own = stage_number() + "out"
        self.keeps_output = True  # False: nobody asks for the output or its tangent again
        self.norm: Normalization | None = None
        fresh = Workspace(keep=False)
        inner_input, self.inner_again = x, x_again
        if norm_first and make_norm is not None:
            self.norm = make_norm(x)
            inner_input, self.inner_again = self.norm.value(fresh), self.norm.value
        self.inner = make_inner(inner_input)
        y = self.inner.value()
        if residual:
            y = y + x
        self.output: Tensor = y
        self.output_again: Formed = lambda _: y
        if not norm_first and make_norm is not None:
            self.norm = make_norm(y)
            self.output, self.output_again = self.norm.value(fresh), self.norm.value

    def forget_output(self) -> None:
        """Do not keep the output or its tangents: what follows has taken what it needs."""
        self.keeps_output = False
        self.output_again = _forgotten

    @property
    def normalizes_input(self) -> bool:
        """Whether the inner map sees the input only through the norm."""
        return self.norm is not None and self.norm_first

    def push(
        self,
        x_dot: Tensor | None,
        x_dot_again: FormedTangent,
        dots: Mapping[str, Tensor],
        space: Workspace,
    ) -> SublayerTangent:
        """The tangent of the output for K directions; ``x_dot`` (K, N, d)."""
        state: NormTangent | None = None
        inner_dot, again = x_dot, x_dot_again
        if self.norm is not None and self.norm_first:
            inner_dot, state = self.norm.push(x_dot, dots, space)
            again = partial(self.norm.tangent, state)
        normalizes_output = self.norm is not None and not self.norm_first
        key = self._own if self.keeps_output and not normalizes_output else self._shared
        x = self.inner_again(space)
        moved, inner = self.inner.push(x, inner_dot, dots, space, key=key)
        if self.residual:
            moved = add(moved, x_dot)
        if self.norm is None or self.norm_first:
            kept = moved
            return SublayerTangent(moved, lambda _: kept, again, inner, state)
        moved, state = self.norm.push(moved, dots, space)
        output_again = partial(self.norm.tangent, state)
        return SublayerTangent(moved, output_again, again, inner, state)

    def pull(
        self,
        rate: Tensor | None,
        tangent: SublayerTangent | None,
        way: Way,
        *,
        needs_input: bool,
    ) -> Tensor | None:
        """Rδ_x from Rδ_y, finding the rates of the wanted weights.

        With ``tangent`` (and adjoints recorded before) this is R of the way back: products with
        the Hessian. Without it, plain vector-Jacobian products.
        """
        state = None if tangent is None else tangent.norm
        if self.norm is not None and not self.norm_first:
            rate = self.norm.pull(rate, state, way)
            if not (needs_input or way.record or way.wanted & self.names):
                return None
        before = self.norm if self.norm_first else None
        through = needs_input or (before is not None and bool(way.wanted & self.norm_names))
        inner_rate = self.inner.pull(
            rate,
            None if tangent is None else tangent.inner,  # type: ignore[arg-type]
            way,
            x=self.inner_again(way.space),
            x_dot=None if tangent is None else tangent.inner_dot(way.space),
            needs_input=through,
        )
        if before is not None and through:
            inner_rate = before.pull(inner_rate, state, way)
        if not needs_input:
            return None
        return add(inner_rate, rate) if self.residual else inner_rate
