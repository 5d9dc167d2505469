"""The page in a real browser: Debian's chromium, headless, driven by Selenium.

Needs ``apt-get install chromium chromium-driver`` and ``pip install selenium``; skipped without.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from curvatlas.report import write_report
from report_samples import write_sample_run

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        _CHROMIUM is None or _DRIVER is None, reason="chromium or chromedriver is not installed"
    ),
]

HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"alert(1)\">"


def _start(*, javascript: bool = True) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = _CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if not javascript:
        rule = "profile.managed_default_content_settings.javascript"
        options.add_experimental_option("prefs", {rule: 2})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(_DRIVER))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = _start()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_sample_run(tmp_path_factory.mktemp("page") / "run", layers=3))


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    return write_report(write_sample_run(folder / "run", name=HOSTILE, role=HOSTILE))


def _open(browser: Any, page: Path, *, width: int = 1100, dark: bool = False) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
    for log in ("browser", "performance"):
        browser.get_log(log)  # forget what an earlier page said
    browser.get(page.as_uri())
    # On a busy machine the first navigation can return while the page is still being parsed.
    WebDriverWait(browser, 60).until(
        lambda b: b.execute_script("return document.readyState") == "complete"
    )


def _requests(browser: Any) -> list[str]:
    found = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
    return [url for url in found if not url.startswith("data:")]


def _show(browser: Any, label: str) -> None:
    """Choose a panel by the words on its button, in every switch that has it."""
    script = """
      document.querySelectorAll('.switch > label').forEach(label => {
        if (label.textContent === arguments[0] && label.offsetParent) label.click();
      });"""
    browser.execute_script(script, label)


def _figure(browser: Any, title: str) -> Any:
    (found,) = [
        f for f in browser.find_elements("css selector", f'figure[aria-label="{title}"]')
        if f.is_displayed()
    ][:1]  # fmt: skip
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found


def _hover_text(browser: Any) -> str:
    return str(browser.execute_script(
        "const h = document.getElementById('hover'); return h.hidden ? '' : h.textContent"
    ))  # fmt: skip


def _ticks(browser: Any, figure: Any, axis: str) -> list[str]:
    return list(browser.execute_script(
        "return [...arguments[0].querySelectorAll(`.axis.${arguments[1]} .tick`)]"
        ".filter(t => t.style.display !== 'none').map(t => t.textContent)", figure, axis,
    ))  # fmt: skip


def test_nothing_is_requested_and_nothing_is_complained_about(browser: Any, page: Path) -> None:
    _open(browser, page)
    assert browser.get_log("browser") == []
    assert _requests(browser) == [page.as_uri()]


def test_every_figure_is_drawn(browser: Any, page: Path) -> None:
    _open(browser, page)
    sizes = browser.execute_script("""
      document.querySelectorAll('.panel').forEach(p => { p.style.display = 'block'; });
      return [...document.querySelectorAll('figure.chart')].map(f => {
        const box = f.querySelector('.plot').closest('svg').getBoundingClientRect();
        const marks = f.querySelector('.marks').getBoundingClientRect();
        return [f.getAttribute('aria-label'), f.dataset.ready, box.width, box.height,
                marks.width, marks.height];
      });""")
    assert len(sizes) == 6 + 2 * 9 + 1  # spectra, two atlases of three views, training
    for name, ready, *numbers in sizes:
        assert ready == "true", name
        assert all(number > 50 for number in numbers), (name, numbers)


def test_heat_maps_show_the_colours_of_their_numbers(browser: Any, page: Path) -> None:
    _open(browser, page)
    # decode the picture in the page itself and compare the order of brightness with the numbers
    values, green = browser.execute_async_script("""
      const done = arguments[arguments.length - 1];
      const figure = document.querySelector('figure[aria-label="H over roles"]');
      const cells = JSON.parse(document.getElementById(
        figure.querySelector('.plot').dataset.cells).textContent);
      const image = new Image();
      image.onload = () => {
        const canvas = document.createElement('canvas');
        canvas.width = image.width; canvas.height = image.height;
        const context = canvas.getContext('2d');
        context.drawImage(image, 0, 0);
        const data = context.getImageData(0, 0, image.width, image.height).data;
        done([cells.values.flat(), [...data].filter((_, i) => i % 4 === 1)]);
      };
      image.src = figure.querySelector('.cells').getAttribute('href');""")
    assert len(values) == len(green) == 81
    pairs = sorted(zip(values, green, strict=True))
    greens = [one for _, one in pairs]
    assert greens == sorted(greens)  # the green channel of the scale grows with the number
    assert greens[-1] - greens[0] > 60


def test_switches_show_one_panel_at_a_time(browser: Any, page: Path) -> None:
    _open(browser, page)
    for words, title in (
        ("H_o: ", "Outliers of H_o"),
        ("H_f: ", "Outliers of H_f"),
        ("H: ", "Outliers of H"),
    ):
        (label,) = [
            one for one in browser.find_elements("css selector", "#spectrum .switch > label")
            if one.text.startswith(words)
        ]  # fmt: skip
        label.click()
        shown = [
            f.get_attribute("aria-label")
            for f in browser.find_elements("css selector", "#spectrum figure")
            if f.is_displayed()
        ]
        assert title in shown
        assert len(shown) == 2


def test_switches_work_by_keyboard(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    _open(browser, page)
    first = browser.find_element("css selector", "#spectrum .switch > input")
    browser.execute_script("arguments[0].focus()", first)
    first.send_keys(Keys.ARROW_RIGHT)
    assert _figure(browser, "Outliers of H_o").is_displayed()


def test_the_atlas_switches_between_the_parts_and_views(browser: Any, page: Path) -> None:
    _open(browser, page)
    for view in ("layers", "blocks", "roles"):
        _show(browser, view)
        for part in ("H_f", "H_o", "H"):
            _show(browser, part)
            figure = _figure(browser, f"{part} over {view}")
            assert figure.is_displayed()
            assert figure.find_element("css selector", ".cells").size["width"] > 50


def test_hovering_a_point_says_its_number(browser: Any, page: Path) -> None:
    from selenium.webdriver import ActionChains

    _open(browser, page)
    figure = _figure(browser, "Outliers of H")
    dot = figure.find_elements("css selector", ".dot")[0]
    expected = browser.execute_script("return arguments[0].querySelector('title').textContent", dot)
    x, y = browser.execute_script(
        """
      const m = arguments[0].getScreenCTM(), d = arguments[0].dataset;
      const a = arguments[0].closest('.clip').getScreenCTM();
      return [Number(d.x) * a.a + a.e, Number(d.y) * a.d + a.f];""",
        dot,
    )
    action = ActionChains(browser)
    action.w3c_actions.pointer_action.move_to_location(round(x) + 3, round(y) + 2)
    action.perform()
    assert _hover_text(browser) == expected
    assert "[" in expected


def test_hovering_a_cell_names_the_pair_and_its_interval(browser: Any, page: Path) -> None:
    from selenium.webdriver import ActionChains

    _open(browser, page)
    figure = _figure(browser, "H over roles")
    image = figure.find_element("css selector", ".cells")
    box = browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", image)
    side = box["width"] / 9
    action = ActionChains(browser)
    action.w3c_actions.pointer_action.move_to_location(
        round(box["x"] + 2.5 * side), round(box["y"] + 1.5 * side)
    )
    action.perform()
    said = _hover_text(browser)
    assert said.startswith("query × key: ")
    assert said.endswith("]")


def test_dragging_zooms_and_double_click_shows_all(browser: Any, page: Path) -> None:
    from selenium.webdriver import ActionChains

    _open(browser, page)
    figure = _figure(browser, "Training loss")
    area = figure.find_element("css selector", ".area")
    before = _ticks(browser, figure, "x"), _ticks(browser, figure, "y")
    ActionChains(browser).move_to_element_with_offset(
        area, -60, -40
    ).click_and_hold().move_by_offset(100, 90).release().perform()
    zoomed = _ticks(browser, figure, "x"), _ticks(browser, figure, "y")
    assert zoomed[0] != before[0]
    assert zoomed[1] != before[1]
    assert "zoomed" in figure.get_attribute("class")
    numbers = [float(tick) for tick in zoomed[0]]
    assert 0 < min(numbers) < max(numbers) < 300
    ActionChains(browser).move_to_element(area).double_click().perform()
    # the ticks are now made by the script: the same as those of scales.py
    assert (_ticks(browser, figure, "x"), _ticks(browser, figure, "y")) == before


def test_script_and_python_make_the_same_ticks_on_every_axis(browser: Any, page: Path) -> None:
    _open(browser, page)
    figures = browser.find_elements("css selector", "figure.chart:not(.wide)")
    assert len(figures) == 7
    for figure in figures:
        before = _ticks(browser, figure, "x"), _ticks(browser, figure, "y")
        script = "arguments[0].querySelectorAll('.tools button')[arguments[1]].click()"
        browser.execute_script(script, figure, 0)
        browser.execute_script(script, figure, 2)
        assert (_ticks(browser, figure, "x"), _ticks(browser, figure, "y")) == before


def test_keyboard_walks_through_points_and_zooms(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    _open(browser, page)
    figure = _figure(browser, "Outliers of H")
    browser.execute_script("arguments[0].focus()", figure)
    figure.send_keys(Keys.ARROW_RIGHT)
    first = _hover_text(browser)
    figure.send_keys(Keys.ARROW_RIGHT)
    assert first.startswith("at initialisation, no. 1")
    assert _hover_text(browser).startswith("at initialisation, no. 2")
    figure.send_keys("+")
    assert "zoomed" in figure.get_attribute("class")
    figure.send_keys("0")
    assert "zoomed" not in figure.get_attribute("class")
    heat = _figure(browser, "H over roles")
    browser.execute_script("arguments[0].focus()", heat)
    heat.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert _hover_text(browser).startswith("query × query: ")


def test_hostile_names_are_text_and_run_nothing(browser: Any, hostile_page: Path) -> None:
    _open(browser, hostile_page)
    assert browser.title == f"Curvature of {HOSTILE}"
    assert browser.find_element("css selector", "h1").text == f"Curvature of {HOSTILE}"
    assert browser.find_elements("css selector", "img") == []
    assert browser.get_log("browser") == []
    assert _requests(browser) == [hostile_page.as_uri()]
    heat = _figure(browser, "H over roles")
    browser.execute_script("arguments[0].focus()", heat)
    heat.send_keys("\ue014")  # arrow right: the first cell is the hostile role
    assert _hover_text(browser).startswith(HOSTILE)


def test_the_page_reads_without_javascript(page: Path) -> None:
    driver = _start(javascript=False)
    try:
        driver.get(page.as_uri())
        figures = [f for f in driver.find_elements("css selector", "figure") if f.is_displayed()]
        assert len(figures) == 2 + 2 + 1
        assert driver.find_elements("css selector", ".tools") == []
        label = driver.find_elements("css selector", "#spectrum .switch > label")[1]
        label.click()
        titles = [
            f.get_attribute("aria-label")
            for f in driver.find_elements("css selector", "#spectrum figure") if f.is_displayed()
        ]  # fmt: skip
        assert titles == ["Density of H_o", "Outliers of H_o"]
    finally:
        driver.quit()


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
    const silent = ['SCRIPT', 'STYLE', 'TITLE'].includes(node.tagName);
    if (!own || silent || !node.getClientRects().length) continue;
    const inSvg = node.namespaceURI.endsWith('svg');
    if (inSvg && node.tagName !== 'text') continue;
    const style = getComputedStyle(node);
    const a = luminance(parse(inSvg ? style.fill : style.color)), b = luminance(ground(node));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    worst.push([contrast, node.tagName, node.textContent.slice(0, 40)]);
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


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_the_page_never_scrolls_sideways(browser: Any, page: Path, width: int) -> None:
    _open(browser, page, width=width)
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width


def test_paper_shows_every_panel_and_no_buttons(browser: Any, page: Path) -> None:
    _open(browser, page)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    hidden, buttons = browser.execute_script("""
      const seen = n => n.getClientRects().length > 0;
      const all = selector => [...document.querySelectorAll(selector)];
      return [all('figure').filter(f => !seen(f)).length,
              all('nav, .tools, .switch > label').filter(seen).length];""")
    assert (hidden, buttons) == (0, 0)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {})["data"]
    assert len(printed) > 50_000
