"""What the sources leave open: other losses, heads, masks, norms, in closed form and verified."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.layers.structure import BlockSpec
from curvatlas.theory import reference
from curvatlas.theory.reference import block_hessian, normal
from curvatlas.theory.statements import CheckEffort, Outcome, check, judge, worst


class _Case:
    """A block at one batch with its closed-form Hessian and gradient."""

    def __init__(self, effort: CheckEffort, trial: int, spec: BlockSpec, *, bias: bool) -> None:
        generator = effort.generator(trial)
        self.spec = spec
        self.weights = reference.draw_weights(spec, generator, bias=bias, output=spec.n_heads > 1)
        x, y = normal(generator, 2, 2, 4, spec.d_model)
        self.h = block_hessian(spec, self.weights, x, y)
        tracked = reference.tracked(self.weights)
        z = reference.block_output(spec, tracked, x)
        grads = torch.autograd.grad(reference.loss_of("mse", y)(z), list(tracked.values()))
        self.gradient = dict(zip(tracked, grads, strict=True))
        self.random = generator

    def draw(self, *shape: int) -> Tensor:
        return normal(self.random, *shape)

    def vector(self, parts: dict[str, Tensor]) -> Tensor:
        flat = torch.zeros(len(self.h.H), dtype=torch.float64)
        for name, part in parts.items():
            start, size = self.h.offset(name)
            flat[start : start + size] = part.reshape(-1)
        return flat

    def residual(self, moved: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
        """‖Hξ − expected‖/(‖H‖‖ξ‖)."""
        xi = self.vector(moved)
        off = self.h.H @ xi - self.vector(expected)
        return float(off.norm() / (self.h.H.norm() * xi.norm()))


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


@check("layer-norm-shift-directions")
def shift_directions(effort: CheckEffort) -> Outcome:
    residuals: list[float] = []
    control: list[float] = []
    for trial in range(effort.trials(4, 24)):
        for norm, values in (("layer", residuals), ("rms", control)):
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
    return Outcome(
        verdict=judge(printed=worst(residuals) < 1e-12 and min(control) > 1e-6),
        figure=f"‖Hξ‖/(‖H‖‖ξ‖) at most {worst(residuals):.0e}; RMSNorm control at least"
        f" {min(control):.0e}",
        numbers={"residual": worst(residuals), "control": min(control)},
    )


@check("key-bias-is-flat")
def key_bias(effort: CheckEffort) -> Outcome:
    residuals = []
    for trial in range(effort.trials(4, 24)):
        case = _Case(effort, trial, _spec(trial, norm_first=trial % 4 > 1), bias=True)
        rows = case.h["key_bias", :].dense()
        residuals.append(float(rows.norm() / case.h.H.norm()))
    return Outcome(
        verdict=judge(printed=worst(residuals) < 1e-14),
        figure=f"‖rows‖/‖H‖ at most {worst(residuals):.0e}",
        numbers={"residual": worst(residuals)},
    )


@check("rescaling-identities")
def rescaling(effort: CheckEffort) -> Outcome:
    residuals: dict[str, list[float]] = {"query-key": [], "value-output": [], "feed-forward": []}
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
        residuals["query-key"].append(case.residual(moved, expected))
        if "output_weight" in w:
            rows = slice(head * d_v, (head + 1) * d_v)
            s = case.draw(d_v, d_v)
            moved = {n: torch.zeros_like(w[n]) for n in ("value_weight", "output_weight")}
            expected = {n: torch.zeros_like(w[n]) for n in moved}
            moved["value_weight"][rows] = s @ w["value_weight"][rows]
            moved["output_weight"][:, rows] = -w["output_weight"][:, rows] @ s
            expected["value_weight"][rows] = -s.T @ g["value_weight"][rows]
            expected["output_weight"][:, rows] = g["output_weight"][:, rows] @ s.T
            residuals["value-output"].append(case.residual(moved, expected))
        scale = case.draw(5)
        moved = {
            "up_weight": scale.unsqueeze(1) * w["up_weight"],
            "down_weight": -w["down_weight"] * scale,
        }
        expected = {
            "up_weight": -scale.unsqueeze(1) * g["up_weight"],
            "down_weight": g["down_weight"] * scale,
        }
        residuals["feed-forward"].append(case.residual(moved, expected))
    largest = {name: worst(values) for name, values in residuals.items()}
    return Outcome(
        verdict=judge(printed=worst(largest) < 1e-12),
        figure=", ".join(f"{name} {value:.0e}" for name, value in largest.items()),
        numbers={"residuals": largest},
    )


_EXACT = 1e-12


def _errors(
    effort: CheckEffort, spec: BlockSpec, loss: str, trial: int, *, bias: bool = True
) -> float:
    """Largest error of H, H_o, H_f against double backward, relative to ‖H‖_F."""
    generator = effort.generator(trial)
    weights = reference.draw_weights(spec, generator, bias=bias)
    x, y = normal(generator, 2, 2, 4, spec.d_model)
    target = torch.randint(spec.d_model, (2, 4), generator=generator)
    if loss == "mse":
        target = y
    closed = block_hessian(spec, weights, x, target, loss=loss)
    tracked = reference.tracked(weights)
    z = reference.block_output(spec, tracked, x)
    truth = reference.split_hessian(z, reference.loss_of(loss, target), list(tracked.values()))
    scale = float(truth[0].norm())
    parts = (closed.H, closed.H_outer, closed.H_functional)
    return max(float((a - b).norm()) / scale for a, b in zip(parts, truth, strict=True))


def _outcome(errors: list[float]) -> Outcome:
    return Outcome(
        verdict=judge(printed=worst(errors) < _EXACT),
        figure=f"H, H_o, H_f to {worst(errors):.0e} of ‖H‖ in {len(errors)} configurations",
        numbers={"error": worst(errors), "configurations": len(errors)},
    )


@check("extension-cross-entropy")
def cross_entropy(effort: CheckEffort) -> Outcome:
    specs = [
        BlockSpec(d_model=4, d_k=3, d_v=4, residual=False),
        BlockSpec(d_model=4, d_k=3, d_v=4, d_ff=6),
        BlockSpec(d_model=4, d_k=3, d_v=4, d_ff=6, norm_first=True),
    ]
    trials = range(effort.trials(3, 30))
    return _outcome([_errors(effort, specs[t % 3], "cross_entropy", t) for t in trials])


@check("extension-multi-head")
def multi_head(effort: CheckEffort) -> Outcome:
    specs = [
        BlockSpec(d_model=4, n_heads=2, d_k=3, d_v=1, residual=False),
        BlockSpec(d_model=4, n_heads=4, n_kv_heads=2, d_k=2, d_v=2, d_ff=5),
        BlockSpec(d_model=6, n_heads=3, d_ff=5, norm_first=True),
    ]
    trials = range(effort.trials(3, 30))
    return _outcome([_errors(effort, specs[t % 3], "mse", t) for t in trials])


@check("extension-causal")
def causal(effort: CheckEffort) -> Outcome:
    specs = [
        BlockSpec(d_model=4, d_k=3, d_v=4, residual=False, causal=True),
        BlockSpec(d_model=4, n_heads=2, d_ff=6, causal=True, norm_first=True),
    ]
    trials = range(effort.trials(2, 20))
    return _outcome([_errors(effort, specs[t % 2], "mse", t) for t in trials])


@check("extension-rms-swiglu")
def rms_swiglu(effort: CheckEffort) -> Outcome:
    errors = []
    for trial in range(effort.trials(4, 32)):
        spec = BlockSpec(
            d_model=4,
            d_k=3,
            d_v=4,
            d_ff=5,
            norm="rms",
            gated=True,
            activation=("silu", "gelu", "gelu_tanh")[trial % 3],
            norm_first=trial % 2 == 1,
        )
        errors.append(_errors(effort, spec, "mse", trial))
    return _outcome(errors)


@check("extension-pre-norm")
def pre_norm(effort: CheckEffort) -> Outcome:
    errors = []
    for trial in range(effort.trials(4, 32)):
        spec = BlockSpec(
            d_model=4,
            d_k=3,
            d_v=4,
            d_ff=5,
            norm_first=True,
            activation=("relu", "gelu", "gelu_tanh", "silu")[trial % 4],
        )
        errors.append(_errors(effort, spec, "mse", trial))
    return _outcome(errors)
