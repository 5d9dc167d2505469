"""LayerNorm: Petrov et al., Theorems 2 and 3, Propositions 5 to 8, Lemma 4, and the article's form.

LN(X) = P(X) M(X) of a sample X (L, d), row-major vec: M = X − X11ᵀ/d, P = diag(σ)⁻¹.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curvatlas.layers.norms import norm_hessian, norm_jacobian, normalize as normalize_tokens
from curvatlas.layers.structure import Norm
from curvatlas.theory.reference import climb, commutation, eye, jacobian, kron, normal, normalize
from curvatlas.theory.statements import (
    CORRECTED,
    FALSE,
    HOLDS,
    CheckEffort,
    Outcome,
    Rows,
    outcome,
    spread,
    statement,
)

SHARP = 2.0 / 3.0**0.5  # max of 3 t (1 − t²) on [0, 1]
_EPS = (0.0, 1e-5, 0.1)
_NORMS: tuple[Norm, Norm] = ("layer", "rms")
_SLACK = 1.0 + 1e-9  # rounding


class PrintedNorm:
    """LN(X) and its derivatives by the papers' matrices."""

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

    def first_term(self) -> Tensor:
        """(P⊗I_d)G, the article's whole Jacobian."""
        return kron(self.p, eye(self.d)) @ self.centring

    def jacobian(self) -> Tensor:
        """(P⊗I_d)G + (I_L⊗Mᵀ)∂P/∂X."""
        return self.first_term() + kron(eye(self.length), self.m.T) @ self.scale_jacobian()

    def hessian_terms(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three terms of ∂²LN/∂X², each (L²d², L d); derivatives of P and M taken entrywise."""
        x = self.x.detach().clone().requires_grad_(True)
        tracked = PrintedNorm(x, self.eps)
        size, one = self.length * self.d, eye(self.length)
        scale_first = jacobian(tracked.p, [x], graph=True)  # ∂P/∂X
        scale_second = jacobian(scale_first, [x]).detach()  # ∂²P/∂X²
        spread_scale = jacobian(kron(tracked.p, eye(self.d)), [x]).detach()
        spread_centred = jacobian(kron(one, tracked.m.T), [x]).detach()
        return (
            kron(eye(size), self.centring.T) @ spread_scale,
            kron(kron(one, self.m.T), eye(size)) @ scale_second,
            kron(eye(size), scale_first.detach().T) @ spread_centred,
        )

    def hessian(self) -> Tensor:
        first, second, third = self.hessian_terms()
        return first + second + third


def automatic(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Jacobian (Ld, Ld) and stacked Hessian (L²d², L d) of LayerNorm by differentiation."""
    leaf = x.detach().clone().requires_grad_(True)
    first = jacobian(normalize(leaf, "layer", eps), [leaf], graph=True)
    return first.detach(), jacobian(first, [leaf]).detach()


def of_the_chain(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same two from the rules the chain of a block uses, token by token."""
    n, inverse = normalize_tokens(x, eps=eps)
    j, h = norm_jacobian(n, inverse), norm_hessian(n, inverse)
    length, d = x.shape
    full = torch.zeros(length, d, length, d, length, d, dtype=torch.float64)
    for i in range(length):
        full[i, :, i, :, i] = h[i]
    dense: Tensor = torch.block_diag(*j)  # type: ignore[no-untyped-call]
    return dense, full.reshape(-1, length * d)


def _tokens(effort: CheckEffort, trial: int, *, length: int = 2, d: int = 3) -> Tensor:
    return (0.3, 1.0, 4.0)[trial % 3] * normal(effort.generator(trial), length, d)


def _inputs(effort: CheckEffort, short: int, full: int) -> Iterator[tuple[Tensor, float]]:
    for trial in effort.trials(short, full):
        yield _tokens(effort, trial, length=2 + trial % 2), _EPS[trial % 3]


@statement("matrix-calculus", HOLDS)
def matrix_calculus(effort: CheckEffort) -> Rows:
    """The rules of matrix calculus that the theorems rest on

    ‖11ᵀ‖ = L; ∂(AB) = (I⊗Bᵀ)∂A + (A⊗I)∂B; ∂(A⊗B)/∂A = (I⊗K⊗I)(I⊗vec_r B); ∂diag(v)/∂v picks the
    diagonal; ∂Aᵀ/∂A = K, all row-major
    Source: Petrov et al., Propositions 2, 3, 4, 6 and 9
        [petrov-prop2 petrov-prop3 petrov-prop4 petrov-prop6 petrov-prop9]
    Tested by: each against automatic differentiation on random 2×3 and 3×2 matrices
    """
    for trial in effort.trials(4, 40):
        generator, one = effort.generator(trial), torch.ones(3 + trial, 3 + trial).double()
        yield torch.linalg.matrix_norm(one, 2), torch.tensor(3.0 + trial, dtype=torch.float64)
        t = normal(generator, 1).requires_grad_(True)
        a, b, c, d = (m.reshape(2, 3) for m in normal(generator, 4, 6))
        first, second = a + t * b, (c + t * d).T  # ∂A = b, ∂B = dᵀ along t
        rule = kron(eye(2), second.T) @ b.reshape(-1, 1) + kron(first, eye(2)) @ d.T.reshape(-1, 1)
        yield rule, jacobian(first @ second, [t])
        leaf, fixed = a.clone().requires_grad_(True), c.T.contiguous()
        widen = kron(eye(6), fixed.reshape(-1, 1))  # entries (i, j), then those of B
        order = torch.arange(36).reshape(2, 3, 3, 2).transpose(1, 2).reshape(-1)
        yield widen[order], jacobian(kron(leaf, fixed), [leaf])
        vector = normal(generator, 3).requires_grad_(True)
        yield eye(9)[:, [0, 4, 8]], jacobian(torch.diag(vector), [vector])
        yield commutation(3, 2), jacobian(leaf.T, [leaf])


@statement("layer-norm-lemmas", HOLDS)
def layer_norm_lemmas(effort: CheckEffort) -> Rows:
    """Three derivative lemmas

    ∂D⁻¹/∂D = −D⁻¹⊗D⁻ᵀ; ∂A^{∘2}/∂A = 2 diag(vec_r A); ∂A^{∘½}/∂A = ½ diag⁻¹(vec_r A^{∘½})
    Source: Petrov et al., Propositions on inverse, Hadamard square and Hadamard root
        [petrov-prop5 petrov-prop7 petrov-prop8]
    Assumptions: D invertible, A positive for the root
    Tested by: each against automatic differentiation on random 3×3 matrices
    """
    for trial in effort.trials(4, 40):
        a = torch.rand(3, 3, generator=effort.generator(trial), dtype=torch.float64) + 0.2
        a = (a + 2.0 * eye(3)).requires_grad_(True)
        inverse, entries = torch.linalg.inv(a), a.detach().reshape(-1)
        yield -kron(inverse, inverse.T), jacobian(inverse, [a])
        yield 2.0 * torch.diag(entries), jacobian(a**2, [a])
        yield 0.5 * torch.diag(entries**-0.5), jacobian(a.sqrt(), [a])


@statement("layer-norm-jacobian", HOLDS)
def layer_norm_jacobian(effort: CheckEffort) -> Rows:
    """Jacobian of LayerNorm in the P(X)·M(X) form

    ∂LN/∂X = (P⊗I_d)G + (I_L⊗Mᵀ)∂P/∂X, G = I − (1/d)(I_L⊗11ᵀ)
    Source: Petrov et al., Theorem 2 (8 in the appendix) [petrov-thm2 petrov-thm8]
    Assumptions: σ > 0 (ε > 0, or tokens of non-zero variance: Assumption 2)
    Tested by: automatic differentiation and the chain's rule, ε ∈ {0, 1e-5, 0.1}, scale 0.3 to 4
    """
    for x, eps in _inputs(effort, 9, 60):
        yield PrintedNorm(x, eps).jacobian(), automatic(x, eps)[0]
        yield of_the_chain(x, eps)[0], automatic(x, eps)[0]


@statement("layer-norm-hessian", HOLDS, limit=1e-11)
def layer_norm_hessian(effort: CheckEffort) -> Rows:
    """Hessian of LayerNorm in the P(X)·M(X) form

    ∂²LN/∂X² = (I⊗Gᵀ)∂(P⊗I)/∂X + ((I⊗Mᵀ)⊗I)∂²P/∂X² + (I⊗(∂P/∂X)ᵀ)∂(I⊗Mᵀ)/∂X
    Source: Petrov et al., Theorem 3 [petrov-thm3]
    Assumptions: σ > 0
    Tested by: the three terms summed, and the chain's rule, against automatic differentiation
    """
    for x, eps in _inputs(effort, 6, 30):
        yield PrintedNorm(x, eps).hessian(), automatic(x, eps)[1]
        yield of_the_chain(x, eps)[1], automatic(x, eps)[1]


@statement("layer-norm-hessian-only-p", FALSE)
def layer_norm_only_p(effort: CheckEffort) -> Rows:
    """'The Hessian of LayerNorm depends only on second derivatives of P'

    ∂²LN/∂X² = ((I⊗Mᵀ)⊗I)∂²P/∂X² alone
    Source: article 'Transformer Full Block Hessian Analysis', LayerNorm section
    Tested by: the single term against the whole Hessian
    Counterexample: the cross terms ∂P·∂M are as large as the Hessian itself
    """
    for trial in effort.trials(6, 30):
        x = _tokens(effort, trial)
        yield PrintedNorm(x, 1e-5).hessian_terms()[1], automatic(x, 1e-5)[1]


@statement("layer-norm-jacobian-article", CORRECTED)
def layer_norm_article(effort: CheckEffort) -> Rows:
    """The article's LayerNorm Jacobian (P⊗I)G

    ∂LN/∂X = (P⊗I)G, without (I⊗Mᵀ)∂P/∂X and without γ
    Source: article 'Transformer Full Block Hessian Analysis', LayerNorm code
    Tested by: relative error against diag(γ)·J for random γ, d = 3 to 8
    Counterexample: relative error 0.4 to 1.0; exact once both are put back
    """
    for trial in effort.trials(8, 60):
        x = _tokens(effort, trial, d=3 + trial % 6)
        gamma = 1.0 + 0.5 * normal(effort.generator(1000 + trial), x.shape[1])
        widen, printed = torch.diag(gamma.repeat(len(x))), PrintedNorm(x, 1e-5)
        truth = widen @ automatic(x, 1e-5)[0]
        yield printed.first_term(), truth, widen @ printed.jacobian()


@statement("layer-norm-entrywise", CORRECTED)
def layer_norm_entrywise(effort: CheckEffort) -> Rows:
    """The second term of ∂n_a/∂x_b is divided by σ³

    ∂n_a/∂x_b = (δ_ab − 1/d)/σ − (x_a−μ)(x_b−μ)/(dσ³); printed with σ²
    Source: Petrov et al., draft, entrywise derivative
    Tested by: both powers against automatic differentiation
    Counterexample: any token with σ ≠ 1
    """
    for trial in effort.trials(6, 40):
        x = _tokens(effort, trial, length=1, d=4)
        centred = (x - x.mean(1, keepdim=True))[0]
        sigma, outer = centred.pow(2).mean().sqrt(), torch.outer(centred, centred)
        printed, right = ((eye(4) - 0.25) / sigma - outer / (4 * sigma**power) for power in (2, 3))
        yield printed, automatic(x, 0.0)[0], right


@statement("layer-norm-statistics", CORRECTED)
def layer_norm_statistics(effort: CheckEffort) -> Rows:
    """LayerNorm's mean and variance are taken per token, over its features

    μ_i = mean over a of x_ia; not the mean over tokens of each feature
    Source: Petrov et al., slides: 'feature-wise' statistics
    Tested by: both readings against PyTorch's layer_norm
    Counterexample: statistics over tokens give a different map, off by order one
    """
    x = _tokens(effort, 1, length=5, d=4)
    truth = torch.nn.functional.layer_norm(x, (4,), eps=1e-5)
    yield normalize(x.T, "layer", 1e-5).T, truth, normalize(x, "layer", 1e-5)


def norm_bounds(x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Lemma 4's bounds on ‖J_LN‖ and ‖H_LN‖ of X (m, n) with σ in front."""
    (m, n), size = x.shape, torch.linalg.matrix_norm(x, 2)
    shared = size**2 / (n**0.5 * sigma**3)
    second = size * (1.0 + (m / n) ** 0.5) / sigma**3 + shared + 3.0 * size**3 / (n * sigma**5)
    return 1.0 / sigma + shared, second


def _lemma_4_ratios(x: Tensor, *, printed: bool) -> Tensor:
    """True norm over bound of J_LN and H_LN: σ = min‖M_i‖ as printed, or the least deviation."""
    centred = x - x.mean(1, keepdim=True)
    rows = centred.norm(dim=1).amin() if printed else centred.pow(2).mean(1).sqrt().amin()
    n, inverse = normalize_tokens(x, eps=0.0)
    # both are block diagonal over tokens: their norm is that of the largest token
    blocks = norm_jacobian(n, inverse), norm_hessian(n, inverse).flatten(1, 2)
    true = torch.stack([torch.linalg.matrix_norm(block, 2).amax() for block in blocks])
    return true / torch.stack(norm_bounds(x, rows))


@statement("layer-norm-norm-bounds", CORRECTED)
def layer_norm_norm_bounds(effort: CheckEffort) -> Outcome:
    """Bounds on the norms of LayerNorm's Jacobian and Hessian

    ‖J_LN‖ ≤ 1/σ + x²/(√n σ³), ‖H_LN‖ ≤ x(1+√(m/n))/σ³ + x²/(√n σ³) + 3x³/(nσ⁵) for X (m, n),
    x = ‖X‖: printed with σ = min_i ‖M_i‖, true with the least row deviation σ = min_i ‖M_i‖/√n
    Source: Petrov et al., Lemma 4 [petrov-lemma4]
    Assumptions: ε = 0, every row variance > 0 (Assumption 2)
    Tested by: random inputs of 1 to 6 tokens, then gradient ascent on true/bound with either σ
    Counterexample: one token (1, −1, 0, …, 0)/√2 with n = 16: ‖J‖ = 4, printed bound 1.25
    """
    ratios: dict[bool, list[Tensor]] = {True: [], False: []}
    climbed: dict[bool, list[float]] = {True: [], False: []}
    for trial in effort.trials(200, 5000):
        shift = 3.0 * float(torch.rand(1, generator=effort.generator(90_000 + trial)))
        x = shift + _tokens(effort, trial, length=1 + trial % 6, d=3 + trial % 14)
        for printed, values in ratios.items():
            values.append(_lemma_4_ratios(x, printed=printed))
    for start in effort.trials(2, 20):
        x = _tokens(effort, 70_000 + start, length=1 + start, d=4)
        for printed, best in climbed.items():
            for which in (0, 1):
                best.append(
                    climb(
                        lambda t, p=printed, w=which: _lemma_4_ratios(t[0], printed=p)[w],  # type: ignore[misc]
                        [x],
                        steps=effort.choose(40, 300),
                    )[0]
                )
    random = {p: torch.stack(values).amax(0).tolist() for p, values in ratios.items()}
    return outcome(
        f"true/bound of J, H up to {random[True][0]:.2f}, {random[True][1]:.2f} as printed; with "
        f"the least deviation {random[False][0]:.2f}, {random[False][1]:.2f}, after ascent "
        f"{max(climbed[False]):.2f}",
        printed=max(*random[True], *climbed[True]) <= _SLACK,
        corrected=max(*random[False], *climbed[False]) <= _SLACK,
        numbers={
            "printed": random[True],
            "corrected": random[False],
            "climbed_printed": max(climbed[True]),
            "climbed_corrected": max(climbed[False]),
        },
    )


@statement("normalisation-is-a-gradient", HOLDS)
def normalisation_gradient(effort: CheckEffort) -> Rows:
    """Normalisation is the gradient of d·σ: symmetric Jacobian, fully symmetric Hessian

    n = d∇σ; J = (C − nnᵀ/d)/σ; ∂²n_a/∂x_b∂x_c = −(J_ab n_c + J_ac n_b + J_bc n_a)/(dσ)
    Source: ours
    Assumptions: LayerNorm or RMSNorm (C = I), any ε with σ > 0
    Tested by: the chain's n, J and 3-tensor against automatic differentiation of σ
    """
    for trial in effort.trials(6, 60):
        norm, eps = _NORMS[trial % 2], (0.0, 0.1)[(trial // 2) % 2]
        x = _tokens(effort, trial, length=1, d=4)[0].requires_grad_(True)
        centred = x - x.mean() if norm == "layer" else x
        gradient = 4.0 * jacobian((centred.pow(2).mean() + eps).sqrt(), [x], graph=True)[0]
        j = jacobian(gradient, [x], graph=True)
        n, inverse = normalize_tokens(x.detach(), eps=eps, norm=norm)
        yield n, gradient
        yield norm_jacobian(n, inverse, norm=norm), j
        second = jacobian(j, [x]).reshape(4, 4, 4)
        yield norm_hessian(n, inverse, norm=norm), second


@statement("normalisation-curvature-constant", HOLDS)
def normalisation_constant(effort: CheckEffort) -> Outcome:
    """The curvature of normalisation is at most 2/√3 in units of ‖δ‖/(√d σ²)

    ‖Σ_a δ_a ∂²n_a‖₂ ≤ (2/√3)‖δ‖/(√d σ²), attained for ε = 0 at an angle cos = 1/√3 to n
    Source: ours; a plain estimate gives √2
    Assumptions: LayerNorm or RMSNorm, any ε ≥ 0 with σ > 0
    Tested by: random δ, and the δ that attains it
    """
    norms: dict[str, list[float]] = {"random": [], "attaining": []}
    for trial in effort.trials(60, 2000):
        norm, eps, d = _NORMS[trial % 2], (0.0, 1e-5, 0.3)[trial % 3], 3 + trial % 6
        x = _tokens(effort, trial, length=1, d=d)[0]
        n, inverse = normalize_tokens(x, eps=eps, norm=norm)
        h = norm_hessian(n, inverse, norm=norm)
        delta = normal(effort.generator(10_000 + trial), d)
        # a unit vector at the best angle to n, within the centred space
        along, across = n / n.norm(), delta - delta.mean() if norm == "layer" else delta
        across = across - (across @ along) * along
        best = along / 3**0.5 + (2 / 3) ** 0.5 * across / across.norm()
        for name, direction in (("random", delta / delta.norm()), ("attaining", best)):
            contracted = torch.linalg.matrix_norm(torch.einsum("a,abc->bc", direction, h), 2)
            norms[name].append(float(contracted * d**0.5 / inverse**2))
    largest = max(map(max, norms.values()))
    return outcome(
        f"random {spread(norms['random'])}, attaining direction {max(norms['attaining']):.4f},"
        f" bound {SHARP:.4f}",
        printed=largest <= SHARP * _SLACK and max(norms["attaining"]) > SHARP * 0.999,
        numbers={name: max(values) for name, values in norms.items()} | {"bound": SHARP},
    )
