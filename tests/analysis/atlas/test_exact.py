"""The atlas from closed forms: the same exact values as the dense products, for one known layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.analysis.atlas.result import Atlas
from curvatlas.zoo import MLP, MLPConfig


def _layer(batch_first: bool = True, norm_first: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, activation="gelu", batch_first=batch_first, norm_first=norm_first
    ).double()


def _problem(layer: nn.Module, batches: int = 1) -> ca.Problem:
    torch.manual_seed(1)
    data = [(torch.randn(3, 4, 8).double(), torch.randn(3, 4, 8).double()) for _ in range(batches)]
    return ca.Problem(layer.eval(), "mse", data)


def _same(found: Atlas, want: Atlas, quantities: tuple[str, ...]) -> None:
    for key, right in want.maps.items():
        if key.split("/")[1] not in quantities:
            continue
        left = found.maps[key]
        assert left.names == right.names
        scale = float(right.values.nan_to_num().abs().max())
        torch.testing.assert_close(
            left.values, right.values, rtol=1e-9, atol=1e-11 * scale, equal_nan=True, msg=key
        )


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_closed_form_of_an_encoder_layer_is_the_dense_atlas(
    norm_first: bool, batch_first: bool
) -> None:
    problem = _problem(_layer(batch_first, norm_first))
    found = ca.atlas(problem, method="closed form")
    assert found.method == "closed form"
    assert found.converged
    assert found.products <= 1
    want = ca.atlas(problem, method="dense")
    _same(found, want, ("frobenius", "spectral", "trace", "negative mass", "coupling"))
    assert found.frobenius["functional"].exact
    assert found.frobenius["functional"].values.max() > 0


def test_beyond_the_budget_norms_and_traces_are_still_exact() -> None:
    problem = _problem(_layer(), batches=2)
    found = ca.atlas(problem, method="closed form", budget="1MB")
    want = ca.atlas(problem, method="dense")
    _same(found, want, ("frobenius", "trace"))
    for part, exact in want.spectral.items():
        low, high = found.spectral[part].interval
        slack = 1e-9 * exact.values.max()
        assert bool(((low <= exact.values + slack) & (exact.values <= high + slack)).all())
    assert "1 products" not in str(found)


def test_a_part_of_a_weight_has_no_closed_norm() -> None:
    with pytest.raises(TypeError, match="part of a weight"):
        ca.atlas(_problem(_layer()), method="closed form", heads=True, budget="1MB")


def test_large_known_layers_take_the_closed_form_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("curvatlas.analysis.atlas.mapping.DENSE_UP_TO", 10)
    assert ca.atlas(_problem(_layer())).method == "closed form"
    other = ca.Problem(
        MLP(MLPConfig(inputs=8, n_layers=2)).double(),
        "cross_entropy",
        (torch.randn(4, 8).double(), torch.tensor([0, 1, 2, 3])),
    )
    assert ca.atlas(other, rtol=1.0).method == "sketch"


class _Twice(nn.TransformerEncoderLayer):
    """Looks like a known layer and computes something else."""

    def forward(self, src: Tensor, *rest: Any, **options: Any) -> Tensor:
        result: Tensor = 2 * super().forward(src, *rest, **options)
        return result


def test_a_layer_that_computes_something_else_is_refused() -> None:
    torch.manual_seed(0)
    layer = _Twice(8, 2, 12, dropout=0.0, batch_first=True).double()
    with pytest.raises(TypeError, match="no closed form of this problem"):
        ca.atlas(_problem(layer), method="closed form")


def test_other_models_and_losses_have_no_closed_form() -> None:
    model = MLP(MLPConfig(inputs=8, n_layers=2)).double()
    data = torch.randn(4, 8).double(), torch.tensor([0, 1, 2, 3])
    with pytest.raises(TypeError, match="no layer the closed forms know"):
        ca.atlas(ca.Problem(model, "cross_entropy", data), method="closed form")
    layer = _layer().eval()
    batch = torch.randn(2, 3, 8).double(), torch.randn(2, 3, 8).double()

    def cubic(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().pow(3).mean()

    with pytest.raises(TypeError, match="mse or cross_entropy"):
        ca.atlas(ca.Problem(layer, cubic, batch), method="closed form")
