"""Which linearisations stay in memory: as many as the budget allows, the rest made anew.

A batch too large for the budget is cut into samples; the weights by valid targets keep it exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from curvatlas.budget import give_back, readable
from curvatlas.engines.late_checks import Answer
from curvatlas.problem import Batch, Problem

Columns = Mapping[str, Tensor]  # parameter name → (K, *shape)


class Linearised(Protocol):
    """One batch, linearised by either engine: what products need is kept."""

    columns_at_once: int

    @property
    def unused(self) -> frozenset[str]:
        """Parameters followed that do not reach the loss."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory that stays in use."""
        ...

    @property
    def needs_scope(self) -> bool:
        """Whether a product has to run inside ``Problem.evaluating``."""
        ...

    def product(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        """The operator of this batch's mean loss times columns, restricted to ``rows``."""
        ...

    def flat_product(self, columns: Tensor) -> Tensor:
        """The operator times flat columns (P, K), as rows (K, P)."""
        ...


# (problem, batch, names of the parameters followed) → that batch, linearised
Linearise = Callable[[Problem, Batch, Sequence[str]], Linearised]

# What a product allocates beside the linearisation it works on, in sizes of that: measured 1.2 to
# 1.4 for H and H_f, 0.4 to 0.7 for H_o, on GPTs with a vocabulary of 50 to 8000. What comes of it
# against budgets: benchmarks/memory.py.
TRANSIENT = 1.4
# Share of the budget that is planned for; the rest covers what the allocator cannot reuse, measured
# at 26 % of the planned bytes when two batches are kept.
PLANNED = 0.7
LARGE_HELD = 2**24  # bytes of a linearisation: 10 ms that give back a sixth to a third of it
PLANNED_WHOLE = 0.87  # the same where a single graph is all there is


class KeptLinearisations:
    """Iterating gives every batch's (count, linearisation), kept from pass to pass if it fits.

    transient: what a product allocates beside the linearisation of all data, in sizes of that.
    """

    def __init__(
        self,
        problem: Problem,
        names: Sequence[str],
        linearise: Linearise,
        *,
        budget: int,
        probe_bytes: int,
        probe_samples: int,
        transient: float = TRANSIENT,
    ) -> None:
        self.linearise, self._transient = linearise, transient
        self._problem = problem
        self._device_type, self._host_waits = problem.device.type, not problem.deferring
        self.names = tuple(names)
        self._kept: dict[int, Linearised] = {}
        self.doubt: Answer | None
        self._note_weights()
        bytes_of = problem.dtype.itemsize
        size = dict(zip(problem.layout.names, problem.layout.sizes, strict=True))
        self._vector_bytes = sum(size[name] for name in self.names) * bytes_of
        # A graph saves activations only; the slopes it ends in are one flat vector more.
        self._sample_bytes = max(probe_bytes, 1) / probe_samples
        self._budget = budget
        self._kept_bytes = 0.0
        self._first_pass = True
        self.unused: frozenset[str] = frozenset(self.names)
        self._warned = False
        self._columns = 0
        # (share of the loss, graph) of every batch, once all graphs are kept.
        self._graphs: list[tuple[float, Linearised]] = []
        self.plan_for(1)

    def plan_for(self, columns: int) -> None:
        """Leave room for that many columns in and out; graphs that no longer fit are dropped."""
        if columns <= self._columns:
            return
        self._columns = columns
        # The columns by parameter and their products, the pieces of one product, the caller's own.
        self._room = PLANNED * self._budget - (2 * columns + 2) * self._vector_bytes
        before = getattr(self, "_most_samples", None)
        whole = self._problem.held and self._whole_fits()
        self._most_samples = self._problem.largest_samples if whole else self._samples_that_fit()
        self._keep_all = whole or (self._problem.held and self._all_fit())
        if self._problem.held and self._problem.separable and not self._keep_all:
            # Smaller pieces need less room beside what is kept: keeping all of them saves a
            # forward and a backward pass in every product.
            widest = self._most_samples
            while self._most_samples > 1 and not self._keep_all:
                self._most_samples = (self._most_samples + 1) // 2
                self._keep_all = self._all_fit()
            if not self._keep_all:
                self._most_samples = widest
        self._largest = self._estimate(min(self._problem.largest_samples, self._most_samples))
        overfull = self._kept_bytes + (1 + TRANSIENT) * self._largest > self._room
        if before != self._most_samples or (overfull and not self._keep_all):
            self._kept.clear()
            self._graphs = []
            self._kept_bytes = 0.0

    def _whole_fits(self) -> bool:
        """Whether one graph of all data fits: nothing is ever built beside it or in its place.

        So the allocator wastes less, and the slopes exist once. Measured on GPTs of 0.1 to 135 M
        parameters: 0.2 to 1.11 of vectors + (1 + TRANSIENT) · graph.
        """
        batches = list(islice(self._problem.batches(), 2))
        if len(batches) != 1:
            return False
        vectors = (2 * self._columns + 1) * self._vector_bytes
        graph = self._problem.units(batches[0]) * self._sample_bytes
        return vectors + (1 + self._transient) / PLANNED_WHOLE * graph <= self._budget

    def _all_fit(self) -> bool:
        largest = self._estimate(min(self._problem.largest_samples, self._most_samples))
        return self._total() + TRANSIENT * largest <= self._room

    def _samples_that_fit(self) -> int:
        room = self._room / (1 + TRANSIENT) - self._vector_bytes
        fitting = int(room / self._sample_bytes)
        if not self._problem.separable:  # the batch is one unit: it cannot be cut
            largest = self._problem.largest_samples
            if fitting < largest and not self._warned and self._problem.loss.additive:
                self._warned = True
                least = (1 + TRANSIENT) * self._estimate(largest)
                warnings.warn(
                    f"the budget of {readable(self._budget)} is too small for a batch, which needs "
                    f"about {readable(least / PLANNED)}, and its samples cannot be told apart: "
                    "working beyond it (smaller batches, or batch_axis= where the samples lie).",
                    stacklevel=6,
                )
            return largest
        if fitting < 1 and not self._warned:
            self._warned = True
            vectors = (2 * self._columns + 2) * self._vector_bytes
            least = (1 + TRANSIENT) * self._estimate(1) + vectors
            warnings.warn(
                f"the budget of {readable(self._budget)} is too small for one sample, which needs "
                f"about {readable(least / PLANNED)}: working sample by sample beyond it "
                "(checkpoint_activations=True makes a Problem's samples smaller).",
                stacklevel=6,
            )
        return min(max(1, fitting), self._problem.largest_samples)

    def _total(self) -> float:
        return sum(self._estimate(self._problem.units(piece)) for piece in self._pieces())

    def _estimate(self, samples: int) -> float:
        return self._vector_bytes + samples * self._sample_bytes

    def _pieces(self) -> Iterator[Batch]:
        """The batches, cut where one alone would not fit."""
        loss = self._problem.loss
        for batch in self._problem.batches():
            step = self._most_samples
            if self._problem.units(batch) <= step:
                yield batch
                continue
            for start in range(0, batch.samples, step):
                piece = batch.part(start, min(start + step, batch.samples), loss.count)
                if piece.count > 0:
                    yield piece

    def __iter__(self) -> Iterator[tuple[float, Linearised]]:
        built, place = False, -1
        graphs: list[tuple[float, Linearised]] = []
        for place, batch in enumerate(self._pieces()):
            linear = self._kept.get(place)
            if linear is None:
                built = True
                linear = self.linearise(self._problem, batch, self.names)
                if max(self._vector_bytes / 4, linear.held_bytes) > LARGE_HELD:
                    give_back()  # what linearising took beside what it keeps
                if self._first_pass:
                    self.unused &= linear.unused
                size = linear.held_bytes + self._vector_bytes
                self._largest = max(self._largest, size)  # longer sequences than the probe's
                if self._may_keep(size):
                    self._kept[place] = linear
                    self._kept_bytes += size
            if place in self._kept and not linear.needs_scope:
                graphs.append((batch.count / self._problem.normaliser, linear))
            yield batch.count, linear
            linear = None  # let go of it before the next one is built
        self._first_pass = False
        self._graphs = graphs if len(graphs) == place + 1 else []
        if built:
            # Forward passes may leave something in the model, such as a count of its calls.
            self._problem.settle()
            self._note_weights()

    def _may_keep(self, size: int) -> bool:
        if self._keep_all:
            return True
        # Leave room to rebuild the largest batch beside what is kept.
        needed = self._kept_bytes + size + (1 + TRANSIENT) * self._largest
        return self._problem.held and needed <= self._room

    def _note_weights(self) -> None:
        self.doubt = None
        self.version = self._problem.weights_version()
        tensors = [t for t in self._problem.own_tensors() if not t.is_inference()]
        self._writes = [(tensor, tensor._version) for tensor in tensors]

    @property
    def stale(self) -> bool:
        """Whether a weight, a buffer or a tensor of the loss has changed since the last pass.

        Or was written to and has its old values again: autograd refuses such a graph.
        """
        if any(tensor._version != count for tensor, count in self._writes):
            return True
        return self._changed()

    def _changed(self) -> bool:
        """Whether values are others, as far as the host can tell without waiting for a device.

        ``doubt``: what only the device can tell.
        """
        changed = self._problem.weights_changed(self.version)
        self.doubt = Answer(changed.reshape(1)) if isinstance(changed, Tensor) else None
        return changed is True

    def ready(self, columns: int) -> list[tuple[float, Linearised]]:
        """(share of the loss, graph) of every batch where products need nothing else; else none.

        All graphs are kept and fit for so many columns, none of them runs Python, which would need
        the model's scope, and weights, buffers and loss are as they were.
        """
        if not self._graphs or self._problem.distributed or columns > self._columns:
            return []
        if columns > 1 and columns > min(
            self.columns_that_fit(), *(graph.columns_at_once for _, graph in self._graphs)
        ):
            return []
        if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(self._device_type):
            return []
        if any(tensor._version != count for tensor, count in self._writes):
            return []
        if self._host_waits:  # the ordinary way, with as few steps as there can be
            changed = self._problem.weights_version() != self.version
        else:
            changed = self._changed()
        return [] if changed else self._graphs

    @property
    def held_bytes(self) -> int:
        """Memory of the linearisations that stay."""
        return sum(linear.held_bytes for linear in self._kept.values())

    def columns_that_fit(self) -> int:
        """How many columns fit through one vmapped pass."""
        rebuilt = 0.0 if self._keep_all else self._largest
        room = self._room - self._kept_bytes - rebuilt
        return max(1, min(256, int(room / (TRANSIENT * self._largest))))

    def __repr__(self) -> str:
        return f"{len(self._kept)} batches kept ({readable(self._kept_bytes)})"


def kept_samples(
    *,
    budget: int,
    vector_bytes: int,
    sample_bytes: float,
    samples: int,
    one_batch: bool = True,
    transient: float = TRANSIENT,
    columns: int = 1,
) -> tuple[int, bool]:
    """(samples of a piece, whether all stay linearised), as ``plan_for`` decides."""
    whole = (2 * columns + 1) * vector_bytes
    if one_batch and whole + (1 + transient) / PLANNED_WHOLE * samples * sample_bytes <= budget:
        return samples, True
    room = PLANNED * budget - (2 * columns + 2) * vector_bytes
    fitting = int((room / (1 + TRANSIENT) - vector_bytes) / max(sample_bytes, 1.0))
    widest = piece = min(max(1, fitting), samples)

    def all_fit(piece: int) -> bool:
        kept = -(-samples // piece) * vector_bytes + samples * sample_bytes
        return kept + TRANSIENT * (vector_bytes + piece * sample_bytes) <= room

    while piece > 1 and not all_fit(piece):
        piece = (piece + 1) // 2
    return (piece, True) if all_fit(piece) else (widest, False)
