"""The commands, one a file; each imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from curvatlas.commands.analyze import analyze
from curvatlas.commands.atlas import atlas
from curvatlas.commands.bench import bench
from curvatlas.commands.check import check
from curvatlas.commands.demo import demo
from curvatlas.commands.doctor import doctor
from curvatlas.commands.landscape import landscape
from curvatlas.commands.report import report
from curvatlas.commands.scaling import scaling
from curvatlas.commands.train import train
from curvatlas.commands.verify import verify

# in the order a newcomer meets them
COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": demo,
    "analyze": analyze,
    "atlas": atlas,
    "landscape": landscape,
    "scaling": scaling,
    "train": train,
    "verify": verify,
    "report": report,
    "check": check,
    "bench": bench,
    "doctor": doctor,
}
