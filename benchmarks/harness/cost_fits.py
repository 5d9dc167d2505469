"""Rates of a machine for ``curvatlas.studies.cost_model``, fitted to measured products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from curvatlas.studies.cost_model import Machine, Task, amounts_of


def fit_machine(tasks: Sequence[Task], seconds: Sequence[float], *, name: str = "") -> Machine:
    """The rates that best explain measured products of one process, in relative error.

    Non-negative least squares of Σ_j a_ij x_j / t_i against 1: a rate that explains nothing is left
    out (infinite), none becomes negative.
    """
    if len(tasks) != len(seconds) or len(tasks) < 4:
        raise ValueError("four rates need at least four measured products, one time for each.")
    if any(task.processes != 1 for task in tasks):
        raise ValueError("the rates are those of one process: leave out tasks of several.")
    amounts = np.array([amounts_of(task) for task in tasks]) / np.asarray(seconds)[:, None]
    scale = amounts.max(axis=0)
    found = nnls(amounts / scale, np.ones(len(tasks)))[0] / scale
    rates = [1 / float(x) if x > 0 else math.inf for x in found[:3]]
    return Machine(
        operations_per_second=rates[0], bytes_per_second=rates[1],
        weight_bytes_per_second=rates[2], seconds_per_call=float(found[3]), name=name,
    )  # fmt: skip


def fit_link(
    machine: Machine,
    tasks: Sequence[Task],
    seconds: Sequence[float],
    *,
    reductions: Sequence[float],
) -> Machine:
    """The same machine with what several processes add.

    tasks, seconds: whole products of several processes;  reductions: seconds of the reduction alone
    of each task. The reductions give link and latency; what the products take beyond them and the
    time of a single process gives the slowdown (geometric mean).
    """
    if not len(tasks) == len(seconds) == len(reductions) or len(tasks) < 2:
        raise ValueError("two unknowns of the link need at least two measured reductions.")
    amounts = np.array([[task.message_bytes, float(task.messages)] for task in tasks])
    amounts = amounts / np.asarray(reductions)[:, None]
    scale = amounts.max(axis=0)
    inverse, latency = nnls(amounts / scale, np.ones(len(tasks)))[0] / scale
    linked = replace(
        machine,
        link_bytes_per_second=1 / float(inverse) if inverse > 0 else math.inf,
        seconds_per_message=float(latency),
    )
    slow = [
        max(t - r, 1e-9) / machine.working_seconds(task)
        for task, t, r in zip(tasks, seconds, reductions, strict=True)
    ]
    return replace(linked, slowdown=max(1.0, float(np.exp(np.mean(np.log(slow))))))
