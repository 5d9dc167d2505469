"""First and second derivatives of one sublayer, read off the graph between two activations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.analysis.propagation_capture import Capture, Node
from curvatlas.problem import Batch
from curvatlas.problem.output_curvature import differentiable_leaves

_COLUMNS = 64  # cotangents through one vmapped pass


class Samples:
    """How tensors are seen: (samples, n), or one sample when the samples interact."""

    def __init__(self, count: int) -> None:
        self.count = count

    def flat(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.count, -1)

    def columns(self, columns: Tensor, like: Tensor) -> Tensor:
        """(K, samples, n) → (K, *shape)."""
        return columns.reshape(-1, *like.shape)


def pull(root: Tensor, inputs: Sequence[Tensor], cotangents: Tensor) -> list[Tensor]:
    """Vector-Jacobian products of K cotangents (K, *root) → (K, *input) each, zeros included."""
    count = len(cotangents)
    if not root.requires_grad:
        return [t.new_zeros(count, *t.shape) for t in inputs]
    options = {"retain_graph": True, "allow_unused": True}
    found: Sequence[Tensor | None]
    try:
        found = torch.autograd.grad(root, inputs, cotangents, is_grads_batched=True, **options)
    except RuntimeError:  # an operation without a batching rule: one by one
        rows = [torch.autograd.grad(root, inputs, c, **options) for c in cotangents]
        found = tuple(
            None if parts[0] is None else torch.stack(parts) for parts in zip(*rows, strict=True)
        )
    return [
        t.new_zeros(count, *t.shape) if g is None else g for t, g in zip(inputs, found, strict=True)
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


def jacobian(node: Node, parents: Sequence[Node], view: Samples) -> list[Tensor]:
    """∂node/∂parent, (samples, n, n_parent) each."""
    size = view.flat(node.tensor).shape[1]
    found = [p.tensor.new_zeros(view.count, size, view.flat(p.tensor).shape[1]) for p in parents]
    for place, block in unit_columns(view.count, size, node.tensor):
        pulled = pull(node.tensor, [p.tensor for p in parents], view.columns(block, node.tensor))
        for target, rows in zip(found, pulled, strict=True):
            target[:, place] = rows.reshape(len(rows), view.count, -1).transpose(0, 1)
    return found


def second(node: Node, parents: Sequence[Node], slope: Tensor, view: Samples) -> list[list[Tensor]]:
    """C_pq = Σ_k δ_k ∂²f_k/∂p∂q, (samples, n_p, n_q), for all pairs of parents."""
    tensors = [p.tensor for p in parents]
    gradients = torch.autograd.grad(
        node.tensor, tensors, slope.reshape(node.tensor.shape), create_graph=True,
        allow_unused=True,
    )  # fmt: skip
    return [gradient_rows(g, p, tensors, view) for g, p in zip(gradients, tensors, strict=True)]


def gradient_rows(
    gradient: Tensor | None, own: Tensor, others: Sequence[Tensor], view: Samples
) -> list[Tensor]:
    size = view.flat(own).shape[1]
    found = [own.new_zeros(view.count, size, view.flat(t).shape[1]) for t in others]
    if gradient is None or not gradient.requires_grad:
        return found  # linear in this input
    for place, block in unit_columns(view.count, size, own):
        for target, rows in zip(
            found, pull(gradient, others, view.columns(block, own)), strict=True
        ):
            target[:, place] = rows.reshape(len(rows), view.count, -1).transpose(0, 1)
    return found


def samples_interact(batch: Batch, capture: Capture) -> bool:
    """Whether one sample's outputs depend on another sample's first activation."""
    first = capture.nodes[0].tensor
    outputs, _ = differentiable_leaves(capture.outputs)
    if batch.length < 2 or any(
        t.ndim == 0 or t.shape[0] != batch.length
        for t in [*outputs, *(node.tensor for node in capture.nodes)]
    ):
        return batch.length >= 2
    generator = torch.Generator(device="cpu").manual_seed(0)
    cotangents = []
    for z in outputs:
        draw = torch.randn(z.shape, generator=generator, dtype=z.dtype, device="cpu").to(z.device)
        draw[1:] = 0
        cotangents.append(draw)
    (pulled,) = torch.autograd.grad(
        outputs, [first], cotangents, retain_graph=True, materialize_grads=True
    )
    return bool(pulled[1:].abs().max() > 0)
