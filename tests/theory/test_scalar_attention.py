"""The public spectrum of scalar attention against a dense Hessian by double backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas.results import load


def draw(seed: int, d_k: int, shape: tuple[int, ...] = (2, 5)) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    sizes = {"x": shape, "target": shape, "query": (d_k,), "key": (d_k,), "value": ()}
    return {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in sizes.items()}


def dense_hessian(
    x: Tensor, target: Tensor, query: Tensor, key: Tensor, value: Tensor, sink: float = 0.0
) -> Tensor:
    """Written out apart from the code under test: one sequence at a time, one flat vector."""
    d_k, x, target = len(query), x.reshape(-1, x.shape[-1]), target.reshape(-1, x.shape[-1])

    def loss(w: Tensor) -> Tensor:
        errors = []
        for tokens, wanted in zip(x, target, strict=True):
            logits = torch.outer(tokens, tokens) * (w[:d_k] @ w[d_k : 2 * d_k]) / math.sqrt(d_k)
            logits = logits + sink * torch.nn.functional.one_hot(torch.tensor(0), len(tokens))
            errors.append(w[-1] * torch.softmax(logits, -1) @ tokens - wanted)
        return torch.stack(errors).square().mean()

    w = torch.cat([query, key, value.reshape(1)])
    hessian: Tensor = torch.autograd.functional.hessian(loss, w)
    return hessian


@pytest.mark.parametrize("sink", [0.0, 1.5])
@pytest.mark.parametrize("d_k", [1, 2, 7])
def test_every_eigenvalue_is_that_of_the_dense_hessian(d_k: int, sink: float) -> None:
    case = draw(10 + d_k, d_k)
    found = ca.scalar_attention_spectrum(**case, sink=sink)
    truth = torch.linalg.eigvalsh(dense_hessian(**case, sink=sink))
    assert found.eigenvalues.shape == truth.shape == (2 * d_k + 1,)
    assert float((found.eigenvalues - truth).norm()) <= 1e-13 * float(truth.norm())
    assert sum(found.multiplicities) == 2 * d_k + 1


def test_bulk_ratio_and_condition_number_are_those_of_the_eigenvalues() -> None:
    case = draw(3, 6)
    found = ca.scalar_attention_spectrum(**case)
    truth = torch.linalg.eigvalsh(dense_hessian(**case)).abs()
    assert found.multiplicities == (5, 5, 1, 1, 1)
    assert found.condition_number == pytest.approx(float(truth.max() / truth.min()), rel=1e-10)
    repeated = truth.sort().values  # the bulk is the size that occurs ten times
    gaps = (repeated[9:] - repeated[:-9]).abs()
    bulk = float(repeated[int(gaps.argmin())])
    assert found.bulk == pytest.approx(bulk, rel=1e-10)
    assert found.bulk_ratio == pytest.approx(bulk / float(found.outliers.abs().max()), rel=1e-10)


def test_the_gauss_newton_part_has_two_eigenvalues() -> None:
    case = draw(4, 3)
    met = ca.scalar_attention_spectrum(**case)
    # with the targets met the functional part vanishes and H is Gauss-Newton
    a = torch.softmax(
        case["x"].unsqueeze(2) * case["x"].unsqueeze(1) * (case["query"] @ case["key"]) / 3**0.5, -1
    )
    case["target"] = case["value"] * (a @ case["x"].unsqueeze(2))[..., 0]
    truth = torch.linalg.eigvalsh(dense_hessian(**case))
    assert float((met.gauss_newton - truth[-2:]).norm()) <= 1e-12 * float(truth.norm())
    assert ca.scalar_attention_spectrum(**case).bulk == pytest.approx(0.0, abs=1e-15)


def test_one_sequence_is_a_batch_of_one() -> None:
    case = draw(5, 2, (6,))
    batch = case | {name: case[name].unsqueeze(0) for name in ("x", "target")}
    alone, together = (ca.scalar_attention_spectrum(**c) for c in (case, batch))
    assert torch.equal(alone.eigenvalues, together.eigenvalues)


def test_it_prints_tabulates_draws_and_survives_a_round_trip(tmp_path: object) -> None:
    found = ca.scalar_attention_spectrum(**draw(6, 4))
    assert "3 pairs" in str(found)
    assert len(found.to_dataframe()) == 5
    assert found.plot().axes
    again = load(found.save(f"{tmp_path}/spectrum"))
    assert again.to_dict() == found.to_dict()


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    case = draw(7, 3)
    with pytest.raises(ValueError, match=r"\(L,\) or \(n, L\)"):
        ca.scalar_attention_spectrum(**case | {"target": case["target"][0]})
    with pytest.raises(ValueError, match="one length d_k"):
        ca.scalar_attention_spectrum(**case | {"key": case["key"][:2]})
    with pytest.raises(ValueError, match="NaN"):
        ca.scalar_attention_spectrum(**case | {"x": case["x"] * float("nan")})
