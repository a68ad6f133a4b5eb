"""Learn the delays of a road from its traffic: a stock BERT under the delay bias, on UXsim's simulated corridor.

    pip install --no-deps uxsim==1.15.1 dill             (and numpy, pandas, scipy, pillow, matplotlib, tqdm, pyyaml)
    python recipes/forecast_delays.py                    3 seeds, one thread
    python recipes/forecast_delays.py --quick            a look, under a minute

Eight detectors, 50 s of free driving apart, count vehicles; demand changes at random, and a quarter of the traffic enters
half-way. A token is one detector at one time. Eight more tokens, one per detector, ask for the next count; each sees
the past of a random few detectors, so that any one of them may have to do.

    none      ordinary attention, which knows a token's detector and time by a learned position
    learned   the same with s - beta_h |t_i - t_j - delay_ij|, beta and one delay per pair of detectors learned by the
              forecasting loss alone, from one value for all pairs
    given     the same with the true delays given and beta learned: what the bias can do at best

Stated measures, on pairs whose second detector lies upstream of the first (only there does a delay exist):
mean |learned - true delay| in seconds and Spearman's rank correlation of the two, beside chance: the same learned delays
shuffled over those pairs, 10,000 times, with the share of shuffles that do at least as well. And the mean squared error
of standardised counts on the last 30 % of the time, with all detectors shown, and with one upstream detector shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from hf_fullpay import AttentionPlan, DelayBias, convert
from origin import provenance
from settings import count, folder, settings

HERE = Path(__file__).parent
CONFIG = HERE / "configs" / "forecast_delays.yaml"
QUICK = {"seeds": 1, "steps": 20, "hours": 1}
KINDS = ("none", "learned", "given")
SPEED, SPACING = 20.0, 1000.0  # m/s, m


def corridor(values: dict[str, Any], seed: int) -> Tensor:
    """Standardised counts, (readings, detectors). Only here is UXsim needed."""
    from uxsim import World

    draw, ends = np.random.default_rng(seed), values["detectors"]
    seconds = int(values["hours"] * 3600)
    world = World(name="corridor", deltan=2, tmax=seconds, print_mode=0, save_mode=0, show_mode=0, random_seed=seed)
    nodes = [world.addNode(f"node{i}", i, 0) for i in range(ends + 1)]
    links = [
        world.addLink(f"link{i}", nodes[i], nodes[i + 1], length=SPACING, free_flow_speed=SPEED, jam_density=0.2)
        for i in range(ends)
    ]
    ramp = world.addNode("ramp", ends / 2, 1)
    world.addLink("on", ramp, nodes[ends // 2], length=SPACING, free_flow_speed=SPEED, jam_density=0.2)
    level = {"node0": 0.3, "ramp": 0.1}
    for start in range(0, seconds, 50):
        for origin, usual in (("node0", 0.3), ("ramp", 0.1)):
            level[origin] += 0.3 * (usual - level[origin]) + 0.4 * usual * draw.standard_normal()
            flow = float(np.clip(level[origin], 0.02, 1.5 * usual))
            world.adddemand(origin, f"node{ends}", start, start + 50, flow)
    world.exec_simulation()
    every = round(values["bin"] / world.DELTAT)
    counts = np.diff(np.stack([np.asarray(link.cum_arrival)[::every] for link in links]), axis=1)
    counts = torch.tensor(counts.T, dtype=torch.float32)[2 * ends :]  # the first vehicles have reached the end
    seen = counts[: int(0.7 * len(counts))]
    return (counts - seen.mean(0)) / seen.std(0)


def true_delays(values: dict[str, Any]) -> Tensor:
    """Readings that free traffic takes from detector j to detector i, (detectors, detectors); negative downstream."""
    place = torch.arange(values["detectors"], dtype=torch.float32)
    return (place[:, None] - place) * SPACING / SPEED / values["bin"]


class Road(nn.Module):
    """A BERT of one layer that reads `lags` counts of every detector and answers one token per detector."""

    def __init__(self, kind: str, values: dict[str, Any]) -> None:
        super().__init__()
        detectors, lags = values["detectors"], values["lags"]
        self.kind, self.detectors, tokens = kind, detectors, detectors * (lags + 1)
        config = BertConfig(
            vocab_size=2, hidden_size=values["hidden"], num_hidden_layers=1, num_attention_heads=values["heads"],
            intermediate_size=2 * values["hidden"], max_position_embeddings=tokens, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, initializer_range=0.1, attn_implementation="sdpa",
        )  # fmt: skip
        self.bert = BertModel(config)
        if kind != "none":
            self.bert = convert(self.bert, AttentionPlan(scores=DelayBias(beta=values["beta"])))
        self.embed, self.head = nn.Linear(2, values["hidden"]), nn.Linear(values["hidden"], 1)
        start = torch.full((detectors, detectors), (lags + 1) / 2)
        self.delays = nn.Parameter(true_delays(values) if kind == "given" else start, requires_grad=kind == "learned")
        # Asking tokens first, at time 0; then the newest counts of all detectors, at -1, and so on.
        ages = torch.arange(lags + 1).repeat_interleave(detectors)
        self.register_buffer("times", -ages.float()[None])
        self.register_buffer("who", torch.arange(detectors).repeat(lags + 1))

    def forward(self, past: Tensor, shown: Tensor) -> Tensor:
        """Next counts (B, S) from past (B, lags, S), newest first, where target i sees detector j if shown (B, S, S)."""
        batch, detectors = past.shape[0], self.detectors
        asked = torch.zeros(batch, detectors, 2)
        told = torch.stack([past.flatten(1), torch.ones(batch, past[0].numel())], -1)
        tokens = self.embed(torch.cat([asked, told], 1))
        n = tokens.shape[1]
        mask = torch.eye(n, dtype=torch.bool).repeat(batch, 1, 1, 1)
        mask[:, 0, :detectors, :] = shown[:, :, self.who]
        mask[:, 0, :detectors, :detectors] = False
        bias = {}
        if self.kind != "none":
            bias = {"times": self.times, "delays": self.delays[self.who][:, self.who]}
        states = self.bert(inputs_embeds=tokens, attention_mask=mask, **bias).last_hidden_state
        return self.head(states[:, :detectors])[..., 0]


def windows(counts: Tensor, places: Tensor, lags: int) -> tuple[Tensor, Tensor]:
    """The past of some readings, newest first, and the readings."""
    return counts[places[:, None] - torch.arange(1, lags + 1)], counts[places]


def train(kind: str, counts: Tensor, values: dict[str, Any], seed: int) -> Road:
    """A model trained on the first 70 % of the readings."""
    torch.manual_seed(seed)
    road, lags, detectors = Road(kind, values), values["lags"], values["detectors"]
    betas = [p for name, p in road.named_parameters() if "beta_bias" in name]
    rest = [
        p for name, p in road.named_parameters() if "beta_bias" not in name and name != "delays" and p.requires_grad
    ]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": values["learning_rate"]}]
    groups += [{"params": betas, "lr": values["beta_rate"], "weight_decay": 0.0}] if betas else []
    if kind == "learned":
        groups.append({"params": [road.delays], "lr": values["delay_rate"], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / values["steps"])
    generator, end = torch.Generator().manual_seed(seed), int(0.7 * len(counts))
    for _ in range(values["steps"]):
        places = torch.randint(lags, end, (values["batch"],), generator=generator)
        past, wanted = windows(counts, places, lags)
        shown = torch.rand(len(places), detectors, detectors, generator=generator) < values["shown"]
        one = torch.randint(detectors, (len(places), detectors, 1), generator=generator)
        shown.scatter_(2, one, True)
        loss = (road(past, shown) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(rest, 1.0)
        optimizer.step()
        schedule.step()
    return road.eval()


@torch.no_grad()
def held_out(road: Road, counts: Tensor, values: dict[str, Any]) -> dict[str, float]:
    """Squared errors on the last 30 % of the readings."""
    lags, detectors = values["lags"], values["detectors"]
    places = torch.arange(int(0.7 * len(counts)) + lags, len(counts))
    past, wanted = windows(counts, places, lags)
    everyone = torch.ones(len(places), detectors, detectors, dtype=torch.bool)
    found = {"all shown": (road(past, everyone) - wanted).square().mean().item()}
    errors = []
    for source in range(detectors - 1):
        only = torch.zeros_like(everyone)
        only[:, :, source] = True
        errors.append((road(past, only) - wanted)[:, source + 1 :].square().mean().item())
    return found | {"one upstream shown": statistics.mean(errors)}


def compare(learned: Tensor, values: dict[str, Any]) -> dict[str, float]:
    """Learned against true delays over upstream pairs, beside chance."""
    rows, columns = torch.tril_indices(values["detectors"], values["detectors"], -1)
    mine, truth = learned.detach()[rows, columns], true_delays(values)[rows, columns]
    error = (mine - truth).abs().mean().item()
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(len(mine), generator=generator) for _ in range(10_000)])
    shuffled = (mine[orders] - truth).abs().mean(1)
    ranks = [x.argsort().argsort().float() for x in (mine, truth)]
    # Equal delays share a rank, or the order within them would count.
    ranks = [
        torch.stack([rank[x == value].mean() for value in x]) for rank, x in zip(ranks, (mine, truth), strict=True)
    ]
    return {
        "error_seconds": error * values["bin"],
        "chance_seconds": shuffled.mean().item() * values["bin"],
        "start_seconds": ((values["lags"] + 1) / 2 - truth).abs().mean().item() * values["bin"],
        "rank_correlation": torch.corrcoef(torch.stack(ranks))[0, 1].nan_to_num().item(),
        "shuffles_as_good": (shuffled <= error).float().mean().item(),
        "within_one_reading": ((mine - truth).abs() <= 1).float().mean().item(),
    }


def has_simulator() -> bool:
    return importlib.util.find_spec("uxsim") is not None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="YAML of values")
    parser.add_argument("--seeds", type=count, help="number of seeds (of the config: 3)")
    parser.add_argument("--steps", type=count, help="training steps")
    parser.add_argument(
        "--quick", action="store_true", help=", ".join(f"{name} {value}" for name, value in QUICK.items())
    )
    parser.add_argument("--out", type=Path, help="folder for the results (recipes/results; a quick look: runs/quick)")
    options = parser.parse_args(arguments)
    values = settings(parser, options.config, CONFIG) | (QUICK if options.quick else {})
    values |= {name: getattr(options, name) for name in ("seeds", "steps") if getattr(options, name) is not None}
    out = folder(parser, options.out or (Path("runs/quick") if options.quick else HERE / "results"))
    if not has_simulator():
        parser.error("needs the simulator: pip install --no-deps uxsim==1.15.1 dill")
    torch.set_num_threads(1)
    origin, rows = provenance(("uxsim",)), []
    for seed in range(values["seeds"]):
        counts = corridor(values, seed)
        ahead = counts[int(0.7 * len(counts)) + values["lags"] :]
        rows.append({"seed": seed, "kind": "mean", "held_out": {"all shown": ahead.square().mean().item()}})
        for kind in KINDS:
            began = time.perf_counter()
            road = train(kind, counts, values, seed)
            row = {"seed": seed, "kind": kind, "held_out": held_out(road, counts, values)}
            if kind == "learned":
                row |= {"delays": compare(road.delays, values), "learned_delays": road.delays.tolist()}
            rows.append(row | {"seconds": round(time.perf_counter() - began, 1)})
            told = {**row["held_out"], **row.get("delays", {})}
            print(f"seed {seed} {kind:<8}" + "  ".join(f"{k} {v:.3f}" for k, v in told.items()), flush=True)
    told = verdict(rows)
    print(told)
    result = {"provenance": origin, "values": values, "verdict": told, "rows": rows}
    (out / "forecast_delays.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def verdict(rows: list[dict[str, Any]]) -> str:
    """Both questions of the recipe, answered seed by seed."""
    by = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    found = sum(row["delays"]["shuffles_as_good"] < 0.01 for row in by["learned"])
    seeds, sentences = len(by["learned"]), []
    for measure in ("all shown", "one upstream shown"):
        errors = {kind: [row["held_out"][measure] for row in of_kind] for kind, of_kind in by.items()}
        better = sum(a < b for a, b in zip(errors["learned"], errors["none"], strict=True))
        means = ", ".join(f"{kind} {statistics.mean(one):.3f}" for kind, one in errors.items())
        sentences.append(f"{measure}: {means}; learned beats none on {better} of {seeds} seeds")
    return (
        f"Delays found better than 99 % of shuffles on {found} of {seeds} seeds. Held-out squared error, "
        + "; ".join(sentences) + "."
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
