"""The exact atlas of a recognised block from its closed form, beyond the size of dense products.

Where the model is one layer that ``curvatlas.blocks`` knows, H, H_o and H_f come in closed form:
assembled and measured entry by entry while three matrices fit the budget, and beyond it the exact
Frobenius norms and traces alone (THEORY §10), with nothing P × P. One product of the operator is
compared with the closed form first: a layer that was read wrongly is never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.analysis.atlas_blocks import VIEWS, Block, groups_of
from curvatlas.analysis.atlas_dense import maps_of_matrices
from curvatlas.analysis.atlas_result import AtlasMap
from curvatlas.blocks.adapters import MappedBlock, UnmappedModuleError, map_module
from curvatlas.blocks.attention import SelfAttentionHessian
from curvatlas.blocks.block import ClosedFormBlock, TransformerBlockHessian
from curvatlas.blocks.derivatives import BlockDerivatives
from curvatlas.operators.parts import PARTS, CurvatureParts
from curvatlas.problem import Problem

Maps = dict[str, AtlasMap]
Shares = dict[str, tuple[float, float, float]]


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """The derivatives of the layer at the problem's data, and where its entries stand."""

    derivatives: BlockDerivatives
    mapped: MappedBlock

    def places(self, block: Block) -> Tensor:
        """Positions of a block of the atlas in the closed form's flat order."""
        inverse = torch.empty_like(self.mapped.positions)
        inverse[self.mapped.positions] = torch.arange(len(inverse))
        return inverse[block.indices]


def closed_form(problem: Problem) -> ClosedForm:
    """The problem's closed form; UnmappedModuleError says why where there is none."""
    if problem.spread:
        raise UnmappedModuleError("the closed form reads all data in one process.")
    mapped = map_module(problem.model)
    if mapped.module_size != problem.size or problem.loss.name not in ("mse", "cross_entropy"):
        raise UnmappedModuleError(
            "the closed form covers all parameters together, under mse or cross_entropy."
        )
    inputs, targets = _one_batch(problem)
    kind: type[ClosedFormBlock] = TransformerBlockHessian
    if mapped.spec.d_ff is None:
        kind = SelfAttentionHessian
    if getattr(_attention_of(problem.model), "batch_first", True) is False:
        inputs, targets = inputs.transpose(0, 1), targets.transpose(0, 1)
    layer = kind.from_weights(mapped.spec, mapped.weights)
    try:
        derivatives = layer.derivatives(inputs, targets, loss=problem.loss.name)
    except (ValueError, TypeError) as reason:
        raise UnmappedModuleError(f"the closed form does not read this data: {reason}") from reason
    value = problem.value()
    if abs(float(derivatives.seeds.value) - value) > _rounding(problem) * max(abs(value), 1e-30):
        raise UnmappedModuleError("the closed form's loss is not the problem's.")
    return ClosedForm(derivatives, mapped)


def _one_batch(problem: Problem) -> tuple[Tensor, Tensor]:
    pairs: list[tuple[Tensor, Tensor]] = []
    for batch in problem.batches():
        if not isinstance(batch.inputs, Tensor) or not isinstance(batch.targets, Tensor):
            raise UnmappedModuleError("the closed form reads batches of one input and one target.")
        pairs.append((batch.inputs, batch.targets))
    if len({(x.shape[1:], y.shape[1:]) for x, y in pairs}) != 1:
        raise UnmappedModuleError("the closed form reads batches of one shape.")
    if len(pairs) > 1 and getattr(_attention_of(problem.model), "batch_first", True) is False:
        raise UnmappedModuleError("the closed form reads one batch when tokens come first.")
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _attention_of(model: nn.Module) -> Any:
    return getattr(model, "self_attn", model)


def _rounding(problem: Problem) -> float:
    return 1e4 * torch.finfo(problem.dtype).eps


def closed_maps(
    found: ClosedForm, operator: CurvatureParts, blocks: Sequence[Block], room: int
) -> tuple[Maps, Shares]:
    """Every map from the closed form: from the matrices where three fit ``room`` bytes."""
    derivatives = found.derivatives
    size = derivatives.size
    if 4 * size**2 * operator.dtype.itemsize <= room:
        matrices = {part: derivatives.dense(part) for part in PARTS}  # type: ignore[arg-type]
        _agree(found, operator, matrices)
        return maps_of_matrices(matrices, [found.places(block) for block in blocks], blocks)
    members = _members(found, blocks)
    largest = max(block.size for block in blocks)
    if largest**2 * operator.dtype.itemsize > room:
        raise UnmappedModuleError("one block of the closed form is larger than the budget.")
    return _norm_maps(found, blocks, members)


def _agree(found: ClosedForm, operator: CurvatureParts, matrices: dict[str, Tensor]) -> None:
    """One product of the operator against the matrices: the closed form is of this very loss."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(
        found.derivatives.size, 1, generator=generator, dtype=torch.float64, device="cpu"
    )
    vector = vector.to(operator.device, operator.dtype)
    wanted = operator.flat_parts(vector)
    ours = found.mapped.from_module_order(vector)
    for part in PARTS:
        got = found.mapped.to_module_order(matrices[part] @ ours)
        scale = float(torch.linalg.norm(wanted["total"])) + float(torch.linalg.norm(wanted[part]))
        if float(torch.linalg.norm(got - wanted[part])) > _rounding(operator.problem) * scale:
            raise UnmappedModuleError(f"the closed form's {part} part is not the operator's.")


def _members(found: ClosedForm, blocks: Sequence[Block]) -> list[list[int]]:
    """The closed form's weights that make up every block; refused where a weight is cut."""
    offsets = list(found.derivatives.offsets.values())
    members: list[list[int]] = []
    for block in blocks:
        places = set(found.places(block).tolist())
        own = [k for k, (start, size) in enumerate(offsets) if start in places and size]
        if sum(offsets[k][1] for k in own) != block.size or not all(
            start + size - 1 in places for start, size in (offsets[k] for k in own)
        ):
            raise UnmappedModuleError(f"{block.name} is a part of a weight: no closed norm.")
        members.append(own)
    return members


def _norm_maps(
    found: ClosedForm, blocks: Sequence[Block], members: list[list[int]]
) -> tuple[Maps, Shares]:
    """Exact norms and traces; ‖A‖_F/√rank ≤ ‖A‖₂ ≤ ‖A‖_F brackets the spectral norms."""
    maps: Maps = {}
    shares: Shares = {}
    derivatives = found.derivatives
    gather = torch.zeros(len(blocks), len(derivatives.names), dtype=torch.float64)
    for a, own in enumerate(members):
        gather[a, own] = 1
    for part in PARTS:
        energy = gather @ derivatives.frobenius(part).cpu().double().square() @ gather.T  # type: ignore[arg-type]
        traces = torch.tensor(list(derivatives.traces(part).values()), dtype=torch.float64)  # type: ignore[arg-type]
        trace = gather @ traces
        for view in VIEWS:
            groups = groups_of(blocks, view)
            join = torch.zeros(len(groups), len(blocks), dtype=torch.float64)
            sizes = torch.zeros(len(groups), dtype=torch.float64)
            for a, places in enumerate(groups.values()):
                join[a, places] = 1
                sizes[a] = sum(blocks[k].size for k in places)
            square = join @ energy @ join.T
            norm = square.sqrt()
            low = norm / torch.minimum(sizes[:, None], sizes[None, :]).sqrt()
            ends = {
                "frobenius": (norm, norm.clone(), norm.clone()),
                "spectral": ((low * norm).sqrt(), low, norm.clone()),
                "trace": (join @ trace, join @ trace, join @ trace),
            }
            for quantity, (values, least, most) in ends.items():
                maps[f"{view}/{quantity}/{part}"] = AtlasMap(
                    quantity=quantity, part=part, view=view, names=tuple(groups),
                    values=values, low=least, high=most,
                )  # fmt: skip
            whole = float(square.sum())
            share = float(square.diagonal().sum()) / whole if whole > 0 else float("nan")
            shares[f"{view}/{part}"] = (share, share, share)
    return maps, shares
