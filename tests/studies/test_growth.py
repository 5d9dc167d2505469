"""Growth: theory's exponents without norms, oracle norms at any scale, clear refusals, resuming."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.errors import ProblemError
from curvatlas.results import same
from curvatlas.studies import growth as module
from curvatlas.studies.growth import exponent_of
from huggingface_models import tiny_config
from oracles import hessian, outer_hessian, relative_error, with_hand_written_norms


def windows(vocabulary: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (3, length + 1), generator=_random(seed))
    return tokens[:, :-1], tokens[:, 1:]


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def without_norms(model: nn.Module) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(parent, name, nn.Identity())
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_without_norms_query_grows_like_t6_and_value_like_t2_in_every_layer(
    dtype: torch.dtype,
) -> None:
    model = zoo.reference_gpt(
        seed=3, vocabulary=20, context=8, n_layers=3, d_model=12, n_heads=2, bias=False
    )
    problem = ca.Problem(without_norms(model).to(dtype), "cross_entropy", windows(20, 8))
    scales = None if dtype == torch.float64 else (0.02, 0.05, 0.1)
    result = ca.growth(problem, scales=scales, roles=["query", "key", "value"], probes=4)
    for role, part, rate, error in (
        ("query", "outer", 6.0, 0.1),
        ("key", "outer", 6.0, 0.1),
        ("query", "functional", 5.0, 0.1),
        ("value", "outer", 2.0, 0.05),
    ):
        exponents = result.exponents(role, part)
        assert list(exponents) == ["layer 0", "layer 1", "layer 2"]
        assert all(abs(value - rate) < error for value in exponents.values()), (role, exponents)
    assert result.predicted("blocks.2.query", "outer") == 6.0
    local = result.local_exponents("outer")[:2, result.names.index("blocks.1.query")]
    assert torch.allclose(local, torch.full_like(local, 6.0), atol=0.1)


def test_the_norms_of_a_fused_block_are_those_of_the_scaled_model() -> None:
    torch.manual_seed(0)
    from transformers import GPT2LMHeadModel

    config = tiny_config("gpt2", n_embd=8, n_head=2)
    model = GPT2LMHeadModel(config).double().eval()
    tokens = torch.randint(19, (1, 4))
    problem = ca.Problem(model, "cross_entropy", {"input_ids": tokens, "labels": tokens})
    result = ca.growth(problem, scales=(0.5, 1.0, 2.0), roles=["query"])

    other = with_hand_written_norms(copy.deepcopy(model))
    weight = other.transformer.h[1].attn.c_attn.weight
    for place, factor in ((0, 0.5), (2, 2.0)):
        # Embeddings leave through the dropout in front of the first block.
        hook = other.transformer.drop.register_forward_hook(lambda _, __, out, t=factor: t * out)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            logits = other(tokens).logits[:, :-1].reshape(-1, 19)
        hook.remove()

        def loss(z: Tensor) -> Tensor:
            return F.cross_entropy(z, tokens[:, 1:].reshape(-1))

        whole = hessian(loss(logits), [weight]).reshape(8, 24, 8, 24)[:, :8, :, :8]
        outer = outer_hessian(logits, loss, [weight]).reshape(8, 24, 8, 24)[:, :8, :, :8]
        at = result.names.index("blocks.1.query")
        for part, want in (("total", whole), ("outer", outer), ("functional", whole - outer)):
            got = result.norms[part][place, at]
            assert relative_error(got, want.norm()) < 1e-6, (part, factor)  # its own float32 parts


@pytest.mark.parametrize("scale", ["query_key", "value", "blocks.*.up"])
def test_scaled_weights_give_the_norms_of_a_model_with_those_weights(scale: str) -> None:
    model = zoo.reference_gpt(vocabulary=9, context=5, n_layers=1, d_model=8, n_heads=2).double()
    data = windows(9, 5)
    problem = ca.Problem(model, "cross_entropy", data)
    before = problem.parameters.clone()
    result = ca.growth(problem, scale=scale, scales=(0.5, 1, 3), roles=["key", "down"])
    assert torch.equal(problem.parameters, before)
    other = copy.deepcopy(model)
    names = {"query_key": ("query", "key"), "value": ("value",), "blocks.*.up": ("up",)}[scale]
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            biased = name.endswith("bias") and scale != "query_key"
            if any(f".{n}." in name for n in names) and not biased:
                parameter.mul_(3)
    want = ca.Hessian(ca.Problem(other, "cross_entropy", data))["blocks.0.key"].dense().norm()
    assert float(result.norms["total"][2, result.names.index("blocks.0.key")]) == pytest.approx(
        float(want), rel=1e-10
    )


@pytest.mark.parametrize("family", ["gpt2", "llama", "vit"])
def test_hugging_face_models_grow_as_they_are(family: str) -> None:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, ViTForImageClassification

    torch.manual_seed(1)
    classes: Any = {
        "gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM, "vit": ViTForImageClassification
    }  # fmt: skip
    model = classes[family](tiny_config(family)).double().eval()
    tokens = torch.randint(19, (2, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    if family == "vit":
        batch = {"pixel_values": torch.randn(2, 3, 8, 8).double(), "labels": torch.tensor([0, 1])}
    problem = ca.Problem(model, "cross_entropy", batch)
    result = ca.growth(problem, scale="query_key", scales=(0.05, 0.1, 0.2), roles=["query"])
    # H_o of the query block ∝ W_K² as long as logits are small
    assert all(abs(v - 2) < 0.05 for v in result.exponents("query").values())
    assert len(result.exponents("query")) == 2
    assert "blocks.1.query" in str(result)
    assert result.plot().axes


def test_a_key_bias_that_the_softmax_forgets_has_no_exponent() -> None:
    model = zoo.reference_gpt(vocabulary=9, context=6, n_layers=1, d_model=8, n_heads=2).double()
    problem = ca.Problem(model, "cross_entropy", windows(9, 6))
    result = ca.growth(problem, scales=(0.5, 1, 2), roles=["query_bias", "key_bias"])
    assert result.law("blocks.0.key_bias", "functional") is None
    assert result.law("blocks.0.query_bias", "functional") is not None


def test_what_cannot_be_scaled_or_fitted_is_one_clear_line() -> None:
    mlp = ca.Problem(zoo.MLP(), "cross_entropy", zoo.digits().train.take(4))
    with pytest.raises(ProblemError, match="MLP has no query and key weights"):
        ca.growth(mlp, scale="query_key")
    with pytest.raises(KeyError, match="there is no slice 'value'"):
        ca.growth(mlp, scale="value")
    with pytest.raises(ValueError, match="needs 3 or more scales, got 2"):
        ca.growth(mlp, scale="head.weight", scales=(1, 2))
    with pytest.raises(ValueError, match="scales are positive"):
        ca.growth(mlp, scale="head.weight", scales=(-1, 1, 2))
    with pytest.raises(ValueError, match="over probes needs 3"):
        ca.growth(mlp, scale="head.weight", probes=2)


@pytest.mark.draws
def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.reference_gpt(vocabulary=9, context=5, n_layers=1, d_model=8, n_heads=2).double()
    problem = ca.Problem(model, "cross_entropy", windows(9, 5))
    options: Any = {"scales": (0.5, 1, 2), "roles": ["query"]}
    measure, calls = module.block_norms, []

    def dies_at_the_third(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("no more")
        return measure(*args, **kwargs)

    monkeypatch.setattr(module, "block_norms", dies_at_the_third)
    with pytest.raises(MemoryError):
        ca.growth(problem, output=tmp_path / "run", **options)
    resumed = ca.growth(problem, output=tmp_path / "run", **options)
    assert len(calls) == 4  # the first two scales were kept
    assert same(resumed, ca.growth(problem, **options))
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "How does curvature grow with the scale?" in page
    assert "<title>" in page  # the picture's marks say what they show


def test_intervals_of_exponents_cover_the_truth() -> None:
    random = np.random.default_rng(0)
    x = np.geomspace(0.01, 0.1, 5)
    covered = 0
    for _ in range(400):
        # probes share most of their error over the scales, and each point has some of its own
        common = random.chisquare(6, 12) / 6
        own = np.exp(0.1 * random.standard_normal((5, 12)))
        low, high = exponent_of(x, (x**3)[:, None] ** 2 * common * own).interval
        covered += low <= 3 <= high
    assert covered >= 0.93 * 400
