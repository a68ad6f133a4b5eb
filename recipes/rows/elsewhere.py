"""Rows that other recipes measure, read from what they wrote to recipes/results: images, generation, heads, the sine."""

from __future__ import annotations

import math
from typing import Any

from rows.row import HOLDS, IN_PART, NOT, NOT_MEASURED, Row, Verdict

RESULTS = "recipes/results"


def judge_sine(result: dict[str, Any]) -> Verdict:
    """E14."""
    seeds = result["values"]["seeds"]
    window = [row for row in result["rows"] if row["protocol"] == "window"]
    best = max(window, key=lambda row: (row["passed"], -row["mae"]))
    given_x = min(row["mae"] for row in result["rows"] if row["protocol"] == "x")
    zero = next(row["mae"] for row in result["rows"] if row["variant"] == "predict zero")
    passed = sum(row["passed"] >= 0.9 * seeds for row in window)
    ours = (
        f"fed its own answers: {passed} of {len(window)} variants pass on 9 of 10 seeds, best {best['variant']} with "
        f"{best['mae']:.4f}; given x alone: best {given_x:.2f} ({zero:.2f} for always zero)"
    )
    if best["passed"] < 0.9 * seeds:
        return Verdict(NOT, ours)
    why = "nothing in the training interval says that the function repeats, so that x alone does not suffice"
    return Verdict(HOLDS, ours) if given_x < 0.05 else Verdict(IN_PART, ours, why)


def judge_roles(result: dict[str, Any]) -> Verdict:
    """E13: a role matters as far as its heads cost more than as many random ones, beyond two standard errors, of the draws
    and of the test set together."""
    sample = result["accuracy"] * (1 - result["accuracy"]) / result["values"]["test"]
    costs = {
        row["role"]: (
            row["random_accuracy"] - row["accuracy"],
            2 * math.sqrt(row["random_accuracy_error"] ** 2 + sample),
        )
        for row in result["rows"]
        if row["heads"]
    }
    counts = {row["role"]: row["heads"] for row in result["rows"]}
    ours = f"accuracy {result['accuracy']:.3f} with all heads; cost beyond as many random heads: " + ", ".join(
        f"{role} ({counts[role]} heads) {100 * cost:+.1f} ± {50 * chance:.1f} points"
        for role, (cost, chance) in costs.items()
    )
    dear = [role for role, (cost, chance) in costs.items() if cost > chance]
    if costs and len(dear) == len(costs):
        return Verdict(HOLDS, ours)
    why = "roles are found; beyond chance, freezing " + (f"only {', '.join(dear)} costs" if dear else "none costs")
    return Verdict(IN_PART if costs else NOT, ours, why + " more than random heads" if costs else "no head has a role")


def judge_images(kind: str) -> Any:
    """F8, E7: accuracy against ordinary attention, over data sets and resolutions."""

    def judge(result: dict[str, Any]) -> Verdict:
        told, rises, falls = [], 0, 0
        for data, found in result.items():
            row = next(row for row in found["table"] if row["kind"] == kind)
            for stage, measured in row.items():
                if isinstance(measured, dict) and "accuracy" in measured:
                    change = measured["accuracy"]["minus ordinary"]
                    told.append(f"{data}, {stage} {100 * change['mean']:+.1f} ± {100 * change['standard_error']:.1f}")
                    rises += change["mean"] > 2 * change["standard_error"]
                    falls += change["mean"] < -2 * change["standard_error"]
        word = HOLDS if rises == len(told) else IN_PART if rises > falls else NOT
        why = "" if rises or falls else "no difference beyond chance"
        return Verdict(word, "points of accuracy against ordinary attention: " + "; ".join(told), why)

    return judge


def judge_repetition(result: dict[str, Any]) -> Verdict:
    """E10: different n-grams at the end of long sampled texts, relative to ordinary attention."""
    rows = {(row["mode"], row["name"]): row["figures"] for row in result["rows"]}
    first = result["rows"][0]["name"]
    ratios = {
        (mode, name): figures["distinct_2_last"]["mean"] / max(rows[mode, first]["distinct_2_last"]["mean"], 1e-9)
        for (mode, name), figures in rows.items()
        if name != first
    }
    ours = (
        "Distinct-2 of the last quarter, as a multiple of "
        + f"{first}'s: "
        + ", ".join(f"{name} ({mode}) {ratio:.2f}" for (mode, name), ratio in ratios.items())
    )
    lia = [ratio for (_, name), ratio in ratios.items() if "lia" in name]
    if not lia:
        return Verdict(NOT_MEASURED, ours, "no run with lia")
    word = HOLDS if min(lia) >= 3.8 else IN_PART if min(lia) > 1 else NOT
    return Verdict(word, ours)


def row(name: str, figure: str, measured: str, material: str, rule: str, recipe: str, *files: str, judge: Any) -> Row:
    """A row of another recipe."""
    return Row(
        name=name, figure=figure, measured=measured, material=material, rule=rule, judge=judge,
        command=f"python recipes/{recipe}", reads=tuple(f"{RESULTS}/{file}" for file in files),
    )  # fmt: skip


F8 = row(
    "F8",
    "full payment for ViT on long patch sequences: better global context (no figure)",
    "accuracy at the resolution trained at and over it, as it is and tuned, paired by seed",
    "ViT from scratch on images that come in packages",
    "holds if accuracy rises beyond two standard errors everywhere; in part if it does more often than it falls so",
    "finetune_vision.py",
    "finetune_vision.json",
    judge=judge_images("full payment"),
)
E7 = row(
    "E7",
    "squeeze-and-excitation after the feed-forward of ViT (no figure)",
    "accuracy with and without, paired by seed",
    "ViT, as F8",
    "as F8",
    "finetune_vision.py",
    "finetune_vision.json",
    judge=judge_images("channel attention"),
)
E10 = row(
    "E10",
    "LIA, chunks of 128 with an overlap of 32: Distinct-n of the last 500 words 3.8x higher",
    "Distinct-2 of the last quarter of long generated texts, against ordinary attention",
    "decoder trained on film reviews",
    "holds at 3.8x and more in greedy and sampled texts; in part above 1x in both",
    "generate_long.py",
    "generate_long.json",
    judge=judge_repetition,
)
E13 = row(
    "E13",
    "head roles (syntactic, semantic, positional), and what freezing a role costs (no figure)",
    "roles found on gold trees and pronouns; accuracy without the heads of a role, against as many random heads",
    "all-MiniLM-L6-v2, UD English-EWT, GAP, film-review sentences",
    "holds if every role costs more than random heads beyond two standard errors, of the draws and of the test set; "
    "in part if there are heads with a role",
    "head_roles.py",
    "head_roles.json",
    judge=judge_roles,
)
E14 = row(
    "E14",
    "sine stress test, train on [0, 2 pi], test on [100 pi, 102 pi]: MAE 0.42 / 0.18 / 0.11 / 0.07 / 0.03, "
    "under 0.05 passes",
    "mean absolute error by architecture, given x alone, and fed by its own answers",
    "synthetic",
    "holds if an architecture passes on 9 of 10 seeds under both protocols; in part under one",
    "forecast_sine.py",
    "forecast_sine.json",
    judge=judge_sine,
)
