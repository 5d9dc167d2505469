"""Fused projections are cut where their features truly are, or not at all."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import curvatlas as ca
import huggingface_models
from curvatlas.anatomy import Anatomy, Slice, anatomy_of

# --- Hugging Face families against what their attentions multiply -------------------------------


class Products(TorchFunctionMode):
    """Operands of the matrix products of more than two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("matmul", "__matmul__", "bmm", "baddbmm"):
            left, right = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)][-2:]
            if min(left.ndim, right.ndim) > 2:
                self.operands.append((left, right))
        return func(*args, **kwargs)


@contextmanager
def recorded(unit: nn.Module, leaf: nn.Module) -> Iterator[dict[str, Any]]:
    """The projection's input, and every product of its attention."""
    seen: dict[str, Any] = {}
    products = Products()

    def first(_: nn.Module, args: Any) -> None:
        seen["x"] = args[0]

    def enter(*_: Any) -> None:
        products.__enter__()

    def leave(*_: Any) -> None:
        products.__exit__(None, None, None)
        seen["products"] = list(products.operands)
        products.operands.clear()

    handles = [
        leaf.register_forward_pre_hook(first),
        unit.register_forward_pre_hook(enter),
        unit.register_forward_hook(leave),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def first_token(operand: Tensor, axis: int) -> Tensor:
    """All heads of the first token, sorted; its scale is the attention's own business."""
    values = operand.movedim(axis, 0)[0].flatten().unique()
    return values / values.norm()


def features(anatomy: Anatomy, model: nn.Module, leaf: str, role: str, x: Tensor) -> Tensor:
    """What a role's slices of a projection make of one token, sorted."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    unit = leaf.rpartition(".")[0]  # DeBERTa keeps the biases of query and value beside it
    pieces = {s.role: s for s in anatomy if s.parameter.startswith(f"{unit}.")}
    weight = pieces[role].view(flat)
    z = x @ weight if pieces[role].transposed else x @ weight.T
    if f"{role}_bias" in pieces:
        z = z + pieces[f"{role}_bias"].view(flat)
    values = z.unique()
    return values / values.norm()


TEXT = {"input_ids": torch.tensor([[5, 9, 4, 11, 7]])}
IMAGE = {"pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
NO_NORM = {"qk_layernorm": False}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8,
            "position_biased_input": False}  # fmt: skip
# name → model type, options, name of the projection, input
FUSED: dict[str, tuple[str, dict[str, Any], str, dict[str, Tensor]]] = {
    "gpt2": ("gpt2", {}, "c_attn", TEXT),
    "openai-gpt": ("openai-gpt", {}, "c_attn", TEXT),
    "imagegpt": ("imagegpt", {}, "c_attn", TEXT),
    "gpt_bigcode, one key for all": ("gpt_bigcode", {}, "c_attn", TEXT),
    "gpt_bigcode": ("gpt_bigcode", {"multi_query": False}, "c_attn", TEXT),
    "gpt_neox": ("gpt_neox", {}, "query_key_value", TEXT),
    "gpt_neox_japanese": ("gpt_neox_japanese", {}, "query_key_value", TEXT),
    "bloom": ("bloom", {}, "query_key_value", TEXT),
    "falcon, one key for all": ("falcon", {}, "query_key_value", TEXT),
    "falcon, head by head": (
        "falcon", {"multi_query": False, "num_kv_heads": 4, "bias": True}, "query_key_value", TEXT),
    "falcon, group by group": (
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "query_key_value", TEXT),
    "mpt": ("mpt", {}, "Wqkv", TEXT),
    "codegen": ("codegen", {}, "qkv_proj", TEXT),
    "codegen, wider heads": ("codegen", {"n_embd": 32, "n_head": 8}, "qkv_proj", TEXT),
    "phi3": ("phi3", {}, "qkv_proj", TEXT),
    "persimmon": ("persimmon", NO_NORM, "query_key_value", TEXT),
    "deberta": ("deberta", {}, "in_proj", TEXT),
    "deberta, relative": ("deberta", RELATIVE, "in_proj", TEXT),
    "modernbert": ("modernbert", {}, "Wqkv", TEXT),
    "mgp-str": ("mgp-str", {"image_size": [8, 8]}, "qkv", IMAGE),
    "vitdet": ("vitdet", {"use_relative_position_embeddings": False}, "qkv", IMAGE),
    "sam": ("sam_vision_model", {"use_rel_pos": False, "window_size": 0}, "qkv", IMAGE),
}  # fmt: skip


@pytest.mark.parametrize("family", FUSED)
def test_the_parts_of_a_fused_weight_are_what_the_attention_multiplies(family: str) -> None:
    model_type, options, name, inputs = FUSED[family]
    model = huggingface_models.tiny_model(model_type, attn="eager", **options)
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    anatomy = anatomy_of(model)
    assert not [note for note in anatomy.notes if name in note]
    leaf = next(path for path, _ in model.named_modules() if path.endswith(f".{name}"))
    unit = model.get_submodule(leaf.rpartition(".")[0])
    with torch.no_grad(), recorded(unit, model.get_submodule(leaf)) as seen:
        model(**inputs)
    x = seen["x"].reshape(-1, seen["x"].shape[-1])[0]
    (query, key), (_, value) = seen["products"][0], seen["products"][-1]
    for role, operand, axis in (("query", query, -2), ("key", key, -1), ("value", value, -2)):
        got, want = features(anatomy, model, leaf, role, x), first_token(operand, axis)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=f"{family}: {role}")


# --- attentions of our own ------------------------------------------------------------------------


class Attention(nn.Module):
    """In the style of vit-pytorch: a norm, one projection of heads · width ≠ dim, an output.

    order: which of q, k, v the thirds of the projection are; per_head: thirds of every head.
    """

    def __init__(
        self,
        *,
        dim: int = 10,
        heads: int = 3,
        width: int = 4,
        order: str = "qkv",
        per_head: bool = False,
        causal: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.width, self.order = heads, width, order
        self.per_head, self.causal = per_head, causal
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * heads * width, bias=bias)
        self.to_out = nn.Sequential(nn.Linear(heads * width, dim), nn.Dropout(0.5))

    def split(self, z: Tensor) -> dict[str, Tensor]:
        """(B, heads, L, width) for each of q, k, v."""
        if self.per_head:
            parts = z.unflatten(-1, (self.heads, 3 * self.width)).transpose(1, 2).chunk(3, -1)
        else:
            thirds = z.chunk(3, -1)
            parts = tuple(t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in thirds)
        return dict(zip(self.order, parts, strict=True))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        logits = q @ k.mT / math.sqrt(self.width)
        if self.causal:
            length = q.shape[-2]
            logits = logits.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        return logits.softmax(-1)

    def mixed(self, parts: dict[str, Tensor]) -> Tensor:
        return self.weights(parts["q"], parts["k"]) @ parts["v"]

    def forward(self, x: Tensor) -> Tensor:
        y = self.mixed(self.split(self.to_qkv(self.norm(x))))
        out: Tensor = self.to_out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, attention: nn.Module, dim: int = 10) -> None:
        super().__init__()
        self.attn = attention
        self.mlp = nn.Sequential(nn.Linear(dim, 12), nn.GELU(), nn.Linear(12, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        out: Tensor = x + self.mlp(x)
        return out


class Model(nn.Module):
    def __init__(self, *attentions: nn.Module, dim: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attention, dim) for attention in attentions)
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def rows(piece: Slice) -> list[int]:
    """Output features of a slice of a (features, inputs) matrix."""
    width = piece.shape[-1]
    first = (piece.indices - piece.start + piece.offset)[::width] // width
    return sorted(first.tolist())


def fused_pieces(anatomy: Anatomy, layer: int = 0) -> dict[str, Slice]:
    chosen = [s for s in anatomy.select(layer=layer) if "to_qkv.weight" in s.parameter]
    return {s.role: s for s in chosen}


def test_heads_that_do_not_fill_the_model_are_cut_into_equal_thirds() -> None:
    attention = Attention(dim=1024 // 64, heads=8, width=64)  # inner 512, dim 16
    pieces = fused_pieces(anatomy_of(Model(attention, dim=16)))
    assert {role: rows(piece) for role, piece in pieces.items()} == {
        "query": list(range(512)),
        "key": list(range(512, 1024)),
        "value": list(range(1024, 1536)),
    }
    assert {piece.head_size for piece in pieces.values()} == {64}


@pytest.mark.parametrize("order", ["qkv", "kqv", "vqk", "qvk", "kvq", "vkq"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_any_order_is_read_from_the_computation(order: str, per_head: bool, causal: bool) -> None:
    attention = Attention(order=order, per_head=per_head, causal=causal, bias=True)
    anatomy = anatomy_of(Model(attention))
    z = torch.arange(36.0)[None, None]  # a feature's value is its number
    expected = {role: sorted(part.flatten().long().tolist())
                for role, part in attention.split(z).items()}  # fmt: skip
    found = {role[0]: rows(piece) for role, piece in fused_pieces(anatomy).items()}
    assert found == expected
    flat = torch.arange(anatomy.size)
    for role in ("query", "key", "value"):
        bias = next(s for s in anatomy if s.role == f"{role}_bias")
        assert (bias.view(flat) - bias.start + bias.offset).tolist() == found[role[0]]


def test_every_head_is_the_one_of_the_computation() -> None:
    attention = Attention(per_head=True, order="vkq").double().eval()
    model = Model(attention).double()
    anatomy = anatomy_of(model)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    x = torch.randn(2, 5, 10, dtype=torch.float64)
    normed, result = attention.norm(x), torch.zeros_like(x)
    heads = {r: anatomy.heads(f"blocks.0.{r}") for r in ("query", "key", "value", "output")}
    for q, k, v, o in zip(*heads.values(), strict=True):
        parts = {n: normed @ s.view(flat).T for n, s in zip("qkv", (q, k, v), strict=True)}
        result = result + attention.mixed(parts) @ o.view(flat).T
    result = result + attention.to_out[0].bias
    torch.testing.assert_close(result, attention(x), rtol=1e-12, atol=1e-12)


def test_heads_mixed_within_the_features_are_split_but_not_cut_into_heads() -> None:
    class Strided(Attention):
        """Feature i of a third belongs to head i mod heads."""

        def split(self, z: Tensor) -> dict[str, Tensor]:
            thirds = z.chunk(3, -1)
            parts = [t.unflatten(-1, (-1, self.heads)).movedim(-1, 1) for t in thirds]
            return dict(zip(self.order, parts, strict=True))

    anatomy = anatomy_of(Model(Strided()))
    assert rows(fused_pieces(anatomy)["value"]) == list(range(24, 36))
    with pytest.raises(ValueError, match="does not divide into heads"):
        anatomy.heads("blocks.0.query")


class BesideItsQuery(nn.Module):
    """Keys and values in one projection, head by head, of two widths; the query has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.to_q, self.to_kv = nn.Linear(10, 6), nn.Linear(10, 2 * (3 + 4))
        self.to_out = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x).unflatten(-1, (2, 3)).transpose(1, 2)
        k, v = self.to_kv(x).unflatten(-1, (2, 7)).transpose(1, 2).split((3, 4), -1)
        out: Tensor = self.to_out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


def test_keys_and_values_of_unequal_width_are_told_apart() -> None:
    anatomy = anatomy_of(Model(BesideItsQuery()))
    pieces = {s.role: s for s in anatomy if s.parameter.endswith("to_kv.weight")}
    assert rows(pieces["key"]) == [0, 1, 2, 7, 8, 9]
    assert rows(pieces["value"]) == [3, 4, 5, 6, 10, 11, 12, 13]
    assert [rows(h) for h in anatomy.heads("blocks.0.value")] == [[3, 4, 5, 6], [10, 11, 12, 13]]


# --- what only looks like an attention ------------------------------------------------------------


class LinearAttention(Attention):
    """No softmax: elu(q) · elu(k) weights that do not sum to one."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (F.elu(q) + 1) @ (F.elu(k) + 1).mT


class Gated(Attention):
    """The first third gates the output; tokens meet by the second alone."""

    def mixed(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["q"].sigmoid() * (self.weights(parts["k"], parts["k"]) @ parts["v"])


class Pointwise(Attention):
    """Three projections of every token, and no token sees another."""

    def mixed(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["q"].tanh() * parts["k"] + parts["v"]


class AcrossFeatures(Attention):
    """Cross-covariance attention: features attend to features."""

    def mixed(self, parts: dict[str, Tensor]) -> Tensor:
        q, k, v = (F.normalize(parts[n].mT, dim=-1) for n in "qkv")
        return ((q @ k.mT).softmax(-1) @ v).mT


class Bent(Attention):
    """Values go through a nonlinearity of their own."""

    def mixed(self, parts: dict[str, Tensor]) -> Tensor:
        return super().mixed({**parts, "v": parts["v"].relu()})


@pytest.mark.parametrize("kind", [LinearAttention, Gated, Pointwise, AcrossFeatures, Bent])
def test_what_does_not_compute_attention_stays_in_one_piece(kind: type[Attention]) -> None:
    anatomy = anatomy_of(Model(kind()))
    (piece,) = anatomy["blocks.0.query_key_value"]
    assert piece.size == 360
    assert not {"query", "key", "value"} & set(anatomy.roles)
    assert anatomy.notes == (
        f"{kind.__name__}.to_qkv.weight stays in one piece: a trial does not show query, key and "
        "value in it",
    )


def test_a_recurrence_is_no_attention() -> None:
    for family in ("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "nemotron_h"):
        model = huggingface_models.tiny_model(family)
        anatomy, modules = anatomy_of(model), dict(model.named_modules())
        for piece in anatomy:
            kept = {"A_log", "time_decay", "igate_preact"}
            path = piece.parameter.rpartition(".")[0]
            around = [modules[p] for p in (path, path.rpartition(".")[0])]
            inside = any(hasattr(module, name) for module in around for name in kept)
            assert not inside or piece.sublayer in ("mixer", "norm"), piece
            roles = {"query", "key", "value", "output", "query_key_value"}
            assert not inside or piece.role.removesuffix("_bias") not in roles, piece


def test_mamba_and_rwkv_have_roles_of_their_own() -> None:
    mamba = anatomy_of(huggingface_models.tiny_model("mamba"))
    assert set(mamba.select(layer=0, sublayer="mixer").names) >= {
        "blocks.0.mixer_input", "blocks.0.convolution", "blocks.0.selection",
        "blocks.0.time_step", "blocks.0.state_decay", "blocks.0.skip", "blocks.0.mixer_output",
    }  # fmt: skip
    rwkv = anatomy_of(huggingface_models.tiny_model("rwkv"))
    assert set(rwkv.roles) >= {"mixer_key", "mixer_value", "receptance", "mixer_output", "up",
                               "down", "time_mix_key", "state_decay"}  # fmt: skip


def test_a_head_that_is_called_value_is_no_attention() -> None:
    model = Model(Attention())
    model.value = nn.Linear(10, 1)  # of a state, in reinforcement learning
    assert {s.sublayer for s in anatomy_of(model) if s.parameter.startswith("value.")} == {"other"}
    assert "key" in anatomy_of(model).roles


# --- gates ----------------------------------------------------------------------------------------


class GatedUnit(nn.Module):
    """down(act(gate) ⊙ up), gate and up in one projection."""

    def __init__(self, order: str, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.order, self.activation = order, activation
        self.gate_up_proj = nn.Linear(10, 14)
        self.down_proj = nn.Linear(7, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = self.gate_up_proj(x)
        parts = (z[..., ::2], z[..., 1::2]) if self.order == "interleaved" else z.chunk(2, -1)
        up, gate = parts if self.order == "up first" else parts[::-1]
        out: Tensor = self.down_proj(self.activation(gate) * up)
        return out


@pytest.mark.parametrize("order", ["gate first", "up first", "interleaved"])
@pytest.mark.parametrize("activation", [F.silu, F.gelu, F.sigmoid])
def test_gate_and_up_are_told_apart(order: str, activation: Callable[[Tensor], Tensor]) -> None:
    model = Model(Attention())
    model.blocks[0].mlp = GatedUnit(order, activation)
    pieces = {s.role: s for s in anatomy_of(model) if s.parameter.endswith("up_proj.weight")}
    up = {"gate first": range(7, 14), "up first": range(7), "interleaved": range(0, 14, 2)}[order]
    if order == "interleaved":
        up = range(1, 14, 2)
    assert rows(pieces["up"]) == list(up)
    assert rows(pieces["gate"]) == sorted(set(range(14)) - set(up))


def test_a_product_without_an_activation_has_no_gate() -> None:
    model = Model(Attention())
    model.blocks[0].mlp = GatedUnit("gate first", lambda z: z)
    anatomy = anatomy_of(model)
    assert "gate" not in anatomy.roles
    assert "does not show gate and up" in anatomy.notes[0]


def test_experts_of_other_shapes_are_told_apart_too() -> None:
    """GPT-OSS interleaves gate and up in a matrix that is stored the other way round."""
    model = huggingface_models.tiny_model("gpt_oss")
    pieces = {s.role: s for s in anatomy_of(model).select(layer=0)}
    flat = torch.arange(sum(p.numel() for p in model.parameters()))
    parameter = dict(model.named_parameters())[pieces["gate"].parameter]
    start = pieces["gate"].start - pieces["gate"].offset
    places = (start + torch.arange(parameter.numel())).reshape(parameter.shape)
    assert torch.equal(pieces["gate"].view(flat), places[..., ::2])
    assert torch.equal(pieces["up"].view(flat), places[..., 1::2])
    assert {"gate_bias", "up_bias"} <= set(pieces)


# --- how a trial behaves --------------------------------------------------------------------------


class NeedsData(nn.Module):
    """Takes (batch, 3, 30), nine tokens of ten: no made-up input has this shape."""

    class NineTokens(Attention):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] != 9:
                raise ValueError("nine tokens")
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.attn = self.NineTokens(order="vkq")
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.attn(x.unflatten(-1, (3, 10)).flatten(1, 2)).mean(1))
        return logits


def test_data_help_where_made_up_inputs_do_not() -> None:
    model = NeedsData().double().eval()
    alone = anatomy_of(model)
    assert "query_key_value" in alone.roles
    assert "could not be tried out" in alone.notes[0]
    data = (torch.randn(4, 3, 30, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))
    anatomy = ca.Problem(model, "cross_entropy", data).anatomy
    assert not anatomy.notes
    assert rows(fused_pieces(anatomy, layer=0)["value"]) == list(range(12))


def test_layers_of_one_class_are_tried_apart_when_their_settings_differ() -> None:
    model = Model(Attention(), Attention(order="vkq"), Attention(per_head=True), Attention())
    anatomy = anatomy_of(model)
    values = [rows(fused_pieces(anatomy, layer)["value"]) for layer in range(4)]
    thirds = [j for h in range(3) for j in range(12 * h + 8, 12 * h + 12)]
    assert values == [list(range(24, 36)), list(range(12)), thirds, list(range(24, 36))]


def test_a_trial_leaves_model_and_random_state_as_they_were() -> None:
    model = Model(Attention(), Attention(per_head=True)).train()
    calls: list[str] = []
    model.blocks[0].attn.register_forward_hook(lambda *_: calls.append("hook"))
    model.register_buffer("seen", torch.zeros(1))
    before = copy.deepcopy(model.state_dict())
    identities = {name: id(p) for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    with torch.no_grad():
        anatomy = anatomy_of(model)
    assert not anatomy.notes
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert {name: id(p) for name, p in model.named_parameters()} == identities
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(module.training for module in model.modules())
    assert not calls
    assert len(model.blocks[0].attn._forward_hooks) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_precision_is_tried(dtype: torch.dtype) -> None:
    anatomy = anatomy_of(Model(Attention(order="kvq")).to(dtype))
    assert rows(fused_pieces(anatomy)["key"]) == list(range(12))


def test_a_model_without_values_is_tried_on_made_up_ones() -> None:
    with torch.device("meta"):
        model = Model(Attention(dim=256, heads=8, width=64, order="kvq"), dim=256)
    anatomy = anatomy_of(model)
    assert all(p.is_meta for p in model.parameters())
    assert rows(fused_pieces(anatomy)["key"]) == list(range(512))


def test_a_model_made_in_inference_mode_is_tried_too() -> None:
    with torch.inference_mode():
        model = Model(Attention(order="kvq"))
        anatomy = anatomy_of(model)
    assert rows(fused_pieces(anatomy)["key"]) == list(range(12))


def test_adapters_around_a_fused_projection_do_not_hide_it() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
            return out

    attention = Attention(order="kvq")
    attention.to_qkv = Adapted(attention.to_qkv)
    anatomy = anatomy_of(Model(attention))
    pieces = {s.role: s for s in anatomy if s.parameter.endswith("base_layer.weight")}
    assert rows(pieces["key"]) == list(range(12))


# --- every family ---------------------------------------------------------------------------------

FAMILIES = [
    "afmoe", "albert", "apertus", "bamba", "bart", "beit", "bert", "biogpt", "blip", "bloom",
    "clip", "clvp", "codegen", "cohere", "convbert", "deberta", "deberta-v2",
    "decision_transformer", "deit", "dinov2", "distilbert", "electra", "falcon", "falcon_mamba",
    "fnet", "gemma2", "git", "glm", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
    "gpt_neox_japanese", "gpt_oss", "gptj", "imagegpt", "jamba", "jetmoe", "llama", "longformer",
    "mamba", "mamba2", "mbart", "mixtral", "modernbert", "mpt", "olmo2", "openai-gpt", "opt",
    "persimmon", "phi3", "pixtral", "prophetnet", "qwen2", "rembert", "roberta", "roformer",
    "rwkv", "siglip", "squeezebert", "swin", "swinv2", "t5", "vit", "whisper", "xlm", "xlnet",
    "xmod",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_covered_once_and_has_honest_roles(family: str) -> None:
    model, anatomy = huggingface_models.tiny_anatomy(family)
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    places = torch.cat([piece.indices for piece in anatomy])
    assert torch.equal(places.sort().values, torch.arange(total))
    assert len(set(anatomy.names)) == len(anatomy)
    assert not {"weight", "bias", "other"} & set(anatomy.roles)
    assert not anatomy.notes
