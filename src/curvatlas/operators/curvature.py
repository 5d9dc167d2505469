"""Operators of a Problem: sums over batches, role × role views, guards on first use."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from curvatlas import parallel
from curvatlas.budget import ResultMemory, default_budget, give_back, parse_bytes
from curvatlas.engines.autograd.linearisation import (
    Columns,
    FunctionalLinearisation,
    HessianLinearisation,
    Linearisation,
    OuterLinearisation,
)
from curvatlas.engines.kept import PLANNED, TRANSIENT, KeptLinearisations
from curvatlas.engines.late_checks import LateChecks
from curvatlas.engines.tangent.model import TangentLinearisation
from curvatlas.engines.tangent.reading import UnmappedModuleError
from curvatlas.errors import NoGradientPath, NonFiniteError
from curvatlas.linear_operator import PARTS, LinearOperator, Part, Tags, check_columns
from curvatlas.operators.engine import (
    ByHand,
    Choice,
    Engine,
    Probe,
    ShortSample,
    SpreadProducts,
    by_autograd,
    check_engine,
    probe_batch,
    probe_columns,
    short_sample,
    tangent_engine,
)
from curvatlas.operators.probes import (
    probe_by_differences,
    probe_loss_by_differences,
    probe_symmetry,
)
from curvatlas.operators.views import BlockView, pieces_of
from curvatlas.problem import Batch, EngineChoice, Problem
from curvatlas.problem.cross_entropy import differentiable_leaves, output_curvature
from curvatlas.problem.evaluation import listed
from curvatlas.problem.kernels import warn_once
from curvatlas.problem.large_heads import logit_room
from curvatlas.tape.linearised import TapeLinearisation

AutogradLinearise = Callable[[Problem, Batch, Sequence[str]], Linearisation]
Selector = Any  # "blocks.0.query", a glob, a Slice, a list of these, an index, or slice(None)


class CurvatureOperator(LinearOperator):
    """A (P, P) matrix of second derivatives, known through products with columns.

    engine: "tangent" computes products by hand-written passes over the whole model, "tape" by rules
        on a record of its operations, "autograd" by double backward on kept graphs; "auto" takes
        the first that understands the model and whose product is right on one sample.
        ``problem.engine`` says which one it was, and why.
    budget: memory the operator may use, as bytes or "2GB"; more keeps more batches linearised.
    checks: probe symmetry, gradient paths, randomness and finiteness on first use.
    """

    linearisation: type[Linearisation]
    # Whether H_o is the operator, a part of it beside H_f, or neither.
    outer: Literal["whole", "part", "none"] = "none"
    part: Part | None = None  # of the Hessian, None: nothing the tangent engine knows

    def __init__(
        self,
        problem: Problem,
        *,
        engine: Engine = "auto",
        budget: int | str | None = None,
        checks: bool = True,
        tags: Tags | None = None,
    ) -> None:
        check_engine(engine)
        size = problem.size
        super().__init__(
            (size, size),
            dtype=problem.dtype,
            device=problem.device,
            tags=tags or Tags(symmetric=True),
        )
        self.problem = problem
        self.budget = default_budget(self.device) if budget is None else parse_bytes(budget)
        self._logit_room = logit_room(None if budget is None else self.budget)
        self.engine, self.checks = engine, checks
        # Linearisations by the set of parameters they follow: the full one, and the last view's.
        self._full: KeptLinearisations | None = None
        self._partial: KeptLinearisations | None = None
        self._spread: SpreadProducts | None = None
        # Engines by what they follow: weights that are the same need no second probe.
        self._choices: dict[tuple[str, ...], Choice] = {}
        self._results = ResultMemory()
        self._late = LateChecks() if problem.deferring else None

    def content(self) -> Any:
        return [type(self).__name__, self.problem.content()]

    def _linearise(self) -> AutogradLinearise:
        """How autograd linearises a batch."""
        return functools.partial(self.linearisation, logit_room=self._logit_room)

    # --- products -------------------------------------------------------------------------------

    def _columns(self, columns: Tensor) -> Tensor:
        if self._late is not None:
            self._refuse(self._late.heard())
        graphs = [] if self._full is None else self._full.ready(columns.shape[1])
        if self._full is None or not graphs:
            return self.restricted(self._pieces(columns), self.problem.layout.names).T
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for place, (share, graph) in enumerate(graphs):
            product = graph.flat_product(columns)  # (K, P)
            if place:
                total.add_(product, alpha=share)
            else:
                total = product.mul_(share) if share != 1 else product
        if self._late is not None:
            if self._redo(self._full, total, [columns]):
                return self._columns(columns)
            return total.T
        if not torch.isfinite(total.sum()) and not _all_finite(total):
            raise self._not_finite(self._pieces(columns))
        return total.T

    def quadratic(self, columns: Tensor) -> Tensor:
        """vᵀ A v of every column of (P, K), or of one vector (P,).

        On the tape from the forward pass alone: 0.55 to 0.73 of a product's time.
        """
        check_columns(self, columns)
        problem = self.problem
        if problem.distributed or self._by_stations():
            return super().quadratic(columns)
        kept = self._kept_for(set(problem.parameter_names))
        if getattr(kept.linearise, "func", None) is not TapeLinearisation:
            return super().quadratic(columns)
        vectors = columns.unsqueeze(1) if columns.ndim == 1 else columns
        count = vectors.shape[1]
        kept.plan_for(count)
        total = torch.zeros(count, dtype=self.dtype, device=self.device)
        with problem.evaluating():
            try:
                for valid, linear in kept:
                    assert isinstance(linear, TapeLinearisation)
                    share = valid / problem.normaliser
                    step = min(linear.columns_at_once, kept.columns_that_fit())
                    for start in range(0, count, step):
                        some = slice(start, start + step)
                        total[some] += share * linear.quadratic(self._pieces(vectors[:, some]))
            except (
                UnmappedModuleError
            ):  # a batch unlike the probe's: a product takes another engine
                return super().quadratic(columns)
            self._after_first_pass(kept)
        if self.before_product is not None:
            self.before_product()
        self.products += count
        if not _all_finite(total):
            raise self._not_finite(self._pieces(vectors))
        return total if columns.ndim > 1 else total[0]

    def _redo(self, kept: KeptLinearisations, total: Tensor, columns: Sequence[Tensor]) -> bool:
        """Check a product on a device without waiting for it; True: it has to be computed anew."""
        assert self._late is not None
        doubt = kept.doubt
        if doubt is not None and doubt.known_true:
            self.release()
            return True
        self._late.guard(total, columns, doubt)
        return False

    def confirm(self) -> None:
        if self._late is not None:
            self._refuse(self._late.confirm())

    def _refuse(self, reason: str | None) -> None:
        """Raise what the checks of an earlier product have told."""
        if reason is not None:
            self.release()
            raise NonFiniteError(f"{self!r}: {reason}")

    def _pieces(self, columns: Tensor) -> dict[str, Tensor]:
        layout = self.problem.layout
        return dict(zip(layout.names, layout.split(columns), strict=True))

    def restricted(
        self, columns: Columns, rows: Sequence[str], *, shards: parallel.Shards | None = None
    ) -> Tensor:
        """Products with columns that live in some parameters only, read off at ``rows``.

        columns: parameter name → (K, *shape); the result is (K, Σ sizes of rows), with ``shards``
        of one column this process's entries of it.
        """
        return self._batch_sums(columns, rows, shards=shards)[0]

    def _batch_sums(
        self,
        columns: Columns,
        rows: Sequence[str],
        *,
        both: bool = False,
        shards: parallel.Shards | None = None,
    ) -> Tensor:
        """Σ_b c_b product(b, columns) / Σ_b c_b: (1, K, rows), or of H_o and H_f (2, K, rows)."""
        problem, parts = self.problem, 2 if both else 1
        if self._late is not None:
            self._refuse(self._late.heard())
        if self._by_stations():
            return self._whole_rows(columns, rows, parts)
        size_of = dict(zip(problem.layout.names, problem.layout.sizes, strict=True))
        sizes = {name: size_of[name] for name in rows}
        count = next(iter(columns.values())).shape[0]

        def fill(total: Tensor) -> parallel.Mark | None:
            with problem.joined():
                return fill_here(total)

        def fill_here(total: Tensor) -> parallel.Mark | None:
            if next(problem.batches(), None) is None:
                total.zero_()  # this process has no share of the data
                return self._marked(columns)
            kept = self._kept_for({*columns, *rows})
            kept.plan_for(count * parts)
            try:
                add_up(total, kept)
            except UnmappedModuleError as error:  # another batch than the probe's is different
                if self.engine in ("tangent", "tape"):
                    raise
                by_autograd(problem, str(error))
                self.release()
                self.engine = "autograd"
                kept = self._kept_for({*columns, *rows})
                kept.plan_for(count * parts)
                add_up(total, kept)
            if self._late is not None:
                if self._redo(kept, total, list(columns.values())):
                    return fill_here(total)
            elif not _all_finite(total):
                raise self._not_finite(columns)
            return self._marked(columns, kept.version)

        def add_up(total: Tensor, kept: KeptLinearisations) -> None:
            with problem.evaluating():
                for place, (valid, linear) in enumerate(kept):
                    share = valid / problem.normaliser
                    step = min(linear.columns_at_once, kept.columns_that_fit())
                    for start in range(0, count, step):
                        some = slice(start, min(start + step, count))
                        # Columns of a (P, K) matrix lie K apart: straighten only these few.
                        chunk = {name: c[some].contiguous() for name, c in columns.items()}
                        _add_batch(total[:, some], linear, chunk, sizes, share, first=place == 0)
                    del linear  # before the next batch is linearised: one graph at a time
                self._after_first_pass(kept)

        total = parallel.summed(
            fill,
            [parts, count, sum(sizes.values())],
            dtype=self.dtype,
            device=self.device,
            distributed=problem.distributed,
            differ=problem.refuse_differing_ranks,
            shards=shards,
            make=self._results.empty,
        )
        # Finite parts may overflow together; a scattered sum is looked at by its own process only,
        # which may not stop alone: the estimator sees it in a norm over all.
        if problem.distributed and shards is None and not _all_finite(total):
            raise self._not_finite(columns)
        return total

    # --- where the weights are spread (FSDP2) -----------------------------------------------------

    @property
    def shards(self) -> parallel.Shards | None:
        return self.problem.shards

    def _by_stations(self) -> bool:
        """Whether products gather the weights station by station; settled on the first one."""
        if self.problem.sharded is None or self._autograd_only() is not None:
            return False
        assert self.part is not None
        if self._spread is None:
            self._spread = SpreadProducts(
                self.problem,
                self.part,
                budget=self.budget,
                logit_room=self._logit_room,
                checks=self.checks,
            )
        reason = self._spread.refusal()
        if reason is None:
            return True
        if self.engine == "tangent":
            raise UnmappedModuleError(reason)
        by_autograd(self.problem, reason)
        warnings.warn(
            f"{reason}: autograd computes, for which every process gathers all weights.",
            stacklevel=5,
        )
        self.engine, self._spread = "autograd", None
        return False

    def _local_product(self, columns: Tensor, parts: Sequence[Part]) -> list[Tensor]:
        """Of each part, this process's entries of a product with columns: (K, P_local)."""
        assert self._spread is not None
        results = [self._spread.product(columns, part) for part in parts]
        if not parallel.everywhere(all(map(_all_finite, results))):
            raise NonFiniteError(
                f"a product of {self!r} is not finite: {self._blame({'the vector': columns})}."
            )
        unused = self._spread.unused()
        if self.checks and unused:
            self._warn_of_unused(unused)
        return results

    def _whole_rows(self, columns: Columns, rows: Sequence[str], parts: int) -> Tensor:
        """``_batch_sums`` of columns that every process holds whole."""
        problem, shards = self.problem, self.problem.shards
        assert shards is not None
        count = next(iter(columns.values())).shape[0]
        parallel.agree(
            self._marked(columns),
            count,
            next(iter(columns.values())),
            problem.refuse_differing_ranks,
        )
        size, layout = problem.size, problem.layout
        whole = torch.zeros(size, count, dtype=self.dtype, device=self.device)
        for name, start, length in zip(layout.names, layout.starts, layout.sizes, strict=True):
            if name in columns:
                whole[start : start + length] = columns[name].reshape(count, -1).T
        local = shards.take(whole).T.contiguous()
        del whole
        assert self.part is not None
        names: tuple[Part, ...] = (self.part,) if parts == 1 else ("outer", "functional")
        places = dict(zip(layout.names, zip(layout.starts, layout.sizes, strict=True), strict=True))
        chosen = [slice(places[name][0], sum(places[name])) for name in rows]
        return torch.stack(
            [
                torch.stack(
                    [torch.cat([full[some] for some in chosen]) for full in map(shards.gathered, p)]
                )
                for p in self._local_product(local, names)
            ]
        )

    def sharded_columns(self, columns: Tensor) -> Tensor:
        """This process's entries (P_local, K) of a product with columns, of which it has its own.

        Where the weights are spread (``shards`` is not None); all processes call it together.
        """
        if not self._by_stations():
            assert self.shards is not None
            # autograd's products are whole in every process, which takes its own entries
            images = [LinearOperator.sharded_matvec(self, c, self.shards) for c in columns.T]
            return torch.stack(images, 1)
        if self.before_product is not None:
            self.before_product()
        self.products += columns.shape[1]
        parallel.agree(
            self.problem.mark(), columns.shape[1], columns, self.problem.refuse_differing_ranks
        )
        assert self.part is not None
        return self._local_product(columns.T.contiguous(), [self.part])[0].T

    def _by_parameter(self, tensors: Any) -> Any:
        shards, sharded = self.problem.shards, self.problem.sharded
        named = tensors.values() if isinstance(tensors, Mapping) else tensors
        if shards is None or sharded is None or not all(hasattr(t, "placements") for t in named):
            return super()._by_parameter(tensors)
        product = self.sharded_columns(sharded.flat(tensors, self.problem.layout).unsqueeze(1))
        pieces = sharded.shaped(product[:, 0], self.problem.layout)
        if isinstance(tensors, Mapping):
            return pieces
        return tuple(pieces.values()) if isinstance(tensors, tuple) else list(pieces.values())

    def sharded_matvec(self, part: Tensor, shards: parallel.Shards) -> Tensor:
        if shards is self.problem.shards:
            return self.sharded_columns(part.unsqueeze(1))[:, 0]
        if not self.problem.spread:
            return super().sharded_matvec(part, shards)
        if self.before_product is not None:
            self.before_product()
        self.products += 1
        layout = self.problem.layout
        columns = layout.split(shards.gathered(part).unsqueeze(-1))
        pieces = dict(zip(layout.names, columns, strict=True))
        return self.restricted(pieces, layout.names, shards=shards).flatten()

    def _marked(
        self, columns: Columns, version: tuple[bytes, bytes] | None = None
    ) -> parallel.Mark | None:
        """What this process's part of a product rests on, the vectors among it."""
        mark = self.problem.mark(version)
        if mark is None:
            return None
        return replace(mark, sketch=parallel.sketch(columns.values()))

    def _not_finite(self, columns: Columns) -> NonFiniteError:
        return NonFiniteError(f"a product of {self!r} is not finite: {self._blame(columns)}.")

    def prepare(self) -> EngineChoice:
        """Check the problem and choose the engine, as the first product would."""
        if self._by_stations():
            return self.problem.engine
        if next(self.problem.batches(), None) is not None:  # this process may have no data
            self._kept_for(set(self.problem.parameter_names))
        return self.problem.engine

    def linearise_with(self, **options: Any) -> None:
        """Linearise all data with these options of ``TangentLinearisation``, whatever the budget.

        For trials on a part of a model: how the whole one would be worked on.
        """
        kept = self._kept_for(set(self.problem.parameter_names))
        kept.linearise = functools.partial(kept.linearise, **options)

    @property
    def held_bytes(self) -> int:
        """Memory that stays in use from product to product, beside weights and vectors."""
        return sum(kept.held_bytes for kept in (self._full, self._partial) if kept is not None)

    def _kept_for(self, names: set[str]) -> KeptLinearisations:
        ordered = [name for name in self.problem.parameter_names if name in names]
        if any(kept is not None and kept.stale for kept in (self._full, self._partial)):
            self.release()  # the weights changed: check and linearise anew
        if self._full is not None:
            return self._full
        if len(ordered) == len(self.problem.parameter_names):
            self._full, self._partial = self._start(ordered), None
            return self._full
        # A view follows only its own parameters: less to build and to keep.
        if self._partial is None or set(self._partial.names) != names:
            self._partial = None  # free the old graphs before building new ones
            try:
                self._partial = self._start(ordered)
            except NoGradientPath:  # to the view: where there is one to others, it is zero
                return self._kept_for(set(self.problem.parameter_names))
        return self._partial

    def _start(self, names: list[str]) -> KeptLinearisations:
        self.problem.sample_axes.room = self.budget
        # Not where weights are spread: all processes have to meet as often as one of them does.
        version = None if self.problem.sharded is not None else self.problem.weights_version()
        followed = (self.engine, *names)
        choice = self._choices.get(followed)
        if choice is not None and choice.version == version:
            if self.checks:
                self.problem.check()  # the mode may be another one
            return self._keep(names, choice)
        short = ShortSample(sample=probe_batch(self.problem))
        if self._autograd_only() is None:
            short = short_sample(self.problem, short.sample, names, self.budget)
        sample, longer = short.sample, short.length_ratio**2
        self._give_back()  # the search for the samples' axis leaves scraps in float64
        try:
            with self.problem.evaluating():
                linear = self._linearise()(self.problem, sample, names)
                if self.checks and self.outer != "none":
                    # Here, where the loss can read what the forward pass leaves in the model.
                    probe_loss_by_differences(self.problem, linear)
        except Exception:
            if self.checks:
                self.problem.check()  # finds the cause, and says it of the whole batch
            raise
        if self.checks:
            self._check_first_batch(sample, int(linear.held_bytes * longer))
            self._say_of_the_loss()
            self._give_back()
        with self.problem.evaluating():
            by_hand_too = self._autograd_only() is None
            draw = functools.partial(probe_columns, self.problem, names)
            product: tuple[Columns, Sequence[Tensor | None]] | None = None  # and of what
            if self.checks and self.tags.symmetric:
                product = probe_symmetry(linear, names, draw)
            elif by_hand_too:
                product = _with_product(linear, draw(), names)
            if not by_hand_too:
                product = None  # nothing is compared with it: two vectors less
            if self.checks and linear.size.custom:
                custom = linear.size.custom
                probe_by_differences(self.problem, sample, names, custom, room=self.budget // 4)
            held = int(linear.held_bytes * longer)
            probe: Probe | None = None
            if product is not None:
                probe = Probe(
                    sample=sample,
                    columns=product[0],
                    product=product[1],
                    length_ratio=short.length_ratio,
                    blocked=short.blocked,
                    reading=short.reading,
                )
            del linear, product  # its graph, before the sample is linearised by hand
            self._give_back()
            by_hand = self._tangent(probe, names)
        del probe
        self._give_back()
        choice = Choice(
            version=version,
            by_hand=None if by_hand is None else by_hand.anew(),
            probe_bytes=held,
            probe_samples=self.problem.units(sample),
        )
        if version is not None:
            self._choices[followed] = choice
        return self._keep(names, choice)

    def _keep(self, names: list[str], choice: Choice) -> KeptLinearisations:
        by_hand = choice.used() or ByHand(
            linearise=self._linearise(),
            sample_bytes=choice.probe_bytes,
            weight_bytes=0,
            transient=TRANSIENT,
        )
        return KeptLinearisations(
            self.problem,
            names,
            by_hand.linearise,
            budget=max(self.budget - by_hand.weight_bytes, 1),
            probe_bytes=by_hand.sample_bytes,
            probe_samples=choice.probe_samples,
            transient=by_hand.transient,
        )

    def _give_back(self) -> None:
        """Return the memory of the checks: of a large model it is several vectors."""
        give_back(self.problem.size * self.dtype.itemsize)

    def _tangent(self, probe: Probe | None, names: Sequence[str]) -> ByHand | None:
        """The hand-written engine and what it needs, where it may be used and is right."""
        if probe is not None:
            assert self.part is not None
            return tangent_engine(
                self.problem,
                probe,
                names,
                engine=self.engine,
                part=self.part,
                logit_room=self._logit_room,
                budget=self.budget,
            )
        reason = self._autograd_only()
        assert reason is not None
        if self.engine in ("tangent", "tape"):
            raise ValueError(f"engine={self.engine!r} cannot be used: {reason}.")
        by_autograd(self.problem, reason)
        return None

    def _autograd_only(self) -> str | None:
        """Why autograd has to compute, None: it does not."""
        if self.engine == "autograd":
            return "engine='autograd' was asked for"
        if self.part is None:
            return f"{type(self).__name__} has no hand-written passes"
        elsewhere = self.problem.truth.elsewhere
        if elsewhere:
            return (
                f"{listed(sorted(elsewhere))} are read other than through their module's attribute"
            )
        return None

    def _check_first_batch(self, sample: Batch, sample_bytes: int) -> None:
        """The problem's checks, on as much of the first batch as the budget allows."""
        problem = self.problem
        first = next(problem.batches())
        # A forward pass without a graph takes less than the graph of the same samples.
        fitting = max(1, int(PLANNED * self.budget * problem.units(sample) / max(sample_bytes, 1)))
        if not problem.separable or first.samples <= fitting:
            return problem.check()
        part = first.part(0, fitting, problem.loss.count)
        problem.with_batches([part if part.count > 0 else sample]).check()

    def _say_of_the_loss(self) -> None:
        """That a loss which reads parameters has a second derivative beside H_o and H_f."""
        names = self.problem.truth.by_loss
        if names and self.linearisation is not HessianLinearisation:
            warn_once(
                self.problem.model,
                "loss of parameters",
                f"the loss itself reads {listed(sorted(names))}: H_o and H_f are second "
                "derivatives through the model's outputs, so H is not their sum; Hessian has all.",
                deeper=2,
            )

    def _after_first_pass(self, kept: KeptLinearisations) -> None:
        if self.checks and kept.unused:
            self._warn_of_unused(kept.unused)
            kept.unused = frozenset()

    def _warn_of_unused(self, names: frozenset[str]) -> None:
        warnings.warn(
            f"no gradient path from the loss to {listed(sorted(names))}: their rows are zero.",
            stacklevel=5,
        )

    def _blame(self, columns: Columns) -> str:
        bad = [n for n, column in columns.items() if not bool(torch.isfinite(column).all())]
        if bad:
            return f"the vector itself holds NaN or infinities in {listed(bad)}"
        return "the second derivative overflows; try float64 or smaller weights"

    # --- views ----------------------------------------------------------------------------------

    def __getitem__(self, key: Selector) -> LinearOperator:
        """``op[rows, columns]`` by role, parameter name, glob or index; ``op[rows]``: a diagonal
        block.

        Indices are positions in the flat vector: ``op[[0, 2], 5:9]`` is 2 × 4.
        """
        rows, columns = key if isinstance(key, tuple) and len(key) == 2 else (key, key)
        return BlockView(self, pieces_of(self.problem, rows), pieces_of(self.problem, columns))

    def _submatrix(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        return self[rows, columns]

    def _problem_on(self, axis: int) -> Problem | None:
        return self.problem

    # --- others ---------------------------------------------------------------------------------

    def per_batch(self) -> list[tuple[float, CurvatureOperator]]:
        """(share of the valid targets, operator of that batch alone) for every batch.

        Empty under several processes, where no process has all batches.
        """
        problem = self.problem
        if problem.distributed:
            return []
        return [
            (batch.count / problem.total_count, self._on(problem.with_batches([batch])))
            for batch in problem.batches()
        ]

    def _on(self, problem: Problem) -> CurvatureOperator:
        part = type(self)(problem, engine=self.engine, budget=self.budget, checks=False)
        # The same formulas at the same weights: what was probed here holds for every batch, whose
        # outputs are held to the model's own all the same.
        part._choices = self._choices
        return part

    def release(self) -> None:
        """Free the kept graphs; the next product builds them anew."""
        self._full = self._partial = None
        if self._spread is not None:
            self._spread.release()


def _with_product(
    linear: Linearisation, columns: Columns, names: Sequence[str]
) -> tuple[Columns, Sequence[Tensor | None]]:
    return columns, linear.product(columns, names)


def _all_finite(values: Tensor) -> bool:
    # A finite sum has only finite terms; isfinite() of every entry takes 39 times as long and was
    # 0.1 gradients of each product with 8 columns (benchmarks/products.py, 1.06 M GPT).
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _add_batch(
    total: Tensor,
    linear: Any,
    columns: Columns,
    rows: Mapping[str, int],
    share: float,
    *,
    first: bool,
) -> None:
    """total (parts, K, Σ sizes) += share × a batch's product; ``first``: = instead of +=.

    rows: parameter name → size.
    """
    if first and isinstance(linear, TangentLinearisation):
        linear.write(total, columns, list(rows))
        if share != 1:
            total.mul_(share)
        return
    names = list(rows)
    results = [linear.product(columns, names)] if len(total) == 1 else linear.parts(columns, names)
    for into, pieces in zip(total, results, strict=True):
        _add_pieces(into, pieces, list(rows.values()), share, first=first)


def _add_pieces(
    total: Tensor, results: list[Tensor | None], sizes: Sequence[int], share: float, *, first: bool
) -> None:
    """total (K, Σ sizes) += share · results, a None counting as zero; ``first``: = instead of +=.

    Writing the first batch instead of adding it saves a pass over memory never touched before.
    """
    start = 0
    for result, size in zip(results, sizes, strict=True):
        into = total[:, start : start + size]
        if result is None:
            if first:
                into.zero_()
        elif first:
            torch.mul(result.reshape(-1, size), share, out=into)
        else:
            into.add_(result.reshape(-1, size), alpha=share)
        start += size


# --- H, H_o and H_f -------------------------------------------------------------------------------


class Hessian(CurvatureOperator):
    """H = ∂²L/∂θ², by hand-written passes or by double backward on kept gradient graphs."""

    linearisation = HessianLinearisation
    outer, part = "part", "total"


class FunctionalHessian(CurvatureOperator):
    """H_f = Σ_z (∂ℓ/∂Z_z) ∂²Z_z/∂θ²: the network's own curvature, weighted by the loss slope."""

    linearisation = FunctionalLinearisation
    part = "functional"


class GaussNewton(CurvatureOperator):
    """H_o = Jᵀ (∂²ℓ/∂Z²) J, exact for any loss; positive semidefinite where the loss is convex."""

    linearisation = OuterLinearisation
    outer, part = "whole", "outer"

    def __init__(
        self,
        problem: Problem,
        *,
        engine: Engine = "auto",
        budget: int | str | None = None,
        checks: bool = True,
    ) -> None:
        if problem.loss.linear:
            warnings.warn(
                f"{problem.loss.name} is linear in the outputs, so that H_o is zero: give the "
                "model's logits to a cross-entropy for the usual Gauss-Newton matrix.",
                stacklevel=2,
            )
        tags = Tags(symmetric=True, psd=problem.loss.convex)
        super().__init__(
            problem,
            engine=engine,
            budget=budget,
            checks=checks,
            tags=tags,
        )


class AllPartsLinearisation(Linearisation):
    """Keeps the graphs of g(θ, u) = J(θ)ᵀu at u = δ = ∂ℓ/∂Z and of the outputs: 8 units, not 16.

    g is differentiated once with respect to θ and u together: the first gives H_f v, the second
    J v. One more pass back gives H_o v = Jᵀ Λ J v, and H v is the sum.
    """

    def _build(self) -> None:
        outputs, rebuild = differentiable_leaves(self.outputs)
        self._require_path(any(z.requires_grad for z in outputs))
        slopes = self._fixed_slopes(outputs, rebuild)
        self._z = outputs
        # Where the slopes themselves depend on parameters (a chunked head), they stay in the graph.
        self._u = [s if s.requires_grad else s.detach().requires_grad_(True) for s in slopes]
        self._transposed = self._gradients(outputs, self._u)
        self._lambda = output_curvature(self._problem.loss, outputs, rebuild, self.batch.targets)

    def _roots(self) -> list[Tensor | None]:
        return [*self._transposed.values(), *self._z]

    def parts(
        self, columns: Columns, rows: Sequence[str]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """(H_o columns, H_f columns) restricted to ``rows``: (K, *shape) each, None for zero."""
        used = [n for n in columns if self._transposed[n] is not None]
        roots = [t for n in used if (t := self._transposed[n]) is not None]
        leaves = [self._places[n] for n in rows]
        places = [get_gradient_edge(u) for u in self._u]
        both = self._pull(roots, [*leaves, *places], [columns[n] for n in used])
        functional, moved = both[: len(leaves)], both[len(leaves) :]
        count = next(iter(columns.values())).shape[0]
        tangents = [
            z.new_zeros(count, *z.shape) if t is None else t
            for t, z in zip(moved, self._z, strict=True)
        ]
        outer = self._pull(self._z, leaves, self._lambda(tangents))
        return outer, functional

    def product(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        outer, functional = self.parts(columns, rows)
        return [
            b if a is None else a if b is None else a + b
            for a, b in zip(outer, functional, strict=True)
        ]


class CurvatureParts(CurvatureOperator):
    """The Hessian as an operator whose ``parts`` gives H, H_o and H_f of the same columns."""

    linearisation = AllPartsLinearisation
    outer, part = "part", "total"

    def parts(self, columns: Columns, rows: Sequence[str]) -> dict[str, Tensor]:
        """Part → (K, Σ sizes of rows), of columns given as parameter name → (K, *shape)."""
        if self.before_product is not None:
            self.before_product()
        self.products += next(iter(columns.values())).shape[0]
        outer, functional = self._batch_sums(columns, rows, both=True)
        room = self._results.empty(outer.shape, dtype=self.dtype, device=self.device)
        total = torch.add(outer, functional, out=room)
        return {"total": total, "outer": outer, "functional": functional}

    def flat_parts(self, columns: Tensor) -> dict[str, Tensor]:
        """Part → (P, K), of flat columns (P, K)."""
        layout = self.problem.layout
        given = dict(zip(layout.names, layout.split(columns), strict=True))
        return {part: rows.T for part, rows in self.parts(given, layout.names).items()}


def check_parts(chosen: Sequence[str] | str) -> tuple[str, ...]:
    """The parts asked for, in the usual order."""
    wanted = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    unknown = [part for part in wanted if part not in PARTS]
    if unknown or not wanted:
        raise ValueError(f"parts are {', '.join(map(repr, PARTS))}, got {wanted!r}.")
    return tuple(part for part in PARTS if part in wanted)


def combined(parts: Mapping[str, Tensor]) -> Tensor:
    """The parts stacked in the order of ``PARTS``."""
    return torch.stack([parts[part] for part in PARTS])
