"""What a forward pass may change in a model beside its weights, and how it is put back.

Running statistics, counters, caches with their length: models keep these in buffers, in plain
attributes, in lists and dictionaries, in an object of their own. Every call starts from all of them
as the user left them, so that a cache and the number that tells its length never part.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.dlpack import from_dlpack

from curvatlas.errors import ProblemError
from curvatlas.problem.kernels import unwatched

# Attributes every module has, and those that a scope of ours may hold patched.
_MODULE_FIELDS = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
_CONTAINERS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)
_NUMBERS = (type(None), bool, int, float, str)
_INPUTS = "(inputs)"  # among the names of what a call writes into
_LARGE = 2**24  # bytes of a tensor that is copied in the model's first call only


class _Holder:
    """The buffers or the attributes of a module, an object's attributes, a container.

    label: the name of what is in it, or with a dot at the end what the names in it are behind.
    fields: they are a module's, whose parameters, hooks and children are no state.
    """

    def __init__(self, label: str, held: Any, *, fields: bool = False) -> None:
        self.label, self.held, self._fields = label, held, fields
        self.contents = self._now()

    def _now(self) -> dict[Any, Any] | list[Any]:
        if self._fields:
            return {name: v for name, v in self.held.items() if name not in _MODULE_FIELDS}
        return dict(self.held) if isinstance(self.held, dict) else list(self.held)

    def named(self) -> Iterator[tuple[str, Any]]:
        """Everything in it, by name."""
        if not isinstance(self.contents, dict):
            yield from ((self.label, value) for value in self.contents)
        elif self.label.endswith(".") or not self.label:
            yield from ((f"{self.label}{name}", value) for name, value in self.contents.items())
        else:
            yield from ((self.label, value) for value in self.contents.values())

    def fill(self, copies: Mapping[int, Tensor]) -> None:
        """Give it its contents again, with copies in place of some tensors."""
        held, now = self.held, self._now()
        if isinstance(self.contents, dict):
            assert isinstance(now, dict)
            named = {name: _exchanged(value, copies) for name, value in self.contents.items()}
            if _same_objects(now, named) and _same_objects(now.values(), named.values()):
                return
            if self._fields:
                for name in now.keys() - named.keys():
                    del held[name]
            else:
                held.clear()
            held.update(named)
            return
        values = [_exchanged(value, copies) for value in self.contents]
        if not _same_objects(now, values):
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(values)


def _same_objects(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _exchanged(value: Any, copies: Mapping[int, Tensor]) -> Any:
    """A value with copies in place of the tensors in it."""
    if isinstance(value, Tensor):
        return copies.get(id(value), value)
    return tuple(_exchanged(part, copies) for part in value) if type(value) is tuple else value


@dataclass
class _Learned:
    """What was seen of a model's calls: which of its tensors they write into."""

    state: object = None  # that the calls started from
    calls: set[Any] = field(default_factory=set)  # kinds of inputs
    written: set[str] = field(default_factory=set)


_learned: weakref.WeakKeyDictionary[nn.Module, _Learned] = weakref.WeakKeyDictionary()


class CallState:
    """A model's state as its user left it, and the calls that start from it.

    Tensors that a call writes into are copies while it runs; what it leaves behind stays for the
    loss to read, until the next call or ``put_back``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._own: list[_Holder] = []  # as the user left them, looked at before the first call
        self._start: list[_Holder] = []  # the same with what can be differentiated in its place
        self._tensors: dict[str, Tensor] = {}

    @unwatched
    def _remember(self) -> None:
        self._own = list(_holders(self.model))
        for name, module in self.model.named_modules():
            fields = vars(module)
            for attribute, value in list(fields.items()):
                if isinstance(value, Tensor) and value.is_inference():
                    fields[attribute] = outside_inference(value)
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                _check_row_norms(name, module)
                module.max_norm = None  # no row is as long: the same result, and nothing is written
        self._start = list(_holders(self.model))
        named = [pair for holder in self._start for pair in holder.named()]
        self._tensors = _tensors_of(named)
        learned = _learned.setdefault(self.model, _Learned())
        state = tuple(map(_mark, named))
        if learned.state != state:
            learned.state, learned.calls = state, set()

    @contextlib.contextmanager
    def one_call(self, inputs: Any) -> Iterator[Any]:
        """The state as it was; copies of all in the first call of a kind, then of the written.

        Gives the inputs, copies of them too where they are written into.

        Copies that the graph of a call saves are held by it, which is why not all are copied.
        """
        if not self._own:
            self._remember()
        learned = _learned[self.model]
        kind = _kind_of(inputs)
        first, new = not learned.calls, kind not in learned.calls
        copied = {
            label: tensor
            for label, tensor in self._tensors.items()
            if label in learned.written
            or tensor.is_inference()
            or (new and (first or tensor.numel() * tensor.element_size() <= _LARGE))
        }
        copies = _copies(copied)
        shared = [(n, t, t._version) for n, t in self._tensors.items() if n not in copied]
        for holder in self._start:
            holder.fill(copies)
        if new or _INPUTS in learned.written:
            inputs = _cloned(inputs)
        yield inputs
        if new and any(getattr(leaf, "_version", 0) for leaf in tree_flatten(inputs)[0]):
            learned.written.add(_INPUTS)
        changed = [label for label, tensor, version in shared if tensor._version != version]
        if changed:
            learned.calls.clear()
            raise ProblemError(
                f"the forward pass changes buffer {changed[0]!r} in some calls and not in others, "
                "so the loss is no function of the parameters: make it do the same every time."
            )
        learned.calls.add(kind)
        for label, tensor in copied.items():
            if label not in learned.written and _differ(copies[id(tensor)], tensor):
                learned.written.add(label)
        # What was written stays for the loss to read; the others are the user's own again.
        originals = {
            id(copies[id(tensor)]): tensor
            for label, tensor in copied.items()
            if label not in learned.written
        }
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = originals.get(id(buffer), buffer)

    @contextlib.contextmanager
    def before_its_calls(self) -> Iterator[None]:
        """Inside, the model has the state that its user sees."""
        now = list(_holders(self.model)) if self._own else []
        self.put_back()
        yield
        for holder in now:
            holder.fill({})

    def put_back(self) -> None:
        """The state as it was before the first call."""
        for holder in self._own:
            holder.fill({})


@unwatched
def _cloned(inputs: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, inputs)


open_scopes: list[CallState] = []  # that are open, innermost last


def as_it_was(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, an open scope shows the model as its user sees it."""
    scope = next((s for s in reversed(open_scopes) if s.model is model), None)
    return contextlib.nullcontext() if scope is None else scope.before_its_calls()


def written_buffers(model: nn.Module) -> frozenset[str]:
    """Names of the tensors that the model's forward pass writes into, as seen in its calls."""
    return frozenset(_learned[model].written if model in _learned else ()) - {_INPUTS}


# --- where a model keeps its state ----------------------------------------------------------------


def _holders(model: nn.Module) -> Iterator[_Holder]:
    seen: set[int] = set()

    def inside(label: str, value: Any) -> Iterator[_Holder]:
        """The containers below a value, and the objects that hold tensors of their own."""
        if isinstance(value, (Tensor, nn.Module, type)) or id(value) in seen:
            return
        if type(value) is tuple:
            for part in value:
                yield from inside(label, part)
            return
        if type(value) in _CONTAINERS:
            seen.add(id(value))
            yield _Holder(label, value)
            for part in value.values() if isinstance(value, dict) else value:
                yield from inside(label, part)
        elif _holds_tensors(value):
            seen.add(id(value))
            yield _Holder(f"{label}.", vars(value))
            for name, part in vars(value).items():
                yield from inside(f"{label}.{name}", part)

    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # which keep theirs out of reach
            continue
        label = f"{prefix}." if prefix else ""
        yield _Holder(label, module._buffers)
        fields = _Holder(label, vars(module), fields=True)
        yield fields
        for name, value in fields.named():
            if not isinstance(value, _NUMBERS):
                yield from inside(name, value)


def _holds_tensors(value: Any) -> bool:
    """An object of a package's own class with a tensor among its attributes: a cache, it may be."""
    if type(value).__module__.partition(".")[0] in ("torch", "builtins"):
        return False
    return any(_is_state(part) for part in getattr(value, "__dict__", {}).values())


def _is_state(value: Any) -> bool:
    """A plain tensor: weights and what has a graph are none."""
    return type(value) is Tensor and not value.requires_grad


def _tensors_of(named: Sequence[tuple[str, Any]]) -> dict[str, Tensor]:
    """By a name of its own each of the tensors among the values, and in tuples there."""
    found: dict[int, tuple[str, Tensor]] = {}
    for label, value in named:
        parts = tree_flatten(value)[0] if type(value) is tuple else [value]
        for part in parts:
            if _is_state(part):
                found.setdefault(id(part), (label, part))
    tensors: dict[str, Tensor] = {}
    for label, tensor in found.values():
        own, number = label, 1
        while own in tensors:
            own, number = f"{label}[{number}]", number + 1
        tensors[own] = tensor
    return tensors


def _mark(pair: tuple[str, Any]) -> object:
    """What tells whether a part of the state was changed by its user."""
    label, value = pair
    if isinstance(value, Tensor):
        return label, id(value), 0 if value.is_inference() else value._version
    return label, value if isinstance(value, _NUMBERS) else id(value)


def _kind_of(inputs: Any) -> object:
    """Shapes and numbers: what a call's caches can depend on."""
    leaves = tree_flatten(inputs)[0]
    return tuple(
        tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)[:40] for leaf in leaves
    )


@unwatched
def _copies(tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """id → a copy; views of the same memory stay views of the same memory."""
    memories: dict[int, list[Tensor]] = {}
    copies: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if tensor.layout == torch.strided and type(tensor) is Tensor and tensor.numel():
            memories.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        else:
            copies[id(tensor)] = tensor.clone()
    for views in memories.values():
        if len(views) == 1:
            copies[id(views[0])] = views[0].clone()
            continue
        memory: Any = views[0].untyped_storage().clone()  # type: ignore[no-untyped-call]
        for view in views:
            place = view.storage_offset(), view.size(), view.stride()
            copies[id(view)] = view.new_empty(0).set_(memory, *place)
    return copies


@unwatched
def _differ(copy: Tensor, tensor: Tensor) -> bool:
    """Whether a call has written into the copy of a tensor."""
    if copy._version > 0 or copy.layout != torch.strided:
        return copy._version > 0
    if copy.is_floating_point():
        copy, tensor = copy.nan_to_num(), tensor.nan_to_num()
    return not torch.equal(copy, tensor)


def outside_inference(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that autograd accepts, for one made in ``inference_mode``."""
    with torch.inference_mode(False):
        return from_dlpack(tensor.detach())


def _check_row_norms(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Where no row is longer than ``max_norm`` the limit does nothing, here and nearby."""
    longest = torch.linalg.vector_norm(module.weight.detach(), module.norm_type, dim=1).max()
    if float(longest) > float(module.max_norm or 0):
        raise ProblemError(
            f"{name or type(module).__name__} has max_norm={module.max_norm:g} and rows of norm up "
            f"to {float(longest):.3g}: its forward pass would rescale the weights themselves, "
            "which no derivative sees. Rescale the rows once, or set max_norm=None."
        )
