"""What commands print: results on stdout, everything else on stderr, JSON when asked."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from curvatlas.progress import set_progress


@dataclass(frozen=True, kw_only=True)
class Console:
    """How talkative a command is. With ``as_json`` only one JSON document goes to stdout."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ValueError("--quiet and --verbose exclude each other: give one of them.")
        set_progress(not self.quiet)

    def say(self, text: object) -> None:
        """What a person wants to see."""
        if not self.quiet and not self.as_json:
            print(text, flush=True)

    def detail(self, text: object) -> None:
        """What only a curious person wants to see."""
        if self.verbose:
            print(text, file=sys.stderr, flush=True)

    def answer(self, value: Any, text: object) -> None:
        """What the command is for: JSON when asked, else the text, also when quiet."""
        if self.as_json:
            print(json.dumps(value, indent=1, default=str), flush=True)
        else:
            print(text, flush=True)
