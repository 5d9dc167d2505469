"""One rule an operation: what it does to tangents, to adjoints, and to an adjoint that moves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from curvatlas.tape.record import Node
from curvatlas.tape.rules import norms, pointwise, products, views  # noqa: F401 (they register)
from curvatlas.tape.rules.base import RULES, Call, Rule, Unruled
from curvatlas.tape.rules.default import Default


def rule_for(node: Node, values: Sequence[Tensor], used: frozenset[int]) -> Rule:
    """The rule of a node; the default one where there is none, or none for this form of a call.

    used: the slots that other nodes read; all rules but the default know the first result only,
    unless every result moves alike (parts of one source).
    """
    call = Call(node, values)
    maker = RULES.get(node.operation)
    beside = [slot for slot in node.outputs[1:] if slot is not None and slot in used]
    if maker is None or _complex(call) or (beside and not getattr(maker, "all_results", False)):
        return Default(call)
    try:
        return maker(call)
    except Unruled:
        return Default(call)


def _complex(call: Call) -> bool:
    """Whether complex numbers take part: all rules but the default one are of real numbers."""
    return any(isinstance(a, Tensor) and a.is_complex() for a in (*call.args, call.y))
