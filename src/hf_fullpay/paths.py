"""Which fast path computes the softmax part of a call: what keys get before a mixture adds its floor.

    reach \\ scores         plain, dynamic scale      bounded, or a clamp       delay bias
    full, band             host                      tiles                     delay
    blocks                 relays                    relays                    -
    chunks                 chunks                    -                         -
    windows                pieces, each by the first row                       -

host is torch's scaled_dot_product_attention (chunked for a band); tiles and delay compute scores anew in tiles of rows;
FlexAttention or our Triton kernels take the place of host, tiles and relays where `backends` says so. The plan refuses
what is not in the table. A mask or a bias of pairs, which the model itself brings, has the size of all pairs: windows then
join the mask, and blocks and chunks go to the reference.

Dimensions: B batch, H query heads, G key/value heads (G divides H), N queries, M keys, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_fullpay.core.numbers import accumulate, to_heads
from hf_fullpay.core.places import query_slots
from hf_fullpay.core.visible import Visible
from hf_fullpay.core.warning import warn
from hf_fullpay.fast.chunks import chunk_attention
from hf_fullpay.fast.cut import Cut, Piece, whole
from hf_fullpay.fast.delay import delayed_attention
from hf_fullpay.fast.grid import Grid, grid_cut
from hf_fullpay.fast.host import host_attention
from hf_fullpay.fast.kernels import kernel_attention, kernel_relays
from hf_fullpay.fast.mean import visible_mean
from hf_fullpay.fast.relays import Squash, relay_attention
from hf_fullpay.fast.sliding import sliding_cut, step_cut
from hf_fullpay.fast.tiles import tiled_attention
from hf_fullpay.payment import Clamp
from hf_fullpay.payment.clamp import floor_of
from hf_fullpay.plan import AttentionPlan
from hf_fullpay.reach import Blocks, Chunks, WindowGlobal, Windows, restricted
from hf_fullpay.scores import Bounded, DelayBias
from hf_fullpay.scores.bounded import width_and_amplitude
from hf_fullpay.scores.delay import clocks


@dataclass(frozen=True, eq=False)
class Call:
    """What a call asks for besides its query, key and value; see `attend` for each.

    Args:
        plan: what the layer does.
        allowed: the keys that the model's mask allows.
        scaling: factor of the scores.
        bias: added to the scores, broadcastable to (B, H, N, M).
        strengths: learned numbers by name.
        given: arguments of the call by name.
        dropout: probability of dropping a weight.
    """

    plan: AttentionPlan
    allowed: Visible
    scaling: float
    bias: Tensor | None
    strengths: Mapping[str, Tensor]
    given: Mapping[str, Any] | None
    dropout: float


def cut_by_reach(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Cut:
    """Pieces of a local reach, the whole for any other."""
    reach, allowed, given = call.plan.reach, call.allowed, call.given
    if allowed.dense is None and call.bias is None:
        if isinstance(reach, WindowGlobal):
            named = reach.named(allowed, given, query.shape[0])
            if allowed.n_queries == 1 and named is None and not reach.random_blocks:
                if cut := step_cut(query, key, value, allowed=allowed, half=reach.half, tokens=reach.tokens):
                    return cut
            elif allowed.n_queries > 1 and (allowed.offset is not None or allowed.n_queries == allowed.n_keys):
                return sliding_cut(
                    query, key, value, allowed=allowed, half=reach.half, tokens=reach.tokens, named=named,
                    random_blocks=reach.random_blocks, seed=reach.seed,
                )  # fmt: skip
        if isinstance(reach, Windows):
            layout = reach.layout(allowed, given)
            axes = layout.rows, layout.columns
            grid = Grid(*(tuple(getattr(axis, name) for axis in axes) for name in ("length", "size", "shift")))
            return grid_cut(query, key, value, allowed=allowed, grid=grid, others=layout.others)
    return whole(query, key, value, restricted(reach, allowed, given, query))


def weigh(piece: Piece, call: Call, backend: str, paid: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Softmax or clamped weights of a piece, applied to its values: (B, H, N, Dv). The kernels blend these with `paid`,
    the mean and the share of a mixture."""
    plan = call.plan
    query, key, value = piece.query, piece.key, piece.value
    common: dict[str, Any] = {"visible": piece.visible, "scaling": call.scaling}
    rows = _row_numbers(piece, call)
    if isinstance(plan.scores, DelayBias):
        return _delayed(piece, call)
    if isinstance(plan.reach, Blocks):
        size = plan.reach.size
        if backend == "triton":
            return kernel_relays(query, key, value, **common, size=size)
        return relay_attention(query, key, value, **common, size=size, squash=_squash(rows), dropout=call.dropout)
    if isinstance(plan.reach, Chunks):
        exchange = to_heads("exchange", call.strengths.get("exchange", plan.reach.exchange), query)
        common |= {"size": plan.reach.size, "stride": plan.reach.stride}
        return chunk_attention(query, key, value, **common, exchange=exchange, dropout=call.dropout)
    if backend == "flex":
        from hf_fullpay.fast.flex import flexible_attention  # loads the compiler, which most never need

        return flexible_attention(query, key, value, **common, **rows)
    if backend == "triton":
        mean, share = paid or (None, None)
        return kernel_attention(query, key, value, **common, bias=call.bias, **rows, mean=mean, share=share)
    function = tiled_attention if rows else host_attention
    return function(query, key, value, **common, bias=call.bias, dropout=call.dropout, **rows)


def _delayed(piece: Piece, call: Call) -> Tensor:
    """Softmax weights of delayed scores; a strength of nothing is the host's business."""
    scores: Any = call.plan.scores
    common: dict[str, Any] = {
        "visible": piece.visible, "scaling": call.scaling, "bias": call.bias, "dropout": call.dropout,
    }  # fmt: skip
    if scores.is_neutral and "beta" not in call.strengths:
        return host_attention(piece.query, piece.key, piece.value, **common)
    beta = to_heads("beta", call.strengths.get("beta", scores.beta), piece.query)
    if not isinstance(beta, Tensor):
        beta = piece.query.new_full((1, 1, 1, 1), beta, dtype=accumulate(piece.query.dtype))
    query_times, key_times, delays = clocks(scores, call.given, call.allowed, piece.query)
    common |= {"query_times": query_times, "key_times": key_times, "delays": delays}
    return delayed_attention(piece.query, piece.key, piece.value, beta=beta, **common)


def _row_numbers(piece: Piece, call: Call) -> dict[str, Any]:
    """The numbers of every row that bounded scores and clamped weights need, by the names of `tiled_attention`; empty
    for ordinary ones."""
    plan, query, strengths = call.plan, piece.query, call.strengths
    rows: dict[str, Any] = {}
    if not isinstance(plan.scores, Bounded) and not isinstance(plan.payment, Clamp):
        return rows
    counts = piece.visible.counts().to(accumulate(query.dtype))
    if isinstance(plan.scores, Bounded):
        options = plan.scores
        bound = to_heads("bound", strengths.get("bound", options.limit), query)
        rows["width"], amplitude = width_and_amplitude(bound, options.temperature, options.slope, counts)
        rows |= {"rescale": True} if options.slope == "rescale" else {"amplitude": amplitude}
        if options.centre == "median":
            rows["median"] = True
        elif options.centre == "mean":
            rows["centre"] = _mean_score(piece, call, counts)
    if isinstance(plan.payment, Clamp):
        budget = to_heads("budget", strengths.get("budget", plan.payment.budget), query)
        rows["floor"] = floor_of(plan.payment.floor, budget, counts)
    return rows


def _squash(rows: dict[str, Any]) -> Squash | None:
    """Bounded scores of blocks. A relay has the mean score of its keys, so the mean over tokens and relays, each as often
    as it has keys, is that over all keys."""
    if not rows:
        return None
    width = rows["width"]
    return Squash(
        rows.get("centre", torch.zeros_like(width)), width, rows.get("amplitude", width), rows.get("rescale", False)
    )


def _mean_score(piece: Piece, call: Call, counts: Tensor) -> Tensor:
    """Mean score of every row, scaling * q_i . (mean of its visible keys): linear in N. (B, H, N, 1)."""
    kind = accumulate(piece.query.dtype)
    mean = visible_mean(piece.key.to(kind), piece.visible)
    rows = piece.query.to(kind).unflatten(1, (mean.shape[1], -1))
    centre = (rows * mean[:, :, None]).sum(-1, keepdim=True).flatten(1, 2) * call.scaling
    if call.bias is not None:
        seen = piece.visible.to_dense()
        centre = centre + (call.bias * seen).sum(-1, keepdim=True) / counts.clamp_min(1)
    return centre


def has_fast_path(query: Tensor, allowed: Visible, bias: Tensor | None) -> bool:
    """Whether blocks and chunks have a fast path for a set; says so where they have none and that costs something."""
    query_slots(allowed)  # raises where queries have no place
    if allowed.dense is None and bias is None and (allowed.offset or 0) >= 0:
        return True
    if query.shape[2] > 1:
        warn(
            "blocks and chunks: a bias or a mask of pairs (four dimensions, packing, a prompt into a static cache) has no "
            "fast path: this call holds all N x M scores. Key padding and causality alone are fast."
        )
    return False
