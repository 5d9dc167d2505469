"""Every public entry point takes Hugging Face models and batches, of six kinds, by one door."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import BatchEncoding
from transformers.utils.generic import ModelOutput

import curvatlas as ca
from curvatlas.analysis.landscape import convergence
from huggingface_models import tiny_model

KINDS = ("gpt2", "llama", "bert classification", "bert masked", "vit", "t5")
_HEADS = {
    "bert classification": "SEQUENCE_CLASSIFICATION",
    "bert masked": "MASKED_LM",
    "vit": "IMAGE_CLASSIFICATION",
}
_WIDTHS = ("hidden_size", "d_model", "n_embd", "intermediate_size", "d_ff", "n_inner")
_HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads")


def model_of(kind: str, width: int = 4) -> nn.Module:
    return tiny_model(
        kind.split()[0],
        head=_HEADS.get(kind),
        decoder_start_token_id=0,
        **dict.fromkeys(_WIDTHS, width),
        **dict.fromkeys(_HEAD_COUNTS, 2),
        **dict.fromkeys(("head_dim", "d_kv"), width // 2),
        **dict.fromkeys(("max_position_embeddings", "n_positions"), 8),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), 1),
    )


def batch_of(kind: str, samples: int) -> dict[str, Tensor]:
    """A batch as a collator makes it: padding, an attention mask, ignored labels."""
    generator = torch.Generator().manual_seed(len(kind))
    if kind == "vit":
        images = torch.randn(samples, 3, 8, 8, generator=generator)
        return {"pixel_values": images, "labels": torch.arange(samples) % 3}
    tokens = torch.randint(3, 19, (samples, 4), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, 3] = tokens[0, 3] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    if kind == "bert classification":
        labels = torch.arange(samples) % 3
    elif kind == "bert masked":
        labels = labels.index_fill(1, torch.tensor([0, 2]), -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class Rows(Dataset[dict[str, Tensor]]):
    """The samples of a batch by number, as a dataset of Hugging Face gives them."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        if place >= len(self):
            raise IndexError(place)
        return {key: value[place] for key, value in self.batch.items()}


def collated(rows: list[dict[str, Tensor]]) -> BatchEncoding:
    return BatchEncoding({key: torch.stack([row[key] for row in rows]) for key in rows[0]})


@dataclass
class Case:
    kind: str
    folder: Path

    def __post_init__(self) -> None:
        self.model = model_of(self.kind)
        self.batch = batch_of(self.kind, 4)
        self.many = batch_of(self.kind, 20)
        self.loader = DataLoader(Rows(self.batch), batch_size=2, collate_fn=collated)
        generator = torch.Generator().manual_seed(0)
        self.vector = torch.randn(self.problem.size, generator=generator)

    @functools.cached_property
    def problem(self) -> ca.Problem:
        """One for all doors: where its samples lie is found once."""
        return ca.Problem(self.model, None, self.batch)

    @property
    def encoding(self) -> BatchEncoding:
        return BatchEncoding(self.batch)

    @property
    def copy(self) -> nn.Module:
        return copy.deepcopy(self.model)


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("runs"))


def test_the_loss_is_the_models_own_in_every_form_of_its_batch(case: Case) -> None:
    own = case.model(**case.batch).loss.item()
    forms: dict[str, Any] = {
        "a mapping": case.batch,
        "a BatchEncoding": case.encoding,
        "lists of numbers": {key: value.tolist() for key, value in case.batch.items()}
        if case.kind != "vit"
        else case.batch,
        "a ModelOutput": ModelOutput(case.batch),
        "a list of batches": [case.encoding],
        "a dataset": Rows(case.batch),
        "a loader with a collator": case.loader,
    }
    for form, data in forms.items():
        for loss in (None, "model", "cross_entropy"):
            value = ca.Problem(case.model, loss, data).value()
            assert value == pytest.approx(own, rel=1e-5), (form, loss)


# Every entry point that takes a model and data, as a user calls it: name → one number of it.
DOORS: dict[str, Callable[[Case], float]] = {
    # operators
    "Hessian": lambda c: float((ca.Hessian(c.problem) @ c.vector).norm()),
    "GaussNewton": lambda c: float((ca.GaussNewton(c.problem) @ c.vector).norm()),
    "FunctionalHessian": lambda c: float((ca.FunctionalHessian(c.problem) @ c.vector).norm()),
    "Fisher": lambda c: float((ca.Fisher(c.problem) @ c.vector).norm()),
    "Jacobian": lambda c: float((ca.Jacobian(c.problem) @ c.vector).norm()),
    "KFAC": lambda c: float((ca.KFAC(c.problem) @ c.vector).norm()),
    "EKFAC": lambda c: float((ca.EKFAC(c.problem) @ c.vector).norm()),
    "ThirdDerivative": lambda c: float(ca.ThirdDerivative(c.problem)(c.vector).norm()),
    "entries": lambda c: float(ca.entries(c.problem, most=24).matrix.norm()),
    # analyzers
    "compute_hessian_eigenvalues": lambda c: float(
        ca.TransformerHessianAnalyzer(c.model).compute_hessian_eigenvalues(c.encoding, k=2)[0]
    ),
    "analyze_full_hessian": lambda c: float(
        ca.TransformerHessianAnalyzer(c.model)
        .analyze_full_hessian(c.loader, n_batches=1, k=2)
        .top_eigenvalue
    ),
    "analyze_layer_wise_curvature": lambda c: float(
        ca.TransformerHessianAnalyzer(c.model)
        .analyze_layer_wise_curvature(ModelOutput(c.batch), rtol=0.5)
        .layers[0]
        .top_eigenvalue
    ),
    "analyze_layer_wise_curvature without labels": lambda c: float(
        ca.TransformerHessianAnalyzer(c.model)
        .analyze_layer_wise_curvature(
            {key: value for key, value in c.batch.items() if key != "labels"}, rtol=0.5
        )
        .layers[0]
        .top_eigenvalue
    ),
    "module_wise_curvature": lambda c: float(
        ca.module_wise_curvature(c.model, c.encoding).modules[0].activation.norm
    ),
    "analyze_attention_curvature": lambda c: float(
        ca.analyze_attention_curvature(c.model, [c.batch])[0]["h_WV"]
    ),
    "atlas": lambda c: float(ca.atlas(c.problem, method="sketch", products=120).names.__len__()),
    "analyze_curvature_flow": lambda c: float(
        ca.CurvaturePropagationAnalyzer(c.model).analyze_curvature_flow(c.encoding).loss
    ),
    "compute_layer_curvature": lambda c: float(
        ca.CurvaturePropagationAnalyzer(c.model)
        .compute_layer_curvature(c.batch, 0)
        .attn_curvature
    ),
    "compute_effective_conditioning": lambda c: float(
        ca.ConvergenceDiagnostics(c.model)
        .compute_effective_conditioning(c.encoding, products=20)
        .largest
    ),
    "analyze_convergence_trajectory": lambda c: float(
        ca.ConvergenceDiagnostics(c.model)
        .analyze_convergence_trajectory([c.encoding], n_steps=2, looks=2, products=6)
        .losses[-1]
    ),
    "landscape_convergence": lambda c: float(
        ca.landscape_convergence(
            ca.Problem(c.model, None, c.many), orders=5, spectra=0, probes=2, outliers=0
        ).displacement_norm
    ),
    "retrained_convergence": lambda c: float(
        ca.retrained_convergence(
            ca.Problem(c.model, None, c.many),
            optimizers=["adam"],
            schedules=["cosine"],
            sizes=(10, 12, 14, 16),
            orders=3,
            steps=1,
            polish=0,
            tolerance=1e6,
        )
        .cells[0]
        .loss.mean[0]
    ),
    "sharpness_drift": lambda c: ca.sharpness_drift(c.problem, tol=1e-3).rate,
    # Taylor models
    "compute_taylor_coefficients": lambda c: float(
        ca.TaylorExpansionAnalyzer(c.model)
        .compute_taylor_coefficients(c.encoding, displacement=0.01 * c.vector, bound_points=0)
        .quadratic
    ),
    "compute_taylor_coefficients with x_train": lambda c: float(
        ca.TaylorExpansionAnalyzer(c.model)
        .compute_taylor_coefficients(c.batch, x_train=c.many, bound_points=0)
        .quadratic
    ),
    "predict_convergence_trajectory": lambda c: float(
        ca.TaylorExpansionAnalyzer(c.model)
        .predict_convergence_trajectory(2, 0.01, c.encoding)
        .values[-1]
    ),
    "critical_learning_rate": lambda c: float(
        ca.TaylorExpansionAnalyzer(c.model).critical_learning_rate(c.batch, steps=3).value
    ),
    "radius": lambda c: float(ca.TaylorExpansionAnalyzer(c.model).radius(c.batch).value),
    # training
    "step_with_curvature_adaptation": lambda c: float(
        ca.CurvatureAwareOptimizer(c.copy).step_with_curvature_adaptation(c.encoding)
    ),
    "estimate_local_curvature": lambda c: float(
        ca.CurvatureAwareOptimizer(c.copy).estimate_local_curvature(ModelOutput(c.batch)).value
    ),
    "Monitor": lambda c: float(ca.Monitor(c.copy, None, c.loader).measure().loss),
    "prune": lambda c: float(ca.prune(c.model, None, c.batch, sparsity=0.3, samples=8).loss_after),
    "quantization_sensitivity": lambda c: float(
        ca.quantization_sensitivity(c.model, "cross_entropy", c.loader, bits=(4,)).loss
    ),
    "pruning_costs": lambda c: float(
        ca.pruning_costs(
            c.model,
            None,
            c.batch,
            ca.prune(c.model, None, c.batch, sparsity=0.3, method="magnitude"),
            by="role",
        ).loss
    ),
    "rounding_costs": lambda c: float(
        ca.rounding_costs(c.model, None, c.batch, bits=(4,), by="role").loss
    ),
    "quantize": lambda c: float(ca.quantize(c.model, None, c.batch, samples=8).loss_after),
    "quantization_table": lambda c: float(
        ca.quantization_table(c.model, None, c.batch, bits=(4,), groups=(4,), samples=8).loss
    ),
    "allocate_bits": lambda c: float(
        ca.allocate_bits(c.model, None, c.batch, average=4.0, bits=(3, 4, 5)).loss
    ),
    # flatness and the papers' experiments
    "sharpness_by_ascent": lambda c: float(
        ca.sharpness_by_ascent(c.problem, radius=0.01, starts=1, steps=3).value
    ),
    "relative_flatness": lambda c: float(
        ca.relative_flatness(c.problem, rtol=0.5, max_products=10).value
    ),
    "gauss_newton_quality": lambda c: float(
        len(str(ca.gauss_newton_quality(c.problem, probes=3)))
    ),
    "sinks": lambda c: float(
        len(str(ca.sinks(c.problem, levels=(0.0, 1.0), heads=False, products=9, probes=3)))
    ),
    # scaling and the whole
    "compute_hessian_norm": lambda c: float(
        ca.ScalingLawAnalyzer(lambda width: model_of(c.kind, width))
        .compute_hessian_norm(c.model, c.loader, n_samples=3, products=10)
        .value
    ),
    "analyze_scaling_with_size": lambda c: float(
        ca.ScalingLawAnalyzer(lambda width: model_of(c.kind, width))
        .analyze_scaling_with_size(
            [4], [8], data=Rows(c.many), steps=1, curvature_samples=8, products=6
        )["validation_loss"]
        .iloc[0]
    ),
    "growth": lambda c: float(
        ca.growth(c.problem, scales=(0.1, 0.2, 0.4), roles=["value"], probes=3).losses[0]
    ),
    "plan_survey": lambda c: float(len(str(ca.plan_survey(c.problem)))),
    "survey": lambda c: float(
        ca.survey(
            c.problem, output=c.folder / "survey", products=20, eigenvalues=1, skip=["density"]
        )
        .result("model.subject", ca.Result)["loss"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_a_hugging_face_batch_goes_through_the_door(
    case: Case, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of the samples that a bound is taken over, each goes through the same door
    monkeypatch.setattr(convergence, "_BOUND_SAMPLES", 1)
    value = DOORS[door](case)
    assert math.isfinite(value)
    assert value != 0


# --- bad batches: one line that says what was expected and what came ------------------------------


def changed(case: Case, labels: Tensor | None) -> dict[str, Tensor]:
    rest = {key: value for key, value in case.batch.items() if key != "labels"}
    return rest if labels is None else {**rest, "labels": labels}


@pytest.mark.parametrize("loss", [None, "cross_entropy"])
def test_labels_of_another_shape_are_refused_with_what_was_expected(
    case: Case, loss: str | None
) -> None:
    with pytest.raises(ValueError, match=r"(?s)\(2") as refusal:
        ca.Problem(case.model, loss, changed(case, case.batch["labels"][:2])).value()
    assert "\n" not in str(refusal.value)


def test_labels_that_are_all_ignored_or_missing_or_no_class_are_refused(case: Case) -> None:
    labels = case.batch["labels"]
    with pytest.raises(ValueError, match="every target is ignored"):
        ca.Problem(case.model, None, changed(case, torch.full_like(labels, -100)))
    with pytest.raises(ValueError, match="the batch has no 'labels'"):
        ca.Problem(case.model, None, changed(case, None))
    if case.kind != "t5":  # whose decoder reads the labels before anything can be compared
        with pytest.raises(ValueError, match=r"class targets must lie in 0\.\.\d+, got .* 99"):
            ca.Problem(case.model, None, changed(case, torch.full_like(labels, 99))).value()


def test_a_loss_that_is_no_number_is_refused_with_what_it_returned(case: Case) -> None:
    def each(outputs: Any, targets: Tensor) -> Tensor:
        return torch.zeros(3)

    def several(outputs: Any, targets: Tensor) -> Any:
        return {"loss": torch.zeros(())}

    with pytest.raises(ValueError, match=r"'each' must return a scalar .* got \(3,\): take its"):
        ca.Problem(case.model, each, case.batch).value()
    with pytest.raises(ValueError, match=r"'several' must return a scalar .* a mapping of loss"):
        ca.Problem(case.model, several, case.batch).value()


def test_the_doors_are_all_entry_points_that_take_a_model_or_a_problem() -> None:
    listed = " ".join(DOORS)
    missing = [name for name in entry_points() if name not in listed]
    assert not missing, f"give these a door: {missing}"


_OTHERWISE = {  # take no data, or an operator, or are studies of fixed models of their own
    "estimate_hessian_from_trajectory", "demo_hessian_analysis", "predict_optimal_dataset_size",
    "compare_predictions", "examine_claims", "anatomy_of", "from_problem", "survey",
    "compare_gauss_newton",  # trains an MLP of its own beside the user's
    "flatness", "pac_bayes",  # made of doors above; tests/analysis/landscape/test_flatness.py
    "fingerprints",  # of the models that a factory makes; tests/test_scaling.py
    "scalar_attention_spectrum",  # of a model of scalar tokens
    "rescaled", "rescaling_invariance",  # need a symmetry of the model; tested there by family
}  # fmt: skip


def entry_points() -> Iterator[str]:
    """Public functions and methods of analyzers with an argument named after a model or data."""
    import inspect

    takes = {"model", "problem", "data", "x", "dataloader"}
    for name in dir(ca):
        item = getattr(ca, name)
        if inspect.isfunction(item):
            candidates = {name: item}
        elif inspect.isclass(item) and name.endswith(("Analyzer", "Diagnostics", "Optimizer")):
            candidates = {
                key: value
                for key, value in vars(item).items()
                if inspect.isfunction(value) and not key.startswith("_")
            }
        else:
            continue
        for key, function in candidates.items():
            if takes & set(inspect.signature(function).parameters) and key not in _OTHERWISE:
                yield key
