"""Overlapping chunks: softmax attention inside every chunk, averaged, and attention over the summaries of chunks.

Dimensions: B batch, H query heads, G key/value heads (G divides H), N queries, M keys, D and Dv widths, C tokens of a
chunk, S tokens from start to start, P chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fullpay.core.numbers import accumulate
from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.host import open_blind_rows, sdpa
from hf_fullpay.fast.laid import (
    Start,
    batched,
    existing,
    first_key,
    group_means,
    grouped,
    laid,
    last_key,
    places,
    ungrouped,
)
from hf_fullpay.fast.mean import blend


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Visible,
    size: int,
    stride: int,
    exchange: Tensor | float,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    """(1 - g) * local + g * far; only one of them where a query lacks the other, zeros where it lacks both.

    Args:
        query: (B, H, N, D).
        key: (B, G, M, D).
        value: (B, G, M, Dv).
        visible: padding and causality (an offset from 0 up), no dense part; without an offset N is M or 1.
        size, stride: C and S.
        exchange: g, a number or (1, H, 1, 1).
        scaling: factor on the dot products.
        dropout: share of the weights dropped, a summary's as one.

    Returns:
        (B, H, N, Dv) in the dtype of query.
    """
    if not torch.compiler.is_compiling():  # there lengths that are compared would be cases of their own
        slots = max(visible.n_keys, query.shape[2] + (visible.offset or 0))
        size, stride = min(size, slots), min(stride, slots)
    local, has_local = (_local_step if query.shape[2] == 1 else _local)(
        query, key, value, visible, size, stride, scaling, dropout
    )
    far, has_far = _far(query, key, value, visible, size, stride, scaling, dropout)
    share = torch.where(has_far & has_local, exchange, has_far.to(accumulate(query.dtype)))
    out = blend(local, far, share)
    return out if visible.keys is None else torch.where(visible.counts() > 0, out, 0)


def _count(n: int, stride: int) -> int:
    """Chunks that start within n slots; traced, one would be a case of its own. One division, which can be simplified."""
    return (n - 1 + stride * (2 if torch.compiler.is_compiling() else 1)) // stride


def _chunks(rows: Tensor, start: Start, count: int, size: int, stride: int) -> Tensor:
    """(B, G, T, D) -> (B, G, P, C, D), the first chunk at slot `start`. Cut and put together: a cheap gradient."""
    widths = [min(stride, size - done) for done in range(0, size, stride)]
    stretches = grouped(laid(rows, start, (count + len(widths) - 1) * stride), stride)
    return torch.cat([stretches[:, :, i : i + count, :width] for i, width in enumerate(widths)], 3)


def _alive(visible: Visible, start: Start, count: int, size: int, stride: int) -> Tensor:
    """Which slots of the chunks hold a key that exists, (B or 1, P, C)."""
    slots = existing(visible, start, (count - 1) * stride + size)
    return slots.unfold(1, size, stride)


def _overlapped(pieces: Tensor, stride: int) -> Tensor:
    """Sum of chunks where they overlap: (B, H, P, C, D) -> (B, H, L, D)."""
    size = pieces.shape[3]
    extra = -(-size // stride) - 1
    cut = pieces.split(stride, 3)
    moved = [F.pad(x, (0, 0, 0, stride - x.shape[3], i, extra - i)) for i, x in enumerate(cut)]
    return ungrouped(sum(moved[1:], moved[0]))


def _local(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, size: int, stride: int, scaling: float, dropout: float
) -> tuple[Tensor, Tensor]:
    """Mean over the chunks that hold a query, and whether there are any."""
    n, causal, offset = query.shape[2], visible.offset is not None, visible.offset or 0
    start, count = first_key(visible), _count(n, stride)
    if offset:  # cached keys come first: begin with the first chunk that holds a query
        skip = (offset - start - size) // stride + 1
        start = start + stride * (skip.clamp_min(0) if isinstance(skip, Tensor) else max(skip, 0))
        count = _count(n + size - 1, stride)
    keys, values = (_chunks(x, start, count, size, stride).transpose(1, 2) for x in (key, value))
    rows = _chunks(query, start - offset, count, size, stride).transpose(1, 2)
    mask = _alive(visible, start, count, size, stride)[:, :, None]  # (B or 1, P, 1, C)
    if visible.keys is not None:
        keys, values = (torch.where(mask[..., None], x, 0) for x in (keys, values))
    if causal:
        mask = mask & mask.new_ones(size, size).tril()
    mask, some = open_blind_rows(mask)
    out = batched(rows, keys, values, mask, scaling, dropout)
    wide = accumulate(query.dtype)
    some = some.expand(-1, -1, size, -1)[:, None].to(wide)  # (B or 1, 1, P, C, 1)
    holding = laid(_overlapped(some, stride), offset - start, n)
    total = laid(_overlapped(out.transpose(1, 2) * some, stride), offset - start, n)
    return (total / holding.clamp_min(1)).to(query.dtype), holding > 0


def _local_step(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, size: int, stride: int, scaling: float, dropout: float
) -> tuple[Tensor, Tensor]:
    """`_local` for a single query: one row for every chunk that holds it, over the C slots that end with it."""
    slot, start = last_key(visible), first_key(visible)
    alive = existing(visible, slot - size + 1, size)[:, None]
    keys, values = (laid(x, slot - size + 1, size) for x in (key, value))
    if visible.keys is not None:
        keys, values = (torch.where(alive[..., None], x, 0) for x in (keys, values))
    place = places(slot - start, query.device)[..., None]
    chunk = place // stride - torch.arange(-(-size // stride), device=query.device)[None, :, None]
    holds = (chunk >= 0) & (place < chunk * stride + size)
    mask = alive & holds & (torch.arange(1 - size, 1, device=query.device) + place >= chunk * stride)
    mask, some = open_blind_rows(mask[:, None])
    out = sdpa(query.expand(-1, -1, mask.shape[2], -1), keys, values, mask, scaling, dropout)
    holding = some.sum(2, keepdim=True)
    return (out * some).sum(2, keepdim=True) / holding.clamp_min(1), holding > 0


def _far(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, size: int, stride: int, scaling: float, dropout: float
) -> tuple[Tensor, Tensor]:
    """Attention over the summaries, and whether there are any."""
    n, causal = query.shape[2], visible.offset is not None or query.shape[2] != visible.n_keys
    start, count = first_key(visible), _count(visible.n_keys, stride)
    alive = _alive(visible, start, count, size, stride)
    keys, values = (_chunks(x, start, count, size, stride) for x in (key, value))
    if visible.keys is not None:
        keys, values = (torch.where(alive[:, None, ..., None], x, 0) for x in (keys, values))
    mask = alive.any(-1)[:, None, None]
    if causal:
        first = places((last_key(visible) if n == 1 else visible.offset or 0) - start, query.device)
        place = first[..., None, None] + torch.arange(n, device=query.device)[:, None]
        mask = mask & (torch.arange(count, device=query.device) * stride + size <= place)
    mask, some = open_blind_rows(mask)
    return sdpa(query, group_means(keys, alive), group_means(values, alive), mask, scaling, dropout), some
