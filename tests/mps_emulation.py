"""A device without float64, as Apple's GPU is one: its tensors compute on the CPU.

PyTorch for the CPU refuses "mps", so the device calls itself "meta", which
``precision.WITHOUT_FLOAT64`` has to be told. As on the real one, no float64 tensor can be made or
moved there, and tensors of two devices do not mix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

MPS = torch.device("meta")
_aten = torch.ops.aten


class _OnMps(Tensor):
    """A tensor of the device, which holds its numbers in main memory."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor) -> _OnMps:
        if numbers.dtype == torch.float64:
            raise TypeError("cannot make a float64 tensor on a device without float64.")
        made = Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=MPS,
            requires_grad=False,
        )
        made.numbers = numbers
        return made

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_by_tensors(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_by_tensors(key), value)

    def tolist(self) -> Any:
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _by_tensors(key: Any) -> Any:
    """Lists of indices are made tensors below the dispatcher, where there is no such device."""
    if isinstance(key, tuple):
        return tuple(map(_by_tensors, key))
    return torch.tensor(key, device="cpu") if isinstance(key, list) else key


def _is_mps(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_flatten((args, kwargs))[0]
    ours = [leaf for leaf in leaves if isinstance(leaf, _OnMps)]
    if not ours and not any(
        isinstance(leaf, torch.device) and leaf.type == "meta" for leaf in leaves
    ):
        return func(*args, **kwargs)
    if any(isinstance(t, Tensor) and t.is_meta and not isinstance(t, _OnMps) for t in leaves):
        raise AssertionError(f"{func} got a tensor that this emulation has not made.")
    name = func.overloadpacket
    elsewhere = [
        t for t in leaves if isinstance(t, Tensor) and not isinstance(t, _OnMps) and t.ndim
    ]
    copying = (_aten.copy_, _aten._to_copy)
    indexing = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
    if ours and elsewhere and name not in (*copying, *indexing):
        raise RuntimeError(f"{func} got tensors on mps:0 and on cpu.")
    if name is _aten.copy_:
        target, source = args[:2]
        into, numbers = (t.numbers if isinstance(t, _OnMps) else t for t in (target, source))
        into.copy_(numbers)
        return target
    asked = kwargs.get("device")
    there = _is_mps(asked) if asked is not None else bool(ours)
    plain_args, plain_kwargs = tree_map(
        lambda leaf: (
            leaf.numbers
            if isinstance(leaf, _OnMps)
            else torch.device("cpu")
            if isinstance(leaf, torch.device)
            else leaf
        ),
        (args, kwargs),
    )
    if func is _aten._to_copy.default and asked is not None and there and not ours:
        plain_args = (plain_args[0].clone(), *plain_args[1:])
    result = func(*plain_args, **plain_kwargs)
    known = {id(t.numbers): t for t in ours}

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not there:
            return leaf
        return known[id(leaf)] if id(leaf) in known else _OnMps(leaf)

    return tree_map(placed, result)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def emulated_mps() -> Iterator[None]:
    """Inside, tensors can be made on the device ``MPS``."""
    originals = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}

    def moved(make: Any) -> Any:
        # These two fill their tensor below the dispatcher, where there is no such device.
        def run(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if not _is_mps(device) or isinstance(data, Tensor):
                return make(data, *args, device=device, **kwargs)
            return make(data, *args, **kwargs).to(device)

        return run

    try:
        for name, original in originals.items():
            setattr(torch, name, moved(original))
        with _Mode():
            yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
