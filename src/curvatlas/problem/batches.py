"""Data in any of the accepted forms, as a list or a stream of uniform batches."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import Dataset as TorchDataset, IterableDataset, default_collate

from curvatlas.errors import NonFiniteError, ProblemError
from curvatlas.files import raw_bytes

if TYPE_CHECKING:
    from curvatlas.problem.sample_axis import SampleAxes, SampleLayout

# Data up to this size are held in memory, so that every pass sees the same batches in the same
# order even when the loader shuffles or augments; larger data are streamed.
HOLD_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs of one model call with their targets, and the number of valid targets."""

    inputs: Any  # a tensor, a tuple of positional or a mapping of keyword arguments
    targets: Any
    count: float
    index: int
    offset: int = 0  # first sample's place in the batch this is a part of
    finder: SampleAxes | None = field(default=None, repr=False, compare=False)

    @functools.cached_property
    def layout(self) -> SampleLayout | None:
        """Where the samples lie in every tensor; None: they cannot be told apart."""
        return None if self.finder is None else self.finder.of(self)

    @functools.cached_property
    def samples(self) -> int:
        """How many samples the batch can be cut into; 1 where they cannot be told apart."""
        if self.layout is None:
            return 1
        leaves = tree_flatten((self.inputs, self.targets))[0]
        axes = zip(leaves, self.layout.leaves, strict=True)
        return next((int(leaf.shape[axis]) for leaf, axis in axes if axis is not None), 1)

    @property
    def length(self) -> int:
        """Length of the inputs' first axis: a measure of size that needs no look at the model."""
        tensors = _tensors(self.inputs)
        return tensors[0].shape[0] if tensors and tensors[0].ndim else 1

    def attached(self, finder: SampleAxes) -> Batch:
        """The same batch for another Problem of the same kind."""
        return self if self.finder is finder else replace(self, finder=finder)

    def singles(self, count: Callable[[Any], float]) -> Iterator[Batch]:
        """The samples with a valid target, each as a batch of its own."""
        for place in range(self.samples):
            piece = self.part(place, place + 1, count)
            if piece.count > 0:
                yield piece

    def part(self, start: int, stop: int, count: Callable[[Any], float]) -> Batch:
        """Samples start..stop of this batch as a batch of its own."""
        if self.layout is None or (start, stop) == (0, self.samples):
            return self
        return self._of(lambda leaf, axis: leaf[_along(axis, slice(start, stop))], count, start)

    def chosen(self, samples: Tensor, count: Callable[[Any], float]) -> Batch:
        """The samples with these numbers, in that order, as a batch of its own."""
        return self._of(lambda leaf, axis: leaf.index_select(axis, samples.to(leaf.device)), count)

    def shortened(self, length: int, places: slice, count: Callable[[Any], float]) -> Batch | None:
        """The same samples with some of their ``length`` tokens; None where no input has them.

        Every axis of that length is cut, the samples' own excepted.
        """
        leaves, spec = tree_flatten((self.inputs, self.targets))
        axes = self.layout.leaves if self.layout is not None else [0] * len(leaves)
        inputs_cut = 0
        for place, (leaf, own) in enumerate(zip(list(leaves), axes, strict=True)):
            if not isinstance(leaf, Tensor):
                continue
            for axis in (a for a in range(leaf.ndim) if a != own and leaf.shape[a] == length):
                leaf = leaf[_along(axis, places)]
                inputs_cut += place < len(tree_flatten(self.inputs)[0])
            leaves[place] = leaf
        if not inputs_cut:
            return None
        inputs, targets = tree_unflatten(leaves, spec)
        part = replace(self, inputs=inputs, targets=targets, count=count(targets))
        part.__dict__["layout"] = self.layout
        return part

    def _of(
        self,
        take: Callable[[Tensor, int], Tensor],
        count: Callable[[Any], float],
        start: int = 0,
    ) -> Batch:
        if self.layout is None:
            return self
        leaves, spec = tree_flatten((self.inputs, self.targets))
        taken = [
            leaf if axis is None else take(leaf, axis)
            for leaf, axis in zip(leaves, self.layout.leaves, strict=True)
        ]
        inputs, targets = tree_unflatten(taken, spec)
        part = replace(
            self,
            inputs=inputs,
            targets=targets,
            count=count(targets),
            offset=self.offset + start,
        )
        part.__dict__["layout"] = self.layout  # a part of one sample could not tell it
        return part


def _along(axis: int, samples: slice) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, samples)


def paired(x: Any, y: Any = None) -> Any:
    """What ``Problem`` takes as data of a call ``method(x, y)``: the batch, or x where y is None.

    A mapping x keeps its labels only where there is no y.
    """
    if y is None:
        return x
    return ({k: v for k, v in x.items() if k != "labels"}, y) if isinstance(x, Mapping) else (x, y)


def first_batches(data: Any, count: int | None) -> Any:
    """The first ``count`` batches of data in any accepted form; None: all of them."""
    if count is None:
        return data
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ProblemError(f"n_batches is a number of batches, at least 1; got {count!r}.")
    return list(itertools.islice(batches_of(data, dtype=torch.get_default_dtype()), count))


def batches_of(data: Any, *, dtype: torch.dtype) -> Iterable[Any]:
    """Whatever the user passed, as an iterable of raw batches that can be walked repeatedly.

    NumPy arrays become tensors, of ``dtype`` where they hold floating numbers, and so do the lists
    of numbers of a mapping (a ``BatchEncoding`` without ``return_tensors``). A dataset of samples,
    of torch or of Hugging Face, is put into batches.
    """
    if isinstance(data, (Tensor, np.ndarray)):
        kind = "tensor" if isinstance(data, Tensor) else "array"
        raise ProblemError(
            f"data is a single {kind}: pass (inputs, targets), a mapping with 'labels', "
            "a list of batches or a DataLoader."
        )
    if isinstance(data, Mapping) or _is_pair(data):
        return _WithTensors([data], dtype)
    if _is_dataset(data):
        return _WithTensors(_Collated(data), dtype)
    if isinstance(data, Iterator):
        raise ProblemError(
            f"data is a one-shot iterator ({type(data).__name__}) and curvature needs many passes: "
            "pass list(data), or the loader itself instead of iter(loader)."
        )
    if not isinstance(data, Iterable):
        raise ProblemError(f"data of type {type(data).__name__} cannot be iterated over.")
    if iter(data) is data:
        raise ProblemError(
            f"data ({type(data).__name__}) can be walked only once and curvature needs many "
            "passes: pass list(data)."
        )
    return _WithTensors(data, dtype)


@dataclass(frozen=True)
class _WithTensors:
    """Raw batches with their NumPy arrays as tensors."""

    data: Iterable[Any]
    dtype: torch.dtype

    def __iter__(self) -> Iterator[Any]:
        for index, raw in enumerate(self.data):
            yield as_tensors(raw, self.dtype, index)


_COLLATED = 32  # samples a batch; batches are weighted by their targets, so it decides no number
_LABEL_NAMES = ("label", "label_ids")  # which collators of Hugging Face call "labels"


@dataclass(frozen=True)
class _Collated:
    """Batches of a dataset that gives samples by number: consecutive ones, stacked."""

    dataset: Any

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.dataset), _COLLATED):
            stop = min(start + _COLLATED, len(self.dataset))
            samples = [self._sample(place) for place in range(start, stop)]
            try:
                yield default_collate(samples)
            except (RuntimeError, TypeError, ValueError, KeyError) as error:
                reason = " ".join(str(error).split())[:120]
                raise ProblemError(
                    f"the samples of this {type(self.dataset).__name__} cannot be put into one "
                    f"batch ({reason}): pass a DataLoader with a collate_fn that pads them."
                ) from error

    def _sample(self, place: int) -> Any:
        sample = self.dataset[place]
        if not isinstance(sample, Mapping):
            return sample
        numbers = {
            key: value
            for key, value in ((k, _numbers(v, 0)) for k, v in sample.items())
            if isinstance(value, (Tensor, np.ndarray, int, float))
        }
        for name in _LABEL_NAMES:
            if name in numbers and "labels" not in numbers:
                numbers["labels"] = numbers.pop(name)
        return numbers


def _is_dataset(data: Any) -> bool:
    """Samples by number: a map-style dataset of torch, or a ``datasets.Dataset``."""
    if isinstance(data, IterableDataset):
        raise ProblemError(
            "an IterableDataset gives samples, not batches: pass DataLoader(dataset, batch_size=…)."
        )
    columns = hasattr(data, "column_names") and hasattr(data, "__getitem__")
    return isinstance(data, TorchDataset) or (columns and hasattr(data, "__len__"))


def _numbers(value: Any, index: int) -> Any:
    """A (nested) list of numbers as a tensor; anything else as it is."""
    if not isinstance(value, list) or not value:
        return value
    first = value[0]
    while isinstance(first, list) and first:
        first = first[0]
    if not isinstance(first, (bool, int, float)):
        return value
    try:
        return torch.tensor(value, device="cpu")
    except (ValueError, TypeError) as error:
        raise ProblemError(
            f"batch {index} holds lists of different lengths: pad them to one length (a tokenizer "
            "does it with padding=True)."
        ) from error


def as_tensors(raw: Any, dtype: torch.dtype, index: int) -> Any:
    """The batch with every NumPy array copied into a tensor, floats as ``dtype``, integers int64.

    The dtype follows the parameters because NumPy's own default is float64 whatever the model is.
    Mappings of any kind (``BatchEncoding``, ``ModelOutput``) become dictionaries.
    """

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):  # one that PyTorch does not look into
            return as_tensors(leaf, dtype, index)
        if not isinstance(leaf, np.ndarray):
            return leaf
        if leaf.dtype.kind == "f":
            return torch.tensor(leaf, dtype=dtype, device="cpu")
        if leaf.dtype.kind == "i":
            return torch.tensor(leaf, dtype=torch.int64, device="cpu")
        if leaf.dtype.kind in "bu":
            return torch.tensor(leaf, device="cpu")
        raise ProblemError(
            f"batch {index} holds a NumPy array of {leaf.dtype}: floating numbers, integers and "
            "booleans become tensors, others do not."
        )

    if isinstance(raw, Mapping):
        return tree_map(convert, {key: _numbers(value, index) for key, value in raw.items()})
    return tree_map(convert, raw)


def _is_pair(data: Any) -> bool:
    """(inputs, targets): a tuple or list of two, one of them no batch but a tensor or an array."""
    if not (isinstance(data, (tuple, list)) and len(data) == 2):
        return False
    inputs, targets = data
    if isinstance(inputs, (Tensor, np.ndarray)):
        return isinstance(targets, (Tensor, np.ndarray, tuple, list, Mapping))
    return isinstance(inputs, (tuple, Mapping)) and isinstance(targets, (Tensor, np.ndarray))


def checked(tree: Any, *, what: str, device: torch.device, index: int) -> Any:
    """A copy of the tree on ``device``; NaN and infinities are refused with their place.

    A copy, because loaders may fill the same memory again, and because inference tensors cannot be
    saved for backward.
    """

    def prepare(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):  # one that PyTorch does not look into, such as BatchEncoding
            return checked(dict(leaf), what=what, device=device, index=index)
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_nested:
            raise ProblemError(
                f"the {what} of batch {index} are a nested tensor, whose samples cannot be counted "
                "or told apart: pad it (torch.nested.to_padded_tensor) and mask what is padding."
            )
        with torch.inference_mode(False):
            moved = leaf.detach().to(device, copy=True)
        if moved.is_floating_point() and not bool(torch.isfinite(moved).all()):
            bad = int((~torch.isfinite(moved)).sum())
            raise NonFiniteError(
                f"the {what} of batch {index} hold {bad} NaN or infinite values: clean the data."
            )
        return moved

    return tree_map(prepare, tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def has_rows(raw: Any) -> bool:
    """Whether a raw batch holds anything: a loader may end with, or begin with, one of no rows."""
    tensors = [tensor for tensor in _tensors(raw) if tensor.ndim]
    return not tensors or any(tensor.size(0) for tensor in tensors)


def sample_digests(batch: Batch) -> int:
    """Σ over samples of a digest of each, which does not depend on how they are put into batches.

    Tensors without an entry for each sample are told with every sample.
    """
    tensors = [t.detach().cpu() for t in _tensors((batch.inputs, batch.targets))]
    size = batch.length
    shared = hashlib.blake2b(digest_size=8)
    rows: list[memoryview] = []
    for tensor in tensors:
        shared.update(f"{tuple(tensor.shape[1:])} {tensor.dtype};".encode())
        content = raw_bytes(tensor)
        if tensor.ndim and tensor.shape[0] == size:
            rows.append(content)
        else:
            shared.update(content)
    total = 0
    for place in range(size):
        digest = shared.copy()
        for content in rows:
            width = len(content) // size
            digest.update(content[place * width : (place + 1) * width])
        total += int.from_bytes(digest.digest(), "little")
    return total


def shapes(batch: Batch) -> tuple[torch.Size, ...]:
    """Shape of every leaf of (inputs, targets), () for what is no tensor."""
    leaves = tree_flatten((batch.inputs, batch.targets))[0]
    return tuple(t.shape if isinstance(t, Tensor) else torch.Size() for t in leaves)


def size_in_bytes(batch: Batch) -> int:
    """Memory of a batch's tensors."""
    return sum(t.numel() * t.element_size() for t in _tensors((batch.inputs, batch.targets)))


def described(inputs: Any) -> str:
    """Shapes and types of inputs, for a message."""

    def one(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        return type(value).__name__

    if isinstance(inputs, Mapping):
        return "{" + ", ".join(f"{k}: {one(v)}" for k, v in inputs.items()) + "}"
    if isinstance(inputs, tuple):
        return "(" + ", ".join(one(v) for v in inputs) + ")"
    return one(inputs)
