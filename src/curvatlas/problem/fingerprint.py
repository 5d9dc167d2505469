r"""A fingerprint of the values a result rests on: has any weight, buffer or loss tensor changed?

Version counters and addresses do not tell: fused optimizers, ``p.data`` and foreign code write
without moving them, and a replaced tensor has counters of its own. So the values are read, from the
live objects, whenever a kept graph is about to be used. Of small tensors a CRC-32 is taken: it
notices every change within 32 neighbouring bits, and misses one in 2³² others. Large ones are read
in rows, and two numbers are kept of each:

    D = Σ_j w_j b_j  mod 2⁶⁴   over its 64-bit words b, with fixed random odd w,
    M = Σ_j a_j x_j            over its numbers x, with fixed random a.

D is exact: an odd w_j has an inverse, so that a change of any one word changes D, however small it
is, and swapped words change it too. Of the highest bits of a word, signs and exponents, D sees
little more than their sum; M sees these. What it costs: benchmarks/guards.py.

On a device, reading these numbers makes the host wait for it. There they are compared where they
are (``changed``), and what the host needs to know is one truth value, which it can ask for later.
"""

from __future__ import annotations

import functools
import hashlib
import re
import types
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from curvatlas import parallel
from curvatlas.errors import ProblemError
from curvatlas.files import in_memory
from curvatlas.problem.evaluation import listed

if TYPE_CHECKING:
    from curvatlas.problem.problem import Problem

_ROW_BYTES = 2**12
_LARGE = 2**17  # bytes: below, the calls of a reduction take longer than reading byte by byte
_ROWS = 128  # of a group: half a megabyte, which stays in the cache between the passes
_DEVICE_ROWS = 2**14  # of a group elsewhere: 64 MB, so that few calls are made

_steps = [0]  # of any optimizer of torch: fused ones write to weights without a version moving


@functools.cache
def _count_steps() -> None:
    """Have the steps of optimizers counted from now on."""

    def count(*_: Any) -> None:
        _steps[0] += 1

    register_optimizer_step_post_hook(count)


class LiveTensors:
    """Every tensor that ``root`` holds now: a module, a loss, a callable with what it closes over.

    The root is looked through once. Afterwards the identities of the objects in it are compared,
    which tells when something was replaced and it has to be looked through again.

    beside: tensors that are watched already and are left out here.
    """

    def __init__(self, root: Any, *, beside: LiveTensors | None = None) -> None:
        self._root, self._beside = root, beside
        self.generation = 0  # moves whenever an object was replaced
        # Attributes that forward passes rewrite, by holder and name.
        self._rewritten: set[tuple[int, str]] = set()
        self._tensors: list[Tensor] = []
        # Of the last look, where a device has a part in it.
        self._last, self._here = b"", b""
        self._devices: list[torch.device] = []
        self._there: list[Tensor] = []
        self._signs: list[int] = []
        self._look_through()

    def fingerprint(self, *, devices: bool = True) -> bytes:
        """Changes whenever the value of a tensor changes, in whatever way.

        devices: False takes what lies in main memory only.
        """
        if not self._watched:
            return b""
        if self._identities() != self._seen:
            self.follow()
        if [t.data_ptr() for t in self._memories] != self._addresses:
            self._arrange()  # ``p.data = other``: the same object with other memory
        checksum = 0
        for memory in self._small:
            checksum = zlib.crc32(memory, checksum)
        digest = hashlib.blake2b(self._shapes, digest_size=16)
        digest.update(checksum.to_bytes(4, "little"))
        for group in self._groups:
            for marks in group.marks():
                digest.update(marks.numpy().data)
        for tensor in self._irregular:
            digest.update(_irregular_value(tensor))
        if not devices:
            return bytes(digest.digest())
        if self._devices:
            self._here = digest.digest()
            self._signs = self._host_signs()
            self._there = [self._marks_on(device) for device in self._devices]
            for marks in self._there:
                digest.update(marks.cpu().numpy().data)
        self._last = bytes(digest.digest())
        return self._last

    def changed(self, fingerprint: bytes) -> bool | Tensor:
        """Whether ``fingerprint()`` would give another one now.

        A truth value on the device where the host would have to wait for the answer. What moves on
        the host as well is looked at there: replaced objects, other memory, versions, steps of
        optimizers.
        """
        if not self._watched or not self._devices:
            return self.fingerprint() != fingerprint
        if self._last != fingerprint or len(self._devices) > 1 or self._identities() != self._seen:
            return self.fingerprint() != fingerprint
        if self._host_signs() != self._signs or self.fingerprint(devices=False) != self._here:
            return self.fingerprint() != fingerprint
        return (self._marks_on(self._devices[0]) != self._there[0]).any()

    def _marks_on(self, device: torch.device) -> Tensor:
        """D and M of all rows on a device, as 64-bit words of one vector."""
        groups = list(self._device_groups[device])
        for tensor in self._gaps:
            if tensor.device == device:
                groups += _groups([tensor.detach().contiguous().view(-1)], look=False)
        return torch.cat([marks for group in groups for marks in group.marks()])

    def _host_signs(self) -> list[int]:
        """What moves on the host with most changes on a device."""
        versions = [t._version for t in self._tensors if not t.is_inference()]
        return [_steps[0], *(t.data_ptr() for t in self._memories), *versions]

    def follow(self) -> None:
        """Look through the root again if an object in it was replaced."""
        if self._identities() != self._seen:
            self.generation += 1
            self._look_through()

    def settle(self) -> None:
        """After a forward pass: the attributes it has replaced are its results, not its weights.

        Modules keep their last attention map or a table of positions in plain attributes.
        """
        replaced = {
            (id(holder), name)
            for holder, name, value in self._attributes
            if holder.get(name) is not value
        }
        if replaced:
            self._rewritten |= replaced
            self._look_through()

    # --- looking through --------------------------------------------------------------------------

    def _identities(self) -> tuple[int, ...]:
        lengths = map(len, self._dicts)
        held = chain.from_iterable(map(dict.values, self._filled))
        attributes = [holder.get(name) for holder, name, _ in self._attributes]
        return (
            *lengths,
            *map(id, held),
            *map(id, attributes),
            *map(id, map(_contents, self._cells)),
        )

    def _look_through(self) -> None:
        self._dicts: list[dict[str, Any]] = []  # of modules: parameters, buffers, children
        self._attributes: list[tuple[dict[str, Any], str, Any]] = []  # dictionary, name, value
        self._cells: list[Any] = []  # what functions close over
        self._visited: dict[int, Any] = {}
        tensors: dict[int, Tensor] = {}
        if self._beside is not None:
            self._visited.update(self._beside._visited)
        self._visit(self._root, tensors)
        for known in self._beside._tensors if self._beside is not None else ():
            tensors.pop(id(known), None)
        self._filled = [held for held in self._dicts if held]
        self._watched = bool(self._dicts or self._attributes or self._cells or tensors)
        self._seen = self._identities()
        # An object that is gone may leave its identity to another one: keep them all.
        self._kept = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._tensors = list(tensors.values())
        self._arrange()

    def _visit(self, item: Any, tensors: dict[int, Tensor]) -> None:
        if isinstance(item, Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(item):
                return  # what a forward pass left of a transform that is over: it has no memory
            local = getattr(item, "_local_tensor", item)  # this process's part of a DTensor
            tensors[id(local)] = local
            return
        if id(item) in self._visited:
            return
        self._visited[id(item)] = item
        if isinstance(item, nn.Module):
            for held in (item._parameters, item._buffers, item._modules):
                self._dicts.append(held)
                for value in held.values():
                    self._visit(value, tensors)
            self._visit_attributes(vars(item), tensors, kinds=(Tensor,))
        elif isinstance(item, (list, tuple)):
            for part in item:
                self._visit(part, tensors)
        elif isinstance(item, functools.partial):
            for part in (item.func, *item.args):
                self._visit(part, tensors)
            self._visit_attributes(item.keywords, tensors)
        elif isinstance(item, types.MethodType):
            self._visit(item.__func__, tensors)
            self._visit_attributes(vars(item.__self__), tensors, item.__func__)
        elif isinstance(item, types.FunctionType):
            for cell in item.__closure__ or ():
                self._cells.append(cell)
                self._visit(_contents(cell), tensors)
            self._visit(item.__defaults__, tensors)
            self._visit_attributes(item.__globals__, tensors, item, kinds=(Tensor, nn.Module))
        elif item is self._root or (callable(item) and not isinstance(item, type)):
            self._visit_attributes(getattr(item, "__dict__", {}), tensors)

    def _visit_attributes(
        self,
        held: dict[str, Any],
        tensors: dict[int, Tensor],
        named_by: types.FunctionType | Any = None,
        *,
        kinds: tuple[type, ...] | None = None,
    ) -> None:
        """The attributes of some kinds, or only those that a function's code names."""
        names = list(held) if named_by is None else list(named_by.__code__.co_names)
        for name in names:
            value = held.get(name)
            if kinds is not None and not isinstance(value, kinds):
                continue
            if isinstance(value, Tensor):
                if value.grad_fn is not None or (id(held), name) in self._rewritten:
                    continue
                self._attributes.append((held, name, value))
            elif isinstance(value, nn.Module):
                self._attributes.append((held, name, value))
            self._visit(value, tensors)

    # --- arranging --------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Sort the tensors by how they are read."""
        self._memories = [part for tensor in self._tensors for part in in_memory(tensor)]
        self._addresses = [part.data_ptr() for part in self._memories]
        self._irregular: list[Tensor] = []
        self._gaps: list[Tensor] = []  # on a device, entries not side by side
        self._last = b""  # what was kept of the last look was in another order
        self._small: list[memoryview] = []
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in self._tensors:
            flat = _flat(tensor)
            if flat is None:
                there = tensor.device.type != "cpu" and tensor.layout == torch.strided
                (self._gaps if there else self._irregular).append(tensor)
            elif flat.device.type == "cpu" and flat.numel() * flat.element_size() < _LARGE:
                if flat.numel():
                    self._small.append(flat.view(torch.uint8).numpy().data)
            elif flat.numel():
                kinds.setdefault((flat.dtype, flat.device), []).append(flat)
        self._groups: list[_Group] = []
        self._device_groups: dict[torch.device, list[_Group]] = {}
        for (_, device), flats in kinds.items():
            if device.type == "cpu":
                self._groups += _groups(flats)
            else:
                self._device_groups.setdefault(device, []).extend(_groups(flats))
        for tensor in self._gaps:
            self._device_groups.setdefault(tensor.device, [])
        self._devices = list(self._device_groups)
        if self._devices:
            _count_steps()
        self._shapes = "; ".join(f"{tuple(t.shape)} {t.dtype}" for t in self._tensors).encode()


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _flat(tensor: Tensor) -> Tensor | None:
    """The tensor's memory as a vector; None where its entries do not lie side by side."""
    try:
        value = tensor.detach()
        if value.is_complex():
            value = torch.view_as_real(value)
        strides = value.stride()
        order = sorted(range(value.ndim), key=lambda axis: -strides[axis])
        dense = value.permute(order)
        return dense.view(-1) if dense.is_contiguous() else None
    except (RuntimeError, NotImplementedError):
        return None


def _irregular_value(tensor: Tensor) -> bytes:
    """The digest of a copy; identity and version of a tensor that cannot be copied either."""
    try:
        digest = hashlib.blake2b(digest_size=16)
        for part in in_memory(tensor.detach()):
            for group in _groups([part.contiguous().view(-1)]):
                for marks in group.marks():
                    digest.update(marks.cpu().numpy().data)
        return digest.digest()
    except (RuntimeError, NotImplementedError):
        return f"{id(tensor)} {tensor._version}".encode()


@dataclass(frozen=True)
class _Group:
    """Vectors and their rows, as words and as numbers."""

    vectors: list[Tensor]  # to be copied side by side; none where the rows are their own memory
    place: Tensor | None  # where to, in the buffer
    rest: Tensor | None  # of the last row, to be zero
    words: Tensor  # (rows, 64-bit words)
    numbers: Tensor | None  # (rows, numbers), None for integers
    finite: bool

    def marks(self) -> list[Tensor]:
        """D and M of every row: (rows,) each, on a device as 64-bit words."""
        with torch.no_grad():
            if self.place is not None:
                torch.cat(self.vectors, out=self.place)
            if self.rest is not None:
                self.rest.zero_()
            if self.numbers is None:
                return [_times(self.words)]
            exact = _times(self.words)  # before another group takes the buffer
            numbers = self.numbers
            if numbers.dtype not in (torch.float32, torch.float64):
                numbers = numbers.float()
            if not self.finite:
                numbers = numbers.nan_to_num()  # an infinity would hide all others of its row
            return [exact, _times(numbers)]


def _times(rows: Tensor) -> Tensor:
    """rows @ weights."""
    weights = _weights(rows.shape[1], rows.dtype, rows.device)
    if rows.device.type == "cpu":
        return torch.mv(rows, weights)
    sums = (rows * weights).sum(1)  # other devices multiply no integer matrices
    if sums.dtype == torch.float32:
        return sums.view(torch.int32).to(torch.int64)
    return sums.view(torch.int64)


@functools.lru_cache(maxsize=16)
def _weights(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fixed random odd integers, or numbers between 0.5 and 1.5."""
    generator = torch.Generator().manual_seed(20250729)
    with torch.inference_mode(False):
        if dtype == torch.int64:
            drawn = (
                torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu") * 2 + 1
            )
        else:
            drawn = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu") + 0.5
        return drawn.to(dtype=dtype, device=device)


def _groups(vectors: Sequence[Tensor], *, look: bool = True) -> list[_Group]:
    """Groups of vectors of one dtype and device: large ones in place, small ones in a buffer.

    look: whether all numbers are finite, which saves a pass; the host waits for the answer.
    """
    in_row = _ROW_BYTES // vectors[0].element_size()
    most = _ROWS if vectors[0].device.type == "cpu" else _DEVICE_ROWS
    groups: list[_Group] = []
    packed: list[list[Tensor]] = []
    room = 0
    for vector in vectors:
        rows = vector.numel() // in_row
        in_place = (
            rows * in_row if rows * _ROW_BYTES >= _LARGE // 2 and vector.data_ptr() % 8 == 0 else 0
        )
        if in_place and vector.storage_offset() * vector.element_size() % 8 == 0:
            pieces = torch.split(vector[:in_place], most * in_row)
            groups += [_group([], len(piece), piece, in_row, look=look) for piece in pieces]
            vector = vector[in_place:]
        for piece in torch.split(vector, most * in_row):
            if not piece.numel():
                continue
            if piece.numel() > room:
                packed.append([])
                room = most * in_row
            packed[-1].append(piece)
            room -= piece.numel()
    lengths = [sum(piece.numel() for piece in pieces) for pieces in packed]
    with torch.inference_mode(False):
        buffer = vectors[0].new_zeros(-(-max(lengths, default=0) // in_row) * in_row)
    groups += [
        _group(pieces, length, buffer, in_row, look=look)
        for pieces, length in zip(packed, lengths, strict=True)
    ]
    return groups


def _group(pieces: list[Tensor], length: int, memory: Tensor, in_row: int, *, look: bool) -> _Group:
    """The group of what is copied to ``memory`` (pieces) or lies there."""
    rows = -(-length // in_row)
    used = memory[: rows * in_row]
    floating = memory.is_floating_point()
    return _Group(
        vectors=pieces,
        place=memory[:length] if pieces else None,
        rest=used[length:] if length < len(used) else None,
        words=used.view(torch.int64).view(rows, -1),
        numbers=used.view(rows, in_row) if floating else None,
        finite=not floating
        or (look and all(bool(torch.isfinite(t).all()) for t in pieces or [memory])),
    )


# --- the same in every process --------------------------------------------------------------------

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, np.generic)
# What functions and foreign objects are told apart by. Their whole numbers and texts are not:
# ranks and devices are among them, which differ by right.
_TELLING = (
    bool,
    float,
    complex,
    np.floating,
    np.ndarray,
    Tensor,
    nn.Module,
    functools.partial,
    types.FunctionType,
    types.MethodType,
)


def content(value: Any) -> bytes:
    """A digest (16 bytes) of what an object holds, the same in every process that holds the same.

    Tensors and arrays count by their bytes wherever they lie, containers by what is in them,
    functions by their code and the numbers it refers to, other objects by type, numbers and
    tensors.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, value, set())
    return digest.digest()


def without_places(text: str) -> str:
    """A ``repr`` without addresses in memory and numbers of devices."""
    return re.sub(r"0x[0-9a-fA-F]+|\b[a-z]+:\d+", "", text)


def _add(digest: Any, value: Any, open_: set[int]) -> None:
    if isinstance(value, _PLAIN):
        digest.update(f"{type(value).__name__} {value!r};".encode())
        return
    digest.update(f"{type(value).__module__}.{type(value).__qualname__}(".encode())
    if isinstance(value, Tensor | np.ndarray):
        _add_numbers(digest, value)
    elif id(value) not in open_:  # what holds itself is told once
        for part in _parts(value):
            _add(digest, part, {*open_, id(value)})
    digest.update(b")")


def _add_numbers(digest: Any, value: Tensor | np.ndarray) -> None:
    digest.update(f"{tuple(value.shape)} {value.dtype};".encode())
    if isinstance(value, np.ndarray):
        digest.update(value.tobytes())
        return
    if hasattr(value, "placements") or value.is_meta:
        return  # a part of a sharded tensor differs by right; without values there are none
    dense = value if value.layout == torch.strided else value.to_dense()
    flat = dense.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def _parts(value: Any) -> Sequence[Any]:
    """What an object is made of, in an order that every process has."""
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=str) for part in (str(key), value[key])]
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, _telling(vars(value.__self__), used_by=value.__func__)]
    if isinstance(value, types.FunctionType):
        code = value.__code__
        cells = dict(zip(code.co_freevars, map(_contents, value.__closure__ or ()), strict=True))
        named = _telling(value.__globals__, used_by=value)
        defaults = [value.__defaults__, value.__kwdefaults__]
        return [value.__qualname__, code, *defaults, _telling(cells), named]
    if isinstance(value, types.CodeType):
        return [value.co_code, value.co_names, value.co_consts]
    if isinstance(value, nn.Module):
        library = type(value).__module__.startswith("torch.")
        plain = {n: v for n, v in vars(value).items() if library and isinstance(v, _PLAIN)}
        numbers = _telling(vars(value))
        return [plain, numbers, value._parameters, value._buffers, value._modules]
    if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
        return [getattr(value, "__qualname__", value.__name__)]
    held = getattr(value, "__dict__", {})
    return [_telling(held, used_by=type(value).__call__) if callable(value) else _telling(held)]


def _telling(named: Mapping[str, Any], *, used_by: Any = None) -> dict[str, Any]:
    """The numbers, tensors and functions among them; of a function's surroundings, what it uses."""
    code = getattr(used_by, "__code__", None)
    names = list(named) if code is None else code.co_names
    return {n: named[n] for n in names if n in named and isinstance(named[n], _TELLING)}


# --- what the ranks of a process group must have in common --------------------------------------
#
# The sum over ranks of H_r v is the product of one Hessian only if all ranks hold the same weights
# and the same loss; with ``shard=True`` they must see the same batches too, or samples are counted
# twice and others never. Each rank's facts go into one digest. Where the digests differ, and only
# there, the facts themselves are exchanged, so that every rank can say what it is.

_SAME_STATE = (
    "load the same state on every rank, or broadcast rank 0's (torch.distributed.broadcast)"
)
# fact → what a rank has, and what to do about it; the first of them that differs is told
_FACTS = {
    "model": ("another model", "build it by the same code with the same options on every rank"),
    "parameters": ("other parameters that vary", "pass the same parameters= on every rank"),
    "dtype": ("parameters of another dtype", "convert the model alike on every rank"),
    "options": ("other options of the Problem", "pass the same ones on every rank"),
    "weights": ("other weights", _SAME_STATE),
    "buffers": ("other buffers", _SAME_STATE),
    "loss": ("another loss", "pass the same one, options and tensors alike, on every rank"),
    "data": (
        "other data",
        "with shard=True every rank has to see the same batches in the same order; switch "
        "shuffling off or seed all loaders alike, or leave shard out and give each rank its share",
    ),
}


def state_of(problem: Problem, *, weights: bool = True) -> dict[str, str]:
    """Digests of the weights, the buffers and the loss by name.

    Weights that are spread are summed up over the processes when all look at them together
    (``ShardedWeights.look``); ``weights=False`` leaves them out.
    """
    tensors: dict[str, str] = {}
    if weights and problem.sharded is not None:
        tensors = {f"weights {n}": f"{number:x}" for n, number in problem.sharded.digests.items()}
    elif weights:
        tensors = {f"weights {n}": content(w).hex() for n, w in problem.all_parameters.items()}
    tensors |= {f"buffers {n}": content(b).hex() for n, b in problem.model.named_buffers()}
    return {**tensors, "loss": content([type(problem.loss), vars(problem.loss)]).hex()}


def model_facts(problem: Problem) -> dict[str, str]:
    """What ranks compare before they gather anything."""
    dtypes = {name: str(tensor.dtype) for name, tensor in problem.all_parameters.items()}
    return {
        "model": content(without_places(repr(problem.model))).hex(),
        "parameters": content([problem.parameter_names, problem.layout.shapes]).hex(),
        "dtype": content(dtypes).hex(),
        "options": content(problem.options).hex(),
    }


def facts_of(problem: Problem) -> dict[str, str]:
    """Everything that ranks compare."""
    return {
        **model_facts(problem),
        **state_of(problem),
        "data": problem.data_digest.hex(),
    }


def refuse_differing(facts: Mapping[str, str]) -> None:
    """Say on every rank what differs; called by all of them."""
    differing = parallel.differing(facts)
    for fact, (what, remedy) in _FACTS.items():
        told = {name: values for name, values in differing.items() if name.split(" ")[0] == fact}
        if told:
            ranks = sorted({r for v in told.values() for r in parallel.others_than_first(v)})
            who = parallel.named(ranks, "has", "have")
            raise ProblemError(f"{who} {what} than rank 0{_where(list(told))}: {remedy}.")


def _where(names: Sequence[str]) -> str:
    tensors = [name.split(" ", 1)[1] for name in names if " " in name]
    return f" ({listed(tensors)})" if tensors else ""
