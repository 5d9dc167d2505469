"""Screenshots of pages for README, gallery and "How to read the report".

curvatlas demo --output demo
curvatlas train vit --optimizer adamw --steps 120 --every 10 --samples 24 --maps --output train
curvatlas growth vit digits --samples 8 --output growth
python scripts/page_pictures.py demo train growth
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from curvatlas.report import write_report

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
_WIDTH, _HEIGHT = 1366, 768
_COLOURS = 160  # maps and a few curves need no more, and a file is a third as large
# in the order of the page's text: where each mark stands
_MARKS = ("h1", ".verdict", ".cards", "main > .pictures", "nav")
_MARGIN = 44


def browser() -> Any:
    """Chromium without a window."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    # a driver of the machine's own, if there is one: Selenium would look for one on the network
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


def first_screen(driver: Any, page: Path) -> Image.Image:
    """What a reader sees before scrolling."""
    size = {"width": _WIDTH, "height": _HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(page.resolve().as_uri())
    return Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")


def annotated(driver: Any, picture: Image.Image) -> Image.Image:
    """The screen with a numbered mark beside each of its parts."""
    tops = [
        driver.execute_script(
            "return document.querySelector(arguments[0]).getBoundingClientRect().top", mark
        )
        for mark in _MARKS
    ]
    wide = Image.new("RGB", (picture.width + _MARGIN, picture.height), "white")
    wide.paste(picture, (_MARGIN, 0))
    draw, font = ImageDraw.Draw(wide), ImageFont.load_default(22)
    for number, top in enumerate(tops, 1):
        x, y = _MARGIN // 2 + 14, top + 14
        draw.ellipse((x - 17, y - 17, x + 17, y + 17), fill="#d55e00")
        draw.text((x, y), str(number), fill="white", font=font, anchor="mm")
    return wide


def save(picture: Image.Image, name: str) -> None:
    path = FIGURES / name
    picture.quantize(_COLOURS).save(path, optimize=True)
    print(f"wrote {path} ({path.stat().st_size / 1000:.0f} kB)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=Path)
    parser.add_argument("others", type=Path, nargs="*")
    given = parser.parse_args()
    driver = browser()
    try:
        picture = first_screen(driver, write_report(given.demo))
        save(picture, "demo.png")
        save(annotated(driver, picture), "report-annotated.png")
        for run in given.others:
            save(first_screen(driver, write_report(run)), f"page-{run.name}.png")
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
