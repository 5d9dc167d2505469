"""Draw docs/figures/report-annotated.png: the top of a run's page with numbered marks.

curvatlas demo --output demo && python scripts/report_picture.py demo
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "docs" / "figures" / "report-annotated.png"
_WIDTH, _HEIGHT = 1000, 1500
# in the order of the page's text: where each mark stands
_MARKS = (
    "//p[contains(., 'measured on')]",
    "//table[.//*[contains(., 'after training')]]",
    "//li[contains(., 'sharpest direction')]",
    "//nav",
)


def screenshot(page: Path, path: Path) -> list[tuple[float, float]]:
    """A picture of the page's top; returns the left upper corner of every marked element."""
    from selenium import webdriver
    from selenium.webdriver.common.by import By

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", f"--window-size={_WIDTH},{_HEIGHT}"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options)
    try:
        browser.get(page.resolve().as_uri())
        browser.save_screenshot(str(path))
        rectangles = [browser.find_element(By.XPATH, mark).rect for mark in _MARKS]
    finally:
        browser.quit()
    return [(r["x"], r["y"] + min(r["height"], 24) / 2) for r in rectangles]


def main() -> None:
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    page = parser.parse_args().run / "report.html"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.png"
        corners = screenshot(page, path)
        picture: Any = imread(path)
    margin = 46
    figure = Figure(figsize=((_WIDTH + margin) / 100, len(picture) / 100), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(picture, extent=(0, picture.shape[1], len(picture), 0))
    axes.set(xlim=(-margin, picture.shape[1]), ylim=(len(picture), 0))
    axes.axis("off")
    for number, (x, y) in enumerate(corners, 1):
        axes.text(
            min(x, 40) - margin / 2 - 8,
            y,
            str(number),
            color="white",
            fontsize=14,
            weight="bold",
            ha="center",
            va="center",
            bbox={"boxstyle": "circle,pad=0.3", "facecolor": "#d55e00", "edgecolor": "none"},
        )
    figure.savefig(TARGET, dpi=80)
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
