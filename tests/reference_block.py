"""An independent Transformer block in plain differentiable torch, and random configurations.

Nothing here imports the code under test except the description of a block. Written for double
backward: norms by hand, softmax spelled out, heads in a loop.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import combinations

import torch
from torch import Tensor

from curvatlas.layers.checks import weight_shapes
from curvatlas.layers.structure import WEIGHT_NAMES, BlockSpec
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


def norm(
    spec: BlockSpec,
    x: Tensor,
    w: dict[str, Tensor],
    name: str,
    *,
    kind: str | None = None,
    eps: float | None = None,
) -> Tensor:
    gamma, beta = w.get(f"{name}_weight"), w.get(f"{name}_bias")
    gamma = gamma if gamma is None else gamma + spec.gain_offset
    if name == "norm2":
        kind, eps = spec.norm2, spec.eps2
    kind, eps = kind or spec.norm, spec.eps if eps is None else eps
    if kind == "layer":
        return layer_norm(x, gamma, beta, eps)
    y = rms_norm(x, gamma, eps) if kind == "rms" else x * (1 if gamma is None else gamma)
    return y if beta is None else y + beta


def head_norm(spec: BlockSpec, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    """Queries or keys (L, heads·s), normalised head by head or all together."""
    options = {"kind": spec.qk_norm, "eps": spec.qk_eps}
    if spec.qk_norm is None or spec.qk_span == "width":
        return x if spec.qk_norm is None else norm(spec, x, w, f"{name}_norm", **options)
    heads = []
    for h, part in enumerate(x.split(spec.key_size, -1)):
        own = dict(w)
        if spec.qk_span == "each head":
            rows = slice(h * spec.key_size, (h + 1) * spec.key_size)
            own = {n: value[rows] for n, value in w.items() if n.startswith(f"{name}_norm")}
        heads.append(norm(spec, part, own, f"{name}_norm", **options))
    return torch.cat(heads, -1)


def turn_some(spec: BlockSpec, x: Tensor) -> Tensor:
    """Rotary positions of the first coordinates of a head x (L, s), in either layout."""
    assert spec.rope_base is not None
    size = spec.rotary_size or x.shape[-1]
    first, rest = x[:, :size], x[:, size:]
    if spec.rope_interleaved:  # even coordinates first, turned, and back
        order = [*range(0, size, 2), *range(1, size, 2)]
        back = [order.index(i) for i in range(size)]
        return torch.cat([turn(first[:, order], spec.rope_base)[:, back], rest], -1)
    return torch.cat([turn(first, spec.rope_base), rest], -1)


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


def attention(
    spec: BlockSpec,
    x: Tensor,
    w: dict[str, Tensor],
    keep: Tensor,
    buckets: Tensor | None = None,
) -> Tensor:
    """One sample x (L, d); keep (L, L) says who may attend to whom, buckets (L, L) which learned
    term a pair has."""
    q, k, v = (linear(x, w, name) for name in ("query", "key", "value"))
    q, k = head_norm(spec, q, w, "query"), head_norm(spec, k, w, "key")
    dk, dv, repeats = spec.key_size, spec.value_size, spec.n_heads // spec.kv_heads
    heads = []
    for h in range(spec.n_heads):
        g = h // repeats
        qh, kh = q[:, h * dk : (h + 1) * dk], k[:, g * dk : (g + 1) * dk]
        if spec.rope_base is not None:
            qh, kh = turn_some(spec, qh), turn_some(spec, kh)
        logits = qh @ kh.T * (spec.scale if spec.scale is not None else dk**-0.5)
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        if buckets is not None:
            logits = logits + w["distance_weight"][buckets, h]
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


def cross_attention(
    spec: BlockSpec, x: Tensor, memory: Tensor, w: dict[str, Tensor], keep: Tensor
) -> Tensor:
    """Tokens x (L, d) of one sample look at its memory (L', m); keep (L') says which of it."""
    dk, dv, repeats = spec.key_size, spec.value_size, spec.n_heads // spec.kv_heads
    q = linear(x, w, "cross_query")
    k, v = linear(memory, w, "cross_key"), linear(memory, w, "cross_value")
    heads = []
    for h in range(spec.n_heads):
        g = h // repeats
        logits = q[:, h * dk : (h + 1) * dk] @ k[:, g * dk : (g + 1) * dk].T
        logits = logits * (spec.scale if spec.scale is not None else dk**-0.5)
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        weight = torch.exp(logits - logits.detach().amax(-1, keepdim=True)) * keep
        heads.append(weight / weight.sum(-1, keepdim=True) @ v[:, g * dv : (g + 1) * dv])
    return linear(torch.cat(heads, -1), w, "cross_output")


def block(
    spec: BlockSpec,
    w: dict[str, Tensor],
    x: Tensor,
    keys: Tensor | None = None,
    memory: Tensor | None = None,
    memory_keys: Tensor | None = None,
    buckets: Tensor | None = None,
) -> Tensor:
    """x (n, L, d) → (n, L, d); keys (n, L) True where a token may be attended to.

    memory (n, L', m) and memory_keys (n, L') likewise for cross attention; buckets (L, L) are rows
    of the table of learned terms.
    """
    outputs = []
    for i, sample in enumerate(x):
        keep = torch.ones(len(sample), len(sample), dtype=x.dtype)
        keep = keep.tril() if spec.causal else keep
        keep = keep if keys is None else keep * keys[i].to(x.dtype)
        if not spec.residual:
            outputs.append(attention(spec, sample, w, keep))
            continue
        if spec.norm_first:
            seen = norm(spec, sample, w, "norm1")
            f = attention(spec, seen, w, keep, buckets)
            y = sample + _behind(spec, f, w, "output_norm")
            if memory is not None:
                seen, kept = norm(spec, y, w, "cross_norm"), _kept(memory, memory_keys, i)
                f = cross_attention(spec, seen, memory[i], w, kept)
                y = y + spec.residual_scale * f
            if spec.d_ff is not None:
                seen = norm(spec, sample if spec.parallel else y, w, "norm2")
                seen = norm(spec, sample, w, "norm1") if spec.one_norm else seen
                y = y + _behind(spec, feed_forward(spec, seen, w), w, "down_norm")
        else:
            y = norm(spec, sample + attention(spec, sample, w, keep, buckets), w, "norm1")
            if memory is not None:
                f = cross_attention(spec, y, memory[i], w, _kept(memory, memory_keys, i))
                y = norm(spec, y + f, w, "cross_norm")
            if spec.d_ff is not None:
                y = norm(spec, y + feed_forward(spec, y, w), w, "norm2")
        outputs.append(y)
    return torch.stack(outputs)


def _kept(memory: Tensor, keys: Tensor | None, sample: int) -> Tensor:
    ones = torch.ones(memory.shape[1], dtype=memory.dtype)
    return ones if keys is None else ones * keys[sample]


def _behind(spec: BlockSpec, f: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    """What a sublayer adds to the residual path."""
    if spec.output_norm is not None:
        f = norm(spec, f, w, name, kind=spec.output_norm, eps=spec.output_eps)
    return spec.residual_scale * f


@dataclass
class Case:
    spec: BlockSpec
    weights: dict[str, Tensor]
    x: Tensor
    keys: Tensor | None
    memory: Tensor | None = None
    memory_keys: Tensor | None = None
    buckets: Tensor | None = None

    @property
    def moving(self) -> dict[str, Tensor]:
        """The weights, and the memory among them."""
        return self.weights if self.memory is None else {**self.weights, "memory": self.memory}

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.moving.values(), self.x]

    def output(self) -> Tensor:
        memory = {"memory": self.memory, "memory_keys": self.memory_keys}
        return block(self.spec, self.weights, self.x, self.keys, **memory, buckets=self.buckets)


def options_of(case: Case, **more: object) -> frozenset[tuple[str, object]]:
    """Every option of a case with its value: of the block, its weights, its sizes, and ``more``."""
    memory = None if case.memory is None else case.memory.shape[1]
    found = {**asdict(case.spec), **{name: name in case.weights for name in WEIGHT_NAMES}, **more}
    found |= dict(zip(("samples", "tokens"), case.x.shape, strict=False), memory_tokens=memory)
    found |= {"padding": case.keys is not None, "memory_padding": case.memory_keys is not None}
    return frozenset(found.items())


def pairs_of(cases: Iterable[frozenset[tuple[str, object]]]) -> set[frozenset[tuple[str, object]]]:
    """Every two values of options that stand together in one of the cases."""
    return {frozenset(two) for case in cases for two in combinations(case, 2)}


def random_weights(
    spec: BlockSpec, seed: int, *, drop: frozenset[str] = frozenset(), scale: float = 0.6
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found, shapes = {}, weight_shapes(spec)
    for name in WEIGHT_NAMES:
        if name in shapes and name not in drop:
            value = scale * torch.randn(shapes[name], generator=generator, dtype=torch.float64)
            if "norm" in name and name.endswith("_weight"):
                value = 1 - spec.gain_offset + value
            found[name] = value.requires_grad_(True)
    return found


_WITHOUT_MEMORY = [name for name in WEIGHT_NAMES if not name.startswith(("cross_", "distance"))]


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
    drop |= {n for n in _WITHOUT_MEMORY if n.endswith("bias") and r.random() < 0.4}
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


def random_form(seed: int) -> Case:
    """Any mixture of the forms that only the matrix-free products have."""
    r = random.Random(1000 + seed)
    heads = r.choice([1, 2, 4])
    shared = r.choice([g for g in (1, 2, 4) if heads % g == 0])
    d, dk = r.choice([4, 6, 8]), r.choice([2, 4, 6])
    parallel = r.random() < 0.4
    rope = r.random() < 0.6
    spec = BlockSpec(
        d_model=d,
        n_heads=heads,
        n_kv_heads=None if shared == heads else shared,
        d_k=dk,
        d_v=r.choice([1, 2, 3]),
        d_ff=r.choice([3, 5]) if parallel or r.random() < 0.85 else None,
        norm=r.choice(["layer", "rms", "none"]),
        norm2=r.choice([None, None, "layer", "rms"]),
        norm_first=True,
        output_norm=r.choice([None, None, "rms", "layer", "none"]),
        parallel=parallel,
        one_norm=parallel and r.random() < 0.5,
        residual_scale=r.choice([1.0, 1.0, 0.3]),
        gain_offset=r.choice([0.0, 0.0, 1.0]),
        activation=r.choice(["gelu", "silu", "relu"]),
        gated=r.random() < 0.4,
        eps=r.choice([1e-5, 0.1]),
        eps2=r.choice([None, 0.2]),
        output_eps=r.choice([None, 0.05]),
        qk_norm=r.choice([None, "rms", "layer"]),
        qk_span=r.choice(["head", "each head", "width"]),
        qk_eps=r.choice([None, 0.3]),
        causal=r.random() < 0.5,
        softcap=r.choice([None, None, 0.8]),
        scale=r.choice([None, 0.7]),
        rope_base=10.0 if rope else None,
        rope_interleaved=rope and r.random() < 0.5,
        rotary_size=r.choice([None, 2]) if rope else None,
    )
    drop = {n for n in _WITHOUT_MEMORY if n.endswith("bias") and r.random() < 0.5}
    drop |= {n for n in _WITHOUT_MEMORY if "norm" in n and r.random() < 0.2}
    generator = torch.Generator().manual_seed(seed)
    samples, length = r.choice([1, 2, 3]), r.choice([1, 3, 5])
    x = torch.randn(samples, length, d, generator=generator, dtype=torch.float64)
    keys = None
    if r.random() < 0.3:
        keys = torch.rand(samples, length, generator=generator) < 0.6
        keys[:, 0] = True
    weights = random_weights(spec, seed, drop=frozenset(drop))
    return Case(spec, weights, x.requires_grad_(True), keys)


def random_cross(seed: int) -> Case:
    """Any mixture of the options of a block that attends to a memory, or has learned terms too."""
    r = random.Random(2000 + seed)
    heads, distances = r.choice([1, 2, 4]), r.choice([None, 3])
    shared = [g for g in (1, 2, 4) if heads % g == 0 and (distances is None or g == heads)]
    rope = r.random() < 0.3
    spec = BlockSpec(
        d_model=r.choice([4, 6, 8]),
        n_heads=heads,
        n_kv_heads=r.choice(shared),
        d_k=2 if rope else r.choice([1, 2, 3]),
        d_v=r.choice([1, 2, 3]),
        d_ff=r.choice([3, 5]),
        norm=r.choice(["layer", "rms", "none"]),
        norm_first=r.random() < 0.5,
        gain_offset=r.choice([0.0, 1.0]),
        activation=r.choice(["gelu", "relu"]),
        gated=r.random() < 0.4,
        eps=r.choice([1e-5, 0.1]),
        causal=r.random() < 0.6,
        softcap=r.choice([None, None, 0.8]),
        scale=r.choice([None, 0.7]),
        rope_base=10.0 if rope else None,
        memory_size=r.choice([3, 4]),
        distances=distances,
    )
    drop = {n for n in WEIGHT_NAMES if n.endswith("bias") and r.random() < 0.4}
    drop |= {n for n in WEIGHT_NAMES if "norm" in n and r.random() < 0.2}
    generator = torch.Generator().manual_seed(seed)
    buckets = None
    samples, length, others = r.choice([1, 2, 3]), r.choice([1, 3, 5]), r.choice([1, 2, 4])
    x = torch.randn(samples, length, spec.d_model, generator=generator, dtype=torch.float64)
    size = (samples, others, spec.memory_size or 0)
    memory = torch.randn(size, generator=generator, dtype=torch.float64)
    keys = None
    if r.random() < 0.5:
        keys = torch.rand(samples, others, generator=generator) < 0.6
        keys[:, -1] = True
    weights = random_weights(spec, seed, drop=frozenset(drop))
    leaves = x.requires_grad_(True), memory.requires_grad_(True)
    if distances is not None:
        buckets = torch.randint(0, distances, (length, length), generator=generator)
    return Case(spec, weights, leaves[0], None, leaves[1], keys, buckets)
