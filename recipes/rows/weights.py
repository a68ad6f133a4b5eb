"""F3, F4, F5: what ordinary attention leaves unpaid, how far gradients reach, how sharp rows are, and what a floor does.

A trained encoder reads film reviews under ordinary attention and under floors of growing budgets; nothing is trained. A
"seed" is a sample of reviews, the same for every attention.
"""

from __future__ import annotations

from typing import Any

import hf_fullpay
from hf_fullpay import AttentionPlan, Mixture
from rows.material import encoder, reviews
from rows.row import HOLDS, IN_PART, NOT, Figures, Row, Verdict, mean, seeds

SHORT, LONG = 64, 256  # under and over the 100 keys at which a floor of 0.01 becomes impossible
MEASURES = {"weights": ("below", "below_relative", "coverage"), "entropy": ("entropy", "entropy_relative"),
            "reach": ("near_over_far",)}  # fmt: skip
SIZES = {
    "quick": {"model": "minilm", "seeds": 2, "documents": 1, "budgets": [0.64]},
    "here": {"model": "minilm", "seeds": 3, "documents": 2, "budgets": [0.2, 0.64]},
    "full": {"model": "bert-base-uncased", "seeds": 10, "documents": 64, "budgets": [0.2, 0.64]},
}
MATERIAL = "all-MiniLM-L6-v2, the last 64 and the last 256 tokens of film reviews (IMDB)"


def attentions(budgets: list[float]) -> dict[str, str]:
    """Names for Transformers, by label. A budget of 0.64 gives each of 64 keys the 0.01 that was asked for."""
    found = {"ordinary": "sdpa", "fullpay, budget 0.05": "fullpay"}
    for budget in budgets:
        name = f"evidence_{round(100 * budget)}"
        hf_fullpay.register(name, AttentionPlan(payment=Mixture(floor=0.01, budget=budget)))
        found[f"budget {budget}"] = name
    return found


def run(check: str, values: dict[str, Any]) -> dict[str, Any]:
    """One check of `hf_fullpay.diagnose` under every attention and both lengths."""
    model, tokenizer = encoder(values["model"])
    figures: Figures = {}
    for length in (SHORT, LONG):
        settings = hf_fullpay.diagnosis.Settings(far=min(100, length // 2), documents=values["documents"])
        for label, name in attentions(values["budgets"]).items():
            model.set_attn_implementation(name)
            for seed in seeds(values):
                batch = reviews(tokenizer, seed, values["documents"], length)
                report = hf_fullpay.diagnose(model, batch, checks=[check], settings=settings, progress=False)
                for measure in MEASURES[check]:
                    found = report.values[measure]
                    # Layer 0 is end to end: from the model's output back to its embeddings.
                    number = found[0] if measure == "near_over_far" else _mean(found)
                    figures.setdefault(label, {}).setdefault(f"{measure}, n = {length}", []).append(number)
    return {"figures": figures, "against": "ordinary"}


def _mean(values: Any) -> float:
    return sum(sum(row) / len(row) for row in values) / len(values)


def strongest(result: dict[str, Any]) -> str:
    """The attention with the largest budget."""
    return list(result["figures"])[-1]


def judge_shares(result: dict[str, Any]) -> Verdict:
    """F3."""
    ordinary = [mean(result, "ordinary", f"below, n = {n}") for n in (SHORT, LONG)]
    paid = [mean(result, strongest(result), f"below, n = {n}") for n in (SHORT, LONG)]
    preset = [mean(result, "fullpay, budget 0.05", f"below, n = {n}") for n in (SHORT, LONG)]
    ours = (
        f"ordinary {ordinary[0]:.0%} of weights at n = {SHORT}, {ordinary[1]:.0%} at {LONG}; a floor of 0.01 with "
        f"budget 0.64: {paid[0]:.0%} and {paid[1]:.0%}; the preset: {preset[0]:.0%} and {preset[1]:.0%}"
    )
    first, second = min(ordinary) > 0.30, paid[0] == 0
    word = HOLDS if first and second and paid[1] == 0 else IN_PART if first or second else NOT
    why = "over 100 keys no attention can give each 0.01, and a preset's small budget gives less" if paid[1] else ""
    return Verdict(word, ours, why)


def judge_reach(result: dict[str, Any]) -> Verdict:
    """F4."""
    name = f"near_over_far, n = {LONG}"
    ordinary, paid = mean(result, "ordinary", name), mean(result, strongest(result), name)
    preset = mean(result, "fullpay, budget 0.05", name)
    ours = f"near / far at n = {LONG}: ordinary {ordinary:.1f}x, preset {preset:.1f}x, budget 0.64 {paid:.1f}x"
    first, second = ordinary >= 10, paid <= 5 and preset <= 5
    if first and second:
        return Verdict(HOLDS, ours)
    shy = "" if first else "ordinary attention, through all layers, is not one to two orders of magnitude short"
    return Verdict(IN_PART if first or second or paid <= 5 else NOT, ours, shy)


def judge_entropy(result: dict[str, Any]) -> Verdict:
    """F5."""
    ordinary = [mean(result, "ordinary", f"entropy, n = {n}") for n in (SHORT, LONG)]
    preset, paid = (
        [mean(result, label, f"entropy, n = {n}") for n in (SHORT, LONG)]
        for label in ("fullpay, budget 0.05", strongest(result))
    )
    ours = (
        f"ordinary {ordinary[0]:.2f} nats at n = {SHORT}, {ordinary[1]:.2f} at {LONG}; "
        f"preset {preset[0]:.2f} and {preset[1]:.2f}; budget 0.64 {paid[0]:.2f} and {paid[1]:.2f}"
    )
    first, second = max(ordinary) < 2.0, min(preset) > 3.0
    if first and second:
        return Verdict(HOLDS, ours)
    why = "entropy grows with log n, so that no fixed line tells them apart; full payment raises it"
    return Verdict(IN_PART if first or second else NOT, ours, why)


F3 = Row(
    name="F3",
    figure="over 30 % of weights under 0.01 in ordinary attention; all above it with full payment",
    measured="share of visible keys with a weight under 0.01, mean over rows, heads and layers; no training",
    material=MATERIAL,
    rule="holds if ordinary > 30 % at both lengths and none is under 0.01 with a floor of 0.01 there; in part if "
    "one of these holds (at 64 tokens)",
    judge=judge_shares,
    run=lambda values: run("weights", values),
    sizes=SIZES,
)
F4 = Row(
    name="F4",
    figure="gradient of far against near tokens: ordinary 1 to 2 orders of magnitude smaller, full payment within 5x",
    measured="gradient norm at the 5 nearest positions over that at positions 100 and more away, end to end; no training",
    material=MATERIAL,
    rule="holds if ordinary >= 10x and full payment (preset and budget 0.64) <= 5x; in part if one of them",
    judge=judge_reach,
    run=lambda values: run("reach", values),
    sizes=SIZES,
)
F5 = Row(
    name="F5",
    figure="attention entropy under 2.0 (ordinary), over 3.0 (full payment)",
    measured="entropy of a row in nats, mean over rows, heads and layers; no training",
    material=MATERIAL,
    rule="holds if ordinary < 2.0 and the preset > 3.0 at both lengths; in part if one of these",
    judge=judge_entropy,
    run=lambda values: run("entropy", values),
    sizes=SIZES,
)
