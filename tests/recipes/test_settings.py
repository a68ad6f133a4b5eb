"""Bad configs and folders are refused in a sentence, before anything is computed."""

import pytest
import yaml

import forecast_delays
import forecast_sine

RECIPES = pytest.mark.parametrize("recipe", [forecast_sine, forecast_delays], ids=["sine", "delays"])


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch):
    for recipe in (forecast_sine, forecast_delays):
        monkeypatch.setattr(recipe, "train", lambda *_: pytest.fail("trained"))


def refused(recipe, capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        recipe.main(list(map(str, arguments)))
    assert ended.value.code == 2
    return capsys.readouterr().err


@RECIPES
@pytest.mark.parametrize(
    "text", ["", "a: [", "- 1", "\x00", "seeds: 3"], ids=["empty", "broken", "list", "bytes", "few"]
)
def test_configs(recipe, tmp_path, capsys, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert "--config: expected" in refused(recipe, capsys, "--config", path)
    assert "--config: expected" in refused(recipe, capsys, "--config", tmp_path / "missing.yaml")
    assert "--config: expected" in refused(recipe, capsys, "--config", tmp_path)


@RECIPES
@pytest.mark.parametrize("change", [{"stps": 3}, {"steps": 0}, {"steps": True}, {"steps": 2.5}, {"batch": "x"},
                                    {"learning_rate": float("nan")}, {"learning_rate": -1}], ids=str)  # fmt: skip
def test_values(recipe, tmp_path, capsys, change):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(recipe.CONFIG.read_text()) | change))
    assert next(iter(change)) in refused(recipe, capsys, "--config", path)


@RECIPES
@pytest.mark.parametrize("option", ["--seeds", "--steps"])
@pytest.mark.parametrize("value", ["0", "-1", "x", "2.5"])
def test_counts(recipe, capsys, option, value):
    assert "at least 1" in refused(recipe, capsys, option, value)


@RECIPES
def test_folders(recipe, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "--out: expected a folder that can be written to" in refused(recipe, capsys, "--out", tmp_path / "file")
