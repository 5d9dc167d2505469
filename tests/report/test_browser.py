"""The demo's page in a real browser: Debian's chromium, headless, driven by Selenium.

Needs ``apt-get install chromium chromium-driver`` and ``pip install selenium``; skipped without.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from curvatlas import runs
from curvatlas.report import write_report
from report_samples import write_sample_run
from result_samples import sample

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        _CHROMIUM is None or _DRIVER is None, reason="chromium or chromedriver is not installed"
    ),
]

HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"alert(1)\">"
WIDTH, HEIGHT = 1366, 768
KINDS = ("CurvatureHistory", "CriticalLearningRate", "Growth", "Sinks", "Flatness", "ScalingGrid",
         "Pruning", "QuantizationTable")  # fmt: skip
_QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = _CHROMIUM
    for argument in _QUIET:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(_DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(small_demo: Path) -> Path:
    """The page of the demo, of few samples and steps."""
    return small_demo / "report.html"


def _open(
    browser: Any, page: Path, *, width: int = WIDTH, dark: bool = False, media: str = ""
) -> None:
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})
    for log in ("browser", "performance"):
        browser.get_log(log)  # forget what an earlier page said
    browser.get(page.as_uri())


def _bottom(browser: Any, selector: str) -> float:
    script = """return Math.max(...[...document.querySelectorAll(arguments[0])]
      .map(node => node.getBoundingClientRect().bottom));"""
    return float(browser.execute_script(script, selector))


def _words_outside_folds(browser: Any) -> int:
    script = """
      const copy = document.body.cloneNode(true);
      copy.querySelectorAll('details > :not(summary), title, style').forEach(n => n.remove());
      const words = [];
      const walk = document.createTreeWalker(copy, NodeFilter.SHOW_TEXT);
      while (walk.nextNode()) words.push(...walk.currentNode.data.split(/\\s+/).filter(Boolean));
      return words.length;"""
    return int(browser.execute_script(script))


def test_the_first_screen_holds_verdict_cards_and_pictures(browser: Any, page: Path) -> None:
    _open(browser, page)
    assert browser.execute_script("return document.querySelectorAll('.card').length") in (3, 4, 5)
    for selector in (".verdict", ".card", "main > .pictures svg"):
        assert 0 < _bottom(browser, selector) <= HEIGHT, selector
    shown = browser.execute_script("""
      return [...document.querySelectorAll('main > .pictures svg')]
        .map(svg => svg.getBoundingClientRect()).map(box => [box.width, box.height]);""")
    assert len(shown) == 3
    assert all(width > 300 and height > 200 for width, height in shown)


def test_the_page_is_short_and_light(browser: Any, page: Path) -> None:
    _open(browser, page)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    assert height <= 5 * HEIGHT
    assert 300 < _words_outside_folds(browser) <= 1800
    assert page.stat().st_size <= 400_000


@pytest.mark.draws
def test_the_page_of_a_large_model_is_eight_screens_at_most(browser: Any, large_page: Path) -> None:
    _open(browser, large_page)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    assert height <= 8 * HEIGHT


@pytest.mark.draws
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_has_such_a_first_screen(browser: Any, tmp_path: Path, kind: str) -> None:
    with runs.Run.create(tmp_path / "run", options={}) as run:
        run.step("found", lambda: sample(kind))
    page = write_report(tmp_path / "run")
    _open(browser, page)
    for selector in (".verdict", ".card", "main > .pictures svg"):
        assert 0 < _bottom(browser, selector) <= HEIGHT, selector
    assert "could not be drawn" not in page.read_text("utf-8")
    _open(browser, page, width=390)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


def test_nothing_is_requested_and_nothing_is_complained_about(browser: Any, page: Path) -> None:
    _open(browser, page)
    requested = [
        message["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"]
        == "Network.requestWillBeSent"
    ]
    assert [url for url in requested if not url.startswith("data:")] == [page.as_uri()]
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [360, 390, 768, WIDTH])
def test_the_page_never_scrolls_sideways(browser: Any, page: Path, width: int) -> None:
    _open(browser, page, width=width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_a_point_and_a_cell_say_what_they_show(browser: Any, page: Path) -> None:
    _open(browser, page)
    titles = browser.execute_script("""
      return [...document.querySelectorAll('main > .pictures svg')]
        .map(svg => [...svg.querySelectorAll('title')].map(t => t.textContent));""")
    assert len(titles[1]) == 13 * 13
    assert "blocks.0.value × blocks.0.query: " in " ".join(titles[1])
    assert any("blocks.0.attention" in said or "attention" in said for said in titles[2])


def test_every_section_is_reached_by_keyboard(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    _open(browser, page)
    reached = []
    for _ in range(60):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.append(
            browser.execute_script("""
          const node = document.activeElement;
          return [node.tagName, node.getAttribute('href') || node.textContent.slice(0, 30)];""")
        )
    links = {href for tag, href in reached if tag == "A"}
    keys = browser.execute_script(
        "return [...document.querySelectorAll('section')].map(s => '#' + s.id)"
    )
    assert set(keys) <= links
    assert any(tag == "SUMMARY" for tag, _ in reached)


_CONTRAST = """
  const light = c => c <= 10 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const c = parse(getComputedStyle(node).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const worst = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some(c => c.nodeType === 3 && c.textContent.trim());
    const silent = ['SCRIPT', 'STYLE', 'TITLE'].includes(node.tagName.toUpperCase());
    if (!own || silent || !node.getClientRects().length) continue;
    const inSvg = node.namespaceURI.endsWith('svg');
    const style = getComputedStyle(node);
    const a = luminance(parse(inSvg ? style.fill : style.color)), b = luminance(ground(node));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    worst.push([inSvg && style.fontWeight >= 600 ? contrast * 1.5 : contrast, node.tagName,
                node.textContent.slice(0, 40)]);
  }
  return worst.sort((p, q) => p[0] - q[0])[0];
"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_in_light_and_dark(browser: Any, page: Path, dark: bool) -> None:
    _open(browser, page, dark=dark)
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") != dark
    contrast, *where = browser.execute_script(_CONTRAST)
    assert contrast >= 4.5, where


def test_paper_shows_what_folds_away_and_no_links(browser: Any, page: Path) -> None:
    _open(browser, page, media="print")
    hidden, links = browser.execute_script("""
      const seen = n => n.getClientRects().length > 0 &&
        n.checkVisibility({contentVisibilityAuto: true});
      const count = (selector, wanted) =>
        [...document.querySelectorAll(selector)].filter(n => seen(n) === wanted).length;
      return [count('figure, table', false), count('nav', true)];""")
    assert (hidden, links) == (0, 0)
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 50_000


def test_hostile_names_are_text_and_run_nothing(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    hostile = write_report(write_sample_run(folder / "run", name=HOSTILE, role=HOSTILE))
    _open(browser, hostile)
    assert browser.title == f"Curvature of {HOSTILE}"
    assert browser.find_element("css selector", "h1").text == f"Curvature of {HOSTILE}"
    assert browser.find_elements("css selector", "img, script") == []
    assert browser.get_log("browser") == []


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, from the npm registry; a folder of one may be given."""
    folder = Path(os.environ.get("AXE_CORE", tmp_path_factory.mktemp("axe")))
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        done = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), "axe-core@4"],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if done.returncode or not script.is_file():
            pytest.skip(f"axe-core cannot be fetched: {done.stderr.strip()[-200:]}")
    return script.read_text("utf-8")


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_serious_violation(browser: Any, page: Path, axe: str, dark: bool) -> None:
    _open(browser, page, dark=dark)
    browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    browser.get(page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    browser.execute_script(axe)
    found = browser.execute_async_script(
        "const done = arguments[arguments.length - 1]; axe.run(document).then(done);"
    )
    browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
    assert len(found["passes"]) > 10
    serious = [
        (one["id"], one["help"], [node["html"][:120] for node in one["nodes"][:3]])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert serious == []
