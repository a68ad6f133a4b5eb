"""Mean of the visible values of every query, as sums over ranges of rows: linear in N.

    out_i = scale_i * sum_{first_i <= j < last_i} weight_j x_j
    first_i = max(i + low, lows_i, 0),  last_i = min(i + high, highs_i, M)

With weight 1 at keys that exist and scale 1 / (their number in the range) this is the mean; with the two exchanged and the
ranges seen from the keys it is the gradient. Rows are summed in chunks first; a tile of queries then adds the chunks that
all its ranges share, and the edges by small products. No difference of long running sums: it would lose digits and let
hidden values in.

Dimensions: B batch, G heads, H query heads, N queries (rows out), M keys (rows in), W width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import check_devices, check_keys, check_segments, check_width_and_dtype
from .compiled import uncompiled
from .config import architecture, interpreted, padded
from .launch import on, packed
from .tiles import load_tile, multiply, run_of, store_tile, three_runs

FAR = 1 << 29  # no limit: beyond every length


@triton.jit(do_not_specialize=["n_in"])
def chunks_kernel(
    x, weight, sums, x_strides, weight_stride, groups, n_in,
    WIDTH: tl.constexpr, PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """sums[pair, chunk] = weighted sum of the rows of a chunk, fp32."""
    chunks = tl.cdiv(n_in, CHUNK)
    chunk = tl.program_id(0) % chunks
    pair = (tl.program_id(0) // chunks).to(tl.int64)
    left = chunk * CHUNK
    rows = left + tl.arange(0, CHUNK)
    x += pair // groups * x_strides[0] + pair % groups * x_strides[1]
    factor = tl.load(weight + pair // groups * weight_stride + rows, mask=rows < n_in, other=0.0)
    tile = load_tile(x, x_strides[2], x_strides[3], left, n_in, CHUNK, WIDTH, PAD, True, factor != 0.0)
    cols = tl.arange(0, PAD)
    total = tl.sum(tile.to(tl.float32) * factor[:, None], 0)
    tl.store(sums + tl.cast(tl.program_id(0), tl.int64) * WIDTH + cols, total, mask=cols < WIDTH)


@triton.jit(do_not_specialize=["n_in", "n_out", "low", "high"])
def ranges_kernel(
    x, weight, sums, scale, out, lows, highs, x_strides, o_strides, weight_stride, scale_stride, groups, n_in, n_out,
    low, high,
    WIDTH: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """EXACT: weights are 0 or 1, and need no more bits than x has."""
    tiles = tl.cdiv(n_out, ROWS)
    top = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    x += pair // groups * x_strides[0] + pair % groups * x_strides[1]
    out += pair // groups * o_strides[0] + pair % groups * o_strides[1]
    weight += pair // groups * weight_stride
    sums += pair * tl.cdiv(n_in, CHUNK) * WIDTH
    rows = top + tl.arange(0, ROWS)
    bottom = tl.minimum(top + ROWS, n_out) - 1
    first = tl.maximum(rows + low, 0)
    last = tl.minimum(rows + high, n_in)
    begin = tl.maximum(top + low, 0)
    full_begin = tl.maximum(bottom + low, 0)
    end = tl.minimum(bottom + high, n_in)
    full_end = tl.minimum(top + high, n_in)
    if lows is not None:
        first = tl.maximum(first, tl.load(lows + rows, mask=rows < n_out, other=0))
        last = tl.minimum(last, tl.load(highs + rows, mask=rows < n_out, other=0))
        begin = tl.maximum(begin, tl.load(lows + top))
        full_begin = tl.maximum(full_begin, tl.load(lows + bottom))
        end = tl.minimum(end, tl.load(highs + bottom))
        full_end = tl.minimum(full_end, tl.load(highs + top))
    start, inner, outer, stop = three_runs(begin, full_begin, full_end, end, CHUNK, False)
    total = tl.zeros((ROWS, PAD), tl.float32)
    for part in tl.static_range(2):
        left_end, blocks = run_of(2 * part, start, inner, outer, stop, CHUNK, False)
        for block in tl.range(0, blocks):
            left = left_end + block * CHUNK
            cols = left + tl.arange(0, CHUNK)
            factor = tl.load(weight + cols, mask=cols < n_in, other=0.0)
            tile = load_tile(x, x_strides[2], x_strides[3], left, n_in, CHUNK, WIDTH, PAD, True, factor != 0.0)
            inside = (cols[None, :] >= first[:, None]) & (cols[None, :] < last[:, None])
            share = tl.where(inside, factor[None, :], 0.0)
            if EXACT:
                total = multiply(share.to(tile.dtype), tile, total, PRECISION, WIDEN)
            else:
                total = multiply(share, tile.to(tl.float32), total, PRECISION, WIDEN)
    cols = tl.arange(0, PAD)
    common = tl.zeros((PAD,), tl.float32)
    for chunk in tl.range(inner // CHUNK, outer // CHUNK, 16):
        several = chunk + tl.arange(0, 16)
        at = sums + several.to(tl.int64)[:, None] * WIDTH + cols[None, :]
        there = (several < outer // CHUNK)[:, None] & (cols < WIDTH)[None, :]
        common += tl.sum(tl.load(at, mask=there, other=0.0), 0)
    total += common[None, :]
    factor = tl.load(scale + pair // groups * scale_stride + rows, mask=rows < n_out, other=0.0)
    total = tl.where(factor[:, None] != 0.0, total * factor[:, None], 0.0)
    store_tile(out, o_strides[2], o_strides[3], top, n_out, total, ROWS, WIDTH, PAD)


def range_sums(
    x: Tensor, weight: Tensor, scale: Tensor, n_out: int, *, low: int = -FAR, high: int = FAR,
    lows: Tensor | None = None, highs: Tensor | None = None, exact: bool,
) -> Tensor:  # fmt: skip
    """The module's sum, (B, G, n_out, W) in the dtype of x.

    Args:
        x: (B, G, M, W).
        weight: (B or 1, M) fp32; rows of weight 0 are never read.
        scale: (B or 1, n_out) fp32.
        n_out: rows of the result.
        low, high: row i sums rows i + low to i + high - 1, as far as these exist.
        lows, highs: (n_out,) int32, neither ever falling: further limits.
        exact: all weights are 0 or 1.
    """
    batch, groups, n_in, width = x.shape
    out = x.new_empty(batch, groups, n_out, width)
    if out.numel() == 0 or n_in == 0:
        return out.zero_()
    chunk = 16 if architecture(x.device) == "interpreter" else 64
    sums = torch.empty(batch * groups * triton.cdiv(n_in, chunk), width, dtype=torch.float32, device=x.device)
    weight_stride, scale_stride = (0 if row.shape[0] == 1 else row.shape[1] for row in (weight, scale))
    half = x.dtype != torch.float32
    with on(x.device):
        chunks_kernel[(sums.shape[0],)](
            x, weight.contiguous(), sums, x.stride(), weight_stride, groups, n_in,
            WIDTH=width, PAD=padded(width), CHUNK=chunk, num_warps=4,
        )  # fmt: skip
        ranges_kernel[(triton.cdiv(n_out, chunk) * batch * groups,)](
            x, weight.contiguous(), sums, scale.contiguous(), out, lows, highs, x.stride(), out.stride(),
            weight_stride, scale_stride, groups, n_in, n_out, low, high,
            WIDTH=width, PAD=padded(width), ROWS=chunk, CHUNK=chunk, EXACT=exact,
            PRECISION="tf32" if half else "ieee",  # in 32 bits: a half has fewer than tf32
            WIDEN=interpreted() and x.dtype == torch.bfloat16, num_warps=8 if width > 128 else 4, num_stages=2,
        )  # fmt: skip
    return out


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, alive: Tensor, inverse: Tensor, n_out: int, ranges: dict, back: dict
    ) -> Tensor:
        ctx.save_for_backward(alive, inverse)
        ctx.n_keys, ctx.back = value.shape[2], back
        return range_sums(value, alive, inverse, n_out, exact=True, **ranges)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        alive, inverse = ctx.saved_tensors
        return range_sums(grad, inverse, alive, ctx.n_keys, exact=False, **ctx.back), *[None] * 5


@uncompiled
def visible_mean(
    value: Tensor,
    *,
    n_queries: int,
    keys: Tensor | None = None,
    offset: int | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Mean of `value` over the keys that each query sees, 0 where it sees none; differentiable once.

    Args:
        value: (B, G, M, Dv), any strides.
        n_queries: N.
        keys, offset, window, cu_seqlens: as in `attention`. (For a dense mask, ask `attention` with a query of zeros.)

    Returns:
        (B, G, N or 1, Dv) in the dtype of `value`: one row where all queries see the same.

    Raises:
        ValueError: for tensors or options that do not fit, as "expected ..., got ...".
    """
    check_width_and_dtype("value", value)
    check_devices(value, {"keys": keys, "cu_seqlens": cu_seqlens})
    check_segments(cu_seqlens)
    device, n_keys = value.device, value.shape[2]
    if window is not None and offset is None:
        raise ValueError("window: expected an offset beside it, got None.")
    check_keys(keys, value.shape[0], n_keys)
    rows = 1 if offset is None and cu_seqlens is None else n_queries
    place = torch.arange(rows, device=device)
    stops = torch.full_like(place, n_keys) if offset is None else (place + offset + 1).clamp(0, n_keys)
    starts = torch.zeros_like(place) if window is None else (place + (offset or 0) + 1 - window).clamp(0, n_keys)
    ranges: dict[str, Any] = {}
    back: dict[str, Any] = {}
    if offset is not None:
        ranges["high"], back["low"] = offset + 1, -offset
        if window is not None:
            ranges["low"], back["high"] = offset + 1 - window, window - offset
    if cu_seqlens is not None:
        segments = packed(cu_seqlens, n_queries)
        starts, stops = torch.maximum(starts, segments.lows), torch.minimum(stops, segments.highs)
        ranges |= {"lows": segments.lows, "highs": segments.highs}
        back |= {"lows": segments.key_lows, "highs": segments.key_highs}
    if keys is None:
        alive = torch.ones(1, n_keys, dtype=torch.float32, device=device)
        counts = (stops - starts)[None]
    else:
        alive = keys.float()
        before = torch.nn.functional.pad(keys.cumsum(1), (1, 0))
        counts = before[:, stops] - before[:, starts]
    inverse = torch.where(counts > 0, 1.0 / counts.clamp(min=1), 0.0)
    return _Mean.apply(value, alive, inverse, rows, ranges, back)
