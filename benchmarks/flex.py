"""FlexAttention compiled with the modification and the block mask of a plan, as far as it can express one.

A reach becomes a block mask, scores become a score function with the row numbers captured, and a mixture is paid on top by
our own mean, as on any host. Relays, summaries and the clamp are no function of one score.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cases import Call, given
from hf_fullpay import AttentionPlan, Band, Bounded, Full, Mixture, Softmax, attention
from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.mean import blend, visible_mean
from hf_fullpay.payment.mixture import share
from hf_fullpay.scores.bounded import width_and_amplitude

PLAIN_SCORES = ("plain", "dynamic_scale")  # a gain starts at 1
MASKS = ("full", "band", "windows", "window_global")

# Each plan, shape and type is a program of its own; past the limit FlexAttention would run unfused, without a word.
torch._dynamo.config.recompile_limit = 256
torch._dynamo.config.accumulated_recompile_limit = 4096


def cannot(plan: AttentionPlan) -> str:
    """Why FlexAttention does not express a plan; an empty string if it does."""
    if plan.reach.kind not in MASKS:
        return f"{plan.reach.kind} attends to summaries: no mask of pairs"
    if not isinstance(plan.payment, Softmax | Mixture):
        return f"{plan.payment.kind} needs the whole row twice: no function of one score"
    if isinstance(plan.scores, Bounded):
        simple = plan.scores.centre in ("mean", "none") and plan.scores.slope != "rescale"
        return "" if simple else "this centre or slope needs the whole row: no function of one score"
    known = (*PLAIN_SCORES, "delay_bias")
    return "" if plan.scores.kind in known else f"no score function for {plan.scores.kind} here"


def flex_call(plan: AttentionPlan, is_causal: bool) -> Call:
    """The compiled call; what depends on shapes alone is built at the first call of a shape."""
    blocks: dict[tuple[int, str], Any] = {}
    compiled = cache(lambda: torch.compile(_softmax_part(plan), dynamic=False))  # when first called

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        n, device = key.shape[2], query.device.type
        if (n, device) not in blocks:
            mask = _mask(plan, is_causal, n, device)
            blocks[n, device] = mask and create_block_mask(mask, None, None, n, n, device=device)
        allowed = Visible(n, n, query.device, offset=0 if is_causal else None)
        out = compiled()(query, key, value, blocks[n, device], *_rows(plan, query, key, allowed))
        if isinstance(plan.payment, Mixture):
            counts = allowed.counts().float()
            out = blend(out, visible_mean(value, allowed), share(plan.payment.floor, plan.payment.budget, counts))
        return out

    return run


def _mask(plan: AttentionPlan, is_causal: bool, n: int, device: str) -> Callable[..., Tensor] | None:
    """Which pairs are visible, as a function of places; None for all."""
    if isinstance(plan.reach, Full):
        return (lambda b, h, i, j: i >= j) if is_causal else None
    if isinstance(plan.reach, Band):
        size = plan.reach.size
        return lambda b, h, i, j: (i >= j) & (i - j < size)
    seen = reach_mask(plan, is_causal, n).to(device)
    return lambda b, h, i, j: seen[i, j]


def reach_mask(plan: AttentionPlan, is_causal: bool, n: int) -> Tensor:
    """(n, n) bool: the pairs of a plan's reach, read from the reference."""
    zeros = torch.zeros(1, 1, n, 1)
    softmax = AttentionPlan(reach=plan.reach)
    options: dict[str, Any] = {"plan": softmax, "is_causal": is_causal, "given": given(softmax, n)}
    return attention(zeros, zeros, zeros, **options, return_weights=True)[1][0, 0] > 0


def _softmax_part(plan: AttentionPlan) -> Callable[..., Tensor]:
    """FlexAttention over queries, keys, values, a block mask and the row numbers of bounded scores."""
    scores = plan.scores

    def plain(query: Tensor, key: Tensor, value: Tensor, blocks: Any) -> Tensor:
        return flex_attention(query, key, value, block_mask=blocks)

    def delayed(query: Tensor, key: Tensor, value: Tensor, blocks: Any) -> Tensor:
        return flex_attention(
            query, key, value, score_mod=lambda s, b, h, i, j: s - scores.beta * (i - j).abs(), block_mask=blocks
        )

    def bounded(
        query: Tensor, key: Tensor, value: Tensor, blocks: Any, centre: Tensor, width: Tensor, amplitude: Tensor
    ) -> Tensor:
        def squash(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return amplitude[i] * torch.tanh((score - centre[b, h, i]) / width[i])

        return flex_attention(query, key, value, score_mod=squash, block_mask=blocks)

    return bounded if isinstance(scores, Bounded) else plain if scores.kind in PLAIN_SCORES else delayed


def _rows(plan: AttentionPlan, query: Tensor, key: Tensor, allowed: Visible) -> tuple[Tensor, ...]:
    """Centre (B, H, N), width (N,) and amplitude (N,) of bounded scores; nothing for others."""
    scores = plan.scores
    if not isinstance(scores, Bounded):
        return ()
    visible = plan.reach.restrict(allowed)
    numbers = width_and_amplitude(scores.limit, scores.temperature, scores.slope, visible.counts().float())
    width, amplitude = (x.expand(1, 1, key.shape[2], 1)[0, 0, :, 0].contiguous() for x in numbers)
    if scores.centre == "none":
        return query.new_zeros(query.shape[:3], dtype=torch.float32), width, amplitude
    mean = visible_mean(key.float(), visible)
    return (query.float() * mean).sum(-1) * query.shape[-1] ** -0.5, width, amplitude
