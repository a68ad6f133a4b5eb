"""Runs side by side: hand-computed numbers, and runs that cannot be compared."""

import json
import math

import pytest

import compare as recipe


def write(folder, attention, seed, loss, **values):
    folder.mkdir()
    origin = {"command": f"run {attention}", "commit": "abc", "versions": {}, "device": "cpu", "threads": 1}
    written = {
        "provenance": origin, "values": {"seed": seed, "batch": 2} | values, "attention": attention,
        "all": {"loss": loss}, "cpu_seconds": 2, "setting": {"length": 8, "parameters": 100 + len(attention)},
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(written))


@pytest.fixture
def runs(tmp_path):
    for attention, losses in (("sdpa", [1.0, 2.0, 3.0]), ("lia", [1.5, 2.5, 4.0])):
        for seed, loss in enumerate(losses):
            write(tmp_path / f"{attention}-{seed}", attention, seed, loss)
    return tmp_path


def test_numbers(runs, capsys):
    arguments = [
        *map(str, sorted(runs.iterdir())),
        "--figures",
        "all.loss",
        "--note",
        "small",
        "--out",
        str(runs / "table.json"),
    ]
    assert recipe.main(arguments) == 0
    assert "+0.6667 +- 0.1667" in capsys.readouterr().out
    result = json.loads((runs / "table.json").read_text())
    rows = {row["attention"]: row for row in result["rows"]}
    assert rows["sdpa"]["figures"]["all.loss"] == {
        "mean": 2.0, "error": pytest.approx(1 / math.sqrt(3)), "by_seed": [1.0, 2.0, 3.0]
    }  # fmt: skip
    assert rows["sdpa"]["difference"] is None
    assert rows["lia"]["difference"]["all.loss"] == {"mean": pytest.approx(2 / 3), "error": pytest.approx(1 / 6)}
    assert result["provenance"]["cpu_seconds"] == 12
    assert result["seeds"] == [0, 1, 2]
    assert result["note"] == "small"


def test_one_seed_has_no_error():
    assert recipe.mean_and_error([3.0]) == {"mean": 3.0, "error": None}


def refused(capsys, folder, *more):
    with pytest.raises(SystemExit) as ended:
        recipe.main([*map(str, sorted(folder.iterdir())), "--figures", "all.loss", *more])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_bad_input(runs, capsys):
    assert "--against: expected one of" in refused(capsys, runs, "--against", "band")
    assert "expected names of numbers" in refused(capsys, runs, "--figures", "all")
    write(runs / "more", "lia", 7, 1.0)
    assert "expected the seeds [0, 1, 2] of sdpa" in refused(capsys, runs)
    write(runs / "other", "lia", 8, 1.0, batch=3)
    assert "differ in attention and seed alone" in refused(capsys, runs)
    (runs / "other" / "results.json").write_text("{")
    assert "expected the folder of a finished run" in refused(capsys, runs)


def test_twice_the_same_seed(runs, capsys):
    write(runs / "again", "sdpa", 1, 1.0)
    assert "got two of sdpa with seed 1" in refused(capsys, runs)
