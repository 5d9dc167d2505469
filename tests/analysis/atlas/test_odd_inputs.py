"""Atlas and propagation of unusual models: the maps against double backward, or a clear error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvatlas as ca
import oracles
from curvatlas.analysis.atlas.result import blocks_of
from curvatlas.errors import ProblemError
from curvatlas.problem.evaluation import evaluation
from curvatlas.zoo import GPT, GPTConfig

Case = tuple[nn.Module, tuple[Tensor, Tensor]]


def small_gpt(**options: Any) -> Case:
    settings = {"vocabulary": 7, "context": 3, "d_model": 4, "n_heads": 2, "d_ff": 6, **options}
    tokens = torch.randint(0, 7, (2, 4))
    return GPT(GPTConfig(**{"n_layers": 1, **settings})), (tokens[:, :-1], tokens[:, 1:])


def frozen() -> Case:
    model, batch = small_gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embedding" not in name and "norm" not in name)
    return model, batch


class Plain(nn.Module):
    """Attention and feed-forward part without any norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(x)))
        logits: Tensor = self.head(x)
        return logits


def without_norms() -> Case:
    return Plain(), (torch.randn(2, 3, 4, dtype=torch.float64), torch.randint(0, 3, (2, 3)))


class Patches(nn.Module):
    """A convolution cuts the image into tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(1, 4, 2, stride=2)
        self.encoder = nn.TransformerEncoderLayer(
            4, 2, 6, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patch_embedding(images).flatten(2).mT
        logits: Tensor = self.head(self.encoder(tokens).mean(1))
        return logits


def convolution() -> Case:
    return Patches(), (torch.randn(2, 1, 4, 4, dtype=torch.float64), torch.randint(0, 3, (2,)))


CASES: dict[str, Callable[[], Case]] = {
    "one layer": small_gpt,
    "frozen weights": frozen,
    "tied embeddings": lambda: small_gpt(tied=True, norm="rms"),
    "no norms": without_norms,
    "a convolution": convolution,
}


def make(name: str) -> Case:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    return model.double().eval(), batch


def oracle_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    outputs = model(batch[0])
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def oracle_hessian(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Over the parameters that are trained, in their order."""
    oracle = oracles.with_hand_written_norms(copy.deepcopy(model))
    with sdpa_kernel(SDPBackend.MATH):
        free = [p for p in oracle.parameters() if p.requires_grad]
        return oracles.hessian(oracle_loss(oracle, batch), free)


def true_map(matrix: Tensor, groups: list[Tensor]) -> Tensor:
    rows = [[torch.linalg.norm(matrix[r][:, c]) for c in groups] for r in groups]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("name", CASES)
def test_the_map_of_an_unusual_model_is_that_of_double_backward(name: str) -> None:
    model, batch = make(name)
    problem = ca.Problem(model, "cross_entropy", batch)
    matrix = oracle_hessian(model, batch)
    assert problem.size == len(matrix), "frozen weights are not counted, tied ones once"
    groups = [block.indices for block in blocks_of(problem.anatomy)]
    truth = true_map(matrix, groups)
    exact = ca.atlas(problem)
    assert exact.method == "dense"
    assert torch.allclose(
        exact.frobenius["total"].values, truth, rtol=1e-8, atol=1e-10 * float(truth.max())
    )
    found = ca.atlas(problem, method="sketch", seed=1).frobenius["total"]
    slack = 1e-9 * float(truth.max())
    held = (found.low - slack <= truth) & (truth <= found.high + slack)
    assert float(held.double().mean()) > 0.93


@pytest.mark.parametrize("name", CASES)
def test_its_activations_have_the_hessians_of_double_backward(name: str) -> None:
    model, batch = make(name)
    flow = ca.CurvaturePropagationAnalyzer(model, "cross_entropy").analyze_curvature_flow(*batch)
    assert flow.method == "dense"
    path = {"no norms": "down", "a convolution": "encoder.linear2"}.get(name, "blocks.0.ffn.down")
    oracle = oracles.with_hand_written_norms(copy.deepcopy(model)).requires_grad_(False)
    kept: list[Tensor] = []

    def leaf(_: nn.Module, arguments: Any, result: Tensor) -> Tensor:
        kept.append(result.detach().requires_grad_(True))
        return kept[0]

    handle = dict(oracle.named_modules())[path].register_forward_hook(leaf)
    with sdpa_kernel(SDPBackend.MATH):
        value = oracle_loss(oracle, batch)
        truth = oracles.hessian(value, kept)
    handle.remove()
    entry = next(e for e in flow.activations if e.module == path)
    assert entry.total is not None
    assert oracles.relative_error(torch.block_diag(*entry.total), truth) < 1e-10
    swept = ca.CurvaturePropagationAnalyzer(
        model, "cross_entropy", method="matrix-free", sweep=True
    ).analyze_curvature_flow(*batch)
    inside = [
        f.interval[0] <= e.norm * (1 + 1e-9) and e.norm * (1 - 1e-9) <= f.interval[1]
        for e, f in zip(flow.activations, swept.activations, strict=True)
    ]
    assert sum(inside) >= 0.8 * len(inside)


def test_shared_key_and_value_heads_have_blocks_of_their_own() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=7, max_position_embeddings=4, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    tokens = torch.randint(0, 7, (2, 4))
    problem = ca.Problem(model, "cross_entropy", [{"input_ids": tokens, "labels": tokens}])
    oracle = oracles.with_hand_written_norms(copy.deepcopy(model))
    oracle.set_attn_implementation("eager")
    with evaluation(oracle, stay_double=True):
        logits = oracle(input_ids=tokens).logits[:, :-1]
        value = F.cross_entropy(logits.reshape(-1, 7), tokens[:, 1:].reshape(-1))
        matrix = oracles.hessian(value, list(oracle.parameters()))
    found = ca.atlas(problem, heads=True)
    names = [n.removeprefix("blocks.0.") for n in found.names if ".head" in n]
    assert [n for n in names if n.startswith("query")] == [f"query.head{k}" for k in range(4)]
    assert [n for n in names if n.startswith("key")] == [f"key.head{k}" for k in range(2)]
    places = dict(zip(problem.layout.names, problem.layout.starts, strict=True))
    start = {n: places[f"model.layers.0.self_attn.{n}_proj.weight"] for n in ("q", "k")}
    # A head of width 2 has two rows of 8 weights, one after the other.
    query, key = (torch.arange(start[n] + 16, start[n] + 32) for n in ("q", "k"))
    for rows, columns, pair in (
        (query, key, ("blocks.0.query.head1", "blocks.0.key.head1")),
        (key, key, ("blocks.0.key.head1", "blocks.0.key.head1")),
    ):
        truth = float(torch.linalg.norm(matrix[rows][:, columns]))
        assert truth > 0
        assert found.frobenius["total"][pair] == pytest.approx(truth, rel=1e-8)


def test_a_model_without_a_trained_weight_or_a_known_sublayer_is_refused() -> None:
    model, batch = make("one layer")
    with pytest.raises((ProblemError, ValueError), match=r"requires_grad|trainable|parameter"):
        ca.atlas(ca.Problem(model.requires_grad_(False), "cross_entropy", batch))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.factor * x).tanh()

    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(ProblemError, match="no sublayer of Scaled was recognised"):
        ca.CurvaturePropagationAnalyzer(Scaled(), "mse").analyze_curvature_flow(x, x)
