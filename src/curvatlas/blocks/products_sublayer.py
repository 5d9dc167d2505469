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
    ) -> None:
        self.norm_first, self.residual, self.names = norm_first, residual, names
        self.gamma, self.beta = f"{norm_name}_weight", f"{norm_name}_bias"
        self.all_names = names | {self.gamma, self.beta}
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

    def push(self, x_dot: Tensor | None, dots: Mapping[str, Tensor]) -> SublayerTangent:
        """The tangent of the output for K directions; ``x_dot`` (K, N, d)."""
        norm_tangent: NormTangent | None = None
        inner_dot = x_dot
        if self.norm is not None and self.norm_first:
            inner_dot, norm_tangent = self.norm.push(
                x_dot, dots.get(self.gamma), dots.get(self.beta)
            )
        moved, inner = self.inner.push(inner_dot, dots)
        if self.residual:
            moved = add(moved, x_dot)
        if self.norm is not None and not self.norm_first:
            moved, norm_tangent = self.norm.push(moved, dots.get(self.gamma), dots.get(self.beta))
        return SublayerTangent(moved, inner, norm_tangent)

    def pull(
        self,
        rate: Tensor | None,
        tangent: SublayerTangent | None,
        *,
        wanted: frozenset[str],
        needs_input: bool,
        found: dict[str, Tensor | None],
        record: bool = False,
    ) -> Tensor | None:
        """Rδ_x from Rδ_y, putting the rates of the wanted weights into ``found``.

        With ``tangent`` (and adjoints recorded before) this is R of the way back: products with
        the Hessian. Without it, plain vector-Jacobian products. ``record`` keeps the adjoints.
        """
        after = self.norm is not None and not self.norm_first
        before = self.norm is not None and self.norm_first
        inner_wanted = bool(wanted & self.names)
        if after:
            reaches = inner_wanted or needs_input
            rate = self._pull_norm(rate, tangent, wanted, reaches, found, record)
            if not reaches:
                return None
        norm_wanted = before and not wanted.isdisjoint({self.gamma, self.beta})
        inner_rate: Tensor | None = None
        if inner_wanted or needs_input or norm_wanted:
            inner_tangent = None if tangent is None else tangent.inner
            inner_rate = self.inner.pull(
                rate,
                inner_tangent,  # type: ignore[arg-type]
                wanted=wanted,
                needs_input=needs_input or norm_wanted,
                found=found,
                record=record,
            )
        if before and (norm_wanted or needs_input):
            inner_rate = self._pull_norm(inner_rate, tangent, wanted, needs_input, found, record)
        if not needs_input:
            return None
        return add(inner_rate, rate) if self.residual else inner_rate

    def _pull_norm(
        self,
        rate: Tensor | None,
        tangent: SublayerTangent | None,
        wanted: frozenset[str],
        needs_input: bool,
        found: dict[str, Tensor | None],
        record: bool,
    ) -> Tensor | None:
        norm, state = self.norm, None if tangent is None else tangent.norm
        assert norm is not None
        if self.gamma in wanted:
            found[self.gamma] = norm.weight_rate(rate, state)
        if self.beta in wanted:
            found[self.beta] = None if rate is None else rate.sum(1)
        if not (needs_input or record):
            return None
        pulled = norm.pull(rate, state)
        if record:
            assert rate is not None
            assert pulled is not None
            norm.record(rate[0], pulled[0])
        return pulled
