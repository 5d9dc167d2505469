"""Which linearisations stay in memory: as many as the budget allows, the rest made anew.

A batch too large for the budget is cut into samples; the weights by valid targets keep it exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from curvatlas.budget import readable
from curvatlas.operators.graph import GraphSize
from curvatlas.operators.linearisation import Linearisation
from curvatlas.problem import Batch, Problem

Make = Callable[[Batch, Sequence[str]], Linearisation]

# A product needs, beside the kept graph, about as much again for its own intermediates.
TRANSIENT = 1.0
# Share of the budget that is planned for; the rest covers the allocator's slack.
PLANNED = 0.7


class KeptLinearisations:
    """Iterating gives every batch's (count, linearisation), kept from pass to pass if it fits."""

    def __init__(
        self,
        make: Make,
        problem: Problem,
        names: Sequence[str],
        *,
        budget: int,
        probe: GraphSize,
        probe_samples: int,
    ) -> None:
        self._make = make
        self._problem = problem
        self.names = tuple(names)
        self._kept: dict[int, Linearisation] = {}
        self._version = problem.weights_version()
        bytes_of = problem.dtype.itemsize
        size = dict(zip(problem.layout.names, problem.layout.sizes, strict=True))
        self._vector_bytes = sum(size[name] for name in self.names) * bytes_of
        self._sample_bytes = max(probe.bytes - self._vector_bytes, 1) / probe_samples
        # Four flat vectors: the columns in, the pieces out, the sum, and the caller's own.
        self._room = PLANNED * budget - 4 * self._vector_bytes
        self._most_samples = self._samples_that_fit()
        self._largest = self._estimate(min(problem.largest_samples, self._most_samples))
        self._keep_all = problem.held and self._total() + TRANSIENT * self._largest <= self._room
        self._kept_bytes = 0.0
        self._first_pass = True
        self.unused: frozenset[str] = frozenset(self.names)

    def _samples_that_fit(self) -> int:
        if not self._problem.loss.additive:
            return self._problem.largest_samples  # the batch is one unit: it cannot be cut
        room = self._room / (1 + TRANSIENT) - self._vector_bytes
        return max(1, int(room / self._sample_bytes))

    def _total(self) -> float:
        return sum(self._estimate(piece.samples) for piece in self._pieces())

    def _estimate(self, samples: int) -> float:
        return self._vector_bytes + samples * self._sample_bytes

    def _pieces(self) -> Iterator[Batch]:
        """The batches, cut where one alone would not fit."""
        loss = self._problem.loss
        for batch in self._problem.batches():
            step = self._most_samples
            if batch.samples <= step:
                yield batch
                continue
            for start in range(0, batch.samples, step):
                piece = batch.part(start, min(start + step, batch.samples), loss.count)
                if piece.count > 0:
                    yield piece

    def __iter__(self) -> Iterator[tuple[float, Linearisation]]:
        for place, batch in enumerate(self._pieces()):
            found = self._kept.get(place)
            if found is None:
                found = self._make(batch, self.names)
                if self._first_pass:
                    self.unused &= found.unused
                if self._may_keep(found.size.bytes):
                    self._kept[place] = found
                    self._kept_bytes += found.size.bytes
            yield batch.count, found
        self._first_pass = False

    def _may_keep(self, size: int) -> bool:
        if self._keep_all:
            return True
        # Leave room to rebuild the largest batch beside what is kept.
        needed = self._kept_bytes + size + (1 + TRANSIENT) * self._largest
        return self._problem.held and needed <= self._room

    @property
    def stale(self) -> bool:
        """Whether the weights have changed since the graphs were made."""
        return self._problem.weights_version() != self._version

    def columns_that_fit(self) -> int:
        """How many columns fit through one vmapped pass."""
        room = self._room - self._kept_bytes
        return max(1, min(256, int(room / (2 * self._largest))))

    def __repr__(self) -> str:
        return f"{len(self._kept)} batches kept ({readable(self._kept_bytes)})"
