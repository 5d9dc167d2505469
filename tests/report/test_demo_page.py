"""The demo's page and numbers: no two of them differ for the same quantity; journeys in a browser.

One small demo (few steps, few samples) is run by the real command and read by all tests.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from curvatlas import cli, runs
from curvatlas.report.comparing import REAL, WITHIN

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_DRIVER = shutil.which("chromedriver")

STAGES = {"initial": "At initialisation", "trained": "After training"}
Claim = tuple[str, float, float]  # who says it, and between which numbers


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command for programs says."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    said = ""
    for command in (
        ["demo", "--steps", "60", "--samples", "10", "--output", str(folder), "--json"],
        ["compare", str(folder), "--quiet"],
    ):
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 0
        said = said or out.getvalue()
    told: dict[str, Any] = json.loads(said)
    return told


@pytest.fixture(scope="module")
def demo(answer: dict[str, Any]) -> Path:
    return Path(answer["report"]).parent


@pytest.fixture(scope="module")
def results(demo: Path) -> dict[str, Any]:
    return {name: result.to_dict() for name, result in runs.load(demo).results.items()}


def _text(page: Path) -> str:
    """What a reader sees, one line an element."""
    body = re.sub(r"<(script|style).*?</\1>", "", page.read_text("utf-8"), flags=re.S)
    body = re.sub(r"</(td|th)>", " | ", body)
    body = re.sub(r"</(tr|li|p|h\d|figcaption|caption)>", "\n", body)
    return html.unescape(re.sub(r"<[^>]+>", "", body))


_NUMBER = r"−?[\d,]+(?:\.\d+)?(?:×10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)?"


def _float(text: str) -> float:
    plain = text.replace("−", "-").replace(",", "")
    digits = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    return float(re.sub(r"×10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda m: "e" + m[1].translate(digits), plain))


def _claims(text: str, pattern: str, who: str) -> Iterator[Claim]:
    """Numbers that follow the pattern, with their interval or half a unit of the last digit."""
    shown = rf"({_NUMBER})(?: \[({_NUMBER}), ({_NUMBER})\])?"
    for match in re.finditer(pattern.replace("#", shown), text):
        value, low, high = match.groups()[-3:]
        middle = _float(value)
        rounding = 0.5 * 10 ** (math.floor(math.log10(abs(middle))) - 2) if middle else 0.0
        ends = (_float(low), _float(high)) if low else (middle, middle)
        yield who, ends[0] - rounding, ends[1] + rounding


def _agree(claims: list[Claim]) -> None:
    assert len(claims) > 1, claims
    for i, (one, low, high) in enumerate(claims):
        for two, other_low, other_high in claims[i + 1 :]:
            scale = 1e-9 * max(abs(low), abs(high))
            assert low <= other_high + scale, (one, two, claims)
            assert other_low <= high + scale, (one, two, claims)


def _stored(results: dict[str, Any], stage: str) -> dict[str, list[Claim]]:
    """The same quantities as the results hold them."""
    one = {name.removeprefix(f"{stage}."): r for name, r in results.items()}
    pairs, density = one["total.eigenpairs"], one["total.density"]
    advice, flow, roles = one["advice"]["conditioning"], one["propagation"], one["atlas"]["maps"]
    low, high = pairs["interval"]
    traces: dict[str, list[Claim]] = {}
    for part in ("total", "outer", "functional"):
        a, b = one[f"{part}.trace"]["interval"]
        traces[part] = [("the trace", a, b)]
        spectrum = one[f"{part}.density"]
        mean = sum(w * x for w, x in zip(spectrum["weights"], spectrum["nodes"], strict=True))
        reach = spectrum["wasserstein_error"]
        size = spectrum["size"]
        traces[part].append(("its density", size * (mean - reach), size * (mean + reach)))
        for view in ("role", "layer", "block"):
            entry = roles[f"{view}/trace/{part}"]
            half = math.hypot(
                *((b - a) / 2 for a, b in zip(entry["low"], entry["high"], strict=True))
            )
            total = sum(entry["values"])
            traces[part].append((f"the {view}s", total - half, total + half))
    totals = [one[f"{part}.trace"]["value"] for part in ("total", "outer", "functional")]
    assert totals[0] == pytest.approx(totals[1] + totals[2], abs=1e-9 * abs(totals[1]))
    frobenius = roles["model/frobenius/total"]
    moments = density["size"] * sum(
        w * x**2 for w, x in zip(density["weights"], density["nodes"], strict=True)
    )
    return {
        "λmax": [
            ("eigenpairs", low[0], high[0]),
            ("advice", *advice["largest_interval"]),
            ("density", max(density["nodes"]) * (1 - 1e-3), max(density["nodes"]) * (1 + 1e-3)),
        ],
        "λmin": [
            ("eigenpairs", low[-1], high[-1]),
            ("advice", *advice["smallest_interval"]),
        ],
        "loss": [
            (who, value * (1 - 1e-9), value * (1 + 1e-9))
            for who, value in (
                ("subject", one["subject"]["loss"]),
                ("advice", advice["loss"]),
                ("propagation", flow["loss"]),
            )
        ],
        "gradient": [
            (who, value * (1 - 1e-9), value * (1 + 1e-9))
            for who, value in (
                ("subject", one["subject"]["gradient_norm"]),
                ("advice", advice["gradient_norm"]),
            )
        ],
        "negative": [
            ("density", *density["negative_mass_interval"]),
            ("advice", *advice["negative_mass_interval"]),
        ],
        "‖H‖": [
            ("atlas", float(frobenius["low"][0][0]), float(frobenius["high"][0][0])),
            ("density", moments**0.5 * 0.9, moments**0.5 * 1.1),
        ],
        **{f"tr {part}": claims for part, claims in traces.items()},
    }


def test_demo_makes_a_run_and_a_report(answer: dict[str, Any]) -> None:
    names = set(answer["results"])
    for stage in STAGES:
        assert f"{stage}.subject" in names
        for part in ("total", "outer", "functional"):
            for what in ("eigenpairs", "trace", "density"):
                assert f"{stage}.{part}.{what}" in names
    before, after = (answer["results"][f"{s}.subject"]["loss"] for s in STAGES)
    assert after < before
    assert "Curvature of reference ViT" in Path(answer["report"]).read_text("utf-8")


@pytest.mark.parametrize("stage", STAGES)
def test_no_two_numbers_of_one_quantity_differ_beyond_their_intervals(
    demo: Path, results: dict[str, Any], stage: str
) -> None:
    claims = _stored(results, stage)
    words, text = STAGES[stage], _text(demo / "report.html")
    beside = _text(demo / "comparison.html")
    place = list(STAGES).index(stage)
    other = rf"(?:{_NUMBER})(?: \[[^\]]*\])? \| " if place else ""
    lower = words[0].lower() + words[1:]
    pages = {
        "λmax": [(text, f"{words}, the sharpest direction has curvature λmax = #"),
                 (text, rf"\nH {lower} \| #"),
                 (beside, rf"λmax of H, the sharpest direction \| {other}#")],
        "λmin": [(text, f"{words}, the loss also curves downwards: the most negative .*? is #"),
                 (beside, rf"λmin of H, the most negative \| {other}#")],
        "loss": [(text, rf"\n{lower} \| #"), (beside, rf"\nloss \| {other}#")],
        "gradient": [(beside, rf"\ngradient norm \| {other}#")],
        "negative": [(text, rf"\nH {lower}: share of negative eigenvalues \| #")],
        "‖H‖": [(beside, rf"\n‖H‖_F \| {other}#")],
        "tr total": [(text, f"{words}, the total curvature is tr H = #"),
                     (text, rf"\ntr H {lower} \| #"), (beside, rf"\ntr H \| {other}#")],
        "tr outer": [(text, rf"\ntr H_o {lower} \| #"), (beside, rf"\ntr H_o \| {other}#")],
        "tr functional": [(text, rf"\ntr H_f {lower} \| #"), (beside, rf"\ntr H_f \| {other}#")],
    }  # fmt: skip
    for name, listed in pages.items():
        for index, (page, pattern) in enumerate(listed):
            found = list(_claims(page, pattern, f"page {index}: {pattern}"))
            assert found, (name, pattern)
            claims[name] += found
    for told in claims.values():
        _agree(told)


def test_the_page_says_once_which_samples_every_number_is_of(
    demo: Path, results: dict[str, Any]
) -> None:
    text = _text(demo / "report.html")
    assert len(re.findall("mean loss over the same 10 digits", text)) == 1
    for stage in STAGES:
        assert results[f"{stage}.propagation"]["samples"] == 10
        low, high = results[f"{stage}.propagation"]["amplification_interval"]
        assert f"{STAGES[stage]}, the curvature at the embedding is" in text
        assert 0 < low < high < math.inf
    assert re.search(r"Training took the loss on 10 digits of 8 × 8 pixels from", text)


def test_traces_of_the_outer_part_are_exact_by_role_and_never_negative(
    results: dict[str, Any],
) -> None:
    for stage in STAGES:
        entry = results[f"{stage}.atlas"]["maps"]["role/trace/outer"]
        assert entry["low"] == entry["values"] == entry["high"]
        assert min(entry["values"]) >= 0
        exact = results[f"{stage}.outer.trace"]["value"]
        assert sum(entry["values"]) == pytest.approx(exact, rel=1e-9)


def test_no_vague_share_is_called_strong_evidence_and_no_advice_is_generic(demo: Path) -> None:
    text = _text(demo / "report.html")
    advice = text[text.rindex("Recommendations\n") :]
    assert "optimizer: adamw at rate 0.005" in advice
    assert "adaptive optimizer (Adam" not in advice  # it is trained with AdamW
    # what predicts a change of the loss is not advised before training, and never untried
    before, after = advice.split("After training")[:2]
    assert "negative curvature" not in before
    assert ("ollow the negative curvature" in after) == ("measured along it" in after)
    for line in re.findall(r".*strong evidence.*", text):
        for low, high in re.findall(r"\[([\d.]+), ([\d.]+)\]", line):
            assert float(high) - float(low) < 0.5


def test_compare_names_the_five_largest_changes_with_a_verdict(demo: Path) -> None:
    text = _text(demo / "comparison.html")
    block = text[text.index("allow together.") :].split("Side by side")[0]
    changes = [line.strip() for line in block.splitlines() if "→" in line]
    assert len(changes) == 5
    assert all(line.endswith((f"{REAL}.", f"{WITHIN}.")) for line in changes)


# --- journeys in a browser ------------------------------------------------------------------------

browsing = [
    pytest.mark.browser,
    pytest.mark.skipif(_CHROMIUM is None or _DRIVER is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = _CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(argument)
    folder = tmp_path_factory.mktemp("downloads")
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(_DRIVER))
    driver.downloads = folder
    yield driver
    driver.quit()


def _open(browser: Any, page: Path, width: int = 1100) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


class TestInABrowser:
    pytestmark = browsing

    def test_a_heading_sorts_its_table_and_a_button_saves_it(
        self, browser: Any, demo: Path
    ) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        _open(browser, demo / "report.html")
        table = browser.execute_script("""
          return [...document.querySelectorAll('.table')].find(t => t.querySelector('caption')
            && t.querySelector('caption').textContent.startsWith('Traces and negative'));""")
        browser.execute_script("arguments[0].querySelectorAll('thead th')[1].click()", table)
        shown = browser.execute_script(
            "return [...arguments[0].querySelectorAll('td:nth-child(2)')].map(c => c.textContent)",
            table,
        )
        values = [_float(re.match(_NUMBER, cell)[0]) for cell in shown]  # type: ignore[index]
        assert values == sorted(values, reverse=True)
        browser.execute_script("arguments[0].querySelector('button.csv').click()", table)
        WebDriverWait(browser, 20).until(lambda b: list(b.downloads.glob("*.csv")))
        (saved,) = browser.downloads.glob("traces-and-negative*.csv")
        lines = saved.read_text("utf-8-sig").splitlines()
        assert lines[0].startswith('"quantity","value')
        assert len(lines) == 1 + len(shown)

    def test_on_a_phone_the_map_scrolls_and_its_colour_bar_stays_in_view(
        self, browser: Any, demo: Path
    ) -> None:
        _open(browser, demo / "report.html", width=390)
        page, bar, title, scrolls = browser.execute_script("""
          const figure = document.querySelector('#atlas figure.chart');
          const box = figure.querySelector('.colour-bar svg').getBoundingClientRect();
          const area = figure.querySelector('.scroll');
          return [document.documentElement.scrollWidth, box.right,
                  figure.querySelector('.bar-title').textContent,
                  area.scrollWidth > area.clientWidth];""")
        assert page <= 390
        assert bar <= 390
        assert title.startswith("Frobenius norm")
        assert scrolls

    def test_every_sublayer_is_named_and_a_zero_is_drawn_as_a_zero(
        self, browser: Any, demo: Path
    ) -> None:
        _open(browser, demo / "report.html")
        names, zeros = browser.execute_script("""
          const figure = document.querySelector('figure[aria-label="Curvature by sublayer"]');
          return [[...figure.querySelectorAll('.axis.x .tick')].map(t => t.textContent),
                  [...figure.querySelectorAll('.nought title')].map(t => t.textContent)];""")
        assert {"0.attention", "0.ffn", "head"} <= set(names)
        assert any(re.search(r"residual, created here: 0$", said) for said in zeros)

    def test_stages_have_the_same_colours_in_every_chart_and_the_picture_has_a_caption(
        self, browser: Any, demo: Path
    ) -> None:
        _open(browser, demo / "report.html")
        colours, caption, drawn = browser.execute_script("""
          const said = {};
          document.querySelectorAll('.legend li').forEach(item => {
            (said[item.textContent.trim()] ||= new Set()).add(item.className); });
          const picture = document.querySelector('#overview img');
          return [Object.entries(said).map(([k, v]) => [k, [...v]]),
                  document.querySelector('#overview figcaption').textContent,
                  picture.naturalWidth];""")
        used = dict(colours)
        assert used["at initialisation"] == ["c0"]
        assert used["after training"] == ["c1"]
        assert "same colours" in caption
        assert drawn > 500

    def test_two_states_stand_side_by_side_on_one_colour_scale(
        self, browser: Any, demo: Path
    ) -> None:
        _open(browser, demo / "comparison.html")
        scales = browser.execute_script("""
          return [...document.querySelectorAll('#maps figure.chart')]
            .filter(f => f.offsetParent)
            .map(f => [f.getAttribute('aria-label'),
                       [...f.querySelectorAll('.colour-bar text')].map(t => t.textContent).join()]);
        """)
        assert len(scales) == 3
        assert scales[0][1] == scales[1][1]
        assert "factor from initial to trained" in scales[2][0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train") / "run"
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "vit", "--optimizer", "adamw", "--steps", "12", "--every", "3",
                  "--samples", "8", "--output", str(folder), "--quiet"])  # fmt: skip
    assert ended.value.code == 0
    return folder


class TestTheTrainingPage:
    pytestmark = browsing

    def test_charts_are_titled_and_labelled_with_their_bars_inside(
        self, browser: Any, trained: Path
    ) -> None:
        _open(browser, trained / "report.html")
        charts = browser.execute_script("""
          return [...document.querySelectorAll('#dynamics figure.chart')].map(f => {
            const area = f.querySelector('.area').getBoundingClientRect();
            const inside = [...f.querySelectorAll('.interval')].every(bar => {
              const box = bar.getBoundingClientRect();
              return box.top >= area.top - 2 && box.bottom <= area.bottom + 2; });
            return [f.getAttribute('aria-label'), inside,
                    [...f.querySelectorAll('.title text')].map(t => t.textContent)];
          });""")
        titles = [title for title, _, _ in charts]
        assert len(set(titles)) == len(titles)
        assert {"Loss", "Sharpness", "Total curvature", "Sharpness by role"} <= set(titles)
        assert "The optimizer's own edge of stability" in titles
        assert all(inside for _, inside, _ in charts)
        for _, _, (x_label, y_label) in charts:
            assert x_label == "training step"
            assert "_" not in y_label

    def test_roles_have_points_only_where_they_were_measured(
        self, browser: Any, trained: Path
    ) -> None:
        history = runs.load(trained)["dynamics"].to_dict()
        roles: dict[str, set[float]] = {}
        for snapshot in history["snapshots"]:
            for role, value in snapshot["role_sharpness"].items():
                roles.setdefault(role, set()).add(value)
        _open(browser, trained / "report.html")
        points = browser.execute_script("""
          const figure = document.querySelector('figure[aria-label="Sharpness by role"]');
          return figure.querySelectorAll('.series .dot').length;""")
        shown = sorted(roles.values(), key=lambda values: -max(map(abs, values)))[:6]
        assert points == sum(len(values) for values in shown)


def test_what_was_measured_is_on_a_page_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from curvatlas import surveying

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(surveying, "atlas", interrupt)
    arguments = ["analyze", "cli_models:make_block_model", "cli_models:make_tokens", "--output",
                 str(tmp_path / "run"), "--dtype", "float64", "--quiet"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 130
    assert "Resume with" in capsys.readouterr().err
    text = _text(tmp_path / "run" / "report.html")
    assert "This run is interrupted" in text
    assert "total curvature is tr H" in text


def test_a_dry_run_says_steps_time_and_memory_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["analyze", "cli_models:make_block_model", "cli_models:make_tokens", "--dry-run"]
    for more in ((), ("--json",)):
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, *more])
        assert ended.value.code == 0
    told, plan = capsys.readouterr().out.split("\n{", 1)
    assert re.search(r"13 steps, about \d+ (s|min) and [\d.]+ .?B of memory", told)
    content = json.loads("{" + plan)
    assert len(content["steps"]) == 13
    assert content["seconds"] == pytest.approx(sum(s["seconds"] for s in content["steps"]))
    assert content["memory"] <= content["memory_limit"]
    assert not list(tmp_path.iterdir())


@pytest.mark.huggingface
def test_an_untrained_gpt2_is_surveyed_to_the_end_within_its_caps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "text.txt").write_text("the trace of an untrained model is near zero. " * 20)
    arguments = ["analyze", str(tmp_path / "gpt2"), str(tmp_path / "text.txt"), "--tokenizer",
                 "bytes", "--context", "16", "--samples", "6", "--optimizer", "adamw", "--lr",
                 "3e-4", "--output", str(tmp_path / "run")]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    assert re.search(r"step 2 of 13: ends of the spectrum of H, about", capsys.readouterr().out)
    for name, result in runs.load(tmp_path / "run").results.items():
        told = result.to_dict()
        if told.get("quantity") == "trace" or "density" in name:
            assert told["products"] <= 306  # 300, and six that measure the scatter of batches
    text = _text(tmp_path / "run" / "report.html")
    for words in ("Spectrum", "Atlas of curvature", "Propagation", "Recommendations"):
        assert f"{words}\n" in text
    assert "not trained yet (loss" in text
    advice = text[text.rindex("Recommendations\n") :]
    assert "Adam, Shampoo" not in advice
    assert "saddle" not in advice
