"""B4 to B7: what bounding the logits of a trained classifier costs and buys, read from migrate_bounded and quantize_check.

Three classifiers were migrated step by step, and beside each the same one was tuned as long under ordinary attention:
differences are to that one, paired by seed. Then both were quantised.
"""

from __future__ import annotations

import statistics
from typing import Any

from rows.elsewhere import row
from rows.row import HOLDS, IN_PART, NOT, Verdict

DROP, FOLD = 0.005, 4


def bounded(result: dict[str, Any]) -> dict[str, Any]:
    """The migrated ones of a result."""
    return next(found for found in result["rows"] if found["attention"] == "bounded")


def judge_quality(result: dict[str, Any]) -> Verdict:
    """B4: accuracy, and the largest logit and hidden state apart."""
    found = bounded(result)
    change = found["difference"]["after.accuracy"]
    logit, hidden = (found["figures"][f"smaller.{name}"]["mean"] for name in ("logit", "hidden"))
    ours = (
        f"accuracy {points(change)} points against equal tuning without a bound; largest logit {logit:.1f}x lower, largest "
        f"hidden state {hidden:.1f}x; stability: B8"
    )
    kept, lower = change["mean"] > -DROP, hidden >= FOLD
    if kept and lower:
        return Verdict(HOLDS, ours)
    why = "bounds lower logits by what they are asked to and leave hidden states as they are; " if not lower else ""
    return Verdict(IN_PART if kept or lower or round(logit, 1) >= FOLD else NOT, ours, why + "memory rises (see Speed)")


def judge_migration(result: dict[str, Any]) -> Verdict:
    """B5: what the bounds alone would cost, and what is left of it after the gradual migration."""
    alone = statistics.fmean(one["together"] for one in result["untrained"])
    left = bounded(result)["difference"]["after.loss"]
    layers = [statistics.fmean(harms) for harms in zip(*(one["alone"] for one in result["untrained"]), strict=True)]
    ours = (
        f"loss +{alone:.3f} with all bounds at once and no tuning, +{left['mean']:.3f} ± {left['error']:.3f} after the "
        f"migration, against equal tuning without; alone, layers cost " + ", ".join(f"{harm:+.3f}" for harm in layers)
    )
    why = "tuning in steps wins part of it back; the same tuning with all bounds at once was not compared"
    return Verdict(IN_PART if left["mean"] < alone else NOT, ours, why if left["mean"] < alone else "")


def judge_last_layer(result: dict[str, Any]) -> Verdict:
    """B6: whether a classifier's last layer is the one to leave alone; a fixed tau is not compared with 1 / sqrt(n)."""
    harms = [one["alone"] for one in result["untrained"]]
    last = statistics.fmean(found[-1] for found in harms)
    others = statistics.fmean(harm for found in harms for harm in found[:-1])
    ours = f"loss when one layer alone is bounded, untrained: last {last:+.3f}, others {others:+.3f} on average"
    why = "tau fixed against 1/sqrt(n) is not compared yet"
    if all(found[-1] > max(found[:-1]) for found in harms):
        return Verdict(IN_PART, ours, why)
    return Verdict(NOT, ours, f"the last layer is not the one that bears a bound worst; {why}")


def judge_eight_bits(result: dict[str, Any]) -> Verdict:
    """B7: the gap in accuracy between INT8 and FP32, before and after bounding, by every way of quantising."""
    told, better, worse = [], [], []
    for way, found in result.items():
        gap, changed = found["summary"]["gap.accuracy"], found["summary"]["moved.decisions_changed"]["difference"]
        change = gap["difference"]
        told.append(
            f"{way}: INT8 minus FP32 {100 * gap['before']['mean']:+.1f} points before, {100 * gap['after']['mean']:+.1f} "
            f"after, difference {points(change)}; decisions changed by INT8 {points(changed)} points"
        )
        better.append(change["mean"] > 2 * change["error"])
        worse.append(changed["mean"] > 2 * changed["error"])
    word = HOLDS if all(better) else IN_PART if any(better) else NOT
    why = "" if any(better) else "the gap does not shrink" + (", and more answers change" if any(worse) else "")
    return Verdict(word, "; ".join(told), why)


def points(change: dict[str, Any]) -> str:
    """A difference in hundredths with its standard error."""
    return f"{100 * change['mean']:+.1f} ± {100 * change['error']:.1f}"


MATERIAL = "all-MiniLM-L6-v2 fine-tuned on film reviews (GLUE is in no package)"
B4 = row(
    "B4",
    "GLUE mean drop under 0.5 %, largest activation 4 to 8x lower, training stability +23 %, memory -15 %",
    "accuracy, largest logit and largest hidden state after the migration, paired with equal tuning under ordinary "
    "attention; the range of learning rates is B8",
    MATERIAL,
    "holds if accuracy drops by under 0.5 points and the largest hidden state falls 4-fold; in part if one of them, or if "
    "only the largest logit falls so",
    "migrate_bounded.py",
    "migrate_bounded.json",
    judge=judge_quality,
)
B5 = row(
    "B5",
    "migration: monitor scores, find sensitive layers; layers under the transition stay ordinary (no figure)",
    "rise of the loss on held-out reviews with all bounds at once and no tuning, and after the migration; the same by layer",
    MATERIAL,
    "in part if less is lost after the migration than by the bounds alone; to hold it would have to beat equal tuning with "
    "all bounds at once",
    "migrate_bounded.py",
    "migrate_bounded.json",
    judge=judge_migration,
)
B6 = row(
    "B6",
    "tau about 1/sqrt(sequence length); keep the last layer of a classifier ordinary (no figure)",
    "rise of the loss when one layer alone is bounded",
    MATERIAL,
    "in part if the last layer bears a bound worst for every seed, else not",
    "migrate_bounded.py",
    "migrate_bounded.json",
    judge=judge_last_layer,
)
B7 = row(
    "B7",
    "bounded attention is friendly to quantisation (no figure)",
    "gap in accuracy between INT8 and FP32, before and after bounding, paired by seed; answers that INT8 changes",
    MATERIAL,
    "holds if the gap shrinks beyond two standard errors with every way of quantising; in part with one",
    "quantize_check.py",
    "quantize_check.json",
    judge=judge_eight_bits,
)
