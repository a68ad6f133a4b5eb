"""A glance at a model in training: one forward pass of a few documents, a few rows of every layer, one backward pass.

Numbers are those of `diagnose`, over fewer rows: an estimate for a curve over steps, not for a verdict.
Dimensions: B documents, H heads, N queries, M keys, R chosen rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.diagnosis.as_found import as_found
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.diagnosis.sinks import LEVEL
from hf_fullpay.hf.blocks import watch_blocks
from hf_fullpay.hf.watch import Seen, watch


def glance(
    model: nn.Module, batch: Mapping[str, Any], *, rows: int = 8, reach: bool = True, settings: Settings | None = None
) -> dict[str, float]:
    """Measure a model, and leave it as it was: mode, gradients, random state.

    Args:
        model: any Transformers model whose attention routes, with adapters or without.
        batch: its keyword arguments, on its device; `attention_mask` (B, N) says what is padding, which no number counts.
        rows: query rows of every layer, evenly spaced.
        reach: whether to run backward once for `near_over_far`.
        settings: near and far.

    Returns:
        coverage: n times the smallest weight of a row, mean.
        entropy, entropy_relative: in nats, and over log n.
        sink_heads: share of heads in which a position of a text's first half gets more than 0.3 of the chosen rows that
            see it, mean over texts. (`diagnose` cuts texts to 64 tokens and looks at all rows.)
        near_over_far: gradient of one position of each document's later half, at the last block's output, with respect
            to its 5 nearest predecessors over the far ones, at the first block's input. Left out for an encoder-decoder
            and for documents too short to have a far.
        budget_min, budget_mean, budget_max: over heads and layers; so too alpha, beta, exchange, and gate (open = 1),
            whichever is learned.

    Raises:
        ValueError: for attention that cannot be seen; see `watch`.
    """
    mask = batch.get("attention_mask")
    look = _Look(rows, mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None)
    reach = reach and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    with as_found(model), ExitStack() as stack:
        stack.enter_context(watch(model, look.see))
        if reach:
            stack.enter_context(watch_blocks(model, look.enter, look.leave))
            stack.enter_context(torch.enable_grad())
        model(**batch)
        found = look.numbers()
        return found | (look.reach(settings or Settings()) if reach else {})


class _Look:
    """What one forward pass shows."""

    def __init__(self, rows: int, real: Tensor | None) -> None:
        self.rows, self.real = rows, real
        self.sums: dict[str, list[Tensor]] = defaultdict(list)
        self.learned: dict[str, list[Tensor]] = defaultdict(list)
        self.first: Tensor | None = None
        self.last: Tensor | None = None

    @torch.no_grad()
    def see(self, seen: Seen) -> None:
        queries = seen.query.shape[2]
        chosen = sorted({(place + 1) * queries // self.rows - 1 for place in range(self.rows)} - {-1})
        found = [seen.rows(row, row + 1) for row in chosen]
        weights = torch.cat([row.weights for row in found], 2)
        paid = torch.cat([row.paid.expand(row.weights.shape) for row in found], 2)
        real = self._real_of(weights.shape[0], queries, weights.device)
        self._take(weights, paid & real[:, None, chosen, None])
        for name, numbers in (seen.arguments["strengths"] or {}).items():
            if name == "gate":  # logits (B, H, N, 1)
                open_, count = torch.sigmoid(numbers[..., 0]) * real[:, None], real.sum().clamp_min(1)
                numbers = open_.sum((0, 2)) / count
            self.learned[name].append(numbers.detach().float())

    def _take(self, weights: Tensor, paid: Tensor) -> None:
        counts = paid.sum(-1)
        live, n = counts > 0, counts.clamp_min(1)
        several = counts > 1
        entropy = torch.special.entr(weights).sum(-1)
        relative = entropy / n.float().log().clamp_min(1e-9)
        coverage = weights.masked_fill(~paid, torch.inf).amin(-1) * n
        for name, values, of in (
            ("coverage", coverage, live), ("entropy", entropy, live), ("entropy_relative", relative, several)
        ):  # fmt: skip
            self.sums[name].append(torch.where(of, values, 0).sum() / of.sum())
        means = (weights * live[..., None]).sum(-2) / paid.sum(-2).clamp_min(1)
        keys = paid.any(-2)
        half = keys & (keys.cumsum(-1) <= (keys.sum(-1, keepdim=True) / 2).ceil())
        self.sums["sink_heads"].append((means.masked_fill(~half, 0).amax(-1).mean(0) > LEVEL).float().mean())

    def _real_of(self, batch: int, queries: int, device: torch.device) -> Tensor:
        """Queries that are no padding, (B, N); all where the mask speaks of another sequence."""
        if self.real is not None and self.real.shape == (batch, queries):
            return self.real.to(device)
        return torch.ones(batch, queries, dtype=torch.bool, device=device)

    def numbers(self) -> dict[str, float]:
        """Means over layers; of the learned numbers least, mean and largest."""
        found = {name: float(torch.stack(values).nanmean()) for name, values in self.sums.items()}
        for name, layers in self.learned.items():
            every = torch.cat(layers)
            found |= {f"{name}_{how}": float(getattr(every, how)()) for how in ("min", "mean", "max")}
        return found

    def enter(self, index: int, hidden: Tensor) -> Tensor | None:
        if index > 0:
            return None
        self.first = hidden.detach().requires_grad_()
        return self.first

    def leave(self, index: int, hidden: Tensor) -> None:
        self.last = hidden

    def reach(self, settings: Settings) -> dict[str, float]:
        """One backward pass: documents of a batch do not meet, so each has a query of its own in it."""
        first, last = self.first, self.last
        if first is None or last is None or first.ndim != 3 or last.shape[:2] != first.shape[:2]:
            return {}
        real = self._real_of(first.shape[0], first.shape[1], first.device)
        place, count = real.cumsum(-1), real.sum(-1, keepdim=True)
        share = torch.arange(1, len(real) + 1, device=real.device)[:, None] / len(real)
        query = (count // 2 + (count - count // 2) * share).long()  # counted from 1, evenly over the later halves
        distance, far = query - place, (count // 2).clamp_max(settings.far)
        direction = torch.randn(last.shape[-1], generator=torch.Generator().manual_seed(settings.seed)).to(last)
        chosen = real & (distance == 0) & (far > settings.near)
        if not chosen.any():
            return {}
        (gradient,) = torch.autograd.grad((last @ direction)[chosen].sum(), first)
        norms, some = gradient.float().norm(dim=-1), chosen.any(-1)
        near, away = (
            ((norms * which).sum(-1) / which.sum(-1).clamp_min(1))[some].mean()
            for which in (real & (distance >= 1) & (distance <= settings.near), real & (distance >= far))
        )
        return {"near_over_far": float(near / away)}
