"""The monitor: true numbers, no effect on training, events, trackers, callbacks."""

from __future__ import annotations

import importlib
import json
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import results, zoo
from curvatlas.errors import NonFiniteError
from curvatlas.training import (
    LinesTracker,
    TensorBoardTracker,
    WandbTracker,
    monitor as monitor_module,
)
from curvatlas.training.snapshot import Snapshot, Tracker


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.LayerNorm(6), nn.Linear(6, 3)
    ).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(32, 4, dtype=torch.float64, generator=generator),
        torch.randint(0, 3, (32,), generator=generator),
    )


def train(model: nn.Module, steps: int, monitor: ca.Monitor | None, optimizer: Any) -> list[Tensor]:
    x, y = batch()
    for _ in range(steps):
        chosen = torch.randint(0, 32, (8,))  # drawn from the global generator, as loaders do
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        if monitor is not None:
            monitor.step()
    return [p.detach().clone() for p in model.parameters()]


def run(with_monitor: bool) -> tuple[list[Tensor], ca.Monitor | None]:
    model = network().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = None
    if with_monitor:
        monitor = ca.Monitor(
            model, "cross_entropy", batch(), every=3, budget=1.0, optimizer=optimizer
        )
    torch.manual_seed(5)
    return train(model, 10, monitor, optimizer), monitor


def test_training_is_the_same_bit_for_bit_with_and_without_the_monitor() -> None:
    without, _ = run(False)
    with_it, monitor = run(True)
    assert monitor is not None
    assert [s.step for s in monitor.snapshots] == [0, 3, 6, 9]
    assert all(torch.equal(a, b) for a, b in zip(without, with_it, strict=True))


def test_a_snapshot_holds_the_true_curvature() -> None:
    model = network().train()
    monitor = ca.Monitor(model, "cross_entropy", batch(), budget=1.0, probes=32, tol=1e-6)
    snapshot = monitor.measure(learning_rate=0.1)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    problem = ca.Problem(model, "cross_entropy", batch())
    dense = ca.Hessian(problem).dense()
    values, vectors = torch.linalg.eigh(dense)
    gradient = problem.gradient()
    assert snapshot.sharpness == pytest.approx(float(values[-1]), rel=1e-5)
    assert snapshot.most_negative == pytest.approx(float(values[0]), rel=1e-5)
    assert snapshot.stability == pytest.approx(0.1 * float(values[-1]), rel=1e-5)
    low, high = snapshot.trace_interval
    assert low - 0.5 * (high - low) <= float(dense.trace()) <= high + 0.5 * (high - low)
    top = vectors[:, -2:]
    want = float((top.T @ gradient).square().sum() / gradient.square().sum())
    assert snapshot.gradient_alignment == pytest.approx(want, rel=1e-4)
    assert snapshot.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-12)
    total = sum(norm**2 for norm in snapshot.role_gradient.values())
    assert total == pytest.approx(float(gradient.square().sum()), rel=1e-12)
    assert sum(snapshot.role_trace.values()) == pytest.approx(snapshot.trace, rel=1e-9)
    assert snapshot.negative_mass == pytest.approx(float((values < 0).double().mean()), abs=0.2)


def test_every_role_gets_its_sharpness_in_turn() -> None:
    model = network().eval()
    monitor = ca.Monitor(model, "cross_entropy", batch(), budget=1.0, tol=1e-6)
    problem = ca.Problem(model, "cross_entropy", batch())
    roles = {piece.role for piece in problem.anatomy.slices}
    for step in range(len(roles)):
        snapshot = monitor.measure(step=step)
    assert set(snapshot.role_sharpness) == roles
    dense = ca.Hessian(problem).dense()
    for role in roles:
        places = torch.cat([s.indices for s in problem.anatomy.slices if s.role == role])
        want = float(torch.linalg.eigvalsh(dense[places][:, places])[-1])
        assert snapshot.role_sharpness[role] == pytest.approx(want, rel=1e-3, abs=1e-9), role


def test_standing_weights_do_not_drift_and_turned_ones_do() -> None:
    model = network().eval()
    monitor = ca.Monitor(model, "cross_entropy", batch(), budget=1.0, tol=1e-6)
    assert monitor.measure(step=0).drift is None
    still = monitor.measure(step=1).drift
    assert still is not None
    assert still < 1e-6
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    moved = monitor.measure(step=2).drift
    assert moved is not None
    assert 0.01 < moved <= 1


def test_measurements_wait_until_the_budget_allows_them(monkeypatch: Any) -> None:
    clock = [0.0]
    monkeypatch.setattr(monitor_module.time, "perf_counter", lambda: clock[0])
    monitor = ca.Monitor(network().eval(), "cross_entropy", batch(), every=1, budget=0.1)
    taken = []
    real = monitor._measuring.measure

    def slow(step: int, rate: float | None) -> Snapshot:
        clock[0] += 5.0
        taken.append(step)
        return real(step, rate)

    monkeypatch.setattr(monitor._measuring, "measure", slow)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(120):
            clock[0] += 1.0
            monitor.step()
    (once,) = (str(warning.message) for warning in told)  # not 118 times
    assert "skips its measurement at step 1" in once
    assert "budget=1 takes every one" in once
    assert "118 skipped to stay within the budget" in str(monitor.history)
    # After the first, one measurement of 5 s for every 50 s of wall time, paid for beforehand.
    assert len(taken) == 2
    assert monitor.skipped == 118
    assert monitor.overhead <= 0.1


@pytest.mark.parametrize(
    ("step_seconds", "cost", "expected"),
    [
        (0.01, 1.0, [0, 50, 100, 150, 200, 250]),  # a short run is measured whole
        (0.1, 9.0, [0, 50, 100, 200]),  # beyond the first 30 s
        (1.0, 40.0, [0, 50, 100, 200]),  # dear: as the steps double
        (1.0, 300.0, [0, 150]),  # dearer than the training: after half of what it costs
        (10.0, 15.0, [0, 50, 100, 150, 200, 250]),  # cheap beside the training
    ],
)
def test_a_run_of_300_steps_has_a_history_by_default(
    step_seconds: float, cost: float, expected: list[int], monkeypatch: Any
) -> None:
    clock = [0.0]
    monkeypatch.setattr(monitor_module.time, "perf_counter", lambda: clock[0])
    monitor = ca.Monitor(network().eval(), "cross_entropy", batch())
    one = monitor.measure(step=0)
    monitor.snapshots.clear()
    monitor.looks.clear()
    monitor._costs.clear()

    def measured(step: int, rate: float | None) -> Snapshot:
        clock[0] += cost
        return replace(one, step=step)

    monkeypatch.setattr(monitor._measuring, "measure", measured)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(300):
            clock[0] += step_seconds
            monitor.step()
    assert monitor.history.series("step") == expected
    assert len(told) == (len(expected) < 6)
    assert monitor.skipped == 6 - len(expected)
    # never more than two thirds of the time, beyond the first one and the seconds of a short run
    assert monitor.spent <= cost + 30.0 + 2 / 3 * clock[0]


def test_a_line_of_the_history_shows_every_estimate_with_its_error() -> None:
    monitor = ca.Monitor(network().eval(), "cross_entropy", batch(), budget=1.0)
    snapshot = replace(
        monitor.measure(step=3, learning_rate=0.1),
        trace=483.5, trace_interval=(11.6, 955.4), sharpness=10.0, sharpness_interval=(9.9, 10.1),
        most_negative=-2.0, most_negative_interval=(-2.01, -1.99), edge=10.0,
        edge_interval=(9.9, 10.1), edge_threshold=20.0,
    )  # fmt: skip
    assert "λmax 10.00 ± 0.1, λmin -2.000 ± 0.01, tr H 480 ± 470" in str(snapshot)
    assert "λmax(P⁻¹H) 10.00 ± 0.1, 0.5000 ± 0.005 of the edge" in str(snapshot)
    low, high = monitor.snapshots[0].most_negative_interval or (0.0, 0.0)
    problem = ca.Problem(monitor._measuring.problem.model, "cross_entropy", batch())
    bottom = float(torch.linalg.eigvalsh(ca.Hessian(problem).dense())[0])
    assert low - 1e-5 <= bottom <= high + 1e-5


def test_measurements_that_fail_are_paid_for(monkeypatch: Any) -> None:
    clock = [0.0]
    monkeypatch.setattr(monitor_module.time, "perf_counter", lambda: clock[0])
    monitor = ca.Monitor(network().eval(), "cross_entropy", batch(), every=1, budget=0.1)

    def failing(step: int, rate: float | None) -> Snapshot:
        clock[0] += 5.0
        raise NonFiniteError("the loss is nan")

    monkeypatch.setattr(monitor._measuring, "measure", failing)
    for _ in range(60):
        clock[0] += 1.0
        monitor.step()
    assert [event.name for event in monitor.events] == ["not_finite"]
    assert monitor.overhead <= 0.1


def test_the_monitor_watches_the_rate_at_every_step() -> None:
    model = network().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = ca.Monitor(
        model, "cross_entropy", batch(), every=100, budget=1.0, optimizer=optimizer
    )
    monitor.step(step=100)
    optimizer.param_groups[0]["lr"] = 100.0
    monitor.step(step=101)
    monitor.step(step=102)
    assert [(e.step, e.name) for e in monitor.events] == [(101, "spike_ahead")]


def test_a_bad_batch_is_told_at_its_own_step() -> None:
    monitor = ca.Monitor(network().eval(), "cross_entropy", batch(), every=1000, budget=1.0)
    for step in range(40):
        monitor.step(loss=torch.tensor(1.0 + 0.1 * (step % 3), requires_grad=True))
    monitor.step(loss=5.0)
    monitor.step(loss=float("nan"))
    monitor.step(loss=float("nan"))
    assert [(e.step, e.name) for e in monitor.events] == [(40, "bad_batch"), (41, "not_finite")]
    assert monitor.events[0].evidence["usual"] == pytest.approx(1.1)


def test_a_batch_is_not_blamed_for_a_rate_that_returns() -> None:
    monitor = ca.Monitor(network().eval(), "cross_entropy", batch(), every=1000, budget=1.0)
    for rate, losses in ((0.1, [1.0, 1.1] * 15), (0.01, [1.0] * 5), (0.1, [1.0, 5.0, 1.0])):
        for loss in losses:
            monitor.step(learning_rate=rate, loss=loss)
    assert monitor.events == []
    monitor.step(learning_rate=0.1, loss=float("nan"))
    assert [(e.step, e.name) for e in monitor.events] == [(38, "not_finite")]


def test_a_key_bias_is_below_the_rounding_of_a_real_run() -> None:
    model = zoo.reference_vit(d_model=4, d_ff=4)
    data = tuple(zoo.digits().train.take(16))
    snapshot = ca.Monitor(model, "cross_entropy", data, budget=1.0).measure()
    share = snapshot.role_gradient["key_bias"] / snapshot.gradient_norm
    assert share < snapshot.rounding < snapshot.role_gradient["query"] / snapshot.gradient_norm


def test_a_model_that_changed_needs_a_new_monitor() -> None:
    model = network().eval()
    monitor = ca.Monitor(model, "cross_entropy", batch(), every=1, budget=1.0)
    model[0] = nn.Linear(model[0].in_features, model[0].out_features + 1, dtype=torch.float64)
    assert monitor.step() is None
    (event,) = monitor.events
    assert event.name == "not_measured"
    assert event.message.endswith("make a new Monitor.")


def test_a_measurement_that_fails_is_an_event_and_training_goes_on(monkeypatch: Any) -> None:
    monitor = ca.Monitor(network().eval(), "cross_entropy", batch(), every=1, budget=1.0)

    def changed(step: int, rate: float | None) -> Snapshot:
        raise RuntimeError("the model was changed:\n mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(monitor._measuring, "measure", changed)
    assert monitor.step() is None
    (event,) = monitor.events
    assert event.name == "not_measured"
    assert not event.alarm
    assert "\n" not in event.message


def test_a_tracker_that_fails_is_an_event_and_the_others_go_on(tmp_path: Path) -> None:
    class Broken(Tracker):
        def write(self, snapshot: Snapshot, events: Any) -> None:
            raise OSError("no space left")

        def close(self) -> None:
            raise OSError("the server is gone")

    lines = LinesTracker(tmp_path / "lines.jsonl")
    monitor = ca.Monitor(
        network().eval(), "cross_entropy", batch(), budget=1.0, trackers=[Broken(), lines]
    )
    assert monitor.step() is not None
    assert [event.name for event in monitor.events] == ["tracker_failed"]
    assert "no space left" in monitor.events[0].message
    assert len(lines.path.read_text().splitlines()) == 1
    monitor.close()
    assert "the server is gone" in monitor.events[1].message


def test_the_loss_is_looked_at_between_measurements(monkeypatch: Any) -> None:
    clock = [0.0]
    monkeypatch.setattr(monitor_module.time, "perf_counter", lambda: clock[0])
    monitor = ca.Monitor(network().eval(), "cross_entropy", batch(), every=1, budget=0.1)
    real = monitor._measuring.measure

    def slow(step: int, rate: float | None) -> Snapshot:
        clock[0] += 5.0
        return real(step, rate)

    monkeypatch.setattr(monitor._measuring, "measure", slow)
    for _ in range(90):
        clock[0] += 1.0
        monitor.step()
    assert len(monitor.snapshots) < len(monitor.looks)
    assert all(loss == pytest.approx(monitor.snapshots[0].loss) for _, loss in monitor.looks)


def test_a_diverged_run_is_an_event_and_not_an_exception() -> None:
    model = network().eval()
    monitor = ca.Monitor(model, "cross_entropy", batch(), every=1, budget=1.0)
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    assert monitor.step() is None
    assert monitor.events[0].name == "not_finite"
    assert "0.weight" in monitor.events[0].message


def test_a_measurement_leaves_accumulated_gradients_alone() -> None:
    model = network().eval()
    monitor = ca.Monitor(model, "cross_entropy", batch(), budget=1.0)
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    monitor.measure()
    F.cross_entropy(model(x), y).backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), kept, strict=True))


def test_layers_frozen_and_thawed_while_training_stay_in_the_picture() -> None:
    model = network()
    monitor = ca.Monitor(model, "cross_entropy", batch(), budget=1.0)
    before = monitor.measure(step=0)
    first = next(model.parameters())
    first.requires_grad_(False)
    frozen = monitor.measure(step=1)
    assert not first.requires_grad
    first.requires_grad_(True)
    thawed = monitor.measure(step=2)
    for snapshot in (frozen, thawed):
        assert snapshot.sharpness == pytest.approx(before.sharpness, rel=1e-2)
        assert snapshot.role_gradient == pytest.approx(before.role_gradient)


def test_a_parameter_without_a_gradient_has_no_curvature() -> None:
    torch.manual_seed(0)

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.idle = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.net(x)
            return found

    plain = ca.Monitor(network(), "cross_entropy", batch(), budget=1.0).measure()
    with pytest.warns(UserWarning, match="no gradient path from the loss to idle.bias"):
        snapshot = ca.Monitor(Idle(), "cross_entropy", batch(), budget=1.0).measure()
    assert snapshot.sharpness == pytest.approx(plain.sharpness, rel=1e-2)
    assert snapshot.gradient_norm == pytest.approx(plain.gradient_norm)


def test_a_loss_that_turns_bad_mid_training_is_an_event_and_measuring_goes_on_after() -> None:
    model = network()
    monitor = ca.Monitor(model, "cross_entropy", batch(), every=1, budget=1.0)
    first = next(model.parameters())
    kept = first.detach().clone()
    monitor.step()
    for _ in range(2):
        with torch.no_grad():
            first.fill_(math.nan)
        monitor.step()
        monitor.step()  # the same again is not said again
        with torch.no_grad():
            first.copy_(kept)  # as after going back to a checkpoint
        monitor.step()
    assert [(event.step, event.name) for event in monitor.events] == [
        (1, "not_finite"),
        (4, "not_finite"),
    ]
    assert [s.step for s in monitor.snapshots] == [0, 3, 6]
    assert monitor.snapshots[1].sharpness == pytest.approx(monitor.snapshots[0].sharpness, rel=1e-2)


def test_the_rate_is_the_largest_of_groups_that_come_and_change() -> None:
    model = network()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[:2], lr=0.1)
    monitor = ca.Monitor(model, "cross_entropy", batch(), budget=1.0, optimizer=optimizer)
    assert monitor.measure(step=0).learning_rate == 0.1
    optimizer.add_param_group({"params": parameters[2:], "lr": 0.3})
    assert monitor.measure(step=1).learning_rate == 0.3
    optimizer.param_groups[1]["lr"] = 0.01
    assert monitor.measure(step=2).learning_rate == 0.1


@pytest.mark.parametrize("missing", ["transformers", "lightning", "tensorboard", "wandb"])
def test_optional_packages_are_asked_for_only_when_used(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(name: str, package: str | None = None) -> Any:
        if missing in name:
            raise ImportError(f"no module named {name}")
        return real(name, package)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", absent)
    monkeypatch.setitem(sys.modules, missing, None)
    monitor = ca.Monitor(network(), "cross_entropy", batch(), budget=1.0)
    if missing == "wandb":
        WandbTracker(object())  # the run is the user's: nothing is imported here
        return
    asked = {
        "transformers": monitor.trainer_callback,
        "lightning": monitor.lightning_callback,
        "tensorboard": lambda: TensorBoardTracker(tmp_path),
    }[missing]
    with pytest.raises(ImportError, match="pip install"):
        asked()


def test_history_saves_loads_prints_and_plots(tmp_path: Path) -> None:
    _, monitor = run(True)
    assert monitor is not None
    history = monitor.history
    back = ca.load(history.save(tmp_path / "history"))
    assert results.same(back, history)
    assert back.series("sharpness") == history.series("sharpness")  # type: ignore[attr-defined]
    assert "overhead" in str(history)
    figure = history.plot()
    drawn = [axes.get_ylabel() for axes in figure.axes]
    assert drawn == ["loss", "own edge", "eigenvalues of H", "tr H (95 %)"]


def test_trackers_get_every_snapshot(tmp_path: Path) -> None:
    class FakeRun:
        def __init__(self) -> None:
            self.logged: list[tuple[int, dict[str, float]]] = []

        def log(self, values: dict[str, float], step: int) -> None:
            self.logged.append((step, values))

    fake = FakeRun()
    pytest.importorskip("tensorboard")
    monitor = ca.Monitor(
        network().eval(),
        "cross_entropy",
        batch(),
        every=1,
        budget=1.0,
        trackers=[
            LinesTracker(tmp_path / "lines.jsonl"),
            WandbTracker(fake),
            TensorBoardTracker(tmp_path / "board"),
        ],
    )
    with monitor:
        monitor.step(learning_rate=0.1)
        monitor.step(learning_rate=0.1)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[0]["sharpness"] == monitor.snapshots[0].sharpness
    assert [step for step, _ in fake.logged] == [0, 1]
    assert fake.logged[1][1]["curvature/stability"] == monitor.snapshots[1].stability
    assert list((tmp_path / "board").iterdir())


@pytest.mark.huggingface
@pytest.mark.slow
def test_the_trainer_callback_rides_along_without_changing_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    tokens = torch.randint(0, 17, (8, 6), generator=torch.Generator().manual_seed(0))
    dataset = [{"input_ids": row, "labels": row} for row in tokens]

    def trained(watch: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=17, n_positions=8)
        )
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, seed=3,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
        monitor = None
        if watch:
            monitor = ca.Monitor(
                model,
                "cross_entropy",
                {"input_ids": tokens, "labels": tokens},
                every=2,
                budget=1.0,
                eigenvalues=1,
                density_products=4,
                max_products=10,
            )
            trainer.add_callback(monitor.trainer_callback())
        trainer.train()
        return [p.detach().clone() for p in model.parameters()], monitor

    plain, _ = trained(False)
    watched, monitor = trained(True)
    assert [s.step for s in monitor.snapshots] == [2, 4]
    assert all(s.learning_rate is not None for s in monitor.snapshots)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.slow
def test_the_lightning_callback_rides_along_without_changing_the_weights(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, data: Any, index: int) -> Tensor:
            loss = F.cross_entropy(self.net(data[0]), data[1])
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x, y = batch()
    losses: list[float] = []
    dataset = torch.utils.data.TensorDataset(x, y)

    def trained(watch: bool, accumulate: int = 1) -> tuple[list[Tensor], ca.Monitor]:
        module = Module()
        monitor = ca.Monitor(module.net, "cross_entropy", batch(), every=2, budget=1.0)
        torch.manual_seed(1)
        trainer = lightning.Trainer(
            max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False,
            accumulate_grad_batches=accumulate,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
            callbacks=[monitor.lightning_callback()] if watch else [],
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(dataset, batch_size=8))
        return [p.detach().clone() for p in module.parameters()], monitor

    plain, _ = trained(False)
    watched, monitor = trained(True)
    assert [s.step for s in monitor.snapshots] == [2, 4]
    assert monitor.snapshots[0].learning_rate == pytest.approx(0.1)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    # Batches that only accumulate gradients are no steps: each step is measured once.
    plain, _ = trained(False, accumulate=2)
    watched, monitor = trained(True, accumulate=2)
    assert [s.step for s in monitor.snapshots] == [2, 4]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    # A step's loss is the mean of those of its two batches.
    expected = torch.tensor(losses[-8:], dtype=torch.float64).view(4, 2).mean(1)
    assert [loss for _, loss in monitor._training] == pytest.approx(expected.tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every": 0}, "every"), ({"budget": 0.0}, "share of the wall time"), ({"probes": 1}, "2")],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ca.Monitor(network(), "cross_entropy", batch(), **options)
