"""Products compiled to one graph of fused kernels, for runs long enough to pay for the compiling.

What is compiled is the product itself, double backward on the kept graph, recorded operation by
operation: the same mathematics as without, so that what is right through LayerNorm stays right.
(Forward over reverse, the usual thing to compile, is wrong there in some compositions, and kept 3.6
times as much on the 1.06 M GPT.) That GPT's product has 2,500 operations and takes a minute to
compile; products then cost a fifth less (benchmarks/compiled.py).
"""

from __future__ import annotations

import math
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from curvatlas.engines.autograd.linearisation import Columns, Linearisation

Compile = bool | Literal["auto"]

# Measured on the 1.06 M GPT: compiling takes 25 ms for every recorded operation (with recording),
# and a compiled product saves a fifth of its time. Three saved tensors make about ten operations.
SECONDS_PER_OPERATION = 0.025
OPERATIONS_PER_TENSOR = 4
SAVED_SHARE = 0.2
_AGREEMENT = 1000  # roundings between a compiled product and the same one uncompiled


class CompiledLinearisation(Linearisation):
    """A linearisation whose products with whole vectors run compiled, from the second one on.

    The first product runs as it is: a graph that does not fit the budget is built anew for every
    product, and compiling it would never pay. expected: products that are still to come, by which
    "auto" decides; None: not known, and nothing is compiled.
    """

    def __init__(
        self, plain: Linearisation, names: Sequence[str], *, compile: Compile, expected: int | None
    ) -> None:
        # Everything but the product is the plain linearisation's own.
        self.__dict__.update(plain.__dict__)
        self._plain = plain
        self._all = tuple(names)
        self._compile, self._expected = compile, expected
        self._run: Callable[..., Sequence[Tensor | None]] | None = None
        self._saved: list[Tensor] = []
        self._seconds: float | None = None  # of the first product
        self._given_up = shutil.which("c++") is None and shutil.which("g++") is None
        if self._given_up and compile is True:
            warnings.warn("no C++ compiler was found: products run uncompiled.", stacklevel=2)

    @property
    def needs_scope(self) -> bool:
        return True  # the second product is recorded and compiled

    def product(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        count = next(iter(columns.values())).shape[0]
        whole = tuple(rows) == self._all and tuple(columns) == self._all
        # Small graphs take their columns through one pass, which no compiled single one beats.
        if self._given_up or not whole or (count > 1 and self._plain.columns_at_once > 1):
            return self._plain.product(columns, rows)
        if self._seconds is None:
            start = time.perf_counter()
            product = self._plain.product(columns, rows)
            self._seconds = (time.perf_counter() - start) / count
            return product
        if self._run is None and not self._prepare(columns):
            self._given_up = True
            return self._plain.product(columns, rows)
        assert self._run is not None
        single = []
        with torch.no_grad():
            for k in range(count):
                single.append(self._run(*self._saved, *(columns[name][k] for name in self._all)))
        return [
            None if parts[0] is None else torch.stack([p for p in parts if p is not None])
            for parts in zip(*single, strict=True)
        ]

    def _prepare(self, columns: Columns) -> bool:
        """Record, compile and check; False where it does not pay or does not agree."""
        if self._compile == "auto" and not self._pays():
            return False
        given = [columns[name][0].contiguous() for name in self._all]
        want = self._plain.product({n: c[:1] for n, c in columns.items()}, self._all)
        try:
            run, self._saved = _compiled(self._plain, self._all, given)
            with torch.no_grad():
                got = run(*self._saved, *given)
        except Exception as error:  # whatever the compiler cannot do, the kept graph can
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            warnings.warn(f"this product cannot be compiled ({reason[:200]}).", stacklevel=4)
            return False
        off = _difference(got, want)
        if not off <= _AGREEMENT * torch.finfo(given[0].dtype).eps:
            warnings.warn(
                f"the compiled product differs from the exact one by {off:.1e}, relative: "
                "products run uncompiled.",
                stacklevel=4,
            )
            return False
        self._run = run
        return True

    def _pays(self) -> bool:
        if self._expected is None or self._seconds is None:
            return False
        operations = OPERATIONS_PER_TENSOR * self._plain.size.tensors
        return self._expected * self._seconds * SAVED_SHARE > operations * SECONDS_PER_OPERATION


def _compiled(
    plain: Linearisation, names: Sequence[str], given: Sequence[Tensor]
) -> tuple[Callable[..., Sequence[Tensor | None]], list[Tensor]]:
    """(compiled product of saved tensors and one tensor a parameter, those saved tensors)."""
    with warnings.catch_warnings():  # importing it warns of torch's own old code
        warnings.simplefilter("ignore")
        from torch._inductor.compile_fx import compile_fx

    def product(*vector: Tensor) -> list[Tensor | None]:
        columns = {name: v.unsqueeze(0) for name, v in zip(names, vector, strict=True)}
        product = plain.product(columns, names)
        return [None if t is None else t.squeeze(0) for t in product]

    recorded = make_fx(product)(*given)
    saved = constants_as_inputs(recorded)
    recorded.graph.eliminate_dead_code()
    recorded.recompile()
    with torch.no_grad():
        run: Any = compile_fx(recorded, [*saved, *given])
    return run, saved


def constants_as_inputs(recorded: GraphModule) -> list[Tensor]:
    """Let a record take its constants as its first inputs; returns them in that order.

    What the kept graph saved stands in the record as constants: as inputs the compiled code neither
    holds copies of them nor depends on their values.
    """
    graph = recorded.graph
    first = next(iter(graph.nodes))
    places: dict[str, Any] = {}
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        if node.target not in places:
            with graph.inserting_before(first):
                places[node.target] = graph.placeholder(f"saved_{len(places)}")
        node.replace_all_uses_with(places[node.target])
        graph.erase_node(node)
    recorded.recompile()
    return [getattr(recorded, name) for name in places]


def _difference(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> float:
    """‖got − want‖ / ‖want‖ over all parameters, infinite where one of them has no entry."""
    off = size = 0.0
    for left, right in zip(got, want, strict=True):
        if (left is None) != (right is None):
            return float("inf")
        if left is not None and right is not None:
            off += float((left - right[0]).square().sum())
            size += float(right.square().sum())
    return math.sqrt(off / size if size > 0 else off)
