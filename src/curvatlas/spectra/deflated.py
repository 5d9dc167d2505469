r"""Sums over a spectrum with the outliers taken out: what trace and Frobenius norm have in common.

Orthonormal vectors V grown by Lanczos capture the outliers, and what they contribute is known
exactly. The rest is sampled with probes u, uniform on the sphere of radius √d in the complement of
V (d its dimension). Probes drawn early stay valid when V grows later: A V is known, so with
P = I − VVᵀ the image A P u = A u − A V (Vᵀu) costs no product. Whether the next products go to V or
to probes is decided by which shortens the road to the tolerance.

Hutch++ (Meyer, Musco, Musco, Woodruff 2021) and its adaptive form (Persson, Cortinovis, Kressner
2022) split the work in this way with a random range; a Krylov space captures outliers in fewer
products (Chen and Hallman 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from curvatlas.budget import give_back
from curvatlas.linear_operator import LinearOperator
from curvatlas.spectra.checkpoint import Resumable, State
from curvatlas.spectra.estimate import Estimate
from curvatlas.spectra.requirements import refuse_asymmetric_images, require_finite
from curvatlas.spectra.vectors import VectorSpace

AT_WORK = 3  # vectors that one step makes and lets go
_LARGE = 2**24  # bytes of probes
_TOGETHER = 2**25  # bytes of probes that are drawn and multiplied together, beyond
_FEW = 8  # columns, which share a product's passes well
_BAND = 2**21  # entries of the probes that are worked on together


class DeflatedSampler(Resumable):
    """V, the probes and their images, and the next step; the quantity is up to subclasses.

    room: vectors of the operator's longer side that may be held at once. When they are used up V
    stays as it is, the probes go and leave their inner products, and further probes come in groups.
    Where the weights are spread, V, probes and images are this process's entries (``space``).
    """

    name: ClassVar[str]  # of the estimator
    group: ClassVar[type]  # a dataclass of the inner products of probes that were let go
    fewest_probes: ClassVar[int]
    outcome: Estimate
    vector_axes: ClassVar = {"rows": 1, "probes": 0, "images": 0}

    def __init__(
        self, op: LinearOperator, budget: int, random: torch.Generator, *, room: int, rtol: float
    ) -> None:
        self.op, self.budget, self.random, self.room, self.rtol = op, budget, random, room, rtol
        self.space = VectorSpace.of(op)
        # Probes (n, ·) and images (m, ·) in the pieces they came in: joining would hold them twice.
        self.probes: list[Tensor] = []
        self.images: list[Tensor] = []
        self.let_go: list[Any] = []
        self.goal = 0  # vectors that V is meant to have
        self.exhausted = False  # the Krylov space is invariant: deflation has given all it can

    @property
    def grown(self) -> int:
        """Vectors of V whose image is known."""
        raise NotImplementedError

    @property
    def growing(self) -> bool:
        """Whether V can still grow: nothing was let go, and there is room."""
        raise NotImplementedError

    @property
    def vectors_of_basis(self) -> int:
        """Vectors in memory for V and its images."""
        raise NotImplementedError

    def grow(self) -> None:
        """One more vector of V, or ``exhausted``."""
        raise NotImplementedError

    def advance(self, left: int) -> None:
        """Decide what comes next, with ``left`` products: ``goal``, ``probe`` or ``finish``."""
        raise NotImplementedError

    def grams(self) -> Any:
        """Inner products of the probes at hand, with V as it is."""
        raise NotImplementedError

    @property
    def held(self) -> int:
        """Probes at hand."""
        return sum(piece.shape[1] for piece in self.probes)

    @property
    def probe_count(self) -> int:
        return self.held + sum(len(group.lengths) for group in self.let_go)

    @property
    def missing(self) -> int:
        """Directions whose image is not at hand."""
        return self.op.shape[1] - self.grown - self.held

    def step(self) -> None:
        if self.deflating:
            self.grow()
        else:
            self.advance(self.budget - self.products)

    @property
    def deflating(self) -> bool:
        return self.grown < self.goal and self.growing

    def probe(self, count: int) -> int:
        """Draw and multiply up to ``count`` more probes in one call of the operator; how many.

        None where there is no room: then those at hand are let go, and that is the whole step, as
        the state kept for an interruption still holds them.
        """
        # A probe in the making: as it is drawn in float64, in the operator's precision, its image.
        each = 3 + (self.op.dtype != torch.float64)
        left = self.room - self.vectors_of_basis - AT_WORK - 2 * self.held
        if each * count > left and self.held > 1:
            self.let_go.append(self.grams())
            self.forget_probes()
            return 0
        # A product holds its columns several times.
        together = max(_FEW, _TOGETHER // max(self.space.longest * self.op.dtype.itemsize, 1))
        count = max(min(count, left // each, together), 1)
        fresh = self.space.normal(count, self.random)
        if fresh.numel() * fresh.element_size() > _LARGE:
            give_back()  # what the last steps left in pieces would stand beside the products
        images = self.space.times(self.op, fresh)
        require_finite(images, space=self.space)
        if self.probe_count == 0:
            refuse_asymmetric_images(self.op, fresh, images, self.name, space=self.space)
        self.probes.append(fresh)
        self.images.append(images)
        return count

    def forget_probes(self) -> None:
        self.probes, self.images = [], []

    def finish(self, outcome: Estimate) -> None:
        self.outcome, self.done = outcome, True

    def by_probes(self, ratio: float) -> tuple[float, int]:
        """Probes needed in all, and those still missing, if nothing more is deflated.

        ratio: of the error to the tolerance; the error falls as 1/√m.
        """
        needed = min(max(self.probe_count * ratio**2 * 1.02, self.fewest_probes), 1e9)
        return needed, max(int(np.ceil(needed)) - self.probe_count, 1)

    def bands(self, length: int) -> Iterator[slice]:
        """Entries of the probes that are worked on together: projected vectors never exist whole.

        A thirty-second of what may be held: two bands beside it are no matter.
        """
        step = min(_BAND, self.room * length // 32) // self.held + 1
        return (slice(start, start + step) for start in range(0, length, step))

    def state(self) -> State:
        tensors = {"random": self.random.get_state()}
        for i, (probes, images) in enumerate(zip(self.probes, self.images, strict=True)):
            tensors.update({f"probes{i}": probes, f"images{i}": images})
        for i, group in enumerate(self.let_go):
            for field in fields(self.group):
                array = np.array(getattr(group, field.name), order="C")
                tensors[f"{field.name} of group {i}"] = torch.from_numpy(array)
        return tensors, {
            "exhausted": int(self.exhausted),
            "goal": self.goal,
            "pieces": len(self.probes),
            "groups": len(self.let_go),
        }

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        pieces = range(int(numbers["pieces"]))
        self.forget_probes()
        self.probes = [tensors[f"probes{i}"].to(self.op.device) for i in pieces]
        self.images = [tensors[f"images{i}"].to(self.op.device) for i in pieces]
        names = [field.name for field in fields(self.group)]
        self.let_go = [
            self.group(**{name: tensors[f"{name} of group {i}"].numpy() for name in names})
            for i in range(int(numbers["groups"]))
        ]
        self.random.set_state(tensors["random"])
        self.exhausted, self.goal = bool(numbers["exhausted"]), int(numbers["goal"])
