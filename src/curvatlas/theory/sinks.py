"""Attention sinks and outlier tokens: what they do to the spectrum of the scalar model."""

from __future__ import annotations

import torch

from curvatlas.theory.figures import lines_figure
from curvatlas.theory.scalar_attention import ScalarModel, draw_scalar
from curvatlas.theory.statements import CORRECTED, HOLDS, Effort, Outcome, judge, statement

_DERIVATION = "docs/theory/derivations.md#spectra"
_LEVELS = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0)


def _with_sink(base: ScalarModel, level: float, kind: str) -> ScalarModel:
    """ "bias": level added to the first token's logits; "outlier": its value made ±(1+level)."""
    if kind == "bias":
        return ScalarModel(base.x, base.query, base.key, base.value, base.target, bias=level)
    x = base.x.clone()
    x[:, 0] = torch.sign(x[:, 0]) * (1.0 + level)
    return ScalarModel(x, base.query, base.key, base.value, base.target)


def _medians(effort: Effort, kind: str) -> tuple[list[float], list[float]]:
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


@statement(
    name="sinks-stretch-the-spectrum",
    source="Ormaniec et al., attention sinks and outlier activations",
    title="A sink or an outlier token stretches the spectrum: bulk over largest outlier falls",
    formula="|g|/|λ|max falls as the first token's logit bias (sink) or its activation (outlier) "
    "grows",
    assumptions="scalar model, medians over random models",
    tested_by="both kinds of sink at six levels",
    verdict=HOLDS,
    derivation=_DERIVATION,
    plot=lines_figure,
)
def sinks_stretch(effort: Effort) -> Outcome:
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


@statement(
    name="sink-shrinks-the-bulk",
    source="Ormaniec et al., 'a sink shrinks the bulk'",
    title="In absolute value the bulk shrinks only when the sink comes from a logit bias",
    formula="bias sink: |g| → 0; outlier token: |g| grows while |g|/|λ|max falls: state it as a "
    "ratio",
    assumptions="scalar model, medians over random models",
    tested_by="median |g| without a sink and with the strongest one, both kinds",
    verdict=CORRECTED,
    counterexample="an outlier token of size 9 multiplies the median bulk by more than ten",
    derivation=_DERIVATION,
)
def sink_shrinks(effort: Effort) -> Outcome:
    found = {kind: _medians(effort, kind) for kind in ("bias", "outlier")}
    absolute = {kind: bulk[-1] / bulk[0] for kind, (bulk, _) in found.items()}
    relative = {kind: ratio[-1] / ratio[0] for kind, (_, ratio) in found.items()}
    return Outcome(
        verdict=judge(
            printed=all(a < 1.0 for a in absolute.values()),
            corrected=absolute["bias"] < 1.0 and all(r < 1.0 for r in relative.values()),
        ),
        figure=f"median |g| changes by a factor {absolute['bias']:.2g} (bias),"
        f" {absolute['outlier']:.2g} (outlier); as a ratio {relative['outlier']:.2g}",
        numbers={"absolute": absolute, "relative": relative},
    )
