"""LayerNorm: the printed matrix forms, the compact ones, and what the sources got wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.theory.reference import eye, jacobian, kron, normal, normalize, relative_error
from curvatlas.theory.statements import CheckEffort, Outcome, agreement, check, judge, worst


class Printed:
    """LN(X) = P(X) M(X) with the papers' matrices; X (L, d), row-major vec."""

    def __init__(self, x: Tensor, eps: float) -> None:
        self.x, self.eps = x, eps
        self.length, self.d = x.shape
        ones = torch.ones(self.d, self.d, dtype=torch.float64)
        self.centring = eye(self.length * self.d) - kron(eye(self.length), ones) / self.d  # G
        self.m = x - x.mean(1, keepdim=True)
        self.sigma = (self.m.pow(2).mean(1) + eps).sqrt()
        self.p = torch.diag(1.0 / self.sigma)

    def scale_jacobian(self) -> Tensor:
        """∂P/∂X (L², L d) by the three lemmas: inverse, Hadamard square, Hadamard root."""
        pick = torch.zeros(self.length**2, self.length, dtype=torch.float64)
        for i in range(self.length):
            pick[i * self.length + i, i] = 1.0  # vec_r of diag(v) = pick v
        mean = kron(eye(self.length), torch.ones(1, self.d, dtype=torch.float64)) / self.d
        square = 2.0 * torch.diag(self.m.reshape(-1)) @ self.centring
        root = 0.5 * torch.diag(1.0 / self.sigma) @ mean @ square
        return -kron(self.p, self.p.T) @ pick @ root

    def jacobian(self) -> Tensor:
        """(P⊗I_d)G + (I_L⊗Mᵀ)∂P/∂X."""
        return self.first_term() + kron(eye(self.length), self.m.T) @ self.scale_jacobian()

    def first_term(self) -> Tensor:
        return kron(self.p, eye(self.d)) @ self.centring

    def hessian_terms(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three terms of ∂²LN/∂X², each (L²d², L d); derivatives of P and M taken entrywise."""
        x = self.x.detach().clone().requires_grad_(True)
        tracked = Printed(x, self.eps)
        size = self.length * self.d
        scale_first = jacobian(tracked.p, [x], graph=True)  # ∂P/∂X
        scale_second = jacobian(scale_first, [x]).detach()  # ∂²P/∂X²
        spread_scale = jacobian(kron(tracked.p, eye(self.d)), [x]).detach()
        spread_centred = jacobian(kron(eye(self.length), tracked.m.T), [x]).detach()
        first = kron(eye(size), self.centring.T) @ spread_scale
        second = kron(kron(eye(self.length), self.m.T), eye(size)) @ scale_second
        third = kron(eye(size), scale_first.detach().T) @ spread_centred
        return first, second, third


def automatic(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Jacobian (Ld, Ld) and stacked Hessian (L²d², L d) of LayerNorm by differentiation."""
    leaf = x.detach().clone().requires_grad_(True)
    first = jacobian(normalize(leaf, "layer", eps), [leaf], graph=True)
    return first.detach(), jacobian(first, [leaf]).detach()


def compact_jacobian(x: Tensor, eps: float, *, kind: str = "layer") -> Tensor:
    """J = (C − n nᵀ/d)/σ of each token: x (…, d) → (…, d, d)."""
    d = x.shape[-1]
    n = normalize(x, kind, eps)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    sigma = (centred.pow(2).mean(-1) + eps).sqrt()
    centring = torch.eye(d, dtype=x.dtype) - (1.0 / d if kind == "layer" else 0.0)
    return (centring - n.unsqueeze(-1) * n.unsqueeze(-2) / d) / sigma[..., None, None]


def compact_hessian(x: Tensor, eps: float, *, kind: str = "layer") -> Tensor:
    """∂²n_a/∂x_b∂x_c = −(J_ab n_c + J_ac n_b + J_bc n_a)/(dσ) of one token: (d,) → (d, d, d)."""
    d = x.shape[-1]
    n, j = normalize(x, kind, eps), compact_jacobian(x, eps, kind=kind)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    sigma = (centred.pow(2).mean(-1) + eps).sqrt()
    outer = torch.einsum("ab,c->abc", j, n)
    return -(outer + outer.permute(0, 2, 1) + outer.permute(2, 0, 1)) / (d * sigma)


_EXACT = 1e-12
SHARP = 2.0 / 3.0**0.5  # max of 3 t (1 − t²) on [0, 1]


def _tokens(effort: CheckEffort, trial: int, *, length: int = 2, d: int = 3) -> Tensor:
    scale = (0.3, 1.0, 4.0)[trial % 3]
    return scale * normal(effort.generator(trial), length, d)


@check("layer-norm-lemmas")
def layer_norm_lemmas(effort: CheckEffort) -> Outcome:
    errors = []
    for trial in range(effort.trials(4, 40)):
        a = torch.rand(3, 3, generator=effort.generator(trial), dtype=torch.float64) + 0.2
        leaf = (a + 2.0 * eye(3)).requires_grad_(True)
        inverse = torch.linalg.inv(leaf)
        errors.append(relative_error(-kron(inverse, inverse.T).detach(), jacobian(inverse, [leaf])))
        square = leaf.detach().clone().requires_grad_(True)
        errors.append(
            relative_error(
                2.0 * torch.diag(square.detach().reshape(-1)), jacobian(square**2, [square])
            )
        )
        root = square.detach().clone().requires_grad_(True)
        expected = 0.5 * torch.diag(root.detach().reshape(-1) ** -0.5)
        errors.append(relative_error(expected, jacobian(root.sqrt(), [root])))
    return agreement(errors, _EXACT)


@check("layer-norm-jacobian")
def layer_norm_jacobian(effort: CheckEffort) -> Outcome:
    errors = []
    for trial in range(effort.trials(9, 60)):
        x, eps = _tokens(effort, trial, length=2 + trial % 2), (0.0, 1e-5, 0.1)[trial % 3]
        errors.append(relative_error(Printed(x, eps).jacobian(), automatic(x, eps)[0]))
    return agreement(errors, _EXACT, "inputs")


@check("layer-norm-hessian")
def layer_norm_hessian(effort: CheckEffort) -> Outcome:
    errors = []
    for trial in range(effort.trials(6, 30)):
        x, eps = _tokens(effort, trial), (0.0, 1e-5, 0.1)[trial % 3]
        errors.append(relative_error(sum(Printed(x, eps).hessian_terms()), automatic(x, eps)[1]))  # type: ignore[arg-type]
    return agreement(errors, 1e-11, "inputs")


@check("layer-norm-hessian-only-p")
def layer_norm_only_p(effort: CheckEffort) -> Outcome:
    errors = []
    for trial in range(effort.trials(6, 30)):
        x = _tokens(effort, trial)
        errors.append(relative_error(Printed(x, 1e-5).hessian_terms()[1], automatic(x, 1e-5)[1]))
    return Outcome(
        verdict=judge(printed=worst(errors) < 1e-6),
        figure=f"relative error {min(errors):.2f} to {max(errors):.2f}",
        numbers={"smallest": min(errors), "largest": max(errors)},
    )


@check("layer-norm-jacobian-article")
def layer_norm_article(effort: CheckEffort) -> Outcome:
    printed, corrected = [], []
    for trial in range(effort.trials(8, 60)):
        x = _tokens(effort, trial, d=3 + trial % 6)
        gamma = 1.0 + 0.5 * normal(effort.generator(1000 + trial), x.shape[1])
        widen = torch.diag(gamma.repeat(len(x)))
        truth = widen @ automatic(x, 1e-5)[0]
        p = Printed(x, 1e-5)
        printed.append(relative_error(p.first_term(), truth))
        corrected.append(relative_error(widen @ p.jacobian(), truth))
    return Outcome(
        verdict=judge(printed=min(printed) < 1e-6, corrected=worst(corrected) < _EXACT),
        figure=f"printed off by {min(printed):.2f} to {max(printed):.2f}; "
        f"corrected {worst(corrected):.0e}",
        numbers={"printed_error": min(printed), "corrected_error": worst(corrected)},
    )


@check("layer-norm-entrywise")
def layer_norm_entrywise(effort: CheckEffort) -> Outcome:
    errors: dict[int, list[float]] = {2: [], 3: []}
    for trial in range(effort.trials(6, 40)):
        x = _tokens(effort, trial, length=1, d=4)
        truth = automatic(x, 0.0)[0]
        centred = (x - x.mean(1, keepdim=True))[0]
        sigma = centred.pow(2).mean().sqrt()
        for power, values in errors.items():
            entry = (eye(4) - 0.25) / sigma - torch.outer(centred, centred) / (4 * sigma**power)
            values.append(relative_error(entry, truth))
    return Outcome(
        verdict=judge(printed=worst(errors[2]) < _EXACT, corrected=worst(errors[3]) < _EXACT),
        figure=f"σ²: off by up to {worst(errors[2]):.2f}; σ³: {worst(errors[3]):.0e}",
        numbers={"printed_error": worst(errors[2]), "corrected_error": worst(errors[3])},
    )


@check("normalisation-is-a-gradient")
def normalisation_gradient(effort: CheckEffort) -> Outcome:
    errors = []
    for trial in range(effort.trials(6, 60)):
        kind, eps = ("layer", "rms")[trial % 2], (0.0, 0.1)[(trial // 2) % 2]
        x = _tokens(effort, trial, length=1, d=4)[0].requires_grad_(True)
        centred = x - x.mean() if kind == "layer" else x
        sigma = (centred.pow(2).mean() + eps).sqrt()
        n = 4.0 * jacobian(sigma, [x], graph=True)[0]
        j = jacobian(n, [x], graph=True)
        h = jacobian(j, [x]).reshape(4, 4, 4)
        with torch.no_grad():
            errors += [
                relative_error(normalize(x, kind, eps), n),
                relative_error(compact_jacobian(x, eps, kind=kind), j),
                relative_error(compact_hessian(x, eps, kind=kind), h),
            ]
    return agreement(errors, _EXACT)


@check("normalisation-curvature-constant")
def normalisation_constant(effort: CheckEffort) -> Outcome:
    random: list[float] = []
    attained: list[float] = []
    for trial in range(effort.trials(60, 2000)):
        kind, eps = ("layer", "rms")[trial % 2], (0.0, 1e-5, 0.3)[trial % 3]
        d = 3 + trial % 6
        x = _tokens(effort, trial, length=1, d=d)[0]
        centred = x - x.mean() if kind == "layer" else x
        unit = d**0.5 * (centred.pow(2).mean() + eps)
        h = compact_hessian(x, eps, kind=kind)
        delta = normal(effort.generator(10_000 + trial), d)
        for direction, norms in ((delta, random), (None, attained)):
            if direction is None:  # a unit vector at the best angle to n, within the centred space
                along = centred / centred.norm()
                across = delta - delta.mean() if kind == "layer" else delta
                across = across - (across @ along) * along
                direction = along / 3**0.5 + (2 / 3) ** 0.5 * across / across.norm()
            contracted = torch.einsum("a,abc->bc", direction / direction.norm(), h)
            norms.append(float(torch.linalg.matrix_norm(contracted, 2) * unit))
    largest = max(*random, *attained)
    return Outcome(
        verdict=judge(printed=largest <= SHARP * (1 + 1e-9) and max(attained) > SHARP * 0.999),
        figure=f"random up to {max(random):.4f}, attaining direction {max(attained):.4f},"
        f" bound {SHARP:.4f}",
        numbers={"random": max(random), "attained": max(attained), "bound": SHARP},
    )


@check("layer-norm-statistics")
def layer_norm_statistics(effort: CheckEffort) -> Outcome:
    x = _tokens(effort, 1, length=5, d=4)
    truth = torch.nn.functional.layer_norm(x, (4,), eps=1e-5)
    centred = x - x.mean(0, keepdim=True)
    featured = centred / (centred.pow(2).mean(0, keepdim=True) + 1e-5).sqrt()
    per_feature = relative_error(featured, truth)
    reference_error = relative_error(normalize(x, "layer", 1e-5), truth)
    return Outcome(
        verdict=judge(printed=per_feature < 1e-6, corrected=reference_error < _EXACT),
        figure=f"over tokens off by {per_feature:.2f}; over features {reference_error:.0e}",
        numbers={"over_tokens": per_feature, "over_features": reference_error},
    )
