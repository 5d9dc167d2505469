"""A command started by torchrun: its processes compute together, the first writes and prints."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

TOGETHER = ("analyze",)  # commands that share their work; the others run in one process


def several() -> bool:
    """Whether torchrun (or a launcher made of it) started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def begin(arguments: Sequence[str]) -> None:
    """Refuse what several processes cannot share; silence all but the first one.

    The others print no results, bars and warnings; their errors are still said.
    """
    if not several():
        return
    command = next((word for word in arguments if not word.startswith("-")), None)
    if command is not None and command not in TOGETHER:
        raise ValueError(
            f"{command} runs in one process: start it without torchrun (only "
            f"{', '.join(TOGETHER)} shares its work)."
        )
    if os.environ.get("RANK") != "0":
        # for the rest of the process
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        warnings.simplefilter("ignore")


def join(device: str) -> str:
    """Join the group that torchrun has prepared, if any; gives the device of this process."""
    if not several():
        return device
    import torch
    import torch.distributed as dist

    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    return device


def leave() -> None:
    """Leave the group that ``join`` has joined."""
    if several() and "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
