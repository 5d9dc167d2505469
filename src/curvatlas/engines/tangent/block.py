r"""Matrix-free derivatives of one Transformer block, written out by hand (derivations §11).

``LinearisedBlock`` evaluates a block once and keeps its activations; every product after that is a
sequence of matrix products and few elementwise passes, no autograd graph anywhere:

    block = LinearisedBlock(spec, weights, x)      # block.output (n, L, d)
    gradients, delta_x = block.gradient(delta)     # keeps the adjoints too
    moved = block.push(tangents, x_dot)            # J v
    rates, rate_x = block.pull(rate, moved)        # R{gradient}: H v for rate = Λ J v

The Hessian is linear in the seeds (Λ, δ) at the output: ``pull`` without a tangent uses Λ alone
(outer part), with ``rate=None`` the adjoints alone (functional part). Tangents are mappings of
weight names to (K, *shape) tensors, K directions at once; a weight left out has tangent zero, and
zero costs nothing: the product with one block (i, j) of the Hessian is ``push`` of W_j alone and
``pull`` of W_i alone.

A decoder's block attends to a memory (n, L', m) beside its own tokens. Its tangent (K, n, L', m)
stands among those of the weights by the name "memory", and so does its rate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from curvatlas.engines.tangent.attention import (
    AttentionStage,
    AttentionTangent,
    CrossAttentionStage,
    Rotation,
)
from curvatlas.engines.tangent.attention_core import AttentionCore
from curvatlas.engines.tangent.feed_forward import FeedForwardStage, FeedForwardTangent
from curvatlas.engines.tangent.linear import BackwardPass, Buffers, add, stage_number, stand_in
from curvatlas.engines.tangent.norm import Normalization, NormTangent
from curvatlas.layers.checks import check_block, check_memory, check_spec
from curvatlas.layers.masks import Keyless
from curvatlas.layers.structure import DISTANCE, MEMORY, WEIGHT_NAMES, BlockSpec, Norm, Weights
from curvatlas.linear_operator import Part, require_part

# ---- what a block and its directions must look like --------------------------------------------


def check_directions(
    weights: Weights,
    tangents: Weights,
    x_dot: Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
) -> int:
    """The number K of directions, after checking that all tangents agree on it."""
    counts: dict[str, int] = {}
    for name, tangent in tangents.items():
        if name not in weights:
            raise ValueError(f"a tangent for {name!r}, which the block does not have.")
        if tangent.ndim != weights[name].ndim + 1 or tangent.shape[1:] != weights[name].shape:
            raise ValueError(
                f"the tangent of {name} must be (K, {', '.join(map(str, weights[name].shape))}), "
                f"got {tuple(tangent.shape)}."
            )
        if tangent.dtype != dtype:
            raise TypeError(f"the tangent of {name} is {tangent.dtype}, the block {dtype}.")
        counts[name] = tangent.shape[0]
    if x_dot is not None:
        if x_dot.ndim != 4 or x_dot.shape[1:] != shape:
            raise ValueError(
                f"the input's tangent must be (K, {', '.join(map(str, shape))}), "
                f"got {tuple(x_dot.shape)}."
            )
        counts["x"] = x_dot.shape[0]
    if not counts:
        raise ValueError("no direction given: pass a tangent of a weight or of the input.")
    if len(set(counts.values())) > 1:
        raise ValueError(f"the tangents disagree on the number of directions: {counts}.")
    return next(iter(counts.values()))


# ---- sublayers ---------------------------------------------------------------------------------


# A value or tangent that the backward pass forms again in a workspace, or already has (K, N, d).
Formed = Callable[[Buffers], Tensor]
FormedTangent = Callable[[Buffers], "Tensor | None"]


def _forgotten(_: Buffers) -> Tensor:
    raise ValueError("this sublayer's output was given away.")


@dataclass
class BranchTangent:
    """What the backward pass needs of the forward pass through one branch."""

    inner_dot: FormedTangent  # the inner map's input tangent on the backward pass
    inner: AttentionTangent | FeedForwardTangent
    before: NormTangent | None
    after: NormTangent | None


@dataclass
class SublayerTangent:
    """What the backward pass needs of the forward pass, and the output's tangent."""

    output: Tensor | None  # (K, N, d)
    output_again: FormedTangent  # the same on the backward pass
    branches: list[BranchTangent]
    norm: NormTangent | None


@dataclass(frozen=True)
class BranchPlan:
    """How to build one branch m · after(f(before(x))); ``names`` are the weights of f."""

    make_inner: Callable[[Tensor], AttentionStage | FeedForwardStage]
    names: frozenset[str]
    make_before: Callable[[Tensor], Normalization] | None = None  # None: the branch sees x
    shares_before: bool = False  # the norm is that of the branch before this one
    make_after: Callable[[Tensor], Normalization] | None = None


@dataclass
class _Branch:
    inner: AttentionStage | FeedForwardStage
    names: frozenset[str]  # of the inner map and the norm behind it
    before: Normalization | None
    after: Normalization | None
    input_again: Formed  # the inner map's input


class Sublayer:
    """Attention, feed-forward or both side by side, with their residual path, at x (N, d).

        pre-norm   y = x + m Σ_b after_b(f_b(before_b(x)))
        post-norm  y = norm(x + f(x))                           bare  y = f(x)

    A block is one or two of these in a row and a stack is many: the chain rule is written once,
    here. ``make_norm`` builds the norm of the sum (post-norm), None: there is none. ``x_again``
    gives x once more when a product needs it. ``name`` is the prefix of its scratch.
    """

    def __init__(
        self,
        x: Tensor,
        x_again: Formed,
        plans: Sequence[BranchPlan],
        make_norm: Callable[[Tensor], Normalization] | None,
        *,
        name: str,
        residual: bool,
        scale: float = 1.0,
        turn: int = 0,
    ) -> None:
        self.residual, self.scale = residual, scale
        self._shared = f"{name}.pulled{turn}"  # free until the backward pass
        self._own = stage_number() + "out"
        self.keeps_output = True  # False: nobody asks for the output or its tangent again
        fresh = Buffers(keep=False)
        self.branches: list[_Branch] = []
        y: Tensor | None = x if residual else None
        before: Normalization | None = None
        for plan in plans:
            if not plan.shares_before:
                before = None if plan.make_before is None else plan.make_before(x)
            seen = x if before is None else before.value(fresh)
            inner = plan.make_inner(seen)
            f, after = inner.value(), None
            if plan.make_after is not None:
                after = plan.make_after(f)
                f = after.value(fresh)
            f = f if scale == 1.0 else f * scale
            y = f if y is None else y + f
            again = x_again if before is None else before.value
            names = plan.names | (frozenset() if after is None else norm_names(after.name))
            self.branches.append(_Branch(inner, names, before, after, again))
        assert y is not None
        total = y
        self.output: Tensor = total
        self.output_again: Formed = lambda _: total
        self.norm: Normalization | None = None
        if make_norm is not None:
            self.norm = make_norm(total)
            self.output, self.output_again = self.norm.value(fresh), self.norm.value

    def forget_output(self) -> None:
        """Do not keep the output or its tangents: what follows has taken what it needs."""
        self.keeps_output = False
        self.output_again = _forgotten

    @property
    def normalizes_input(self) -> bool:
        """Whether the inner maps see the input only through norms."""
        return all(branch.before is not None for branch in self.branches)

    @property
    def names(self) -> frozenset[str]:
        """The weights in here, as far as they are there."""
        norms = [self.norm, *(branch.before for branch in self.branches)]
        own = [norm_names(norm.name) for norm in norms if norm is not None]
        return frozenset().union(*own, *(branch.names for branch in self.branches))

    def push(
        self,
        x_dot: Tensor | None,
        x_dot_again: FormedTangent,
        dots: Mapping[str, Tensor],
        space: Buffers,
    ) -> SublayerTangent:
        """The tangent of the output for K directions; ``x_dot`` (K, N, d)."""
        key = self._own if self.keeps_output and self.norm is None else self._shared
        total: Tensor | None = None
        states: list[BranchTangent] = []
        before: Normalization | None = None
        seen, state, again = x_dot, None, x_dot_again
        for branch in self.branches:
            if branch.before is None:
                seen, state, again = x_dot, None, x_dot_again
            elif branch.before is not before:
                seen, state = branch.before.push(x_dot, dots, space)
                again = partial(branch.before.tangent, state)
            before = branch.before
            place = key if total is None else "sublayer.branch"
            moved, inner, after = self._push_branch(branch, seen, dots, space, place)
            states.append(BranchTangent(again, inner, state, after))
            total = add(total, moved)
        if self.residual:
            total = add(total, x_dot)
        if self.norm is None:
            kept = total
            return SublayerTangent(total, lambda _: kept, states, None)
        total, outer = self.norm.push(total, dots, space)
        return SublayerTangent(total, partial(self.norm.tangent, outer), states, outer)

    def _push_branch(
        self,
        branch: _Branch,
        seen: Tensor | None,
        dots: Mapping[str, Tensor],
        space: Buffers,
        key: str,
    ) -> tuple[Tensor | None, AttentionTangent | FeedForwardTangent, NormTangent | None]:
        """The tangent of m after(f(·)), in the buffer of ``key``."""
        x = branch.input_again(space)
        place = key if branch.after is None else "sublayer.inner"
        moved, inner = branch.inner.push(x, seen, dots, space, key=place)
        after: NormTangent | None = None
        if branch.after is not None:
            y_dot, after = branch.after.push(moved, dots, space)
            # a copy: the norm may give the tangent that it keeps for the backward pass
            moved = None if y_dot is None else space.take(key, *y_dot.shape, like=x).copy_(y_dot)
        if moved is not None and self.scale != 1.0:
            moved *= self.scale
        return moved, inner, after

    def pull(
        self,
        rate: Tensor | None,
        tangent: SublayerTangent | None,
        backward: BackwardPass,
        *,
        needs_input: bool,
    ) -> Tensor | None:
        """Rδ_x from Rδ_y, finding the rates of the wanted weights.

        With ``tangent`` (and adjoints recorded before) this is R of the backward pass: products
        with the Hessian. Without it, plain vector-Jacobian products.
        """
        if self.norm is not None:
            rate = self.norm.pull(rate, None if tangent is None else tangent.norm, backward)
        total: Tensor | None = None
        through: Tensor | None = None  # Rδ of what the current norm gives its branches
        for index, branch in enumerate(self.branches):
            before = branch.before
            reaches = needs_input or (
                before is not None and not backward.wanted.isdisjoint(norm_names(before.name))
            )
            state = None if tangent is None else tangent.branches[index]
            if reaches or backward.record or not backward.wanted.isdisjoint(branch.names):
                through = add(
                    through, self._pull_branch(branch, rate, state, backward, reaches=reaches)
                )
            following = self.branches[index + 1 : index + 2]
            if before is not None and following and following[0].before is before:
                continue
            if before is not None and reaches:
                norm_state = None if state is None else state.before
                through = before.pull(through, norm_state, backward)
            total, through = add(total, through), None
        if not needs_input:
            return None
        return add(total, rate) if self.residual else total

    def _pull_branch(
        self,
        branch: _Branch,
        rate: Tensor | None,
        state: BranchTangent | None,
        backward: BackwardPass,
        *,
        reaches: bool,
    ) -> Tensor | None:
        """Rδ of what f sees, from Rδ of the sublayer's output."""
        space = backward.space
        if rate is not None and self.scale != 1.0:
            rate = torch.mul(
                rate, self.scale, out=space.take("sublayer.inner", *rate.shape, like=rate)
            )
        if branch.after is not None:
            rate = branch.after.pull(rate, None if state is None else state.after, backward)
        return branch.inner.pull(
            rate,
            None if state is None else state.inner,  # type: ignore[arg-type]
            backward,
            x=branch.input_again(space),
            x_dot=None if state is None else state.inner_dot(space),
            needs_input=reaches,
        )


def norm_names(name: str) -> frozenset[str]:
    """The weights of a norm."""
    return frozenset((f"{name}_weight", f"{name}_bias"))


_ATTENTION = frozenset({DISTANCE, *WEIGHT_NAMES[:8]}).union(
    norm_names("query_norm"), norm_names("key_norm")
)
_FEED_FORWARD = frozenset(WEIGHT_NAMES[8:14])
_CROSS_ATTENTION = frozenset(
    {MEMORY, *(name for name in WEIGHT_NAMES if name.startswith("cross_"))}
) - norm_names("cross_norm")
_BEFORE = ("norm1_weight", "norm2_weight")


@dataclass
class BlockTangent:
    """One push through a block: the output's tangent and what ``pull`` needs of the inside."""

    output: Tensor | None  # (K, n, L, d); None is zero
    output_again: FormedTangent  # the same (K, N, d) on the backward pass
    sublayers: list[SublayerTangent]
    directions: int


class LinearisedBlock:
    """A block at inputs x (n, L, d) or (L, d), with what its derivatives need.

    ``mask`` is boolean with True where attention is allowed, (n, L) for padding keys or (n, L, L),
    or floating and added to the logits; ``spec.causal`` comes on top. ``rotation`` are rotary
    positions as a model's own tables have them, instead of ``spec.rope_base``. A query without keys
    is refused, or mixes nothing with ``keyless="zero"``.

    ``blocked``: attention by blocks of queries, whose memory is linear in L.

    ``memory`` (n, L', m) is what a block with ``spec.memory_size`` attends to, ``memory_mask`` its
    mask: (n, L') for padding keys, or of four axes that broadcast to (n, H, L, L'). ``buckets``
    (L, L): the row of the table of learned terms of every pair, with ``spec.distances``.

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
        rotation: Rotation | None = None,
        keyless: Keyless = "refuse",
        blocked: bool = False,
        space: Buffers | None = None,
        turn: int = 0,
        x_again: Formed | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        buckets: Tensor | None = None,
    ) -> None:
        x = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach()
        if mask is not None and mask.ndim == 1:
            mask = mask.unsqueeze(0)
        self._check(spec, weights, x)
        check_memory(spec, x, memory)
        if (spec.distances is None) != (buckets is None):
            raise ValueError("spec.distances and buckets belong together: give both or neither.")
        self._memory = None if memory is None else memory.detach()
        self._memory_mask = memory_mask
        self._buckets = buckets
        self.weights = {name: weights[name].detach() for name in WEIGHT_NAMES if name in weights}
        self.spec, self._rotation, self._keyless = spec, rotation, keyless
        self._blocked = blocked
        # Two sublayers alternate by themselves; one alone would overwrite its neighbour's result.
        self.turn = turn = turn if spec.d_ff is None or spec.parallel else 2
        self.space = space if space is not None else Buffers(keep=False)
        self.samples, self.length, self.width = x.shape
        tokens = x.reshape(-1, self.width)
        again = x_again if x_again is not None else lambda _: tokens
        self.sublayers = self._sublayers(tokens, again, mask)
        self.shape = x.shape
        self._output: Tensor | None = self.sublayers[-1].output.view_as(x)
        for sublayer in self.sublayers:
            del sublayer.output  # the next sublayer keeps what it needs of it
        self.recorded = False

    def attach(self, weights: Weights) -> None:
        """Multiply with these weights, those it was made with, until ``detach``."""
        for stage in self._stages():
            stage.attach(weights)

    def detach(self) -> None:
        """Let go of the matrices; vectors (biases, gains) stay. Products need them ``attach``ed.

        For weights that are copies: cast from another dtype, or gathered from several processes.
        """
        for stage in self._stages():
            stage.detach()
        self.weights = {n: stand_in(w) if w.ndim > 1 else w for n, w in self.weights.items()}

    def _stages(self) -> list[AttentionStage | FeedForwardStage]:
        return [branch.inner for sublayer in self.sublayers for branch in sublayer.branches]

    def reads_forgotten(self) -> list[Tensor]:
        """Truth values, by attention: whether the adjoint reads rows that see no key."""
        cores = [stage.core for stage in self._stages() if isinstance(stage, AttentionStage)]
        found = [core.reads_forgotten for core in cores if isinstance(core, AttentionCore)]
        return [read for read in found if read is not None]

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
        backward = BackwardPass(Buffers(keep=False), names, record=True)
        rate = self._pull(
            delta.reshape(1, -1, self.width).clone(), None, backward, needs_input=True
        )
        self.recorded = True
        assert rate is not None
        rates = self._complete(backward, 1)
        return {name: value[0] for name, value in rates.items()}, rate[0].view(self.shape)

    def push(self, tangents: Weights, x_dot: Tensor | None = None) -> BlockTangent:
        """J v for K directions: weights' tangents (K, *shape), input's (K, n, L, d)."""
        dtype = next(iter(self.weights.values())).dtype
        directions = check_directions(self._moving(), tangents, x_dot, self.shape, dtype)
        return self.push_checked(tangents, x_dot, directions, None)

    def push_checked(
        self,
        tangents: Weights,
        x_dot: Tensor | None,
        directions: int,
        x_dot_again: FormedTangent | None,
    ) -> BlockTangent:
        """``push`` of tangents that fit. ``x_dot_again`` gives the input's tangent (K, N, d) once
        more on the backward pass, for a caller whose ``x_dot`` does not live that long."""
        moved = None if x_dot is None else self._tokens(x_dot)
        tokens = moved
        again = x_dot_again if x_dot_again is not None else lambda _: tokens
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
        recorded adjoints' backward pass; ``rate=None`` is zero. Rδ_x is None when zero or not
        needed.
        ``into``: tensors (K, *shape) that take the rates of the weights, or have them added; to the
        memory's it is always added.
        """
        names = frozenset(self.weights) if wanted is None else frozenset(wanted)
        if unknown := names - self._moving().keys():
            raise ValueError(
                f"the block has no weight {sorted(unknown)[0]!r}: it has {', '.join(self.weights)}."
            )
        if tangent is not None and not self.recorded:
            raise ValueError("no adjoint is recorded: call gradient(delta) before this product.")
        moving = rate if rate is not None else tangent
        directions = 1
        backward = BackwardPass(
            self.space, names, into or {}, accumulate=accumulate, turn=self.turn
        )
        moved: Tensor | None = None
        if moving is not None:
            directions = moving.shape[0] if isinstance(moving, Tensor) else moving.directions
            flat = None if rate is None else self._tokens(rate)
            moved = self._pull(flat, tangent, backward, needs_input=needs_input)
        shaped = None if moved is None else moved.view(-1, *self.shape)
        return self._complete(backward, directions), shaped

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
        rates, rate_x = self.pull(delta, wanted=wanted)
        assert rate_x is not None
        return rates, rate_x

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
        require_part(part)
        state = self.push(tangents, x_dot)
        rate = None
        if part != "functional" and state.output is not None:
            rate = curvature(state.output)
        rates, rate_x = self.pull(
            rate, None if part == "outer" else state, wanted=wanted, needs_input=needs_input
        )
        if needs_input and rate_x is None:
            rate_x = self._zeros(state.directions)
        return rates, rate_x

    def _pull(
        self,
        rate: Tensor | None,
        tangent: BlockTangent | None,
        backward: BackwardPass,
        *,
        needs_input: bool,
    ) -> Tensor | None:
        for index in reversed(range(len(self.sublayers))):
            earlier = self.sublayers[:index]
            reaches = needs_input or any(not backward.wanted.isdisjoint(s.names) for s in earlier)
            rate = self.sublayers[index].pull(
                rate,
                None if tangent is None else tangent.sublayers[index],
                backward,
                needs_input=reaches,
            )
            if not reaches:
                return None
        return rate

    def _moving(self) -> Weights:
        """What tangents go by name for: the weights, and the memory of cross attention."""
        return self.weights if self._memory is None else {**self.weights, MEMORY: self._memory}

    def _zeros(self, directions: int) -> Tensor:
        return next(iter(self.weights.values())).new_zeros(directions, *self.shape)

    def _tokens(self, samples: Tensor) -> Tensor:
        """(K, n, L, d) → (K, n·L, d), contiguous."""
        return samples.reshape(samples.shape[0], -1, self.width).contiguous()

    def _complete(self, backward: BackwardPass, directions: int) -> dict[str, Tensor]:
        """The wanted rates in order; one that nothing reached is zero."""
        moving = self._moving()
        for name, weight in moving.items():
            if name in backward.wanted and name not in backward.rates:
                target = backward.into.get(name)
                if target is None:
                    target = weight.new_zeros(directions, *weight.shape)
                elif not backward.accumulate and name != MEMORY:
                    target.zero_()
                backward.rates[name] = target
        return {name: backward.rates[name] for name in moving if name in backward.wanted}

    @staticmethod
    def _check(spec: BlockSpec, weights: Weights, x: Tensor) -> None:
        check_block(spec, weights, x)

    def _sublayers(self, x: Tensor, x_again: Formed, mask: Tensor | None) -> list[Sublayer]:
        spec, weights = self.spec, self._with_gains()

        def make_attention(tokens: Tensor) -> AttentionStage:
            return AttentionStage(
                spec,
                weights,
                tokens,
                samples=self.samples,
                mask=mask,
                rotation=self._rotation,
                keyless=self._keyless,
                blocked=self._blocked,
                buckets=self._buckets,
            )

        def make_cross_attention(tokens: Tensor) -> AttentionStage:
            assert self._memory is not None
            return CrossAttentionStage(
                spec,
                weights,
                tokens,
                memory=self._memory,
                mask=self._memory_mask,
                keyless=self._keyless,
                blocked=self._blocked,
            )

        def make_norm(
            name: str, norm: Norm | None, eps: float | None
        ) -> Callable[[Tensor], Normalization] | None:
            kind = spec.norm if norm is None else norm
            if kind == "none" and norm_names(name).isdisjoint(weights):
                return None
            scale = spec.eps if eps is None else eps
            return partial(Normalization, name, weights, norm=kind, eps=scale)

        norm1 = make_norm("norm1", None, None) if spec.residual else None
        norm2 = make_norm("norm2", spec.norm2, spec.eps2)
        after = [
            None if spec.output_norm is None else make_norm(name, spec.output_norm, spec.output_eps)
            for name in ("output_norm", "down_norm")
        ]
        first = spec.norm_first
        attention = BranchPlan(
            make_attention, _ATTENTION, norm1 if first else None, make_after=after[0]
        )
        feed_forward = BranchPlan(
            partial(FeedForwardStage, spec, weights),
            _FEED_FORWARD,
            norm2 if first else None,
            shares_before=spec.one_norm,
            make_after=after[1],
        )
        make = partial(Sublayer, residual=spec.residual, scale=spec.residual_scale, turn=self.turn)
        if spec.d_ff is None or spec.parallel:
            plans = [attention] if spec.d_ff is None else [attention, feed_forward]
            return [make(x, x_again, plans, None if first else norm1, name="norm1")]
        one = make(x, x_again, [attention], None if first else norm1, name="norm1")
        sublayers, following = [one], [(feed_forward, norm2, "norm2")]
        if spec.memory_size is not None:
            norm = make_norm("cross_norm", None, None)
            cross = BranchPlan(make_cross_attention, _CROSS_ATTENTION, norm if first else None)
            following.insert(0, (cross, norm, "cross_norm"))
        for plan, norm, name in following:
            before = sublayers[-1]
            x, x_again = before.output, before.output_again
            last = make(x, x_again, [plan], None if first else norm, name=name)
            if last.normalizes_input:
                before.forget_output()
            sublayers.append(last)
        return sublayers

    def _with_gains(self) -> dict[str, Tensor]:
        """The weights with every norm's gain as it multiplies."""
        offset = self.spec.gain_offset
        if offset == 0.0:
            return self.weights
        gains = [name for name in self.weights if name.endswith(("norm_weight", *_BEFORE))]
        return self.weights | {name: self.weights[name] + offset for name in gains}


class LinearisedFeedForward(LinearisedBlock):
    """The feed-forward part alone, Z = FFN(x): no attention, norm or residual path."""

    @staticmethod
    def _check(spec: BlockSpec, weights: Weights, x: Tensor) -> None:
        check_spec(spec)

    def _sublayers(self, x: Tensor, x_again: Formed, mask: Tensor | None) -> list[Sublayer]:
        plan = BranchPlan(partial(FeedForwardStage, self.spec, self.weights), _FEED_FORWARD)
        return [Sublayer(x, x_again, [plan], None, name="norm2", residual=False, turn=self.turn)]
