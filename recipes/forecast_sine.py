"""The sine stress test: train on [0, 2 pi], forecast [100 pi, 102 pi].

    python recipes/forecast_sine.py                      all variants, 10 seeds, one thread
    python recipes/forecast_sine.py --quick              a look, under a minute
    python recipes/forecast_sine.py --validate           how the values of the config were chosen

Two protocols, and they ask different things:

    x        the model is given x and asked for sin x: extrapolation to inputs fifty times larger than any seen
    window   the model is given the last readings of the series and asked for the next, then fed its own answers for a
             whole period: the readings before 100 pi are the only thing it knows about where it is

Rows: five architectures (multilayer perceptron, LSTM, and a Transformer with sinusoidal, learned and rotary positions;
the report that this test follows gives five errors, 0.42 / 0.18 / 0.11 / 0.07 / 0.03, without naming the architectures,
so these five are a choice, set against those figures rank by rank), and the Transformer whose positions
validated best with full payment, bounded scores and a band. Beside them two answers that need no model: always zero
(2 / pi = 0.637), and the last period once more (exact by construction: it is told the period).

All variants see the same batches. Windows of readings inside the training interval are flipped in sign half of the
time: an interval of one period holds no window that crosses its end, and a flipped one from the middle looks like it.
The figure is the mean absolute error over the test interval; a seed passes the window protocol under 0.05.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay import (
    AttentionPlan,
    Band,
    Bounded,
    FullPayForecaster,
    FullPayForecasterConfig,
    FullPayWarning,
    Mixture,
)
from origin import provenance
from settings import count, folder, settings

HERE = Path(__file__).parent
CONFIG = HERE / "configs" / "forecast_sine.yaml"
TRAIN, HELD_OUT, TEST = 2 * math.pi, 1.5 * math.pi, 100 * math.pi
PASS = 0.05
SOURCE = (0.42, 0.18, 0.11, 0.07, 0.03)  # the figures quoted, without the names of their architectures
QUICK = {"seeds": 2, "steps": 40}
ARCHITECTURES = ("mlp", "lstm", "sinusoidal", "learned", "rotary")
VARIANTS = (*ARCHITECTURES, "fullpay", "bounded", "band")
WARM_UP = 2  # readings without which the phase is unknown; what follows them is not asked for in training


class Perceptron(nn.Module):
    """The last `window` readings side by side, through two hidden layers, at every place of a sequence."""

    def __init__(self, channels: int, window: int, hidden: int) -> None:
        super().__init__()
        self.window = window
        self.layers = nn.Sequential(
            nn.Linear(window * channels, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(),
            nn.Linear(hidden, channels),
        )  # fmt: skip

    def forward(self, values: Tensor) -> Tensor:
        rows = nn.functional.pad(values, (0, 0, self.window - 1, 0)).unfold(1, self.window, 1)
        return values + self.layers(rows.flatten(2))


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(channels, hidden, batch_first=True), nn.Linear(hidden, channels)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.head(self.cell(values)[0])


class Attentive(nn.Module):
    """A forecaster of the package."""

    def __init__(self, channels: int, variant: str, values: dict[str, Any]) -> None:
        super().__init__()
        plans = {
            "fullpay": AttentionPlan(payment=Mixture(floor=values["floor"], budget=values["budget"])),
            "bounded": AttentionPlan(scores=Bounded(bound=values["bound"], centre="mean", temperature="auto")),
            "band": AttentionPlan(reach=Band(values["band"])),
        }
        attention: dict[str, Any] = {"attn_implementation": "sdpa"}
        if variant in plans:
            attention = {"fullpay": plans[variant].to_dict()}
        config = FullPayForecasterConfig(
            channels=channels, context_length=values["window"], hidden_size=values["hidden"],
            num_hidden_layers=values["layers"], num_attention_heads=values["heads"],
            positions=values["positions"] if variant in plans else variant, initializer_range=values["initializer_range"],
            **attention,
        )  # fmt: skip
        self.forecaster = FullPayForecaster(config)

    def forward(self, values: Tensor) -> Tensor:
        return self.forecaster(values).prediction


def build(variant: str, protocol: str, values: dict[str, Any]) -> nn.Module:
    """A model that maps (B, N, C) to (B, N, C). Protocol x has a second channel, empty, where the answer appears, so
    that no residual path carries x itself into it."""
    channels = 2 if protocol == "x" else 1
    if variant == "mlp":
        return Perceptron(channels, 1 if protocol == "x" else values["window"], values["hidden"])
    return Recurrent(channels, values["hidden"]) if variant == "lstm" else Attentive(channels, variant, values)


def as_input(x: Tensor) -> Tensor:
    """x as a model gets it, in units of the training interval."""
    scaled = (x - TRAIN / 2) / (TRAIN / 2)
    return torch.stack([scaled, torch.zeros_like(x)], -1).float()


def train(variant: str, protocol: str, seed: int, values: dict[str, Any], end: float = TRAIN) -> nn.Module:
    """A model trained on the sine over [0, end]."""
    torch.manual_seed(seed)
    model, window = build(variant, protocol, values), values["window"]
    step = 2 * math.pi / values["readings_per_period"]
    optimizer = torch.optim.AdamW(model.parameters(), values["learning_rate"], weight_decay=values["weight_decay"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, values["learning_rate"], values["steps"], pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)  # the same batches for every variant
    for _ in range(values["steps"]):
        start = torch.rand(values["batch"], 1, generator=generator, dtype=torch.float64) * (end - window * step)
        x = start + step * torch.arange(window + 1)
        sine = x.sin().float()
        if protocol == "x":
            error = model(as_input(x[:, 1:]))[..., 1] - sine[:, 1:]
        else:
            sine = sine * (torch.randint(0, 2, (len(x), 1), generator=generator) * 2 - 1)
            error = (model(sine[:, :-1, None])[..., 0] - sine[:, 1:])[:, WARM_UP:]
        optimizer.zero_grad()
        error.square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def forecast(model: nn.Module, protocol: str, start: float, count: int, values: dict[str, Any]) -> Tensor:
    """`count` answers from x = start on."""
    window, step = values["window"], 2 * math.pi / values["readings_per_period"]
    if protocol == "x":
        x = start + step * torch.arange(1 - window, count, dtype=torch.float64)
        return model(as_input(x.unfold(0, window, 1)))[:, -1, 1]
    found = (start + step * torch.arange(-window, 0, dtype=torch.float64)).sin().float()[None, :, None]
    for _ in range(count):
        found = torch.cat([found, model(found[:, -window:])[:, -1:]], 1)
    return found[0, window:, 0]


def error_of(answers: Tensor, start: float, values: dict[str, Any]) -> float:
    """Mean absolute error of answers from x = start on."""
    x = start + 2 * math.pi / values["readings_per_period"] * torch.arange(len(answers), dtype=torch.float64)
    return (answers - x.sin()).abs().mean().item()


def validate(values: dict[str, Any], variants: list[str]) -> None:
    """Errors inside the training interval, the last quarter of which was held out: what values are chosen by."""
    window, period = values["window"], values["readings_per_period"]
    start = window * 2 * math.pi / period
    for variant in variants:
        errors = []
        for seed in range(values["seeds"]):
            model = train(variant, "window", seed, values, HELD_OUT)
            errors.append(error_of(forecast(model, "window", start, period - window, values), start, values))
        print(f"{variant:<12}{statistics.mean(errors):.4f}  worst {max(errors):.4f}", flush=True)


def without_model(values: dict[str, Any]) -> dict[str, Tensor]:
    """Answers that nothing was trained for."""
    period = values["readings_per_period"]
    x = TEST + 2 * math.pi / period * torch.arange(-period, 0, dtype=torch.float64)
    return {"predict zero": torch.zeros(period), "repeat the last period": x.sin().float()}


def run(values: dict[str, Any], variants: list[str]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Tensor]]]:
    """Rows of the table, and the forecasts of the first seed by protocol and name."""
    rows, drawn = [], {protocol: dict(without_model(values)) for protocol in ("x", "window")}
    for name, answers in without_model(values).items():
        rows.append({"protocol": "none", "variant": name, "mae": error_of(answers, TEST, values)})
    for protocol in ("x", "window"):
        for variant in variants:
            began, errors = time.process_time(), []
            for seed in range(values["seeds"]):
                model = train(variant, protocol, seed, values)
                answers = forecast(model, protocol, TEST, values["readings_per_period"], values)
                errors.append(error_of(answers, TEST, values))
                if seed == 0:
                    drawn[protocol][variant] = answers
            row = {
                "protocol": protocol, "variant": variant, "mae": statistics.mean(errors),
                "deviation": statistics.stdev(errors) if len(errors) > 1 else 0.0,
                "passed": sum(error < PASS for error in errors), "errors": errors,
                "cpu_seconds": round(time.process_time() - began, 1),
            }  # fmt: skip
            rows.append(row)
            print(
                f"{protocol:<8}{variant:<12}MAE {row['mae']:.4f} +- {row['deviation']:.4f}   "
                f"{row['passed']}/{len(errors)} under {PASS}   {row['cpu_seconds']:.0f} s",
                flush=True,
            )
    return rows, drawn


def verdict(rows: list[dict[str, Any]], seeds: int) -> str:
    """Whether the target is met, in words."""
    window = [row for row in rows if row["protocol"] == "window"]
    extrapolated = min(row["mae"] for row in rows if row["protocol"] == "x")
    best = max(window, key=lambda row: (row["passed"], -row["mae"]))
    ranked = sorted((row["mae"] for row in window if row["variant"] in ARCHITECTURES), reverse=True)
    under = sum(ours < theirs for ours, theirs in zip(ranked, SOURCE, strict=False))
    met = "met" if best["passed"] >= 0.9 * seeds else "missed"
    return (
        f"Target (MAE under {PASS} on 9 of 10 seeds, best variant, window protocol): {met} by {best['variant']}, "
        f"{best['passed']} of {seeds}, MAE {best['mae']:.4f}. Rank by rank {under} of {len(SOURCE)} architectures lie under "
        f"the source's figures there. Given x alone the best is {extrapolated:.3f}, against {2 / math.pi:.3f} for zero: "
        "nothing in the training interval says that the function repeats."
    )


def plot(drawn: dict[str, dict[str, Tensor]], values: dict[str, Any], path: Path) -> None:
    """The forecasts of the first seed over the test interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, constrained_layout=True)
    period = values["readings_per_period"]
    places = 100 + 2 / period * torch.arange(period)
    for panel, (protocol, curves) in zip(panels, drawn.items(), strict=True):
        for name, answers in curves.items():
            wide = name == "repeat the last period"
            panel.plot(
                places, answers, "k" if wide else "", lw=4 if wide else 1.2, alpha=0.3 if wide else 1, label=name
            )
        panel.set(title=f"protocol {protocol}, seed 0", ylabel="forecast", ylim=(-1.6, 1.6))
    panels[0].legend(ncols=2, fontsize=7)
    panels[1].set_xlabel("x / pi")
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="YAML of values")
    parser.add_argument("--seeds", type=count, help="number of seeds (of the config: 10)")
    parser.add_argument("--steps", type=count, help="training steps")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="rows (all)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK['seeds']} seeds of {QUICK['steps']} steps")
    parser.add_argument("--validate", action="store_true", help="errors on the held-out part of the training interval")
    parser.add_argument("--out", type=Path, help="folder for the results (recipes/results; a quick look: runs/quick)")
    options = parser.parse_args(arguments)
    values = settings(parser, options.config, CONFIG) | (QUICK if options.quick else {})
    values |= {name: getattr(options, name) for name in ("seeds", "steps") if getattr(options, name) is not None}
    torch.set_num_threads(1)
    warnings.simplefilter("error", FullPayWarning)  # a floor that is not given in full would be another experiment
    if options.validate:
        validate(values, options.variants)
        return 0
    out = folder(parser, options.out or (Path("runs/quick") if options.quick else HERE / "results"))
    origin = provenance()  # of the code that runs, not of what is there when it ends
    rows, drawn = run(values, options.variants)
    told = verdict(rows, values["seeds"])
    print(told)
    result = {"provenance": origin, "values": values, "verdict": told, "rows": rows}
    (out / "forecast_sine.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(drawn, values, out / "forecast_sine.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
