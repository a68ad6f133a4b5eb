"""Clamp: softmax lifted to a floor, in passes over the scores of a row.

    w_i  = softmax_j z_ij                       lse_i of forward.py
    p_ij = max(a_i * w_ij, floor_i)             over the n_i keys that query i sees, a_i such that the row sums to one
    out_i = sum_j p_ij v_j

The factor falls from a_i = 1, the set of clamped keys grows, and once it stays it is the right one (Newton's method on
a convex function of a_i; few rounds). It is kept in lse_i - log2 a_i, so that a_i * w_ij = exp2(z_ij - that).

Backward: with the kept keys K = {a w > floor} and rest_i = 1 - floor_i * (n_i - |K|), what the kept keys share,

    D_i = sum_K p_ij dp_ij / rest_i         dfloor_i = sum_{not K} dp_ij - (n_i - |K|) * D_i

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D and Dv widths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Call, on, run_forward, sized, strides
from .tiles import LOG2E, hide, key_range, load_pairs, load_tile, multiply, run_of, squash, store_tile

EPSILON = tl.constexpr(2.0**-21)  # a floor of 1 / n, up to rounding, clamps all


@triton.jit(do_not_specialize=["n_queries", "n_keys", "offset", "window"])
def clamp_kernel(
    query, key, value, d_out, out, lse, delta, d_floor,
    keys, mask, bias, lows, highs, centre, rate, amplitude, share, floor,
    q_strides, k_strides, v_strides, o_strides, keys_strides, mask_strides, bias_strides,
    scaling, heads, group, n_queries, n_keys, offset, window,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, TANH: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """STEP "solve" lowers lse in place, "pay" writes the output, "delta" what the backward pass needs of d_out."""
    tiles = tl.cdiv(n_queries, ROWS)
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
    place = pair.to(tl.int64) * n_queries + rows
    there = rows < n_queries
    q = load_tile(query, q_strides[2], q_strides[3], top, n_queries, ROWS, D, PAD, True, None)
    norm = tl.load(lse + place, mask=there, other=float("inf"))
    least = tl.load(floor + place, mask=there, other=0.0)
    middle = None
    slope = None
    height = None
    if TANH:
        slope = tl.load(rate + place, mask=there, other=0.0)[:, None]
        height = tl.load(amplitude + place, mask=there, other=0.0)[:, None]
        if centre is not None:
            middle = tl.load(centre + place, mask=there, other=0.0)[:, None]
    if STEP == "delta":
        do = load_tile(
            d_out + b * o_strides[0] + h * o_strides[1], o_strides[2], o_strides[3], top, n_queries, ROWS, DV, PAD_V,
            True, None,
        )  # fmt: skip
    PLAIN: tl.constexpr = not TANH and bias is None
    unit = 1.0
    if PLAIN:
        unit = scaling * LOG2E

    gathered = tl.zeros((ROWS, PAD_V), tl.float32)
    kept_part = tl.zeros((ROWS,), tl.float32)
    low_part = tl.zeros((ROWS,), tl.float32)
    low_count = tl.zeros((ROWS,), tl.float32)
    start, inner, outer, stop = key_range(top, n_queries, n_keys, offset, window, lows, highs, CAUSAL, BAND, ROWS, COLS)
    scale = tl.full((ROWS,), 1.0, tl.float32)
    before = tl.full((ROWS,), -1.0, tl.float32)
    unsolved = 1
    while unsolved > 0:  # once, but for "solve"
        total = tl.zeros((ROWS,), tl.float32)
        kept = tl.zeros((ROWS,), tl.float32)
        seen = tl.zeros((ROWS,), tl.float32)
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
                    visible = z > float("-inf")
                    w = tl.exp2(z * unit - norm[:, None])
                    if STEP == "solve":
                        above = w * scale[:, None] > least[:, None]
                        total += tl.sum(tl.where(above, w, 0.0), 1)
                        kept += tl.sum(tl.where(above, 1.0, 0.0), 1)
                        seen += tl.sum(tl.where(visible, 1.0, 0.0), 1)
                    else:
                        v = load_tile(
                            value, v_strides[2], v_strides[3], left, n_keys, COLS, DV, PAD_V, part != 1, alive
                        )
                        if STEP == "pay":
                            paid = tl.where(visible, tl.maximum(w, least[:, None]), 0.0)
                            gathered = multiply(paid.to(v.dtype), v, gathered, PRECISION, WIDEN)
                        else:
                            dp = multiply(do, tl.trans(v), None, PRECISION, WIDEN)
                            above = w > least[:, None]
                            below = visible & (w <= least[:, None])
                            kept_part += tl.sum(tl.where(above, w * dp, 0.0), 1)
                            low_part += tl.sum(tl.where(below, dp, 0.0), 1)
                            low_count += tl.sum(tl.where(below, 1.0, 0.0), 1)
        unsolved = 0
        if STEP == "solve":
            level = (least * seen >= 1.0 - EPSILON) & (before < 0.0)
            rest = tl.maximum(1.0 - least * (seen - kept), 0.0)
            lower = tl.minimum(scale, rest / tl.where(total > 0.0, total, 1.0))
            lower = tl.where((total > 0.0) & (level == 0), lower, 0.0)
            changed = kept != before
            scale = tl.where(changed, lower, scale)
            before = tl.where(level, 0.0, kept)
            unsolved = tl.max(changed.to(tl.int32), 0)

    if STEP == "solve":
        lifted = norm - tl.log2(tl.where(scale > 0.0, scale, 1.0))
        tl.store(lse + place, tl.where(scale > 0.0, lifted, float("inf")), mask=there)
    elif STEP == "pay":
        out += b * o_strides[0] + h * o_strides[1]
        store_tile(out, o_strides[2], o_strides[3], top, n_queries, gathered, ROWS, DV, PAD_V)
    else:
        rest = 1.0 - least * low_count
        shared = tl.where(rest > 0.0, kept_part / tl.where(rest > 0.0, rest, 1.0), 0.0)
        tl.store(delta + place, shared, mask=there)
        tl.store(d_floor + place, low_part - low_count * shared, mask=there)


def _launch(call: Call, step: str, lse: Tensor, strides_of: Tensor, **tensors: Tensor | None) -> None:
    tile = call.tile("forward" if step != "delta" else "queries")
    batch, heads, queries = call.rows_shape
    others = dict.fromkeys(("d_out", "out", "delta", "d_floor")) | tensors
    with on(lse.device):
        clamp_kernel[(triton.cdiv(queries, tile.rows) * batch * heads,)](
            call.query, call.key, call.value, lse=lse, floor=call.floor, o_strides=strides(strides_of), STEP=step,
            **others, **call.common(), **sized(tile),
        )  # fmt: skip


def run_clamp(call: Call) -> tuple[Tensor, Tensor]:
    """Output, and lse_i - log2 a_i."""
    out, lse = run_forward(call, lse_only=True)
    if out.numel():
        _launch(call, "solve", lse, out)
        _launch(call, "pay", lse, out, out=out)
    return out, lse


def run_clamp_delta(call: Call, d_out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """D and the gradient of the floor, (B, H, N)."""
    delta, d_floor = torch.empty_like(lse), torch.empty_like(lse)
    _launch(call, "delta", lse, d_out, d_out=d_out, delta=delta, d_floor=d_floor)
    return delta, d_floor
