r"""Rescalings of a Transformer's weights that leave its function as it is.

    query_key     Q_h → Sᵀ Q_h,  K_h → S⁻¹ K_h in every head: logits are QKᵀ
    value_output  V_h → S V_h,   O_h → O_h S⁻¹: heads are read through the output projection
    norm_gain     γ, β → D γ, D β and W → W D⁻¹ in every linear layer that reads the norm
    feed_forward  up → D up, down → down D⁻¹: for ReLU (D > 0) and for gated units

S is a multiple of the identity ("uniform"), diagonal ("channels") or any invertible matrix
("matrix"); D is uniform or diagonal. A quantity that these change says nothing about the function
alone (Dinh et al. 2017). What a model allows is not read off its family: a rescaling is applied
and counts only if the outputs stay (rotary positions mix channels, a post-norm's output is read by
the residual stream, normalised heads forget their scale).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvatlas.analysis.landscape.ascent import moved_to
from curvatlas.anatomy import Slice
from curvatlas.errors import ProblemError
from curvatlas.problem import Problem
from curvatlas.spectra.checkpoint import generator

Rescaling = Literal["query_key", "value_output", "norm_gain", "feed_forward"]
Mode = Literal["uniform", "channels", "matrix"]
RESCALINGS: tuple[Rescaling, ...] = get_args(Rescaling)
MODES: tuple[Mode, ...] = get_args(Mode)

_SAME = {torch.float64: 1e-9, torch.float32: 1e-3}  # outputs, relative to their largest
_PARTS = {
    "query_key": ("query", "key"),
    "value_output": ("value", "output"),
    "norm_gain": ("gamma",),
    "feed_forward": ("up", "down"),
}


def rescaled(
    problem: Problem,
    rescaling: Rescaling,
    *,
    mode: Mode = "uniform",
    factor: float = 3.0,
    seed: int = 0,
) -> Problem:
    """The same problem for a copy of the model, rescaled in every layer that allows it.

    factor: of a uniform rescaling; channels are multiplied by powers of it between its inverse and
    itself, matrices have it as their condition number. Refused where it changes the outputs.
    """
    if rescaling not in RESCALINGS:
        raise ValueError(f"rescalings are {', '.join(RESCALINGS)}, got {rescaling!r}.")
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(MODES)}, got {mode!r}.")
    if not 0 < factor < float("inf") or factor == 1:
        raise ValueError(f"factor is a positive number other than 1, got {factor!r}.")
    if mode == "matrix" and rescaling in ("norm_gain", "feed_forward"):
        raise ValueError(f"{rescaling} acts on single channels: mode is uniform or channels.")
    for role in _PARTS[rescaling]:
        if not any(piece.role == role for piece in problem.anatomy):
            raise ProblemError(
                f"the model has no {role} among the parameters that vary: nothing to rescale by "
                f"{rescaling!r}."
            )
    weights = _Weights(problem, mode, factor, seed)
    getattr(weights, rescaling)()
    if not weights.changed:
        raise ProblemError(
            f"{rescaling} ({mode}) changes the outputs of {type(problem.model).__name__} wherever "
            "it is applied: it is no symmetry of this model."
        )
    return moved_to(problem, weights.flat)


class _Weights:
    """The flat vector under rescaling; a part of the model at a time, kept if the outputs stay."""

    def __init__(self, problem: Problem, mode: Mode, factor: float, seed: int) -> None:
        self.problem, self.mode, self.factor = problem, mode, factor
        self.flat = problem.parameters.clone()
        self.random = generator(seed)
        self.changed = 0
        self._outputs = self._run(self.flat)

    # --- what is drawn -----------------------------------------------------------------------

    def _matrix(self, size: int) -> Tensor:
        """S (size, size)."""
        if self.mode != "matrix":
            return torch.diag(self._channels(size))
        draw = torch.randn(size, size, generator=self.random, dtype=torch.float64, device="cpu")
        left, _, right = torch.linalg.svd(draw)
        values = torch.logspace(-0.5, 0.5, size, base=self.factor, dtype=torch.float64)
        return self._like(left @ torch.diag(values) @ right)

    def _channels(self, size: int) -> Tensor:
        """D as a vector (size,), positive."""
        if self.mode == "uniform":
            return self._like(torch.full((size,), self.factor, dtype=torch.float64))
        draw = torch.rand(size, generator=self.random, dtype=torch.float64, device="cpu")
        return self._like(self.factor ** (2 * draw - 1))

    def _like(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.flat)

    # --- the rescalings ----------------------------------------------------------------------

    def query_key(self) -> None:
        for queries, keys in self._heads("query", "key"):
            proposal = self.flat.clone()
            for key, group in zip(keys, _dealt(queries, len(keys)), strict=True):
                s = self._matrix(_outputs(key[0]))
                for piece in key:
                    _multiply(proposal, piece, torch.linalg.inv(s))
                for piece in (p for query in group for p in query):
                    _multiply(proposal, piece, s.T)
            self._keep(proposal)

    def value_output(self) -> None:
        for outputs, values in self._heads("output", "value"):
            proposal = self.flat.clone()
            for value, group in zip(values, _dealt(outputs, len(values)), strict=True):
                s = self._matrix(_outputs(value[0]))
                for piece in value:
                    _multiply(proposal, piece, s)
                for output in group:
                    _multiply(proposal, output[0], torch.linalg.inv(s), right=True)
            self._keep(proposal)

    def norm_gain(self) -> None:
        anatomy = self.problem.anatomy
        for gain in (p for p in anatomy if p.role == "gamma" and p.sublayer == "norm"):
            bias = [p for p in anatomy if p.name == gain.name.removesuffix("gamma") + "beta"]
            d = self._channels(gain.size)
            for readers, base in product(self._readers(gain), (0.0, 1.0)):
                proposal = self.flat.clone()
                place = gain.indices.to(proposal.device)
                proposal[place] = d * (base + proposal[place]) - base  # Gemma's gain is 1 + γ
                for piece in bias:
                    proposal[piece.indices.to(proposal.device)] *= d
                for piece in readers:
                    _multiply(proposal, piece, torch.diag(1 / d), right=True)
                if self._keep(proposal):
                    break

    def _readers(self, gain: Slice) -> Iterator[list[Slice]]:
        """Sets of linear layers that may be all that reads a norm."""
        anatomy = self.problem.anatomy

        def at(layer: int | None, *roles: str) -> list[Slice]:
            return [p for p in anatomy if p.layer == layer and p.role in roles]

        attention, feed_forward = ("query", "key", "value"), ("up", "gate")
        candidates = [at(gain.layer, *attention), at(gain.layer, *feed_forward)]
        candidates.append([*candidates[0], *candidates[1]])
        if gain.layer is not None:
            candidates.append(at(gain.layer + 1, *attention))
        candidates.append([p for p in anatomy if p.sublayer == "head" and len(p.shape) == 2])
        for pieces in candidates:
            if pieces and all(_inputs(p) == gain.size for p in pieces):
                yield pieces

    def feed_forward(self) -> None:
        anatomy = self.problem.anatomy
        for up in (p for p in anatomy if p.role == "up"):
            down = [p for p in anatomy if p.role == "down" and p.layer == up.layer]
            bias = [p for p in anatomy if p.role == "up_bias" and p.layer == up.layer]
            if len(down) != 1 or _inputs(down[0]) != _outputs(up):
                continue  # several experts, or a layout that is not ours
            d = self._channels(_outputs(up))
            proposal = self.flat.clone()
            for piece in (up, *bias):
                _multiply(proposal, piece, torch.diag(d))
            _multiply(proposal, down[0], torch.diag(1 / d), right=True)
            self._keep(proposal)

    def _heads(self, many: str, few: str) -> Iterator[tuple[list[list[Slice]], list[list[Slice]]]]:
        """By layer: the heads of two roles, each with the weight first and its bias after it."""
        anatomy = self.problem.anatomy
        for layer in anatomy.layers:
            pair = []
            for role in (many, few):
                weight = [p for p in anatomy if p.layer == layer and p.role == role]
                if len(weight) != 1:
                    break
                bias = [p for p in anatomy if p.layer == layer and p.role == f"{role}_bias"]
                pieces = weight if role == "output" else [*weight, *bias]  # its bias has no heads
                if weight[0].head_size is None:
                    pair.append([pieces])
                else:
                    cut = [anatomy.heads(piece) for piece in pieces]
                    pair.append([list(head) for head in zip(*cut, strict=True)])
            if len(pair) == 2 and len(pair[0]) % len(pair[1]) == 0:
                yield pair[0], pair[1]

    # --- what stays --------------------------------------------------------------------------

    def _keep(self, proposal: Tensor) -> bool:
        """Take the rescaled weights if the outputs are the same."""
        outputs = self._run(proposal)
        size = max(float(z.abs().max()) for z in self._outputs)
        off = max(float((a - b).abs().max()) for a, b in zip(self._outputs, outputs, strict=True))
        if not off <= _SAME.get(self.flat.dtype, 1e-2) * size:
            return False
        self.flat, self.changed = proposal, self.changed + 1
        return True

    def _run(self, flat: Tensor) -> list[Tensor]:
        problem = self.problem
        pieces = zip(problem.layout.names, problem.layout.split(flat), strict=True)
        leaves = {name: piece.squeeze(0) for name, piece in pieces}
        batch = next(problem.batches())
        few = batch.part(0, min(4, batch.samples), problem.loss.count)
        with problem.evaluating(), torch.no_grad():
            outputs = tree_leaves(problem.model_outputs(few, leaves))
        return [z for z in outputs if isinstance(z, Tensor) and z.is_floating_point()]


def _dealt(heads: Sequence[list[Slice]], groups: int) -> list[Sequence[list[Slice]]]:
    """Query heads by the key head they share: neighbours, as grouped-query attention has it."""
    size = len(heads) // groups
    return [heads[i * size : (i + 1) * size] for i in range(groups)]


def _outputs(piece: Slice) -> int:
    return piece.shape[-1] if piece.transposed and len(piece.shape) == 2 else piece.shape[0]


def _inputs(piece: Slice) -> int:
    return piece.size // _outputs(piece)


def _multiply(flat: Tensor, piece: Slice, matrix: Tensor, *, right: bool = False) -> None:
    """W → matrix · W, or W · matrix, of a piece seen as (out, in); a bias is a column."""
    stored = piece.view(flat).clone()
    seen = stored.reshape(-1, 1) if len(piece.shape) == 1 else stored
    seen = seen.T if piece.transposed and len(piece.shape) == 2 else seen
    image = seen @ matrix if right else matrix @ seen
    image = image.T if piece.transposed and len(piece.shape) == 2 else image
    flat[piece.indices.to(flat.device)] = image.reshape(-1)
