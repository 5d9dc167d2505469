r"""Try a fused projection out: which output features are queries, which keys, which values.

Names do not tell. The same ``qkv`` is stacked in one library, goes head by head in the next and
puts values before keys in a third. What an attention computes tells, feature by feature. Let
z (tokens, features) be what the projection puts out, drawn at random, and y what becomes of it:

  query   y_s depends on z_tj of one token t, its own; keys and values are seen by several tokens;
  value   y is affine in all values together: other values leave ∂y/∂z_j as it is, and change it
          for every query and key;
  all     when every token has the same value, attention weights do not matter (they sum to one):
          ∂y/∂z_j vanishes for every query and key.

In a gated feed-forward part, y = W_down (act(gate) ⊙ up), up is affine like a value and gate is
not. A projection that fails any of this stays in one piece. Trials run on copies that share the
weights, without hooks, and draw from their own generator: model and random state stay as they are.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map


@dataclass(frozen=True)
class Part:
    """One role's output features: ``count`` runs of ``length``, ``stride`` apart."""

    role: str
    start: int
    length: int
    count: int = 1
    stride: int = 0


@dataclass(frozen=True)
class Heads:
    """What an attention module says of its heads; None where it says nothing."""

    count: int | None
    size: int | None


_COUNT = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead")
_SIZE = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head", "d_kv")


def heads_of(chain: list[nn.Module]) -> Heads:
    """Head count and size from the innermost module (or its config) that states them."""
    count = size = None
    for module in chain:
        for source in (module, getattr(module, "config", None)):
            count = count if count is not None else _integer(source, _COUNT)
            size = size if size is not None else _integer(source, _SIZE)
    return Heads(count, size)


def _integer(source: object, names: tuple[str, ...]) -> int | None:
    for name in names:
        try:
            value = getattr(source, name, None)
        except Exception:  # a configuration whose layers differ refuses to name one size
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def parts_of(roles: Sequence[str]) -> list[Part] | None:
    """The regular runs of every role, in order of first appearance; None where they are irregular.

    roles: one for every output feature, "query", "query", …, "key", …
    """
    starts: dict[str, list[int]] = {}
    ends: dict[str, list[int]] = {}
    for place, role in enumerate(roles):
        if place == 0 or roles[place - 1] != role:
            starts.setdefault(role, []).append(place)
        if place == len(roles) - 1 or roles[place + 1] != role:
            ends.setdefault(role, []).append(place + 1)
    parts = []
    for role, first in starts.items():
        lengths = {b - a for a, b in zip(first, ends[role], strict=True)}
        strides = {b - a for a, b in pairwise(first)}
        if len(lengths) > 1 or len(strides) > 1:
            return None
        stride = strides.pop() if strides else 0
        parts.append(Part(role, first[0], lengths.pop(), len(first), stride))
    return parts


Runner = Callable[[nn.Module], object]  # runs a copy of the model, on data that are at hand
_Input = tuple[Sequence[Any], dict[str, Any]]  # positional and keyword arguments

_TOKENS = (2, 5)
_SIDES = (64, 224)  # of images, where a module does not say
_ROWS = 5  # output rows tried for one that sees several tokens
_FUNCTIONALS = 3  # random functionals of y whose gradients are compared
_SAME, _OTHER = 1e-3, 3e-2  # relative changes of a gradient: rounding, and what two draws differ by
_GROUPS = 4  # key heads that are silenced to see whether heads are what they are said to be
_UNSEEN = 1e-10  # of the largest gradient: another token's query has exactly none
_LARGE_BUFFER = 2**20  # entries: a mask, not a counter that a forward pass may write to
_LARGEST = 2**27  # entries of a copy that are converted or made up, half a gigabyte


class CannotTry(Exception):
    """The module cannot be run on its own."""


@dataclass(frozen=True, eq=False)
class Call:
    """A module's copy and arguments it was called with."""

    unit: nn.Module
    arguments: Sequence[Any]
    keywords: dict[str, Any]

    def __call__(self) -> list[Tensor]:
        """Floating-point tensors that come out and depend on what is varied."""
        result = self.unit(*self.arguments, **self.keywords)
        leaves = tree_flatten(result)[0]
        return [
            leaf
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.ndim >= 2
        ]


# --- the verdicts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What every output feature of a fused projection is."""

    roles: list[str]
    axis: int | None = None  # of the features in a bare parameter
    head_sizes: dict[str, int] = field(default_factory=dict)  # role → width of a head, if seen


def attention_roles(call: Call, weight: Tensor, *, queries: bool, heads: Heads) -> Verdict | None:
    """Role of every output feature of a projection, None when it does not behave like attention.

    queries: whether the projection makes queries too, or keys and values only.
    heads: what the module says of its heads; a size is believed where the trial shows it.
    """
    return attention_verdict(_ProjectionOutput(call, weight), queries=queries, heads=heads)


def attention_verdict(output: Varied, *, queries: bool, heads: Heads) -> Verdict | None:
    """Role of every varied feature, None when they do not behave like those of an attention."""
    features = output.z.shape[-1]
    if output.z.numel() == features:
        raise CannotTry("a single token has nothing to attend to")
    for _ in output.each_result():
        query = torch.zeros(features, dtype=torch.bool)
        if queries:
            query = output.local_features()
            if query.all():
                continue
        for value in value_guesses(output, query):
            if output.affine(value) and output.weights_do_not_matter(value):
                names = [
                    "query" if query[j] else "value" if value[j] else "key" for j in range(features)
                ]
                return Verdict(names, head_sizes=output.head_sizes(query, value, heads))
    return None


def gate_roles(call: Call, weight: Tensor) -> Verdict | None:
    """Role of every output feature of [gate; up], None when no half is affine."""
    for varied in _variations(call, weight):
        for _ in varied.each_result():
            for up in _halves(torch.ones(varied.z.shape[-1], dtype=torch.bool)):
                if varied.affine(up) and not varied.affine(~up):  # else there is no telling them
                    return Verdict(["up" if u else "gate" for u in up.tolist()], varied.axis)
    return None


def value_guesses(output: Varied, query: Tensor) -> Iterator[Tensor]:
    """Which of the other features may be values: boolean masks (features,)."""

    def some(guess: Tensor) -> bool:
        return 0 < int(guess.sum()) < int((~query).sum())

    if query.any():
        # Without queries the logits are the same for all keys, and keys lose their gradient; not
        # where a norm's bias or relative positions stand in for the query.
        silent = output.z.clone()
        silent[..., query] = 0
        size = output.gradients(silent).norm(dim=0)
        guess = ~query & (size > _SAME * size.max())
        if some(guess):
            yield guess
            return
    guess = ~query & output.shared_features()
    if some(guess):
        yield guess
    yield from _halves(~query)


def _halves(members: Tensor) -> Iterator[Tensor]:
    """Ways to choose half of the members, all masks (features,).

    Of every run of neighbours the later half, or the earlier; every other run; of a single run
    every other feature.
    """
    places = members.nonzero().flatten()
    runs = list(torch.tensor_split(places, (places.diff() != 1).nonzero().flatten() + 1))
    choices: list[list[Tensor]] = []
    if all(len(run) % 2 == 0 for run in runs):
        choices += [[r[len(r) // 2 :] for r in runs], [r[: len(r) // 2] for r in runs]]
    if len(runs) == 1:
        runs = list(torch.split(places, 1))
    if len(runs) % 2 == 0:
        choices += [runs[1::2], runs[::2]]
    for chosen in choices:
        mask = torch.zeros_like(members)
        mask[torch.cat(chosen)] = True
        yield mask


# --- varying what a projection puts out -----------------------------------------------------------


class Varied:
    """Gradients of what a module puts out with respect to features that are set by hand.

    z: features drawn at random, on the last axis; y: one of the tensors that come out.
    """

    axis: int | None = None  # of the features, in a bare parameter
    z: Tensor

    def __init__(self, call: Call) -> None:
        self.call = call
        self._draw = torch.Generator().manual_seed(0)
        self._leaf = torch.zeros(())  # what the last run was made from
        self._place = 0

    def draw(self) -> Tensor:
        """Random features."""
        raise NotImplementedError

    def run(self, z: Tensor) -> list[Tensor]:
        """What comes out when the features are ``z``; a graph leads back to ``_leaf``, a copy."""
        raise NotImplementedError

    def each_result(self) -> Iterator[None]:
        """Take every tensor that comes out as y in turn."""
        for place, y in enumerate(self.run(self.z)):
            self._place = place
            self._functionals = [
                torch.randn(y.shape, generator=self._draw, device="cpu")
                for _ in range(_FUNCTIONALS)
            ]
            self.before = self.gradients(self.z)
            yield

    def gradients(self, z: Tensor) -> Tensor:
        """Gradients of the same random functionals of y at every call: (functionals × rest, F)."""
        y = self.run(z)[self._place]
        return torch.cat([self._gradient(y, w) for w in self._functionals])

    def _gradient(self, y: Tensor, w: Tensor) -> Tensor:
        """Gradient of Σ w y with respect to the features that y was made from: (rest, F)."""
        (gradient,) = torch.autograd.grad(
            y, self._leaf, w.to(y), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return gradient.reshape(-1, gradient.shape[-1]).cpu().double()

    def local_features(self) -> Tensor:
        """Features that y_s sees of one token only: (F,) booleans, for the row s that sees most."""
        y = self.run(self.z)[self._place]
        most = torch.zeros(self.z.shape[-1], dtype=torch.long)
        for row in spread(y.numel() // y.shape[-1], _ROWS):
            gradient = self._gradient(y, only(self._functionals[0], row)).abs()
            seen = (gradient > _UNSEEN * gradient.max()).sum(0)  # tokens, for every feature
            most = seen if int(seen.sum()) > int(most.sum()) else most
        return most == 1

    def shared_features(self) -> Tensor:
        """Features whose tokens y_s weighs in the same proportions in all its entries: (F,).

        ∂y_s/∂v_t = a_st W: values of one head are weighed by attention alone, keys are not.
        """
        y = self.run(self.z)[self._place]
        row = y.numel() // y.shape[-1] - 1
        gradients = torch.stack([self._gradient(y, only(w, row)) for w in self._functionals])
        singular: Tensor = torch.linalg.svdvals(gradients.movedim(-1, 0))  # (F, functionals)
        return singular[:, 1] <= _SAME * singular[:, 0]

    def affine(self, part: Tensor) -> bool:
        """Whether y is affine in the features of ``part`` together, and in no other feature."""
        other = self.z.clone()
        other[..., part] = self.draw()[..., part]
        size = self.before.norm(dim=0)
        change = (self.gradients(other) - self.before).norm(dim=0)
        steady = change[part] <= _SAME * size[part]
        moved = change[~part] >= _OTHER * size[~part]
        return bool((size > 0).all() and steady.all() and moved.all())

    def weights_do_not_matter(self, value: Tensor) -> bool:
        """Whether queries and keys have no effect once all tokens have the same value."""
        equal = self.z.clone().reshape(-1, self.z.shape[-1])
        equal[:, value] = equal[0, value].clone()
        after = self.gradients(equal.reshape(self.z.shape))
        return bool(after[:, ~value].norm() <= _SAME * self.before[:, ~value].norm())

    def head_sizes(self, query: Tensor, value: Tensor, heads: Heads) -> dict[str, int]:
        """Role → width of a head, if the count or size the module states shows in what it computes.

        Zero values of one key's head silence its key and the queries that go with it, no others.
        """
        q, k, v = (m.nonzero().flatten() for m in (query, ~query & ~value, value))
        stated = [len(q) // heads.count if len(q) else len(k) // heads.count] if heads.count else []
        for size in (*stated, *([heads.size] if heads.size else ())):
            if not size or len(q) % size or len(k) % size:
                continue
            groups = len(k) // size
            if len(q) // size % groups or len(v) % groups:
                continue
            if all(self._head_is_apart(q, k, v, g, groups) for g in spread(groups, _GROUPS)):
                sizes = {"key": size, "value": len(v) // groups}
                return {"query": size, **sizes} if len(q) else sizes
        return {}

    def _head_is_apart(self, q: Tensor, k: Tensor, v: Tensor, group: int, groups: int) -> bool:
        own_q, own_k, own_v = (m.tensor_split(groups)[group] for m in (q, k, v))
        silent = self.z.clone()
        silent[..., own_v] = 0
        expected = self.before.clone()
        expected[:, torch.cat([own_q, own_k])] = 0
        error = (self.gradients(silent) - expected).norm(dim=0) > _SAME * self.before.norm(dim=0)
        return not bool(error[torch.cat([q, k])].any())


def only(w: Tensor, row: int) -> Tensor:
    """The functional of one row of y alone."""
    rows = w.reshape(-1, w.shape[-1])
    result = torch.zeros_like(rows)
    result[row] = rows[row]
    return result.reshape(w.shape)


def spread(count: int, most: int) -> list[int]:
    """At most so many of 0 … count − 1, the first and the last among them."""
    few = min(count, most)
    return sorted({round(k * (count - 1) / max(few - 1, 1)) for k in range(few)})


_LINEAR_MAPS = {
    F.linear,
    torch.addmm,
    torch.baddbmm,
    torch.mm,
    torch.matmul,
    Tensor.mm,
    Tensor.matmul,
    Tensor.__matmul__,
}
_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}


class _ProjectionOutput(Varied):
    """What a linear map with this weight puts out, replaced by values of our own."""

    def __init__(self, call: Call, weight: Tensor) -> None:
        super().__init__(call)
        self.weight = weight
        outputs: list[Tensor] = []

        def note(_: int, __: Tensor, compute: Callable[[], Tensor]) -> Tensor:
            outputs.append(compute())
            return outputs[-1]

        with torch.no_grad(), Replaced([weight], note) as replaced:
            call.unit(*call.arguments, **call.keywords)
        if not outputs or any(output.shape != outputs[0].shape for output in outputs):
            raise CannotTry("the projection is not called as one linear map")
        self._like, self._images = outputs[0], replaced.convolution
        self.z = self.draw()

    def draw(self) -> Tensor:
        return (0.5 * torch.randn(self._like.shape, generator=self._draw, device="cpu")).to(
            self._like
        )

    def run(self, z: Tensor) -> list[Tensor]:
        leaf = self._leaf = z.clone().requires_grad_(True)
        with torch.enable_grad(), Replaced([self.weight], lambda *_: leaf.view_as(leaf)):
            results = self.call()
        return [y.movedim(1, -1) for y in results] if self._images else results


class Replaced(TorchFunctionMode):
    """Inside, a linear map with one of ``weights`` puts out what ``replace`` gives, features last.

    replace is given the place of the weight, what the map takes in, and the computation of what it
    would put out.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        replace: Callable[[int, Tensor, Callable[[], Tensor]], Tensor],
    ) -> None:
        super().__init__()
        self.replace = replace
        self.forms = [[w] for w in weights]  # a weight, its transpose, its copy in other precision
        self.convolution = False  # whether features come first, and places after them

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        place = next(
            (k for k, fs in enumerate(self.forms) if any(a is f for a in inputs for f in fs)), None
        )
        if place is None:
            return func(*args, **kwargs)
        if func in _CONVOLUTIONS or func in _LINEAR_MAPS:
            forms = self.forms[place]
            others = [a for a in inputs if not any(a is form for form in forms)]
            taken = max(others, key=lambda a: a.ndim, default=inputs[0])  # no bias has two axes
            if func in _LINEAR_MAPS:
                return self.replace(place, taken, lambda: func(*args, **kwargs))
            self.convolution = True
            return self.replace(
                place, taken.movedim(1, -1), lambda: func(*args, **kwargs).movedim(1, -1)
            ).movedim(-1, 1)
        result = func(*args, **kwargs)
        alone = len(inputs) == 1 and isinstance(result, Tensor)
        if alone and result.numel() == self.forms[place][0].numel():
            self.forms[place].append(result)
        return result


class _WeightItself(Varied):
    """A bare parameter, replaced by values of our own; the features lie along one of its axes."""

    axis: int

    def __init__(self, call: Call, weight: Tensor, axis: int) -> None:
        super().__init__(call)
        self.weight, self.axis = weight, axis
        self.name = next(n for n, p in call.unit.named_parameters() if p is weight)
        if weight.numel() > _LARGEST // 4:
            raise CannotTry("its gradients would take too much memory")
        self.z = self.draw()

    def draw(self) -> Tensor:
        width = 1 if self.name.endswith("bias") else max(self.weight.shape[-2:])
        values: Tensor = (
            torch.randn(self.weight.shape, generator=self._draw, device="cpu") / width**0.5
        )
        return values.to(self.weight).movedim(self.axis, -1)

    def run(self, z: Tensor) -> list[Tensor]:
        self._leaf = z.clone().requires_grad_(True)
        with torch.enable_grad():
            values = {self.name: self._leaf.movedim(-1, self.axis)}
            result = torch.func.functional_call(
                self.call.unit, values, tuple(self.call.arguments), self.call.keywords
            )
        leaves = tree_flatten(result)[0]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _variations(call: Call, weight: Tensor) -> Iterator[Varied]:
    """The projection's output if it is called as one, else the weight along each of its axes."""
    try:
        yield _ProjectionOutput(call, weight)
    except CannotTry:
        for axis in range(weight.ndim - 1, max(weight.ndim - 3, -1), -1):
            yield _WeightItself(call, weight, axis)


# --- running a module on its own ------------------------------------------------------------------


class Rehearsal:
    """Calls of some modules of a model: alone, as the modules around them call them, and on data.

    Every module around them is run once on each made-up input, for all that it calls.
    """

    def __init__(
        self, modules: dict[str, nn.Module], units: Collection[str], run: Runner | None
    ) -> None:
        self._modules, self._units, self._run = modules, units, run
        self._copies: dict[str, nn.Module | None] = {}
        self._inputs: dict[object, Iterator[_Input]] = {}
        self._reached: dict[object, list[dict[str, _Input]]] = {}

    def calls(self, unit: str, width: int) -> Iterator[Call]:
        """Calls of the module at path ``unit``; width: features of its input."""
        for path in outwards(unit):
            key = (path, width)
            if key not in self._inputs:
                self._inputs[key] = _made_up_inputs(self._modules[path], width)
                self._reached[key] = []
            yield from self._recorded(key, path, unit)
        if self._run is not None:
            if self._run not in self._inputs:
                self._inputs[self._run], self._reached[self._run] = iter([((), {})]), []
            yield from self._recorded(self._run, "", unit)

    def _recorded(self, key: object, path: str, unit: str) -> Iterator[Call]:
        """Calls that were seen before, then those of inputs that were not tried yet."""
        for place in itertools.count():
            if place == len(self._reached[key]):
                inputs = next(self._inputs[key], None)
                if inputs is None:
                    return
                self._reached[key].append(self._record(path, inputs, on_data=key is self._run))
            if unit in self._reached[key][place]:
                twin = self._copy(unit)
                if twin is not None:
                    yield Call(twin, *_in_float32(self._reached[key][place][unit]))

    def _copy(self, unit: str) -> nn.Module | None:
        """The module in float32; None for one that is too large or of a kind that is not copied."""
        if unit not in self._copies:
            self._copies[unit] = None
            with contextlib.suppress(Exception):
                self._copies[unit] = copy_of(self._modules[unit], full=True)
        return self._copies[unit]

    def _record(self, path: str, inputs: _Input, *, on_data: bool) -> dict[str, _Input]:
        """Arguments of the first call of every unit inside; the rest of the pass is left out."""
        try:
            twin = copy_of(self._modules[path])
        except Exception:  # a module of a kind that is not copied
            return {}
        prefix = f"{path}." if path else ""
        inside = [unit for unit in self._units if unit == path or unit.startswith(prefix)]
        seen: dict[str, _Input] = {}

        def watch(unit: str) -> None:
            def note(module: nn.Module, args: Any, kwargs: Any) -> None:
                seen.setdefault(unit, (args, kwargs))
                if len(seen) == len(inside):
                    raise _Reached

            inner = twin.get_submodule(unit[len(path) :].lstrip("."))
            inner.register_forward_pre_hook(note, with_kwargs=True)

        for unit in inside:
            watch(unit)
        # Any signature, any failure: these inputs are not what it takes, and that is the answer.
        with contextlib.suppress(_Reached, Exception), torch.no_grad():
            if on_data and self._run is not None:
                self._run(twin)
            else:
                twin(*inputs[0], **inputs[1])
        return seen


def outwards(path: str) -> Iterator[str]:
    """The path, the paths around it, and "" for the whole model."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _in_float32(inputs: _Input) -> _Input:
    draw = torch.Generator().manual_seed(3)

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta:  # any numbers will do for activations, and no mask
            values = torch.randn(leaf.shape, generator=draw, device="cpu")
            return values if leaf.is_floating_point() else torch.ones_like(leaf, device="cpu")
        leaf = leaf.detach().clone()
        return leaf.float() if leaf.is_floating_point() else leaf

    arguments, keywords = tree_map(plain, inputs)
    return arguments, keywords


class _Reached(BaseException):
    """All modules were called; no ``except Exception`` of the model is to catch it."""


def _made_up_inputs(module: nn.Module, width: int) -> Iterator[_Input]:
    """Inputs a module may take: hidden tokens, packed or on a grid, images, token numbers."""
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(()))
    device, draw = like.device, torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cpu").to(like)

    accepted = _accepted(module)
    hidden = normal(*_TOKENS, width)
    yield [hidden], {}
    rest = _usual_arguments(accepted, module, hidden)
    if rest:
        yield [hidden], rest
    if "cu_seqlens" in accepted:
        packed = hidden.reshape(-1, width)
        yield [packed], _usual_arguments(accepted, module, packed)
    yield [normal(1, 4, 4, width)], {}
    yield [normal(1, width, 8, 8)], {}
    first = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    config = getattr(module, "config", None)
    if first is not None and first.in_channels <= 4:
        stated = getattr(module, "image_size", None) or getattr(config, "image_size", None)
        for side in (stated,) if stated else _SIDES:
            height, wide = side if isinstance(side, (list, tuple)) else (side, side)
            yield [normal(1, first.in_channels, height, wide)], {}
    tables = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    if tables:
        # Not the first few numbers: they mark padding, the beginning and the end.
        low, high = (3, min(tables)) if min(tables) > 4 else (0, min(tables))
        tokens = (low + torch.arange(math.prod(_TOKENS)) % (high - low)).reshape(_TOKENS)
        keywords: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
        if "decoder_input_ids" in accepted:
            keywords["decoder_input_ids"] = tokens.to(device)
        yield [tokens.to(device)], keywords


def _accepted(module: nn.Module) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return {}


def _usual_arguments(
    accepted: dict[str, inspect.Parameter], module: nn.Module, hidden: Tensor
) -> dict[str, Any]:
    """Arguments that attentions commonly ask for besides the tokens, with no effect where so."""
    length = hidden.shape[-2]
    size = next(
        (
            s
            for name in ("head_dim", "head_size", "dim_head")
            if isinstance(s := getattr(module, name, None), int)
        ),
        None,
    )
    values: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, length], dtype=torch.int32, device=hidden.device),
        "position_ids": torch.arange(length, device=hidden.device)[None],
        "residual": torch.zeros_like(hidden),
    }
    if size is not None:
        angles = hidden.new_zeros(*([1] * (hidden.ndim - 2)), length, size)
        values["position_embeddings"] = (angles.cos(), angles.sin())
    chosen = {name: value for name, value in values.items() if name in accepted}
    for name, parameter in list(accepted.items())[1:]:
        required = parameter.default is inspect.Parameter.empty
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if required and named and name not in chosen:
            chosen[name] = None
    return chosen


# --- copies ---------------------------------------------------------------------------------------


def copy_of(module: nn.Module, *, full: bool = False) -> nn.Module:
    """The module in evaluation mode, without hooks; weights are shared, nothing needs a gradient.

    full: all in float32, which every kernel takes, with made-up values where there are none (a
    model on the meta device, or spread over processes), and adapters beside a projection silent.
    """
    copies: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    draw = torch.Generator().manual_seed(2)
    anew = sum(p.numel() for p in module.parameters() if p.is_meta or p.dtype != torch.float32)
    if full and anew > _LARGEST:
        raise CannotTry("a copy in float32 would take too much memory")

    def tensor(original: Tensor, weight: bool, silent: bool = False) -> Tensor:
        if id(original) in tensors:
            return tensors[id(original)]
        plain = original.detach()
        if plain.is_inference():  # made under torch.inference_mode(): no graph may keep it
            plain = plain.clone()
        if full and (original.is_meta or hasattr(original, "placements")):
            plain = torch.zeros(original.shape, dtype=original.dtype)
            if weight:
                plain = 0.2 * torch.randn(original.shape, generator=draw, device="cpu")
        if full and plain.is_floating_point():
            plain = torch.zeros_like(plain.float()) if silent else plain.float()
        if weight:
            plain = nn.Parameter(plain, requires_grad=False)
        elif plain.numel() <= _LARGE_BUFFER:
            plain = plain.clone()
        tensors[id(original)] = plain
        return plain

    def copied(original: nn.Module, silent: bool = False) -> nn.Module:
        if id(original) in copies:
            return copies[id(original)]
        twin: nn.Module = object.__new__(type(original))
        copies[id(original)] = twin
        for name, value in original.__dict__.items():
            if isinstance(value, dict):
                value = type(value)() if "hooks" in name else value.copy()
            elif isinstance(value, (list, set)):
                value = value.copy()
            elif isinstance(value, Tensor):
                value = tensor(value, False)
            elif isinstance(value, MethodType) and value.__self__ is original:
                value = MethodType(value.__func__, twin)
            twin.__dict__[name] = value
        twin._modules = {
            n: None if m is None else copied(m, silent or n.startswith("lora_"))
            for n, m in original._modules.items()
        }
        twin._parameters = {
            n: None if p is None else tensor(p, True, silent)  # type: ignore[misc]
            for n, p in original._parameters.items()
        }
        twin._buffers = {
            n: None if b is None else tensor(b, False) for n, b in original._buffers.items()
        }
        return twin

    twin = copied(module)
    for part in twin.modules():
        part.__dict__["training"] = False
    return twin


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """The random state as it was, gradients allowed, no autocast, no warnings of made-up calls."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with (
        torch.random.fork_rng(devices=[d.index or 0 for d in devices]),
        torch.inference_mode(False),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
