"""Make the benchmarks' own environment: curvatlas and its peers beside one torch.

    python benchmarks/peers.py [--environment .venv-bench]

A peer that cannot be installed is named and left out: the benchmarks then run without it. The peers
are installed without their dependencies, and what they really import is added by name, because
curvlinops would otherwise pull torchvision (through BackPACK), whose build for CUDA breaks every
Hugging Face import beside a CPU torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Peer:
    """A library to compare with: what to install without dependencies, and what it needs."""

    name: str
    module: str
    bare: tuple[str, ...]
    needs: tuple[str, ...] = ()


PEERS = (
    Peer(
        "curvlinops",
        "curvlinops",
        ("curvlinops-for-pytorch==3.0.1", "backpack-for-pytorch==1.7.1", "einconv==0.1.0",
         "unfoldNd<1", "linear-operator>=0.2"),
        ("einops>=0.3,<1", "opt-einsum>=3.4", "jaxtyping>=0.2.9", "mpmath"),
    ),
    Peer("hessian-eigenthings", "hessian_eigenthings", ("hessian-eigenthings==1.0.0a5",)),
    Peer("pyhessian", "pyhessian", ("pyhessian==0.1",)),
    Peer("pytorch-optimizer", "pytorch_optimizer", ("pytorch_optimizer==4.1.0",)),
)  # fmt: skip
OURS = ("numpy>=1.26", "scipy>=1.11", "safetensors>=0.4", "tqdm>=4.66", "typer>=0.12",
        "lazy_loader>=0.4", "transformers>=4.45", "scikit-learn>=1.4", "psutil")  # fmt: skip
UNWANTED = ("torchvision", "torchaudio")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-bench")
    parser.add_argument("--force", action="store_true", help="install again even if up to date")
    options = parser.parse_args(argv)
    stamp = options.environment / "peers.json"
    wanted = _fingerprint()
    if not options.force and stamp.exists():
        known = json.loads(stamp.read_text(encoding="utf-8"))
        if known["fingerprint"] == wanted:
            print(f"peers: up to date ({', '.join(known['installed']) or 'none installed'})")
            return 0
    missing = build(options.environment)
    installed = [peer.name for peer in PEERS if peer.name not in missing]
    stamp.write_text(
        json.dumps({"fingerprint": wanted, "installed": installed, "missing": missing}, indent=1),
        encoding="utf-8",
    )
    print(f"peers: {', '.join(installed) or 'none'} ready in {options.environment.name}")
    for name, why in missing.items():
        print(f"peers: WITHOUT {name}: {why}", file=sys.stderr)
    return 0


def build(environment: Path) -> dict[str, str]:
    """Create the environment; returns the peers that are missing, each with the reason."""
    python = environment / "bin" / "python"
    if not python.exists():
        print(f"peers: creating {environment.name}")
        venv.EnvBuilder(with_pip=True, clear=environment.exists()).create(environment)
    print("peers: torch and what curvatlas needs (a minute or two the first time)")
    _require(python, ["torch"])
    _require(python, list(OURS))
    _require(python, ["--no-deps", "--editable", str(ROOT)])
    missing: dict[str, str] = {}
    for peer in PEERS:
        print(f"peers: {peer.name}")
        why = _install(python, ["--no-deps", *peer.bare])
        why = why or (_install(python, list(peer.needs)) if peer.needs else "")
        why = why or _run([str(python), "-c", f"import {peer.module}"])
        if why:
            missing[peer.name] = why
    for name in UNWANTED:
        if not _run([str(python), "-c", f"import importlib.metadata as m; m.version('{name}')"]):
            missing[f"(a clean environment: {name} was pulled in)"] = (
                "remove it from a peer's needs"
            )
    return missing


def _require(python: Path, arguments: list[str]) -> None:
    why = _install(python, arguments)
    if why:
        raise SystemExit(f"peers: cannot install {' '.join(arguments)}: {why}")


def _install(python: Path, arguments: list[str]) -> str:
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    return _run([str(python), "-m", "pip", "install", "--quiet", *constraints, *arguments])


def _run(command: list[str]) -> str:
    """ "" when the command succeeds, else the line of its output that says why not."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or [f"exit code {done.returncode}"])[-1]


def _fingerprint() -> str:
    text = repr((PEERS, OURS)) + (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
