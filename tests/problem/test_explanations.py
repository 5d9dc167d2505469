"""A missing second derivative is named by its operation, with the way round it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import curvatlas as ca
import oracles
from curvatlas.errors import DifferentiationError
from curvatlas.problem.kernels import explanation

EPS = torch.finfo(torch.float64).eps


class Network(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.middle = nn.Linear(3, 4), nn.Linear(4, 3), middle
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(x)))
        return result


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 3, (5,), generator=generator)


def product(model: nn.Module, loss: Any = "cross_entropy", operator: Any = ca.Hessian) -> Tensor:
    problem = ca.Problem(model, loss, data())
    result: Tensor = operator(problem) @ torch.ones(problem.size, dtype=torch.float64)
    return result


OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "cdist": (lambda h: torch.cdist(h, torch.ones(4, 4).double()), r"torch.cdist \(aten::_cdist_b"),
    "pdist": (lambda h: h + F.pdist(torch.cat([h, h + 1])).sum(), r"torch.pdist \(aten::_pdist_b"),
    "segments": (
        lambda h: h + torch.segment_reduce(h, "sum", lengths=torch.ones(len(h)).long()),
        r"torch.segment_reduce \(aten::_segment_reduce_backward\).*index_add",
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_of_the_model_is_named(name: str) -> None:
    operation, message = OPERATIONS[name]
    with pytest.raises(DifferentiationError, match=message) as caught:
        product(Network(operation))
    assert "attention" not in str(caught.value)


def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
    scores = torch.stack([outputs, outputs.cos(), outputs.sin()]).log_softmax(-1)
    samples = len(targets)
    lengths = torch.full((samples,), 3), torch.ones(samples).long()
    return F.ctc_loss(scores, (targets % 2 + 1).unsqueeze(1), *lengths)


LOSSES: dict[str, tuple[Any, str]] = {
    "ctc": (ctc, r"CTC loss \(aten::_ctc_loss_backward\).*FunctionalHessian"),
    "multi-margin": (nn.MultiMarginLoss(), r"multi-margin loss \(aten::multi_margin_loss_backward"),
    "multi-label margin": (
        lambda z, y: F.multilabel_margin_loss(z, torch.stack([y, y - y - 1, y], 1)),
        r"multi-label margin loss \(aten::multilabel_margin_loss_backward",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("operator", [ca.Hessian, ca.GaussNewton])
def test_a_loss_without_second_derivative_is_named(name: str, operator: Any) -> None:
    loss, message = LOSSES[name]
    with pytest.raises(DifferentiationError, match=message) as caught:
        product(Network(), loss, operator)
    assert "attention" not in str(caught.value)


def test_the_functional_part_needs_only_the_slope_of_such_a_loss() -> None:
    model, (inputs, targets) = Network(), data()
    parameters = list(model.parameters())
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(ctc(outputs, targets), outputs, retain_graph=True)
    want = oracles.hessian((outputs * slope).sum(), parameters)
    found = ca.FunctionalHessian(ca.Problem(model, ctc, (inputs, targets))).dense()
    assert oracles.relative_error(found, want) < 1000 * EPS


def test_hard_sigmoid_and_fused_linear_losses_are_written_out() -> None:
    found = product(Network(nn.Hardsigmoid()))
    want = product(Network(lambda x: (F.relu(x + 3) - F.relu(x - 3)) / 6))
    assert oracles.relative_error(found, want) < 1000 * EPS
    options: Any = getattr(nn, "LinearCrossEntropyOptions", None)
    if options is None:  # before torch 2.13
        return
    weight = torch.randn(4, 3, dtype=torch.float64)
    found = product(Network(), lambda z, y: F.linear_cross_entropy(z, weight, y, options=options()))
    want = product(Network(), lambda z, y: F.cross_entropy(z @ weight.T, y))
    assert oracles.relative_error(found, want) < 1000 * EPS


class SquaredOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * slope * ctx.saved_tensors[0]


def test_a_function_marked_once_differentiable_is_named_by_its_class() -> None:
    with pytest.raises(DifferentiationError, match=r"SquaredOnce: .*once_differentiable"):
        product(Network(SquaredOnce.apply))


class FusedLoss(torch.autograd.Function):
    """Cross-entropy that makes its gradient in the forward pass, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        probabilities = z.softmax(-1)
        ctx.save_for_backward((probabilities - F.one_hot(y, z.shape[-1])) / len(z))
        return -probabilities.gather(1, y.unsqueeze(1)).log().mean()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * slope, None


class FusedLossOnce(FusedLoss):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * slope, None


@pytest.mark.parametrize("fused", [FusedLoss, FusedLossOnce])
@pytest.mark.parametrize("operator", [ca.Hessian, ca.GaussNewton])
def test_a_fused_loss_that_drops_its_curvature_is_refused(fused: Any, operator: Any) -> None:
    with pytest.raises(DifferentiationError, match=rf"by 100%: {fused.__name__}Backward"):
        product(Network(), lambda z, y: fused.apply(z, y), operator)


def test_the_functional_part_of_a_fused_loss_is_right() -> None:
    found = product(Network(), lambda z, y: FusedLoss.apply(z, y), ca.FunctionalHessian)
    want = product(Network(), "cross_entropy", ca.FunctionalHessian)
    assert oracles.relative_error(found, want) < 1000 * EPS


class TwiceLoss(FusedLoss):
    """The same with its gradient computed where it can be differentiated."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(z, y)
        return F.cross_entropy(z, y)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        z, y = ctx.saved_tensors
        return slope * (z.softmax(-1) - F.one_hot(y, z.shape[-1])) / len(z), None


def test_a_custom_loss_with_a_right_double_backward_is_accepted() -> None:
    found = product(Network(), lambda z, y: TwiceLoss.apply(z, y))
    assert oracles.relative_error(found, product(Network())) < 1000 * EPS


@torch.library.custom_op("curvatlas_test::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


@torch.library.custom_op("curvatlas_test::cube_slope", mutates_args=())
def cube_slope(slope: Tensor, x: Tensor) -> Tensor:
    return 3 * slope * x**2


cube.register_autograd(
    lambda ctx, slope: cube_slope(slope, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
_library = torch.library.Library("curvatlas_test", "FRAGMENT")
_library.define("bare(Tensor x) -> Tensor")
_library.impl("bare", lambda x: x.detach() ** 2, "CPU")


@pytest.mark.filterwarnings("ignore:curvatlas_test")
def test_custom_operators_are_named() -> None:
    with pytest.raises(DifferentiationError, match=r"curvatlas_test.cube_slope.*register_autograd"):
        product(Network(cube))
    with pytest.raises(DifferentiationError, match=r"curvatlas_test::bare.*gradients.*dropped"):
        product(Network(lambda h: h + torch.ops.curvatlas_test.bare(h)))


MESSAGES = {
    "derivative for aten::_scaled_dot_product_efficient_attention_backward is not implemented": (
        "attention kernel",
        "attn_implementation='eager'",
    ),
    "the derivative for '_cudnn_rnn_backward' is not implemented. Double backwards is not supported"
    " for CuDNN RNNs due to limitations in the CuDNN API.": ("cuDNN", "cudnn.flags(enabled=False)"),
    "derivative for aten::grid_sampler_2d_backward is not implemented": ("grid_sample", "later"),
    "double backwards on roi_align not supported": ("roi_align", "grid_sample"),
    "derivative for aten::some_new_backward is not implemented": (
        "aten::some_new_backward",
        "plain PyTorch operations",
    ),
    "torch.compile with aot_autograd does not currently support double backward": (
        "torch.compile",
        "before compiling",
    ),
    "trying to differentiate twice a function that was marked with @once_differentiable": (
        "once_differentiable",
        "remove the mark",
    ),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_pytorchs_messages_become_an_operation_and_a_way_round(message: str) -> None:
    text = explanation(message)
    assert text is not None
    assert "\n" not in text
    assert all(part in text for part in MESSAGES[message])
    assert ("attention" in text) == ("attention" in message)


def test_other_errors_stay_as_they_are() -> None:
    assert explanation("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)") is None
    assert explanation("\"addmm_impl_cpu_\" not implemented for 'Half'") is None
