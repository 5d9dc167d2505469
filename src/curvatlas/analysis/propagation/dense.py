r"""Hessian back-propagation, dense: one sample's (tokens · width)² matrix at every activation.

Activations are eliminated from the loss backwards. For t = f(p, …) with slope δ_t:

    S_pq ← S_pq + J_pᵀ S_tt J_q + Σ_k δ_t,k ∂²f_k/∂p∂q + J_pᵀ S_tq + S_pt J_q

over pairs p, q of activations that are still needed. Skip connections are nothing special: a sum
has two inputs and the mixed terms S_pt carry what the branch and the skip share. Once every reader
of p is eliminated, S_pp is the Hessian of the loss with respect to p.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvatlas.analysis.propagation.capture import Capture, Node
from curvatlas.engines.autograd.pull import pull
from curvatlas.problem import Batch, Problem
from curvatlas.problem.cross_entropy import differentiable_leaves, output_curvature

_COLUMNS = 64  # cotangents through one vmapped pass


class SampleView:
    """How tensors are seen: (samples, n), or one sample when the samples interact."""

    def __init__(self, count: int) -> None:
        self.count = count

    def flat(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.count, -1)

    def columns(self, columns: Tensor, like: Tensor) -> Tensor:
        """(K, samples, n) → (K, *shape)."""
        return columns.reshape(-1, *like.shape)


def pulled(
    roots: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """``pull`` with zeros where nothing comes back: (K, *root) each → (K, *input) each."""
    count = len(cotangents[0])
    return [
        t.new_zeros(count, *t.shape) if g is None else g
        for t, g in zip(inputs, pull(roots, inputs, cotangents), strict=True)
    ]


def unit_columns(samples: int, size: int, like: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Unit vectors, the same in every sample: (K, samples, size) at a time."""
    for start in range(0, size, _COLUMNS):
        stop = min(start + _COLUMNS, size)
        block = like.new_zeros(stop - start, samples, size)
        for k in range(stop - start):
            block[k, :, start + k] = 1
        yield slice(start, stop), block


def is_sum(node: Node) -> bool:
    """Whether the activation is exactly the sum of its two inputs: identity Jacobians."""
    function = node.tensor.grad_fn
    if function is None or function.name() != "AddBackward0" or len(node.parents) != 2:
        return False
    edges = {(f, n) for f, n in function.next_functions}
    parents = {(p.tensor.grad_fn, p.tensor.output_nr) for p in node.parents}
    plain = getattr(function, "_saved_alpha", 1) == 1
    same = all(p.tensor.shape == node.tensor.shape for p in node.parents)
    return edges == parents and plain and same


@contextlib.contextmanager
def cut(parents: Sequence[Node]) -> Iterator[None]:
    """Inside, gradients with respect to one of ``parents`` do not run through another of them.

    The engine hands out the gradient at an activation before it runs the function behind it, so
    emptying what that function receives cuts the graph just there.
    """
    handles = []
    for node in parents:
        others = [p for p in parents if p is not node]
        if not _reaches(node, others):
            continue
        function, number = node.tensor.grad_fn, node.tensor.output_nr
        assert function is not None

        def empty(grads: Any, number: int = number) -> Any:
            return tuple(
                torch.zeros_like(g) if k == number and g is not None else g
                for k, g in enumerate(grads)
            )

        handles.append(function.register_prehook(empty))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reaches(node: Node, targets: Sequence[Node]) -> bool:
    stack, seen = list(node.parents), set()
    while stack:
        other = stack.pop()
        if other in targets:
            return True
        if other not in seen:
            seen.add(other)
            stack.extend(other.parents)
    return False


def jacobian(node: Node, parents: Sequence[Node], view: SampleView) -> list[Tensor]:
    """∂node/∂parent, (samples, n, n_parent) each."""
    size = view.flat(node.tensor).shape[1]
    jacobians = [
        p.tensor.new_zeros(view.count, size, view.flat(p.tensor).shape[1]) for p in parents
    ]
    for place, block in unit_columns(view.count, size, node.tensor):
        slopes = [view.columns(block, node.tensor)]
        parts = pulled([node.tensor], [p.tensor for p in parents], slopes)
        for target, rows in zip(jacobians, parts, strict=True):
            target[:, place] = rows.reshape(len(rows), view.count, -1).transpose(0, 1)
    return jacobians


def second(
    node: Node, parents: Sequence[Node], slope: Tensor, view: SampleView
) -> list[list[Tensor]]:
    """C_pq = Σ_k δ_k ∂²f_k/∂p∂q, (samples, n_p, n_q), for all pairs of parents."""
    tensors = [p.tensor for p in parents]
    gradients = torch.autograd.grad(
        node.tensor,
        tensors,
        slope.reshape(node.tensor.shape),
        create_graph=True,
        allow_unused=True,
    )
    return [gradient_rows(g, p, tensors, view) for g, p in zip(gradients, tensors, strict=True)]


def gradient_rows(
    gradient: Tensor | None, tensor: Tensor, others: Sequence[Tensor], view: SampleView
) -> list[Tensor]:
    size = view.flat(tensor).shape[1]
    blocks = [tensor.new_zeros(view.count, size, view.flat(t).shape[1]) for t in others]
    if gradient is None or not gradient.requires_grad:
        return blocks  # linear in this input
    for place, block in unit_columns(view.count, size, tensor):
        for target, rows in zip(
            blocks, pulled([gradient], others, [view.columns(block, tensor)]), strict=True
        ):
            target[:, place] = rows.reshape(len(rows), view.count, -1).transpose(0, 1)
    return blocks


def samples_interact(problem: Problem, batch: Batch, capture: Capture) -> bool:
    """Whether one sample's part of the loss depends on another sample's first activation.

    ``Problem.separable`` asks the same from the inputs on; here what happens before the first
    activation does not count, and a loss that mixes samples does.
    """
    outputs, rebuild = differentiable_leaves(capture.outputs)
    if batch.length < 2 or any(
        t.ndim == 0 or t.shape[0] != batch.length
        for t in [*outputs, *(node.tensor for node in capture.nodes)]
    ):
        return batch.length >= 2
    generator = torch.Generator(device="cpu").manual_seed(0)
    cotangents = []  # at the first sample's outputs alone
    for z in outputs:
        draw = torch.randn(z.shape, generator=generator, dtype=z.dtype, device="cpu").to(z.device)
        draw[1:] = 0
        cotangents.append(draw)
    (slope,) = torch.autograd.grad(
        outputs, [capture.nodes[0].tensor], cotangents, retain_graph=True, materialize_grads=True
    )
    lam = output_curvature(problem.loss, outputs, rebuild, batch.targets)
    images = lam([draw.unsqueeze(0) for draw in cotangents])
    return any(bool(t[1:].abs().max() > 0) for t in (slope, *(image[0] for image in images)))


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


def propagate(problem: Problem, batch: Batch, capture: Capture, view: SampleView) -> Iterator[Step]:
    """Eliminate every activation, last first; inside ``problem.evaluating()``."""
    slopes = output_slopes(problem, batch, capture)
    hessian: dict[tuple[Node, Node], Tensor] = {}
    created: dict[Node, Tensor] = {}

    def add(p: Node, q: Node, value: Tensor) -> None:
        sum_so_far = hessian.get((p, q))
        hessian[p, q] = value if sum_so_far is None else sum_so_far.add_(value)

    yield _seed(problem, batch, capture, view, add, created)
    for node in reversed(capture.nodes):
        total = hessian.pop((node, node))
        total = (total + total.transpose(1, 2)) / 2  # rounding only
        slope = view.flat(slopes[node])
        mixed = {q: hessian.pop((node, q)) for p, q in list(hessian) if p is node}
        for q in mixed:
            hessian.pop((q, node))
        through: list[tuple[Node, Tensor, Tensor]] = []
        parents = node.parents
        jacobians, curvature = _local(node, slope, view)
        for a, p in enumerate(parents):
            behind = _before(jacobians[a], total)
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
        yield Step(node, total, created.pop(node), through, slope.detach())


def _local(
    node: Node, slope: Tensor, view: SampleView
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
    slopes = torch.autograd.grad(loss, tensors, retain_graph=True)
    return dict(zip(capture.nodes, slopes, strict=True))


def _seed(
    problem: Problem,
    batch: Batch,
    capture: Capture,
    view: SampleView,
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
    view: SampleView,
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
    for p, tensor, gradient in zip(nodes, tensors, gradients, strict=True):
        size = view.flat(tensor).shape[1]
        outer = [tensor.new_zeros(view.count, size, view.flat(t).shape[1]) for t in tensors]
        inner = gradient_rows(gradient, tensor, tensors, view)
        for place, block in unit_columns(view.count, size, tensor):
            # J e_k at the outputs, weighted by Λ
            weighted = lam(pulled([gradient], cotangents, [view.columns(block, tensor)]))
            for target, rows in zip(outer, pulled(outputs, tensors, weighted), strict=True):
                target[:, place] = rows.reshape(len(rows), view.count, -1).transpose(0, 1)
        for q, passed, made in zip(nodes, outer, inner, strict=True):
            add(p, q, passed + made)
            if p is q:
                created[p] = made
                through.append((p, passed, made))
    return through
