"""The printed Hessian blocks of self-attention (Ormaniec et al., Theorems 3.1 and 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.linear_operator import Part
from curvatlas.theory import reference
from curvatlas.theory.reference import (
    SingleHead,
    attention_hessian_blocks,
    commutation,
    draw_head,
    eye,
    first_factor,
    jacobian,
    kron,
    moments,
    normal,
    relative_error,
    second_factor,
    shuffle,
)
from curvatlas.theory.statements import HOLDS, CheckEffort, Outcome, agreement, check, judge, worst

_EXACT = 1e-12


def _derivatives(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A (L, L), ∂A/∂T (L², L²) and ∂²A/∂T² (L⁴, L²) by automatic differentiation."""
    t = logits.detach().clone().requires_grad_(True)
    a = torch.softmax(t, -1)
    first = jacobian(a, [t], graph=True)
    return a.detach(), first.detach(), jacobian(first, [t]).detach()


@check("softmax-derivative")
def softmax_derivative(effort: CheckEffort) -> Outcome:
    printed, corrected = [], []
    for trial in range(effort.trials(5, 40)):
        n = 3 + trial % 4
        logits = normal(effort.generator(trial), n, n)
        a, truth, _ = _derivatives(logits)
        one = torch.eye(n, dtype=torch.float64)
        same_row = torch.einsum("ik,jl->ijkl", one, one)
        as_printed = a[:, :, None, None] * (same_row - a[None, None])
        right = torch.einsum("ik,ij,jl->ijkl", one, a, one) - torch.einsum(
            "ik,ij,il->ijkl", one, a, a
        )
        truth = truth.reshape(n, n, n, n)
        printed.append(relative_error(as_printed, truth))
        corrected.append(relative_error(right, truth))
    return Outcome(
        verdict=judge(printed=min(printed) < _EXACT, corrected=worst(corrected) < _EXACT),
        figure=f"printed off by {min(printed):.2f} to {worst(printed):.2f}; "
        f"corrected exact to {worst(corrected):.0e}",
        numbers={"printed_error": min(printed), "corrected_error": worst(corrected)},
    )


@check("softmax-jacobian-norm")
def softmax_jacobian_norm(effort: CheckEffort) -> Outcome:
    norms = []
    for trial in range(effort.trials(200, 5000)):
        generator = effort.generator(trial)
        scale = 0.1 * 300.0 ** float(torch.rand(1, generator=generator))
        row = torch.softmax(scale * normal(generator, 2 + trial % 14), 0)
        norms.append(float(torch.linalg.matrix_norm(torch.diag(row) - torch.outer(row, row), 2)))
    half = torch.full((2,), 0.5, dtype=torch.float64)
    attained = float(torch.linalg.matrix_norm(torch.diag(half) - torch.outer(half, half), 2))
    return Outcome(
        verdict=judge(printed=max(norms) <= 0.5 + 1e-14 and abs(attained - 0.5) < 1e-14),
        figure=f"largest of {len(norms)} random rows {max(norms):.4f}; (½, ½) gives {attained:.4f}",
        numbers={"largest": max(norms), "attained": attained},
    )


@check("softmax-second-derivative-norm")
def softmax_second_derivative_norm(effort: CheckEffort) -> Outcome:
    largest = 0.0
    for trial in range(effort.trials(40, 400)):
        generator = effort.generator(trial)
        n = 2 + trial % 7
        scale = 0.1 * 50.0 ** float(torch.rand(1, generator=generator))
        a = torch.softmax(scale * normal(generator, n), 0)
        v = normal(generator, n)
        for _ in range(30):  # alternate: the best u for this v, then v = u
            centred = v - a @ v
            # D²[u, v] = a ∘ (ũ ṽ) − a Cov(u, v), linear in u
            matrix = torch.diag(a * centred) - torch.outer(a * centred, a)
            matrix = matrix - torch.outer(a, a * centred)
            _, s, vh = torch.linalg.svd(matrix / v.norm())
            v = vh[0]
            largest = max(largest, float(s[0]))
    return Outcome(
        verdict=judge(printed=largest <= 1.0),
        figure=f"largest found {largest:.3f} (bound 1)",
        numbers={"largest": largest},
    )


@check("attention-moments")
def attention_moments(effort: CheckEffort) -> Outcome:
    errors = []
    for trial in range(effort.trials(4, 20)):
        head = draw_head(
            effort.generator(trial), length=2 + trial % 3, d=2 + trial % 2, d_k=1 + trial % 3
        )
        x, length = head.x, len(head.x)
        a, first, second = _derivatives(head.logits())
        m = moments(a, x)
        xx = kron(x, x)
        z1 = kron(eye(length), x.T.contiguous()) @ first @ xx
        # ∂²A/∂T² is stacked as vec_r(∂A/∂T) by T: rows (ij, kl), columns T
        z2 = kron(eye(length), x.T, x.T, x.T) @ second @ xx
        errors += [relative_error(first_factor(x, m), z1), relative_error(second_factor(x, m), z2)]
    return agreement(errors, _EXACT, "matrices")


@check("attention-exponential-family")
def attention_exponential_family(effort: CheckEffort) -> Outcome:
    errors = []
    for trial in range(effort.trials(4, 20)):
        head = draw_head(effort.generator(trial), length=3 + trial % 3, d=3, d_k=2)
        m = moments(head.attention(), head.x)
        for i, x_i in enumerate(head.x):
            theta = (head.scale * head.key @ head.query.T @ x_i).requires_grad_(True)
            psi = torch.logsumexp(head.x @ theta, 0)
            first = jacobian(psi, [theta], graph=True)
            second = jacobian(first, [theta], graph=True)
            third = jacobian(second, [theta])
            errors += [
                relative_error(first.detach()[0], m.first[i]),
                relative_error(second.detach(), m.second[i]),
                relative_error(third, m.third[i]),
            ]
    return agreement(errors, _EXACT, "moments")


_PRINTED_BLOCKS = ("VV", "QQ", "VQ", "QK")
_OUR_BLOCKS = ("KK", "VK")


def outer_blocks(head: SingleHead) -> dict[str, Tensor]:
    """H_o block by block, as printed; KK and VK derived in the same notation (derivations §4)."""
    length, d = head.x.shape
    c, s, d_k = head.reduction, head.scale, head.query.shape[1]
    m = moments(head.attention(), head.x)
    z1 = first_factor(head.x, m)
    middle = z1.T @ kron(eye(length), head.value @ head.value.T) @ z1
    by_query = kron(eye(d), head.key)
    by_key = kron(head.query, eye(d)) @ commutation(d_k, d)
    by_value = kron(m.first.T, head.value.T)
    return {
        "VV": c * kron(m.first.T @ m.first, eye(d)),
        "QQ": c * s**2 * by_query.T @ middle @ by_query,
        "QK": c * s**2 * by_query.T @ middle @ by_key,
        "KK": c * s**2 * by_key.T @ middle @ by_key,
        "VQ": c * s * by_value @ z1 @ by_query,
        "VK": c * s * by_value @ z1 @ by_key,
    }


def functional_blocks(head: SingleHead) -> dict[str, Tensor]:
    """H_f block by block, as printed; KK and VK derived in the same notation (derivations §4)."""
    length, d = head.x.shape
    c, s, d_k = head.reduction, head.scale, head.query.shape[1]
    m = moments(head.attention(), head.x)
    z1, z2 = first_factor(head.x, m), second_factor(head.x, m)
    residual = (head.output() - head.target).reshape(1, -1)
    by_query = kron(eye(d), head.key)
    by_key = kron(head.query, eye(d)) @ commutation(d_k, d)
    left = kron(residual, eye(d * d_k)) @ kron(eye(length), head.value.T, eye(d), head.key.T)
    left_key = (
        kron(residual, eye(d * d_k))
        @ kron(eye(length * d), by_key.T)
        @ kron(eye(length), head.value.T, eye(d * d))
    )
    value_side = kron(residual, eye(d * d)) @ kron(eye(length), shuffle(d)) @ z1
    # The bracket is d × d; only then comes ⊗ I_{d_k}.
    bracket = (
        kron(residual, eye(d))
        @ kron(eye(length), head.value.T, eye(d))
        @ kron(z1, eye(d))
        @ shuffle(d)
    )
    return {
        "VV": torch.zeros(d * d, d * d, dtype=torch.float64),
        "QQ": c * s**2 * left @ z2 @ by_query,
        "QK": c * s**2 * left @ z2 @ by_key + c * s * kron(bracket, eye(d_k)),
        "KK": c * s**2 * left_key @ z2 @ by_key,
        "VQ": c * s * value_side @ by_query,
        "VK": c * s * value_side @ by_key,
    }


def automatic_blocks(head: SingleHead) -> dict[str, dict[str, Tensor]]:
    """The same blocks of H_o and H_f by double backward; keys "outer", "functional"."""
    h = head.tracked()
    sizes = [p.numel() for p in h.parameters]
    edges = {"Q": (0, sizes[0]), "K": (sizes[0], sizes[0] + sizes[1])}
    edges["V"] = (sizes[0] + sizes[1], sum(sizes))
    _, outer, functional = reference.split_hessian(h.output(), h.loss, h.parameters)
    return {
        part: {
            a + b: full[slice(*edges[a]), slice(*edges[b])]
            for a, b in ("VV", "QQ", "QK", "KK", "VQ", "VK")
        }
        for part, full in (("outer", outer), ("functional", functional))
    }


def _compare(effort: CheckEffort, part: Part, names: tuple[str, ...]) -> Outcome:
    """Printed against automatic and against the efficient closed form, relative to ‖H‖_F."""
    printed_error, efficient_error = [], []
    for trial in range(effort.trials(4, 24)):
        head = draw_head(
            effort.generator(trial),
            length=2 + trial % 3,
            d=2 + (trial // 2) % 2,
            d_k=1 + trial % 3,
            input_scale=(0.5, 1.0, 2.0)[trial % 3],
        )
        truth = automatic_blocks(head)
        scale = max(float(b.norm()) for blocks in truth.values() for b in blocks.values())
        printed = outer_blocks(head) if part == "outer" else functional_blocks(head)
        efficient = attention_hessian_blocks(head, part)
        for name in names:
            want = truth[part][name]
            printed_error.append(float((printed[name] - want).norm()) / scale)
            efficient_error.append(float((efficient[name] - want).norm()) / scale)
    return Outcome(
        verdict=judge(printed=worst(printed_error) < _EXACT and worst(efficient_error) < _EXACT),
        figure=f"printed {worst(printed_error):.0e}, efficient {worst(efficient_error):.0e}"
        f" from double backward ({len(printed_error)} blocks)",
        numbers={
            "printed_error": worst(printed_error),
            "efficient_error": worst(efficient_error),
            "blocks": len(printed_error),
        },
    )


@check("attention-outer-blocks")
def attention_outer(effort: CheckEffort) -> Outcome:
    return _compare(effort, "outer", _PRINTED_BLOCKS)


@check("attention-functional-blocks")
def attention_functional(effort: CheckEffort) -> Outcome:
    return _compare(effort, "functional", _PRINTED_BLOCKS)


@check("attention-key-blocks")
def attention_key_blocks(effort: CheckEffort) -> Outcome:
    outer, functional = (_compare(effort, p, _OUR_BLOCKS) for p in ("outer", "functional"))
    error = max(outer.numbers["printed_error"], functional.numbers["printed_error"])
    efficient = max(outer.numbers["efficient_error"], functional.numbers["efficient_error"])
    return Outcome(
        verdict=judge(printed=outer.verdict == HOLDS and functional.verdict == HOLDS),
        figure=f"Kronecker {error:.0e}, efficient {efficient:.0e} from double backward",
        numbers={"printed_error": error, "efficient_error": efficient},
    )


@check("attention-jacobian-commutation")
def attention_jacobians(effort: CheckEffort) -> Outcome:
    without, corrected = [], []
    for trial in range(effort.trials(4, 20)):
        head = draw_head(effort.generator(trial), length=3, d=3, d_k=2).tracked()
        with torch.no_grad():
            a = head.attention()
        rows = [torch.diag(r) - torch.outer(r, r) for r in a]
        soft = torch.block_diag(*rows)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            left = kron(eye(3), head.value.T @ head.x.T) @ soft * head.scale
            query = left @ kron(head.x, head.x @ head.key)
            key_without = left @ kron(head.x @ head.query, head.x)
            key = key_without @ commutation(2, 3)
        true_query = reference.jacobian(head.output(), [head.query])
        true_key = reference.jacobian(head.output(), [head.key])
        corrected += [
            reference.relative_error(query, true_query),
            reference.relative_error(key, true_key),
        ]
        without.append(reference.relative_error(key_without, true_key))
    return Outcome(
        verdict=judge(printed=min(without) < _EXACT, corrected=worst(corrected) < _EXACT),
        figure=f"without K off by {min(without):.2f} to {max(without):.2f}; "
        f"with K exact to {worst(corrected):.0e}",
        numbers={"without": min(without), "corrected": worst(corrected)},
    )


@check("functional-value-query-size")
def functional_value_query(effort: CheckEffort) -> Outcome:
    head = draw_head(effort.generator(), length=3, d=3, d_k=2)
    residual = (head.output() - head.target).reshape(1, -1)
    inner = kron(eye(3), shuffle(3)).shape[0]
    conformable = kron(residual, eye(3)).shape[1] == inner
    error = reference.relative_error(
        functional_blocks(head)["VQ"], automatic_blocks(head)["functional"]["VQ"]
    )
    return Outcome(
        verdict=judge(printed=conformable, corrected=error < _EXACT),
        figure=f"printed: {3 * 3 * 3} columns meet {inner} rows; corrected exact to {error:.0e}",
        numbers={"printed_columns": 27, "rows": inner, "corrected_error": error},
    )
