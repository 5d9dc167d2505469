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

import contextlib
import functools
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

aten = torch.ops.aten
_torch: Any = torch  # its functionalisation is not typed
_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
_STOPS = frozenset((aten.detach.default,))
# Functions of Python that would hand themselves to the mode whole, instead of running their body.
_HANDS_OVER = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


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
        lines = [
            f"%{'/'.join('_' if s is None else str(s) for s in node.outputs):<6} = "
            f"{node.name}({', '.join(f'%{s}' for s in node.inputs)})  "
            f"{list(self.values[next(s for s in node.outputs if s is not None)].shape)}  "
            f"{node.module}"
            for node in self.nodes
        ]
        return "\n".join(lines)


class _Writer:
    """The record while it is written, and what both levels share."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.record = Record()
        self.paused = False
        self._slots: dict[int, int] = {}  # id of a value of the record → its slot
        self._lifted: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor → itself, its wrapper
        self._storages: dict[int, Tensor] = {}  # a leaf's memory → its value
        self.modules: list[str] = [""]
        for name, tensor in named.items():
            value = tensor.detach()
            slot = self.record.leaves[name] = self.record.slot(value)
            self._slots[id(value)] = slot
            self._storages.setdefault(tensor.untyped_storage().data_ptr(), value)
            self._lifted[id(tensor)] = (tensor, _torch._to_functional_tensor(value))

    def slot_of(self, value: Any) -> int | None:
        return self._slots.get(id(value))

    # --- lifting ----------------------------------------------------------------------------------

    def lift(self, value: Any) -> Any:
        """Arguments with every plain tensor wrapped, the same tensor always by the same wrapper."""
        if isinstance(value, Tensor):
            if _torch._is_functional_tensor(value):
                return value
            known = self._lifted.get(id(value))
            if known is None:
                known = (value, _torch._to_functional_tensor(self._plain(value)))
                self._lifted[id(value)] = known
            return known[1]
        if isinstance(value, (list, tuple)):
            parts = [self.lift(part) for part in value]
            if isinstance(value, list):
                return parts
            return tuple(parts) if type(value) is tuple else _rebuilt(value, parts)
        if isinstance(value, dict):
            return {key: self.lift(part) for key, part in value.items()}
        return value

    def _plain(self, value: Tensor) -> Tensor:
        """A tensor met for the first time: a constant, or another view of a leaf's memory."""
        try:
            memory = value.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            memory = 0
        own = value.detach()
        base = self._storages.get(memory) if memory else None
        if base is None or own.dtype != base.dtype:
            return own
        place = (list(value.size()), list(value.stride()), value.storage_offset())
        if place == (list(base.size()), list(base.stride()), base.storage_offset()):
            return base
        self.write(aten.as_strided.default, (base, *place), {}, own)
        return own

    def inner(self, value: Any) -> Any:
        """Arguments with every wrapper exchanged for what it holds now."""
        if isinstance(value, Tensor):
            if not _torch._is_functional_tensor(value):
                return value
            _torch._sync(value)
            return _torch._from_functional_tensor(value)
        if isinstance(value, (list, tuple)):
            parts = [self.inner(part) for part in value]
            if isinstance(value, list):
                return parts
            return tuple(parts) if type(value) is tuple else _rebuilt(value, parts)
        if isinstance(value, dict):
            return {key: self.inner(part) for key, part in value.items()}
        return value

    # --- writing ----------------------------------------------------------------------------------

    def write(
        self,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """A node, where something moves and something that can move comes out."""
        slots: dict[int, None] = {}

        def placed(value: Any) -> Any:
            slot = self._slots.get(id(value)) if isinstance(value, Tensor) else None
            if slot is None:
                return value
            slots[slot] = None
            return Ref(slot)

        placed_args, placed_kwargs = _tensors_changed(placed, (args, kwargs))
        if not slots:
            return
        if operation in _STOPS or not torch.is_grad_enabled():
            self.record.stops.add(self.modules[-1])
            return
        _refuse_randomness(operation, self.modules[-1])
        many = isinstance(result, (list, tuple))
        outputs: list[int | None] = []
        for value in result if many else (result,):
            moves = isinstance(value, Tensor) and value.is_floating_point()
            if isinstance(value, Tensor) and value.is_complex():
                raise DifferentiationError(
                    f"{self.modules[-1] or 'the model'} computes with complex numbers "
                    f"({operation}), which the tape does not follow: use engine='autograd'."
                )
            slot = None
            if moves:
                slot = self.record.slot(value)
                self._slots[id(value)] = slot
            outputs.append(slot)
        if all(slot is None for slot in outputs):
            return
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


def _rebuilt(original: Any, parts: list[Any]) -> Any:
    """A named tuple or ``torch.Size`` of other parts."""
    kind = type(original)
    return kind(*parts) if hasattr(original, "_fields") else kind(parts)


def _tensors_changed(change: Callable[[Any], Any], arguments: Any) -> Any:
    if isinstance(arguments, Tensor):
        return change(arguments)
    if isinstance(arguments, (list, tuple)):
        changed = [_tensors_changed(change, a) for a in arguments]
        return changed if isinstance(arguments, list) else tuple(changed)
    if isinstance(arguments, dict):
        return {key: _tensors_changed(change, a) for key, a in arguments.items()}
    return arguments


def _refuse_randomness(operation: Any, module: str) -> None:
    if torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()):
        raise DifferentiationError(
            f"{module or 'the model'} draws random numbers on the way to the loss ({operation}): "
            "call model.eval(), or make the draw an input."
        )


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down ATen operations."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writer = writer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._writer.paused:
            self._writer.write(func, tuple(args), kwargs or {}, result)
        return result


class _Functions(TorchFunctionMode):
    """Lifts tensors, and writes down whole functions."""

    def __init__(self, writer: _Writer, whole: frozenset[Any]) -> None:
        super().__init__()
        self._writer, self._whole = writer, whole

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        writer, kwargs = self._writer, kwargs or {}
        if func in _READS:
            return func(*args, **kwargs)
        if func in _LEAVES_TORCH:
            return func(*writer.inner(writer.lift(args)), **kwargs)
        args, kwargs = writer.lift(args), writer.lift(kwargs)
        if func in self._whole:
            args = _one_dtype(args)
            return writer_whole(writer, _PLAIN_NAMES.get(func, func), args, kwargs)
        if func is _DATA:
            return torch.Tensor.detach(*args)
        return func(*args, **kwargs)


def _one_dtype(args: Any) -> Any:
    """Tensors of the widest floating dtype among them: libraries round what a model keeps."""
    dtypes = [a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()]
    if len(set(dtypes)) < 2:
        return args
    widest = functools.reduce(torch.promote_types, dtypes)
    return tuple(
        a.to(widest) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    )


def writer_whole(
    writer: _Writer, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run a function beneath the record, and write it down as one node."""
    args, kwargs = writer.inner(args), writer.inner(kwargs)
    with _beneath(writer):
        result = function(*args, **kwargs)
    writer.write(function, args, kwargs, result)
    with _beneath(writer):
        return tree_map(
            lambda t: _torch._to_functional_tensor(t) if isinstance(t, Tensor) else t, result
        )


@contextlib.contextmanager
def _beneath(writer: _Writer) -> Iterator[None]:
    """Inside, operations run as they are, and nothing is written down."""
    paused, writer.paused = writer.paused, True
    try:
        with torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE):
            yield
    finally:
        writer.paused = paused


_READS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_sparse", "is_meta", "itemsize")
) | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point}
_LEAVES_TORCH = frozenset(
    (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr)
)
_DATA = getattr(torch.Tensor, "data").__get__  # noqa: B009 (typed as a tensor)
# One name for a function that people call by several.
_PLAIN_NAMES: dict[Any, Any] = {
    torch.Tensor.matmul: torch.matmul,
    torch.Tensor.__matmul__: torch.matmul,
    torch._C._nn.linear: F.linear,
    torch._C._nn.scaled_dot_product_attention: F.scaled_dot_product_attention,
}
WHOLE = frozenset(
    (
        torch._C._nn.linear,
        torch._C._nn.scaled_dot_product_attention,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
    )
)


@contextlib.contextmanager
def _recording(writer: _Writer, model: nn.Module, whole: frozenset[Any]) -> Iterator[None]:
    """Both levels, module names, and what of torch's Python would hide calls from them."""
    handles = []
    for name, module in model.named_modules():
        enter = functools.partial(_entered, writer, name)
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(
            module.register_forward_hook(functools.partial(_left, writer), always_call=True)
        )
    hands_over = {name: getattr(F, name) for name in _HANDS_OVER}
    apply = vars(torch.autograd.Function)["apply"]

    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        function = functools.partial(apply.__func__, kind)
        function.__name__ = kind.__name__  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunction():
            return writer_whole(writer, function, writer.lift(args), writer.lift(kwargs))

    for name in _HANDS_OVER:
        setattr(F, name, lambda *_: False)
    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment]
    _torch._enable_functionalization(reapply_views=True)
    try:
        with torch.enable_grad(), _Operations(writer), _Functions(writer, whole):
            yield
    finally:
        _torch._disable_functionalization()
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for name, function in hands_over.items():
            setattr(F, name, function)
        for handle in handles:
            handle.remove()


def _entered(writer: _Writer, name: str, *_: Any) -> None:
    writer.modules.append(name)


def _left(writer: _Writer, *_: Any) -> None:
    writer.modules.pop()


def record(
    model: nn.Module,
    named: Mapping[str, Tensor],
    outputs: Callable[[], Any],
    loss: Callable[[Any], Tensor],
) -> Record:
    """The record of ``loss(outputs())``, whose leaves are the ``named`` parameters of the model."""
    writer = _Writer(named)
    with _recording(writer, model, WHOLE):
        result = outputs()
        writer.record.boundary = len(writer.record.nodes)
        value = loss(result)
    final = writer.inner(value)
    slot = writer.slot_of(final)
    if slot is None:
        raise NoGradientPath(
            "no gradient path from the loss to any of the parameters: is the output detached, "
            "computed under no_grad, or independent of them?"
        )
    writer.record.loss = slot
    return writer.record
