"""Attention in one pass over the keys, with the mixture floor in the epilogue.

    w_i = softmax_j z_ij over the keys that query i sees        z of tiles.py
    out_i = (1 - share_i) * sum_j w_ij v_j + share_i * mean_i
    lse_i = log2 sum_j exp(z_ij), +inf where query i sees nothing: then w_ij = exp2(z_ij - lse_i) is 0 in backward too

Dimensions: B batch, H query heads, G key/value heads (head h reads h // (H // G)), N queries, M keys, D and Dv widths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LOG2E, hide, key_range, load_pairs, load_tile, multiply, run_of, squash, store_tile


@triton.jit(do_not_specialize=["n_queries", "n_keys", "offset", "window"])
def forward_kernel(
    query, key, value, out, lse,
    keys, mask, bias, lows, highs, centre, rate, amplitude, share, mean,
    q_strides, k_strides, v_strides, o_strides, keys_strides, mask_strides, bias_strides, mean_strides,
    scaling, heads, group, mean_group, n_queries, n_keys, offset, window,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, TANH: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n_queries, ROWS)
    # The longest rows of a causal mask go first.
    top = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    pair = tl.program_id(0) // tiles
    b = (pair // heads).to(tl.int64)
    h = (pair % heads).to(tl.int64)
    query += b * q_strides[0] + h * q_strides[1]
    key += b * k_strides[0] + h // group * k_strides[1]
    value += b * v_strides[0] + h // group * v_strides[1]
    if keys is not None:
        keys += b * keys_strides[0]
    if mask is not None:
        mask += b * mask_strides[0] + h * mask_strides[1]
    if bias is not None:
        bias += b * bias_strides[0] + h * bias_strides[1]

    rows = top + tl.arange(0, ROWS)
    place = pair.to(tl.int64) * n_queries + rows  # in row numbers, which are contiguous (B, H, N)
    there = rows < n_queries
    q = load_tile(query, q_strides[2], q_strides[3], top, n_queries, ROWS, D, PAD, True, None)
    middle = None
    slope = None
    height = None
    if TANH:
        slope = tl.load(rate + place, mask=there, other=0.0)[:, None]
        height = tl.load(amplitude + place, mask=there, other=0.0)[:, None]
        if centre is not None:
            middle = tl.load(centre + place, mask=there, other=0.0)[:, None]
    # Without tanh or bias the factor of the scores is left to the exponential, where it is free.
    PLAIN: tl.constexpr = not TANH and bias is None
    unit = 1.0
    if PLAIN:
        unit = scaling * LOG2E

    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, PAD_V), tl.float32)
    start, inner, outer, stop = key_range(top, n_queries, n_keys, offset, window, lows, highs, CAUSAL, BAND, ROWS, COLS)
    for part in tl.static_range(3):
        if part < 2 or BAND or lows is not None:
            begin, blocks = run_of(part, start, inner, outer, stop, COLS, False)
            for block in tl.range(0, blocks):
                left = begin + block * COLS
                cols = left + tl.arange(0, COLS)
                alive = None
                if keys is not None:  # whatever is in padding, even infinity, must not enter a product
                    alive = tl.load(keys + cols * keys_strides[1], mask=cols < n_keys, other=0) != 0
                k = load_tile(key, k_strides[2], k_strides[3], left, n_keys, COLS, D, PAD, part != 1, alive)
                z = multiply(q, tl.trans(k), None, PRECISION, WIDEN)
                if not PLAIN:
                    added = None
                    if bias is not None:
                        added = load_pairs(bias, bias_strides, rows[:, None], cols[None, :], n_queries, n_keys)
                    z, _, _ = squash(z, scaling, added, middle, slope, height, TANH, FAST)
                z = hide(
                    z, rows[:, None], cols[None, :], n_queries, n_keys, offset, window, lows, highs, mask,
                    mask_strides, CAUSAL, BAND, part != 1,
                )  # fmt: skip
                if keys is not None:
                    z = tl.where(alive[None, :], z, float("-inf"))
                higher = tl.maximum(peak, tl.max(z, 1) * unit)
                level = tl.where(higher == float("-inf"), 0.0, higher)
                w = tl.exp2(z * unit - level[:, None])
                fade = tl.exp2(peak - level)
                total = total * fade + tl.sum(w, 1)
                if out is not None:
                    gathered = gathered * fade[:, None]
                    v = load_tile(value, v_strides[2], v_strides[3], left, n_keys, COLS, DV, PAD_V, part != 1, alive)
                    gathered = multiply(w.to(v.dtype), v, gathered, PRECISION, WIDEN)
                peak = higher

    blind = total == 0.0
    if out is not None:
        gathered = gathered / tl.where(blind, 1.0, total)[:, None]
        if share is not None:
            mean += b * mean_strides[0] + h // mean_group * mean_strides[1]
            vbar = load_tile(mean, mean_strides[2], mean_strides[3], top, n_queries, ROWS, DV, PAD_V, True, None)
            t = tl.load(share + place, mask=there, other=0.0)[:, None]
            gathered = (1.0 - t) * gathered + t * vbar.to(tl.float32)
        out += b * o_strides[0] + h * o_strides[1]
        store_tile(out, o_strides[2], o_strides[3], top, n_queries, gathered, ROWS, DV, PAD_V)
    tl.store(lse + place, tl.where(blind, float("inf"), peak + tl.log2(tl.where(blind, 1.0, total))), mask=there)
