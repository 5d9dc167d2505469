"""The demo's page and numbers: no two of them differ for the same quantity.

One small demo (few steps, few samples) is run by the real command and read by all tests.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from curvatlas import cli, runs
from curvatlas.report.comparing import REAL, WITHIN

STAGES = {"initial": "At initialisation", "trained": "After training"}
Claim = tuple[str, float, float]  # who says it, and between which numbers


@pytest.fixture(scope="module")
def demo(small_demo: Path) -> Path:
    return small_demo


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
    text, beside = (
        _text(demo / name).partition("How sure is this?")[0]
        for name in ("report.html", "comparison.html")
    )
    place = list(STAGES).index(stage)
    other = rf"(?:{_NUMBER})(?: \[[^\]]*\])? \| " if place else ""
    rows = {"λmax": "λmax", "λmin": "λmin", "‖H‖": "‖H‖_F", "tr total": "total curvature tr H",
            "tr outer": "tr H_o", "tr functional": "tr H_f"}  # fmt: skip
    pages = {
        name: [(page, rf"\n{row} \| {other}#") for page in (text, beside)]
        for name, row in rows.items()
    }
    loss = r"loss # at init" if place == 0 else r" and # after training"
    pages["loss"] = [(text, loss)]
    for name, listed in pages.items():
        for index, (page, pattern) in enumerate(listed):
            found = list(_claims(page, pattern, f"page {index}: {pattern}"))
            assert found, (name, pattern)
            claims[name] += found
    for told in claims.values():
        _agree(told)


def test_the_page_says_which_samples_its_numbers_are_of(
    demo: Path, results: dict[str, Any]
) -> None:
    text = _text(demo / "report.html")
    assert text.count("measured on 10 digits of 8 × 8 pixels") == 1
    for stage in STAGES:
        assert results[f"{stage}.propagation"]["samples"] == 10
        low, high = results[f"{stage}.propagation"]["amplification_interval"]
        assert 0 < low < high < math.inf
    # the error over other samples stands beside that of the probes
    sure = text[text.index("How sure is this?") :]
    assert re.search(r"\nλmax \| [\d.]+ \| (exact|±[^|]*) \| ± [^|]+\(", sure)


def test_traces_of_the_outer_part_are_exact_by_role_and_never_negative(
    results: dict[str, Any],
) -> None:
    for stage in STAGES:
        entry = results[f"{stage}.atlas"]["maps"]["role/trace/outer"]
        assert entry["low"] == entry["values"] == entry["high"]
        assert min(entry["values"]) >= 0
        exact = results[f"{stage}.outer.trace"]["value"]
        assert sum(entry["values"]) == pytest.approx(exact, rel=1e-9)


def test_no_vague_share_is_a_finding_and_no_advice_is_generic(demo: Path) -> None:
    first = (demo / "findings.txt").read_text("utf-8")
    assert "adaptive optimizer (Adam" not in first  # it is trained with AdamW
    text = _text(demo / "report.html")
    assert "with AdamW at rate 0.005" in text
    told = text[: text.index("How sure is this?")]
    for low, high in re.findall(r"share of negative.*\[([\d.]+), ([\d.]+)\]", told):
        assert float(high) - float(low) <= 0.5


def test_compare_names_the_largest_changes_with_a_verdict(demo: Path) -> None:
    text = _text(demo / "comparison.html")
    block = text[text.index("The largest changes") : text.index("How sure is this?")]
    changes = [line for line in block.splitlines() if line.count(" | ") == 5]
    assert len(changes) >= 6
    assert all(line.endswith((f"{REAL} | ", f"{WITHIN} | ")) for line in changes[1:])


def test_the_terminal_ends_with_the_findings_and_the_path(
    demo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    for arguments in ([], ["--quiet"], ["--open"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["report", str(demo), *arguments])
        assert ended.value.code == 0
        told = capsys.readouterr().out.strip().split("\n")
        findings = (demo / "findings.txt").read_text("utf-8").split("\n")
        if arguments == ["--quiet"]:
            assert told == findings[:1]
        else:
            assert told == [*findings, f"report: {demo / 'report.html'}"]
            assert len(told) <= 9
    assert opened == [(demo / "report.html").as_uri()]


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
    assert "total curvature tr H" in text


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
    for words in ("How sharp is it?", "Which weights carry it?", "Where in depth?"):
        assert f"{words}\n" in text
    assert "not trained yet (loss" in text
    assert "Adam, Shampoo" not in text
    assert "saddle" not in text
