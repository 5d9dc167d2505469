"""Write scikit-learn's digits to src/curvatlas/zoo/data/digits.npz (see SOURCES.txt beside it).

python scripts/embed_digits.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TARGET = Path(__file__).parents[1] / "src/curvatlas/zoo/data/digits.npz"


def main() -> None:
    digits = load_digits()
    images = digits.images.astype(np.uint8)
    assert (images == digits.images).all(), "pixels are whole numbers 0..16"
    np.savez_compressed(TARGET, images=images, labels=digits.target.astype(np.uint8))
    print(f"{TARGET}: {images.shape}, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
