"""Models that choose their own kernels: attention, compiled code, checkpoints, low precision."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention_by_reference
from torch.utils.checkpoint import checkpoint

import curvatlas as ca
import oracles
from curvatlas.errors import ProblemError
from curvatlas.problem import kernels
from half_precision import plain_half_precision

EPS = torch.finfo(torch.float64).eps
WIDTH, HEAD, LENGTH = 6, 3, 5


def hessian_by_hand(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = data
    loss = F.cross_entropy(model(inputs), targets)
    return oracles.hessian(loss, [p for p in model.parameters() if p.requires_grad])


def assert_same_hessian(
    model: nn.Module, plain: nn.Module, data: tuple[Tensor, Tensor], **options: Any
) -> None:
    """Ours of ``model`` against double backward through ``plain``, the same by hand."""
    got = ca.Hessian(ca.Problem(model, "cross_entropy", data, **options)).dense()
    want = hessian_by_hand(plain, data)
    assert float(want.norm()) > 1e-3
    assert oracles.relative_error(got, want) < 1000 * EPS


# --- attention -----------------------------------------------------------------------------------

Attention = Callable[..., Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, **options)


def fused_by_reference(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        return attention_by_reference(q, k, v, **options)


def fused_the_old_way(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        context = torch.backends.cuda.sdp_kernel(enable_math=False, enable_flash=True)
    with context:
        return F.scaled_dot_product_attention(q, k, v, **options)


def fused_operator(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        result: Tensor = torch.ops.aten.scaled_dot_product_attention(q, k, v, **options)
        return result


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(Q Kᵀ scale + mask) V, a row without any key being zero."""
    if enable_gqa:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.where(seen, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total > 0, total, 1.0)) @ v


class AttentionModel(nn.Module):
    """One attention layer between two linear maps, with a kernel of its own choice."""

    def __init__(self, attention: Attention, heads: int = 2, kv_heads: int = 2, **options: Any):
        super().__init__()
        torch.manual_seed(7)
        self.heads, self.kv_heads = heads, kv_heads
        self.query = nn.Linear(WIDTH, heads * HEAD)
        self.key = nn.Linear(WIDTH, kv_heads * HEAD)
        self.value = nn.Linear(WIDTH, kv_heads * HEAD)
        self.head = nn.Linear(heads * HEAD, 3)
        self.attention = attention
        self.options = options if heads == kv_heads else {**options, "enable_gqa": True}
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        def split(hidden: Tensor, heads: int) -> Tensor:
            return hidden.view(*x.shape[:2], heads, HEAD).transpose(1, 2)

        q, k, v = (
            split(self.query(x), self.heads),
            split(self.key(x), self.kv_heads),
            split(self.value(x), self.kv_heads),
        )
        mixed = self.attention(q, k, v, **self.options).transpose(1, 2)
        result: Tensor = self.head(torch.tanh(mixed.reshape(*x.shape[:2], -1))).mean(1)
        return result


def sequences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 3, (4,), generator=generator)


def _mask(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    if kind == "float":
        return torch.randn(LENGTH, LENGTH, dtype=torch.float64, generator=generator)
    seen = torch.rand(LENGTH, LENGTH, generator=generator) < 0.6
    seen.fill_diagonal_(True)
    if kind == "empty row":
        seen[2] = False
    return seen


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.8},
    "boolean mask": {"attn_mask": _mask("boolean")},
    "float mask": {"attn_mask": _mask("float")},
    "a row that sees nothing": {"attn_mask": _mask("empty row")},
    "grouped queries": {"kv_heads": 1},
    "grouped causal": {"heads": 4, "kv_heads": 2, "is_causal": True, "scale": 0.3},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_attention_that_sets_its_own_kernel_is_differentiated_twice(kind: str) -> None:
    options = OPTIONS[kind]
    plain = AttentionModel(by_hand, **options)
    assert_same_hessian(AttentionModel(fused, **options), plain, sequences())


@pytest.mark.parametrize("attention", [fused_by_reference, fused_the_old_way, fused_operator])
def test_every_way_to_a_fused_kernel_is_intercepted(attention: Attention) -> None:
    plain = AttentionModel(by_hand, is_causal=True)
    assert_same_hessian(AttentionModel(attention, is_causal=True), plain, sequences())


@pytest.mark.parametrize("operator", [ca.GaussNewton, ca.FunctionalHessian])
def test_the_parts_of_the_hessian_take_such_attention_too(operator: Any) -> None:
    found = operator(ca.Problem(AttentionModel(fused), "cross_entropy", sequences())).dense()
    want = operator(ca.Problem(AttentionModel(by_hand), "cross_entropy", sequences())).dense()
    assert oracles.relative_error(found, want) < 1000 * EPS


def test_attention_inside_torchs_own_layer_is_intercepted() -> None:
    class Layer(nn.Module):
        """nn.MultiheadAttention calls the kernel from inside another overridable function."""

        def __init__(self, kernel: SDPBackend) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.head = nn.Linear(WIDTH, 3)
            self.kernel = kernel
            self.double().eval()

        def forward(self, x: Tensor) -> Tensor:
            with sdpa_kernel(self.kernel):
                mixed: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return self.head(torch.tanh(mixed)).mean(1)

    flash, math = Layer(SDPBackend.FLASH_ATTENTION), Layer(SDPBackend.MATH)
    assert_same_hessian(flash, math, sequences())


def test_the_users_kernel_choice_is_left_as_it_was() -> None:
    def enabled() -> tuple[bool, ...]:
        backends = torch.backends.cuda
        return backends.flash_sdp_enabled(), backends.math_sdp_enabled()

    before = enabled()
    problem = ca.Problem(AttentionModel(fused), "cross_entropy", sequences())
    ca.Hessian(problem) @ torch.ones(problem.size, dtype=torch.float64)
    assert enabled() == before
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    assert "Flash" in type(F.scaled_dot_product_attention(x, x, x).grad_fn).__name__


flex = pytest.importorskip("torch.nn.attention.flex_attention")


class FlexModel(AttentionModel):
    """Flex attention with a learned bias by distance, and its matrix products by hand."""

    def __init__(self, *, by_hand: bool, masked: bool = False, **options: Any) -> None:
        super().__init__(self._hand if by_hand else self._flex, **options)
        torch.manual_seed(11)
        self.bias = nn.Parameter(torch.randn(self.heads, 2 * LENGTH, dtype=torch.float64))
        self.masked = masked

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return value + self.bias[h, i - j + LENGTH]

        block = None
        if self.masked:
            block = flex.create_block_mask(
                lambda b, h, i, j: (i >= j) & (i != 2), None, None, LENGTH, LENGTH, device="cpu"
            )
        result: Tensor = flex.flex_attention(q, k, v, score_mod=score, block_mask=block, **options)
        return result

    def _hand(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        place = torch.arange(LENGTH)
        bias = self.bias[:, place[:, None] - place[None, :] + LENGTH]
        if self.masked:
            unseen = (place[:, None] < place[None, :]) | (place[:, None] == 2)  # row 2: all
            bias = bias.masked_fill(unseen, float("-inf"))
        return by_hand(q, k, v, attn_mask=bias, **options)


@pytest.mark.parametrize("options", [{}, {"masked": True}, {"kv_heads": 1, "scale": 0.4}])
def test_flex_attention_is_computed_by_matrix_products(options: dict[str, Any]) -> None:
    plain = FlexModel(by_hand=True, **options)
    assert_same_hessian(FlexModel(by_hand=False, **options), plain, sequences())


# --- compiled code -------------------------------------------------------------------------------


def vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 2, (5,), generator=generator)


class Network(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)
        self.activation = activation
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.activation(self.body(x)))
        return result


def test_a_model_compiled_in_place_runs_uncompiled_and_stays_compiled() -> None:
    model = Network()
    model.compile()
    call = model._compiled_call_impl
    with pytest.warns(UserWarning, match=r"torch.compile was called on Network"):
        assert_same_hessian(model, Network(), vectors())
    assert model._compiled_call_impl is call


def test_a_compiled_submodule_runs_uncompiled_under_its_own_names() -> None:
    model = Network()
    model.body = torch.compile(model.body)  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"on body: compiled graphs cannot be differentiated"):
        problem = ca.Problem(model, "cross_entropy", vectors())
    assert problem.parameter_names == tuple(name for name, _ in model.named_parameters())
    want = hessian_by_hand(Network(), vectors())
    assert oracles.relative_error(ca.Hessian(problem).dense(), want) < 1000 * EPS
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        ca.Problem(model, "cross_entropy", vectors())


@torch.compile
def compiled_activation(x: Tensor) -> Tensor:
    return torch.sin(x) * x


def compiled_when_called(x: Tensor) -> Tensor:
    return torch.compile(torch.cos)(x)  # type: ignore[no-any-return]


def test_functions_compiled_inside_a_model_run_uncompiled() -> None:
    assert_same_hessian(
        Network(compiled_activation), Network(lambda x: torch.sin(x) * x), vectors()
    )
    assert_same_hessian(Network(compiled_when_called), Network(torch.cos), vectors())


def test_a_forward_decorated_by_compile_is_said() -> None:
    class Decorated(Network):
        forward = torch.compile(Network.forward)  # type: ignore[assignment]

    with pytest.warns(UserWarning, match=r"torch.compile was called on Decorated"):
        assert_same_hessian(Decorated(), Network(), vectors())


def test_a_compiled_forward_of_one_module_and_a_compiled_loss_run_uncompiled() -> None:
    model = Network()
    compiled = torch.compile(model.forward)
    model.forward = compiled  # type: ignore[method-assign]
    loss = torch.compile(F.cross_entropy)
    with pytest.warns(UserWarning, match=r"torch.compile was called on Network"):
        problem = ca.Problem(model, loss, vectors())
    found = ca.Hessian(problem).dense()
    assert oracles.relative_error(found, hessian_by_hand(Network(), vectors())) < 1000 * EPS
    assert model.forward is compiled


@pytest.mark.filterwarnings("ignore:torch.compile was called")
def test_compiled_modules_run_uncompiled_by_a_torch_without_stances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.compiler, "set_stance")  # before torch 2.6
    model = Network()
    model.body = torch.compile(model.body)  # type: ignore[assignment]
    model.head.compile()
    model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
    kept = model.forward, model.body.forward, model.head._compiled_call_impl
    assert_same_hessian(model, Network(), vectors())
    assert (model.forward, model.body.forward, model.head._compiled_call_impl) == kept


def test_a_scripted_model_is_refused_with_the_way_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.trace(Network(), vectors()[0])
    with pytest.raises(ProblemError, match=r"TorchScript.*pass the module that was scripted"):
        ca.Problem(model, "cross_entropy", vectors())


# --- checkpoints and precision -------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", ["plain", "attention", "weight norm", "rounded"])
def test_a_models_own_checkpoints_do_not_disturb(reentrant: bool, inner: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first = nn.Linear(WIDTH, WIDTH)
            layer: nn.Module = nn.Linear(WIDTH, 3)
            if inner == "weight norm":
                layer = nn.utils.parametrizations.weight_norm(layer)
            self.last, self.on = layer, on
            self.double()

        def part(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            if inner == "attention":
                q = h.unsqueeze(1)
                h = (fused if self.on else by_hand)(q, q, q).squeeze(1)
            if inner == "rounded" and self.on:  # as Hugging Face's norms do
                h = h.to(torch.float32).to(h.dtype)
            if inner == "weight norm" and not self.on:
                g, v = self.last.parametrizations.weight.original0, None
                v = self.last.parametrizations.weight.original1
                w = g * v / v.pow(2).sum(1, keepdim=True).sqrt()
                return F.linear(h, w, self.last.bias).mean(1)
            return self.last(h).mean(1)

        def forward(self, x: Tensor) -> Tensor:
            if not self.on:
                return self.part(x)
            return checkpoint(self.part, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    assert_same_hessian(Checkpointed(True), Checkpointed(False), sequences())
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)


def test_our_own_checkpoints_compute_blocks_again_by_the_same_operations() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            norm = nn.utils.parametrizations.weight_norm
            self.blocks = nn.ModuleList(nn.Sequential(norm(nn.Linear(3, 3))) for _ in range(2))
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    inputs, _ = vectors()
    data = (inputs, torch.arange(5) % 3)
    plain = ca.Hessian(ca.Problem(Blocks(), "cross_entropy", data)).dense()
    lean = ca.Problem(Blocks(), "cross_entropy", data, checkpoint_activations=True)
    assert oracles.relative_error(ca.Hessian(lean).dense(), plain) < 1000 * EPS


def test_autocast_inside_the_model_is_left_out_and_said() -> None:
    class Cast(Network):
        context = torch.autocast("cpu", dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            with self.context:
                return super().forward(x).to(x.dtype)

    inputs, targets = vectors()
    data = (inputs.float(), targets)
    model = Cast().float()
    with pytest.warns(UserWarning, match="autocast in its forward pass"):
        found = ca.Hessian(ca.Problem(model, "cross_entropy", data)).dense()
    want = hessian_by_hand(copy.deepcopy(Network()).float(), data)
    assert oracles.relative_error(found, want) < 1000 * torch.finfo(torch.float32).eps
    with plain_half_precision(), model.context:  # the user's own context does what it did
        assert model.head(torch.ones(1, 4)).dtype == torch.bfloat16


def test_other_threads_keep_their_checkpoints_and_their_compiler() -> None:
    from concurrent.futures import ThreadPoolExecutor

    class Waiting(Network):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = executor.submit(elsewhere).result()
            return super().forward(x)

    def elsewhere() -> bool:
        x = torch.ones(2, requires_grad=True)
        y = checkpoint(torch.sin, x, use_reentrant=True)
        return "CheckpointFunction" in type(y.grad_fn).__name__

    with ThreadPoolExecutor(1) as executor:
        model = Waiting()
        problem = ca.Problem(model, "cross_entropy", vectors())
        with problem.evaluating():
            problem.outputs(next(problem.batches()), problem.leaves())
            assert model.seen is True


def test_a_fused_kernel_is_used_where_no_derivative_is_taken_and_logits_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 6, dtype=torch.float64)
    plain = by_hand(q, k, v, is_causal=True)
    seen: list[int] = []
    usual = kernels.sdpa_kernel

    def noted(backends: Any) -> Any:
        seen.append(len(backends))
        return usual(backends)

    monkeypatch.setattr(kernels, "sdpa_kernel", noted)
    attention = kernels._by_matrix_products(torch.nn.functional.scaled_dot_product_attention)
    for limit, expected in ((2**27, 1), (0, 2)):
        monkeypatch.setattr(kernels, "_LARGE_LOGITS", limit)
        with torch.no_grad():
            torch.testing.assert_close(attention(q, k, v, is_causal=True), plain)
        assert seen[-1] == expected
    attention(q, k, v, is_causal=True)  # derivatives may follow: by matrix products
    assert seen[-1] == 1
