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
from curvatlas.engines.graphs import pull
from curvatlas.problem import Batch, Problem
from curvatlas.problem.cross_entropy import differentiable_leaves, output_curvature

_COLUMNS = 64  # cotangents through one vmapped pass


def pulled(
    roots: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """``pull`` with zeros where nothing comes back: (K, *root) each → (K, *input) each."""
    count = len(cotangents[0])
    return [
        t.new_zeros(count, *t.shape) if g is None else g
        for t, g in zip(inputs, pull(roots, inputs, cotangents), strict=True)
    ]


def matrices(
    product: Callable[[Tensor], Sequence[Tensor]],
    tensor: Tensor,
    others: Sequence[Tensor],
    samples: int,
) -> list[Tensor]:
    """Rows of bilinear forms, (samples, n, n_other) for each of ``others``.

    product: K directions (K, *tensor) → (K, *other) each. Every sample gets the same unit vectors,
    as samples that interact are seen as one.
    """
    size = tensor.numel() // samples
    blocks = [tensor.new_zeros(samples, size, t.numel() // samples) for t in others]
    for start in range(0, size, _COLUMNS):
        units = tensor.new_zeros(min(_COLUMNS, size - start), 1, size)
        units[:, 0, start:].fill_diagonal_(1)
        directions = units.expand(-1, samples, -1).reshape(-1, *tensor.shape)
        for block, rows in zip(blocks, product(directions), strict=True):
            by_sample = rows.reshape(len(rows), samples, -1).transpose(0, 1)
            block[:, start : start + len(rows)] = by_sample
    return blocks


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


def propagate(problem: Problem, batch: Batch, capture: Capture, samples: int) -> Iterator[Step]:
    """Eliminate every activation, last first; inside ``problem.evaluating()``."""
    slopes = output_slopes(problem, batch, capture)
    hessian: dict[tuple[Node, Node], Tensor] = {}
    created: dict[Node, Tensor] = {}

    def add(p: Node, q: Node, value: Tensor) -> None:
        sum_so_far = hessian.get((p, q))
        hessian[p, q] = value if sum_so_far is None else sum_so_far.add_(value)

    yield _seed(problem, batch, capture, samples, add, created)
    for node in reversed(capture.nodes):
        total = hessian.pop((node, node))
        total = (total + total.transpose(1, 2)) / 2  # rounding only
        slope = slopes[node].reshape(samples, -1)
        mixed = {q: hessian.pop((node, q)) for p, q in list(hessian) if p is node}
        for q in mixed:
            hessian.pop((q, node))
        through: list[tuple[Node, Tensor, Tensor]] = []
        parents = node.parents
        jacobians, curvature = _local(node, slope, samples)
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
    node: Node, slope: Tensor, samples: int
) -> tuple[list[Tensor | None], list[list[Tensor | None]]]:
    """Jacobians (None: identity) and second derivatives (None: zero) of the node's function."""
    parents = node.parents
    if is_sum(node):
        return [None] * len(parents), [[None] * len(parents) for _ in parents]
    if not parents:
        return [], []
    tensors = [parent.tensor for parent in parents]
    with cut(parents):
        jacobians = matrices(
            lambda c: pulled([node.tensor], tensors, [c]), node.tensor, tensors, samples
        )
        gradients = torch.autograd.grad(
            node.tensor,
            tensors,
            slope.reshape(node.tensor.shape),
            create_graph=True,
            materialize_grads=True,
        )
        curvature = [
            _second(g, t, tensors, samples) for g, t in zip(gradients, tensors, strict=True)
        ]
    return [*jacobians], [[*row] for row in curvature]


def _second(
    gradient: Tensor, tensor: Tensor, others: Sequence[Tensor], samples: int
) -> list[Tensor]:
    """∂(Jᵀδ)/∂other of the gradient at ``tensor``: Σ_k δ_k ∂²f_k, (samples, n, n_other) each."""
    return matrices(lambda c: pulled([gradient], others, [c]), tensor, others, samples)


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
    samples: int,
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
        through = _seed_cut(samples, add, created, nodes, outputs, deltas, lam)
    slope = torch.cat([d.detach().reshape(samples, -1) for d in deltas], dim=1)
    head = Node("head", "head", None, capture.outputs, parents=nodes)
    return Step(head, None, None, through, slope)


def _seed_cut(
    samples: int,
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
        inner = _second(gradient, tensor, tensors, samples)

        def outer_product(directions: Tensor, gradient: Tensor = gradient) -> list[Tensor]:
            moved = pulled([gradient], cotangents, [directions])  # J v at the outputs
            return pulled(outputs, tensors, lam(moved))

        outer = matrices(outer_product, tensor, tensors, samples)
        for q, passed, made in zip(nodes, outer, inner, strict=True):
            add(p, q, passed + made)
            if p is q:
                created[p] = made
                through.append((p, passed, made))
    return through
