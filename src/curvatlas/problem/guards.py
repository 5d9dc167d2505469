"""What is checked before a number is trusted, and the words that say what is wrong."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from curvatlas.errors import NonFiniteError, ProblemError

_RATES = ("dropout", "attention_dropout", "dropout_p", "attn_dropout", "drop_prob", "layerdrop")


def check_weights(named: Mapping[str, Tensor]) -> None:
    """Finite values, one floating dtype of at least float32, one device."""
    dtypes = {p.dtype for p in named.values()}
    low = sorted(str(t) for t in dtypes if t not in (torch.float32, torch.float64))
    if low:
        raise ProblemError(
            f"parameters of {', '.join(low)}: curvature needs float32 or float64, "
            "call model.float() or model.double() first."
        )
    if len(dtypes) > 1:
        examples = {str(p.dtype): name for name, p in named.items()}
        raise ProblemError(
            f"parameters of several dtypes ({examples}): call model.float() or model.double()."
        )
    devices = {p.device for p in named.values()}
    if len(devices) > 1:
        raise ProblemError(
            f"parameters lie on several devices ({', '.join(map(str, devices))}): "
            "move the model to one."
        )
    bad = [name for name, p in named.items() if not bool(torch.isfinite(p.detach()).all())]
    if bad:
        raise NonFiniteError(f"NaN or infinite weights in {_listed(bad)}: reload or retrain them.")


def kinds(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape, dtype and device of every parameter, in words."""
    return {name: f"{tuple(p.shape)} {p.dtype} on {p.device}" for name, p in named.items()}


def check_same_parameters(before: Mapping[str, str], named: Mapping[str, Tensor]) -> None:
    """Replaced parameters are followed; others than before (``kinds``) are another problem."""
    now = kinds(named)
    changed = sorted(before.keys() ^ now.keys())
    if changed:
        raise ProblemError(
            "the model's parameters are not those the Problem was made for: "
            f"{_listed(changed)} came, went or are tied otherwise; make a new Problem."
        )
    for name, kind in now.items():
        if kind != before[name]:
            raise ProblemError(
                f"parameter {name!r} was {before[name]} and is now {kind}: make a new Problem."
            )


def random_modules(model: nn.Module) -> list[str]:
    """Modules whose train-mode randomness is switched on, by name and kind."""
    found = []
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            active = module.p > 0
        else:
            rates = [vars(module).get(rate) for rate in _RATES]
            active = any(isinstance(rate, float) and rate > 0 for rate in rates)
        if active:
            found.append(f"{name or type(module).__name__}")
    return found


def check_mode(model: nn.Module) -> None:
    """Refuse dropout and batch statistics that are switched on."""
    dropping = random_modules(model)
    if dropping:
        raise ProblemError(
            f"dropout is active in {_listed(dropping)}, so the loss is random: call model.eval()."
        )
    batch_norms = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    if batch_norms:
        raise ProblemError(
            f"batch normalisation uses batch statistics in {_listed(batch_norms)}, so the loss is "
            "not a sum over samples: call model.eval()."
        )


def check_same_loss(first: float, second: float, *, eps: float) -> None:
    """Two evaluations of one loss must agree."""
    if first != second and not abs(first - second) <= 100 * eps * max(abs(first), abs(second)):
        relative = abs(first - second) / max(abs(first), abs(second))
        raise ProblemError(
            f"the loss changes between two evaluations (relative {relative:.0e}): something in the "
            "model, the loss or the data is random; make it deterministic."
        )


def check_finite_loss(value: float, index: int) -> None:
    """The loss of batch ``index`` must be a number."""
    if not abs(value) < float("inf"):
        raise NonFiniteError(
            f"the loss of batch {index} is {value}: look at that batch's inputs and targets and at "
            "the model's outputs for it."
        )


def _listed(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


listed = _listed
