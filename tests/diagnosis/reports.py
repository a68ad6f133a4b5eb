"""Reports made by hand: like those of a real encoder, and as awkward as models and data sets can make them."""

from __future__ import annotations

import math
import random
from functools import cache

from hf_fullpay.diagnosis.measures import MEASURES
from hf_fullpay.diagnosis.report import Curve, Findings, Heatmap, Report, Table

HOSTILE = """<script>console.error("ran")</script><img src=x onerror="console.error(1)">'"&amp; | $x$ `*` 🙂"""
LIMITS = {name: measure.limit for name, measure in MEASURES.items() if measure.limit is not None}
HEADS = {
    "below": (0.9, 0.08), "below_relative": (0.42, 0.2), "coverage": (0.02, 0.02), "least": (1e-6, 1e-6),
    "floor_kept": (1.02, 0.01), "row_error": (2e-7, 1e-7), "entropy": (2.4, 0.9), "entropy_relative": (0.46, 0.17),
    "score_largest": (14.0, 5.0), "span": (11.0, 4.0), "touched": (0.01, 0.01), "sink": (0.3, 0.2),
    "importance": (1.0, 0.6), "distance": (40.0, 24.0), "range": (90.0, 50.0),
}  # fmt: skip
LAYERS = {"near_over_far": 30.0, "spike": 6.0, "spike_ratio": 12.0, "gradient_norm": 3e-3, "gradient_range": 50.0}


def report(layers: int = 12, heads: int = 12, seed: int = 0, panels: int = 48, better: float = 0.0) -> Report:
    """One like a real encoder's; `better` moves entropy and coverage towards uniform."""
    dice = random.Random(seed)
    values: dict = {
        name: [[abs(dice.gauss(mean, spread)) for _ in range(heads)] for _ in range(layers)]
        for name, (mean, spread) in HEADS.items()
    }
    values["entropy"] = [[n + better * (5 - n) for n in row] for row in values["entropy"]]
    values["coverage"] = [[n + better * 0.4 for n in row] for row in values["coverage"]]
    values |= {name: [first * 1.4**i * dice.uniform(0.8, 1.2) for i in range(layers)] for name, first in LAYERS.items()}
    values |= {"dead_heads": 0.02, "leak": 0.0, "sink_heads": 0.35}
    distances = [float(2**power) for power in range(9)]
    near = {f"layer {i}": [(1 + 0.1 * i) / (x + 1) ** (1.3 - 0.06 * i) for x in distances] for i in range(layers)}
    texts = {
        f"layer {i}, head {j}": _weights(panels, dice) for i in range(min(layers, 12)) for j in range(min(heads, 12))
    }
    far = [[abs(i - j) ** 0.7 for j in range(32)] for i in range(32)]
    roles = [
        [i, j, dice.choice(["positional", "syntactic", "coreference", "global", "none"]), dice.random()]
        for i in range(layers) for j in range(heads)
    ]  # fmt: skip
    findings = Findings(
        values=values,
        uniform={"below": 1.0, "below_relative": 0.0, "coverage": 1.0, "entropy": 5.2, "entropy_relative": 1.0,
                 "distance": [[80.0] * heads] * layers},
        curves={
            "gradient": Curve("Gradient by distance", "tokens apart", "mean norm", distances, near, True, True),
            "by_distance": Curve("Weight by distance", "tokens apart", "weight", distances,
                                 {"model": [0.2 / (x + 1) for x in distances], "uniform": [0.005] * 9}, True),
        },
        heatmaps={
            "weights": Heatmap("Attention weights", "key", "query", texts, log=True),
            "positions": Heatmap("Distance of positions", "position", "position",
                                 {"first layer's input": far, "last layer's output": far}),
        },
        tables={"roles": Table("Roles of heads", ["layer", "head", "role", "score"], roles)},
        notes=["Texts were cut to 512 tokens.", "leak: the model is not causal, so nothing leaks."],
    )  # fmt: skip
    data = {"documents": 32, "tokens": 16384, "longest": 512, "dtype": "float32", "device": "cpu", "seconds": 12.34}
    return Report("BertModel (all-MiniLM-L6-v2)", "sdpa", "softmax over all keys", [f"layer {i}" for i in range(layers)],
                  data, findings, dict(LIMITS))  # fmt: skip


def _weights(size: int, dice: random.Random) -> list[list[float]]:
    """A head that looks at a neighbour, or at one position, with noise."""
    offset, sink = dice.randint(-3, 3), dice.random()
    rows = []
    for i in range(size):
        scores = [
            4 * (j == i + offset) + 5 * sink * (j == 0) + dice.gauss(0, 1) - 0.1 * abs(i - j) for j in range(size)
        ]
        total = sum(map(math.exp, scores))
        rows.append([math.exp(score) / total for score in scores])
    return rows


def real() -> Report:
    return report()


def empty() -> Report:
    return Report("Model", "eager", "", [], {}, Findings(), {})


def single() -> Report:
    return report(1, 1, panels=1)


def ragged() -> Report:
    """Layers with different numbers of heads, one of them with none, and numbers that are not finite."""
    made = report(4, 4, panels=8)
    made.findings.values |= {
        "entropy": [[1.0, math.nan], [2.0, 3.0, 4.0], [], [0.5]],
        "coverage": [[math.nan] * 4] * 4,
        "importance": [[math.inf, 1.0], [-math.inf, 0.0], [2.0], [1e300, -1e300]],
        "spike": [1.0, math.nan, math.inf, 1e6],
        "near_over_far": [math.nan] * 4,
    }
    made.findings.uniform["entropy"] = [[2.0, 2.0], [2.0, 2.0, 2.0], [], [math.nan]]
    made.findings.curves["gaps"] = Curve("Gaps", "x", "y", [0.0, 1.0, 2.0], {"a": [math.nan, 1.0, 0.0]}, True, True)
    made.findings.curves["bare"] = Curve("Bare", "x", "y", [], {})
    made.findings.heatmaps["holes"] = Heatmap("Holes", "x", "y", {"a": [[math.nan, 1.0], [0.0]], "b": []}, log=True)
    return made


def deep() -> Report:
    return report(48, 8, panels=8)


def hostile() -> Report:
    """Every string that may come from outside carries markup."""
    made = report(2, 2, panels=4)
    made.model = made.attention = made.plan = HOSTILE
    made.layers, made.data = [HOSTILE] * 2, {HOSTILE: HOSTILE, "documents": "half \ud83d"}
    made.findings.curves[HOSTILE] = Curve(HOSTILE, HOSTILE, HOSTILE, [0.0, 1.0], {HOSTILE: [1.0, 2.0], "b": [1.0, 3.0]})
    made.findings.heatmaps[HOSTILE] = Heatmap(HOSTILE, HOSTILE, HOSTILE, {HOSTILE: [[1.0, 2.0]]}, HOSTILE)
    made.findings.tables[HOSTILE] = Table(HOSTILE, [HOSTILE, "layer", "head", "role"], [[HOSTILE, 0, 0, HOSTILE]])
    made.findings.notes += [HOSTILE]
    return made


# Made once each: tests only look at them.
AWKWARD = {make.__name__: cache(make) for make in (real, empty, single, ragged, deep, hostile)}
