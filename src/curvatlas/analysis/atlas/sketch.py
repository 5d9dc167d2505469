"""Fill the map column by column: one product gives all rows of H, H_o and H_f at once.

A probe that lives in column block j gives H_ij z for every row block i. Only small Gram matrices of
these products are kept, (rows, q, q) a column and part, and the leading directions of every row
block, which make the probes of the columns to come better than random ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from curvatlas.analysis.atlas.result import AtlasBlock
from curvatlas.fits import Array
from curvatlas.linear_operator import PARTS
from curvatlas.operators.curvature import CurvatureParts
from curvatlas.precision import in_float64
from curvatlas.progress import bar

# The variance is itself estimated from M pairs, with a relative error near √(2/M). Adding twice
# that keeps 95 % coverage for spectra from flat to rank one (tests/analysis/atlas/test_sketch).
_CAUTION = 2.0


@dataclass(frozen=True)
class Energy:
    """Estimates of squared Frobenius norms, one an entry: all arrays have the same shape."""

    value: Array  # ‖A‖_F²
    variance: Array
    fourth: Array  # ‖AᵀA‖_F², the fourth power of the Schatten-4 norm
    pairs: Array  # probe pairs behind ``variance``; infinite where the value is exact
    seen: Array  # largest singular value among the probed directions, squared

    def interval(self) -> tuple[Array, Array]:
        """95 % interval of ‖A‖_F²: a scaled χ² with the estimated mean and variance."""
        variance = self.variance * (1 + _CAUTION * np.sqrt(2 / np.maximum(self.pairs, 1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            freedom = np.clip(2 * self.value**2 / variance, 0.5, 1e9)
        freedom = np.where(variance > 0, freedom, 1e9)
        low = self.value * freedom / chi2.ppf(0.975, freedom)
        high = self.value * freedom / chi2.ppf(0.025, freedom)
        exact = variance == 0
        return np.where(exact, self.value, low), np.where(exact, self.value, high)

    def spectral_interval(self) -> tuple[Array, Array]:
        """95 % bracket of ‖A‖₂²: at most ‖A‖_F², at least ‖B‖_F²/tr B and what was seen.

        ‖B‖_F² ≤ ‖A‖₂² tr B gives the lower end. The tempting upper end ‖B‖_F is not used: few
        pairs underestimate it badly when one direction dominates.
        """
        _, high = self.interval()
        fourth = self.fourth / (1 + _CAUTION * np.sqrt(2 / np.maximum(self.pairs, 1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            low = np.where(high > 0, fourth / high, 0.0)
        return np.minimum(np.maximum(low, self.seen), high), high

    def relative_error(self) -> Array:
        """Standard error of ‖A‖_F (not squared), relative to it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            result = np.sqrt(self.variance) / (2 * self.value)
        return np.where(self.value > 0, result, 0.0)


def energy_of(grams: Array, size: int, *, longest: float | None = None) -> Energy:
    r"""From Gram matrices (..., q, q) of q orthonormal probes in a space of dimension ``size``.

    Q random orthonormal (n, q), G = (A Q)ᵀ(A Q), B = AᵀA and T = (n/q) tr G:

        E T = ‖A‖_F²,   Var T = (2/q) · n(n−q) · E[G_kl²],  k ≠ l,

    because E[G_kl²] = (‖B‖_F² − tr²B/n) / ((n−1)(n+2)) for two orthonormal random vectors. The
    q(q−1)/2 pairs estimate the variance far better than the spread of q numbers does, and give
    ‖B‖_F², from which ‖B‖_F²/tr B ≤ ‖A‖₂² ≤ tr B brackets the largest singular value. With q = n
    all is exact.

    longest: given for ``coded_probes``, whose squared lengths are 1 on average and this
        at most. Their pairs still estimate the variance, too high rather than too low: the pairs
        that matter most stand in different probes.
    """
    q = grams.shape[-1]
    diagonal = np.diagonal(grams, axis1=-2, axis2=-1)
    trace = diagonal.sum(-1)
    value = size / q * trace
    squares = grams**2
    pairs = q * (q - 1) / 2
    seen = np.linalg.eigvalsh(grams)[..., -1] if q else np.zeros_like(value)
    seen = np.maximum(seen, 0.0) / (longest or 1.0)
    if q >= size:  # every direction was probed
        fourth = squares.sum((-2, -1))
        return Energy(value, np.zeros_like(value), fourth, np.full_like(value, np.inf), seen)
    off = (squares.sum((-2, -1)) - (diagonal**2).sum(-1)) / (2 * pairs)  # mean of G_kl², k < l
    # Half the spread of the diagonal has the same mean; it notices a direction that few probes hit.
    spread = diagonal.var(-1, ddof=1) / 2 if longest is None else off
    variance = 2 / q * size * (size - q) * np.maximum(off, (off + spread) / 2)
    fourth = (size - 1) * (size + 2) * off + value**2 / size
    return Energy(value, variance, fourth, np.full_like(value, pairs), seen)


def pooled(parts: list[Energy], weights: list[float]) -> Energy:
    """Σ w_k E_k of independent estimates: probe groups of one matrix (weights that sum to 1), or
    matrices side by side (weights 1)."""

    def combined(arrays: list[Array], power: int = 1) -> Array:
        return np.asarray(sum(w**power * a for w, a in zip(weights, arrays, strict=True)))

    variance = combined([p.variance for p in parts], 2)
    # The pairs count with the share of the variance they stand for.
    with np.errstate(divide="ignore", invalid="ignore"):
        noise = combined([p.variance**2 / p.pairs for p in parts], 4)
        pairs = np.where(noise > 0, variance**2 / noise, np.inf)
    return Energy(
        combined([p.value for p in parts]),
        variance,
        combined([p.fourth for p in parts]),
        pairs,
        np.max(np.stack([p.seen for p in parts]), axis=0),
    )


_FULL_UP_TO = 512  # entries of a block whose whole covariance is kept
MOST = 40  # directions kept of a larger block
WAITING = 0.6  # samples, as a share of these, gathered before they are merged
_FEWEST = 4  # directions worth keeping
_ENOUGH = 3 * MOST  # samples, after which more would cost time and teach little


class Directions:
    """The leading directions of one block's entries, from samples of its rows.

    kept: how many of a block of more than 512 entries; fewer than 4 are not worth the memory.
    """

    def __init__(
        self, size: int, *, dtype: torch.dtype, device: torch.device, kept: int = MOST
    ) -> None:
        self.size = size
        self._most = kept
        self.samples = 0
        small = size <= _FULL_UP_TO
        empty = torch.zeros(0, size, dtype=dtype, device=device)
        self._covariance = empty.new_zeros(size, size) if small else None
        self._kept = empty
        self._waiting: list[Tensor] = []

    @property
    def learns(self) -> bool:
        return self.samples < _ENOUGH and (self._covariance is not None or self._most >= _FEWEST)

    def add(self, samples: Tensor) -> None:
        """samples: (k, n), each scaled by how much it matters."""
        if not self.learns:
            return
        self.samples += len(samples)
        if self._covariance is not None:
            self._covariance.addmm_(samples.T, samples)
            return
        self._waiting.append(samples)
        if sum(len(block) for block in self._waiting) >= WAITING * self._most:
            self._merge()

    def _merge(self) -> None:
        """Keep the leading right singular vectors, scaled, of all samples so far, as rows."""
        if not self._waiting:
            return
        stacked = torch.cat([self._kept, *self._waiting])  # (k, n)
        self._waiting = []
        values, vectors = torch.linalg.eigh(in_float64(stacked @ stacked.T))
        vectors = vectors.flip(1)[:, : min(self._most, int((values > 1e-6 * values[-1]).sum()))]
        self._kept = vectors.T.to(stacked.dtype).to(stacked.device) @ stacked

    def basis(self) -> Tensor:
        """(n, r) orthonormal, leading direction first; r = 0 before the first sample."""
        if not self.samples:
            return torch.zeros(self.size, 0, dtype=self._kept.dtype)
        if self._covariance is not None:
            vectors: Tensor = torch.linalg.eigh(self._covariance.cpu().double()).eigenvectors
            return vectors.flip(1).to(self._kept.dtype)
        self._merge()
        return orthonormal(self._kept.T.cpu())

    def state(self) -> dict[str, Tensor]:
        """What was learnt so far, in tensors that later samples do not change."""
        held = {"kept": self._kept}
        if self._covariance is not None:
            held["covariance"] = self._covariance.clone()
        held |= {f"waiting{i:03}": block for i, block in enumerate(self._waiting)}
        return held

    def restore(self, held: dict[str, Tensor], samples: int) -> None:
        self.samples, place = samples, self._kept.device
        self._kept = held["kept"].to(place)
        if self._covariance is not None:
            self._covariance = held["covariance"].to(place)
        self._waiting = [held[name].to(place) for name in sorted(held) if name[0] == "w"]


def orthonormal(columns: Tensor) -> Tensor:
    """The orthonormal factor of a tall (n, k) matrix."""
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def coded_probes(basis: Tensor, count: int, generator: torch.Generator) -> Tensor:
    r"""(n, q) orthogonal probes x_c that know where a column's curvature lies, E XXᵀ = I.

    H is symmetric, so the products H_ba z_a of other columns are samples of the row space of H_ab.
    Their leading directions u_1, …, u_r (``basis``) are an approximate eigenbasis of B = H_abᵀH_ab
    for every row a. Dealt out in turn to q classes, with random signs ε and a random share w of the
    complement,

        x_c = Σ_{i ∈ c} ε_i u_i + √((n − r)/q) w_c,   E Σ_c ‖H_ab x_c‖² = ‖H_ab‖_F²,

    only pairs inside a class make noise, Var = 2 Σ_c Σ_{i ≠ j ∈ c} B_ij²: none of the q leading
    directions disturbs another, and no product more is needed than for isotropic probes.
    """
    size, rank = basis.shape
    probes = torch.zeros(size, count, dtype=basis.dtype)
    rest = size - rank
    if rest > 0:
        # Isotropic where nothing is known; fewer columns where the complement has fewer dimensions.
        some = min(count, rest)
        draw = torch.randn(size, some, generator=generator, dtype=basis.dtype, device="cpu")
        draw -= basis @ (basis.T @ draw)
        probes[:, :some] = orthonormal(draw) * (rest / some) ** 0.5
    if rank > 0:
        signs = (
            torch.randint(0, 2, (rank,), generator=generator, device="cpu").to(basis.dtype) * 2 - 1
        )
        classes = torch.zeros(rank, count, dtype=basis.dtype)
        places = torch.arange(rank)
        classes[places, places % count] = signs
        probes += basis @ classes
    return probes


_UNSEEN = 1e-5  # of the largest norm: below it the products of one column are rounding
_SAMPLES = 3  # directions that one column's products teach about each row block


@dataclass(frozen=True)
class ProbeGroup:
    """q orthogonal probes X of one column block of size n; Q = √(q/n) X, orthonormal on average."""

    size: int
    grams: Array  # (parts, rows, q, q): Gram matrices of H_ij Q
    inner: Array  # (parts, q, q): Qᵀ H_jj Q
    longest: float  # largest squared length of a column of Q
    noise: float  # mean relative variance of the energies

    @property
    def probes(self) -> int:
        return int(self.inner.shape[-1])

    def energy(self, grams: Array) -> Energy:
        return energy_of(grams, self.size, longest=self.longest)

    @property
    def precision(self) -> float:
        """What the group counts for beside others; infinite where it is exact."""
        return np.inf if self.probes >= self.size else 1 / max(self.noise, 1e-12)


class Sketch:
    """All products so far, and the energies they estimate."""

    def __init__(
        self, operator: CurvatureParts, blocks: Sequence[AtlasBlock], *, seed: int
    ) -> None:
        self.operator = operator
        self.blocks = tuple(blocks)
        self.groups: list[list[ProbeGroup]] = [[] for _ in blocks]
        self._generator = torch.Generator(device="cpu").manual_seed(seed)
        sizes = [block.size for block in blocks]
        order = torch.cat([block.indices for block in blocks])
        in_order = bool((order == torch.arange(len(order))).all())
        # Rows of fused parameters are regrouped into blocks; None where they already are.
        self._order = None if in_order else order.to(operator.device)
        self._sizes = sizes
        # A quarter of the budget, at most, for what the columns teach each other.
        vectors = operator.budget / 4 / (sum(sizes) * operator.dtype.itemsize)
        kept = min(MOST, int(vectors / (1 + WAITING)))
        self._directions = [
            Directions(size, dtype=operator.dtype, device=operator.device, kept=kept)
            for size in sizes
        ]

    @property
    def products(self) -> int:
        return sum(group.probes for groups in self.groups for group in groups)

    def probe(self, columns: Sequence[int], probes: int) -> None:
        """Draw ``probes`` more orthonormal probes in each of the ``columns``."""
        wanted = [min(probes, self._sizes[j]) for j in columns]
        with bar("atlas", total=sum(wanted)) as progress:
            for j, count in zip(columns, wanted, strict=True):
                self.probe_column(j, count)
                progress.update(count)

    def probe_column(self, j: int, probes: int) -> None:
        """More probes in one column, unless it is exact already."""
        if not self.is_exact(j):
            self.groups[j].append(self._measure(j, min(probes, self._sizes[j])))

    def is_exact(self, j: int) -> bool:
        """Whether every direction of column j was probed."""
        return any(group.probes >= group.size for group in self.groups[j])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything the next probe depends on, and all that the energies are made of."""
        tensors = {"random": self._generator.get_state()}
        listed = [(j, group) for j, groups in enumerate(self.groups) for group in groups]
        for index, (_, group) in enumerate(listed):
            tensors[f"grams{index}"] = torch.from_numpy(group.grams)
            tensors[f"inner{index}"] = torch.from_numpy(group.inner)
        for j, directions in enumerate(self._directions):
            tensors |= {f"learnt{j}.{name}": held for name, held in directions.state().items()}
        return tensors, {
            "groups": [[j, group.size, group.longest, group.noise] for j, group in listed],
            "samples": [directions.samples for directions in self._directions],
        }

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self._generator.set_state(tensors["random"])
        self.groups = [[] for _ in self.blocks]
        for index, (j, size, longest, noise) in enumerate(numbers["groups"]):
            grams, inner = (tensors[f"{word}{index}"].numpy() for word in ("grams", "inner"))
            self.groups[j].append(ProbeGroup(int(size), grams, inner, longest, noise))
        for j, (directions, samples) in enumerate(
            zip(self._directions, numbers["samples"], strict=True)
        ):
            start = f"learnt{j}."
            held = {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}
            directions.restore(held, int(samples))

    def _measure(self, j: int, count: int) -> ProbeGroup:
        block, operator = self.blocks[j], self.operator
        size = block.size
        if count >= size:
            draw = torch.eye(size, dtype=torch.float64)
        else:
            draw = coded_probes(self._directions[j].basis(), count, self._generator)
            draw *= (count / size) ** 0.5
        basis = draw.to(operator.device, operator.dtype)  # (n, q)
        layout = operator.problem.layout
        results = operator.parts(scatter(block, basis.T, operator), layout.names)
        grams = np.empty((len(PARTS), len(self.blocks), count, count))
        inner = np.empty((len(PARTS), count, count))
        for p, part in enumerate(PARTS):
            for i, piece in enumerate(self._pieces(results[part])):
                # In the model's own precision: a float64 copy of ten million rows costs more than
                # the product, and 1e-6 is far below the probes' own error.
                grams[p, i] = (piece @ piece.T).cpu().double().numpy()
                if i == j:
                    inner[p] = (piece @ basis).cpu().double().numpy()
        self._learn(j, results, grams)
        longest = float(draw.square().sum(0).max())
        noise = _noise(energy_of(grams, size, longest=longest))
        return ProbeGroup(size, grams, (inner + inner.swapaxes(-1, -2)) / 2, longest, noise)

    def _pieces(self, rows: Tensor) -> Sequence[Tensor]:
        """(q, P) → (q, size) for every block."""
        if self._order is not None:
            rows = rows.index_select(1, self._order)
        return torch.split(rows, self._sizes, dim=1)

    def _learn(self, j: int, results: dict[str, Tensor], grams: Array) -> None:
        """Keep what the products of column j say about the row spaces of all other columns."""
        norms = np.sqrt(np.trace(grams[1:], axis1=-2, axis2=-1))  # (2, rows): each weighs the same
        floor = _UNSEEN * np.sqrt(np.trace(grams[0], axis1=-2, axis2=-1).max())
        scale = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > floor)
        outer, functional = (self._pieces(results[part]) for part in PARTS[1:])
        cross = np.stack(
            [(a @ b.T).cpu().double().numpy() for a, b in zip(outer, functional, strict=True)]
        )
        both = np.block([[grams[1], cross], [cross.swapaxes(-1, -2), grams[2]]])  # (rows, 2q, 2q)
        scale = np.repeat(scale.T, grams.shape[-1], axis=1)  # (rows, 2q)
        vectors = np.linalg.eigh(scale[:, :, None] * both * scale[:, None, :])[1]
        leading = vectors[..., ::-1][..., :_SAMPLES].swapaxes(-1, -2) * scale[:, None, :]
        mixed = torch.from_numpy(leading).to(outer[0])  # (rows, samples, 2q)
        q = grams.shape[-1]
        for i, directions in enumerate(self._directions):
            # Its own probes would no longer be independent of what was learnt from them.
            if i == j or not directions.learns or not scale[i].any():
                continue
            directions.add(mixed[i, :, :q] @ outer[i] + mixed[i, :, q:] @ functional[i])

    # --- energies -------------------------------------------------------------------------------

    def energies(self, groups: Sequence[Sequence[int]]) -> Energy:
        """‖H[a, b]‖_F² for groups a, b of blocks: arrays (parts, groups, groups).

        Uses both triangles: an entry and its transpose are probed independently.
        """
        indicator = np.zeros((len(groups), len(self.blocks)))
        for a, group in enumerate(groups):
            indicator[a, list(group)] = 1
        per_column = [self._column(j, indicator) for j in range(len(self.blocks))]
        one_way = [pooled([per_column[j] for j in group], [1.0] * len(group)) for group in groups]
        full = Energy(*(np.stack([getattr(e, f) for e in one_way], -1) for f in _FIELDS))
        return _both_triangles(full, self._weights(groups))

    def _column(self, j: int, indicator: Array) -> Energy:
        """(parts, row groups) of one column, pooled over its probe groups."""
        groups = self._counted(j)
        parts = [
            group.energy(np.einsum("ab,pbkl->pakl", indicator, group.grams)) for group in groups
        ]
        return pooled(parts, _shares(groups))

    def _counted(self, j: int) -> list[ProbeGroup]:
        """The groups of column j that say something: the exact one alone, if there is one."""
        exact = [group for group in self.groups[j] if group.probes >= group.size]
        return exact[:1] or self.groups[j]

    def _weights(self, columns: Sequence[Sequence[int]]) -> Array:
        """How well a column group is known: the least precision of its blocks."""
        precision = [
            sum(group.precision for group in self._counted(j)) for j in range(len(self.blocks))
        ]
        return np.array([min(precision[j] for j in group) for group in columns])

    def traces(self) -> tuple[Array, Array]:
        """tr H_jj and its standard error: arrays (parts, blocks).

        Var[(n/q) tr QᵀAQ] ≤ (2/q) ‖A‖_F², and ‖A‖_F² is known from the map itself.
        """
        values = np.zeros((len(PARTS), len(self.blocks)))
        errors = np.zeros_like(values)
        for j in range(len(self.groups)):
            groups = self._counted(j)
            for g, share in zip(groups, _shares(groups), strict=True):
                n, q = g.size, g.probes
                values[:, j] += share * n / q * np.trace(g.inner, axis1=-2, axis2=-1)
                frobenius = n / q * np.trace(g.grams[:, j], axis1=-2, axis2=-1)
                shrink = n * (n - q) / max((n - 1) * (n + 2), 1)
                errors[:, j] += share**2 * 2 / q * shrink * frobenius
        return values, np.sqrt(errors)


def _noise(energy: Energy) -> float:
    """Mean relative variance over entries and parts, those of rounding apart."""
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = energy.variance / energy.value**2
    floor = _UNSEEN**2 * energy.value.max(axis=(-2, -1), keepdims=True)
    return float(relative[energy.value > floor].mean()) if (energy.value > floor).any() else 0.0


def _shares(groups: Sequence[ProbeGroup]) -> list[float]:
    """Weights of independent groups, by their precision averaged over the map.

    An entry's own variance must not weigh it: few probes estimate both, and low with low.
    """
    if len(groups) == 1:
        return [1.0]
    precision = np.array([group.precision for group in groups])
    return [float(share) for share in precision / precision.sum()]


_FIELDS = ("value", "variance", "fourth", "pairs", "seen")


def _both_triangles(energy: Energy, probes: Array) -> Energy:
    """Average an entry with its transpose, weighted by probes; the diagonal stays as it is."""
    transposed = Energy(*(np.swapaxes(getattr(energy, f), -1, -2) for f in _FIELDS))
    here, there = np.broadcast_arrays(probes[None, :], probes[:, None])
    with np.errstate(invalid="ignore"):
        weight = np.where(
            np.isinf(here), np.where(np.isinf(there), 0.5, 1.0), here / (here + there)
        )
    np.fill_diagonal(weight, 0.5)
    weight, rest = weight[None], 1 - weight[None]
    diagonal = np.eye(len(probes), dtype=bool)[None]
    variance = weight**2 * energy.variance + rest**2 * transposed.variance
    variance = np.where(diagonal, energy.variance, variance)
    pairs = np.where(diagonal, energy.pairs, energy.pairs + transposed.pairs)
    return Energy(
        weight * energy.value + rest * transposed.value,
        variance,
        weight * energy.fourth + rest * transposed.fourth,
        np.where(variance == 0, np.inf, pairs),
        np.maximum(energy.seen, transposed.seen),
    )


def scatter(block: AtlasBlock, rows: Tensor, operator: CurvatureParts) -> dict[str, Tensor]:
    """(K, size of the block) → parameter name → (K, *shape), zero outside the block."""
    layout = operator.problem.layout
    place = {name: k for k, name in enumerate(layout.names)}
    result: dict[str, Tensor] = {}
    start = 0
    for piece in block.slices:
        k = place[piece.parameter]
        name, size = layout.names[k], layout.sizes[k]
        if name not in result:
            result[name] = rows.new_zeros(len(rows), size)
        local = (piece.indices - layout.starts[k]).to(rows.device)
        result[name].index_copy_(1, local, rows[:, start : start + piece.size])
        start += piece.size
    return {
        name: column.reshape(-1, *layout.shapes[place[name]]) for name, column in result.items()
    }
