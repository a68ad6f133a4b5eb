"""F9, E12: gradients through the depth of a trained encoder, and the three diagnostic experiments on it.

Position distances, heat maps of heads, gradient flow with dead heads: `hf_fullpay.diagnose` runs them on film reviews.
Nothing is trained; a "seed" is a sample of reviews and a random direction.
"""

from __future__ import annotations

import math
from typing import Any

import hf_fullpay
from rows.material import encoder, reviews
from rows.row import HOLDS, IN_PART, NOT, Figures, Row, Verdict, gain, mean, seeds
from rows.weights import LONG, attentions

LONG_TEXT = "recipes/results/generate_long.json"
SIZES = {
    "quick": {"model": "minilm", "seeds": 2, "documents": 1, "budgets": [0.64]},
    "here": {"model": "minilm", "seeds": 3, "documents": 2, "budgets": [0.64]},
    "full": {"model": "bert-base-uncased", "seeds": 10, "documents": 32, "budgets": [0.2, 0.64]},
}


def run_depth(values: dict[str, Any]) -> dict[str, Any]:
    """Norm of a gradient at the first layer's input over that at the last layer's, and the same for far positions."""
    return _diagnosed(values, ["heads", "reach"], lambda found: {
        "gradient, first / last layer": found["gradient_norm"][0] / found["gradient_norm"][-1],
        "near / far, through the last layer": found["near_over_far"][-1],
        "near / far, through all layers": found["near_over_far"][0],
    })  # fmt: skip


def run_experiments(values: dict[str, Any]) -> dict[str, Any]:
    """One number or two of each experiment; the pictures are in `Report.save`."""
    return _diagnosed(values, ["positions", "weights", "heads", "range"], lambda found: {
        "positions: rank correlation with distance, input": found["position_decay"][0],
        "positions: the same, last layer": found["position_decay"][-1],
        "heat maps: mean distance of a weight (tokens)": _mean(found["distance"]),
        "gradient flow: first / last layer": found["gradient_norm"][0] / found["gradient_norm"][-1],
        "gradient flow: dead heads": found["dead_heads"],
    })  # fmt: skip


def _diagnosed(values: dict[str, Any], checks: list[str], numbers: Any) -> dict[str, Any]:
    model, tokenizer = encoder(values["model"])
    figures: Figures = {}
    for label, name in attentions(values["budgets"]).items():
        model.set_attn_implementation(name)
        for seed in seeds(values):
            settings = hf_fullpay.diagnosis.Settings(seed=seed, documents=values["documents"])
            batch = reviews(tokenizer, seed, values["documents"], LONG)
            report = hf_fullpay.diagnose(model, batch, checks=checks, settings=settings, progress=False)
            for measure, number in numbers(report.values).items():
                figures.setdefault(label, {}).setdefault(measure, []).append(number)
    return {"figures": figures, "against": "ordinary"}


def _mean(values: Any) -> float:
    return sum(sum(row) / len(row) for row in values) / len(values)


def judge_depth(result: dict[str, Any], generated: dict[str, Any] | None) -> Verdict:
    """F9, three claims: gradients, repetition, matrix work."""
    label = list(result["figures"])[-1]
    decay, through = "gradient, first / last layer", "near / far, through all layers"
    change, chance = gain(result, label, through)
    ours = (
        f"gradient at the first over the last layer: ordinary {mean(result, 'ordinary', decay):.2f}, {label} "
        f"{mean(result, label, decay):.2f}; near / far through all layers {mean(result, 'ordinary', through):.1f}x and "
        f"{mean(result, label, through):.1f}x"
    )
    decays, helped = mean(result, "ordinary", decay) < 1, change < -chance
    varied, repetition = repeated(generated)
    word = IN_PART if decays or helped or varied else NOT
    why = [
        "gradients " + ("shrink" if decays else "grow") + " on the way down (residual paths carry them)",
        "far positions " + ("gain" if helped else "do not gain") + " by the floor",
    ]
    why.append(repetition)
    why.append("tensor cores need a GPU, none was at hand")
    return Verdict(word, ours, "; ".join(why))


def repeated(generated: dict[str, Any] | None) -> tuple[bool, str]:
    """Whether greedy texts repeat less under full payment, beyond chance, and in words."""
    if generated is None:
        return False, "repetition not measured yet"
    rows = {(row["mode"], row["name"]): row["difference"] for row in generated["rows"]}
    change = rows["greedy", "fullpay"]["repeated_4_last"]
    less = change["mean"] < -2 * change["error"]
    told = (
        f"repeated 4-grams at the end of greedy texts {100 * change['mean']:+.1f} ± {100 * change['error']:.1f} points"
    )
    return less, told


def judge_experiments(result: dict[str, Any]) -> Verdict:
    """E12: the three run, and say something."""
    found = result["summary"]["ordinary"]
    finite = all(math.isfinite(entry["mean"]) for entry in found.values())
    start, end, distance, flow, dead = (entry["mean"] for entry in found.values())
    ours = (
        f"position distances follow tokens apart with rank correlation {start:.2f} at the input, {end:.2f} after the "
        f"last layer; weights lie {distance:.0f} tokens away; gradient, first / last layer {flow:.2f}; dead heads {dead:.0%}"
    )
    return Verdict(HOLDS if finite else NOT, ours)


F9 = Row(
    name="F9",
    figure="why: gradient decay with depth; repetition and drift in generation; dense matrix work suits tensor cores",
    measured="norm of the gradient at the first layer's input over the last's, and gradient near / far, through one "
    "layer and through all; repetition by generate_long.py; matrix work not at all",
    material="all-MiniLM-L6-v2, 256 tokens of film reviews",
    rule="holds if ordinary gradients decay with depth, the floor brings far ones nearer, generation repeats less "
    "and a GPU is kept busier; in part if one of these was seen",
    judge=judge_depth,
    run=run_depth,
    sizes=SIZES,
    reads=(LONG_TEXT,),
)
E12 = Row(
    name="E12",
    figure="three experiments: position distances, heat maps of heads, gradient flow and dead heads (no figure)",
    measured="`hf_fullpay.diagnose`, checks positions, weights, range, heads; pictures by `Report.save`",
    material="all-MiniLM-L6-v2, 256 tokens of film reviews",
    rule="holds if all three run and give finite numbers",
    judge=judge_experiments,
    run=run_experiments,
    sizes=SIZES,
)
