"""The dense Hessian of a block: chunks of tokens, pairs of families, one output.

    H = H(Λ, δ) is linear in the seeds: outer = H(Λ, 0), functional = H(0, δ), total = H(Λ, δ).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from curvatlas.blocks.assembly import Workspace, add_block, mirror, prepare
from curvatlas.blocks.evaluation import Evaluation
from curvatlas.blocks.families import Family, build_families, parameter_offsets
from curvatlas.blocks.losses import Seeds
from curvatlas.blocks.terms import Terms

Part = Literal["total", "outer", "functional"]


class DenseBlock:
    """Dense second derivatives of one evaluated block under one set of seeds."""

    def __init__(self, evaluation: Evaluation, seeds: Seeds, *, budget: int) -> None:
        self.evaluation, self.seeds, self.budget = evaluation, seeds, budget
        self.families = build_families(evaluation.spec, evaluation.weights)
        self.offsets = parameter_offsets(evaluation.weights)
        self.size = sum(size for _, size in self.offsets.values())

    def chunks(self, part: Part) -> Iterator[Terms]:
        ev = self.evaluation
        batch, length = ev.samples, ev.length
        yield self.terms(slice(0, batch), slice(0, length), part)

    def terms(self, samples: slice, rows: slice, part: Part) -> Terms:
        ev, seeds = self.evaluation, self.seeds
        lam = delta = None
        if part != "functional" and seeds.blocks is not None:
            index = torch.arange(ev.samples * ev.length).view(ev.samples, ev.length)
            lam = seeds.blocks(slice(0, index.numel()))
        if part != "outer":
            delta = seeds.delta[samples, rows].flatten(0, 1)
        return Terms(ev, samples, rows, lam, delta)

    def dense(self, part: Part, out: Tensor | None = None, workspace: Workspace | None = None) -> Tensor:
        ws = workspace or Workspace()
        if out is None:
            out = torch.empty(self.size, self.size, dtype=self.evaluation.x.dtype)
        spec = self.evaluation.spec
        tied = spec.n_heads != spec.kv_heads
        if tied:
            out.zero_()
        first = True
        for terms in self.chunks(part):
            act = {f.key: terms.activation(f) for f in self.families}
            for i, f in enumerate(self.families):
                for g in self.families[i:]:
                    ops = prepare(terms.pair(f, g), act[f.key], act[g.key])
                    add_block(out, f, g, ops, accumulate=not first or tied, workspace=ws)
            first = False
        for i, f in enumerate(self.families):
            for g in self.families[i + 1:]:
                mirror(out, f, g, ws)
        return out
