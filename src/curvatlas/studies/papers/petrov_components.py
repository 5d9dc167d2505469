"""The component checks of Petrov's thesis: formulas against autograd in float32, and their speed.

Sizes as its tables show them: 8 tokens of width 16, 32 hidden units, so that ∂F/∂W is 128 × 512 and
the norm's Jacobian 128 × 128.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import functional

from curvatlas.closed_form.modules import FFNHessian, LayerNormHessian, TransformerBlockHessian
from curvatlas.figures.style import BLUE, ORANGE
from curvatlas.fits import mean_reach
from curvatlas.studies.papers.exhibits import Ask, exhibit
from curvatlas.studies.papers.reproduction import Mark, Panel, Reproduction, finding, tensor

LENGTH, WIDTH, HIDDEN = 8, 16, 32
_DRAWS = 5
_ROWS = 16  # of so many of the block's Hessian one is compared
_ROUNDS, _ROUNDS_IN_FULL = 12, 60
_ERROR = 1e-6  # in float32: what counts as equal
_FASTER = 10.0  # times: an order of magnitude at least
_PRINTED_ERRORS = {
    "∂F/∂W₁": 1e-15, "∂F/∂W₂": 1e-15, "LN Jacobian": 8.3e-8, "LN Hessian": 1.5e-7,
    "block Jacobian": 1.5e-7, "block Hessian": 1.6e-7,
}  # fmt: skip
# milliseconds on a GPU, by autograd and by the formula
_PRINTED_TIMES = {
    "∂F/∂W₂": (57.81, 0.13),
    "∂F/∂W₁": (55.85, 0.45),
    "LN Jacobian": (55.96, 0.80),
}

Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]  # the formula's, autograd's


@exhibit(
    "petrov-thesis",
    shows="formulas of the components against autograd in float32: errors and times",
    claim="errors of 1e-7; the formulas take 1/70 to 1/450 of autograd's time",
    source="Petrov, thesis slides 2026",
    seconds=8,
)
def components(ask: Ask) -> Reproduction:
    """Errors over random draws, and time by autograd over the formula's, in turns."""
    findings = []
    errors: dict[str, list[float]] = {}
    for draw in range(_DRAWS):
        for name, (ours, theirs) in pairs(ask.seed + draw).items():
            errors.setdefault(name, []).append(_error(ours(), theirs()))
    for name, printed in _PRINTED_ERRORS.items():
        found = errors[name]
        findings.append(
            finding(
                f"relative error of the {name}, the largest of {_DRAWS} draws",
                max(found),
                paper=f"{printed:g}",
                accepted=(0.0, _ERROR),
            )
        )
    rounds = _ROUNDS_IN_FULL if ask.full else _ROUNDS
    timed = {n: p for n, p in pairs(ask.seed).items() if n in _PRINTED_TIMES}
    times = {name: in_turns(pair, rounds) for name, pair in timed.items()}
    for name, (fast, slow) in times.items():
        ratio = (slow / fast).log()
        ends = float(ratio.mean()) + torch.tensor([0.0, -1.0, 1.0]) * mean_reach(ratio)
        middle, low, high = ends.exp().tolist()
        autograd, formula = _PRINTED_TIMES[name]
        findings.append(
            finding(
                f"{name}: autograd's time over the formula's",
                middle,
                (low, high),
                paper=f"{autograd / formula:.0f} on a GPU",
                accepted=(_FASTER, float("inf")),
            )
        )
    return Reproduction(
        findings=tuple(findings),
        panels=_bars(times),
        columns=len(times),
        setting=f"{LENGTH} tokens of width {WIDTH}, {HIDDEN} hidden units, float32, one thread",
        notes=(
            "an entry of ∂F/∂W is one product of two numbers, by the formula as by autograd: the "
            "same float, error 0",
            "times are of this processor, the slides' of a GPU, where a call costs more than its "
            "arithmetic",
        ),
        numbers={
            "errors": errors,
            "milliseconds": {n: [float(t.mean()) for t in both] for n, both in times.items()},
        },
    )


def pairs(seed: int) -> dict[str, Pair]:
    """Name → (the formula, autograd), at weights and tokens of a seed, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x, target = torch.randn(2, LENGTH, WIDTH)
        ffn = FFNHessian(WIDTH, HIDDEN, dropout=0.0, activation="relu", bias=False)
        norm = LayerNormHessian(WIDTH)
        form: dict[str, Any] = {"activation": "relu", "bias": False, "output_projection": False}
        block = TransformerBlockHessian(WIDTH, HIDDEN, **form)
    up, down = ffn.weights["up_weight"].detach(), ffn.weights["down_weight"].detach()

    def fed(w1: Tensor, w2: Tensor) -> Tensor:
        return torch.relu(x @ w1.T) @ w2.T

    def normalized(tokens: Tensor) -> Tensor:  # by hand: torch's own is not to be differentiated
        centred = tokens - tokens.mean(-1, keepdim=True)  # twice by every transform
        deviation = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        return centred / deviation

    def bent() -> Tensor:
        """∂²n/∂x² of the first token (d, d, d)."""

        def slope(token: Tensor) -> Tensor:
            return jacobian(normalized, token, create_graph=True)

        return jacobian(slope, x[0])

    derivatives = block.derivatives(x, target)
    size = LENGTH * WIDTH
    return {
        "∂F/∂W₁": (
            lambda: ffn.compute_ffn_jacobians(x).d_ffn_d_w1,
            lambda: jacobian(lambda w: fed(w, down), up),
        ),
        "∂F/∂W₂": (
            lambda: ffn.compute_ffn_jacobians(x).d_ffn_d_w2,
            lambda: jacobian(lambda w: fed(up, w), down),
        ),
        "LN Jacobian": (
            lambda: norm.compute_jacobian(x),
            lambda: jacobian(normalized, x).reshape(size, size),
        ),
        "LN Hessian": (lambda: norm.compute_hessian(x)[0], bent),
        "block Jacobian": (
            lambda: derivatives.dense(part="outer"),
            lambda: 2.0 / size * _gram(_block_jacobian(block, x)),
        ),
        "block Hessian": (
            lambda: derivatives.dense()[::_ROWS],
            lambda: _block_hessian(block, x, target),
        ),
    }


def jacobian(function: Callable[[Tensor], Tensor], at: Tensor, **options: Any) -> Tensor:
    """By autograd, row by row."""
    found: Tensor = functional.jacobian(function, at, **options)  # type: ignore[no-untyped-call]
    return found


def _block_jacobian(block: nn.Module, x: Tensor) -> Tensor:
    """∂Z/∂W (L·d, P): the block's H_o is 2/(L d) JᵀJ."""
    outputs = block(x).flatten()
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(o, _of(block), retain_graph=True)])
        for o in outputs
    ]
    return torch.stack(rows)


def _gram(rows: Tensor) -> Tensor:
    return rows.T @ rows


def _block_hessian(block: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Every sixteenth row by double backward: (P / 16, P)."""
    loss = (block(x) - target).square().mean()
    slope = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, _of(block), create_graph=True)]
    )
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(s, _of(block), retain_graph=True)])
        for s in slope[::_ROWS]
    ]
    return torch.stack(rows)


def _of(block: nn.Module) -> list[Tensor]:
    return [parameter for _, parameter in block.named_parameters()]


def _error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def in_turns(pair: Pair, rounds: int) -> tuple[Tensor, Tensor]:
    """Milliseconds of each round (rounds,), the two in turns so that other work cancels."""
    took: list[list[float]] = [[], []]
    for call in pair:
        call()
    for _ in range(rounds):
        for place, call in enumerate(pair):
            start = time.process_time()
            repeats = 1 if place else 20  # the formula takes less than the clock's grain
            for _ in range(repeats):
                call()
            took[place].append(max(time.process_time() - start, 1e-9) * 1e3 / repeats)
    return tensor(took[0]), tensor(took[1])


def _bars(times: dict[str, tuple[Tensor, Tensor]]) -> tuple[Panel, ...]:
    """A panel a derivative: milliseconds by autograd and by the formula."""
    panels = []
    for name, (ours, theirs) in times.items():
        marks = []
        for place, (label, took, colour) in enumerate(
            (("autograd", theirs, ORANGE), ("formula", ours, BLUE))
        ):
            middle, reach = float(took.mean()), mean_reach(took)
            ends: Any = {"low": tensor([max(middle - reach, 0)]), "high": tensor([middle + reach])}
            x, y = tensor([place]), tensor([middle])
            marks.append(Mark(x=x, y=y, style="columns", colour=colour, label=label, **ends))
        names = ("autograd", "formula")
        panels.append(
            Panel(title=name, ylabel="ms", yscale="log", marks=tuple(marks), blocks=names)
        )
    return tuple(panels)
