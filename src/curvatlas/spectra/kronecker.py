r"""KFAC and EKFAC: the Gauss-Newton blocks of linear layers as Kronecker products.

A linear layer y = [W b] â with inputs â_n (tokens n, 1 appended for the bias) has the exact block

    H_o = Σ_s vec(D_s) vec(D_s)ᵀ,   D_s = Σ_{n ∈ s} g_n â_nᵀ,

s over samples and columns of Λ^½, g_n the columns pulled back to y_n. KFAC (Martens and Grosse
2015) replaces it by G ⊗ A, A = mean_n â âᵀ, G = Σ_n g gᵀ. EKFAC (George et al. 2018) keeps the
eigenvectors U_G, U_A and measures the true diagonal there, λ = Σ_s (U_Gᵀ D_s U_A)², which is the
nearest such matrix in Frobenius norm. Both are U diag(λ) Uᵀ, so products, damped inverses, traces
and norms are exact and cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvatlas.operators.base import LinearOperator, Tags
from curvatlas.problem import Batch, Problem
from curvatlas.progress import track

_MOST_CLASSES = 512  # Λ^½ is taken exactly: one backward pass a column


@dataclass(frozen=True)
class KroneckerBlock:
    """U diag(λ) Uᵀ with U = U_G ⊗ U_A, acting on [W b] of one linear layer."""

    name: str  # of the module
    weight: slice  # places in the flat vector
    bias: slice | None
    left: Tensor  # U_G (out, out)
    right: Tensor  # U_A (in [+ 1], in [+ 1])
    values: Tensor  # λ (out, in [+ 1])

    def gather(self, columns: Tensor) -> Tensor:
        """(n, K) → (K, out, in [+ 1])."""
        out, count = self.left.shape[0], columns.shape[1]
        matrix = columns[self.weight].T.reshape(count, out, -1)
        if self.bias is None:
            return matrix
        return torch.cat([matrix, columns[self.bias].T.unsqueeze(-1)], 2)

    def scatter(self, matrices: Tensor, result: Tensor) -> None:
        """The inverse of ``gather``, into ``result`` (n, K)."""
        weights = matrices if self.bias is None else matrices[:, :, :-1]
        result[self.weight] = weights.reshape(len(matrices), -1).T
        if self.bias is not None:
            result[self.bias] = matrices[:, :, -1].T

    def apply(self, matrices: Tensor, values: Tensor) -> Tensor:
        """U diag(values) Uᵀ on (K, out, in)."""
        turned = self.left.T @ matrices @ self.right
        return self.left @ (turned * values) @ self.right.T


class KFAC(LinearOperator):
    """KFAC of all ``nn.Linear`` layers of a problem, as a (P, P) operator.

    Parameters outside linear layers have zero rows and columns; ``covered`` lists the layers.
    """

    corrected = False

    def __init__(self, problem: Problem) -> None:
        n = problem.size
        tags = Tags(symmetric=True, psd=True)
        super().__init__((n, n), dtype=problem.dtype, device=problem.device, tags=tags)
        self.problem = problem
        if not problem.loss.convex:
            raise ValueError(
                f"{type(self).__name__} needs a loss that is convex in the outputs "
                f"(cross_entropy or mse), got {problem.loss.name!r}."
            )
        self.blocks = tuple(_blocks(problem, corrected=self.corrected))

    @property
    def covered(self) -> tuple[str, ...]:
        """Names of the linear layers."""
        return tuple(block.name for block in self.blocks)

    def _columns(self, columns: Tensor) -> Tensor:
        result = torch.zeros_like(columns)
        for block in self.blocks:
            block.scatter(block.apply(block.gather(columns), block.values), result)
        return result

    def inverse(self, damping: float) -> LinearOperator:
        """(A + damping·I)⁻¹, exact for this A; 1/damping on the parameters not covered."""
        if not damping > 0:
            raise ValueError(f"damping must be positive, got {damping!r}.")
        return _Inverse(self, damping)

    def exact_trace(self) -> float:
        return sum(float(block.values.sum()) for block in self.blocks)

    def exact_frobenius_norm(self) -> float:
        return float(sum(float(block.values.pow(2).sum()) for block in self.blocks) ** 0.5)

    def exact_diagonal(self) -> Tensor:
        result = torch.zeros(self.shape[0], 1, dtype=self.dtype, device=self.device)
        for block in self.blocks:
            entries = block.left.pow(2) @ block.values @ block.right.pow(2).T
            block.scatter(entries.unsqueeze(0), result)
        return result.squeeze(1)


class EKFAC(KFAC):
    """KFAC with its eigenvalues corrected to the true diagonal in KFAC's eigenbasis."""

    corrected = True


class _Inverse(LinearOperator):
    def __init__(self, original: KFAC, damping: float) -> None:
        super().__init__(
            original.shape, dtype=original.dtype, device=original.device, tags=original.tags
        )
        self._original, self._damping = original, damping

    def _columns(self, columns: Tensor) -> Tensor:
        result = columns / self._damping
        for block in self._original.blocks:
            values = 1 / (block.values + self._damping)
            block.scatter(block.apply(block.gather(columns), values), result)
        return result


@dataclass
class _Capture:
    """Inputs and outputs of the linear layers in one forward pass."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@contextmanager
def _watched(layers: dict[str, nn.Linear]) -> Iterator[_Capture]:
    capture = _Capture({}, {})

    def hook(name: str):  # type: ignore[no-untyped-def]
        def keep(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            if name in capture.inputs:
                raise ValueError(f"{name} is called twice in one pass: KFAC cannot treat it.")
            capture.inputs[name], capture.outputs[name] = given[0].detach(), output

        return keep

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield capture
    finally:
        for handle in handles:
            handle.remove()


def _path(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def _layers(problem: Problem) -> dict[str, nn.Linear]:
    varying = set(problem.parameter_names)
    found = {
        name: module
        for name, module in problem.model.named_modules()
        if type(module) is nn.Linear and _path(name, "weight") in varying
    }
    if not found:
        raise ValueError("the problem has no nn.Linear layer whose weight varies: no KFAC.")
    return found


def _blocks(problem: Problem, *, corrected: bool) -> Iterator[KroneckerBlock]:
    layers = _layers(problem)
    second: dict[str, Tensor] = {}
    pulled: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}
    for batch in track(problem.batches(), "KFAC"):
        share = batch.count / problem.normaliser
        for name, inputs, slopes in _passes(problem, layers, batch):
            if slopes is None:
                a = inputs.flatten(0, -2)
                second[name] = second.get(name, 0) + a.T @ a
                tokens[name] = tokens.get(name, 0) + a.shape[0]
            else:
                g = slopes.flatten(0, -2)
                pulled[name] = pulled.get(name, 0) + share * g.T @ g
    bases = {}
    for name in layers:
        if name not in pulled:
            continue  # never called
        left_values, left = torch.linalg.eigh(pulled[name])
        right_values, right = torch.linalg.eigh(second[name] / tokens[name])
        values = left_values.clamp_min(0)[:, None] * right_values.clamp_min(0)
        bases[name] = (left, right, values)
    if corrected:
        bases = _corrected(problem, layers, bases)
    layout = problem.layout
    places = dict(zip(layout.names, zip(layout.starts, layout.sizes, strict=True), strict=True))
    for name, (left, right, values) in bases.items():
        start, size = places[_path(name, "weight")]
        bias = None
        if _path(name, "bias") in places:
            first, length = places[_path(name, "bias")]
            bias = slice(first, first + length)
        yield KroneckerBlock(name, slice(start, start + size), bias, left, right, values)


def _corrected(
    problem: Problem,
    layers: dict[str, nn.Linear],
    bases: dict[str, tuple[Tensor, Tensor, Tensor]],
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """λ = Σ_s (U_Gᵀ D_s U_A)²."""
    exact = {name: torch.zeros_like(values) for name, (_, _, values) in bases.items()}
    for batch in track(problem.batches(), "EKFAC"):
        share = batch.count / problem.normaliser
        for name, inputs, slopes in _passes(problem, layers, batch):
            if slopes is None or name not in bases:
                continue
            left, right, _ = bases[name]
            a = (inputs @ right).reshape(inputs.shape[0], -1, right.shape[0])  # (B, T, in)
            g = (slopes @ left).reshape(slopes.shape[0], -1, left.shape[0])  # (B, T, out)
            gradients = torch.einsum("bto,bti->boi", g, a)
            exact[name] += share * gradients.pow(2).sum(0)
    return {name: (left, right, exact[name]) for name, (left, right, _) in bases.items()}


def _passes(
    problem: Problem, layers: dict[str, nn.Linear], batch: Batch
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(layer, inputs with 1 appended, None), then (layer, inputs, g) for each column of Λ^½."""
    varying = set(problem.parameter_names)
    with problem.evaluating(), torch.enable_grad(), _watched(layers) as capture:
        outputs = problem.outputs(batch, problem.leaves())
        names = list(capture.outputs)
        inputs = {
            name: _with_one(capture.inputs[name]) if _path(name, "bias") in varying
            else capture.inputs[name]
            for name in names
        }  # fmt: skip
        for name in names:
            yield name, inputs[name], None
        for column in _root_columns(problem, outputs, batch):
            slopes = torch.autograd.grad(
                outputs, [capture.outputs[name] for name in names], column,
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
            for name, slope in zip(names, slopes, strict=True):
                if slope is not None:
                    yield name, inputs[name], slope


def _with_one(inputs: Tensor) -> Tensor:
    return torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)


def _root_columns(problem: Problem, outputs: Tensor, batch: Batch) -> Iterator[Tensor]:
    """Columns of Λ^½ for each target at once (Λ is block-diagonal over targets), shaped like Z."""
    fixed = outputs.detach()
    product = problem.loss.curvature(fixed, batch.targets)
    if product is None:
        raise ValueError(f"KFAC knows no Λ for the loss {problem.loss.name!r}.")
    classes = fixed.shape[-1]
    if classes > _MOST_CLASSES:
        raise ValueError(
            f"KFAC takes Λ^½ exactly and {classes} outputs a target are too many (at most "
            f"{_MOST_CLASSES}): use ca.GaussNewton with ca.solve instead."
        )
    rows = []
    for index in range(classes):
        unit = torch.zeros_like(fixed)
        unit[..., index] = 1
        rows.append(product(unit))
    blocks = torch.stack(rows, -1)  # (…, C, C)
    values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)
    roots = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    for index in range(classes):
        if bool(values[..., index].max() > 0):
            yield roots[..., index]
