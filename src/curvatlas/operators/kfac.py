r"""KFAC and EKFAC: blocks of the Gauss-Newton or Fisher matrix as Kronecker products.

**The exact block.** A layer y_m = [W b] â_m acts on positions m (tokens, pixels; 1 is appended to
the input for the bias: â_m (in + 1,)). Let Z_i be the outputs of target i (a token with a label, a
sample) and f_ic, c = 1…r, the columns of a factor of its curvature, Σ_c f_ic f_icᵀ = Λ_i:

    kind="exact"      Λ_i = ∂²ℓ/∂Z_i², Gauss-Newton's block; r = C, the outputs of a target
    kind="mc"         Λ_i = mean_s r_is r_isᵀ, slopes at targets drawn from the model; r = samples
    kind="empirical"  Λ_i = r_i r_iᵀ, the slope at the observed target; r = 1

(``ca.Fisher`` has the same kinds and draws.) Every column is pulled back on its own,

    g_icm = (∂Z_i/∂y_m)ᵀ f_ic  (out,),   D_ic = Σ_m g_icm â_mᵀ  (out, in + 1),
    H_o = Σ_ic vec(D_ic) vec(D_ic)ᵀ.

**KFAC** (Martens and Grosse 2015; for shared weights Eschenhagen et al. 2023) is G ⊗ A with

    approximation="expand"   A = mean_m â_m â_mᵀ              G = Σ_ic Σ_m g_icm g_icmᵀ
    approximation="reduce"   A = mean_n ā_n ā_nᵀ              G = Σ_ic (Σ_m g_icm)(Σ_m g_icm)ᵀ

A: (in + 1, in + 1), m over all positions of all samples (those of ignored targets as well), ā_n the
mean of â_m over the positions of sample n.  G: (out, out), weighted over batches by their valid
targets.  "expand" is exact for a linear network with a target for each position, "reduce" for one
that averages the positions first.

**EKFAC** (George et al. 2018) keeps the eigenvectors U_G, U_A of either and takes the true diagonal
there, λ = Σ_ic (U_Gᵀ D_ic U_A)²  (out, in + 1): the matrix nearest to H_o among those with these
eigenvectors. Its trace is that of H_o's block, always.

**Layers.** ``nn.Linear``, ``nn.Conv2d`` and ``nn.Conv1d`` (â the patches under the kernel), GPT-2's
``Conv1D``, the projections of ``nn.MultiheadAttention`` (one layer for fused query, key and value).
Embeddings, and tables of which rows are read or added: â is the unit vector of the row, A =
diag(counts)/positions, U_A = I, always "expand"; the padding index is left out. Gain and shift of
norms (Layer-, RMS-, Group-, InstanceNorm, BatchNorm in evaluation, ``weight * x``): no Kronecker
product but H_o's own block, norms="exact" with 2d × 2d numbers, or its diagonal, norms="diagonal".
A frozen weight or bias leaves the other, with â = 1 or â = a.

**Tied weights, layers called twice.** All uses are positions of one layer: m runs over those of
every use, and D_ic sums over all uses. Where a weight is used in two ways (W h in the head, Wᵀ e in
the embedding), KFAC is the diagonal of G₁ ⊗ A₁ + A₂ ⊗ G₂ in the eigenvectors of the mean of its
left and of its right factors, each of trace one and weighted by the trace of its product. A bias
shares its weight's block only if neither is used without the other; else each is its own block.

All are U diag(λ) Uᵀ, so products, damped inverses, traces, norms and determinants are exact.

**Cost.** One backward pass of a batch for every column f_ic of a *sample*, as the columns of
different samples do not meet and are pulled back together: T·C passes for T targets a sample and C
outputs a target ("exact"), T·samples ("mc"), T ("empirical"), twice that for EKFAC; T is 1 where
targets do not meet in the model either (classification, layers that act on each token). Many
columns go in one call, as memory allows. Where a layer does not know its samples (positions looked
up once for a batch) the samples run one by one, with as many operations; where a model mixes them,
T counts the targets of the whole batch. per="sample" pulls the targets of a sample back together,
Σ_i∈n f_ic: samples passes for "mc", whose mean stays the same since draws are independent (more
noise: cross terms average out), one for "empirical", which then is the Fisher matrix of samples.
"exact" has no such way: its columns have arbitrary signs.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from curvatlas import parallel
from curvatlas.budget import available_bytes, readable
from curvatlas.errors import NonFiniteError
from curvatlas.linear_operator import LinearOperator, Tags
from curvatlas.operators.layer_uses import Use
from curvatlas.operators.pulled_columns import ColumnChoice, PulledColumns, SampleRun
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.problem.evaluation import listed

_GRADIENT_BYTES = 2**26  # gradients D_ic of one layer that exist at the same time


@dataclass(frozen=True)
class Block:
    """U diag(λ) Uᵀ with U = U_G ⊗ U_A, acting on [W b] of one layer; [γ β] of a norm is one row."""

    name: str  # of the module
    weight: slice | None  # places in the flat vector; None: held fixed
    bias: slice | None
    transposed: bool  # W is stored (in, out)
    left: Tensor | None  # U_G (out, out); None: the identity
    right: Tensor | None  # U_A (in [+ 1], in [+ 1]); None: the identity
    values: Tensor  # λ (out, in [+ 1])

    def gather(self, columns: Tensor) -> Tensor:
        """(P, K) → (K, out, in [+ 1])."""
        out, count, parts = len(self.values), columns.shape[1], []
        if self.weight is not None:
            flat = columns[self.weight].T
            parts.append(
                flat.reshape(count, -1, out).mT if self.transposed else flat.reshape(count, out, -1)
            )
        if self.bias is not None:
            parts.append(columns[self.bias].T.reshape(count, out, -1))
        return torch.cat(parts, 2)

    def scatter(self, matrices: Tensor, result: Tensor) -> None:
        """The inverse of ``gather``, into ``result`` (P, K)."""
        count, out, width = matrices.shape
        last = 0 if self.bias is None else (self.bias.stop - self.bias.start) // out
        weights, biases = torch.split(matrices, [width - last, last], dim=2)
        if self.weight is not None:
            stored = weights.mT if self.transposed else weights
            result[self.weight] = stored.reshape(count, -1).T
        if self.bias is not None:
            result[self.bias] = biases.reshape(count, -1).T

    def apply(self, matrices: Tensor) -> Tensor:
        """U diag(λ) Uᵀ on (K, out, in)."""
        turned = matrices if self.left is None else self.left.T @ matrices
        turned = (turned if self.right is None else turned @ self.right) * self.values
        turned = turned if self.left is None else self.left @ turned
        return turned if self.right is None else turned @ self.right.T

    def diagonal(self) -> Tensor:
        """The matrix's diagonal, (out, in [+ 1])."""
        entries = self.values if self.left is None else self.left.pow(2) @ self.values
        return entries if self.right is None else entries @ self.right.pow(2).T


class BlockwiseOperator(LinearOperator):
    """Blocks U diag(λ) Uᵀ on the layers of a problem, ``elsewhere`` · I on the other parameters."""

    def __init__(
        self, problem: Problem, blocks: Sequence[Block] = (), *, elsewhere: float = 0.0
    ) -> None:
        n = problem.size
        tags = Tags(symmetric=True, psd=True)
        super().__init__((n, n), dtype=problem.dtype, device=problem.device, tags=tags)
        self.problem, self.blocks, self.elsewhere = problem, tuple(blocks), elsewhere

    @property
    def covered(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(block.name for block in self.blocks)

    def _problem_on(self, axis: int) -> Problem:
        return self.problem

    def _columns(self, columns: Tensor) -> Tensor:
        result = columns * self.elsewhere
        for block in self.blocks:
            block.scatter(block.apply(block.gather(columns)), result)
        return result

    def inverse(self, damping: float) -> BlockwiseOperator:
        """(A + damping·I)⁻¹, exact for this A; 1/damping on the parameters not covered."""
        return self.power(-1.0, damping)

    def power(self, exponent: float, damping: float) -> BlockwiseOperator:
        """(A + damping·I)^exponent, exact for this A."""
        _check_damping(damping)
        blocks = [
            replace(block, values=(block.values + damping) ** exponent) for block in self.blocks
        ]
        elsewhere = (self.elsewhere + damping) ** exponent
        return BlockwiseOperator(self.problem, blocks, elsewhere=elsewhere)

    def exact_largest(self) -> float:
        """λmax of A."""
        return max([self.elsewhere, *(float(block.values.max()) for block in self.blocks)])

    def _sum_over_eigenvalues(self, function: Callable[[Tensor], Tensor]) -> float:
        others = self.shape[0] - sum(block.values.numel() for block in self.blocks)
        alone = torch.tensor(self.elsewhere, dtype=torch.float64, device="cpu")
        inside = sum(float(function(in_float64(block.values)).sum()) for block in self.blocks)
        return inside + (others * float(function(alone)) if others else 0.0)

    def exact_trace(self) -> float:
        """tr A."""
        return self._sum_over_eigenvalues(lambda values: values)

    def exact_frobenius_norm(self) -> float:
        """‖A‖_F."""
        return math.sqrt(self._sum_over_eigenvalues(torch.square))

    def exact_log_determinant(self, damping: float) -> float:
        """log det(A + damping·I); parameters not covered count log(damping) each."""
        _check_damping(damping)
        return self._sum_over_eigenvalues(lambda values: (values + damping).log())

    def exact_diagonal(self) -> Tensor:
        """diag A, (P,)."""
        result = torch.full(
            (self.shape[0], 1), self.elsewhere, dtype=self.dtype, device=self.device
        )
        for block in self.blocks:
            block.scatter(block.diagonal().unsqueeze(0), result)
        return result.squeeze(1)


def _check_damping(damping: float) -> None:
    if not damping > 0:
        raise ValueError(f"damping must be positive, got {damping!r}.")


class KFAC(BlockwiseOperator):
    r"""KFAC of a problem's layers as a (P, P) operator, G ⊗ A for each layer.

    approximation: what is summed where a weight is shared over positions m,
        "expand"  A = mean_m â_m â_mᵀ,    G = Σ_ic Σ_m g_icm g_icmᵀ;
        "reduce"  A = mean_n ā_n ā_nᵀ,    G = Σ_ic (Σ_m g_icm)(Σ_m g_icm)ᵀ.
    kind: Gauss-Newton ("exact"), the mean over ``samples`` targets drawn with ``seed`` ("mc"), or
        the observed targets ("empirical"), as in ``ca.Fisher``.
    per: pull back the columns of every target on their own, or ("mc", "empirical") of every sample
        together, which is one backward pass a draw instead of one for each target and draw.
    norms: gain and shift of norms by their "exact" block (2d × 2d) or its "diagonal".
    checks: refuse weights, modes and randomness that would give a wrong number.

    Layers: linear maps, convolutions (groups=1), embeddings, norms; tied weights and repeated calls
    count all their uses. ``covered`` lists the layers; the parameters in ``uncovered`` have zero
    rows and columns, and a warning names them. The matrix is that of the weights at this moment.
    Equations and costs: the module's docstring.
    """

    corrected = False

    def __init__(
        self,
        problem: Problem,
        *,
        approximation: Literal["expand", "reduce"] = "expand",
        kind: Literal["exact", "mc", "empirical"] = "exact",
        samples: int = 1,
        seed: int = 0,
        per: Literal["target", "sample"] = "target",
        norms: Literal["exact", "diagonal"] = "exact",
        checks: bool = True,
    ) -> None:
        super().__init__(problem)
        self.approximation, self.kind, self.per, self.norms = approximation, kind, per, norms
        self.samples, self.seed = samples, seed
        self._refuse()
        if checks:
            problem.check()
        passes = PulledColumns(
            problem,
            ColumnChoice(kind=kind, samples=samples, seed=seed, per=per),
            whole_samples=approximation == "reduce",
            name=type(self).__name__,
        )
        with problem.evaluating():
            sums = _block_sums(self, passes)
            blocks = {key: entry.block(problem) for key, entry in sums.items()}
            if self.corrected:
                products = [key for key, entry in sums.items() if not entry.gain]
                blocks |= _corrected(passes, {key: blocks[key] for key in products})
        self.blocks = tuple(blocks.values())
        self.uncovered = tuple(n for n in problem.parameter_names if n in passes.unexplained)
        self._warn_and_check()

    def _refuse(self) -> None:
        name, loss = type(self).__name__, self.problem.loss
        options = {
            "approximation": (self.approximation, ("expand", "reduce")),
            "kind": (self.kind, ("exact", "mc", "empirical")),
            "per": (self.per, ("target", "sample")),
            "norms": (self.norms, ("exact", "diagonal")),
        }
        for option, (value, allowed) in options.items():
            if value not in allowed:
                raise ValueError(f"{option} is one of {', '.join(allowed)}, got {value!r}.")
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}.")
        if self.kind == "exact" and self.per == "sample":
            raise ValueError(
                "kind='exact' pulls every target back on its own: per='sample' would add cross "
                "terms with arbitrary signs. Take kind='mc' or 'empirical' for per='sample'."
            )
        if self.kind == "exact" and not loss.convex:
            raise ValueError(
                f"{name} needs a loss that is convex in the outputs (cross_entropy, mse or "
                f"bce_with_logits), got {loss.name!r}: use one of these, or kind='empirical'."
            )
        if self.kind == "exact" and loss.linear:
            raise ValueError(
                f"{loss.name} is linear in the outputs, so that Λ and {name} are zero: give the "
                "model's logits to a cross-entropy, or use kind='empirical'."
            )
        if self.kind == "mc" and not loss.likelihood:
            raise ValueError(
                f"{name} with kind='mc' needs a likelihood and {loss.name!r} is not known as one: "
                "use cross_entropy, mse or bce_with_logits, or kind='empirical'."
            )
        if self.problem.distributed and parallel.world_size() > 1:
            raise ValueError(
                f"{name} does not sum over processes: make its Problem with distributed=False on "
                "data that one process holds."
            )
        if self.problem.checkpoint_activations:
            raise ValueError(
                f"{name} reads inside the model's blocks: make its Problem without "
                "checkpoint_activations."
            )

    def _warn_and_check(self) -> None:
        if not self.blocks:
            raise ValueError(
                "no parameter that varies belongs to a layer that KFAC knows (nn.Linear, "
                "nn.Conv2d, nn.Embedding, norms): no KFAC."
            )
        bad = [block.name for block in self.blocks if not bool(torch.isfinite(block.values).all())]
        if bad:
            raise NonFiniteError(
                f"{type(self).__name__} is not finite in {listed(bad)}: try float64."
            )
        if self.uncovered:
            warnings.warn(
                f"{type(self).__name__} knows no layer for {listed(list(self.uncovered))}: their "
                "rows are zero.",
                stacklevel=3,
            )


class EKFAC(KFAC):
    r"""KFAC with its eigenvalues corrected to the true diagonal in KFAC's eigenbasis.

    λ = Σ_ic (U_Gᵀ D_ic U_A)²  (out, in + 1),   D_ic = Σ_m g_icm â_mᵀ the gradient of column ic,

    for both approximations, which differ in U_G and U_A only. Its trace is that of the blocks of
    ``ca.GaussNewton`` (kind="exact") or ``ca.Fisher`` of the same kind, samples and seed. Twice the
    passes of KFAC; options and layers as there.
    """

    corrected = True


# --- KFAC's factors -----------------------------------------------------------------------------

Key = tuple[str | None, str | None]  # a block's weight and bias
Form = tuple[bool, bool]  # of uses that are pooled: embeddings; whether the weight is (in, out)


def _block_keys(uses: Sequence[Use]) -> dict[Key, list[int]]:
    """The blocks and their uses; weight and bias in one if neither is used without the other."""
    biases: dict[str | None, set[str | None]] = {}
    weights: dict[str | None, set[str | None]] = {}
    for use in uses:
        biases.setdefault(use.weight, set()).add(use.bias)
        weights.setdefault(use.bias, set()).add(use.weight)
    keys: dict[Key, list[int]] = {}
    for number, use in enumerate(uses):
        pair: Key = (use.weight, use.bias)
        apart: list[Key] = [(use.weight, None), (None, use.bias)]
        joint = None not in pair and len(biases[use.weight]) == len(weights[use.bias]) == 1
        for key in [pair] if joint else apart:
            if key != (None, None):
                keys.setdefault(key, []).append(number)
    return keys


def _by_form(run: SampleRun, key: Key, numbers: Sequence[int]) -> dict[Form, list[int]]:
    """Uses that are pooled: the same kind of map, the weight stored in the same way."""
    forms: dict[Form, list[int]] = {}
    for number in numbers:
        use = run.uses[number]
        # Without the weight there is only â = 1, and no way to store it.
        form = use.kind == "embedding", use.transposed and key[0] is not None
        forms.setdefault(form, []).append(number)
    return forms


def _layer_name(key: Key) -> str:
    """The module of a weight (and its bias); else the parameter's own name."""
    weight, bias = key
    if weight is None:
        return str(bias)
    module, _, last = weight.rpartition(".")
    return module if last == "weight" else weight


def _total(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


@dataclass
class _Pool:
    """Σ â âᵀ over ``positions``, and Σ g gᵀ."""

    inputs: Tensor  # (in, in), or (V,) counts of an embedding
    outputs: Tensor  # (out, out)
    positions: float = 0.0


class _BlockSums:
    """What the passes add up for one block: A and G, or the second moment of a norm's [γ β]."""

    def __init__(self, key: Key, *, gain: bool, reduces: bool, diagonal_gain: bool) -> None:
        self.key, self.gain = key, gain
        self._reduces, self._diagonal_gain = reduces, diagonal_gain
        self._pools: dict[Form, _Pool] = {}
        self._second_moment: Tensor | None = None  # (n, n), or (n,) its diagonal

    def add_inputs(self, run: SampleRun, numbers: Sequence[int]) -> None:
        """Add to A, of layers that have one."""
        for form, some in {} if self.gain else _by_form(run, self.key, numbers).items():
            if form[0]:
                for number in some:
                    self._add_counts(run, form, number)
                continue
            rows = [run.with_one(number, self.key) for number in some]  # (S, M, in) each
            out = run.uses[some[0]].width
            pool = self._pool(form, (rows[0].shape[-1],) * 2, out, like=rows[0])
            if self._reduces:
                means = _total(r.sum(1) for r in rows) / sum(r.shape[1] for r in rows)
                rows = [means.unsqueeze(1)]
            for row in rows:
                flat = row.flatten(0, 1)
                pool.inputs += flat.T @ flat
                pool.positions += len(flat)

    def _add_counts(self, run: SampleRun, form: Form, number: int) -> None:
        use, indices = run.uses[number], run.inputs(number).reshape(-1)
        table = run.recorded.leaves[str(use.weight)].detach()
        if use.padding is not None:
            indices = indices[indices != use.padding]
        pool = self._pool(form, (table.numel() // use.width,), use.width, like=table)
        pool.inputs += torch.bincount(indices, minlength=len(pool.inputs))
        pool.positions += len(indices)

    def _pool(self, form: Form, inputs: tuple[int, ...], out: int, *, like: Tensor) -> _Pool:
        if form not in self._pools:
            # Eigenvectors, and eigh's copies in float64, come on top of the factors.
            size = 4 * (torch.Size(inputs).numel() + out * out) * like.dtype.itemsize
            if like.device.type == "cpu" and size > available_bytes():
                raise ValueError(
                    f"the Kronecker factors of {_layer_name(self.key)!r} ({inputs[0]} inputs, "
                    f"{out} outputs) take {readable(size)}: hold it fixed with "
                    "Problem(parameters=...)."
                )
            self._pools[form] = _Pool(like.new_zeros(inputs), like.new_zeros(out, out))
        return self._pools[form]

    def add_slopes(self, run: SampleRun, numbers: Sequence[int], slopes: list[Tensor]) -> None:
        """Add to G, or to the second moment of a gain; slopes: (K, S, M, out) a use."""
        if self.gain:
            moment = self._gain_moment(run, numbers, slopes)
            before = self._second_moment
            self._second_moment = moment if before is None else before + moment
            return
        for form, some in _by_form(run, self.key, numbers).items():
            terms = [slopes[number] for number in some]
            if self._reduces and not form[0]:
                terms = [_total(term.sum(2, keepdim=True) for term in terms)]
            for term in terms:
                flat = term.flatten(0, 2)
                self._pools[form].outputs += flat.T @ flat

    def _gain_moment(self, run: SampleRun, numbers: Sequence[int], slopes: list[Tensor]) -> Tensor:
        """Σ d dᵀ, or its diagonal, for the gradients d of [γ, β]."""
        gradients = []
        for number in numbers:
            parts = []
            if self.key[0] is not None:
                parts.append((slopes[number] * run.inputs(number)).sum(2))
            if self.key[1] is not None:
                parts.append(slopes[number].sum(2))
            gradients.append(torch.cat(parts, -1))  # (K, S, n)
        flat = _total(gradients).flatten(0, 1)
        return flat.square().sum(0) if self._diagonal_gain else flat.T @ flat

    def block(self, problem: Problem) -> Block:
        """The block with KFAC's eigenvectors and eigenvalues."""
        layout = problem.layout
        places = {
            name: slice(start, start + size)
            for name, start, size in zip(layout.names, layout.starts, layout.sizes, strict=True)
        }
        weight, bias = (None if name is None else places[name] for name in self.key)
        transposed = not self.gain and all(form[1] for form in self._pools)
        left: Tensor | None = None
        if self.gain:
            assert self._second_moment is not None
            values, right = _eigen(self._second_moment)
            values = values.unsqueeze(0)
        else:
            left, right, values = self._eigenbasis(transposed)
        return Block(_layer_name(self.key), weight, bias, transposed, left, right, values)

    def _eigenbasis(self, transposed: bool) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """U_G, U_A and λ of G ⊗ A, or of a sum of such products for a weight used in two ways."""
        sides = []
        for form, pool in self._pools.items():
            pair = (pool.outputs, pool.inputs / max(pool.positions, 1.0))
            sides.append(pair if form[1] == transposed else pair[::-1])
        if len(sides) == 1:
            (left_values, left), (right_values, right) = map(_eigen, sides[0])
            return left, right, left_values[:, None] * right_values
        matrices = [[f.diag() if f.ndim == 1 else f for f in pair] for pair in sides]
        bases = []
        for side in range(2):
            # Factors of trace one, weighted by the traces of their products.
            mean = _total(pair[side] * float(pair[1 - side].trace()) for pair in matrices)
            bases.append(torch.linalg.eigh(in_float64(mean))[1].to(mean.dtype).to(mean.device))
        left_basis, right_basis = bases
        values = _total(
            _diagonal_in(left_basis, left)[:, None] * _diagonal_in(right_basis, right)
            for left, right in matrices
        )
        return left_basis, right_basis, values


def _eigen(factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues, none below zero, and eigenvectors; None, the identity, for a diagonal (n,)."""
    if factor.ndim == 1:
        return factor, None
    values, vectors = torch.linalg.eigh(in_float64(factor))
    values, vectors = (t.to(factor.dtype).to(factor.device) for t in (values, vectors))
    return values.clamp_min(0), vectors


def _diagonal_in(basis: Tensor, matrix: Tensor) -> Tensor:
    """diag(Uᵀ M U), none below zero."""
    return (basis * (matrix @ basis)).sum(0).clamp_min(0)


def _block_sums(operator: KFAC, passes: PulledColumns) -> dict[Key, _BlockSums]:
    """A and G of every layer, and the second moments of gains."""
    sums: dict[Key, _BlockSums] = {}
    block_of: dict[str, Key] = {}
    for run in passes:
        keys = _block_keys(run.uses)
        for key, numbers in keys.items():
            for name in key:
                if name is not None and block_of.setdefault(name, key) != key:
                    raise ValueError(
                        f"{name} meets another weight or bias in batch {run.recorded.batch.index} "
                        "than before, and KFAC takes both in one block: hold one of them fixed "
                        "with Problem(parameters=...)."
                    )
            if key not in sums:
                sums[key] = _BlockSums(
                    key,
                    gain=all(run.uses[number].kind == "gain" for number in numbers),
                    reduces=operator.approximation == "reduce",
                    diagonal_gain=operator.norms == "diagonal",
                )
            sums[key].add_inputs(run, numbers)
        for slopes in run.slopes():
            for key, numbers in keys.items():
                sums[key].add_slopes(run, numbers, slopes)
    return sums


# --- EKFAC's eigenvalues ------------------------------------------------------------------------


def _corrected(passes: PulledColumns, blocks: dict[Key, Block]) -> dict[Key, Block]:
    """The blocks with λ = Σ_ic (U_Gᵀ D_ic U_A)²."""
    exact = {
        key: replace(block, values=torch.zeros_like(block.values)) for key, block in blocks.items()
    }
    for run in passes:
        keys = _block_keys(run.uses)
        for slopes in run.slopes():
            for key, numbers in keys.items():
                if key in exact:
                    exact[key].values.add_(_squares(run, key, exact[key], numbers, slopes))
    return exact


def _squares(
    run: SampleRun, key: Key, block: Block, numbers: Sequence[int], slopes: list[Tensor]
) -> Tensor:
    """Σ (U_Gᵀ D U_A)² over some columns, like ``block.values``."""
    if block.right is None:
        return _embedding_squares(run, block, numbers, slopes)
    pairs = [_turned(run, key, block, number, slopes[number]) for number in numbers]
    if len(pairs) == 1 and pairs[0][0].shape[2] == 1:
        # One position: D is an outer product, and so is its square.
        left, right = (side.square().sum(0).flatten(0, 1) for side in pairs[0])
        return left.T @ right
    total = torch.zeros_like(block.values)
    count = len(slopes[numbers[0]])
    step = max(1, _GRADIENT_BYTES // (run.samples * total.numel() * total.dtype.itemsize))
    for start in range(0, count, step):
        some = slice(start, min(start + step, count))
        gradients = _total(
            (left if len(left) == 1 else left[some]).mT
            @ (right if len(right) == 1 else right[some])
            for left, right in pairs
        )  # (k, S, out, in)
        total += gradients.square_().sum((0, 1))
    return total


def _turned(
    run: SampleRun, key: Key, block: Block, number: int, slopes: Tensor
) -> tuple[Tensor, Tensor]:
    """l and r with U_Gᵀ D U_A = Σ_m l_m r_mᵀ: (K or 1, S, M, out) and (K or 1, S, M, in)."""
    assert block.left is not None
    assert block.right is not None
    use = run.uses[number]
    swapped = key[0] is not None and use.transposed != block.transposed
    near, far = (block.right, block.left) if swapped else (block.left, block.right)
    embeds = use.kind == "embedding"
    a = far[run.inputs(number)] if embeds else run.with_one(number, key) @ far
    pair = slopes @ near, a.unsqueeze(0)
    return pair[::-1] if swapped else pair


def _embedding_squares(
    run: SampleRun, block: Block, numbers: Sequence[int], slopes: list[Tensor]
) -> Tensor:
    """The same for embeddings alone, U_A = I: columns of D are sums over equal indices."""
    assert block.left is not None
    indices = torch.cat([run.inputs(number) for number in numbers], 1)  # (S, M)
    g = torch.cat([slopes[number] for number in numbers], 2) @ block.left
    rows = block.values.shape[1]
    sample = torch.arange(len(indices), device=indices.device).unsqueeze(1)
    pairs = sample * rows + indices  # of a sample and the row it reads
    entries, place = torch.unique(pairs, return_inverse=True)
    sums = g.new_zeros(len(g), len(entries), g.shape[-1])
    sums.index_add_(1, place.reshape(-1), g.flatten(1, 2))
    squares = sums.square_().sum(0)  # (pairs, out)
    return torch.zeros_like(block.values).index_add_(1, entries % rows, squares.T)
