"""What a model and its loss compute, written down once: one node an operation that moves.

Two levels look at one ordinary call of the untouched model. A ``TorchFunctionMode`` above lifts
every tensor that it meets into functionalisation, so that nothing is written in place beneath, and
takes whole functions for which there is a rule (``linear``, ``matmul``, attention) as one node. A
``TorchDispatchMode`` beneath writes down everything else as ATen operations.

A leaf is the *memory* of a parameter, whichever way the model or the loss reaches it. What does not
depend on a leaf is a constant and makes no node; so is what the model detaches or computes where
gradients are switched off: the derivative stops there, as it does for autograd.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from curvatlas.errors import DifferentiationError, NoGradientPath
from curvatlas.problem.kernels import Replaced

aten = torch.ops.aten
_torch: Any = torch  # its functionalisation is not typed
swap_tensors: Any = torch.utils.swap_tensors
_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
_STOPS = frozenset((aten.detach.default,))
# What reads no more of a tensor than its shape and dtype.
_CONSTANT = frozenset(
    (
        aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.empty_like.default, aten.new_zeros.default, aten.new_ones.default,
        aten.new_full.default, aten.new_empty.default, aten.fill.Scalar, aten.zero.default,
    )
)  # fmt: skip


def _from_numpy(array: Any) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE):
        return _usual_from_numpy(array)


_usual_from_numpy = torch.from_numpy  # which a mode does not see
# Functions of Python that would hand themselves to the mode whole, instead of running their body.
_REPLACED = (
    *(
        Replaced("torch.nn.functional", "", name, lambda *_: False)
        for name in (
            "has_torch_function",
            "has_torch_function_unary",
            "has_torch_function_variadic",
        )
    ),
    Replaced("torch", "", "from_numpy", _from_numpy),
)


class Ref(NamedTuple):
    """In a node's arguments, the place of a value that moves."""

    slot: int


@dataclass(eq=False)
class Node:
    """One operation: ``outputs = operation(*args, **kwargs)``, with ``Ref`` where values move."""

    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]  # slots, in the order of their first place among the arguments
    outputs: tuple[int | None, ...]  # slots; None for what does not move (indices, counts)
    module: str  # that was running
    many: bool  # whether the operation returns a tuple

    @property
    def name(self) -> str:
        """The operation as messages call it."""
        overload = isinstance(self.operation, torch._ops.OpOverload)
        return str(self.operation) if overload else self.operation.__name__

    def with_values(self, values: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these values in the places of the inputs."""
        by_slot = dict(zip(self.inputs, values, strict=True))
        args, kwargs = tree_map_refs(lambda ref: by_slot[ref.slot], (self.args, self.kwargs))
        return args, kwargs


def tree_map_refs(change: Callable[[Ref], Any], arguments: Any) -> Any:
    """Arguments with every ``Ref`` exchanged."""
    if isinstance(arguments, Ref):
        return change(arguments)
    if isinstance(arguments, (list, tuple)):
        changed = [tree_map_refs(change, a) for a in arguments]
        return changed if isinstance(arguments, list) else tuple(changed)
    if isinstance(arguments, dict):
        return {key: tree_map_refs(change, a) for key, a in arguments.items()}
    return arguments


@dataclass(eq=False)
class Record:
    """A call written down: nodes in the order in which they ran.

    leaves: parameter name → its slot;  values: of every slot, at the recorded point;
    boundary: the number of nodes of the model, before those of the loss;  loss: its slot.
    """

    nodes: list[Node] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    leaves: dict[str, int] = field(default_factory=dict)
    boundary: int = 0
    loss: int = -1
    stops: set[str] = field(default_factory=set)  # modules in which the derivative stops
    hooks: set[str] = field(default_factory=set)  # where autograd would change it by tensor hooks

    def slot(self, value: Tensor) -> int:
        """A new slot for a value that moves."""
        self.values.append(value)
        return len(self.values) - 1

    def replayed(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """The loss that the record computes at other values of the leaves."""
        values: dict[int, Tensor] = {
            slot: leaves.get(name, self.values[slot]) for name, slot in self.leaves.items()
        }
        for node in self.nodes:
            args, kwargs = node.with_values([values[slot] for slot in node.inputs])
            result = node.operation(*args, **kwargs)
            results = result if node.many else (result,)
            for slot, value in zip(node.outputs, results, strict=True):
                if slot is not None:
                    values[slot] = value
        return values[self.loss]

    def __str__(self) -> str:
        """A line a node: slots, operation, shapes, kind of rule, module."""
        from curvatlas.tape.rules import rule_for

        used = frozenset(slot for node in self.nodes for slot in node.inputs)
        lines = []
        for node in self.nodes:
            made = [slot for slot in node.outputs if slot is not None]
            rule = rule_for(node, self.values, used)
            shapes = ", ".join(f"%{s} {list(self.values[s].shape)}" for s in node.inputs)
            lines.append(
                f"{', '.join(f'%{slot}' for slot in made)} = {node.name}({shapes}) → "
                f"{', '.join(str(list(self.values[slot].shape)) for slot in made)}  "
                f"{type(rule).__name__.lower()}  {node.module}"
            )
        return "\n".join(lines)


class _Mark(NamedTuple):
    """What a constant came from: ``stops`` the derivative, or ``draws`` random numbers."""

    value: Tensor
    kind: str
    module: str


class _Writer:
    """The record while it is written, and what both levels share.

    follows: leaves require grad and functions are not taken whole, because the model differentiates
    in its own forward pass: its backward pass then arrives as operations.
    """

    def __init__(self, model: nn.Module, named: Mapping[str, Tensor], *, follows: bool) -> None:
        self.record = Record()
        self.paused = False
        self.follows = follows
        self.modules: list[str] = [""]
        self.failed: str | None = None  # the module in which the call broke off
        self.results: list[Tensor] = []  # wrappers that the model's code was given
        self._slots: dict[int, int] = {}  # id of a value of the record → its slot
        self._lifted: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor → itself, its wrapper
        self._marks: dict[int, _Mark] = {}  # id of a constant → what it came from
        self._leaves = _Leaves(model, named)
        for name, tensor in named.items():
            if tensor.is_complex():
                raise DifferentiationError(
                    f"parameter {name!r} is complex, which the tape does not follow: hold its real "
                    "and imaginary parts as two real parameters."
                )
            value = tensor.detach()
            slot = self.record.leaves[name] = self.record.slot(value)
            self._slots[id(value)] = self._slots[id(tensor)] = slot
            wrapper = _torch._to_functional_tensor(value)
            self._lifted[id(tensor)] = (tensor, wrapper.requires_grad_() if follows else wrapper)

    def slot_of(self, value: Any) -> int | None:
        """The slot of a value or of what a wrapper holds, None: it does not move."""
        return self._slots.get(id(self.inner(value)))

    @property
    def module(self) -> str:
        return self.modules[-1] or "the model"

    # --- lifting ----------------------------------------------------------------------------------

    def lift(self, value: Any) -> Any:
        """Arguments with every plain tensor wrapped, the same tensor always by the same wrapper."""
        if isinstance(value, Tensor):
            known = self._lifted.get(id(value))
            if known is not None:
                return known[1]
            if _torch._is_functional_tensor(value) or not self._can_be_lifted(value):
                return value
            with _beneath(self):
                wrapper = _torch._to_functional_tensor(self._plain(value))
            self._lifted[id(value)] = (value, wrapper)
            return wrapper
        return _with_parts(value, self.lift)

    def _can_be_lifted(self, value: Tensor) -> bool:
        if value.is_nested:
            raise DifferentiationError(
                f"{self.module} computes with nested tensors, which the tape does not follow: pad "
                "them, or use engine='autograd'."
            )
        return value.layout is torch.strided and not _in_a_transform(value)

    def _plain(self, value: Tensor) -> Tensor:
        """A tensor met for the first time: a constant, or a view of a leaf's memory."""
        found = self._leaves.behind(value)
        own = value.detach()
        if found is None:
            return own
        name, followed = found
        slot = self.record.leaves[name]
        leaf = self.record.values[slot]
        if not followed:
            self._mark(own, "stops", self.module)
        elif _place(leaf) == _place(value):
            return leaf
        else:
            operation, args = _view_of(leaf, value)
            self.write(operation, (leaf, *args), {}, own)
        return own

    def inner(self, value: Any) -> Any:
        """Arguments with every wrapper exchanged for what it holds now."""
        if isinstance(value, Tensor):
            if not _torch._is_functional_tensor(value):
                return value
            _torch._sync(value)
            return _torch._from_functional_tensor(value)
        return _with_parts(value, self.inner)

    # --- writing ----------------------------------------------------------------------------------

    def write(
        self,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """A node, where something moves and something that can move comes out."""
        if operation in _CONSTANT:
            return
        if operation is aten.copy.default:
            operation, args, kwargs = self._copied(args[1], result)
        slots: dict[int, None] = {}
        mark: _Mark | None = None

        def placed(value: Tensor) -> Any:
            nonlocal mark
            slot = self._slots.get(id(value))
            if slot is not None:
                slots[slot] = None
                return Ref(slot)
            mark = self._marks.get(id(value), mark)
            return value

        placed_args, placed_kwargs = _tensors_changed(placed, (args, kwargs))
        many = isinstance(result, (list, tuple))
        results = result if many else (result,)
        if draws := _draws(operation, kwargs):
            mark = _Mark(results[0], "draws", self.module)
        if not slots or (stops := operation in _STOPS or not torch.is_grad_enabled()):
            if slots and not draws and stops:
                mark = _Mark(results[0], "stops", self.module)
            if mark is not None:
                for value in results:
                    self._mark(value, mark.kind, mark.module)
            return
        if mark is not None and mark.kind == "draws":
            raise DifferentiationError(
                f"{mark.module} draws random numbers on the way to the loss: call model.eval(), or "
                "make the draw an input."
            )
        outputs: list[int | None] = []
        for value in results:
            moves = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
            slot = self.record.slot(value) if moves else None
            if slot is not None:
                self._slots[id(value)] = slot
            outputs.append(slot)
        if any(slot is not None for slot in outputs):
            self.record.nodes.append(
                Node(
                    operation,
                    placed_args,
                    placed_kwargs,
                    tuple(slots),
                    tuple(outputs),
                    self.modules[-1],
                    many,
                )
            )

    def _copied(
        self, source: Tensor, result: Tensor
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """What writing all of a tensor over another is: nothing of that is left but its shape."""
        shape = list(result.shape)
        if source.dtype == result.dtype:
            return aten.expand.default, (source, shape), {}
        wide = source.expand(shape)
        self.write(aten.expand.default, (source, shape), {}, wide)
        return aten._to_copy.default, (wide,), {"dtype": result.dtype}

    def whole(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function beneath the record, and write it down as one node."""
        args, kwargs = _positional(function, self.inner(args), self.inner(kwargs))
        with _beneath(self):
            result = function(*args, **kwargs)
        if kwargs.get("dtype") is not None and isinstance(result, Tensor):
            kwargs = {**kwargs, "dtype": result.dtype}  # which the outer mode may have widened
        self.write(function, args, kwargs, result)
        with _beneath(self):
            return tree_map(
                lambda t: _torch._to_functional_tensor(t) if isinstance(t, Tensor) else t, result
            )

    def without_derivative(self, target: Tensor, change: Callable[[], Any]) -> Any:
        """A change in place where gradients are off: other values, and the derivative as before."""
        before = self.inner(target)
        result = change()
        after = self.inner(target)
        if before is not after and id(after) not in self._slots:
            with torch.enable_grad(), _beneath(self):
                difference = after - before
                self._mark(difference, "stops", self.module)
                self.write(aten.add.Tensor, (before, difference), {}, after)
        return result

    def _mark(self, value: Any, kind: str, module: str) -> None:
        if isinstance(value, Tensor) and (value.is_floating_point() or kind == "draws"):
            self._marks[id(value)] = _Mark(value, kind, module)

    # --- at the end -------------------------------------------------------------------------------

    def finish(self, loss: Tensor) -> Record:
        """The record of what leads to the loss."""
        record, slot = self.record, self.slot_of(loss)
        if slot is None:
            raise NoGradientPath(
                "no gradient path from the loss to any of the parameters: is the output detached, "
                "computed under no_grad, or independent of them?"
            )
        record.loss = slot
        reached, made = {slot}, set[int]()

        def noted(value: Tensor) -> None:
            mark = self._marks.get(id(value))
            if mark is not None:
                record.stops.add(mark.module)

        kept, model = [], 0
        for place, node in reversed(list(enumerate(record.nodes))):
            if any(output in reached for output in node.outputs):
                reached.update(node.inputs)
                made.update(output for output in node.outputs if output is not None)
                _tensors_changed(noted, (node.args, node.kwargs))
                kept.append(node)
                model += place < record.boundary
        record.nodes, record.boundary = kept[::-1], model
        reached.update(record.leaves.values())
        nothing = torch.empty(0)
        for place in range(len(record.values)):
            if place not in reached and place not in made:
                record.values[place] = nothing
        return record

    def give_back(self) -> None:
        """Wrappers that the model's code still holds, in a cache or an attribute, as plain tensors.

        Two references are ours: the list's and the loop's, and one is the argument's.
        """
        results, self.results = self.results, []
        while results:
            wrapper = results.pop()
            if sys.getrefcount(wrapper) > 2 and _torch._is_functional_tensor(wrapper):
                with contextlib.suppress(RuntimeError):  # somebody has a weak reference to it
                    swap_tensors(wrapper, self.inner(wrapper).detach())


class _Leaves:
    """Whose memory a tensor lies in.

    Beside the parameters themselves a pass meets stand-ins for them (attributes that were replaced
    for the call) and views that were made before it. Autograd follows a view where it has a graph;
    an alias without one, made by ``detach`` or ``.data``, is a constant.
    """

    def __init__(self, model: nn.Module, named: Mapping[str, Tensor]) -> None:
        self._model, self._named = model, named
        own = {id(tensor): name for name, tensor in named.items()}
        attributes = model.named_parameters(remove_duplicate=False)
        self._by_attribute = {name: own.get(id(p)) for name, p in attributes}
        self._by_id = own
        self._by_memory: dict[int, list[str]] = {}
        for name, tensor in named.items():
            memory = tensor.untyped_storage().data_ptr()
            if memory:
                self._by_memory.setdefault(memory, []).append(name)
        self._stand_ins: dict[int, str | None] = {}

    def behind(self, value: Tensor) -> tuple[str, bool] | None:
        """The leaf that a tensor is a view of, and whether derivatives follow it; None: none."""
        try:
            names = self._by_memory.get(value.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):
            names = None
        if names is None:
            return None
        if id(value) not in self._stand_ins:
            attributes = self._model.named_parameters(remove_duplicate=False)
            self._stand_ins = {id(p): self._by_attribute.get(n) for n, p in attributes}
        if id(value) in self._stand_ins:
            held = self._stand_ins[id(value)]
            return None if held is None else (held, True)
        name = self._by_id.get(id(value._base))
        if name is None:
            if isinstance(value, nn.Parameter):  # of its own: it varies, or not, by itself
                return None
            inside = (n for n in names if _overlap(self._named[n], value))
            name = next(inside, None)
            if name is None:
                return None
        leaf = self._named[name]
        followed = value.grad_fn is not None or not leaf.requires_grad
        return name, followed and leaf.dtype == value.dtype


def _place(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.size()), value.stride(), value.storage_offset()


def _positions(value: Tensor) -> Tensor:
    """Where in its memory each entry lies."""
    size = value.untyped_storage().nbytes() // value.itemsize
    places = torch.arange(size, device=value.device)
    return places.as_strided(value.size(), value.stride(), value.storage_offset())


def _overlap(leaf: Tensor, value: Tensor) -> bool:
    if leaf.itemsize != value.itemsize:
        return True
    return bool(torch.isin(_positions(value), _positions(leaf)).any())


def _view_of(leaf: Tensor, value: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The operation that takes a view of a leaf's memory from the leaf, however that lies."""
    for order in itertools.permutations(range(leaf.ndim)) if leaf.ndim <= 4 else ():
        if _place(leaf.permute(order)) == _place(value):
            return aten.permute.default, (list(order),)
    if leaf.is_contiguous() and value.is_contiguous() and leaf.numel() == value.numel():
        return aten.view.default, (list(value.shape),)
    places = _positions(leaf).flatten()
    wanted = _positions(value)
    if not bool(torch.isin(wanted, places).all()):
        raise DifferentiationError(
            f"a tensor of shape {list(value.shape)} lies in the memory of a parameter and beyond "
            "it: hold the whole as one parameter, and take its parts in forward."
        )
    numbers = torch.empty(int(places.max()) + 1, dtype=torch.long, device=leaf.device)
    numbers[places] = torch.arange(places.numel(), device=leaf.device)
    return aten.take.default, (numbers[wanted],)


def _with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container with every part changed, of the same kind; anything else as it is."""
    if isinstance(value, (list, tuple)):
        parts = [change(part) for part in value]
        kind = type(value)
        if kind is list or kind is tuple:
            return kind(parts)
        if hasattr(value, "_fields"):
            return kind(*parts)
        return kind(parts) if isinstance(value, (torch.Size, list)) else tuple(parts)
    if isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(change(part) for part in (value.start, value.stop, value.step)))
    return value


def _tensors_changed(change: Callable[[Tensor], Any], arguments: Any) -> Any:
    """Arguments with every tensor exchanged; tuples become plain ones."""
    if isinstance(arguments, Tensor):
        return change(arguments)
    if isinstance(arguments, (list, tuple)):
        changed = [_tensors_changed(change, a) for a in arguments]
        return changed if isinstance(arguments, list) else tuple(changed)
    if isinstance(arguments, dict):
        return {key: _tensors_changed(change, a) for key, a in arguments.items()}
    return arguments


def _positional(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call whose first arguments are given by position, as rules read them."""
    kwargs = dict(kwargs)
    for name in _FIRST.get(function, ())[len(args) :]:
        if name not in kwargs:
            break
        args = (*args, kwargs.pop(name))
    return args, kwargs


def _draws(operation: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws from the global generator."""
    if kwargs.get("dropout_p"):
        return True
    seeded = torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())
    return seeded and kwargs.get("generator") is None


def _in_a_transform(value: Tensor) -> bool:
    """Whether a tensor is inside ``torch.func``'s grad, vmap or jvp."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down ATen operations."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writer = writer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Where torch's C++ calls an operation (scripted code, vmap), the other mode is still there.
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        if not self._writer.paused:
            self._writer.write(func, tuple(args), kwargs or {}, result)
        return result


class _Differentiates(Exception):
    """The model takes a derivative in its forward pass."""


class _Functions(TorchFunctionMode):
    """Lifts tensors, and writes down whole functions."""

    def __init__(self, writer: _Writer, whole: frozenset[Any]) -> None:
        super().__init__()
        self._writer, self._whole = writer, whole

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            return func(*args, **kwargs)
        if torch._C._are_functorch_transforms_active():
            return func(*self._writer.lift(args), **self._writer.lift(kwargs))
        result = self._called(func, args, kwargs)
        if isinstance(result, Tensor):
            self._writer.results.append(result)
        elif isinstance(result, (list, tuple)):
            self._writer.results += [part for part in result if isinstance(part, Tensor)]
        return result

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        writer = self._writer
        args, kwargs = writer.lift(args), writer.lift(kwargs)
        if func in self._whole and not writer.follows and "out" not in kwargs:
            return writer.whole(_PLAIN_NAMES.get(func, func), _one_dtype(args), kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(writer, func, args, kwargs)
        changes = not torch.is_grad_enabled() and args and _changes(func)
        if changes and isinstance(args[0], Tensor) and writer.slot_of(args[0]) is not None:
            return writer.without_derivative(args[0], lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


def _changes(func: Any) -> bool:
    """Whether a method changes its first argument in place."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _one_dtype(args: Any) -> Any:
    """Tensors of the widest floating dtype among them: libraries round what a model keeps."""
    dtypes = {a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()}
    if len(dtypes) < 2:
        return args
    widest = functools.reduce(torch.promote_types, dtypes)
    return tuple(
        a.to(widest) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    )


# --- calls of torch that are not operations -------------------------------------------------------


def _differentiated(writer: _Writer, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not writer.follows:
        raise _Differentiates
    return func(*args, **kwargs)


def _left_torch(writer: _Writer, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """NumPy and pointers: what is computed there is a constant."""
    if torch.is_grad_enabled() and writer.slot_of(args[0]) is not None:
        raise DifferentiationError(
            f"{writer.module} hands a value that depends on the parameters to NumPy or to foreign "
            "code, where no derivative follows it: compute it by torch's operations, or detach it."
        )
    return _listed(writer, func, args, kwargs)


def _listed(writer: _Writer, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    args = writer.inner(args)
    with _beneath(writer):
        return func(*args, **kwargs)


def _detached(writer: _Writer, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``detach`` and ``.data``: of a constant another name, which may be written into later."""
    if writer.slot_of(args[0]) is None:
        return aten.alias.default(*args)
    return torch.Tensor.detach(*args)


def _data_set(writer: _Writer, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    slots = [writer.slot_of(a) for a in args]
    if slots[0] is not None and slots[0] == slots[1]:  # by Module.to, with nothing to change
        return None
    if slots != [None, None]:
        raise DifferentiationError(
            f"{writer.module} assigns to the .data of a tensor in its forward pass, which no "
            "derivative follows: compute a new tensor instead."
        )
    return func(*args, **kwargs)


def _hooked(writer: _Writer, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A hook on a gradient that is not ours: the record differentiates the forward pass."""
    if writer.follows:
        return func(*args, **kwargs)
    if writer.slot_of(args[0]) is not None:
        writer.record.hooks.add(writer.module)
    return torch.utils.hooks.RemovableHandle(collections.OrderedDict())


def _nothing(writer: _Writer, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    return None


def _requires_grad(writer: _Writer, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args) or writer.slot_of(args[0]) is not None


def _of_tensor(name: str) -> Any:
    return getattr(torch.Tensor, name)


_Special = Callable[[_Writer, Any, Any, dict[str, Any]], Any]
_SPECIAL: dict[Any, _Special] = {
    torch.autograd.grad: _differentiated,
    torch.Tensor.backward: _differentiated,
    torch.Tensor.register_hook: _hooked,
    torch.Tensor.retain_grad: _nothing,
    torch.Tensor.numpy: _left_torch,
    torch.Tensor.__array__: _left_torch,
    torch.Tensor.data_ptr: _left_torch,
    torch.Tensor.tolist: _listed,
    _of_tensor("data").__get__: _detached,
    torch.Tensor.detach: _detached,
    torch.detach: _detached,
    _of_tensor("data").__set__: _data_set,
    _of_tensor("requires_grad").__get__: _requires_grad,
}
_READS = frozenset(
    _of_tensor(name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_sparse", "is_meta", "itemsize")
) | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point}
# One name for a function that people call by several.
_PLAIN_NAMES: dict[Any, Any] = {
    torch.Tensor.matmul: torch.matmul,
    torch.Tensor.__matmul__: torch.matmul,
    torch._C._nn.linear: F.linear,
    torch._C._nn.scaled_dot_product_attention: F.scaled_dot_product_attention,
}
_FIRST: dict[Any, tuple[str, ...]] = {
    torch.matmul: ("input", "other"),
    F.linear: ("input", "weight", "bias"),
    F.scaled_dot_product_attention: ("query", "key", "value"),
}
WHOLE = frozenset(
    (
        torch._C._nn.linear,
        torch._C._nn.scaled_dot_product_attention,
        torch._C._nn.cross_entropy_loss,
        torch.rms_norm,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
    )
)


# --- autograd.Function ----------------------------------------------------------------------------


class _Applied:
    """While recording, ``autograd.Function.apply`` makes one node of the user's function.

    The body of the method is exchanged, not the method: people keep ``f = MyFunction.apply``.
    """

    _lock = threading.Lock()
    _scopes = 0
    _thread = threading.local()  # .writer: of the recording that runs in a thread

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer

    def __enter__(self) -> None:
        kind = type(self)
        self._before = getattr(kind._thread, "writer", None)
        kind._thread.writer = self._writer
        with kind._lock:
            kind._scopes += 1
            _METHOD.__code__ = _STAND_IN

    def __exit__(self, *_: object) -> None:
        kind = type(self)
        kind._thread.writer = self._before
        with kind._lock:
            kind._scopes -= 1
            if not kind._scopes:
                _METHOD.__code__ = _ORIGINAL.__code__

    @classmethod
    def instead(cls, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the exchanged body does."""
        writer: _Writer | None = getattr(cls._thread, "writer", None)
        if writer is None or writer.paused or torch._C._are_functorch_transforms_active():
            return _ORIGINAL(function, *args, **kwargs)  # beneath vmap no tensor is plain
        if writer.follows:
            raise DifferentiationError(
                f"{writer.module} calls the autograd.Function {function.__qualname__} and takes a "
                "derivative in its forward pass, which the tape does not follow together: write "
                "the function by plain operations, or use engine='autograd'."
            )

        def applied(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _tensors_changed(torch.clone, (args, kwargs))  # it may change them
            return _ORIGINAL(function, *args, **kwargs)

        applied.__name__ = function.__name__
        with torch._C.DisableTorchFunction():
            return writer.whole(applied, writer.lift(args), writer.lift(kwargs))


class _StandsIn:
    @classmethod
    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Runs among the globals of ``torch.autograd.function``."""
        from curvatlas.tape.record import _Applied

        assert __class__ is not None  # type: ignore[name-defined]  # a free variable, as there
        return _Applied.instead(cls, args, kwargs)


_METHOD: Any = vars(torch.autograd.Function)["apply"].__func__
_STAND_IN = vars(_StandsIn)["apply"].__func__.__code__
_ORIGINAL = types.FunctionType(
    _METHOD.__code__, _METHOD.__globals__, "apply", _METHOD.__defaults__, _METHOD.__closure__
)


# --- the call -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _beneath(writer: _Writer) -> Iterator[None]:
    """Inside, operations run as they are, and nothing is written down."""
    paused, writer.paused = writer.paused, True
    try:
        with torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE):
            yield
    finally:
        writer.paused = paused


@contextlib.contextmanager
def _named_modules(writer: _Writer, model: nn.Module) -> Iterator[None]:
    """The writer knows which module runs, in this thread."""
    names = {module: name for name, module in model.named_modules()}
    thread = threading.get_ident()

    def entered(module: nn.Module, *_: Any) -> None:
        if threading.get_ident() == thread:
            writer.modules.append(names.get(module, writer.modules[-1]))

    def left(*_: Any) -> None:
        if threading.get_ident() == thread and len(writer.modules) > 1:
            name = writer.modules.pop()
            if writer.failed is None and sys.exc_info()[0] is not None:
                writer.failed = name

    hooks = torch.nn.modules.module
    before = hooks.register_module_forward_pre_hook(entered)
    after = hooks.register_module_forward_hook(left, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextlib.contextmanager
def _recording(writer: _Writer, model: nn.Module, whole: frozenset[Any]) -> Iterator[None]:
    """Both levels, module names, and what of torch's Python would hide calls from them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_named_modules(writer, model))
        for replaced in _REPLACED:
            stack.enter_context(replaced)
        stack.enter_context(_Applied(writer))
        _torch._enable_functionalization(reapply_views=True)
        stack.callback(_torch._disable_functionalization)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_Operations(writer))
        stack.enter_context(_Functions(writer, whole))
        yield


def record(
    model: nn.Module,
    named: Mapping[str, Tensor],
    outputs: Callable[[], Any],
    loss: Callable[[Any], Tensor],
) -> Record:
    """The record of ``loss(outputs())``, whose leaves are the ``named`` parameters of the model.

    ``outputs`` calls the model with its own parameters. It is called a second time where the model
    takes a derivative in its forward pass (forces, an inner step on its weights).
    """
    try:
        return _recorded(model, named, outputs, loss, follows=False)
    except Exception as error:
        if not _asks_for_gradients(error):
            raise
    return _recorded(model, named, outputs, loss, follows=True)


def _recorded(
    model: nn.Module,
    named: Mapping[str, Tensor],
    outputs: Callable[[], Any],
    loss: Callable[[Any], Tensor],
    *,
    follows: bool,
) -> Record:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise DifferentiationError(
                f"{name or 'the model'} is compiled by torch.jit.script, where its weights are "
                "out of sight: pass the module as it was before, or use engine='autograd'."
            )
    writer = _Writer(model, named, follows=follows)
    try:
        with _recording(writer, model, WHOLE):
            result = outputs()
            writer.record.boundary = len(writer.record.nodes)
            value = loss(result)
        return writer.finish(value)
    except RuntimeError as error:
        if "INTERNAL ASSERT" not in str(error) and "NestedTensor" not in str(error):
            raise
        raise DifferentiationError(
            f"{writer.failed or 'the model'} computes with a kind of tensor that the tape does not "
            "follow (nested, quantised or a subclass): use plain tensors, or engine='autograd'."
        ) from error
    finally:
        result = value = None  # type: ignore[assignment]
        writer.give_back()


def _asks_for_gradients(error: BaseException | None) -> bool:
    """Whether a call failed because the model differentiates in it."""
    while error is not None:
        if isinstance(error, _Differentiates) or "does not require grad" in str(error):
            return True
        error = error.__cause__
    return False
