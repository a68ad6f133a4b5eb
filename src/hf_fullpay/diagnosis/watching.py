"""Promises that show in one forward pass: in the rows of weights of every layer, and in the gradients of its outputs.

Dimensions: B batch, H heads, G key/value heads, R rows of a tile, M keys.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from hf_fullpay.core.numbers import to_heads
from hf_fullpay.core.shapes import repeat_groups
from hf_fullpay.diagnosis.inputs import Batch, real_tokens, without_labels
from hf_fullpay.diagnosis.ledger import Ledger
from hf_fullpay.diagnosis.stream import promised_floor
from hf_fullpay.hf.blocks import watch_blocks
from hf_fullpay.hf.unwrap import no_cache
from hf_fullpay.hf.watch import Seen, watch
from hf_fullpay.payment.gate import gated
from hf_fullpay.payment.mixture import Budget, Mixture
from hf_fullpay.reach import Blocks, Chunks
from hf_fullpay.reference import Rows
from hf_fullpay.scores import Bounded, DelayBias
from hf_fullpay.scores.bounded import width_and_amplitude

SAMPLED = 4  # rows of a tile whose order is looked at, and of a layer whose gradients are


def check_rows(model: nn.Module, batch: Batch, ledger: Ledger) -> None:
    """One forward pass, with everything that it shows written into the ledger."""
    real = real_tokens(batch)

    def see(seen: Seen) -> None:
        rows = _real_of(seen, real)
        ledger.is_ordinary &= seen.plan.is_vanilla
        wrong = ~seen.output.isfinite() & rows[:, :, None, None]
        ledger.highest("finite", seen.index, wrong.sum((0, 1, 3)))
        if wrong.any():
            return  # nothing else can be said of it
        with torch.no_grad():
            _check_budget(seen, ledger)
            for start, stop in seen.tiles():
                _Tile(seen, start, stop, rows[:, None, start:stop], ledger).check()
        _check_gradients(seen, rows, ledger)

    def enter(index: int, hidden: Tensor) -> Tensor | None:
        return hidden.detach().requires_grad_() if index == 0 else None  # else a model of frozen parts has no graph

    def leave(index: int, hidden: Tensor) -> None:
        rows = real if real is not None and real.shape == hidden.shape[:2] else None
        if not (hidden if rows is None else hidden[rows]).isfinite().all():
            ledger.broken_block(index)

    with ExitStack() as stack:
        stack.enter_context(watch(model, see))
        stack.enter_context(watch_blocks(model, enter, leave))
        stack.enter_context(torch.enable_grad())
        model(**without_labels(batch, model), **no_cache(model))


def _real_of(seen: Seen, real: Tensor | None) -> Tensor:
    """Queries that are no padding, (B, N) bool."""
    shape = (seen.query.shape[0], seen.query.shape[2])
    return real if real is not None and real.shape == shape else seen.query.new_ones(shape, dtype=torch.bool)


class _Tile:
    """Some rows of one call."""

    def __init__(self, seen: Seen, start: int, stop: int, real: Tensor, ledger: Ledger) -> None:
        self.seen, self.start, self.stop, self.ledger = seen, start, stop, ledger
        self.rows: Rows = seen.rows(start, stop)
        self.counts = self.rows.paid.sum(-1)
        self.live = real & (self.counts > 0)

    def check(self) -> None:
        self._sums()
        self._order()
        self._agreement()
        self._floor()
        self._bound()

    def _highest(self, name: str, values: Tensor, live: Tensor | None = None) -> None:
        """Values (B, H, R)."""
        live = (self.live if live is None else live).expand_as(values)
        if live.any():
            self.ledger.highest(name, self.seen.index, values.masked_fill(~live, -torch.inf).amax((0, 2)))

    def _sums(self) -> None:
        weights = self.rows.weights
        if self.seen.sinks is None:  # which take a part of every row
            self._highest("rows", (weights.sum(-1) - 1).abs())
        self._highest("reach", weights.abs().masked_fill(self.rows.paid, 0).amax(-1))

    def _order(self) -> None:
        plan, rows = self.seen.plan, self.rows
        if isinstance(plan.reach, Blocks | Chunks) or self.seen.softcap is not None:
            return  # a relay or a summary stands for keys of many scores; a cap comes before the bias
        some = slice(None, None, max(1, (self.stop - self.start) // SAMPLED))
        # Delays change the order on purpose; what they leave of the scores is what the softmax keeps in order.
        scores = (rows.logits if isinstance(plan.scores, DelayBias) else rows.scores)[:, :, some]
        visible = rows.visible.expand(rows.weights.shape)[:, :, some]
        weights = rows.weights[:, :, some]
        scores, order = scores.masked_fill(~visible, -torch.inf).sort(-1, descending=True)
        ordered = weights.gather(-1, order)
        both = visible.gather(-1, order)[..., 1:] & (scores[..., :-1] > scores[..., 1:])
        gained = torch.where(both, ordered[..., 1:] - ordered[..., :-1], 0).clamp_min(0)
        if gained.shape[-1]:
            largest = weights.amax(-1).clamp_min(1e-30)
            self._highest("order", gained.amax(-1) / largest, self.live.expand(rows.weights.shape[:3])[:, :, some])

    def _agreement(self) -> None:
        seen = self.seen
        weights = self.rows.weights
        ours = weights @ repeat_groups(seen.value.detach(), seen.query.shape[1]).to(weights.dtype)
        if seen.plan.gate:
            ours = gated(ours, (seen.arguments["strengths"] or {})["gate"][:, :, self.start : self.stop])
        theirs = seen.output.detach()[:, self.start : self.stop].transpose(1, 2).to(ours.dtype)
        live = self.live.expand(weights.shape[:3])
        largest = theirs.abs().amax(-1).masked_fill(~live, 0).amax().clamp_min(1e-30)
        self._highest("agreement", (ours - theirs).abs().amax(-1) / largest)

    def _floor(self) -> None:
        promised = promised_floor(self.seen, self.counts)
        if promised is None:
            return
        least = self.rows.weights.masked_fill(~self.rows.paid, torch.inf).amin(-1)
        live = self.live & (promised > 0)
        if live.any():
            ratio = (least / promised.clamp_min(1e-30)).masked_fill(~live, torch.inf)
            self.ledger.lowest("floor", self.seen.index, ratio.amin((0, 2)))

    def _bound(self) -> None:
        plan, rows = self.seen.plan, self.rows
        if not isinstance(plan.scores, Bounded):
            return
        strengths = self.seen.arguments["strengths"] or {}
        bound = to_heads("bound", strengths.get("bound", plan.scores.limit), self.seen.query)
        n = rows.visible.sum(-1, keepdim=True).to(rows.logits.dtype)
        width, amplitude = width_and_amplitude(bound, plan.scores.temperature, plan.scores.slope, n)
        if plan.scores.slope == "rescale":
            amplitude = width
        amplitude = amplitude[..., 0].expand(rows.weights.shape[:3])
        live = self.live & amplitude.isfinite()
        largest = rows.logits.abs().masked_fill(~rows.visible, 0).amax(-1)
        self._highest("bound", largest / amplitude, live)
        if getattr(plan.payment, "pay", "reach") == "visible" and not torch.equal(rows.paid, rows.visible):
            return  # keys outside the reach are paid from what the certificate speaks of
        small, n = torch.exp(-2 * amplitude), n[..., 0]
        low, high = small / (small + n - 1).clamp_min(1e-30), 1 / (1 + (n - 1) * small)
        least = rows.weights.masked_fill(~rows.visible, torch.inf).amin(-1)
        ratio = torch.maximum(rows.weights.amax(-1) / high, torch.where(low > 0, low / least, 0))
        self._highest("certificate", ratio, live & (n > 1) & ~_is_signed(plan.payment))


def _is_signed(payment: object) -> torch.Tensor:
    return torch.tensor(isinstance(payment, Mixture) and payment.signed)


def _check_budget(seen: Seen, ledger: Ledger) -> None:
    """A learned budget can fade to nothing, and the floor with it."""
    payment, budget = seen.plan.payment, (seen.arguments["strengths"] or {}).get("budget")
    if budget is not None and isinstance(payment, Budget):
        over = (budget.abs() - payment.budget_max).clamp_min(0)
        gone = torch.zeros_like(over) if getattr(payment, "signed", False) else (budget <= 0).to(over)
        ledger.highest("budget", seen.index, over + gone)


def _check_gradients(seen: Seen, real: Tensor, ledger: Ledger) -> None:
    """Gradients of some rows of the output: none may reach a value that is not paid, nor a key that is not seen."""
    queries, heads = seen.query.shape[2], seen.query.shape[1]
    groups = seen.key.shape[1]
    if not seen.output.requires_grad or not seen.value.requires_grad:
        return
    direction = torch.randn(heads, seen.output.shape[-1], generator=torch.Generator().manual_seed(0)).to(seen.output)
    for row in sorted({place * (queries - 1) // (SAMPLED - 1) for place in range(SAMPLED)}):
        told = seen.output[:, row] * direction * real[:, row, None, None]
        found = torch.autograd.grad(told.sum(), (seen.value, seen.key), retain_graph=True, allow_unused=True)
        rows = seen.rows(row, row + 1)
        for gradient, allowed in zip(found, (rows.paid, rows.visible), strict=True):
            if gradient is None:  # keys that were cast on their way
                continue
            some = allowed.expand(rows.weights.shape)[:, :, 0].unflatten(1, (groups, heads // groups)).any(2)
            outside = gradient.abs().amax(-1).masked_fill(some, 0).amax((0, 2))
            ledger.highest("gradients", seen.index, outside.repeat_interleave(heads // groups))
