"""Compiled products are the exact ones, are compiled only where they pay, and give way if not."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import curvatlas as ca
import oracles
from curvatlas import zoo
from curvatlas.engines.autograd import compiled
from curvatlas.operators.curvature import CurvatureOperator

needs_a_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler"
)


def problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], ca.Problem]:
    """Affine LayerNorm between linear maps: the composition that other products get wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[1].weight.normal_(1.0, 0.3)
    data = (torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1]))
    return model, data, ca.Problem(model, "cross_entropy", data)


def linearisation_of(operator: CurvatureOperator) -> Any:
    assert operator._full is not None
    return next(iter(operator._full))[1]


@needs_a_compiler
@pytest.mark.slow
def test_compiled_products_through_layer_norm_are_exact() -> None:
    model, (inputs, targets), given = problem()
    operator = ca.Hessian(given, compile=True)
    vector = torch.randn(given.size, dtype=torch.float64)
    products = [operator @ vector for _ in range(3)]  # the first one runs uncompiled
    assert linearisation_of(operator)._run is not None
    by_hand = oracles.with_hand_written_norms(model)
    loss = torch.nn.functional.cross_entropy(by_hand(inputs), targets)
    want = oracles.hessian(loss, list(by_hand.parameters())) @ vector
    for got in products:
        assert oracles.relative_error(got, want) < 1e-13
    # Other weights: the compiled code must not remember the old ones.
    model[0].weight.data.mul_(1.5)  # moves no version
    loss = torch.nn.functional.cross_entropy(by_hand(inputs), targets)
    want = oracles.hessian(loss, list(by_hand.parameters())) @ vector
    assert oracles.relative_error(operator @ vector, want) < 1e-13


def test_auto_compiles_only_where_the_expected_products_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def refuse(*_: object) -> Any:
        asked.append(1)
        raise RuntimeError("not in this test")

    monkeypatch.setattr(compiled, "_compiled", refuse)
    vector = torch.randn(problem()[2].size, dtype=torch.float64)
    for expected, compiles in ((None, 0), (1, 0), (10**9, 1)):
        asked.clear()
        operator = ca.Hessian(problem()[2], compile="auto", expected_products=expected)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                operator @ vector
        assert len(asked) == (compiles if shutil.which("c++") or shutil.which("g++") else 0)


def test_a_compiled_product_that_differs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem()[2]

    def wrong(plain: Any, names: Sequence[str], vector: Sequence[torch.Tensor]) -> Any:
        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            columns = {n: v.unsqueeze(0) for n, v in zip(names, tensors, strict=True)}
            return [t[0] * (1 + 1e-9) for t in plain.product(columns, names)]

        return run, []

    monkeypatch.setattr(compiled, "_compiled", wrong)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: name)
    operator, plain = ca.Hessian(given, compile=True), ca.Hessian(given)
    vector = torch.randn(given.size, dtype=torch.float64)
    operator @ vector
    with pytest.warns(UserWarning, match=r"differs from the exact one by 1\.0e-09"):
        got = operator @ vector
    assert torch.equal(got, plain @ vector)
    assert torch.equal(operator @ vector, plain @ vector)  # and says it once


def test_a_wrong_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="compile is True, False or 'auto'"):
        ca.Hessian(problem()[2], compile="always")  # type: ignore[arg-type]


def test_a_model_that_is_understood_is_computed_by_hand_and_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "_compiled", lambda *_: pytest.fail("was compiled"))
    model = zoo.reference_gpt().double().eval()
    tokens = torch.randint(model.config.vocabulary, (2, 5))
    given = ca.Problem(model, "cross_entropy", (tokens, tokens))
    vector = torch.randn(given.size, dtype=torch.float64)
    operator, plain = ca.Hessian(given, compile=True), ca.Hessian(given)
    for _ in range(3):
        assert torch.equal(operator @ vector, plain @ vector)
    assert given.engine.name == "tangent"
