"""The reference: the composition of reach, scores and payment, dense and plain, exactly as the definitions say.

It is differentiable, runs in FP64 where the inputs are FP64 (FP32 otherwise), returns the weights, and is the oracle of
all tests. Fast paths never import it; a user meets it when asking for attention weights.
Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    dtype, kind = query.dtype, accumulate(query.dtype)
    query, key, value = (
        query.to(kind),
        repeat_groups(key, query.shape[1]).to(kind),
        repeat_groups(value, query.shape[1]).to(kind),
    )
    if 0 in (query.shape[2], key.shape[2]):  # nothing to pay: zeros, of which a gradient may be asked
        weights = query @ key.mT
        return (weights @ value).to(dtype), weights.to(dtype)
    strengths = strengths or {}
    paid, visible = allowed.to_dense(), restricted(plan.reach, allowed, given, query).to_dense()

    scores = query @ key.mT * scaling
    if bias is not None:
        scores = scores + bias.to(kind)
    if isinstance(plan.scores, DynamicScale):
        alpha = to_heads("alpha", strengths.get("alpha", plan.scores.start()), query)
        scores = scores * dynamic_gain(alpha, plan.scores.max_scale)
    if isinstance(plan.reach, Blocks):
        scores = relayed_scores(scores, visible, query_slots(allowed), origins(visible), plan.reach.size)
    if isinstance(plan.scores, Bounded):
        bound = to_heads("bound", strengths.get("bound", plan.scores.limit), query)
        options = {name: getattr(plan.scores, name) for name in ("centre", "temperature", "slope")}
        scores = bounded_scores(scores, visible, bound=bound, **options)
    elif isinstance(plan.scores, DelayBias):
        beta = to_heads("beta", strengths.get("beta", plan.scores.beta), query)
        scores = scores - beta * lags(*clocks(plan.scores, given, allowed, query)).abs().to(kind)[:, None]

    if isinstance(plan.reach, Chunks):
        exchange = to_heads("exchange", strengths.get("exchange", plan.reach.exchange), query)
        weights = chunk_weights(
            scores, visible, query_slots(allowed), origins(visible), is_causal(allowed), size=plan.reach.size,
            stride=plan.reach.stride, exchange=exchange, softmax=softmax_weights,
        )  # fmt: skip
    else:
        weights = softmax_weights(scores, visible)
    # Dropout acts on what the softmax pays, never on the floor.
    drop = torch.nn.Dropout(dropout)
    if isinstance(plan.payment, Mixture):
        budget = to_heads("budget", strengths.get("budget", plan.payment.budget), query)
        # A query whose reach is empty gives zeros, even where the mask allows keys outside its reach.
        paid = visible if plan.payment.pay == "reach" else paid & visible.any(-1, keepdim=True)
        weights = mixture_weights(drop(weights), paid, floor=plan.payment.floor, budget=budget)
    elif isinstance(plan.payment, Clamp):
        budget = to_heads("budget", strengths.get("budget", plan.payment.budget), query)
        least = floor_of(plan.payment.floor, budget, visible.sum(-1, keepdim=True).to(kind))
        floor = visible * least
        weights = floor + drop(clamp_weights(weights, visible, least) - floor)
    else:
        weights = drop(weights)
    output = weights @ value
    if plan.gate:
        output = gated(output, strengths["gate"])
    return output.to(dtype), weights.to(dtype)
