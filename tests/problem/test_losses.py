"""Every loss of torch.nn: value, H and H_o over uneven batches are those of one batch of all."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.errors import ProblemError
from oracles import hessian as hessian_of, outer_hessian

SIZES = (5, 1, 4)  # samples of the batches
WIDTH = 4  # outputs, or classes
Case = tuple[nn.Module, str, str]  # the loss, what the outputs are, what the targets are


class Network(nn.Module):
    """(n, 3) → (n, 4), or (n, 4, places...) with ``places`` outputs for each class."""

    def __init__(self, outputs: str, places: tuple[int, ...] = ()) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        size = WIDTH * int(torch.tensor(places).prod()) if places else WIDTH
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, size)
        self._outputs, self._places = outputs, places
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=numbers)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        z = self.last(torch.tanh(self.first(x)))
        z = z.reshape(len(x), WIDTH, *self._places)
        if self._outputs == "probabilities":
            return z.sigmoid()
        return z.log_softmax(1) if self._outputs == "log-probabilities" else z


def targets_of(kind: str, places: tuple[int, ...] = ()) -> Tensor:
    numbers = torch.Generator().manual_seed(1)
    n, shape = sum(SIZES), (sum(SIZES), WIDTH, *places)
    if kind == "classes":
        classes = torch.randint(0, WIDTH, (n, *places), generator=numbers)
        classes[2], classes.view(n, -1)[7, 0] = -100, -100
        return classes
    if kind == "every class":
        return torch.randint(0, WIDTH, (n, *places), generator=numbers)
    if kind == "numbers":
        return torch.randn(shape, generator=numbers, dtype=torch.float64)
    if kind == "signs":
        return torch.randn(shape, generator=numbers, dtype=torch.float64).sign()
    if kind == "counts":
        return torch.randint(0, 5, shape, generator=numbers).double()
    if kind == "bits":
        return torch.randint(0, 2, shape, generator=numbers).double()
    if kind == "sets of classes":
        return torch.tensor([[3, 0, -1, 1]] * n)
    assert kind == "probabilities"
    return torch.rand(shape, generator=numbers, dtype=torch.float64).softmax(1)


def weights(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.2


def cases() -> list[Any]:
    made: list[Any] = []

    def add(make: Callable[..., nn.Module], outputs: str, targets: str, **options: Any) -> None:
        for reduction in ("mean", "sum"):
            shown = ", ".join(
                f"{k}" if isinstance(v, Tensor) else f"{k}={v}" for k, v in options.items()
            )
            name = f"{make.__name__}({shown}) {reduction} {targets}"
            made.append(
                pytest.param((make(reduction=reduction, **options), outputs, targets), id=name)
            )

    entrywise = [nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss]
    for make in entrywise:
        add(make, "logits", "numbers")
    add(nn.HuberLoss, "logits", "numbers", delta=0.4)
    add(nn.SmoothL1Loss, "logits", "numbers", beta=0.3)
    add(nn.PoissonNLLLoss, "logits", "counts")
    add(nn.PoissonNLLLoss, "probabilities", "counts", log_input=False, full=True)
    add(nn.KLDivLoss, "log-probabilities", "probabilities")
    add(nn.KLDivLoss, "log-probabilities", "log-probabilities", log_target=True)
    add(nn.BCELoss, "probabilities", "bits")
    add(nn.BCELoss, "probabilities", "probabilities", weight=weights(WIDTH))
    for weight, positive in itertools.product((None, weights(WIDTH)), repeat=2):
        add(nn.BCEWithLogitsLoss, "logits", "bits", weight=weight, pos_weight=positive)
    add(nn.BCEWithLogitsLoss, "logits", "probabilities", pos_weight=weights(1))
    add(nn.SoftMarginLoss, "logits", "signs")
    add(nn.HingeEmbeddingLoss, "logits", "signs")
    add(nn.MultiLabelSoftMarginLoss, "logits", "bits")
    add(nn.MultiLabelSoftMarginLoss, "logits", "bits", weight=weights(WIDTH))
    for weight, smoothing in itertools.product((None, weights(WIDTH)), (0.0, 0.2)):
        options = {"weight": weight, "label_smoothing": smoothing}
        add(nn.CrossEntropyLoss, "logits", "classes", **options)
        add(nn.CrossEntropyLoss, "logits", "every class", **options, ignore_index=1)
        add(nn.CrossEntropyLoss, "logits", "probabilities", **options)
    for weight in (None, weights(WIDTH)):
        add(nn.NLLLoss, "log-probabilities", "classes", weight=weight)
        add(nn.NLLLoss, "log-probabilities", "every class", weight=weight, ignore_index=2)
    made.append(
        pytest.param(
            (nn.KLDivLoss(reduction="batchmean"), "log-probabilities", "probabilities"),
            id="KLDivLoss batchmean",
        )
    )
    return made


def drawn(kind: str, places: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    x = torch.randn(sum(SIZES), 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if kind == "log-probabilities":
        return x, targets_of("probabilities", places).log()
    return x, targets_of(kind, places)


def batches_of(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


def oracle(model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> tuple[Any, ...]:
    """Value, H and H_o of the concatenated batch."""
    parameters = list(model.parameters())
    outputs = model(x)
    if isinstance(loss, nn.BCELoss):
        loss = functools.partial(written_out, loss)
    value = loss(outputs, y)
    outer = outer_hessian(outputs, lambda z: loss(z, y), parameters)
    return float(value.detach()), hessian_of(value, parameters), outer


def written_out(loss: nn.BCELoss, z: Tensor, y: Tensor) -> Tensor:
    """BCE by its formula: torch's derivatives of it add 1e-12 to what they divide by."""
    entries = -(y * z.log() + (1 - y) * torch.log1p(-z))
    entries = entries if loss.weight is None else entries * loss.weight
    return entries.mean() if loss.reduction == "mean" else entries.sum()


def close(ours: Tensor, truth: Tensor) -> bool:
    return bool((ours - truth).abs().max() <= 1e-12 * max(1.0, float(truth.abs().max())))


@pytest.mark.parametrize("case", cases())
def test_a_torch_loss_over_uneven_batches_is_that_of_the_concatenated_batch(case: Case) -> None:
    loss, outputs, targets = case
    model = Network(outputs)
    x, y = drawn(targets)
    value, hessian, outer = oracle(model, loss, x, y)
    problem = ca.Problem(model, loss, batches_of(x, y))
    assert problem.value() == pytest.approx(value, rel=1e-12)
    assert close(ca.Hessian(problem).dense(), hessian)
    assert close(ca.GaussNewton(problem).dense(), outer)
    assert close(ca.FunctionalHessian(problem).dense(), hessian - outer)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("places", [(3,), (WIDTH,), (2, 3), (2, WIDTH)])
@pytest.mark.parametrize("targets", ["classes", "probabilities"])
@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_classes_on_the_second_axis_are_read_as_torch_reads_them(
    make: Any, targets: str, places: tuple[int, ...], reduction: str
) -> None:
    if make is nn.NLLLoss and targets == "probabilities":
        return
    loss = make(reduction=reduction, weight=weights(WIDTH))
    model = Network("logits" if make is nn.CrossEntropyLoss else "log-probabilities", places)
    x, y = drawn(targets, places)
    value, hessian, outer = oracle(model, loss, x, y)
    problem = ca.Problem(model, loss, batches_of(x, y))
    assert problem.value() == pytest.approx(value, rel=1e-12)
    assert close(ca.Hessian(problem).dense(), hessian)
    assert close(ca.GaussNewton(problem).dense(), outer)


def test_logits_with_the_classes_last_are_read_where_torch_has_no_reading() -> None:
    class Turned(Network):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).movedim(1, -1)

    model, (x, y) = Turned("logits", (3,)), drawn("classes", (3,))
    problem = ca.Problem(model, nn.CrossEntropyLoss(), (x, y))
    by_name = ca.Problem(model, "cross_entropy", (x, y))
    truth = float(F.cross_entropy(model(x).movedim(-1, 1), y))
    assert problem.value() == pytest.approx(truth, rel=1e-12)
    assert by_name.value() == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_a_budget_that_splits_batches_changes_no_loss(loss: str) -> None:
    model, (x, y) = Network("logits"), drawn("classes")
    module = nn.CrossEntropyLoss(weight=weights(WIDTH), label_smoothing=0.1, reduction=loss)
    _, hessian, _ = oracle(model, module, x, y)
    with pytest.warns(UserWarning, match="budget"):
        small = ca.Hessian(ca.Problem(model, module, (x, y)), budget=1).dense()
    assert close(small, hessian)


@pytest.mark.parametrize(
    "function",
    [
        F.cross_entropy,
        functools.partial(F.cross_entropy, reduction="sum", label_smoothing=0.1),
        functools.partial(F.cross_entropy, weight=weights(WIDTH)),
    ],
)
def test_functions_of_torch_are_their_modules(function: Callable[..., Tensor]) -> None:
    model, (x, y) = Network("logits"), drawn("classes")
    value, hessian, outer = oracle(model, function, x, y)
    problem = ca.Problem(model, function, batches_of(x, y))
    assert problem.value() == pytest.approx(value, rel=1e-12)
    assert close(ca.Hessian(problem).dense(), hessian)
    assert close(ca.GaussNewton(problem).dense(), outer)


def test_a_callable_sum_is_a_sum_when_it_is_said_to_be_one() -> None:
    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).pow(4).sum()

    model, (x, y) = Network("logits"), drawn("numbers")
    value, hessian, outer = oracle(model, total, x, y)
    problem = ca.Problem(model, total, batches_of(x, y), reduction="sum")
    assert problem.value() == pytest.approx(value, rel=1e-12)
    assert close(ca.Hessian(problem).dense(), hessian)
    assert close(ca.GaussNewton(problem).dense(), outer)


def test_a_callable_sum_over_several_batches_is_noticed() -> None:
    model, (x, y) = Network("logits"), drawn("numbers")
    with pytest.raises(ProblemError, match="reduction='sum'"):
        ca.Problem(model, lambda z, t: (z - t).pow(2).sum(), batches_of(x, y))


def test_a_callable_mean_over_other_units_than_counted_is_named() -> None:
    model, (x, y) = Network("logits"), drawn("classes")
    weight = weights(WIDTH)
    with pytest.warns(UserWarning, match="count="):
        ca.Problem(model, lambda z, t: F.cross_entropy(z, t, weight=weight), batches_of(x, y))


@pytest.mark.parametrize("kind", ["exact", "mc", "empirical"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_fisher_of_binary_targets_follows_its_definition(kind: Any, reduction: str) -> None:
    model, (x, y) = Network("logits"), drawn("bits")
    loss = nn.BCEWithLogitsLoss(reduction=reduction)
    problem = ca.Problem(model, loss, batches_of(x, y))
    # the trace of 800 draws has a standard deviation of 1 % (of 200: 1.9 %)
    fisher = ca.Fisher(problem, kind=kind, samples=800 if kind == "mc" else 1)
    _, _, outer = oracle(model, loss, x, y)
    if kind == "exact":
        assert close(fisher.dense(), outer)
        return
    if kind == "mc":
        trace = float(fisher.dense().trace())
        assert trace == pytest.approx(float(outer.trace()), rel=0.05)
        return
    truth = torch.zeros_like(outer)
    for i in range(len(x)):
        value = loss(model(x[i : i + 1]), y[i : i + 1])
        gradients = torch.autograd.grad(value, list(model.parameters()))
        flat = torch.cat([g.reshape(-1) for g in gradients])
        truth += torch.outer(flat, flat)
    assert close(fisher.dense(), truth if reduction == "sum" else truth / len(x))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CTCLoss(), "more than"),
        (nn.GaussianNLLLoss(), "more than"),
        (nn.TripletMarginLoss(), "more than"),
        (nn.MSELoss(reduction="none"), "reduction"),
        (nn.BCEWithLogitsLoss(weight=weights(10, WIDTH)), "each sample"),
        (nn.CrossEntropyLoss(weight=weights(3)), "class weights"),
        (nn.CrossEntropyLoss(weight=-weights(4)), "at least zero"),
    ],
)
def test_what_a_loss_cannot_mean_is_refused(loss: nn.Module, words: str) -> None:
    kind = "bits" if isinstance(loss, nn.BCEWithLogitsLoss) else "classes"
    model, (x, y) = Network("logits"), drawn(kind)
    with pytest.raises(ProblemError, match=words):
        ca.Problem(model, loss, (x, y)).value()


@pytest.mark.parametrize("ignored", [WIDTH, 99, -1])
def test_an_ignore_index_may_lie_outside_the_classes(ignored: int) -> None:
    model, (x, y) = Network("logits"), drawn("classes")
    y = torch.where(y == -100, ignored, y)
    loss = nn.CrossEntropyLoss(ignore_index=ignored, weight=weights(WIDTH))
    problem = ca.Problem(model, loss, (x, y))
    _, hessian, outer = oracle(model, loss, x, y)
    assert close(ca.Hessian(problem).dense(), hessian)
    assert close(ca.GaussNewton(problem).dense(), outer)
    assert ca.Fisher(problem, kind="empirical").dense().isfinite().all()


def test_a_loss_linear_in_the_outputs_says_that_its_outer_part_is_zero() -> None:
    model, (x, y) = Network("log-probabilities"), drawn("classes")
    with pytest.warns(UserWarning, match="linear in the outputs"):
        ca.GaussNewton(ca.Problem(model, nn.NLLLoss(), (x, y)))


def test_what_compares_samples_with_their_mean_refuses_a_sum() -> None:
    model, (x, y) = Network("logits"), drawn("classes")
    problem = ca.Problem(model, nn.CrossEntropyLoss(reduction="sum"), (x, y))
    with pytest.raises(ProblemError, match="reduction='mean'"):
        ca.landscape_convergence(problem)
