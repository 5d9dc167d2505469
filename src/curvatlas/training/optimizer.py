r"""CurvatureAwareOptimizer: preconditioned steps, as long as the measured curvature allows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvatlas.problem.evaluation import unwrap
from curvatlas.training.optimizer_control import TENTH, Control
from curvatlas.training.optimizer_curvature import AdaptedStep, LocalCurvature, local_curvature
from curvatlas.training.optimizer_directions import DiagonalStack, SpectralStack, Stack, lies
from curvatlas.training.optimizer_groups import StepSizes, edges, parameter_groups
from curvatlas.training.optimizer_probe import gradients_at, repeatable
from curvatlas.zoo.training import Loss, loss_of

Closure = Callable[[], Any]
_METHODS = ("auto", "spectral", "diagonal")


class CurvatureAwareOptimizer(Optimizer):
    r"""Orthogonalised momentum for matrices, Adam for the rest, rate held below the measured limit.

    model: an ``nn.Module`` (embeddings and the head are then known by their place and treated as
        diagonal), or parameters or parameter groups as for any ``torch.optim`` optimizer.
    base_lr: the learning rate, ``group["lr"]`` for schedulers. Too large a rate is cut to what the
        curvature along the steps allows: see ``optimizer_control``.
    loss: for ``estimate_local_curvature`` and ``step_with_curvature_adaptation``.
    momentum: of the matrices;  betas, eps: of Adam;  weight_decay: decoupled, matrices only.
    step_sizes: "whole" (one limit of the rate for the model), "role" or "block" (one for each role
        or each sublayer of each layer, from the curvature that role or block meets along the
        step). Only where a model is given; parameter groups have a limit each anyway.
    every: steps between two measured products (one more gradient each) where the loss can be
        evaluated again: ``step(closure)`` and ``step_with_curvature_adaptation``. 0: never.

    A group's ``"method"`` is "auto", "spectral" or "diagonal". A step whose gradient is not finite
    is left out with a warning, and ``skipped`` counts it.

    Published ideas used: the Kronecker-factored Gauss-Newton preconditioner of Shampoo (Gupta et
    al. 2018) in its memoryless form, Muon (Jordan et al. 2024), with update sizes matched to Adam's
    as by Liu et al. (2025); Adam (Kingma and Ba 2015) with decoupled decay (Loshchilov and Hutter
    2019); the slope of the next gradient along the last step as in hypergradient descent (Baydin
    et al. 2018); critical rates as in the edge of stability (Cohen et al. 2021). SOAP (Vyas et al.
    2024) was tried and took more steps on the zoo's GPT.

        optimizer = ca.CurvatureAwareOptimizer(model, base_lr=8e-3)
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        base_lr: float = 5e-3,
        *,
        loss: Loss = "cross_entropy",
        momentum: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        step_sizes: StepSizes = "whole",
        every: int = 20,
    ) -> None:
        for name, value, low, high in (
            ("base_lr", base_lr, 0.0, float("inf")),
            ("momentum", momentum, 0.0, 1.0),
            ("betas[0]", betas[0], 0.0, 1.0),
            ("betas[1]", betas[1], 0.0, 1.0),
            ("weight_decay", weight_decay, 0.0, float("inf")),
            ("every", every, 0, float("inf")),
        ):
            if not low <= value < high:
                raise ValueError(f"{name} must lie in [{low:g}, {high:g}), got {value}.")
        self.loss, self.every, self.skipped = loss, every, 0
        self.model = unwrap(model) if isinstance(model, nn.Module) else None
        self._diagonal = edges(self.model)
        self._stacks: list[list[Stack]] | None = None
        self._active: tuple[int, ...] = ()
        self._measurements = 0
        defaults = {
            "lr": base_lr,
            "momentum": momentum,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "method": "auto",
            "steps": 0,
        }
        super().__init__(parameter_groups(model, self.model, step_sizes), defaults)

    # --- a regular torch optimizer --------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, for example a layer that is unfrozen during training."""
        method = param_group.get("method", "auto")
        if method not in _METHODS:
            raise ValueError(f"a group's method is one of {', '.join(_METHODS)}, got {method!r}.")
        super().add_param_group(param_group)
        self.param_groups[-1]["control"] = asdict(Control())
        self._stacks = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict()``, also from one saved with ``torch.save``."""
        super().load_state_dict(state_dict)
        self._stacks = None

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_stacks": None, "_active": ()}  # built again from the states
        return {**self.__dict__, **left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stacks = None

    def step(self, closure: Closure | None = None) -> Any:
        """One step; with a closure (as ``torch.optim`` knows it) the curvature is measured too."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        with torch.no_grad():
            moved = self._step()
        if closure is not None and moved and self._due():
            self._measure(closure)
        return value

    @torch.no_grad()
    def _step(self) -> bool:
        stacks = self._current()
        gradients = [[stack.gradient() for stack in row] for row in stacks]
        overlaps = [_slope(row, given) for row, given in zip(stacks, gradients, strict=True)]
        if not all(map(math.isfinite, overlaps)):
            # 0 · NaN and 0 · ∞ are NaN: a bad gradient shows before it has touched the momentum.
            self.skipped += 1
            warnings.warn(
                f"the gradient is not finite: step left out ({self.skipped} so far).", stacklevel=3
            )
            return False
        for group, row, given, overlap in zip(
            self.param_groups, stacks, gradients, overlaps, strict=True
        ):
            if not row:
                continue
            control = Control.of(group)
            if group["steps"] == 0:
                control.ceiling = TENTH * min(stack.size for stack in row)
            control.follow(overlap)
            rate = control.rate(float(group["lr"]))
            for stack, gradient in zip(row, given, strict=True):
                direction = stack.advance(gradient)
                stack.move(direction, rate=rate, decay=group["weight_decay"])
                stack.direction.copy_(direction)
            control.stepped(rate, _slope(row, given))
            control.keep(group)
            group["steps"] += 1
        return True

    def _current(self) -> list[list[Stack]]:
        """The stacks of the parameters that have a gradient now, a list for each group."""
        active = tuple(
            id(p) for group in self.param_groups for p in group["params"] if p.grad is not None
        )
        if self._stacks is None or active != self._active:
            self._stacks = [self._stacked(group) for group in self.param_groups]
            self._active = active
        return self._stacks

    def _stacked(self, group: dict[str, Any]) -> list[Stack]:
        alike: dict[Any, list[nn.Parameter]] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.is_complex():
                raise ValueError("complex parameters are not supported: store two real ones.")
            spectral = self._is_spectral(p, group["method"])
            sizes = (tuple(p.shape[::-1]) if lies(p) else tuple(p.shape)) if spectral else ()
            steps = int(self.state[p].get("step", 0))
            alike.setdefault((spectral, sizes, p.dtype, p.device, steps), []).append(p)
        found: list[Stack] = []
        for (spectral, *_), parameters in alike.items():
            states = [self.state[p] for p in parameters]
            if spectral:
                found.append(SpectralStack(parameters, states, momentum=group["momentum"]))
            else:
                options = {"betas": group["betas"], "eps": group["eps"]}
                found.append(DiagonalStack(parameters, states, **options))
        return found

    def _is_spectral(self, parameter: nn.Parameter, method: str) -> bool:
        if method == "auto":
            return parameter.ndim >= 2 and id(parameter) not in self._diagonal
        return method == "spectral" and parameter.ndim >= 2

    @property
    def learning_rates(self) -> list[float]:
        """The rate each group's last step really used: ``lr`` or the measured limit."""
        return [float(group["control"]["last_rate"]) for group in self.param_groups]

    @property
    def limits(self) -> list[float]:
        """The largest rate each group may use at present."""
        return [Control.of(group).rate(math.inf) for group in self.param_groups]

    # --- curvature ------------------------------------------------------------------------------

    def _due(self) -> bool:
        """Densely at first (1, 2, 4, 8, …), where a wrong rate does the most harm."""
        steps = max(group["steps"] for group in self.param_groups)
        early = steps < self.every and steps & (steps - 1) == 0
        return self.every > 0 and (early or steps % self.every == 0)

    def _measure(self, closure: Closure) -> None:
        """η a and η² dᵀHd of each group by the difference of two gradients of one batch."""
        stacks = self._current()
        before = [[stack.gradient() for stack in row] for row in stacks]
        with gradients_at(self, closure):
            after = [[stack.gradient() for stack in row] for row in stacks]
        for group, row, old, new in zip(self.param_groups, stacks, before, after, strict=True):
            control = Control.of(group)
            slope, rate = _slope(row, old), control.last_rate
            control.measured(rate * slope, rate * (slope - _slope(row, new)))
            control.keep(group)
        self._measurements += 1

    def estimate_local_curvature(self, x: Any, y: Any) -> LocalCurvature:
        """λmax of the Hessian on a batch, and dᵀHd along the present direction by role."""
        directions = {p: self.state[p]["direction"] for p in self.state if self.state[p]}
        return local_curvature(self._known_model(), self.loss, x, y, directions)

    def step_with_curvature_adaptation(self, x: Any, y: Any) -> AdaptedStep:
        """Forward, backward and a step on one batch, the curvature measured every few steps."""
        model = self._known_model()

        def closure() -> Tensor:
            self.zero_grad()
            value = loss_of(self.loss, model(x), y)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        measured, skipped = self._measurements, self.skipped
        value = self.step(repeatable(closure, model))
        return AdaptedStep(
            loss=float(value.detach()),
            learning_rate=max(self.learning_rates),
            limit=min(self.limits),
            measured=self._measurements > measured,
            skipped=self.skipped > skipped,
        )

    def _known_model(self) -> nn.Module:
        if self.model is None:
            raise ValueError(
                "the optimizer was made from parameters: give it the model itself to measure."
            )
        return self.model


def _slope(stacks: list[Stack], gradients: list[Tensor]) -> float:
    """Σ gᵀd over the stacks of a group, with the direction of the last step."""
    pairs = zip(stacks, gradients, strict=True)
    return sum(float(torch.dot(g.view(-1), s.direction.view(-1))) for s, g in pairs)
