"""A small result of every class that draws itself: plausible numbers of the right shapes."""

from __future__ import annotations

import dataclasses
import importlib
import random
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import report_samples
from curvatlas import results
from curvatlas.figures import DRAWINGS

ROLES = ("query", "key", "value", "output")
_PARTS = ("total", "outer", "functional")


def drawn_kinds() -> list[str]:
    """Every kind of result with a drawing function."""
    results.import_result_modules()
    importlib.import_module("curvatlas.studies")
    return sorted(DRAWINGS)


def sample(kind: str, seed: int = 0) -> Any:
    """A result of this kind: numbers drawn by its fields' types, shapes as ``_SHAPED`` says."""
    results.import_result_modules()
    return _filled(results._registry[kind], random.Random(seed))


def _filled(cls: Any, draw: random.Random, **given: Any) -> Any:
    make = _SHAPED.get(cls.__name__)
    fixed = {**(make(draw) if make is not None else {}), **given}
    if isinstance(fixed.get("whole_result"), results.Result):
        return fixed["whole_result"]
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in fixed:
            values[field.name] = fixed[field.name]
        elif field.init:
            values[field.name] = _value(field.name, hints[field.name], values, draw)
    return cls(**values)


def _value(name: str, hint: Any, before: dict[str, Any], draw: random.Random) -> Any:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        hint = next(option for option in inside if option is not types.NoneType)
        return _value(name, hint, before, draw)
    if hint == results.Interval:
        value = before.get(name.removesuffix("_interval").removesuffix("_threshold"))
        value = before.get("value", value) if name == "interval" else value
        value = value if isinstance(value, float) else draw.uniform(1, 2)
        return (value * draw.uniform(0.7, 0.95), value * draw.uniform(1.05, 1.4))
    if isinstance(hint, type) and issubclass(hint, results.Result):
        return _filled(hint, draw)
    if origin is tuple and inside[-1] is not Ellipsis:
        return tuple(_value(name, one, {}, draw) for one in inside)
    if origin is tuple:
        return tuple(_value(name, inside[0], {}, draw) for _ in range(3))
    if origin is dict:
        return {role: _value(name, inside[1], {}, draw) for role in ROLES}
    if origin is typing.Literal:
        return inside[0]
    plain: dict[Any, Callable[[], Any]] = {
        bool: lambda: True,
        float: lambda: draw.lognormvariate(0, 1),
        int: lambda: draw.randint(2, 9),
        str: lambda: draw.choice(("alpha", "beta", "gamma")),
        Tensor: lambda: _numbers(draw, 6),
    }
    return plain[hint]() if hint in plain else None


def _numbers(draw: random.Random, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(10**9))
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.05


def _of(kind: str, draw: random.Random, **given: Any) -> Any:
    results.import_result_modules()
    return _filled(results._registry[kind], draw, **given)


def _falling(draw: random.Random, steps: int) -> Tensor:
    return _numbers(draw, steps).cumsum(0).flip(0)


def _growth(draw: random.Random) -> dict[str, Any]:
    names = tuple(f"blocks.{layer}.{role}" for layer in range(2) for role in ROLES)
    norms = {part: _numbers(draw, 5, len(names)).cumprod(0) for part in _PARTS}
    return {
        "names": names, "roles": ROLES * 2, "layers": (0,) * 4 + (1,) * 4, "scaled": "inputs",
        "scales": (0.5, 1.0, 2.0, 4.0, 8.0), "losses": (2.0, 1.5, 1.2, 1.1, 1.0),
        "norms": norms, "low": norms, "high": norms, "window": (1.0, 4.0),
        "laws": {part: {name: _of("PowerLaw", draw) for name in names} for part in _PARTS},
    }  # fmt: skip


def _sinks(draw: random.Random) -> dict[str, Any]:
    names = tuple(f"blocks.{layer}.{role}" for layer in range(2) for role in ROLES)
    levels = tuple(
        _of(
            "SinkLevel", draw, bias=bias, density=report_samples.density(0),
            norms={part: _numbers(draw, len(names), 3) for part in _PARTS},
        )
        for bias in (0.0, 1.0, 2.0)
    )  # fmt: skip
    norms = {role: dict.fromkeys(_PARTS, draw.uniform(1, 2)) for role in ROLES}
    heads = tuple(
        _of("SinkHead", draw, layer=0, head=h, mass=0.1 + 0.2 * h, norms=norms) for h in range(3)
    )
    return {"names": names, "levels": levels, "heads": heads}


def _flow(draw: random.Random) -> dict[str, Any]:
    names = ["embedding", *(f"blocks.{i}.{s}" for i in range(2) for s in ("attention", "norm1"))]

    def entry(name: str, place: str) -> Any:
        layer = int(name.split(".")[1]) if "." in name else None
        measures = {k: _of("Measure", draw) for k in ("total", "passed_on", "created_here")}
        sublayer = name.rpartition(".")[2].removesuffix("1") if "." in name else "embedding"
        measures = {
            k: dataclasses.replace(m, norm_interval=(0.9 * m.norm, 1.2 * m.norm))
            for k, m in measures.items()
        }
        return _of(
            "FlowEntry", draw, name=name, layer=layer, sublayer=sublayer, place=place,
            aliases=(f"blocks.{layer}",) if layer is not None else (), measures=measures,
        )  # fmt: skip

    return {
        "sublayers": tuple(entry(n, "sublayer") for n in names),
        "activations": tuple(entry(n, "activation") for n in names),
        "step": 10,
    }


def _scaling(draw: random.Random) -> dict[str, Any]:
    cells = tuple(
        _of("ScalingCell", draw, parameters=n, samples=d, failure="", looks=None)
        for n in (1000, 4000) for d in (64, 256, 1024)
    )  # fmt: skip
    return {"cells": cells, "phases": {}, "planes": {}, "law": None}


def _convergence(draw: random.Random) -> dict[str, Any]:
    return {"spectra": tuple(_of("SpectrumAt", draw, k=k) for k in (16, 64, 256))}


def _reproduction(draw: random.Random) -> dict[str, Any]:
    x = torch.tensor([0.01, 0.1, 1.0, 10.0])

    def panel(title: str) -> Any:
        y = _numbers(draw, 4).cumprod(0)
        marks = (
            _of(
                "Mark",
                draw,
                x=x,
                y=y,
                low=y * 0.9,
                high=y * 1.1,
                label="H",
                style="points",
                colour="#7570b3",
                faint=False,
            ),
            _of(
                "Mark",
                draw,
                x=x,
                y=x**2,
                low=None,
                high=None,
                style="dashed",
                label="slope 2",
                colour="#667080",
                faint=False,
            ),
        )
        return _of(
            "Panel", draw, title=title, xlabel="σ", ylabel="norm", xscale="log", yscale="log",
            marks=marks, dotted=(1.0,), image=None, limits=None, borders=(), blocks=(), note="",
        )  # fmt: skip

    panels = panel("V"), panel("Q")
    values = [float(one.marks[0].y[k]) for one in panels for k in (0, 3)]
    findings = tuple(
        _of("Finding", draw, value=v, low=0.9 * v, high=1.1 * v, verdict="confirmed", told="")
        for v in values
    )
    return {"panels": panels, "findings": findings, "columns": 2,
            "shared": "none", "numbers": {}}  # fmt: skip


_SHAPED: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "Atlas": lambda draw: {"whole_result": report_samples.atlas(2, draw.randrange(99))},
    "AtlasMap": lambda draw: {
        "whole_result": report_samples.atlas(2, draw.randrange(99)).view("role")
    },
    "AttentionCurvature": lambda draw: {"batches": tuple(_of("Atlas", draw) for _ in range(3))},
    "Bounds": lambda draw: {"printed": _falling(draw, 4), "corrected": _falling(draw, 4)},
    "BlockHessian": lambda draw: {
        "names": ("W1", "W2"), "block_sizes": {"W1": 3, "W2": 4}, "_source": None,
        "parts": {part: _numbers(draw, 7, 7) for part in _PARTS},
    },
    "ConvergenceTrajectory": lambda draw: {"look_steps": (0, 5, 9), "momentum": 0.9},
    "CriticalLearningRate": lambda draw: {"ratios": (0.5, 0.9, 1.1), "momentum": 0.0},
    "CurvatureBounds": lambda draw: {
        "token_names": ROLES, "token_matrix": _numbers(draw, 4, 4),
        "exact": 2.0, "token_structured": 3.7, "data_free": 91.0, "printed": 5000.0,
    },
    "CurvatureFlow": _flow,
    "CurvatureHistory": lambda draw: {
        "snapshots": tuple(
            _of("Snapshot", draw, step=step, maps=None, moved=None) for step in (0, 10, 20, 30)
        ),
        "events": (_of("Event", draw, step=12),),
    },
    "Curve": lambda draw: {"k": torch.tensor([4.0, 16, 64, 256]), "mean": _falling(draw, 4),
                           "low": _numbers(draw, 4) / 20, "high": _numbers(draw, 4) + 4},
    "Eigenpairs": lambda draw: {
        "whole_result": report_samples.eigenpairs(draw.randrange(99), both=True)
    },
    "Entries": lambda draw: {
        "names": ("W1", "W2"), "sizes": (3, 4), "whole": (3, 4), "part": "total",
        "matrix": _numbers(draw, 7, 7),
    },
    "Generalisation": lambda draw: {
        "correlations": tuple(
            _of("MeasureCorrelation", draw, measure=name, value=0.1 * k, control=(-0.2, 0.2),
                interval=(0.1 * k - 0.2, 0.1 * k + 0.2))
            for k, name in enumerate(("sharpness", "trace", "fisher_rao"))
        )
    },
    "Growth": _growth,
    "Invariance": lambda draw: {
        "rescalings": ("norm", "heads"), "before": {"sharpness": 2.0, "trace": 3.0},
        "after": {"sharpness": (2.0, 2.5), "trace": (3.0, 31.0)}, "tolerance": 1e-9,
        "verdicts": {"sharpness": ("same", "changed"), "trace": ("same", "changed")},
    },
    "LandscapeConvergence": _convergence,
    "ModelComparison": lambda draw: {"atlases": {k: _of("Atlas", draw) for k in ("a", "b")}},
    "PredictedTrajectory": lambda draw: {
        "losses": _falling(draw, 20), "actual": _falling(draw, 20), "horizon": 12,
        "exact_steps": 8, "converges": True,
    },
    "Pruning": lambda draw: {
        "segment": torch.stack([torch.linspace(0, 1, 5, dtype=torch.float64), _numbers(draw, 5)]),
    },
    "QuantizationTable": lambda draw: {
        "rows": tuple(
            _of("Quantization", draw, rounding=rounding, bits_per_weight=bits)
            for rounding in ("nearest", "curvature") for bits in (2.25, 4.25, 8.25)
        )
    },
    "RetrainedConvergence": lambda draw: {
        "cells": tuple(
            _of(
                "RetrainedCell", draw, optimizer=o, schedule="constant", converged=1.0,
                curves={name: _of("Curve", draw)
                        for name in ("retrained", "control", "followed", "fixed", "noise")},
            )
            for o in ("sgd", "adam")
        )
    },
    "Reproduction": _reproduction,
    "ScalarAttentionSpectrum": lambda draw: {"outliers": _numbers(draw, 3)},
    "ScalingGrid": _scaling,
    "SinkStudy": lambda draw: {"seeds": (0, 1, 2)},
    "Sinks": _sinks,
    "Snapshot": lambda draw: {"metric": "plain"},
    "SpectralDensity": lambda draw: {"whole_result": report_samples.density(draw.randrange(99))},
}  # fmt: skip
