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
from curvatlas.blocks.products_sublayer import Formed, FormedTangent, Sublayer, SublayerTangent
from curvatlas.blocks.products_workspace import Way, Workspace
from curvatlas.blocks.structure import WEIGHT_NAMES, BlockSpec, Weights

Part = Literal["total", "outer", "functional"]
PARTS: tuple[Part, ...] = ("total", "outer", "functional")

_ATTENTION = frozenset(WEIGHT_NAMES[:8])
_FEED_FORWARD = frozenset(WEIGHT_NAMES[8:14])


@dataclass
class BlockTangent:
    """One push through a block: the output's tangent and what ``pull`` needs of the inside."""

    output: Tensor | None  # (K, n, L, d); None is zero
    output_again: FormedTangent  # the same (K, N, d) on the way back
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
    """A block at one input; see ``linearise``.

    ``space`` is for a caller that makes many products and copies what it keeps: with a keeping
    workspace every result lives in a buffer that the next product overwrites. Neighbours that share
    one differ in ``turn`` (0 or 1).
    """

    def __init__(
        self,
        spec: BlockSpec,
        weights: Weights,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        space: Workspace | None = None,
        turn: int = 0,
        x_again: Formed | None = None,
    ) -> None:
        x = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach()
        if mask is not None and mask.ndim == 1:
            mask = mask.unsqueeze(0)
        check_block(spec, weights, x)
        self.weights = {name: weights[name].detach() for name in WEIGHT_NAMES if name in weights}
        self.spec = spec
        # Two sublayers alternate by themselves; one alone would overwrite its neighbour's result.
        self.turn = turn = turn if spec.d_ff is None else 2
        self.space = space if space is not None else Workspace(keep=False)
        self.samples, self.length, self.width = x.shape
        tokens = x.reshape(-1, self.width)
        again = x_again if x_again is not None else lambda _: tokens
        self.sublayers = _sublayers(spec, self.weights, tokens, again, self.samples, mask, turn)
        self.shape = x.shape
        self._output: Tensor | None = self.sublayers[-1].output.view_as(x)
        for sublayer in self.sublayers:
            del sublayer.output  # the next sublayer keeps what it needs of it
        self.recorded = False

    @property
    def output(self) -> Tensor:
        """Z (n, L, d)."""
        if self._output is None:
            raise ValueError("this block has given its output away.")
        return self._output

    def give_output(self) -> Tensor:
        """Z (n, L, d), and forget it: a stack needs no block's output but the last one's."""
        output, self._output = self.output, None
        return output

    @property
    def names(self) -> tuple[str, ...]:
        """The block's weights, in the order of ``WEIGHT_NAMES``."""
        return tuple(self.weights)

    def gradient(
        self, delta: Tensor, *, wanted: Collection[str] | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """∂ℓ/∂W of the wanted weights and δ_x (n, L, d) from δ_Z (n, L, d); keeps the adjoints.

        Every later product with ``total`` or ``functional`` part uses these adjoints; a block
        takes one δ in its life.
        """
        if self.recorded:
            raise ValueError("this block already keeps an adjoint: linearise again for another.")
        # Fresh memory, also under a keeping workspace: these tensors stay.
        names = frozenset(self.weights if wanted is None else wanted)
        way = Way(Workspace(keep=False), names, record=True)
        rate = self._pull(delta.reshape(1, -1, self.width).clone(), None, way, needs_input=True)
        self.recorded = True
        assert rate is not None
        found = self._complete(way, 1)
        return {name: value[0] for name, value in found.items()}, rate[0].view(self.shape)

    def push(
        self,
        tangents: Weights,
        x_dot: Tensor | None = None,
        *,
        x_dot_again: FormedTangent | None = None,
    ) -> BlockTangent:
        """J v for K directions: weights' tangents (K, *shape), input's (K, n, L, d).

        ``x_dot_again`` gives the input's tangent (K, N, d) once more on the way back, for a caller
        whose ``x_dot`` does not live that long.
        """
        dtype = next(iter(self.weights.values())).dtype
        directions = check_directions(self.weights, tangents, x_dot, self.shape, dtype)
        return self.push_checked(tangents, x_dot, directions, x_dot_again)

    def push_checked(
        self,
        tangents: Weights,
        x_dot: Tensor | None,
        directions: int,
        x_dot_again: FormedTangent | None,
    ) -> BlockTangent:
        """``push`` of tangents that are known to fit."""
        moved = None if x_dot is None else self._tokens(x_dot)
        given = moved
        again = x_dot_again if x_dot_again is not None else lambda _: given
        states = []
        for sublayer in self.sublayers:
            state = sublayer.push(moved, again, tangents, self.space)
            states.append(state)
            moved, again = state.output, state.output_again
        shaped = None if moved is None else moved.view(directions, *self.shape)
        return BlockTangent(shaped, again, states, directions)

    def pull(
        self,
        rate: Tensor | None,
        tangent: BlockTangent | None = None,
        *,
        wanted: Collection[str] | None = None,
        needs_input: bool = True,
        into: Mapping[str, Tensor] | None = None,
        accumulate: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """R{∂ℓ/∂W} (K, *shape) of the ``wanted`` weights and Rδ_x, from Rδ_Z (K, n, L, d).

        Without ``tangent``: vector-Jacobian products of ``rate``. With it: the tangent of the
        recorded adjoints' way back; ``rate=None`` is zero. Rδ_x is None when zero or not needed.
        ``into``: tensors (K, *shape) that take the rates of the weights, or have them added.
        """
        names = frozenset(self.weights) if wanted is None else frozenset(wanted)
        if unknown := names - set(self.weights):
            raise ValueError(
                f"the block has no weight {sorted(unknown)[0]!r}: it has {', '.join(self.weights)}."
            )
        if tangent is not None and not self.recorded:
            raise ValueError("no adjoint is recorded: call gradient(delta) before this product.")
        given = rate if rate is not None else tangent
        directions = 1
        way = Way(self.space, names, into or {}, accumulate=accumulate, turn=self.turn)
        moved: Tensor | None = None
        if given is not None:
            directions = given.shape[0] if isinstance(given, Tensor) else given.directions
            flat = None if rate is None else self._tokens(rate)
            moved = self._pull(flat, tangent, way, needs_input=needs_input)
        shaped = None if moved is None else moved.view(-1, *self.shape)
        return self._complete(way, directions), shaped

    def jvp(self, tangents: Weights, x_dot: Tensor | None = None) -> Tensor:
        """J v (K, n, L, d)."""
        state = self.push(tangents, x_dot)
        if state.output is None:
            return self._zeros(state.directions)
        return state.output

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
            rate = curvature(state.output)
        found, rate_x = self.pull(
            rate, None if part == "outer" else state, wanted=wanted, needs_input=needs_input
        )
        if needs_input and rate_x is None:
            rate_x = self._zeros(state.directions)
        return found, rate_x

    def _pull(
        self, rate: Tensor | None, tangent: BlockTangent | None, way: Way, *, needs_input: bool
    ) -> Tensor | None:
        for index in reversed(range(len(self.sublayers))):
            earlier = self.sublayers[:index]
            reaches = needs_input or any(way.wanted & (s.names | s.norm_names) for s in earlier)
            rate = self.sublayers[index].pull(
                rate,
                None if tangent is None else tangent.sublayers[index],
                way,
                needs_input=reaches,
            )
            if not reaches:
                return None
        return rate

    def _zeros(self, directions: int) -> Tensor:
        return self.weights["query_weight"].new_zeros(directions, *self.shape)

    def _tokens(self, samples: Tensor) -> Tensor:
        """(K, n, L, d) → (K, n·L, d), contiguous."""
        return samples.reshape(samples.shape[0], -1, self.width).contiguous()

    def _complete(self, way: Way, directions: int) -> dict[str, Tensor]:
        """The wanted rates in order; one that nothing reached is zero."""
        for name, weight in self.weights.items():
            if name in way.wanted and name not in way.found:
                target = way.into.get(name)
                if target is None:
                    target = weight.new_zeros(directions, *weight.shape)
                elif not way.accumulate:
                    target.zero_()
                way.found[name] = target
        return {name: way.found[name] for name in self.weights if name in way.wanted}


def _sublayers(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    x_again: Formed,
    samples: int,
    mask: Tensor | None,
    turn: int,
) -> list[Sublayer]:
    def make_norm(name: str) -> Callable[[Tensor], Normalization] | None:
        if spec.norm == "none" and not {f"{name}_weight", f"{name}_bias"} & set(weights):
            return None
        return partial(Normalization, name, weights, norm=spec.norm, eps=spec.eps)

    def make_attention(value: Tensor) -> Attention:
        return Attention(spec, weights, value, samples=samples, mask=mask)

    attention = Sublayer(
        x,
        x_again,
        make_attention,
        make_norm("norm1") if spec.residual else None,
        norm_name="norm1",
        names=_ATTENTION,
        norm_first=spec.norm_first,
        residual=spec.residual,
        turn=turn,
    )
    if spec.d_ff is None:
        return [attention]
    feed_forward = Sublayer(
        attention.output,
        attention.output_again,
        partial(FeedForward, spec, weights),
        make_norm("norm2"),
        norm_name="norm2",
        names=_FEED_FORWARD,
        norm_first=spec.norm_first,
        residual=spec.residual,
        turn=turn,
    )
    if feed_forward.normalizes_input:
        attention.forget_output()
    return [attention, feed_forward]
