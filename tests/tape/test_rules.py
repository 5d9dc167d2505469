"""Every rule against autograd of its own operation, over the samples of PyTorch's own table.

The table (``op_db``) holds calls; each is recorded as a model's would be, so that what is tested is
what reaches a rule. Every operation that has a rule must occur there, or among ``more``.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten

from curvatlas.tape.record import Node, Record, Ref, aten, record, tree_map_refs
from curvatlas.tape.rules import rule_for
from curvatlas.tape.rules.base import RULES, Call, Pointwise, Rule
from curvatlas.tape.rules.default import Default

Case = tuple[Node, list[Tensor]]  # a node and the values of all slots


# --- the calls ------------------------------------------------------------------------------------


def recorded(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Record | None:
    """One call, with the sum of what it returns as the loss; None: it cannot be recorded."""
    leaves = {
        id(leaf): leaf
        for leaf in tree_flatten((args, kwargs))[0]
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }

    def total(results: Any) -> Tensor:
        moving = [
            r for r in tree_flatten(results)[0] if isinstance(r, Tensor) and r.is_floating_point()
        ]
        return torch.stack([(r.double() * 2.0).sum() for r in moving]).sum()

    named = {str(i): leaf for i, leaf in enumerate(leaves.values())}
    try:
        return record(nn.Module(), named, lambda: call(*args, **kwargs), total)
    except Exception:  # complex or random numbers, sparse tensors, no gradient: not the rules'
        return None


def more() -> Iterator[tuple[Any, ...]]:
    """Calls that the table does not have."""

    def x(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64).add(0.1).requires_grad_(True)

    a, image = x(3, 4), x(2, 3, 5, 5)
    for operation, *rest in (
        (aten.alias,),
        (aten.select_copy, 1, 2),
        (aten.slice_copy, 0, 1, 3),
        (aten.unsafe_split_with_sizes, [1, 3], 1),
        (aten.rsub, 2.0, 3.0),
        (aten.norm, 2),
        (aten.clamp_max, 0.6),
        (aten.pow, 3, a),
        (aten.xlogy, a, 2.0),
        (aten.xlogy, 2.0, a),
        (aten.remainder, 0.3),
        (aten.fmod, 0.3),
        (aten.floor_divide, 0.3),
        (aten._weight_norm_interface, x(3, 1), 0),
        (aten._weight_norm_interface, x(1, 4), 1),
    ):
        yield operation, *(rest if any(r is a for r in rest) else (a, *rest))
    yield F.fold, x(2, 8, 6), (3, 4), 2
    yield aten._upsample_bicubic2d_aa, image, [7, 4], False
    mask = torch.tensor([[True, False, True], [False, True, False]])
    yield lambda t: t[mask, :, torch.tensor([4, 0, 0])], image
    yield lambda t: t[:, mask.T, [0, 1, 2]], x(2, 3, 2, 5)
    statistics = x(3).data, x(3).data
    yield aten._native_batch_norm_legit_no_training, image, x(3), x(3), *statistics, 0.1, 0.1
    yield F.rms_norm, x(2, 3, 4), [3, 4], x(3, 4), 0.1
    yield F.rms_norm, x(2, 4), [4]
    target = torch.tensor([[0, 2, -100, 1], [1, 1, 3, 0]])
    for options in itertools.product((None, x(4).data), range(3), (0.0, 0.3)):
        weight, reduction, smoothing = options
        loss = functools.partial(
            F.cross_entropy,
            weight=weight,
            reduction=("none", "mean", "sum")[reduction],
            label_smoothing=smoothing,
        )
        yield loss, x(2, 4, 4), target
        yield loss, x(4), target[0, 0]
        yield loss, x(3, 4), x(3, 4).softmax(1).data
    heads = x(2, 4, 3, 5), x(2, 2, 6, 5), x(2, 2, 6, 7)
    yield functools.partial(F.scaled_dot_product_attention, enable_gqa=True), *heads
    unseen = torch.ones(3, 6, dtype=torch.bool)
    unseen[1] = False  # a query that sees no key
    yield F.scaled_dot_product_attention, x(2, 3, 5), x(2, 6, 5), x(2, 6, 4), unseen
    bias = torch.zeros(2, 1, 3, 6).masked_fill(~unseen, -torch.inf).double()
    yield F.scaled_dot_product_attention, x(2, 4, 3, 5), x(2, 4, 6, 5), x(2, 4, 6, 5), bias
    yield F.scaled_dot_product_attention, x(2, 4, 3, 5), x(2, 4, 6, 5), x(2, 4, 6, 5), x(4, 3, 6)


@pytest.fixture(scope="module")
def cases() -> dict[Any, list[Case]]:
    """Operation → its recorded calls, each form of arguments once."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[Any, dict[str, Case]] = defaultdict(dict)

    def collect(written: Record | None) -> bool:
        """Keep the calls that have a rule; whether there are some."""
        reached = False
        for node in () if written is None else written.nodes[: written.boundary]:
            if node.operation in RULES and not node.kwargs.get("dropout_p"):
                form = described(written, node, (node.args, node.kwargs))
                found[node.operation].setdefault(form, (node, written.values))
                reached = True
        return reached

    def described(written: Record, node: Node, argument: Any) -> str:
        if isinstance(argument, Ref):
            value, place = written.values[argument.slot], node.inputs.index(argument.slot)
            return f"input {place} {value.dtype}{tuple(value.shape)}{value.stride()}"
        if isinstance(argument, Tensor):
            return f"{argument.dtype}{tuple(argument.shape)}"
        if isinstance(argument, (list, tuple)):
            return f"({','.join(described(written, node, a) for a in argument)})"
        return str(argument)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for call, *args in more():
            collect(recorded(call, *args))
        for info in op_db:
            if not info.supports_autograd or torch.float64 not in info.dtypes:
                continue
            torch.manual_seed(0)
            reached = False
            samples = info.sample_inputs("cpu", torch.float64, requires_grad=True)
            for number, sample in enumerate(samples):
                written = recorded(info.op, sample.input, *sample.args, **sample.kwargs)
                reached |= collect(written)
                if number == 4 and not reached:
                    break  # an entry without any operation that has a rule
    return {operation: list(forms.values()) for operation, forms in found.items()}


# --- the truth ------------------------------------------------------------------------------------


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    axes = [axis for axis in range(v.ndim) if axis != dim % v.ndim]
    length = v.square().sum(axes, keepdim=True).sqrt()
    return v * (g / length), length


def distances(a: Tensor, b: Tensor, p: float = 2.0, *_: Any) -> Tensor:
    return torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)


def layer_norm(x: Tensor, shape: list[int], w: Any, b: Any, eps: float) -> tuple[Tensor]:
    axes = list(range(-len(shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    n = centred / (centred.square().mean(axes, keepdim=True) + eps).sqrt()
    n = n if w is None else n * w
    return (n if b is None else n + b,)


def binary_cross_entropy(x: Tensor, t: Tensor, w: Any = None, reduction: int = 1) -> Tensor:
    entries = -(t * x.log() + (1 - t) * (1 - x).log()) * (1 if w is None else w)
    return (entries, entries.mean(), entries.sum())[reduction]


# Operations whose derivatives are missing in PyTorch, or wrong, by others that are the same.
PLAIN: dict[Any, Callable[..., Any]] = {
    aten._cdist_forward.default: distances,
    aten._euclidean_dist.default: distances,
    aten._weight_norm_interface.default: weight_norm,
    aten.hardsigmoid.default: lambda x: (x / 6 + 0.5).clamp(0, 1),
    aten.floor_divide.default: lambda x, y: (x / y).floor(),
    aten.unfold.default: lambda x, *window: x.unfold(*window) if x.ndim else x.reshape(1),
    aten.unfold_copy.default: lambda x, *window: x.unfold(*window) if x.ndim else x.reshape(1),
    aten._prelu_kernel.default: lambda x, w: torch.where(x > 0, x, w * x),
    aten.native_layer_norm.default: layer_norm,
    aten.binary_cross_entropy.default: binary_cross_entropy,
}


class Truth:
    """Derivatives of one operation by autograd: of the results that its rule speaks of."""

    def __init__(self, node: Node, x: Sequence[Tensor], *, all_results: bool) -> None:
        self.node = node
        slots = [n for n, slot in enumerate(node.outputs) if slot is not None]
        self.numbers = slots if all_results else slots[:1]
        self.x = [value.detach().requires_grad_(True) for value in x]
        self.y = self._results(self.x)

    def _results(self, x: Sequence[Tensor]) -> list[Tensor]:
        args, kwargs = self.node.with_values(x)
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            result = PLAIN.get(self.node.operation, self.node.operation)(*args, **kwargs)
        return [(result if self.node.many else [result])[n] for n in self.numbers]

    def pull(self, bars: Sequence[Tensor]) -> list[Tensor]:
        return self._gradient(self.y, self.x, bars)

    def push(self, dots: Sequence[Tensor]) -> list[Tensor]:
        u = [torch.zeros_like(y).requires_grad_(True) for y in self.y]
        return self._gradient(self._gradient(self.y, self.x, u, graph=True), u, dots)

    def bend(self, bars: Sequence[Tensor], dots: Sequence[Tensor]) -> list[Tensor]:
        return self._gradient(self._gradient(self.y, self.x, bars, graph=True), self.x, dots)

    @staticmethod
    def _gradient(
        roots: Sequence[Tensor],
        at: Sequence[Tensor],
        given: Sequence[Tensor],
        *,
        graph: bool = False,
    ) -> list[Tensor]:
        pairs = [(r, g) for r, g in zip(roots, given, strict=True) if r.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in at]
        with torch.enable_grad():
            parts = torch.autograd.grad(
                [r for r, _ in pairs],
                at,
                [g for _, g in pairs],
                retain_graph=True,
                create_graph=graph,
                allow_unused=True,
            )
        return [torch.zeros_like(x) if p is None else p for p, x in zip(parts, at, strict=True)]


# --- the comparison -------------------------------------------------------------------------------


class Check:
    """A rule with everything that it can be asked, for K columns."""

    def __init__(self, rule: Rule, truth: Truth, columns: int) -> None:
        self.rule, self.truth = rule, truth
        generator = torch.Generator().manual_seed(columns)

        def draw(like: Sequence[Tensor], count: int) -> list[Tensor]:
            return [
                torch.randn(count, *t.shape, dtype=torch.float64, generator=generator).to(t.dtype)
                for t in like
            ]

        self.dots, self.bars = draw(truth.x, columns), draw(truth.y, columns)
        self.kept = [bar[0] for bar in draw(truth.y, 1)]

    def close(self, name: str, ours: Any, columns: Sequence[Tensor]) -> None:
        """Ours (None: zero) against the columns, where these are finite."""
        expected = torch.stack(list(columns)).detach()
        ours = torch.zeros_like(expected) if ours is None else ours
        assert ours.shape == expected.shape, f"{name}: {ours.shape}, not {expected.shape}"
        finite = expected.isfinite()
        if finite.any():
            expected, ours = expected[finite], ours[finite]
            scale = max(1.0, expected.abs().max().item())
            limit = 1e5 * max(torch.finfo(t.dtype).eps for t in (*self.truth.x, *self.truth.y))
            error = (ours - expected).abs().max().item()
            assert error <= limit * scale, f"{name}: off by {error:.1e} of {scale:.1e}"

    def _per_column(self, function: Callable[..., list[Tensor]], values: Sequence[Tensor]) -> Any:
        """Results of single columns, by result."""
        rows = [function([v[k] for v in values]) for k in range(len(values[0]))]
        return list(zip(*rows, strict=True))

    def all(self) -> None:
        rule, truth, dots, bars = self.rule, self.truth, self.dots, self.bars
        many = rule.all_results and truth.node.many
        everything = [True] * len(dots)

        def adjoint(values: Sequence[Tensor]) -> Any:
            if not many:
                return values[0]
            by_number = dict(zip(truth.numbers, values, strict=True))
            return tuple(by_number.get(n) for n in range(len(truth.node.outputs)))

        with torch.no_grad():
            # First order, and one moving input alone.
            for alone in (None, *(range(len(dots)) if len(dots) > 1 else ())):
                given = [d if alone in (None, i) else None for i, d in enumerate(dots)]
                moved = [d * (g is not None) for d, g in zip(dots, given, strict=True)]
                pushed = rule.push(given)
                pushed = [pushed[n] for n in truth.numbers] if many else [pushed]
                for ours, column in zip(pushed, self._per_column(truth.push, moved), strict=True):
                    self.close(f"push {alone}", ours, column)
            expected = self._per_column(truth.pull, bars)
            pulled = rule.pull(adjoint(bars), everything)
            for i, (ours, column) in enumerate(zip(pulled, expected, strict=True)):
                self.close(f"pull {i}", ours, column)
                if len(dots) > 1:
                    needs = [i == j for j in range(len(dots))]
                    partial = rule.pull(adjoint(bars), needs)
                    self.close(f"pull {i} alone", partial[i], column)
            # Second order.
            if rule.bends:
                rule.keep(adjoint(self.kept))
            bent = self._per_column(lambda d: truth.bend(self.kept, d), dots)
            if not rule.bends:
                for i, column in enumerate(bent):
                    self.close(f"bend {i}", None, column)
                return
            for i, column in enumerate(bent):
                needs = [i == j for j in range(len(dots))]
                self.close(f"bend {i}", rule.pull2(None, dots, needs)[i], column)
                both = [a + b for a, b in zip(column, expected[i], strict=True)]
                self.close(f"pull2 {i}", rule.pull2(adjoint(bars), dots, everything)[i], both)
            form = sum(
                (torch.stack(list(column)) * d).reshape(len(d), -1).sum(1)
                for column, d in zip(bent, dots, strict=True)
            )
            self.close("quadratic", rule.quadratic(dots), list(form))
            if len(dots) > 1:
                given = [dots[0], *[None] * (len(dots) - 1)]
                moved = [dots[0], *[torch.zeros_like(d) for d in dots[1:]]]
                alone = self._per_column(lambda d: truth.bend(self.kept, d), moved)
                ours = rule.pull2(None, given, everything)
                for i, column in enumerate(alone):
                    self.close(f"bend {i} by 0", ours[i], column)
                form = (torch.stack(list(alone[0])) * dots[0]).reshape(len(dots[0]), -1).sum(1)
                self.close("quadratic by 0", rule.quadratic(given), list(form))


def check(node: Node, values: Sequence[Tensor], *, slowly: bool = True) -> Rule:
    """The rule of a node, and the default one, for one column and for three."""
    with torch.no_grad():
        rule = rule_for(node, values, frozenset())
    x = [values[slot] for slot in node.inputs]
    truth = Truth(node, x, all_results=rule.all_results)
    for columns in (1, 3):
        Check(rule, truth, columns).all()
    if slowly and not isinstance(rule, Default) and node.operation not in PLAIN:
        with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            Check(Default(Call(node, values)), Truth(node, x, all_results=True), 2).all()
    return rule


def held(node: Node, values: Sequence[Tensor], moving: int) -> Node:
    """A node with one input, the others constants."""

    def change(ref: Ref) -> Any:
        return ref if ref.slot == moving else values[ref.slot]

    args, kwargs = tree_map_refs(change, (node.args, node.kwargs))
    return Node(node.operation, args, kwargs, (moving,), node.outputs, node.module, node.many)


def at_special_values(node: Node, values: Sequence[Tensor]) -> list[Tensor] | None:
    """Inputs of zeros, ones and large numbers of both signs, as far as the operation allows."""
    if node.operation is aten.pow.Tensor_Tensor:  # autograd takes ∂²(aⁿ)/∂a∂n for 0 at n = 0
        return None
    for special in ((0.0, 1.0, -1.0, 500.0, -500.0), (0.0, 1.0, 500.0), (1.0, 500.0)):
        changed = list(values)
        for shift, slot in enumerate(node.inputs):
            x = values[slot]
            at = (torch.arange(x.numel()) * (shift + 1)) % len(special)
            changed[slot] = torch.tensor(special)[at].to(x.dtype).reshape(x.shape)
        args, kwargs = node.with_values([changed[slot] for slot in node.inputs])
        try:
            result = node.operation(*args, **kwargs)
        except RuntimeError:  # out of its domain
            continue
        results = result if node.many else [result]
        for slot, y in zip(node.outputs, results, strict=True):
            if slot is not None:
                changed[slot] = y
        if all(changed[slot].isfinite().all() for slot in node.outputs if slot is not None):
            return changed
    return None


def named(operation: Any) -> str:
    return str(operation) if hasattr(operation, "_schema") else str(operation.__name__)


@pytest.mark.parametrize("operation", RULES, ids=named)
def test_a_rule_is_autograds_first_and_second_derivative(
    operation: Any, cases: dict[Any, list[Case]]
) -> None:
    assert cases.get(operation), "no call of it: add one to more()"
    for place, (node, values) in enumerate(cases[operation]):
        rule = check(node, values, slowly=place < 5)
        if len(node.inputs) > 1:
            for slot in node.inputs:
                check(held(node, values, slot), values, slowly=False)
        if isinstance(rule, Pointwise) and place < 3:
            special = at_special_values(node, values)
            if special is not None:
                check(node, special, slowly=False)
