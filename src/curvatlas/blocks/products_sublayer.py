r"""A sublayer: attention or feed-forward with its residual path and its norm.

    post-norm  y = norm(x + f(x))        pre-norm  y = x + f(norm(x))        bare  y = f(x)

A block is two of these in a row and a stack is many, so the chain rule is written once, here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from curvatlas.blocks.products_attention import Attention, AttentionTangent
from curvatlas.blocks.products_feed_forward import FeedForward, FeedForwardTangent
from curvatlas.blocks.products_linear import add
from curvatlas.blocks.products_norm import Normalization, NormTangent
from curvatlas.blocks.products_workspace import Way, Workspace, stage_number


@dataclass
class SublayerTangent:
    """What the way back needs of the way forward, and the output's tangent."""

    output: Tensor | None  # (K, N, d)
    inner: AttentionTangent | FeedForwardTangent
    norm: NormTangent | None


class Sublayer:
    """One sublayer at its input x (N, d).

    ``make_inner`` builds the inner map at its input; ``make_norm`` the norm (None: no norm).
    ``norm_name`` is the prefix of the norm's weights, ``names`` are the inner map's weights.
    """

    def __init__(
        self,
        x: Tensor,
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
        self._out = f"{norm_name}.pulled{turn}"  # free until the way back
        self._number = stage_number()
        self.norm: Normalization | None = None
        inner_input = x
        if norm_first and make_norm is not None:
            self.norm = make_norm(x)
            inner_input = self.norm.value()
        self.inner = make_inner(inner_input)
        y = self.inner.value()
        if residual:
            y = y + x
        if not norm_first and make_norm is not None:
            self.norm = make_norm(y)
            y = self.norm.value()
        self.output: Tensor = y

    def push(
        self, x_dot: Tensor | None, dots: Mapping[str, Tensor], space: Workspace
    ) -> SublayerTangent:
        """The tangent of the output for K directions; ``x_dot`` (K, N, d)."""
        norm_tangent: NormTangent | None = None
        inner_dot = x_dot
        if self.norm is not None and self.norm_first:
            inner_dot, norm_tangent = self.norm.push(x_dot, dots, space)
        # Before or after a norm nobody needs the sum on the way back; without one the next layer
        # multiplies by it then.
        key = self._out if self.norm is not None else self._number + "out"
        moved, inner = self.inner.push(inner_dot, dots, space, key=key)
        if self.residual:
            moved = add(moved, x_dot)
        if self.norm is not None and not self.norm_first:
            moved, norm_tangent = self.norm.push(moved, dots, space)
        return SublayerTangent(moved, inner, norm_tangent)

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
        after = self.norm is not None and not self.norm_first
        if self.norm is not None and after:
            rate = self.norm.pull(rate, state, way)
            if not (needs_input or way.wanted & self.names):
                return None
        before = self.norm is not None and self.norm_first
        through = needs_input or (before and bool(way.wanted & self.norm_names))
        inner_rate = self.inner.pull(
            rate,
            None if tangent is None else tangent.inner,  # type: ignore[arg-type]
            way,
            needs_input=through,
        )
        if self.norm is not None and before and through:
            inner_rate = self.norm.pull(inner_rate, state, way)
        if not needs_input:
            return None
        if way.record and before and inner_rate is not None:
            inner_rate = inner_rate.clone()  # the norm keeps the other one as its δ_x
        return add(inner_rate, rate) if self.residual else inner_rate
