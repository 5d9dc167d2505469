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
    verify_layernorm_hessian()           jacobian, hessian, contraction, weight_hessian, passed

The closed forms are in ``closed_form``, ``CurvatureAwareOptimizer`` in ``training``, pictures in
``figures``. A model in train mode is evaluated in evaluation mode, which is said once, and put
back. Options that a method only names are those of the function it names.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import functional
from torch.func import functional_call

from curvatlas import scaling
from curvatlas.analysis.atlas.layerwise import activation_curvature
from curvatlas.analysis.conditioning import EffectiveConditioning, effective_conditioning
from curvatlas.analysis.diagnostics import ConvergenceTrajectory, convergence_trajectory
from curvatlas.analysis.landscape import taylor, taylor_result
from curvatlas.analysis.landscape.line import Displacement, towards
from curvatlas.analysis.propagation.result import Measure
from curvatlas.closed_form.modules import LayerNormHessian
from curvatlas.display import Table
from curvatlas.layers.structure import Norm
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
from curvatlas.results import Interval, Number, Result, Rows, also_named
from curvatlas.spectra.eigen_result import Eigenpairs, Which
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.estimate import Estimate
from curvatlas.spectra.norms import frobenius_norm, spectral_norm
from curvatlas.spectra.summary import CurvatureSummary, curvature_summary, participation
from curvatlas.spectra.trace import trace
from curvatlas.training.optimizer import CurvatureAwareOptimizer

SERIES = ("hessian_norms", "condition_numbers", "eigenvalue_spectra", "layer_curvatures")
_MAKER = "TransformerHessianAnalyzer"  # which takes distributed=False


@dataclass(frozen=True, kw_only=True)
class FullHessianAnalysis(CurvatureSummary):
    """The summary of the Hessian of all data, and the scatter of its ends over the batches."""

    top_eigenvalue: float  # of the whole data
    values: Tensor  # (B, k) largest eigenvalues of every batch
    norms: tuple[float, ...]  # ‖H‖₂ of every batch
    mean_hessian_norm: float  # of ``norms``
    eigenvalue_mean: float  # of ``values``, over batches and eigenvalues
    eigenvalue_std: float
    roles: dict[str, float]  # mass of the top eigenvector by role

    def _lines(self) -> list[str]:
        lead = max(self.roles, key=lambda role: self.roles[role])
        lines = [*super()._lines(), f"top vector mostly in {lead} ({self.roles[lead]:.0%})"]
        if len(self.values) > 1:
            pairs = zip(self.values.mean(0).tolist(), self.values.std(0).tolist(), strict=True)
            spread = ", ".join(f"{mean:.4g} ± {scatter:.2g}" for mean, scatter in pairs)
            lines.append(f"over {len(self.values)} batches: {spread}")
        return lines


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

    def __str__(self) -> str:
        return (
            f"{'-' if self.layer is None else self.layer:>3} {self.sublayer:<10} λmax "
            f"{Number(self.top_eigenvalue, *self.top_interval)}"
            f"  ‖·‖_F {self.frobenius.number}  trace {self.trace.number}"
        )


@dataclass(frozen=True, kw_only=True)
class LayerWiseCurvature(Rows, Result):
    """Curvature of every layer's sublayers, and of what every module puts out."""

    layers: tuple[LayerCurvature, ...]
    activations: dict[str, Measure]  # module path → ∂²L/∂a² of its output a: norm and trace
    products: int
    output_norms: dict[str, float] = field(default_factory=dict)  # module path → ‖a‖ over the batch
    slopes: dict[str, float] = field(default_factory=dict)  # module path → ‖∂L/∂a‖
    target: str = "given"  # where the targets came from

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """One mapping a module; ``curvature`` is ‖∂²L/∂a²‖_F, the article's proxy a slope."""
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

    def __str__(self) -> str:
        outputs = (
            f"output of {path or 'the model'}: ‖·‖_F {Number(one.norm, *one.norm_interval)}  "
            f"trace {Number(one.trace, *one.trace_interval)}"
            for path, one in self.activations.items()
        )
        return "\n".join([*map(str, self.layers), *outputs])


@dataclass(eq=False, repr=False)
class TransformerHessianAnalyzer:
    """Eigenvalues, whole-data statistics and layer-wise curvature of a model's loss Hessian.

    loss and distributed: as in ``Problem``. folder: where long estimates keep checkpoints, so that
    the same sequence of calls resumes after a kill. history: ``hessian_norms`` has a number a batch
    and ``condition_numbers`` one a call of the full analysis, ``eigenvalue_spectra`` and
    ``layer_curvatures`` what each call computed of them.
    """

    model: nn.Module
    _: KW_ONLY
    loss: LossLike = "cross_entropy"
    seed: int = 0
    folder: str | os.PathLike[str] | None = None
    distributed: bool | None = None
    history: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in SERIES}, init=False
    )

    @evaluated
    def compute_hessian_eigenvalues(
        self, x: Any, y: Any = None, k: int = 20, *, which: Which = "largest", tol: float = 1e-4
    ) -> Eigenpairs:
        """The k largest (or other) Hessian eigenpairs of one batch, or all if there are fewer.

        (x, y), or x alone a mapping with labels. The result reads like the tensor of its values.
        """
        op = self._hessian(paired(x, y))
        file = self._file("eigenvalues.safetensors", op)
        k = min(k, op.shape[0])
        found = eigenpairs(op, k=k, which=which, tol=tol, seed=self.seed, checkpoint=file)
        self.history["eigenvalue_spectra"].append(found.values)
        return found

    @evaluated
    @also_named(dataloader="data")
    def analyze_full_hessian(
        self, data: Any, *, n_batches: int | None = None, k: int = 10
    ) -> FullHessianAnalysis:
        """``curvature_summary`` of the whole data's Hessian, and both ends of every batch's.

        n_batches: only the first so many batches of ``data``.
        """
        op = self._hessian(first_batches(data, n_batches))
        op.problem.require_one_process("the eigenvalues of every batch", maker=_MAKER)
        k = min(k, op.shape[0])
        file = self._file("full", op)
        whole = curvature_summary(op, k=k, max_products=40, seed=self.seed, checkpoint=file)
        ends, products, parts = whole.eigenpairs, whole.products, op.per_batch()
        values, norms = [ends.largest[:k]], [ends.norm]
        if len(parts) > 1:
            values, norms = [], []
            for _, part in track(parts, "batches", total=len(parts)):
                top = eigenpairs(part, k=k, seed=self.seed, start=ends.vectors[:, :k])
                last = ends.vectors[:, -1]
                low = eigenpairs(part, k=1, which="smallest", seed=self.seed, start=last)
                values.append(top.values)
                norms.append(max(abs(top.value), abs(low.value)))
                products += top.products + low.products
                part.release()
        tops = torch.stack(values)
        spread = participation(ends.vectors[:, 0], op.problem.anatomy)
        found = FullHessianAnalysis(
            **{**vars(whole), "products": products},
            top_eigenvalue=whole.sharpness,
            values=tops,
            norms=tuple(norms),
            mean_hessian_norm=sum(norms) / len(norms),
            eigenvalue_mean=float(tops.mean()),
            eigenvalue_std=float(tops.std()) if tops.numel() > 1 else 0.0,
            roles=dict(zip(spread.groups, spread.mass[0].tolist(), strict=True)),
        )
        self.history["hessian_norms"] += norms
        self.history["condition_numbers"].append(found.condition_number)
        self.history["eigenvalue_spectra"].append(ends.values)
        return found

    @evaluated
    def analyze_layer_wise_curvature(
        self, x: Any, y: Any = None, *, rtol: float = 0.1
    ) -> LayerWiseCurvature:
        """Every sublayer's diagonal block, and the Hessian with respect to every module's output
        (``module_wise_curvature`` has both module by module).

        (x, y), or a mapping x with labels. Without targets the loss is that of the model's own
        predictions, which ``result.target`` says. The result is a sequence of rows, one a module.
        """
        if y is not None or (isinstance(x, Mapping) and x.get("labels") is not None):
            op, origin = self._hessian(paired(x, y)), "given"
        else:
            own, origin = own_targets(self.model, self.loss, x, distributed=self.distributed)
            op = Hessian(own)
        op.problem.require_one_process("the curvature of every module's output", maker=_MAKER)
        groups: dict[tuple[int | None, str], list[Any]] = {}
        for piece in op.problem.anatomy:
            groups.setdefault((piece.layer, piece.sublayer), []).append(piece)
        layers, products = [], 0
        limits: dict[str, Any] = {"rtol": rtol, "seed": self.seed, "max_products": 200}
        for (layer, sublayer), pieces in track(groups.items(), "layers", total=len(groups)):
            block = op[pieces, pieces]
            top = eigenpairs(block, k=1, tol=1e-3, seed=self.seed)
            norm = spectral_norm(block, seed=self.seed)
            size, total = frobenius_norm(block, **limits), trace(block, **limits)
            products += top.products + norm.products + size.products + total.products
            first = top.number(0)
            layers.append(
                LayerCurvature(
                    layer=layer,
                    sublayer=sublayer,
                    size=block.shape[0],
                    top_eigenvalue=first.value,
                    top_interval=(first.low, first.high),
                    spectral_norm=norm,
                    frobenius=size,
                    trace=total,
                )
            )
        outputs, more = activation_curvature(op.problem, probes=8, seed=self.seed)
        found = LayerWiseCurvature(
            layers=tuple(layers),
            activations={path: measure for path, (measure, *_) in outputs.items()},
            products=products + more,
            output_norms={path: float(a.norm()) for path, (_, a, _) in outputs.items()},
            slopes={path: slope for path, (*_, slope) in outputs.items()},
            target=origin,
        )
        self.history["layer_curvatures"].append(list(found.rows))
        return found

    def _hessian(self, data: Any) -> Hessian:
        return Hessian(Problem(self.model, self.loss, data, distributed=self.distributed))

    def _file(self, what: str, op: Hessian) -> Path | None:
        """A checkpoint of its own for every call, weights and data: both name it."""
        if self.folder is None:
            return None
        told = content(op.content()).hex()[:12]
        calls = sum(len(self.history[name]) for name in ("eigenvalue_spectra", "layer_curvatures"))
        return Path(self.folder) / f"{calls:03d}-{told}-{what}"


@dataclass(eq=False, repr=False)
class ConvergenceDiagnostics:
    """Measures what decides whether and how fast a model trains; data go to the methods.

    ``loss_history`` and ``grad_history`` (‖∇L‖) have a number for each step of every trajectory,
    ``curvature_history`` the condition number of each look.
    """

    model: nn.Module
    _: KW_ONLY
    loss: LossLike = "cross_entropy"
    loss_history: list[float] = field(default_factory=list, init=False)
    grad_history: list[float] = field(default_factory=list, init=False)
    curvature_history: list[float] = field(default_factory=list, init=False)

    @evaluated
    def compute_effective_conditioning(
        self, x: Any, y: Any = None, **options: Any
    ) -> EffectiveConditioning:
        """``effective_conditioning`` of one batch: λmax / mean|λ|, no ratio of gradient entries."""
        return effective_conditioning(Problem(self.model, self.loss, paired(x, y)), **options)

    @evaluated
    @also_named(dataloader="data")
    def analyze_convergence_trajectory(
        self, data: Any, n_steps: int = 100, *, in_place: bool = False, **options: Any
    ) -> ConvergenceTrajectory:
        """``convergence_trajectory`` of a copy of the model, or of itself ``in_place``."""
        model = self.model if in_place else copy.deepcopy(self.model)
        found = convergence_trajectory(Problem(model, self.loss, data), n_steps, **options)
        self.loss_history += found.losses.tolist()
        self.grad_history += found.gradient_norms.tolist()
        self.curvature_history += [look.condition_number for look in found.looks]
        return found


@dataclass(eq=False, repr=False)
class TaylorExpansionAnalyzer:
    """Local models of a network's loss, each compared with the loss itself.

    Data go to the methods: a batch as ``(x, y)``, or anything ``Problem`` takes as one argument.
    Methods that are given none use the data of the last call. ``hessian_cache`` keeps the largest
    eigenvalue that ``estimated_hessian_eigenvalue`` reads, for each state of weights and data.
    """

    model: nn.Module
    _: KW_ONLY
    loss: LossLike = "cross_entropy"
    parameters: Parameters | None = None
    hessian_cache: dict[str, Eigenpairs] = field(default_factory=dict, init=False)
    _problem: Problem | None = field(default=None, init=False)  # of the last data
    _eigenvalue: float | None = field(default=None, init=False)  # set, or seen in a trajectory

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
            raise AttributeError("no eigenvalue yet: set it, or give a method data or losses.")
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
        x_train: Any = None,
        *,
        displacement: Displacement | None = None,
        checkpoint: nn.Module | Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> taylor_result.TaylorExpansion:
        """``taylor_expansion`` along ``displacement``, or to the weights of another model or state
        dict, ``checkpoint``.

        With x_train the terms are those of the article's L_{k+1} − L_k: the difference that the
        samples (x, y) make when they are added to x_train, data of its own, or inputs whose targets
        are the model's own predictions. The displacement may then be left out: the unit vector of
        steepest descent. With two data sets as x and y: of the second loss less the first.
        """
        two = y is not None and not isinstance(y, (Tensor, np.ndarray))
        if two and x_train is not None:
            raise ValueError("pass x_train= or a second data set, not both.")
        problem = self._of(x, None if two else y)
        if displacement is None and checkpoint is None and x_train is not None:
            gradient = problem.gradient()
            if not bool(gradient.any()):
                raise ValueError("the gradient is zero: give displacement= or checkpoint=.")
            displacement = -gradient / torch.linalg.vector_norm(gradient)
        elif (displacement is None) == (checkpoint is None):
            raise ValueError("give displacement= or checkpoint=: where the loss is expanded.")
        elif checkpoint is not None:
            displacement = towards(problem, checkpoint)
        between = (problem, problem.with_data(y)) if two else None
        if x_train is not None:
            between = self._with_samples_added(x_train, problem)
        assert displacement is not None
        return taylor.taylor_expansion(problem, displacement, between=between, **options)

    def _with_samples_added(self, x_train: Any, added: Problem) -> tuple[Problem, Problem]:
        """The loss of the training data alone, and with the samples of ``added``."""
        labelled = not isinstance(x_train, Mapping) or x_train.get("labels") is not None
        if isinstance(x_train, (Tensor, np.ndarray)) or not labelled:
            named, _ = own_targets(self.model, self.loss, x_train)
            x_train = [(batch.inputs, batch.targets) for batch in named.batches()]
        before = added.with_data(x_train)
        before.require_mean("the difference that added samples make")
        batches = [*before.batches(), *added.batches()]
        return before, before.with_batches([replace(b, index=i) for i, b in enumerate(batches)])

    @evaluated
    def radius(self, x: Any = None, y: Any = None, **options: Any) -> taylor_result.TrustRadius:
        """``trust_radius``: how far a Taylor model holds."""
        return taylor.trust_radius(self._of(x, y), **options)

    @evaluated
    def predict_convergence_trajectory(
        self, n_steps: int, learning_rate: float, x: Any = None, y: Any = None, **options: Any
    ) -> taylor_result.PredictedTrajectory | list[dict[str, float]]:
        """``predict_trajectory``: gradient descent by the quadratic model.

        Where only ``estimated_hessian_eigenvalue`` λ is known: rows of one mode as in the article,
        whose distance to its minimum, 1 at first, shrinks by 1 − ηλ a step.
        """
        if x is None and self._problem is None and self._eigenvalue is not None:
            shrink = 1 - learning_rate * self._eigenvalue
            pairs = itertools.pairwise(shrink**step for step in range(n_steps + 1))
            return [
                {"step": step, "delta_w_norm": before, "delta_w_predicted": after}
                for step, (before, after) in enumerate(pairs)
            ]
        return taylor.predict_trajectory(self._of(x, y), n_steps, learning_rate, **options)

    @evaluated
    def critical_learning_rate(
        self, x: Any = None, y: Any = None, **options: Any
    ) -> taylor_result.CriticalLearningRate:
        """``critical_rate``: 2(1 + μ)/λmax, tried by training."""
        return taylor.critical_rate(self._of(x, y), **options)

    @also_named(loss_trajectory="trajectory")
    def estimate_hessian_from_trajectory(
        self, trajectory: Any, learning_rate: float | None = None, **options: Any
    ) -> taylor_result.ObservedCurvature:
        """``observed_curvature`` of losses, rows with a ``loss``, or weights, with its error."""
        found = taylor.observed_curvature(trajectory, learning_rate, **options)
        self._eigenvalue = found.avg_curvature
        return found

    def _of(self, x: Any, y: Any) -> Problem:
        """The problem of these data, or of the last ones."""
        if x is not None:
            self._problem = Problem(self.model, self.loss, paired(x, y), parameters=self.parameters)
        if self._problem is None:
            raise ValueError("no data yet: pass (x, y) or data to this call.")
        return self._problem


class ScalingLawAnalyzer(scaling.GridTrainer):
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
        **options: Any,
    ) -> scaling.HessianNorm:
        """``hessian_norm`` of the model's loss on ``data`` (or on the batch (data, targets)), or on
        its first ``n_samples``: of H itself, no outer product of gradients."""
        if n_samples is not None and n_samples < 1:
            raise ValueError(f"n_samples is at least 1, got {n_samples}.")
        with without_randomness(model):
            problem = Problem(model, self.loss, paired(data, targets))
            if n_samples is not None:
                problem = subset(problem, torch.arange(n_samples, device="cpu"))
            return scaling.hessian_norm(Hessian(problem), **options)

    def analyze_scaling_with_size(
        self, model_sizes: Sequence[Any], dataset_sizes: Sequence[int], **options: Any
    ) -> Any:
        """``train_grid`` as a ``pandas.DataFrame``, a row a run; ``grid`` keeps the laws."""
        Table.of([]).to_dataframe()  # a missing pandas is said before hours of training
        grid = self.train_grid(model_sizes, dataset_sizes, **options)
        first = (
            "n_params n_samples top_eigenvalue bottom_eigenvalue condition_number effective_rank"
        )
        pairs = zip(grid.cells, grid.rows, strict=True)
        rows = [{**{key: cell[key] for key in first.split()}, **row} for cell, row in pairs]
        return Table.of(rows).to_dataframe()

    def predict_optimal_dataset_size(
        self,
        model_size: Any,
        target_condition: float | None = None,
        *,
        grid: scaling.ScalingGrid | None = None,
        **options: Any,
    ) -> scaling.DatasetPrediction:
        """``optimal_dataset_size`` by the fitted laws, for a ``target`` of a ``quantity``, or the D
        at which λmax / mean|λ| is ``target_condition``; without either the compute-optimal D."""
        if target_condition is not None:
            if options.keys() & {"target", "quantity"}:
                raise ValueError("give target_condition alone, or target with quantity.")
            options |= {"target": target_condition, "quantity": "condition_number"}
        return scaling.optimal_dataset_size(self._grid(grid), model_size, **options)

    def compare_predictions(
        self, grid: scaling.ScalingGrid | None = None
    ) -> scaling.PredictionComparison:
        """Hold out the largest data size; predict its losses by loss, by curvature, by neither."""
        return scaling.compare_predictions(self._grid(grid))

    def _grid(self, grid: scaling.ScalingGrid | None) -> scaling.ScalingGrid:
        grid = self.grid if grid is None else grid
        if grid is None:
            raise ValueError(
                "no runs yet: call analyze_scaling_with_size(model_sizes, dataset_sizes) first (2 "
                "sizes of each for a condition number, 3 for a loss), or pass grid=."
            )
        return grid


class TokenTransformer(nn.Module):
    """``nn.Embedding``, learned positions, ``nn.TransformerEncoder`` with its dropout, a head."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) integers → logits (B, L, tokens)."""
        x = self.embedding(tokens) + self.positions[:, : tokens.shape[1]]
        logits: Tensor = self.head(self.encoder(x))
        return logits


def demo_hessian_analysis(
    *, steps: int = 50, every: int = 10, seed: int = 0
) -> tuple[TransformerHessianAnalyzer, CurvatureAwareOptimizer]:
    """Train a small token Transformer on one random batch, in train mode, each step's rate adapted
    to the curvature along it; every ``every`` steps print ``analyze_full_hessian``.

    Returns (analyzer, optimizer); ``analyzer.history`` has the series over the steps.
    """
    if steps < 1 or every < 1:
        raise ValueError(f"steps and every are at least 1, got {steps} and {every}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TokenTransformer(tokens=50, length=32, width=16)
        x, y = torch.randint(0, 50, (2, 8, 32)).unbind()
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


@dataclass(frozen=True, kw_only=True)
class NormVerification(Result):
    """Largest relative errors of the closed forms against double backward."""

    jacobian: float
    hessian: float
    contraction: float
    weight_hessian: float
    tolerance: float
    passed: bool

    def __str__(self) -> str:
        names = ("jacobian", "hessian", "contraction", "weight_hessian")
        errors = ", ".join(f"{name.replace('_', ' ')} {self[name]:.1e}" for name in names)
        word = "agrees" if self.passed else "DISAGREES"
        return f"closed form {word} with double backward: {errors} (up to {self.tolerance:.1e})"


def verify_layernorm_hessian(
    d_model: int = 8,
    length: int = 4,
    *,
    eps: float = 1e-5,
    norm: Norm = "layer",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> NormVerification:
    """Compare every closed form of a random norm with double backward at random tokens."""
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, length, d_model, generator=random, dtype=dtype, device="cpu")
    x, target, delta = drawn.unbind()
    layer = LayerNormHessian(d_model, eps, norm=norm).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=random)
    names = [name for name, _ in layer.named_parameters()]

    def loss(*values: Tensor) -> Tensor:
        y: Tensor = functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return (y - target).square().mean()

    # reverse over reverse: torch.func.hessian is silently wrong through normalisations
    jacobian: Any = functional.jacobian
    hessian: Any = functional.hessian
    bend = hessian(lambda tokens: (delta * layer(tokens)).sum(), x)  # (L, d, L, d)
    bend = bend.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (L, d, d): tokens do not meet
    rows = hessian(loss, tuple(layer.parameters()))
    tensor, contracted = layer.compute_hessian(x), layer.compute_hessian(x, cotangent=delta)
    by_weight = layer.compute_hessian_wrt_parameters(x, target).H
    compared = {
        "jacobian": (layer.compute_jacobian(x), jacobian(layer, x).reshape(x.numel(), -1)),
        "hessian": (torch.einsum("la,labc->lbc", delta, tensor), bend),
        "contraction": (contracted, bend),
        "weight_hessian": (by_weight, torch.cat([torch.cat(row, 1) for row in rows])),
    }
    errors = {name: float((a - b).norm() / b.norm()) for name, (a, b) in compared.items()}
    tolerance = 200 * torch.finfo(dtype).eps
    passed = max(errors.values()) <= tolerance
    return NormVerification(**errors, tolerance=tolerance, passed=passed)
