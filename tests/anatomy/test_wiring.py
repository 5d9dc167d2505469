"""Roles come from what linear maps do; names, and the user, only say it first."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.anatomy import Anatomy, anatomy_of


class NamelessAttention(nn.Module):
    """An attention whose query, key, value and output are called as they are told to be."""

    def __init__(self, width: int, heads: int, names: Sequence[str]) -> None:
        super().__init__()
        self.heads, self.names = heads, tuple(names)
        for name in sorted(names):
            setattr(self, name, nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, out = (getattr(self, name) for name in self.names)
        parts = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (q, k, v))
        mixed = F.scaled_dot_product_attention(*parts)
        result: Tensor = out(mixed.transpose(1, 2).flatten(2))
        return result


class NamelessBlock(nn.Module):
    def __init__(self, width: int, hidden: int, order: str, gated: bool) -> None:
        super().__init__()
        self.first = NamelessAttention(width, 2, order)
        self.x1 = nn.Linear(width, hidden)
        self.x2 = nn.Linear(hidden, width)
        self.x3 = nn.Linear(width, hidden) if gated else None
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.n1(x))
        y = self.n2(x)
        inner = F.silu(self.x1(y))
        if self.x3 is not None:
            inner = inner * self.x3(y)
        return x + self.x2(inner)


class Nameless(nn.Module):
    def __init__(self, order: str, gated: bool) -> None:
        super().__init__()
        self.stack = nn.ModuleList(NamelessBlock(8, 12, order, gated) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stack:
            x = block(x)
        result: Tensor = self.head(x.mean(1))
        return result


def _by_parameter(anatomy: Anatomy) -> dict[str, str]:
    return {piece.parameter: piece.role for piece in anatomy}


@pytest.mark.parametrize("order", ["abcd", "dbca", "cdab"])
@pytest.mark.parametrize("gated", [False, True])
def test_maps_without_telling_names_get_their_roles_from_what_they_do(
    order: str, gated: bool
) -> None:
    torch.manual_seed(0)
    anatomy = anatomy_of(Nameless(order, gated))
    roles = _by_parameter(anatomy)
    expected = dict(zip(order, ("query", "key", "value", "output"), strict=True))
    for layer in range(2):
        place = f"stack.{layer}"
        assert {k: roles[f"{place}.first.{k}.weight"] for k in "abcd"} == expected
        assert roles[f"{place}.first.{order[2]}.bias"] == "value_bias"
        assert roles[f"{place}.x1.weight"] == ("gate" if gated else "up")
        assert roles[f"{place}.x2.weight"] == "down"
        if gated:
            assert roles[f"{place}.x3.weight"] == "up"
    assert anatomy.layers == (0, 1)
    assert any("read as value by what it does" in text for text in anatomy.assumptions)


def test_a_wrong_name_is_corrected_and_said() -> None:
    torch.manual_seed(1)
    model = NamelessAttention(8, 2, ("q_proj", "v_proj", "k_proj", "o_proj"))
    anatomy = anatomy_of(model)
    roles = _by_parameter(anatomy)
    assert roles["k_proj.weight"] == "value"
    assert roles["v_proj.weight"] == "key"
    assert any("k_proj is read as value" in text for text in anatomy.assumptions)


def test_names_that_a_trial_confirms_are_no_assumptions() -> None:
    model = ca.zoo.GPT(
        ca.zoo.GPTConfig(vocabulary=7, context=5, d_model=8, n_heads=2, n_layers=2, d_ff=12)
    )
    assert anatomy_of(model).assumptions == ()


def test_two_maps_with_a_nonlinearity_outside_blocks_are_no_feed_forward_part() -> None:
    torch.manual_seed(0)

    class WithHead(Nameless):
        def __init__(self) -> None:
            super().__init__("abcd", False)
            self.last = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(super().forward(x))
            return result

    roles = _by_parameter(anatomy_of(WithHead()))
    assert roles["last.0.weight"] == "linear"


# --- roles that the user states ------------------------------------------------------------------


class Opaque(nn.Module):
    """Blocks whose feed-forward part is made of bare parameters with names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList(nn.ModuleDict() for _ in range(2))
        for block in self.stack:
            block["attn"] = nn.MultiheadAttention(4, 2, batch_first=True)
            block["net"] = nn.ModuleList([nn.Identity(), nn.Linear(4, 9), nn.Linear(9, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stack:
            x = x + block["attn"](x, x, x, need_weights=False)[0]
            x = x + block["net"][2](torch.relu(block["net"][1](x)))
        return x.mean(1)


ROLES = {"*.net.1.weight": "up", "*.net.2.*": "down"}


def _opaque(**options: Any) -> ca.Problem:
    torch.manual_seed(0)
    return ca.Problem(Opaque(), "mse", (torch.randn(3, 5, 4), torch.randn(3, 4)), **options)


def test_stated_roles_name_the_slices_and_biases_follow_their_weights() -> None:
    problem = _opaque(roles=ROLES)
    anatomy = problem.anatomy
    assert anatomy.select("blocks.1.up")[0].parameter == "stack.1.net.1.weight"
    assert anatomy.select("blocks.0.up_bias")[0].parameter == "stack.0.net.1.bias"
    assert anatomy.select("blocks.0.down_bias")[0].sublayer == "ffn"
    assert problem.with_data((torch.randn(2, 5, 4), torch.randn(2, 4))).anatomy.roles == (
        anatomy.roles
    )


def test_many_parameters_without_a_role_are_warned_about_with_the_cure() -> None:
    with pytest.warns(UserWarning, match=r"no role that is known.*roles="):
        assert "up" not in _opaque().anatomy.roles
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "up" in _opaque(roles=ROLES).anatomy.roles


def test_a_pattern_that_matches_nothing_is_refused_with_near_names() -> None:
    with pytest.raises(KeyError, match=r"no parameter 'stack\.0\.net\.1\.weigh'; near.*weight"):
        _ = _opaque(roles={"stack.0.net.1.weigh": "up"}).anatomy
    with pytest.raises(ValueError, match="is no role"):
        _ = _opaque(roles={"*.net.1.*": "an up"}).anatomy


def test_a_role_of_your_own_stands_behind_its_sublayer() -> None:
    (piece,) = _opaque(roles={"stack.0.net.1.weight": "ffn.widen"}).anatomy.select("blocks.0.widen")
    assert (piece.sublayer, piece.role) == ("ffn", "widen")


def test_a_stated_role_that_a_trial_contradicts_is_kept_and_said() -> None:
    torch.manual_seed(0)
    anatomy = anatomy_of(Nameless("abcd", False), roles={"*.first.a.weight": "value"})
    assert _by_parameter(anatomy)["stack.0.first.a.weight"] == "value"
    assert any("said to be value; in a trial it acts as query" in t for t in anatomy.assumptions)


# --- other libraries -----------------------------------------------------------------------------


def _submodule(package: str, name: str) -> Any:
    """A module of a package whose ``__init__`` wants what is not installed (torchvision)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"needs pip install --no-deps {package}")
    shell = types.ModuleType(package)
    shell.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = shell
    try:
        return importlib.import_module(f"{package}.{name}")
    finally:
        for loaded in [m for m in sys.modules if m.partition(".")[0] == package]:
            del sys.modules[loaded]


BLOCK_ROLES = {"gamma", "query", "key", "value", "output", "up", "down"}


@pytest.mark.parametrize("kind", ["vit", "simple_vit"])
def test_vit_pytorch_at_depth_two_is_two_blocks_with_their_roles(kind: str) -> None:
    library = _submodule("vit_pytorch", kind)
    make = library.ViT if kind == "vit" else library.SimpleViT
    size = {"image_size": 8, "patch_size": 4, "num_classes": 3}
    anatomy = anatomy_of(make(**size, dim=8, depth=2, heads=2, dim_head=4, mlp_dim=12))
    assert anatomy.layers == (0, 1)
    for layer in anatomy.layers:
        assert {p.role for p in anatomy.select(layer=layer)} >= BLOCK_ROLES
    assert "other" not in anatomy.sublayers
    assert anatomy.select("embedding.norm")[0].parameter.startswith("to_patch_embedding.1")


@pytest.mark.parametrize("glu", [False, True])
def test_x_transformers_at_depth_two_is_two_blocks_with_their_roles(glu: bool) -> None:
    library = pytest.importorskip("x_transformers")
    layers = library.Decoder(
        dim=8, depth=2, heads=2, attn_dim_head=4, ff_glu=glu, cross_attend=True
    )
    model = library.TransformerWrapper(num_tokens=11, max_seq_len=6, attn_layers=layers)
    anatomy = anatomy_of(model)
    assert anatomy.layers == (0, 1)
    for layer in anatomy.layers:
        roles = {p.role for p in anatomy.select(layer=layer)}
        assert roles >= BLOCK_ROLES | {"cross_query", "cross_value"} | ({"gate"} if glu else set())
    assert anatomy.select("embedding.position")[0].parameter == "pos_emb.emb.weight"
    assert "other" not in anatomy.sublayers
    assert any("number sublayers" in text for text in anatomy.assumptions)
