"""Exact Hessians of tiny Transformers by JAX, stored for the tests as an independent oracle.

    python -m venv .venv-jax && .venv-jax/bin/pip install jax safetensors
    .venv-jax/bin/python scripts/jax_fixtures.py

Nothing here shares code with curvatlas or PyTorch: normalisation, attention and losses are written
again in jax.numpy, second derivatives come from ``jax.hessian`` in float64. Each file in
tests/fixtures holds the weights (PyTorch's (out, in) layout), inputs, targets, loss, gradient and
outputs, and the upper triangles of H and of H_outer = Jᵀ (∂²ℓ/∂Z²) J. The flat vector follows the
order of ``parameters`` in the header, each entry row-major.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402  (float64 must be switched on first)
from safetensors.numpy import save_file  # noqa: E402

FOLDER = Path(__file__).parents[1] / "tests" / "fixtures"
IGNORED = -100

ACTIVATIONS = {
    "relu": lambda h: jnp.maximum(h, 0.0),
    "gelu": lambda h: jax.nn.gelu(h, approximate=False),
    "gelu_tanh": lambda h: jax.nn.gelu(h, approximate=True),
    "silu": jax.nn.silu,
    "identity": lambda h: h,
}

# A block: fields of curvatlas' BlockSpec, whether it has biases, and its loss. "pooled" is the
# cross-entropy of head_weight · mean over tokens; "cross_entropy" takes the d outputs as logits.
BLOCKS: dict[str, dict[str, Any]] = {
    "post_layer_gelu_mse": {"n_heads": 2, "bias": True},
    "pre_layer_gelu_mse": {"n_heads": 2, "norm_first": True, "bias": True},
    "post_rms_gelu_tanh_ce_causal": {
        "n_heads": 2, "norm": "rms", "activation": "gelu_tanh", "causal": True,
        "loss": "cross_entropy"},
    "pre_rms_swiglu_ce_causal_grouped": {
        "n_heads": 2, "n_kv_heads": 1, "norm": "rms", "norm_first": True, "activation": "silu",
        "gated": True, "causal": True, "loss": "cross_entropy"},
    "post_layer_relu_mse_no_output": {"activation": "relu", "output": False},
    "pre_layer_relu_pooled": {"norm_first": True, "activation": "relu", "loss": "pooled"},
    "post_layer_swiglu_pooled": {"activation": "silu", "gated": True, "loss": "pooled"},
    "post_rms_relu_mse_causal": {"norm": "rms", "activation": "relu", "causal": True},
    "pre_rms_gelu_mse_bias": {"norm": "rms", "norm_first": True, "bias": True},
    "post_layer_gelu_tanh_ce_bias": {
        "activation": "gelu_tanh", "bias": True, "loss": "cross_entropy"},
    "pre_layer_silu_mse_rope": {
        "n_heads": 2, "norm_first": True, "activation": "silu", "rope_base": 100.0},
    "pre_layer_gelu_ce_causal": {"norm_first": True, "causal": True, "loss": "cross_entropy"},
    "attention_mse": {"d_ff": None, "norm": "none", "residual": False, "output": False},
    "attention_two_heads_bias_mse": {
        "n_heads": 2, "d_ff": None, "norm": "none", "residual": False, "bias": True},
    "attention_linear_mse": {
        "d_ff": None, "norm": "none", "residual": False, "output": False, "softmax": False},
}  # fmt: skip

# A language model: options of curvatlas' GPTConfig; parameters are named as in zoo.GPT.
MODELS: dict[str, dict[str, Any]] = {
    "gpt_layer_gelu_padded": {
        "vocabulary": 5, "context": 4, "n_layers": 2, "d_model": 3, "n_heads": 1, "d_ff": 3},
    "gpt_rms_swiglu_rope_tied_grouped_padded": {
        "vocabulary": 5, "context": 4, "n_layers": 2, "d_model": 4, "n_heads": 2, "n_kv_heads": 1,
        "d_ff": 3, "norm": "rms", "activation": "swiglu", "bias": False, "positions": "rope",
        "rope_base": 100.0, "tied": True},
}  # fmt: skip


# --- the mathematics ------------------------------------------------------------------------------


def normalise(x, weight, bias, kind, eps):
    if kind == "none":
        return x
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def linear(x, weight, bias=None):
    y = jnp.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def turn(x, base):
    """Rotary positions, pairs (p, p + s/2); x: (n, L, heads, s)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)  # (L, s/2)
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attend(w, x, *, heads, kv_heads, causal, softmax, rope_base):
    n, length, _ = x.shape
    q = linear(x, w["query_weight"], w.get("query_bias")).reshape(n, length, heads, -1)
    k = linear(x, w["key_weight"], w.get("key_bias")).reshape(n, length, kv_heads, -1)
    v = linear(x, w["value_weight"], w.get("value_bias")).reshape(n, length, kv_heads, -1)
    if rope_base is not None:
        q, k = turn(q, rope_base), turn(k, rope_base)
    group = np.arange(heads) // (heads // kv_heads)
    logits = jnp.einsum("nihs,njhs->nhij", q, k[:, :, group]) / math.sqrt(q.shape[-1])
    past = np.tril(np.ones((length, length), bool)) if causal else np.ones((length, length), bool)
    if softmax:
        a = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))) * past
        a = a / a.sum(-1, keepdims=True)
    else:
        a = logits * past
    o = jnp.einsum("nhij,njhs->nihs", a, v[:, :, group]).reshape(n, length, -1)
    return linear(o, w["output_weight"], w.get("output_bias")) if "output_weight" in w else o


def feed_forward(w, x, activation):
    act = ACTIVATIONS[activation]
    up = linear(x, w["up_weight"], w.get("up_bias"))
    hidden = act(up)
    if "gate_weight" in w:
        hidden = act(linear(x, w["gate_weight"], w.get("gate_bias"))) * up
    return linear(hidden, w["down_weight"], w.get("down_bias"))


def block(w, x, spec):
    def norm(z, which):
        return normalise(
            z, w.get(f"{which}_weight"), w.get(f"{which}_bias"), spec["norm"], spec["eps"]
        )

    def attention(z):
        return attend(
            w, z, heads=spec["n_heads"], kv_heads=spec["n_kv_heads"] or spec["n_heads"],
            causal=spec["causal"], softmax=spec["softmax"], rope_base=spec["rope_base"],
        )  # fmt: skip

    if not spec["residual"]:
        return attention(x)
    if spec["norm_first"]:
        u = x + attention(norm(x, "norm1"))
        return u + feed_forward(w, norm(u, "norm2"), spec["activation"])
    y = norm(x + attention(x), "norm1")
    return norm(y + feed_forward(w, y, spec["activation"]), "norm2")


def cross_entropy(logits, targets):
    """Mean over the targets that are not ignored."""
    valid = targets != IGNORED
    chosen = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[..., None], -1)[..., 0]
    largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    normaliser = jnp.log(jnp.exp(logits - largest).sum(-1)) + largest[..., 0]
    return ((normaliser - chosen) * valid).sum() / valid.sum()


def loss_of(kind, outputs, targets):
    if kind == "mse":
        return ((outputs - targets) ** 2).mean()
    return cross_entropy(outputs, targets)


# --- the cases ------------------------------------------------------------------------------------


def block_case(name, options, rng):
    options = dict(options)
    bias, output = options.pop("bias", False), options.pop("output", True)
    loss = options.pop("loss", "mse")
    spec = {
        "d_model": 4, "n_heads": 1, "n_kv_heads": None, "d_ff": 5, "norm": "layer",
        "norm_first": False, "activation": "gelu", "gated": False, "eps": 1e-5, "causal": False,
        "softmax": True, "rope_base": None, "residual": True, **options,
    }  # fmt: skip
    d, hidden = spec["d_model"], spec["d_ff"]
    size = d // spec["n_heads"]
    inner, shared = d, (spec["n_kv_heads"] or spec["n_heads"]) * size
    shapes = {"query_weight": (inner, d), "key_weight": (shared, d), "value_weight": (shared, d)}
    if bias:
        shapes |= {"query_bias": (inner,), "key_bias": (shared,), "value_bias": (shared,)}
    if output:
        shapes |= {"output_weight": (d, inner)} | ({"output_bias": (d,)} if bias else {})
    if hidden is not None:
        for part in ("gate", "up") if spec["gated"] else ("up",):
            shapes |= {f"{part}_weight": (hidden, d)}
            shapes |= {f"{part}_bias": (hidden,)} if bias else {}
        shapes |= {"down_weight": (d, hidden)} | ({"down_bias": (d,)} if bias else {})
    if spec["norm"] != "none":
        for part in ("norm1", "norm2"):
            shapes |= {f"{part}_weight": (d,)}
            shapes |= {f"{part}_bias": (d,)} if spec["norm"] == "layer" else {}
    if loss == "pooled":
        shapes |= {"head_weight": (3, d)}
    n, length = 3, 4
    inputs = rng.normal(size=(n, length, d))
    targets = {
        "mse": lambda: rng.normal(size=(n, length, d)),
        "cross_entropy": lambda: rng.integers(0, d, (n, length)),
        "pooled": lambda: rng.integers(0, 3, n),
    }[loss]()

    def forward(w):
        z = block(w, inputs, spec)
        return linear(z.mean(1), w["head_weight"]) if loss == "pooled" else z

    header = {"kind": "block", "spec": spec, "loss": loss}
    save(name, header, draw(shapes, rng), forward, inputs, targets)


def model_case(name, options, rng):
    config = {"norm": "layer", "activation": "gelu", "bias": True, "positions": "learned",
              "n_kv_heads": None, "tied": False, "rope_base": 10000.0, **options}  # fmt: skip
    d, hidden, heads = config["d_model"], config["d_ff"], config["n_heads"]
    shared = (config["n_kv_heads"] or heads) * d // heads
    bias, gated = config["bias"], config["activation"] == "swiglu"
    affine = config["norm"] == "layer" and bias

    def with_bias(part, rows, columns):
        return {f"{part}.weight": (rows, columns)} | ({f"{part}.bias": (rows,)} if bias else {})

    def norm(part):
        return {f"{part}.weight": (d,)} | ({f"{part}.bias": (d,)} if affine else {})

    learned = config["positions"] == "learned"
    shapes = {"position_embedding": (config["context"], d)} if learned else {}
    shapes |= {"token_embedding.weight": (config["vocabulary"], d)}
    for i in range(config["n_layers"]):
        at = f"blocks.{i}"
        shapes |= norm(f"{at}.norm1")
        shapes |= with_bias(f"{at}.attention.query", d, d)
        shapes |= with_bias(f"{at}.attention.key", shared, d)
        shapes |= with_bias(f"{at}.attention.value", shared, d)
        shapes |= with_bias(f"{at}.attention.output", d, d) | norm(f"{at}.norm2")
        shapes |= with_bias(f"{at}.ffn.up", hidden, d)
        shapes |= with_bias(f"{at}.ffn.gate", hidden, d) if gated else {}
        shapes |= with_bias(f"{at}.ffn.down", d, hidden)
    shapes |= norm("norm") | ({} if config["tied"] else {"head.weight": (config["vocabulary"], d)})

    tokens = rng.integers(0, config["vocabulary"], (3, config["context"]))
    targets = rng.integers(0, config["vocabulary"], tokens.shape)
    targets[0, 2:], targets[2, 3:] = IGNORED, IGNORED  # uneven padding
    spec = {
        "n_heads": heads, "n_kv_heads": config["n_kv_heads"], "norm": config["norm"], "eps": 1e-5,
        "activation": "silu" if gated else config["activation"], "causal": True, "softmax": True,
        "rope_base": None if learned else config["rope_base"], "residual": True,
        "norm_first": True,
    }  # fmt: skip

    def forward(w):
        x = w["token_embedding.weight"][tokens]
        x = x + w["position_embedding"] if learned else x
        for i in range(config["n_layers"]):
            inside = {
                key.removeprefix(f"blocks.{i}.").rpartition("attention.")[2]
                .removeprefix("ffn.").replace(".", "_"): value
                for key, value in w.items() if key.startswith(f"blocks.{i}.")
            }  # fmt: skip
            x = block(inside, x, spec)
        x = normalise(x, w["norm.weight"], w.get("norm.bias"), config["norm"], 1e-5)
        return linear(x, w["token_embedding.weight" if config["tied"] else "head.weight"])

    header = {"kind": "gpt", "spec": config, "loss": "cross_entropy"}
    save(name, header, draw(shapes, rng), forward, tokens, targets)


def draw(shapes, rng):
    """Weights of ordinary size; norm weights around 1."""
    weights = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape) * 0.6
        is_gamma = "norm" in name and name.endswith("weight")
        weights[name] = 1.0 + 0.3 * values if is_gamma else values
    return weights


def save(name, header, weights, forward, inputs, targets):
    names, shapes = list(weights), [w.shape for w in weights.values()]
    sizes = [math.prod(shape) for shape in shapes]
    theta = jnp.asarray(np.concatenate([w.reshape(-1) for w in weights.values()]))

    def unflatten(flat):
        ends = np.cumsum(sizes)
        return {
            key: flat[end - size : end].reshape(shape)
            for key, shape, size, end in zip(names, shapes, sizes, ends, strict=True)
        }

    def outputs(flat):
        return forward(unflatten(flat))

    def value(flat):
        return loss_of(header["loss"], outputs(flat), targets)

    def loss_of_outputs(flat):
        return loss_of(header["loss"], flat.reshape(z.shape), targets)

    # Compiled whole: op by op, the same takes minutes and gigabytes of small programs.
    z = jax.jit(outputs)(theta)
    gradient = jax.jit(jax.grad(value))(theta)
    hessian = jax.jit(jax.hessian(value))(theta)
    jacobian = jax.jit(jax.jacrev(lambda flat: outputs(flat).reshape(-1)))(theta)
    curvature = jax.jit(jax.hessian(loss_of_outputs))(z.reshape(-1))
    outer = jacobian.T @ curvature @ jacobian
    asymmetry = float(jnp.abs(hessian - hessian.T).max() / jnp.abs(hessian).max())
    assert asymmetry < 1e-13, (name, asymmetry)
    upper = np.triu_indices(len(theta))
    tensors = {f"weights/{key}": np.ascontiguousarray(w) for key, w in weights.items()}
    tensors |= {
        "inputs": inputs, "targets": targets, "outputs": z, "value": value(theta)[None],
        "gradient": gradient, "hessian": hessian[upper], "outer": outer[upper],
    }  # fmt: skip
    path = FOLDER / f"{name}.safetensors"
    header = {**header, "parameters": names, "jax": jax.__version__}
    save_file(
        {key: np.ascontiguousarray(t) for key, t in tensors.items()},
        path,
        metadata={"fixture": json.dumps(header)},
    )
    size = path.stat().st_size / 1e3
    print(f"{name}: P = {len(theta)}, {size:.0f} kB, asymmetry {asymmetry:.0e}", flush=True)
    jax.clear_caches()


def main() -> None:
    """Write all fixtures, or those named on the command line."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[1:] or [*BLOCKS, *MODELS]
    for make, cases, first_seed in ((block_case, BLOCKS, 0), (model_case, MODELS, 1000)):
        for seed, (name, options) in enumerate(cases.items(), first_seed):
            if name in wanted:
                make(name, options, np.random.default_rng(seed))


if __name__ == "__main__":
    main()
