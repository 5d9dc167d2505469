"""The kept results: one JSON file a benchmark, written whole or not at all."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.machine import facts

RESULTS = Path(__file__).resolve().parent.parent / "results"


def requirement(name: str, measured: float | None, limit: float) -> dict[str, Any]:
    """A line of the contract: what was measured against the most it may be."""
    met = None if measured is None else measured <= limit
    return {"name": name, "measured": measured, "limit": limit, "met": met}


def keep(name: str, content: dict[str, Any], *, folder: Path = RESULTS) -> Path:
    """Write ``content`` with the machine's facts to results/<name>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    whole = {"benchmark": name, "date": day, "machine": facts(), **content}
    path = folder / f"{name}.json"
    draft = path.with_suffix(".json.part")
    draft.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(draft, path)
    return path
