"""The sine stress test, tiny: every row is there, and the parts are what the recipe says."""

import json
import math

import pytest
import torch
import yaml

import forecast_sine as recipe

VALUES = yaml.safe_load((recipe.HERE / "configs" / "forecast_sine.yaml").read_text())


def test_quick_run(tmp_path, capsys):
    assert recipe.main(["--quick", "--seeds", "1", "--steps", "2", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "forecast_sine.json").read_text())
    named = {(row["protocol"], row["variant"]) for row in result["rows"]}
    assert named == {(p, v) for p in ("x", "window") for v in recipe.VARIANTS} | {
        ("none", "predict zero"),
        ("none", "repeat the last period"),
    }
    assert all(math.isfinite(row["mae"]) for row in result["rows"])
    assert result["provenance"].keys() >= {"command", "commit", "versions", "device", "threads"}
    assert result["values"]["steps"] == 2
    assert (tmp_path / "forecast_sine.png").stat().st_size > 10_000
    assert "Target" in capsys.readouterr().out


def test_answers_without_a_model():
    errors = {k: recipe.error_of(v, recipe.TEST, VALUES) for k, v in recipe.without_model(VALUES).items()}
    assert errors["predict zero"] == pytest.approx(2 / math.pi, rel=0.01)
    assert errors["repeat the last period"] < 1e-6


@pytest.mark.parametrize("variant", recipe.VARIANTS)
def test_no_model_looks_ahead(variant):
    """The windows of a sequence are those of a forecast: what follows a reading never enters what is said there."""
    model = recipe.build(variant, "window", VALUES).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    values = torch.randn(1, VALUES["window"], 1, requires_grad=True)
    output = model(values)
    (gradient,) = torch.autograd.grad(output[0, 3].sum(), values)
    assert gradient[0, 3].abs().max() > 0
    assert not gradient[0, 4:].any()


@pytest.mark.parametrize("protocol", ["x", "window"])
def test_training_stays_within_its_interval(protocol, monkeypatch):
    seen = []
    stock = torch.Tensor.sin
    monkeypatch.setattr(torch.Tensor, "sin", lambda x: seen.append(x) or stock(x))
    recipe.train("mlp", protocol, 0, VALUES | {"steps": 20})
    assert min(x.min() for x in seen) >= 0
    assert max(x.max() for x in seen) <= recipe.TRAIN + 1e-9


def test_validation_is_told_apart(capsys, tmp_path):
    assert recipe.main(["--validate", "--seeds", "1", "--steps", "2", "--variants", "mlp", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("mlp")
    assert not any(tmp_path.iterdir())


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        recipe.main(["--help"])
    assert end.value.code == 0
    assert "python recipes/forecast_sine.py" in capsys.readouterr().out
