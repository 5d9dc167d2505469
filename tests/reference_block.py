"""An independent Transformer block in plain differentiable torch, and random configurations.

Nothing here imports the code under test except the description of a block. Written for double
backward: norms by hand, softmax spelled out, heads in a loop.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.engines.tangent.structure import WEIGHT_NAMES, BlockSpec
from oracles import layer_norm, rms_norm


def activation(name: str, z: Tensor) -> Tensor:
    if name == "relu":
        return torch.where(z > 0, z, torch.zeros_like(z))
    if name == "gelu":
        return z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    if name == "gelu_tanh":
        return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    if name == "silu":
        return z / (1 + torch.exp(-z))
    assert name == "identity"
    return z


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    y = x @ w[f"{name}_weight"].T
    return y + w[f"{name}_bias"] if f"{name}_bias" in w else y


def norm(spec: BlockSpec, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    gamma, beta = w.get(f"{name}_weight"), w.get(f"{name}_bias")
    if spec.norm == "layer":
        return layer_norm(x, gamma, beta, spec.eps)
    y = rms_norm(x, gamma, spec.eps) if spec.norm == "rms" else x * (1 if gamma is None else gamma)
    return y if beta is None else y + beta


def turn(x: Tensor, base: float) -> Tensor:
    """Rotary positions as complex multiplication; x (L, s)."""
    length, size = x.shape
    z = torch.complex(x[:, : size // 2], x[:, size // 2 :])
    angle = torch.outer(
        torch.arange(length, dtype=x.dtype),
        base ** (-2 * torch.arange(size // 2, dtype=x.dtype) / size),
    )
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


def attention(spec: BlockSpec, x: Tensor, w: dict[str, Tensor], keep: Tensor) -> Tensor:
    """One sample x (L, d); keep (L, L) says who may attend to whom."""
    q, k, v = (linear(x, w, name) for name in ("query", "key", "value"))
    dk, dv, repeats = spec.key_size, spec.value_size, spec.n_heads // spec.kv_heads
    heads = []
    for h in range(spec.n_heads):
        g = h // repeats
        qh, kh = q[:, h * dk : (h + 1) * dk], k[:, g * dk : (g + 1) * dk]
        if spec.rope_base is not None:
            qh, kh = turn(qh, spec.rope_base), turn(kh, spec.rope_base)
        logits = qh @ kh.T * (spec.scale if spec.scale is not None else dk**-0.5)
        if spec.softmax:
            weight = torch.exp(logits - logits.detach().amax(-1, keepdim=True)) * keep
            weight = weight / weight.sum(-1, keepdim=True)
        else:
            weight = logits * keep
        heads.append(weight @ v[:, g * dv : (g + 1) * dv])
    mixed = torch.cat(heads, dim=-1)
    return linear(mixed, w, "output") if "output_weight" in w else mixed


def feed_forward(spec: BlockSpec, x: Tensor, w: dict[str, Tensor]) -> Tensor:
    up = linear(x, w, "up")
    if spec.gated:
        return linear(activation(spec.activation, linear(x, w, "gate")) * up, w, "down")
    return linear(activation(spec.activation, up), w, "down")


def block(spec: BlockSpec, w: dict[str, Tensor], x: Tensor, keys: Tensor | None = None) -> Tensor:
    """x (n, L, d) → (n, L, d); keys (n, L) True where a token may be attended to."""
    outputs = []
    for i, sample in enumerate(x):
        keep = torch.ones(len(sample), len(sample), dtype=x.dtype)
        keep = keep.tril() if spec.causal else keep
        keep = keep if keys is None else keep * keys[i].to(x.dtype)
        if not spec.residual:
            outputs.append(attention(spec, sample, w, keep))
            continue
        if spec.norm_first:
            y = sample + attention(spec, norm(spec, sample, w, "norm1"), w, keep)
            if spec.d_ff is not None:
                y = y + feed_forward(spec, norm(spec, y, w, "norm2"), w)
        else:
            y = norm(spec, sample + attention(spec, sample, w, keep), w, "norm1")
            if spec.d_ff is not None:
                y = norm(spec, y + feed_forward(spec, y, w), w, "norm2")
        outputs.append(y)
    return torch.stack(outputs)


@dataclass
class Case:
    spec: BlockSpec
    weights: dict[str, Tensor]
    x: Tensor
    keys: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.weights.values(), self.x]


def shapes(spec: BlockSpec) -> dict[str, tuple[int, ...]]:
    d, dk, dv, f = spec.d_model, spec.key_size, spec.value_size, spec.d_ff
    h, g = spec.n_heads, spec.kv_heads
    found: dict[str, tuple[int, ...]] = {
        "query_weight": (h * dk, d),
        "key_weight": (g * dk, d),
        "value_weight": (g * dv, d),
        "query_bias": (h * dk,),
        "key_bias": (g * dk,),
        "value_bias": (g * dv,),
        "output_weight": (d, h * dv),
        "output_bias": (d,),
    }
    if f is not None:
        found |= {"gate_weight": (f, d), "gate_bias": (f,)} if spec.gated else {}
        found |= {"up_weight": (f, d), "up_bias": (f,), "down_weight": (d, f), "down_bias": (d,)}
    if spec.residual:
        found |= {"norm1_weight": (d,), "norm1_bias": (d,)}
        found |= {} if f is None else {"norm2_weight": (d,), "norm2_bias": (d,)}
    return found


def random_weights(
    spec: BlockSpec, seed: int, *, drop: frozenset[str] = frozenset(), scale: float = 0.6
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in WEIGHT_NAMES:
        if name in shapes(spec) and name not in drop:
            value = scale * torch.randn(
                shapes(spec)[name], generator=generator, dtype=torch.float64
            )
            if name in ("norm1_weight", "norm2_weight"):
                value = 1 + value
            found[name] = value.requires_grad_(True)
    return found


def random_case(seed: int) -> Case:
    """Any mixture of the options of ``BlockSpec``."""
    r = random.Random(seed)
    whole = r.random() < 0.8
    heads = r.choice([1, 2, 4])
    shared = r.choice([g for g in (1, 2, 4) if heads % g == 0])
    rope = r.random() < 0.25
    project = heads > 1 or r.random() < 0.6
    d = r.choice([4, 6]) if heads != 4 else 8
    spec = BlockSpec(
        d_model=d,
        n_heads=heads,
        n_kv_heads=None if shared == heads else shared,
        d_k=r.choice([2, 4]) if rope else r.choice([1, 2, 3]),
        d_v=r.choice([1, 2, 3]) if project else d,
        d_ff=r.choice([3, 5, 7]) if whole else None,
        norm=r.choice(["layer", "layer", "rms", "none"]),
        norm_first=r.random() < 0.5,
        activation=r.choice(["relu", "gelu", "gelu_tanh", "silu", "identity"]),
        gated=r.random() < 0.3,
        eps=r.choice([1e-5, 0.1]),
        causal=r.random() < 0.4,
        softmax=r.random() < 0.85,
        scale=r.choice([None, None, 0.7]),
        rope_base=r.choice([10.0, 10000.0]) if rope else None,
        residual=whole or r.random() < 0.5,
    )
    drop = set() if project else {"output_weight", "output_bias"}
    drop |= {n for n in WEIGHT_NAMES if n.endswith("bias") and r.random() < 0.4}
    drop |= {n for n in ("norm1_weight", "norm2_weight") if r.random() < 0.2}
    samples, length = r.choice([1, 2, 3]), r.choice([1, 2, 3, 5])
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, length, d, generator=generator, dtype=torch.float64)
    keys = None
    if r.random() < 0.3:
        keys = torch.rand(samples, length, generator=generator) < 0.6
        keys[:, 0] = True  # the first key stays, so no causal row is empty
    weights = random_weights(spec, seed, drop=frozenset(drop))
    return Case(spec, weights, x.requires_grad_(True), keys)
