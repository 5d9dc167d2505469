"""The part of an operator that is known exactly and cheaply: H_o through its samples' factors.

With few outputs to a sample the diagonal of H_o costs a handful of products
(``operators/sample_factors.py``). H_o itself is then settled, and of H = H_o + H_f only the
functional part is left to estimate, which has no large outliers to be found first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.operators.curvature import CurvatureOperator
from curvatlas.operators.hessian import FunctionalHessian
from curvatlas.operators.sample_factors import SampleFactors
from curvatlas.operators.views import BlockView

FACTORS = "factors of the samples"


@dataclass(frozen=True, kw_only=True)
class OuterPart:
    """diag H_o of an operator's rows, its cost, and the operator of what is left."""

    diagonal: Tensor  # (n,) float64
    products: int  # the cost, in products with the operator
    rest: LinearOperator | None  # None: H_o is all there is


def count_products(op: LinearOperator, products: int) -> None:
    """Add to an operator's count what was spent on its behalf elsewhere."""
    op.products += products
    if isinstance(op, BlockView):
        op.parent.products += products


def all_outer(op: LinearOperator) -> bool:
    """Whether nothing is left beside H_o."""
    parent = op.parent if isinstance(op, BlockView) else op
    return isinstance(parent, CurvatureOperator) and parent.outer == "whole"


def outer_part(op: LinearOperator, most: int) -> OuterPart | None:
    """H_o's diagonal where it costs at most ``most`` products; None where it is dearer or unknown.

    The cost is added to the operator's own count.
    """
    view = op if isinstance(op, BlockView) else None
    parent = view.parent if view is not None else op
    if not isinstance(parent, CurvatureOperator) or parent.outer == "none":
        return None
    if view is not None and view.row_slices != view.column_slices:
        return None
    names = parent.problem.layout.names if view is None else view.row_parameters
    factors = SampleFactors(parent, names)
    columns = factors.columns()
    if columns is None or (spent := factors.products(columns)) > most:
        return None
    values = factors.diagonal()
    if values is None:
        return None
    count_products(op, spent)
    if view is not None:
        values = view.rows_of(values)
    return OuterPart(diagonal=values, products=spent, rest=_rest(parent, view))


def _rest(parent: CurvatureOperator, view: BlockView | None) -> LinearOperator | None:
    if parent.outer == "whole":
        return None
    parent.release()  # the rest has the same budget: both would be twice as much
    rest = FunctionalHessian(parent.problem, budget=parent.budget, checks=parent.checks)
    return rest if view is None else BlockView(rest, view.row_slices, view.column_slices)
