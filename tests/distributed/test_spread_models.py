"""Weights and vectors that FSDP2 spreads: one process's numbers, and faults that all hear of."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

import curvatlas as ca
import oracles
from distributed import spread_models
from distributed.test_data_parallel import start

pytestmark = pytest.mark.slow


MODES = ("passing", "recomputed")  # beside that in which all samples stay linearised


def load(folder: Path, name: str) -> list[dict[str, Tensor]]:
    return [torch.load(folder / f"{name} {rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("products")
    start(spread_models.every_model, folder, "")
    return folder


@functools.cache
def in_one_process(family: str) -> tuple[ca.Hessian, dict[str, Tensor]]:
    model, _, loss, data = spread_models.case(family)
    hessian = ca.Hessian(ca.Problem(model, loss, data))
    return hessian, spread_models.products(hessian)


@pytest.mark.parametrize("name", list(spread_models.names()))
def test_products_of_a_spread_model_are_those_of_one_process(name: str, products: Path) -> None:
    first, second = load(products, name)
    alone, whole = in_one_process(name.split()[0])
    want = dict(whole)
    for way in ("local", "straight", *(f"{m}{s}" for m in MODES for s in ("", " again"))):
        want[way] = want["H"]
    for quantity, value in want.items():
        assert torch.equal(first[quantity], second[quantity]), quantity
        assert oracles.relative_error(first[quantity], value) < 1e-12, quantity
    assert oracles.relative_error(first["image"], alone @ first["slopes"]) < 1e-12
    lengths = int(first["length"]) + int(second["length"])
    assert lengths == alone.shape[0] * (2 if name == "gpt 2" else 1)  # whole in each replica


@pytest.fixture(scope="module")
def estimates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("estimates")
    start(spread_models.every_estimator, folder, "")
    return folder


def test_every_estimator_gives_the_numbers_of_one_process(estimates: Path) -> None:
    first, second = load(estimates, "estimates")
    model, _, loss, data = spread_models.case("gpt")
    problem = ca.Problem(model, loss, data)
    for name, value in spread_models.estimates(problem).items():
        assert torch.equal(first[name], second[name]), name
        # a solution comes by short recurrences, which magnify rounding; the others do not
        allowed = 1e-6 if name == "solve" else 1e-9
        assert oracles.relative_error(first[name], value) < allowed, name
    parts = [torch.load(estimates / f"vectors {rank}.pt", weights_only=True) for rank in (0, 1)]
    lengths = [len(part) for part in parts]
    assert sum(lengths) == problem.size
    assert max(lengths) < 0.6 * problem.size
    gram = sum(part.T @ part for part in parts)
    assert float((gram - torch.eye(4, dtype=torch.float64)).abs().max()) < 1e-10


def test_a_whole_models_vectors_are_spread_where_asked_for(estimates: Path) -> None:
    first, second = load(estimates, "over processes")
    want = spread_models.over_processes()
    assert oracles.relative_error(first["solve"], want["solve"]) < 1e-6
    assert oracles.relative_error(first["diagonal"], want["diagonal"]) < 1e-9
    for name in want:
        assert torch.equal(first[name], second[name])


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    return spread_models.of_spectra()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((n, torch.float64) for n in spread_models.SPREAD),
        *((n, torch.float64) for n in spread_models.PARTS),
        *((n, torch.float64) for n in spread_models.GATHERED),
        *((n, torch.float32) for n in spread_models.SINGLE),
    ],
)
def test_spread_vectors_give_the_numbers_of_whole_ones(
    name: str, dtype: torch.dtype, estimates: Path, alone: dict[str, Tensor]
) -> None:
    first, second = load(estimates, "spectra")
    key = f"{name}, {dtype}"
    assert torch.equal(first[key], second[key])
    allowed = 1e-10 if dtype == torch.float64 else 1e-5
    assert oracles.relative_error(first[key].double(), alone[key].double()) < allowed
    for longest in (first[f"longest {key}"], second[f"longest {key}"]):
        if name in spread_models.GATHERED:  # so that the recorder is seen to see
            assert int(longest) >= spread_models.SIZE
        else:
            assert int(longest) < 0.6 * spread_models.SIZE


@pytest.mark.parametrize("name", list(spread_models.STOPPED))
def test_any_number_of_processes_goes_on_from_spread_vectors(
    name: str, estimates: Path, tmp_path: Path
) -> None:
    _, estimate = spread_models.STOPPED[name]
    fresh, alone = spread_models.Spectrum(torch.float64), spread_models.Spectrum(torch.float64)
    want = estimate(fresh, tmp_path / "state")
    # two processes stopped, and two go on, or one with the parts of both
    by_two, other = load(estimates, "gone on")
    by_one = estimate(alone, estimates / "parts" / name)
    assert torch.equal(by_two[name], other[name])
    for resumed in (by_two[name], by_one):
        assert oracles.relative_error(resumed, want) < 1e-10
    for products in (int(by_two[f"products of {name}"]), alone.products):
        assert 0 < products < 0.8 * fresh.products


def test_a_stopped_estimate_goes_on_from_every_ranks_piece(tmp_path: Path) -> None:
    start(spread_models.stopped, tmp_path, "stop")
    pieces = sorted(file.name for file in tmp_path.glob("state.step*"))
    assert [name.rsplit(".", 1)[1] for name in pieces][-2:] == ["0of2", "1of2"]
    start(spread_models.stopped, tmp_path, "go on")
    model, _, loss, data = spread_models.case("gpt")
    whole = ca.Hessian(ca.Problem(model, loss, data))
    want = ca.eigenpairs(whole, k=2, which="both", tol=1e-8, max_products=200)
    got = [torch.load(tmp_path / f"go on {rank}.pt", weights_only=True) for rank in (0, 1)]
    assert torch.equal(got[0], got[1])
    assert oracles.relative_error(got[0], want.values) < 1e-9
    assert int((tmp_path / "go on 0.txt").read_text()) < want.products
    for rank in (0, 1):
        told = (tmp_path / f"other {rank}.txt").read_text()
        assert "belongs to another estimate (other weights, data or loss)" in told
    told = [(tmp_path / f"lost {rank}.txt").read_text() for rank in (0, 1)]
    assert any("is missing or damaged" in text for text in told)
    assert all(text.count("\n") == 0 and text for text in told)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    start(spread_models.faults, folder, "")
    return folder


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("other_models", "rank 1 has another model than rank 0"),
        ("other_lengths", "rank 1 has other data than rank 0"),
        ("no_memory", "memory ran out in blocks.1"),
        ("other_counts", "rank 1 multiplies 2 columns and rank 0 1"),
        ("not_a_number", "NaN or infinite weights in head.weight"),
        ("dropping", "dropout is active in"),
        ("unknown_layers", "has no layer that is written out by hand"),
        ("product_not_finite", "holds NaN or infinity in 6 of 18000 entries"),
        ("right_side_not_finite", "b contains NaN or infinity"),
    ],
)
def test_a_fault_of_one_rank_is_one_line_on_every_rank(
    faults: Path, fault: str, words: str
) -> None:
    for rank in (0, 1):
        message = (faults / f"{fault} {rank}.txt").read_text()
        assert words in message
        assert "\n" not in message
