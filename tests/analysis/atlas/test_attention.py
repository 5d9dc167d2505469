"""Curvature of attention over batches, against the dense Hessian of the same parameters."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import curvatlas as ca
from curvatlas.errors import ProblemError


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


def setting() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = Classifier().double().eval()
    batches = [
        (torch.randn(size, 3, 4, dtype=torch.float64), torch.randint(0, 3, (size,)))
        for size in (4, 2, 3)
    ]
    return model, batches


@functools.cache
def analysed() -> ca.AttentionCurvature:
    return ca.analyze_attention_curvature(*setting())


@pytest.mark.parametrize("kind", ["total", "outer", "functional"])
def test_every_batch_has_the_norms_of_its_dense_blocks(kind: str) -> None:
    model, batches = setting()
    found = analysed()
    operator = {
        "total": ca.Hessian, "outer": ca.GaussNewton, "functional": ca.FunctionalHessian,
    }[kind]  # fmt: skip
    series = found.series("blocks.1.query", "blocks.0.value", part=kind)
    for row, batch in zip(series, batches, strict=True):
        block = operator(ca.Problem(model, "cross_entropy", batch))
        want = block["blocks.1.query", "blocks.0.value"].dense().norm()
        assert row[0].item() == pytest.approx(want.item(), rel=1e-9)
    whole = operator(ca.Problem(model, "cross_entropy", batches))
    want = whole["blocks.1.query", "blocks.0.value"].dense().norm()
    got = found.whole.frobenius[kind]["blocks.1.query", "blocks.0.value"]
    assert got == pytest.approx(want.item(), rel=1e-9)
    assert found.targets == (4.0, 2.0, 3.0)
    assert found.converged


def test_only_attention_is_in_it_and_it_prints_saves_and_plots(tmp_path) -> None:
    model, batches = setting()
    found = ca.analyze_attention_curvature(model, batches, biases=False)
    roles = {name.split(".")[-1] for name in found.names}
    assert roles == {"query", "key", "value", "output"}
    assert "blocks.1.value" in str(found)
    assert len(found.plot().axes) >= 2
    assert ca.load(found.save(tmp_path / "attention")).names == found.names


def test_float_targets_mean_squared_error() -> None:
    torch.manual_seed(1)
    model = ca.SelfAttentionHessian(4, 2).double()
    x, y = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    found = ca.analyze_attention_curvature(model, (x, y))
    exact = model.compute_attention_hessian(x, y)
    total = found.whole.view("model").values.item()
    assert total == pytest.approx(exact.H.norm().item(), rel=1e-9)


def test_a_model_without_attention_is_refused_with_the_way_out() -> None:
    model = nn.Linear(4, 3)
    data = (torch.randn(5, 4), torch.randint(0, 3, (5,)))
    with pytest.raises(ProblemError, match=r"no attention in Linear.*ca\.atlas"):
        ca.analyze_attention_curvature(model, data)
