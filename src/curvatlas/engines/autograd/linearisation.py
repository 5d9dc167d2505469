"""One batch, linearised: graphs kept alive so that each product costs only its own backward passes.

Every product runs reverse over reverse. Forward over reverse and torch.func.hessian are silently
wrong through affine LayerNorm or padded embeddings in some compositions; this one is right in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvatlas.engines.graphs import GraphSize, edge_of, graph_size, pull
from curvatlas.errors import NoGradientPath, ProblemError
from curvatlas.problem import Batch, Problem
from curvatlas.problem.cross_entropy import differentiable_leaves, output_curvature
from curvatlas.problem.evaluation import check_finite_loss, listed, without_tensor_hooks
from curvatlas.problem.large_heads import HiddenLogits
from curvatlas.problem.losses import Rebuild

# Below this average size of a saved tensor a backward pass is bound by the cost of its calls, and
# running several columns through one vmapped pass wins, up to about a megabyte in flight per
# tensor; above it the columns run one by one (benchmarks/products.py: 1.2 k-parameter GPT 12 ms a
# column alone, 0.4 ms in a block of 64; 1 M-parameter GPT 2.1 gradients alone, 2.9 in blocks of 8).
BATCHED_BELOW_BYTES = 60_000
IN_FLIGHT_BYTES = 1_000_000

Columns = Mapping[str, Tensor]  # parameter name → (K, *shape)


class Linearisation:
    """Leaves, outputs and loss slope of one batch; subclasses add the graph of their product."""

    def __init__(
        self, problem: Problem, batch: Batch, names: Sequence[str], *, logit_room: int | None = None
    ) -> None:
        self.batch = batch
        self.leaves = problem.leaves(names)
        # A product asks for these: a parameter may have been frozen since.
        self._places = {name: get_gradient_edge(leaf) for name, leaf in self.leaves.items()}
        self._problem = problem
        self.outputs = self._predicted(logit_room)
        self._names = tuple(names)
        self.unused: frozenset[str] = frozenset()
        self._build()
        self.size: GraphSize = graph_size(
            [*self._roots(), *differentiable_leaves(self.outputs)[0]],
            excluding=problem.own_tensors(),
        )
        self.columns_at_once = 1
        # Logits in chunks and checkpointed blocks are worked through a column at a time.
        single = isinstance(self.outputs, HiddenLogits) or problem.checkpoint_activations
        if self.size.mean_bytes < BATCHED_BELOW_BYTES and not single:
            self.columns_at_once = max(
                8, min(256, int(IN_FLIGHT_BYTES / max(self.size.mean_bytes, 1)))
            )

    @property
    def needs_scope(self) -> bool:
        """Whether a product has to run inside ``Problem.evaluating``: Python of the graph does."""
        return self.size.runs_python

    def _predicted(self, logit_room: int | None) -> Any:
        return self._problem.predictions(self.batch, self.leaves, logit_room=logit_room)

    @property
    def held_bytes(self) -> int:
        """Memory that stays in use: the graph, the outputs, and as much again for their slopes."""
        outputs = differentiable_leaves(self.outputs)[0]
        return self.size.bytes + 2 * sum(z.numel() * z.element_size() for z in outputs)

    def _build(self) -> None:
        raise TypeError(f"{type(self).__name__} builds no graph.")

    def _roots(self) -> Sequence[Tensor | GradientEdge | None]:
        raise TypeError(f"{type(self).__name__} keeps no graph.")

    def product(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        """The operator of this batch's mean loss times columns, restricted to ``rows``."""
        raise TypeError(f"{type(self).__name__} has no product.")

    def flat_product(self, columns: Tensor) -> Tensor:
        """The operator times flat columns (P, K), as rows (K, P)."""
        layout, count = self._problem.layout, columns.shape[1]
        parts = zip(layout.names, torch.split(columns, list(layout.sizes)), strict=True)
        # Straightened as in the first product: the bits do not depend on when the graph was made.
        pieces = {
            name: part.T.contiguous().view(count, *self.leaves[name].shape) for name, part in parts
        }
        rows = [
            columns.new_zeros(count, size) if row is None else row.reshape(count, size)
            for row, size in zip(self.product(pieces, layout.names), layout.sizes, strict=True)
        ]
        return torch.cat(rows, 1)

    def _loss(self) -> Tensor:
        loss = self._problem.loss.value(self.outputs, self.batch.targets)
        check_finite_loss(float(loss.detach()), self.batch.index)
        self._require_path(loss.requires_grad)
        return loss

    def _gradients(
        self, roots: list[Tensor], cotangents: list[Tensor] | None
    ) -> dict[str, Tensor | None]:
        """Jᵀ cotangents by parameter, with the graph that differentiates it once more."""
        grads = torch.autograd.grad(
            roots, list(self.leaves.values()), cotangents, create_graph=True, allow_unused=True
        )
        self.unused = frozenset(n for n, g in zip(self._names, grads, strict=True) if g is None)
        self._require_path(len(self.unused) < len(self._names))
        return dict(zip(self._names, grads, strict=True))

    def _fixed_slopes(self, outputs: list[Tensor], rebuild: Rebuild) -> list[Tensor]:
        """δ = ∂ℓ/∂Z, once the loss is known to be a number."""
        value, slopes = self._problem.loss.fixed_slopes(outputs, rebuild, self.batch.targets)
        check_finite_loss(value, self.batch.index)
        return slopes

    def _require_path(self, exists: bool) -> None:
        if not exists:
            named = self._problem.model.named_modules()
            integers = [name for name, m in named if ".quantized." in type(m).__module__]
            if integers:
                raise ProblemError(
                    f"{listed(integers)} compute on integers, through which no gradient flows: "
                    "load the model dequantised (in bfloat16 or float32)."
                )
            raise NoGradientPath(
                f"no gradient path from the loss to any of {listed(list(self._names))}: is the "
                "output detached, computed under no_grad, or independent of them?"
            )

    def _pull(
        self,
        roots: Sequence[Tensor] | Sequence[GradientEdge],
        inputs: Sequence[Tensor] | Sequence[GradientEdge],
        cotangents: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Vector-Jacobian products for K cotangents at once: (K, *root) each → (K, *input) each."""
        for leaf in self.leaves.values():
            if leaf._backward_hooks:  # put on a parameter since; to see none costs no call
                with without_tensor_hooks(self.leaves.values()):
                    return self._pull(roots, inputs, cotangents)
        if self.columns_at_once > 1:
            try:
                return pull(roots, inputs, cotangents, together=True)
            except RuntimeError:
                self.columns_at_once = 1  # an operation without a batching rule: one by one
        return pull(roots, inputs, cotangents, together=False)


class HessianLinearisation(Linearisation):
    """H v = ∂(gᵀv)/∂θ on the kept graph of the gradient g: 6 units, a gradient is 3."""

    def _build(self) -> None:
        self._keep(self._gradients([self._loss()], None))

    def _keep(self, slopes: Mapping[str, Tensor | None]) -> None:
        """Keep the places of the gradient in its graph; its values would be one vector more."""
        self._slopes = {name: edge_of(slope) for name, slope in slopes.items()}

    def _roots(self) -> list[GradientEdge | None]:
        return list(self._slopes.values())

    def product(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        used = [n for n in columns if self._slopes[n] is not None]
        roots = [slope for n in used if (slope := self._slopes[n]) is not None]
        return self._pull(roots, [self._places[n] for n in rows], [columns[n] for n in used])


class FunctionalLinearisation(HessianLinearisation):
    """H_f v = ∂(gᵀv)/∂θ with g = Jᵀδ and the output slope δ = ∂ℓ/∂Z held fixed."""

    def _build(self) -> None:
        outputs, rebuild = differentiable_leaves(self.outputs)
        self._require_path(any(z.requires_grad for z in outputs))
        deltas = self._fixed_slopes(outputs, rebuild)
        self._keep(self._gradients(outputs, deltas))


class OuterLinearisation(Linearisation):
    """Jᵀ Λ J v on the kept graph of u ↦ Jᵀu: 4 units.

    Jᵀu is linear in u, so differentiating it with respect to u gives J v without forward mode.
    """

    def _build(self) -> None:
        outputs, rebuild = differentiable_leaves(self.outputs)
        self._require_path(any(z.requires_grad for z in outputs))
        self._z = outputs
        self._u = [torch.zeros_like(z).requires_grad_(True) for z in outputs]
        self._transposed = self._gradients(outputs, self._u)
        self._lambda = self._output_product(rebuild)

    def _output_product(self, rebuild: Rebuild) -> Callable[[list[Tensor]], list[Tensor]]:
        return output_curvature(self._problem.loss, self._z, rebuild, self.batch.targets)

    def _roots(self) -> list[Tensor | None]:
        return [*self._transposed.values(), *self._z]

    def product(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        used = [n for n in columns if self._transposed[n] is not None]
        roots = [t for n in used if (t := self._transposed[n]) is not None]
        moved = self._pull(roots, self._u, [columns[n] for n in used])  # J v at the outputs
        count = next(iter(columns.values())).shape[0]
        tangents = [
            z.new_zeros(count, *z.shape) if t is None else t
            for t, z in zip(moved, self._z, strict=True)
        ]
        weighted = self._lambda(tangents)
        return self._pull(self._z, [self._places[n] for n in rows], weighted)
