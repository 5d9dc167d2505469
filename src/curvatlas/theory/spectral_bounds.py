"""Bounds on the Hessian's norm that a user can call on their own block or stack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvatlas.blocks.losses import Loss, Seeds, resolve_loss
from curvatlas.blocks.normalization import normalize
from curvatlas.blocks.products import linearise
from curvatlas.blocks.stack import BlockStack
from curvatlas.blocks.structure import WEIGHT_NAMES, BlockSpec, Weights
from curvatlas.results import Result
from curvatlas.theory import reference
from curvatlas.theory.attention_bounds import corrected_bound, printed_theorem_1
from curvatlas.theory.exact_norm import exact_norm
from curvatlas.theory.kronecker import SingleHead
from curvatlas.theory.norm_calculus import Calculus, groups_of, through_block
from curvatlas.theory.norm_rows import has_norms, rows_by_products
from curvatlas.theory.stack_bound import stack_token_bound
from curvatlas.theory.token_bound import entry_bounds

_ATTENTION = frozenset({"query", "key", "value", "output"})


@dataclass(frozen=True, kw_only=True)
class CurvatureBounds(Result):
    """Upper bounds on ‖H‖₂ over all parameters, and the norm itself.

    ``printed`` is the sources' formula (Theorem 1 of the draft for bare attention, the 5·max rule
    of Theorem 6 otherwise): shown for comparison, ``printed_is_valid`` says whether it is a bound.
    """

    exact: float
    token_structured: float
    data_free: float
    printed: float
    printed_source: str
    printed_is_valid: bool
    chain: dict[str, float]  # input norm, weight norms, L, d_k, … → the data-free bound
    token_names: tuple[str, ...]
    token_matrix: Tensor  # bounds by pairs of parameter groups
    data_free_names: tuple[str, ...]
    data_free_matrix: Tensor

    @property
    def looseness(self) -> dict[str, float]:
        """Each bound divided by the exact norm."""
        values = {
            "token_structured": self.token_structured,
            "data_free": self.data_free,
            "printed": self.printed,
        }
        return {k: v / self.exact if self.exact > 0 else math.inf for k, v in values.items()}

    def __str__(self) -> str:
        loose = self.looseness
        note = "" if self.printed_is_valid else ", NOT a valid bound"
        return "\n".join(
            [
                f"exact            {self.exact:.4g}",
                f"token-structured {self.token_structured:.4g}"
                f"  ({loose['token_structured']:.2f} ×)",
                f"data-free        {self.data_free:.4g}  ({loose['data_free']:.3g} ×)",
                f"printed          {self.printed:.4g}  ({loose['printed']:.3g} ×,"
                f" {self.printed_source}{note})",
                "chain: " + ", ".join(f"{k} = {v:.3g}" for k, v in self.chain.items()),
            ]
        )

    def plot(self) -> Any:
        """The four numbers on a log axis beside the matrix of group bounds."""
        from curvatlas.theory.figures import bounds_figure

        return bounds_figure(self)


def bounds(
    block: Any,
    x: Tensor,
    target: Tensor,
    *,
    loss: str | Loss | None = None,
    mask: Tensor | None = None,
) -> CurvatureBounds:
    """Bounds on the spectral norm of a block's (or stack's) Hessian at inputs x (n, L, d).

    ``block``: ``SelfAttentionHessian``, ``TransformerBlockHessian``, ``BlockStack``, a pair
    (spec, weights) or a list of pairs (a stack). All parameters are covered: weights, biases, γ, β.
    ``loss=None``: the stack's own, else mse, or cross-entropy when the targets are integers.
    With a loss given by name everything is computed in float64, whatever the block's dtype.
    """
    layers = as_layers(block)
    if loss is None and isinstance(block, BlockStack):
        loss = block.loss
    if loss is None:
        loss = "mse" if target.is_floating_point() else "cross_entropy"
    if isinstance(loss, str):
        layers = [(spec, {n: w.double() for n, w in weights.items()}) for spec, weights in layers]
        x = x.double()
        target = target.double() if target.is_floating_point() else target
    x = x.detach()
    if x.ndim == 2:
        x, target = x.unsqueeze(0), target.unsqueeze(0)
    _check(layers, x, target)
    resolved = resolve_loss(loss)
    if len(layers) > 1:
        names, matrix, token, exact, seeds = stack_token_bound(layers, x, target, resolved, mask)
    else:
        spec, weights = layers[0]
        seeds = resolved.seeds(linearise(spec, weights, x, mask).output, target)
        found = entry_bounds(
            spec,
            weights,
            x,
            seeds,
            mask=mask,
            norm_rows=(
                (lambda: rows_by_products(spec, weights, x, seeds, mask))
                if has_norms(weights)
                else None
            ),
        )
        names, matrix, token = found.names, found.matrix, float(found.norm())
        exact = exact_norm(layers, x, target, resolved, mask)
    data_names, data_matrix, chain = data_free_matrix(layers, x, seeds, mask)
    data_free = float(torch.linalg.eigvalsh(data_matrix)[-1])
    printed = len(data_names) * float(data_matrix.max())
    source, valid = f"{len(data_names)}·max of group bounds, as in Petrov et al., Theorem 6", True
    head = as_single_head(layers, x, target, loss, mask)
    if head is not None:
        data_free = min(data_free, float(corrected_bound(head)))
        printed = max(float(v) for v in printed_theorem_1(head).values())
        source, valid = "Petrov et al., draft, Theorem 1", False
    return CurvatureBounds(
        exact=exact,
        token_structured=token,
        data_free=data_free,
        printed=printed,
        printed_source=source,
        printed_is_valid=valid,
        chain=chain | {"bound": data_free},
        token_names=names,
        token_matrix=matrix,
        data_free_names=tuple(data_names),
        data_free_matrix=data_matrix,
    )


def as_layers(block: Any) -> list[tuple[BlockSpec, dict[str, Tensor]]]:
    """(spec, weights) of every layer; weights in ``WEIGHT_NAMES`` order and detached."""
    if isinstance(block, BlockStack):
        if block.readout.weights:
            raise ValueError("bounds cover the blocks of a stack: pass it without a readout.")
        pairs: Sequence[tuple[BlockSpec, Weights]] = list(
            zip(block.specs, block.weights, strict=True)
        )
    elif isinstance(block, tuple) and len(block) == 2 and isinstance(block[0], BlockSpec):
        pairs = [block]
    elif isinstance(block, (list, tuple)):
        return [layer for part in block for layer in as_layers(part)]
    elif hasattr(block, "spec") and hasattr(block, "weights"):
        weights = block.weights() if callable(block.weights) else block.weights
        pairs = [(block.spec, weights)]
    else:
        raise TypeError(
            "bounds need a closed-form block, a stack or (spec, weights), "
            f"got {type(block).__name__}."
        )
    return [
        (spec, {n: weights[n].detach() for n in WEIGHT_NAMES if n in weights})
        for spec, weights in pairs
    ]


def _check(layers: Sequence[tuple[BlockSpec, Weights]], x: Tensor, target: Tensor) -> None:
    width = layers[0][0].d_model
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(
            f"the input must be (n, L, {width}) or (L, {width}), got {tuple(x.shape)}."
        )
    if target.is_floating_point() and target.shape != x.shape:
        raise ValueError(
            f"the target must have the output's shape {tuple(x.shape)}, got {tuple(target.shape)}."
        )
    if not bool(torch.isfinite(x).all()):
        raise ValueError("the input contains NaN or Inf: no derivative is defined there.")


def as_single_head(
    layers: Sequence[tuple[BlockSpec, Weights]],
    x: Tensor,
    target: Tensor,
    loss: str | Loss,
    mask: Tensor | None,
) -> SingleHead | None:
    """The papers' setting of Theorem 1, when the block is one: else None."""
    spec, weights = layers[0]
    plain = (
        len(layers) == 1
        and not spec.residual
        and set(weights) == {"query_weight", "key_weight", "value_weight"}
        and spec.n_heads == 1
        and spec.softmax
        and not spec.causal
        and spec.scale is None
        and spec.rope_base is None
        and mask is None
        and loss == "mse"
        and x.shape[0] == 1
    )
    if not plain:
        return None
    return SingleHead(
        x[0],
        weights["query_weight"].T,
        weights["key_weight"].T,
        weights["value_weight"].T,
        target[0],
    )


def data_free_matrix(
    layers: Sequence[tuple[BlockSpec, Weights]], x: Tensor, seeds: Seeds, mask: Tensor | None
) -> tuple[list[str], Tensor, dict[str, float]]:
    """Group bounds by norm calculus, with the chain of numbers that leads to them."""
    prefixes = [f"{i}." if len(layers) > 1 else "" for i in range(len(layers))]
    groups = [g for p, (_, w) in zip(prefixes, layers, strict=True) for g in groups_of(w, p)]
    tokens, length = x.shape[0] * x.shape[1], x.shape[1]
    calculus = Calculus(tokens, length, groups)
    calculus.chain |= {
        "input norm": float(torch.linalg.matrix_norm(x.reshape(tokens, -1), 2)),
        "largest token": float(x.norm(dim=-1).max()),
        "L": float(length),
        "d_k": float(layers[0][0].key_size),
    }
    y, z = calculus.constant(x.double()), x
    for prefix, (spec, weights) in zip(prefixes, layers, strict=True):
        block = linearise(spec, weights, z, mask)
        y = through_block(
            calculus, y, spec, weights, smallest_deviations(spec, weights, z, mask), prefix
        )
        z = block.output
    probe = seeds.blocks(slice(None)) if seeds.blocks is not None else None
    if probe is None:
        raise ValueError(
            "bounds need a loss that does not couple tokens: use mse or token cross-entropy."
        )
    curvature = float(torch.linalg.matrix_norm(probe, 2).max())
    residual = float(seeds.delta.norm())
    calculus.chain |= {
        "loss: norm of second derivative": curvature,
        "loss: gradient norm": residual,
    }
    matrix = curvature * torch.outer(y.jac, y.jac) + residual * y.hess
    return groups, matrix, calculus.chain


def smallest_deviations(
    spec: BlockSpec, weights: Weights, x: Tensor, mask: Tensor | None
) -> dict[str, float]:
    """min over tokens of σ in front of norm1 and norm2 (empty without norms)."""
    if spec.norm == "none" or not spec.residual:
        return {}

    def smallest(tokens: Tensor) -> float:
        return float((1.0 / normalize(tokens, eps=spec.eps, norm=spec.norm)[1]).min())

    half = replace(spec, d_ff=None)
    attention = {n: w for n, w in weights.items() if n.split("_")[0] in _ATTENTION}
    if spec.norm_first:
        front = {n: w for n, w in weights.items() if n.startswith("norm1")}
        u = linearise(half, attention | front, x, mask).output
        return {"norm1": smallest(x), "norm2": smallest(u)}
    u = linearise(replace(half, norm="none"), attention, x, mask).output
    y = reference.affine_norm(u, weights, "norm1", spec)
    found = {"norm1": smallest(u)}
    if spec.d_ff is not None:
        found["norm2"] = smallest(y + reference.feed_forward(spec, weights, y))
    return found
