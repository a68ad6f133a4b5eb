"""The table of everything that is measured: what it means, which way is better, and the line that it should keep.

A limit is a default that a user can set (`thresholds={"entropy": 2.5}`); None means that a number is reported without a
verdict. The defaults are the figures that full payment was first described with, so ordinary models fail some of them:
that is what they are for.
"""

from __future__ import annotations

from dataclasses import dataclass

LOW, HIGH = "low", "high"


@dataclass(frozen=True)
class Measure:
    """One number per layer and head, per layer, or per model.

    Args:
        name: its key in `Report.values`, in thresholds and in tables.
        check: the check that measures it.
        title: a few words for tables and pictures.
        about: one sentence that says exactly what is measured.
        unit: "" for a ratio or a share.
        better: LOW, HIGH, or None where neither is.
        limit: the line it should keep, or None.
        headline: how layers and heads make one number: "mean", "min" or "max"; a limit is asked of that number.
    """

    name: str
    check: str
    title: str
    about: str
    unit: str = ""
    better: str | None = None
    limit: float | None = None
    headline: str = "mean"

    @property
    def label(self) -> str:
        """Title and unit."""
        return f"{self.title} [{self.unit}]" if self.unit else self.title

    def keeps(self, value: float, limit: float) -> bool:
        """Whether a value keeps a limit; NaN keeps none."""
        return value <= limit if self.better == LOW else value >= limit


_TABLE = (
    Measure(
        "below", "weights", "weights under the threshold",
        "share of visible keys with a weight under the absolute threshold (0.01), mean over rows",
        better=LOW, limit=0.30,
    ),
    Measure(
        "below_relative", "weights", "weights under a tenth of uniform",
        "share of visible keys with a weight under 0.1 / n, n the visible keys of the row, mean over rows",
        better=LOW, limit=0.30,
    ),
    Measure(
        "coverage", "weights", "coverage",
        "n times the smallest weight of a row, mean over rows: 1 for uniform attention, 0 where a key gets nothing",
        better=HIGH,
    ),
    Measure("least", "weights", "smallest weight", "smallest weight of a visible key", better=HIGH, headline="min"),
    Measure(
        "floor_kept", "promise", "smallest weight / promised floor",
        "smallest weight over what the plan promises a row of that length, least over rows; only where a floor is promised",
        better=HIGH, limit=0.999, headline="min",
    ),
    Measure(
        "row_error", "promise", "rows from one", "largest distance of a row's sum from one",
        better=LOW, limit=1e-3, headline="max",
    ),
    Measure(
        "error", "promise", "weights against the model",
        "what the weights shown here give, against what the model computed: largest distance over largest output",
        better=LOW, limit=1e-3, headline="max",
    ),
    Measure("entropy", "entropy", "entropy", "entropy of a row, mean over rows", unit="nats", better=HIGH, limit=3.0),
    Measure(
        "entropy_relative", "entropy", "entropy / log n", "entropy over log n, mean over rows of two keys and more",
        better=HIGH,
    ),
    Measure(
        "near_over_far", "reach", "gradient, near / far",
        "gradient of an output with respect to its 5 nearest positions over far ones, as it arrives at each layer's input",
        better=LOW, limit=5.0, headline="max",
    ),
    Measure(
        "gradient_range", "reach", "gradient range",
        "distance within which nine tenths of an output's gradient norm lie, at each layer's input", unit="tokens",
    ),
    Measure("score_largest", "scores", "largest score", "largest |score|, scaling and bias included", headline="max"),
    Measure("score_median", "scores", "median score", "median of the visible scores"),
    Measure("score_low", "scores", "score, 0.1 % quantile", "0.001 quantile of the visible scores", headline="min"),
    Measure("score_high", "scores", "score, 99.9 % quantile", "0.999 quantile of the visible scores", headline="max"),
    Measure(
        "span", "scores", "row span, 99.9 % quantile",
        "0.999 quantile over rows of max_j |score - mean of the row|: what a bound has to hold", headline="max",
    ),
    Measure(
        "touched", "scores", "rows that a bound would touch",
        "share of rows whose span exceeds bound * sqrt(n), n the visible keys (bound 2 by default)", better=LOW,
    ),
    Measure(
        "sink", "sinks", "largest sink",
        "largest mean weight, over the rows that see it, of a position of the first half; mean over texts cut to 64",
        better=LOW, limit=0.3, headline="max",
    ),
    Measure("sink_heads", "sinks", "heads with a sink", "share of heads whose largest sink exceeds 0.3", better=LOW),
    Measure("spike", "spikes", "largest hidden state", "max |hidden state| at each layer's output", headline="max"),
    Measure(
        "spike_ratio", "spikes", "largest / median hidden state", "max over median of |hidden state| at each layer's output",
        better=LOW, headline="max",
    ),
    Measure(
        "importance", "heads", "importance of a head",
        "|gradient times output| of a head, summed, over the mean of its layer's heads",
    ),
    Measure(
        "gradient_norm", "heads", "gradient norm", "norm of the loss's gradient at each layer's input, mean over tokens",
    ),
    Measure(
        "dead_heads", "heads", "dead heads", "share of heads with under a hundredth of their layer's mean importance",
        better=LOW, limit=0.0,
    ),
    Measure(
        "position_decay", "positions", "distance of positions against tokens apart",
        "rank correlation of |i - j| with the distance of positions i and j, all-zero input, at the first layer's input "
        "and at the last layer's output",
    ),
    Measure(
        "leak", "leak", "leak from the future, values",
        "largest change of outputs before a position when what follows it changes, over the largest output",
        better=LOW, limit=1e-5, headline="max",
    ),
    Measure(
        "leak_gradient", "leak", "leak from the future, gradients",
        "largest gradient of an output with respect to a later input, over the largest to an earlier one",
        better=LOW, limit=0.0, headline="max",
    ),
    Measure(
        "distance", "range", "mean distance", "mean distance from query to key, by weight", unit="tokens",
    ),
    Measure(
        "range", "range", "effective range", "distance within which nine tenths of the weight lie", unit="tokens",
    ),
    Measure("positional_heads", "roles", "positional heads", "share of heads with their largest weight at a fixed offset"),
    Measure("syntactic_heads", "roles", "syntactic heads", "share of heads that find a relation of gold dependency trees"),
    Measure("coreference_heads", "roles", "heads for coreference", "share of heads that tell the antecedent of a pronoun"),
    Measure("global_heads", "roles", "global heads", "share of heads with half of their weight on class and separator"),
    Measure(
        "nonfinite_weights", "finite", "weights that are NaN or infinite",
        "parameters of the model with numbers that are not finite; torch's SDPA on a CPU hides what NaN does to a head",
        better=LOW, limit=0.0,
    ),
    Measure("nonfinite", "finite", "NaN or infinity", "numbers in a layer's output that are not finite", better=LOW,
            limit=0.0, headline="max"),
)  # fmt: skip
MEASURES = {measure.name: measure for measure in _TABLE}
CHECKS = tuple(dict.fromkeys(measure.check for measure in _TABLE))
