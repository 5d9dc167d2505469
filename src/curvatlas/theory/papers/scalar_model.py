"""Scalar models and the symmetric bulk: *Cracking the Hessian* (Singh, Ormaniec, Hofmann).

Linear pairs f = ⟨w, v⟩x (Theorem 3.1), their ReLU form (3.4), attention with scalar tokens (3.5,
``theory/scalar_attention.py``), and what remains of it in any block: the bulk ±σ(Γ).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from curvatlas.figures.theory import lines_figure, spectrum_figure
from curvatlas.layers.structure import BlockSpec
from curvatlas.theory import reference
from curvatlas.theory.papers.growth import logspace, slope
from curvatlas.theory.reference import block_hessian, normal, relative_error
from curvatlas.theory.scalar_attention import ScalarAttention, pair_core
from curvatlas.theory.statements import (
    CORRECTED,
    HOLDS,
    CheckEffort,
    Outcome,
    Rows,
    log_log,
    outcome,
    statement,
    worst,
)

_PAPER = "Singh, Ormaniec, Hofmann"


# ---- linear and ReLU pairs ----------------------------------------------------------------------


def pair_eigenpairs(g: float, h: float, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (2D,) and eigenvectors (2D, 2D) of the Hessian of ℓ(wᵀv), g = ℓ', h = ℓ''."""
    size = len(w)
    plus, minus = (  # first column along w ± v, the others orthogonal to it
        torch.linalg.qr((w + sign * v).unsqueeze(1), mode="complete")[0] for sign in (1.0, -1.0)
    )
    plus, minus = plus * torch.sign((w + v) @ plus[:, 0]), minus * torch.sign((w - v) @ minus[:, 0])
    # over (w, v) the Hessian pairs w with v: (v; w) = (w+v; w+v)/2 − (w−v; −(w−v))/2
    even, odd = torch.cat([plus, plus]) / 2**0.5, torch.cat([-minus, minus]) / 2**0.5
    outliers, mix = torch.linalg.eigh(pair_core(g, h, w, v))
    vectors = torch.stack([even[:, 0], odd[:, 0]], 1) @ mix
    bulk = torch.full((size - 1,), g, dtype=torch.float64)
    values = torch.cat([bulk, -bulk, outliers])
    return values, torch.cat([even[:, 1:], odd[:, 1:], vectors], 1)


def outlier_pair(g: float, h: float, w: Tensor, v: Tensor) -> Tensor:
    """½[h z² ± √(h²z⁴ + 4g² + 8gh wᵀv)], z² = ‖w‖² + ‖v‖²."""
    size, product = float(w @ w + v @ v), float(w @ v)
    root = (h**2 * size**2 + 4 * g**2 + 8 * g * h * product) ** 0.5
    return 0.5 * (h * size + torch.tensor([-root, root], dtype=torch.float64))


def _pair_derivatives(x: Tensor, y: Tensor, product: float, count: int) -> tuple[float, float]:
    """ℓ' and ℓ'' of Σ(px − y)²/count at p."""
    return 2.0 / count * float((product * x - y) @ x), 2.0 / count * float(x @ x)


def _pair_hessian(x: Tensor, y: Tensor, w: Tensor, v: Tensor, *, relu: bool) -> Tensor:
    w, v = (t.clone().requires_grad_(True) for t in (w, v))
    hidden = x.unsqueeze(1) * w
    f = (torch.relu(hidden) if relu else hidden) @ v
    return reference.hessian((f - y).pow(2).mean(), [w, v])


def _draw_pair(effort: CheckEffort, trial: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator, size = effort.generator(trial), 2 + trial % 5
    x, y = normal(generator, 2, 7)
    w, v = normal(generator, 2, size)
    return x, y, w, v


@statement("linear-pair-spectrum", HOLDS)
def linear_pair_spectrum(effort: CheckEffort) -> Rows:
    """All eigenpairs of the two-layer linear model with scalar data

    f = ⟨w, v⟩x, w, v ∈ R^D, g = ℓ', h = ℓ'' in ⟨w, v⟩: g on (a; a), a ⊥ w+v, and −g on (a; −a),
    a ⊥ w−v, D−1 times each; two outliers ½[hz² ± √(h²z⁴ + 4g² + 8gh⟨w,v⟩)], z² = ‖w‖² + ‖v‖²
    Source: Singh, Ormaniec, Hofmann, Theorem 3.1 (its formula as we derive it) [cracking-thm-3.1]
    Assumptions: formulas for mean squared error, g = (2/n)Σ(⟨w,v⟩x−y)x, h = (2/n)Σx²
    Tested by: H times every eigenvector, and the outliers, against double backward, D = 2 to 6
    """
    for trial in effort.trials(8, 60):
        x, y, w, v = _draw_pair(effort, trial)
        h = _pair_hessian(x, y, w, v, relu=False)
        slopes = _pair_derivatives(x, y, float(w @ v), len(x))
        values, vectors = pair_eigenpairs(*slopes, w, v)
        yield vectors * values, h @ vectors
        yield vectors.T @ vectors, torch.eye(len(h), dtype=torch.float64)
        yield outlier_pair(*slopes, w, v), values[-2:]


@statement("relu-pair-spectrum", HOLDS)
def relu_pair_spectrum(effort: CheckEffort) -> Rows:
    """All eigenpairs of the two-layer ReLU model with scalar data

    f = Σ_k v_k ReLU(w_k x): units with w_k > 0 see the samples x > 0, the others x < 0; each group
    is a linear pair of its own with its own g, h, and H has no block between the groups
    Source: Singh, Ormaniec, Hofmann, Theorem 3.4 (its formula as we derive it) [cracking-thm-3.4]
    Assumptions: no w_k x zero; mean squared error over all n samples
    Tested by: H times every eigenvector of both groups against double backward, D = 2 to 6
    """
    for trial in effort.trials(8, 60):
        x, y, w, v = _draw_pair(effort, trial)
        h = _pair_hessian(x, y, w, v, relu=True)
        found = []
        for sign in (1.0, -1.0):
            units, seen = torch.nonzero(sign * w > 0)[:, 0], sign * x > 0
            if not len(units):
                continue
            product = float(w[units] @ v[units])
            slopes = _pair_derivatives(x[seen], y[seen], product, len(x))
            values, vectors = pair_eigenpairs(*slopes, w[units], v[units])
            padded = torch.zeros(len(h), len(values), dtype=torch.float64)
            padded[torch.cat([units, units + len(w)])] = vectors
            found.append((values, padded))
            yield padded * values, h @ padded
        values = torch.cat([values for values, _ in found])
        yield values.sort().values, torch.linalg.eigvalsh(h)


# ---- scalar attention ---------------------------------------------------------------------------


def draw_scalar(effort: CheckEffort, trial: int, d_k: int, *, batch: int = 2) -> ScalarAttention:
    generator = effort.generator(trial)
    x, query, key = (normal(generator, *shape) for shape in ((batch, 5), (d_k,), (d_k,)))
    value = float(normal(generator, 1))
    return ScalarAttention(x, query, key, value, normal(generator, batch, 5))


def hessians(model: ScalarAttention) -> tuple[Tensor, Tensor, Tensor]:
    """(H, H_o, H_f) over (w_Q, w_K, w_V) by double backward."""
    value = torch.tensor(model.value, dtype=torch.float64)
    params = [t.clone().requires_grad_(True) for t in (model.query, model.key, value)]
    z = model.output(*params)
    return reference.split_hessian(z, lambda f: (f - model.target).pow(2).mean(), params)


def _of_the_chain(model: ScalarAttention) -> Tensor:
    """H of the same model as an attention block of width one."""
    spec = BlockSpec(d_model=1, d_k=len(model.query), d_v=1, residual=False)
    value = torch.tensor([[model.value]], dtype=torch.float64)
    columns = {"query_weight": model.query.unsqueeze(1), "key_weight": model.key.unsqueeze(1)}
    weights = columns | {"value_weight": value}
    return block_hessian(spec, weights, model.x.unsqueeze(2), model.target.unsqueeze(2)).H


@statement("scalar-spectrum", HOLDS, plot=spectrum_figure)
def scalar_spectrum(effort: CheckEffort) -> Outcome:
    """d_k − 1 symmetric pairs of bulk eigenvalues and three outliers, in closed form

    bulk ±s ℓ_β (multiplicity d_k−1 each); outliers: eigenvalues of a 3×3 matrix in ℓ_VV, ℓ_β,
    ℓ_Vβ, ℓ_ββ, ‖w_Q±w_K‖
    Source: Singh, Ormaniec, Hofmann, Theorem 3.5; Ormaniec et al., slides [cracking-thm-3.5]
    Assumptions: f(x) = w_V A(x)x with scalar tokens; any batch; formulas for mean squared error
    Tested by: all eigenvalues for d_k = 1, 2, 5, 16 against double backward and the chain
    """
    errors = []
    computed: Tensor = torch.zeros(0)
    predicted = computed
    for trial in effort.trials(8, 80):
        model = draw_scalar(effort, trial, (1, 2, 5, 16)[trial % 4], batch=1 + trial % 3)
        predicted = model.spectrum().eigenvalues
        computed = torch.linalg.eigvalsh(hessians(model)[0])
        errors.append(relative_error(predicted, computed))
        errors.append(relative_error(predicted, torch.linalg.eigvalsh(_of_the_chain(model))))
    return outcome(
        f"largest relative error {worst(errors):.0e} in {len(errors)} comparisons",
        printed=worst(errors) < 1e-10,
        numbers={"error": worst(errors)},
        series={
            "computed": computed.tolist(),
            "predicted": predicted.tolist(),
            "title": "scalar attention, d_k = 16: 15 pairs ±g and three outliers",
        },
    )


@statement("scalar-condition-number", HOLDS, plot=lines_figure)
def scalar_condition(effort: CheckEffort) -> Outcome:
    """At fixed β the condition number grows like ‖w_Q‖² + ‖w_K‖²

    bulk ±sℓ_β unchanged, largest outlier ∝ z² = ‖w_Q‖² + ‖w_K‖²: κ = |λ|max/|g| ∝ z²
    Source: Singh, Ormaniec, Hofmann, §4.2: condition number against ‖w_Q‖, ‖w_K‖
        [cracking-sec-4.2]
    Assumptions: d_k ≥ 3, weights grown along directions that keep w_Qᵀw_K
    Tested by: log-log slope of |λ|max/|g| against z² for large z, from full spectra
    """
    model = draw_scalar(effort, 3, 6)
    basis = torch.linalg.qr(torch.stack([model.query, model.key], 1), mode="complete")[0]
    sizes, conditions, drift = [], [], []
    for t in logspace(3.0, 3000.0, 7):
        grown = replace(model, query=model.query + t * basis[:, 2], key=model.key + t * basis[:, 3])
        bulk = grown.spectrum().bulk
        values = torch.linalg.eigvalsh(hessians(grown)[0])
        sizes.append(float(grown.query @ grown.query + grown.key @ grown.key))
        conditions.append(float(values.abs().max()) / bulk)
        drift.append(abs(bulk / model.spectrum().bulk - 1.0))
    rate = slope(sizes[-4:], conditions[-4:])
    return outcome(
        f"slope of κ against z² {rate:.3f}; bulk drifts by {worst(drift):.0e}",
        printed=abs(rate - 1.0) < 0.05 and worst(drift) < 1e-6,
        numbers={"slope": rate, "bulk_drift": worst(drift)},
        series=log_log(
            sizes,
            {"|λ|max / |g|": conditions},
            "z² = ‖w_Q‖² + ‖w_K‖²  (β fixed)",
            "condition number",
        ),
    )


@statement("gauss-newton-blind-to-bulk", HOLDS)
def gauss_newton_blind(effort: CheckEffort) -> Outcome:
    """The Gauss-Newton matrix has rank two and does not see the bulk

    H_o has eigenvalues of [[ℓ_VV, s o_Vβ z],[s o_Vβ z, s² o_ββ z²]] and zeros; H_o v = 0 on the
    bulk eigenvectors of H
    Source: Singh, Ormaniec, Hofmann; Ormaniec et al., slides
    Tested by: eigenvalues of H_o, and ‖H_o v‖ on the bulk eigenvectors, d_k = 2, 5, 16
    """
    errors, leaks = [], []
    for trial in effort.trials(6, 60):
        model = draw_scalar(effort, trial, (2, 5, 16)[trial % 3])
        outer = hessians(model)[1]
        values = torch.linalg.eigvalsh(outer)
        expected = torch.zeros_like(values)
        expected[-2:] = model.spectrum().gauss_newton
        errors.append(relative_error(expected.sort().values, values))
        total = (model.query + model.key).unsqueeze(1)
        plus = torch.linalg.qr(total, mode="complete")[0][:, 1]
        vector = torch.cat([plus, plus, torch.zeros(1, dtype=torch.float64)]) / 2**0.5
        leaks.append(float((outer @ vector).norm() / outer.norm()))
    return outcome(
        f"eigenvalues to {worst(errors):.0e}; leak into the bulk {worst(leaks):.0e}",
        printed=worst(errors) < 1e-10 and worst(leaks) < 1e-12,
        numbers={"error": worst(errors), "leak": worst(leaks)},
    )


@statement("gauss-newton-top-eigenvalue", HOLDS, plot=lines_figure)
def gauss_newton_top(effort: CheckEffort) -> Outcome:
    """λmax(H_o) of attention grows faster with the data than that of an MLP of the same size

    scalar attention: slope of λmax in the input scale exceeds 2 before saturation; linear MLP
    f = w_2ᵀw_1 x: exactly 2
    Source: Singh, Ormaniec, Hofmann, §4.3: λmax of Gauss-Newton, attention against MLP
        [cracking-sec-4.3]
    Assumptions: scalar tokens; query and key norms of 10, so that the value direction does not hide
        them
    Tested by: largest local slope of λmax(H_o), t from 0.05 to 1, several models; the MLP beside
    """
    scales = logspace(0.05, 1.0, 12)
    steepest, mlp_slopes = [], []
    curves: dict[str, list[float]] = {}
    for trial in effort.trials(15, 60):
        base = draw_scalar(effort, trial, 4)
        query, key = (10.0 * w / w.norm() for w in (base.query, base.key))
        key = key - (key @ query) / 100.0 * query  # orthogonal: logits stay small, norms large
        attention, mlp = [], []
        for t in scales:
            model = replace(base, x=t * base.x, query=query, key=key)
            attention.append(float(model.spectrum().gauss_newton[-1]))
            # f = (w_2·w_1) x with 2 d_k + 1 ≈ as many weights: J = x [w_2, w_1]
            weight = float(query @ query + key @ key)
            mlp.append(2.0 / base.x.numel() * float((t * base.x).pow(2).sum()) * weight)
        steepest.append(max(slope(scales[i : i + 3], attention[i : i + 3]) for i in range(10)))
        mlp_slopes.append(slope(scales, mlp))
        curves = {"attention": attention, "linear MLP": mlp}
    middle = sorted(steepest)[len(steepest) // 2]
    return outcome(
        f"attention: steepest slope {min(steepest):.2f} to {max(steepest):.2f}; MLP"
        f" {mlp_slopes[0]:.2f}",
        printed=min(steepest) > 1.99 and middle > 3.0,
        numbers={"steepest": steepest, "mlp": mlp_slopes[0]},
        series=log_log(scales, curves, "input scale t", "λmax of Gauss-Newton"),
    )


_LEVELS = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0)


def _with_sink(base: ScalarAttention, level: float, kind: str) -> ScalarAttention:
    """ "bias": level added to the first token's logits; "outlier": its value made ±(1+level)."""
    if kind == "bias":
        return replace(base, sink=level)
    x = base.x.clone()
    x[:, 0] = torch.sign(x[:, 0]) * (1.0 + level)
    return replace(base, x=x)


def _medians(effort: CheckEffort, kind: str) -> tuple[list[float], list[float]]:
    """Median bulk |g| and median |g|/largest |eigenvalue| at every level, over random models."""
    models = [draw_scalar(effort, trial, 8) for trial in effort.trials(60, 600)]
    bulk, ratio = [], []
    for level in _LEVELS:
        spectra = [_with_sink(m, level, kind).spectrum() for m in models]
        bulk.append(sorted(s.bulk for s in spectra)[len(models) // 2])
        parts = sorted(s.bulk / float(s.values.abs().max()) for s in spectra)
        ratio.append(parts[len(models) // 2])
    return bulk, ratio


@statement("sinks-stretch-the-spectrum", HOLDS, plot=lines_figure)
def sinks_stretch(effort: CheckEffort) -> Outcome:
    """A sink or an outlier token stretches the spectrum: bulk over largest outlier falls

    |g|/|λ|max falls as the first token's logit bias (sink) or its activation (outlier) grows
    Source: Singh, Ormaniec, Hofmann, panel (c); Ormaniec et al., slides: attention sinks and
        outlier activations [cracking-panel-c]
    Assumptions: scalar model, medians over random models
    Tested by: both kinds of sink at six levels
    """
    curves = {kind: _medians(effort, kind)[1] for kind in ("bias", "outlier")}
    falls = {kind: values[-1] / values[0] for kind, values in curves.items()}
    return outcome(
        ", ".join(f"{kind}: median ratio {v[0]:.3g} → {v[-1]:.3g}" for kind, v in curves.items()),
        printed=all(f < 0.75 for f in falls.values()),
        numbers={"fall": falls},
        series={
            "x": list(_LEVELS),
            "curves": {f"sink by {k}": v for k, v in curves.items()},
            "yscale": "log",
            "xlabel": "strength of the sink",
            "ylabel": "median |bulk| / largest |outlier|",
        },
    )


@statement("sink-shrinks-the-bulk", CORRECTED)
def sink_shrinks(effort: CheckEffort) -> Outcome:
    """In absolute value the bulk shrinks only when the sink comes from a logit bias

    bias sink: |g| → 0; outlier token: |g| grows while |g|/|λ|max falls: state it as a ratio
    Source: Singh, Ormaniec, Hofmann, panel (c); Ormaniec et al., slides: 'a sink shrinks the
        bulk' [cracking-panel-c]
    Assumptions: scalar model, medians over random models
    Tested by: median |g| without a sink and with the strongest one, both kinds
    Counterexample: an outlier token of size 9 multiplies the median bulk by more than ten
    """
    medians = {kind: _medians(effort, kind) for kind in ("bias", "outlier")}
    absolute = {kind: bulk[-1] / bulk[0] for kind, (bulk, _) in medians.items()}
    relative = {kind: ratio[-1] / ratio[0] for kind, (_, ratio) in medians.items()}
    return outcome(
        f"median |g| changes by a factor {absolute['bias']:.2g} (bias),"
        f" {absolute['outlier']:.2g} (outlier); as a ratio {relative['outlier']:.2g}",
        printed=all(a < 1.0 for a in absolute.values()),
        corrected=absolute["bias"] < 1.0 and all(r < 1.0 for r in relative.values()),
        numbers={"absolute": absolute, "relative": relative},
    )


# ---- any block ----------------------------------------------------------------------------------


@statement("gamma-bulk", HOLDS)
def gamma_bulk(effort: CheckEffort) -> Outcome:
    """In any block the Hessian has eigenvalues ±σ_k(Γ), Γ = ∂ℓ/∂(W_QW_Kᵀ)

    a ⊥ rows of W_Q, W_K in R^{d_k}: (u_kaᵀ, ±v_kaᵀ) are eigenvectors with ±σ_k(Γ); per head;
    ∇_{W_Q} = ΓW_K, ∇_{W_K} = ΓᵀW_Q; H_o annihilates them
    Source: ours, generalises the scalar bulk
    Assumptions: d_k > rank[W_Q; W_K]; no query or key bias
    Tested by: attention and post-norm blocks, one and two heads, mse and cross-entropy
    """
    errors, gradients, leaks = [], [], []
    for trial in effort.trials(4, 24):
        generator = effort.generator(trial)
        heads, bare, d, d_k = 1 + trial % 2, trial % 4 < 2, 3, 8
        spec = BlockSpec(
            d_model=d, n_heads=heads, d_k=d_k, d_v=d if heads == 1 else 2,
            d_ff=None if bare else 4, residual=not bare,
        )  # fmt: skip
        weights = reference.tracked(reference.draw_weights(spec, generator))
        x, y = normal(generator, 2, 1, 4, d)
        kind = ("mse", "cross_entropy")[trial // 2 % 2]
        if kind == "cross_entropy":
            y = torch.randint(d, (1, 4), generator=generator)
        z, loss = reference.block_output(spec, weights, x), reference.loss_of(kind, y)
        h, outer, _ = reference.split_hessian(z, loss, list(weights.values()))
        g_q = torch.autograd.grad(loss(z), weights["query_weight"], retain_graph=True)[0]
        for head in range(heads):
            rows = slice(head * d_k, (head + 1) * d_k)
            w_q, w_k = (weights[f"{n}_weight"][rows].detach() for n in ("query", "key"))  # (d_k, d)
            # ∇_{W_Q} = ΓW_K in (in, out) layout: solve for Γ, W_K has full row rank d
            gamma = g_q[rows].T @ torch.linalg.pinv(w_k.T)
            gradients.append(relative_error((gamma @ w_k.T).T, g_q[rows]))
            free = torch.linalg.qr(torch.cat([w_q, w_k], 1), mode="complete")[0][:, 2 * d]
            u, s, vh = torch.linalg.svd(gamma)
            for k in range(d):
                for sign in (1.0, -1.0):
                    parts = torch.zeros(2, heads * d_k, d, dtype=torch.float64)  # of W_Q, of W_K
                    parts[0, rows] = torch.outer(free, u[:, k])
                    parts[1, rows] = sign * torch.outer(free, vh[k])
                    vector = torch.nn.functional.pad(parts.reshape(-1), (0, len(h) - parts.numel()))
                    errors.append(float((h @ vector - sign * s[k] * vector).norm() / h.norm()))
                    leaks.append(float((outer @ vector).norm() / outer.norm()))
    return outcome(
        f"{len(errors)} eigenvectors to {worst(errors):.0e} of ‖H‖; Gauss-Newton sees"
        f" {worst(leaks):.0e}",
        printed=worst([*errors, *leaks]) < 1e-11 and worst(gradients) < 1e-9,
        numbers={"error": worst(errors), "leak": worst(leaks), "eigenvectors": len(errors)},
    )
