"""Gradients of forward.py, without atomics: three kernels, of which the first two read or sum rows and the last columns.

    D_i   = do_i . (out_i - share_i * mean_i)                   delta_kernel, with dmean_i = share_i * do_i
    dp_ij = do_i . v_j
    dz_ij = w_ij * ((1 - share_i) * dp_ij - D_i)
    ds_ij = dz_ij, or dz_ij * (1 - tanh^2) * amplitude_i / width_i
    dq_i  = scaling * sum_j ds_ij k_j,   dbias_ij = ds_ij       queries_kernel, with the gradients of row numbers:
                                                                dshare_i = do_i . mean_i - sum_j w_ij dp_ij
                                                                dcentre_i = -sum_j ds_ij
                                                                damplitude_i = sum_j dz_ij * tanh
                                                                drate_i = amplitude_i sum_j dz_ij (1 - tanh^2) y / rate
    dv_j  = sum_i (1 - share_i) * w_ij do_i,   dk_j = scaling * sum_i ds_ij q_i                     keys_kernel

With a clamp, p_ij = max(w_ij, floor_i) where w_ij = exp2(z_ij - lse_i) already has the factor a_i in its lse:

    dz_ij = w_ij * (dp_ij - D_i) where w_ij > floor_i, else 0;   dv_j = sum_i p_ij do_i;   D_i of clamp.py

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D and Dv widths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LOG2E, hide, key_range, load_pairs, load_tile, multiply, query_range, run_of, squash, store_tile


@triton.jit(do_not_specialize=["n_queries"])
def delta_kernel(
    d_out, out, share, mean, delta, d_mean,
    do_strides, o_strides, mean_strides, dm_strides, heads, mean_group, n_queries,
    DV: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """D, and the gradient of the mean: of every query, or with ONE row of the mean a sum for every tile of queries."""
    tiles = tl.cdiv(n_queries, ROWS)
    tile = tl.program_id(0) % tiles
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    m = pair % (heads // mean_group)
    b = pair // (heads // mean_group)
    top = tile * ROWS
    rows = top + tl.arange(0, ROWS)
    there = rows < n_queries
    to_mean = tl.zeros((ROWS, PAD_V), tl.float32)
    if share is not None:
        mean += b * mean_strides[0] + m * mean_strides[1]
        vbar = load_tile(
            mean, mean_strides[2], mean_strides[3], top, n_queries, ROWS, DV, PAD_V, True, None
        ).to(tl.float32)  # fmt: skip
    for member in tl.range(0, mean_group):
        h = m * mean_group + member
        place = (b * heads + h) * n_queries + rows
        do = load_tile(
            d_out + b * do_strides[0] + h * do_strides[1], do_strides[2], do_strides[3], top, n_queries, ROWS, DV,
            PAD_V, True, None,
        ).to(tl.float32)  # fmt: skip
        o = load_tile(
            out + b * o_strides[0] + h * o_strides[1], o_strides[2], o_strides[3], top, n_queries, ROWS, DV, PAD_V,
            True, None,
        ).to(tl.float32)  # fmt: skip
        if share is not None:
            t = tl.load(share + place, mask=there, other=0.0)[:, None]
            o -= t * vbar
            to_mean += t * do
        tl.store(delta + place, tl.sum(do * o, 1), mask=there)
    if d_mean is not None:
        d_mean += b * dm_strides[0] + m * dm_strides[1]
        if ONE:
            cols = tl.arange(0, PAD_V)
            at = d_mean + tile.to(tl.int64) * dm_strides[2] + cols.to(tl.int64) * dm_strides[3]
            tl.store(at, tl.sum(to_mean, 0), mask=cols < DV)
        else:
            store_tile(d_mean, dm_strides[2], dm_strides[3], top, n_queries, to_mean, ROWS, DV, PAD_V)


@triton.jit(do_not_specialize=["n_queries", "n_keys", "offset", "window"])
def queries_kernel(
    query, key, value, d_out, lse, delta, d_query, d_bias,
    keys, mask, bias, lows, highs, centre, rate, amplitude, share, mean, floor,
    d_centre, d_rate, d_amplitude, d_share,
    q_strides, k_strides, v_strides, do_strides, dq_strides, keys_strides, mask_strides, bias_strides, mean_strides,
    db_strides, scaling, heads, group, mean_group, n_queries, n_keys, offset, window,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, TANH: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n_queries, ROWS)
    top = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    pair = tl.program_id(0) // tiles
    b = (pair // heads).to(tl.int64)
    h = (pair % heads).to(tl.int64)
    query += b * q_strides[0] + h * q_strides[1]
    d_out += b * do_strides[0] + h * do_strides[1]
    key += b * k_strides[0] + h // group * k_strides[1]
    value += b * v_strides[0] + h // group * v_strides[1]
    if keys is not None:
        keys += b * keys_strides[0]
    if mask is not None:
        mask += b * mask_strides[0] + h * mask_strides[1]
    if bias is not None:
        bias += b * bias_strides[0] + h * bias_strides[1]
    if d_bias is not None:
        d_bias += b * db_strides[0] + h * db_strides[1]

    rows = top + tl.arange(0, ROWS)
    place = pair.to(tl.int64) * n_queries + rows
    there = rows < n_queries
    q = load_tile(query, q_strides[2], q_strides[3], top, n_queries, ROWS, D, PAD, True, None)
    do = load_tile(d_out, do_strides[2], do_strides[3], top, n_queries, ROWS, DV, PAD_V, True, None)
    norm = tl.load(lse + place, mask=there, other=float("inf"))[:, None]
    less = tl.load(delta + place, mask=there, other=0.0)[:, None]
    middle = None
    slope = None
    height = None
    if TANH:
        slope = tl.load(rate + place, mask=there, other=0.0)[:, None]
        height = tl.load(amplitude + place, mask=there, other=0.0)[:, None]
        if centre is not None:
            middle = tl.load(centre + place, mask=there, other=0.0)[:, None]
    if share is not None:
        rest = 1.0 - tl.load(share + place, mask=there, other=0.0)[:, None]
    if floor is not None:
        least = tl.load(floor + place, mask=there, other=0.0)[:, None]
    PLAIN: tl.constexpr = not TANH and bias is None
    unit = 1.0
    if PLAIN:
        unit = scaling * LOG2E

    to_query = tl.zeros((ROWS, PAD), tl.float32)
    attended = tl.zeros((ROWS,), tl.float32)
    to_amplitude = tl.zeros((ROWS,), tl.float32)
    to_rate = tl.zeros((ROWS,), tl.float32)
    to_centre = tl.zeros((ROWS,), tl.float32)
    start, inner, outer, stop = key_range(top, n_queries, n_keys, offset, window, lows, highs, CAUSAL, BAND, ROWS, COLS)
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
                v = load_tile(value, v_strides[2], v_strides[3], left, n_keys, COLS, DV, PAD_V, part != 1, alive)
                z = multiply(q, tl.trans(k), None, PRECISION, WIDEN)
                dp = multiply(do, tl.trans(v), None, PRECISION, WIDEN)
                squashed = z
                y = z
                if not PLAIN:
                    added = None
                    if bias is not None:
                        added = load_pairs(bias, bias_strides, rows[:, None], cols[None, :], n_queries, n_keys)
                    z, squashed, y = squash(z, scaling, added, middle, slope, height, TANH, FAST)
                z = hide(
                    z, rows[:, None], cols[None, :], n_queries, n_keys, offset, window, lows, highs, mask,
                    mask_strides, CAUSAL, BAND, part != 1,
                )  # fmt: skip
                if keys is not None:
                    z = tl.where(alive[None, :], z, float("-inf"))
                w = tl.exp2(z * unit - norm)
                if floor is not None:
                    w = tl.where(w > least, w, 0.0)
                if share is not None:
                    if d_share is not None:
                        attended += tl.sum(w * dp, 1)
                    dp = dp * rest
                ds = w * (dp - less)
                if TANH:
                    if d_amplitude is not None:
                        to_amplitude += tl.sum(ds * squashed, 1)
                    ds = ds * (1.0 - squashed * squashed)
                    if d_rate is not None:
                        to_rate += tl.sum(ds * y, 1)
                    ds = ds * (slope * height)
                    if d_centre is not None:
                        to_centre += tl.sum(ds, 1)
                if d_bias is not None:
                    at = (
                        d_bias + rows.to(tl.int64)[:, None] * db_strides[2] + cols.to(tl.int64)[None, :] * db_strides[3]
                    )
                    tl.store(at, ds, mask=there[:, None] & (cols < n_keys)[None, :])
                to_query = multiply(ds.to(k.dtype), k, to_query, PRECISION, WIDEN)

    if d_query is not None:
        d_query += b * dq_strides[0] + h * dq_strides[1]
        store_tile(d_query, dq_strides[2], dq_strides[3], top, n_queries, to_query * scaling, ROWS, D, PAD)
    if d_share is not None:
        mean += b * mean_strides[0] + h // mean_group * mean_strides[1]
        vbar = load_tile(mean, mean_strides[2], mean_strides[3], top, n_queries, ROWS, DV, PAD_V, True, None)
        tl.store(d_share + place, tl.sum(do.to(tl.float32) * vbar.to(tl.float32), 1) - attended, mask=there)
    if d_amplitude is not None:
        tl.store(d_amplitude + place, to_amplitude, mask=there)
    if d_rate is not None:
        tl.store(d_rate + place, to_rate, mask=there)
    if d_centre is not None:
        tl.store(d_centre + place, -to_centre, mask=there)


@triton.jit(do_not_specialize=["n_queries", "n_keys", "offset", "window"])
def keys_kernel(
    query, key, value, d_out, lse, delta, d_key, d_value,
    keys, mask, bias, lows, highs, key_lows, key_highs, centre, rate, amplitude, share, floor,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, keys_strides, mask_strides, bias_strides,
    scaling, heads, group, n_queries, n_keys, offset, window,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, TANH: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """One program for COLS keys of a key head: it visits all query heads that read them, so nothing is added twice."""
    tiles = tl.cdiv(n_keys, COLS)
    left = tl.program_id(0) % tiles * COLS
    pair = tl.program_id(0) // tiles
    groups = heads // group
    b = (pair // groups).to(tl.int64)
    g = (pair % groups).to(tl.int64)
    key += b * k_strides[0] + g * k_strides[1]
    value += b * v_strides[0] + g * v_strides[1]
    cols = left + tl.arange(0, COLS)
    alive = cols < n_keys
    if keys is not None:
        alive = alive & (tl.load(keys + b * keys_strides[0] + cols * keys_strides[1], mask=alive, other=0) != 0)
    k = load_tile(key, k_strides[2], k_strides[3], left, n_keys, COLS, D, PAD, True, alive)
    if d_key is not None:
        v = load_tile(value, v_strides[2], v_strides[3], left, n_keys, COLS, DV, PAD_V, True, alive)
    PLAIN: tl.constexpr = not TANH and bias is None
    unit = 1.0
    if PLAIN:
        unit = scaling * LOG2E

    to_key = tl.zeros((COLS, PAD), tl.float32)
    to_value = tl.zeros((COLS, PAD_V), tl.float32)
    start, inner, outer, stop = query_range(
        left, n_queries, n_keys, offset, window, key_lows, key_highs, CAUSAL, BAND, COLS, ROWS
    )
    query += b * q_strides[0]
    d_out += b * do_strides[0]
    if mask is not None:
        mask += b * mask_strides[0]
    if bias is not None:
        bias += b * bias_strides[0]
    for part in tl.static_range(3):
        if part < 2 or BAND or key_lows is not None:
            begin, blocks = run_of(part, start, inner, outer, stop, ROWS, True)
            steps = blocks * group
            if part == 0:
                steps = tl.maximum(steps, 1)
            for step in tl.range(0, steps):  # one flat loop: nested ones take more registers
                head = g
                top = begin + step * ROWS
                if GROUPED:
                    head = g * group + step // tl.maximum(blocks, 1)
                    top = begin + step % tl.maximum(blocks, 1) * ROWS
                first = (b * heads + head) * n_queries  # of row numbers; 64 bits for scalars alone save registers
                q_head = query + head * q_strides[1]
                do_head = d_out + head * do_strides[1]
                mask_head = None
                if mask is not None:
                    mask_head = mask + head * mask_strides[1]
                bias_head = None
                if bias is not None:
                    bias_head = bias + head * bias_strides[1]
                rows = top + tl.arange(0, ROWS)
                there = rows < n_queries
                q = load_tile(q_head, q_strides[2], q_strides[3], top, n_queries, ROWS, D, PAD, True, None)
                do = load_tile(do_head, do_strides[2], do_strides[3], top, n_queries, ROWS, DV, PAD_V, True, None)
                norm = tl.load(lse + first + rows, mask=there, other=float("inf"))[None, :]
                less = tl.load(delta + first + rows, mask=there, other=0.0)[None, :]
                z = multiply(k, tl.trans(q), None, PRECISION, WIDEN)
                squashed = z
                middle = None
                slope = None
                height = None
                if not PLAIN:
                    added = None
                    if bias is not None:
                        added = load_pairs(bias_head, bias_strides, rows[None, :], cols[:, None], n_queries, n_keys)
                    if TANH:
                        slope = tl.load(rate + first + rows, mask=there, other=0.0)[None, :]
                        height = tl.load(amplitude + first + rows, mask=there, other=0.0)[None, :]
                        if centre is not None:
                            middle = tl.load(centre + first + rows, mask=there, other=0.0)[None, :]
                    z, squashed, _ = squash(z, scaling, added, middle, slope, height, TANH, FAST)
                z = hide(
                    z, rows[None, :], cols[:, None], n_queries, n_keys, offset, window, lows, highs, mask_head,
                    mask_strides, CAUSAL, BAND, part != 1,
                )  # fmt: skip
                w = tl.exp2(z * unit - norm)
                paid = w
                if floor is not None:
                    least = tl.load(floor + first + rows, mask=there, other=0.0)[None, :]
                    paid = tl.where(z == float("-inf"), 0.0, tl.maximum(w, least))
                    w = tl.where(w > least, w, 0.0)
                if share is not None:
                    rest = 1.0 - tl.load(share + first + rows, mask=there, other=1.0)[None, :]
                    paid = w * rest
                if d_value is not None:
                    to_value = multiply(paid.to(do.dtype), do, to_value, PRECISION, WIDEN)
                if d_key is not None:
                    dp = multiply(v, tl.trans(do), None, PRECISION, WIDEN)
                    ds = paid * dp - w * less if share is not None else w * (dp - less)
                    if TANH:
                        ds = ds * (1.0 - squashed * squashed) * (slope * height)
                    to_key = multiply(ds.to(q.dtype), q, to_key, PRECISION, WIDEN)

    if keys is not None:  # read again: kept, it would take registers in the loops
        here = keys + b * keys_strides[0] + cols * keys_strides[1]
        alive = tl.load(here, mask=cols < n_keys, other=0) != 0
        to_key = tl.where(alive[:, None], to_key, 0.0)
        to_value = tl.where(alive[:, None], to_value, 0.0)
    if d_key is not None:
        d_key += b * dk_strides[0] + g * dk_strides[1]
        store_tile(d_key, dk_strides[2], dk_strides[3], left, n_keys, to_key * scaling, COLS, D, PAD)
    if d_value is not None:
        d_value += b * dv_strides[0] + g * dv_strides[1]
        store_tile(d_value, dv_strides[2], dv_strides[3], left, n_keys, to_value, COLS, DV, PAD_V)
