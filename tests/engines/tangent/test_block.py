"""Products of one block against double backward through an independent block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from curvatlas.engines.tangent.block import LinearisedBlock
from curvatlas.engines.tangent.linear import Buffers
from curvatlas.layers.checks import check_spec, weight_shapes
from curvatlas.layers.losses import TokenSquaredError
from curvatlas.layers.structure import BlockSpec
from oracles import flat, relative_error
from reference_block import (
    Case,
    block,
    options_of,
    pairs_of,
    random_case,
    random_cross,
    random_form,
    random_weights,
)

TOLERANCE = 1e-12


def _directions(case: Case, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, *leaf.shape, generator=generator, dtype=leaf.dtype)
        for leaf in case.leaves
    ]


def _oracle(case: Case, target: Tensor, directions: list[Tensor]) -> dict[str, Tensor]:
    """Gradient, J v, Jᵀ(J v) · 2/size, and H v, flat, by reverse over reverse."""
    z = case.output()
    loss = (z - target).pow(2).sum() / z.numel()
    options = {"retain_graph": True, "allow_unused": True}
    grads = torch.autograd.grad(loss, case.leaves, create_graph=True, **options)
    u = torch.zeros_like(z, requires_grad=True)
    pulled = torch.autograd.grad(z, case.leaves, u, create_graph=True, **options)
    total, outer, moved = [], [], []
    for i in range(len(directions[0])):
        pairs = [(g, v[i]) for g, v in zip(grads, directions, strict=True) if g is not None]
        inner = sum((g * v).sum() for g, v in pairs)
        row = torch.autograd.grad(inner, case.leaves, **options)
        total.append(flat(row, case.leaves))
        pairs = [(g, v[i]) for g, v in zip(pulled, directions, strict=True) if g is not None]
        (jv,) = torch.autograd.grad(sum((g * v).sum() for g, v in pairs), u, retain_graph=True)
        moved.append(jv)
        back = torch.autograd.grad(z, case.leaves, 2 / z.numel() * jv, **options)
        outer.append(flat(back, case.leaves))
    return {
        "gradient": flat(grads, case.leaves).detach(),
        "moved": torch.stack(moved),
        "outer": torch.stack(outer),
        "total": torch.stack(total),
        "output": z.detach(),
    }


def _linearised(case: Case, **options: Any) -> LinearisedBlock:
    memory = {"memory": case.memory, "memory_mask": case.memory_keys, "buckets": case.buckets}
    return LinearisedBlock(case.spec, case.weights, case.x, case.keys, **memory, **options)


def _flat(found: dict[str, Tensor], rate_x: Tensor, count: int) -> Tensor:
    return torch.cat([t.reshape(count, -1) for t in [*found.values(), rate_x]], dim=1)


# Of 160 random mixtures of each kind these hold every pair of options that stands together in one
# of them, 8,000 to 11,000 pairs, and 97 of 100 triples.
SEEDS: dict[Callable[[int], Case], list[int]] = {
    random_case: [
        0, 1, 2, 3, 6, 9, 11, 15, 19, 21, 22, 23, 27, 28, 32, 35, 36, 38, 40, 43, 47, 48, 57, 58,
        65, 66, 74, 77, 78, 84, 86, 94, 97, 99, 101, 102, 104, 105, 106, 116, 119, 121, 122, 123,
        124, 129, 134, 138, 145, 146, 157, 159,
    ],
    random_form: [
        0, 8, 17, 19, 29, 30, 33, 35, 36, 50, 52, 57, 58, 66, 67, 69, 71, 76, 77, 85, 90, 94, 99,
        104, 105, 110, 112, 115, 116, 119, 131, 132, 135, 136, 144, 145, 146, 150, 157,
    ],
    random_cross: [
        0, 2, 3, 6, 27, 32, 48, 53, 62, 64, 66, 68, 73, 81, 84, 87, 92, 95, 100, 106, 116, 129,
        130, 133, 134, 136, 142, 145, 151,
    ],
}  # fmt: skip


@pytest.mark.parametrize("make", SEEDS)
def test_the_seeds_mix_every_pair_of_options_that_chance_mixes(make: Callable[[int], Case]) -> None:
    cases = {
        seed: options_of(make(seed), columns=seed % 3, blocked=seed % 2) for seed in range(160)
    }
    assert pairs_of(cases[seed] for seed in SEEDS[make]) == pairs_of(cases.values())


@pytest.mark.parametrize("make", SEEDS)
@pytest.mark.parametrize("start", range(4))
def test_products_equal_double_backward_for_any_mixture_of_options(
    start: int, make: Callable[[int], Case]
) -> None:
    """Every seed with whole attention weights, every second one also block by block."""
    for seed in SEEDS[make][start::4]:
        case = make(seed)
        directions = _directions(case, 1 + seed % 3, seed)
        target = torch.randn_like(case.x.detach())
        want = _oracle(case, target, directions)
        _compare(seed, case, target, directions, want, blocked=False)
        if seed % 2 and case.buckets is not None:
            with pytest.raises(ValueError, match="no learned terms"):
                _linearised(case, blocked=True)
        elif seed % 2:
            _compare(seed, case, target, directions, want, blocked=True)


def _compare(
    seed: int,
    case: Case,
    target: Tensor,
    directions: list[Tensor],
    want: dict[str, Tensor],
    *,
    blocked: bool,
) -> None:
    count = len(directions[0])
    got = _linearised(case, blocked=blocked)
    seeds = TokenSquaredError().seeds(got.output, target)
    tangents = dict(zip(case.moving, directions[:-1], strict=True))
    grads, delta_x = got.gradient(seeds.delta, wanted=case.moving)
    scale = torch.linalg.norm(want["total"])
    checks = {
        "output": (got.output, want["output"]),
        "gradient": (flat([*grads.values(), delta_x], case.leaves), want["gradient"]),
        "moved": (got.jvp(tangents, directions[-1]), want["moved"]),
    }
    for part in ("total", "outer", "functional"):
        options = {"curvature": seeds.product, "part": part, "wanted": case.moving}
        found = got.hvp(tangents, directions[-1], **options)
        functional = want["total"] - want["outer"]
        checks[part] = (_flat(*found, count), want.get(part, functional))
    for name, (left, right) in checks.items():
        error = relative_error(left, right)
        if name in ("total", "outer", "functional"):
            error = float(torch.linalg.norm(left - right) / scale)
        assert error <= TOLERANCE, (seed, blocked, name, error, case.spec, list(case.weights))


@pytest.mark.parametrize("start", range(3))
def test_any_part_of_a_block_with_memory_moves_and_is_asked_for_alone(start: int) -> None:
    for seed in SEEDS[random_cross][start::3]:
        case = random_cross(seed)
        got = _linearised(case, space=Buffers(keep=True))
        seeds = TokenSquaredError().seeds(got.output, torch.zeros_like(got.output))
        got.gradient(seeds.delta, wanted=())
        options: Any = {"curvature": seeds.product, "needs_input": False}
        # two columns for each part, zero for all the others
        padded = {
            name: torch.zeros(2 * len(case.moving), *value.shape, dtype=torch.float64)
            for name, value in case.moving.items()
        }
        for place, value in enumerate(padded.values()):
            value[2 * place : 2 * place + 2].normal_()
        whole, _ = got.hvp(padded, **options, wanted=case.moving)
        want = {row: rate.clone() for row, rate in whole.items()}
        table = ["distance_weight"] if case.buckets is not None else []
        for place, (name, value) in enumerate(padded.items()):
            two = slice(2 * place, 2 * place + 2)
            others = [["memory"], ["query_weight", "cross_value_weight"], table]
            for rows in ([name], *(others if table or place == 0 else others[:-1])):
                found, _ = got.hvp({name: value[two]}, **options, wanted=rows)
                for row in rows:
                    scale = float(want[row][two].norm()) + 1e-3
                    error = float((found[row] - want[row][two]).norm()) / scale
                    assert error <= TOLERANCE, (seed, name, row, error, case.spec)


def test_a_memorys_rate_is_added_to_what_is_there() -> None:
    case = random_cross(0)
    assert case.memory is not None
    rate, there = torch.randn_like(case.x[None]), torch.randn_like(case.memory[None])
    want = _linearised(case).pull(rate, wanted=["memory"])[0]["memory"]
    into = {"memory": there.clone()}
    _linearised(case).pull(rate, wanted=["memory"], into=into)
    torch.testing.assert_close(into["memory"], there + want)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (None, "pass memory="),
        (torch.zeros(2, 3, 7).double(), "must be \\(2, tokens, 4\\)"),
        (torch.zeros(2, 3, 4), "float32"),
    ],
)
def test_a_memory_that_does_not_fit_is_refused(memory: Tensor | None, message: str) -> None:
    spec = BlockSpec(d_model=4, n_heads=2, d_ff=5, memory_size=4)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    with pytest.raises((ValueError, TypeError), match=message):
        LinearisedBlock(spec, random_weights(spec, 0), x, memory=memory)
    plain = replace(spec, memory_size=None)
    with pytest.raises(ValueError, match="without cross attention"):
        LinearisedBlock(plain, random_weights(plain, 0), x, memory=x)
    with pytest.raises(ValueError, match="has no parallel"):
        check_spec(replace(spec, parallel=True, norm_first=True))


_MASKS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "bare": {},
    "linear": {"causal": True, "softmax": False},
}


@pytest.mark.parametrize("capped", [None, 0.9])
@pytest.mark.parametrize("kind", ["none", "padding", "pairs", "alibi", "without keys"])
@pytest.mark.parametrize("rule", _MASKS)
def test_blocks_of_queries_give_what_all_of_them_together_give(
    rule: str, kind: str, capped: float | None
) -> None:
    softmax = _MASKS[rule].get("softmax", True)
    if not softmax and (capped or kind == "alibi"):
        return
    n, length, d = 2, 21, 8
    spec = BlockSpec(
        d_model=d, n_heads=4, n_kv_heads=2, d_ff=5, norm_first=True, softcap=capped, **_MASKS[rule]
    )
    weights = random_weights(spec, 3)
    x = torch.randn(n, length, d, dtype=torch.float64)
    mask: Tensor | None = None
    if kind == "padding":
        mask = torch.rand(n, 1, length) < 0.7
        mask = mask | torch.eye(length, dtype=torch.bool)
    elif kind == "pairs":
        mask = (torch.rand(n, 4, length, length) < 0.6) | torch.eye(length, dtype=torch.bool)
    elif kind == "alibi":
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = -distance.abs() * torch.tensor([0.5, 0.25, 0.1, 0.05])[:, None, None]
        mask = mask.double().unsqueeze(0)
    elif kind == "without keys":
        mask = torch.ones(n, length, length, dtype=torch.bool)
        mask[0, 4:9] = False
    keyless = "zero" if kind == "without keys" else "refuse"
    rows: list[list[Tensor]] = []
    for blocked in (False, True):
        got = LinearisedBlock(spec, weights, x, mask, keyless=keyless, blocked=blocked)
        seeds = TokenSquaredError().seeds(got.output, torch.zeros_like(got.output))
        grads, delta = got.gradient(seeds.delta)
        results = [got.output, *grads.values(), delta]
        for moving in (weights, {"key_weight": 0}, {"value_weight": 0}):
            generator = torch.Generator().manual_seed(1)
            tangents = {
                name: torch.randn(3, *weights[name].shape, generator=generator).double()
                for name in moving
            }
            for part in ("total", "outer", "functional"):
                rates, back = got.hvp(tangents, curvature=seeds.product, part=part)
                results += [*rates.values(), back]
        rows.append(results)
    for left, right in zip(*rows, strict=True):
        assert float((left - right).norm()) <= TOLERANCE * float(right.norm() + 1), (rule, kind)


def test_a_query_without_keys_is_refused_by_its_place_in_the_whole_input() -> None:
    spec, weights, x = _spec_case(causal=True)
    mask = torch.ones(x.shape[0], x.shape[1], x.shape[1], dtype=torch.bool)
    mask[0, -1] = False
    for blocked in (False, True):
        with pytest.raises(ValueError, match=f"query {x.shape[1] - 1} of sample 0"):
            LinearisedBlock(spec, weights, x, mask, blocked=blocked)


def _whole_case() -> Case:
    return next(c for c in map(random_case, range(100)) if c.spec.d_ff and len(c.weights) > 14)


def _forms() -> list[Case]:
    """One case of every form: parallel, norms behind, heads normalised, logits capped."""
    cases = [random_form(seed) for seed in range(60)]
    chosen = [
        next(c for c in cases if c.spec.parallel and c.spec.one_norm and c.spec.softcap),
        next(c for c in cases if c.spec.parallel and not c.spec.one_norm and c.spec.qk_norm),
        next(c for c in cases if c.spec.output_norm and c.spec.d_ff and not c.spec.parallel),
        next(c for c in cases if c.spec.qk_norm and c.spec.qk_span == "each head"),
    ]
    return chosen


@pytest.mark.parametrize("case", [_whole_case(), *_forms()], ids=range(5))
def test_one_block_of_the_hessian_equals_its_part_of_the_whole_product(case: Case) -> None:
    got = LinearisedBlock(case.spec, case.weights, case.x, case.keys)
    seeds = TokenSquaredError().seeds(got.output, torch.randn_like(got.output))
    got.gradient(seeds.delta)
    for column, weight in case.weights.items():
        tangent = {column: torch.randn(2, *weight.shape, dtype=torch.float64)}
        for part in ("total", "outer", "functional"):
            whole, _ = got.hvp(tangent, curvature=seeds.product, part=part)
            scale = sum(float(t.norm()) for t in whole.values())
            for row in case.weights:
                alone, nothing = got.hvp(
                    tangent, curvature=seeds.product, part=part, wanted=[row], needs_input=False
                )
                assert nothing is None
                assert list(alone) == [row]
                assert float((alone[row] - whole[row]).norm()) <= TOLERANCE * scale, (row, column)


def test_products_are_symmetric() -> None:
    case = _whole_case()
    got = LinearisedBlock(case.spec, case.weights, case.x, case.keys)
    seeds = TokenSquaredError().seeds(got.output, torch.zeros_like(got.output))
    got.gradient(seeds.delta)
    u, v = (_directions(case, 1, seed) for seed in (1, 2))
    images = []
    for w in (u, v):
        tangents = dict(zip(case.weights, w[:-1], strict=True))
        images.append(_flat(*got.hvp(tangents, w[-1], curvature=seeds.product), 1)[0])
    flat_u, flat_v = (torch.cat([t.reshape(-1) for t in w]) for w in (u, v))
    left, right = flat_v @ images[0], flat_u @ images[1]
    torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-13)


def _spec_case(**options: object) -> tuple[BlockSpec, dict[str, Tensor], Tensor]:
    spec = BlockSpec(**{"d_model": 4, "n_heads": 2, "d_ff": 6, **options})  # type: ignore[arg-type]
    torch.manual_seed(0)
    return spec, random_weights(spec, 0), torch.randn(2, 3, 4, dtype=torch.float64)


def test_one_token_alone_has_no_query_or_key_curvature() -> None:
    spec, weights, x = _spec_case()
    got = LinearisedBlock(spec, weights, x[:, :1])
    seeds = TokenSquaredError().seeds(got.output, torch.zeros_like(got.output))
    got.gradient(seeds.delta)
    v = {name: torch.randn(1, *w.shape, dtype=torch.float64) for name, w in weights.items()}
    found, _ = got.hvp(v, curvature=seeds.product)
    for name in ("query_weight", "key_weight", "query_bias", "key_bias"):
        assert float(found[name].abs().max()) <= 1e-15
    assert float(found["value_weight"].abs().max()) > 1e-6


def test_padding_and_pair_masks_that_say_the_same_give_the_same() -> None:
    spec, weights, x = _spec_case(causal=True)
    keys = torch.tensor([[True, True, False], [True, False, True]])
    pairs = keys.unsqueeze(1).expand(2, 3, 3)
    added = torch.zeros(2, 3, 3, dtype=torch.float64).masked_fill(~pairs, -torch.inf)
    outputs = [LinearisedBlock(spec, weights, x, mask).output for mask in (keys, pairs, added)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert relative_error(outputs[0], block(spec, weights, x, keys).detach()) <= TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.zeros(2, 3, dtype=torch.bool)}, "may attend to no key"),
        ({"mask": torch.ones(2, 5, dtype=torch.bool)}, "mask's shape"),
        ({"mask": torch.ones(2, 3, dtype=torch.int64)}, "must be boolean"),
        ({"options": {"n_heads": 3}}, "must divide d_model"),
        ({"options": {"n_kv_heads": 4}}, "must divide n_heads"),
        ({"options": {"norm": "batch"}}, "unknown norm"),
        ({"options": {"activation": "tanh"}}, "unknown activation"),
        ({"options": {"residual": False}}, "bare attention layer"),
        ({"options": {"eps": -1.0}}, "eps must not be negative"),
        ({"options": {"eps": 0.0}, "x": torch.ones(2, 3, 4).double()}, "no variance"),
        ({"x": torch.ones(2, 3, 4)}, "convert one of them"),
        ({"x": torch.ones(2, 3, 5).double()}, "must be \\(samples, tokens, 4\\)"),
        ({"x": torch.ones(2, 3, 4, dtype=torch.int64)}, "floating dtype"),
        ({"drop": "up_weight"}, "misses up_weight"),
        ({"drop": "output_weight"}, "without output_weight"),
        ({"add": "gate_weight"}, "this block has no such part"),
        ({"add": "qkv"}, "unknown name"),
    ],
)
def test_wrong_blocks_are_refused_in_one_line(change: dict, message: str) -> None:
    spec, weights, x = _spec_case()
    spec = replace(spec, **change.get("options", {}))
    weights.pop(change.get("drop"), None)  # type: ignore[arg-type]
    if "add" in change:
        weights[change["add"]] = torch.zeros(6, 4, dtype=torch.float64)
    x = change.get("x", x)
    if change.get("options", {}).get("eps") == 0.0:  # pre-norm sees the constant tokens themselves
        spec = replace(spec, norm_first=True)
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        LinearisedBlock(spec, weights, x, change.get("mask"))
    assert "\n" not in str(caught.value)


def test_wrong_directions_are_refused() -> None:
    spec, weights, x = _spec_case()
    got = LinearisedBlock(spec, weights, x)
    good = torch.zeros(2, *weights["query_weight"].shape, dtype=torch.float64)
    wrong = [
        ({}, None, "no direction"),
        ({"query_weight": good[0]}, None, "must be"),
        ({"gate_weight": good}, None, "does not have"),
        ({"query_weight": good.float()}, None, "float32"),
        ({"query_weight": good}, torch.zeros(1, 2, 3, 4).double(), "disagree"),
        ({"query_weight": good}, torch.zeros(2, 3, 4).double(), "input's tangent"),
    ]
    for tangents, x_dot, message in wrong:
        with pytest.raises((ValueError, TypeError), match=message):
            got.push(tangents, x_dot)
    with pytest.raises(ValueError, match="no adjoint is recorded"):
        got.hvp({"query_weight": good}, curvature=lambda v: v)
    with pytest.raises(ValueError, match="has no weight"):
        got.pull(torch.zeros(1, 2, 3, 4).double(), wanted=["gate_weight"])
    got.gradient(torch.ones_like(got.output))
    with pytest.raises(ValueError, match="already keeps an adjoint"):
        got.gradient(torch.ones_like(got.output))


def test_relu_at_exactly_zero_counts_as_off() -> None:
    spec, weights, x = _spec_case(activation="relu")
    with torch.no_grad():
        weights["up_weight"].zero_()
        weights["up_bias"].zero_()
    grads, _ = LinearisedBlock(spec, weights, x).gradient(torch.ones_like(x))
    assert float(grads["up_weight"].abs().max()) == 0.0


def test_rates_with_and_without_a_place_of_their_own_are_the_same() -> None:
    spec = BlockSpec(d_model=4, n_heads=2, d_ff=9, norm_first=True, parallel=True)
    weights = {
        name: torch.randn(shape, dtype=torch.float64) for name, shape in weight_shapes(spec).items()
    }
    x, rate = torch.randn(2, 2, 3, 4, dtype=torch.float64).unbind()
    want, _ = LinearisedBlock(spec, weights, x).pull(rate[None])
    places = {"output_weight": torch.empty(1, 4, 4, dtype=torch.float64)}
    here = LinearisedBlock(spec, weights, x, space=Buffers(keep=True))
    for _ in range(2):
        got, _ = here.pull(rate[None], into=places)
        for name, value in want.items():  # all of them, once the whole pass is over
            torch.testing.assert_close(got[name], value, rtol=1e-13, atol=1e-14, msg=name)
