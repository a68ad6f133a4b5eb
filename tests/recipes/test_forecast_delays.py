"""The corridor recipe, tiny. Without UXsim a made-up corridor stands in for it."""

import json

import pytest
import torch
import yaml

import forecast_delays as recipe

VALUES = yaml.safe_load((recipe.HERE / "configs" / "forecast_delays.yaml").read_text())


def made_up(values, seed):
    """White counts that move down the road undisturbed."""
    generator = torch.Generator().manual_seed(seed)
    source, hop = torch.randn(300, generator=generator), round(recipe.SPACING / recipe.SPEED / values["bin"])
    return torch.stack([source.roll(i * hop) for i in range(values["detectors"])], 1)[50:]


def test_quick_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "has_simulator", lambda: True)
    monkeypatch.setattr(recipe, "corridor", made_up)
    monkeypatch.setattr(recipe, "provenance", lambda packages: {"packages": packages})
    assert recipe.main(["--quick", "--steps", "2", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "forecast_delays.json").read_text())
    assert [row["kind"] for row in result["rows"]] == ["mean", *recipe.KINDS]
    learned = result["rows"][2]
    assert learned["delays"].keys() >= {"error_seconds", "chance_seconds", "rank_correlation", "shuffles_as_good"}
    assert "Held-out" in capsys.readouterr().out


def test_a_missing_simulator_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "has_simulator", lambda: False)
    with pytest.raises(SystemExit):
        recipe.main(["--quick", "--out", str(tmp_path)])
    assert "needs the simulator: pip install --no-deps uxsim" in capsys.readouterr().err


def test_the_true_delays_pass_every_measure_and_one_value_for_all_none():
    truth = recipe.true_delays(VALUES)
    right = recipe.compare(truth, VALUES)
    assert right["error_seconds"] == 0
    assert right["rank_correlation"] == pytest.approx(1)
    assert right["shuffles_as_good"] < 0.01
    flat = recipe.compare(torch.full_like(truth, 5.0), VALUES)
    assert flat["error_seconds"] == pytest.approx(flat["chance_seconds"])
    assert flat["rank_correlation"] == 0
    assert flat["shuffles_as_good"] == 1


@pytest.mark.parametrize("kind", recipe.KINDS)
def test_a_forecast_sees_only_what_is_shown(kind):
    road = recipe.Road(kind, VALUES).eval()
    past = torch.randn(1, VALUES["lags"], VALUES["detectors"], requires_grad=True)
    shown = torch.zeros(1, VALUES["detectors"], VALUES["detectors"], dtype=torch.bool)
    shown[:, :, 2] = True
    (gradient,) = torch.autograd.grad(road(past, shown)[0, 5], past)
    assert gradient[..., 2].abs().min() > 0
    assert not gradient[..., [0, 1, 3, 4, 5, 6, 7]].any()


def test_delays_and_strengths_learn():
    road = recipe.Road("learned", VALUES)
    shown = torch.ones(2, VALUES["detectors"], VALUES["detectors"], dtype=torch.bool)
    road(torch.randn(2, VALUES["lags"], VALUES["detectors"]), shown).square().sum().backward()
    assert road.delays.grad.abs().max() > 0
    betas = [p for name, p in road.named_parameters() if "beta_bias" in name]
    assert [b.shape for b in betas] == [(VALUES["heads"],)]
    assert betas[0].grad.abs().max() > 0
    assert not recipe.Road("given", VALUES).delays.requires_grad


def test_uxsim_counts_move_down_the_road():
    """The delay of the largest correlation is the free time of travel."""
    pytest.importorskip("uxsim")
    counts = recipe.corridor(VALUES | {"hours": 1, "detectors": 4}, 0)
    correlation = [(counts[20:, 1] * counts[20 - lag : len(counts) - lag, 0]).mean() for lag in range(6)]
    assert torch.stack(correlation).argmax() == 2
