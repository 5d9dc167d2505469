"""The article's analysis calls as its reader types them, over the library's own verbs.

Every result reads like a mapping too, and behind each key stands the true quantity:

    TransformerHessianAnalyzer(model)
        .history                         hessian_norms, condition_numbers, eigenvalue_spectra,
                                         layer_curvatures
        .compute_hessian_eigenvalues     reads like a tensor
        .analyze_full_hessian            mean_hessian_norm, eigenvalue_mean, eigenvalue_std,
                                         top_eigenvalue, spectral_gap
        .analyze_layer_wise_curvature    rows: name, output_norm, curvature, and the article's
                                         curvature_proxy, which is a slope
    ConvergenceDiagnostics(model)        loss_history, grad_history, curvature_history
        .compute_effective_conditioning  loss, grad_norm, grad_mean, grad_std,
                                         eff_condition_number
        .analyze_convergence_trajectory  loss_decreased, loss_reduction, gradient_decay_rate,
                                         condition_number_trend, final_condition
    TaylorExpansionAnalyzer(model)       hessian_cache, estimated_hessian_eigenvalue
        .compute_taylor_coefficients     delta_loss, quadratic_coefficient, gradient_norm
        .predict_convergence_trajectory  rows: step, delta_w_norm, delta_w_predicted
        .estimate_hessian_from_trajectory    avg_curvature, convergence_rate
    ScalingLawAnalyzer(model_factory)    dataloader, grid
        .compute_hessian_norm            top_eigenvalue, bottom_eigenvalue, condition_number,
                                         effective_rank
        .analyze_scaling_with_size       DataFrame: n_params, n_samples and those keys
        .predict_optimal_dataset_size    value, interval
    demo_hessian_analysis()              gives (analyzer, optimizer)

The closed forms are in ``closed_form``, ``CurvatureAwareOptimizer`` in ``training``, pictures in
``figures``.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvatlas.analysis.atlas.layerwise import activation_curvature
from curvatlas.analysis.conditioning import EffectiveConditioning, effective_conditioning
from curvatlas.analysis.diagnostics import ConvergenceTrajectory, convergence_trajectory
from curvatlas.analysis.landscape.line import Displacement, towards
from curvatlas.analysis.landscape.taylor import (
    critical_rate,
    observed_curvature,
    predict_trajectory,
    taylor_expansion,
    trust_radius,
)
from curvatlas.analysis.landscape.taylor_result import (
    CriticalLearningRate,
    ObservedCurvature,
    PredictedTrajectory,
    TaylorExpansion,
    TrustRadius,
)
from curvatlas.analysis.propagation.result import Measure
from curvatlas.display import Table
from curvatlas.linear_operator import LinearOperator
from curvatlas.operators.curvature import Hessian
from curvatlas.operators.per_sample import subset
from curvatlas.problem import Problem
from curvatlas.problem.batches import first_batches, paired
from curvatlas.problem.evaluation import evaluated, without_randomness
from curvatlas.problem.fingerprint import content
from curvatlas.problem.losses import LossLike
from curvatlas.problem.parameters import Parameters
from curvatlas.problem.problem import own_targets
from curvatlas.progress import track
from curvatlas.results import Interval, Number, Result, also_named
from curvatlas.scaling import (
    DatasetPrediction,
    GridTrainer,
    HessianNorm,
    PredictionComparison,
    ScalingGrid,
    compare_predictions,
    hessian_norm,
    optimal_dataset_size,
)
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.estimate import Estimate
from curvatlas.spectra.norms import frobenius_norm, spectral_norm
from curvatlas.spectra.summary import condition_density, condition_number, participation
from curvatlas.spectra.trace import trace
from curvatlas.training.optimizer import CurvatureAwareOptimizer

_DENSITY = 40  # products for the mean |λ| of the condition number


@dataclass(frozen=True, kw_only=True)
class FullHessianAnalysis(Result):
    """The Hessian of all data, and how its largest eigenvalues scatter over the batches."""

    eigenpairs: Eigenpairs  # of the whole data, both ends
    values: Tensor  # (B, k) largest eigenvalues of every batch
    norms: tuple[float, ...]  # ‖H‖₂ of every batch
    top_eigenvalue: float  # of the whole data
    spectral_gap: float  # λ1 − λ2 of the whole data
    trace: Estimate
    roles: dict[str, float]  # mass of the top eigenvector by role
    products: int
    converged: bool
    condition_number: float = float("nan")  # λmax / mean|λ| of the whole data
    condition_interval: Interval = (0.0, float("inf"))

    also = ("mean_hessian_norm", "eigenvalue_mean", "eigenvalue_std")

    @property
    def mean_hessian_norm(self) -> float:
        """Mean over batches of ‖H‖₂."""
        return sum(self.norms) / len(self.norms)

    @property
    def eigenvalue_mean(self) -> float:
        """Mean of the largest eigenvalues over batches and eigenvalues."""
        return float(self.values.mean())

    @property
    def eigenvalue_std(self) -> float:
        """Their standard deviation over batches and eigenvalues; 0 for a single number."""
        return float(self.values.std()) if self.values.numel() > 1 else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Of the top eigenvalue, certified."""
        low, high = self.eigenpairs.interval
        return float(low[0]), float(high[0])

    def __str__(self) -> str:
        lead = max(self.roles, key=lambda role: self.roles[role])
        lines = [str(self.eigenpairs)]
        if len(self.values) > 1:
            pairs = zip(self.values.mean(0).tolist(), self.values.std(0).tolist(), strict=True)
            spread = ", ".join(f"{mean:.4g} ± {scatter:.2g}" for mean, scatter in pairs)
            lines.append(f"over {len(self.values)} batches: {spread}")
        mass = f"top vector mostly in {lead} ({self.roles[lead]:.0%})"
        gap = f"gap {self.eigenpairs.gap}; " if len(self.eigenpairs) > 1 else ""
        lines.append(f"{gap}{self.trace}; {mass}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class LayerCurvature(Result):
    """The diagonal block of one sublayer of one layer."""

    layer: int | None
    sublayer: str
    size: int
    top_eigenvalue: float
    top_interval: Interval = (float("-inf"), float("inf"))  # certified
    spectral_norm: Estimate
    frobenius: Estimate
    trace: Estimate


@dataclass(frozen=True, kw_only=True)
class LayerWiseCurvature(Result):
    """Curvature of every layer's sublayers, and of what every module puts out."""

    layers: tuple[LayerCurvature, ...]
    activations: dict[str, Measure]  # module path → ∂²L/∂a² of its output a: norm and trace
    products: int
    output_norms: dict[str, float] = field(default_factory=dict)  # module path → ‖a‖ over the batch
    slopes: dict[str, float] = field(default_factory=dict)  # module path → ‖∂L/∂a‖
    target: str = "given"  # where the targets came from

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """One mapping a module: ``name``, ``output_norm`` ‖a‖, ``curvature`` ‖∂²L/∂a²‖_F, …

        ``curvature_proxy`` is what the article has in its place: a slope, ‖∂L/∂a‖.
        """
        return tuple(
            {
                "name": path,
                "output_norm": self.output_norms.get(path, float("nan")),
                "curvature": measure.norm,
                "curvature_interval": measure.norm_interval,
                "trace": measure.trace,
                "curvature_proxy": self.slopes.get(path, float("nan")),
            }
            for path, measure in self.activations.items()
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.activations)

    def __getitem__(self, key: Any) -> Any:
        """A field by name, or the row of one module by number."""
        return super().__getitem__(key) if isinstance(key, str) else self.rows[key]

    def __str__(self) -> str:
        lines = [
            f"{'-' if c.layer is None else c.layer:>3} {c.sublayer:<10} λmax "
            f"{Number(c.top_eigenvalue, *c.top_interval)}"
            f"  ‖·‖_F {c.frobenius.number}  trace {c.trace.number}"
            for c in self.layers
        ]
        lines += [
            f"output of {path or 'the model'}: ‖·‖_F "
            f"{Number(measure.norm, *measure.norm_interval)}  trace "
            f"{Number(measure.trace, *measure.trace_interval)}"
            for path, measure in self.activations.items()
        ]
        return "\n".join(lines)


class AnalysisHistory(list[Result]):
    """Every result of an analyzer in order, and by the article's names the series in them.

    ``history["hessian_norms"]`` has a number for each batch and ``["condition_numbers"]`` one for
    each call of ``analyze_full_hessian``, ``["eigenvalue_spectra"]`` the eigenvalues of each call
    that computed some, ``["layer_curvatures"]`` the rows of each ``analyze_layer_wise_curvature``.
    """

    def __init__(self) -> None:
        super().__init__()
        names = ("hessian_norms", "condition_numbers", "eigenvalue_spectra", "layer_curvatures")
        self.series: dict[str, list[Any]] = {name: [] for name in names}

    def append(self, result: Result) -> None:
        """Add a result, and its numbers to the series."""
        super().append(result)
        if isinstance(result, FullHessianAnalysis):
            self.series["hessian_norms"] += result.norms
            self.series["condition_numbers"].append(result.condition_number)
            self.series["eigenvalue_spectra"].append(result.eigenpairs.values)
        elif isinstance(result, Eigenpairs):
            self.series["eigenvalue_spectra"].append(result.values)
        elif isinstance(result, LayerWiseCurvature):
            self.series["layer_curvatures"].append(list(result.rows))

    def keys(self) -> tuple[str, ...]:
        """Names of the series."""
        return tuple(self.series)

    def __contains__(self, key: object) -> bool:
        return key in self.series if isinstance(key, str) else super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.series:
            raise KeyError(f"the history has no {key!r}: it has {', '.join(self.series)}.")
        return self.series[key]


class TransformerHessianAnalyzer:
    """Eigenvalues, whole-data statistics and layer-wise curvature of a model's loss Hessian.

    A model in train mode is evaluated in evaluation mode, which is said once, and put back.
    loss: as in ``Problem``. folder: where long estimates keep checkpoints, so that the same
    sequence of calls resumes after a kill. ``history`` holds every result in order, and series of
    their numbers by name (``AnalysisHistory``).
    distributed: as in ``Problem``; under a process group every rank passes its own share of the
    data, or with False this process's data are all there are.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: LossLike = "cross_entropy",
        seed: int = 0,
        folder: str | os.PathLike[str] | None = None,
        distributed: bool | None = None,
    ) -> None:
        self.model = model
        self.distributed = distributed
        self.loss = loss
        self.seed = seed
        self.folder = None if folder is None else Path(folder)
        self.history = AnalysisHistory()

    @evaluated
    def compute_hessian_eigenvalues(
        self, x: Any, y: Any = None, k: int = 20, *, which: str = "largest", tol: float = 1e-4
    ) -> Eigenpairs:
        """The k largest (or other) Hessian eigenpairs of one batch, with certified intervals.

        (x, y), or x alone a mapping with labels. Fewer where the model has fewer parameters. The
        result reads like the tensor of its values.
        """
        op = self._hessian(paired(x, y))
        pairs = eigenpairs(
            op,
            k=min(k, op.shape[0]),
            which=which,  # type: ignore[arg-type]
            tol=tol,
            seed=self.seed,
            checkpoint=self._file("eigenvalues", op),
        )
        self.history.append(pairs)
        return pairs

    @evaluated
    @also_named(dataloader="data")
    def analyze_full_hessian(
        self, data: Any, *, n_batches: int | None = None, k: int = 10
    ) -> FullHessianAnalysis:
        """Both ends of the whole data's spectrum, and the k largest of every batch's.

        n_batches: only the first so many batches of ``data``.
        """
        op = self._hessian(first_batches(data, n_batches))
        op.problem.require_one_process(
            "the eigenvalues of every batch", maker="TransformerHessianAnalyzer"
        )
        k = min(k, op.shape[0])
        both_ends = eigenpairs(
            op,
            k=max(k, min(2, op.shape[0])),  # two for the gap
            which="both",
            seed=self.seed,
            checkpoint=self._file("full", op),
        )
        total = trace(op, rtol=0.05, seed=self.seed, checkpoint=self._file("full-trace", op))
        density = condition_density(
            op,
            max_products=_DENSITY,
            seed=self.seed,
            checkpoint=self._file("full-density", op),
        )
        ends = [float(end[0]) for end in both_ends.interval]
        condition, condition_interval = condition_number(
            (ends[0], both_ends.value, ends[1]), density
        )
        products = both_ends.products + total.products + density.products
        rows, norms = [], []
        parts = op.per_batch()
        if len(parts) > 1:
            for _, part in track(parts, "batches", total=len(parts)):
                top = eigenpairs(part, k=k, seed=self.seed, start=both_ends.vectors[:, :k])
                last = both_ends.vectors[:, -1]
                low = eigenpairs(part, k=1, which="smallest", seed=self.seed, start=last)
                rows.append(top.values)
                norms.append(max(abs(top.value), abs(low.value)))
                products += top.products + low.products
                part.release()
        else:
            rows, norms = [both_ends.largest[:k]], [both_ends.norm]
        gap = both_ends.values[0] - both_ends.values[1] if op.shape[0] > 1 else torch.tensor(0.0)
        spread = participation(both_ends.vectors[:, 0], op.problem.anatomy)
        result = FullHessianAnalysis(
            eigenpairs=both_ends,
            values=torch.stack(rows),
            norms=tuple(norms),
            top_eigenvalue=both_ends.value,
            spectral_gap=float(gap),
            trace=total,
            roles=dict(zip(spread.groups, spread.mass[0].tolist(), strict=True)),
            products=products,
            converged=both_ends.converged,
            condition_number=condition,
            condition_interval=condition_interval,
        )
        self.history.append(result)
        return result

    @evaluated
    def analyze_layer_wise_curvature(
        self, x: Any, y: Any = None, *, rtol: float = 0.1
    ) -> LayerWiseCurvature:
        """Top eigenvalue, norms and trace of every (layer, sublayer) diagonal block, and norm and
        trace of the Hessian with respect to every module's output (``module_wise_curvature`` has
        both module by module).

        (x, y), or a mapping x with labels. Without targets the loss is that of the model's own
        predictions (cross-entropy: the most likely class; mean squared error: zero), which
        ``result.target`` says. The result is a sequence of rows, one a module.
        """
        origin = "given"
        if y is None and not (isinstance(x, Mapping) and x.get("labels") is not None):
            problem, origin = own_targets(self.model, self.loss, x, distributed=self.distributed)
            op = Hessian(problem)
        else:
            op = self._hessian(paired(x, y))
        # A module's output exists for the samples of this process only.
        op.problem.require_one_process(
            "the curvature of every module's output", maker="TransformerHessianAnalyzer"
        )
        groups: dict[tuple[int | None, str], list[Any]] = {}
        for piece in op.problem.anatomy:
            groups.setdefault((piece.layer, piece.sublayer), []).append(piece)
        entries, products = [], 0
        for (layer, sublayer), pieces in track(groups.items(), "layers", total=len(groups)):
            block: LinearOperator = op[pieces, pieces]
            top = eigenpairs(block, k=1, tol=1e-3, seed=self.seed)
            norm = spectral_norm(block, seed=self.seed)
            size = frobenius_norm(block, rtol=rtol, seed=self.seed, max_products=200)
            total = trace(block, rtol=rtol, seed=self.seed, max_products=200)
            products += top.products + norm.products + size.products + total.products
            entries.append(
                LayerCurvature(
                    layer=layer,
                    sublayer=sublayer,
                    size=block.shape[0],
                    top_eigenvalue=top.value,
                    top_interval=(top.number(0).low, top.number(0).high),
                    spectral_norm=norm,
                    frobenius=size,
                    trace=total,
                )
            )
        outputs, more = activation_curvature(op.problem, probes=8, seed=self.seed)
        result = LayerWiseCurvature(
            layers=tuple(entries),
            activations={path: measure for path, (measure, *_) in outputs.items()},
            products=products + more,
            output_norms={p: float(torch.linalg.norm(a)) for p, (_, a, _) in outputs.items()},
            slopes={path: slope for path, (*_, slope) in outputs.items()},
            target=origin,
        )
        self.history.append(result)
        return result

    def _hessian(self, data: Any) -> Hessian:
        return Hessian(Problem(self.model, self.loss, data, distributed=self.distributed))

    def _file(self, what: str, op: Hessian) -> Path | None:
        """A checkpoint of its own for every call, weights and data: both name it."""
        if self.folder is None:
            return None
        told = content(op.content()).hex()[:12]
        return self.folder / f"{len(self.history):03d}-{what}-{told}.safetensors"


class ConvergenceDiagnostics:
    """Measures what decides whether and how fast a model trains; data go to the methods.

    A model in train mode is evaluated in evaluation mode, which is said once, and put back.
    ``loss_history`` and ``grad_history`` (‖∇L‖) have a number for each step of every trajectory,
    ``curvature_history`` the condition number of each look.
    """

    def __init__(self, model: nn.Module, *, loss: LossLike = "cross_entropy") -> None:
        self.model = model
        self.loss = loss
        self.loss_history: list[float] = []
        self.grad_history: list[float] = []
        self.curvature_history: list[float] = []

    @evaluated
    def compute_effective_conditioning(
        self, x: Any, y: Any = None, *, loss: LossLike | None = None, **options: Any
    ) -> EffectiveConditioning:
        """``effective_conditioning`` of one batch, whose options these are."""
        problem = Problem(self.model, self.loss if loss is None else loss, paired(x, y))
        return effective_conditioning(problem, **options)

    @evaluated
    @also_named(dataloader="data")
    def analyze_convergence_trajectory(
        self,
        data: Any,
        n_steps: int = 100,
        *,
        loss: LossLike | None = None,
        in_place: bool = False,
        **options: Any,
    ) -> ConvergenceTrajectory:
        """``convergence_trajectory``, whose options these are, of a copy unless ``in_place``."""
        model = self.model if in_place else copy.deepcopy(self.model)
        problem = Problem(model, self.loss if loss is None else loss, data)
        found = convergence_trajectory(problem, n_steps, **options)
        self.loss_history += found.losses.tolist()
        self.grad_history += found.gradient_norms.tolist()
        self.curvature_history += [look.condition_number for look in found.looks]
        return found


class TaylorExpansionAnalyzer:
    """Local models of a network's loss, each compared with the loss itself.

    A model in train mode is evaluated in evaluation mode, which is said once, and put back.
    Data go to the methods: a batch as ``(x, y)``, or anything ``Problem`` takes as one argument.
    Methods that are given none use the data of the last call. ``hessian_cache`` keeps the largest
    eigenvalue that ``estimated_hessian_eigenvalue`` reads, for each state of weights and data.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: LossLike = "cross_entropy",
        parameters: Parameters | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.parameters = parameters
        self.hessian_cache: dict[str, Eigenpairs] = {}
        self._problem: Problem | None = None
        self._eigenvalue: float | None = None  # set from outside, or seen in a trajectory

    @classmethod
    def from_problem(cls, problem: Problem) -> TaylorExpansionAnalyzer:
        """An analyzer whose methods use the problem's model, loss, data and parameters."""
        names = list(problem.parameter_names)
        analyzer = cls(problem.model, loss=problem.loss, parameters=names)
        analyzer._problem = problem
        return analyzer

    @property
    def estimated_hessian_eigenvalue(self) -> float:
        """What was set, or the last ``avg_curvature`` of a trajectory, else λmax on the data."""
        if self._eigenvalue is not None:
            return self._eigenvalue
        if self._problem is None:
            raise AttributeError(
                "no eigenvalue yet: set estimated_hessian_eigenvalue, estimate it from a "
                "trajectory, or give data to a method."
            )
        operator = Hessian(self._problem)
        key = content(operator.content()).hex()
        if key not in self.hessian_cache:
            with without_randomness(self.model):
                self.hessian_cache[key] = eigenpairs(operator, k=1, which="largest", tol=1e-6)
        return self.hessian_cache[key].value

    @estimated_hessian_eigenvalue.setter
    def estimated_hessian_eigenvalue(self, value: float) -> None:
        self._eigenvalue = float(value)

    @evaluated
    def compute_taylor_coefficients(
        self,
        x: Any = None,
        y: Any = None,
        other_x: Any = None,
        other_y: Any = None,
        *,
        x_train: Any = None,
        displacement: Displacement | None = None,
        checkpoint: nn.Module | Mapping[str, Tensor] | None = None,
        loss: LossLike | None = None,
        **options: Any,
    ) -> TaylorExpansion:
        """``taylor_expansion`` (whose options these are) along ``displacement``, or to the weights
        of another model or state dict, ``checkpoint``.

        With a second data set (``other_x``, ``other_y``) every term is that of L_other − L. As in
        the article, ``compute_taylor_coefficients(x, y, x_train)``: the difference that the samples
        (x, y) make when they are added to ``x_train``, L_{k+1} − L_k. ``x_train``: data of its own
        (a batch with targets, a loader), or inputs alone, whose targets are then the model's own
        predictions. The displacement may then be left out: the unit vector of steepest descent.
        """
        if x_train is None and other_x is not None and other_y is None and _is_inputs(other_x):
            other_x, x_train = None, other_x
        first, second = _datasets(x, y, other_x, other_y)
        if x_train is not None and second is not None:
            raise ValueError("pass x_train= or a second data set, not both.")
        problem = self._problem_of(first, loss)
        if displacement is None and checkpoint is None and x_train is not None:
            gradient = problem.gradient()
            if not bool(gradient.any()):
                raise ValueError("the gradient is zero: give displacement= or checkpoint=.")
            displacement = -gradient / torch.linalg.vector_norm(gradient)
        if (displacement is None) == (checkpoint is None):
            raise ValueError(
                "give either displacement= or checkpoint=: where the loss is expanded."
            )
        if checkpoint is not None:
            displacement = towards(problem, checkpoint)
        between = None
        if second is not None:
            between = problem, problem.with_data(second)
        elif x_train is not None:
            between = self._with_samples_added(x_train, loss, problem)
        assert displacement is not None
        return taylor_expansion(problem, displacement, between=between, **options)

    def _with_samples_added(
        self, x_train: Any, loss: LossLike | None, added: Problem
    ) -> tuple[Problem, Problem]:
        """The loss of the training data alone, and with the samples of ``added``."""
        before = added.with_data(x_train) if not _is_inputs(x_train) else None
        if before is None:
            named, _ = own_targets(self.model, self.loss if loss is None else loss, x_train)
            before = added.with_data([(b.inputs, b.targets) for b in named.batches()])
        before.require_mean("the difference that added samples make")
        batches = [*before.batches(), *added.batches()]
        return before, before.with_batches([replace(b, index=i) for i, b in enumerate(batches)])

    @evaluated
    def radius(
        self, x: Any = None, y: Any = None, *, loss: LossLike | None = None, **options: Any
    ) -> TrustRadius:
        """``trust_radius``, whose options these are: how far a Taylor model holds."""
        return trust_radius(self._problem_of(_datasets(x, y, None, None)[0], loss), **options)

    @evaluated
    def predict_convergence_trajectory(
        self,
        n_steps: int,
        learning_rate: float,
        x: Any = None,
        y: Any = None,
        *,
        loss: LossLike | None = None,
        **options: Any,
    ) -> PredictedTrajectory | list[dict[str, float]]:
        """``predict_trajectory``, whose options these are: gradient descent by the quadratic model.

        Where no data are known but ``estimated_hessian_eigenvalue`` is λ: rows of one mode alone,
        the distance to its minimum ``delta_w_norm`` (1 at first) and ``delta_w_predicted`` after
        the step, 1 − ηλ times as far.
        """
        if x is None and self._problem is None and self._eigenvalue is not None:
            shrink = 1 - learning_rate * self._eigenvalue
            pairs = itertools.pairwise(shrink**step for step in range(n_steps + 1))
            return [
                {"step": step, "delta_w_norm": before, "delta_w_predicted": after}
                for step, (before, after) in enumerate(pairs)
            ]
        problem = self._problem_of(_datasets(x, y, None, None)[0], loss)
        return predict_trajectory(problem, n_steps, learning_rate, **options)

    @evaluated
    def critical_learning_rate(
        self, x: Any = None, y: Any = None, *, loss: LossLike | None = None, **options: Any
    ) -> CriticalLearningRate:
        """``critical_rate``, whose options these are: 2(1 + μ)/λmax, tried by training."""
        return critical_rate(self._problem_of(_datasets(x, y, None, None)[0], loss), **options)

    @also_named(loss_trajectory="trajectory")
    def estimate_hessian_from_trajectory(
        self, trajectory: Any, learning_rate: float | None = None, **options: Any
    ) -> ObservedCurvature:
        """``observed_curvature`` of losses, of rows with a ``loss`` or of weights; its options."""
        found = observed_curvature(trajectory, learning_rate, **options)
        self._eigenvalue = found.avg_curvature
        return found

    def _problem_of(self, data: Any, loss: LossLike | None) -> Problem:
        if data is None:
            if self._problem is None:
                raise ValueError("no data yet: pass (x, y) or data to this call.")
            if loss is None:
                return self._problem
            data = self._problem.data
        chosen = self.loss if loss is None else loss
        self._problem = Problem(self.model, chosen, data, parameters=self.parameters)
        return self._problem


def _datasets(x: Any, y: Any, other_x: Any, other_y: Any) -> tuple[Any, Any]:
    """(data, other data) from whichever way they were passed; None where there is none."""
    if x is not None and y is not None and not isinstance(y, (Tensor, np.ndarray)):
        if other_x is not None or other_y is not None:
            raise ValueError("two data sets were given and a third: pass x, y, other_x, other_y.")
        return x, y  # two data sets, one an argument
    return paired(x, y), paired(other_x, other_y)


def _is_inputs(data: Any) -> bool:
    """Inputs without targets: a tensor, an array or a mapping without labels."""
    if isinstance(data, Mapping):
        return data.get("labels") is None
    return isinstance(data, (Tensor, np.ndarray))


class ScalingLawAnalyzer(GridTrainer):
    """Trains models that ``model_factory`` makes, on growing data, and fits what it sees.

    Models, ``model_factory`` and ``dataloader``: as of ``GridTrainer``; ``grid`` has the runs.
    """

    @also_named(dataloader="data")
    def compute_hessian_norm(
        self,
        model: nn.Module,
        data: Any,
        targets: Any = None,
        *,
        n_samples: int | None = None,
        loss: LossLike | None = None,
        rtol: float = 1e-3,
        products: int = 60,
        seed: int = 0,
    ) -> HessianNorm:
        """‖H‖₂ of the model's loss on ``data`` (or on the batch (data, targets)), certified.

        n_samples: only the first so many samples. products: for condition number and rank.
        """
        if n_samples is not None and n_samples < 1:
            raise ValueError(f"n_samples is at least 1, got {n_samples}.")
        with without_randomness(model):
            problem = Problem(model, self.loss if loss is None else loss, paired(data, targets))
            if n_samples is not None:
                problem = subset(problem, torch.arange(n_samples, device="cpu"))
            return hessian_norm(Hessian(problem), products=products, rtol=rtol, seed=seed)

    def analyze_scaling_with_size(
        self, model_sizes: Sequence[Any], dataset_sizes: Sequence[int], **options: Any
    ) -> Any:
        """``train_grid`` as a ``pandas.DataFrame``, a row a run; ``grid`` keeps the laws.

        Each row has ``n_params``, ``n_samples``, ``top_eigenvalue``, ``bottom_eigenvalue``,
        ``condition_number``, ``effective_rank`` and every other number of the run.
        """
        Table.of([]).to_dataframe()  # a missing pandas is said before hours of training
        grid = self.train_grid(model_sizes, dataset_sizes, **options)
        first = ["n_params", "n_samples", "top_eigenvalue", "bottom_eigenvalue"]
        first += ["condition_number", "effective_rank"]
        pairs = zip(grid.cells, grid.rows, strict=True)
        rows = [{**{key: cell[key] for key in first}, **row} for cell, row in pairs]
        return Table.of(rows).to_dataframe()

    def predict_optimal_dataset_size(
        self,
        model_size: Any,
        target_condition: float | None = None,
        *,
        target: float | None = None,
        quantity: str = "validation_loss",
        grid: ScalingGrid | None = None,
        **options: Any,
    ) -> DatasetPrediction:
        """``optimal_dataset_size``, whose options these are: the samples D at which the condition
        number λmax / mean|λ| reaches ``target_condition``, or ``quantity`` its ``target``; without
        either the compute-optimal D."""
        if target_condition is not None:
            if target is not None or quantity not in ("validation_loss", "condition_number"):
                raise ValueError("give target_condition alone, or target with quantity.")
            target, quantity = target_condition, "condition_number"
        return optimal_dataset_size(
            self._grid(grid), model_size, target=target, quantity=quantity, **options
        )

    def compare_predictions(self, grid: ScalingGrid | None = None) -> PredictionComparison:
        """Hold out the largest data size; predict its losses by loss, by curvature, by neither."""
        return compare_predictions(self._grid(grid))

    def _grid(self, grid: ScalingGrid | None) -> ScalingGrid:
        grid = self.grid if grid is None else grid
        if grid is None:
            raise ValueError(
                "no runs yet: call analyze_scaling_with_size(model_sizes, dataset_sizes) first (2 "
                "sizes of each for a condition number, 3 for a loss), or pass grid=."
            )
        return grid


_TOKENS, _LENGTH, _SAMPLES = 50, 32, 8


class TokenTransformer(nn.Module):
    """Embedding, learned positions, ``nn.TransformerEncoder`` with its dropout, a linear head."""

    def __init__(self, *, tokens: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) integers → logits (B, L, tokens)."""
        logits: Tensor = self.head(
            self.encoder(self.embedding(tokens) + self.positions[:, : tokens.shape[1]])
        )
        return logits


def demo_hessian_analysis(
    *, steps: int = 50, every: int = 10, seed: int = 0
) -> tuple[TransformerHessianAnalyzer, CurvatureAwareOptimizer]:
    """Train on one random batch for ``steps`` steps, with the Hessian analysed now and then.

    The model stays in train mode, dropout included, and each step adapts its rate to the curvature
    along it; every ``every`` steps ``analyze_full_hessian`` looks at the network in evaluation
    mode. Prints a line a look and returns (analyzer, optimizer): ``analyzer.history`` has the
    Hessian's norms, condition numbers and eigenvalues over the steps.
    """
    if steps < 1 or every < 1:
        raise ValueError(f"steps and every are at least 1, got {steps} and {every}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TokenTransformer(tokens=_TOKENS, length=_LENGTH, width=16, heads=2, layers=2)
        x, y = torch.randint(0, _TOKENS, (2, _SAMPLES, _LENGTH)).unbind()
        analyzer = TransformerHessianAnalyzer(model, seed=seed)
        optimizer = CurvatureAwareOptimizer(model, base_lr=1e-3)
        for step in range(steps):
            if step % every == 0:
                found = analyzer.analyze_full_hessian([(x, y)], n_batches=1, k=2)
                print(
                    f"step {step}: ‖H‖ {found.mean_hessian_norm:.4g}, "
                    f"λmax {found.top_eigenvalue:.4g}, λmax/mean|λ| {found.condition_number:.4g}"
                )
            done = optimizer.step_with_curvature_adaptation(x, y)
        print(f"step {steps}: loss {done:.4f}, rate {done.learning_rate:.3g}")
    return analyzer, optimizer
