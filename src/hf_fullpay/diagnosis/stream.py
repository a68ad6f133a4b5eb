"""The checks that look at every weight and every score once, a tile of rows at a time.

Dimensions: B batch, H heads, R rows of a tile, M keys.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from hf_fullpay.core.numbers import to_heads
from hf_fullpay.core.places import query_slots
from hf_fullpay.diagnosis.report import Curve, Findings, Heatmap
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.diagnosis.sums import Extreme, Mean, Sample
from hf_fullpay.hf.watch import Seen
from hf_fullpay.payment.clamp import floor_of
from hf_fullpay.payment.mixture import Budget
from hf_fullpay.reference import Rows

PANEL = 32  # rows and columns of a small picture
PANELS = 12  # layers, and heads, that are shown


@dataclass(eq=False)
class Tile:
    """Rows of one attention call.

    Args:
        seen: the call.
        rows: weights and scores of queries start..stop-1.
        start, stop: which queries.
        real: queries that are no padding, (B, N) bool, or None.
    """

    seen: Seen
    rows: Rows
    start: int
    stop: int
    real: Tensor | None

    @cached_property
    def counts(self) -> Tensor:
        """n, keys that may have a weight, (B or 1, H or 1, R)."""
        return self.rows.paid.sum(-1)

    @cached_property
    def live(self) -> Tensor:
        """Rows that count: they see a key and are no padding, (B or 1, H or 1, R) bool."""
        live = self.counts > 0
        return live if self.real is None else live & self.real[:, None, self.start : self.stop]

    @cached_property
    def least(self) -> Tensor:
        """Smallest weight of each row, (B, H, R)."""
        weights = self.rows.weights
        if bool((self.counts == weights.shape[-1]).all()):  # nothing hidden: a pass less
            return weights.amin(-1)
        return weights.masked_fill(~self.rows.paid, torch.inf).amin(-1)

    def below(self, level: Tensor | float) -> Tensor:
        """How many keys of each row have a weight under a positive level (B or 1, H or 1, R, 1), (B, H, R). Hidden keys
        weigh exactly nothing, so they are counted and taken off again."""
        few = (self.rows.weights < level).sum(-1) - (self.rows.weights.shape[-1] - self.counts)
        return few + 0 * self.least.masked_fill(self.counts == 0, 0)  # NaN is not below anything, and is no pass


class Stream:
    """One check; subclasses say what they do with a tile, and what they found."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.means: dict[str, dict[int, Mean]] = defaultdict(lambda: defaultdict(Mean))
        self.highs: dict[str, dict[int, Extreme]] = defaultdict(lambda: defaultdict(lambda: Extreme(1)))
        self.lows: dict[str, dict[int, Extreme]] = defaultdict(lambda: defaultdict(lambda: Extreme(-1)))

    def take(self, tile: Tile) -> None:
        """Look at one tile."""
        raise NotImplementedError

    def findings(self, layers: int) -> Findings:
        """Everything summed up so far, for layers 0..layers-1."""
        found = Findings()
        for kind in (self.means, self.highs, self.lows):
            for name, by_layer in kind.items():
                into = found.uniform if name.endswith("_uniform") else found.values
                into[name.removesuffix("_uniform")] = [
                    by_layer[layer].result() if layer in by_layer else [math.nan] for layer in range(layers)
                ]
        return found


class Weights(Stream):
    """Share of weights under the threshold, coverage, smallest weight."""

    def take(self, tile: Tile) -> None:
        n, live, layer = tile.counts, tile.live, tile.seen.index
        safe = n.clamp_min(1)
        self.means["below"][layer].add(tile.below(self.settings.threshold) / safe, live)
        self.means["below_uniform"][layer].add((1 / safe < self.settings.threshold).float(), live)
        self.means["below_relative"][layer].add(tile.below((0.1 / safe)[..., None]) / safe, live)
        self.means["below_relative_uniform"][layer].add(torch.zeros_like(safe, dtype=torch.float32), live)
        self.means["coverage"][layer].add(tile.least * n, live)
        self.means["coverage_uniform"][layer].add(torch.ones_like(safe, dtype=torch.float32), live)
        self.lows["least"][layer].add(tile.least, live)
        self.lows["least_uniform"][layer].add(1 / safe, live)


class Promise(Stream):
    """The floor against what the plan promises, sums of rows, and whether these weights are the model's."""

    def take(self, tile: Tile) -> None:
        rows, layer = tile.rows, tile.seen.index
        if tile.seen.sinks is None:
            self.highs["row_error"][layer].add((rows.weights.sum(-1) - 1).abs(), tile.live)
        promised = promised_floor(tile.seen, tile.counts)
        if promised is not None:
            kept = torch.where(promised > 0, tile.least / promised.clamp_min(1e-30), torch.inf)
            self.lows["floor_kept"][layer].add(kept, tile.live)
        if tile.start == 0 and not tile.seen.plan.gate:  # the first rows of every call stand for the rest
            error = tile.seen.error(tile.start, tile.stop, rows.weights)
            every = torch.ones(1, 1, 1, dtype=torch.bool)
            self.highs["error"][layer].add(torch.full((1, 1, 1), error), every)

    def findings(self, layers: int) -> Findings:
        found = super().findings(layers)
        if "error" in found.values:  # of a layer, not of a head
            found.values["error"] = [row[0] for row in found.values["error"]]  # type: ignore[union-attr]
        return found


class Entropy(Stream):
    """Entropy of rows, in nats and relative to the uniform distribution."""

    def take(self, tile: Tile) -> None:
        weights, n, layer = tile.rows.weights, tile.counts, tile.seen.index
        entropy = torch.special.entr(weights).sum(-1)
        most = n.clamp_min(1).float().log()
        self.means["entropy"][layer].add(entropy, tile.live)
        self.means["entropy_uniform"][layer].add(most, tile.live)
        several = tile.live & (n > 1)
        self.means["entropy_relative"][layer].add(entropy / most.clamp_min(1e-9), several)
        self.means["entropy_relative_uniform"][layer].add(torch.ones_like(most), several)


class Scores(Stream):
    """Range, quantiles and median of scores, and what a bound would have to hold."""

    KEYS = 16  # of a row that the sample takes

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.scores: dict[int, Sample] = defaultdict(Sample)
        self.spans: dict[int, Sample] = defaultdict(Sample)

    def take(self, tile: Tile) -> None:
        rows, n, layer = tile.rows, tile.counts, tile.seen.index
        scores, visible = rows.scores, rows.visible
        seen = visible.sum(-1)
        if bool((seen == scores.shape[-1]).all()):
            low, high, mean = scores.amin(-1), scores.amax(-1), scores.mean(-1)
        else:
            low = scores.masked_fill(~visible, torch.inf).amin(-1)
            high = scores.masked_fill(~visible, -torch.inf).amax(-1)
            mean = scores.masked_fill(~visible, 0).sum(-1) / seen.clamp_min(1)
        span = torch.maximum(high - mean, mean - low)
        live = tile.live & (seen > 0)
        self.highs["score_largest"][layer].add(torch.maximum(high.abs(), low.abs()), live)
        self.means["touched"][layer].add((span > self.settings.bound * n.sqrt()).float(), live)
        self.spans[layer].add(_by_head(span.masked_fill(~live.expand_as(span), torch.nan)))
        some = torch.linspace(0, scores.shape[-1] - 1, min(self.KEYS, scores.shape[-1]), device=scores.device).long()
        counted = (visible[..., some] & live[..., None]).expand(*scores.shape[:-1], len(some))
        self.scores[layer].add(_by_head(scores[..., some].masked_fill(~counted, torch.nan)))

    def findings(self, layers: int) -> Findings:
        found = super().findings(layers)
        names = ("score_low", "score_median", "score_high")
        found.values |= {name: [[math.nan] for _ in range(layers)] for name in (*names, "span")}
        for layer, sample in self.scores.items():
            for name, numbers in zip(names, sample.quantiles(0.001, 0.5, 0.999), strict=True):
                found.values[name][layer] = numbers  # type: ignore[index]
            found.values["span"][layer] = self.spans[layer].quantiles(0.999)[0]  # type: ignore[index]
        return found


class Range(Stream):
    """How far from the query the weight lies."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.mass: dict[int, Tensor] = {}

    def take(self, tile: Tile) -> None:
        allowed = tile.seen.arguments["allowed"]
        if allowed.n_queries != allowed.n_keys and allowed.offset is None:
            return  # queries and keys are different sequences, or each row of the batch stands elsewhere
        slots = query_slots(allowed)
        weights, layer = tile.rows.weights, tile.seen.index
        heads, keys = weights.shape[1], weights.shape[-1]
        rows = slots[0, 0, tile.start : tile.stop] if slots.shape[2] > 1 else slots[0, 0]
        apart = (rows - torch.arange(keys, device=rows.device)).abs().clamp_max(keys - 1)
        summed = (weights * tile.live[..., None]).sum(0).flatten(1)
        mass = weights.new_zeros(heads, keys).scatter_add_(
            1, apart.expand(-1, keys).reshape(1, -1).expand_as(summed), summed
        )
        mass = mass.double().cpu()
        before = self.mass.get(layer)
        if before is not None:
            size = max(before.shape[1], keys)
            mass = _longer(before, size) + _longer(mass, size)
        self.mass[layer] = mass

    def findings(self, layers: int) -> Findings:
        found = Findings()
        if not self.mass:
            return found
        distance: list[list[float]] = [[math.nan] for _ in range(layers)]
        reach: list[list[float]] = [[math.nan] for _ in range(layers)]
        edges = [0, 1]
        longest = max(mass.shape[1] for mass in self.mass.values())
        while edges[-1] < longest:
            edges.append(max(edges[-1] + 1, int(edges[-1] * 1.5)))
        series = {}
        for layer, mass in sorted(self.mass.items()):
            share = mass / mass.sum(1, keepdim=True)
            distance[layer] = (share * torch.arange(mass.shape[1])).sum(1).tolist()
            reach[layer] = (share.cumsum(1) < 0.9).sum(1).double().tolist()
            whole = _longer(share.mean(0, keepdim=True), edges[-1] + 1)[0]
            series[f"layer {layer}"] = [float(whole[a:b].sum()) for a, b in pairwise(edges)]
        found.values = {"distance": distance, "range": reach}
        found.curves["distance"] = Curve(
            "Where the weight lies", "distance from the query (tokens)", "share of the weight",
            [float(edge) for edge in edges[:-1]], series,
        )  # fmt: skip
        return found


class Pictures(Stream):
    """The weights of the first input: every head on a grid of at most PANEL x PANEL fields. A field holds the weight
    that a query gives to all keys of its column together, mean over the queries of its row."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.sums: dict[int, Tensor] = {}
        self.finished: set[int] = set()

    def take(self, tile: Tile) -> None:
        layer, weights = tile.seen.index, tile.rows.weights[0].float()
        if layer in self.finished or (tile.real is not None and not tile.real[0].any()):
            return
        queries, keys = tile.seen.query.shape[2], weights.shape[-1]
        row_real = torch.ones(queries, dtype=torch.bool, device=weights.device) if tile.real is None else tile.real[0]
        key_real = row_real if queries == keys else torch.ones(keys, dtype=torch.bool, device=weights.device)
        rows = _bins(row_real)
        columns = rows if key_real is row_real else _bins(key_real)
        pooled = rows[tile.start : tile.stop].T / rows.sum(0)[:, None] @ (weights @ columns)
        self.sums[layer] = self.sums.get(layer, 0) + pooled.cpu()
        if tile.stop == queries:
            self.finished.add(layer)

    def findings(self, layers: int) -> Findings:
        panels = {
            f"layer {layer}, head {head}": [[float(f"{number:.3g}") for number in row] for row in sums[head].tolist()]
            for layer, sums in ((layer, self.sums[layer]) for layer in _spread(sorted(self.sums)))
            for head in _spread(list(range(len(sums))))
        }
        found = Findings()
        if panels:
            found.heatmaps["weights"] = Heatmap(
                "Weights of the first input", "keys", "queries", panels, unit="share of a query's weight", log=True
            )
        return found


def _bins(real: Tensor) -> Tensor:
    """Which of at most PANEL bins each real token falls into, (N, bins), one-hot; nothing for padding."""
    count = int(real.sum())
    bins = min(PANEL, count)
    place = (real.cumsum(0) - 1).clamp_min(0) * bins // max(count, 1)
    return torch.nn.functional.one_hot(place, bins).float() * real[:, None]


def _spread(numbers: list[int]) -> list[int]:
    """At most PANELS of them, evenly spaced."""
    if len(numbers) <= PANELS:
        return numbers
    return [numbers[round(place * (len(numbers) - 1) / (PANELS - 1))] for place in range(PANELS)]


def promised_floor(seen: Seen, counts: Tensor) -> Tensor | None:
    """What the plan of a layer promises every key of rows of `counts` keys: min(floor, budget_h / n), or None."""
    payment = seen.plan.payment
    if not isinstance(payment, Budget) or getattr(payment, "signed", False):
        return None
    strengths = seen.arguments["strengths"] or {}
    budget = to_heads("budget", strengths.get("budget", payment.budget), seen.query)
    budget = budget[..., 0] if isinstance(budget, Tensor) else budget
    floor = floor_of(payment.floor, budget, counts.clamp_min(1).float())
    return None if not (floor > 0).any() else floor


def _by_head(values: Tensor) -> Tensor:
    """(B, H, ...) -> (H, X)."""
    return values.transpose(0, 1).flatten(1)


def _longer(mass: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(mass, (0, size - mass.shape[1]))
