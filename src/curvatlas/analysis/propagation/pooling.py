r"""One account of curvature for all samples, from accounts of groups of them.

The loss over all samples is Σ_g w_g ℓ_g, and an activation of one sample enters one term alone, so
the groups' second derivatives lie beside each other in one block-diagonal matrix:

    ‖S‖_F² = Σ_g w_g² ‖S_g‖_F²,     tr S = Σ_g w_g tr S_g,     ‖S‖₂ = max_g w_g ‖S_g‖₂.

A ratio of norms at two places is a ratio of sums over groups: leaving out one group after the other
(the jackknife) says how far it would move with other samples and other probes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.analysis.propagation.result import CurvatureFlow, FlowEntry, Measure
from curvatlas.results import Interval


def pooled_flow(flows: Sequence[CurvatureFlow], weights: Sequence[float]) -> CurvatureFlow:
    """The account of all groups together; ``weights`` are their shares of the loss.

    Intervals of norms and traces are for the probes; those of amplifications for the samples too.
    """
    first = flows[0]
    activations = _pooled_entries([flow.activations for flow in flows], weights)
    start, end = (_norms([flow.activations[at] for flow in flows]) for at in (0, -1))
    amplification = _ratio(start, end, weights)
    return replace(
        first,
        sublayers=_pooled_entries([flow.sublayers for flow in flows], weights),
        activations=activations,
        loss=sum(w * flow.loss for w, flow in zip(weights, flows, strict=True)),
        samples=sum(flow.samples for flow in flows),
        products=sum(flow.products for flow in flows),
        amplification_interval=None if amplification is None else amplification[1],
    )


def _norms(entries: Sequence[FlowEntry]) -> list[float]:
    return [entry.norm for entry in entries]


def _pooled_entries(
    groups: Sequence[tuple[FlowEntry, ...]], weights: Sequence[float]
) -> tuple[FlowEntry, ...]:
    names = [[entry.name for entry in entries] for entries in groups]
    if any(other != names[0] for other in names):
        raise ValueError("groups of samples took different ways through the model.")
    return tuple(_pooled(entries, weights) for entries in zip(*groups, strict=True))


def _pooled(entries: Sequence[FlowEntry], weights: Sequence[float]) -> FlowEntry:
    first, w = entries[0], np.asarray(weights)
    measures = {
        part: _measure([entry.measures[part] for entry in entries], weights)
        for part in first.measures
    }
    amplified = None
    if all(entry.amplification for entry in entries):
        behind = [entry.norm / (entry.amplification or 1.0) for entry in entries]
        amplified = _ratio(_norms(entries), behind, weights)
    spectra = [entry.eigenvalues for entry in entries]
    values = _side_by_side([s for s in spectra if s is not None], weights)
    return replace(
        first,
        total=None,
        passed_on=None,
        created_here=None,
        measures=measures,
        spectral_norm=float((w * [entry.spectral_norm for entry in entries]).max()),
        spectral_interval=(
            float((w * [entry.spectral_interval[0] for entry in entries]).max()),
            float((w * [entry.spectral_interval[1] for entry in entries]).max()),
        ),
        eigenvalues=values if len(spectra) == sum(s is not None for s in spectra) else None,
        token_trace=_side_by_side([entry.token_trace for entry in entries], weights),
        token_norm=_all([entry.token_norm for entry in entries], weights),
        token_trace_error=_all([entry.token_trace_error for entry in entries], weights),
        gradient_scale=math.hypot(*(w * [entry.gradient_scale for entry in entries])),
        amplification=None if amplified is None else amplified[0],
        amplification_interval=None if amplified is None else amplified[1],
        exact=all(entry.exact for entry in entries),
    )


def _all(tensors: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | None:
    there = [tensor for tensor in tensors if tensor is not None]
    return _side_by_side(there, weights) if len(there) == len(tensors) else None


def _side_by_side(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """(samples of all groups, longest); what a shorter group does not have is zero."""
    if not tensors:
        return torch.zeros(0, 0)
    longest = max(tensor.shape[-1] for tensor in tensors)
    return torch.cat(
        [
            torch.nn.functional.pad(w * tensor, (0, longest - tensor.shape[-1]))
            for w, tensor in zip(weights, tensors, strict=True)
        ]
    )


def _measure(measures: Sequence[Measure], weights: Sequence[float]) -> Measure:
    w = np.asarray(weights)
    square = float((w**2 * [m.norm**2 for m in measures]).sum())
    norm = math.sqrt(square)
    # Probes of different groups are independent: their errors add in quadrature.
    below, above = (
        math.hypot(*(w**2 * [abs(m.norm_interval[end] ** 2 - m.norm**2) for m in measures]))
        for end in (0, 1)
    )
    trace = float((w * [m.trace for m in measures]).sum())
    low, high = (
        math.hypot(*(w * [m.trace_interval[end] - m.trace for m in measures])) for end in (0, 1)
    )
    return Measure(
        norm=norm,
        norm_interval=(math.sqrt(max(square - below, 0.0)), math.sqrt(square + above)),
        trace=trace,
        trace_interval=(trace - low, trace + high),
    )


def _ratio(
    top: Sequence[float], bottom: Sequence[float], weights: Sequence[float]
) -> tuple[float, Interval] | None:
    """√(Σ w² t² / Σ w² b²) and its 95 % interval by the jackknife over groups."""
    over, under = (np.asarray(weights) ** 2 * np.asarray(v) ** 2 for v in (top, bottom))
    if not under.sum() > 0 or not over.sum() > 0:
        return None
    value = math.sqrt(over.sum() / under.sum())
    count = len(over)
    if count < 3:
        return value, (0.0, math.inf)  # two groups say nothing of a scatter
    left_out = (over.sum() - over) / (under.sum() - under)
    if not (left_out > 0).all() or not np.isfinite(left_out).all():
        return value, (0.0, math.inf)
    logs = np.log(left_out) / 2
    error = math.sqrt((count - 1) / count * float(((logs - logs.mean()) ** 2).sum()))
    factor = math.exp(float(student.ppf(0.975, count - 1)) * error)
    return value, (value / factor, value * factor)
