"""B8: over which learning rates does a model still train?

A small GPT-2 learns the bytes of film reviews from scratch, at every rate of a grid and under every attention, with equal
batches. A rate still trains if the loss of the last steps is at most a tenth above the best that ordinary attention has
at any rate, for the same seed. The figure is the largest rate that does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from data import table
from rows.row import HOLDS, IN_PART, NOT, Figures, Row, Verdict, gain, mean, seeds

ATTENTIONS = {"ordinary": "sdpa", "bounded": "bounded", "fullpay": "fullpay", "bounded_fullpay": "bounded_fullpay"}
SLACK = 1.1
LENGTH, SIZE_OF_BATCH = 128, 8
SIZES = {
    "quick": {
        "seeds": 2, "steps": 2, "width": 16, "layers": 1, "rates": [1e-3, 1e-2], "attentions": ["ordinary", "bounded"],
    },
    "here": {
        "seeds": 3, "steps": 100, "width": 48, "layers": 2, "rates": [1e-3, 4e-3, 1.6e-2, 6.4e-2, 0.256],
        "attentions": ["ordinary", "bounded", "fullpay"],
    },
    "full": {
        "seeds": 10, "steps": 20000, "width": 768, "layers": 12, "rates": [2.0**i * 1e-4 for i in range(12)],
        "attentions": list(ATTENTIONS),
    },
}  # fmt: skip


def text_bytes() -> torch.Tensor:
    """The reviews one after the other."""
    rows = table("reviews")
    assert rows is not None
    return torch.tensor(list("\n".join(rows["text"].iloc[:4000]).encode()), dtype=torch.uint8)


def final_loss(name: str, rate: float, seed: int, values: dict[str, Any], corpus: torch.Tensor) -> float:
    """Mean loss of the last tenth of the steps; infinity for a run that diverged to no number."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=values["width"], n_layer=values["layers"],
        n_head=max(values["width"] // 64, 4), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
        eos_token_id=0, attn_implementation=name,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    warm = max(values["steps"] // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warm, 1.0))
    order, losses = torch.Generator().manual_seed(seed), []  # the same batches for every attention and rate
    for _ in range(values["steps"]):
        starts = torch.randint(len(corpus) - LENGTH, (SIZE_OF_BATCH, 1), generator=order)
        ids = corpus[starts + torch.arange(LENGTH)].long().to(device)
        loss = model(input_ids=ids, labels=ids).loss
        if not loss.isfinite():
            return math.inf
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-warm:]) / len(losses[-warm:])


def run(values: dict[str, Any]) -> dict[str, Any]:
    """Losses by attention, rate and seed; the largest rate that still trains, as log2 of its multiple of the smallest."""
    corpus, rates = text_bytes(), values["rates"]
    losses = {
        label: {
            rate: [final_loss(ATTENTIONS[label], rate, seed, values, corpus) for seed in seeds(values)]
            for rate in rates
        }
        for label in values["attentions"]
    }
    best = [min(losses["ordinary"][rate][seed] for rate in rates) for seed in seeds(values)]
    figures: Figures = {
        label: {
            "log2 of the largest rate that trains": [largest(by_rate, rates, best, seed) for seed in seeds(values)],
            "best loss": [min(by_rate[rate][seed] for rate in rates) for seed in seeds(values)],
        }
        for label, by_rate in losses.items()
    }
    told = {
        label: {
            f"{rate:g}": [loss if math.isfinite(loss) else None for loss in found] for rate, found in by_rate.items()
        }
        for label, by_rate in losses.items()
    }
    return {"figures": figures, "against": "ordinary", "losses": told, "notes": _notes(losses)}


def largest(by_rate: dict[float, list[float]], rates: list[float], best: list[float], seed: int) -> float:
    """log2 of the largest rate that still trains; of half the smallest if none does."""
    good = [rate for rate in rates if by_rate[rate][seed] <= SLACK * best[seed]]
    return math.log2(max(good, default=rates[0] / 2))


def _notes(losses: dict[str, dict[float, list[float]]]) -> list[str]:
    return [
        f"Loss of {label} by rate, mean over seeds: "
        + ", ".join(f"{rate:g}: {sum(found) / len(found):.2f}" for rate, found in by_rate.items())
        for label, by_rate in losses.items()
    ]


def judge(result: dict[str, Any]) -> Verdict:
    """Whether bounded scores train at larger rates, and by what factor."""
    name = "log2 of the largest rate that trains"
    more, chance = gain(result, "bounded", name)
    base = 2 ** mean(result, "ordinary", name)
    ours = (
        f"largest rate that still trains: bounded {2**more:.2g} times ordinary's ({base:.2g}); "
        f"best loss {mean(result, 'bounded', 'best loss'):.3f} against {mean(result, 'ordinary', 'best loss'):.3f}"
    )
    if "fullpay" in result["figures"]:
        ours += f"; full payment {2 ** gain(result, 'fullpay', name)[0]:.2g} times"
    if more > 0 and more > chance:
        return Verdict(HOLDS, ours)
    why = "no difference beyond chance on this grid" if abs(more) <= chance else ""
    return Verdict(IN_PART if more > 0 else NOT, ours, why)


B8 = Row(
    name="B8",
    figure='bounded attention tolerates larger learning rates (no figure); "training stability +23 %" (B4)',
    measured="the largest rate of a grid at which a GPT-2 trained from scratch ends within a tenth of the best loss "
    "that ordinary attention reaches at any rate; AdamW, warm-up of a tenth, gradients clipped at 1",
    material="bytes of film reviews; GPT-2 of 2 layers, width 48, 128 positions",
    rule="holds if bounded's largest rate is higher, paired by seed, by more than two standard errors; in part if "
    "higher by less",
    judge=judge,
    run=run,
    sizes=SIZES,
)
