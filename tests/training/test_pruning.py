"""Pruning: the surgeon's algebra exactly, the curvature rows' Gram matrix, and real models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import curvatlas as ca
import families
import oracles
from curvatlas import zoo
from curvatlas.operators import per_sample
from curvatlas.operators.per_sample import sampled_gradients
from curvatlas.training import pruning as module
from curvatlas.training.pruning import Changes, round_to, step_sizes
from curvatlas.training.surgeon import (
    BlockCurvature,
    compensated,
    in_blocks,
    inverse_blocks,
    remove_all,
    rounded_in_turn,
)


def quadratic(blocks: int = 3, size: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    factor = torch.randn(blocks, 20, size, dtype=torch.float64)
    inverse = inverse_blocks(factor.mT @ factor, damping=1e-3)
    return torch.randn(blocks, size, dtype=torch.float64), inverse, torch.linalg.inv(inverse)


def test_each_removal_costs_what_the_quadratic_says() -> None:
    weights, inverse, curvature = quadratic()
    removals = remove_all(weights, inverse)
    for block in range(3):
        assert sorted(removals.order[block].tolist()) == list(range(6))
        gone: list[int] = []
        rise = 0.0
        for turn in range(6):
            gone.append(int(removals.order[block, turn]))
            kept = [i for i in range(6) if i not in gone]
            # Best place of the kept weights once the others are zero: a constrained minimum.
            b, w = curvature[block], weights[block]
            best = torch.zeros(6, dtype=torch.float64)
            if kept:
                best[kept] = w[kept] + torch.linalg.solve(
                    b[kept][:, kept], b[kept][:, gone] @ w[gone]
                )
            exact = 0.5 * float((best - w) @ b @ (best - w))
            rise += float(removals.cost[block, turn])
            assert rise == pytest.approx(exact, rel=1e-9)
            out = torch.zeros(3, 6, dtype=torch.bool)
            out[block, gone] = True
            got = compensated(weights, inverse, out)
            assert oracles.relative_error(got[block], best) < 1e-9 or float(best.norm()) == 0
            others = [i for i in range(3) if i != block]
            assert torch.equal(got[others], weights[others])


def test_rounding_in_turn_leaves_the_free_weights_at_their_best() -> None:
    weights, inverse, curvature = quadratic()
    steps = torch.full_like(weights, 0.3)
    got = rounded_in_turn(weights, inverse, steps, levels=7)
    for block in range(3):
        b, w = curvature[block], weights[block]
        fixed: list[float] = []
        for turn in range(6):
            # The best place of the free weights given what is rounded: a constrained minimum.
            best = w.clone()
            if fixed:
                moved = torch.tensor(fixed, dtype=torch.float64) - w[:turn]
                best[turn:] -= torch.linalg.solve(b[turn:, turn:], b[turn:, :turn] @ moved)
            fixed.append(float((best[turn] / 0.3).round().clamp(-7, 7) * 0.3))
        assert torch.allclose(got[block], torch.tensor(fixed, dtype=torch.float64))


def test_the_first_removal_is_the_cheapest_of_all() -> None:
    weights, inverse, _ = quadratic()
    removals = remove_all(weights, inverse)
    price = weights.square() / (2 * inverse.diagonal(dim1=1, dim2=2))
    assert torch.equal(removals.order[:, 0], price.argmin(1))
    assert torch.allclose(removals.cost[:, 0], price.amin(1))


@pytest.mark.parametrize(
    ("name", "draws"), [("zoo vit pre-norm", 4), ("torch multihead", 10), ("zoo gpt pre-norm", 7)]
)
def test_sampled_gradients_average_to_the_gauss_newton_matrix(name: str, draws: int) -> None:
    model, batch, loss = families.make(name)
    generator = torch.Generator().manual_seed(0)
    single = ca.Problem(model, loss, batch)
    columns = torch.randn(single.size, 8, dtype=torch.float64, generator=generator)
    want = ca.GaussNewton(single) @ columns
    # The data 64 times: the same matrix, and targets of their own for each copy. The error is 0.08,
    # 0.16 and 0.1 in the mean, and over 300 seeds 0.25 lies more than 4 standard deviations of its
    # logarithm above: a false alarm in less than one of 10,000 seeds.
    copies = tree_map(lambda leaf: torch.cat([leaf] * 64), batch)
    problem = ca.Problem(model, loss, copies)
    total = torch.zeros_like(want)
    for seed in range(draws):
        rows = sampled_gradients(problem, samples=1000, seed=1000 * seed)
        total += rows.T @ (rows @ columns) / len(rows) / draws
    assert oracles.relative_error(total, want) < 0.25


class Peeking(nn.Linear):
    """Looks at a value of its input, which cannot be mapped over samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if float(x.sum()) > 1e9 else 2.0)


@pytest.mark.parametrize("peeks", [False, True])
def test_rows_of_samples_side_by_side_are_those_of_one_after_the_other(
    peeks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if peeks:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        torch.manual_seed(0)
        problem = ca.Problem(Peeking(3, 2).double(), "cross_entropy", (x, torch.arange(5) % 2))
    else:
        model, (tokens, targets), loss = families.make("zoo gpt pre-norm")
        targets = targets.clone()
        targets[1] = -100  # a sample without a target is passed over, others keep their draws
        problem = ca.Problem(model, loss, (tokens, targets))
    together = list(per_sample.sampled_gradient_rows(problem, samples=4, seed=2))
    monkeypatch.setattr(per_sample, "_ROWS_ABREAST", 1)
    single = list(per_sample.sampled_gradient_rows(problem, samples=4, seed=2))
    assert len(together) == len(single) == (4 if peeks else len(targets) - 1)
    for (row, count), (want, wanted) in zip(together, single, strict=True):
        assert count == wanted
        assert oracles.relative_error(row, want) < 1e3 * torch.finfo(torch.float64).eps


def test_a_loss_that_cannot_be_split_has_its_diagonal_read_column_by_column() -> None:
    model, batch, _ = families.make("zoo vit pre-norm")

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    pruned = ca.prune(model, loss, batch, sparsity=0.5, method="obd", exact_diagonal=True)
    problem = ca.Problem(model, loss, batch, parameters=list(pruned.curvature))
    assert pruned.products == problem.size
    want = ca.GaussNewton(problem).dense().diagonal()
    got = torch.cat([pruned.curvature[name].reshape(-1) for name in problem.parameter_names])
    assert oracles.relative_error(got, want) < 1e3 * torch.finfo(torch.float64).eps


def test_a_known_diagonal_gives_the_same_masks_for_nothing() -> None:
    model, batch, loss = families.make("zoo vit pre-norm")
    options = {"sparsity": 0.5, "method": "obd", "exact_diagonal": True}
    first = ca.prune(model, loss, batch, **options)
    again = ca.prune(model, loss, batch, **options, curvature=first.curvature)
    assert again.products == 0 < first.products
    assert all(torch.equal(again.masks[name], mask) for name, mask in first.masks.items())
    assert again.predicted_rise == first.predicted_rise
    with pytest.raises(ValueError, match="curvature does not fit the parameter"):
        ca.prune(model, loss, batch, **options, curvature={})


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, object]:
    """A ViT that has learned a little, in float64."""
    torch.manual_seed(0)
    data, model = zoo.digits(), zoo.reference_vit(d_model=8, n_heads=2)
    zoo.train(model, data, steps=60, lr=1.6e-2)
    inputs, targets = data.train.take(24)
    return model.double().eval(), (inputs.double(), targets)


def _all_places(problem: ca.Problem) -> Tensor:
    return torch.arange(problem.size)


def test_blocks_are_those_of_the_sampled_gradients_in_one_pass_or_in_several(small: object) -> None:
    model, batch = small  # type: ignore[misc]
    problem = ca.Problem(model, "cross_entropy", batch, parameters=["query", "up"])
    blocks = in_blocks([_all_places(problem)], 40)
    options = {"samples": 24, "damping": 0.1, "seed": 3}
    ((_, whole),) = BlockCurvature(problem, blocks, **options, memory="1GB").passes()
    rows = sampled_gradients(problem, samples=24, seed=3)
    dense = rows.T @ rows / len(rows)
    want = dense[:40, :40] + 0.1 * dense[:40, :40].diagonal().mean() * torch.eye(40)
    assert oracles.relative_error(torch.linalg.inv(whole[0]), want) < 1e-4  # the floor of 1e-6
    least = (3 * 16 + 8) * problem.size * 8 + 8 * 2**21 + 40 * 40 * 8
    several = list(BlockCurvature(problem, blocks, **options, memory=least + 20000).passes())
    assert len(several) > 1
    floor = 1e-5  # of the mean of the blocks of a pass, not of all
    assert oracles.relative_error(torch.cat([inverse for _, inverse in several]), whole) < floor
    with pytest.raises(ValueError, match=r"surgeon needs .* may use .*: give it more memory"):
        BlockCurvature(problem, blocks, **options, memory=least - 1)


def test_a_stopped_surgeon_goes_on_with_the_same_bits(
    small: object, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = small  # type: ignore[misc]
    options = {"sparsity": 0.6, "samples": 24, "stages": 3}
    whole = ca.prune(model, "cross_entropy", batch, **options)
    file = tmp_path / "state.safetensors"  # type: ignore[operator]
    calls = []
    operate = module.operate

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return operate(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "operate", counted)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        ca.prune(model, "cross_entropy", batch, **options, checkpoint=file)
    again = ca.prune(model, "cross_entropy", batch, **options, checkpoint=file)
    assert len(calls) == 4
    assert all(torch.equal(again.weights[n], w) for n, w in whole.weights.items())
    assert again.products == whole.products
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ValueError, match="belongs to another estimate"):
        ca.prune(model, "cross_entropy", batch, **{**options, "sparsity": 0.5}, checkpoint=file)


def test_a_problem_alone_is_pruned_like_its_model_loss_and_data(small: object) -> None:
    model, batch = small  # type: ignore[misc]
    options = {"sparsity": 0.4, "samples": 8}
    ours = ca.prune(ca.Problem(model, "cross_entropy", batch), **options)
    theirs = ca.prune(model, "cross_entropy", batch, **options)
    assert all(torch.equal(ours.weights[n], w) for n, w in theirs.weights.items())


@pytest.mark.parametrize("method", ["magnitude", "obd", "obs"])
def test_uniform_layers_lose_the_same_share_and_others_what_they_can_spare(
    small: object, method: str
) -> None:
    model, batch = small  # type: ignore[misc]
    options = {"sparsity": 0.5, "method": method, "samples": 24}
    alike = ca.prune(model, "cross_entropy", batch, layers="uniform", **options)
    assert all(share == pytest.approx(0.5, abs=0.01) for share in alike.part_sparsity.values())
    spared = ca.prune(model, "cross_entropy", batch, **options)
    shares = spared.part_sparsity.values()
    assert max(shares) - min(shares) > 0.1
    assert spared.sparsity == pytest.approx(0.5, abs=0.01)


def test_a_pruning_goes_on_from_an_earlier_one(small: object) -> None:
    model, batch = small  # type: ignore[misc]
    half = ca.prune(model, "cross_entropy", batch, sparsity=0.5, samples=24)
    more = ca.prune(model, "cross_entropy", batch, sparsity=0.7, samples=24, start=half)
    assert more.sparsity == pytest.approx(0.7, abs=0.01)
    for name, mask in half.masks.items():
        assert not bool((more.masks[name] & ~mask).any())
        assert bool((more.weights[name][~mask] == 0).all())
    same = ca.prune(model, "cross_entropy", batch, sparsity=0.4, samples=24, start=half)
    assert all(torch.equal(same.weights[n], w) for n, w in half.weights.items())
    query = ca.prune(model, "cross_entropy", batch, sparsity=0.5, samples=8, roles=["query"])
    with pytest.raises(ValueError, match="start does not fit"):
        ca.prune(model, "cross_entropy", batch, sparsity=0.7, start=query)


def test_nothing_is_changed_where_nothing_is_asked_for(small: object) -> None:
    model, batch = small  # type: ignore[misc]
    pruning = ca.prune(model, "cross_entropy", batch, sparsity=0.0, samples=8)
    assert pruning.sparsity == pruning.rise == pruning.predicted_rise == 0.0
    assert pruning.in_quadratic_range


class Quartic(nn.Module):
    """Outputs w, whatever the input: the loss is a polynomial of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), 3)


def test_the_interval_holds_a_rise_of_third_and_fourth_order() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs**4 + 2 * outputs**3 + outputs**2).sum(1).mean()

    data = (torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    changes = Changes(ca.Problem(Quartic(), loss, data))
    for size, inside in ((1e-3, True), (2.0, False)):
        delta = size * torch.tensor([0.5, 1.0, -0.4], dtype=torch.float64)
        fields = changes.fields(changes.theta + delta)
        exact = float(loss((changes.theta + delta)[None], delta)) - changes.loss
        slope, bend = oracles_of_line(changes.theta, delta)
        assert fields["predicted_rise"] == pytest.approx(slope + bend / 2, rel=1e-10)
        assert fields["linear_rise"] == pytest.approx(slope, rel=1e-10)
        low, high = fields["predicted_interval"]
        assert low <= exact <= high
        assert fields["in_quadratic_range"] is inside
        assert fields["loss_after"] - fields["loss_before"] == pytest.approx(exact)


def oracles_of_line(w: Tensor, d: Tensor) -> tuple[float, float]:
    slope = ((4 * w**3 + 6 * w**2 + 2 * w) * d).sum()
    return float(slope), float(((12 * w**2 + 12 * w + 2) * d**2).sum())


def test_an_untrained_model_is_told_from_a_trained_one() -> None:
    model, batch, loss = families.make("zoo vit pre-norm")
    pruning = ca.prune(model, loss, batch, sparsity=0.02, method="magnitude")
    assert "the model is not at a minimum" in str(pruning)
    assert abs(pruning.linear_rise) > abs(pruning.predicted_rise - pruning.linear_rise)
    assert pruning.predicted_rise == pytest.approx(pruning.rise, rel=0.05)


def test_frozen_weights_stay_and_are_named() -> None:
    model, batch, loss = families.make("zoo vit pre-norm")
    names = [n for n, _ in model.named_parameters() if "query" in n]
    parameters = dict(model.named_parameters())
    for name in names:
        parameters[name].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"frozen, left as they are: blocks\.0\.query"):
        pruning = ca.prune(model, loss, batch, sparsity=0.5, samples=8)
    assert not set(names) & set(pruning.weights)
    with pytest.raises(ValueError, match=r"no parameter has one of the roles .*query are frozen"):
        ca.prune(model, loss, batch, sparsity=0.5, roles=["query"])


def test_weights_without_curvature_go_first_and_none_at_all_is_refused(small: object) -> None:
    model, batch = small  # type: ignore[misc]
    dead = copy.deepcopy(model)
    down = next(p for n, p in dead.named_parameters() if n.endswith("down.weight"))
    up_name = next(n for n, _ in dead.named_parameters() if n.endswith("up.weight"))
    with torch.no_grad():
        down[:, :3] = 0  # nothing hears the first three neurons
    pruning = ca.prune(
        dead, "cross_entropy", batch, sparsity=0.05, samples=24, roles=["up"], stages=1
    )
    gone = (~pruning.masks[up_name]).nonzero()[:, 0]
    assert len(gone)
    assert int(gone.max()) < 3
    assert pruning.rise == pytest.approx(0.0, abs=1e-12)
    with torch.no_grad():
        for name, parameter in dead.named_parameters():
            if "head" in name:
                parameter.zero_()
    with pytest.raises(ValueError, match="curvature of every weight that may go is zero"):
        ca.prune(dead, "cross_entropy", batch, sparsity=0.5, samples=8)


def test_not_a_number_is_refused_and_the_model_keeps_its_weights() -> None:
    model, batch, loss = families.make("zoo vit pre-norm")
    name, parameter = next((n, p) for n, p in model.named_parameters() if "up.weight" in n)
    with torch.no_grad():
        parameter[0, 0] = torch.nan
    with pytest.raises(ValueError, match=f"NaN or infinite weights in {name}"):
        ca.prune(model, loss, batch, sparsity=0.5)


def trained() -> tuple[nn.Module, zoo.Samples, zoo.Samples]:
    data = zoo.digits()
    model = zoo.reference_vit(seed=0)
    zoo.train(model, data, steps=300, seed=0)
    return model.eval(), data.train.take(256), data.validation


@pytest.fixture(scope="module")
def digits_model() -> tuple[nn.Module, zoo.Samples, zoo.Samples]:
    return trained()


def held_out_loss(model: nn.Module, pruning: ca.Result, validation: zoo.Samples) -> float:
    copied = copy.deepcopy(model)
    pruning.apply(copied)  # type: ignore[attr-defined]
    return ca.Problem(copied, "cross_entropy", validation).value()


@pytest.fixture(scope="module")
def diagonal(digits_model: tuple[nn.Module, zoo.Samples, zoo.Samples]) -> dict[str, Tensor]:
    """diag H_o of the model, as a first pruning by it finds it."""
    model, sample, _ = digits_model
    return ca.prune(model, "cross_entropy", sample, sparsity=0.5, method="obd").curvature


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [0.5, 0.7, 0.9])
def test_curvature_beats_magnitude_on_held_out_digits(
    digits_model: tuple[nn.Module, zoo.Samples, zoo.Samples],
    diagonal: dict[str, Tensor],
    sparsity: float,
) -> None:
    model, sample, validation = digits_model
    before = [p.detach().clone() for p in model.parameters()]
    losses = {}
    for method in ("magnitude", "obd", "obs"):
        entries = diagonal if method == "obd" else None
        pruning = ca.prune(
            model,
            "cross_entropy",
            sample,
            sparsity=sparsity,
            method=method,
            curvature=entries,
            samples=64,
        )
        assert pruning.sparsity == pytest.approx(sparsity, abs=0.01)
        losses[method] = held_out_loss(model, pruning, validation)
    assert losses["obs"] < losses["magnitude"]
    # At 90 % in one shot all but the surgeon's updates end above chance (log 10): no ranking there.
    assert sparsity > 0.8 or losses["obd"] < losses["magnitude"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
def test_a_pruning_reports_roles_and_survives_saving(
    digits_model: tuple[nn.Module, zoo.Samples, zoo.Samples], tmp_path: object
) -> None:
    model, sample, _ = digits_model
    pruning = ca.prune(model, "cross_entropy", sample, sparsity=0.5, method="obs", samples=64)
    assert set(pruning.role_sparsity) == {"query", "key", "value", "output", "up", "down"}
    removed = sum(int((~mask).sum()) for mask in pruning.masks.values())
    total = sum(mask.numel() for mask in pruning.masks.values())
    assert removed / total == pytest.approx(0.5, abs=0.01)
    for name, mask in pruning.masks.items():
        assert bool((pruning.weights[name][~mask] == 0).all())
    copied = copy.deepcopy(model)
    pruning.apply(copied)
    value = ca.Problem(copied, "cross_entropy", sample).value()
    assert value == pytest.approx(pruning.loss_after, rel=1e-6)
    back = ca.load(pruning.save(tmp_path / "pruning"))  # type: ignore[operator]
    assert str(back) == str(pruning)


@pytest.mark.slow
def test_quantization_error_is_predicted_by_curvature(
    digits_model: tuple[nn.Module, zoo.Samples, zoo.Samples],
) -> None:
    model, sample, _ = digits_model
    double = copy.deepcopy(model).double()
    result = ca.quantization_sensitivity(
        double, "cross_entropy", sample.to(torch.float64), bits=(8, 6)
    )
    assert result.predicted.shape == (6, 2)
    # At eight bits the step is small: the second-order prediction is nearly the truth.
    assert torch.allclose(result.predicted[:, 0], result.measured[:, 0], rtol=0.1, atol=1e-8)
    assert "query" in str(result)


def test_rounding_keeps_the_largest_weight_and_the_sign() -> None:
    weights = torch.tensor([[1.0, -0.5, 0.2], [0.0, 0.0, 0.0]])
    rounded = round_to(weights, 3)
    assert torch.allclose(rounded, torch.tensor([[1.0, -2 / 3, 1 / 3], [0.0, 0.0, 0.0]]))


def test_every_group_has_its_own_scale() -> None:
    weights = torch.tensor([[1.0, -0.5, 0.02, 0.01, 3.0]])
    assert torch.allclose(step_sizes(weights, 4, 2), torch.tensor([[1, 1, 0.02, 0.02, 3.0]]) / 7)
    assert torch.equal(round_to(weights, 4, 5), round_to(weights, 4))
    rounded = round_to(weights, 4, 2)
    assert torch.allclose(rounded[0, [0, 2, 4]], weights[0, [0, 2, 4]])
    assert float((rounded - weights).abs().max()) <= 0.5 / 7 + 1e-7


def test_wrong_requests_are_refused() -> None:
    model, batch, loss = families.make("zoo vit pre-norm")
    with pytest.raises(ValueError, match="sparsity"):
        ca.prune(model, loss, batch, sparsity=1.0)
    with pytest.raises(ValueError, match="method"):
        ca.prune(model, loss, batch, sparsity=0.5, method="guess")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter has one of the roles"):
        ca.prune(model, loss, batch, sparsity=0.5, roles=["nothing"])
    with pytest.raises(ValueError, match="2 bits"):
        ca.quantization_sensitivity(model, loss, batch, bits=(1,))
    for wrong, words in (
        ({"layers": "some"}, "layers is 'curvature' or 'uniform'"),
        ({"stages": 0}, "stages must be at least 1"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"damping": 0.0}, "damping must be a positive number"),
        ({"memory": 1000}, "surgeon needs"),
        ({"sparsity": float("nan")}, "sparsity"),
        ({"sparsity": -0.1}, "sparsity"),
    ):
        with pytest.raises(ValueError, match=words):
            ca.prune(model, loss, batch, **{"sparsity": 0.5, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group is a number of inputs"):
        ca.quantize(model, loss, batch, group=0)
    with pytest.raises(ValueError, match="rounding is 'nearest' or 'curvature'"):
        ca.quantize(model, loss, batch, rounding="up")  # type: ignore[arg-type]
