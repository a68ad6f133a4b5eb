"""Mean of the visible values of every query, and the blend of attention with it. Linear in N unless the set is dense.

Dimensions: B batch, H query heads, G key/value heads (G divides H; head h uses group h // (H // G)), N queries, M keys,
Dv width of value, W window of a band.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fullpay.core.numbers import accumulate
from hf_fullpay.core.visible import Visible

_BLOCK = 16  # rows summed by one small matrix product; a power of two, so that 1 / _BLOCK is exact in every dtype


def visible_mean(value: Tensor, visible: Visible) -> Tensor:
    """Mean of `value` over the keys that each query sees, 0 where it sees none.

    Args:
        value: (B, G, M, Dv), any strides.
        visible: which keys each query sees.

    Returns:
        (B, G, N or 1, Dv) in the dtype of `value`, one row where all queries see the same; (B, H, N, Dv) where a dense
        part differs from head to head.
    """
    if visible.keys is not None:  # whatever is in padding, even NaN, must not enter a product
        value = torch.where(visible.keys[:, None, :, None], value, 0.0)
    if visible.dense is None and visible.offset is not None and visible.n_queries > 1:
        sums = _prefix_sums(value, visible) if _sees_prefix(visible) else _window_sums(value, visible)
        return (sums * (_BLOCK / visible.counts().clamp(min=1).to(sums.dtype))).to(value.dtype)
    mask = visible.tile(0, visible.n_queries)
    if mask is None:
        mask = torch.ones(1, 1, 1, visible.n_keys, dtype=torch.bool, device=value.device)
    counts = mask.sum(-1, keepdim=True, dtype=accumulate(value.dtype)).clamp(min=1)
    # The largest power of two up to the count keeps half-precision sums in range and is exact in every dtype.
    power = counts.log2().floor().exp2()
    weights = (mask / power).to(value.dtype)
    if weights.shape[1] > 1:
        weights, value = weights.unflatten(1, (value.shape[1], -1)), value[:, :, None]
    sums = weights @ value
    if sums.dim() == 5:
        sums = sums.flatten(1, 2)
    return (sums * (power / counts)).to(value.dtype)


def blend(attended: Tensor, mean: Tensor, share: Tensor) -> Tensor:
    """(1 - share) * attended + share * mean, computed in FP32 (FP64 for FP64).

    Args:
        attended: (B, H, N, Dv), any strides, which the result keeps.
        mean: (B, G or H, N or 1, Dv).
        share: broadcastable to (B, H, N, 1); where it is 0 the result equals `attended` bit for bit.

    Returns:
        (B, H, N, Dv) in the dtype of `attended`.
    """
    heads, groups = attended.shape[1], mean.shape[1]
    # Expanded also because PyTorch lets a scalar tensor take the lower precision of what it multiplies.
    share = share[(None,) * (4 - share.dim())].expand(-1, heads, -1, -1)
    # A step of decoding is felt in every operation.
    mix = _Blend.apply if torch.is_grad_enabled() else _blend
    if heads == groups:
        return mix(attended, mean, share)
    grouped = attended.unflatten(1, (groups, -1))
    return mix(grouped, mean[:, :, None], share.unflatten(1, (groups, -1))).flatten(1, 2)


def _blend(attended: Tensor, mean: Tensor, share: Tensor) -> Tensor:
    wide = accumulate(attended.dtype)
    return torch.lerp(attended.to(wide), mean.to(wide), share.to(wide)).to(attended.dtype)


class _Blend(torch.autograd.Function):
    """Plain autograd takes as long, but keeps FP32 copies of both inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, attended: Tensor, mean: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(attended, mean, share)
        return _blend(attended, mean, share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attended, mean, share = ctx.saved_tensors
        wide, to_share = accumulate(grad.dtype), None
        if ctx.needs_input_grad[2]:
            to_share = torch.sub(mean.to(wide), attended).mul_(grad).sum(-1, keepdim=True)
            to_share = to_share.sum_to_size(share.shape).to(share.dtype)
        to_mean = grad * share.to(wide)
        return (grad - to_mean).to(grad.dtype), to_mean.sum_to_size(mean.shape).to(mean.dtype), to_share


def _padded(rows: Tensor, front: int, back: int) -> Tensor:
    """Rows of zeros added or, with negative numbers, rows cut off; `F.pad` copies even when there is nothing to do."""
    if not torch.compiler.is_compiling() and front == back == 0:
        return rows
    return F.pad(rows, (0, 0, front, back))


def _sees_prefix(visible: Visible) -> bool:
    """No window, or one that never cuts (not asked while exporting: lengths may not be compared there)."""
    if visible.window is None or visible.offset is None:
        return True
    return not torch.compiler.is_exporting() and visible.window >= visible.n_queries + visible.offset


def _prefix_sums(value: Tensor, visible: Visible) -> Tensor:
    """Sums over keys j <= i + offset, divided by _BLOCK."""
    n, offset = visible.n_queries, visible.offset or 0
    # Padded so that the last N running sums are those of the queries.
    lead = max(-offset, 0)
    rows = _padded(value, lead, n + offset - visible.n_keys)
    return _RunningSums.apply(rows, _BLOCK, False)[:, :, offset + lead :]


def _window_sums(value: Tensor, visible: Visible) -> Tensor:
    """Sums over keys i + offset - W < j <= i + offset, divided by _BLOCK.

    A difference of two long running sums would lose digits and let hidden values in. Running sums that start anew every
    W rows need no difference: a window is the end of one stretch and the beginning of the next.
    """
    n, offset, window = visible.n_queries, visible.offset or 0, visible.window or 1
    front = window - 1 - offset  # window i becomes rows i .. i + W - 1
    if torch.compiler.is_exporting():
        rows = F.pad(value, (0, 0, front, n + offset - visible.n_keys))
        return rows.unfold(2, window, 1).sum(-1, dtype=accumulate(value.dtype)) / _BLOCK
    # Compiled, one more than needed at times: the simpler expression compiles faster.
    stretches = n // window + 2 if torch.compiler.is_compiling() else -(-n // window) + 1
    rows = F.pad(value, (0, 0, front, stretches * window - front - visible.n_keys)).unflatten(2, (stretches, window))
    block = min(window, _BLOCK)
    ends = _RunningSums.apply(rows, block, True).flatten(2, 3)[:, :, :n]
    begins = _RunningSums.apply(F.pad(rows[..., :-1, :], (0, 0, 1, 0)), block, False).flatten(2, 3)
    return ends + begins[:, :, window : window + n]


class _RunningSums(torch.autograd.Function):
    """Its own adjoint, run from the other end; what it keeps for the backward pass is nothing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, block: int, from_end: bool) -> Tensor:
        ctx.dtype, ctx.block, ctx.from_end = rows.dtype, block, from_end
        return _running_sums(rows, block, from_end)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _running_sums(grad.to(ctx.dtype), ctx.block, not ctx.from_end).to(ctx.dtype), None, None


def _running_sums(rows: Tensor, block: int, from_end: bool) -> Tensor:
    """Running sums along the last but one dimension, divided by _BLOCK; FP32 or FP64.

    Inside blocks by a product with a triangle, over the blocks by a cumulative sum.
    """
    size, wide = rows.shape[-2], accumulate(rows.dtype)
    if torch.compiler.is_compiling():  # views of symbolic sizes compile slowly and put conditions on exported lengths
        sums = rows.flip(-2).cumsum(-2, dtype=wide).flip(-2) if from_end else rows.cumsum(-2, dtype=wide)
        return sums / _BLOCK
    count = -(-size // block)
    blocks = _padded(rows, 0, count * block - size).unflatten(-2, (count, block))
    triangle = rows.new_full((block, block), 1 / _BLOCK)
    if from_end:
        inner = triangle.triu() @ blocks
        carry = F.pad(inner[..., 1:, 0, :].flip(-2).cumsum(-2, dtype=wide).flip(-2), (0, 0, 0, 1))
    else:
        inner = triangle.tril() @ blocks
        carry = F.pad(inner[..., :-1, -1, :].cumsum(-2, dtype=wide), (0, 0, 1, 0))
    inner = inner.to(wide)
    inner += carry[..., None, :]
    return inner.flatten(-3, -2)[..., :size, :]
