"""What the article's code computes under the name of Hessian: tested against the true quantity."""

from __future__ import annotations

import torch

from curvatlas.blocks.activations import activation_derivatives
from curvatlas.theory import reference
from curvatlas.theory.article import ARTICLE, draw_relu_block
from curvatlas.theory.efficient import block_hessian
from curvatlas.theory.statements import (
    CORRECTED,
    FALSE,
    Effort,
    Outcome,
    judge,
    spread,
    statement,
)

_DERIVATION = "docs/theory/derivations.md#the-articles-claims"


@statement(
    name="down-projection-hessian",
    source=f"{ARTICLE}, feed-forward section (returned as zeros)",
    title="'The Hessian of W2 vanishes because the output is linear in it'",
    formula="true: H(W2,W2) = Σ_i ĝ_iĝ_iᵀ ⊗ Λ_i, the Gauss-Newton part",
    assumptions="pre-norm (no norm after W2), mean squared error",
    tested_by="closed form Σ gg ᵀ⊗Λ against the Hessian block",
    verdict=CORRECTED,
    counterexample="the block is c·gᵀg⊗I, as large as the others",
    derivation=_DERIVATION,
)
def down_projection(effort: Effort) -> Outcome:
    spec, weights, x, y = draw_relu_block(effort, 0, norm_first=True)
    h = block_hessian(spec, weights, x, y)
    block = h.block("down_weight")
    u = x + reference.attention(spec, weights, reference.affine_norm(x, weights, "norm1", spec))
    v = reference.affine_norm(u, weights, "norm2", spec)
    g = reference.activate(reference.linear(v, weights, "up"), "relu").reshape(-1, 12)
    formula = torch.kron(torch.eye(6, dtype=torch.float64), g.T @ g) * 2.0 / y.numel()
    error = reference.relative_error(formula, block)
    share = float(block.norm() / h.total.norm())
    return Outcome(
        verdict=judge(printed=share < 1e-12, corrected=error < 1e-12),
        figure=f"‖H(W2,W2)‖ is {share:.2f} of ‖H‖; Σ gg ᵀ⊗Λ exact to {error:.0e}",
        numbers={"share": share, "error": error},
    )


@statement(
    name="gelu-derivative",
    source=f"{ARTICLE}, feed-forward code",
    title="The article's GELU derivative mixes the tanh approximation with the exact density",
    formula="printed f' = Φ_tanh(z) + zφ(z); exact GELU: Φ + zφ; tanh GELU: (1+t)/2 + zt'/2",
    tested_by="largest error over [−6, 6] against both GELUs; both correct forms by "
    "differentiation",
    verdict=CORRECTED,
    counterexample="wrong for either activation, by 1e-4 and more",
    derivation=_DERIVATION,
)
def gelu_derivative(effort: Effort) -> Outcome:
    z = torch.linspace(-6, 6, 4001, dtype=torch.float64, requires_grad=True)
    inner = (2.0 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)
    density = torch.exp(-0.5 * z**2) / (2.0 * torch.pi) ** 0.5
    mixed = (0.5 * (1.0 + torch.tanh(inner)) + z * density).detach()
    printed, corrected = {}, {}
    for name in ("gelu", "gelu_tanh"):
        (truth,) = torch.autograd.grad(reference.activate(z, name).sum(), z)
        printed[name] = float((mixed - truth).abs().max())
        ours = activation_derivatives(name, z.detach())[1]
        corrected[name] = float((ours - truth).abs().max())
    return Outcome(
        verdict=judge(
            printed=min(printed.values()) < 1e-6, corrected=max(corrected.values()) < 1e-12
        ),
        figure=f"printed off by {printed['gelu']:.1e} (erf), {printed['gelu_tanh']:.1e} (tanh);"
        f" ours {max(corrected.values()):.0e}",
        numbers={"printed": printed, "corrected": corrected},
    )


@statement(
    name="top-k-by-one-vector",
    source=f"{ARTICLE}, eigenvalue routine",
    title="'Successive Rayleigh quotients of one power iteration are the top-k eigenvalues'",
    formula="λ_1 … λ_k = ρ(v_1) … ρ(v_k) along one iteration",
    tested_by="a matrix with eigenvalues 10, 7, 5, 3, … and its ten quotients",
    verdict=FALSE,
    counterexample="all quotients tend to the same largest eigenvalue",
    derivation=_DERIVATION,
)
def top_k(effort: Effort) -> Outcome:
    generator = effort.generator()
    values = torch.tensor([10.0, 7.0, 5.0, 3.0, 2.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))[0]
    matrix = q @ torch.diag(values) @ q.T
    v = torch.randn(8, generator=generator, dtype=torch.float64)
    quotients = []
    for _ in range(20):
        v = matrix @ v
        v = v / v.norm()
        quotients.append(float(v @ matrix @ v))
    claimed = sorted(quotients[-5:], reverse=True)
    error = max(abs(a - b) for a, b in zip(claimed, values[:5].tolist(), strict=True))
    return Outcome(
        verdict=judge(printed=error < 0.1),
        figure=f"returned {', '.join(f'{c:.2f}' for c in claimed)} for 10, 7, 5, 3, 2",
        numbers={"error": error},
    )


@statement(
    name="gradient-outer-product",
    source=f"{ARTICLE}, analyzer",
    title="'The outer product of the gradient is the Hessian'",
    formula="H ≈ ∇ℓ∇ℓᵀ, and its condition number",
    tested_by="relative error and rank of ∇ℓ∇ℓᵀ (best multiple) against H",
    verdict=FALSE,
    counterexample="rank one, infinite condition number, relative error near one",
    derivation=_DERIVATION,
)
def gradient_outer(effort: Effort) -> Outcome:
    errors = []
    for trial in range(effort.trials(3, 20)):
        spec, weights, x, y = draw_relu_block(effort, trial, norm_first=trial % 2 == 1)
        h = block_hessian(spec, weights, x, y).total
        tracked = reference.tracked(weights)
        z = reference.block_output(spec, tracked, x)
        g = reference.flat_gradient(reference.loss_of("mse", y)(z), list(tracked.values()))
        outer = torch.outer(g, g)
        best = (outer * h).sum() / (outer * outer).sum()
        errors.append(reference.relative_error(best * outer, h))
    return Outcome(
        verdict=judge(printed=min(errors) < 0.1),
        figure=f"relative error of the best multiple {spread(errors)}",
        numbers={"errors": errors},
    )


@statement(
    name="residual-added-twice",
    source=f"{ARTICLE}, feed-forward code inside the block",
    title="The article's block adds the residual of the feed-forward part twice",
    formula="printed S = Y + (Y + FFN(Y)); block: S = Y + FFN(Y)",
    tested_by="outputs and Hessians of both",
    verdict=CORRECTED,
    counterexample="output and Hessian differ by tens of percent",
    derivation=_DERIVATION,
)
def residual_twice(effort: Effort) -> Outcome:
    spec, weights, x, y = draw_relu_block(effort, 0, norm_first=False)
    tracked = reference.tracked(weights)
    middle = reference.affine_norm(
        x + reference.attention(spec, tracked, x), tracked, "norm1", spec
    )
    fed = reference.feed_forward(spec, tracked, middle)
    twice = reference.affine_norm(2.0 * middle + fed, tracked, "norm2", spec)
    once = reference.affine_norm(middle + fed, tracked, "norm2", spec)
    loss, params = reference.loss_of("mse", y), list(tracked.values())
    printed = reference.relative_error(
        reference.hessian(loss(twice), params), reference.hessian(loss(once), params)
    )
    ours = block_hessian(spec, weights, x, y).total
    corrected = reference.relative_error(ours, reference.hessian(loss(once), params))
    return Outcome(
        verdict=judge(printed=printed < 1e-6, corrected=corrected < 1e-12),
        figure=f"Hessian off by {printed:.2f}; with one residual {corrected:.0e}",
        numbers={"printed": printed, "corrected": corrected},
    )
