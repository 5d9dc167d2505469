"""The whole matrix-free account from one sweep: against dense truth, and linear in the depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
import families
from curvatlas.analysis.propagation import matrix_free
from curvatlas.analysis.propagation.matrix_free import FreeProducts, ProbeGroups, pairs_of
from curvatlas.zoo import GPT, GPTConfig

PARTS = ("total", "passed_on", "created_here")


def account(model: nn.Module, batch: Any, loss: str, **options: Any) -> ca.CurvatureFlow:
    x, target = (batch, None) if isinstance(batch, dict) else batch
    return ca.CurvaturePropagationAnalyzer(model, loss, **options).analyze_curvature_flow(x, target)


def entries(flow: ca.CurvatureFlow) -> list[Any]:
    return [*flow.sublayers, *flow.activations]


def deep_gpt(layers: int) -> tuple[GPT, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=11, context=4, d_model=8, n_heads=2, n_layers=layers)
    tokens = torch.randint(0, 11, (1, 5))
    return GPT(config).double().eval(), (tokens[:, :-1], tokens[:, 1:])


@pytest.mark.parametrize("name", ["zoo gpt pre-norm", "zoo gpt post-norm relu", "torch multihead"])
def test_one_sweep_holds_the_dense_account_in_its_intervals(name: str) -> None:
    model, batch, loss = families.make(name)
    dense = account(model, batch, loss, method="dense")
    norms, traces, tokens, largest = [], [], [], []
    for seed in range(3):
        free = account(model, batch, loss, method="matrix-free", sweep=True, seed=seed)
        for exact, estimate in zip(entries(dense), entries(free), strict=True):
            assert exact.name == estimate.name
            slack = 1e-9 * exact.norm
            for part in PARTS:
                truth, found = exact.measures[part], estimate.measures[part]
                low, high = found.norm_interval
                norms.append(low - slack <= truth.norm <= high + slack)
                low, high = found.trace_interval
                traces.append(low - slack <= truth.trace <= high + slack)
            low, high = estimate.spectral_interval
            largest.append(low * (1 - 1e-9) <= exact.spectral_norm <= high * (1 + 1e-9))
            off = (estimate.token_trace - exact.token_trace).abs()
            tokens.append(float((off <= 2.2 * estimate.token_trace_error + slack).double().mean()))
            # The same probes serve both parts: their traces add up to rounding.
            parts = sum(estimate.measures[part].trace for part in PARTS[1:])
            assert parts == pytest.approx(estimate.trace, rel=1e-9, abs=slack)
            assert estimate.trace == pytest.approx(float(estimate.token_trace.sum()), abs=slack)
    assert sum(norms) > 0.9 * len(norms)
    assert sum(traces) > 0.9 * len(traces)
    assert sum(largest) > 0.95 * len(largest)
    assert sum(tokens) > 0.9 * len(tokens)


def test_a_deep_model_is_swept_and_holds_its_truth() -> None:
    model, batch = deep_gpt(16)
    chosen = account(model, batch, "cross_entropy", method="matrix-free", probes=4)
    swept = account(model, batch, "cross_entropy", method="matrix-free", probes=4, sweep=True)
    assert [e.norm for e in chosen] == [e.norm for e in swept], "the sweep from 16 blocks on"
    dense = account(model, batch, "cross_entropy", method="dense")
    inside = []
    for exact, found in zip(entries(dense), entries(swept), strict=True):
        low, high = found.interval
        inside.append(low <= exact.norm * (1 + 1e-9) and exact.norm * (1 - 1e-9) <= high)
    assert sum(inside) > 0.9 * len(inside)
    near = [abs(f.norm / e.norm - 1) for e, f in zip(dense.stream, swept.stream, strict=True)]
    assert sorted(near)[len(near) // 2] < 0.2
    few = account(*deep_gpt(4), "cross_entropy", method="matrix-free", probes=3)
    sites = account(*deep_gpt(4), "cross_entropy", method="matrix-free", probes=3, sweep=False)
    assert [e.norm for e in few] == [e.norm for e in sites]


def test_a_sweep_costs_in_proportion_to_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products to the end: as many at any depth. All other vectors travel one sublayer each."""
    to_the_end: list[str] = []
    travelled = [0]

    def counted_total(self: FreeProducts, node: Any) -> Any:
        to_the_end.append(node.name)
        return total(self, node)

    def counted_pull(roots: Any, inputs: Any, cotangents: list[Tensor]) -> list[Tensor]:
        travelled[0] += len(cotangents[0])
        return pulled(roots, inputs, cotangents)

    total, pulled = FreeProducts.total, matrix_free.pulled
    monkeypatch.setattr(FreeProducts, "total", counted_total)
    monkeypatch.setattr(matrix_free, "pulled", counted_pull)
    columns = {}
    for layers in (6, 18):
        to_the_end.clear()
        travelled[0] = 0
        account(*deep_gpt(layers), "cross_entropy", method="matrix-free", probes=3, sweep=True)
        columns[layers] = travelled[0]
        assert len(to_the_end) <= 14
    assert 2.5 < columns[18] / columns[6] < 3.5


def test_an_encoder_that_every_decoder_layer_reads_has_no_cut_and_still_its_entries() -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
            self.encoder = nn.TransformerEncoderLayer(8, 2, 12, **options)
            layer = nn.TransformerDecoderLayer(8, 2, 12, **options)
            self.decoder = nn.TransformerDecoder(layer, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.decoder(x, self.encoder(x))
            return found

    torch.manual_seed(0)
    model = Translator().double().eval()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    batch = x, torch.randn_like(x)
    dense = account(model, batch, "mse", method="dense")
    free = account(model, batch, "mse", method="matrix-free", sweep=True)
    inside = []
    for exact, found in zip(entries(dense), entries(free), strict=True):
        assert exact.name == found.name
        low, high = found.interval
        inside.append(low <= exact.norm * (1 + 1e-9) and exact.norm * (1 - 1e-9) <= high)
    assert sum(inside) >= 0.9 * len(inside)


@pytest.mark.parametrize("distance", [0.0, 0.3, 2.0])
def test_pairs_know_the_norm_and_the_trace_of_what_was_pulled_back(distance: float) -> None:
    """S = Jᵀ A J + T, with 24 pairs that started at A and 24 probed at S itself."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size, count, rounds = 40, 24, 120
    a, t = draw(size, size), 0.1 * draw(size, size)
    a, t = a + a.T, t + t.T
    jacobian = torch.eye(size, dtype=torch.float64) + distance * draw(size, size) / size**0.5
    truth = jacobian.T @ a @ jacobian + t
    norm, trace = float(torch.linalg.norm(truth)), float(truth.trace())
    norms, traces, errors, plain = [], [], [], []
    for _ in range(rounds):
        w, v = draw(count, size).sign(), draw(count, size).sign()
        start = w[:, None], (w @ a)[:, None]
        far = (w @ jacobian)[:, None], (w @ a @ jacobian)[:, None]
        sketch = ProbeGroups(far=far, fresh=(v[:, None], (v @ t)[:, None]))
        pairs = pairs_of(sketch, 1, spectral=True)
        found = pairs.probed(pairs_of(ProbeGroups(fresh=start), 1))
        norms.append(found.norm_interval[0] <= norm <= found.norm_interval[1])
        traces.append(found.trace_interval[0] <= trace <= found.trace_interval[1])
        errors.append(abs(found.norm / norm - 1))
        plain.append(abs(pairs.probed().norm / norm - 1))
        assert found.spectral[0] <= float(torch.linalg.matrix_norm(truth, 2)) * (1 + 1e-9)
    assert sum(norms) >= 0.92 * rounds
    assert sum(traces) >= 0.92 * rounds
    # Near a rotation what is known where the probes started takes most of the noise away.
    assert sum(errors) < (0.5 if distance < 1 else 1.1) * sum(plain)
