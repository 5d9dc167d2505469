"""Exact invariants of the Hessian, and what the papers leave open: losses, heads, masks, norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from curvatlas.layers.structure import Activation, BlockSpec
from curvatlas.theory import reference
from curvatlas.theory.reference import block_hessian, normal
from curvatlas.theory.statements import (
    HOLDS,
    CheckEffort,
    Outcome,
    Rows,
    outcome,
    statement,
    worst,
)


class _Case:
    """A block at one batch with its closed-form Hessian and gradient."""

    def __init__(self, effort: CheckEffort, trial: int, spec: BlockSpec, *, bias: bool) -> None:
        self.random, self.spec = effort.generator(trial), spec
        self.weights = reference.draw_weights(spec, self.random, bias=bias, output=spec.n_heads > 1)
        x, y = normal(self.random, 2, 2, 4, spec.d_model)
        self.h = block_hessian(spec, self.weights, x, y)
        tracked = reference.tracked(self.weights)
        z = reference.block_output(spec, tracked, x)
        grads = torch.autograd.grad(reference.loss_of("mse", y)(z), list(tracked.values()))
        self.gradient = dict(zip(tracked, grads, strict=True))

    def draw(self, *shape: int) -> Tensor:
        return normal(self.random, *shape)

    def residual(self, moved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
        """‖Hξ − expected‖/(‖H‖‖ξ‖)."""
        xi, want = torch.zeros(2, len(self.h.H), dtype=torch.float64)
        for flat, parts in ((xi, moved), (want, expected)):
            for name, part in parts.items():
                start, size = self.h.offset(name)
                flat[start : start + size] = part.reshape(-1)
        return float((self.h.H @ xi - want).norm() / (self.h.H.norm() * xi.norm()))


def _spec(trial: int, **options: object) -> BlockSpec:
    heads = 1 + trial % 2
    base: dict[str, object] = {
        "d_model": 4,
        "n_heads": heads,
        "d_k": 3,
        "d_v": 4 if heads == 1 else 2,
        "d_ff": 5,
        "activation": ("gelu", "relu", "silu")[trial % 3],
    }
    return BlockSpec(**(base | options))  # type: ignore[arg-type]


@statement("layer-norm-shift-directions", HOLDS)
def shift_directions(effort: CheckEffort) -> Outcome:
    """Directions removed by LayerNorm are exact null directions of H

    post-norm: H annihilates W2 += 1aᵀ (and its bias), W_O += 1aᵀ (W_V += 1aᵀ without W_O)
    Source: ours
    Assumptions: LayerNorm, post-norm; not RMSNorm
    Tested by: one and two heads, three activations, with biases; RMSNorm as the control
    """
    residuals: dict[str, list[float]] = {"layer": [], "rms": []}
    for trial in effort.trials(4, 24):
        for norm, values in residuals.items():
            case = _Case(effort, trial, _spec(trial, norm=norm), bias=True)
            ones = torch.ones(4, dtype=torch.float64)
            mixed = "output" if "output_weight" in case.weights else "value"
            for which in ("down", mixed):
                width = case.weights[f"{which}_weight"].shape[1]
                moved = {
                    f"{which}_weight": torch.outer(ones, case.draw(width)),
                    f"{which}_bias": ones * float(case.draw(1)),
                }
                values.append(case.residual(moved, {}))
    largest, control = worst(residuals["layer"]), min(residuals["rms"])
    return outcome(
        f"‖Hξ‖/(‖H‖‖ξ‖) at most {largest:.0e}; RMSNorm control at least {control:.0e}",
        printed=largest < 1e-12 and control > 1e-6,
        numbers={"residual": largest, "control": control},
    )


@statement("key-bias-is-flat", HOLDS)
def key_bias(effort: CheckEffort) -> Outcome:
    """The key bias has exactly zero Hessian rows

    softmax ignores a constant added to a row of logits: H[b_K, ·] = 0
    Source: ours
    Tested by: rows of b_K, post- and pre-norm, one and two heads
    """
    residuals = []
    for trial in effort.trials(4, 24):
        case = _Case(effort, trial, _spec(trial, norm_first=trial % 4 > 1), bias=True)
        residuals.append(float(case.h["key_bias", :].dense().norm() / case.h.H.norm()))
    return outcome(
        f"‖rows‖/‖H‖ at most {worst(residuals):.0e}",
        printed=worst(residuals) < 1e-14,
        numbers={"residual": worst(residuals)},
    )


@statement("rescaling-identities", HOLDS)
def rescaling(effort: CheckEffort) -> Outcome:
    """One-parameter symmetries fix H along their orbits: Hξ = −Gᵀ∇ℓ

    (W_QS, −W_KSᵀ) per head; (W_VS, −SW_O) per head; ReLU rescaling (W1D, −DW2); ξ = Gθ
    Source: ours
    Assumptions: no query/key bias for the first, no value bias for the second, ReLU for the third
    Tested by: random S and D, post- and pre-norm, one and two heads
    """
    residuals: dict[str, list[float]] = {}
    for trial in effort.trials(4, 24):
        spec = _spec(trial, activation="relu", norm_first=trial % 4 > 1)
        case = _Case(effort, trial, spec, bias=False)
        w, g = case.weights, case.gradient
        # weights are (out, in): W_QS is Sᵀ·query_weight on the rows of the head
        parts = [("query", "key", spec.key_size, case.draw(spec.key_size, spec.key_size))]
        if "output_weight" in w:
            parts.append(("value", "output", spec.value_size, case.draw(2, 2)))
        parts.append(("up", "down", 5, torch.diag(case.draw(5))))
        for first, second, size, s in parts:
            a, b = f"{first}_weight", f"{second}_weight"
            rows = slice(0, size) if first == "up" else slice((spec.n_heads - 1) * size, None)
            turn = second != "key"  # the columns of W_O and W2 meet those rows
            moved, expected = (
                {n: torch.zeros_like(t) for n, t in ((a, w[a]), (b, w[b]))} for _ in range(2)
            )
            moved[a][rows], expected[a][rows] = s.T @ w[a][rows], -s @ g[a][rows]
            if turn:
                moved[b][:, rows], expected[b][:, rows] = -w[b][:, rows] @ s.T, g[b][:, rows] @ s
            else:
                moved[b][rows], expected[b][rows] = -s @ w[b][rows], s.T @ g[b][rows]
            residuals.setdefault(f"{first}-{second}", []).append(case.residual(moved, expected))
    largest = {name: worst(values) for name, values in residuals.items()}
    return outcome(
        ", ".join(f"{name} {value:.0e}" for name, value in largest.items()),
        printed=worst(largest) < 1e-12 and len(largest) == 3,
        numbers={"residuals": largest},
    )


# ---- what the papers leave open -----------------------------------------------------------------


def _forms(effort: CheckEffort, specs: Sequence[BlockSpec], full: int, loss: str = "mse") -> Rows:
    """H, H_o and H_f of random blocks, joined, against double backward: biases, γ, β included."""
    for trial in effort.trials(max(len(specs), 3), full):
        spec, generator = specs[trial % len(specs)], effort.generator(trial)
        weights = reference.draw_weights(spec, generator, bias=True)
        x, target = normal(generator, 2, 2, 4, spec.d_model)
        if loss == "cross_entropy":
            target = torch.randint(spec.d_model, (2, 4), generator=generator)
        closed = block_hessian(spec, weights, x, target, loss=loss)
        tracked = reference.tracked(weights)
        z = reference.block_output(spec, tracked, x)
        truth = reference.split_hessian(z, reference.loss_of(loss, target), list(tracked.values()))
        yield torch.cat([closed.H, closed.H_outer, closed.H_functional]), torch.cat(truth)


@statement("extension-cross-entropy", HOLDS, derivation="7-the-block")
def cross_entropy(effort: CheckEffort) -> Rows:
    """All closed forms under token cross-entropy

    H is linear in the seeds: δ_i = (π_i − e_y)/N, Λ_i = (diag π_i − π_iπ_iᵀ)/N
    Source: ours: the sources treat mean squared error
    Tested by: bare attention, post- and pre-norm blocks against double backward
    """
    specs = [
        BlockSpec(d_model=4, d_k=3, d_v=4, residual=False),
        BlockSpec(d_model=4, d_k=3, d_v=4, d_ff=6),
        BlockSpec(d_model=4, d_k=3, d_v=4, d_ff=6, norm_first=True),
    ]
    return _forms(effort, specs, 30, "cross_entropy")


@statement("extension-multi-head", HOLDS, derivation="7-the-block")
def multi_head(effort: CheckEffort) -> Rows:
    """Several heads with an output projection, any d_k and d_v, grouped keys and values

    cross-head blocks only through Λ (no functional part); tied heads: EᵀHE
    Source: ours: the sources treat one head without W_O
    Tested by: two to four heads, grouped-query included, against double backward
    """
    specs = [
        BlockSpec(d_model=4, n_heads=2, d_k=3, d_v=1, residual=False),
        BlockSpec(d_model=4, n_heads=4, n_kv_heads=2, d_k=2, d_v=2, d_ff=5),
        BlockSpec(d_model=6, n_heads=3, d_ff=5, norm_first=True),
    ]
    return _forms(effort, specs, 30)


@statement("extension-causal", HOLDS, derivation="7-the-block")
def causal(effort: CheckEffort) -> Rows:
    """Causal masks change nothing in the formulas: A is zero there

    the same blocks with A_ij = 0 for j > i
    Source: ours: the sources treat full attention
    Tested by: causal attention and blocks, one and two heads, against double backward
    """
    specs = [
        BlockSpec(d_model=4, d_k=3, d_v=4, residual=False, causal=True),
        BlockSpec(d_model=4, n_heads=2, d_ff=6, causal=True, norm_first=True),
    ]
    return _forms(effort, specs, 20)


@statement("extension-rms-swiglu", HOLDS, derivation="7-the-block")
def rms_swiglu(effort: CheckEffort) -> Rows:
    """RMSNorm (C = I) and gated feed-forward (two channels per unit)

    J = (I − nnᵀ/d)/σ; per unit D1 = (f'h_u, f), D2 = [[f''h_u, f'], [f', 0]]
    Source: ours: the sources treat LayerNorm and ReLU
    Tested by: RMSNorm with SwiGLU and GEGLU, post- and pre-norm, against double backward
    """
    gated = BlockSpec(d_model=4, d_k=3, d_v=4, d_ff=5, norm="rms", gated=True)
    activations: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "silu")
    specs = [
        replace(gated, activation=name, norm_first=place % 2 == 1)
        for place, name in enumerate(activations)
    ]
    return _forms(effort, specs, 32)


@statement("extension-pre-norm", HOLDS, derivation="7-the-block")
def pre_norm(effort: CheckEffort) -> Rows:
    """The pre-norm block in closed form, γ and β of both norms included

    U = X + Att(n₁(X)), Z = U + FFN(n₂(U)); γ₁, β₁ move the attention's input
    Source: ours: the papers' theory is post-norm, the article's code pre-norm
    Tested by: all activations, with biases, against double backward
    """
    plain = BlockSpec(d_model=4, d_k=3, d_v=4, d_ff=5, norm_first=True)
    activations: tuple[Activation, ...] = ("relu", "gelu", "gelu_tanh", "silu")
    return _forms(effort, [replace(plain, activation=name) for name in activations], 32)
