"""A statement that is changed a little no longer gets its verdict: every check can fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from curvatlas.theory import attention_bounds, reference
from curvatlas.theory.attention_bounds import mended_theorem_1, published_theorem_1
from curvatlas.theory.papers import attention, block, bounds, growth, layer_norm, scalar_model
from curvatlas.theory.papers.bounds import block_norm, head_hessian, key_head, peaked_head
from curvatlas.theory.scalar_attention import ScalarAttention
from curvatlas.theory.statements import find


def times(factor: float) -> Callable[[Any], Any]:
    """What a function returns, multiplied: tensors, tables and tuples of them."""

    def grown(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: grown(entry) for key, entry in value.items()}
        return tuple(map(grown, value)) if isinstance(value, tuple) else factor * value

    return lambda original: lambda *args: grown(original(*args))


def without_the_functional_term(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def outer_alone(head: reference.SingleHead, weight: Tensor) -> Tensor:
        a = torch.softmax(head.x @ weight @ head.x.T, -1)
        met = reference.SingleHead(
            head.x, head.query, head.key, head.value, a @ head.x @ head.value
        )
        return original(met, weight)  # the residual is zero there

    return outer_alone


def with_one_pair_twice(original: Callable[..., Any]) -> Callable[..., Any]:
    def terms(head: reference.SingleHead) -> tuple[Tensor, Tensor]:
        first, second = original(head)
        return first + 0.5 * second, 0.5 * second  # the sum is right, its spectrum is not

    return terms


# statement → the formula behind it and what is done to it
CHANGES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "ormaniec-thm-3.1": (attention, "outer_blocks", times(1.001)),
    "ormaniec-thm-3.2": (attention, "second_derivatives", times(0.999)),
    "ormaniec-lemma-4.1": (attention, "one_matrix_hessian", without_the_functional_term),
    "ormaniec-remark-d.1": (attention, "two_matrix_terms", with_one_pair_twice),
    "ormaniec-lemma-d.2": (attention, "rank_bound", lambda f: lambda d_k, d_v: f(d_k, d_v) + 1),
    "petrov-lemma2": (attention, "second_derivatives", times(2.0)),
    "petrov-thm1": (attention_bounds, "published_theorem_1", times(100.0)),
    "theorem-1-lines": (attention_bounds, "mended_theorem_1", lambda f: published_theorem_1),
    "petrov-thm2": (layer_norm.PrintedNorm, "jacobian", lambda f: lambda self: self.first_term()),
    "petrov-thm5": (block.PrintedBlock, "output_hessian", times(0.9)),
    "petrov-lemma4": (layer_norm, "norm_bounds", times(0.1)),
    "petrov-prop10": (bounds, "sublayer_bounds", times(0.9)),
    "petrov-thm6": (bounds, "theorem_6_bound", times(0.01)),
    "theorem-6-residual": (
        bounds,
        "resolve_loss",
        lambda f: lambda name: SimpleNamespace(seeds=lambda z, y: SimpleNamespace(delta=z - y)),
    ),
    "cracking-thm-3.1": (scalar_model, "outlier_pair", times(1.001)),
    "cracking-thm-3.4": (scalar_model, "_pair_derivatives", times(1.001)),
    "cracking-thm-3.5": (ScalarAttention, "derivatives", times(1.001)),
    "growth-input-outer": (growth, "slope", lambda f: lambda x, y: f(x, y) + 0.1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_statement_loses_its_verdict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    item = find(name)
    place, attribute, change = CHANGES[name]
    monkeypatch.setattr(place, attribute, change(getattr(place, attribute)))
    assert item.run().verdict != item.verdict


def test_the_published_theorem_1_fails_at_a_global_minimum() -> None:
    head = key_head()
    assert torch.equal(head.output(), head.target)
    h = head_hessian(head)
    assert float(block_norm(head, "KK", h)) == pytest.approx(32.0, rel=1e-14)
    bound = 3.0 * max(float(line) for line in published_theorem_1(head).values())
    assert bound == pytest.approx(24.0, rel=1e-14)


@pytest.mark.parametrize("length", [8, 16, 64])
def test_a_peaked_row_exceeds_the_line_of_vq_by_an_eighth_of_the_tokens(length: int) -> None:
    head = peaked_head(length)
    true = float(block_norm(head, "VQ", head_hessian(head)))
    assert true / float(published_theorem_1(head)["VQ"]) == pytest.approx(length / 8, rel=1e-9)
    assert true / float(mended_theorem_1(head)["VQ"]) == pytest.approx(0.5, rel=1e-9)


def test_lemma_4_fails_with_the_norm_of_a_row_and_holds_with_its_deviation() -> None:
    x = torch.zeros(1, 16, dtype=torch.float64)
    x[0, 0], x[0, 1] = 0.5**0.5, -(0.5**0.5)
    true = float(torch.linalg.matrix_norm(layer_norm.automatic(x, 0.0)[0], 2))
    assert true == pytest.approx(4.0, rel=1e-12)
    printed = float(layer_norm.norm_bounds(x, torch.tensor(1.0).double())[0])
    mended = float(layer_norm.norm_bounds(x, torch.tensor(0.25).double())[0])
    assert printed == pytest.approx(1.25, rel=1e-12)
    assert mended >= true
