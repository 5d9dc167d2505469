"""Fisher information: exact, by sampled targets, or empirical."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from curvatlas.engines.autograd.linearisation import OuterLinearisation
from curvatlas.errors import ProblemError
from curvatlas.linear_operator import Tags
from curvatlas.operators.curvature import AutogradLinearise, CurvatureOperator
from curvatlas.problem import Batch, CrossEntropy, Problem
from curvatlas.problem.cross_entropy import factored_product
from curvatlas.problem.large_heads import HiddenLogits
from curvatlas.problem.losses import Rebuild

Kind = Literal["empirical", "mc", "exact"]


class Fisher(CurvatureOperator):
    r"""F = (1/N) Σ_i J_iᵀ E[r_i r_iᵀ] J_i over valid targets i, with r_i = ∂ℓ_i/∂Z_i.

    kind="exact": the expectation over the model's own predictive distribution; for cross_entropy
        and mse (as a Gaussian likelihood) this equals the Gauss-Newton matrix.
    kind="mc": that expectation by ``samples`` targets drawn with ``seed`` (fixed for the operator).
    kind="empirical": the observed targets, r_i r_iᵀ as it stands. One target is a class label (a
        token in a sequence) or a regression vector along the last axis; with a callable loss, one
        sample along the first axis.
    """

    linearisation = OuterLinearisation

    def __init__(
        self,
        problem: Problem,
        *,
        kind: Kind = "exact",
        samples: int = 1,
        seed: int = 0,
        budget: int | str | None = None,
        checks: bool = True,
    ) -> None:
        if kind not in ("empirical", "mc", "exact"):
            raise ValueError(f"kind is 'empirical', 'mc' or 'exact', got {kind!r}.")
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}.")
        if kind != "empirical" and not problem.loss.likelihood:
            raise ProblemError(
                f"the {kind} Fisher needs a likelihood and {problem.loss.name!r} is not known as "
                "one: use loss='cross_entropy' or 'mse', kind='empirical', or GaussNewton."
            )
        tags = Tags(symmetric=True, psd=True)
        super().__init__(problem, budget=budget, checks=checks, tags=tags)
        self.kind, self.samples, self.seed = kind, samples, seed
        self.outer, self.part = ("whole", "outer") if kind == "exact" else ("none", None)

    def content(self) -> Any:
        return [self.kind, self.samples, self.seed, *super().content()]

    def _linearise(self) -> AutogradLinearise:
        if self.kind == "exact":
            return functools.partial(OuterLinearisation, logit_room=self._logit_room)
        return functools.partial(_ResidualLinearisation, fisher=self)

    def _on(self, problem: Problem) -> Fisher:
        return Fisher(
            problem,
            kind=self.kind,
            samples=self.samples,
            seed=self.seed,
            budget=self.budget,
            checks=False,
        )


class _ResidualLinearisation(OuterLinearisation):
    """Λ replaced by Σ_s r_s r_sᵀ, rank one for every target."""

    def __init__(
        self, problem: Problem, batch: Batch, names: Sequence[str], *, fisher: Fisher
    ) -> None:
        self._fisher = fisher
        super().__init__(problem, batch, names, logit_room=fisher._logit_room)

    def _output_product(self, rebuild: Rebuild) -> Callable[[list[Tensor]], list[Tensor]]:
        logits = rebuild(self._z)
        if isinstance(logits, HiddenLogits):
            return self._chunked_product(logits)
        if len(self._z) != 1:
            raise ProblemError("a sampled or empirical Fisher needs one output tensor.")
        loss, targets, z = self._problem.loss, self.batch.targets, self._z[0]
        observed, axes = loss.residual(z, targets)
        if self._fisher.kind == "mc" and axes == 1 and self._fisher.samples > z.shape[-1]:
            return self._second_moment(z)
        residuals = [observed]
        if self._fisher.kind == "mc":
            residuals = list(self._drawn(z))
        scale = 1.0 / (len(residuals) * loss.target_count(z, targets))
        last = tuple(range(-axes, 0))

        def product(columns: list[Tensor]) -> list[Tensor]:
            total = torch.zeros_like(columns[0])
            for residual in residuals:
                inner = residual * columns[0]
                inner = inner.sum(last, keepdim=True) if last else inner
                total.addcmul_(residual, inner)
            return [total.mul_(scale)]

        return product

    def _drawn(self, z: Tensor) -> Iterator[Tensor]:
        """The residuals of the sampled targets, draw after draw."""
        loss, targets = self._problem.loss, self.batch.targets
        for draw in range(self._fisher.samples):
            yield loss.sample_residual(z, targets, self._uniform(draw))

    def _second_moment(self, z: Tensor) -> Callable[[list[Tensor]], list[Tensor]]:
        """Σ_s r_s r_sᵀ of each target as a matrix: less than the residuals of more samples than
        outputs, and a product no longer depends on their number."""
        moment = z.new_zeros(*z.shape, z.shape[-1])
        for residual in self._drawn(z):
            moment += residual.unsqueeze(-1) * residual.unsqueeze(-2)
        loss, targets = self._problem.loss, self.batch.targets
        moment /= self._fisher.samples * loss.target_count(z, targets)
        return lambda columns: [(moment @ columns[0].unsqueeze(-1)).squeeze(-1)]

    def _chunked_product(self, logits: HiddenLogits) -> Callable[[list[Tensor]], list[Tensor]]:
        loss, targets = self._problem.loss, self.batch.targets
        assert isinstance(loss, CrossEntropy)
        levels = None
        if self._fisher.kind == "mc":
            levels = [self._uniform(s)(targets.shape) for s in range(self._fisher.samples)]
        chunked, drawn = loss.residual_classes(logits, targets, levels)
        return factored_product(
            logits,
            self._z,
            lambda factors, directions: chunked.rank_one(factors, directions, drawn),
        )

    def _uniform(self, draw: int) -> Callable[[torch.Size], Tensor]:
        return drawn_uniform(self._fisher.seed, self.batch, draw)


def drawn_uniform(seed: int, batch: Batch, draw: int) -> Callable[[torch.Size], Tensor]:
    """Numbers in (0, 1) that do not depend on how batches are cut to fit the memory."""
    mixed = (seed * 1_000_003 + batch.index) * 1009 + draw

    def uniform(shape: torch.Size) -> Tensor:
        generator = torch.Generator().manual_seed(mixed)
        axis = 0 if batch.layout is None else batch.layout.outputs[0] or 0  # of the samples
        rows = batch.offset + shape[axis]
        others = (*shape[:axis], *shape[axis + 1 :])
        numbers = torch.rand(rows, *others, generator=generator, dtype=torch.float64, device="cpu")
        numbers = numbers[batch.offset :].movedim(0, axis).contiguous()
        return numbers.clamp(1e-12, 1 - 1e-12)

    return uniform
