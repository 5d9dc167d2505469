r"""CurvatureAwareOptimizer: preconditioned steps, as long as the measured curvature allows."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvatlas.anatomy import anatomy_of
from curvatlas.operators import Hessian
from curvatlas.problem import Problem
from curvatlas.problem.batches import paired
from curvatlas.problem.evaluation import unwrap
from curvatlas.problem.losses import LossLike
from curvatlas.results import Interval, Number, Result
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.summary import condition_density, condition_number
from curvatlas.training.directions import (
    ITERATIONS,
    QUINTIC,
    DiagonalStack,
    SpectralStack,
    Stack,
    diagonal_size,
    kept_share,
    lies,
    spectral_size,
)
from curvatlas.training.metric import Piece, adam_piece, muon_piece
from curvatlas.training.monitor import leaving_no_trace

StepSizes = Literal["whole", "role", "block"]


def parameter_groups(
    wanted: nn.Module | Iterable[Any], model: nn.Module | None, step_sizes: StepSizes
) -> Any:
    """What ``torch.optim.Optimizer`` takes: the parameters passed, or the model's in groups."""
    if step_sizes not in ("whole", "role", "block"):
        raise ValueError(f"step_sizes is 'whole', 'role' or 'block', got {step_sizes!r}.")
    if model is None:
        if step_sizes != "whole":
            raise ValueError(f"step_sizes={step_sizes!r} needs the model, not its parameters.")
        return wanted
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameters to train.")
    return parameters if step_sizes == "whole" else _grouped(model, step_sizes)


def _grouped(model: nn.Module, step_sizes: StepSizes) -> list[dict[str, Any]]:
    """A group for each role (vectors together) or for each sublayer of each layer."""
    named = dict(model.named_parameters())
    names: dict[str, str] = {}
    for piece in anatomy_of(model).slices:
        where = piece.sublayer if piece.layer is None else f"{piece.layer}.{piece.sublayer}"
        if step_sizes == "role":
            where = piece.role if named[piece.parameter].ndim > 1 else "vectors"
        earlier = names.setdefault(piece.parameter, where)
        if where not in earlier.split("+"):  # query, key and value in one matrix
            names[piece.parameter] = f"{earlier}+{where}"
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        groups.setdefault(names.get(name, "others"), []).append(parameter)
    return [{"params": members, "block": block} for block, members in groups.items()]


def edges(model: nn.Module | None) -> frozenset[int]:
    """Embeddings and the head: rows are tokens or classes, not directions to be mixed."""
    if model is None:
        return frozenset()
    named = dict(model.named_parameters())
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    slices = anatomy_of(model).slices
    by_place = {id(named[s.parameter]) for s in slices if s.sublayer in ("embedding", "head")}
    return frozenset(tables | by_place)


def dense_maps(model: nn.Module | None) -> frozenset[int]:
    """Weights by which a layer multiplies dense inputs; a table that is also the head is one."""
    modules = [] if model is None else model.modules()
    weights = [getattr(m, "weight", None) for m in modules if not isinstance(m, nn.Embedding)]
    return frozenset(id(w) for w in weights if isinstance(w, nn.Parameter) and w.ndim > 1)


Closure = Callable[[], Any]


@contextlib.contextmanager
def gradients_at(optimizer: Optimizer, closure: Closure) -> Iterator[None]:
    """Inside, ``p.grad`` holds the closure's gradient at the present weights; as before after."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None  # a closure that zeroes in place must not touch the gradients kept here
    try:
        with torch.enable_grad():
            closure()
        for p, kept in zip(parameters, before, strict=True):
            if p.grad is None and kept is not None:
                p.grad = torch.zeros_like(kept)
        yield
    finally:
        for p, kept in zip(parameters, before, strict=True):
            p.grad = kept


def repeatable(closure: Closure, model: nn.Module) -> Closure:
    """The same closure, drawing the same random numbers each time; buffers move only once."""
    generators: list[Any] = []
    buffers: list[torch.Tensor] = []

    def repeated() -> Any:
        if not generators:
            generators.append(torch.get_rng_state())
            value = closure()
            buffers.extend(b.clone() for b in model.buffers())
            return value
        with torch.random.fork_rng():
            torch.set_rng_state(generators[0])
            value = closure()
        with torch.no_grad():
            for buffer, kept in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(kept)
        return value

    return repeated


# A rate up to this is taken on trust; a higher one is reached by growing from here, so that it is
# measured before it does harm.
_TRUSTED = 1e-2
_GROWTH, _SHRINK = 1.5, 0.8
_MEMORY = 0.8  # of the running means: five steps
# Where the next gradient points back by this share of the slope, κ is near 1.4 without noise. At
# tuned rates the zoo's models stay above −0.25, at five times the rate they go to −0.45.
_BACKWARDS = -0.35
# The largest rate. Directions have a size of their own (see directions.py), so that the best rate
# of a short run hardly depends on the model: of 0.03 to 0.06, 0.045 ended within 1 % of the best
# on two ViTs and two GPTs of widths 16 to 128, with none of the race's seeds (0.03 within 1 % too,
# but for the digits: 22 %). Beyond it nothing is gained and no measurement stops a wrong rate:
# behind a normalisation curvature falls as weights grow.
MAX_RATE = 0.045
_MAX_FRACTION = 1.0  # κ that a measured product allows: the bottom of the parabola


@dataclass
class Control:
    r"""The limit of the learning rate of one parameter group, and the means it comes from.

    A step −η d meets the curvature dᵀHd along it. With the slope a = gᵀd the quadratic model
    changes by −η a + ½ η² dᵀHd: least at η = a / dᵀHd, and no gain from twice that on. What is
    watched is the fraction κ = η dᵀHd / a: 1 at the lowest point, 2 at the critical rate.

    Two measurements feed the same limit. After every step, free: the next gradient g⁺ has the slope
    g⁺ᵀd = a (1 − κ) along the step just made (in expectation over batches; the batch's own noise
    in a only lowers it). Now and then, when the loss can be evaluated again: the difference of two
    gradients of one batch, dᵀ(g(θ) − g(θ − ηd)) = η dᵀHd with H averaged along the step, without
    noise.

    Both are local, so that no rate goes beyond ``MAX_RATE`` either.

    A schedule multiplies what these limits leave: η = s min(base rate, limit, MAX_RATE) with
    s = lr / base rate. All rates here are those before the schedule, so that a decay lowers the
    rate from its first step on, however far the base rate lies above the limits.
    """

    limit: float = _TRUSTED
    slope: float = 0.0  # running mean of gᵀd
    overlap: float = 0.0  # running mean of g⁺ᵀd, one step later
    last_slope: float | None = None  # of the step just made
    last_rate: float = 0.0
    last_factor: float = 1.0  # s of the step just made

    @classmethod
    def of(cls, group: dict[str, Any]) -> Control:
        """The control that a parameter group carries (plain numbers: they survive any saving)."""
        return cls(**group["control"])

    def keep(self, group: dict[str, Any]) -> None:
        """Write it back."""
        group["control"] = dict(vars(self))

    def follow(self, overlap: float) -> None:
        """Take in the slope of the newest gradient along the last step."""
        if self.last_slope is None:
            return
        self.slope = _MEMORY * self.slope + (1 - _MEMORY) * self.last_slope
        self.overlap = _MEMORY * self.overlap + (1 - _MEMORY) * overlap
        if self.overlap < _BACKWARDS * self.slope:
            self.limit = min(self.limit, self.last_rate) * _SHRINK
        else:
            # It need not run far ahead of what is used.
            grown = _GROWTH * min(self.limit, max(self.last_rate, _TRUSTED))
            self.limit = min(MAX_RATE, max(self.limit, grown))

    def measured(self, slope: float, curvature: float) -> None:
        """Take in η a and η² dᵀHd of the step just made, both of one batch."""
        if slope > 0 and curvature > _MAX_FRACTION * slope and math.isfinite(curvature):
            self.limit = min(self.limit, self.last_rate * _MAX_FRACTION * slope / curvature)

    def rate(self, wanted: float) -> float:
        """The learning rate that may be used, before the schedule."""
        return min(wanted, self.limit)

    def stepped(self, rate: float, slope: float, factor: float = 1.0) -> None:
        """Remember the step just made."""
        self.last_rate, self.last_slope, self.last_factor = rate, slope, factor


def used_rate(group: Mapping[str, Any]) -> float:
    """The learning rate of a group's last step."""
    control = group["control"]
    return float(control["last_rate"]) * float(control["last_factor"])


def base_rate(group: Mapping[str, Any]) -> float:
    """The rate that a group's schedule starts from or rises to (``max_lr``: OneCycleLR)."""
    known = group.get("max_lr", group.get("initial_lr", group["base_lr"]))
    return max(float(known), float(group["lr"]))


@dataclass(frozen=True, kw_only=True)
class LocalCurvature(Result):
    """The Hessian of one batch at the present weights."""

    value: float  # λmax
    interval: Interval  # certain, from the residual
    loss: float
    critical_rate: float  # 2 / λmax: of plain gradient descent on this batch
    slope: float | None  # gᵀd along the optimizer's direction; None before its first step
    along_direction: float | None  # dᵀHd
    best_rate: float | None  # gᵀd / dᵀHd where dᵀHd > 0: the bottom of the parabola
    role_along_direction: dict[str, float]  # role → d_rᵀ(Hd)_r; they add up to dᵀHd
    products: int
    converged: bool
    condition_number: float = float("nan")  # λmax / mean|λ|
    condition_interval: Interval = (0.0, float("inf"))  # 95 %
    max_gradient: float = float("nan")  # largest and smallest |∂L/∂θ_i|
    min_gradient: float = float("nan")

    def __str__(self) -> str:
        low, high = self.interval
        rates = (2 / high if high > 0 else math.inf, 2 / low if low > 0 else math.inf)
        text = f"λmax {Number(self.value, low, high)}, 2/λmax {Number(self.critical_rate, *rates)}"
        if self.best_rate is not None:
            text += f", best rate along the direction {self.best_rate:.3g}"
        return text


@dataclass(frozen=True, kw_only=True)
class AdaptedStep(Result):
    """One step of ``step_with_curvature_adaptation``; ``float(step)`` is its loss."""

    loss: float  # before the step
    learning_rate: float  # that was used
    limit: float  # the measured limit of the rate after the step
    measured: bool  # whether this step measured a product
    skipped: bool  # whether it was left out because the gradient was not finite

    def __float__(self) -> float:
        return self.loss

    def __format__(self, how: str) -> str:
        """As the loss where a format is asked for: ``f"{step:.4f}"``."""
        return format(self.loss, how) if how else str(self)

    def __str__(self) -> str:
        done = "left out" if self.skipped else f"rate {self.learning_rate:.3g}"
        return f"loss {self.loss:.4g}, {done}, limit {self.limit:.3g}"


def local_curvature(
    model: nn.Module, loss: Any, data: Any, directions: Mapping[Tensor, Tensor]
) -> LocalCurvature:
    """λmax by Lanczos and one product along ``directions`` (parameter → direction), exact."""
    with leaving_no_trace(model):
        problem = Problem(model, loss, data)
        operator = Hessian(problem)
        top = eigenpairs(
            operator,
            k=1,
            which="largest",
            tol=1e-2,
            max_products=min(100, problem.size),
            data_error=False,
        )
        density = condition_density(operator, max_products=_DENSITY)
        gradient = problem.gradient()
        slope, along = None, None
        roles: dict[str, float] = {}
        if directions:
            named = dict(model.named_parameters())
            flat = torch.cat(
                [
                    directions.get(named[name], torch.zeros_like(named[name])).reshape(-1)
                    for name in problem.parameter_names
                ]
            ).to(operator.dtype)
            each = flat * (operator @ flat)
            slope, along = float(gradient @ flat), float(each.sum())
            for piece in problem.anatomy.slices:
                roles[piece.role] = roles.get(piece.role, 0.0) + float(piece.view(each).sum())
        value = float(top.values[0])
        low, high = float(top.interval[0][0]), float(top.interval[1][0])
        condition, condition_interval = condition_number((low, value, high), density)
        best = slope / along if slope is not None and along is not None and along > 0 else None
        return LocalCurvature(
            value=value,
            interval=(low, high),
            loss=problem.value(),
            critical_rate=2.0 / value if value > 0 else float("inf"),
            slope=slope,
            along_direction=along,
            best_rate=best,
            role_along_direction=roles,
            products=operator.products,
            converged=bool(top.converged),
            condition_number=condition,
            condition_interval=condition_interval,
            max_gradient=float(gradient.abs().max()),
            min_gradient=float(gradient.abs().min()),
        )


_METHODS = ("auto", "spectral", "diagonal")
_DENSITY = 24  # products for the mean |λ| of the condition number


class CurvatureAwareOptimizer(Optimizer):
    r"""Orthogonalised momentum for matrices, Adam for the rest, rate held below the measured limit.

    model: an ``nn.Module`` (embeddings and the head are then known by their place and treated as
        diagonal), or parameters or parameter groups as for any ``torch.optim`` optimizer.
    base_lr: the largest learning rate, ``group["lr"]`` for schedulers. What is used is the least of
        it, of 0.045 and of what the curvature along the steps allows (see ``Control``), times the
        schedule's factor lr / base_lr: every base_lr from 0.045 on gives the same run.
    loss: as in ``Problem``: of ``estimate_local_curvature``, ``step_with_curvature_adaptation``.
    curvature_adaptation: False takes the learning rate as it is and measures nothing.
    momentum: of the matrices, the most that is kept of it: it grows with the steps made, see
        ``kept_share``;  betas, eps: of Adam;  weight_decay: decoupled, matrices only.
    step_sizes: "whole" (one limit of the rate for the model), "role" or "block" (one for each role
        or each sublayer of each layer, from the curvature that role or block meets along the
        step). Only where a model is given; parameter groups have a limit each anyway.
    every: steps between two measured products (one more gradient each) where the loss can be
        evaluated again: ``step(closure)`` and ``step_with_curvature_adaptation``. 0: never.

    A group's ``"method"`` is "auto", "spectral" or "diagonal". A step whose gradient is not finite
    is left out with a warning, and ``skipped`` counts it.

    Published ideas used: the Kronecker-factored Gauss-Newton preconditioner of Shampoo (Gupta et
    al. 2018) in its memoryless form, Muon (Jordan et al. 2024); update sizes that do not change
    their meaning with the width (Yang et al. 2022); Adam (Kingma and Ba 2015) with decoupled decay
    (Loshchilov and Hutter 2019); the slope of the next gradient along the last step as in
    hypergradient descent (Baydin et al. 2018); critical rates as in the edge of stability (Cohen et
    al. 2021). SOAP (Vyas et al. 2024) was tried and took more steps on the zoo's GPT.

        optimizer = ca.CurvatureAwareOptimizer(model)
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        base_lr: float = 0.1,
        curvature_adaptation: bool = True,
        *,
        loss: LossLike = "cross_entropy",
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        step_sizes: StepSizes = "whole",
        every: int = 50,
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
        self.base_lr = base_lr
        self.hessian_estimates: dict[str, float] = {}
        self.curvature_adaptation = curvature_adaptation
        self._problem: tuple[Any, Problem] | None = None  # the loss it was made with, and itself
        self.model = unwrap(model) if isinstance(model, nn.Module) else None
        self._diagonal, self._dense = edges(self.model), dense_maps(self.model)
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
        group = self.param_groups[-1]
        group["base_lr"], group["control"] = float(group["lr"]), asdict(Control())
        self._stacks = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict()``, also from one saved with ``torch.save``."""
        wanted = {field.name for field in fields(Control)}
        for group in state_dict["param_groups"]:
            control = group.get("control", {})
            missing = sorted(({"base_lr"} - group.keys()) | (wanted - control.keys()))
            if missing:
                raise ValueError(
                    f"the state has no {', '.join(missing)}: it is of another optimizer, or of "
                    "this one up to curvatlas 0.2, whose steps had other sizes. Load the model's "
                    "weights alone and go on with a new optimizer."
                )
        super().load_state_dict(state_dict)
        self._stacks = None

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_stacks": None, "_active": (), "_problem": None}  # built again from the states
        return {**self.__dict__, **left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stacks = None
        # Parameters are known by identity, and a copy has its own.
        self._diagonal, self._dense = edges(self.model), dense_maps(self.model)

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
        overlaps = [
            _slope(row, row_gradients) for row, row_gradients in zip(stacks, gradients, strict=True)
        ]
        if not all(map(math.isfinite, overlaps)):
            # 0 · NaN and 0 · ∞ are NaN: a bad gradient shows before it has touched the momentum.
            self.skipped += 1
            warnings.warn(
                f"the gradient is not finite: step left out ({self.skipped} so far).", stacklevel=3
            )
            return False
        for group, row, row_gradients, overlap in zip(
            self.param_groups, stacks, gradients, overlaps, strict=True
        ):
            if not row:
                continue
            control = Control.of(group)
            control.follow(overlap)
            rate = base = base_rate(group)
            if self.curvature_adaptation:
                rate = control.rate(base)
            factor = float(group["lr"]) / base if base > 0 else 1.0
            for stack, gradient in zip(row, row_gradients, strict=True):
                stack.advance(gradient)
                stack.move(rate=factor * rate, decay=group["weight_decay"])
            control.stepped(rate, _slope(row, row_gradients), factor)
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
        stacks: list[Stack] = []
        for (spectral, *_), parameters in alike.items():
            states = [self.state[p] for p in parameters]
            if spectral:
                stacks.append(SpectralStack(parameters, states, momentum=group["momentum"]))
            else:
                options = {"betas": group["betas"], "eps": group["eps"]}
                options["sizes"] = [self._entries(p) for p in parameters]
                stacks.append(DiagonalStack(parameters, states, **options))
        return stacks

    def _is_spectral(self, parameter: nn.Parameter, method: str) -> bool:
        if method == "auto":
            return parameter.ndim >= 2 and id(parameter) not in self._diagonal
        return method == "spectral" and parameter.ndim >= 2

    def _entries(self, parameter: Tensor) -> float:
        """The size of a diagonal direction's entries."""
        dense = id(parameter) in self._dense
        return diagonal_size(parameter[0].numel()) if dense else 1.0

    def metric_piece(
        self, group: Mapping[str, Any], parameter: Tensor, state: Mapping[str, Any]
    ) -> Piece | None:
        """What the monitor takes for this optimizer's metric; see ``training/metric.py``."""
        if "momentum" not in state:
            return None
        rate = used_rate(group)
        if "square" in state:
            steps = float(state["step"])
            rate *= self._entries(parameter)
            return adam_piece(state["square"], steps, rate, group["betas"], group["eps"])
        size = spectral_size(parameter.shape[0], parameter[0].numel())
        return muon_piece(
            state["momentum"],
            rate * size,
            kept_share(group["momentum"], int(state["step"])),
            nesterov=True,
            iterations=ITERATIONS,
            coefficients=QUINTIC,
        )

    @property
    def limits_own_rate(self) -> bool:
        """Whether rates are held to the curvature met: the monitor need not warn of them."""
        return self.curvature_adaptation

    @property
    def learning_rates(self) -> list[float]:
        """The rate each group's last step really used: ``lr`` or the measured limit."""
        return [used_rate(group) for group in self.param_groups]

    @property
    def limits(self) -> list[float]:
        """The largest rate each group may use at present, before a schedule's factor."""
        return [Control.of(group).rate(math.inf) for group in self.param_groups]

    @property
    def optimizer(self) -> CurvatureAwareOptimizer:
        """Itself, as the article's code reaches it: ``optimizer.optimizer.param_groups``."""
        return self

    # --- curvature ------------------------------------------------------------------------------

    def _due(self) -> bool:
        """Densely at first (1, 4, 16, …), where a wrong rate does the most harm."""
        steps = max(group["steps"] for group in self.param_groups)
        early = steps < self.every and steps in (1, 4, 16, 64)
        wanted = self.curvature_adaptation and self.every > 0
        return wanted and (early or steps % self.every == 0)

    def _measure(self, closure: Closure) -> None:
        """η a and η² dᵀHd of each group by the difference of two gradients of one batch."""
        stacks = self._current()
        before = [[stack.gradient() for stack in row] for row in stacks]
        with gradients_at(self, closure):
            after = [[stack.gradient() for stack in row] for row in stacks]
        for group, row, old, new in zip(self.param_groups, stacks, before, after, strict=True):
            control = Control.of(group)
            slope, rate = _slope(row, old), used_rate(group)
            control.measured(rate * slope, rate * (slope - _slope(row, new)))
            control.keep(group)
        self._measurements += 1

    def estimate_local_curvature(self, x: Any, y: Any = None) -> LocalCurvature:
        """λmax of the Hessian on a batch, and dᵀHd along the present direction by role.

        (x, y), or x alone a mapping with labels. In evaluation mode; the model stays in its own.
        The numbers of the last call are in ``hessian_estimates``.
        """
        directions = {p: self.state[p]["direction"] for p in self.state if self.state[p]}
        found = local_curvature(self._known_model(), self.loss, paired(x, y), directions)
        named = ("condition_number", "max_gradient", "min_gradient", "loss", "critical_rate")
        self.hessian_estimates = {name: found[name] for name in named}
        return found

    def step_with_curvature_adaptation(self, x: Any, y: Any = None) -> AdaptedStep:
        """Forward, backward and a step on one batch, the curvature measured every few steps.

        (x, y), or x alone a mapping with labels, as ``Problem`` reads them; in the model's present
        mode, dropout included.
        """
        model, data = self._known_model(), paired(x, y)
        problem = self._problem_for(data)

        def closure() -> Tensor:
            self.zero_grad()
            value = problem.training_loss(data)
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

    def _problem_for(self, data: Any) -> Problem:
        """How batches are read: settled by the first one, and again when the loss is replaced."""
        if self._problem is None or self._problem[0] is not self.loss:
            model = self._known_model()
            with leaving_no_trace(model):
                problem = Problem(model, self.loss, data, distributed=False)
            self._problem = self.loss, problem
        return self._problem[1]

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
