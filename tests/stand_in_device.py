"""A device that is none: its tensors compute on the CPU, refuse to mix and count what waits.

PyTorch for the CPU knows no other device with values, so this one calls itself "meta". As on a
GPU, tensors of two devices do not mix (single numbers of main memory excepted), a generator of
main memory draws nothing there, and whatever needs a value on the host has to wait for the device:
``.item()``, ``bool``, ``.tolist()``, ``.cpu()``, results whose shape depends on values, indices and
numbers that are sent to the device. Those are counted, with the line they came from. Copies with
``non_blocking=True`` wait for nothing and are not.

``float64=False``: as on Apple's GPU, no float64 tensor can be made or moved there
(``precision.WITHOUT_FLOAT64`` has to be told).
"""

from __future__ import annotations

import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
_SOURCE = str(Path(__file__).parents[1] / "src")
_aten = torch.ops.aten

_COPYING = (_aten.copy_, _aten._to_copy)
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
# Of these the host needs a value before it can go on, as of all that return a number.
_WAITING = {
    getattr(_aten, name)
    for name in (
        "nonzero",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "_linalg_check_errors",
        "_linalg_eigh",
        "_linalg_svd",
        "linalg_eig",
        "linalg_eigvals",
        "linalg_lstsq",
    )
}


@dataclass
class Waits:
    """How often the host waited for the device, by operation and line of the library."""

    places: Counter[str] = field(default_factory=Counter)
    float64: bool = True

    @property
    def count(self) -> int:
        return self.places.total()

    def clear(self) -> None:
        self.places.clear()

    def note(self, what: str) -> None:
        # Frames as they are: traceback.extract_stack would read the source of every one of them.
        frames = ((f.f_code.co_filename, line) for f, line in traceback.walk_stack(None))
        ours = (f"{Path(file).name}:{line}" for file, line in frames if file.startswith(_SOURCE))
        where = list(itertools.islice(ours, 3))[::-1]
        self.places[f"{what} at {' > '.join(where) or 'the test'}"] += 1

    def __str__(self) -> str:
        return "\n".join(f"{n} × {place}" for place, n in self.places.most_common())


_waits = Waits()


class OnDevice(Tensor):
    """A tensor of the device, which holds its numbers in main memory."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    is_meta = False

    @staticmethod
    def __new__(cls, numbers: Tensor) -> OnDevice:
        if numbers.dtype == torch.float64 and not _waits.float64:
            raise TypeError("cannot make a float64 tensor on a device without float64.")
        made = Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made.numbers = numbers
        return made

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_by_tensors(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, (bool, int, float)):
            super().__getitem__(_by_tensors(key)).fill_(value)
        else:
            super().__setitem__(_by_tensors(key), value)

    def tolist(self) -> Any:
        _waits.note("tolist")
        return self.numbers.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a tensor of the stand-in device to numpy: use .cpu().")

    __array__ = numpy

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"device": DEVICE, "dtype": self.dtype, **options})

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def untyped_storage(self) -> Any:
        return self.numbers.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _by_tensors(key: Any) -> Any:
    """Lists of indices are made tensors below the dispatcher, where there is no such device."""
    if isinstance(key, tuple):
        return tuple(map(_by_tensors, key))
    return torch.tensor(key, device="cpu") if isinstance(key, list) else key


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


# Arguments are tuples, lists and dictionaries of leaves: pytree, which knows far more kinds, took
# half of the time of all tests on the device.
def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        yield value
        return
    for item in value:
        if isinstance(item, (tuple, list, dict)):
            yield from _leaves(item)
        else:
            yield item


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        made = [_mapped(function, item) for item in value]
        return made if isinstance(value, list) else tuple(made)
    return function(value)


def _in_main_memory(leaf: Any) -> Any:
    if isinstance(leaf, OnDevice):
        return leaf.numbers
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = [*_leaves(args), *_leaves(kwargs)]
    ours = [leaf for leaf in leaves if isinstance(leaf, OnDevice)]
    made_there = any(isinstance(leaf, torch.device) and _is_there(leaf) for leaf in leaves)
    if not ours and not made_there:
        return func(*args, **kwargs)
    if any(isinstance(t, Tensor) and t.is_meta for t in leaves):
        raise AssertionError(f"{func} got a tensor that the stand-in has not made.")
    if isinstance(kwargs.get("generator"), torch.Generator):
        raise RuntimeError(f"{func} on the device got a generator of main memory.")
    name = func.overloadpacket
    elsewhere = [
        t for t in leaves if isinstance(t, Tensor) and not isinstance(t, OnDevice) and t.ndim
    ]
    if ours and elsewhere and name not in (*_COPYING, *_INDEXING):
        raise RuntimeError(f"{func} got tensors on the stand-in device and on cpu.")
    if name in _WAITING:
        _waits.note(name.__name__)
    if name in _INDEXING:
        indices = [t for t in _leaves(args[1]) if isinstance(t, Tensor)]
        if any(not isinstance(t, OnDevice) or t.dtype == torch.bool for t in indices):
            _waits.note(name.__name__)
    if name is _aten.copy_:
        target, source = args[:2]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if waits and isinstance(target, OnDevice) != isinstance(source, OnDevice):
            _waits.note("copy_")
        into, numbers = (t.numbers if isinstance(t, OnDevice) else t for t in (target, source))
        # C++ sees no shared memory here: matmul(out=) copies a view of its result onto itself.
        plain = into.is_contiguous() and numbers.is_contiguous()
        if not (plain and into.data_ptr() == numbers.data_ptr()):
            into.copy_(numbers)
        return target
    asked = kwargs.get("device")
    there = _is_there(asked) if asked is not None else bool(ours)
    moved = name is _aten._to_copy and there != bool(ours)
    if moved and not kwargs.get("non_blocking", False):
        _waits.note("to")
    plain_args, plain_kwargs = _mapped(_in_main_memory, args), _mapped(_in_main_memory, kwargs)
    if moved and there:
        plain_args = (plain_args[0].clone(), *plain_args[1:])
    result = func(*plain_args, **plain_kwargs)
    if isinstance(result, (bool, int, float)):
        _waits.note(name.__name__)
    inputs = {id(t.numbers): t for t in ours}

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not there:
            return leaf
        return inputs[id(leaf)] if id(leaf) in inputs else OnDevice(leaf)

    return _mapped(placed, result)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def stand_in_device(*, float64: bool = True) -> Iterator[Waits]:
    """Inside, tensors can be made on ``DEVICE``; what waits for it is counted."""

    def moved(make: Any) -> Any:
        # These two fill their tensor below the dispatcher, where there is no such device.
        def run(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if not _is_there(device) or isinstance(data, Tensor):
                return make(data, *args, device=device, **kwargs)
            return make(data, *args, **kwargs).to(device)

        return run

    def no_autocast(device_type: str, **options: Any) -> Any:
        return nullcontext() if device_type == DEVICE.type else autocast(device_type, **options)

    autocast = torch.autocast
    _waits.clear()
    _waits.float64 = float64
    with (
        mock.patch.object(torch, "tensor", moved(torch.tensor)),
        mock.patch.object(torch, "as_tensor", moved(torch.as_tensor)),
        mock.patch.object(torch, "autocast", no_autocast),
        mock.patch.object(torch, "is_autocast_enabled", return_value=False),
        _Mode(),
    ):
        yield _waits
