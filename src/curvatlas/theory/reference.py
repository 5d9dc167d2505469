"""The independent reference of every check: a plain forward pass, differentiated twice.

Kept apart from the engines and closed forms on purpose: ``curvatlas verify`` compares them with it.
Normalisation is written out by hand and second derivatives are reverse over reverse:
``torch.func.hessian`` is silently wrong through LayerNorm. Only the section on our closed forms,
at the end, calls what is under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from curvatlas.closed_form.modules import TransformerBlockHessian
from curvatlas.closed_form.result import BlockHessian
from curvatlas.layers.checks import weight_shapes
from curvatlas.layers.losses import OutputLoss
from curvatlas.layers.structure import WEIGHT_NAMES, BlockSpec, Weights
from curvatlas.linear_operator import Part
from curvatlas.zoo.block import forward_pass

# ---- the papers' matrices: to compare with at small size ---------------------------------------


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def kron(*factors: Tensor) -> Tensor:
    """A ⊗ B ⊗ … from left to right."""
    product = factors[0]
    for factor in factors[1:]:
        product = torch.kron(product.contiguous(), factor.contiguous())
    return product


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def commutation(m: int, n: int) -> Tensor:
    """K_{m,n} (mn, mn) with K vec(A) = vec(Aᵀ) for A (m, n), column-major vec."""
    matrix = torch.zeros(m * n, m * n, dtype=torch.float64)
    for i in range(m):
        for j in range(n):
            matrix[j + n * i, i + m * j] = 1.0
    return matrix


@dataclass(frozen=True)
class SingleHead:
    """Single-head attention in the papers' layout: weights act on the right, d_v = d, no W_O."""

    x: Tensor  # (L, d)
    query: Tensor  # (d, d_k)
    key: Tensor  # (d, d_k)
    value: Tensor  # (d, d)
    target: Tensor  # (L, d)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.query.shape[1])

    @property
    def reduction(self) -> float:
        """c = 2/(L d_v), the second derivative of the mean squared error."""
        return 2.0 / self.target.numel()

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def logits(self) -> Tensor:
        return self.scale * (self.x @ self.query) @ (self.x @ self.key).T

    def attention(self) -> Tensor:
        return torch.softmax(self.logits(), -1)

    def output(self) -> Tensor:
        return self.attention() @ self.x @ self.value

    def loss(self, output: Tensor) -> Tensor:
        return (output - self.target).pow(2).mean()

    def tracked(self) -> SingleHead:
        q, k, v = (p.detach().clone().requires_grad_(True) for p in self.parameters)
        return SingleHead(self.x, q, k, v, self.target)


def draw_head(
    generator: torch.Generator,
    *,
    length: int,
    d: int,
    d_k: int,
    input_scale: float = 1.0,
    weight_scale: float = 1.0,
) -> SingleHead:
    return SingleHead(
        x=input_scale * normal(generator, length, d),
        query=weight_scale * normal(generator, d, d_k) / d**0.5,
        key=weight_scale * normal(generator, d, d_k) / d**0.5,
        value=weight_scale * normal(generator, d, d) / d**0.5,
        target=normal(generator, length, d),
    )


LossFunction = Callable[[Tensor], Tensor]


def block_output(spec: BlockSpec, weights: Weights, x: Tensor) -> Tensor:
    """Z (n, L, d) of one block; ``residual=False`` is the bare attention layer."""
    return forward_pass(spec, weights, x)[0]


def normalize(x: Tensor, kind: str, eps: float) -> Tensor:
    """n(x): LayerNorm (C x/σ) or RMSNorm (x/σ) of each token, σ = √(mean square + ε)."""
    if kind == "none":
        return x
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def loss_of(kind: str, target: Tensor) -> LossFunction:
    """ "mse": ‖Z − Y‖²/(n L d); "cross_entropy": mean over tokens, integer targets."""
    if kind == "mse":
        return lambda z: (z - target).pow(2).mean()
    return lambda z: -torch.log_softmax(z, -1).gather(-1, target.unsqueeze(-1)).mean()


def draw_weights(
    spec: BlockSpec,
    generator: torch.Generator,
    *,
    scale: float = 1.0,
    bias: bool = False,
    output: bool | None = None,
    affine: bool = True,
) -> dict[str, Tensor]:
    """Random float64 weights of a block, entries ~ scale/√fan_in, γ around 1."""
    d, heads = spec.d_model, spec.n_heads
    projected = output if output is not None else (heads > 1 or spec.value_size != d)

    def has(name: str) -> bool:
        if name.startswith("norm"):
            known = spec.norm == "layer" or name.endswith("weight")
            return affine and spec.norm != "none" and known
        if name.startswith("output") and not projected:
            return False
        return bias or name.endswith("weight")

    shapes = {name: shape for name, shape in weight_shapes(spec).items() if has(name)}
    drawn: dict[str, Tensor] = {}
    for name in (n for n in WEIGHT_NAMES if n in shapes):
        shape = shapes[name]
        noise = normal(generator, *shape)
        if name.startswith("norm"):
            drawn[name] = 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
        else:
            drawn[name] = noise * (scale / shape[-1] ** 0.5 if len(shape) > 1 else 0.3 * scale)
    return drawn


def tracked(weights: Weights) -> dict[str, Tensor]:
    """Copies of the weights that record gradients."""
    return {name: w.detach().clone().requires_grad_(True) for name, w in weights.items()}


def flat_gradient(value: Tensor, params: Sequence[Tensor], *, graph: bool = False) -> Tensor:
    grads = torch.autograd.grad(
        value, params, create_graph=graph, retain_graph=True, allow_unused=True
    )
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)]
    return torch.cat([g.reshape(-1) for g in filled])


def jacobian(outputs: Tensor, params: Sequence[Tensor], *, graph: bool = False) -> Tensor:
    """Dense Jacobian (#outputs, P); all rows in one batched backward pass."""
    flat = outputs.reshape(-1)
    if not flat.requires_grad:
        return flat.new_zeros(flat.numel(), sum(p.numel() for p in params))
    rows = torch.autograd.grad(
        flat,
        params,
        torch.eye(flat.numel(), dtype=flat.dtype, device=flat.device),
        retain_graph=True,
        create_graph=graph,
        allow_unused=True,
        is_grads_batched=True,
    )
    filled = [
        flat.new_zeros(flat.numel(), p.numel()) if r is None else r.reshape(flat.numel(), -1)
        for r, p in zip(rows, params, strict=True)
    ]
    return torch.cat(filled, 1)


def hessian(value: Tensor, params: Sequence[Tensor], *, graph: bool = False) -> Tensor:
    """Dense Hessian (P, P) of a scalar: reverse over reverse, rows batched."""
    return jacobian(flat_gradient(value, params, graph=True), params, graph=graph)


def split_hessian(
    outputs: Tensor, loss: LossFunction, params: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """(H, H_o, H_f): total, Jᵀ(∂²ℓ/∂Z²)J and Σ_z (∂ℓ/∂Z_z) ∂²Z_z, each (P, P)."""
    leaf = outputs.detach().requires_grad_(True)
    lam = hessian(loss(leaf), [leaf])
    jac = jacobian(outputs, params)
    total = hessian(loss(outputs), params)
    outer = jac.T @ lam @ jac
    return total, outer, total - outer


def spectral_norm(matrix: Tensor) -> Tensor:
    """‖M‖₂ of a symmetric matrix: the larger end of its spectrum."""
    values = torch.linalg.eigvalsh(0.5 * (matrix + matrix.transpose(-1, -2)))
    return torch.maximum(values[..., -1].abs(), values[..., 0].abs())


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖_F / ‖want‖_F, absolute when ``want`` is zero."""
    got, want = got.detach(), want.detach()
    scale = float(torch.linalg.norm(want))
    error = float(torch.linalg.norm(got - want))
    return error / scale if scale > 0 else error


# ---- random blocks for sweeps ------------------------------------------------------------------


T = TypeVar("T")
KINDS = ("attention", "post-norm", "pre-norm")


@dataclass(frozen=True)
class Case:
    """A block at one batch: x, target (n, L, d) (or class indices) under ``loss``."""

    spec: BlockSpec
    weights: dict[str, Tensor]
    x: Tensor
    target: Tensor
    loss: str


def draw_case(generator: torch.Generator, kind: str, *, small: bool = False) -> Case:
    """One random case; ``small`` keeps to a handful of numbers, for an adversary."""

    def pick(options: Sequence[T]) -> T:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    def between(low: float, high: float) -> float:
        return low * math.exp(math.log(high / low) * float(torch.rand(1, generator=generator)))

    heads = pick((1, 2)) if small else pick((1, 1, 2, 3))
    d = pick((2, 3)) if small else pick((4, 5, 6))
    bare = kind == "attention"
    spec = BlockSpec(
        d_model=d,
        n_heads=heads,
        d_k=pick((1, 2)) if small else pick((1, 2, 4)),
        d_v=d if heads == 1 else pick((1, 2)),
        d_ff=None if bare else (3 if small else pick((5, 8))),
        norm=pick(("layer", "layer", "rms")),
        norm_first=kind == "pre-norm",
        activation=pick(("gelu", "silu", "gelu_tanh") if small else ("relu", "gelu", "silu")),
        gated=pick((False, False, True)),
        eps=0.1 if small else 1e-5,  # d = 2 without ε normalises every token to (±1, ∓1)
        causal=pick((False, False, True)),
        residual=not bare,
    )
    weights = draw_weights(spec, generator, scale=between(0.3, 3.0), bias=pick((False, True)))
    n, length = (1, pick((2, 3))) if small else (pick((1, 1, 2)), pick((2, 4, 6, 8)))
    x = between(0.1, 3.0) * normal(generator, n, length, d)
    loss = pick(("mse", "mse", "cross_entropy"))
    target = normal(generator, n, length, d)
    if loss == "cross_entropy":
        target = torch.randint(d, (n, length), generator=generator)
    return Case(spec, weights, x, target, loss)


# ---- our closed forms, as the checks use them --------------------------------------------------


def block_hessian(
    spec: BlockSpec, weights: Weights, x: Tensor, target: Tensor, *, loss: str | OutputLoss = "mse"
) -> BlockHessian:
    """H, H_o and H_f of a block at inputs x (n, L, d), in closed form."""
    return TransformerBlockHessian.from_weights(spec, weights).compute_block_hessian(
        x, target, loss
    )


def head_as_block(head: SingleHead) -> tuple[BlockSpec, dict[str, Tensor]]:
    """The papers' single head as a block: weights in (out, in) layout, no W_O, no residual."""
    d, d_k = head.query.shape
    spec = BlockSpec(d_model=d, d_k=d_k, d_v=d, residual=False)
    named = zip(("query_weight", "key_weight", "value_weight"), head.parameters, strict=True)
    return spec, {name: w.detach().T.contiguous() for name, w in named}


def in_papers_layout(
    result: BlockHessian, weights: Weights, letters: Mapping[str, str], part: Part
) -> dict[tuple[str, str], Tensor]:
    """All blocks of ``part`` between these weights, rows and columns (in, out) in row-major order.

    letters: the papers' name of a weight → ours
    """

    def turned(name: str) -> Tensor:
        out, inputs = weights[name].shape
        return torch.arange(out * inputs).reshape(out, inputs).T.reshape(-1)

    return {
        (a, b): result.block(first, second, part)[turned(first)][:, turned(second)]
        for a, first in letters.items()
        for b, second in letters.items()
    }


def attention_hessian_blocks(head: SingleHead, part: Part) -> dict[str, Tensor]:
    """Blocks VV, VQ, … of ``part`` from the chain, in the papers' layout."""
    spec, weights = head_as_block(head)
    result = block_hessian(spec, weights, head.x.unsqueeze(0), head.target.unsqueeze(0))
    letters = {"Q": "query_weight", "K": "key_weight", "V": "value_weight"}
    blocks = in_papers_layout(result, weights, letters, part)
    return {a + b: block for (a, b), block in blocks.items()}


Objective = Callable[[Sequence[Tensor]], Tensor]


def climb(
    objective: Objective, start: Sequence[Tensor], *, steps: int, rate: float = 0.05
) -> tuple[float, list[Tensor]]:
    """Adam ascent on log(objective); returns the best value met and where.

    Written out because ``torch.optim`` costs seconds of imports that nothing else here needs.
    A kink or a degenerate eigenvalue can make one gradient NaN: such entries are left unmoved.
    """
    point = [t.detach().clone() for t in start]
    mean, square = ([torch.zeros_like(t) for t in point] for _ in range(2))
    best, where = -float("inf"), point
    for step in range(1, steps + 1):
        tracked = [t.clone().requires_grad_(True) for t in point]
        value = objective(tracked)
        reached = float(value.detach())
        if not math.isfinite(reached):
            break
        if reached > best:
            best, where = reached, [t.clone() for t in point]
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            value.clamp_min(1e-300).log(), tracked, allow_unused=True
        )
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            g = torch.nan_to_num(gradient, 0.0, 0.0, 0.0)
            mean[i] = 0.9 * mean[i] + 0.1 * g
            square[i] = 0.999 * square[i] + 0.001 * g * g
            size = (square[i] / (1 - 0.999**step)).sqrt() + 1e-12
            point[i] = point[i] + rate * mean[i] / (1 - 0.9**step) / size
    return best, where
