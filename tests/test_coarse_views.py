"""Sublayer by sublayer, expert by expert: closed forms, operators and maps have the same blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import curvatlas as ca
from huggingface_models import tiny_anatomy, tiny_model
from oracles import hessian as dense_of

EPS = torch.finfo(torch.float64).eps


@pytest.fixture(scope="module")
def closed() -> tuple[ca.BlockHessian, Tensor, dict[str, Tensor]]:
    """The closed form, the same Hessian by reverse over reverse, and who is who in it."""
    torch.manual_seed(0)
    block = ca.TransformerBlockHessian(4, 5, 2).double().eval()
    x, target = torch.randn(2, 2, 3, 4, dtype=torch.float64).unbind()
    named = dict(block.named_parameters())
    exact = dense_of((block(x) - target).square().mean(), list(named.values()))
    kinds = {
        "norm": "norm",
        "attention": ("query", "key", "value", "output"),
        "ffn": ("up", "down"),
    }
    places = {
        kind: torch.cat([torch.full((p.numel(),), n.startswith(start)) for n, p in named.items()])
        for kind, start in kinds.items()
    }
    return block.compute_block_hessian(x, target), exact, places


@pytest.mark.parametrize("row", ["attention", "norm", "ffn"])
@pytest.mark.parametrize("column", ["attention", "norm", "ffn"])
def test_a_block_of_sublayers_is_that_of_their_parameters(
    closed: tuple[ca.BlockHessian, Tensor, dict[str, Tensor]], row: str, column: str
) -> None:
    found, exact, places = closed
    want = exact[places[row]][:, places[column]]
    room = 1e4 * EPS * float(exact.norm())
    assert float((found.block(row, column) - want).norm()) <= room
    assert float((found[row, column].dense() - want).norm()) <= room
    parts = found.block(row, column, "outer") + found.block(row, column, "functional")
    assert float((parts - want).norm()) <= room
    place = [found.sublayers.index(name) for name in (row, column)]
    norms = found.frobenius(by="sublayer")
    assert float(norms[place[0], place[1]]) == pytest.approx(float(want.norm()), rel=1e-9)


def test_the_coarse_view_is_three_by_three_and_holds_all_of_the_hessian(
    closed: tuple[ca.BlockHessian, Tensor, dict[str, Tensor]],
) -> None:
    found, exact, _ = closed
    assert found.sublayers == ("attention", "norm", "ffn")
    norms = found.frobenius(by="sublayer")
    assert float(norms.norm()) == pytest.approx(float(exact.norm()), rel=1e-12)
    assert found.block("norm1", "norm2").shape == (8, 8)
    with pytest.raises(KeyError, match="no parameter 'mixer' and no such sublayer"):
        found.block("mixer", "ffn")
    with pytest.raises(ValueError, match="by is 'parameter' or 'sublayer'"):
        found.frobenius(by="role")


def test_closed_forms_of_one_sublayer_know_it_by_name() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64)
    norm = ca.LayerNormHessian(4).double().compute_hessian_wrt_parameters(x)
    assert torch.equal(norm.block("norm", "norm"), norm.H)
    ffn = ca.FFNHessian(4, 3).double().eval().compute_hessian(x, torch.randn_like(x))
    assert torch.equal(ffn.block("ffn", "ffn"), ffn.H)


@pytest.fixture(scope="module")
def problem() -> ca.Problem:
    torch.manual_seed(0)
    model = tiny_model(
        "llama", hidden_size=8, intermediate_size=8, vocab_size=19, head_dim=2
    ).double()
    tokens = torch.randint(3, 19, (2, 4))
    return ca.Problem(model, "cross_entropy", {"input_ids": tokens, "labels": tokens})


def test_operators_take_sublayers_and_roles_of_all_layers_or_of_one(problem: ca.Problem) -> None:
    operator = ca.Hessian(problem)
    anatomy = problem.anatomy
    v = torch.randn(anatomy.select(sublayer="ffn")[0].size * 6, dtype=torch.float64)
    places = {
        name: torch.cat([s.indices for s in anatomy if s.sublayer == name])
        for name in ("attention", "ffn", "norm")
    }
    full = torch.zeros(problem.size, dtype=torch.float64)
    full[places["ffn"]] = v
    image = operator @ full
    for row in ("attention", "norm"):
        found = operator[row, "ffn"] @ v
        torch.testing.assert_close(found, image[places[row]], rtol=1e-9, atol=1e-12)
    queries = torch.cat([s.indices for s in anatomy if s.role == "query"])
    assert operator["query"].shape == (len(queries), len(queries))
    assert {s.layer for s in anatomy.select("blocks.1.attention")} == {1}
    assert {s.sublayer for s in anatomy.select("blocks.1.attention")} == {"attention"}
    assert len(anatomy.select("blocks.1.attention")) == 4


def test_the_atlas_has_the_same_entries_by_sublayer(problem: ca.Problem) -> None:
    found = ca.atlas(problem, method="dense")
    operator = ca.Hessian(problem)
    for pair in (("attention", "ffn"), ("norm", "attention"), ("query", "down")):
        exact = float(operator[pair].dense().norm())
        assert found.block(*pair) == pytest.approx(exact, rel=1e-9)
        assert found.block(*pair[::-1]) == pytest.approx(exact, rel=1e-9)
    outer = float(ca.GaussNewton(problem)["attention", "ffn"].dense().norm())
    assert found.block("attention", "ffn", part="outer") == pytest.approx(outer, rel=1e-9)
    with pytest.raises(KeyError, match="no view has both 'attention' and 'nothing'"):
        found.block("attention", "nothing")


@pytest.mark.parametrize("family", ["mixtral", "switch_transformers", "gpt_oss"])
def test_experts_have_rows_of_their_own(family: str) -> None:
    sizes = dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "d_ff"), 8)
    model = tiny_model(family, decoder_start_token_id=0, **sizes).double()
    torch.manual_seed(0)
    tokens = torch.randint(3, 19, (2, 4))
    whole = ca.Problem(model, "cross_entropy", {"input_ids": tokens, "labels": tokens})
    anatomy = whole.anatomy
    cut = [e for s in anatomy if "experts" in s.parameter for e in anatomy.experts(s)]
    stacked = [s for s in anatomy if "experts" in s.parameter]
    joined = torch.cat([e.indices for e in cut])
    assert torch.equal(joined.sort().values, torch.cat([s.indices for s in stacked]).sort().values)
    down = next(s for s in stacked if s.role == "down")
    layer = down.layer
    found = ca.atlas(
        ca.Problem(
            model,
            "cross_entropy",
            {"input_ids": tokens, "labels": tokens},
            parameters=sorted({s.parameter for s in stacked if s.layer == layer}),
        ),
        experts=True,
        method="dense",
    )
    names = [f"blocks.{layer}.down.expert{e}" for e in range(2)]
    assert set(names) <= {name.replace("blocks.0", f"blocks.{layer}") for name in found.names}
    dense = ca.Hessian(whole)[cut, cut].dense()
    one = next(e for e in cut if e.layer == layer and e.role == "down")
    start = sum(e.size for e in cut[: cut.index(one)])
    exact = float(dense[start : start + one.size, start : start + one.size].norm())
    row = next(n for n in found.names if n.endswith("down.expert0"))
    assert found.frobenius["total"][row, row] == pytest.approx(exact, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "family",
    ["mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "zamba", "recurrent_gemma", "xlstm",
     "electra", "swin", "beit", "dinov2", "fnet", "squeezebert", "jetmoe", "qwen3_next", "gpt_oss",
     "deepseek_v3", "modernbert", "t5", "whisper", "clip"],
)  # fmt: skip
def test_no_parameter_of_a_family_goes_without_a_role(family: str) -> None:
    for piece in tiny_anatomy(family)[1]:
        role = piece.role.removesuffix("_bias")
        assert piece.sublayer != "other", piece.parameter
        assert role not in ("weight", "bias", "other", ""), piece.parameter
