r"""The third derivative T_ijk = ∂³L/∂θ_i∂θ_j∂θ_k of a Problem, through its contractions.

T[v, ·, ·] is the rate at which the Hessian changes along v, a symmetric matrix like H itself:

    T[u, v, ·] = ∂(uᵀ H(θ) v)/∂θ = (d/ds) H(θ + s v) u  at s = 0.

Every pass is a backward pass. PyTorch's fused norms are wrong from the third derivative on, with no
error, so that norms are written out (``problem/smooth_norms.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.engines.autograd.linearisation import HessianLinearisation
from curvatlas.engines.kept import KeptLinearisations
from curvatlas.errors import DifferentiationError, NonFiniteError, ProblemError
from curvatlas.operators.curvature import AutogradLinearise, CurvatureOperator
from curvatlas.operators.engine import probe_batch
from curvatlas.operators.probes import probe_third_derivative
from curvatlas.problem import Batch, Problem
from curvatlas.problem.smooth_norms import SmoothNorms


class HessianDerivativeLinearisation(HessianLinearisation):
    """T[v, u, ·] = ∂(uᵀ H v)/∂θ on the kept graph of H v, for one v: 12 units, a gradient is 3."""

    def __init__(
        self,
        problem: Problem,
        batch: Batch,
        names: Sequence[str],
        *,
        direction: Mapping[str, Tensor],
    ) -> None:
        self._direction = direction  # parameter name → its piece of v; those absent are zero
        super().__init__(problem, batch, list(dict.fromkeys([*names, *direction])))

    def _predicted(self, logit_room: int | None) -> Any:
        with SmoothNorms():
            return self._problem.outputs(self.batch, self.leaves)

    def _build(self) -> None:
        with SmoothNorms():
            super()._build()
        used = [
            (slope, self._direction[name])
            for name, slope in self._slopes.items()
            if slope is not None and name in self._direction
        ]
        curved: Sequence[Tensor | None] = [None] * len(self._names)
        if used:
            curved = torch.autograd.grad(
                [slope for slope, _ in used],
                list(self.leaves.values()),
                [piece for _, piece in used],
                create_graph=True,
                allow_unused=True,
            )
        self._keep(dict(zip(self._names, curved, strict=True)))


class HessianDerivative(CurvatureOperator):
    """T[v, ·, ·] (P, P): how the Hessian changes along v, to first order.

    A symmetric operator with the products, views, batches and checks of ``ca.Hessian``. The graph
    of H v is kept, so that further products with the same v cost a backward pass each.
    """

    def __init__(
        self,
        problem: Problem,
        direction: Tensor,
        *,
        budget: int | str | None = None,
        checks: bool = True,
    ) -> None:
        if problem.checkpoint_activations:
            raise ProblemError(
                "checkpointed blocks can be differentiated twice, not three times: make the "
                "Problem without checkpoint_activations."
            )
        super().__init__(problem, budget=budget, checks=checks)
        self.direction = checked_vector(problem, direction, "the direction")

    def content(self) -> Any:
        return [*super().content(), self.direction]

    def _linearise(self) -> AutogradLinearise:
        layout = self.problem.layout
        pieces = layout.split(self.direction.unsqueeze(-1))
        direction = {
            name: piece.squeeze(0)
            for name, piece in zip(layout.names, pieces, strict=True)
            if bool(piece.any())
        }

        def linearise(problem: Problem, batch: Batch, names: Sequence[str]) -> Any:
            return HessianDerivativeLinearisation(problem, batch, names, direction=direction)

        return linearise

    def _start(self, names: list[str]) -> KeptLinearisations:
        try:
            kept = super()._start(names)
        except DifferentiationError as error:
            message = str(error).replace("second derivative is not", "third derivative is not")
            raise DifferentiationError(message) from error
        if self.checks:

            def linearise(problem: Problem, batch: Batch, direction: Mapping[str, Tensor]) -> Any:
                return HessianDerivativeLinearisation(problem, batch, names, direction=direction)

            sample = probe_batch(self.problem)
            probe_third_derivative(self.problem, sample, names, linearise, room=self.budget // 4)
        return kept

    def _on(self, problem: Problem) -> HessianDerivative:
        return HessianDerivative(problem, self.direction, budget=self.budget, checks=False)


class ThirdDerivative:
    """T = ∂³L/∂θ³, a symmetric tensor (P, P, P) known through its contractions.

    >>> T = ThirdDerivative(problem)             # doctest: +SKIP
    >>> T(v)                                     # doctest: +SKIP
    >>> T(u, v)                                  # doctest: +SKIP
    >>> T.along(v)                               # doctest: +SKIP

    T(v) = T[v, v, ·] and T(u, v) = T[u, v, ·] are flat vectors (P,), and ``along(v)`` is the
    operator T[v, ·, ·] = dH/ds along v. ``T[u, v]`` says the same as ``T(u, v)``.

    budget: memory for graphs, as bytes or "2GB".
    checks: on first use, those of ``ca.Hessian`` and a comparison with differences of H v.
    """

    def __init__(
        self, problem: Problem, *, budget: int | str | None = None, checks: bool = True
    ) -> None:
        self.problem, self._budget, self.checks = problem, budget, checks
        self.shape = (problem.size,) * 3
        self.products = 0  # vectors T[u, v, ·] computed so far
        self._last: HessianDerivative | None = None
        self._checked: object = None

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' precision, in which all vectors are."""
        return self.problem.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters lie, and all vectors."""
        return self.problem.device

    def along(self, direction: Tensor) -> HessianDerivative:
        """T[v, ·, ·], the Hessian's derivative along v, as an operator."""
        direction = checked_vector(self.problem, direction, "the direction")
        if self._last is not None and torch.equal(self._last.direction, direction):
            return self._last
        version = self.problem.weights_version()
        self._last = None  # its graphs go before new ones are made
        self._last = HessianDerivative(
            self.problem,
            direction,
            budget=self._budget,
            checks=self.checks and self._checked != version,
        )
        self._checked = version
        return self._last

    def __call__(self, u: Tensor, v: Tensor | None = None) -> Tensor:
        """T[u, v, ·] (P,), with v = u where it is left out."""
        u = checked_vector(self.problem, u, "u")
        v = u if v is None else checked_vector(self.problem, v, "v")
        self.products += 1
        return self.along(v) @ u

    def __getitem__(self, key: tuple[Any, ...]) -> Tensor:
        """``T[u, v]`` or ``T[u, v, :]``: the same as ``T(u, v)``."""
        vectors = key if isinstance(key, tuple) else (key,)
        if len(vectors) == 3 and isinstance(vectors[2], (slice, type(Ellipsis))):
            vectors = vectors[:2]
        if len(vectors) != 2:
            raise TypeError(
                f"T[u, v] takes two vectors, got {len(vectors)}: T[u, v, w] is T(u, v) @ w, and "
                "T.along(v) the operator T[v, ·, ·]."
            )
        return self(*vectors)

    def eigenvalue_rate(self, vectors: Tensor, direction: Tensor | None = None) -> Tensor:
        r"""dλ/ds of eigenvalues of H along θ + s d: the eigenvalues of QᵀT[d, ·, ·]Q, ascending.

        One vector q (P,) gives T[q, q, d] (first-order perturbation theory). A multiple eigenvalue
        splits: with a basis Q (P, m) of its eigenspace the m rates are those of its branches.

        direction: d, by default −∇L, gradient flow: dλ/dt = −T[q, q, ∇L]. A step of gradient
        descent with learning rate η then changes λ by η dλ/dt, to first order.
        """
        direction = -self.problem.gradient() if direction is None else direction
        basis = vectors.unsqueeze(-1) if vectors.ndim == 1 else vectors
        if basis.ndim != 2 or basis.shape[0] != self.problem.size:
            raise ValueError(
                f"eigenvectors are ({self.problem.size},) or ({self.problem.size}, m), got "
                f"{tuple(vectors.shape)}."
            )
        basis = torch.linalg.qr(basis.to(dtype=self.dtype, device=self.device)).Q
        moved = self.along(direction) @ basis
        self.products += basis.shape[1]
        projected = basis.T @ moved
        rates: Tensor = torch.linalg.eigvalsh((projected + projected.T) / 2)
        return rates

    def release(self) -> None:
        """Free the kept graphs; the next contraction builds them anew."""
        self._last = None

    def __repr__(self) -> str:
        return f"ThirdDerivative({self.problem!r})"


def checked_vector(problem: Problem, vector: Tensor, what: str) -> Tensor:
    """A flat vector (P,) in the problem's precision and on its device."""
    if not isinstance(vector, Tensor):
        raise TypeError(f"{what} must be a tensor ({problem.size},), got {type(vector).__name__}.")
    if vector.shape != (problem.size,):
        raise ValueError(
            f"{what} has shape {tuple(vector.shape)}, the parameters are a flat vector of "
            f"{problem.size}."
        )
    moved = vector.detach().to(dtype=problem.dtype, device=problem.device)
    if not bool(torch.isfinite(moved).all()):
        raise NonFiniteError(f"{what} holds NaN or infinities.")
    return moved
