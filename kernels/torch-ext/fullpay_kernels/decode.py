"""One query a sequence, as in generation with a cache: the keys are split over programs, and the parts combined.

    part s of the keys gives  out_s = softmax over it,  lse_s = log2 sum exp z
    out = sum_s 2 ** (lse_s - lse) out_s,  lse = log2 sum_s 2 ** lse_s,  then the mixture as in forward.py

The query heads that share a key head are the rows of a tile, so that a key is read once. No gradients.

Dimensions: B batch, H query heads, G key/value heads, M keys, S splits, D and Dv widths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import architecture, interpreted, padded
from .launch import on, strides
from .tiles import load_pairs, load_tile, multiply, squash, store_tile

COLS = 64


@triton.jit(do_not_specialize=["n_keys", "low", "high", "length"])
def split_kernel(
    query, key, value, parts, lse, keys, bias, centre, rate, amplitude,
    q_strides, k_strides, v_strides, keys_strides, bias_strides,
    scaling, heads, group, n_keys, low, high, length, splits,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TANH: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Keys low + split * length up to the next split of one key head."""
    split = tl.program_id(0) % splits
    pair = tl.program_id(0) // splits
    groups = heads // group
    b = (pair // groups).to(tl.int64)
    g = (pair % groups).to(tl.int64)
    query += b * q_strides[0] + g * group * q_strides[1]
    key += b * k_strides[0] + g * k_strides[1]
    value += b * v_strides[0] + g * v_strides[1]
    rows = tl.arange(0, ROWS)
    place = b * heads + g * group + rows
    there = rows < group
    q = load_tile(query, q_strides[1], q_strides[3], 0, group, ROWS, D, PAD, True, None)
    middle = None
    slope = None
    height = None
    if TANH:
        slope = tl.load(rate + place, mask=there, other=0.0)[:, None]
        height = tl.load(amplitude + place, mask=there, other=0.0)[:, None]
        if centre is not None:
            middle = tl.load(centre + place, mask=there, other=0.0)[:, None]
    if bias is not None:
        bias += b * bias_strides[0] + g * group * bias_strides[2]
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, PAD_V), tl.float32)
    begin = low + split * length
    end = tl.minimum(begin + length, high)
    for left in tl.range(begin, end, COLS):
        cols = left + tl.arange(0, COLS)
        alive = cols < end
        if keys is not None:
            alive = alive & (tl.load(keys + b * keys_strides[0] + cols * keys_strides[1], mask=alive, other=0) != 0)
        k = load_tile(key, k_strides[2], k_strides[3], left, n_keys, COLS, D, PAD, True, alive)
        v = load_tile(value, v_strides[2], v_strides[3], left, n_keys, COLS, DV, PAD_V, True, alive)
        added = None
        if bias is not None:
            added = load_pairs(bias, bias_strides, rows[:, None], cols[None, :], group, n_keys)
        z = multiply(q, tl.trans(k), None, PRECISION, WIDEN)
        z, _, _ = squash(z, scaling, added, middle, slope, height, TANH, False)
        z = tl.where(alive[None, :], z, float("-inf"))
        higher = tl.maximum(peak, tl.max(z, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        w = tl.exp2(z - level[:, None])
        fade = tl.exp2(peak - level)
        total = total * fade + tl.sum(w, 1)
        gathered = multiply(w.to(v.dtype), v, gathered * fade[:, None], PRECISION, WIDEN)
        peak = higher
    blind = total == 0.0
    gathered = gathered / tl.where(blind, 1.0, total)[:, None]
    sized = tl.where(blind, float("-inf"), peak + tl.log2(tl.where(blind, 1.0, total)))
    first = (b * groups + g) * splits * group + split * group  # parts lie as (B, G, S, heads of the group, Dv)
    store_tile(parts + first * DV, DV, 1, 0, group, gathered, ROWS, DV, PAD_V)
    tl.store(lse + first + rows, sized, mask=there)


@triton.jit
def combine_kernel(
    parts, lse, out, share, mean, o_strides, mean_strides, heads, group, mean_group, splits,
    DV: tl.constexpr, PAD_V: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program for one query head."""
    pair = tl.program_id(0).to(tl.int64)
    b = pair // heads
    h = pair % heads
    several = tl.arange(0, SPLITS)
    place = (pair // group * splits + several) * group + h % group
    sized = tl.load(lse + place, mask=several < splits, other=float("-inf"))
    peak = tl.max(sized, 0)
    w = tl.exp2(sized - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(w, 0)
    w = w / tl.where(total == 0.0, 1.0, total)
    cols = tl.arange(0, PAD_V)
    inside = (several < splits)[:, None] & (cols < DV)[None, :]
    gathered = tl.sum(tl.load(parts + place[:, None] * DV + cols[None, :], mask=inside, other=0.0) * w[:, None], 0)
    if share is not None:
        at = mean + b * mean_strides[0] + h // mean_group * mean_strides[1] + cols.to(tl.int64) * mean_strides[3]
        t = tl.load(share + pair)
        gathered = (1.0 - t) * gathered + t * tl.load(at, mask=cols < DV, other=0.0).to(tl.float32)
    at = out + b * o_strides[0] + h * o_strides[1] + cols.to(tl.int64) * o_strides[3]
    tl.store(at, gathered.to(out.dtype.element_ty), mask=cols < DV)


def run_decode(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, keys: Tensor | None = None, bias: Tensor | None = None,
    low: int, high: int, centre: Tensor | None = None, rate: Tensor | None = None, amplitude: Tensor | None = None,
    share: Tensor | None = None, mean: Tensor | None = None, splits: int | None = None, precision: str = "ieee",
) -> Tensor:  # fmt: skip
    """Launches on checked tensors: keys (B, M) uint8, bias (B, H, 1, M), row numbers (B, H) fp32, contiguous."""
    batch, heads, _, width = query.shape
    groups, n_keys, width_v = key.shape[1], key.shape[2], value.shape[3]
    if splits is None:
        splits = splits_for(high - low, batch * groups, query.device)
    length = triton.cdiv(triton.cdiv(max(high - low, 1), splits), COLS) * COLS
    group = heads // groups
    out = torch.empty(batch, heads, 1, width_v, dtype=query.dtype, device=query.device)
    parts = torch.empty(batch * groups * splits, group, width_v, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch * groups * splits, group, dtype=torch.float32, device=query.device)
    bias_strides = None if bias is None else (bias.stride(0), 0, bias.stride(1), bias.stride(3))
    with on(query.device):
        split_kernel[(batch * groups * splits,)](
            query, key, value, parts, lse, keys, bias, centre, rate, amplitude,
            query.stride(), key.stride(), value.stride(), strides(keys), bias_strides,
            scaling, heads, group, n_keys, low, high, length, splits,
            D=width, DV=width_v, PAD=padded(width), PAD_V=padded(width_v),
            ROWS=max(triton.next_power_of_2(group), 16), COLS=COLS, TANH=rate is not None, PRECISION=precision,
            WIDEN=interpreted() and query.dtype == torch.bfloat16, num_warps=4, num_stages=2,
        )  # fmt: skip
        combine_kernel[(batch * heads,)](
            parts, lse, out, share, mean, out.stride(), strides(mean), heads, group,
            1 if mean is None else heads // mean.shape[1], splits,
            DV=width_v, PAD_V=padded(width_v), SPLITS=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out


def splits_for(length: int, pairs: int, device: torch.device) -> int:
    """Enough programs for two on every multiprocessor, none with fewer than two blocks of keys."""
    if architecture(device) == "interpreter":
        return 3
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(triton.cdiv(2 * processors, pairs), triton.cdiv(length, 2 * COLS), 64))
