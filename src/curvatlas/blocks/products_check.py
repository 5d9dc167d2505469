"""What a block and its directions must look like before anything is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.blocks.activations import check_activation
from curvatlas.blocks.normalization import NORMS
from curvatlas.blocks.structure import WEIGHT_NAMES, BlockSpec, Weights


def weight_shapes(spec: BlockSpec) -> dict[str, tuple[int, ...]]:
    """The shape every weight of ``spec`` would have, present or not."""
    d, queries = spec.d_model, spec.n_heads * spec.key_size
    keys, values = spec.kv_heads * spec.key_size, spec.kv_heads * spec.value_size
    shapes: dict[str, tuple[int, ...]] = {
        "query_weight": (queries, d),
        "key_weight": (keys, d),
        "value_weight": (values, d),
        "query_bias": (queries,),
        "key_bias": (keys,),
        "value_bias": (values,),
        "output_weight": (d, spec.n_heads * spec.value_size),
        "output_bias": (d,),
    }
    if spec.d_ff is not None:
        f = spec.d_ff
        if spec.gated:
            shapes |= {"gate_weight": (f, d), "gate_bias": (f,)}
        shapes |= {"up_weight": (f, d), "up_bias": (f,)}
        shapes |= {"down_weight": (d, f), "down_bias": (d,)}
    if spec.residual:
        shapes |= {"norm1_weight": (d,), "norm1_bias": (d,)}
        if spec.d_ff is not None:
            shapes |= {"norm2_weight": (d,), "norm2_bias": (d,)}
    return shapes


def check_spec(spec: BlockSpec) -> None:
    """Raise on sizes and choices that no block can have."""
    d, heads, shared = spec.d_model, spec.n_heads, spec.kv_heads
    if min(d, heads, shared) < 1 or (spec.d_ff is not None and spec.d_ff < 1):
        raise ValueError(f"sizes must be positive: {spec}.")
    if heads % shared:
        raise ValueError(
            f"n_kv_heads={shared} must divide n_heads={heads}: each serves as many queries."
        )
    if d % heads and (spec.d_k is None or spec.d_v is None):
        raise ValueError(f"n_heads={heads} must divide d_model={d}, or give d_k and d_v.")
    if min(spec.key_size, spec.value_size) < 1:
        raise ValueError("d_k and d_v must be positive.")
    if spec.norm not in NORMS:
        raise ValueError(f"unknown norm {spec.norm!r}: choose one of {', '.join(NORMS)}.")
    if spec.eps < 0:
        raise ValueError(f"eps must not be negative, got {spec.eps!r}.")
    check_activation(spec.activation)
    if not spec.residual and spec.d_ff is not None:
        raise ValueError("residual=False is the bare attention layer Z = Att(X): it has no d_ff.")


def check_block(spec: BlockSpec, weights: Weights, x: Tensor) -> None:
    """Raise when spec, weights and input x (n, L, d) do not fit together."""
    check_spec(spec)
    if x.ndim != 3 or x.shape[-1] != spec.d_model or x.numel() == 0:
        raise ValueError(
            f"the input must be (samples, tokens, {spec.d_model}), got {tuple(x.shape)}."
        )
    if not x.is_floating_point():
        raise TypeError(f"the input must be of a floating dtype, got {x.dtype}.")
    shapes = weight_shapes(spec)
    if unknown := set(weights) - set(shapes):
        name = sorted(unknown)[0]
        reason = "this block has no such part" if name in WEIGHT_NAMES else "unknown name"
        raise ValueError(f"weight {name!r}: {reason}; expected some of {', '.join(shapes)}.")
    for name, weight in weights.items():
        if tuple(weight.shape) != shapes[name]:
            raise ValueError(f"{name} must be {shapes[name]}, got {tuple(weight.shape)}.")
        if weight.dtype != x.dtype:
            raise TypeError(f"{name} is {weight.dtype}, the input {x.dtype}: convert one of them.")
        if weight.device != x.device:
            raise ValueError(f"{name} is on {weight.device}, the input on {x.device}.")
    needed = ["query_weight", "key_weight", "value_weight"]
    if spec.d_ff is not None:
        needed += ["up_weight", "down_weight", *(["gate_weight"] if spec.gated else [])]
    if missing := [name for name in needed if name not in weights]:
        raise ValueError(f"the block misses {', '.join(missing)}.")
    if "output_weight" not in weights:
        if spec.n_heads * spec.value_size != spec.d_model or spec.n_heads != 1:
            raise ValueError(
                "without output_weight the attention needs one head with d_v = d_model, got "
                f"{spec.n_heads} heads of size {spec.value_size} for d_model={spec.d_model}."
            )
        if "output_bias" in weights:
            raise ValueError("output_bias without output_weight: give both or neither.")


def check_directions(
    weights: Weights,
    tangents: Weights,
    x_dot: Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
) -> int:
    """The number K of directions, after checking that all tangents agree on it."""
    counts: dict[str, int] = {}
    for name, tangent in tangents.items():
        if name not in weights:
            raise ValueError(f"a tangent for {name!r}, which the block does not have.")
        if tangent.ndim != weights[name].ndim + 1 or tangent.shape[1:] != weights[name].shape:
            raise ValueError(
                f"the tangent of {name} must be (K, {', '.join(map(str, weights[name].shape))}), "
                f"got {tuple(tangent.shape)}."
            )
        if tangent.dtype != dtype:
            raise TypeError(f"the tangent of {name} is {tangent.dtype}, the block {dtype}.")
        counts[name] = tangent.shape[0]
    if x_dot is not None:
        if x_dot.ndim != 4 or x_dot.shape[1:] != shape:
            raise ValueError(
                f"the input's tangent must be (K, {', '.join(map(str, shape))}), "
                f"got {tuple(x_dot.shape)}."
            )
        counts["x"] = x_dot.shape[0]
    if not counts:
        raise ValueError("no direction given: pass a tangent of a weight or of the input.")
    if len(set(counts.values())) > 1:
        raise ValueError(f"the tangents disagree on the number of directions: {counts}.")
    return next(iter(counts.values()))
