"""What the ranks of a process group must have in common, compared before their parts are added.

The sum over ranks of H_r v is the product of one Hessian only if all ranks hold the same weights
and the same loss; with ``shard=True`` they must see the same batches too, or samples are counted
twice and others never. Each rank's facts go into one digest. Where the digests differ, and only
there, the facts themselves are exchanged, so that every rank can say what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from curvatlas import parallel
from curvatlas.errors import ProblemError
from curvatlas.problem.fingerprint import content, without_places
from curvatlas.problem.guards import listed

if TYPE_CHECKING:
    from curvatlas.problem.core import Problem

_SAME_STATE = (
    "load the same state on every rank, or broadcast rank 0's (torch.distributed.broadcast)"
)
# fact → what a rank has, and what to do about it; the first of them that differs is told
_FACTS = {
    "model": ("another model", "build it by the same code with the same options on every rank"),
    "parameters": ("other parameters that vary", "pass the same parameters= on every rank"),
    "dtype": ("parameters of another dtype", "convert the model alike on every rank"),
    "options": ("other options of the Problem", "pass the same ones on every rank"),
    "weights": ("other weights", _SAME_STATE),
    "buffers": ("other buffers", _SAME_STATE),
    "loss": ("another loss", "pass the same one, options and tensors alike, on every rank"),
    "data": (
        "other data",
        "with shard=True every rank has to see the same batches in the same order; switch "
        "shuffling off or seed all loaders alike, or leave shard out and give each rank its share",
    ),
}


def state_of(problem: Problem) -> dict[str, str]:
    """Digests of the weights, the buffers and the loss by name."""
    named: Mapping[str, Mapping[str, Tensor]] = {
        "weights": problem.all_parameters,
        "buffers": dict(problem.model.named_buffers()),
    }
    tensors = {
        f"{kind} {name}": content(tensor).hex()
        for kind, group in named.items()
        for name, tensor in group.items()
    }
    return {**tensors, "loss": content([type(problem.loss), vars(problem.loss)]).hex()}


def facts_of(problem: Problem) -> dict[str, str]:
    """Everything that ranks compare."""
    dtypes = {name: str(tensor.dtype) for name, tensor in problem.all_parameters.items()}
    return {
        "model": content(without_places(repr(problem.model))).hex(),
        "parameters": content([problem.parameter_names, problem.layout.shapes]).hex(),
        "dtype": content(dtypes).hex(),
        "options": content(problem.options).hex(),
        **state_of(problem),
        "data": problem.data_digest.hex(),
    }


def refuse_differing(problem: Problem) -> None:
    """Say on every rank what differs; called by all of them."""
    differing = parallel.differing(facts_of(problem))
    for fact, (what, remedy) in _FACTS.items():
        told = {name: values for name, values in differing.items() if name.split(" ")[0] == fact}
        if told:
            ranks = sorted({r for v in told.values() for r in parallel.others_than_first(v)})
            who = parallel.named(ranks, "has", "have")
            raise ProblemError(f"{who} {what} than rank 0{_where(list(told))}: {remedy}.")


def _where(names: Sequence[str]) -> str:
    tensors = [name.split(" ", 1)[1] for name in names if " " in name]
    return f" ({listed(tensors)})" if tensors else ""
