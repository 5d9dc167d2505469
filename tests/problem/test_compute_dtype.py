"""Weights in half precision, computed with in float32: the numbers of the rounded network."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.engines.tangent import model as tangent_model
from curvatlas.errors import DifferentiationError, ProblemError
from curvatlas.zoo.models import GPT, GPTConfig
from half_precision import NoHalfPrecision
from oracles import relative_error

OPERATORS = (ca.Hessian, ca.GaussNewton, ca.FunctionalHessian)
TOLERANCE = 1e-5  # of float32 products by two engines


def _gpt(dtype: torch.dtype = torch.bfloat16, **options: Any) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=13, context=8, d_model=12, n_heads=3, n_layers=3, **options)
    return GPT(config).eval().to(dtype)


def _tokens(samples: int = 3, length: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, 13, (samples, length + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def _widened(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    return copy.deepcopy(model).to(dtype)


def test_samples_go_through_in_the_runs_of_float32_and_give_its_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tangent_model, "ONE_RUN_BYTES", 1)
    monkeypatch.setattr(tangent_model, "RUN_SHARE", 2.5)  # of the weights' bytes: four samples
    runs: list[int] = []
    length = tangent_model.run_length

    def noted(*sizes: Any, **options: Any) -> int:
        runs.append(length(*sizes, **options))
        return runs[-1]

    monkeypatch.setattr(tangent_model, "run_length", noted)
    model = _gpt()
    seen, found = [], []
    for samples in range(2, 9):  # few go through together, more do not
        data = _tokens(samples)
        half = ca.Problem(model, "cross_entropy", data, compute_dtype=torch.float32)
        for problem in (half, ca.Problem(_widened(model), "cross_entropy", data)):
            runs.clear()
            v = torch.ones(problem.size)
            found.append(ca.Hessian(problem, engine="tangent") @ v)
            seen.append((samples, tuple(runs)))
    assert seen[::2] == seen[1::2]
    assert len({taken[-1] == samples for samples, taken in seen}) == 2  # some are cut, some not
    for got, want in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("engine", ["tangent", "autograd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_the_rounded_weights_in_float32(
    dtype: torch.dtype, engine: Any
) -> None:
    model, data = _gpt(dtype), _tokens()
    before = {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    half = ca.Problem(model, "cross_entropy", data, compute_dtype=torch.float32)
    wide = ca.Problem(_widened(model), "cross_entropy", data)
    assert half.dtype == torch.float32
    assert half.value() == pytest.approx(wide.value(), rel=1e-6)
    assert relative_error(half.gradient(), wide.gradient()) <= TOLERANCE
    torch.testing.assert_close(half.parameters, wide.parameters, rtol=0, atol=0)
    v = torch.randn(half.size, 2)
    for kind in OPERATORS:
        got = kind(half, engine=engine) @ v
        assert got.dtype == torch.float32
        assert half.engine.name == engine
        assert relative_error(got, kind(wide, engine="autograd") @ v) <= TOLERANCE
    assert before == {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}


def test_float64_arithmetic_on_half_precision_weights_is_as_exact_as_on_float64_ones() -> None:
    model, data = _gpt(), _tokens()
    half = ca.Problem(model, "cross_entropy", data, compute_dtype=torch.float64)
    wide = ca.Problem(_widened(model, torch.float64), "cross_entropy", data)
    v = torch.randn(half.size, dtype=torch.float64)
    for kind in OPERATORS:
        want = kind(wide, engine="autograd") @ v
        for engine in ("tangent", "autograd"):
            got = kind(half, engine=engine) @ v
            assert relative_error(got, want) <= 1e-11


def test_views_frozen_parameters_and_recomputed_blocks_are_right_too() -> None:
    model, data = _gpt(), _tokens()
    names = ["blocks.1.attention.*", "blocks.2.*"]
    options: dict[str, Any] = {"parameters": names}
    wide = ca.Problem(_widened(model), "cross_entropy", data, **options)
    v = torch.randn(wide.size)
    want = ca.Hessian(wide, engine="autograd") @ v
    for lean in (False, True):
        half = ca.Problem(
            model,
            "cross_entropy",
            data,
            compute_dtype=torch.float32,
            checkpoint_activations=lean,
            **options,
        )
        for engine in ("tangent", "autograd"):
            got = ca.Hessian(half, engine=engine) @ v
            assert relative_error(got, want) <= TOLERANCE
    view = ca.Hessian(half)["blocks.1.query", "blocks.2.value"]
    exact = ca.Hessian(wide, engine="autograd")["blocks.1.query", "blocks.2.value"]
    assert relative_error(view.dense(), exact.dense()) <= TOLERANCE


def test_copies_live_for_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a scope has given is gone when the next one opens, of blocks and of the head."""
    given: list[weakref.ref[Tensor]] = []
    most, original = 0, ca.Problem.present

    @contextlib.contextmanager
    def watched(
        problem: ca.Problem, names: Iterable[str], **options: Any
    ) -> Iterator[dict[str, Tensor]]:
        nonlocal most
        with original(problem, names, **options) as weights:
            new = [weakref.ref(w) for w in weights.values() if w.ndim > 1]
            given.extend(new)
            alive = {id(w): w.numel() for ref in given if (w := ref()) is not None}
            most = max(most, sum(alive.values()))
            yield weights

    model = _gpt()
    half = ca.Problem(model, "cross_entropy", _tokens(), compute_dtype=torch.float32)
    operator = ca.Hessian(half)
    v = torch.randn(half.size)
    operator @ v
    monkeypatch.setattr(ca.Problem, "present", watched)
    operator @ v
    assert half.engine.name == "tangent"
    block = sum(p.numel() for p in model.blocks[0].parameters() if p.ndim > 1)
    assert len(given) > 2 * 3 * 4  # every block twice, on the way there and back
    assert most <= block  # the largest scope's; the head is smaller


def test_half_precision_without_a_dtype_to_compute_in_is_refused_with_the_way_out() -> None:
    problem = ca.Problem(_gpt(), "cross_entropy", _tokens())
    for checks in (True, False):
        with pytest.raises(ProblemError, match=r"bfloat16.*compute_dtype=torch\.float32"):
            ca.Hessian(problem, checks=checks) @ torch.ones(problem.size, dtype=torch.bfloat16)
    with pytest.raises(ProblemError, match=r"parameters of bfloat16.*compute_dtype"):
        ca.Problem(_gpt(), "cross_entropy", _tokens()).value()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_arithmetic_in_half_precision_stays_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ProblemError, match=r"compute_dtype is torch\.float32 or torch\.float64"):
        ca.Problem(_gpt(), "cross_entropy", _tokens(), compute_dtype=dtype)


def test_a_quantised_float_weight_is_refused_with_the_way_out() -> None:
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    data = (torch.randn(2, 4), torch.randn(2, 3))
    with pytest.raises(ProblemError, match=r"'weight' is float8_e4m3fn.*dequantised"):
        ca.Problem(model, "mse", data, compute_dtype=torch.float32).check()


class _Rounding(nn.Module):
    """Rounds its activations to bfloat16, as models made for it do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x)).to(torch.bfloat16).to(self.down.weight.dtype)
        return self.down(h.to(dtype=torch.bfloat16) * torch.sigmoid(h).bfloat16())


def test_a_forward_pass_made_for_half_precision_does_not_round_on_the_way() -> None:
    torch.manual_seed(0)
    model = _Rounding().to(torch.bfloat16)
    data = (torch.randn(4, 5).bfloat16(), torch.randn(4, 3).bfloat16())
    got = ca.Problem(model, "mse", data, compute_dtype=torch.float64).gradient()

    x, y = (t.double() for t in data)
    weights = [p.detach().double().requires_grad_() for p in model.parameters()]
    h = torch.tanh(x @ weights[0].T + weights[1])
    loss = ((h * torch.sigmoid(h)) @ weights[2].T + weights[3] - y).pow(2).mean()
    want = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, weights)])
    assert relative_error(got, want) <= 1e-12


# --- adapters on a base that is frozen ------------------------------------------------------------


class _Quantised(nn.Module):
    """x W₀ᵀ with W₀ in eight bits and a scale a row, dequantised in its forward pass."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (linear.weight.detach() / scale).round().to(torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.to(x.dtype) * self.scale.to(x.dtype)
        return nn.functional.linear(x, weight, self.bias)


class _Adapted(nn.Module):
    def __init__(self, base: nn.Module, d: int, out: int) -> None:
        super().__init__()
        self.base = base
        self.A, self.B = nn.Parameter(torch.randn(2, d) / 3), nn.Parameter(torch.randn(out, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.A.T @ self.B.T


@pytest.mark.parametrize("quantised", [True, False])
def test_adapters_on_a_quantised_base_have_the_curvature_of_the_dequantised_one(
    quantised: bool,
) -> None:
    model = _gpt(torch.float32)
    reference = model
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        linear = block.ffn.up
        codes = _Quantised(linear)
        linear.weight.data = codes.codes.float() * codes.scale
        torch.manual_seed(5)
        block.ffn.up = _Adapted(linear, linear.in_features, linear.out_features)
    if quantised:
        reference = copy.deepcopy(model)
        for block in model.blocks:
            block.ffn.up.base = _Quantised(block.ffn.up.base)
    problem = ca.Problem(model, "cross_entropy", _tokens())
    exact = ca.Problem(reference, "cross_entropy", _tokens())
    assert all(name.endswith((".A", ".B")) for name in problem.parameter_names)
    v = torch.randn(problem.size)
    got, want = ca.Hessian(problem) @ v, ca.Hessian(exact, engine="autograd") @ v
    assert relative_error(got, want) <= 1e-4


def test_adapters_in_float32_on_a_half_precision_base_need_a_dtype_to_compute_in() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    base = transformers.LlamaForCausalLM(config).eval()
    for parameter in base.parameters():
        parameter.data = parameter.data.bfloat16().float()
    options: Any = {"r": 2, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    wide = peft.get_peft_model(base, peft.LoraConfig(**options)).eval()
    half = copy.deepcopy(wide)
    for parameter in half.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    ids = torch.randint(0, 17, (2, 6))
    batch = {"input_ids": ids, "labels": ids}
    with pytest.raises(ProblemError, match=r"frozen weights of bfloat16.*compute_dtype"):
        ca.Problem(half, None, batch).check()
    exact = ca.Problem(wide, None, batch)
    v = torch.randn(exact.size)
    want = ca.Hessian(exact, engine="autograd") @ v
    problem = ca.Problem(half, None, batch, compute_dtype=torch.float32)
    assert relative_error(ca.Hessian(problem, engine="tangent") @ v, want) <= TOLERANCE
    assert relative_error(ca.Hessian(problem, engine="autograd") @ v, want) <= TOLERANCE


def test_layers_that_compute_on_integers_are_refused_with_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    quantize = torch.ao.quantization.quantize_dynamic
    mixed = quantize(model, {"2": torch.ao.quantization.default_dynamic_qconfig})
    data = (torch.randn(3, 4), torch.randn(3, 2))
    with pytest.raises((ProblemError, DifferentiationError), match="dequantis"):
        ca.Hessian(ca.Problem(mixed, "mse", data)) @ torch.ones(20)


def test_a_moved_copy_of_the_model_is_not_rounded() -> None:
    problem = ca.Problem(_gpt(), "cross_entropy", _tokens(), compute_dtype=torch.float32)
    copied = problem.copied_model()
    assert {p.dtype for p in copied.parameters()} == {torch.float32}
    moved = problem.with_model(copied)
    assert moved.in_place
    assert moved.value() == pytest.approx(problem.value(), rel=1e-6)


# --- before anything is computed ------------------------------------------------------------------


class _Labelled(nn.Module):
    """Returns its own loss, which is called when data are read."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = _gpt()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.gpt(input_ids)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
        return {"loss": loss, "logits": logits}


def _two_batches(model: nn.Module) -> ca.Problem:
    """Of a loss that is called on the first batch when the data are read."""
    tokens, targets = _tokens()

    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    return ca.Problem(model, loss, [(tokens, targets), (tokens[:1], targets[:1])])


_HALF_USES: dict[str, Callable[[GPT], Any]] = {
    "check": lambda model: ca.Problem(model, "cross_entropy", _tokens()).check(),
    "a callable loss": lambda model: _two_batches(model).check(),
    "separable": lambda model: ca.Problem(model, "cross_entropy", _tokens()).separable,
    "value": lambda model: ca.Problem(model, "cross_entropy", _tokens()).value(),
    "gradient": lambda model: ca.Problem(model, "cross_entropy", _tokens()).gradient(),
    "Hessian": lambda model: ca.Hessian(ca.Problem(model, "cross_entropy", _tokens())).dense(),
    "GaussNewton": lambda model: ca.GaussNewton(
        ca.Problem(model, "cross_entropy", _tokens()), checks=False
    ).dense(),
    "Fisher": lambda model: ca.Fisher(ca.Problem(model, "cross_entropy", _tokens())).dense(),
    "KFAC": lambda model: ca.KFAC(ca.Problem(model, "cross_entropy", _tokens())).dense(),
    "Jacobian": lambda model: (
        ca.Jacobian(ca.Problem(model, "cross_entropy", _tokens())) @ torch.ones(1)
    ),
    "atlas": lambda model: ca.atlas(ca.Problem(model, "cross_entropy", _tokens())),
    "Monitor": lambda model: ca.Monitor(model, "cross_entropy", _tokens()).measure(),
    "TransformerHessianAnalyzer": lambda model: ca.TransformerHessianAnalyzer(
        model
    ).analyze_layer_wise_curvature(_tokens()[0]),
    "LayerNormHessian": lambda model: ca.LayerNormHessian.from_module(
        nn.LayerNorm(8, dtype=torch.bfloat16)
    ).compute_jacobian(torch.zeros(2, 8, dtype=torch.bfloat16)),
    "TransformerBlockHessian": lambda model: ca.TransformerBlockHessian.from_module(
        model.blocks[0]
    ).compute_hessian(*torch.zeros(2, 1, 3, 12, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("use", list(_HALF_USES))
def test_half_precision_is_refused_before_anything_is_computed_in_it(use: str) -> None:
    model = _gpt()
    with NoHalfPrecision(), pytest.raises((ValueError, TypeError), match="float32 or float64"):
        _HALF_USES[use](model)


def test_a_model_with_its_own_loss_is_refused_before_it_is_called() -> None:
    model, (tokens, _) = _Labelled(), _tokens()
    with NoHalfPrecision(), pytest.raises(ProblemError, match=r"parameters of bfloat16"):
        ca.Problem(model, None, {"input_ids": tokens, "labels": tokens}).check()


@pytest.mark.parametrize("engine", ["tangent", "autograd"])
def test_half_precision_weights_are_never_computed_with(engine: Any) -> None:
    model, data = _gpt(), _tokens()
    problem = ca.Problem(model, "cross_entropy", data, compute_dtype=torch.float32)
    with NoHalfPrecision():
        problem.gradient()
        ca.Hessian(problem, engine=engine) @ torch.ones(problem.size)
        ca.trace(ca.Hessian(problem, engine=engine), max_products=4)
        assert problem.separable
        assert len(list(problem.anatomy)) > 20


def test_what_notices_half_precision_would_notice_a_product() -> None:
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    with NoHalfPrecision(), pytest.raises(AssertionError, match=r"mm was computed in half"):
        x @ x
    with NoHalfPrecision(), pytest.raises(AssertionError, match=r"addmm was computed in half"):
        nn.Linear(2, 2, dtype=torch.bfloat16)(x)
