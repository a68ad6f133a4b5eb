"""F7: what a floor together with a local window saves, counted and timed.

Counted in multiplications of a whole layer, for one sequence: four projections and a feed-forward of four times the width
take 12 n d^2 (whatever the attention), scores and their sum over values 2 d for every pair of tokens. A window of k
leaves k pairs of each token, of the n in an encoder or the (n + 1) / 2 on average in a decoder; the floor over everything
adds one running or whole mean, n d. Timed: `fullpay_band` in benchmarks/results/cpu.json, attention alone.
"""

from __future__ import annotations

import json
from typing import Any

from rows.row import HOLDS, IN_PART, NOT, ROOT, Figures, Row, Verdict, mean

TIMES = "benchmarks/results/cpu.json"
LOW, HIGH = 0.30, 0.40
SIZE = {"width": 768, "window": 256, "lengths": [512, 1024, 3000, 8192]}


def multiplications(n: int, width: int, pairs: int, floor: bool) -> int:
    """Of one layer."""
    return 12 * n * width**2 + 2 * pairs * width + (n * width if floor else 0)


def pairs(n: int, window: int | None, causal: bool) -> int:
    """Of tokens that the softmax sees: all, or `window` of each token (half to either side if not causal)."""
    if window is None:
        return n * (n + 1) // 2 if causal else n * n
    if causal:
        return sum(min(i + 1, window) for i in range(n))
    half = window // 2
    return sum(min(i, half) + 1 + min(n - 1 - i, half) for i in range(n))


def run(values: dict[str, Any]) -> dict[str, Any]:
    """Shares of the arithmetic that are saved, and times."""
    figures: Figures = {}
    width, window = values["width"], values["window"]
    for kind, causal in (("encoder", False), ("decoder", True)):
        for n in values["lengths"]:
            full, local = pairs(n, None, causal), pairs(n, window, causal)
            layer = 1 - multiplications(n, width, local, True) / multiplications(n, width, full, False)
            attention = 1 - (2 * local + n) / (2 * full)
            found = {f"layer saved, n = {n}": [layer], f"attention saved, n = {n}": [attention]}
            figures.setdefault(kind, {}).update(found)
    timed = ROOT / TIMES
    rows = json.loads(timed.read_text())["rows"] if timed.exists() else []
    for row in rows:
        if row["name"] == "fullpay_band" and row["dtype"] == "fp32":
            name = f"attention time saved, {row['direction']}, n = {row['n']}"
            figures.setdefault("measured, band of 128, decoder", {})[name] = [1 - row["ratio"]]
    return {"figures": figures, "against": "nothing", "notes": [__doc__.strip().split("\n\n")[1].replace("\n", " ")]}


def judge(result: dict[str, Any]) -> Verdict:
    """At 3,000 tokens, the length that the sources speak of."""
    encoder, decoder = (mean(result, kind, "layer saved, n = 3000") for kind in ("encoder", "decoder"))
    short = mean(result, "encoder", "layer saved, n = 512")
    timed = result["summary"].get("measured, band of 128, decoder", {})
    seconds = timed.get("attention time saved, forward, n = 2048", {}).get("mean")
    ours = f"{encoder:.0%} of a BERT-base layer's arithmetic at n = 3,000 (decoder {decoder:.0%}; n = 512: {short:.0%})"
    ours += "" if seconds is None else f"; attention alone, n = 2,048, band of 128: {seconds:.0%} of the time"
    if LOW <= encoder <= HIGH:
        return Verdict(HOLDS, ours, "for an encoder of that length; what is saved grows with n, and is little at 512")
    word = HOLDS if encoder > HIGH else IN_PART if encoder > 0 else NOT
    return Verdict(word, ours)


F7 = Row(
    name="F7",
    figure="floor together with a local window: 30 to 40 % less arithmetic",
    measured="multiplications of a whole layer with a window of 256 and a floor over everything, against full "
    "attention; time of the attention alone from the benchmarks",
    material="counted for BERT-base's width of 768; timed on this CPU",
    rule="holds if the count at n = 3,000 (encoder) saves 30 % or more; in part if less",
    judge=judge,
    run=run,
    sizes={"quick": SIZE, "here": SIZE, "full": SIZE},
    command="python benchmarks/gpu.py",
)
