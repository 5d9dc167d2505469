"""The scalar attention model, its spectrum in closed form, and the general ±σ(Γ) bulk."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.figures.theory import lines_figure, spectrum_figure
from curvatlas.layers.structure import BlockSpec
from curvatlas.theory import reference
from curvatlas.theory.checks.growth import logspace, slope
from curvatlas.theory.reference import normal
from curvatlas.theory.statements import CheckEffort, Outcome, check, judge, log_log, worst


@dataclass(frozen=True)
class ScalarModel:
    """f(x) = w_V A(x) x, A = softmax(β x xᵀ + bias), β = w_Qᵀw_K/√d_k; x, target (n, L)."""

    x: Tensor
    query: Tensor  # (d_k,)
    key: Tensor  # (d_k,)
    value: float
    target: Tensor
    bias: float = 0.0  # added to every logit of the first token: an attention sink

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(len(self.query))

    def output(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = self.scale * (query @ key) * self.x.unsqueeze(2) * self.x.unsqueeze(1)
        sink = torch.zeros_like(self.x)
        sink[:, 0] = self.bias
        return value * (torch.softmax(logits + sink.unsqueeze(1), -1) @ self.x.unsqueeze(2))[..., 0]

    def hessians(self) -> tuple[Tensor, Tensor, Tensor]:
        """(H, H_o, H_f) over (w_Q, w_K, w_V) by double backward."""
        params = [
            self.query.clone().requires_grad_(True),
            self.key.clone().requires_grad_(True),
            torch.tensor(self.value, dtype=torch.float64, requires_grad=True),
        ]
        z = self.output(*params)
        return reference.split_hessian(z, lambda v: (v - self.target).pow(2).mean(), params)

    def derivatives(self) -> dict[str, float]:
        """ℓ_VV, ℓ_β, ℓ_Vβ, ℓ_ββ and their outer-product parts, from row moments."""
        logits = self.scale * (self.query @ self.key) * self.x.unsqueeze(2) * self.x.unsqueeze(1)
        sink = torch.zeros_like(self.x)
        sink[:, 0] = self.bias
        a = torch.softmax(logits + sink.unsqueeze(1), -1)
        mean = (a @ self.x.unsqueeze(2))[..., 0]
        centred = self.x.unsqueeze(1) - mean.unsqueeze(2)  # (n, i, j)
        variance, third = (a * centred**2).sum(2), (a * centred**3).sum(2)
        residual = self.value * mean - self.target
        w, x, c = self.value, self.x, 2.0 / self.x.numel()
        return {
            "vv": float(c * (mean**2).sum()),
            "b": float(c * (residual * w * x * variance).sum()),
            "vb": float(c * ((w * mean + residual) * x * variance).sum()),
            "bb": float(c * (w**2 * x**2 * variance**2 + residual * w * x**2 * third).sum()),
            "outer_vb": float(c * (w * mean * x * variance).sum()),
            "outer_bb": float(c * (w**2 * x**2 * variance**2).sum()),
        }

    def bulk(self) -> float:
        """g = s ℓ_β: the bulk sits at ±|g|."""
        return self.scale * self.derivatives()["b"]

    def spectrum(self) -> Tensor:
        """All 2 d_k + 1 eigenvalues in closed form, ascending (derivations §16)."""
        d, s = self.derivatives(), self.scale
        g, c, h = s * d["b"], s * d["vb"], s**2 * d["bb"]
        alpha = float((self.query + self.key).norm()) / 2**0.5
        delta = float((self.query - self.key).norm()) / 2**0.5
        core = torch.tensor(
            [
                [d["vv"], c * alpha, c * delta],
                [c * alpha, g + h * alpha**2, h * alpha * delta],
                [c * delta, h * alpha * delta, -g + h * delta**2],
            ],
            dtype=torch.float64,
        )
        pairs = torch.full((len(self.query) - 1,), g, dtype=torch.float64)
        return torch.cat([torch.linalg.eigvalsh(core), pairs, -pairs]).sort().values

    def outer_spectrum(self) -> Tensor:
        """The two non-zero eigenvalues of the Gauss-Newton matrix."""
        d, s = self.derivatives(), self.scale
        z = float((self.query @ self.query + self.key @ self.key).sqrt())
        core = [
            [d["vv"], s * d["outer_vb"] * z],
            [s * d["outer_vb"] * z, s**2 * d["outer_bb"] * z**2],
        ]
        values: Tensor = torch.linalg.eigvalsh(torch.tensor(core, dtype=torch.float64))
        return values


def draw_scalar(effort: CheckEffort, trial: int, d_k: int, *, batch: int = 2) -> ScalarModel:
    generator = effort.generator(trial)

    x, query, key = (normal(generator, *shape) for shape in ((batch, 5), (d_k,), (d_k,)))
    value = float(normal(generator, 1))
    return ScalarModel(x, query, key, value, normal(generator, batch, 5))


@check("scalar-spectrum", plot=spectrum_figure)
def scalar_spectrum(effort: CheckEffort) -> Outcome:
    errors = []
    model = draw_scalar(effort, 0, 16)
    computed = predicted = model.spectrum()
    for trial in range(effort.trials(8, 80)):
        model = draw_scalar(effort, trial, (1, 2, 5, 16)[trial % 4], batch=1 + trial % 3)
        computed = torch.linalg.eigvalsh(model.hessians()[0])
        predicted = model.spectrum()
        errors.append(reference.relative_error(predicted, computed))
    return Outcome(
        verdict=judge(printed=worst(errors) < 1e-10),
        figure=f"largest relative error {worst(errors):.0e} over {len(errors)} models",
        numbers={"error": worst(errors)},
        series={
            "computed": computed.tolist(),
            "predicted": predicted.tolist(),
            "title": "scalar attention, d_k = 16: 15 pairs ±g and three outliers",
        },
    )


@check("scalar-condition-number", plot=lines_figure)
def scalar_condition(effort: CheckEffort) -> Outcome:
    model = draw_scalar(effort, 3, 6)
    basis = torch.linalg.qr(torch.stack([model.query, model.key], 1), mode="complete")[0]
    out, across = basis[:, 2], basis[:, 3]
    sizes, conditions, drift = [], [], []
    for t in logspace(3.0, 3000.0, 7):
        grown = ScalarModel(
            model.x, model.query + t * out, model.key + t * across, model.value, model.target
        )
        values = torch.linalg.eigvalsh(grown.hessians()[0])
        sizes.append(float(grown.query @ grown.query + grown.key @ grown.key))
        conditions.append(float(values.abs().max()) / abs(grown.bulk()))
        drift.append(abs(grown.bulk() / model.bulk() - 1.0))
    rate = slope(sizes[-4:], conditions[-4:])
    return Outcome(
        verdict=judge(printed=abs(rate - 1.0) < 0.05 and worst(drift) < 1e-6),
        figure=f"slope of κ against z² {rate:.3f}; bulk drifts by {worst(drift):.0e}",
        numbers={"slope": rate, "bulk_drift": worst(drift)},
        series=log_log(
            sizes,
            {"|λ|max / |g|": conditions},
            "z² = ‖w_Q‖² + ‖w_K‖²  (β fixed)",
            "condition number",
        ),
    )


@check("gauss-newton-blind-to-bulk")
def gauss_newton_blind(effort: CheckEffort) -> Outcome:
    errors, leaks = [], []
    for trial in range(effort.trials(6, 60)):
        model = draw_scalar(effort, trial, (2, 5, 16)[trial % 3])
        _, outer, _ = model.hessians()
        values = torch.linalg.eigvalsh(outer)
        expected = torch.zeros_like(values)
        expected[-2:] = model.outer_spectrum()
        errors.append(reference.relative_error(expected.sort().values, values))
        total = model.query + model.key
        plus = torch.linalg.qr(total.unsqueeze(1), mode="complete")[0][:, 1]
        vector = torch.cat([plus, plus, torch.zeros(1, dtype=torch.float64)]) / 2**0.5
        leaks.append(float((outer @ vector).norm() / outer.norm()))
    return Outcome(
        verdict=judge(printed=worst(errors) < 1e-10 and worst(leaks) < 1e-12),
        figure=f"eigenvalues to {worst(errors):.0e}; leak into the bulk {worst(leaks):.0e}",
        numbers={"error": worst(errors), "leak": worst(leaks)},
    )


@check("gauss-newton-top-eigenvalue", plot=lines_figure)
def gauss_newton_top(effort: CheckEffort) -> Outcome:
    scales = logspace(0.05, 1.0, 12)
    steepest, mlp_slopes = [], []
    curves: dict[str, list[float]] = {}
    for trial in range(effort.trials(15, 60)):
        base = draw_scalar(effort, trial, 4)
        query, key = (10.0 * w / w.norm() for w in (base.query, base.key))
        key = key - (key @ query) / 100.0 * query  # orthogonal: logits stay small, norms large
        attention, mlp = [], []
        for t in scales:
            model = ScalarModel(t * base.x, query, key, base.value, base.target)
            attention.append(float(model.outer_spectrum()[-1]))
            # f = (w_2·w_1) x with 2 d_k + 1 ≈ as many weights: J = x [w_2, w_1]
            weight = float(query @ query + key @ key)
            mlp.append(2.0 / base.x.numel() * float((t * base.x).pow(2).sum()) * weight)
        steepest.append(max(slope(scales[i : i + 3], attention[i : i + 3]) for i in range(10)))
        mlp_slopes.append(slope(scales, mlp))
        curves = {"attention": attention, "linear MLP": mlp}
    middle = sorted(steepest)[len(steepest) // 2]
    return Outcome(
        verdict=judge(printed=min(steepest) > 1.99 and middle > 3.0),
        figure=f"attention: steepest slope {min(steepest):.2f} to {max(steepest):.2f}; MLP"
        f" {mlp_slopes[0]:.2f}",
        numbers={"steepest": steepest, "mlp": mlp_slopes[0]},
        series=log_log(scales, curves, "input scale t", "λmax of Gauss-Newton"),
    )


@check("gamma-bulk")
def gamma_bulk(effort: CheckEffort) -> Outcome:
    errors, gradients, leaks = [], [], []
    for trial in range(effort.trials(4, 24)):
        generator = effort.generator(trial)
        heads, bare = 1 + trial % 2, trial % 4 < 2
        d, d_k = 3, 8
        spec = BlockSpec(
            d_model=d,
            n_heads=heads,
            d_k=d_k,
            d_v=d if heads == 1 else 2,
            d_ff=None if bare else 4,
            residual=not bare,
        )
        plain = reference.draw_weights(spec, generator)
        weights = reference.tracked(plain)
        x = normal(generator, 1, 4, d)
        kind = ("mse", "cross_entropy")[trial // 2 % 2]
        y = normal(generator, 1, 4, d)
        if kind == "cross_entropy":
            y = torch.randint(d, (1, 4), generator=generator)
        z = reference.block_output(spec, weights, x)
        loss = reference.loss_of(kind, y)
        h, outer, _ = reference.split_hessian(z, loss, list(weights.values()))
        g_q = torch.autograd.grad(loss(z), weights["query_weight"], retain_graph=True)[0]
        for head in range(heads):
            rows = slice(head * d_k, (head + 1) * d_k)
            w_q, w_k = plain["query_weight"][rows], plain["key_weight"][rows]  # (d_k, d)
            # ∇_{W_Q} = ΓW_K in (in, out) layout: solve for Γ, W_K has full row rank d
            gamma = g_q[rows].T @ torch.linalg.pinv(w_k.T)
            gradients.append(reference.relative_error((gamma @ w_k.T).T, g_q[rows]))
            free = torch.linalg.qr(torch.cat([w_q, w_k], 1), mode="complete")[0][:, 2 * d]
            u, s, vh = torch.linalg.svd(gamma)
            size = plain["query_weight"].numel()
            for k in range(d):
                for sign in (1.0, -1.0):
                    vector = torch.zeros(len(h), dtype=torch.float64)
                    q_part = torch.zeros_like(plain["query_weight"])
                    k_part = torch.zeros_like(plain["key_weight"])
                    q_part[rows] = torch.outer(free, u[:, k])
                    k_part[rows] = sign * torch.outer(free, vh[k])
                    vector[:size] = q_part.reshape(-1)
                    vector[size : 2 * size] = k_part.reshape(-1)
                    expected = sign * s[k] * vector
                    errors.append(float((h @ vector - expected).norm() / h.norm()))
                    leaks.append(float((outer @ vector).norm() / outer.norm()))
    return Outcome(
        verdict=judge(printed=worst([*errors, *leaks]) < 1e-11 and worst(gradients) < 1e-9),
        figure=f"{len(errors)} eigenvectors to {worst(errors):.0e} of ‖H‖; Gauss-Newton sees"
        f" {worst(leaks):.0e}",
        numbers={"error": worst(errors), "leak": worst(leaks), "eigenvectors": len(errors)},
    )


_LEVELS = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0)


def _with_sink(base: ScalarModel, level: float, kind: str) -> ScalarModel:
    """ "bias": level added to the first token's logits; "outlier": its value made ±(1+level)."""
    if kind == "bias":
        return ScalarModel(base.x, base.query, base.key, base.value, base.target, bias=level)
    x = base.x.clone()
    x[:, 0] = torch.sign(x[:, 0]) * (1.0 + level)
    return ScalarModel(x, base.query, base.key, base.value, base.target)


def _medians(effort: CheckEffort, kind: str) -> tuple[list[float], list[float]]:
    """Median bulk |g| and median |g|/largest outlier at every level, over random models."""
    count = effort.trials(60, 600)
    bulk, ratio = [], []
    for level in _LEVELS:
        models = [_with_sink(draw_scalar(effort, t, 8), level, kind) for t in range(count)]
        sizes = [abs(m.bulk()) for m in models]
        parts = [s / float(m.spectrum().abs().max()) for s, m in zip(sizes, models, strict=True)]
        bulk.append(sorted(sizes)[count // 2])
        ratio.append(sorted(parts)[count // 2])
    return bulk, ratio


@check("sinks-stretch-the-spectrum", plot=lines_figure)
def sinks_stretch(effort: CheckEffort) -> Outcome:
    curves = {kind: _medians(effort, kind)[1] for kind in ("bias", "outlier")}
    falls = {kind: values[-1] / values[0] for kind, values in curves.items()}
    return Outcome(
        verdict=judge(printed=all(f < 0.75 for f in falls.values())),
        figure=", ".join(
            f"{kind}: median ratio {v[0]:.3g} → {v[-1]:.3g}" for kind, v in curves.items()
        ),
        numbers={"fall": falls},
        series={
            "x": list(_LEVELS),
            "curves": {f"sink by {k}": v for k, v in curves.items()},
            "yscale": "log",
            "xlabel": "strength of the sink",
            "ylabel": "median |bulk| / largest |outlier|",
        },
    )


@check("sink-shrinks-the-bulk")
def sink_shrinks(effort: CheckEffort) -> Outcome:
    medians = {kind: _medians(effort, kind) for kind in ("bias", "outlier")}
    absolute = {kind: bulk[-1] / bulk[0] for kind, (bulk, _) in medians.items()}
    relative = {kind: ratio[-1] / ratio[0] for kind, (_, ratio) in medians.items()}
    return Outcome(
        verdict=judge(
            printed=all(a < 1.0 for a in absolute.values()),
            corrected=absolute["bias"] < 1.0 and all(r < 1.0 for r in relative.values()),
        ),
        figure=f"median |g| changes by a factor {absolute['bias']:.2g} (bias),"
        f" {absolute['outlier']:.2g} (outlier); as a ratio {relative['outlier']:.2g}",
        numbers={"absolute": absolute, "relative": relative},
    )
