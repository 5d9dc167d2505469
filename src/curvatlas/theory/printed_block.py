"""The post-norm ReLU block of Petrov et al.: derivatives B_i, ξ_ij and the 25-block Hessian."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.blocks.structure import BlockSpec
from curvatlas.theory import reference
from curvatlas.theory.efficient import block_hessian
from curvatlas.theory.kronecker import commutation, eye, kron
from curvatlas.theory.layer_norm_forms import compact_hessian, compact_jacobian
from curvatlas.theory.statements import (
    CORRECTED,
    HOLDS,
    Effort,
    Outcome,
    judge,
    statement,
    worst,
)

_EXACT = 1e-11
_DERIVATION = "docs/theory/derivations.md#the-block"
_NAMES = ("Q", "K", "V", "1", "2")


class PrintedBlock:
    """Y = LN(X + F), S = Y + ReLU(YW1)W2, Z = LN(S); weights act on the right (papers' layout)."""

    def __init__(self, x: Tensor, weights: dict[str, Tensor], eps: float) -> None:
        self.x, self.w, self.eps = x, weights, eps
        self.length, self.d = x.shape
        self.d_k, self.d_ff = weights["Q"].shape[1], weights["1"].shape[1]
        s = self.d_k**-0.5
        self.a = torch.softmax(s * (x @ weights["Q"]) @ (x @ weights["K"]).T, -1)
        self.u = x + self.a @ x @ weights["V"]
        self.y = reference.normalize(self.u, "layer", eps)
        self.h = self.y @ weights["1"]
        self.s = self.y + torch.relu(self.h) @ weights["2"]
        self.z = reference.normalize(self.s, "layer", eps)

    def _spread(self, per_token: Tensor) -> Tensor:
        spread: Tensor = torch.block_diag(*per_token)  # type: ignore[no-untyped-call]
        return spread

    def derivatives(self) -> dict[str, Tensor]:
        """B_i = ∂S/∂W_i (L d, n_i), by the printed formulas."""
        one = eye(self.length)
        mask = torch.diag((self.h > 0).double().reshape(-1))
        down = kron(one, self.w["2"].T)
        through = eye(self.length * self.d) + down @ mask @ kron(one, self.w["1"].T)
        to_u = through @ self._spread(compact_jacobian(self.u, self.eps))
        soft = self._spread(torch.diag_embed(self.a) - self.a.unsqueeze(-1) * self.a.unsqueeze(-2))
        left = kron(one, self.w["V"].T @ self.x.T) @ soft * self.d_k**-0.5
        d_q = left @ kron(self.x, self.x @ self.w["K"])
        d_k = left @ kron(self.x @ self.w["Q"], self.x) @ commutation(self.d_k, self.d)
        return {
            "Q": to_u @ d_q,
            "K": to_u @ d_k,
            "V": to_u @ kron(self.a @ self.x, eye(self.d)),
            "1": down @ mask @ kron(self.y, eye(self.d_ff)),
            "2": kron(torch.relu(self.h), eye(self.d)),
        }

    def output_jacobian(self) -> Tensor:
        return self._spread(compact_jacobian(self.s, self.eps))

    def output_hessian(self) -> Tensor:
        """H_Z (L²d², L d): vec_r of the Jacobian by S, stacked as the papers stack it."""
        size = self.length * self.d
        full = torch.zeros(self.length, self.d, self.length, self.d, size, dtype=torch.float64)
        for i in range(self.length):
            h = compact_hessian(self.s[i].detach(), self.eps)
            full[i, :, i, :, i * self.d : (i + 1) * self.d] = h
        return full.reshape(size * size, size)


def draw_block(effort: Effort, trial: int) -> PrintedBlock:
    generator = effort.generator(trial)
    d, d_k, d_ff, length = 2 + trial % 2, 1 + trial % 2, 3, 2

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {
        "Q": draw(d, d_k),
        "K": draw(d, d_k),
        "V": draw(d, d),
        "1": draw(d, d_ff),
        "2": draw(d_ff, d),
    }
    weights = {k: v.requires_grad_(True) for k, v in weights.items()}
    # ε = 0.1 keeps d = 2 interesting: without ε the normalised pair is always (±1, ∓1)
    return PrintedBlock(draw(length, d), weights, 0.1)


@statement(
    name="relu-lemma",
    source="Petrov et al., ReLU lemma",
    title="ReLU has derivative diag 1{z > 0} and no second derivative almost everywhere",
    formula="∂σ(A)/∂A = diag(vec_r 1{A > 0}); ∂²σ(A)/∂A² = 0 where no entry is 0",
    assumptions="no entry exactly zero",
    tested_by="central differences of the entries, and of the derivative, away from the kink",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def relu_lemma(effort: Effort) -> Outcome:
    z = torch.randn(500, generator=effort.generator(), dtype=torch.float64)
    z = z[z.abs() > 1e-3]
    h = 1e-4
    first = (torch.relu(z + h) - torch.relu(z - h)) / (2 * h)
    second = (torch.relu(z + h) - 2 * torch.relu(z) + torch.relu(z - h)) / h**2
    errors = [float((first - (z > 0).double()).abs().max()), float(second.abs().max())]
    return Outcome(
        verdict=judge(printed=errors[0] < 1e-9 and errors[1] < 1e-5),
        figure=f"first derivative off by {errors[0]:.0e}, second at most {errors[1]:.0e}",
        numbers={"first": errors[0], "second": errors[1]},
    )


@statement(
    name="block-derivatives",
    source="Petrov et al., Proposition 10 and Theorem 4",
    title="First derivatives of the whole block",
    formula="B_2 = σ(YW1)⊗I; B_1 = (I⊗W2ᵀ)D(Y⊗I); B_{Q,K,V} = (I + (I⊗W2ᵀ)D(I⊗W1ᵀ)) J_Y ∂F/∂W",
    assumptions="post-norm, ReLU, single head, no biases, γ = 1, β = 0",
    tested_by="all five B_i and J_Z B_i against automatic differentiation",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def block_derivatives(effort: Effort) -> Outcome:
    errors = []
    for trial in range(effort.trials(4, 24)):
        block = draw_block(effort, trial)
        j_z = block.output_jacobian().detach()
        for name, b in block.derivatives().items():
            errors += [
                reference.relative_error(b, reference.jacobian(block.s, [block.w[name]])),
                reference.relative_error(j_z @ b, reference.jacobian(block.z, [block.w[name]])),
            ]
    return Outcome(
        verdict=judge(printed=worst(errors) < _EXACT),
        figure=f"largest relative error {worst(errors):.0e} over {len(errors)} Jacobians",
        numbers={"error": worst(errors)},
    )


def _stacked_second(block: PrintedBlock, i: str, j: str) -> Tensor:
    """∂²Z/∂W_i∂W_j (L d n_i, n_j) by automatic differentiation, stacked as in the papers."""
    first = reference.jacobian(block.z, [block.w[i]], graph=True)
    return reference.jacobian(first, [block.w[j]]).detach()


@statement(
    name="block-hessian-25-blocks",
    source="Petrov et al., Theorem 5",
    title="Second derivatives of the whole block, all 25 pairs of weights",
    formula="H_tr^{(i,j)} = (J_Z⊗I_{n_i}) ξ_ij + (I⊗B_iᵀ) H_Z B_j, ξ_ij = ∂B_i/∂W_j",
    assumptions="post-norm, ReLU, single head, no biases, γ = 1, β = 0",
    tested_by="25 stacked blocks against automatic differentiation",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def block_second_derivatives(effort: Effort) -> Outcome:
    errors: dict[str, float] = {}
    for trial in range(effort.trials(2, 8)):
        block = draw_block(effort, trial)
        j_z, h_z = block.output_jacobian().detach(), block.output_hessian()
        b = block.derivatives()
        for i in _NAMES:
            for j in _NAMES:
                n_i = block.w[i].numel()
                xi = reference.jacobian(b[i], [block.w[j]]).detach()
                printed = kron(j_z, eye(n_i)) @ xi
                printed = printed + kron(eye(len(j_z)), b[i].detach().T) @ h_z @ b[j].detach()
                truth = _stacked_second(block, i, j)
                errors[f"{trial}:{i}{j}"] = reference.relative_error(printed, truth)
    return Outcome(
        verdict=judge(printed=worst(errors) < _EXACT and len(errors) % 25 == 0),
        figure=f"largest relative error {worst(errors):.0e} over {len(errors)} blocks",
        numbers={"error": worst(errors), "blocks": len(errors)},
    )


@statement(
    name="block-hessian-symmetry",
    source="Petrov et al., slides, remark after Theorem 5",
    title="H^{(i,j)} = H^{(j,i)}",
    formula="printed: stacked blocks are equal; true: contracted with ∂ℓ/∂Z they are transposes",
    tested_by="shapes and entries of the stacked blocks; contraction with a random gradient",
    verdict=CORRECTED,
    counterexample="H^{(Q,1)} and H^{(1,Q)} do not even have the same shape",
    derivation=_DERIVATION,
)
def block_symmetry(effort: Effort) -> Outcome:
    block = draw_block(effort, 1)
    delta = torch.randn(
        block.z.numel(), generator=effort.generator(99), dtype=torch.float64
    ).unsqueeze(0)
    equal, contracted = 0, []
    for i, j in (("Q", "1"), ("V", "2"), ("Q", "K"), ("1", "2")):
        left, right = _stacked_second(block, i, j), _stacked_second(block, j, i)
        equal += int(left.shape == right.shape and reference.relative_error(left, right) < _EXACT)
        h_ij = kron(delta, eye(block.w[i].numel())) @ left
        h_ji = kron(delta, eye(block.w[j].numel())) @ right
        contracted.append(reference.relative_error(h_ij, h_ji.T))
    return Outcome(
        verdict=judge(printed=equal == 4, corrected=worst(contracted) < _EXACT),
        figure=f"{equal} of 4 stacked pairs equal; contracted transposes agree"
        f" to {worst(contracted):.0e}",
        numbers={"equal_pairs": equal, "contracted_error": worst(contracted)},
    )


@statement(
    name="functional-part-of-linear-parameters",
    source="Petrov et al., draft: 'H_f vanishes when Z is linear in a parameter, e.g. W2'",
    title="The functional Hessian of W2 (and of W1 under ReLU) is zero",
    formula="H_f(W2,W2) = 0 and, for ReLU, H_f(W1,W1) = 0",
    tested_by="ratio ‖H_f(W,W)‖/‖H(W,W)‖ in the post-norm block and in the pre-norm block",
    verdict=CORRECTED,
    counterexample="post-norm: the final norm follows W2, the ratio is of order one",
    derivation=_DERIVATION,
)
def linear_parameters(effort: Effort) -> Outcome:
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for norm_first, found in ratios.items():
        for trial in range(effort.trials(2, 10)):
            spec = BlockSpec(
                d_model=4, d_k=2, d_v=4, d_ff=5, activation="relu", norm_first=norm_first
            )
            generator = effort.generator(trial)
            weights = reference.draw_weights(spec, generator)
            x, y = torch.randn(2, 1, 3, 4, generator=generator, dtype=torch.float64)
            result = block_hessian(spec, weights, x, y)
            for name in ("up_weight", "down_weight"):
                ratio = result.block(name, "functional").norm() / result.block(name, "total").norm()
                found.append(float(ratio))
    return Outcome(
        verdict=judge(printed=worst(ratios[False]) < 1e-12, corrected=worst(ratios[True]) < 1e-12),
        figure=f"post-norm ratio {min(ratios[False]):.2f} to {max(ratios[False]):.2f}; "
        f"pre-norm {worst(ratios[True]):.0e}",
        numbers={"post_norm": min(ratios[False]), "pre_norm": worst(ratios[True])},
    )
