"""Products of a stack of blocks against double backward through independent blocks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from curvatlas.engines.tangent.head import Readout
from curvatlas.engines.tangent.stack import BlockStack, default_parts
from curvatlas.layers.losses import (
    OutputLoss,
    PooledCrossEntropy,
    Seeds,
    TokenSquaredError,
)
from curvatlas.layers.structure import BlockSpec
from oracles import flat, layer_norm, relative_error, rms_norm
from reference_block import block, random_case, random_form, random_weights

TOLERANCE = 1e-12


def _draw(r: random.Random, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(True)


class Model:
    """A random stack, its plain torch twin, its loss and targets."""

    def __init__(self, seed: int) -> None:
        r = random.Random(seed)
        first = random_case(7 * seed)
        d = first.spec.d_model
        cases = [first]
        while len(cases) < r.choice([1, 2, 3]):
            case = random_case(r.randrange(10**6))
            if case.spec.d_model == d:
                cases.append(case)
        samples, length = r.choice([1, 2, 3]), r.choice([2, 3, 4])
        # 1/√d of the input, as in a trained net: deep linear attention of scale 1 explodes
        self.x = _draw(r, samples, length, d)
        self.specs = [case.spec for case in cases]
        self.weights = [
            {k: (0.5 * v).detach().requires_grad_(True) for k, v in case.weights.items()}
            for case in cases
        ]
        self.keys = None
        if r.random() < 0.3:
            self.keys = torch.ones(samples, length, dtype=torch.bool)
            self.keys[0, -1] = False
        self.norm = r.choice(["none", "layer", "rms"])
        self.pooling = r.choice([None, None, "mean", "first", "last"])
        classes = r.choice([None, 3, 5])
        options: dict[str, Tensor] = {}
        if self.norm != "none" and r.random() < 0.8:
            options["norm_weight"] = _draw(r, d)
            if self.norm == "layer":
                options["norm_bias"] = _draw(r, d)
        if classes is not None:
            options["weight"] = _draw(r, classes, d)
            if r.random() < 0.5:
                options["bias"] = _draw(r, classes)
        self.head = options
        self.scale = (1.0, 0.7)[seed % 2]
        self.readout = Readout(
            pooling=self.pooling, norm=self.norm, eps=0.01, scale=self.scale, **options
        )
        self.loss = r.choice(["mse", "cross_entropy"])
        width, tokens = classes or d, 1 if self.pooling else length
        generator = torch.Generator().manual_seed(seed)
        if self.loss == "mse":
            self.targets = torch.randn(samples, tokens, width, generator=generator).double()
        else:
            self.targets = torch.randint(width, (samples, tokens), generator=generator)

    @property
    def leaves(self) -> list[Tensor]:
        order = ("norm_weight", "norm_bias", "weight", "bias")
        head = [self.head[name] for name in order if name in self.head]
        return [*(t for w in self.weights for t in w.values()), *head, self.x]

    def outputs(self) -> Tensor:
        z = self.x
        for spec, weights in zip(self.specs, self.weights, strict=True):
            z = block(spec, weights, z, self.keys)
        gamma, beta = self.head.get("norm_weight"), self.head.get("norm_bias")
        if self.norm == "layer":
            z = layer_norm(z, gamma, beta, 0.01)
        elif self.norm == "rms":
            z = rms_norm(z, gamma, 0.01)
        if self.pooling == "mean":
            z = z.mean(1, keepdim=True)
        elif self.pooling is not None:
            z = z[:, :1] if self.pooling == "first" else z[:, -1:]
        z = self.scale * z
        if "weight" in self.head:
            z = z @ self.head["weight"].T
            z = z + self.head["bias"] if "bias" in self.head else z
        return z

    def value(self, z: Tensor) -> Tensor:
        if self.loss == "mse":
            return (z - self.targets).pow(2).mean()
        return F.cross_entropy(z.flatten(0, 1), self.targets.flatten())


def _oracle(model: Model, v: Tensor) -> dict[str, Tensor]:
    """Gradient, H v and H_o v by reverse over reverse; v (P,)."""
    leaves, options = model.leaves, {"retain_graph": True, "allow_unused": True}
    parts = [
        p.view_as(t) for p, t in zip(v.split([t.numel() for t in leaves]), leaves, strict=True)
    ]
    z = model.outputs()
    value = model.value(z)
    grads = torch.autograd.grad(value, leaves, create_graph=True, **options)
    inner = sum((g * p).sum() for g, p in zip(grads, parts, strict=True) if g is not None)
    total = flat(torch.autograd.grad(inner, leaves, **options), leaves)
    u = torch.zeros_like(z, requires_grad=True)
    pulled = torch.autograd.grad(z, leaves, u, create_graph=True, **options)
    inner = sum((g * p).sum() for g, p in zip(pulled, parts, strict=True) if g is not None)
    (moved,) = torch.autograd.grad(inner, u)
    leaf = z.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(model.value(leaf), leaf, create_graph=True)
    (bent,) = torch.autograd.grad((slope * moved).sum(), leaf)
    outer = flat(torch.autograd.grad(z, leaves, bent, **options), leaves)
    return {
        "value": value.detach(),
        "gradient": flat(grads, leaves).detach(),
        "total": total,
        "outer": outer,
        "functional": total - outer,
        "moved": moved,
    }


@pytest.mark.parametrize("start", range(0, 60, 10))
def test_stack_products_equal_double_backward(start: int) -> None:
    for seed in range(start, start + 10):
        model = Model(seed)
        blocks = list(zip(model.specs, model.weights, strict=True))
        stack = BlockStack(blocks, loss=model.loss, readout=model.readout)
        here = stack.linearise(model.x, model.targets, mask=model.keys, include_input=True)
        v = torch.randn(here.shape[0], 1 + seed % 3, dtype=torch.float64)
        columns = {part: here.product(v, part=part) for part in ("total", "outer", "functional")}
        for k in range(v.shape[1]):
            want = _oracle(model, v[:, k])
            scale = torch.linalg.norm(want["total"]) + torch.linalg.norm(want["outer"])
            for part, got in columns.items():
                error = float(torch.linalg.norm(got[:, k] - want[part]) / scale)
                assert error <= TOLERANCE, (seed, part, error, model.specs)
            assert relative_error(here.gradient, want["gradient"]) <= TOLERANCE, seed
            assert relative_error(here.jacobian_product(v)[k], want["moved"]) <= TOLERANCE, seed
            torch.testing.assert_close(here.value, want["value"], rtol=TOLERANCE, atol=0)


def _small(length: int = 3, **options: object) -> tuple[BlockSpec, dict[str, Tensor], Tensor]:
    spec = BlockSpec(d_model=4, n_heads=2, d_ff=6, **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return spec, random_weights(spec, 1), torch.randn(2, length, 4, dtype=torch.float64)


@pytest.mark.parametrize("order", ["pre post pre", "post none post", "none pre none", "bare post"])
def test_neighbours_of_different_kinds_do_not_disturb_each_other(order: str) -> None:
    kinds = {
        "pre": BlockSpec(d_model=4, n_heads=2, d_ff=6, norm_first=True),
        "post": BlockSpec(d_model=4, n_heads=2, d_ff=6),
        "none": BlockSpec(d_model=4, n_heads=2, d_ff=6, norm="none"),
        "bare": BlockSpec(d_model=4, n_heads=2, norm="none", residual=False),
    }
    model = Model(0)
    model.specs = [kinds[name] for name in order.split()]
    model.weights = [
        random_weights(s, i, drop=_norms(s), scale=0.4) for i, s in enumerate(model.specs)
    ]
    torch.manual_seed(0)
    model.x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    model.keys, model.norm, model.pooling, model.head = None, "none", None, {}
    model.scale = 1.0
    model.loss, model.targets = "mse", torch.randn(2, 3, 4, dtype=torch.float64)
    blocks = list(zip(model.specs, model.weights, strict=True))
    here = BlockStack(blocks).linearise(model.x, model.targets, include_input=True)
    v = torch.randn(here.shape[0], dtype=torch.float64)
    want = _oracle(model, v)
    for part in ("total", "outer", "functional"):
        assert relative_error(here.product(v, part=part), want[part]) <= 10 * TOLERANCE, part


def _norms(spec: BlockSpec) -> frozenset[str]:
    names = {f"norm{i}_{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    return frozenset(names) if spec.norm == "none" else frozenset()


def test_one_vector_and_its_columns_give_the_same_product() -> None:
    spec, weights, x = _small()
    here = BlockStack([(spec, weights)] * 2).linearise(x, torch.zeros_like(x))
    v = torch.randn(here.shape[0], 4, dtype=torch.float64)
    together = here @ v
    for k in range(4):
        assert relative_error(together[:, k], here @ v[:, k]) <= TOLERANCE


def test_a_product_survives_the_next_product() -> None:
    spec, weights, x = _small()
    here = BlockStack([(spec, weights)]).linearise(x, torch.zeros_like(x), include_input=True)
    v = torch.randn(here.shape[0], dtype=torch.float64)
    first, moved = here @ v, here.jacobian_product(v)
    kept, kept_moved = first.clone(), moved.clone()
    here.product(-2 * v)
    assert torch.equal(first, kept)
    assert torch.equal(moved, kept_moved)


def test_the_input_alone_gives_its_own_block_of_the_hessian() -> None:
    spec, weights, x = _small()
    stack = BlockStack([(spec, weights)] * 2)
    whole = stack.linearise(x, torch.zeros_like(x), include_input=True)
    alone = stack.linearise(x, torch.zeros_like(x), include_input=True, include_weights=False)
    v = torch.randn(x.numel(), dtype=torch.float64)
    padded = torch.cat([torch.zeros(stack.size, dtype=torch.float64), v])
    assert relative_error(alone @ v, (whole @ padded)[stack.size :]) <= TOLERANCE


def test_the_mean_over_samples_is_the_mean_of_their_products() -> None:
    spec, weights, x = _small()
    stack = BlockStack([(spec, weights)])
    v = torch.randn(stack.size, dtype=torch.float64)
    together = stack.linearise(x, torch.zeros_like(x)) @ v
    apart = [stack.linearise(s[None], torch.zeros_like(s[None])) @ v for s in x]
    assert relative_error(together, sum(apart) / len(apart)) <= TOLERANCE  # type: ignore[operator]


@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "pooled"])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_of_a_batch_add_up_to_the_whole(loss: str, masked: bool) -> None:
    spec, weights, _ = _small()
    torch.manual_seed(1)
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    mask = torch.ones(5, 3, dtype=torch.bool) if masked else None
    if mask is not None:
        mask[1, 2] = mask[4, 1] = False
    targets: Tensor = torch.randint(4, (5, 3))
    targets[0] = -100  # a sample without, one with some ignored targets
    targets[3, 1] = -100
    given: object = loss
    if loss == "mse":
        targets = torch.randn_like(x)
    elif loss == "pooled":
        given, targets = PooledCrossEntropy(torch.randn(3, 4).double()), torch.randint(3, (5,))
    stack = BlockStack([(spec, weights)] * 2, loss=given)  # type: ignore[arg-type]
    whole = stack.linearise(x, targets, mask=mask, include_input=True, parts=1)
    v = torch.randn(whole.shape[0], 2, dtype=torch.float64)
    for parts in (2, 3, 5):
        split = stack.linearise(x, targets, mask=mask, include_input=True, parts=parts)
        # the first sample alone has no valid target: five parts fall back to the whole
        assert len(split.chains) == (1 if loss == "cross_entropy" and parts == 5 else parts)
        torch.testing.assert_close(split.value, whole.value, rtol=TOLERANCE, atol=0)
        torch.testing.assert_close(split.output, whole.output, rtol=TOLERANCE, atol=TOLERANCE)
        assert relative_error(split.gradient, whole.gradient) <= TOLERANCE
        assert relative_error(split.jacobian_product(v), whole.jacobian_product(v)) <= TOLERANCE
        for part in ("total", "outer", "functional"):
            want = whole.product(v, part=part)
            assert relative_error(split.product(v, part=part), want) <= TOLERANCE


def test_a_loss_that_is_no_mean_over_samples_is_not_taken_in_parts() -> None:
    spec, weights, x = _small()

    class Worst(OutputLoss):
        """A loss that couples the samples: its seeds cannot be taken from some of them."""

        def seeds(self, outputs: Tensor, targets: Tensor) -> Seeds:
            return TokenSquaredError().seeds(outputs, targets)

    assert len(BlockStack([(spec, weights)], loss=Worst()).linearise(x, x, parts=2).chains) == 1


def test_large_batches_are_taken_in_parts_by_default() -> None:
    spec = BlockSpec(d_model=128, n_heads=4, d_ff=512)
    assert default_parts([spec] * 4, torch.zeros(8, 64, 128, dtype=torch.float64)) == 2
    assert default_parts([spec] * 4, torch.zeros(1, 512, 128, dtype=torch.float64)) == 1
    assert default_parts([spec] * 4, torch.zeros(8, 64, 128)) == 1  # float32: half the bytes
    assert default_parts([spec] * 12, torch.zeros(64, 64, 128, dtype=torch.float64)) > 8


def test_a_pooled_loss_object_and_a_pooled_readout_agree() -> None:
    spec, weights, x = _small()
    head, labels = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 2])
    by_loss = BlockStack([(spec, weights)], loss=PooledCrossEntropy(head))
    by_readout = BlockStack(
        [(spec, weights)], loss="cross_entropy", readout=Readout(weight=head, pooling="mean")
    )
    v = torch.randn(by_loss.size, dtype=torch.float64)
    padded = torch.cat([v, torch.zeros(head.numel(), dtype=torch.float64)])
    want = by_loss.linearise(x, labels) @ v
    got = by_readout.linearise(x, labels) @ padded
    assert relative_error(got[: len(v)], want) <= TOLERANCE


def test_names_follow_the_flat_order() -> None:
    spec, weights, x = _small()
    stack = BlockStack([(spec, weights)] * 2, readout=Readout(weight=torch.eye(4).double()))
    here = stack.linearise(x, torch.zeros_like(x), include_input=True)
    pieces = here.split(torch.cat([t.reshape(-1) for t in [*stack.named_weights.values(), x]]))
    assert list(pieces) == [*stack.named_weights, "input"]
    assert all(torch.equal(pieces[k], w) for k, w in stack.named_weights.items())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda s, x: BlockStack([]), "at least one block"),
        (lambda s, x: s.linearise(x, x) @ torch.zeros(3).double(), "takes a vector"),
        (lambda s, x: s.linearise(x.float(), x.float()), "convert one of them"),
        (lambda s, x: s.linearise(x, x).product(torch.zeros(s.size), part="total"), "convert it"),
        (
            lambda s, x: s.linearise(x, x).product(torch.zeros(s.size).double(), part="both"),
            "part must be one of",
        ),
        (lambda s, x: s.linearise(x, x, include_weights=False), "nothing to differentiate"),
        (lambda s, x: s.linearise(x, x, parts=9), "between 1 and the 2 samples"),
        (lambda s, x: s.linearise(x * torch.inf, x), "no derivative is defined"),
        (lambda s, x: BlockStack([(s.specs[0], {})]).linearise(x, x), "misses query_weight"),
    ],
)
def test_wrong_use_is_refused_in_one_line(wrong: object, message: str) -> None:
    spec, weights, x = _small()
    stack = BlockStack([(spec, weights)])
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        wrong(stack, x)  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_blocks_of_different_width_are_refused() -> None:
    spec, weights, _ = _small()
    with pytest.raises(ValueError, match="share one width"):
        BlockStack([(spec, weights), (replace(spec, d_model=8), weights)])


def test_stacks_of_any_forms_share_a_workspace_without_harm() -> None:
    """Blocks that alternate forms overwrite each other's scratch, never what is still needed."""
    pool = [random_form(seed) for seed in range(120)]
    for seed in range(12):
        r = random.Random(seed)
        d = r.choice([4, 6, 8])
        cases = r.sample([case for case in pool if case.spec.d_model == d], 3)
        weights = [
            {n: w.detach().requires_grad_(True) for n, w in c.weights.items()} for c in cases
        ]
        x = _draw(r, 2, 3, d)
        target = torch.randn(2, 3, d, dtype=torch.float64)
        z = x
        for case, own in zip(cases, weights, strict=True):
            z = block(case.spec, own, z)
        leaves = [*(w for own in weights for w in own.values()), x]
        loss = (z - target).pow(2).mean()
        gradient = flat(
            torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True), leaves
        )
        v = torch.randn(len(gradient), 2, dtype=torch.float64)
        want = torch.stack(
            [
                flat(
                    torch.autograd.grad(
                        gradient @ column, leaves, retain_graph=True, allow_unused=True
                    ),
                    leaves,
                )
                for column in v.T
            ],
            1,
        )
        stack = BlockStack([(c.spec, own) for c, own in zip(cases, weights, strict=True)])
        here = stack.linearise(x, target, include_input=True)
        for _ in range(2):
            assert relative_error(here @ v, want) <= 1e-11, (seed, [c.spec for c in cases])
        assert relative_error(here.gradient, gradient.detach()) <= 1e-12
