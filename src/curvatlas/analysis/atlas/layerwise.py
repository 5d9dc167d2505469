"""Curvature by role and by module, for models too large for a map or with unknown roles."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from curvatlas.analysis.atlas.result import AtlasBlock, blocks_of
from curvatlas.analysis.atlas.sketch import Sketch
from curvatlas.analysis.propagation.dense import pulled
from curvatlas.analysis.propagation.matrix_free import orthonormal, probe
from curvatlas.analysis.propagation.result import Measure
from curvatlas.anatomy import Slice
from curvatlas.fits import mean_reach
from curvatlas.linear_operator import LinearOperator
from curvatlas.operators.curvature import CurvatureParts
from curvatlas.operators.per_sample import count_samples, root_gradients
from curvatlas.precision import sum_in_float64
from curvatlas.problem import Problem
from curvatlas.problem.batches import paired
from curvatlas.problem.evaluation import call, evaluated
from curvatlas.problem.losses import LossLike
from curvatlas.progress import bar, track
from curvatlas.results import Number, Result
from curvatlas.spectra.estimate import Estimate
from curvatlas.spectra.summary import Participation

_LAYER = re.compile(r"^blocks\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class RoleTraces(Result):
    """Samples of every role's trace; their mean plus what is known exactly is the estimate.

    Intervals are Student's over the probes.
    """

    part: str  # total: H, outer: H_o
    roles: tuple[str, ...]
    sizes: tuple[int, ...]  # parameters of each role over all layers
    samples: Tensor  # (probes, roles)
    known: Tensor  # (roles,), the part of the eigenvectors that were taken out
    products: int
    unit: str  # what was counted

    def trace(self, role: str) -> float:
        """tr of the role's diagonal block."""
        place = self.roles.index(role)
        return float(self.known[place] + self.samples[:, place].mean())

    def interval(self, role: str) -> tuple[float, float]:
        """Of the trace, 95 %."""
        return _around(self.trace(role), self.samples[:, self.roles.index(role)])

    def whole(self) -> Estimate:
        """The trace of the whole matrix: the roles partition the parameters."""
        sums = self.samples.sum(1)
        value = float(self.known.sum() + sums.mean())
        return Estimate(
            quantity="trace",
            value=value,
            interval=_around(value, sums),
            products=self.products,
            converged=len(sums) > 1,
            exact=False,
            method=f"{len(sums)} normal probes, {self.products} {self.unit}",
        )

    def pooled(self) -> RoleTraces:
        """Roles that were taken apart by layer, over all layers."""
        names = [_LAYER.sub("", role) for role in self.roles]
        roles = tuple(dict.fromkeys(names))
        places = [[k for k, name in enumerate(names) if name == role] for role in roles]
        return replace(
            self,
            roles=roles,
            sizes=tuple(sum(self.sizes[k] for k in members) for members in places),
            samples=torch.stack([self.samples[:, members].sum(1) for members in places], dim=1),
            known=torch.stack([self.known[members].sum() for members in places]),
        )

    def __add__(self, other: RoleTraces) -> RoleTraces:
        """More probes of the same matrix, with the same eigenvectors taken out."""
        if (self.part, self.roles) != (other.part, other.roles):
            raise ValueError("probes of different matrices cannot be put together.")
        samples = torch.cat([self.samples, other.samples])
        return replace(self, samples=samples, products=self.products + other.products)

    def __str__(self) -> str:
        name = {"total": "H", "outer": "H_o"}[self.part]
        lines = [f"tr {name}: {self.whole()}"]
        for role, size in zip(self.roles, self.sizes, strict=True):
            low, high = self.interval(role)
            lines.append(
                f"  {role:<18} {size:>12,} parameters  {self.trace(role):>10.4g}"
                f"  [{low:.4g}, {high:.4g}]"
            )
        return "\n".join(lines)


def outer_role_traces(
    problem: Problem,
    *,
    probes: int = 8,
    first: int = 0,
    seed: int = 0,
    layers: bool = False,
) -> RoleTraces:
    r"""tr H_o by role, one backward pass a probe: probes ``first`` to ``first + probes``.

    H_o = Σ_b c_b J_bᵀ Λ_b J_b needs no product: with Λ_b = B_b B_bᵀ and ξ normal,
    E (J_bᵀ B_b ξ)_i² = (J_bᵀ Λ_b J_b)_ii. Samples of the data are taken apart, which leaves their
    cross terms out of the noise.

    layers: every layer's roles apart ("blocks.3.key"); ``RoleTraces.pooled`` puts them together
    """
    problem.require_one_process("a trace by backward passes over the samples")
    roles = pooled_roles(problem, layers=layers)
    samples = torch.zeros(probes, len(roles), dtype=torch.float64)
    gradients = root_gradients(problem, probes=probes, seed=seed * 1_000_003 + first * 1009)
    for number, row, share in track(gradients, "tr H_o", total=probes * count_samples(problem)):
        samples[number] += share * _by_role(row.square_(), roles)
    return _traces("outer", roles, samples, None, probes, "backward passes over the data")


def role_traces(
    op: LinearOperator,
    problem: Problem,
    *,
    part: str = "total",
    probes: int = 8,
    first: int = 0,
    seed: int = 0,
    deflate: Tensor | None = None,
    known: Tensor | None = None,
) -> RoleTraces:
    r"""tr of ``op`` by role of ``problem``, one product a probe and one for each deflated vector.

        tr(E_r H) = tr(E_r H Q Qᵀ) + E[(E_r z)ᵀ H (I − Q Qᵀ) z]

    deflate: orthonormal columns (n, k), best the leading eigenvectors, in any precision;
    known: ``RoleTraces.known`` of an earlier call with the same columns, which saves their products
    """
    roles = pooled_roles(problem)
    products = probes
    if deflate is not None and known is None:
        products += deflate.shape[1]
        known = torch.zeros(len(roles), dtype=torch.float64)
        for column in deflate.unbind(1):
            vector = column.to(device=op.device, dtype=op.dtype)
            known += _by_role((op @ vector).mul_(vector), roles)
    samples = torch.zeros(probes, len(roles), dtype=torch.float64)
    with bar(f"trace of {op!r}", total=probes) as progress:
        for number in range(probes):
            draw = torch.Generator().manual_seed(seed * 1_000_003 + 7 + first + number)
            probe = torch.randn(op.shape[0], generator=draw, dtype=torch.float32, device="cpu")
            probe = probe.to(device=op.device, dtype=op.dtype)
            image = op @ _without(probe, deflate)
            samples[number] = _by_role(image.mul_(probe), roles)
            progress.update(1)
    return _traces(part, roles, samples, known, products, "products")


def pooled_roles(problem: Problem, *, layers: bool = False) -> dict[str, tuple[Slice, ...]]:
    """Role → its slices in every layer (or, by ``layers``, in each); every parameter once."""
    groups: dict[str, list[Slice]] = {}
    for block in blocks_of(problem.anatomy, biases=False):
        groups.setdefault(block.name if layers else block.role, []).extend(block.slices)
    return {role: tuple(slices) for role, slices in groups.items()}


def role_shares(problem: Problem, vectors: Tensor) -> Participation:
    """Mass of each column of ``vectors`` (n, k) in every role, one column at a time.

    ``spectra.summary`` for vectors that fill the memory, in any stored precision.
    """
    roles = pooled_roles(problem)
    mass = torch.zeros(vectors.shape[1], len(roles), dtype=torch.float64)
    fourth = torch.zeros(vectors.shape[1], dtype=torch.float64)
    for k in range(vectors.shape[1]):
        squares = vectors[:, k].float().square_()
        fourth[k] = sum_in_float64(squares.square())
        mass[k] = _by_role(squares, roles)
    total = mass.sum(1, keepdim=True)
    mass /= total
    return Participation(
        groups=tuple(roles),
        mass=mass,
        ratio=1 / mass.square().sum(1),
        entries=total.squeeze(1).square() / fourth,
    )


def _traces(
    part: str,
    roles: dict[str, tuple[Slice, ...]],
    samples: Tensor,
    known: Tensor | None,
    products: int,
    unit: str,
) -> RoleTraces:
    sizes = tuple(sum(piece.size for piece in slices) for slices in roles.values())
    known = torch.zeros(len(roles), dtype=torch.float64) if known is None else known
    return RoleTraces(
        part=part,
        roles=tuple(roles),
        sizes=sizes,
        samples=samples,
        known=known,
        products=products,
        unit=unit,
    )


def _by_role(entries: Tensor, roles: dict[str, tuple[Slice, ...]]) -> Tensor:
    """Sums of the entries (n,) of each role: (roles,), float64."""
    sums = [
        torch.stack([sum_in_float64(_entries(entries, piece)) for piece in slices]).sum()
        for slices in roles.values()
    ]
    return torch.stack(sums).cpu()


def _entries(entries: Tensor, piece: Slice) -> Tensor:
    if piece.contiguous:  # the indices of a large matrix would take twice its own memory
        return entries[piece.start : piece.start + piece.length]
    return entries[piece.indices]


def _without(probe: Tensor, columns: Tensor | None) -> Tensor:
    """(I − Q Qᵀ) z, one column at a time: Q may be stored in a lower precision."""
    if columns is None:
        return probe
    rest = probe.clone()
    for column in columns.unbind(1):
        vector = column.to(device=probe.device, dtype=probe.dtype)
        rest.sub_(vector, alpha=float(torch.dot(vector, probe)))
    return rest


def _around(value: float, samples: Tensor) -> tuple[float, float]:
    reach = mean_reach(samples)
    return value - reach, value + reach


_TAIL = 2.2


@dataclass(frozen=True, kw_only=True)
class ModuleCurvature(Result):
    """∂²L/∂θ² of one module's own parameters, ∂²L/∂a² of its output a."""

    module: str  # path; "" is the model itself
    type: str
    size: int  # parameters of its own
    parameters: Measure | None  # None: it has none that vary
    parameter_spectral_interval: tuple[float, float] | None
    activation: Measure | None  # None: its output does not reach the loss
    activation_shape: tuple[int, ...] | None
    gradient_norm: float  # of the parameters: a slope, not a curvature


@dataclass(frozen=True, kw_only=True)
class ModuleWiseCurvature(Result):
    """One entry a module, in the model's order."""

    modules: tuple[ModuleCurvature, ...]
    products: int

    def __getitem__(self, module: str) -> ModuleCurvature:
        for entry in self.modules:
            if entry.module == module:
                return entry
        names = ", ".join(entry.module for entry in self.modules)
        raise KeyError(f"there is no module {module!r}; there are {names}.")

    def __str__(self) -> str:
        lines = [f"{'module':<32} {'‖H‖_F':>20} {'tr H':>20} {'‖S‖_F':>20} {'tr S':>20}"]
        for entry in self.modules:
            cells = []
            for measure in (entry.parameters, entry.activation):
                if measure is None:
                    cells += ["–", "–"]
                    continue
                norm = Number(measure.norm, *measure.norm_interval)
                cells += [str(norm), str(Number(measure.trace, *measure.trace_interval))]
            lines.append(" ".join([f"{entry.module:<32}", *(f"{cell:>20}" for cell in cells)]))
        return "\n".join(lines)


@evaluated
def module_wise_curvature(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    loss: LossLike = "cross_entropy",
    probes: int = 8,
    seed: int = 0,
    budget: int | str | None = None,
) -> ModuleWiseCurvature:
    """True second derivatives of every module, with 95 % intervals from ``probes`` products each.

    Every module with parameters of its own is one block of the Hessian; every module that puts out
    a real tensor has the Hessian of the loss with respect to it. (x, y) is one batch, or x alone a
    mapping with labels.
    """
    # One batch is looked into, which lies in this process.
    problem = Problem(model, loss, paired(x, y), distributed=False)
    blocks = _module_blocks(problem)
    operator = CurvatureParts(problem, budget=budget)
    sketch = Sketch(operator, blocks, seed=seed)
    sketch.probe(range(len(blocks)), probes)
    energy = sketch.energies([[j] for j in range(len(blocks))])
    low, high = energy.interval()
    spectral = energy.spectral_interval()
    values, errors = sketch.traces()
    gradient = problem.gradient()
    of_parameters: dict[str, Any] = {}
    for j, block in enumerate(blocks):
        norms = [float(np.sqrt(max(float(a[0, j, j]), 0.0))) for a in (energy.value, low, high)]
        trace, reach = float(values[0, j]), _TAIL * float(errors[0, j])
        ends = [float(np.sqrt(max(float(a[0, j, j]), 0.0))) for a in spectral]
        measure = Measure(
            norm=norms[0],
            norm_interval=(norms[1], norms[2]),
            trace=trace,
            trace_interval=(trace - reach, trace + reach),
        )
        slope = float(torch.linalg.norm(gradient[block.indices]))
        of_parameters[block.name] = (measure, (ends[0], ends[1]), slope, block.size)
    of_outputs, products = activation_curvature(problem, probes=probes, seed=seed)
    entries = []
    for path, module in problem.model.named_modules():
        inner, output = of_parameters.get(path), of_outputs.get(path)
        if inner is None and output is None:
            continue
        entries.append(
            ModuleCurvature(
                module=path,
                type=type(module).__name__,
                size=inner[3] if inner else 0,
                parameters=inner[0] if inner else None,
                parameter_spectral_interval=inner[1] if inner else None,
                activation=output[0] if output else None,
                activation_shape=tuple(output[1].shape) if output else None,
                gradient_norm=inner[2] if inner else 0.0,
            )
        )
    return ModuleWiseCurvature(modules=tuple(entries), products=sketch.products + products)


def _module_blocks(problem: Problem) -> tuple[AtlasBlock, ...]:
    groups: dict[str, list[Any]] = {}
    for piece in problem.anatomy.slices:
        groups.setdefault(piece.parameter.rpartition(".")[0], []).append(piece)
    return tuple(
        AtlasBlock(name=path, role=path, layer=path, sublayer=path, slices=tuple(pieces))
        for path, pieces in groups.items()
    )


def activation_curvature(
    problem: Problem, *, probes: int, seed: int
) -> tuple[dict[str, tuple[Measure, Tensor, float]], int]:
    """Hessian of the first batch's loss with respect to every module's (last) output.

    Returns path → (norm and trace with intervals, the output itself, the norm of the gradient
    there), and the products used.
    """
    caught: dict[str, Tensor] = {}
    handles = []
    for path, module in problem.model.named_modules():

        def keep(_: nn.Module, arguments: Any, result: Any, path: str = path) -> None:
            for leaf in tree_flatten(result)[0]:
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad:
                    caught[path] = leaf
                    return

        handles.append(module.register_forward_hook(keep))
    batch = next(problem.batches())
    generator = torch.Generator(device="cpu").manual_seed(seed)
    measures: dict[str, tuple[Measure, Tensor, float]] = {}
    products = 0
    try:
        with problem.evaluating():
            leaves = problem.leaves()
            weights = problem.named_weights()
            fixed = {n: p.detach() for n, p in weights.items() if n not in leaves}
            raw = call(problem.model, {**leaves, **fixed}, batch.inputs)
            value = problem.loss.value(problem.read(raw, batch), batch.targets)
            paths = list(caught)
            slopes: Any = torch.autograd.grad(
                value, [caught[p] for p in paths], create_graph=True, allow_unused=True
            )
            for path, slope in track(list(zip(paths, slopes, strict=True)), "modules"):
                tensor = caught[path]
                if slope is None:
                    continue
                basis = orthonormal(tensor.shape, probes, generator, tensor)
                images = pulled([slope], [tensor], [basis])[0].detach()
                products += len(basis)
                measure = probe(images.unsqueeze(-1), basis.unsqueeze(-1), 1).measure
                measures[path] = (
                    measure,
                    tensor.detach(),
                    float(torch.linalg.norm(slope.detach())),
                )
    finally:
        for handle in handles:
            handle.remove()
    return measures, products
