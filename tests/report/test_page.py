"""The page of a run: complete, self-contained, escaped, light, and honest about what it lacks."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from curvatlas import runs, zoo
from curvatlas.analysis.landscape.taylor_result import (
    CriticalLearningRate,
    PredictedTrajectory,
    TrustRadius,
)
from curvatlas.analysis.propagation.analyzer import CurvaturePropagationAnalyzer
from curvatlas.report import write_report
from curvatlas.report.page import page_of
from curvatlas.report.paper import write_figures
from curvatlas.results import Result
from report_samples import atlas, density, eigenpairs, subject, trace, write_sample_run
from run_samples import write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&=@"
QUESTIONS = ["How sharp is it?", "Which weights carry it?", "Is Gauss-Newton enough?",
             "What changed?", "How sure is this?"]  # fmt: skip


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_run(tmp_path_factory.mktemp("sample") / "run")


@pytest.fixture(scope="module")
def text(sample: Path) -> str:
    return write_report(sample).read_text("utf-8")


class Read(HTMLParser):
    """Elements, and texts by the element that holds them; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in ("meta", "input", "br", "hr", "img", "link"):
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name, f"</{name}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


def _page(tmp_path: Path, **results: Result) -> str:
    with runs.Run.create(tmp_path / "run", options={}) as run:
        for name, result in results.items():
            run.step(name, lambda result=result: result)
    return write_report(tmp_path / "run").read_text("utf-8")


def test_a_survey_answers_its_questions_in_order(text: str) -> None:
    asked = [words for words in Read(text).texts["h2"] if words.endswith("?")]
    assert asked == ["Theorems and claims: which hold?", *QUESTIONS]


def test_the_first_screen_holds_verdict_cards_and_pictures_before_any_section(text: str) -> None:
    first = text[: text.index("<section")]
    assert first.count('class="verdict') == 1
    assert 3 <= first.count('class="card"') <= 5
    assert 1 <= first.count("<figure>") <= 3
    assert "2.3 at initialisation and 0.2 after training" in first


def test_a_run_of_unknown_results_still_gives_a_page(tmp_path: Path) -> None:
    page = Read(write_report(write_run(tmp_path / "run")).read_text("utf-8"))
    assert "hessian, trace" in page.texts["summary"]
    assert page.texts["h1"] == ["Results of a run"]


def test_numbers_stand_with_the_larger_of_both_errors(tmp_path: Path) -> None:
    pairs = eigenpairs(0, both=True)
    wide = (pairs.values - 3, pairs.values + 3)
    wider = dataclasses.replace(pairs, data_interval=wide)
    sure = dataclasses.replace(trace(50.0), data_interval=(49.9, 50.1))
    page = _page(tmp_path, **{"model.total.eigenpairs": wider, "model.total.trace": sure})
    top = float(pairs.values.max())
    assert f"[{top - 3:.3g}, {top + 3:.3g}]" in page
    assert "[49, 51]" in page  # of the probes: those of the data are narrower


def test_a_number_without_information_is_no_finding(tmp_path: Path) -> None:
    vague = dataclasses.replace(
        density(0), negative_mass=0.5, negative_mass_interval=(0.1, 0.9), exact=False
    )
    unsure = dataclasses.replace(trace(1.0), interval=(-3.0, 5.0))
    page = _page(tmp_path, **{
        "model.total.eigenpairs": eigenpairs(0, both=True), "model.total.density": vague,
        "model.total.trace": unsure,
    })  # fmt: skip
    told = page[: page.index('id="certainty"')]
    assert "Total curvature, tr H" not in told
    assert "[0.1, 0.9]" not in page
    assert "negative share" in page[page.index('id="certainty"') :]  # that it is unknown


def test_nothing_is_asked_of_the_network_and_nothing_runs(text: str) -> None:
    for name, attributes in Read(text).elements:
        assert name not in ("link", "iframe", "object", "embed", "base", "script"), name
        assert not any(key.startswith("on") for key in attributes)
        for key in ("src", "href", "action", "data", "srcset"):
            value = attributes.get(key)
            if value is not None:
                assert value.startswith(("#", "data:image/png;base64,")), (name, key, value)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text
    assert "script-src" not in text


@pytest.mark.draws
def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run", name=HOSTILE, role=HOSTILE)
    page = Read(write_report(run).read_text("utf-8"))
    assert page.texts["h1"] == [f"Curvature of {HOSTILE}"]
    assert {"script", "img"} & {name for name, _ in page.elements} == set()
    assert not any(key.startswith("on") for _, a in page.elements for key in a)
    assert any(HOSTILE in words for words in page.texts["title"])  # of a cell of the map


def test_no_cell_of_a_spreadsheet_is_a_formula(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run", role="=cmd|' /C calc'!A0")
    write_report(run)
    cells = "".join(p.read_text("utf-8-sig") for p in (run / "tables").glob("*.csv"))
    assert "cmd|" in cells
    assert not re.search(r'(^|,)"?[=@]', cells, flags=re.M)


def test_every_picture_says_in_words_what_it_shows(text: str) -> None:
    pictures = [a for name, a in Read(text).elements if name == "svg" and a.get("role") == "img"]
    assert len(pictures) == text.count("<figure>") >= 8
    assert all(len(a["aria-label"] or "") > 20 for a in pictures)


def test_identifiers_are_unique_and_links_lead_somewhere(text: str) -> None:
    elements = Read(text).elements
    identifiers = [a["id"] for _, a in elements if a.get("id")]
    assert len(identifiers) == len(set(identifiers))
    for name, attributes in elements:
        if name == "a":
            assert (attributes["href"] or "")[1:] in identifiers


@pytest.mark.draws
def test_the_same_run_gives_the_same_page(sample: Path, tmp_path: Path, text: str) -> None:
    assert write_report(sample, tmp_path / "b.html").read_text("utf-8") == text


def test_the_findings_are_at_most_eight_lines_of_plain_text(sample: Path, text: str) -> None:
    lines = runs.load(sample).findings.split("\n")
    assert 4 <= len(lines) <= 8
    assert lines == page_of(runs.load(sample)).lines()
    assert "came out otherwise than recorded" in lines[0]


def test_a_run_shows_its_findings_in_a_notebook(sample: Path, text: str) -> None:
    shown = runs.load(sample)._repr_html_()
    assert "came out otherwise than recorded" in shown
    (sample / "findings.txt").write_text("<script>\x1b[31m")
    assert "<script>" not in runs.load(sample)._repr_html_()
    assert "\x1b" not in runs.load(sample).findings
    write_report(sample)


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run = runs.Run.create(tmp_path / "run", options={})
    run.close("interrupted", "KeyboardInterrupt")
    text = write_report(tmp_path / "run").read_text("utf-8")
    assert "This run is interrupted" in text[: text.index("<section")]


@pytest.mark.draws
def test_results_whose_fields_do_not_belong_together_leave_the_rest_to_be_read(
    tmp_path: Path,
) -> None:
    broken = dataclasses.replace(atlas(1, 0), maps={})
    empty = dataclasses.replace(density(0), nodes=torch.empty(0), weights=torch.empty(0))
    whole = {
        "model.subject": subject("net", "", 1),
        "model.total.eigenpairs": eigenpairs(0, both=True),
    }
    rate = CriticalLearningRate(
        value=math.nan, interval=(1.0, 0.0), sharpness=0.0, momentum=0.0, ratios=(1.0,), growth=(),
        expected=(), losses=(), products=0, converged=True,
    )  # fmt: skip
    page = _page(tmp_path, **whole, **{"model.atlas": broken, "model.total.density": empty,
                                       "landscape.rate": rate})  # fmt: skip
    assert "fields that do not belong together" in page
    assert "Curvature of net" in page


@pytest.mark.draws
def test_a_map_of_zeros_alone_stands_beside_the_others(tmp_path: Path) -> None:
    zero = atlas(1, 0)
    names = [key for key in zero.maps if key.endswith("functional")]
    nothing = {key: torch.zeros_like(zero.maps[key].values) for key in names}
    maps = {
        key: dataclasses.replace(zero.maps[key], values=n, low=n, high=n)
        for key, n in nothing.items()
    }
    flat = dataclasses.replace(zero, maps={**zero.maps, **maps})
    page = _page(tmp_path, **{"model.atlas": flat})
    assert "could not be drawn" not in page
    assert "Map of the blocks of H_f" in page


@pytest.mark.slow
@pytest.mark.draws
def test_paper_figures_are_png_and_svg(sample: Path, tmp_path: Path) -> None:
    written = write_figures(page_of(runs.load(sample)), tmp_path)
    names = {path.stem for path in written}
    assert {"spectrum-of-the-hessian", "the-outermost-eigenvalues"} <= names
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"{name}.{suffix}" for name in names for suffix in ("png", "svg")
    )
    drawn = (tmp_path / "spectrum-of-the-hessian.svg").read_text("utf-8")
    assert "at initialisation" in drawn


# --- other kinds of runs --------------------------------------------------------------------------


@pytest.mark.draws
def test_propagation_shows_both_terms_of_every_sublayer(tmp_path: Path) -> None:
    model = zoo.reference_vit(d_model=8, n_heads=2).eval()
    batch = zoo.digits().train.take(2)
    flow = CurvaturePropagationAnalyzer(model).analyze_curvature_flow(*batch)
    page = _page(tmp_path, flow=flow)
    assert "Where in depth?" in page
    rows = (tmp_path / "run" / "tables" / "depth.csv").read_text("utf-8-sig").splitlines()
    assert len(rows) == 1 + len(flow)
    assert "created here" in page
    assert torch.isfinite(torch.tensor(flow.amplification))


@pytest.mark.draws
def test_the_landscape_says_where_descent_fails_and_draws_prediction_and_truth(
    tmp_path: Path,
) -> None:
    rate = CriticalLearningRate(
        value=0.25, interval=(0.24, 0.26), sharpness=8.0, momentum=0.0, ratios=(0.95, 1.05),
        growth=(0.9, 1.1), expected=(0.9, 1.1), losses=(torch.ones(2), torch.ones(2)),
        products=9, converged=True,
    )  # fmt: skip
    radius = TrustRadius(
        radius=0.5, accuracy=0.01, order=2, limited=True, worst_inside=0.008, measured_radius=0.75
    )
    path = PredictedTrajectory(
        losses=torch.tensor([2.0, 1.0, 0.5]), actual=torch.tensor([2.0, 1.1, 0.7]),
        learning_rate=0.125, momentum=0.0, eigenvalues=torch.ones(1), weights=torch.ones(1),
        exact_steps=2, critical_learning_rate=0.25, converges=True, top_share=1.0, products=3,
        horizon=1, tolerance=0.2,
    )  # fmt: skip
    page = _page(tmp_path, rate=rate, radius=radius, path=path)
    assert "Keep the rate of plain gradient descent below 0.25." in page
    assert "Training at 0.95 and 1.05 times this rate confirms it." in page
    assert "for 1 of 2 steps. Beyond that the quadratic model is no forecast." in page
    assert "seen to fail at 0.75" in page
    assert "How this was computed" in page
    unconfirmed = dataclasses.replace(rate, growth=(1.2, 1.1))
    (tmp_path / "second").mkdir()
    assert "does NOT confirm it" in _page(tmp_path / "second", rate=unconfirmed)


@pytest.mark.parametrize(
    ("which", "outside", "words"),
    [
        ("both", (-1.0, 18.5), "complete above 18.5 and below -1 at 97.5 %"),
        # beyond the outermost of the list: nothing that a reader of the list need know
        ("both", (-11.0, 18.5), "complete above 18.5 at 97.5 %; lower end converged, not searched"),
        ("largest", (-math.inf, 18.5), "complete above 18.5 at 97.5 %;"),
        ("both", (-math.inf, math.inf), "one further out overlooked: at most 1.0%"),
    ],
)
def test_the_page_says_where_no_eigenvalue_is_missing(
    tmp_path: Path, which: str, outside: tuple[float, float], words: str
) -> None:
    found = dataclasses.replace(
        eigenpairs(0, both=which == "both"), which=which, complete_outside=outside
    )
    assert words in _page(tmp_path, **{"model.total.eigenpairs": found})
    assert words in str(found)  # the terminal says the same


@pytest.mark.draws
def test_a_large_model_stays_below_two_megabytes_and_its_names_legible(large_page: Path) -> None:
    assert large_page.stat().st_size <= 2_000_000
    assert "could not be drawn" not in large_page.read_text("utf-8")


def test_only_templates_contain_tags() -> None:
    source = Path(runs.__file__).parents[1]
    tagged = re.compile(
        r"</?(a|b|p|br|td|th|tr|li|ul|div|span|table|section|details|h\d|img)\b[^\"]*>"
    )
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if any(tagged.search(line) for line in path.read_text("utf-8").splitlines())
    }
    assert found == {"display.py"}
