"""Further Hugging Face families read as blocks: their own double backward is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import families
from curvatlas.closed_form.modules import TransformerBlockHessian
from curvatlas.engines.tangent.reading import UnmappedModuleError, map_module
from curvatlas.engines.tangent.stack import BlockStack
from curvatlas.problem.evaluation import evaluation
from oracles import flat, hessian, relative_error

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.huggingface

LENGTH, WIDTH = 6, 8
SIZES = {
    "hidden_size": WIDTH,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 12,
    "vocab_size": 11,
}
Case = tuple[nn.Module, Callable[[Tensor], Tensor]]


@pytest.fixture(autouse=True)
def _twice_differentiable_attention() -> Iterator[None]:
    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _seen(window: int = LENGTH) -> Tensor:
    """The additive mask (1, 1, L, L) of a causal window."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - window)
    return torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def _bert_like(name: str) -> Case:
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**SIZES))
    layer = model.encoder.layer[0]
    return layer, lambda x: layer(x)


def _distilbert() -> Case:
    config = transformers.DistilBertConfig(
        dim=WIDTH, n_heads=2, n_layers=1, hidden_dim=12, vocab_size=11
    )
    layer = transformers.DistilBertModel(config).transformer.layer[0]
    return layer, lambda x: layer(x)


def _albert() -> Case:
    model = transformers.AlbertModel(transformers.AlbertConfig(**SIZES, embedding_size=4))
    layer = model.encoder.albert_layer_groups[0].albert_layers[0]
    return layer, lambda x: layer(x)


def _opt(first: bool) -> Case:
    config = transformers.OPTConfig(
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_hidden_layers=1,
        ffn_dim=12,
        vocab_size=11,
        do_layer_norm_before=first,
        activation_function="gelu",
    )
    layer = transformers.OPTModel(config).decoder.layers[0]
    return layer, lambda x: layer(x, attention_mask=_seen())


def _bart(name: str, **options: Any) -> Case:
    config = getattr(transformers, f"{name}Config")(**families.BART_SIZES | options)
    layer = getattr(transformers, f"{name}Model")(config).encoder.layers[0]
    return layer, lambda x: layer(x, attention_mask=None)


def _deit() -> Case:
    config = transformers.DeiTConfig(**SIZES | {"image_size": 8, "patch_size": 4})
    model = transformers.DeiTModel(config)
    layer = (model.layers if hasattr(model, "layers") else model.encoder.layer)[0]
    return layer, lambda x: layer(x)


def _gpt_neo(kind: str) -> Case:
    config = transformers.GPTNeoConfig(
        hidden_size=WIDTH,
        num_heads=2,
        num_layers=1,
        attention_types=[[[kind], 1]],
        window_size=3,
        intermediate_size=12,
        vocab_size=11,
        max_position_embeddings=16,
    )
    layer = transformers.GPTNeoModel(config).h[0]

    def run(x: Tensor) -> Tensor:
        out = layer(x)
        return out[0] if isinstance(out, tuple) else out

    return layer, run


def _llama_like(name: str, *, window: int = LENGTH, **options: Any) -> Case:
    config = getattr(transformers, f"{name}Config")(**SIZES, num_key_value_heads=1, **options)
    layer = getattr(transformers, f"{name}Model")(config).layers[0]
    half = torch.arange(0, WIDTH // 2, 2, dtype=torch.float64) / (WIDTH // 2)
    angle = torch.outer(torch.arange(LENGTH, dtype=torch.float64), 10000.0**-half)
    angle = torch.cat([angle, angle], -1)[None]
    rotary = (angle.cos(), angle.sin())
    return layer, lambda x: layer(x, attention_mask=_seen(window), position_embeddings=rotary)


CASES: dict[str, Callable[[], Case]] = {
    "RoBERTa": lambda: _bert_like("Roberta"),
    "ELECTRA": lambda: _bert_like("Electra"),
    "DistilBERT": _distilbert,
    "ALBERT": _albert,
    "OPT": lambda: _opt(True),
    "OPT, post-norm": lambda: _opt(False),
    "BART": lambda: _bart("Bart"),
    "MBART": lambda: _bart("MBart"),
    "Whisper": lambda: _bart("Whisper", num_mel_bins=4),
    "DeiT": _deit,
    "GPT-Neo": lambda: _gpt_neo("global"),
    "GPT-Neo, local": lambda: _gpt_neo("local"),
    "Mistral, window": lambda: _llama_like("Mistral", window=3, sliding_window=3),
    "Qwen2": lambda: _llama_like("Qwen2"),
    "OLMo": lambda: _llama_like("Olmo"),
}


def _prepared(name: str) -> Case:
    """The layer in float64, the library's casts to float32 undone while it runs."""
    module, plain = CASES[name]()
    module = module.double().eval()

    def run(x: Tensor) -> Tensor:
        with evaluation(module, stay_double=True):
            return plain(x)

    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module, run


@pytest.mark.parametrize("name", CASES)
def test_layers_of_many_families_are_read(name: str) -> None:
    module, run = _prepared(name)
    mapped = map_module(module)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    target = torch.randn_like(x)
    leaves = list(module.parameters())
    value = (run(x) - target).pow(2).mean()
    first = torch.autograd.grad(value, leaves, create_graph=True)
    v = [torch.randn_like(leaf) for leaf in leaves]
    rows = torch.autograd.grad(first, leaves, v, allow_unused=True)
    want = flat(rows, leaves)
    here = BlockStack([(mapped.spec, mapped.weights)]).linearise(x, target)
    got = mapped.to_module_order(here @ mapped.from_module_order(flat(v, leaves)))
    assert abs(float(here.value - value.detach())) <= 1e-13 * float(value.detach())
    assert relative_error(got, want) <= 1e-12
    assert torch.linalg.norm(want) > 0


@pytest.mark.parametrize("name", ["GPT-Neo, local", "DistilBERT"])
def test_their_dense_hessian_is_the_closed_one(name: str) -> None:
    module, run = _prepared(name)
    block = TransformerBlockHessian.from_module(module)
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    target = torch.randn_like(x)
    dense = block.compute_block_hessian(x, target).H
    order = map_module(module)
    leaves = list(module.parameters())
    want = hessian((run(x) - target).pow(2).mean(), leaves)
    positions = order.positions
    assert relative_error(dense, want[positions][:, positions]) <= 1e-12


def test_bodies_with_a_window_and_twins_of_bert_are_stacks() -> None:
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=3)
    body = transformers.MistralModel(config).double().eval()
    tokens = torch.randint(0, 11, (2, LENGTH))
    with torch.no_grad(), evaluation(body, stay_double=True):
        want = body(tokens).last_hidden_state.detach()
    stack = BlockStack.from_module(body)
    assert [spec.window for spec in stack.specs] == [3, 3]
    here = stack.linearise(body.embed_tokens(tokens).detach(), torch.zeros_like(want))
    assert relative_error(here.output, want) <= 1e-7  # the library rounds its angles to float32
    for name in ("Roberta", "DistilBert"):
        kind = getattr(transformers, f"{name}Config")
        options = {"dim": WIDTH, "n_heads": 2, "n_layers": 2} if name == "DistilBert" else SIZES
        module = getattr(transformers, f"{name}Model")(kind(**options)).double().eval()
        assert len(BlockStack.from_module(module).specs) == 2


def test_a_window_as_wide_as_the_sequence_changes_nothing() -> None:
    narrow = map_module(_prepared("Mistral, window")[0])
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    values = []
    for window in (None, LENGTH, 3):
        spec = type(narrow.spec)(**{**vars(narrow.spec), "window": window})
        values.append(float(BlockStack([(spec, narrow.weights)]).linearise(x, x).value))
    assert values[0] == values[1] != values[2]


def test_a_window_needs_causal_attention_and_a_key() -> None:
    mapped = map_module(_prepared("Mistral, window")[0])
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    for change, reason in (({"causal": False}, "needs causal"), ({"window": 0}, "own key")):
        spec = type(mapped.spec)(**{**vars(mapped.spec), **change})
        with pytest.raises(ValueError, match=reason):
            BlockStack([(spec, mapped.weights)]).linearise(x, x)


def test_well_known_layers_outside_the_closed_forms_say_why() -> None:
    config = transformers.PhiConfig(**SIZES)
    with pytest.raises(UnmappedModuleError, match="side by side"):
        map_module(transformers.PhiModel(config).layers[0])
    clipped = transformers.OlmoConfig(**SIZES, clip_qkv=1.0)
    with pytest.raises(UnmappedModuleError, match="clips queries"):
        map_module(transformers.OlmoModel(clipped).eval().layers[0])
