"""Pages in a real browser, light and dark, on a desk and on a telephone."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

import browser
import reports
from hf_fullpay.diagnosis.compare import compare

LOOK = (Path(__file__).parent / "look.js").read_text()
CASES = [*reports.AWKWARD, "compared", "unlike"]
SIZES = list(product((1280, 360), (False, True)))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if browser.found() is None:
        missing = "Install Debian's package chromium (or Chrome): pages are tested in a real browser."
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    opened = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every page, written once."""
    out = tmp_path_factory.mktemp("pages")
    made = {name: make() for name, make in reports.AWKWARD.items()}
    made["compared"] = compare(reports.report(panels=12), reports.report(seed=1, panels=12, better=0.5))
    made["unlike"] = compare(reports.deep(), reports.ragged())
    return {name: one.save(out / name) for name, one in made.items()}


@pytest.mark.parametrize(("width", "dark"), SIZES, ids=lambda value: str(value))
@pytest.mark.parametrize("case", CASES)
def test_every_figure_is_seen(chromium, pages, tmp_path, case, width, dark):
    chromium.open(pages[case], width, dark=dark)
    assert chromium.ask(LOOK) == []
    assert chromium.complaints == []
    picture = Image.open(chromium.picture(tmp_path / "page.png")).convert("RGB")
    colours = picture.getcolors(picture.width * picture.height)
    assert picture.width == width
    assert len(colours) > 20
    ground = max(colours)[1]
    assert (sum(ground) < 150) == dark


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("document.querySelector('svg.plot').style.display = 'none'", "is not visible"),
        ("document.querySelector('svg.plot').style.width = '2000px'", "scrolls sideways"),
        ("document.querySelector('h1').style.color = 'gray'", "contrast"),
        ("document.querySelector('.plot circle').setAttribute('cx', 'nan')", "has no place"),
        ("document.querySelector('.panels img').src = 'data:,'", "is no picture"),
    ],
)
def test_faults_are_seen(chromium, pages, fault, complaint):
    chromium.open(pages["single"], 360)
    chromium.ask(f"document.querySelector('svg.plot').style.maxWidth = 'none'; {fault}")
    chromium.ask("new Promise((done) => setTimeout(done, 50))")  # a picture loads
    assert any(complaint in found for found in chromium.ask(LOOK))


def test_without_scripts(chromium, pages):
    chromium.open(pages["real"], 360, scripts=False)
    try:
        assert chromium.ask(LOOK) == []
    finally:
        chromium.call("Emulation.setScriptExecutionDisabled", value=False)


def test_numbers_by_keyboard(chromium, pages):
    chromium.open(pages["real"], 1280)
    chromium.ask('document.querySelector("#weights svg.plot").focus()')
    readout = 'document.querySelector("#weights .readout").textContent'
    chromium.press("ArrowRight", 39)
    assert chromium.ask(readout).startswith("layer 0, head 0: ")
    chromium.press("ArrowRight", 39)
    chromium.press("ArrowDown", 40)
    value = reports.report().values["below"][1][1]
    assert chromium.ask(readout) == f"layer 1, head 1: {value:.6g}"


def test_pictures_are_enlarged_and_closed_by_keyboard(chromium, pages):
    chromium.open(pages["real"], 360)
    chromium.ask('document.querySelector(".panels button").focus()')
    chromium.press("Enter", 13)
    box = chromium.ask(
        '(({width, right}) => [width, right])(document.querySelector("dialog img").getBoundingClientRect())'
    )
    assert box[0] > 200
    assert box[1] <= 360
    assert chromium.ask('document.querySelector("dialog h3").textContent').startswith("layer 0, head 0: ")
    chromium.press("Escape", 27)
    assert chromium.ask('document.querySelector("dialog").open') is False


def test_nothing_of_a_name_is_markup(chromium, pages):
    chromium.open(pages["hostile"], 1280)
    assert chromium.ask('document.querySelectorAll("script").length') == 1
    assert chromium.ask("document.querySelectorAll('img[src=x]').length") == 0
    assert chromium.ask('document.querySelector("h1").textContent') == reports.HOSTILE


def test_fragment_leaves_the_notebook_as_it_is(chromium, tmp_path):
    page = tmp_path / "notebook.html"
    around = "<!DOCTYPE html><h1>Mine</h1><table><tr><td>mine</td></tr></table>{}"
    style = """[["h1", "font"], ["h1", "margin"], ["td", "padding"], ["body", "background"]].map(
        ([name, part]) => getComputedStyle(document.querySelector(name))[part])"""
    page.write_text(around.format(""))
    chromium.open(page, 1000)
    before = chromium.ask(style)
    page.write_text(around.format(reports.hostile()._repr_html_()), encoding="utf-8", errors="xmlcharrefreplace")
    chromium.open(page, 1000)
    assert chromium.ask(style) == before
    assert chromium.ask('document.querySelectorAll(".fullpay svg.plot").length') > 5
    assert chromium.complaints == []


def test_size_and_self_containment(pages):
    text = pages["real"].read_text(encoding="utf-8")
    assert len(text) < 2e6
    for outside in ("http:", "https:", "@import", "url("):
        assert outside not in text
