"""What is differentiated is the model's own loss, for every kind of head and form of labels."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import curvatlas as ca
from curvatlas.errors import ProblemError
from hugging_face_heads import HEADS, LENGTH, head, tokens
from oracles import hessian, relative_error

pytestmark = pytest.mark.huggingface

# Heads whose loss is none of the formulas known here: several losses added up, or outputs that are
# not logits of the labels.
OWN = {
    "MixtralForCausalLM",
    "BertForPreTraining",
    "ProphetNetForConditionalGeneration",
    "ViTForMaskedImageModeling",
    "SegformerForSemanticSegmentation",
    "CLIPModel",
}


def own_loss(model: Any, batch: dict[str, Any]) -> float:
    return float(model(**batch).loss.detach())


@pytest.mark.parametrize("name", HEADS)
def test_the_loss_is_the_models_own(name: str) -> None:
    model, batch = head(name)
    problem = ca.Problem(model, "model", batch)
    assert problem.value() == pytest.approx(own_loss(model, batch), rel=1e-6)
    assert (problem.loss.name == "model") == (name in OWN)


@pytest.mark.parametrize("name", sorted(set(HEADS) - OWN))
def test_a_loss_by_name_is_the_models_own_without_a_word(name: str) -> None:
    model, batch = head(name)
    formula = ca.Problem(model, data=batch).loss.name.removeprefix("span ")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, module="curvatlas|test_objective")
        problem = ca.Problem(model, formula, batch)
    assert problem.value() == pytest.approx(own_loss(model, batch), rel=1e-6)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "ProphetNetForConditionalGeneration"])
def test_a_loss_that_differs_from_the_models_own_names_both_numbers(name: str) -> None:
    model, batch = head(name)
    with pytest.warns(UserWarning, match=f"{own_loss(model, batch):.6g}.*loss='model'") as seen:
        problem = ca.Problem(model, "cross_entropy", batch)
    assert f"{problem.value():.6g}" in str(seen[0].message)


@pytest.mark.parametrize(
    "name",
    [
        "MixtralForCausalLM",
        "WhisperForConditionalGeneration",
        "BertForQuestionAnswering",
        "BertForSequenceClassification, regression",
        "BertForSequenceClassification, several labels",
        "CLIPModel",
        "BertForMaskedLM",
    ],
)
def test_the_hessian_is_that_of_the_models_own_loss(name: str) -> None:
    model, batch = head(name)
    model = model.double()
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"  # the grouped kernel knows no float64
    batch = {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in batch.items()
    }
    problem = ca.Problem(model, "model", batch, keep_float64=False)
    vector = torch.randn(problem.size, generator=torch.Generator().manual_seed(1)).double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(
        model(**batch).loss, parameters, create_graph=True, materialize_grads=True
    )
    flat = torch.cat([s.reshape(-1) for s in slopes])
    product = torch.autograd.grad(flat @ vector.to(flat), parameters, materialize_grads=True)
    truth = torch.cat([p.reshape(-1) for p in product])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parameters without a gradient path
        ours = ca.Hessian(problem, checks=False) @ vector
    # These models round parts of themselves to float32.
    assert relative_error(ours, truth.double()) < 2e-5


@pytest.mark.parametrize("operator", [ca.GaussNewton, ca.FunctionalHessian, ca.Fisher])
def test_parts_of_an_unknown_loss_are_refused(operator: Any) -> None:
    model, batch = head("MixtralForCausalLM")
    problem = ca.Problem(model, "model", batch)
    with pytest.raises(ProblemError, match=r"cross_entropy"):
        operator(problem) @ torch.ones(problem.size)


def test_a_pair_is_shifted_when_told_and_says_so_when_it_repeats_the_tokens() -> None:
    model, _ = head("GPT2LMHeadModel")
    ids = tokens(5)
    own = own_loss(model, {"input_ids": ids, "labels": ids})
    assert ca.Problem(model, "cross_entropy", (ids, ids), shift=True).value() == pytest.approx(own)
    assert ca.Problem(model, "model", (ids, ids)).value() == pytest.approx(own)
    straight = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())
    with pytest.warns(UserWarning, match="shift=True"):
        problem = ca.Problem(model, "cross_entropy", (ids, ids))
    assert problem.value() == pytest.approx(float(straight.detach()))


def test_a_shift_that_the_model_does_not_make_is_said() -> None:
    model, batch = head("BertForMaskedLM")
    with pytest.warns(UserWarning, match="shift=True gives .* model's own"):
        ca.Problem(model, "cross_entropy", batch, shift=True)


def test_an_option_that_cannot_apply_is_refused() -> None:
    model, batch = head("BertForSequenceClassification")
    with pytest.raises(ProblemError, match="shift=True takes integer labels"):
        ca.Problem(model, "cross_entropy", batch, shift=True)
    with pytest.raises(ProblemError, match="shift= has no meaning"):
        ca.Problem(model, "model", batch, shift=True)
    with pytest.raises(ProblemError, match="count= belongs"):
        ca.Problem(model, "model", batch, count=len)
    with pytest.raises(ProblemError, match="no loss of its own"):
        ca.Problem(torch.nn.Linear(2, 2), None, {"x": torch.ones(1, 2), "labels": torch.ones(1)})


def test_uneven_batches_of_labels_are_one_batch() -> None:
    model, batch = head("GPT2LMHeadModel")
    model = model.double()
    pieces = [{k: v[i:j] for k, v in batch.items()} for i, j in ((0, 1), (1, 3))]
    together = ca.Problem(model, "cross_entropy", batch)
    apart = ca.Problem(model, "cross_entropy", pieces)
    assert apart.value() == pytest.approx(together.value(), rel=1e-12)
    vector = torch.ones(apart.size, dtype=torch.float64)
    ours = ca.Hessian(apart) @ vector
    assert relative_error(ours, ca.Hessian(together) @ vector) < 1e-12


def test_spans_that_are_cut_off_on_one_side_are_refused() -> None:
    model, batch = head("BertForQuestionAnswering")
    batch["start_positions"][2] = LENGTH - 1
    with pytest.raises(ProblemError, match="end positions lie inside"):
        ca.Problem(model, "cross_entropy", batch)


def test_a_loader_that_fills_one_buffer_again_gives_every_batch() -> None:
    class Reusing:
        def __init__(self) -> None:
            self.buffer = torch.empty(4, 3, dtype=torch.float64)

        def __iter__(self) -> Any:
            for place in range(3):
                self.buffer.copy_(inputs[place])
                yield self.buffer, targets[place]

    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 4, 3, generator=numbers, dtype=torch.float64)
    targets = torch.randn(3, 4, 2, generator=numbers, dtype=torch.float64)
    model = torch.nn.Linear(3, 2).double()
    operator = ca.Hessian(ca.Problem(model, "mse", Reusing()))
    value = (model(inputs.flatten(0, 1)) - targets.flatten(0, 1)).pow(2).mean()
    assert relative_error(operator.dense(), hessian(value, list(model.parameters()))) < 1e-14


def test_data_that_change_after_the_problem_was_made_change_nothing() -> None:
    x, y = torch.randn(4, 3), torch.randint(0, 2, (4,))
    problem = ca.Problem(torch.nn.Linear(3, 2), "cross_entropy", (x, y))
    before = problem.value()
    x.zero_()
    assert problem.value() == before
