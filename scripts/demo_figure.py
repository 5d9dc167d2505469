"""Write docs/figures/demo.png: the overview that ``curvatlas demo`` draws of its own run.

python scripts/demo_figure.py          # runs the demo first (about a minute)
python scripts/demo_figure.py RUN      # of a demo that was run already
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from curvatlas import runs
from curvatlas.report.paper import write_figures

TARGET = Path(__file__).resolve().parent.parent / "docs" / "figures" / "demo.png"
_COLOURS = 128  # a heat map and two curves need no more, and the file is a third as large


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch) / "demo"
        if len(sys.argv) == 1:
            command = [sys.executable, "-m", "curvatlas.cli", "demo", "--output", str(run)]
            subprocess.run(command, check=True)
        picture, _ = write_figures(runs.load(run), Path(scratch), kinds=("overview",))
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        Image.open(picture).convert("RGB").quantize(_COLOURS).save(TARGET, optimize=True)
    print(f"wrote {TARGET} ({TARGET.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
