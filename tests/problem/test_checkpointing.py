"""Checkpointed blocks give the same derivatives and keep the memory of one block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import curvatlas as ca
import families
import oracles
from curvatlas.engines.autograd.linearisation import HessianLinearisation
from curvatlas.errors import ProblemError
from curvatlas.operators.curvature import CurvatureParts
from curvatlas.problem.checkpointing import repeated_blocks
from curvatlas.zoo.models import GPT, GPTConfig

OPERATORS: dict[str, Any] = {
    "H": ca.Hessian,
    "H_o": ca.GaussNewton,
    "H_f": ca.FunctionalHessian,
    "parts": CurvatureParts,
}


def gpt(layers: int = 3, **changes: Any) -> GPT:
    torch.manual_seed(2)
    config = {"vocabulary": 13, "context": 6, "d_model": 8, "n_heads": 2, "n_layers": layers}
    return GPT(GPTConfig(**{**config, **changes})).double().eval()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randint(0, 13, (2, 4, 6), generator=torch.Generator().manual_seed(0))
    targets[1, 3:] = -100
    return inputs, targets


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"positions": "rope"}])
def test_every_operator_is_the_same_with_checkpointed_blocks(changes: dict[str, Any]) -> None:
    model = gpt(**changes)
    plain = ca.Problem(model, "cross_entropy", tokens())
    lean = ca.Problem(model, "cross_entropy", tokens(), checkpoint_activations=True)
    columns = torch.randn(plain.size, 3, dtype=torch.float64)
    assert oracles.relative_error(lean.gradient(), plain.gradient()) < 1e-13
    for name, make in OPERATORS.items():
        want = make(plain) @ columns
        assert oracles.relative_error(make(lean) @ columns, want) < 1e-12, name


@pytest.mark.huggingface
@pytest.mark.parametrize("family", ["hf llama", "hf gpt2", "hf bert", "torch encoder pre-norm"])
def test_blocks_with_keyword_arguments_and_masks_are_checkpointed(family: str) -> None:
    model, batch, loss = families.make(family)
    plain = ca.Problem(model, loss, batch)
    lean = ca.Problem(model, loss, batch, checkpoint_activations=True)
    direction = torch.randn(plain.size, dtype=plain.dtype)
    for make in (ca.Hessian, ca.GaussNewton):
        want = make(plain) @ direction
        assert oracles.relative_error(make(lean) @ direction, want) < 1e-10


def test_a_checkpointed_graph_grows_by_inputs_and_cotangents_only() -> None:
    def kept(layers: int, lean: bool) -> int:
        problem = ca.Problem(gpt(layers), "cross_entropy", tokens(), checkpoint_activations=lean)
        batch = next(problem.batches())
        with problem.evaluating():
            return HessianLinearisation(problem, batch, problem.parameter_names).size.bytes

    grown = kept(6, True) - kept(3, True)
    boundary = 4 * 6 * 8 * 8  # one (B, L, d) tensor of float64
    assert 0 < grown <= 3 * 4 * boundary
    assert grown < (kept(6, False) - kept(3, False)) / 10


def test_the_blocks_keep_their_forward_afterwards() -> None:
    model = gpt()
    problem = ca.Problem(model, "cross_entropy", tokens(), checkpoint_activations=True)
    ca.Hessian(problem) @ torch.zeros(problem.size, dtype=torch.float64)
    assert all("forward" not in block.__dict__ for block in repeated_blocks(model))


def test_a_model_without_repeated_blocks_is_refused() -> None:
    model = nn.Linear(3, 2).double()
    data = (torch.randn(4, 3).double(), torch.randn(4, 2).double())
    problem = ca.Problem(model, "mse", data, checkpoint_activations=True)
    with pytest.raises(ProblemError, match="no list of repeated blocks"):
        problem.gradient()
