"""JAX and double backward, written independently of each other, agree to rounding."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jax_fixtures
import oracles
from curvatlas import zoo
from curvatlas.zoo.models import rotate

TOLERANCE = 1e-12


def block(w: dict[str, Tensor], x: Tensor, spec: dict) -> Tensor:
    """A block in plain PyTorch with hand-written norms; x: (n, L, d)."""
    heads, shared = spec["n_heads"], spec["n_kv_heads"] or spec["n_heads"]

    def project(z: Tensor, part: str) -> Tensor:
        return F.linear(z, w[f"{part}_weight"], w.get(f"{part}_bias"))

    def attention(z: Tensor) -> Tensor:
        q, k, v = (
            project(z, part).unflatten(-1, (count, -1)).transpose(1, 2)
            for part, count in (("query", heads), ("key", shared), ("value", shared))
        )  # (n, heads, L, s)
        if spec["rope_base"] is not None:
            q, k = (rotate(t, spec["rope_base"]) for t in (q, k))
        k, v = (t.repeat_interleave(heads // shared, dim=1) for t in (k, v))
        logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if spec["causal"]:
            future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(future, -math.inf if spec["softmax"] else 0.0)
        a = logits.softmax(-1) if spec["softmax"] else logits
        o = (a @ v).transpose(1, 2).flatten(2)
        return project(o, "output") if "output_weight" in w else o

    def norm(z: Tensor, part: str) -> Tensor:
        if spec["norm"] == "layer":
            return oracles.layer_norm(z, w[f"{part}_weight"], w[f"{part}_bias"], spec["eps"])
        return oracles.rms_norm(z, w[f"{part}_weight"], spec["eps"])

    def feed_forward(z: Tensor) -> Tensor:
        tanh = partial(F.gelu, approximate="tanh")
        functions = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": tanh, "silu": F.silu}
        act = functions[spec["activation"]]
        up = project(z, "up")
        hidden = act(project(z, "gate")) * up if spec["gated"] else act(up)
        return project(hidden, "down")

    if not spec["residual"]:
        return attention(x)
    if spec["norm_first"]:
        u = x + attention(norm(x, "norm1"))
        return u + feed_forward(norm(u, "norm2"))
    y = norm(x + attention(x), "norm1")
    return norm(y + feed_forward(y), "norm2")


def loss_of(fixture: jax_fixtures.Fixture, outputs: Tensor) -> Tensor:
    if fixture.loss == "mse":
        return (outputs - fixture.targets).pow(2).mean()
    return F.cross_entropy(outputs.flatten(0, -2), fixture.targets.flatten())


def check(fixture: jax_fixtures.Fixture, outputs: Tensor, params: list[Tensor]) -> None:
    loss = loss_of(fixture, outputs)
    outer = oracles.outer_hessian(outputs, lambda z: loss_of(fixture, z), params)
    assert loss.item() == pytest.approx(fixture.value, rel=TOLERANCE)
    assert oracles.relative_error(outputs.detach(), fixture.outputs) < TOLERANCE
    assert oracles.relative_error(outer, fixture.outer) < TOLERANCE
    assert oracles.relative_error(oracles.hessian(loss, params), fixture.hessian) < TOLERANCE
    assert oracles.relative_error(oracles.gradient(loss, params), fixture.gradient) < TOLERANCE


@pytest.mark.parametrize("name", jax_fixtures.names("block"))
def test_double_backward_through_a_block_agrees_with_jax(name):
    fixture = jax_fixtures.load(name)
    weights = {k: w.clone().requires_grad_(True) for k, w in fixture.weights.items()}
    outputs = block(weights, fixture.inputs, fixture.spec)
    if fixture.loss == "pooled":
        outputs = outputs.mean(1) @ weights["head_weight"].T
    check(fixture, outputs, list(weights.values()))


@pytest.mark.parametrize("name", jax_fixtures.names("gpt"))
def test_double_backward_through_the_zoo_gpt_agrees_with_jax_under_padding(name):
    fixture = jax_fixtures.load(name)
    model = zoo.GPT(zoo.GPTConfig(**fixture.spec)).double()
    assert [n for n, _ in model.named_parameters()] == list(fixture.weights)
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), fixture.weights.values(), strict=True):
            parameter.copy_(weight)
    check(fixture, model(fixture.inputs), list(model.parameters()))


def test_the_fixtures_cover_the_choices_a_block_can_make():
    fixtures = [jax_fixtures.load(name) for name in jax_fixtures.names("block")]
    seen = {(f.spec["norm_first"], f.spec["norm"]) for f in fixtures if f.spec["residual"]}
    assert seen == {(a, b) for a in (False, True) for b in ("layer", "rms")}
    assert {f.loss for f in fixtures} == {"mse", "cross_entropy", "pooled"}
    assert {f.spec["activation"] for f in fixtures} == {"relu", "gelu", "gelu_tanh", "silu"}
    for choice in ("causal", "gated", "softmax"):
        assert {f.spec[choice] for f in fixtures} == {False, True}
    assert len(jax_fixtures.names("gpt")) == 2
