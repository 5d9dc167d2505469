"""What was analysed, warnings, other results, and how to reproduce the run."""

from __future__ import annotations

import shlex
from typing import Any

from curvatlas.report.contents import (
    Contents,
    Section,
    as_interval,
    as_number,
    quantity,
    stage_words,
    with_interval,
)
from curvatlas.report.markup import Markup, join, number, table, tag

_MOST_ROLES = 14


def subject(contents: Contents) -> Section | None:
    entries = contents.of_kind("Subject")
    if not entries:
        return None
    first = entries[0].content
    lead = tag(
        "p",
        tag("strong", first.get("name")),
        f" is a {first.get('model')} with ",
        tag("strong", f"{int(as_number(first.get('parameters')) or 0):,} parameters"),
        f", measured on {first.get('data')} in {first.get('dtype')} on {first.get('device')}.",
    )
    rows: list[list[object]] = [
        [stage_words(entry.stage) or "as given", *_numbers(entry.content)] for entry in entries
    ]
    losses = table(
        ["weights", str(first.get("loss_name") or "loss"), "gradient norm", "targets", "batches"],
        rows,
        caption="The loss at which curvature was measured",
    )
    basis = _basis(contents, entries[0].content)
    engine = first.get("engine")
    products = tag("p", f"How products with H were computed: {engine}.") if engine else None
    parts = join(lead, basis, products, losses, _roles(first))
    return Section("subject", "What was analysed", parts)


def _basis(contents: Contents, first: dict[str, Any]) -> Markup:
    """Which samples every number was measured on: said once, here."""
    targets = as_number(first.get("targets")) or 0.0
    flows = contents.of_kind("CurvatureFlow")
    fewer = [
        f"propagation on {entry.content.get('samples')} of them"
        for entry in flows[:1]
        if entry.content.get("amplification_interval") is None
    ]
    exception = f" (except {fewer[0]})" if fewer else ""
    if not contents.of_kind("Eigenpairs", "SpectralDensity", "Atlas"):
        words = f"Curvature is that of the mean loss over {targets:,.0f} targets of these data."
        return tag("p", words, class_="basis")
    why = f" {first['basis']}" if first.get("basis") else ""
    return tag(
        "p",
        f"Every number on this page is that of the mean loss over the same {first.get('data')} "
        f"({targets:,.0f} targets){exception}. Intervals in brackets are 95 % intervals of the "
        "measurement on these samples; how far other samples would move a number is said where it "
        f"was measured.{why}",
        class_="basis",
    )


def _numbers(content: dict[str, Any]) -> list[object]:
    keys = ("loss", "gradient_norm", "targets", "batches")
    return [number(as_number(content.get(key)) or 0.0, 4) for key in keys]


def _roles(content: dict[str, Any]) -> Markup | None:
    sizes: dict[str, int] = {}
    for entry in content.get("roles") or []:
        size = int(as_number(entry.get("parameters")) or 0)
        role = str(entry.get("role")).removesuffix("_bias")  # a bias counts with its weight
        sizes[role] = sizes.get(role, 0) + size
    total, largest = sum(sizes.values()), max(sizes.values(), default=0)
    if not total:
        return None
    rows: list[list[object]] = []
    for role, size in sorted(sizes.items(), key=lambda item: -item[1])[:_MOST_ROLES]:
        bar = tag("span", class_="share", style=f"width:{100 * size / largest:.1f}%")
        rows.append([role, f"{size:,}", f"{size / total:.1%}", bar])
    left_out = len(sizes) - len(rows)
    more = tag("p", f"and {left_out} smaller roles.") if left_out else None
    head: list[object] = ["role", "parameters", "share", ""]
    return join(table(head, rows, caption="Parameters by role, biases with their weights"), more)


_MISSED = 0.06  # above this the bound on an overlooked eigenvalue is worth a word

# classes that have a section of their own
_SHOWN = {
    "Subject",
    "Eigenpairs",
    "SpectralDensity",
    "TrainedWeights",
    "TrainingHistory",
    "Atlas",
    "Verification",
    "CurvatureFlow",
    "Advice",
    "CriticalLearningRate",
    "TrustRadius",
    "LandscapeConvergence",
    "RetrainedPoint",
    "RetrainedConvergence",
    "StudiedModel",
    "Generalisation",
    "PredictedTrajectory",
    "TaylorExpansion",
    "Flatness",
    "Sharpness",
    "RelativeFlatness",
    "PacBayes",
    "Invariance",
    "Pruning",
    "CostTable",
    "QuantizationTable",
    "BitAllocation",
}


def cautions(contents: Contents) -> Section | None:
    warnings = [str(warning) for warning in contents.manifest["warnings"]]
    status, error = contents.manifest["status"], contents.manifest["error"]
    if status != "complete":
        said = f" ({error})" if error else ""
        warnings.insert(0, f"This run is {status}{said}: what is missing was not computed.")
    failures = contents.manifest.get("failures") or {}
    warnings += [f"{name} failed: {reason}" for name, reason in failures.items()]
    for entry in contents.entries:
        if entry.content.get("converged") is False:
            warnings.append(_unfinished(entry.name, entry.content))
        missed = as_number(entry.content.get("missed_probability"))
        if missed is not None and missed > _MISSED:
            warnings.append(
                f"{entry.name}: the chance that an eigenvalue further out was overlooked is "
                f"bounded only by {missed:.0%}."
            )
    if not warnings:
        return None
    items = [tag("li", warning) for warning in warnings]
    return Section("warnings", "Warnings", tag("ul", items, class_="cautions"))


def _unfinished(name: str, content: dict[str, Any]) -> str:
    """What an estimate that spent its products is known to, where it says so."""
    value, interval = quantity(content)
    if content.get("quantity") == "trace" and value is not None and interval is not None:
        half = (interval[1] - interval[0]) / 2
        return (
            f"{name} is known to ± {number(half)} only: its products are spent (more with "
            "--products). Its interval holds."
        )
    return f"{name} did not converge within its budget."


def others(contents: Contents) -> Section | None:
    rows: list[list[object]] = []
    for entry in contents.entries:
        if entry.kind in _SHOWN or entry.content.get("quantity") == "trace":
            continue
        for key, value in entry.content.items():
            shown = _simple(key, value, entry.content)
            if shown is not None:
                rows.append([entry.name, key, shown])
    if not rows:
        return None
    return Section(
        "others",
        "Other results",
        table(["step", "field", "value"], rows, caption="Results without a picture"),
    )


def _simple(key: str, value: Any, content: dict[str, Any]) -> object | None:
    if key in ("kind", "interval") or isinstance(value, (dict, list)) or value is None:
        return None
    number = as_number(value)
    if number is not None and not isinstance(value, int):
        return with_interval(
            number, as_interval(content.get("interval")) if key == "value" else None
        )
    return value if isinstance(value, (bool, int)) else str(value)


def reproduction(contents: Contents) -> Section:
    manifest = contents.manifest
    command = shlex.join(manifest["command"]) if manifest["command"] else "(run from Python)"
    versions = {"curvatlas": manifest["version"], **manifest["environment"]}
    settings: dict[str, object] = {
        **{
            f"option {key}": "–" if value is None else str(value)
            for key, value in manifest["options"].items()
        },
        **versions,
        **{f"{key} fingerprint": value for key, value in manifest["fingerprints"].items() if value},
        "started": manifest["created"],
        "last written": manifest["updated"],
    }
    seconds: list[list[object]] = [
        [name, step["kind"], float(step["seconds"])] for name, step in manifest["steps"].items()
    ]
    return Section(
        "reproduce",
        "How to reproduce",
        join(
            tag("pre", tag("code", command), tabindex=0),
            tag("p", "The same command on the same machine gives the same numbers."),
            tag(
                "details",
                tag("summary", "Settings and versions"),
                table(["setting", "value"], [[key, value] for key, value in settings.items()]),
            ),
            tag(
                "details",
                tag("summary", "Steps and their time"),
                table(["step", "result", "seconds"], seconds),
            ),
        ),
    )
