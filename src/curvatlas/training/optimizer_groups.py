"""Which parameters share a rule and a limit of the rate: groups by role or block, the edges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from curvatlas.anatomy import anatomy_of

StepSizes = Literal["whole", "role", "block"]


def parameter_groups(
    given: nn.Module | Iterable[Any], model: nn.Module | None, step_sizes: StepSizes
) -> Any:
    """What ``torch.optim.Optimizer`` takes: what was given, or the model's parameters in groups."""
    if step_sizes not in ("whole", "role", "block"):
        raise ValueError(f"step_sizes is 'whole', 'role' or 'block', got {step_sizes!r}.")
    if model is None:
        if step_sizes != "whole":
            raise ValueError(f"step_sizes={step_sizes!r} needs the model, not its parameters.")
        return given
    found = list(model.parameters())
    if not found:
        raise ValueError(f"{type(model).__name__} has no parameters to train.")
    return found if step_sizes == "whole" else _grouped(model, step_sizes)


def _grouped(model: nn.Module, step_sizes: StepSizes) -> list[dict[str, Any]]:
    """A group for each role (vectors together) or for each sublayer of each layer."""
    named = dict(model.named_parameters())
    names: dict[str, str] = {}
    for piece in anatomy_of(model).slices:
        where = piece.sublayer if piece.layer is None else f"{piece.layer}.{piece.sublayer}"
        if step_sizes == "role":
            where = piece.role if named[piece.parameter].ndim > 1 else "vectors"
        known = names.setdefault(piece.parameter, where)
        if where not in known.split("+"):  # query, key and value in one matrix
            names[piece.parameter] = f"{known}+{where}"
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        groups.setdefault(names.get(name, "others"), []).append(parameter)
    return [{"params": members, "block": block} for block, members in groups.items()]


def edges(model: nn.Module | None) -> frozenset[int]:
    """Embeddings and the head: rows are tokens or classes, not directions to be mixed."""
    if model is None:
        return frozenset()
    named = dict(model.named_parameters())
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    slices = anatomy_of(model).slices
    known = {id(named[s.parameter]) for s in slices if s.sublayer in ("embedding", "head")}
    return frozenset(tables | known)
