"""What a block must look like: shapes of its weights, options that exclude each other."""

from __future__ import annotations

from torch import Tensor

from curvatlas.layers.activations import check_activation
from curvatlas.layers.norms import NORMS
from curvatlas.layers.structure import DISTANCE, WEIGHT_NAMES, BlockSpec, Weights
from curvatlas.precision import COMPUTED


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
        if spec.d_ff is not None and not spec.one_norm:
            shapes |= {"norm2_weight": (d,), "norm2_bias": (d,)}
    if spec.qk_norm is not None:
        alone = spec.qk_span == "head"
        for name, width in (("query", queries), ("key", keys)):
            size = spec.key_size if alone else width
            shapes |= {f"{name}_norm_weight": (size,), f"{name}_norm_bias": (size,)}
    if spec.output_norm is not None:
        for name in ("output", *(["down"] if spec.d_ff is not None else [])):
            shapes |= {f"{name}_norm_weight": (d,), f"{name}_norm_bias": (d,)}
    if spec.memory_size is not None:
        for name, rows in (("query", queries), ("key", keys), ("value", values), ("output", d)):
            columns = {"query": d, "output": spec.n_heads * spec.value_size}
            width = columns.get(name, spec.memory_size)
            shapes |= {f"cross_{name}_weight": (rows, width), f"cross_{name}_bias": (rows,)}
        shapes |= {"cross_norm_weight": (d,), "cross_norm_bias": (d,)}
    if spec.distances is not None:
        shapes |= {DISTANCE: (spec.distances, spec.n_heads)}
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
    for norm in (spec.norm, spec.norm2, spec.output_norm, spec.qk_norm):
        if norm is not None and norm not in NORMS:
            raise ValueError(f"unknown norm {norm!r}: choose one of {', '.join(NORMS)}.")
    for eps in (spec.eps, spec.eps2, spec.output_eps, spec.qk_eps):
        if eps is not None and eps < 0:
            raise ValueError(f"eps must not be negative, got {eps!r}.")
    _check_form(spec)
    check_activation(spec.activation)
    if not spec.residual and spec.d_ff is not None:
        raise ValueError("residual=False is the bare attention layer Z = Att(X): it has no d_ff.")


def _check_form(spec: BlockSpec) -> None:
    """Raise on options that exclude each other."""
    branches = {
        "parallel": spec.parallel,
        "output_norm": spec.output_norm is not None,
        "residual_scale": spec.residual_scale != 1.0,
    }
    for name, used in branches.items():
        if used and not (spec.norm_first and spec.residual):
            raise ValueError(f"{name} is for pre-norm blocks: norm_first=True, residual=True.")
    if spec.parallel and spec.d_ff is None:
        raise ValueError("parallel sublayers need a feed-forward part: give d_ff.")
    if spec.one_norm and not spec.parallel:
        raise ValueError("one norm for both sublayers needs them in parallel: parallel=True.")
    if spec.softcap is not None and not (spec.softcap > 0 and spec.softmax):
        raise ValueError("softcap must be positive, and needs softmax attention.")
    if spec.distances is not None and (spec.kv_heads != spec.n_heads or not spec.softmax):
        raise ValueError("learned terms of the logits need softmax attention and a key each head.")
    if spec.memory_size is not None:
        others = {
            "parallel": spec.parallel,
            "output_norm": spec.output_norm is not None,
            "qk_norm": spec.qk_norm is not None,
            "softmax=False": not spec.softmax,
            "residual=False": not spec.residual,
            "d_ff=None": spec.d_ff is None,
        }
        if excluded := [name for name, used in others.items() if used]:
            raise ValueError(f"a block with memory_size has no {', '.join(excluded)}.")
        if spec.memory_size < 1:
            raise ValueError(f"memory_size must be positive, got {spec.memory_size}.")
    if spec.rotary_size is not None and not 0 < spec.rotary_size <= spec.key_size:
        raise ValueError(
            f"rotary_size={spec.rotary_size} must lie between 1 and the head size {spec.key_size}."
        )


def check_memory(spec: BlockSpec, x: Tensor, memory: Tensor | None) -> None:
    """Raise when a block with input x (n, L, d) is not given the memory (n, L', m) it needs."""
    if spec.memory_size is None:
        if memory is not None:
            raise ValueError("a memory for a block without cross attention: memory_size is None.")
        return
    if memory is None:
        raise ValueError("the block attends to a memory: pass memory=.")
    expected = (len(x), spec.memory_size)
    if memory.ndim != 3 or (len(memory), memory.shape[-1]) != expected or memory.numel() == 0:
        raise ValueError(
            f"the memory must be ({len(x)}, tokens, {spec.memory_size}), got {tuple(memory.shape)}."
        )
    if (memory.dtype, memory.device) != (x.dtype, x.device):
        raise TypeError(
            f"the memory is {memory.dtype} on {memory.device}, the input {x.dtype} on {x.device}."
        )


def check_block(spec: BlockSpec, weights: Weights, x: Tensor) -> None:
    """Raise when spec, weights and input x (n, L, d) do not fit together."""
    check_spec(spec)
    if x.ndim != 3 or x.shape[-1] != spec.d_model or x.numel() == 0:
        raise ValueError(
            f"the input must be (samples, tokens, {spec.d_model}), got {tuple(x.shape)}."
        )
    if x.dtype not in COMPUTED:
        raise TypeError(
            f"the input must be of a floating dtype, float32 or float64, got {x.dtype}: convert "
            "the block and its input."
        )
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
    if spec.distances is not None:
        needed.append(DISTANCE)
    if spec.memory_size is not None:
        needed += [f"cross_{name}_weight" for name in ("query", "key", "value", "output")]
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
