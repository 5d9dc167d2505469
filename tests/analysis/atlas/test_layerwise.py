"""Curvature module by module against dense Hessians."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import oracles
from curvatlas.analysis.atlas.layerwise import module_wise_curvature
from curvatlas.zoo import MLP, MLPConfig


def test_a_full_basis_gives_the_exact_curvature_of_every_module() -> None:
    torch.manual_seed(0)
    model = MLP(MLPConfig(inputs=3, outputs=2, width=4, n_layers=2, activation="tanh")).double()
    x, y = torch.randn(3, 3, dtype=torch.float64), torch.tensor([0, 1, 1])
    found = module_wise_curvature(model, x, y, probes=24)
    for path, layer in (("layers.0", model.layers[0]), ("head", model.head)):
        truth = oracles.hessian(F.cross_entropy(model(x), y), list(layer.parameters()))
        entry = found[path].parameters
        assert entry is not None
        assert entry.norm == pytest.approx(float(torch.linalg.norm(truth)), rel=1e-10)
        assert entry.trace == pytest.approx(float(truth.trace()), rel=1e-9)
        slope = oracles.gradient(F.cross_entropy(model(x), y), list(layer.parameters()))
        assert found[path].gradient_norm == pytest.approx(float(slope.norm()), rel=1e-10)
    hidden = model.layers[0](x).detach().requires_grad_(True)
    value = F.cross_entropy(model.head(torch.tanh(model.layers[1](torch.tanh(hidden)))), y)
    truth = oracles.hessian(value, [hidden])
    output = found["layers.0"].activation
    assert output is not None
    assert output.norm == pytest.approx(float(torch.linalg.norm(truth)), rel=1e-10)
    assert output.trace == pytest.approx(float(truth.trace()), rel=1e-9)


def test_few_probes_give_intervals_that_hold_and_a_readable_table() -> None:
    torch.manual_seed(1)
    model = MLP(MLPConfig(inputs=6, outputs=3, width=8, n_layers=2)).double()
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 3, (5,))
    exact, found = (module_wise_curvature(model, x, y, probes=p) for p in (72, 6))
    held = []
    for a, b in zip(exact.modules, found.modules, strict=True):
        for truth, estimate in ((a.parameters, b.parameters), (a.activation, b.activation)):
            if truth is not None and estimate is not None:
                low, high = estimate.norm_interval
                held.append(low * (1 - 1e-9) <= truth.norm <= high * (1 + 1e-9))
    assert sum(held) >= len(held) - 1
    assert "layers.0" in str(found)
    with pytest.raises(KeyError, match="there is no module"):
        found["nowhere"]
