"""The reference: the composition of reach, scores and payment, dense and plain, exactly as the definitions say.

It is differentiable, runs in FP64 where the inputs are FP64 (FP32 otherwise), returns the weights, and is the oracle of
all tests. Fast paths never import it; a user meets it when asking for attention weights.
Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_fullpay.core.numbers import accumulate, to_heads
from hf_fullpay.core.places import is_causal, origins, query_slots
from hf_fullpay.core.shapes import repeat_groups
from hf_fullpay.core.visible import Visible
from hf_fullpay.payment import Clamp, Mixture
from hf_fullpay.payment.clamp import clamp_weights, floor_of
from hf_fullpay.payment.gate import gated
from hf_fullpay.payment.mixture import mixture_weights
from hf_fullpay.payment.softmax import softmax_weights
from hf_fullpay.plan import AttentionPlan
from hf_fullpay.reach import Blocks, Chunks, restricted
from hf_fullpay.reach.blocks import relayed_scores
from hf_fullpay.reach.chunks import chunk_weights
from hf_fullpay.scores import Bounded, DelayBias, DynamicScale
from hf_fullpay.scores.bounded import bounded_scores
from hf_fullpay.scores.delay import clocks, lags
from hf_fullpay.scores.dynamic_scale import dynamic_gain


@dataclass(frozen=True, eq=False)
class Rows:
    """The dense rows of some queries. R rows, the other letters as above; FP64 where the inputs are FP64, else FP32.

    Attributes:
        weights: (B, H, R, M), sums to one over each row that sees a key, dropout included.
        paid: keys that may have a weight, (B or 1, H or 1, R, M) bool.
        scores: (B, H, R, M), scaling * q . k + bias, before the plan changes them.
        logits: (B, H, R, M), what the softmax is taken of; entries at keys out of reach have no meaning.
        visible: keys that the softmax sees, (B or 1, H or 1, R, M) bool.
    """

    weights: Tensor
    paid: Tensor
    scores: Tensor
    logits: Tensor
    visible: Tensor


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: AttentionPlan,
    allowed: Visible,
    scaling: float,
    bias: Tensor | None = None,
    strengths: Mapping[str, Tensor] | None = None,
    given: Mapping[str, Any] | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, Dv) and weights (B, H, N, M), both in the type of query; arguments as in `attend`."""
    dtype = query.dtype
    value = repeat_groups(value, query.shape[1]).to(accumulate(dtype))
    if 0 in (query.shape[2], key.shape[2]):  # nothing to pay: zeros, of which a gradient may be asked
        weights = query.to(value.dtype) @ repeat_groups(key, query.shape[1]).to(value.dtype).mT
        return (weights @ value).to(dtype), weights.to(dtype)
    weights = reference_rows(
        query, key, plan=plan, allowed=allowed, scaling=scaling, bias=bias, strengths=strengths, given=given,
        dropout=dropout,
    ).weights  # fmt: skip
    output = weights @ value
    if plan.gate:
        output = gated(output, (strengths or {})["gate"])
    return output.to(dtype), weights.to(dtype)


def reference_rows(
    query: Tensor,
    key: Tensor,
    *,
    plan: AttentionPlan,
    allowed: Visible,
    scaling: float,
    bias: Tensor | None = None,
    strengths: Mapping[str, Tensor] | None = None,
    given: Mapping[str, Any] | None = None,
    dropout: float = 0.0,
    start: int = 0,
    stop: int | None = None,
) -> Rows:
    """Rows start..stop-1 of the weights, and what led to them; other arguments as in `attend`."""
    stop = query.shape[2] if stop is None else stop
    rows, kind = slice(start, stop), accumulate(query.dtype)
    key = repeat_groups(key, query.shape[1]).to(kind)
    strengths = strengths or {}
    paid = _dense(allowed, start, stop)
    visible = _dense(restricted(plan.reach, allowed, given, query), start, stop)

    raw = scores = query[:, :, rows].to(kind) @ key.mT * scaling
    if bias is not None:
        raw = scores = scores + (bias if bias.shape[2] == 1 else bias[:, :, rows]).to(kind)
    if isinstance(plan.scores, DynamicScale):
        alpha = to_heads("alpha", strengths.get("alpha", plan.scores.start()), query)
        scores = scores * dynamic_gain(alpha, plan.scores.max_scale)
    if isinstance(plan.reach, Blocks):
        scores = relayed_scores(scores, visible, _slots(allowed, rows), origins(visible), plan.reach.size)
    if isinstance(plan.scores, Bounded):
        bound = to_heads("bound", strengths.get("bound", plan.scores.limit), query)
        options = {name: getattr(plan.scores, name) for name in ("centre", "temperature", "slope")}
        scores = bounded_scores(scores, visible, bound=bound, **options)
    elif isinstance(plan.scores, DelayBias):
        beta = to_heads("beta", strengths.get("beta", plan.scores.beta), query)
        times, key_times, delays = clocks(plan.scores, given, allowed, query)
        late = lags(times[:, rows], key_times, None if delays is None else delays[:, rows])
        scores = scores - beta * late.abs().to(kind)[:, None]

    if isinstance(plan.reach, Chunks):
        exchange = to_heads("exchange", strengths.get("exchange", plan.reach.exchange), query)
        weights = chunk_weights(
            scores, visible, _slots(allowed, rows), origins(visible), is_causal(allowed), size=plan.reach.size,
            stride=plan.reach.stride, exchange=exchange, softmax=softmax_weights,
        )  # fmt: skip
    else:
        weights = softmax_weights(scores, visible)
    # Dropout acts on what the softmax pays, never on the floor.
    drop = torch.nn.Dropout(dropout)
    # A query whose reach is empty gives zeros, even where the mask allows keys outside its reach.
    everyone = isinstance(plan.payment, Mixture) and plan.payment.pay == "visible"
    paid = paid & visible.any(-1, keepdim=True) if everyone else visible
    if isinstance(plan.payment, Mixture):
        budget = to_heads("budget", strengths.get("budget", plan.payment.budget), query)
        weights = mixture_weights(drop(weights), paid, floor=plan.payment.floor, budget=budget)
    elif isinstance(plan.payment, Clamp):
        budget = to_heads("budget", strengths.get("budget", plan.payment.budget), query)
        least = floor_of(plan.payment.floor, budget, visible.sum(-1, keepdim=True).to(kind))
        floor = visible * least
        weights = floor + drop(clamp_weights(weights, visible, least) - floor)
    else:
        weights = drop(weights)
    return Rows(weights, paid, raw, scores, visible)


def _dense(visible: Visible, start: int, stop: int) -> Tensor:
    """Rows of the mask, (B or 1, H or 1, R, M) bool."""
    mask = visible.tile(start, stop)
    if mask is None:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=visible.device)
    return mask.expand(mask.shape[0], mask.shape[1], stop - start, visible.n_keys)


def _slots(allowed: Visible, rows: slice) -> Tensor:
    slots = query_slots(allowed)
    return slots if slots.shape[2] == 1 else slots[:, :, rows]
