"""``curvatlas doctor``: what this machine has, and whether second derivatives come out right."""

from __future__ import annotations

from typing import Any

import typer

from curvatlas.commands.options import AsJson, Debug, Quiet, Verbose


def doctor(
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Print versions, kernels and guards, and test second derivatives through LayerNorm."""
    from curvatlas.commands.checkup import checkup
    from curvatlas.commands.console import Console

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    findings = checkup()
    console.answer(findings, _table(findings))
    if not findings["healthy"]:
        raise typer.Exit(1)


def _table(findings: dict[str, Any]) -> str:
    lines = []
    for title, content in findings.items():
        if not isinstance(content, dict):
            continue
        lines.append(title)
        width = max(len(key) for key in content)
        lines += [f"  {key:<{width}}  {value}" for key, value in content.items()]
    verdict = "everything is in order" if findings["healthy"] else "NOT in order, see above"
    return "\n".join([*lines, verdict])
