"""Small real data: digits and a text are embedded, Fashion-MNIST and MNIST read if installed.

Every loader returns a ``Dataset`` of two ``Samples``; a ``Samples`` is itself a batch, the pair
(inputs, targets), and cuts itself into batches. Reading a file never runs code from it.
"""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_Path = str | os.PathLike[str]
_MAX_BYTES = 2**30  # far above MNIST (0.2 GB unpacked): stops a decompression bomb


def _read(path: _Path) -> bytes:
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content: bytes = file.read(_MAX_BYTES + 1)
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}.") from error
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{path} unpacks to more than {_MAX_BYTES} bytes: not one of these sets.")
    return content


def read_idx(path: _Path) -> np.ndarray:
    """An IDX file of bytes (two zeros, type 0x08, axes, sizes, data) as a uint8 array."""
    content = _read(path)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an IDX file of bytes: starts with {content[:4]!r}.")
    start = 4 + 4 * content[3]
    shape = tuple(np.frombuffer(content[4:start], dtype=">u4").astype(int).tolist())
    data = np.frombuffer(content[start:], dtype=np.uint8)
    if len(shape) != content[3] or data.size != int(np.prod(shape)):
        raise ValueError(f"{path} is cut short: shape {shape}, but {data.size} bytes of data.")
    return data.reshape(shape)


class Samples(NamedTuple):
    """(inputs, targets), first axis one entry a sample; usable wherever a batch is.

    inputs may be a mapping of tensors, as a Hugging Face model takes them; targets are its labels.
    """

    inputs: Any
    targets: Tensor

    @property
    def size(self) -> int:
        """How many samples there are (``len`` is that of the pair: 2)."""
        return len(self.targets)

    @property
    def batch(self) -> Any:
        """What ``Problem`` takes: the pair, or a mapping with ``labels``."""
        if isinstance(self.inputs, Mapping):
            return {**self.inputs, "labels": self.targets}
        return tuple(self)

    def at(self, places: Any) -> Samples:
        """The samples at these places: a slice or a tensor of numbers."""
        return Samples(tree_map(lambda t: t[places], self.inputs), self.targets[places])

    def take(self, count: int) -> Samples:
        """The first ``count`` samples (they are already in random order)."""
        return self.at(slice(count))

    def batches(self, batch_size: int) -> list[Samples]:
        """Consecutive batches; the last one holds what remains."""
        starts = range(0, self.size, batch_size)
        return [self.at(slice(start, start + batch_size)) for start in starts]

    def to(self, dtype: torch.dtype) -> Samples:
        """Inputs (and real-valued targets) in ``dtype``; tokens and labels stay integers."""
        moved = tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, tuple(self))
        return Samples(*moved)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Training and validation samples that share nothing."""

    name: str
    train: Samples
    validation: Samples
    classes: int  # labels, or tokens of the vocabulary
    symbols: tuple[str, ...] | None = None  # what each token (character) or class (image) is
    notes: tuple[str, ...] = ()  # what a reader of results on these data has to know

    def __str__(self) -> str:
        first = tree_leaves(self.train.inputs)[0]
        shape = " × ".join(map(str, first.shape[1:]))
        told = (
            f"{self.name}: {self.train.size} training and {self.validation.size} validation "
            f"samples of {shape}, {self.classes} classes"
        )
        return "; ".join([told, *self.notes])


def digits(*, validation: float = 0.2, seed: int = 0) -> Dataset:
    """The 1,797 handwritten digits of 8 × 8 pixels that scikit-learn ships (embedded here)."""
    with (
        (files("curvatlas.zoo") / "data" / "digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        images, labels = arrays["images"], arrays["labels"]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).numpy()
    held_out = _count(validation, len(images))
    return image_dataset(
        "digits",
        train=(images[order[held_out:]], labels[order[held_out:]]),
        validation=(images[order[:held_out]], labels[order[:held_out]]),
    )


def fashion_mnist(path: _Path | None = None) -> Dataset:
    """Fashion-MNIST, 60,000 + 10,000 images of 28 × 28, from the IDX files in ``path``."""
    return _idx_dataset(
        "Fashion-MNIST",
        path,
        folders=("fashion-mnist", "FashionMNIST/raw"),
        install="install the Debian package dataset-fashion-mnist",
    )


def mnist(path: _Path | None = None) -> Dataset:
    """MNIST from the IDX files in the folder ``path``, or from an ``mnist.npz`` of plain arrays."""
    if path is not None and Path(path).suffix == ".npz":
        with np.load(Path(path), allow_pickle=False) as arrays:
            missing = {"x_train", "y_train", "x_test", "y_test"} - set(arrays.files)
            if missing:
                raise ValueError(f"{path} lacks the arrays {', '.join(sorted(missing))}.")
            return image_dataset(
                "MNIST",
                train=(arrays["x_train"], arrays["y_train"]),
                validation=(arrays["x_test"], arrays["y_test"]),
            )
    return _idx_dataset(
        "MNIST",
        path,
        folders=("mnist", "MNIST/raw"),
        install="put its IDX files or mnist.npz somewhere and pass the path (pickles are not read)",
    )


def text(
    path: _Path | None = None,
    *,
    context: int = 64,
    level: Literal["byte", "character"] = "byte",
    stride: int | None = None,
    validation: float = 0.1,
    seed: int = 0,
) -> Dataset:
    """Next-token windows of a text file (default: the embedded opening of Moby-Dick).

    inputs (n, context), targets (n, context) one token further; windows start every ``stride``
    tokens (None: ``context``, so that none overlap). The end of the text is held out.
    """
    if path is None:
        raw = gzip.decompress((files("curvatlas.zoo") / "data" / "moby_dick.txt.gz").read_bytes())
        name = "Moby-Dick"
    else:
        name, raw = Path(path).name, Path(path).read_bytes()
    if level == "byte":
        tokens, symbols, classes = torch.tensor(list(raw)), None, 256
    elif level == "character":
        characters = raw.decode("utf-8")
        symbols = tuple(sorted(set(characters)))
        number = {symbol: index for index, symbol in enumerate(symbols)}
        tokens, classes = torch.tensor([number[c] for c in characters]), len(symbols)
    else:
        raise ValueError(f"level must be 'byte' or 'character', got {level!r}.")
    cut = len(tokens) - _count(validation, len(tokens))
    if min(cut, len(tokens) - cut) <= context:
        raise ValueError(
            f"{name} has {len(tokens)} tokens: too few for a training and a validation window of "
            f"{context + 1}; lower context or give a longer text."
        )
    train, held_out = (_windows(part, context, stride) for part in (tokens[:cut], tokens[cut:]))
    order = torch.randperm(train.size, generator=torch.Generator().manual_seed(seed))
    train = Samples(train.inputs[order], train.targets[order])
    return Dataset(name=name, train=train, validation=held_out, classes=classes, symbols=symbols)


def _windows(tokens: Tensor, context: int, stride: int | None) -> Samples:
    windows = tokens.unfold(0, context + 1, stride or context)  # (n, context + 1)
    return Samples(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def _count(fraction: float, total: int) -> int:
    if not 0 < fraction < 1:
        raise ValueError(f"validation is a fraction between 0 and 1, got {fraction!r}.")
    return math.ceil(fraction * total)


def image_dataset(
    name: str,
    *,
    train: tuple[np.ndarray, np.ndarray],
    validation: tuple[np.ndarray, np.ndarray],
    limit: int | None = None,
    **more: Any,
) -> Dataset:
    """Images less the mean of the training pixels, over their deviation, channel by channel.

    (n, side²) and (n, H, W) are grey, (n, C, H, W) has channels. limit: most samples of each part
    (mean and deviation are those of all of them). more: other fields of ``Dataset``.
    """
    channels = [train[0]] if train[0].ndim < 4 else list(train[0].swapaxes(0, 1))
    moments = np.array([_mean_and_deviation(c) for c in channels], dtype=np.float32)
    shape = (1,) if train[0].ndim < 4 else (-1, 1, 1)
    mean, deviation = (column.reshape(shape) for column in moments.T)

    def samples(images: np.ndarray, labels: np.ndarray) -> Samples:
        if len(images) != len(labels):
            raise ValueError(f"{name} has {len(images)} images and {len(labels)} labels.")
        if images.ndim == 2:
            side = math.isqrt(images.shape[1])
            images = images.reshape(-1, side, side)
        pixels = (images[:limit].astype(np.float32) - mean) / deviation
        return Samples(torch.from_numpy(pixels), torch.from_numpy(labels[:limit].astype(np.int64)))

    classes = more.pop("classes", int(train[1].max()) + 1)
    return Dataset(
        name=name, train=samples(*train), validation=samples(*validation), classes=classes, **more
    )


def _mean_and_deviation(values: np.ndarray) -> tuple[float, float]:
    """Of all entries; bytes are counted, which takes no copy of them as real numbers."""
    if values.dtype == np.uint8:
        levels = np.arange(256.0)
        shares = np.bincount(values.reshape(-1), minlength=256) / max(values.size, 1)
        mean = float(shares @ levels)
        deviation = math.sqrt(float(shares @ (levels - mean) ** 2))
    else:
        mean, deviation = float(values.mean()), float(values.std())
    return mean, deviation or 1.0  # a channel that never changes says nothing, however it is scaled


def places_of(path: _Path | None, folders: tuple[str, ...]) -> list[Path]:
    """Where a data set may lie: the path that was given, or the usual places."""
    if path is not None:
        return [Path(path)]
    roots = [Path("/usr/share/datasets"), Path.home() / ".cache" / "curvatlas", Path("data")]
    if "CURVATLAS_DATA" in os.environ:
        roots.insert(0, Path(os.environ["CURVATLAS_DATA"]))
    return [root / folder for root in roots for folder in folders]


def _idx_dataset(
    name: str, path: _Path | None, *, folders: tuple[str, ...], install: str
) -> Dataset:
    places = places_of(path, folders)
    for place in places:
        parts = [
            (_find(place, f"{part}-images-idx3-ubyte"), _find(place, f"{part}-labels-idx1-ubyte"))
            for part in ("train", "t10k")
        ]
        (images, labels), (test_images, test_labels) = parts
        if images and labels and test_images and test_labels:
            return image_dataset(
                name,
                train=(read_idx(images), read_idx(labels)),
                validation=(read_idx(test_images), read_idx(test_labels)),
            )
    looked = ", ".join(map(str, places))
    raise FileNotFoundError(
        f"{name} is not on this machine (looked in {looked}): {install}, or pass path= to the "
        "folder with its four IDX files (train-images-idx3-ubyte.gz, …)."
    )


def _find(folder: Path, stem: str) -> Path | None:
    return next((p for p in (folder / f"{stem}.gz", folder / stem) if p.is_file()), None)
