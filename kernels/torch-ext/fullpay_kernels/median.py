"""Exact lower median of every row's scores, in passes that recompute them: memory stays linear.

    s_ij = scaling * q_i . k_j + bias_ij over the n_i keys that query i sees
    median_i = the entry of rank (n_i - 1) // 2 in ascending order,  chosen_i = its first place

Read as an integer whose order is that of the floats, the median is found two bits at a time: the largest prefix below
which at most `rank` scores lie. Sixteen passes, one before to count n_i and one after to find the place.
Gradient: that of s at the chosen place, gathered for queries and, by a product with one-hot rows, for keys.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import Call, on, sized, strides
from .tiles import hide, key_range, load_pairs, load_tile, multiply, query_range, run_of, store_tile

INFINITY = tl.constexpr(0x7F800000)  # bits of +inf, above those of any finite score
LOWEST = tl.constexpr(-(2**31))
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["n_queries", "n_keys", "offset", "window"])
def select_kernel(
    query, key, median, chosen, keys, mask, bias, lows, highs,
    q_strides, k_strides, keys_strides, mask_strides, bias_strides,
    scaling, heads, group, n_queries, n_keys, offset, window,
    D: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
    BAND: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n_queries, ROWS)
    top = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    pair = tl.program_id(0) // tiles
    b = (pair // heads).to(tl.int64)
    h = (pair % heads).to(tl.int64)
    query += b * q_strides[0] + h * q_strides[1]
    key += b * k_strides[0] + h // group * k_strides[1]
    if keys is not None:
        keys += b * keys_strides[0]
    if mask is not None:
        mask += b * mask_strides[0] + h * mask_strides[1]
    if bias is not None:
        bias += b * bias_strides[0] + h * bias_strides[1]
    rows = top + tl.arange(0, ROWS)
    q = load_tile(query, q_strides[2], q_strides[3], top, n_queries, ROWS, D, PAD, True, None)
    start, inner, outer, stop = key_range(top, n_queries, n_keys, offset, window, lows, highs, CAUSAL, BAND, ROWS, COLS)
    prefix = tl.full((ROWS,), LOWEST, tl.int32)
    rank = tl.zeros((ROWS,), tl.int32)
    seen = tl.zeros((ROWS,), tl.int32)
    best = tl.zeros((ROWS,), tl.int32)
    for step in tl.range(0, 18):
        size = tl.where(step == 0, 0, 1 << tl.minimum(tl.maximum(32 - 2 * step, 0), 30))
        first = tl.where(step == 0, INFINITY, prefix + size)  # below infinity lies all that is visible
        second = first + size
        third = second + size
        below_first = tl.zeros((ROWS,), tl.int32)
        below_second = tl.zeros((ROWS,), tl.int32)
        below_third = tl.zeros((ROWS,), tl.int32)
        best = tl.full((ROWS,), NOWHERE, tl.int32)
        for part in tl.static_range(3):
            if part < 2 or BAND or lows is not None:
                begin, blocks = run_of(part, start, inner, outer, stop, COLS, False)
                for block in tl.range(0, blocks):
                    left = begin + block * COLS
                    cols = left + tl.arange(0, COLS)
                    alive = None
                    if keys is not None:
                        alive = tl.load(keys + cols * keys_strides[1], mask=cols < n_keys, other=0) != 0
                    k = load_tile(key, k_strides[2], k_strides[3], left, n_keys, COLS, D, PAD, part != 1, alive)
                    s = multiply(q, tl.trans(k), None, PRECISION, WIDEN) * scaling
                    if bias is not None:
                        added = load_pairs(bias, bias_strides, rows[:, None], cols[None, :], n_queries, n_keys)
                        s += added.to(tl.float32)
                    s = hide(
                        s, rows[:, None], cols[None, :], n_queries, n_keys, offset, window, lows, highs, mask,
                        mask_strides, CAUSAL, BAND, part != 1,
                    )  # fmt: skip
                    if keys is not None:
                        s = tl.where(alive[None, :], s, float("-inf"))
                    s = tl.where(s == float("-inf"), float("inf"), s)
                    bits = s.to(tl.int32, bitcast=True)
                    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
                    below_first += tl.sum((bits < first[:, None]).to(tl.int32), 1)
                    below_second += tl.sum((bits < second[:, None]).to(tl.int32), 1)
                    below_third += tl.sum((bits < third[:, None]).to(tl.int32), 1)
                    best = tl.minimum(best, tl.min(tl.where(bits == prefix[:, None], cols[None, :], NOWHERE), 1))
        if step == 0:
            seen = below_first
            rank = (tl.maximum(seen, 1) - 1) // 2
        elif step < 17:
            count = (below_first <= rank).to(tl.int32) + (below_second <= rank) + (below_third <= rank)
            prefix += size * count

    value = tl.where(prefix < 0, prefix ^ 0x7FFFFFFF, prefix).to(tl.float32, bitcast=True)
    place = pair.to(tl.int64) * n_queries + rows
    tl.store(median + place, tl.where(seen > 0, value, 0.0), mask=rows < n_queries)
    tl.store(chosen + place, tl.where(seen > 0, best, -1), mask=rows < n_queries)


@triton.jit(do_not_specialize=["n_queries"])
def gather_kernel(
    key, chosen, pull, d_query, k_strides, dq_strides, heads, group, n_queries,
    D: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq_i = pull_i * k_chosen_i, pull_i being scaling * dmedian_i."""
    tiles = tl.cdiv(n_queries, ROWS)
    top = tl.program_id(0) % tiles * ROWS
    pair = tl.program_id(0) // tiles
    b = (pair // heads).to(tl.int64)
    h = (pair % heads).to(tl.int64)
    rows = top + tl.arange(0, ROWS)
    cols = tl.arange(0, PAD)
    place = pair.to(tl.int64) * n_queries + rows
    at = tl.load(chosen + place, mask=rows < n_queries, other=-1)
    factor = tl.load(pull + place, mask=rows < n_queries, other=0.0)
    key += b * k_strides[0] + h // group * k_strides[1]
    pointers = key + at.to(tl.int64)[:, None] * k_strides[2] + cols.to(tl.int64)[None, :] * k_strides[3]
    k = tl.load(pointers, mask=(at >= 0)[:, None] & (cols < D)[None, :], other=0.0).to(tl.float32)
    d_query += b * dq_strides[0] + h * dq_strides[1]
    store_tile(d_query, dq_strides[2], dq_strides[3], top, n_queries, k * factor[:, None], ROWS, D, PAD)


@triton.jit(do_not_specialize=["n_queries", "n_keys", "offset", "window"])
def scatter_kernel(
    query, chosen, pull, d_key, key_lows, key_highs, q_strides, dk_strides,
    heads, group, n_queries, n_keys, offset, window,
    D: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
    BAND: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dk_j = sum of pull_i * q_i over the queries, of all heads that read the key, that chose it."""
    tiles = tl.cdiv(n_keys, COLS)
    left = tl.program_id(0) % tiles * COLS
    pair = tl.program_id(0) // tiles
    groups = heads // group
    b = (pair // groups).to(tl.int64)
    g = pair % groups
    cols = left + tl.arange(0, COLS)
    to_key = tl.zeros((COLS, PAD), tl.float32)
    start, _, _, stop = query_range(
        left, n_queries, n_keys, offset, window, key_lows, key_highs, CAUSAL, BAND, COLS, ROWS
    )
    for h in tl.range(g * group, g * group + group):
        head = tl.cast(h, tl.int64)
        first = (b * heads + head) * n_queries
        q_head = query + b * q_strides[0] + head * q_strides[1]
        for top in tl.range(start, stop, ROWS):
            rows = top + tl.arange(0, ROWS)
            there = rows < n_queries
            q = load_tile(q_head, q_strides[2], q_strides[3], top, n_queries, ROWS, D, PAD, True, None)
            at = tl.load(chosen + first + rows, mask=there, other=-1)
            factor = tl.load(pull + first + rows, mask=there, other=0.0)
            picked = tl.where(cols[:, None] == at[None, :], factor[None, :], 0.0)
            to_key = multiply(picked.to(q.dtype), q, to_key, PRECISION, WIDEN)
    d_key += b * dk_strides[0] + g.to(tl.int64) * dk_strides[1]
    store_tile(d_key, dk_strides[2], dk_strides[3], left, n_keys, to_key, COLS, D, PAD)


def run_median(call: Call) -> tuple[Tensor, Tensor]:
    """Median fp32 and chosen place int32, (B, H, N); 0 and -1 in rows without keys."""
    batch, heads, queries = call.rows_shape
    median = torch.empty(call.rows_shape, dtype=torch.float32, device=call.query.device)
    chosen = torch.empty(call.rows_shape, dtype=torch.int32, device=call.query.device)
    if median.numel():
        tile, common = call.tile("forward"), call.common()
        with on(median.device):
            select_kernel[(triton.cdiv(queries, tile.rows) * batch * heads,)](
                call.query, call.key, median, chosen, **_pick(select_kernel, common), **sized(tile)
            )
    return median, chosen


def run_median_backward(call: Call, chosen: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of query and key."""
    batch, heads, queries = call.rows_shape
    d_query, d_key = torch.empty_like(call.query), torch.empty_like(call.key)
    tile, common = call.tile("keys"), call.common()
    if d_query.numel() == 0 or d_key.numel() == 0:
        return d_query.zero_(), d_key.zero_()
    segments = call.segments
    with on(pull.device):
        gather_kernel[(triton.cdiv(queries, 32) * batch * heads,)](
            call.key, chosen, pull, d_query, dq_strides=strides(d_query), ROWS=32, **_pick(gather_kernel, common)
        )
        scatter_kernel[(triton.cdiv(call.key.shape[2], tile.cols) * batch * call.key.shape[1],)](
            call.query, chosen, pull, d_key, dk_strides=strides(d_key),
            key_lows=None if segments is None else segments.key_lows,
            key_highs=None if segments is None else segments.key_highs,
            **_pick(scatter_kernel, common), **sized(tile),
        )  # fmt: skip
    return d_query, d_key


def _pick(kernel: Any, common: dict[str, Any]) -> dict[str, Any]:
    """Those of the common arguments that a kernel takes."""
    return {name: value for name, value in common.items() if name in kernel.arg_names}


class Median(torch.autograd.Function):
    """Lower medians, (B, H, N, 1) fp32, of the scores of a call that `build(query, key, bias)` makes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, bias: Tensor | None, build: Any) -> Tensor:
        median, chosen = run_median(build(query, key, bias))
        ctx.save_for_backward(query, key, bias, chosen)
        ctx.build = build
        return median.unsqueeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, bias, chosen = ctx.saved_tensors
        call, d_bias = ctx.build(query, key, bias), None
        grad = grad[..., 0].float()
        d_query, d_key = run_median_backward(call, chosen, (grad * call.scaling).contiguous())
        if ctx.needs_input_grad[2]:
            d_bias = torch.zeros(*chosen.shape, key.shape[2], device=grad.device)
            d_bias.scatter_(-1, chosen.clamp(min=0).long().unsqueeze(-1), (grad * (chosen >= 0)).unsqueeze(-1))
            d_bias = d_bias.sum_to_size(bias.shape).to(bias.dtype)
        return d_query, d_key, d_bias, None
