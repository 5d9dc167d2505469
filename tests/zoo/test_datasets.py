"""Data loaders give real samples in order, and refuse what they cannot trust."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from curvatlas import zoo
from curvatlas.zoo.datasets import read_idx


def test_embedded_digits_are_those_of_scikit_learn():
    data, original = zoo.digits(), load_digits()
    images = torch.cat([data.train.inputs, data.validation.inputs])
    labels = torch.cat([data.train.targets, data.validation.targets])
    low, high = images.min(), images.max()
    pixels = ((images - low) / (high - low) * 16).round()
    ours = {(int(y), *x.flatten().int().tolist()) for x, y in zip(pixels, labels, strict=True)}
    theirs = {(int(y), *x.astype(int)) for x, y in zip(original.data, original.target, strict=True)}
    assert images.shape == (1797, 8, 8)
    assert ours == theirs


def test_the_split_is_fixed_by_the_seed_and_normalised_on_training_pixels():
    first, second, other = zoo.digits(), zoo.digits(), zoo.digits(seed=1)
    assert torch.equal(first.train.inputs, second.train.inputs)
    assert not torch.equal(first.train.targets, other.train.targets)
    assert (first.train.size, first.validation.size) == (1437, 360)
    assert abs(first.train.inputs.double().mean()) < 1e-6
    assert abs(first.train.inputs.double().std(correction=0) - 1) < 1e-6


def test_batches_cover_all_samples_once_in_order():
    train = zoo.digits().train
    batches = train.batches(100)
    assert [b.size for b in batches] == [100] * 14 + [37]
    assert torch.equal(torch.cat([b.inputs for b in batches]), train.inputs)
    assert torch.equal(torch.cat([b.targets for b in batches]), train.targets)
    assert train.take(3).to(torch.float64).inputs.dtype == torch.float64


def test_text_targets_are_the_next_tokens_and_splits_do_not_overlap(tmp_path):
    path = tmp_path / "count.txt"
    path.write_bytes(bytes(i % 251 for i in range(3000)))
    data = zoo.text(path, context=10, validation=0.2)
    for samples in (data.train, data.validation):
        assert torch.equal(samples.inputs[:, 1:], samples.targets[:, :-1])
        assert ((samples.inputs + 1) % 251 == samples.targets).all()
    assert (data.train.size, data.validation.size) == (239, 59)


def test_the_embedded_text_opens_with_ishmael_and_reads_back_from_characters():
    data = zoo.text(level="character", context=32)
    texts = {"".join(data.symbols[i] for i in row) for row in data.train.inputs.tolist()}
    assert "CHAPTER 1. Loomings.\n\nCall me Is" in texts
    assert zoo.text().classes == 256


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_idx_folders_load_and_incomplete_files_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    for part, size in (("train", 30), ("t10k", 10)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", rng.integers(0, 256, (size, 28, 28)))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.arange(size) % 10)
    data = zoo.fashion_mnist(tmp_path)
    assert data.train.inputs.shape == (30, 28, 28)
    assert data.validation.targets.tolist() == list(range(10))
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist"):
        zoo.fashion_mnist(tmp_path / "elsewhere")

    short = tmp_path / "short"
    short.write_bytes((tmp_path / "train-labels-idx1-ubyte").read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut short"):
        read_idx(short)
    short.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="not an IDX file"):
        read_idx(short)
    broken = tmp_path / "broken.gz"
    broken.write_bytes((tmp_path / "train-images-idx3-ubyte.gz").read_bytes()[:-20])
    with pytest.raises(ValueError, match="gzip"):
        read_idx(broken)


def test_mnist_reads_plain_arrays_and_no_pickles(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 255, (20, 28, 28)),
        "y_train": rng.integers(0, 10, 20),
        "x_test": rng.integers(0, 255, (5, 28, 28)),
        "y_test": rng.integers(0, 10, 5),
    }
    np.savez(tmp_path / "mnist.npz", **arrays)
    data = zoo.mnist(tmp_path / "mnist.npz")
    assert data.train.inputs.shape == (20, 28, 28)
    assert data.validation.targets.tolist() == arrays["y_test"].tolist()
    objects = np.array([{"not": "numbers"}], dtype=object)
    np.savez(tmp_path / "objects.npz", **{**arrays, "x_train": objects})
    with pytest.raises(ValueError, match="allow_pickle"):
        zoo.mnist(tmp_path / "objects.npz")
    np.savez(tmp_path / "short.npz", x_train=arrays["x_train"])
    with pytest.raises(ValueError, match="lacks the arrays x_test"):
        zoo.mnist(tmp_path / "short.npz")


def test_wrong_requests_say_what_is_wrong(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("too short")
    with pytest.raises(ValueError, match="lower context"):
        zoo.text(path)
    with pytest.raises(ValueError, match="between 0 and 1"):
        zoo.digits(validation=1.5)
    with pytest.raises(ValueError, match="'byte' or 'character'"):
        zoo.text(level="word")
