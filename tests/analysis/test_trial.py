"""No direction is recommended before it was walked, on the data at hand and on held-out data."""

from __future__ import annotations

import html
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.analysis.conditioning import conditioning_and_ends
from curvatlas.analysis.diagnostics import (
    Advice,
    Situation,
    advise,
    recommend,
)
from curvatlas.analysis.trial import Trial, along_the_gradient
from curvatlas.article import ConvergenceDiagnostics
from curvatlas.operators.curvature import Hessian
from curvatlas.problem import Problem

TRAINED = Situation(optimizer="sgd", trained=True)


def product_net(first: float, second: float) -> nn.Module:
    """y = a b x: a saddle at a = b = 0, where H = −2E[x y] of two opposite signs."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        for layer, weight in zip(model, (first, second), strict=True):
            layer.weight.fill_(weight)
    return model.eval()


def line(sign: float = 1.0, count: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1.0, 1.0, count, dtype=torch.float64).unsqueeze(-1)
    return x, sign * x


def advice(model: nn.Module, data: Any, held_out: Any, **options: Any) -> Any:
    problem = Problem(model, "mse", data)
    conditioning, ends = conditioning_and_ends(
        problem, learning_rate=None, products=10, layers=False, seed=0
    )
    other = None if held_out is None else problem.with_data(held_out)
    return advise(
        [conditioning], problem, ends, held_out=other, **{"situation": TRAINED, **options}
    )


def test_a_saddle_is_left_where_steps_on_both_data_have_lowered_the_loss() -> None:
    data = line()
    recommendations, ruled_out = advice(product_net(0.0, 0.0), data, line(count=30))
    (found,) = [item for item in recommendations if item.topic == "negative curvature"]
    assert ruled_out == ()
    trial = found.trial
    assert trial.confirmed
    assert "a saddle" in found.evidence
    assert len(trial.confirmed_at) >= 2
    # what is told is what a step does: the loss of a net moved by hand along (1, 1)/√2
    power = float(data[0].square().mean())
    for length, predicted, measured in zip(
        trial.lengths, trial.predicted, trial.measured, strict=True
    ):
        assert predicted == pytest.approx(-power * length**2, rel=1e-6, abs=1e-15)
        assert measured == pytest.approx(power * ((1 - length**2 / 2) ** 2 - 1), abs=1e-12)
        assert f"{predicted:+.2g}" in found.effect
        assert f"{measured:+.2g}" in found.effect


@pytest.mark.parametrize(
    ("model", "held_out", "why"),
    [
        # H has the eigenvalues 1 ± √5 times E x², and the slope is as large as they are
        (product_net(1.0, 0.0), line(), "steepest descent of the same length lowered the loss"),
        (product_net(0.0, 0.0), None, "not tried on held-out data, as none were given"),
        (product_net(0.0, 0.0), line(-1.0), "on held-out data no such fall was seen"),
    ],
    ids=["a slope", "nothing held out", "held-out data that rise"],
)
def test_what_is_not_confirmed_is_not_advised_and_what_was_tried_is_said(
    model: nn.Module, held_out: Any, why: str
) -> None:
    recommendations, (trial,) = advice(model, line(), held_out)
    assert "negative curvature" not in {item.topic for item in recommendations}
    assert trial.verdict.startswith(why)
    assert "predicted" in str(trial)
    assert ("held-out data" in trial.steps) == (held_out is not None)
    assert ("a saddle" in trial.place) == (model[0].weight.item() < 0.5)


def test_no_advice_rests_on_a_prediction_alone() -> None:
    problem = Problem(product_net(0.0, 0.0), "mse", line())
    conditioning, _ = conditioning_and_ends(
        problem, learning_rate=0.01, products=10, layers=False, seed=0
    )
    assert conditioning.indefiniteness > 0.5
    said = recommend([conditioning], situation=TRAINED)
    assert not {"negative curvature"} & {item.topic for item in said}
    calm = replace(conditioning, smallest=-1e-9, largest=1.0, largest_interval=(0.99, 1.01))
    low = Situation(optimizer="sgd", learning_rate=1e-3, trained=True)
    assert recommend([calm], situation=low) == ()  # "up to 0.5": not before a step was taken


@pytest.mark.parametrize(("noise", "confirmed"), [(0.0, True), (40.0, False)])
def test_a_higher_rate_is_advised_where_one_step_of_it_goes_further(
    noise: float, confirmed: bool
) -> None:
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(0.0)
    data = line()
    generator = torch.Generator().manual_seed(0)
    scatter = torch.randn(data[1].shape, generator=generator, dtype=torch.float64)
    problem = Problem(model, "mse", data)
    held_out = problem.with_data((data[0], data[1] + noise * scatter))
    gradient = problem.gradient()
    curvature = float(gradient @ (Hessian(problem) @ gradient) / (gradient @ gradient))
    trial = along_the_gradient(
        problem, gradient, curvature=curvature, rate=0.01, rates=[0.1, 0.5], held_out=held_out
    )
    assert trial is not None
    assert trial.predicted == pytest.approx(trial.measured, rel=1e-9)  # the loss is quadratic
    assert trial.confirmed == confirmed


def test_rounding_confirms_nothing() -> None:
    """Changes below what the loss is rounded to are no fall."""
    steps = {"lengths": (1.0, 2.0), "predicted": (-1e-9, -2e-9), "measured": (-1e-9, -2e-9)}
    held: dict[str, Any] = {
        "held_out": (-1e-9, -2e-9),
        "held_out_intervals": ((-2e-9, -1e-10), (-3e-9, -1e-9)),
        "instead_held_out": (0.0, 0.0),
    }
    trial = Trial(
        direction="a direction", **steps, rounding=1e-12, instead="none",
        instead_measured=(0.0, 0.0), **held,
    )  # fmt: skip
    assert trial.confirmed
    assert not replace(trial, rounding=1e-6).confirmed


@pytest.mark.parametrize("steps", [0, 20], ids=["as drawn", "badly trained"])
def test_nothing_is_told_of_a_gpt_that_a_step_does_not_show(steps: int) -> None:
    """Once predicted: −0.92 of a step that lowered the loss by 0.0002."""
    model = zoo.reference_gpt(seed=0, d_model=8, n_layers=1, n_heads=2)
    data = zoo.text(context=16)
    if steps:
        zoo.train(model, data, steps=steps, lr=1.0, batch_size=16)
    model = model.double().eval()
    some, others = data.train.take(24).batch, data.validation.take(24).batch
    problem = Problem(model, "cross_entropy", some)
    held_out = problem.with_data(others)
    conditioning, ends = conditioning_and_ends(
        problem, learning_rate=None, products=10, layers=False, seed=0
    )
    recommendations, ruled_out = advise(
        [conditioning], problem, ends, held_out=held_out, situation=TRAINED
    )
    assert steps or conditioning.indefiniteness > 0.1  # there is something to try
    advised = [item.trial for item in recommendations if item.topic == "negative curvature"]
    assert len(advised) + len(ruled_out) == (conditioning.indefiniteness > 0.1)
    for trial in advised:  # each confirmed step, taken again by hand on data it was not made on
        assert trial is not None
        vector = ends.vectors[:, -1] * (-1.0 if problem.gradient() @ ends.vectors[:, -1] > 0 else 1)
        for length in trial.confirmed_at:
            before = held_out.value()
            with torch.no_grad():
                pieces = problem.layout.shaped(length * vector)
                named = dict(model.named_parameters())
                for name, piece in zip(problem.layout.names, pieces, strict=True):
                    named[name].add_(piece)
                after = held_out.value()
                for name, piece in zip(problem.layout.names, pieces, strict=True):
                    named[name].sub_(piece)
            assert after < before


def test_a_trajectory_tries_its_advice_too() -> None:
    found = ConvergenceDiagnostics(
        product_net(0.0, 0.0), loss="mse"
    ).analyze_convergence_trajectory(
        line(), 2, learning_rate=1e-3, looks=2, products=10, held_out=line(count=30)
    )
    assert "negative curvature" in {item.topic for item in found.recommendations}
    alone = ConvergenceDiagnostics(
        product_net(0.0, 0.0), loss="mse"
    ).analyze_convergence_trajectory(line(), 2, learning_rate=1e-3, looks=2, products=10)
    assert "negative curvature" not in {item.topic for item in alone.recommendations}
    assert "not advised, the most negative eigenvector" in str(alone)


@pytest.mark.parametrize("held_out", [line(count=30), None], ids=["held out", "none"])
def test_a_survey_and_its_page_tell_what_was_tried(held_out: Any, tmp_path: Path) -> None:
    problem = Problem(product_net(0.0, 0.0), "mse", line())
    run = ca.survey(
        problem, output=tmp_path, stage="trained", held_out=held_out, eigenvalues=1,
        skip=["trace", "map", "propagation"],
    )  # fmt: skip
    advice = run.result("trained.advice", Advice)
    page = html.unescape(run.report.read_text("utf-8"))
    (trial,) = advice.ruled_out or [item.trial for item in advice.recommendations]
    assert trial is not None
    assert trial.confirmed == (held_out is not None)
    assert trial.verdict in page
    told = str(trial)
    assert told[told.index("‖step‖") :] in page  # what was predicted and measured, with its errors
    assert (f"{trial.direction}: {trial.verdict}" in page) == (held_out is None)  # as ruled out
    fell = "Tried: the loss fell as predicted, on held-out data too, there by up to "
    assert (fell in page) == (held_out is not None)
    assert "; a saddle: negative curvature lowers the loss further" in page
    assert f"{'→ follow' if held_out else 'not advised, the most'}" in str(advice)
