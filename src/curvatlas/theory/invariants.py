"""Symmetries of a block leave exact traces in its Hessian."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.blocks.structure import BlockSpec
from curvatlas.theory import reference
from curvatlas.theory.efficient import DenseParts, block_hessian
from curvatlas.theory.statements import HOLDS, Effort, Outcome, judge, statement, worst

_DERIVATION = "docs/theory/derivations.md#invariants"


class _Case:
    """A block at one batch with its closed-form Hessian and gradient."""

    def __init__(self, effort: Effort, trial: int, spec: BlockSpec, *, bias: bool) -> None:
        generator = effort.generator(trial)
        self.spec = spec
        self.weights = reference.draw_weights(spec, generator, bias=bias, output=spec.n_heads > 1)
        x, y = torch.randn(2, 2, 4, spec.d_model, generator=generator, dtype=torch.float64)
        self.h: DenseParts = block_hessian(spec, self.weights, x, y)
        tracked = reference.tracked(self.weights)
        z = reference.block_output(spec, tracked, x)
        grads = torch.autograd.grad(reference.loss_of("mse", y)(z), list(tracked.values()))
        self.gradient = dict(zip(tracked, grads, strict=True))
        self.random = generator

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64)

    def vector(self, parts: dict[str, Tensor]) -> Tensor:
        flat = torch.zeros(len(self.h.total), dtype=torch.float64)
        for name, part in parts.items():
            flat[self.h.positions(name)] = part.reshape(-1)
        return flat

    def residual(self, moved: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
        """‖Hξ − expected‖/(‖H‖‖ξ‖)."""
        xi = self.vector(moved)
        off = self.h.total @ xi - self.vector(expected)
        return float(off.norm() / (self.h.total.norm() * xi.norm()))


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


@statement(
    name="layer-norm-shift-directions",
    source="ours",
    title="Directions removed by LayerNorm are exact null directions of H",
    formula="post-norm: H annihilates W2 += 1aᵀ (and its bias), W_O += 1aᵀ (W_V += 1aᵀ without "
    "W_O)",
    assumptions="LayerNorm, post-norm; not RMSNorm",
    tested_by="one and two heads, three activations, with biases; RMSNorm as the control",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def shift_directions(effort: Effort) -> Outcome:
    residuals: list[float] = []
    control: list[float] = []
    for trial in range(effort.trials(4, 24)):
        for norm, found in (("layer", residuals), ("rms", control)):
            case = _Case(effort, trial, _spec(trial, norm=norm), bias=True)
            ones = torch.ones(4, dtype=torch.float64)
            mixed = "output" if "output_weight" in case.weights else "value"
            for which in ("down", mixed):
                width = case.weights[f"{which}_weight"].shape[1]
                moved = {
                    f"{which}_weight": torch.outer(ones, case.draw(width)),
                    f"{which}_bias": ones * float(case.draw(1)),
                }
                found.append(case.residual(moved, {}))
    return Outcome(
        verdict=judge(printed=worst(residuals) < 1e-12 and min(control) > 1e-6),
        figure=f"‖Hξ‖/(‖H‖‖ξ‖) at most {worst(residuals):.0e}; RMSNorm control at least"
        f" {min(control):.0e}",
        numbers={"residual": worst(residuals), "control": min(control)},
    )


@statement(
    name="key-bias-is-flat",
    source="ours",
    title="The key bias has exactly zero Hessian rows",
    formula="softmax ignores a constant added to a row of logits: H[b_K, ·] = 0",
    tested_by="rows of b_K, post- and pre-norm, one and two heads",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def key_bias(effort: Effort) -> Outcome:
    found = []
    for trial in range(effort.trials(4, 24)):
        case = _Case(effort, trial, _spec(trial, norm_first=trial % 4 > 1), bias=True)
        rows = case.h.total[case.h.positions("key_bias")]
        found.append(float(rows.norm() / case.h.total.norm()))
    return Outcome(
        verdict=judge(printed=worst(found) < 1e-14),
        figure=f"‖rows‖/‖H‖ at most {worst(found):.0e}",
        numbers={"residual": worst(found)},
    )


@statement(
    name="rescaling-identities",
    source="ours",
    title="One-parameter symmetries fix H along their orbits: Hξ = −Gᵀ∇ℓ",
    formula="(W_QS, −W_KSᵀ) per head; (W_VS, −SW_O) per head; ReLU rescaling (W1D, −DW2); ξ = Gθ",
    assumptions="no query/key bias for the first, no value bias for the second, ReLU for the third",
    tested_by="random S and D, post- and pre-norm, one and two heads",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def rescaling(effort: Effort) -> Outcome:
    found: dict[str, list[float]] = {"query-key": [], "value-output": [], "feed-forward": []}
    for trial in range(effort.trials(4, 24)):
        spec = _spec(trial, activation="relu", norm_first=trial % 4 > 1)
        case = _Case(effort, trial, spec, bias=False)
        w, g = case.weights, case.gradient
        d_k, d_v = spec.key_size, spec.value_size
        head = spec.n_heads - 1
        rows = slice(head * d_k, (head + 1) * d_k)
        s = case.draw(d_k, d_k)
        # (out, in) layout: W_Q → W_QS reads Sᵀ·query_weight
        moved = {n: torch.zeros_like(w[n]) for n in ("query_weight", "key_weight")}
        expected = {n: torch.zeros_like(w[n]) for n in moved}
        moved["query_weight"][rows] = s.T @ w["query_weight"][rows]
        moved["key_weight"][rows] = -s @ w["key_weight"][rows]
        expected["query_weight"][rows] = -s @ g["query_weight"][rows]
        expected["key_weight"][rows] = s.T @ g["key_weight"][rows]
        found["query-key"].append(case.residual(moved, expected))
        if "output_weight" in w:
            rows = slice(head * d_v, (head + 1) * d_v)
            s = case.draw(d_v, d_v)
            moved = {n: torch.zeros_like(w[n]) for n in ("value_weight", "output_weight")}
            expected = {n: torch.zeros_like(w[n]) for n in moved}
            moved["value_weight"][rows] = s @ w["value_weight"][rows]
            moved["output_weight"][:, rows] = -w["output_weight"][:, rows] @ s
            expected["value_weight"][rows] = -s.T @ g["value_weight"][rows]
            expected["output_weight"][:, rows] = g["output_weight"][:, rows] @ s.T
            found["value-output"].append(case.residual(moved, expected))
        scale = case.draw(5)
        moved = {
            "up_weight": scale.unsqueeze(1) * w["up_weight"],
            "down_weight": -w["down_weight"] * scale,
        }
        expected = {
            "up_weight": -scale.unsqueeze(1) * g["up_weight"],
            "down_weight": g["down_weight"] * scale,
        }
        found["feed-forward"].append(case.residual(moved, expected))
    largest = {name: worst(values) for name, values in found.items()}
    return Outcome(
        verdict=judge(printed=worst(largest) < 1e-12),
        figure=", ".join(f"{name} {value:.0e}" for name, value in largest.items()),
        numbers={"residuals": largest},
    )
