"""SelfAttentionHessian: the papers' blocks, masks, moments and bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from batched_oracles import parts
from curvatlas.closed_form.modules import SelfAttentionHessian


def tokens(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"d_k": 2},
        {"n_heads": 2, "bias": True},
        {"n_heads": 3, "d_k": 2, "d_v": 5, "causal": True},
        {"n_heads": 2, "softmax": False, "bias": True},
        {"n_heads": 2, "n_kv_heads": 1, "bias": True},
        {"n_heads": 2, "d_k": 4, "rope_base": 50.0, "bias": True},
    ],
)
def test_every_block_and_part_equals_double_backward(options: dict[str, object]) -> None:
    layer = SelfAttentionHessian(6, **options).double()  # type: ignore[arg-type]
    x, y = tokens(2, 4, 6)
    padding = torch.tensor([[False, False, False, False], [False, False, True, True]])
    outputs = layer(x, key_padding_mask=padding)
    want = parts(outputs, lambda z: (z - y).pow(2).mean(), list(layer.parameters()))
    result = layer.compute_attention_hessian(x, y, key_padding_mask=padding)
    scale = float(want["total"].norm())
    for part in ("total", "outer", "functional"):
        assert float((result.part(part) - want[part]).norm()) <= 1e-12 * scale  # type: ignore[arg-type]
    torch.testing.assert_close(
        result["QK"], result.block("K", "Q").T, rtol=1e-9, atol=1e-13 * scale
    )
    assert result.attention is not None
    assert result["loss"] == pytest.approx((outputs - y).detach().pow(2).mean().item())


def test_value_block_is_the_second_moment_of_attended_tokens() -> None:
    # H(V, V) = c M1ᵀM1 ⊗ I (Ormaniec, Theorem 3.1), in (out, in) order I ⊗ M1ᵀM1.
    layer = SelfAttentionHessian(4, d_k=3).double()
    x, y = tokens(5, 4)
    M1 = layer.moments(x).M1[0, 0]
    want = torch.kron(torch.eye(4, dtype=torch.float64), M1.T @ M1) * 2 / y.numel()
    result = layer.compute_attention_hessian(x, y)
    torch.testing.assert_close(result["VV"], want)
    assert float(result.block("V", "V", part="functional").abs().max()) == 0.0


def test_query_block_of_the_outer_part_follows_from_the_second_moment() -> None:
    # H_o(Q, Q) = c s² Σ_i x_i x_iᵀ ⊗ W_Kᵀ M2 W_V W_Vᵀ M2 W_K  (Theorem 3.1).
    layer = SelfAttentionHessian(4, d_k=3).double()
    x, y = tokens(5, 4)
    M2 = layer.moments(x).M2[0, 0]
    key, value = layer.weights["key_weight"].detach(), layer.weights["value_weight"].detach()
    G = value @ M2 @ key.T
    want = torch.einsum("npq,na,nb->paqb", G.mT @ G, x, x).reshape(12, 12) * 2 / y.numel() / 3
    result = layer.compute_attention_hessian(x, y)
    torch.testing.assert_close(result.block("Q", "Q", part="outer"), want)


def test_moments_are_central_moments_of_each_row() -> None:
    layer = SelfAttentionHessian(3, causal=True).double()
    x, _ = tokens(4, 3)
    found = layer.moments(x)
    A = found.attention[0, 0]
    for i in range(4):
        mean = A[i] @ x
        centred = x - mean
        torch.testing.assert_close(found.M1[0, 0, i], mean)
        torch.testing.assert_close(found.M2[0, 0, i], centred.T @ (A[i, :, None] * centred))
        third = torch.einsum("j,ja,jb,jc->abc", A[i], centred, centred, centred)
        torch.testing.assert_close(found.M3[0, 0, i], third)


def test_without_softmax_the_functional_diagonal_blocks_vanish() -> None:
    layer = SelfAttentionHessian(4, d_k=2, softmax=False).double()
    result = layer.compute_attention_hessian(*tokens(5, 4))
    for name in ("query_weight", "key_weight", "value_weight"):
        assert float(result.block(name, name, part="functional").abs().max()) == 0.0
        assert result.structure.is_zero(name, name, "functional")


def test_one_token_leaves_only_the_values_curved() -> None:
    layer = SelfAttentionHessian(4, bias=True).double()
    result = layer.compute_attention_hessian(*tokens(1, 4))
    for name in result.names:
        zero = float(result.block(name, name).abs().max()) == 0.0
        assert zero == name.startswith(("query", "key")), name
        assert zero == result.structure.is_zero(name, name)


def test_float32_stays_accurate_when_tokens_share_a_large_mean() -> None:
    torch.manual_seed(1)
    d = 8
    x = torch.randn(12, d, dtype=torch.float64) + 100.0
    y = torch.randn(12, d, dtype=torch.float64)
    layer = SelfAttentionHessian(d).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_((torch.randn(d, d) * 0.02).float().double())
    x32 = x.float()
    exact = layer.compute_attention_hessian(x32.double(), y.float().double())["QQ"]
    rough = layer.float().compute_attention_hessian(x32, y.float())["QQ"]
    error = float((rough.double() - exact).norm() / exact.norm())
    assert error <= 1e-4, error


def test_wrapped_multihead_attention_agrees() -> None:
    module = nn.MultiheadAttention(6, 2, batch_first=True).double().eval()
    layer = SelfAttentionHessian.from_module(module)
    x, y = tokens(2, 3, 6)
    torch.testing.assert_close(layer(x), module(x, x, x)[0])
    assert layer.compute_attention_hessian(x, y).H.shape[0] == sum(
        p.numel() for p in module.parameters()
    )


def test_bad_input_gets_one_clear_line() -> None:
    x, y = tokens(2, 3, 4)
    layer = SelfAttentionHessian(4).double()
    everything = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="may attend to no key"):
        layer.compute_attention_hessian(x, y, key_padding_mask=everything)
    with pytest.raises(ValueError, match="key_padding_mask must be boolean"):
        layer.compute_attention_hessian(x, y, key_padding_mask=everything[:1])
    with pytest.raises(TypeError, match="float32"):
        layer.compute_attention_hessian(x.float(), y)
    with pytest.raises(ValueError, match="must divide d_model"):
        SelfAttentionHessian(4, 3)
    with pytest.raises(ValueError, match="loss is nan"):
        layer.compute_attention_hessian(x * torch.nan, y)
    with pytest.raises(ValueError, match="moments need softmax"):
        SelfAttentionHessian(4, softmax=False).moments(x)
