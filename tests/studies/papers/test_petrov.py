"""The second paper's figures: made of small models, and verdicts that follow what is measured."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas import zoo
from curvatlas.analysis.atlas.entries import Entries
from curvatlas.studies.papers import (
    petrov_components,
    petrov_hessians as hessians,
    petrov_landscape as landscape,
    petrov_models as models,
)
from curvatlas.studies.papers.exhibits import Ask, all_exhibits
from curvatlas.studies.papers.petrov_hessians import Looks

FIGURES = [f"petrov-fig{k}" for k in range(1, 13)]


@pytest.fixture(scope="module")
def problem() -> ca.Problem:
    model = zoo.reference_vit(seed=1, d_model=4, d_ff=8)
    return ca.Problem(model, "cross_entropy", zoo.digits().train.take(256).batches(32))


def test_every_figure_and_table_of_the_second_paper_that_shows_numbers_has_an_id() -> None:
    assert {*FIGURES, "petrov-table1", "petrov-thesis"} <= set(all_exhibits())


# --- data -----------------------------------------------------------------------------------------


def write_idx(folder: Path, side: int) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", 12), ("t10k", 6)):
        images = np.arange(count * side * side, dtype=np.uint8).reshape(count, side, side)
        head = struct.pack(">HBB3I", 0, 8, 3, count, side, side)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = bytes(range(count % 10 + 1)) * 12
        head = struct.pack(">HBBI", 0, 8, 1, count)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(head + labels[:count])


def test_a_folder_with_the_papers_data_or_a_folder_of_it_is_read(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", 28)
    for folder in (tmp_path, tmp_path / "mnist"):
        setting = models.setting_of(Ask(data=folder), "mnist")
        assert setting.real
        assert setting.data.train.inputs.shape == (12, 28, 28)
        assert "12 images of mnist" in setting.told.lower()
    assert "stand in for MNIST" in models.setting_of(Ask(), "mnist").told
    assert "stand in for CIFAR-10" in models.setting_of(Ask(), "cifar").told


def test_a_folder_without_the_expected_files_is_refused_in_one_line(tmp_path: Path) -> None:
    empty, small = tmp_path / "empty", tmp_path / "small"
    empty.mkdir()
    write_idx(small, 8)
    for folder, words in (
        (empty, "has no MNIST: expected MNIST's train-images-idx3-ubyte"),
        (small, "has images of 8 × 8, this needs 28 × 28"),
        (tmp_path / "absent", "is no folder"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
            ca.paper("petrov-fig3", data=folder)
        assert "\n" not in str(caught.value)


# --- Table 1 and the heat maps --------------------------------------------------------------------


def test_a_model_of_another_size_is_not_table_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ca.paper("petrov-table1").verdict == "confirmed"
    wider = lambda table, seed: zoo.petrov_vit(table, seed=seed, d_model=32)  # noqa: E731
    monkeypatch.setattr(models, "petrov_vit", wider)
    assert ca.paper("petrov-table1").verdict == "refuted"


NAMES = (
    "embedding.patch", "blocks.0.query", "blocks.0.key", "blocks.0.value", "blocks.0.output",
    "blocks.0.norm1.gamma", "blocks.0.norm1.beta", "blocks.0.up", "blocks.0.down",
    "blocks.0.norm2.gamma", "blocks.0.norm2.beta", "head.weight",
)  # fmt: skip


def entries_at(levels: dict[str, float], seed: int) -> Entries:
    """Blocks of 6 × 6 entries whose mean log10 is the level of the block, ± 0.1."""
    generator = torch.Generator().manual_seed(seed)
    logs = torch.tensor([levels.get(name, -3.0) for name in NAMES], dtype=torch.float64)
    each = (logs[:, None] + logs) / 2
    noise = 0.1 * torch.randn(len(NAMES) * 6, len(NAMES) * 6, generator=generator)
    matrix = 10 ** (each.repeat_interleave(6, 0).repeat_interleave(6, 1) + noise.double())
    sizes = (6,) * len(NAMES)
    return Entries(matrix=matrix, part="total", names=NAMES, sizes=sizes, whole=sizes)


START = {
    "embedding.patch": -3.2, "blocks.0.query": -4.8, "blocks.0.key": -4.6, "blocks.0.value": -3.6,
    "blocks.0.norm1.gamma": -2.7, "blocks.0.norm1.beta": -2.7, "blocks.0.norm2.gamma": -2.7,
    "blocks.0.norm2.beta": -2.7, "head.weight": -2.5,
}  # fmt: skip
GROWN = {
    "embedding.patch": 0.5, "blocks.0.query": -1.4, "blocks.0.key": -0.9, "blocks.0.value": 0.2,
    "blocks.0.norm1.gamma": 0.2, "blocks.0.norm1.beta": 0.2, "blocks.0.norm2.gamma": -2.6,
    "blocks.0.norm2.beta": -2.6, "head.weight": -2.9,
}  # fmt: skip


def drawn(
    start: dict[str, float], end: dict[str, float], weights: dict[str, float] | None = None
) -> Callable[..., Looks]:
    def looks(ask: Ask, seed: int, *, whole: bool) -> Looks:
        norms = {name: (weights or {}).get(name, 1.0) for name in NAMES}
        before, after = entries_at(start, seed), entries_at(end, seed + 50)
        return Looks(before, after, (norms, norms), 0.6)

    return looks


def swapped(levels: dict[str, float], one: str, other: str) -> dict[str, float]:
    return {**levels, one: levels[other], other: levels[one]}


def test_the_heat_maps_say_that_value_leads_among_q_k_v_only_until_blocks_are_permuted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hessians, "looks", drawn(START, GROWN))
    for name in ("petrov-fig3", "petrov-fig4"):
        made = ca.paper(name)
        assert made.verdict.startswith("true only where among Q, K, V"), str(made)
        assert made.finding("VV brighter than every other block, decades").verdict == "refuted"
        assert len(made.panels) == 2
        assert made.panels[0].limits == made.panels[1].limits
        assert made.panels[1].blocks == ("query", "key", "value")
        assert made.plot().axes
    value, query = "blocks.0.value", "blocks.0.query"
    wrong = drawn(swapped(START, value, query), swapped(GROWN, value, query))
    monkeypatch.setattr(hessians, "looks", wrong)
    for name in ("petrov-fig3", "petrov-fig4"):
        made = ca.paper(name)
        assert made.finding("VV brighter than QQ and KK, decades").verdict == "refuted"
        assert "among Q, K, V" not in made.verdict


def test_growth_with_training_needs_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessians, "looks", drawn(START, GROWN))
    grown = ca.paper("petrov-fig4")
    assert grown.finding("growth of value in training").value == pytest.approx(10**3.8, rel=0.3)
    assert grown.finding("growth of head in training").verdict == "confirmed"
    monkeypatch.setattr(hessians, "looks", drawn(START, START))
    same = ca.paper("petrov-fig4")
    assert same.finding("growth of value in training").verdict == "refuted"


def test_norms_confirm_only_where_keys_and_values_are_the_highest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    high = {**START, "blocks.0.key": -1.0, "blocks.0.value": -1.0}
    weights = {"blocks.0.key": 5.0, "blocks.0.value": 6.0}
    monkeypatch.setattr(hessians, "looks", drawn(high, high, weights))
    made = ca.paper("petrov-fig5")
    assert made.verdict == "confirmed"
    assert made.panels[0].blocks[1] == "query"
    assert made.plot().axes
    weights["blocks.0.up"] = 7.0
    monkeypatch.setattr(hessians, "looks", drawn(high, high, weights))
    assert "norms of W" not in ca.paper("petrov-fig5").verdict
    assert ca.paper("petrov-fig5").verdict.startswith("true only where")


def test_the_map_of_a_users_model_shows_its_own_entries(problem: ca.Problem) -> None:
    made = ca.paper("petrov-fig3", problem=problem)
    whole = ca.entries(problem)
    value, query, key = (whole.level(f"blocks.0.{r}", eps=1e-6) for r in ("value", "query", "key"))
    told = made.finding("VV brighter than QQ and KK, decades")
    assert told.value == pytest.approx(value - max(query, key))
    assert told.verdict == ("confirmed" if value > max(query, key) else "refuted")
    image = made.panels[0].image
    assert image is not None
    assert float(image.max()) <= float((whole.matrix.abs() + 1e-6).log10().max()) + 1e-5


def test_the_figures_are_made_of_trained_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.Setting, "steps", property(lambda self: 20))
    monkeypatch.setattr(hessians, "_samples", lambda ask: 8)
    monkeypatch.setattr(hessians, "_seeds", lambda ask: range(2))
    monkeypatch.setattr(hessians, "_ROWS", 60)
    for cached in (hessians._looks, models._trained):
        cached.cache_clear()
    found = hessians.looks(Ask(), 0, whole=True)
    problem = models.setting_of(Ask(), "mnist")
    model = problem.model(0)
    zoo.train(model, problem.data, steps=20, seed=0, lr=2e-3, schedule="constant", batch_size=128)
    again = ca.entries(problem.problem(model, 8)).matrix
    assert torch.equal(found.after.matrix, again)
    assert found.before.sizes == found.before.whole
    assert sum(hessians.looks(Ask(), 1, whole=False).before.sizes) <= 60
    weight = model.blocks[0].attention.query.weight
    assert found.weights[1]["blocks.0.query"] == pytest.approx(
        float(weight.detach().norm()), rel=1e-6
    )
    for cached in (hessians._looks, models._trained):
        cached.cache_clear()


def test_the_first_steps_are_followed_family_by_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessians, "_FIRST_STEPS", 60)
    monkeypatch.setattr(hessians, "_SNAPSHOTS", (0, 20, 60))
    monkeypatch.setattr(hessians, "_ROWS", 60)
    hessians._first_steps.cache_clear()
    made = ca.paper("petrov-fig9")
    marks = {mark.label: mark for panel in made.panels for mark in panel.marks}
    start = models.setting_of(Ask(), "mnist").model(0).blocks[0].attention.value.weight
    middle = float(start.detach().abs().quantile(0.5))
    assert float(marks["50%"].y[0]) > 0
    assert float(made.panels[0].marks[1].y[0]) == pytest.approx(middle, rel=1e-3)
    assert made.plot().axes
    assert made.verdict == "confirmed"
    seen = hessians._first_steps(None, 0, 32)["petrov-fig9"]
    backwards = dict.fromkeys(hessians._FAMILIES, seen[::-1])
    monkeypatch.setattr(hessians, "_first_steps", lambda *_: backwards)
    assert ca.paper("petrov-fig9").verdict == "refuted"


# --- one more sample ------------------------------------------------------------------------------


def test_the_slope_of_a_models_losses_is_that_of_noise(problem: ca.Problem) -> None:
    made = ca.paper("petrov-fig6", problem=problem)
    assert made.verdict == "true only where the slope itself"
    slope = next(f for f in made.findings if f.what.startswith("slope of"))
    assert slope.value == pytest.approx(-1.0, abs=0.1)
    null = made.finding("distance from the slope of pure noise")
    assert null.verdict == "refuted"
    assert made.plot().axes


def test_running_means_step_by_the_identity() -> None:
    values = torch.tensor([1.0, 4.0, 1.0, 0.0])
    assert landscape.running_steps(values).tolist() == pytest.approx([1.5, 0.5, 0.5])
    smooth = landscape._moving_average(np.array([1.0, 0.0, 0.0]))
    assert smooth.tolist() == pytest.approx([1.0, 0.98, 0.98**2])


def test_losses_that_do_not_settle_refute_the_slope(
    monkeypatch: pytest.MonkeyPatch, problem: ca.Problem
) -> None:
    def drifting(values: Tensor) -> Any:
        return original(values + torch.arange(len(values)) ** 0.5)

    original = landscape.running_steps
    monkeypatch.setattr(landscape, "running_steps", drifting)
    made = ca.paper("petrov-fig6", problem=problem)
    slope = next(f for f in made.findings if f.what.startswith("slope of"))
    assert slope.verdict == "refuted"
    assert made.verdict == "refuted"


def test_the_gradient_at_the_weights_falls_with_samples_and_is_that_of_the_problem(
    problem: ca.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = landscape._by_group(problem, 8)
    whole = problem.gradient()
    assert rows.shape == (32, problem.size)
    assert float((rows.mean(0) - whole).norm() / whole.norm()) < 1e-4
    made = ca.paper("petrov-fig12", problem=problem)
    assert len(made.findings) == 1  # of a model whose start is not known
    alike = rows[:1].expand_as(rows)  # every sample pulls the same way: the mean never falls
    monkeypatch.setattr(landscape, "_by_group", lambda *_: alike)
    assert ca.paper("petrov-fig12", problem=problem).verdict == "refuted"


def test_too_few_samples_for_a_curve_are_said(problem: ca.Problem) -> None:
    few = problem.with_data([tuple(zoo.digits().train.take(40))])
    with pytest.raises(ValueError, match="need 16 groups of 8 samples, the data give 5"):
        ca.paper("petrov-fig12", problem=few)


# --- the thesis' component checks -----------------------------------------------------------------


def test_the_components_agree_with_autograd_until_a_term_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(petrov_components, "_DRAWS", 1)
    monkeypatch.setattr(petrov_components, "_ROUNDS", 3)
    made = ca.paper("petrov-thesis")
    errors = [f for f in made.findings if "error" in f.what]
    assert len(errors) == 6
    assert all(one.verdict == "confirmed" for one in errors)
    from curvatlas.closed_form.modules import LayerNormHessian

    whole = LayerNormHessian.compute_jacobian

    def without_second_term(self: Any, x: Tensor) -> Tensor:
        _, inv_std, _ = self._statistics(x)
        d = x.shape[-1]
        centring = torch.eye(d) - 1.0 / d
        return torch.block_diag(*(centring * s for s in inv_std.flatten()))

    monkeypatch.setattr(LayerNormHessian, "compute_jacobian", without_second_term)
    assert whole is not LayerNormHessian.compute_jacobian
    broken = ca.paper("petrov-thesis")
    wrong = next(f for f in broken.findings if "LN Jacobian, the largest" in f.what)
    assert wrong.verdict == "refuted"
    assert broken.verdict == "refuted"


# --- the sketches ---------------------------------------------------------------------------------


def test_the_sketched_block_is_the_models_until_its_norm_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ca.paper("petrov-fig2").verdict == "confirmed"
    before = lambda table, seed: zoo.petrov_vit(table, seed=seed, norm_first=True)  # noqa: E731
    monkeypatch.setattr(models, "petrov_vit", before)
    assert ca.paper("petrov-fig2").verdict == "refuted"


def test_losses_along_a_line_are_those_of_the_moved_model(problem: ca.Problem) -> None:
    places = torch.tensor([0.0, 0.1], dtype=torch.float64)
    found = landscape._along(problem, places, torch.Generator().manual_seed(0))
    direction = torch.randn(problem.size, generator=torch.Generator().manual_seed(0))
    step = 0.1 * direction / direction.norm() * problem.parameters.norm()
    there = ca.Problem(
        landscape.moved(problem, 1.0, step).model, "cross_entropy", zoo.digits().train.take(16)
    )
    assert float(found[1].mean()) == pytest.approx(there.value(), rel=1e-5)
    here = ca.Problem(problem.model, "cross_entropy", zoo.digits().train.take(16))
    assert float(found[0].mean()) == pytest.approx(here.value(), rel=1e-5)
