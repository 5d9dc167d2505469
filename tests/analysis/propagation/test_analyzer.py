"""Curvature at every activation against double backward through hand-written norms."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvatlas as ca
import families
import oracles
from curvatlas.analysis.propagation.capture import block_paths
from curvatlas.analysis.propagation.matrix_free import FreeProducts
from curvatlas.analysis.propagation.result import CurvatureFlow
from curvatlas.anatomy import anatomy_of
from curvatlas.problem.evaluation import evaluation

PARTS = ("total", "passed_on", "created_here")


def inputs_of(batch: Any) -> tuple[Any, Any]:
    return (batch, None) if isinstance(batch, Mapping) else batch


def replaced(module: nn.Module, *, at_input: bool, kept: list[Tensor]) -> Any:
    """Make the module's output (or first input) a leaf of the graph, remembered in ``kept``."""

    def leaf(tensor: Tensor) -> Tensor:
        fresh = tensor.detach().requires_grad_(True)
        kept.append(fresh)
        return fresh

    if at_input:

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if args:
                return (leaf(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": leaf(kwargs["hidden_states"])}

        return module.register_forward_pre_hook(before, with_kwargs=True)

    def after(_: nn.Module, args: Any, result: Any) -> Any:
        if isinstance(result, tuple):
            return (leaf(result[0]), *result[1:])
        return leaf(result)

    return module.register_forward_hook(after)


@contextlib.contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    with evaluation(model, stay_double=True), sdpa_kernel(SDPBackend.MATH):
        yield


def oracle_hessian(model: nn.Module, batch: Any, loss: str, path: str, *, at_input: bool) -> Tensor:
    """∂²ℓ/∂activation², (entries, entries) over the whole batch, row after row."""
    oracle = oracles.with_hand_written_norms(copy.deepcopy(model))
    for parameter in oracle.parameters():
        parameter.requires_grad_(False)
    kept: list[Tensor] = []
    handle = replaced(dict(oracle.named_modules())[path], at_input=at_input, kept=kept)
    with twice_differentiable(oracle):
        if isinstance(batch, Mapping):
            logits = oracle(**{k: v for k, v in batch.items() if k != "labels"}).logits
            labels = batch["labels"]
            if labels.ndim == 2:
                logits, labels = logits[:, :-1], labels[:, 1:]
            value = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        else:
            outputs = oracle(batch[0])
            value = (
                (outputs - batch[1]).pow(2).mean()
                if loss == "mse"
                else F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())
            )
        handle.remove()
        return oracles.hessian(value, [kept[0]])


def small(batch: Any) -> Any:
    """Two samples are enough, and the oracle is slow."""
    if isinstance(batch, Mapping):
        return {k: v[:2] for k, v in batch.items()}
    return batch[0][:2], batch[1][:2]


@functools.cache
def flow_of(name: str) -> tuple[nn.Module, Any, str, CurvatureFlow]:
    model, batch, loss = families.make(name)
    batch = small(batch)
    x, target = inputs_of(batch)
    flow = ca.CurvaturePropagationAnalyzer(model, loss).analyze_curvature_flow(x, target)
    return model, batch, loss, flow


def block_diagonal(matrices: Tensor) -> Tensor:
    return torch.block_diag(*matrices)


CHECKED = {
    "zoo gpt pre-norm": ("blocks.0.attention", "blocks.1.norm2", "blocks.0"),
    "zoo gpt rms swiglu rope tied": ("blocks.1.attention",),
    "zoo gpt post-norm relu": ("blocks.0.attention", "blocks.1.ffn", "blocks.0"),
    "zoo vit post-norm": (),
    "torch encoder post-norm": ("blocks.0.attention", "blocks.1.norm1"),
    "torch encoder pre-norm": ("blocks.0.norm1", "blocks.0.ffn"),
    "hf gpt2": ("blocks.0.attention", "final_norm"),
    "hf llama": ("blocks.0.norm2", "blocks.1.attention"),
    "hf bert": ("blocks.0.attention", "blocks.0.norm1"),
    "hf vit": ("blocks.0.attention", "blocks.1.ffn"),
}


@pytest.mark.parametrize("name", CHECKED)
def test_every_activation_has_the_hessian_of_double_backward(name: str) -> None:
    model, batch, loss, flow = flow_of(name)
    first_block = block_paths(anatomy_of(model))[0]
    places = [("embedding", first_block, True)]
    for wanted in CHECKED[name]:
        path = first_block if wanted == "blocks.0" else flow.activation(wanted).module
        assert path is not None
        places.append((wanted, path, False))
    for wanted, path, at_input in places:
        truth = oracle_hessian(model, batch, loss, path, at_input=at_input)
        found = flow.activation(wanted).total
        assert found is not None
        assert oracles.relative_error(block_diagonal(found), truth) < 1e-10, wanted


@pytest.mark.parametrize("name", CHECKED)
def test_what_is_passed_on_and_created_adds_up_exactly(name: str) -> None:
    flow = flow_of(name)[3]
    for entry in (*flow.sublayers, *flow.activations):
        total, passed, created = (getattr(entry, part) for part in PARTS)
        assert oracles.relative_error(passed + created, total) < 1e-12
        assert torch.allclose(total, total.mT, rtol=0, atol=1e-12 * float(total.abs().max()))
        if entry.sublayer == "residual" and entry.place == "sublayer":
            assert entry.measures["created_here"].norm == 0
    relu = "relu" in name or name == "torch encoder post-norm"
    created = [e.measures["created_here"].norm for e in flow if e.sublayer == "ffn"]
    assert (max(created) == 0) == relu, "a piecewise linear feed-forward part creates nothing"
    assert min(e.measures["created_here"].norm for e in flow if e.sublayer == "attention") > 0


def test_a_sublayer_s_entry_is_the_hessian_at_its_own_input() -> None:
    model, batch, loss = families.make("zoo gpt post-norm relu")
    flow = ca.CurvaturePropagationAnalyzer(model, loss).analyze_curvature_flow(*batch)
    truth = oracle_hessian(model, batch, loss, "blocks.1.attention", at_input=True)
    found = flow["blocks.1.attention"].total
    assert found is not None
    assert oracles.relative_error(block_diagonal(found), truth) < 1e-10
    behind = flow.activation("blocks.1.attention").norm
    assert flow["blocks.1.attention"].amplification == pytest.approx(
        flow["blocks.1.attention"].norm / behind
    )


def test_created_here_is_the_second_derivative_of_the_sublayer_alone() -> None:
    model, batch, loss = families.make("zoo gpt pre-norm")
    flow = ca.CurvaturePropagationAnalyzer(model, loss).analyze_curvature_flow(*batch)
    kept: list[Tensor] = []
    block = model.blocks[1]
    handles = [
        replaced(block.attention, at_input=True, kept=kept),
        replaced(block.attention, at_input=False, kept=kept),
    ]
    value = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
    for handle in handles:
        handle.remove()
    entered, left = kept
    (slope,) = torch.autograd.grad(value, left)
    again = block.attention(entered)
    truth = oracles.hessian((again * slope).sum(), [entered])
    created = flow["blocks.1.attention"].created_here
    assert created is not None
    assert oracles.relative_error(block_diagonal(created), truth) < 1e-10


@pytest.mark.parametrize("name", ["zoo gpt pre-norm", "zoo gpt post-norm relu"])
def test_the_matrix_free_account_holds_the_dense_one_in_its_intervals(name: str) -> None:
    model, batch, loss = families.make(name)
    dense = ca.CurvaturePropagationAnalyzer(model, loss).analyze_curvature_flow(*batch)
    free = ca.CurvaturePropagationAnalyzer(
        model, loss, method="matrix-free", probes=12
    ).analyze_curvature_flow(*batch)
    assert (dense.method, free.method) == ("dense", "matrix-free")
    norms, traces = [], []
    pairs = zip(
        (*dense.sublayers, *dense.activations), (*free.sublayers, *free.activations), strict=True
    )
    for exact, estimate in pairs:
        assert exact.name == estimate.name
        for part in PARTS:
            truth, found = exact.measures[part], estimate.measures[part]
            slack = 1e-9 * exact.norm
            low, high = found.norm_interval
            norms.append(low - slack <= truth.norm <= high + slack)
            low, high = found.trace_interval
            traces.append(low - slack <= truth.trace <= high + slack)
        low, high = estimate.spectral_interval
        assert low * (1 - 1e-9) <= exact.spectral_norm <= high * (1 + 1e-9)
        assert estimate.gradient_scale == pytest.approx(exact.gradient_scale, nan_ok=True) or (
            exact.sublayer == "head"
        )
        assert estimate.token_trace.shape == exact.token_trace.shape
    assert sum(norms) > 0.9 * len(norms)
    assert sum(traces) > 0.9 * len(traces)


def test_a_full_basis_of_probes_makes_the_matrix_free_account_exact() -> None:
    model, batch, loss = families.make("zoo gpt pre-norm")
    tokens, targets = batch[0][:1, :3], batch[1][:1, :3]
    size = tokens.numel() * 8
    dense = ca.CurvaturePropagationAnalyzer(model, loss).analyze_curvature_flow(tokens, targets)
    free = ca.CurvaturePropagationAnalyzer(
        model, loss, method="matrix-free", probes=size
    ).analyze_curvature_flow(tokens, targets)
    for exact, estimate in zip(dense.sublayers, free.sublayers, strict=True):
        for part in PARTS:
            assert estimate.measures[part].norm == pytest.approx(
                exact.measures[part].norm, rel=1e-9, abs=1e-12 * exact.norm
            )
        assert torch.allclose(
            estimate.token_trace, exact.token_trace, atol=1e-9 * float(exact.norm)
        )


@pytest.mark.parametrize("method", ["dense", "matrix-free"])
def test_chosen_layers_have_the_entries_of_the_whole_account(method: str) -> None:
    model, batch, loss = families.make("zoo gpt pre-norm")
    tokens, targets = batch[0][:1, :3], batch[1][:1, :3]
    size = tokens.numel() * 8  # a full basis: the matrix-free entries are exact too
    analyzer = ca.CurvaturePropagationAnalyzer(model, loss, method=method, probes=size)
    whole = analyzer.analyze_curvature_flow(tokens, targets)
    for layers, left in ((1, {None, 1}), ([0], {None, 0}), (7, {None, 0, 1})):
        some = analyzer.analyze_curvature_flow(tokens, targets, layers=layers)
        assert {entry.layer for entry in some.activations} == left
        expected = [entry for entry in whole.sublayers if entry.layer in left]
        for entry, other in zip(some.sublayers, expected, strict=True):
            assert entry.name == other.name
            assert entry.norm == pytest.approx(other.norm, rel=1e-9)
    with pytest.raises(ValueError, match=r"no blocks \[5\]; there are \[0, 1\]"):
        analyzer.analyze_curvature_flow(tokens, targets, layers=[5])
    with pytest.raises(ValueError, match="at least 1"):
        analyzer.analyze_curvature_flow(tokens, targets, layers=0)


def test_one_activation_costs_its_own_products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    total = FreeProducts.total

    def counted(self: FreeProducts, node: Any) -> Any:
        asked.append(node.name)
        return total(self, node)

    monkeypatch.setattr(FreeProducts, "total", counted)
    model, batch, loss = families.make("zoo gpt pre-norm")
    analyzer = ca.CurvaturePropagationAnalyzer(model, loss, method="matrix-free", probes=3)
    entry = analyzer.compute_layer_curvature(batch[0], "embedding", batch[1])
    assert entry.name == "embedding"
    # The embedding itself, and what is passed on to it by the sublayers that read it.
    assert set(asked) <= {"embedding", "blocks.0.norm1", "blocks.0.attention_residual"}


def test_memory_decides_between_matrices_and_products() -> None:
    model, batch, loss = families.make("zoo gpt pre-norm")
    small = ca.CurvaturePropagationAnalyzer(model, loss, budget="100kB", probes=3)
    assert small.analyze_curvature_flow(*batch).method == "matrix-free"
    # 36 matrices of 3 × 48 × 48 float64 fit, 6 for every activation do not
    middle = ca.CurvaturePropagationAnalyzer(model, loss, budget="3MB")
    flow = middle.analyze_curvature_flow(*batch)
    assert flow.method == "dense"
    assert flow[0].total is None
    assert flow[0].norm > 0


def test_interacting_samples_are_treated_as_one() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = families.make("torch encoder pre-norm")[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x + x.mean(0, keepdim=True))

    _, batch, loss = families.make("torch encoder pre-norm")
    alone = ca.CurvaturePropagationAnalyzer(Mixing().double().eval(), loss)
    flow = alone.analyze_curvature_flow(*batch)
    assert flow["head"].total is not None
    # the mixing lies before the first activation: the samples are independent behind it
    assert flow["head"].total.shape[0] == 3


def test_missing_targets_are_the_model_s_own_predictions() -> None:
    model, (tokens, _), _ = families.make("zoo gpt pre-norm")
    analyzer = ca.CurvaturePropagationAnalyzer(model)
    flow = analyzer.analyze_curvature_flow(tokens)
    assert "own most likely" in flow.target
    given = analyzer.analyze_curvature_flow(tokens, model(tokens).argmax(-1))
    assert flow[0].norm == pytest.approx(given[0].norm, rel=1e-12)
    encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).double().eval()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    plain = ca.CurvaturePropagationAnalyzer(encoder)
    assert plain.analyze_curvature_flow(x).target == "zero"
    assert plain.compute_layer_curvature(x, 0).name == "blocks.0.norm2"
    with pytest.raises(KeyError, match="there is no activation"):
        plain.compute_layer_curvature(x, 7)


def test_the_figure_has_four_panels_and_is_saved_where_told(tmp_path: Any) -> None:
    model, batch, loss = families.make("torch encoder pre-norm")
    analyzer = ca.CurvaturePropagationAnalyzer(model, loss)
    with pytest.raises(ValueError, match="nothing to draw yet"):
        analyzer.visualize_curvature_flow()
    for step in (0, 1):
        analyzer.analyze_curvature_flow(*batch, step=step)
    figure = analyzer.visualize_curvature_flow(tmp_path / "flow.png")
    assert (tmp_path / "flow.png").stat().st_size > 10_000
    assert len([axes for axes in figure.axes if axes.get_title()]) == 4


def test_a_flow_survives_saving(tmp_path: Any) -> None:
    model, batch, loss = families.make("torch multihead")
    flow = ca.CurvaturePropagationAnalyzer(model, loss).analyze_curvature_flow(*batch)
    loaded = ca.load(flow.save(tmp_path / "flow"))
    assert torch.equal(loaded.activations[0].total, flow.activations[0].total)
    assert str(loaded) == str(flow)


def test_active_dropout_is_left_out_and_the_model_put_back() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).train()
    analyzer = ca.CurvaturePropagationAnalyzer(layer, "mse")
    x = torch.randn(2, 3, 8)
    with pytest.warns(UserWarning, match="dropout.* evaluated in evaluation mode and put back"):
        flow = analyzer.analyze_curvature_flow(x, torch.zeros_like(x))
    assert layer.training
    assert layer.self_attn.training
    layer.eval()
    assert analyzer.analyze_curvature_flow(x, torch.zeros_like(x))[0].norm == flow[0].norm


@pytest.mark.huggingface
def test_activations_of_an_encoder_and_a_decoder_have_names_of_their_own() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(**families.BART_SIZES)
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).double().eval()
    tokens = torch.randint(3, families.VOCABULARY, (1, 7))
    batch = {"input_ids": tokens[:, :4], "labels": tokens[:, 4:]}
    analyzer = ca.CurvaturePropagationAnalyzer(model, "cross_entropy")
    flow = analyzer.analyze_curvature_flow(batch)
    for entries in (flow.activations, flow.sublayers):
        names = [entry.name for entry in entries]
        assert len(names) == len(set(names))
    names = [entry.name for entry in flow.activations]
    assert {"embedding.norm.0", "embedding.norm.1", "blocks.1.cross_attention"} <= set(names)


def test_a_loss_that_mixes_the_samples_treats_them_as_one() -> None:
    model, (x, y), _ = families.make("torch encoder pre-norm")

    def of_the_mean(z: Tensor, target: Tensor) -> Tensor:
        return (z.mean(0) - target.double().mean()).pow(2).mean()

    flow = ca.CurvaturePropagationAnalyzer(model, of_the_mean).analyze_curvature_flow(x, y)
    found = flow.activation("blocks.1").total
    assert found is not None
    assert len(found) == 1
    # Every sample's last activation, moved alike, moves the mean as one sample does.
    head = flow["head"].total
    assert head is not None
    size = head.shape[1] // len(x)
    blocks = head.reshape(len(x), size, len(x), size)
    assert float(blocks[0, :, 1].norm()) > 0.1 * float(blocks[0, :, 0].norm())
