r"""Matrix-free derivatives of one Transformer block, written out by hand (THEORY 9).

``linearise`` evaluates a block once and keeps its activations; every product after that is a
sequence of matrix products and few elementwise passes, no autograd graph anywhere:

    block = linearise(spec, weights, x)            # block.output (n, L, d)
    gradients, delta_x = block.gradient(delta)     # keeps the adjoints too
    moved = block.push(tangents, x_dot)            # J v
    rates, rate_x = block.pull(rate, moved)        # R{gradient}: H v for rate = Λ J v

The Hessian is linear in the seeds (Λ, δ) at the output: ``pull`` without a tangent uses Λ alone
(outer part), with ``rate=None`` the adjoints alone (functional part). Tangents are mappings of
weight names to (K, *shape) tensors, K directions at once; a weight left out has tangent zero, and
zero costs nothing: the product with one block (i, j) of the Hessian is ``push`` of W_j alone and
``pull`` of W_i alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from curvatlas.blocks.products_attention import Attention
from curvatlas.blocks.products_check import check_block, check_directions
from curvatlas.blocks.products_feed_forward import FeedForward
from curvatlas.blocks.products_norm import Normalization
from curvatlas.blocks.products_sublayer import Sublayer, SublayerTangent
from curvatlas.blocks.structure import WEIGHT_NAMES, BlockSpec, Weights

Part = Literal["total", "outer", "functional"]
PARTS: tuple[Part, ...] = ("total", "outer", "functional")

_ATTENTION = frozenset(name for name in WEIGHT_NAMES[:8])
_FEED_FORWARD = frozenset(name for name in WEIGHT_NAMES[8:14])


@dataclass
class BlockTangent:
    """One push through a block: the output's tangent and what ``pull`` needs of the inside."""

    output: Tensor | None  # (K, N, d); None is zero
    sublayers: list[SublayerTangent]
    directions: int


def linearise(
    spec: BlockSpec, weights: Weights, x: Tensor, mask: Tensor | None = None
) -> LinearisedBlock:
    """Evaluate the block at x (n, L, d) or (L, d) and keep what its derivatives need.

    ``mask`` is boolean with True where attention is allowed, (n, L) for padding keys or (n, L, L),
    or floating and added to the logits; ``spec.causal`` comes on top.
    """
    return LinearisedBlock(spec, weights, x, mask)


class LinearisedBlock:
    """A block at one input; see ``linearise``."""

    def __init__(
        self, spec: BlockSpec, weights: Weights, x: Tensor, mask: Tensor | None = None
    ) -> None:
        x = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach()
        if mask is not None and mask.ndim == 1:
            mask = mask.unsqueeze(0)
        self.weights = {name: weights[name].detach() for name in WEIGHT_NAMES if name in weights}
        check_block(spec, weights, x)
        self.spec = spec
        self.samples, self.length, self.width = x.shape
        tokens = x.reshape(-1, self.width)
        self.sublayers = _sublayers(spec, self.weights, tokens, self.samples, mask)
        self.output = self.sublayers[-1].output.view_as(x)  # (n, L, d)
        self.delta: Tensor | None = None  # the output's adjoint, once recorded

    @property
    def names(self) -> tuple[str, ...]:
        """The block's weights, in the order of ``WEIGHT_NAMES``."""
        return tuple(self.weights)

    def gradient(self, delta: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """∂ℓ/∂W of every weight and δ_x (n, L, d) from δ_Z (n, L, d); keeps the adjoints.

        Every later product with ``total`` or ``functional`` part uses these adjoints.
        """
        self.delta = delta.reshape(-1, self.width)
        found, rate = self._pull(
            self.delta.unsqueeze(0), None, frozenset(self.weights), True, record=True
        )
        assert rate is not None
        return {k: v[0] for k, v in found.items()}, rate[0].view_as(self.output)

    def push(self, tangents: Weights, x_dot: Tensor | None = None) -> BlockTangent:
        """J v for K directions: weights' tangents (K, *shape), input's (K, n, L, d)."""
        directions = check_directions(self.weights, tangents, x_dot, self.output)
        moved = None if x_dot is None else x_dot.reshape(directions, -1, self.width)
        states = []
        for sublayer in self.sublayers:
            state = sublayer.push(moved, tangents)
            states.append(state)
            moved = state.output
        return BlockTangent(moved, states, directions)

    def pull(
        self,
        rate: Tensor | None,
        tangent: BlockTangent | None = None,
        *,
        wanted: Collection[str] | None = None,
        needs_input: bool = True,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """R{∂ℓ/∂W} (K, *shape) of the ``wanted`` weights and Rδ_x, from Rδ_Z (K, n, L, d).

        Without ``tangent``: vector-Jacobian products of ``rate``. With it: the tangent of the
        recorded adjoints' way back; ``rate=None`` is zero. Rδ_x is None when zero or not needed.
        """
        names = frozenset(self.weights) if wanted is None else frozenset(wanted)
        if unknown := names - set(self.weights):
            raise ValueError(
                f"the block has no weight {sorted(unknown)[0]!r}: it has {', '.join(self.weights)}."
            )
        if tangent is not None and self.delta is None:
            raise ValueError("no adjoint is recorded: call gradient(delta) before this product.")
        flat = None if rate is None else rate.reshape(rate.shape[0], -1, self.width)
        found, moved = self._pull(flat, tangent, names, needs_input)
        return found, None if moved is None else moved.view(-1, *self.output.shape)

    def jvp(self, tangents: Weights, x_dot: Tensor | None = None) -> Tensor:
        """J v (K, n, L, d)."""
        state = self.push(tangents, x_dot)
        if state.output is None:
            return self.output.new_zeros(state.directions, *self.output.shape)
        return state.output.view(-1, *self.output.shape)

    def vjp(
        self, delta: Tensor, *, wanted: Collection[str] | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Jᵀu of the weights and of the input, for u (K, n, L, d)."""
        found, rate_x = self.pull(delta, wanted=wanted)
        assert rate_x is not None
        return found, rate_x

    def hvp(
        self,
        tangents: Weights,
        x_dot: Tensor | None = None,
        *,
        curvature: Callable[[Tensor], Tensor],
        part: Part = "total",
        wanted: Collection[str] | None = None,
        needs_input: bool = True,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """H v, H_o v or H_f v of a loss whose δ went to ``gradient`` and whose Λ is ``curvature``.

        ``curvature`` maps (K, n, L, d) to the same shape. Returns weights' rows (K, *shape) and
        the input's (K, n, L, d).
        """
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}.")
        state = self.push(tangents, x_dot)
        rate = None
        if part != "functional" and state.output is not None:
            rate = curvature(state.output.view(-1, *self.output.shape))
        found, rate_x = self.pull(
            rate,
            None if part == "outer" else state,
            wanted=wanted,
            needs_input=needs_input,
        )
        if needs_input and rate_x is None:
            rate_x = self.output.new_zeros(state.directions, *self.output.shape)
        return found, rate_x

    def _pull(
        self,
        rate: Tensor | None,
        tangent: BlockTangent | None,
        wanted: frozenset[str],
        needs_input: bool,
        *,
        record: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for index in reversed(range(len(self.sublayers))):
            earlier = self.sublayers[:index]
            reaches = needs_input or any(wanted & s.all_names for s in earlier)
            rate = self.sublayers[index].pull(
                rate,
                None if tangent is None else tangent.sublayers[index],
                wanted=wanted,
                needs_input=reaches,
                found=found,
                record=record,
            )
            if not reaches:
                break
        directions = 1 if tangent is None else tangent.directions
        if rate is not None:
            directions = rate.shape[0]
        return self._complete(found, wanted, directions), rate if needs_input else None

    def _complete(
        self, found: Mapping[str, Tensor | None], wanted: frozenset[str], directions: int
    ) -> dict[str, Tensor]:
        """The wanted rates in order; one that nothing reaches is zero."""
        complete = {}
        for name, weight in self.weights.items():
            if name in wanted:
                value = found.get(name)
                zero = value is None
                complete[name] = weight.new_zeros(directions, *weight.shape) if zero else value
        return complete  # type: ignore[return-value]


def _sublayers(
    spec: BlockSpec, weights: Weights, x: Tensor, samples: int, mask: Tensor | None
) -> list[Sublayer]:
    def make_norm(prefix: str) -> Callable[[Tensor], Normalization] | None:
        gamma, beta = weights.get(f"{prefix}_weight"), weights.get(f"{prefix}_bias")
        if spec.norm == "none" and gamma is None and beta is None:
            return None
        return lambda value: Normalization(value, gamma, beta, norm=spec.norm, eps=spec.eps)

    attention = Sublayer(
        x,
        partial(_attention, spec, weights, samples, mask),
        make_norm("norm1") if spec.residual else None,
        norm_name="norm1",
        names=_ATTENTION,
        norm_first=spec.norm_first,
        residual=spec.residual,
    )
    if spec.d_ff is None:
        return [attention]
    feed_forward = Sublayer(
        attention.output,
        partial(FeedForward, spec, weights),
        make_norm("norm2"),
        norm_name="norm2",
        names=_FEED_FORWARD,
        norm_first=spec.norm_first,
        residual=spec.residual,
    )
    return [attention, feed_forward]


def _attention(
    spec: BlockSpec, weights: Weights, samples: int, mask: Tensor | None, x: Tensor
) -> Attention:
    return Attention(spec, weights, x, samples=samples, mask=mask)
