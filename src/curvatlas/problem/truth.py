r"""Whether a gradient is the loss's: asked once, before the first derivative of a model and a loss.

Autograd differentiates what it recorded. What the forward pass detaches, computes under
``no_grad``, rescales by a hook or rounds with a straight-through estimator, it differentiates in
another way, and second derivatives follow it without a word. Differences of the loss notice:

    D(h) = (L(θ + h v) − L(θ − h v)) / 2h   against   gᵀv

in the dtype that is computed in, on a few samples, along a v that moves every weight in proportion
to its size. θ stands a few per cent from the model's own weights: there no gate is closed and no
gradient vanishes as at a minimum. What a difference may be off by itself is measured by D(2h); a
kink or a jump on the way shows there too. Nothing is said unless several directions agree on it,
and then each parameter is asked for itself.

The weights are moved in copies, with which the model is called. So a second question comes with the
first: does the pass read a weight other than through its module's attribute (a list, a view made in
``__init__``, the closure of the loss)? Copies do not reach such a weight. Every operation of one
pass is looked at for the memory of the model's own weights; where it is met, the weights themselves
are moved, and put back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from curvatlas.errors import NonFiniteError, PeerError, ProblemError
from curvatlas.precision import has_float64
from curvatlas.problem.batches import Batch
from curvatlas.problem.evaluation import (
    changed_in_place,
    check_same_loss,
    is_own_leaf,
    listed,
    without_tensor_hooks,
)
from curvatlas.problem.kernels import following_padding, unwatched, warn_once

if TYPE_CHECKING:
    from curvatlas.problem.problem import Problem

SAMPLES = 2  # that are enough, where a batch can be cut
_MOVED = 0.05  # how far θ is from the model's weights, in sizes of each of them
_NOISE = 4099  # random numbers that are repeated, a prime
# Steps in sizes of the weights: short ones pass fewer kinks, long ones stand out of the rounding.
_STEPS = {torch.float64: (1e-5, 1e-3), torch.float32: (2e-3, 2e-2)}
_ROUNDINGS = 8  # of the loss, in a difference of two values: 1 was measured
_EXACT = {torch.float64: 1e-5, torch.float32: 2e-3}  # of ‖g ∘ v‖, how well gᵀv itself is known
_SAME = {torch.float64: 1e-5, torch.float32: 1e-3}  # losses of one model in two modes
_UNSURE = 5  # times |D(h) − D(2h)|: a jump of the loss between −h and h gives 2
_DECISIVE = 0.3  # of the slope: differences less certain than this decide nothing
_LISTED = 5
_COPIED = 2**28  # bytes of a copy in float64, at most


@dataclass
class Truth:
    """What was found of a model and a loss; shared by the Problems of both."""

    looked: bool = False
    # Parameters that are read other than through their module's attribute, and those of the loss.
    elsewhere: frozenset[str] = field(default_factory=frozenset)
    by_loss: frozenset[str] = field(default_factory=frozenset)
    # Those of which the model holds values computed before the call, on graphs of their own.
    computed_before: frozenset[str] = field(default_factory=frozenset)


def look(problem: Problem, batch: Batch, whole: Batch) -> None:
    """Say once what the derivatives are of, where they are not those of the loss.

    batch: a few samples of ``whole``, in which every row of padding is looked for.
    """
    truth = problem.truth
    truth.looked = True
    _say_overlaps(problem)
    train_mode = [module for module in problem.model.modules() if module.training]
    with problem.evaluating():
        for distance in (_MOVED, 0.0):
            truth.elsewhere = truth.computed_before = frozenset()
            comparison = _Comparison(problem, batch, train_mode)
            try:
                with comparison.moved(distance), torch.no_grad():
                    if comparison.of_a_number():
                        comparison.run()
                        if comparison.say_padding() or whole is batch or not comparison.padding:
                            return
                        comparison.batch = whole
                        if comparison.of_a_number():
                            comparison.say_padding()
                        return
            except PeerError:
                raise
            except ProblemError as error:
                of_these_weights = isinstance(error, NonFiniteError) or error.__cause__ is not None
                if not (distance and of_these_weights):
                    raise
            except Exception:  # these are no weights for the model; what fails here is told later
                pass


def _say_overlaps(problem: Problem) -> None:
    pairs = overlapping(problem.all_parameters) if problem.sharded is None else []
    if pairs:
        warn_once(
            problem.model,
            "overlap",
            f"the parameters {listed(pairs)} overlap in memory: derivatives are those of the loss "
            "with each parameter varying by itself, though a step of one moves the other.",
            deeper=2,
        )


def overlapping(named: Mapping[str, Tensor]) -> list[str]:
    """Names of parameters that share entries with another one, or with themselves."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in named.items():
        place = _place(tensor) if tensor.numel() and not tensor.is_meta else None
        if place is not None:
            by_storage.setdefault(place[0], []).append(name)
    shared: list[str] = []
    for names in by_storage.values():
        repeated = [n for n in names if _repeats(named[n])]
        shared += repeated
        names = [n for n in names if n not in repeated]
        ranges = sorted(place[1:] for n in names if (place := _place(named[n])))
        if all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges)):
            continue
        tensors = [named[n] for n in names]
        itemsize = min(t.itemsize for t in tensors)
        uses = torch.zeros(tensors[0].untyped_storage().nbytes() // itemsize, dtype=torch.int8)
        views = [uses.as_strided(t.size(), t.stride(), t.storage_offset()) for t in tensors]
        for view in views:
            view.add_(1)
        shared += [n for n, view in zip(names, views, strict=True) if bool((view > 1).any())]
    return shared


def _repeats(tensor: Tensor) -> bool:
    """Whether entries of one tensor lie in the same place, as after ``expand``."""
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the parameters whose memory an operation reads."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[str] = set()
        self._places: dict[int, list[tuple[int, int, str]]] = {}
        for name, tensor in parameters.items():
            place = _place(tensor)
            if place is not None:
                self._places.setdefault(place[0], []).append((*place[1:], name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._look(args)
        if kwargs:
            self._look(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _look(self, arguments: Iterable[Any]) -> None:
        for argument in arguments:
            if isinstance(argument, Tensor):
                if _storage(argument) in self._places and (place := _place(argument)) is not None:
                    for start, stop, name in self._places[place[0]]:
                        if start < place[2] and place[1] < stop:
                            self.read.add(name)
            elif isinstance(argument, list | tuple):
                self._look(argument)


def _storage(tensor: Tensor) -> int:
    """Where a tensor's memory is, 0: it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _place(tensor: Tensor) -> tuple[int, int, int] | None:
    """Storage, first and last byte of a tensor; None where it has no memory of its own."""
    storage = _storage(tensor)
    if not storage:
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((int(n) - 1) * int(s) for n, s in steps)
    start = int(tensor.storage_offset()) * tensor.itemsize
    return storage, start, start + extent * tensor.itemsize


@dataclass(frozen=True)
class _Slope:
    """The slope of the loss along a direction, by autograd and by differences."""

    by_autograd: float
    by_differences: float
    allowed: float
    decided: bool

    @property
    def wrong(self) -> bool:
        return self.decided and abs(self.by_autograd - self.by_differences) > self.allowed


class _Comparison:
    """A few samples' loss near the model's weights, and its gradient there."""

    def __init__(self, problem: Problem, batch: Batch, train_mode: Sequence[nn.Module]) -> None:
        self._problem, self.batch = problem, batch
        self._model = problem.model  # that is spoken of
        self._names = problem.parameter_names
        self._places = {name: place for place, name in enumerate(self._names)}
        self._train_mode = train_mode  # modules
        self._with_gradients = False  # switched on in calls whose gradient nobody takes
        self._in_memory = False  # whether the model's own weights are moved
        self._gradient: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def moved(self, distance: float) -> Iterator[None]:
        """Inside, the weights that vary stand at θ: copies, or the model's own (``_into_memory``).

        distance: in sizes of each weight.
        """
        with self._problem.present(self._names) as weights:
            self._weights = {name: weight.detach().clone() for name, weight in weights.items()}
        sizes = {n: _rms(weight) for n, weight in self._weights.items()}
        numbers = sum(w.numel() for w in self._weights.values())
        squares = sum(sizes[n] ** 2 * w.numel() for n, w in self._weights.items())
        typical = math.sqrt(squares / numbers) or 1.0
        self._sizes = {name: size or typical for name, size in sizes.items()}
        self._distance = distance
        self._saved: dict[str, Tensor] = {}
        try:
            self._move(self._names, direction=0, by=distance)
            yield
        finally:
            for name, weight in self._saved.items():
                self._weights[name].copy_(weight)

    def _into_memory(self) -> None:
        """Move the model's own weights instead: the copies do not reach all of them."""
        self._move(self._names, direction=0, by=-self._distance)
        everything = self._problem.all_parameters
        self._saved = {name: everything[name].data.clone() for name in self._names}
        self._weights = {name: everything[name].data for name in self._names}
        self._move(self._names, direction=0, by=self._distance)
        self._in_memory = True

    @unwatched
    def _move(self, names: Sequence[str], *, direction: int, by: float) -> None:
        if by:
            for name in names:
                weight = self._weights[name]
                weight.add_(self._along(name, direction), alpha=by * self._sizes[name])

    def _along(self, name: str, direction: int) -> Tensor:
        """The direction at a parameter, in sizes of it."""
        weight = self._weights[name]
        noise = _noise(direction, weight.dtype, weight.device).roll(97 * self._places[name])
        return noise.repeat(-(-weight.numel() // _NOISE))[: weight.numel()].view(weight.shape)

    # --- the loss at θ --------------------------------------------------------------------------

    def _loss(self, reads: _Reads | None = None) -> float:
        problem, batch = self._problem, self.batch
        leaves = {} if self._in_memory else self._weights
        with reads or contextlib.nullcontext(), torch.set_grad_enabled(self._with_gradients):
            outputs = problem.predictions(batch, leaves)
            if reads is not None:
                self._by_model, reads.read = frozenset(reads.read), set()
            return float(problem.loss.value(outputs, batch.targets))

    def of_a_number(self) -> bool:
        """Take the gradient at θ; whether loss and gradient are finite."""
        problem, batch = self._problem, self.batch
        with torch.enable_grad(), following_padding() as rows:
            if self._in_memory:
                leaves = problem.leaves()
                own = {}
            else:
                leaves = {n: w.detach().requires_grad_(True) for n, w in self._weights.items()}
                own = {n: p for n in leaves if is_own_leaf(p := problem.all_parameters[n])}
            sizes = {name: _rms(leaf) for name, leaf in leaves.items()}
            loss = problem.loss.value(problem.predictions(batch, leaves), batch.targets)
            for name, leaf in leaves.items():
                if _rms(leaf) != sizes[name]:  # behind the back of its version, by ``.data``
                    raise changed_in_place(name)
            if not loss.requires_grad:
                return False  # which is refused where the first derivative is taken
            with without_tensor_hooks([*leaves.values(), *own.values()]):
                gradient = torch.autograd.grad(
                    loss, [*leaves.values(), *own.values()], retain_graph=True, allow_unused=True
                )
        self._with_graph = float(loss.detach())
        self.padding = {n: rows[id(leaf)] for n, leaf in leaves.items() if id(leaf) in rows}
        pairs = zip(own, gradient[len(leaves) :], strict=True)
        self._followed = frozenset(name for name, slope in pairs if slope is not None)
        named = zip(leaves, gradient, strict=False)
        self._gradient = {n: g.to_dense() if g.is_sparse else g for n, g in named if g is not None}
        finite = math.isfinite(self._with_graph)
        return finite and all(bool(torch.isfinite(g.sum())) for g in self._gradient.values())

    def run(self) -> None:
        """Compare, and say what was found."""
        problem, truth = self._problem, self._problem.truth
        self._check_modes(self._read_elsewhere())
        truth.computed_before = self._followed - truth.elsewhere
        if truth.computed_before:
            warn_once(
                problem.model,
                "computed before",
                f"the model holds values computed from {listed(sorted(truth.computed_before))} "
                "before its forward pass (in __init__, in a cache), which a step of the weights "
                "does not change: derivatives hold them fixed.",
                deeper=4,
            )
        if truth.elsewhere:
            problem.refuse_elsewhere(problem.leaves())
            self._into_memory()
            if not self.of_a_number():
                return
        if not self._wrong():
            return
        with contextlib.ExitStack() as stack:
            judge = self if truth.elsewhere else self._in_float64(stack)
            if judge is self or judge._wrong():
                judge._say()

    def _read_elsewhere(self) -> float:
        """The loss at θ, and which of the model's own weights were read meanwhile."""
        problem, truth = self._problem, self._problem.truth
        reads = _Reads({name: problem.all_parameters[name] for name in self._names})
        try:
            value = self._loss(reads)
        except (RuntimeError, TypeError, ValueError):  # code that does not bear to be watched
            return self._loss()
        truth.by_loss = frozenset(reads.read)
        truth.elsewhere = self._by_model | truth.by_loss
        return value

    def _wrong(self) -> bool:
        """Whether the slope along one direction is wrong, and along most others then too."""
        if not self._slope(self._names, 1).wrong:
            return False
        return sum(self._slope(self._names, d).wrong for d in (2, 3, 4)) >= 2

    def _in_float64(self, stack: contextlib.ExitStack) -> _Comparison:
        """The comparison of a copy in float64, where steps pass no kink; itself, if none can be."""
        problem, batch = self._problem, self.batch
        size = 8 * sum(tensor.numel() for tensor in problem.own_tensors())
        if problem.dtype == torch.float64 or size > _COPIED or not has_float64(problem.device):
            return self
        try:
            twin = problem.with_model(copy.deepcopy(problem.model).double())
            twin.dtype, twin.compute_dtype = torch.float64, None
            inputs, targets = tree_map(_doubled, (batch.inputs, batch.targets))
            other = _Comparison(twin, replace(batch, inputs=inputs, targets=targets), ())
            other._model, other._with_gradients = problem.model, self._with_gradients
            stack.enter_context(twin.evaluating())
            stack.enter_context(other.moved(self._distance))
            return other if other.of_a_number() else self
        except Exception:  # what has no float64 is judged as it is
            return self

    def say_padding(self) -> bool:
        """Whether the loss depends on rows that tables hold fixed."""
        whole = math.sqrt(sum(float(g.norm()) ** 2 for g in self._gradient.values()))
        padded = [
            name
            for name, row in self.padding.items()
            if name in self._gradient
            and float(self._gradient[name][row].norm()) > _EXACT[self._problem.dtype] * whole
        ]
        if padded:
            warn_once(
                self._model,
                "padding",
                f"{listed(padded)}: the loss depends on the row of padding_idx, which "
                "the embedding holds fixed; derivatives are those with that row held fixed.",
                deeper=4,
            )
        return bool(padded)

    def _check_modes(self, value: float) -> None:
        """Whether gradients switched off, or train mode, give another loss."""
        problem, same = self._problem, _SAME[self._problem.dtype]
        eps = torch.finfo(problem.dtype).eps
        with_graph = self._with_graph
        if abs(with_graph - value) > 100 * eps * max(abs(with_graph), abs(value)):
            check_same_loss(value, self._loss(), eps=eps)
            if _differ(with_graph, value, same):
                self._with_gradients = True  # differences are of the loss that is differentiated
                warn_once(
                    problem.model,
                    "grad mode",
                    f"the model or the loss branches on torch.is_grad_enabled(): near the weights "
                    f"the loss is {with_graph:.6g} with gradients switched on, of which "
                    f"derivatives are taken, and {value:.6g} without.",
                    deeper=4,
                )
        if not self._train_mode:
            return
        try:
            for module in self._train_mode:
                module.training = True
            with torch.random.fork_rng(devices=[]):
                trained = self._loss()
        except Exception:  # what fails in train mode is not asked for
            return
        finally:
            for module in self._train_mode:
                module.training = False
        value = with_graph if self._with_gradients else value
        if _differ(trained, value, same):
            warn_once(
                problem.model,
                "train mode",
                f"the model is in train mode, where its loss is another ({trained:.6g} instead of "
                f"{value:.6g} near the weights): derivatives are those of evaluation mode; call "
                "model.eval() to say so yourself.",
                deeper=4,
            )

    # --- slopes -----------------------------------------------------------------------------------

    @unwatched
    def _by_autograd(self, names: Sequence[str], direction: int) -> tuple[float, float]:
        """gᵀv and ‖g ∘ v‖² over some parameters."""
        slope = square = 0.0
        for name in names:
            gradient = self._gradient.get(name)
            if gradient is not None:
                terms = gradient * self._along(name, direction).mul_(self._sizes[name])
                slope += float(terms.sum(dtype=_wide(terms)))
                square += float(torch.linalg.vector_norm(terms)) ** 2
        return slope, square

    def _slope(self, names: Sequence[str], direction: int) -> _Slope:
        dtype = self._problem.dtype
        slope, square = self._by_autograd(names, direction)
        exact = _EXACT[dtype] * math.sqrt(square)
        result = _Slope(slope, slope, math.inf, decided=False)
        for step in _STEPS[dtype]:
            ahead, behind = self._at(names, direction, step), self._at(names, direction, -step)
            near = (ahead - behind) / (2 * step)
            size = max(abs(ahead), abs(behind))
            rounding = _ROUNDINGS * torch.finfo(dtype).eps * size / step
            if abs(near - slope) <= exact:
                return _Slope(slope, near, exact, decided=True)
            twice = self._at(names, direction, 2 * step) - self._at(names, direction, -2 * step)
            allowed = exact + rounding + _UNSURE * abs(near - twice / (4 * step))
            decided = allowed <= _DECISIVE * max(abs(slope), abs(near), math.sqrt(square))
            result = _Slope(slope, near, allowed, decided=decided)
            if decided:
                break
        return result

    def _at(self, names: Sequence[str], direction: int, step: float) -> float:
        self._move(names, direction=direction, by=step)
        try:
            return self._loss()
        finally:
            self._move(names, direction=direction, by=-step)

    def _located(self, names: Sequence[str], wrong: Callable[[Sequence[str]], bool]) -> list[str]:
        """Parameters whose own slope is wrong, the first few; halves before their parts."""
        if len(names) == 1:
            return list(names)
        located: list[str] = []
        middle = len(names) // 2
        for half in (names[:middle], names[middle:]):
            if len(located) < _LISTED and wrong(half):
                located += self._located(half, wrong)
        return located[:_LISTED]

    def _say(self) -> None:
        whole = self._slope(self._names, 1)
        names = self._located(self._names, lambda some: self._slope(some, 1).wrong)
        where = listed(names) if names else "several parameters together"
        warn_once(
            self._model,
            "gradient",
            f"the gradient is not the loss's, at {where}: along a random direction autograd's is "
            f"{whole.by_autograd:.4g} and differences of the loss give {whole.by_differences:.4g}. "
            "Something in the forward pass cuts or changes gradients (detach, .data, no_grad, a "
            "hook, a straight-through estimator, an autograd.Function): derivatives are of what "
            "autograd differentiates, with what is cut held fixed.",
            deeper=4,
        )


def _differ(some: float, other: float, tolerance: float) -> bool:
    return not abs(some - other) <= tolerance * max(abs(some), abs(other))


def _doubled(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.device.type == "cpu" else tensor.dtype


@unwatched
def _rms(weight: Tensor) -> float:
    return float(torch.linalg.vector_norm(weight.detach())) / math.sqrt(max(weight.numel(), 1))


@functools.lru_cache(maxsize=16)
def _noise(direction: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers, the same for every weight."""
    seeded = torch.Generator().manual_seed(20261 + direction)
    with torch.inference_mode(False):
        numbers = torch.randn(_NOISE, generator=seeded, dtype=torch.float64, device="cpu")
        return numbers.to(dtype=dtype, device=device)
