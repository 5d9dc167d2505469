"""Diagnostics against dense spectra and real training; advice with evidence and not without."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvatlas import zoo
from curvatlas.analysis.conditioning import (
    EffectiveConditioning,
    LayerSharpness,
    heterogeneity,
)
from curvatlas.analysis.diagnostics import (
    GradientNoise,
    Situation,
    is_post_norm,
    recommend,
)
from curvatlas.article import ConvergenceDiagnostics
from curvatlas.operators.curvature import Hessian
from curvatlas.problem import Problem
from huggingface_models import tiny_model

SAMPLES = zoo.digits().train.to(torch.float64)


def tiny(**options: Any) -> nn.Module:
    return zoo.reference_vit(**{"d_model": 4, "patch_size": 4, **options}).double().eval()


def batch(count: int) -> tuple[Tensor, Tensor]:
    return SAMPLES.inputs[:count], SAMPLES.targets[:count]


def layer(name: str, index: int | None, sharpness: float) -> LayerSharpness:
    return LayerSharpness(
        name=name, layer=index, parameters=10, sharpness=sharpness,
        interval=(0.99 * sharpness, 1.01 * sharpness), gradient_norm=1.0,
    )  # fmt: skip


def look(**changes: Any) -> EffectiveConditioning:
    calm = EffectiveConditioning(
        loss=1.0, gradient_norm=1.0, largest=10.0, largest_interval=(9.9, 10.1), smallest=-0.1,
        smallest_interval=(-0.11, -0.09), condition_number=50.0, interval=(45.0, 55.0),
        negative_mass=0.4, negative_mass_interval=(0.35, 0.45), effective_rank=9.0, alignment=0.1,
        learning_rate=0.1, stability=0.5,
        layers=(layer("layer 0", 0, 5.0), layer("layer 1", 1, 6.0), layer("layer 2", 2, 5.5)),
        heterogeneity=1.2, heterogeneity_interval=(1.15, 1.25), products=1, converged=True,
    )  # fmt: skip
    return replace(calm, **changes)


def test_conditioning_is_that_of_the_dense_spectrum() -> None:
    model = tiny()
    found = ConvergenceDiagnostics(model).compute_effective_conditioning(
        *batch(8), learning_rate=0.1
    )
    problem = Problem(model, "cross_entropy", batch(8))
    operator = Hessian(problem)
    dense = operator.dense()
    values = torch.linalg.eigvalsh(dense)
    assert found.largest == pytest.approx(float(values[-1]), rel=1e-3)
    assert found.smallest == pytest.approx(float(values[0]), rel=1e-2)
    want = float(values[-1] / values.abs().mean())
    assert found.interval[0] <= want <= found.interval[1]
    assert found.condition_number == pytest.approx(want, rel=0.15)
    gradient = problem.gradient()
    alignment = float(gradient @ dense @ gradient / (gradient @ gradient) / values[-1])
    assert found.alignment == pytest.approx(alignment, rel=1e-3)
    assert found.stability == pytest.approx(0.05 * float(values[-1]), rel=1e-3)
    first = next(item for item in found.layers if item.layer == 0)
    inside = torch.cat([s.indices for s in problem.anatomy.slices if s.layer == 0])
    block = torch.linalg.eigvalsh(dense[inside][:, inside])[-1]
    assert first.interval[0] <= float(block) * (1 + 1e-9)
    assert float(block) <= first.interval[1] * (1 + 1e-9)
    assert first.gradient_norm == pytest.approx(float(gradient[inside].norm()))


def test_trajectory_trains_a_copy_and_reports_what_happened() -> None:
    model = tiny()
    before = [p.detach().clone() for p in model.parameters()]
    found = ConvergenceDiagnostics(model).analyze_convergence_trajectory(
        batch(24), 12, learning_rate=0.1, looks=3, products=20
    )
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert found.look_steps == (0, 6, 12)
    assert found.losses[0] == pytest.approx(Problem(model, "cross_entropy", batch(24)).value())
    assert 0 < found.loss_reduction < 1
    assert found.loss_decay_rate.value < 0
    assert found.condition_trend is not None
    assert found.noise is not None
    assert not found.diverged
    assert found.plot().axes[1].get_ylabel().startswith("sharpness")
    for item in found.recommendations:
        assert item.value > item.threshold
        assert item.evidence


def test_plain_sgd_is_what_the_trajectory_runs() -> None:
    model = tiny()
    found = ConvergenceDiagnostics(model).analyze_convergence_trajectory(
        batch(10), 5, learning_rate=0.05, momentum=0.9, looks=2, products=12, in_place=True
    )
    other = tiny()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(other(batch(10)[0]), batch(10)[1])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert found.losses.tolist() == pytest.approx(losses, rel=1e-9)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_calm_measurements_give_no_advice() -> None:
    noise = GradientNoise(
        value=30.0, interval=(20.0, 45.0), simple=25.0, simple_interval=(20.0, 30.0), samples=48,
        gradient_norm=1.0, products=1,
    )  # fmt: skip
    assert recommend([look()], gradient_norms=[1.0] * 20, noise=noise, batch_size=32) == ()


@pytest.mark.parametrize(
    ("changes", "topic", "strength"),
    [
        ({"learning_rate": 0.3}, "learning rate", "strong"),
        ({"learning_rate": 0.2005}, "learning rate", "weak"),
        (
            {"heterogeneity": 40.0, "heterogeneity_interval": (38.0, 42.0)},
            "adaptive optimizer",
            "strong",
        ),
        (
            {"heterogeneity": 12.0, "heterogeneity_interval": (8.0, 18.0)},
            "adaptive optimizer",
            "weak",
        ),
        ({"layers": (layer("layer 0", 0, 1.0), layer("layer 1", 1, 9.0))}, "layer-wise rates",
         "strong"),
    ],
)  # fmt: skip
def test_each_measurement_gives_its_own_advice(
    changes: dict[str, Any], topic: str, strength: str
) -> None:
    (found,) = recommend([look(**changes)])
    assert (found.topic, found.strength) == (topic, strength)
    assert re.search(r" ± |\d \[|\(exact\)", found.evidence)  # no number without its error


def test_gradient_spikes_ask_for_clipping_and_noise_for_larger_batches() -> None:
    norms = [1.0 + 0.01 * i for i in range(40)]
    norms[7] = 30.0
    (found,) = recommend([look()], gradient_norms=norms)
    assert found.topic == "clipping"
    noise = GradientNoise(
        value=300.0, interval=(200.0, 450.0), simple=25.0, simple_interval=(20.0, 30.0),
        samples=48, gradient_norm=1.0, products=1,
    )  # fmt: skip
    (larger,) = recommend([look()], noise=noise, batch_size=32)
    assert "larger batch" in larger.action
    (smaller,) = recommend([look()], noise=noise, batch_size=4000)
    assert "smaller batch" in smaller.action


def test_pre_norm_is_only_advised_to_post_norm_stacks_whose_sharpness_grows() -> None:
    growing = look(layers=tuple(layer(f"layer {i}", i, 1.3**i) for i in range(5)))
    post, pre = (
        Problem(tiny(n_layers=2, norm_first=first), "cross_entropy", batch(2))
        for first in (False, True)
    )
    assert [r.topic for r in recommend([growing], problem=post)] == ["pre-norm"]
    assert recommend([growing], problem=pre) == ()
    flat = look(layers=tuple(layer(f"layer {i}", i, 1 + 0.01 * (-1) ** i) for i in range(5)))
    assert recommend([flat], problem=post) == ()


@pytest.mark.parametrize(
    ("family", "behind"),
    [("bert", True), ("bart", True), ("albert", True), ("gpt2", False), ("llama", False),
     ("gptj", False), ("gemma2", False), ("t5", False)],
)  # fmt: skip
def test_the_place_of_the_norms_is_seen_in_the_computation(family: str, behind: bool) -> None:
    tokens = torch.arange(3, 11).reshape(2, 4)
    model = tiny_model(family, decoder_start_token_id=0)
    problem = Problem(model, "cross_entropy", {"input_ids": tokens, "labels": tokens})
    assert is_post_norm(problem) == behind


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_place_of_the_norms_is_seen_in_torchs_own_layers(norm_first: bool) -> None:
    block = nn.TransformerEncoderLayer(4, 2, 6, norm_first=norm_first, batch_first=True)
    stack = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    model = nn.Sequential(stack, nn.Linear(4, 3)).eval()
    problem = Problem(model, "mse", (torch.randn(2, 3, 4), torch.randn(2, 3, 3)))
    assert is_post_norm(problem) == (not norm_first)


def test_sharpness_is_compared_between_parts_of_like_size() -> None:
    small = replace(layer("norm", None, 1e-3), parameters=64)
    large = [replace(layer(f"layer {i}", i, s), parameters=5000) for i, s in enumerate((6.0, 9.0))]
    ratio, (low, high) = heterogeneity([small, *large])
    assert ratio == pytest.approx(1.5)
    assert low <= 1.5 <= high
    assert heterogeneity([small, large[0]]) == (1.0, (1.0, 1.0))
    advice = recommend([look(layers=(small, *large), heterogeneity=ratio)])
    assert "norm" not in " ".join(str(item) for item in advice)


def test_training_beyond_the_edge_is_noticed() -> None:
    model = tiny()
    found = ConvergenceDiagnostics(model).analyze_convergence_trajectory(
        batch(12), 3, learning_rate=20.0, looks=2, products=12
    )
    assert found.stability[0] > 1
    assert "learning rate" in {item.topic for item in found.recommendations}


def test_advice_knows_the_optimizer_and_whether_the_model_is_trained() -> None:
    rough = look(
        heterogeneity=40.0,
        heterogeneity_interval=(38.0, 42.0),
        smallest=-4.0,
        smallest_interval=(-4.1, -3.9),
        learning_rate=0.3,
    )

    def topics(**situation: Any) -> set[str]:
        return {item.topic for item in recommend([rough], situation=Situation(**situation))}

    plain = {"optimizer": "sgd", "learning_rate": 0.3}
    assert topics(**plain, trained=True) == {"learning rate", "adaptive optimizer"}
    assert topics(**plain, trained=False) == {"learning rate", "adaptive optimizer"}
    # λmax of H says nothing about Adam's edge, and nobody who uses it is told to.
    assert topics(optimizer="adamw", learning_rate=0.3, trained=True) == set()


def test_every_advice_says_what_would_change_and_how_to_check_it() -> None:
    rough = look(heterogeneity=40.0, heterogeneity_interval=(38.0, 42.0), learning_rate=0.3)
    for item in recommend([rough]):
        assert item.effect
        assert item.check
        assert f"{item.value:.3g}" in item.uncertainty
    (rate,) = [item for item in recommend([rough]) if item.topic == "learning rate"]
    assert f"{abs(1 - 0.3 * rough.largest):.3g} a step" in rate.effect


def test_momentum_moves_the_edge() -> None:
    now = look(learning_rate=0.3)
    calm = Situation(optimizer="sgd", learning_rate=0.3, momentum=0.9)
    assert [item.topic for item in recommend([now])] == ["learning rate"]
    assert 0.3 * now.largest < 2 * 1.9
    assert recommend([now], situation=calm) == ()


def test_whether_a_classifier_is_trained_is_read_from_its_loss() -> None:
    problem = Problem(tiny(), "cross_entropy", batch(10))
    blind = math.log(batch_classes(problem))
    for loss, trained in ((0.95 * blind, False), (0.5 * blind, True)):
        found = Situation().at(problem, loss)
        assert found.trained is trained
        assert "blind guessing" in found.because


def batch_classes(problem: Problem) -> int:
    (one,) = problem.batches()
    return int(problem.model(one.inputs).shape[-1])


def test_an_unknown_optimizer_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"optimizer is one of sgd.* got 'adamz'"):
        Situation(optimizer="adamz").checked()
