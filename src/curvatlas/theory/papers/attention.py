"""One attention head, block by block (Ormaniec et al., §3, §4 and D; Petrov et al., Lemma 2).

d_v = d, no W_O, weights act on the right; c = 2/(L d_v), s = 1/√d_k, R_m = vec_r(F − Y)ᵀ ⊗ I_m.
Everything is printed over the moments of the tokens under each row of A:

    M1_i = Σ_j A_ij x_j,   M2_i = Σ_j A_ij x̃x̃ᵀ,   M3_i = Σ_j A_ij x̃⊗x̃x̃ᵀ,   x̃ = x_j − M1_i
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.linear_operator import Part
from curvatlas.theory.reference import (
    SingleHead,
    attention_hessian_blocks,
    commutation,
    draw_head,
    eye,
    hessian,
    jacobian,
    kron,
    normal,
    relative_error,
    split_hessian,
)
from curvatlas.theory.statements import (
    CORRECTED,
    HOLDS,
    CheckEffort,
    Outcome,
    Rows,
    outcome,
    statement,
)

PAIRS = ("VV", "QQ", "QK", "KK", "VQ", "VK")
_PRINTED = ("VV", "QQ", "VQ", "QK")


def _heads(
    effort: CheckEffort, short: int, full: int, *, shortest: int = 2
) -> Iterator[SingleHead]:
    for trial in effort.trials(short, full):
        yield draw_head(
            effort.generator(trial),
            length=shortest + trial % 3,
            d=2 + (trial // 2) % 2,
            d_k=1 + trial % 3,
            input_scale=(0.5, 1.0, 2.0)[trial % 3],
        )


# ---- softmax ------------------------------------------------------------------------------------


def softmax_derivatives(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A (L, L), ∂A/∂T (L², L²) and ∂²A/∂T² (L⁴, L²) by automatic differentiation."""
    t = logits.detach().clone().requires_grad_(True)
    a = torch.softmax(t, -1)
    first = jacobian(a, [t], graph=True)
    return a.detach(), first.detach(), jacobian(first, [t]).detach()


@statement("softmax-derivative", CORRECTED, derivation="3-softmax")
def softmax_derivative(effort: CheckEffort) -> Rows:
    """Derivative of the row-wise softmax

    ∂A_ij/∂T_kl = δ_ik A_ij (δ_jl − A_il); printed: A_ij (δ_ik δ_jl − A_kl)
    Source: Petrov et al., draft, appendix (softmax derivative)
    Tested by: both entrywise formulas against automatic differentiation, 3 to 6 tokens
    Counterexample: the printed form couples different rows: off by more than 10 % at 3 tokens
    """
    for trial in effort.trials(5, 40):
        n = 3 + trial % 4
        a, truth, _ = softmax_derivatives(normal(effort.generator(trial), n, n))
        printed = a[:, :, None, None] * (
            torch.einsum("ik,jl->ijkl", eye(n), eye(n)) - a[None, None]
        )
        right = torch.einsum("ik,ij,jl->ijkl", eye(n), a, eye(n))
        right = right - torch.einsum("ik,ij,il->ijkl", eye(n), a, a)
        yield printed, truth.reshape(n, n, n, n), right


@statement("softmax-jacobian-norm", HOLDS, derivation="3-softmax")
def softmax_jacobian_norm(effort: CheckEffort) -> Outcome:
    """The softmax Jacobian has norm at most one half

    ‖∂A/∂T‖₂ = max_i ‖diag(a_i) − a_i a_iᵀ‖₂ ≤ ½ (the draft uses ≤ 1, the published proof 1/L)
    Source: Petrov et al., draft, proof of Theorem 1
    Tested by: random logits at scales 0.1 to 30, and the two-token row (½, ½), which attains ½
    """
    norms = []
    for trial in effort.trials(200, 5000):
        generator = effort.generator(trial)
        scale = 0.1 * 300.0 ** float(torch.rand(1, generator=generator))
        row = torch.softmax(scale * normal(generator, 2 + trial % 14), 0)
        norms.append(float(torch.linalg.matrix_norm(torch.diag(row) - torch.outer(row, row), 2)))
    half = torch.full((2,), 0.5, dtype=torch.float64)
    attained = float(torch.linalg.matrix_norm(torch.diag(half) - torch.outer(half, half), 2))
    return outcome(
        f"largest of {len(norms)} random rows {max(norms):.4f}; (½, ½) gives {attained:.4f}",
        printed=max(norms) <= 0.5 + 1e-14 and abs(attained - 0.5) < 1e-14,
        numbers={"largest": max(norms), "attained": attained},
    )


@statement("softmax-second-derivative-norm", HOLDS, derivation="3-softmax")
def softmax_second_derivative_norm(effort: CheckEffort) -> Outcome:
    """The second derivative of softmax is bounded by 1 as a bilinear map

    ‖D²softmax(t)[u, v]‖₂ ≤ 2 (Var_a u · Var_a v)^½ ≤ ‖u‖‖v‖
    Source: ours (used by the data-free bound)
    Tested by: alternating maximisation from random starts, 2 to 8 tokens, scales 0.1 to 5
    """
    largest = 0.0
    for trial in effort.trials(40, 400):
        generator = effort.generator(trial)
        n = 2 + trial % 7
        scale = 0.1 * 50.0 ** float(torch.rand(1, generator=generator))
        a = torch.softmax(scale * normal(generator, n), 0)
        v = normal(generator, n)
        for _ in range(30):  # alternate: the best u for this v, then v = u
            moved = a * (v - a @ v)
            # D²[u, v] = a ∘ (ũ ṽ) − a Cov(u, v), linear in u
            matrix = torch.diag(moved) - torch.outer(moved, a) - torch.outer(a, moved)
            _, s, vh = torch.linalg.svd(matrix / v.norm())
            v = vh[0]
            largest = max(largest, float(s[0]))
    return outcome(
        f"largest found {largest:.3f} (bound 1)",
        printed=largest <= 1.0,
        numbers={"largest": largest},
    )


# ---- the papers' matrices -----------------------------------------------------------------------


@dataclass(frozen=True)
class RowMoments:
    """Central moments of the tokens under each row of A: M1 (L, d), M2 (L, d, d), M3 (L, d², d)."""

    first: Tensor
    second: Tensor
    third: Tensor


def moments(attention: Tensor, x: Tensor) -> RowMoments:
    """The moments of the head of this page, attention (L, L), x (L, d)."""
    first = attention @ x
    centred = x.unsqueeze(0) - first.unsqueeze(1)  # (i, j, d)
    second = torch.einsum("ij,ija,ijb->iab", attention, centred, centred)
    third = torch.einsum("ij,ija,ijb,ijc->iabc", attention, centred, centred, centred)
    d = x.shape[1]
    return RowMoments(first, second, third.reshape(len(x), d * d, d))


def first_factor(x: Tensor, m: RowMoments) -> Tensor:
    """Z1 (L d, d²): block row i is x_iᵀ ⊗ M2_i."""
    return torch.cat([kron(x[i : i + 1], m.second[i]) for i in range(len(x))])


def second_factor(x: Tensor, m: RowMoments) -> Tensor:
    """Z2 (L d³, d²) = (I_L ⊗ K_{d,d} ⊗ I_d)(block rows x_iᵀ ⊗ x_i ⊗ M3_i)."""
    length, d = x.shape
    rows = [kron(x[i : i + 1], x[i : i + 1].T, m.third[i]) for i in range(length)]
    return kron(eye(length), commutation(d, d), eye(d)) @ torch.cat(rows)


def shuffle(d: int) -> Tensor:
    """S (d³, d) = (I_d ⊗ K_{d,d})(vec_r I_d ⊗ I_d)."""
    return kron(eye(d), commutation(d, d)) @ kron(eye(d).reshape(-1, 1), eye(d))


@statement("attention-moments", HOLDS)
def attention_moments(effort: CheckEffort) -> Rows:
    """Softmax derivatives are central moments of the tokens

    Z1 = (I⊗Xᵀ)(∂A/∂T)(X⊗X) = rows x_iᵀ⊗M2_i;
    Z2 = (I⊗Xᵀ⊗Xᵀ⊗Xᵀ)(∂²A/∂T²)(X⊗X) = (I⊗K⊗I) rows x_iᵀ⊗x_i⊗M3_i
    Source: Ormaniec et al., Lemma C.1 and the definitions of M1, M2, M3, Z1, Z2
        [ormaniec-lemma-c.1]
    Tested by: both sides built in full at 3 to 5 tokens; ∂A/∂T by automatic differentiation
    """
    for head in _heads(effort, 4, 20, shortest=3):
        x, one = head.x, eye(len(head.x))
        # ∂²A/∂T² is stacked as vec_r(∂A/∂T) by T: rows (ij, kl), columns T
        a, first, second = softmax_derivatives(head.logits())
        m = moments(a, x)
        yield first_factor(x, m), kron(one, x.T) @ first @ kron(x, x)
        yield second_factor(x, m), kron(one, x.T, x.T, x.T) @ second @ kron(x, x)


@statement("attention-exponential-family", HOLDS)
def attention_exponential_family(effort: CheckEffort) -> Rows:
    """An attention row is an exponential family in θ_i = s W_K W_Qᵀ x_i

    ψ(θ) = log Σ_j exp(x_jᵀθ): ∇ψ = M1, ∇²ψ = M2, ∇³ψ = M3
    Source: ours
    Tested by: three derivatives of ψ by automatic differentiation against the moments
    """
    for head in _heads(effort, 4, 20, shortest=3):
        m, truth = moments(head.attention(), head.x), []
        for x_i in head.x:
            theta = (head.scale * head.key @ head.query.T @ x_i).requires_grad_(True)
            first = jacobian(torch.logsumexp(head.x @ theta, 0), [theta], graph=True)
            second = jacobian(first, [theta], graph=True)
            truth.append((first[0], second, jacobian(second, [theta])))
        # all rows at once: those that softmax saturates have third moments of rounding size
        for moment, rows in zip(
            (m.first, m.second, m.third), zip(*truth, strict=True), strict=True
        ):
            yield moment, torch.stack(rows)


@statement("attention-jacobian-commutation", CORRECTED)
def attention_jacobians(effort: CheckEffort) -> Rows:
    """The key Jacobian needs a commutation matrix

    ∂F/∂W_Q = (I⊗W_VᵀXᵀ)(∂A/∂T) s(X⊗XW_K); ∂F/∂W_K = (I⊗W_VᵀXᵀ)(∂A/∂T) s(XW_Q⊗X)K_{dK,d} (the
    draft lacks K)
    Source: Petrov et al., draft, ∂F/∂W_Q and ∂F/∂W_K
    Tested by: both Jacobians against automatic differentiation, with and without K
    Counterexample: without K_{dK,d} the key Jacobian is off by order one (d = 3, d_k = 2)
    """
    for trial in effort.trials(4, 20):
        head = draw_head(effort.generator(trial), length=3, d=3, d_k=2)
        soft = softmax_derivatives(head.logits())[1]
        left = kron(eye(3), head.value.T @ head.x.T) @ soft * head.scale
        query = left @ kron(head.x, head.x @ head.key)
        key = left @ kron(head.x @ head.query, head.x)
        h = head.tracked()
        yield query, jacobian(h.output(), [h.query]), query
        yield key, jacobian(h.output(), [h.key]), key @ commutation(2, 3)


# ---- Theorems 3.1 and 3.2 -----------------------------------------------------------------------


def outer_blocks(head: SingleHead) -> dict[str, Tensor]:
    """H_o block by block, as printed; KK and VK derived in the same notation (derivations §4)."""
    length, d = head.x.shape
    c, s, d_k = head.reduction, head.scale, head.query.shape[1]
    m = moments(head.attention(), head.x)
    z1 = first_factor(head.x, m)
    middle = z1.T @ kron(eye(length), head.value @ head.value.T) @ z1
    by_query = kron(eye(d), head.key)
    by_key = kron(head.query, eye(d)) @ commutation(d_k, d)  # Π
    by_value = kron(m.first.T, head.value.T)
    return {
        "VV": c * kron(m.first.T @ m.first, eye(d)),
        "QQ": c * s**2 * by_query.T @ middle @ by_query,
        "QK": c * s**2 * by_query.T @ middle @ by_key,
        "KK": c * s**2 * by_key.T @ middle @ by_key,
        "VQ": c * s * by_value @ z1 @ by_query,
        "VK": c * s * by_value @ z1 @ by_key,
    }


def second_derivatives(head: SingleHead) -> dict[str, Tensor]:
    """∂²F/∂W_i∂W_j (L d n_i, n_j) as printed behind R; KK and VK in the same notation."""
    length, d = head.x.shape
    s, d_k = head.scale, head.query.shape[1]
    m = moments(head.attention(), head.x)
    z1, z2 = first_factor(head.x, m), second_factor(head.x, m)
    by_query = kron(eye(d), head.key)
    by_key = kron(head.query, eye(d)) @ commutation(d_k, d)  # Π
    left = kron(eye(length), head.value.T, eye(d), head.key.T)
    left_key = kron(eye(length * d), by_key.T) @ kron(eye(length), head.value.T, eye(d * d))
    bracket = kron(eye(length), head.value.T, eye(d)) @ kron(z1, eye(d)) @ shuffle(d)
    return {
        "VV": torch.zeros(length * d**3, d * d, dtype=torch.float64),
        "QQ": s**2 * left @ z2 @ by_query,
        # R_{d d_k} (bracket ⊗ I_{d_k}) = (R_d bracket) ⊗ I_{d_k}, which is how it is printed
        "QK": s**2 * left @ z2 @ by_key + s * kron(bracket, eye(d_k)),
        "KK": s**2 * left_key @ z2 @ by_key,
        "VQ": s * kron(eye(length), shuffle(d)) @ z1 @ by_query,
        "VK": s * kron(eye(length), shuffle(d)) @ z1 @ by_key,
    }


def functional_blocks(head: SingleHead) -> dict[str, Tensor]:
    """H_f = c R_n ∂²F/∂W_i∂W_j with n the size of W_i."""
    residual = (head.output() - head.target).reshape(1, -1)
    return {
        name: head.reduction * kron(residual, eye(len(second) // residual.numel())) @ second
        for name, second in second_derivatives(head).items()
    }


def automatic_blocks(head: SingleHead) -> dict[str, dict[str, Tensor]]:
    """The same blocks of H_o and H_f by double backward; keys "outer", "functional"."""
    h = head.tracked()
    _, outer, functional = split_hessian(h.output(), h.loss, h.parameters)
    sizes = [p.numel() for p in h.parameters]
    places = dict(zip("QKV", torch.split(torch.arange(sum(sizes)), sizes), strict=True))
    return {
        part: {pair: full[places[pair[0]]][:, places[pair[1]]] for pair in PAIRS}
        for part, full in (("outer", outer), ("functional", functional))
    }


def _joined(blocks: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Blocks as one vector: their errors are relative to all of them."""
    return torch.cat([blocks[name].reshape(-1) for name in names])


def _blocks(effort: CheckEffort, part: Part, names: Sequence[str]) -> Rows:
    formula = outer_blocks if part == "outer" else functional_blocks
    for head in _heads(effort, 4, 24):
        truth = _joined(automatic_blocks(head)[part], names)
        yield _joined(formula(head), names), truth
        yield _joined(attention_hessian_blocks(head, part), names), truth  # the chain says the same


@statement("attention-outer-blocks", HOLDS)
def attention_outer(effort: CheckEffort) -> Rows:
    """Outer-product Hessian of self-attention, blocks VV, QQ, VQ, QK

    H_o(V,V) = c M1ᵀM1⊗I; H_o(Q,Q) = c s²(I⊗W_Kᵀ)Z1ᵀ(I⊗W_VW_Vᵀ)Z1(I⊗W_K);
    H_o(V,Q) = c s(M1ᵀ⊗W_Vᵀ)Z1(I⊗W_K); H_o(Q,K) = … Z1(W_Q⊗I)K_{dK,d}
    Source: Ormaniec et al., Theorem 3.1 [ormaniec-thm-3.1]
    Assumptions: single head, d_v = d, no W_O, mean squared error
    Tested by: printed Kronecker form = chain of the block = double backward, 2 to 4 tokens
    """
    return _blocks(effort, "outer", _PRINTED)


@statement("attention-functional-blocks", HOLDS)
def attention_functional(effort: CheckEffort) -> Rows:
    """Functional Hessian of self-attention, blocks VV, QQ, VQ, QK

    H_f(V,V) = 0; H_f(Q,Q) = c s² R(I⊗W_Vᵀ⊗I⊗W_Kᵀ)Z2(I⊗W_K); H_f(V,Q) = c s R_{d²}(I⊗S)Z1(I⊗W_K);
    H_f(Q,K) = … + [c s R_d(I⊗W_Vᵀ⊗I)(Z1⊗I)S]⊗I_{dK}
    Source: Ormaniec et al., Theorem 3.2 [ormaniec-thm-3.2]
    Assumptions: single head, d_v = d, no W_O, mean squared error
    Tested by: printed Kronecker form = chain of the block = double backward, 2 to 4 tokens
    """
    return _blocks(effort, "functional", _PRINTED)


@statement("attention-key-blocks", HOLDS)
def attention_key_blocks(effort: CheckEffort) -> Rows:
    """The blocks the slides leave out: KK and VK

    Π = (W_Q⊗I)K_{dK,d}: H_o(K,K) = c s² ΠᵀZ1ᵀ(I⊗W_VW_Vᵀ)Z1Π, H_o(V,K) = c s(M1ᵀ⊗W_Vᵀ)Z1Π,
    H_f(K,K) = c s² R(I⊗Πᵀ)(I⊗W_Vᵀ⊗I)Z2Π, H_f(V,K) = c s R(I⊗S)Z1Π
    Source: ours, missing from Ormaniec et al.
    Assumptions: single head, d_v = d, no W_O, mean squared error
    Tested by: Kronecker form = chain of the block = double backward, 2 to 4 tokens
    """
    yield from _blocks(effort, "outer", ("KK", "VK"))
    yield from _blocks(effort, "functional", ("KK", "VK"))


@statement("functional-value-query-size", CORRECTED)
def functional_value_query(effort: CheckEffort) -> Outcome:
    """H_f(V,Q) takes R of size d_v², not d_v

    c s R_m (I_L⊗S)Z1(I⊗W_K) with R_m = vec_r(F−Y)ᵀ⊗I_m: conformable only for m = d_v²
    Source: Petrov et al., draft, H_f(V,Q)
    Tested by: sizes of the factors; the product with m = d_v² against double backward
    Counterexample: with m = d_v the inner sizes differ (L d_v² against L d_v³)
    """
    head = draw_head(effort.generator(), length=3, d=3, d_k=2)
    columns, rows = head.target.numel() * 3, len(kron(eye(3), shuffle(3)))
    truth = automatic_blocks(head)["functional"]["VQ"]
    error = relative_error(functional_blocks(head)["VQ"], truth)
    return outcome(
        f"printed: {columns} columns meet {rows} rows; corrected exact to {error:.0e}",
        printed=columns == rows,
        corrected=error < 1e-12,
        numbers={"printed_columns": columns, "rows": rows, "corrected_error": error},
    )


@statement("attention-second-derivative", CORRECTED)
def attention_second_derivative(effort: CheckEffort) -> Rows:
    """The second derivative of attention carries no factor of the loss

    printed Φ_ij = (2/(L d_v)) ∂²F/∂W_i∂W_j, that is Theorem 3.2 of Ormaniec et al. without R;
    true: the same without 2/(L d_v), which belongs to the mean squared error
    Source: Petrov et al., Lemma 2 (Φ) [petrov-lemma2]
    Assumptions: single head, d_v = d, no W_O
    Tested by: all six pairs, with and without the factor, against automatic differentiation of F
    Counterexample: L = 2, d_v = 2: every block printed at half its size
    """
    for head in _heads(effort, 4, 24):
        h = head.tracked()
        weights = dict(zip("QKV", h.parameters, strict=True))
        firsts = {a: jacobian(h.output(), [w], graph=True) for a, w in weights.items()}
        truth = {pair: jacobian(firsts[pair[0]], [weights[pair[1]]]) for pair in PAIRS}
        formula = _joined(second_derivatives(head), PAIRS)
        yield head.reduction * formula, _joined(truth, PAIRS), formula


# ---- one matrix W_QK or two ---------------------------------------------------------------------


def one_matrix_hessian(head: SingleHead, weight: Tensor) -> Tensor:
    """Z1ᵀ(I⊗W_VW_Vᵀ)Z1 + (δᵀ(I⊗W_Vᵀ)⊗I)Z2 (d², d²), T = X W_QK Xᵀ, δ = vec_r(F − Y)."""
    x, one = head.x, eye(len(head.x))
    attention = torch.softmax(x @ weight @ x.T, -1)
    m = moments(attention, x)
    z1, residual = first_factor(x, m), (attention @ x @ head.value - head.target).reshape(1, -1)
    inner = residual @ kron(one, head.value.T)
    outer = z1.T @ kron(one, head.value @ head.value.T) @ z1
    return outer + kron(inner, eye(x.shape[1] ** 2)) @ second_factor(x, m)


def _loss_of_one_matrix(head: SingleHead, weight: Tensor) -> Tensor:
    return head.loss(torch.softmax(head.x @ weight @ head.x.T, -1) @ head.x @ head.value)


@statement("attention-one-matrix", HOLDS)
def attention_one_matrix(effort: CheckEffort) -> Rows:
    """The Hessian of attention with one matrix W_QK

    T = X W_QK Xᵀ: H = Z1ᵀ(I⊗W_VW_Vᵀ)Z1 + (δᵀ(I⊗W_Vᵀ)⊗I)Z2, δ = vec_r(F−Y), up to 2/(L d_v)
    Source: Ormaniec et al., Lemma 4.1 [ormaniec-lemma-4.1]
    Assumptions: single head, d_v = d, no W_O, mean squared error
    Tested by: times 2/(L d_v), against double backward, and against the chain with W_K = √d I
    """
    for head in _heads(effort, 4, 24):
        d = head.x.shape[1]
        weight = normal(effort.generator(1000 + d), d, d).requires_grad_(True)
        truth = hessian(_loss_of_one_matrix(head, weight), [weight])
        yield head.reduction * one_matrix_hessian(head, weight.detach()), truth
        same = SingleHead(head.x, weight.detach(), d**0.5 * eye(d), head.value, head.target)
        chain = [attention_hessian_blocks(same, part)["QQ"] for part in ("outer", "functional")]
        yield chain[0] + chain[1], truth


def score_gradient(head: SingleHead) -> Tensor:
    """Bᵀ = ∂ℓ/∂W_QK (d, d) at W_QK = W_QW_Kᵀ/√d_k, by automatic differentiation."""
    weight = (head.scale * head.query @ head.key.T).requires_grad_(True)
    (gradient,) = torch.autograd.grad(_loss_of_one_matrix(head, weight), weight)
    return gradient


def two_matrix_terms(head: SingleHead) -> tuple[Tensor, Tensor]:
    """VᵀUV/d_k and (1/√d_k)[[0, Bᵀ], [B, 0]]⊗I_{d_k} over (W_Q, W_K), both (2dd_k, 2dd_k)."""
    d, d_k = head.query.shape
    gradient = score_gradient(head)
    u = head.reduction * one_matrix_hessian(head, head.scale * head.query @ head.key.T)
    v = torch.cat([kron(eye(d), head.key), kron(head.query, eye(d)) @ commutation(d_k, d)], 1)
    zero = torch.zeros_like(gradient)
    swap = torch.cat([torch.cat([zero, gradient], 1), torch.cat([gradient.T, zero], 1)])
    return head.scale**2 * v.T @ u @ v, head.scale * kron(swap, eye(d_k))


@statement("attention-two-matrices", HOLDS)
def attention_two_matrices(effort: CheckEffort) -> Rows:
    """Two matrices W_Q, W_K add symmetric pairs of eigenvalues, each d_k-fold

    H(W_Q, W_K) = VᵀUV/d_k + (1/√d_k)[[0, Bᵀ], [B, 0]]⊗I_{d_k}, U of Lemma 4.1, V = ∂W_QW_Kᵀ,
    Bᵀ = ∂ℓ/∂W_QK: the second term has ±σ_k(B)/√d_k, each d_k-fold; with one matrix it is absent
    Source: Ormaniec et al., Remark D.1 [ormaniec-remark-d.1]
    Assumptions: single head, d_v = d, no W_O, mean squared error
    Tested by: the sum against double backward and the chain; eigenvalues of the second term
    """
    for head in _heads(effort, 4, 24):
        first, second = two_matrix_terms(head)
        h = head.tracked()
        truth = hessian(h.loss(h.output()), [h.query, h.key])
        yield first + second, truth
        outer, functional = (attention_hessian_blocks(head, p) for p in ("outer", "functional"))
        qq, qk, kk = (outer[name] + functional[name] for name in ("QQ", "QK", "KK"))
        yield torch.cat([torch.cat([qq, qk], 1), torch.cat([qk.T, kk], 1)]), truth
        sigma = head.scale * torch.linalg.svdvals(score_gradient(head)).repeat(len(head.query.T))
        yield torch.linalg.eigvalsh(second), torch.cat([sigma, -sigma]).sort().values


def rank_bound(d_k: int, d_v: int) -> int:
    """Lemma D.2: the rank of VᵀUV is at most 2d_kd_v − d_k² below d_k = d_v, d_v² from there."""
    return 2 * d_k * d_v - d_k**2 if d_k < d_v else d_v**2


@statement("attention-rank", HOLDS)
def attention_rank(effort: CheckEffort) -> Outcome:
    """The rank of VᵀUV, the part that one matrix W_QK has too

    rank VᵀUV ≤ 2d_kd_v − d_k² for d_k < d_v, else d_v²; random heads attain it
    Source: Ormaniec et al., Lemma D.2 [ormaniec-lemma-d.2]
    Assumptions: single head, d_v = d, no W_O, mean squared error
    Tested by: eigenvalues above 1e-10 of the largest counted, d_v = 2, 3, 4, d_k from 1 to d_v + 1
    """
    ranks: dict[tuple[int, int], int] = {}
    for d in (2, 3, 4):
        for d_k in range(1, d + 2):
            for trial in effort.trials(1, 10):
                head = draw_head(effort.generator(trial), length=2 * d, d=d, d_k=d_k)
                size = torch.linalg.eigvalsh(two_matrix_terms(head)[0]).abs()
                rank = int((size > 1e-10 * size.amax()).sum())
                ranks[d, d_k] = max(rank, ranks.get((d, d_k), 0))
    shown = ", ".join(f"d_k = {k}: {rank} of {rank_bound(k, d)}" for (d, k), rank in ranks.items())
    return outcome(
        f"{shown} (d_v = 2, 3, 4)",
        printed=all(rank == rank_bound(d_k, d) for (d, d_k), rank in ranks.items()),
        numbers={f"d_v={d}, d_k={d_k}": rank for (d, d_k), rank in ranks.items()},
    )
