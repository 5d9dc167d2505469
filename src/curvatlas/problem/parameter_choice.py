"""Which parameters vary: all trainable ones, or those that names, patterns and roles pick."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from curvatlas.anatomy import anatomy_of
from curvatlas.errors import ProblemError
from curvatlas.problem.guards import listed

_One = str | re.Pattern[str] | nn.Parameter
Parameters = _One | Sequence[_One]


def choose_parameters(
    model: nn.Module, everything: Mapping[str, Tensor], wanted: Parameters | None
) -> tuple[str, ...]:
    """Names in the order of ``everything``, the model's parameters by name.

    Parameters without entries, such as those of ``nn.Linear(4, 0)``, have no place in the vector.
    """
    names = _chosen(model, everything, wanted)
    filled = tuple(name for name in names if everything[name].numel())
    if not filled:
        raise ProblemError(
            f"{listed(list(names))} have no entries: there is nothing to differentiate by."
        )
    return filled


def _chosen(
    model: nn.Module, everything: Mapping[str, Tensor], wanted: Parameters | None
) -> tuple[str, ...]:
    if wanted is None:
        trainable = tuple(name for name, p in everything.items() if p.requires_grad)
        if not trainable:
            raise ProblemError(
                f"every parameter is frozen ({listed(list(everything))}): "
                "set requires_grad on some, or name them in parameters=."
            )
        return trainable
    chosen: set[str] = set()
    for item in [wanted] if isinstance(wanted, (str, re.Pattern, nn.Parameter)) else wanted:
        if isinstance(item, str):
            chosen |= set(_matching(model, everything, item))
        elif isinstance(item, re.Pattern):
            chosen |= _searched(everything, item)
        elif isinstance(item, Tensor):
            chosen |= {name for name, p in everything.items() if p is item}
        else:
            raise ProblemError(
                "parameters= takes names, globs, roles, re.compile(...) and parameters, got a "
                f"{type(item).__name__}."
            )
    if not chosen:
        raise ProblemError("parameters= selects nothing.")
    return tuple(name for name in everything if name in chosen)


def _matching(model: nn.Module, everything: Mapping[str, Tensor], pattern: str) -> list[str]:
    direct = [name for name in everything if fnmatch.fnmatchcase(name, pattern)]
    if direct:
        return direct
    slices = anatomy_of(model, list(everything)).select(pattern)
    names = list(dict.fromkeys(piece.parameter for piece in slices))
    covered = dict.fromkeys(names, 0)
    for piece in slices:
        covered[piece.parameter] += piece.size
    for name in names:
        if covered[name] != everything[name].numel():
            raise ProblemError(
                f"{pattern!r} is only a part of the fused parameter {name!r}: take the whole "
                "parameter here and the part by H[rows, columns]."
            )
    return names


def _searched(everything: Mapping[str, Tensor], pattern: re.Pattern[str]) -> set[str]:
    names = {name for name in everything if pattern.search(name)}
    if not names:
        raise ProblemError(
            f"no parameter's name contains {pattern.pattern!r}: there are "
            f"{listed(list(everything))}."
        )
    return names
