"""``CurvaturePropagationAnalyzer``: how curvature moves from the loss back to the embedding."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.analysis.propagation_capture import Capture, capture
from curvatlas.analysis.propagation_entries import (
    Wanted,
    dense_entries,
    free_entries,
    sweep_entries,
)
from curvatlas.analysis.propagation_local import Samples, samples_interact
from curvatlas.analysis.propagation_result import CurvatureFlow, FlowEntry
from curvatlas.anatomy import anatomy_of
from curvatlas.budget import default_budget, parse_bytes
from curvatlas.problem import Batch, Problem
from curvatlas.problem.evaluation import call, evaluation
from curvatlas.problem.losses import Loss, main_tensor

# Matrices alive at once while one sublayer is eliminated: the joint Hessian of a block's branch and
# skip (4), Jacobian and second derivative, their products, the copies handed out, and those that
# norms and spectra make (benchmarks/costs.py: 25 in use, the rest held by the allocator).
ALIVE = 36
# Blocks from which one sweep is cheaper than products at every entry: half of the time at 16, a
# quarter at 32 (benchmarks/atlas_deep.py --depths).
_SWEEP_FROM = 16
_DENSE_UP_TO = 2048  # tokens · width beyond which products are cheaper than 2·n² entries


class CurvaturePropagationAnalyzer:
    """Exact account of second derivatives along the depth of any Transformer.

    model: any ``nn.Module`` whose anatomy has attention, norm or feed-forward modules.
    loss: ``"cross_entropy"``, ``"mse"`` or a callable (outputs, targets) → mean. None: cross-
        entropy for integer targets, mean squared error for real ones; without targets,
        cross-entropy if the model has a head and mean squared error otherwise.
    budget: memory for dense matrices; beyond it (or 2048 entries a sample) products are used.
    probes: products an entry when matrix-free. A sweep takes three times as many, for all entries.
    sweep: whether a matrix-free account of all blocks comes from one sweep, linear in the depth
        (norms less certain, traces more), or from products at every entry, quadratic in it.
        None: the sweep from 16 blocks on.

    Without targets the loss is that of the model's own predictions: for cross-entropy the most
    likely class of every output, for mean squared error the target zero. ``flow.target`` says so.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[[Any, Any], Tensor] | Loss | None = None,
        *,
        budget: int | str | None = None,
        probes: int = 8,
        method: str = "auto",
        sweep: bool | None = None,
        seed: int = 0,
    ) -> None:
        if method not in ("auto", "dense", "matrix-free"):
            raise ValueError(f"method is 'auto', 'dense' or 'matrix-free', got {method!r}.")
        if probes < 3:
            raise ValueError(f"an interval needs at least 3 probes, got {probes}.")
        self.model = model
        self.loss = loss
        self.budget = budget
        self.probes = probes
        self.method = method
        self.sweep = sweep
        self.seed = seed
        self.history: list[CurvatureFlow] = []

    # --- the article's methods ------------------------------------------------------------------

    def compute_layer_curvature(self, x: Any, layer: int | str, target: Any = None) -> FlowEntry:
        """The Hessian of the loss with respect to one activation.

        layer: a block's number (its output), or a name such as "embedding", "blocks.0.attention".
        """
        name = f"blocks.{layer}" if isinstance(layer, int) else layer
        problem, _ = self._problem(x, target)
        problem.check()
        batch = next(problem.batches())
        with problem.evaluating():
            captured = capture(problem, batch)
            known = {a: node for node in captured.nodes for a in (node.name, *node.aliases)}
            if name not in known:
                raise KeyError(f"there is no activation {name!r}; there are {', '.join(known)}.")
            node = known[name]
            entries = self._entries(problem, batch, captured, lambda other: other is node)[1]
            for entry in entries:
                if entry.place == "activation":
                    return entry
        raise KeyError(f"the activation {name!r} was not reached.")  # pragma: no cover

    def analyze_curvature_flow(
        self,
        x: Any,
        target: Any = None,
        *,
        step: int | None = None,
        layers: int | Sequence[int] | None = None,
    ) -> CurvatureFlow:
        """Every sublayer and activation of one batch; kept in ``history`` for the figure.

        x: the model's input, or a mapping of keyword arguments (``labels`` are its targets).
        layers: the blocks to account for, by their numbers, or how many of them, evenly spaced
            with the first and the last. None: all. What stands outside the blocks always counts.
            Without matrices, a deep model's come from one sweep (see ``sweep``), linear in the
            depth. Blocks asked for by number get products of their own, each through all that
            lies behind it: their norms are known better and spectral norms bracketed closer.
        """
        problem, origin = self._problem(x, target)
        problem.check()
        batch = next(problem.batches())
        with problem.evaluating():
            captured = capture(problem, batch)
            chosen = None if layers is None else _chosen_layers(layers, captured)
            method, entries = self._entries(
                problem,
                batch,
                captured,
                None if chosen is None else lambda n: n.layer is None or n.layer in chosen,
            )
            found = list(entries)
            loss = float(problem.loss.value(captured.outputs, batch.targets).detach())
        found.reverse()  # from the embedding to the head
        flow = CurvatureFlow(
            sublayers=tuple(e for e in found if e.place == "sublayer"),
            activations=tuple(e for e in found if e.place == "activation"),
            method=method,
            loss=loss,
            target=origin,
            samples=batch.length,
            step=step,
        )
        self.history.append(flow)
        return flow

    def visualize_curvature_flow(
        self, path: str | os.PathLike[str] | None = None, *, flows: Any = None
    ) -> Any:
        """Four panels over layers (and steps, after several analyses); saved where told."""
        from curvatlas.analysis.propagation_figures import plot_flow

        chosen = list(flows) if flows is not None else self.history
        if not chosen:
            raise ValueError("nothing to draw yet: call analyze_curvature_flow(x) first.")
        figure = plot_flow(chosen)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    # --- what stands behind them ----------------------------------------------------------------

    def _entries(
        self, problem: Problem, batch: Batch, captured: Capture, wanted: Wanted | None
    ) -> tuple[str, Iterator[FlowEntry]]:
        """By matrices, by one sweep for all entries (wanted: None), or by products for each."""
        every = wanted or (lambda _: True)
        view = Samples(1 if samples_interact(batch, captured) else batch.length)
        largest = max(node.tensor.numel() // view.count for node in captured.nodes)
        room = default_budget(problem.device) if self.budget is None else parse_bytes(self.budget)
        one = view.count * largest**2 * problem.dtype.itemsize
        fits = ALIVE * one <= room and largest <= _DENSE_UP_TO
        if self.method == "dense" or (self.method == "auto" and fits):
            everything = 6 * len(captured.nodes) * one
            keep = everything <= room
            return "dense", dense_entries(problem, batch, captured, view, keep=keep, wanted=every)
        blocks = len({node.layer for node in captured.nodes if node.layer is not None})
        deep = blocks >= _SWEEP_FROM if self.sweep is None else self.sweep
        probes, seed = self.probes, self.seed
        if wanted is None and deep:
            found = sweep_entries(problem, batch, captured, view, probes=probes, seed=seed)
        else:
            found = free_entries(
                problem, batch, captured, view, probes=probes, seed=seed, wanted=every
            )
        return "matrix-free", found

    def _problem(self, x: Any, target: Any) -> tuple[Problem, str]:
        if isinstance(x, Mapping) and target is None and x.get("labels") is not None:
            labels = x["labels"]
            return self._of_batch(self._loss_for(labels), x), "labels"
        if target is not None:
            if isinstance(x, Mapping):
                data: Any = {**{k: v for k, v in x.items() if k != "labels"}, "labels": target}
                return self._of_batch(self._loss_for(target), data, shift=False), "given"
            return self._of_batch(self._loss_for(target), (x, target)), "given"
        return self._self_targets(x)

    def _of_batch(self, loss: Any, batch: Any, shift: bool | None = None) -> Problem:
        # One batch is looked into, which lies in this process.
        return Problem(self.model, loss, [batch], shift=shift, distributed=False)

    def _loss_for(self, target: Any) -> Any:
        if self.loss is not None:
            return self.loss
        real = isinstance(target, Tensor) and target.is_floating_point()
        return "mse" if real else "cross_entropy"

    def _self_targets(self, x: Any) -> tuple[Problem, str]:
        """Targets from the model's own outputs."""
        loss = self.loss
        if loss is None:
            slices = anatomy_of(self.model).slices
            has_head = any(s.sublayer == "head" or "head" in " ".join(s.tied) for s in slices)
            loss = "cross_entropy" if has_head else "mse"
        name = loss if isinstance(loss, str) else getattr(loss, "name", "")
        if name not in ("cross_entropy", "mse"):
            raise ValueError("a callable loss needs targets: pass target=.")
        inputs = {k: v for k, v in x.items() if k != "labels"} if isinstance(x, Mapping) else x
        with evaluation(self.model, stay_double=False), torch.no_grad():
            values = dict(self.model.named_parameters())
            outputs = main_tensor(call(self.model, values, inputs), name)
        if name == "cross_entropy":
            target, origin = outputs.argmax(-1), "the model's own most likely classes"
        else:
            target, origin = torch.zeros_like(outputs), "zero"
        data = {**inputs, "labels": target} if isinstance(inputs, Mapping) else (inputs, target)
        shift = False if isinstance(inputs, Mapping) else None
        return self._of_batch(loss, data, shift=shift), origin


def _chosen_layers(layers: int | Sequence[int], captured: Capture) -> set[int]:
    """The numbers of the blocks asked for; an int spreads that many from the first to the last."""
    known = sorted({node.layer for node in captured.nodes if node.layer is not None})
    if isinstance(layers, int):
        if layers < 1:
            raise ValueError(f"layers is a number of blocks, at least 1, or a list; got {layers}.")
        places = torch.linspace(len(known) - 1, 0, min(layers, len(known))).round().long().tolist()
        return {known[place] for place in places} if known else set()
    unknown = sorted(set(layers) - set(known))
    if unknown:
        raise ValueError(f"there are no blocks {unknown}; there are {known}.")
    return set(layers)
