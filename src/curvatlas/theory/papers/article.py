"""Claims of the article and of the experiments: tested, not repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.closed_form.result import BlockHessian
from curvatlas.figures.theory import lines_figure
from curvatlas.layers.activations import activation_derivatives
from curvatlas.layers.structure import BlockSpec
from curvatlas.theory import reference
from curvatlas.theory.papers.growth import logspace, slope
from curvatlas.theory.reference import block_hessian, normal
from curvatlas.theory.statements import (
    CORRECTED,
    FALSE,
    CheckEffort,
    Outcome,
    Rows,
    log_log,
    outcome,
    spread,
    statement,
)
from curvatlas.zoo.block import ACTIVATIONS, attend, feed_forward, linear, normalised

_ARTICLE = "article 'Transformer Full Block Hessian Analysis'"
_WEIGHTS = ("query_weight", "key_weight", "value_weight", "up_weight", "down_weight")


def draw_relu_block(
    effort: CheckEffort, trial: int, *, norm_first: bool, scale: float = 1.0, samples: int = 2
) -> tuple[BlockSpec, dict[str, Tensor], Tensor, Tensor]:
    generator = effort.generator(trial)
    spec = BlockSpec(d_model=6, d_k=6, d_v=6, d_ff=12, norm_first=norm_first, activation="relu")
    weights = reference.draw_weights(spec, generator, scale=scale)
    x, y = normal(generator, 2, samples, 6, 6)
    return spec, weights, x, y


def _norms(h: BlockHessian) -> Tensor:
    """Frobenius norms of the blocks between the five weight matrices."""
    return torch.tensor(
        [[float(h.block(a, b).norm()) for b in _WEIGHTS] for a in _WEIGHTS],
        dtype=torch.float64,
    )


@statement("many-zero-blocks", FALSE)
def many_zero_blocks(effort: CheckEffort) -> Outcome:
    """'Many blocks of the Hessian are zero because of the residual connections'

    ‖H_ij‖ = 0 for many pairs (i, j) of query, key, value, up, down
    Source: article 'Transformer Full Block Hessian Analysis', block section
    Tested by: norms of all pairs, post- and pre-norm, ReLU
    Counterexample: no block between the five weight matrices is zero, in either arrangement
    """
    zeros, smallest = 0, []
    for trial in effort.trials(4, 20):
        norms = _norms(block_hessian(*draw_relu_block(effort, trial, norm_first=trial % 2 == 1)))
        zeros += int((norms < 1e-12 * norms.max()).sum())
        smallest.append(float(norms.min() / norms.max()))
    return outcome(
        printed=zeros > 0,
        figure=f"{zeros} zero blocks; smallest block over largest {spread(smallest)}",
        numbers={"zero_blocks": zeros, "smallest": min(smallest)},
    )


@statement("block-diagonal-dominance", FALSE)
def diagonal_dominance(effort: CheckEffort) -> Outcome:
    """'The Hessian is dominated by its diagonal blocks'

    Σ_{i≠j}‖H_ij‖_F² ≪ Σ_i‖H_ii‖_F²
    Source: article 'Transformer Full Block Hessian Analysis', block section
    Tested by: share of ‖H‖_F² off the block diagonal, post- and pre-norm, random weights
    Counterexample: more than half of ‖H‖_F² lies off the block diagonal
    """
    shares = []
    for trial in effort.trials(6, 40):
        energy = _norms(
            block_hessian(*draw_relu_block(effort, trial, norm_first=trial % 2 == 1))
        ).pow(2)
        shares.append(1.0 - float(energy.diagonal().sum() / energy.sum()))
    middle = sorted(shares)[len(shares) // 2]
    return outcome(
        printed=middle < 0.1,
        figure=f"off-diagonal share of ‖H‖_F² {spread(shares)}",
        numbers={"shares": shares},
    )


@statement("layer-norm-bounds-curvature", FALSE, plot=lines_figure)
def layer_norm_bounds(effort: CheckEffort) -> Outcome:
    """'LayerNorm keeps the input-dependent curvature bounded'

    sup over inputs of ‖H‖ finite for fixed weights
    Source: article 'Transformer Full Block Hessian Analysis', propagation section
    Tested by: post-norm: tokens X + c·1 with W_V 1 = 0 (U keeps its variance); pre-norm: X → tX
    Counterexample: post-norm: ‖H(V,V)‖ grows like c²; pre-norm: ‖H‖ grows like t (residual Z − Y)
    """
    levels = logspace(10.0, 1e4, 5)
    spec, weights, x, y = draw_relu_block(effort, 0, norm_first=False)
    # W_V blind to the common shift: U keeps its variance, the norm removes c, the means m keep it
    value = weights["value_weight"]
    weights = weights | {"value_weight": value - value.mean(1, keepdim=True)}
    post = [float(block_hessian(spec, weights, x + c, y).block("V", "V").norm()) for c in levels]
    spec, weights, x, y = draw_relu_block(effort, 1, norm_first=True)
    pre = [float(block_hessian(spec, weights, t * x, y).H.norm()) for t in levels]
    slopes = {"post-norm": slope(levels, post), "pre-norm": slope(levels, pre)}
    return outcome(
        printed=max(slopes.values()) < 0.1,
        figure=f"growth with the shift c: slope {slopes['post-norm']:.2f} (post-norm VV); with the"
        f" scale t: {slopes['pre-norm']:.2f} (pre-norm H)",
        numbers={"slopes": slopes},
        series=log_log(
            levels,
            {"post-norm, ‖H(V,V)‖ at X + c": post, "pre-norm, ‖H‖ at tX": pre},
            "shift c, or scale t",
            "Frobenius norm",
        ),
    )


@statement("norm-and-condition-against-data-size", CORRECTED, plot=lines_figure)
def data_size(effort: CheckEffort) -> Outcome:
    """'Norm and condition number of the Hessian fall like 1/√D with the data'

    printed ‖H_D‖ ∝ D^{−½}; true: ‖H_D‖ → ‖H_∞‖ and ‖H_D − H_∞‖ ∝ D^{−½}
    Source: article 'Transformer Full Block Hessian Analysis', scaling section
    Assumptions: independent samples, fixed weights, finite variance of the curvature (ε > 0)
    Tested by: slopes over D = 64 to 1,024 of ‖H_D‖, of |λ|max over median |λ|, and of ‖H_D − H_∞‖
    Counterexample: the norm settles at a constant; only its fluctuation falls
    """
    piece, count = 64, effort.choose(192, 1024)
    # ε = 0.1: with d small and ε → 0 the curvature 1/σ² has no finite variance over samples
    spec = BlockSpec(d_model=5, d_k=2, d_v=5, d_ff=4, eps=0.1)
    generator = effort.generator()
    weights = reference.draw_weights(spec, generator)
    pieces = []
    for _ in range(count):
        x, y = normal(generator, 2, piece, 3, 5)
        pieces.append(block_hessian(spec, weights, x, y).H)
    limit = torch.stack(pieces).mean(0)
    sizes = [piece * m for m in (1, 2, 4, 8, 16)]
    norms, conditions, deviations = [], [], []
    for size in sizes:
        step = size // piece
        groups = [
            torch.stack(pieces[i : i + step]).mean(0)
            for i in range(0, min(len(pieces) - step + 1, 12 * step), step)
        ]
        values = [torch.linalg.eigvalsh(g).abs() for g in groups]
        norms.append(sum(float(v.max()) for v in values) / len(groups))
        conditions.append(sum(float(v.max() / v.median()) for v in values) / len(groups))
        deviations.append(
            sum(float(torch.linalg.matrix_norm(g - limit, 2)) for g in groups) / len(groups)
        )
    xs = [float(s) for s in sizes]
    settled = norms[-1] / norms[0]
    slopes = {
        "norm": slope(xs, norms),
        "condition": slope(xs, conditions),
        "deviation": slope(xs, deviations),
    }
    return outcome(
        printed=settled < 0.35,  # 16 times the data: 1/√D means a quarter
        corrected=settled > 0.5 and abs(slopes["deviation"] + 0.5) < 0.2,
        figure=f"norm at D = 1,024 is {settled:.2f} of that at D = 64 (1/√D: 0.25); "
        + ", ".join(f"slope of the {k} {v:.2f}" for k, v in slopes.items()),
        numbers={"slopes": slopes, "settled": settled},
        series=log_log(
            xs,
            {
                "‖H_D‖": norms,
                "|λ|max / median |λ|": conditions,
                "‖H_D − H_∞‖": deviations,
            },
            "samples D",
        ),
    )


@statement("value-blocks-dominate", CORRECTED)
def value_dominates(effort: CheckEffort) -> Outcome:
    """The value block is the largest attention block

    ‖H(V,V)‖ ≥ ‖H(Q,Q)‖, ‖H(K,K)‖: true for small weights (QQ, KK fall like w², w⁴ faster)
    Source: Petrov et al., experiments: value-related blocks are largest at initialisation
    Tested by: max(QQ, KK)/VV in post-norm blocks at weight scale 0.1 and 2
    Counterexample: at weights of order one the query or key block overtakes
    """
    ratios: dict[float, list[float]] = {0.1: [], 2.0: []}
    for scale, values in ratios.items():
        for trial in effort.trials(6, 40):
            norms = _norms(
                block_hessian(*draw_relu_block(effort, trial, norm_first=False, scale=scale))
            )
            values.append(float(torch.maximum(norms[0, 0], norms[1, 1]) / norms[2, 2]))
    return outcome(
        printed=max(ratios[2.0]) < 1.0,
        corrected=max(ratios[0.1]) < 1.0,
        figure=f"max(QQ, KK)/VV {spread(ratios[0.1])} at scale 0.1, {spread(ratios[2.0])} at "
        f"scale 2",
        numbers={"small": ratios[0.1], "large": ratios[2.0]},
    )


@statement("down-projection-hessian", CORRECTED)
def down_projection(effort: CheckEffort) -> Outcome:
    """'The Hessian of W2 vanishes because the output is linear in it'

    true: H(W2,W2) = Σ_i ĝ_iĝ_iᵀ ⊗ Λ_i, the Gauss-Newton part
    Source: article 'Transformer Full Block Hessian Analysis', feed-forward section (returned as
        zeros)
    Assumptions: pre-norm (no norm after W2), mean squared error
    Tested by: closed form Σ gg ᵀ⊗Λ against the Hessian block
    Counterexample: the block is c·gᵀg⊗I, as large as the others
    """
    spec, weights, x, y = draw_relu_block(effort, 0, norm_first=True)
    h = block_hessian(spec, weights, x, y)
    block = h.block("down_weight", "down_weight")
    u = x + attend(spec, weights, normalised(spec, weights, x, "norm1"), None)[0]
    g = torch.relu(linear(normalised(spec, weights, u, "norm2"), weights, "up")).reshape(-1, 12)
    formula = torch.kron(torch.eye(6, dtype=torch.float64), g.T @ g) * 2.0 / y.numel()
    error = reference.relative_error(formula, block)
    share = float(block.norm() / h.H.norm())
    return outcome(
        printed=share < 1e-12,
        corrected=error < 1e-12,
        figure=f"‖H(W2,W2)‖ is {share:.2f} of ‖H‖; Σ gg ᵀ⊗Λ exact to {error:.0e}",
        numbers={"share": share, "error": error},
    )


@statement("gelu-derivative", CORRECTED)
def gelu_derivative(effort: CheckEffort) -> Outcome:
    """The article's GELU derivative mixes the tanh approximation with the exact density

    printed f' = Φ_tanh(z) + zφ(z); exact GELU: Φ + zφ; tanh GELU: (1+t)/2 + zt'/2
    Source: article 'Transformer Full Block Hessian Analysis', feed-forward code
    Tested by: largest error over [−6, 6] against both GELUs; both correct forms by differentiation
    Counterexample: wrong for either activation, by 1e-4 and more
    """
    z = torch.linspace(-6, 6, 4001, dtype=torch.float64, requires_grad=True)
    inner = (2.0 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)
    density = torch.exp(-0.5 * z**2) / (2.0 * torch.pi) ** 0.5
    mixed = (0.5 * (1.0 + torch.tanh(inner)) + z * density).detach()
    printed, corrected = {}, {}
    for name in ("gelu", "gelu_tanh"):
        (truth,) = torch.autograd.grad(ACTIVATIONS[name](z).sum(), z)
        printed[name] = float((mixed - truth).abs().max())
        ours = activation_derivatives(name, z.detach())[1]
        corrected[name] = float((ours - truth).abs().max())
    return outcome(
        printed=min(printed.values()) < 1e-6,
        corrected=max(corrected.values()) < 1e-12,
        figure=f"printed off by {printed['gelu']:.1e} (erf), {printed['gelu_tanh']:.1e} (tanh);"
        f" ours {max(corrected.values()):.0e}",
        numbers={"printed": printed, "corrected": corrected},
    )


@statement("top-k-by-one-vector", FALSE)
def top_k(effort: CheckEffort) -> Outcome:
    """'Successive Rayleigh quotients of one power iteration are the top-k eigenvalues'

    λ_1 … λ_k = ρ(v_1) … ρ(v_k) along one iteration
    Source: article 'Transformer Full Block Hessian Analysis', eigenvalue routine
    Tested by: a matrix with eigenvalues 10, 7, 5, 3, … and its ten quotients
    Counterexample: all quotients tend to the same largest eigenvalue
    """
    generator = effort.generator()
    values = torch.tensor([10.0, 7.0, 5.0, 3.0, 2.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    q = torch.linalg.qr(normal(generator, 8, 8))[0]
    matrix = q @ torch.diag(values) @ q.T
    v = normal(generator, 8)
    quotients = []
    for _ in range(20):
        v = matrix @ v
        v = v / v.norm()
        quotients.append(float(v @ matrix @ v))
    claimed = sorted(quotients[-5:], reverse=True)
    error = max(abs(a - b) for a, b in zip(claimed, values[:5].tolist(), strict=True))
    return outcome(
        printed=error < 0.1,
        figure=f"returned {', '.join(f'{c:.2f}' for c in claimed)} for 10, 7, 5, 3, 2",
        numbers={"error": error},
    )


@statement("gradient-outer-product", FALSE, limit=0.1)
def gradient_outer(effort: CheckEffort) -> Rows:
    """'The outer product of the gradient is the Hessian'

    H ≈ ∇ℓ∇ℓᵀ, and its condition number
    Source: article 'Transformer Full Block Hessian Analysis', analyzer
    Tested by: relative error and rank of ∇ℓ∇ℓᵀ (best multiple) against H
    Counterexample: rank one, infinite condition number, relative error near one
    """
    for trial in effort.trials(3, 20):
        spec, weights, x, y = draw_relu_block(effort, trial, norm_first=trial % 2 == 1)
        h = block_hessian(spec, weights, x, y).H
        tracked = reference.tracked(weights)
        z = reference.block_output(spec, tracked, x)
        g = reference.flat_gradient(reference.loss_of("mse", y)(z), list(tracked.values()))
        outer = torch.outer(g, g)
        yield (outer * h).sum() / (outer * outer).sum() * outer, h


@statement("residual-added-twice", CORRECTED)
def residual_twice(effort: CheckEffort) -> Rows:
    """The article's block adds the residual of the feed-forward part twice

    printed S = Y + (Y + FFN(Y)); block: S = Y + FFN(Y)
    Source: article 'Transformer Full Block Hessian Analysis', feed-forward code inside the block
    Tested by: outputs and Hessians of both
    Counterexample: output and Hessian differ by tens of percent
    """
    spec, weights, x, y = draw_relu_block(effort, 0, norm_first=False)
    tracked = reference.tracked(weights)
    middle = normalised(spec, tracked, x + attend(spec, tracked, x, None)[0], "norm1")
    fed = feed_forward(spec, tracked, middle)
    twice = normalised(spec, tracked, 2.0 * middle + fed, "norm2")
    once = normalised(spec, tracked, middle + fed, "norm2")
    loss, params = reference.loss_of("mse", y), list(tracked.values())
    printed, truth = (reference.hessian(loss(z), params) for z in (twice, once))
    yield printed, truth, block_hessian(spec, weights, x, y).H
