"""What becomes of a report: JSON, Markdown, pandas, pictures, files, and two reports compared."""

from __future__ import annotations

import builtins
import json
import math
import warnings

import pytest
from PIL import Image

import reports
from hf_fullpay.diagnosis.compare import compare
from hf_fullpay.diagnosis.plots import pictures
from hf_fullpay.diagnosis.ramp import Scale, colour, png
from hf_fullpay.diagnosis.report import Report, shown
from hf_fullpay.diagnosis.svg import ticks

each = pytest.mark.parametrize("make", reports.AWKWARD.values(), ids=reports.AWKWARD)


@each
def test_json_round_trip(make, tmp_path):
    made = make()
    data = json.loads(made.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    again = Report.from_dict(data)
    assert again.to_dict() == made.to_dict()
    made.save(tmp_path)
    assert Report.load(tmp_path).to_dict() == Report.load(tmp_path / "report.json").to_dict() == made.to_dict()


@pytest.mark.parametrize("data", [{}, {"findings": 3}, {"findings": {"curves": {"a": {"b": 1}}}}, []])
def test_json_of_something_else(data):
    with pytest.raises(ValueError, match="expected the JSON of a report"):
        Report.from_dict(data)


@each
def test_text_and_markdown(make):
    made = make()
    assert made.title.split()[0] in str(made)
    text = made.to_markdown()
    assert "<script>" not in text
    assert "<img" not in text
    for table in text.split("\n\n"):
        rows = [line for line in table.splitlines() if line.startswith("|")]
        bars = {row.replace("\\|", "").count("|") for row in rows}
        assert len(bars) <= 1, table


@each
def test_pandas(make):
    made = make()
    frame = made.to_pandas()
    if not made.layers:
        assert frame.empty
        return
    assert frame["layer"].nunique() == len(made.layers)
    entropy = made.values["entropy"]
    for layer, row in enumerate(entropy):
        ours = frame[frame["layer"] == layer].sort_values("head")["entropy"].dropna().tolist()
        assert ours == [number for number in row if not math.isnan(number)]


@each
def test_fragment(make):
    text = make()._repr_html_()
    assert text.count("<style>") == 1
    assert "<script" not in text


@pytest.mark.parametrize(("name", "suffix"), [("single", ".svg"), ("ragged", ".png"), ("hostile", ".svg")])
def test_every_name_has_a_picture(name, suffix, tmp_path):
    made = reports.AWKWARD[name]()
    for index, picture in enumerate(pictures(made)):
        path = tmp_path / f"{index}{suffix}"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # the font has no emoji
            figure = made.plot(picture, path)
        assert figure.axes
        if suffix == ".png":
            image = Image.open(path)
            assert len(image.convert("RGB").getcolors(image.width * image.height)) > 10
        else:
            assert "<svg" in path.read_text(encoding="utf-8")


def test_pictures_name_everything_that_has_one():
    assert {"entropy", "coverage", "spike", "gradient", "by_distance", "weights"} <= set(
        pictures(reports.AWKWARD["real"]())
    )
    assert "leak" not in pictures(reports.AWKWARD["real"]())  # one number for the model
    assert pictures(reports.empty()) == []


def test_picture_of_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"expected one of below.*entropy.*weights, positions, got 'entropie'"):
        reports.report(2, 2, panels=2).plot("entropie")
    with pytest.raises(ValueError, match="this report has no pictures"):
        reports.empty().plot("entropy")
    with pytest.raises(ValueError, match=r"expected a file that ends in .png or .svg, got .*gif"):
        reports.single().plot("entropy", tmp_path / "a.gif")


def test_without_matplotlib(monkeypatch):
    stock = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return stock(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'hf-fullpay\[diagnose\]'"):
        reports.single().plot("entropy")


def test_folders_that_cannot_be_written(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for target in (taken, taken / "below"):
        with pytest.raises(ValueError, match=r"save: expected a folder.*, got .*taken"):
            reports.single().save(target)
    assert taken.read_text() == "mine"
    (tmp_path / "index.html").mkdir()
    with pytest.raises(ValueError, match="expected a folder that can be written"):
        reports.single().save(tmp_path)


def test_compare():
    before, after = reports.report(3, 4, panels=2), reports.report(3, 4, seed=1, panels=2, better=0.9)
    made = compare(before, after)
    entropy = next(line for line in made.lines if line.measure.name == "entropy")
    assert (entropy.before.passed, entropy.after.passed, entropy.improved) == (False, True, True)
    frame = made.to_pandas().set_index("measure")
    assert frame.loc["entropy", "change"] == entropy.change == entropy.after.value - entropy.before.value
    assert entropy.in_words.endswith("better")
    assert len(made.to_markdown().splitlines()) > len(made.lines)
    assert "FAIL" in str(made)
    assert json.loads(made.to_json())["lines"][0]["measure"] == "below"


def test_compare_what_differs():
    before, after = reports.report(2, 2, panels=2), reports.report(5, 3, panels=2)
    del after.findings.values["sink"], before.findings.values["entropy"]
    made = compare(before, after)
    names = [line.measure.name for line in made.lines]
    assert "sink" not in names
    assert "entropy" not in names
    assert any("only before: largest sink" in note for note in made.notes)
    assert any("only after: entropy" in note for note in made.notes)
    assert any("2 layers of 2 heads before, 5 layers of 3 heads after" in note for note in made.notes)
    assert compare(reports.empty(), before).lines == []


@pytest.mark.parametrize(("first", "second"), [(a, b) for a in reports.AWKWARD for b in ("ragged", "empty")])
def test_compare_anything(first, second, tmp_path):
    made = compare(reports.AWKWARD[first](), reports.AWKWARD[second]())
    assert made.save(tmp_path).exists()
    assert made._repr_html_()
    assert str(made)
    made.to_pandas()
    json.loads(made.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_compare_refuses():
    with pytest.raises(ValueError, match="after: expected a Report"):
        compare(reports.single(), {"no": "report"})


def test_ramp(tmp_path):
    import base64

    assert (colour(0), colour(1)) == ("#440154", "#fde725")
    data = png([[0.0, 1.0], [math.nan]], Scale.of([0.0, 1.0]))
    path = tmp_path / "a.png"
    path.write_bytes(base64.b64decode(data.split(",")[1]))
    image = Image.open(path).convert("RGBA")
    found = [image.getpixel(place) for place in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert [pixel[3] for pixel in found] == [255, 255, 0, 0]
    assert found[:2] == [(0x44, 0x01, 0x54, 255), (0xFD, 0xE7, 0x25, 255)]


@pytest.mark.parametrize(
    ("numbers", "log"),
    [([], False), ([1.0], True), ([0.0, 0.0], True), ([math.nan, math.inf], False), ([-1e308, 1e308], False),
     ([1e-300, 1e300], True), ([5e-324, 1e-323], False), ([3.0, 3.0 + 1e-15], False)],
)  # fmt: skip
def test_scales(numbers, log):
    scale = Scale.of(numbers, log)
    assert all(0 <= scale.share(number) <= 1 for number in (0.0, 1.0, -1.0, *numbers) if math.isfinite(number))
    found = ticks(scale)
    assert 1 <= len(found) <= 12
    assert all(map(math.isfinite, found))


@pytest.mark.parametrize(("number", "words"), [(0.0, "0"), (1416.2, "1416"), (12.345, "12.3"), (1e-8, "1.0e-08")])
def test_numbers_in_words(number, words):
    assert shown(number) == words


def test_infinity_survives_a_file(tmp_path):
    """A verdict that an infinite number broke is still broken when the report is read again."""
    made = reports.report(2, 2, panels=2)
    made.findings.values["row_error"] = [[0.0, math.inf], [0.0, 0.0]]
    made.save(tmp_path)
    line = next(line for line in Report.load(tmp_path).lines if line.measure.name == "row_error")
    assert (line.value, line.passed) == (math.inf, False)
