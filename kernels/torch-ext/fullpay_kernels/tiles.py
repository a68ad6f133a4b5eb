"""What every kernel does with a tile of scores: multiply, squash, hide, and find the range of keys.

    s_ij = scaling * q_i . k_j + bias_ij
    z_ij = s_ij, or amplitude_i * tanh((s_ij - centre_i) / width_i)
    query i sees key j where     lows_i <= j < highs_i                     segments, blocks
                                 j <= i + offset                           causality
                                 j > i + offset - window                   band
                                 keys[b, j], mask[b, h, i, j]              padding, anything else

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D and Dv widths.
Tiles may lie either way round: `rows` and `cols` come already shaped (n, 1) and (1, m), or (1, n) and (m, 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def multiply(left, right, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """total + left @ right, accumulated in FP32."""
    if WIDEN:  # the interpreter would multiply the bits of bfloat16
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """Accurate to a few units in the last place, for tiny x too: an infinite width means z = x * 2**-60 * 2**60."""
    if FAST:  # NVIDIA's instruction, a relative error of 2**-11
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    size = tl.abs(x)
    tail = tl.exp2(size * (-2.0 * LOG2E))
    large = (1.0 - tail) / (1.0 + tail)
    square = x * x
    series = -5.70498872745e-3
    series = series * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    return tl.where(size < 0.625, x + x * square * series, tl.where(x < 0, -large, large))


@triton.jit
def three_runs(first, full_first, full_last, last, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    """Whole blocks from `first` to `last` as three runs, the middle one inside [full_first, full_last).

    Kernels visit the last run first (or with FIRST the first), then the middle one, then the other: that one is never
    empty. A branch round the first loop, even one for a loop that does not run, makes the compiler serialise its
    products; an empty loop later costs nothing.
    """
    start = tl.maximum(first, 0) // BLOCK * BLOCK
    stop = tl.maximum((tl.maximum(last, 0) + BLOCK - 1) // BLOCK * BLOCK, start + BLOCK)
    inner = (tl.maximum(full_first, 0) + BLOCK - 1) // BLOCK * BLOCK
    outer = tl.maximum(full_last, 0) // BLOCK * BLOCK
    if FIRST:
        inner = tl.minimum(tl.maximum(inner, start + BLOCK), stop)
        outer = tl.minimum(tl.maximum(outer, inner), stop)
    else:
        inner = tl.minimum(tl.maximum(inner, start), stop - BLOCK)
        outer = tl.minimum(tl.maximum(outer, inner), stop - BLOCK)
    return start, inner, outer, stop


@triton.jit
def run_of(part: tl.constexpr, start, inner, outer, stop, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    """First row, and number of blocks, of a run in the order of the visits; parts 0 and 2 lie at an edge."""
    first = inner
    end = outer
    if part != 1:
        if (part == 0) == FIRST:
            first = start
            end = inner
        else:
            first = outer
            end = stop
    blocks = (end - first) // BLOCK
    if part == 0:  # so that the compiler knows
        blocks = tl.maximum(blocks, 1)
    return first, blocks


@triton.jit
def key_range(
    top, n_queries, n_keys, offset, window, lows, highs,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blocks of keys that queries top .. top + ROWS - 1 see: some, all, some."""
    bottom = tl.minimum(top + ROWS, n_queries) - 1
    first = 0
    full_first = 0
    last = n_keys
    full_last = n_keys
    if CAUSAL:
        last = tl.minimum(last, bottom + offset + 1)
        full_last = tl.minimum(full_last, top + offset + 1)
    if BAND:
        first = top + offset - window + 1
        full_first = bottom + offset - window + 1
    if lows is not None:
        first = tl.maximum(first, tl.load(lows + top))
        full_first = tl.maximum(full_first, tl.load(lows + bottom))
        last = tl.minimum(last, tl.load(highs + bottom))
        full_last = tl.minimum(full_last, tl.load(highs + top))
    return three_runs(first, full_first, full_last, last, BLOCK, False)


@triton.jit
def query_range(
    left, n_queries, n_keys, offset, window, key_lows, key_highs,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blocks of queries that see keys left .. left + COLS - 1: `key_range`, seen from the keys."""
    right = tl.minimum(left + COLS, n_keys) - 1
    first = 0
    full_first = 0
    last = n_queries
    full_last = n_queries
    if CAUSAL:
        first = left - offset
        full_first = right - offset
    if BAND:
        last = tl.minimum(last, right - offset + window)
        full_last = tl.minimum(full_last, left - offset + window)
    if key_lows is not None:
        first = tl.maximum(first, tl.load(key_lows + left))
        full_first = tl.maximum(full_first, tl.load(key_lows + right))
        last = tl.minimum(last, tl.load(key_highs + right))
        full_last = tl.minimum(full_last, tl.load(key_highs + left))
    if not BAND and key_lows is None:  # queries past the end need no care: their lse reads as +inf
        full_last = last + BLOCK
    return three_runs(first, full_first, full_last, last, BLOCK, True)


@triton.jit
def hide(
    scores, rows, cols, n_queries, n_keys, offset, window, lows, highs, mask, mask_strides,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scores with -inf at hidden pairs; only tiles at an edge look at ranges. `mask` points at its batch and head."""
    if EDGE:
        scores = tl.where(cols < n_keys, scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(cols <= rows + offset, scores, float("-inf"))
        if BAND:
            scores = tl.where(cols > rows + offset - window, scores, float("-inf"))
        if lows is not None:
            low = tl.load(lows + rows, mask=rows < n_queries, other=0)
            high = tl.load(highs + rows, mask=rows < n_queries, other=0)
            scores = tl.where((cols >= low) & (cols < high), scores, float("-inf"))
    if mask is not None:
        scores = tl.where(load_pairs(mask, mask_strides, rows, cols, n_queries, n_keys) != 0, scores, float("-inf"))
    return scores


@triton.jit
def load_pairs(tensor, strides, rows, cols, n_queries, n_keys):
    """Tile of a tensor over pairs that already points at its batch and head."""
    at = rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3]
    return tl.load(tensor + at, mask=(rows < n_queries) & (cols < n_keys), other=0)


@triton.jit
def load_tile(tensor, row_stride, col_stride, top, n_rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
              CHECK: tl.constexpr, alive):  # fmt: skip
    """Rows top .. top + ROWS - 1 of a (n_rows, WIDTH) matrix, padded to PAD columns; zeros outside and where not alive."""
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, PAD)
    at = tensor + tl.cast(top, tl.int64) * row_stride
    at = at + rows.to(tl.int64)[:, None] * row_stride + cols.to(tl.int64)[None, :] * col_stride
    if alive is not None:
        inside = alive[:, None]
        if WIDTH != PAD:
            inside = inside & (cols < WIDTH)[None, :]
        return tl.load(at, mask=inside, other=0.0)
    if CHECK:
        inside = (top + rows < n_rows)[:, None]
        if WIDTH != PAD:
            inside = inside & (cols < WIDTH)[None, :]
        return tl.load(at, mask=inside, other=0.0)
    if WIDTH != PAD:
        return tl.load(at, mask=(cols < WIDTH)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def store_tile(tensor, row_stride, col_stride, top, n_rows, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr,
               PAD: tl.constexpr):  # fmt: skip
    """Inverse of `load_tile`, in the dtype of the tensor."""
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, PAD)
    at = tensor + tl.cast(top, tl.int64) * row_stride
    at = at + rows.to(tl.int64)[:, None] * row_stride + cols.to(tl.int64)[None, :] * col_stride
    inside = (top + rows < n_rows)[:, None] & (cols < WIDTH)[None, :]
    tl.store(at, tile.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def squash(product, scaling, bias, centre, rate, amplitude, TANH: tl.constexpr, FAST: tl.constexpr):
    """From q . k to z in powers of two, and the tanh and its argument (z again where there is none)."""
    scores = product * scaling
    if bias is not None:
        scores += bias.to(tl.float32)
    if TANH:
        if centre is not None:
            scores -= centre
        scores *= rate
        squashed = tanh(scores, FAST)
        z = squashed * (amplitude * LOG2E)
        if bias is not None:  # a bias of -inf hides the pair, here too; 0 * inf must not reach the gradient of the rate
            hidden = scores == float("-inf")
            z = tl.where(hidden, float("-inf"), z)
            scores = tl.where(hidden, 0.0, scores)
        return z, squashed, scores
    return scores * LOG2E, scores, scores
