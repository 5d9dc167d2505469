"""The same account without matrices: products on the kept graph, norms and traces from probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvatlas.analysis.atlas_statistics import energy_of
from curvatlas.analysis.propagation_capture import Capture, Node
from curvatlas.analysis.propagation_local import cut, is_sum, pull
from curvatlas.precision import in_float64
from curvatlas.problem import Batch, Problem
from curvatlas.problem.output_curvature import differentiable_leaves, output_curvature

TAIL = 2.2  # a quadratic form in few probes has heavier tails than a normal number

Product = Callable[[Tensor], Tensor]  # of K vectors in the activation's shape: (K, *shape)


class FreeProducts:
    """Products with the Hessian at any activation and with the two parts of any sublayer.

    A product at an activation costs one double backward through what lies behind it: linear in
    the tokens, and in the parameters and layers behind it; no memory beyond the kept graph. All
    probes of an entry go through one batched pass.
    """

    def __init__(self, problem: Problem, batch: Batch, capture: Capture) -> None:
        self.capture = capture
        tensors = [node.tensor for node in capture.nodes]
        value = problem.loss.value(capture.outputs, batch.targets)
        slopes = torch.autograd.grad(value, tensors, create_graph=True)
        self.slopes = dict(zip(capture.nodes, slopes, strict=True))
        self.outputs, rebuild = differentiable_leaves(capture.outputs)
        fixed = [z.detach().requires_grad_(True) for z in self.outputs]
        loss = problem.loss.value(rebuild(fixed), batch.targets)
        self._deltas = torch.autograd.grad(loss, fixed, materialize_grads=True)
        self._lambda = output_curvature(problem.loss, self.outputs, rebuild, batch.targets)
        self.readers: dict[Node, list[Node]] = {node: [] for node in capture.nodes}
        for node in capture.nodes:
            for parent in node.parents:
                self.readers[parent].append(node)

    def total(self, node: Node) -> Product:
        """v ↦ S v at the activation."""
        slope = self.slopes[node]
        return lambda v: _gradient([slope], node.tensor, [v])

    def created(self, node: Node) -> Product:
        """v ↦ Σ δ ∂²f v over every sublayer f that reads the activation."""
        parts = [self.created_by(reader, node) for reader in self.readers[node]]
        if node in self.capture.last:
            parts.append(self.head(node)[1])
        if not parts:
            return torch.zeros_like

        def product(v: Tensor) -> Tensor:
            total = parts[0](v)
            for part in parts[1:]:
                total = total + part(v)
            return total

        return product

    def created_by(self, reader: Node, node: Node) -> Product:
        """v ↦ Σ δ ∂²f/∂node² v for the one sublayer that makes ``reader``."""
        if is_sum(reader):
            return torch.zeros_like
        with cut(reader.parents):
            (slope,) = torch.autograd.grad(
                reader.tensor, [node.tensor], self.slopes[reader].detach(), create_graph=True
            )

        def product(v: Tensor) -> Tensor:
            with cut(reader.parents):
                return _gradient([slope], node.tensor, [v])

        return product

    def passed_by(self, reader: Node, node: Node) -> Product:
        """v ↦ Jᵀ S J v for the one sublayer that makes ``reader``; S is at ``reader``."""
        behind = self.total(reader)
        if is_sum(reader):
            return behind
        u = torch.zeros_like(reader.tensor).requires_grad_(True)
        with cut(reader.parents):
            (transposed,) = torch.autograd.grad(reader.tensor, [node.tensor], u, create_graph=True)

        def product(v: Tensor) -> Tensor:
            with cut(reader.parents):
                moved = _gradient([transposed], u, [v])
            arrived = behind(moved)
            with cut(reader.parents):
                return _gradient([reader.tensor], node.tensor, [arrived])

        return product

    def head(self, node: Node) -> tuple[Product, Product]:
        """(v ↦ Jᵀ Λ J v, v ↦ δ ∂²Z v) of everything behind the last activation."""
        parents = self.capture.last
        u = [d.detach().clone().requires_grad_(True) for d in self._deltas]
        with cut(parents):
            (slope,) = torch.autograd.grad(self.outputs, [node.tensor], u, create_graph=True)

        def passed(v: Tensor) -> Tensor:
            with cut(parents):
                moved = pull(slope, u, v)
                return _gradient(self.outputs, node.tensor, self._lambda(moved))

        def created(v: Tensor) -> Tensor:
            with cut(parents):
                return _gradient([slope], node.tensor, [v])

        return passed, created


def _gradient(roots: list[Tensor], where: Tensor, cotangents: list[Tensor]) -> Tensor:
    """Σ over roots of K cotangents (K, *root) pulled back to ``where``: (K, *where)."""
    total: Tensor | None = None
    for root, columns in zip(roots, cotangents, strict=True):
        (found,) = pull(root, [where], columns)
        total = found if total is None else total + found
    assert total is not None
    return total


@dataclass(frozen=True)
class Probed:
    """What probes say about one symmetric matrix of size n."""

    norm: float
    norm_interval: tuple[float, float]
    trace: float
    trace_interval: tuple[float, float]
    spectral: tuple[float, float]
    token_trace: Tensor  # (samples, tokens)
    token_error: Tensor  # its standard error


NOTHING = Probed(
    norm=0.0,
    norm_interval=(0.0, 0.0),
    trace=0.0,
    trace_interval=(0.0, 0.0),
    spectral=(0.0, 0.0),
    token_trace=torch.zeros(0),
    token_error=torch.zeros(0),
)


def probe(images: Tensor, basis: Tensor, samples: int) -> Probed:
    """From S Q for an orthonormal Q: both (K, samples, tokens, width)."""
    count = len(basis)
    flat, q = (in_float64(t.reshape(count, -1)) for t in (images, basis))
    size = flat.shape[1]
    energy = energy_of((flat @ flat.T).cpu().numpy(), size)
    low, high = (float(np.sqrt(max(float(end), 0.0))) for end in energy.interval())
    norm = float(np.sqrt(max(float(energy.value), 0.0)))
    trace = size / count * float((flat * q).sum())
    reach = TAIL * float(np.sqrt(2 / count * max(0.0, 1 - count / size))) * norm
    ends = tuple(float(np.sqrt(max(float(end), 0.0))) for end in energy.spectral_interval())
    tokens = size * in_float64(images * basis)  # (K, samples, tokens, width)
    tokens = tokens.reshape(count, samples, -1, tokens.shape[-1]).sum(-1).cpu()
    left = max(0.0, 1 - count / size) / count
    return Probed(
        norm=norm,
        norm_interval=(low, high),
        trace=trace,
        trace_interval=(trace - reach, trace + reach),
        spectral=(ends[0], ends[1]),
        token_trace=tokens.mean(0),
        token_error=tokens.std(0) * left**0.5,
    )


def orthonormal(shape: torch.Size, count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """(count, *shape) random and orthonormal."""
    size = int(np.prod(shape))
    draw = torch.randn(
        size, min(count, size), generator=generator, dtype=torch.float64, device="cpu"
    )
    basis: Tensor = torch.linalg.qr(draw).Q.T
    return basis.reshape(-1, *shape).to(device=like.device, dtype=like.dtype)
