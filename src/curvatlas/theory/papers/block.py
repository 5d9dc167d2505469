"""The post-norm block: Petrov et al., Lemma 1 and Theorems 4 and 5 (9 and 10 in their appendix).

Y = LN(X + F), S = Y + ReLU(YW1)W2, Z = LN(S); weights act on the right, no biases, γ = 1, β = 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvatlas.layers.structure import BlockSpec
from curvatlas.theory import reference
from curvatlas.theory.papers.layer_norm import PrintedNorm
from curvatlas.theory.reference import (
    block_hessian,
    commutation,
    eye,
    in_papers_layout,
    jacobian,
    kron,
    normal,
    relative_error,
)
from curvatlas.theory.statements import (
    CORRECTED,
    HOLDS,
    CheckEffort,
    Outcome,
    Rows,
    outcome,
    statement,
    worst,
)

WEIGHTS = {
    "Q": "query_weight",
    "K": "key_weight",
    "V": "value_weight",
    "1": "up_weight",
    "2": "down_weight",
}


class PrintedBlock:
    """The block of this page with its printed derivatives, x (L, d), weights (in, out)."""

    def __init__(self, x: Tensor, weights: Mapping[str, Tensor], eps: float) -> None:
        self.x, self.w, self.eps = x, weights, eps
        self.length, self.d = x.shape
        self.d_k, self.d_ff = weights["Q"].shape[1], weights["1"].shape[1]
        self.scale = self.d_k**-0.5
        self.a = torch.softmax(self.scale * (x @ weights["Q"]) @ (x @ weights["K"]).T, -1)
        self.u = x + self.a @ x @ weights["V"]
        self.y = reference.normalize(self.u, "layer", eps)
        self.h = self.y @ weights["1"]
        self.s = self.y + torch.relu(self.h) @ weights["2"]
        self.z = reference.normalize(self.s, "layer", eps)

    def derivatives(self) -> dict[str, Tensor]:
        """B_i = ∂S/∂W_i (L d, n_i)."""
        one = eye(self.length)
        mask = torch.diag((self.h > 0).double().reshape(-1))  # D
        down = kron(one, self.w["2"].T)
        through = eye(self.length * self.d) + down @ mask @ kron(one, self.w["1"].T)  # J_SY
        to_u = through @ PrintedNorm(self.u, self.eps).jacobian()
        rows = torch.diag_embed(self.a) - self.a.unsqueeze(-1) * self.a.unsqueeze(-2)
        soft: Tensor = torch.block_diag(*rows)  # type: ignore[no-untyped-call]
        left = kron(one, self.w["V"].T @ self.x.T) @ soft * self.scale
        by_key = kron(self.x @ self.w["Q"], self.x) @ commutation(self.d_k, self.d)
        return {
            "Q": to_u @ left @ kron(self.x, self.x @ self.w["K"]),
            "K": to_u @ left @ by_key,
            "V": to_u @ kron(self.a @ self.x, eye(self.d)),
            "1": down @ mask @ kron(self.y, eye(self.d_ff)),
            "2": kron(torch.relu(self.h), eye(self.d)),
        }

    def output_jacobian(self) -> Tensor:
        """J_Z (L d, L d) = ∂LN/∂S."""
        return PrintedNorm(self.s, self.eps).jacobian()

    def output_hessian(self) -> Tensor:
        """H_Z (L²d², L d) = ∂²LN/∂S²."""
        return PrintedNorm(self.s.detach(), self.eps).hessian()

    def second_derivatives(self) -> dict[tuple[str, str], Tensor]:
        """H_tr^{(i,j)} = (J_Z⊗I_{n_i}) ξ_ij + (I_{Ld}⊗B_iᵀ) H_Z B_j (L d n_i, n_j)."""
        b, j_z = self.derivatives(), self.output_jacobian().detach()
        h_z = self.output_hessian()
        return {
            (i, j): kron(j_z, eye(b[i].shape[1])) @ jacobian(b[i], [self.w[j]])
            + kron(eye(len(j_z)), b[i].detach().T) @ h_z @ b[j].detach()
            for i in b
            for j in b
        }

    def automatic(self, i: str, j: str) -> Tensor:
        """∂²Z/∂W_i∂W_j (L d n_i, n_j) by differentiation, stacked as in the papers."""
        return jacobian(jacobian(self.z, [self.w[i]], graph=True), [self.w[j]])

    def hessian_of_the_chain(self, target: Tensor) -> dict[tuple[str, str], Tensor]:
        """Blocks of the loss' Hessian (mean squared error) from the chain of the block."""
        spec = BlockSpec(
            d_model=self.d, d_k=self.d_k, d_v=self.d, d_ff=self.d_ff, eps=self.eps,
            activation="relu",
        )  # fmt: skip
        weights = {WEIGHTS[k]: w.detach().T.contiguous() for k, w in self.w.items()}
        result = block_hessian(spec, weights, self.x.unsqueeze(0), target.unsqueeze(0))
        return in_papers_layout(result, weights, WEIGHTS, "total")


def draw_block(effort: CheckEffort, trial: int) -> PrintedBlock:
    generator = effort.generator(trial)
    d, d_k, d_ff, length = 2 + trial % 2, 1 + trial % 2, 3, 2
    shapes = {"Q": (d, d_k), "K": (d, d_k), "V": (d, d), "1": (d, d_ff), "2": (d_ff, d)}
    weights = {k: normal(generator, *shape).requires_grad_(True) for k, shape in shapes.items()}
    # ε = 0.1 keeps d = 2 interesting: without ε the normalised pair is always (±1, ∓1)
    return PrintedBlock(normal(generator, length, d), weights, 0.1)


@statement("relu-lemma", HOLDS, derivation="6-activations")
def relu_lemma(effort: CheckEffort) -> Outcome:
    """ReLU has derivative diag 1{z > 0} and no second derivative almost everywhere

    ∂σ(A)/∂A = diag(vec_r 1{A > 0}); ∂²σ(A)/∂A² = 0 where no entry is 0
    Source: Petrov et al., Lemma 1 (3 in the appendix) [petrov-lemma1 petrov-lemma3]
    Assumptions: no entry exactly zero
    Tested by: central differences of the entries, and of the derivative, away from the kink
    """
    z = normal(effort.generator(), 500)
    z, h = z[z.abs() > 1e-3], 1e-4
    first = (torch.relu(z + h) - torch.relu(z - h)) / (2 * h) - (z > 0).double()
    second = (torch.relu(z + h) - 2 * torch.relu(z) + torch.relu(z - h)) / h**2
    errors = float(first.abs().max()), float(second.abs().max())
    return outcome(
        f"first derivative off by {errors[0]:.0e}, second at most {errors[1]:.0e}",
        printed=errors[0] < 1e-9 and errors[1] < 1e-5,
        numbers={"first": errors[0], "second": errors[1]},
    )


@statement("block-derivatives", HOLDS, limit=1e-11)
def block_derivatives(effort: CheckEffort) -> Rows:
    """First derivatives of the whole block

    B_2 = σ(YW1)⊗I; B_1 = (I⊗W2ᵀ)D(Y⊗I); B_{Q,K,V} = (I + (I⊗W2ᵀ)D(I⊗W1ᵀ)) J_Y ∂F/∂W
    Source: Petrov et al., Theorem 4 (9 in the appendix) [petrov-thm4 petrov-thm9]
    Assumptions: post-norm, ReLU, single head, no biases, γ = 1, β = 0
    Tested by: all five B_i and J_Z B_i against automatic differentiation
    """
    for trial in effort.trials(4, 24):
        block = draw_block(effort, trial)
        j_z = block.output_jacobian()
        for name, b in block.derivatives().items():
            yield b, jacobian(block.s, [block.w[name]])
            yield j_z @ b, jacobian(block.z, [block.w[name]])


@statement("block-hessian-25-blocks", HOLDS, limit=1e-11)
def block_second_derivatives(effort: CheckEffort) -> Rows:
    """Second derivatives of the whole block, all 25 pairs of weights

    H_tr^{(i,j)} = (J_Z⊗I_{n_i}) ξ_ij + (I⊗B_iᵀ) H_Z B_j, ξ_ij = ∂B_i/∂W_j
    Source: Petrov et al., Theorem 5 (10 in the appendix) [petrov-thm5 petrov-thm10]
    Assumptions: post-norm, ReLU, single head, no biases, γ = 1, β = 0
    Tested by: 25 stacked blocks against automatic differentiation; contracted with ∂ℓ/∂Z and with
        the outer part added, against the chain of the block
    """
    for trial in effort.trials(2, 8):
        block = draw_block(effort, trial)
        printed, j_z = block.second_derivatives(), block.output_jacobian()
        target = normal(effort.generator(900 + trial), *block.z.shape)
        c = 2.0 / target.numel()
        delta = c * (block.z - target).reshape(1, -1)
        b, chain = block.derivatives(), block.hessian_of_the_chain(target)
        for (i, j), second in printed.items():
            yield second, block.automatic(i, j)
            contracted = kron(delta, eye(b[i].shape[1])) @ second
            yield chain[i, j], contracted + c * (j_z @ b[i]).T @ (j_z @ b[j])


@statement("block-hessian-symmetry", CORRECTED)
def block_symmetry(effort: CheckEffort) -> Outcome:
    """H^{(i,j)} = H^{(j,i)}

    printed: stacked blocks are equal; true: contracted with ∂ℓ/∂Z they are transposes
    Source: Petrov et al., slides, remark after Theorem 5
    Tested by: shapes and entries of the stacked blocks; contraction with a random gradient
    Counterexample: H^{(Q,1)} and H^{(1,Q)} do not even have the same shape
    """
    block = draw_block(effort, 1)
    delta = normal(effort.generator(99), 1, block.z.numel())
    equal, contracted = 0, []
    for i, j in (("Q", "1"), ("V", "2"), ("Q", "K"), ("1", "2")):
        left, right = block.automatic(i, j), block.automatic(j, i)
        equal += int(left.shape == right.shape and relative_error(left, right) < 1e-11)
        h_ij = kron(delta, eye(block.w[i].numel())) @ left
        h_ji = kron(delta, eye(block.w[j].numel())) @ right
        contracted.append(relative_error(h_ij, h_ji.T))
    return outcome(
        f"{equal} of 4 stacked pairs equal; contracted transposes agree to {worst(contracted):.0e}",
        printed=equal == 4,
        corrected=worst(contracted) < 1e-11,
        numbers={"equal_pairs": equal, "contracted_error": worst(contracted)},
    )


@statement("functional-part-of-linear-parameters", CORRECTED)
def linear_parameters(effort: CheckEffort) -> Outcome:
    """The functional Hessian of W2 (and of W1 under ReLU) is zero

    H_f(W2,W2) = 0 and, for ReLU, H_f(W1,W1) = 0
    Source: Petrov et al., draft: 'H_f vanishes when Z is linear in a parameter, e.g. W2'
    Tested by: ratio ‖H_f(W,W)‖/‖H(W,W)‖ in the post-norm block and in the pre-norm block
    Counterexample: post-norm: the final norm follows W2, the ratio is of order one
    """
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for norm_first, values in ratios.items():
        spec = BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=5, activation="relu", norm_first=norm_first)
        for trial in effort.trials(2, 10):
            generator = effort.generator(trial)
            weights = reference.draw_weights(spec, generator)
            result = block_hessian(spec, weights, *normal(generator, 2, 1, 3, 4))
            for w in ("up_weight", "down_weight"):
                functional = result.block(w, w, "functional").norm()
                values.append(float(functional / result.block(w, w).norm()))
    return outcome(
        f"post-norm ratio {min(ratios[False]):.2f} to {max(ratios[False]):.2f}; "
        f"pre-norm {worst(ratios[True]):.0e}",
        printed=worst(ratios[False]) < 1e-12,
        corrected=worst(ratios[True]) < 1e-12,
        numbers={"post_norm": min(ratios[False]), "pre_norm": worst(ratios[True])},
    )
