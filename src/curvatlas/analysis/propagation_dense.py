r"""Hessian back-propagation, dense: one sample's (tokens · width)² matrix at every activation.

Activations are eliminated from the loss backwards. For t = f(p, …) with slope δ_t:

    S_pq ← S_pq + J_pᵀ S_tt J_q + Σ_k δ_t,k ∂²f_k/∂p∂q + J_pᵀ S_tq + S_pt J_q

over pairs p, q of activations that are still needed. Skip connections are nothing special: a sum
has two inputs and the mixed terms S_pt carry what the branch and the skip share. Once every reader
of p is eliminated, S_pp is the Hessian of the loss with respect to p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.analysis.propagation_capture import Capture, Node
from curvatlas.analysis.propagation_local import (
    Samples,
    cut,
    gradient_rows,
    is_sum,
    jacobian,
    pull,
    second,
    unit_columns,
)
from curvatlas.problem import Batch, Problem
from curvatlas.problem.output_curvature import differentiable_leaves, output_curvature


@dataclass(frozen=True)
class Step:
    """One activation, eliminated: its own Hessian and what its sublayer does to it.

    Matrices are (samples, n, n) with n the entries of one sample's activation. The first step is
    the head: everything between the last activation and the loss.
    """

    node: Node
    total: Tensor | None  # S at the activation (None for the head: Λ is never formed)
    created: Tensor | None  # Σ δ ∂²f over the sublayers f that read it
    through: list[tuple[Node, Tensor, Tensor]]  # input, Jᵀ S J, δ ∂²f of the node's own sublayer
    slope: Tensor  # δ, (samples, n)


def propagate(problem: Problem, batch: Batch, capture: Capture, view: Samples) -> Iterator[Step]:
    """Eliminate every activation, last first; inside ``problem.evaluating()``."""
    slopes = output_slopes(problem, batch, capture)
    hessian: dict[tuple[Node, Node], Tensor] = {}
    created: dict[Node, Tensor] = {}

    def add(p: Node, q: Node, value: Tensor) -> None:
        known = hessian.get((p, q))
        hessian[p, q] = value if known is None else known.add_(value)

    yield _seed(problem, batch, capture, view, add, created)
    for node in reversed(capture.nodes):
        own = hessian.pop((node, node))
        own = (own + own.transpose(1, 2)) / 2  # rounding only
        slope = view.flat(slopes[node])
        mixed = {q: hessian.pop((node, q)) for p, q in list(hessian) if p is node}
        for q in mixed:
            hessian.pop((q, node))
        through: list[tuple[Node, Tensor, Tensor]] = []
        parents = node.parents
        jacobians, curvature = _local(node, slope, view)
        for a, p in enumerate(parents):
            behind = _before(jacobians[a], own)
            for b, q in enumerate(parents):
                passed = _after(behind, jacobians[b])
                made = curvature[a][b]
                if p is q:
                    own_made = torch.zeros_like(passed) if made is None else made
                    through.append((p, passed.clone(), own_made))
                    created[p] = created[p] + own_made if p in created else own_made
                add(p, q, passed.clone() if made is None else passed + made)
            for q, cross in mixed.items():
                moved = _before(jacobians[a], cross)
                add(p, q, moved.clone())
                add(q, p, moved.transpose(1, 2).clone())
        yield Step(node, own, created.pop(node), through, slope.detach())


def _local(
    node: Node, slope: Tensor, view: Samples
) -> tuple[list[Tensor | None], list[list[Tensor | None]]]:
    """Jacobians (None: identity) and second derivatives (None: zero) of the node's function."""
    parents = node.parents
    if is_sum(node):
        return [None] * len(parents), [[None] * len(parents) for _ in parents]
    if not parents:
        return [], []
    with cut(parents):
        jacobians = jacobian(node, parents, view)
        curvature = second(node, parents, slope, view)
    return [*jacobians], [[*row] for row in curvature]


def _before(jacobian: Tensor | None, matrix: Tensor) -> Tensor:
    return matrix if jacobian is None else jacobian.transpose(1, 2) @ matrix


def _after(matrix: Tensor, jacobian: Tensor | None) -> Tensor:
    return matrix if jacobian is None else matrix @ jacobian


def output_slopes(problem: Problem, batch: Batch, capture: Capture) -> dict[Node, Tensor]:
    """δ = ∂ℓ/∂t at every activation."""
    loss = problem.loss.value(capture.outputs, batch.targets)
    tensors = [node.tensor for node in capture.nodes]
    found = torch.autograd.grad(loss, tensors, retain_graph=True)
    return dict(zip(capture.nodes, found, strict=True))


def _seed(
    problem: Problem,
    batch: Batch,
    capture: Capture,
    view: Samples,
    add: Callable[[Node, Node, Tensor], None],
    created: dict[Node, Tensor],
) -> Step:
    """The head and the loss: Jᵀ Λ J and δ ∂²Z without a matrix over the outputs."""
    outputs, rebuild = differentiable_leaves(capture.outputs)
    fixed = [z.detach().requires_grad_(True) for z in outputs]
    value = problem.loss.value(rebuild(fixed), batch.targets)
    deltas = [d.detach() for d in torch.autograd.grad(value, fixed, materialize_grads=True)]
    lam = output_curvature(problem.loss, outputs, rebuild, batch.targets)
    nodes = list(capture.last)
    with cut(nodes):
        through = _seed_cut(view, add, created, nodes, outputs, deltas, lam)
    slope = torch.cat([view.flat(d.detach()) for d in deltas], dim=1)
    head = Node("head", "head", None, capture.outputs, parents=nodes)
    return Step(head, None, None, through, slope)


def _seed_cut(
    view: Samples,
    add: Callable[[Node, Node, Tensor], None],
    created: dict[Node, Tensor],
    nodes: list[Node],
    outputs: list[Tensor],
    deltas: list[Tensor],
    lam: Callable[[list[Tensor]], list[Tensor]],
) -> list[tuple[Node, Tensor, Tensor]]:
    tensors = [node.tensor for node in nodes]
    cotangents = [d.requires_grad_(True) for d in deltas]
    gradients = torch.autograd.grad(outputs, tensors, cotangents, create_graph=True)
    through: list[tuple[Node, Tensor, Tensor]] = []
    for p, own, gradient in zip(nodes, tensors, gradients, strict=True):
        size = view.flat(own).shape[1]
        outer = [own.new_zeros(view.count, size, view.flat(t).shape[1]) for t in tensors]
        inner = gradient_rows(gradient, own, tensors, view)
        for place, block in unit_columns(view.count, size, own):
            moved = pull(gradient, cotangents, view.columns(block, own))  # J e_k at the outputs
            weighted = lam(moved)
            for target, rows in zip(outer, _pull_all(outputs, tensors, weighted), strict=True):
                target[:, place] = rows.reshape(len(rows), view.count, -1).transpose(0, 1)
        for q, passed, made in zip(nodes, outer, inner, strict=True):
            add(p, q, passed + made)
            if p is q:
                created[p] = made
                through.append((p, passed, made))
    return through


def _pull_all(
    roots: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    total = pull(roots[0], inputs, cotangents[0])
    for root, columns in zip(roots[1:], cotangents[1:], strict=True):
        found = pull(root, inputs, columns)
        total = [a + b for a, b in zip(total, found, strict=True)]
    return total
