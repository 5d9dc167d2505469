"""Images and torch datasets as DATA of commands, and the studies that train on them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from curvatlas import cli, runs, zoo
from curvatlas.cli.inputs import NamedModel, find_data
from curvatlas.studies import generalisation

Image = pytest.importorskip("PIL.Image")

_MINE = """
import torch
from torch.utils.data import TensorDataset
from curvatlas import zoo

def make_model():
    return zoo.reference_vit(d_model=4, d_ff=4, image_size=4, patch_size=2, classes=3)

def make_dataset():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(30, 4, 4, generator=generator), torch.arange(30) % 3)

def make_parts():
    return zoo.from_torch(make_dataset())

def make_sized(width, depth):
    return zoo.reference_vit(
        d_model=width, d_ff=4, n_layers=depth, image_size=4, patch_size=2, classes=3
    )
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A factory of a small ViT and of data, and a folder of grey images for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(_MINE, encoding="utf-8")
    random = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for place in range(8):
            pixels = random.integers(0, 256, (4, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{place}.png")
    return tmp_path


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def test_a_torch_dataset_of_a_factory_is_cut_to_the_samples_asked_for(folder: Path) -> None:
    model = NamedModel(model=zoo.MLP().double(), name="mlp")
    for text in ("mine.py:make_dataset", "mine.py:make_parts"):
        found = find_data(str(folder / text), model, samples=10, batch_size=4)
        assert [len(batch[1]) for batch in found.batches] == [4, 4, 2]
        assert found.batches[0][0].dtype == torch.float64
        assert found.loss == "cross_entropy"
    held_out = find_data("mine.py:make_parts", model, samples=99, batch_size=99, part="validation")
    assert len(held_out.batches[0][1]) == 6


def test_a_command_runs_on_a_folder_of_images_and_says_what_it_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["landscape", "mine.py:make_model", "images", "--loss-only", "--samples", "24"]
    (folder / "images" / "b" / "3.png").write_bytes(b"nothing")
    code, _, said = run(words, capsys)
    assert code == 2
    assert "b/3.png" in said
    assert "--broken skip" in said
    assert said.count("\n") == 1
    (folder / "images" / "d").mkdir()
    words += ["--broken", "skip", "--json", "--output", "out"]
    assert run(words, capsys)[0] == 2  # a class without images
    (folder / "images" / "d").rmdir()
    code, printed, _ = run(words, capsys)
    assert code == 2  # 18 samples are too few: said, and the run is kept
    assert json.loads(printed)["error"]["message"].startswith("convergence with k needs")


def test_the_pickled_cifar_is_refused_by_a_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cifar").mkdir()
    (folder / "cifar" / "data_batch_1").write_bytes(pickle.dumps({}))
    code, _, said = run(["landscape", "vit", "cifar", "--loss-only"], capsys)
    assert code == 2
    assert "binary version" in said


def test_retraining_is_an_option_of_landscape_and_goes_on_where_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["landscape", "mine.py:make_model", "mine.py:make_dataset", "--loss-only"]
    words += ["--retrain", "--optimizers", "adam", "--schedules", "cosine", "--train-orders", "3"]
    words += ["--train-steps", "2", "--penalty", "0.1", "--polish", "3", "--output", "out"]
    code, _, said = run([*words, "--sizes", "10,12"], capsys)
    assert code == 2
    assert "4 or more numbers of samples" in said
    code, _, said = run([*words, "--optimizers", "lion"], capsys)
    assert code == 2
    assert "optimizers are sgd" in said
    assert not (folder / "out").exists()
    words += ["--sizes", "10,12,15,20", "--json"]
    code, printed, _ = run(words, capsys)
    assert code == 0
    results = json.loads(printed)["results"]
    assert [cell["optimizer"] for cell in results["retrained"]["cells"]] == ["adam"]
    assert results["landscape.convergence"]["products"] == 0
    assert results["landscape.convergence"]["hessian"] is None
    page = (folder / "out" / "report.html").read_text(encoding="utf-8")
    assert "The minimum, trained again" in page
    (folder / "out" / "report.html").unlink()
    before = runs.load(folder / "out").manifest.steps
    assert run(words, capsys)[0] == 0
    assert runs.load(folder / "out").manifest.steps == before


@pytest.mark.draws
def test_generalisation_takes_your_models_and_data_and_resumes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    def studied(data: zoo.Dataset, make: object, options: dict[str, float], *_: int) -> object:
        model = make(width=int(options["width"]), depth=int(options["depth"]))  # type: ignore[operator]
        made.append((model.config.d_model, len(model.blocks)))
        assert data.train.inputs.shape[1:] == (4, 4)
        if len(made) == 3:
            raise KeyboardInterrupt
        value = float(len(made) % 7)
        names = {**generalisation.MEASURES, **generalisation.BASELINES}
        return generalisation.StudiedModel(
            options=dict(options), train_loss=0.1, test_loss=0.1 + value, train_error=0.0,
            test_error=0.5, measures=dict.fromkeys(names, value),
        )  # fmt: skip

    monkeypatch.setattr(generalisation, "_studied", studied)
    words = ["generalisation", "images", "--model", "mine.py:make_sized", "--models", "6"]
    words += ["--sizes", "10,14", "--widths", "4,6", "--output", "study", "--json"]
    code, _, said = run(["generalisation", "images"], capsys)
    assert code == 2
    assert "has 19 training samples and the study asks for 480" in said
    code, _, said = run(words, capsys)
    assert code == 130
    assert "2 results are kept" in said
    code, printed, _ = run(words, capsys)
    assert code == 0
    assert len(made) == 3 + 4  # the third is made anew, the first two are not
    assert {width for width, _ in made} == {4, 6}
    found = json.loads(printed)["results"]["generalisation"]
    assert len(found["models"]) == 6
    assert all(row["value"] == pytest.approx(1.0) for row in found["correlations"])
    page = (folder / "study" / "report.html").read_text(encoding="utf-8")
    assert "Which measures tell the gap?" in page
    assert "gaps shuffled" in page
    code, _, said = run(["generalisation", "mine.py:make_model"], capsys)
    assert code == 2
    assert "a study that trains needs" in said
