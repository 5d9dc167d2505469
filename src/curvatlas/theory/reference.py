"""The independent reference of every check: a plain forward pass, differentiated twice.

Nothing here shares code with ``curvatlas.blocks``. Normalisation is written out by hand and second
derivatives are reverse over reverse: ``torch.func.hessian`` is silently wrong through LayerNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from curvatlas.blocks.structure import WEIGHT_NAMES, BlockSpec, Weights

Loss = Callable[[Tensor], Tensor]


def normalize(x: Tensor, kind: str, eps: float) -> Tensor:
    """n(x): LayerNorm (C x/σ) or RMSNorm (x/σ) of each token, σ = √(mean square + ε)."""
    if kind == "none":
        return x
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def affine_norm(x: Tensor, weights: Weights, which: str, spec: BlockSpec) -> Tensor:
    y = normalize(x, spec.norm, spec.eps)
    if f"{which}_weight" in weights:
        y = y * weights[f"{which}_weight"]
    if f"{which}_bias" in weights:
        y = y + weights[f"{which}_bias"]
    return y


def linear(x: Tensor, weights: Weights, which: str) -> Tensor:
    y = x @ weights[f"{which}_weight"].transpose(-1, -2)
    return y + weights[f"{which}_bias"] if f"{which}_bias" in weights else y


def activate(z: Tensor, kind: str) -> Tensor:
    if kind == "relu":
        return torch.relu(z)
    if kind == "gelu":
        return 0.5 * z * (1.0 + torch.erf(z / 2.0**0.5))
    if kind == "gelu_tanh":
        return 0.5 * z * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))
    return z * torch.sigmoid(z) if kind == "silu" else z


def attention_weights(spec: BlockSpec, weights: Weights, x: Tensor) -> Tensor:
    """A (n, H, L, L) of inputs x (n, L, d); the logits themselves when ``softmax=False``."""
    n, length, _ = x.shape
    heads, d_k, groups = spec.n_heads, spec.key_size, spec.kv_heads
    q = linear(x, weights, "query").reshape(n, length, heads, d_k).transpose(1, 2)
    k = linear(x, weights, "key").reshape(n, length, groups, d_k).transpose(1, 2)
    logits = spec.logit_scale * q @ k.repeat_interleave(heads // groups, 1).transpose(-1, -2)
    seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    if spec.window is not None:
        seen = seen.triu(1 - spec.window)
    if not spec.softmax:
        return logits.masked_fill(~seen, 0.0) if spec.causal else logits
    if spec.causal:
        logits = logits.masked_fill(~seen, float("-inf"))
    return torch.softmax(logits, -1)


def attention(spec: BlockSpec, weights: Weights, x: Tensor) -> Tensor:
    """F(x) (n, L, d): heads concatenated, projected when there is an output weight."""
    n, length, _ = x.shape
    heads, d_v, groups = spec.n_heads, spec.value_size, spec.kv_heads
    v = linear(x, weights, "value").reshape(n, length, groups, d_v).transpose(1, 2)
    mixed = attention_weights(spec, weights, x) @ v.repeat_interleave(heads // groups, 1)
    out = mixed.transpose(1, 2).reshape(n, length, heads * d_v)
    return linear(out, weights, "output") if "output_weight" in weights else out


def feed_forward(spec: BlockSpec, weights: Weights, v: Tensor) -> Tensor:
    up = linear(v, weights, "up")
    if spec.gated:
        hidden = activate(linear(v, weights, "gate"), spec.activation) * up
    else:
        hidden = activate(up, spec.activation)
    return linear(hidden, weights, "down")


def block_output(spec: BlockSpec, weights: Weights, x: Tensor) -> Tensor:
    """Z (n, L, d) of one block; ``residual=False`` is the bare attention layer."""
    if not spec.residual:
        return attention(spec, weights, x)
    if spec.norm_first:
        u = x + attention(spec, weights, affine_norm(x, weights, "norm1", spec))
        if spec.d_ff is None:
            return u
        return u + feed_forward(spec, weights, affine_norm(u, weights, "norm2", spec))
    y = affine_norm(x + attention(spec, weights, x), weights, "norm1", spec)
    if spec.d_ff is None:
        return y
    return affine_norm(y + feed_forward(spec, weights, y), weights, "norm2", spec)


def stack_output(layers: Sequence[tuple[BlockSpec, Weights]], x: Tensor) -> Tensor:
    for spec, weights in layers:
        x = block_output(spec, weights, x)
    return x


def loss_of(kind: str, target: Tensor) -> Loss:
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
    d, heads, groups = spec.d_model, spec.n_heads, spec.kv_heads
    projected = output if output is not None else (heads > 1 or spec.value_size != d)
    shapes: dict[str, tuple[int, ...]] = {
        "query_weight": (heads * spec.key_size, d),
        "key_weight": (groups * spec.key_size, d),
        "value_weight": (groups * spec.value_size, d),
    }
    if projected:
        shapes["output_weight"] = (d, heads * spec.value_size)
    if spec.d_ff is not None:
        if spec.gated:
            shapes["gate_weight"] = (spec.d_ff, d)
        shapes |= {"up_weight": (spec.d_ff, d), "down_weight": (d, spec.d_ff)}
    if bias:
        shapes |= {n.replace("weight", "bias"): s[:1] for n, s in list(shapes.items())}
    if affine and spec.residual and spec.norm != "none":
        norms = ["norm1", "norm2"] if spec.d_ff is not None else ["norm1"]
        shapes |= {f"{n}_weight": (d,) for n in norms}
        if spec.norm == "layer":
            shapes |= {f"{n}_bias": (d,) for n in norms}
    drawn: dict[str, Tensor] = {}
    for name in WEIGHT_NAMES:
        if name not in shapes:
            continue
        shape = shapes[name]
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
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
    outputs: Tensor, loss: Loss, params: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """(H, H_o, H_f): total, Jᵀ(∂²ℓ/∂Z²)J and Σ_z (∂ℓ/∂Z_z) ∂²Z_z, each (P, P)."""
    leaf = outputs.detach().requires_grad_(True)
    lam = hessian(loss(leaf), [leaf])
    jac = jacobian(outputs, params)
    total = hessian(loss(outputs), params)
    outer = jac.T @ lam @ jac
    return total, outer, total - outer


def functional_hessian(outputs: Tensor, loss: Loss, params: Sequence[Tensor]) -> Tensor:
    """H_f (P, P) on its own: the Hessian of ⟨∂ℓ/∂Z, Z(θ)⟩ with the first factor held fixed."""
    leaf = outputs.detach().requires_grad_(True)
    (delta,) = torch.autograd.grad(loss(leaf), leaf)
    return hessian((delta * outputs).sum(), params)


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
