r"""Traces of H and H_o by role for models too large for a map, all roles from the same probes.

H_o = Σ_b c_b J_bᵀ Λ_b J_b needs no product. With Λ_b = B_b B_bᵀ and ξ normal in the output space

    E (J_bᵀ B_b ξ)_i² = (J_bᵀ Λ_b J_b)_ii,

so one backward pass gives a sample of every role's trace; samples of the data are taken apart,
which leaves their cross terms out of the noise. For H a probe is a product, read off role by role.
Known eigenvectors Q take their part exactly, and their weight out of the noise:

    tr(E_r H) = tr(E_r H Q Qᵀ) + E[(E_r z)ᵀ H (I − Q Qᵀ) z].

Intervals are Student's over the probes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from scipy import stats
from torch import Tensor

from curvatlas.analysis.atlas_blocks import blocks_of
from curvatlas.anatomy import Slice
from curvatlas.errors import ProblemError
from curvatlas.operators.base import LinearOperator
from curvatlas.precision import sum_in_float64
from curvatlas.problem import Batch, Problem
from curvatlas.progress import bar
from curvatlas.results import Result
from curvatlas.spectra.estimate import Estimate
from curvatlas.spectra.participation import Participation

_CONFIDENCE = 0.95
_LAYER = re.compile(r"^blocks\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class RoleTraces(Result):
    """Samples of every role's trace; their mean plus what is known exactly is the estimate."""

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
            quantity="trace", value=value, interval=_around(value, sums), products=self.products,
            converged=len(sums) > 1, exact=False,
            method=f"{len(sums)} normal probes, {self.products} {self.unit}",
        )  # fmt: skip

    def pooled(self) -> RoleTraces:
        """Roles that were taken apart by layer, over all layers."""
        names = [_LAYER.sub("", role) for role in self.roles]
        roles = tuple(dict.fromkeys(names))
        places = [[k for k, name in enumerate(names) if name == role] for role in roles]
        return replace(
            self,
            roles=roles,
            sizes=tuple(sum(self.sizes[k] for k in own) for own in places),
            samples=torch.stack([self.samples[:, own].sum(1) for own in places], dim=1),
            known=torch.stack([self.known[own].sum() for own in places]),
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
    """tr H_o by role, one backward pass a probe: probes ``first`` to ``first + probes``.

    layers: every layer's roles apart ("blocks.3.key"); ``RoleTraces.pooled`` puts them together
    """
    problem.require_one_process("a trace by backward passes over the samples")
    roles = pooled_roles(problem, layers=layers)
    samples = torch.zeros(probes, len(roles), dtype=torch.float64)
    pieces = _samples_of(problem)
    with problem.evaluating(), bar("tr H_o", total=len(pieces)) as progress:
        for place, piece in enumerate(pieces):
            draw = torch.Generator().manual_seed(seed * 1_000_003 + first * 1009 + place)
            share = piece.count / problem.normaliser
            leaves = problem.leaves()
            outputs = problem.outputs(piece, leaves)
            for number in range(probes):
                noise = torch.randn(outputs.shape, generator=draw, device="cpu").to(outputs)
                seed_of = problem.loss.root_product(outputs, piece.targets, noise)
                if seed_of is None:
                    raise ProblemError(
                        f"no root of the curvature of {problem.loss.name!r} is known: "
                        "use role_traces(GaussNewton(problem)), by products."
                    )
                found = torch.autograd.grad(
                    outputs, list(leaves.values()), seed_of, retain_graph=number < probes - 1,
                    allow_unused=True,
                )  # fmt: skip
                squares = problem.layout.join(found, like=outputs).square_()
                samples[number] += share * _by_role(squares, roles)
            del outputs, leaves
            progress.update(1)
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
    """tr of ``op`` by role of ``problem``, one product a probe and one for each deflated vector.

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

    ``spectra.participation`` for vectors that fill the memory, in any stored precision.
    """
    roles = pooled_roles(problem)
    mass = torch.zeros(vectors.shape[1], len(roles), dtype=torch.float64)
    fourth = torch.zeros(vectors.shape[1], dtype=torch.float64)
    for k in range(vectors.shape[1]):
        squares = vectors[:, k].float().square_()
        fourth[k] = sum_in_float64(squares.square())
        mass[k] = _by_role(squares, roles)
    whole = mass.sum(1, keepdim=True)
    mass /= whole
    return Participation(
        groups=tuple(roles),
        mass=mass,
        ratio=1 / mass.square().sum(1),
        entries=whole.squeeze(1).square() / fourth,
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
        part=part, roles=tuple(roles), sizes=sizes, samples=samples, known=known,
        products=products, unit=unit,
    )  # fmt: skip


def _samples_of(problem: Problem) -> list[Batch]:
    """Single samples where the loss adds up over them, else the batches."""
    if not problem.separable:
        return list(problem.batches())
    return [piece for batch in problem.batches() for piece in batch.singles(problem.loss.count)]


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
    count = len(samples)
    if count < 2:
        return float("-inf"), float("inf")
    reach = stats.t.ppf(0.5 + _CONFIDENCE / 2, count - 1) * float(samples.std()) / count**0.5
    return value - float(reach), value + float(reach)
