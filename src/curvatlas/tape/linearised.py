"""A batch of a Problem on the tape: what an operator multiplies with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from curvatlas.errors import DifferentiationError, UnmappedModuleError
from curvatlas.linear_operator import Part
from curvatlas.problem import Batch, Problem
from curvatlas.problem.evaluation import check_finite_loss
from curvatlas.problem.large_heads import HiddenLogits
from curvatlas.problem.objective import OwnLoss
from curvatlas.tape.record import record
from curvatlas.tape.run import Tape

Columns = Mapping[str, Tensor]  # parameter name → (K, *shape)
# Bytes of one value's tangents: more no longer stay in the processor's caches, and a column costs
# as much alone (nanoGPT of 0.8 M parameters, 8 × 64 tokens: 2.1 gradients alone, 2.3 in eights).
_IN_FLIGHT = 2**20


class TapeLinearisation:
    """One batch, recorded; the operator ``part`` of its mean loss."""

    needs_scope = False

    def __init__(self, problem: Problem, batch: Batch, names: Sequence[str], *, part: Part) -> None:
        if part != "total" and isinstance(problem.loss, OwnLoss):
            problem.loss.fixed_slopes([], lambda tensors: tensors, batch.targets)  # refuses
        self.batch, self.part, self.dtype = batch, part, problem.dtype
        self._layout = problem.layout
        leaves = problem.leaves(names)
        try:
            written = record(
                problem.model,
                leaves,
                lambda: _whole(problem.predictions(batch, leaves)),
                lambda outputs: problem.loss.value(outputs, batch.targets),
            )
        except DifferentiationError as error:
            raise UnmappedModuleError(str(error)) from error
        self.value = float(written.values[written.loss])
        check_finite_loss(self.value, batch.index)
        self.tape = Tape(written)
        self.unused = frozenset(names) - frozenset(self.tape.gradient)
        own = {t.untyped_storage().data_ptr() for t in problem.own_tensors()}
        kept = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in _tensors_in(self.tape)
        }
        self.held_bytes = sum(size for place, size in kept.items() if place not in own)
        self.weight_bytes = 0
        per_column = self.tape.tangent_bytes
        per_value = per_column // max(len(written.nodes), 1)
        self.columns_at_once = max(1, min(64, _IN_FLIGHT // max(per_value, 1)))
        self.transient = max(0.4, 1.2 * per_column / max(self.held_bytes, 1))

    def product(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        """The operator times columns (K, *shape), restricted to ``rows``."""
        return self.part_product(columns, rows, self.part)

    def part_product(
        self, columns: Columns, rows: Sequence[str], part: Part
    ) -> list[Tensor | None]:
        """The same for another part."""
        if part == "outer":
            return self.tape.outer(columns, rows)
        if part == "functional":
            return self.tape.functional(columns, rows)
        return self.tape.hessian(columns, rows)

    def parts(
        self, columns: Columns, rows: Sequence[str]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """(H_o, H_f) of the same columns."""
        return self.tape.parts(columns, rows)

    def quadratic(self, columns: Columns) -> Tensor:
        """vᵀ A v of each of the columns: (K,)."""
        return self.tape.quadratic(columns, self.part)

    def flat_product(self, columns: Tensor) -> Tensor:
        """The operator times flat columns (P, K), as rows (K, P)."""
        layout = self._layout
        pieces = dict(zip(layout.names, layout.split(columns), strict=True))
        rows = columns.new_empty(columns.shape[::-1])
        products = self.product({n: p.contiguous() for n, p in pieces.items()}, layout.names)
        for start, size, row in zip(layout.starts, layout.sizes, products, strict=True):
            into = rows[:, start : start + size]
            into.zero_() if row is None else into.copy_(row.reshape(into.shape))
        return rows


def _whole(outputs: Any) -> Any:
    if isinstance(outputs, HiddenLogits):
        raise UnmappedModuleError("logits as large as these go by parts, which the tape does not.")
    return outputs


def _tensors_in(held: Any) -> Iterator[Tensor]:
    """Every tensor that an object of ours holds, in its fields, lists and tuples."""
    seen: set[int] = set()
    left = [held]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, set, frozenset)):
            left.extend(value)
        elif isinstance(value, Mapping):
            left.extend(value.values())
        elif type(value).__module__.startswith("curvatlas.tape"):
            fields = getattr(value, "__dict__", None)
            slots = [getattr(value, name) for name in getattr(type(value), "__slots__", ())]
            left.extend(fields.values() if fields else slots)
        elif callable(value) and getattr(value, "__closure__", None):
            left.extend(cell.cell_contents for cell in value.__closure__)
