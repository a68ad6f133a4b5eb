"""Calibration: bounds for every layer and head, out of the scores that a model has on some data.

Over the rows i of a head, with the centre m_i and temperature tau_i of the plan,

    bound = quantile over rows of max_j |s_ij - m_i| * tau_i, divided by r

so that the largest logit that the head can give, B_i = bound / tau_i, is r times smaller than what all rows but one in a
thousand reach. Cost: one forward pass, the scores of some rows at a time, and for every head its largest 16,384 rows.

Dimensions: B batch, H heads, R rows of a tile, M keys.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.core.errors import check_number, wrong
from hf_fullpay.core.numbers import PerLayer
from hf_fullpay.diagnosis.inputs import batches_of, real_tokens, without_labels
from hf_fullpay.diagnosis.report import Curve, Findings, Table
from hf_fullpay.diagnosis.run import as_found
from hf_fullpay.diagnosis.tables import as_text, rich_table
from hf_fullpay.hf.forward import BINDING
from hf_fullpay.hf.trial import trial
from hf_fullpay.hf.unwrap import body_of, no_cache, unwrapped
from hf_fullpay.hf.watch import Seen, watch
from hf_fullpay.plan import AttentionPlan, resolve, with_options
from hf_fullpay.scores import Bounded, Plain
from hf_fullpay.scores.bounded import SMALLEST, centre_of, width_and_amplitude

KEPT = 1 << 14  # rows of a head that are kept, the largest ones


@dataclass(frozen=True)
class Calibration:
    """Bounds, and what they were made of. Lists are by layer, and in each by head.

    Attributes:
        base: the plan that was calibrated, with its own bound.
        reduction: r.
        quantile: which quantile over rows.
        rows: how many rows each head had.
        largest: largest |score|, scaling and bias included.
        spans: quantile of max_j |score - centre|.
        bounds: for `Bounded(bound=...)`.
    """

    base: AttentionPlan
    reduction: float
    quantile: float
    rows: int
    largest: list[list[float]]
    spans: list[list[float]]
    bounds: PerLayer

    def plan(self, **options: Any) -> AttentionPlan:
        """The plan with the calibrated bounds, for `convert`, `register` or a config.

        Args:
            options: further changes to the plan, such as layers="from:6".
        """
        return with_options(self.base, {"bound": self.bounds} | options)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self) | {"base": self.base.to_dict(), "bounds": [list(row) for row in self.bounds]}

    def findings(self) -> Findings:
        """A table and a curve for a report."""
        rows = [
            [layer, max(largest), max(spans), sum(spans) / len(spans), min(bounds), max(bounds)]
            for layer, (largest, spans, bounds) in enumerate(zip(self.largest, self.spans, self.bounds, strict=True))
        ]
        columns = ["layer", "largest |score|", "widest row span", "mean row span", "least bound", "widest bound"]
        curve = Curve(
            "Scores and their calibrated limit", "layer", "logit", [float(row[0]) for row in rows],
            {
                "largest |score|": [row[1] for row in rows],
                f"{self.quantile:g} quantile of row spans": [row[2] for row in rows],
                f"limit, {self.reduction:g} times lower": [row[2] / self.reduction for row in rows],
            },
        )  # fmt: skip
        return Findings(
            curves={"calibration": curve}, tables={"calibration": Table(self._title, columns, rows)}, notes=[self._note]
        )

    @property
    def _title(self) -> str:
        return f"Bounds for logits {self.reduction:g} times lower"

    @property
    def _note(self) -> str:
        return (
            f"{self.quantile:g} quantile of {self.rows} rows a head, over {self.reduction:g}; {self.base.describe()}."
        )

    def __rich__(self) -> Any:
        return rich_table(self.findings().tables["calibration"], [self._note])

    def __str__(self) -> str:
        return as_text(self)


def calibrate(
    model: nn.Module, inputs: Any, *, plan: AttentionPlan | str = "bounded", reduction: float = 4.0,
    quantile: float = 0.999, **options: Any,
) -> Calibration:  # fmt: skip
    """Bounds per layer and head that make the largest logit `reduction` times smaller.

    The model runs the reach and the payment of the plan, without any bound, and is left as it was.

    Args:
        model: a Transformers model, stock or converted.
        inputs: a dict of tensors, the main input as a tensor, or an iterable of such (a DataLoader); padding by
            `attention_mask` is left out.
        plan: a plan with Bounded scores, or a preset's name; its centre, temperature and reach are used.
        reduction: how many times smaller; 4 to 8 is usual.
        quantile: of the rows; what the largest rows exceed it by, the bound takes away too.
        options: changes to the plan, such as centre="median" or temperature=0.1.

    Returns:
        The bounds: `convert(model, calibrate(model, inputs).plan())`.

    Raises:
        ValueError: for a plan without Bounded scores, a model that cannot run it, no inputs, no row with two keys, or
            scores that are not finite.
    """
    plan = with_options(resolve(plan), options)
    if not isinstance(plan.scores, Bounded):
        raise wrong("calibrate(plan=...)", "a plan with Bounded scores", plan.describe())
    check_number("calibrate(reduction=...)", reduction, low=0, open_low=True)
    check_number("calibrate(quantile=...)", quantile, low=0, high=1)
    model = unwrapped(model)
    # One for each attention module; several modules of a layer (cross-attention) share its bounds.
    heads: dict[tuple[int, str], _Heads] = defaultdict(lambda: _Heads(plan.scores, quantile))  # type: ignore[arg-type]
    real: list[Tensor | None] = [None]

    def see(seen: Seen) -> None:
        heads[getattr(seen.module, BINDING).index, seen.path].take(seen, real[0])

    with as_found(model), trial(model, replace(plan, scores=Plain())) as tried:
        tried.run(range(tried.total))
        body = body_of(model)
        with watch(body, see):
            for batch in batches_of(inputs, body):
                real[0] = real_tokens(batch)
                body(**without_labels(batch, body) | no_cache(body))
        total = tried.total
    found = [[one for (index, _), one in heads.items() if index == layer] for layer in range(total)]
    if silent := [layer for layer, row in enumerate(found) if not row]:
        raise ValueError(f"calibrate: expected inputs that pass through every layer, got none through {silent}.")
    spans = [_widest([one.span.quantile() for one in row]) for row in found]
    widths = [_widest([one.width.quantile() for one in row]) for row in found]
    # A head whose scores never differ says nothing about its bound: it gets the widest.
    widest = max(max(row) for row in widths)
    if widest == 0:
        raise ValueError("calibrate: expected scores that differ within a row, got none. Longer inputs are needed.")
    bounds = tuple(tuple(max((width or widest) / reduction, SMALLEST) for width in row) for row in widths)
    largest = [_widest([one.size for one in row]) for row in found]
    rows = max(int(one.span.count.max()) for row in found for one in row)
    return Calibration(plan, float(reduction), float(quantile), rows, largest, spans, bounds)


class _Heads:
    """What is kept of the rows of one attention module."""

    def __init__(self, scores: Bounded, quantile: float) -> None:
        self.scores, self.span, self.width = scores, _Top(quantile), _Top(quantile)
        self.size: Tensor = torch.zeros(())

    def take(self, seen: Seen, real: Tensor | None) -> None:
        """Rows of one call; `real` says which queries are no padding."""
        for start, stop in seen.tiles():
            rows = seen.rows(start, stop)
            counts = rows.visible.sum(-1)
            live = counts > 0
            if real is not None and real.shape[1] == seen.query.shape[2]:
                live = live & real[:, None, start:stop]
            live = live.expand(rows.logits.shape[:3])
            hidden = ~(rows.visible & live[..., None])
            far = (rows.logits - centre_of(rows.logits, rows.visible, self.scores.centre)).abs()
            span = far.masked_fill(hidden, 0).amax(-1)
            size = rows.scores.abs().masked_fill(hidden, 0).amax((0, 2, 3)).cpu()
            if not torch.isfinite(size).all():
                raise ValueError(
                    f"calibrate: expected finite scores, got NaN or infinity in call {seen.index} ({seen.path}). Look at "
                    "the weights before it, or use a wider type."
                )
            self.size = torch.maximum(self.size, size)
            self.span.take(span, live)
            inverse_tau, _ = width_and_amplitude(1.0, self.scores.temperature, "preserve", counts.to(span.dtype))
            self.width.take(span / inverse_tau, live)


class _Top:
    """The largest numbers of a stream, by head: a high quantile of it is exact."""

    def __init__(self, quantile: float) -> None:
        self.share = 1 - quantile
        self.count = torch.zeros((), dtype=torch.long)
        self.top: Tensor | None = None

    def take(self, values: Tensor, live: Tensor) -> None:
        """Numbers >= 0 of shape (B, H, R), those that are live."""
        heads = values.shape[1]
        new = values.masked_fill(~live, -1).transpose(0, 1).reshape(heads, -1).cpu()
        both = new if self.top is None else torch.cat([self.top, new], 1)
        self.top = both.topk(min(KEPT, both.shape[1]), 1).values
        self.count = self.count + live.sum((0, 2)).cpu()
        if self.share * float(self.count.max() - 1) > KEPT - 2:
            raise ValueError(
                f"calibrate: expected at most {int((KEPT - 2) / self.share)} rows a head for quantile={1 - self.share:g}, "
                "got more. Give fewer inputs, or a higher quantile."
            )

    def quantile(self) -> Tensor:
        """By head, between neighbours in proportion, as torch.quantile has it."""
        place = self.share * (self.count - 1).clamp_min(0).double()
        assert self.top is not None
        upper = self.top.gather(1, place.long()[:, None])[:, 0].double()
        lower = self.top.gather(1, place.ceil().long()[:, None])[:, 0].double()
        return (upper + (lower - upper) * place.frac()).clamp_min(0)


def _widest(found: list[Tensor]) -> list[float]:
    """By head, over the attention modules of a layer.

    Raises:
        ValueError: if they differ in their number of heads.
    """
    if len(shapes := {len(one) for one in found}) > 1:
        raise ValueError(
            f"calibrate: expected as many heads in all attention modules of a layer, got {sorted(shapes)}."
        )
    return torch.stack([one.double() for one in found]).amax(0).tolist()
