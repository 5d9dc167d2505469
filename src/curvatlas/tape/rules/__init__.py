"""One rule an operation: what it does to tangents, to adjoints, and to an adjoint that moves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from curvatlas.tape.record import Node
from curvatlas.tape.rules import (  # noqa: F401 (they register)
    attention,
    gathers,
    images,
    losses,
    norms,
    pointwise,
    products,
    views,
)
from curvatlas.tape.rules.base import RULES, Call, Rule, Unruled
from curvatlas.tape.rules.default import Default


def rule_for(node: Node, values: Sequence[Tensor], used: frozenset[int]) -> Rule:
    """The rule of a node; the default one where there is none, or none for this form of a call.

    used: the slots that other nodes read; most rules know the first result only.
    """
    call = Call(node, values)
    maker = RULES.get(node.operation)
    if maker is None or _complex(call):
        return Default(call)
    try:
        rule = maker(call)
    except Unruled:
        return Default(call)
    beside = any(slot is not None and slot in used for slot in node.outputs[1:])
    return Default(call) if beside and not rule.all_results else rule


def _complex(call: Call) -> bool:
    """Whether complex numbers take part: all rules but the default one are of real numbers."""
    return any(isinstance(a, Tensor) and a.is_complex() for a in (*call.args, call.y))
