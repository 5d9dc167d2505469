r"""What single samples of the data contribute: losses, gradients, curvatures, factors of H_o.

Samples do not meet in L = Σ_i c_i ℓ_i / Σ_i c_i (c_i valid targets of sample i), and in H_o =
Σ_i J_iᵀ Λ_i J_i neither. They run side by side under ``vmap`` where the model allows it and one
after the other elsewhere; whether they are apart at all is found by ``Problem.separable``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvatlas import parallel
from curvatlas.budget import default_budget
from curvatlas.engines.graphs import pull
from curvatlas.errors import DifferentiationError, NonFiniteError, PeerError, ProblemError
from curvatlas.operators.curvature import Hessian
from curvatlas.precision import float64_device, in_float64
from curvatlas.problem import Batch, CrossEntropy, Loss, MeanSquaredError, Problem
from curvatlas.problem.evaluation import call
from curvatlas.problem.sample_axis import cut
from curvatlas.problem.smooth_norms import SmoothNorms
from curvatlas.progress import bar

if TYPE_CHECKING:
    from curvatlas.operators.curvature import CurvatureOperator

_SIDE_BY_SIDE = 64  # samples: more gains nothing on a CPU and costs memory
_GRADIENT_BYTES = 2**27  # gradients of single samples that exist at the same time
_GRADIENT_COPIES = 3  # a gradient, its square and their sum
_OUTPUT_BYTES = 2**26  # of samples that go through together where only their losses are wanted
_ROW_NUMBERS = 2**23  # of gradients of one sample held at once: 32 MB in float32
_ROWS_ABREAST = 16  # sampled gradients: as many as the surgeon plans memory for
_ROW_OUTPUTS = 2**18  # outputs of the samples side by side: their activations grow with them
_MAX_OUTPUTS = 256  # numbers that the model gives for one sample; Λ_i is decomposed densely
_MAX_NUMBERS = 2**27  # in the matrices Λ_t of one call, 1 GB
_OUTER_UNITS, _TOTAL_UNITS = 4, 6  # of a product with H_o and with H; a forward pass is one


# --- the samples of the data ----------------------------------------------------------------------


def pieces(problem: Problem, size: int) -> Iterator[Batch]:
    """The data in batches of at most ``size`` samples; whole batches where they cannot be cut."""
    problem.require_one_process("a quantity by sample")
    return own_pieces(problem, size)


def own_pieces(problem: Problem, size: int) -> Iterator[Batch]:
    """``pieces`` of this process's share of the data."""
    for batch in problem.batches():
        for start in range(0, batch.samples, size):
            piece = batch.part(start, min(start + size, batch.samples), problem.loss.count)
            if piece.count > 0:
                yield piece


def count_samples(problem: Problem) -> int:
    """Samples of the data (batches, where a loss is not a sum over samples)."""
    problem.require_one_process("a quantity by sample")
    return sum(batch.samples for batch in problem.batches())


def subset(problem: Problem, indices: Tensor) -> Problem:
    """The same problem on some samples, numbered in the order of the data."""
    problem.require_one_process("a choice of samples")
    chosen, first = [], 0
    for batch in problem.batches():
        here = indices[(indices >= first) & (indices < first + batch.samples)] - first
        first += batch.samples
        if len(here):
            chosen.append(batch.chosen(here.sort().values, problem.loss.count))
    return problem.with_batches(chosen)


def sample_operations(problem: Problem) -> int:
    """Operations of a forward pass of the first sample, as torch counts them; 0: none it knows."""
    sample = next(problem.batches()).part(0, 1, problem.loss.count)
    with problem.evaluating(), torch.no_grad(), _Counted() as counted:
        problem.outputs(sample, {})
    return int(counted.operations)


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what is called inside by the formulas of ``torch.utils.flop_counter``.

    Torch's own mode asks every call first for its decomposition and imports the compiler for that,
    which took longer than the rest of a small survey; autograd has decomposed these calls before.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # or torch imports the compiler to tell it so
        return False

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # imports Triton where there is one

        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas: dict[Any, Any] = flop_registry
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        if formula is not None:
            self.operations += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


def _mapped(batch: Batch, one: Callable[..., Any], *by_sample: Any) -> Any:
    """one(inputs, targets, *of by_sample) of every sample, side by side under ``vmap``.

    by_sample: trees of tensors with the samples on their first axis.
    """
    assert batch.layout is not None
    leaves, spec = tree_flatten((batch.inputs, batch.targets))
    axes = batch.layout.leaves

    def on_sample(rows: list[Tensor], *others: Any) -> Any:
        row = iter(rows)
        filled = [
            leaf if axis is None else next(row).unsqueeze(axis)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        return one(*tree_unflatten(filled, spec), *others)

    tensors = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
    along = [axis for axis in axes if axis is not None]
    return torch.func.vmap(on_sample, in_dims=(along, *[0] * len(by_sample)))(tensors, *by_sample)


# --- gradients, sample after sample ---------------------------------------------------------------


def pulled_rows(leaves: dict[str, Tensor], root: Tensor, seeds: Tensor) -> Tensor:
    """Jᵀ seed in the flat parameters: (K, *root) → (K, P); the graph is kept."""
    tensors, count = list(leaves.values()), len(seeds)
    blocks = [
        leaf.new_zeros(count, leaf.numel()) if row is None else row.reshape(count, -1)
        for row, leaf in zip(pull([root], tensors, [seeds]), tensors, strict=True)
    ]
    return torch.cat(blocks, dim=1)


def sample_gradients(problem: Problem, most: int) -> Tensor:
    """Contribution of each of the first samples to the mean gradient, (n, P)."""
    problem.require_mean("gradient noise")
    rows: list[Tensor] = []
    counts: list[float] = []
    with problem.evaluating():
        for piece in pieces(problem, 1):
            leaves = problem.leaves()
            loss = problem.loss.value(problem.outputs(piece, leaves), piece.targets)
            rows.append(pulled_rows(leaves, loss, loss.new_ones(1))[0])
            counts.append(piece.count)
            if len(rows) >= most:
                break
    gradients = torch.stack(rows)
    weights = torch.tensor(counts, dtype=gradients.dtype, device=gradients.device)
    return gradients * (weights / weights.mean())[:, None]


def sampled_gradients(problem: Problem, *, samples: int, seed: int = 0) -> Tensor:
    r"""G (n, P) with E[GᵀG]/n = H_o for additive losses; at most ``samples`` rows.

    Row i is Jᵢᵀ r_i with r_i the residual of targets drawn from the predictive distribution,
    scaled so that a sample with many targets weighs as it does in the loss.
    """
    rows, targets = zip(*sampled_gradient_rows(problem, samples=samples, seed=seed), strict=True)
    # H_o is a mean over targets and a row sums those of one sample: n rows stand for ``targets``.
    return torch.stack(rows) / math.sqrt(sum(targets) / len(rows))


def sampled_gradient_rows(
    problem: Problem, *, samples: int, seed: int = 0
) -> Iterator[tuple[Tensor, float]]:
    """Jᵢᵀ r_i (P,) and the targets it sums, sample after sample: E Σ rowᵀ row / Σ targets = H_o."""
    if not problem.loss.additive:
        raise ProblemError(
            f"sampled gradients need a likelihood; {problem.loss.name!r} is not known as one: use "
            "loss='cross_entropy' or 'mse', or method='obd'."
        )
    problem.require_mean("a sketch of sampled gradients")
    problem.require_one_process("a sketch of sampled gradients")
    if not problem.separable:
        raise ProblemError(
            "sampled gradients are those of single samples, and the samples of a batch influence "
            "each other or their axis is not found (batch_axis=): use method='obd'."
        )
    problem.check()
    rows = _SampledRows(problem, seed)
    with problem.evaluating():
        for piece in pieces(problem, rows.at_once):
            if rows.taken >= samples:
                break
            if piece.samples > samples - rows.taken:
                piece = piece.part(0, samples - rows.taken, problem.loss.count)
            yield from rows.of(piece)


class _SampledRows:
    """Rows of ``sampled_gradient_rows``, a few samples side by side where the model allows it."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem, self.seed = problem, seed
        self.taken = 0
        first = next(problem.batches()).part(0, 1, problem.loss.count)
        with problem.evaluating(), torch.no_grad():
            numbers = getattr(problem.outputs(first, {}), "numel", lambda: _ROW_OUTPUTS)()
        fitting = min(_ROW_NUMBERS // problem.size, _ROW_OUTPUTS // max(numbers, 1))
        self.at_once = 1 if problem.checkpoint_activations else max(1, min(_ROWS_ABREAST, fitting))
        self._compared = False

    def of(self, batch: Batch) -> Iterator[tuple[Tensor, float]]:
        count = self.problem.loss.count
        singles = [batch.part(i, i + 1, count) for i in range(batch.samples)]
        rows = None
        if self.at_once > 1 and len(singles) > 1:
            try:
                rows = self._side_by_side(batch, singles)
            except (RuntimeError, ProblemError):
                self.at_once = 1  # an operation that vmap does not know, or a look at values
        for place, single in enumerate(singles):
            if single.count > 0:
                yield self._alone(single) if rows is None else rows[place]
                self.taken += 1

    def _residual(self, outputs: Tensor, single: Batch, place: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + place)

        def uniform(shape: torch.Size) -> Tensor:
            drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
            return drawn.clamp(1e-12, 1 - 1e-12)

        return self.problem.loss.sample_residual(outputs, single.targets, uniform).to(outputs)

    def _alone(self, single: Batch) -> tuple[Tensor, float]:
        leaves = self.problem.leaves()
        outputs = self.problem.outputs(single, leaves)
        residual = self._residual(outputs, single, self.taken)
        row = pulled_rows(leaves, outputs, residual.unsqueeze(0))[0]
        return row, self.problem.loss.target_count(outputs, single.targets)

    def _side_by_side(
        self, batch: Batch, singles: Sequence[Batch]
    ) -> list[tuple[Tensor, float]] | None:
        """None, from then on, where the mapped gradient is not that of a plain backward pass."""
        problem, axis = self.problem, sample_axis_of_outputs(batch)
        leaves, outputs = mapped_outputs(problem, batch, problem.layout.names)
        residuals, counts, place = [], [], self.taken
        for value, single in zip(outputs.detach().unsqueeze(axis + 1), singles, strict=True):
            if single.count > 0:
                residuals.append(self._residual(value, single, place).squeeze(axis))
                place += 1
            else:  # without a valid target: not asked for
                residuals.append(torch.zeros_like(value).squeeze(axis))
            counts.append(problem.loss.target_count(value, single.targets))
        gradients = torch.autograd.grad(
            outputs,
            list(leaves.values()),
            torch.stack(residuals),
            materialize_grads=True,
            allow_unused=True,
        )
        rows = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)
        if not self._compared:
            first = next(i for i, single in enumerate(singles) if single.count > 0)
            plain, _ = self._alone(singles[first])
            allowed = torch.finfo(rows.dtype).eps ** 0.5 * float(plain.abs().max())
            if not bool((rows[first] - plain).abs().max() <= allowed):
                self.at_once = 1
                return None
            self._compared = True
        return list(zip(rows, counts, strict=True))


def mapped_outputs(
    problem: Problem, batch: Batch, names: Sequence[str]
) -> tuple[dict[str, Tensor], Tensor]:
    """Leaves (n, *shape) by name, and the outputs (n, *outputs of a sample) made of them.

    Every sample gets parameters of its own, all views of the same memory: the gradient by them
    is the samples' gradients side by side.
    """
    leaves = {
        name: leaf.detach().expand(batch.samples, *leaf.shape).requires_grad_(True)
        for name, leaf in problem.leaves(names).items()
    }
    output_axis = sample_axis_of_outputs(batch)
    # The check of the loss looks at the targets' values, which vmap forbids: one stands for all
    single = batch.part(0, 1, problem.loss.count)

    def one(inputs: Any, _: Any, parameters: dict[str, Tensor]) -> Tensor:
        sample = Batch(
            inputs=inputs,
            targets=single.targets,
            count=single.count,
            index=batch.index,
            offset=batch.offset,
        )
        outputs: Tensor = problem.outputs(sample, parameters)
        return outputs.squeeze(output_axis)

    return leaves, _mapped(batch, one, leaves)


def root_gradients(
    problem: Problem, *, probes: int, seed: int
) -> Iterator[tuple[int, Tensor, float]]:
    r"""Jᵀ B ξ of every sample with B Bᵀ = Λ and ξ normal: (probe, (P,) gradient, sample's share).

    E (Jᵀ B ξ)_i² = (Jᵀ Λ J)_ii. Batches are taken whole where their samples cannot be told apart.
    """
    with problem.evaluating():
        for place, piece in enumerate(pieces(problem, 1)):
            draw = torch.Generator().manual_seed(seed + place)
            leaves = problem.leaves()
            outputs = problem.outputs(piece, leaves)
            for probe in range(probes):
                noise = torch.randn(outputs.shape, generator=draw, device="cpu").to(outputs)
                root = problem.loss.root_product(outputs, piece.targets, noise)
                if root is None:
                    raise ProblemError(
                        f"no root of the curvature of {problem.loss.name!r} is known: "
                        "use role_traces(GaussNewton(problem)), by products."
                    )
                row = pulled_rows(leaves, outputs, root.unsqueeze(0))[0]
                yield probe, row, piece.count / problem.normaliser
            del outputs, leaves


# --- losses, slopes and curvatures in a few directions --------------------------------------------


@dataclass(frozen=True)
class SampleQuantities:
    """One row a sample, in the order of the data."""

    counts: Tensor  # (n,) valid targets: the sample's weight in the mean
    losses: Tensor  # (n,)
    gradient_norms: Tensor  # (n,)
    slopes: Tensor  # (n, w)
    curvatures: Tensor  # (n, w, w), symmetric


def sample_quantities(
    problem: Problem, directions: Tensor, *, limit: int | None = None, chunk: int | None = None
) -> SampleQuantities:
    r"""ℓ_i, ‖∇ℓ_i‖, Wᵀ∇ℓ_i and Wᵀ h_i W for directions W (P, w) of at most ``limit`` samples.

    By Hessian products h_i W of single samples, in float64; P-sized memory is that of one chunk,
    whatever the number of samples. The first chunk is compared with the Hessian operator.
    """
    parts: list[tuple[Tensor, ...]] = []
    sampler = _Sampler(problem, directions, chunk)
    total = count_samples(problem) if limit is None else min(limit, count_samples(problem))
    done = 0
    with bar("per-sample curvature", total=total) as progress:
        for batch in pieces(problem, sampler.chunk):
            if done >= total:
                break
            if batch.samples > total - done:
                batch = batch.part(0, total - done, problem.loss.count)
            parts.append(sampler.of(batch))
            done += len(parts[-1][0])
            progress.update(len(parts[-1][0]))
    return SampleQuantities(*(torch.cat(column) for column in zip(*parts, strict=True)))


def sample_losses(problem: Problem, *, limit: int) -> Tensor:
    """ℓ_i of the first ``limit`` samples with a valid target, (n,) float64; forward only."""
    return weighted_losses(problem, limit=limit)[1]


def weighted_losses(problem: Problem, *, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Weights c_i (valid targets) and losses ℓ_i of the first ``limit`` samples that have a target.

    (n,) and (n,) float64, by forward passes only.
    """
    sampler = _Sampler(problem, problem.parameters.new_zeros(problem.size, 0), 256)
    rows: list[tuple[Tensor, ...]] = []
    most, done = count_samples(problem) if limit is None else limit, 0
    with torch.no_grad(), bar("losses by sample", total=most) as progress:
        for batch in pieces(problem, sampler.chunk):
            rows.append(sampler.of(batch))
            done += len(rows[-1][0])
            progress.update(len(rows[-1][0]))
            if done >= most:
                break
    weights, losses = (torch.cat(column)[:most] for column in zip(*rows, strict=True))
    return weights, losses


class _Sampler:
    """Computes a chunk's rows: vectorised, or sample by sample where the model does not allow."""

    def __init__(self, problem: Problem, directions: Tensor, chunk: int | None) -> None:
        problem.require_mean("curvature by sample")
        problem.check()
        self.problem = problem
        self.directions = directions.to(dtype=problem.dtype, device=problem.device)
        row = 8 * problem.size * problem.dtype.itemsize  # gradient, products and their graph
        self.chunk = chunk or max(1, min(_SIDE_BY_SIDE, default_budget(problem.device) // row))
        self._vectorised = problem.separable and not problem.truth.elsewhere
        self._checked = not directions.shape[1]
        self._columns = problem.layout.split(self.directions)  # (w, *shape) each

    def of(self, batch: Batch) -> tuple[Tensor, ...]:
        rows = None
        with self.problem.evaluating(), SmoothNorms():
            if self._vectorised and batch.layout is not None:
                try:
                    rows = self._side_by_side(batch)
                except RuntimeError:
                    self._vectorised = False  # an operation without a batching rule
            if rows is None:
                wide = self.directions.shape[1] > 0
                rows = self._one_by_one(batch) if wide else (self._losses(batch),)
        count = self.problem.loss.count
        counts = [batch.part(i, i + 1, count).count for i in range(batch.samples)]
        weights = torch.tensor(counts, dtype=torch.float64)
        if not self._checked:
            self._check(batch, weights, rows)
            self._checked = True
        return tuple(t.cpu().double()[weights > 0] for t in (weights, *rows))

    def _side_by_side(self, batch: Batch) -> tuple[Tensor, ...]:
        problem, directions, loss = self.problem, self.directions, self.problem.loss
        names = problem.parameter_names
        fixed = {n: p.detach() for n, p in problem.named_weights().items()}

        def one(inputs: Any, targets: Any) -> tuple[Tensor, ...]:
            def value_at(values: dict[str, Tensor]) -> Tensor:
                raw = call(problem.model, {**fixed, **values}, inputs)
                return loss.value(loss.arranged(loss.outputs_of(raw), targets), targets)

            here = {n: fixed[n] for n in names}
            if not directions.shape[1]:
                return (value_at(here),)
            # one linearisation for all directions
            linear: Any = torch.func.vjp(torch.func.grad_and_value(value_at), here, has_aux=True)
            gradient, pulled, value = linear
            flat = torch.cat([gradient[n].reshape(-1) for n in names])
            products = []
            for column in zip(*self._columns, strict=True):
                (bent,) = pulled(dict(zip(names, column, strict=True)))
                products.append(torch.cat([bent[n].reshape(-1) for n in names]) @ directions)
            return value, flat.norm(), flat @ directions, torch.stack(products)

        rows: tuple[Tensor, ...] = _mapped(batch, one)
        return rows

    def _losses(self, batch: Batch) -> Tensor:
        """ℓ_i, (n,): forward passes of some samples together, whose outputs are cut by sample."""
        problem, count, losses = self.problem, self.problem.loss.count, []
        start, stop = 0, 1  # the first one alone tells how large outputs are
        while start < batch.samples:
            part = batch.part(start, stop, count)
            outputs, spec = tree_flatten(problem.outputs(part, {}))
            axes = (None,) * len(outputs) if batch.layout is None else batch.layout.outputs
            for i in range(part.samples):
                one = part.part(i, i + 1, count)
                own = tree_unflatten(cut(outputs, axes, i, i + 1), spec)
                value = problem.loss.value(own, one.targets) if one.count > 0 else None
                losses.append(self.directions.new_zeros(()) if value is None else value.detach())
            size = sum(z.nbytes for z in outputs if isinstance(z, Tensor)) / part.samples
            start, stop = stop, min(batch.samples, stop + max(1, int(_OUTPUT_BYTES / size)))
        return torch.stack(losses)

    def _one_by_one(self, batch: Batch) -> tuple[Tensor, ...]:
        problem, directions = self.problem, self.directions
        width = directions.shape[1]
        rows: list[tuple[Tensor, ...]] = []
        for i in range(batch.samples):
            part = batch.part(i, i + 1, problem.loss.count)
            if part.count == 0:
                zero = directions.new_zeros
                rows.append((zero(()), zero(()), zero(width), zero(width, width)))
                continue
            leaves = problem.leaves()
            value = problem.loss.value(problem.outputs(part, leaves), part.targets)
            tensors = list(leaves.values())
            grads = torch.autograd.grad(value, tensors, create_graph=True, materialize_grads=True)
            like = directions[:, 0]
            flat = problem.layout.join([g.detach() for g in grads], like=like)
            products = [
                problem.layout.join(
                    pull(grads, tensors, [c.unsqueeze(0) for c in column]), like=like
                )
                @ directions
                for column in zip(*self._columns, strict=True)
            ]
            rows.append((value.detach(), flat.norm(), flat @ directions, torch.stack(products)))
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    def _check(self, batch: Batch, counts: Tensor, rows: tuple[Tensor, ...]) -> None:
        """The weighted mean of the samples' curvatures is the Hessian operator's."""
        operator = Hessian(self.problem.with_batches([batch]))
        want = self.directions.T @ (operator @ self.directions)
        shares = (counts / counts.sum()).to(want)
        got = torch.einsum("i,iab->ab", shares, rows[3].to(want))
        error = float((got - want).norm())
        allowed = 1e4 * torch.finfo(want.dtype).eps * float(rows[3].abs().max() + want.norm())
        if error > allowed:
            raise DifferentiationError(
                f"per-sample curvatures do not add up to the Hessian ({error:.1e} off, "
                f"{allowed:.1e} allowed): samples of a batch influence each other, or an operation "
                "has a wrong second derivative."
            )


# --- the exact diagonal of H_o --------------------------------------------------------------------


@dataclass(frozen=True)
class TargetFactors:
    """Columns f_tc of n samples with T targets each: Λ_t = Σ_c f_tc f_tcᵀ for every target t.

    Targets do not meet in Λ, so that its factors are those of small matrices, C × C for C outputs
    of a target, and a column f_tc is zero outside its own target.
    """

    columns: Tensor  # (n, T, C, r)
    places: Tensor  # (q, 2) pairs (t, c) that are not zero for some sample, the largest first
    shape: torch.Size  # of the outputs, samples first

    def seeds(self, some: Tensor) -> Tensor:
        """Columns of the pairs ``some`` (k, 2) as directions of the outputs, samples first."""
        n, targets, classes, _ = self.columns.shape
        t, c = some.unbind(1)
        seeds = self.columns.new_zeros(len(some), n, targets, classes)
        seeds[torch.arange(len(some), device=t.device), :, t] = self.columns[:, t, :, c]
        return seeds.reshape(len(some), *self.shape)


def target_factors(
    loss: Loss, outputs: Tensor, targets: object, *, axis: int = 0
) -> TargetFactors | None:
    """The factors at ``outputs`` with n samples on ``axis``.

    None: no closed form of Λ, or too many outputs.
    """
    shape = outputs.movedim(axis, 0).shape  # samples first
    n, classes = shape[0], _outputs_of_a_target(loss, shape)
    if outputs.numel() * classes > _MAX_NUMBERS:
        return None
    product = loss.curvature(outputs.detach(), targets)
    if product is None:
        return None
    units = torch.eye(classes, dtype=outputs.dtype, device=outputs.device)
    units = units.view(classes, 1, 1, classes)
    count = outputs.numel() // (n * classes)
    units = units.expand(classes, n, count, classes).reshape(classes, *shape)
    weighted = product(units.movedim(1, 1 + axis)).movedim(1 + axis, 1)
    blocks = in_float64(weighted.reshape(classes, n, count, classes).movedim(0, 3))
    values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)  # (n, T, C)
    rounding = classes * torch.finfo(outputs.dtype).eps * values.amax()
    columns: Tensor = vectors * values.where(values > rounding, 0.0).sqrt().unsqueeze(2)
    sizes = columns.square().sum((0, 2))  # (T, r)
    places = sizes.nonzero()
    order = sizes[places[:, 0], places[:, 1]].argsort(descending=True)
    return TargetFactors(
        columns.to(outputs.dtype).to(outputs.device), places[order].to(outputs.device), shape
    )


def _outputs_of_a_target(loss: Loss, shape: torch.Size) -> int:
    """C: along the last axis for losses that are known so, else all outputs of a sample."""
    if isinstance(loss, CrossEntropy | MeanSquaredError) and len(shape) > 1:
        return shape[-1]
    return shape[1:].numel()


def sample_axis_of_outputs(batch: Batch) -> int:
    """The axis on which the outputs, one tensor, hold the samples of a batch."""
    layout = batch.layout
    if layout is None or layout.outputs[0] is None:
        raise ProblemError("the samples of this batch cannot be told apart.")
    return layout.outputs[0]


class SampleFactors:
    r"""diag H_o from the factors Λ_i = Σ_c f_ic f_icᵀ of an operator's data, samples side by side.

        diag H_o = Σ_i Σ_c (J_iᵀ f_ic)²

    with few columns where a sample has few outputs (C classes: C − 1), and one backward pass for
    each c with the gradients of the samples kept apart. There is no answer, and the caller
    estimates, where an operation of the model cannot be mapped over samples or samples meet.

    names: the parameters whose rows are wanted.
    """

    def __init__(self, operator: CurvatureOperator, names: Sequence[str]) -> None:
        self.problem: Problem = operator.problem
        self.names = tuple(names)
        self._checks = operator.checks
        self._product_units = _OUTER_UNITS if operator.outer == "whole" else _TOTAL_UNITS
        sizes = dict(zip(self.problem.layout.names, self.problem.layout.sizes, strict=True))
        self.size = sum(sizes[name] for name in names)
        gradient_bytes = _GRADIENT_COPIES * self.size * operator.dtype.itemsize
        self._fits = gradient_bytes <= operator.budget
        at_once = min(_GRADIENT_BYTES, operator.budget) // max(gradient_bytes, 1)
        self._at_once = max(1, int(at_once))  # gradients of single samples

    def columns(self) -> int | None:
        """How many backward passes the diagonal takes; None where it is not to be had so.

        Of several processes the most that one of them takes, and None where one has no answer.
        """
        own = self._own_columns()
        if not self.problem.distributed:
            return own or None
        told = parallel.from_every_process(-1 if own is None else own)
        return None if min(told) < 0 else max(told) or None

    def _own_columns(self) -> int | None:
        """``columns`` of this process's data; 0: it has none."""
        problem = self.problem
        supported = problem.loss.additive and problem.loss.convex and self._fits
        if not supported or problem.checkpoint_activations:
            return None
        with problem.joined():
            first = next(problem.batches(), None)
            if first is None:
                return 0 if problem.distributed else None
            if not problem.separable:
                return None
            try:
                with problem.evaluating(), torch.no_grad():
                    outputs = problem.outputs(first.part(0, 1, problem.loss.count), {})
            except PeerError:
                raise
            except (RuntimeError, ProblemError):
                return None
        if not isinstance(outputs, Tensor) or outputs.numel() > _MAX_OUTPUTS:
            return None
        rank = outputs.numel()
        if problem.loss.name == "cross_entropy":
            rank -= rank // outputs.shape[-1]  # logits may be shifted together
        return rank

    def products(self, columns: int) -> int:
        """The cost in products with the operator.

        A forward pass for the outputs, one more for each group of columns, and a backward pass,
        which counts as two, for each column.
        """
        groups = math.ceil(columns / min(self._at_once, max(columns, 1)))
        return math.ceil((1 + groups + 2 * columns) / self._product_units)

    def diagonal(self) -> Tensor | None:
        """Σ_i Σ_c (J_iᵀ f_ic)² (Σ sizes of ``names``,), float64.

        None when the samples cannot be told apart in this model.
        """
        columns = self.columns()
        if columns is None:
            return None
        if not self.problem.distributed:
            return self._own_diagonal(columns)
        total = parallel.together(lambda: self._own_diagonal(columns))
        if not parallel.everywhere(total is not None):
            return None
        assert total is not None
        return parallel.add_over_processes(total)

    def _own_diagonal(self, columns: int) -> Tensor | None:
        """The terms of this process's samples."""
        problem = self.problem
        total = torch.zeros(self.size, dtype=torch.float64, device=float64_device(problem.device))
        mapping_checked = False
        with problem.joined():
            if self._checks:  # what is wrong with the problem is said, not worked around
                problem.check()
            try:
                with problem.evaluating():
                    for part in own_pieces(problem, max(1, self._at_once // max(columns, 1))):
                        with torch.no_grad():
                            factors = _factors(problem, part, problem.outputs(part, {}))
                        if factors is None:
                            return None
                        if not len(factors.places):
                            continue  # saturated: Λ is zero
                        if not mapping_checked and not self._mapping_agrees(part, factors):
                            return None
                        mapping_checked = True
                        total += part.count / problem.normaliser * self._squares(part, factors)
            except PeerError:
                raise
            except (RuntimeError, ProblemError):
                return None  # an operation without a rule for vmap, or with a look at its values
        return total if bool(torch.isfinite(total).all()) else None

    def _squares(self, batch: Batch, factors: TargetFactors) -> Tensor:
        """Σ_i Σ_c (J_iᵀ f_ic)² of one batch, flat and in float64."""
        total = torch.zeros(
            self.size, dtype=torch.float64, device=float64_device(factors.columns.device)
        )
        for some in torch.split(factors.places, self._at_once):
            gradients = self._gradients(batch, factors.seeds(some))  # (r, n, *shape) each
            # Not in place: gradients of different parameters may share their memory.
            squares = [gradient.flatten(2).square().sum((0, 1)) for gradient in gradients]
            total += in_float64(torch.cat(squares))
        return total

    def _gradients(self, batch: Batch, seeds: Tensor) -> list[Tensor]:
        """J_iᵀ f_ic for every sample and column: (r, n, *shape) for each of ``names``.

        seeds: (r, n, *outputs of a sample), the columns.
        """
        leaves, outputs = mapped_outputs(self.problem, batch, self.names)
        gradients = torch.autograd.grad(
            outputs,
            list(leaves.values()),
            seeds,
            is_grads_batched=True,
            allow_unused=True,
        )
        return [
            leaf.new_zeros(len(seeds), *leaf.shape) if gradient is None else gradient
            for gradient, leaf in zip(gradients, leaves.values(), strict=True)
        ]

    def _mapping_agrees(self, batch: Batch, factors: TargetFactors) -> bool:
        """Whether gradients of mapped samples are those of a plain backward pass.

        That the samples are apart is known (``Problem.separable``); whether every operation of the
        model is mapped over them rightly is seen on a random mixture of two samples' outputs.
        """
        pair = batch.part(0, min(2, batch.samples), self.problem.loss.count)
        random = torch.Generator().manual_seed(0)
        shape = (1, pair.samples, *factors.shape[1:])
        seeds = torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(
            factors.columns
        )
        apart = self._gradients(pair, seeds)
        leaves = self.problem.leaves(self.names)
        outputs = self.problem.outputs(pair, leaves).movedim(sample_axis_of_outputs(pair), 0)
        joint = torch.autograd.grad(
            outputs, list(leaves.values()), seeds[0], allow_unused=True, materialize_grads=True
        )
        left = torch.cat([gradient.sum((0, 1)).reshape(-1) for gradient in apart])
        right = torch.cat([gradient.reshape(-1) for gradient in joint])
        allowed = torch.finfo(left.dtype).eps ** 0.5 * float(right.abs().max())
        return bool((left - right).abs().max() <= allowed)


def exact_outer_diagonal(problem: Problem) -> tuple[Tensor, int] | None:
    r"""diag H_o = Σ_i Σ_c (J_iᵀ f_ic)² (P,) in float64, and the backward passes it took.

    One sample after the other, for any model and more outputs than ``SampleFactors`` takes: a
    backward pass of one sample for every output, where columns of H_o would be one product of all
    samples for every weight. None where a sample has more outputs than there are weights, the loss
    no closed form of Λ, or the data are spread over processes.
    """
    if problem.spread or not problem.separable or not _fewer_outputs_than_weights(problem):
        return None
    problem.check()
    total = torch.zeros(problem.size, dtype=torch.float64, device=float64_device(problem.device))
    passes = 0
    with problem.evaluating(), bar("exact diagonal") as progress:
        for piece in pieces(problem, 1):
            leaves = problem.leaves()
            outputs = problem.outputs(piece, leaves)
            factors = None if piece.layout is None else _factors(problem, piece, outputs)
            if factors is None:
                return None
            samples_first = outputs.movedim(sample_axis_of_outputs(piece), 0)
            for some in torch.split(factors.places, max(1, _ROW_NUMBERS // problem.size)):
                rows = pulled_rows(leaves, samples_first, factors.seeds(some))
                total += piece.count * in_float64(rows).square().sum(0)
            passes += len(factors.places)
            progress.update(1)
    if not bool(torch.isfinite(total).all()):
        raise NonFiniteError("the Gauss-Newton diagonal is not finite at these weights.")
    return total / problem.normaliser, passes


def _fewer_outputs_than_weights(problem: Problem) -> bool:
    piece = next(iter(problem.batches())).part(0, 1, problem.loss.count)
    with problem.evaluating(), torch.no_grad():
        outputs = problem.outputs(piece, problem.leaves())
    return isinstance(outputs, Tensor) and outputs.numel() <= problem.size


def _factors(problem: Problem, batch: Batch, outputs: Tensor) -> TargetFactors | None:
    axis = sample_axis_of_outputs(batch)
    return target_factors(problem.loss, outputs, batch.targets, axis=axis)
