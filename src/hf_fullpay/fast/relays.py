"""Blocks with relays: the queries of a block against its own keys and the relays of the others, all blocks as one batch.

Dimensions: B batch, H query heads, G key/value heads (G divides H), N queries, M keys, D and Dv widths, C tokens of a
block, P blocks of keys, Q blocks of queries of R rows each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_fullpay.core.numbers import accumulate
from hf_fullpay.core.visible import Visible
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
from hf_fullpay.fast.squash import STRAIGHT


@dataclass(frozen=True)
class Squash:
    """Bounded scores, amplitude * tanh((s - centre) / width), or with `rescale` min(1, width / max |s - centre|) * (s -
    centre). The tensors broadcast against (B, H, N, 1)."""

    centre: Tensor
    width: Tensor
    amplitude: Tensor
    rescale: bool

    def each(self, change: Callable[[Tensor], Tensor]) -> Squash:
        """The same with every tensor changed."""
        return Squash(change(self.centre), change(self.width), change(self.amplitude), self.rescale)


def relay_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Visible,
    size: int,
    scaling: float,
    squash: Squash | None = None,
    dropout: float = 0.0,
    origin: Start | None = None,
) -> Tensor:
    """Softmax over the tokens of the own block and the relays of the others; a query that sees nothing gives zeros.

    Args:
        query: (B, H, N, D).
        key: (B, G, M, D).
        value: (B, G, M, Dv).
        visible: padding and causality (an offset from 0 up), no dense part; without an offset N is M or 1.
        size: C.
        scaling: factor on the dot products.
        squash: what bounded scores do to tokens and relays alike, before a relay's log count is added.
        dropout: share of the weights dropped, a relay's as one.
        origin: slot from which blocks are counted; None for the first existing key.

    Returns:
        (B, H, N, Dv) in the dtype of query.
    """
    n, causal, offset = query.shape[2], visible.offset is not None, visible.offset or 0
    total = n + offset if causal else visible.n_keys  # keys beyond are seen by nobody
    if causal and n == 1:
        key, value = key[:, :, :total], value[:, :, :total]
        keep = None if visible.keys is None else visible.keys[:, :total]
        visible = replace(visible, n_keys=key.shape[2], keys=keep)
    compiling = torch.compiler.is_compiling()  # lengths that are compared, or few blocks, would be cases of their own
    size = size if compiling else min(size, total)
    origin = first_key(visible) if origin is None else origin
    # The layout begins up to C - 1 slots early, so that the origin is the first slot of a block.
    start: Start = -(-origin % size)
    # One division, which an exporter can simplify where it meets multiples of it.
    blocks = (total - 1 + size * (2 if compiling or isinstance(start, Tensor) else 1)) // size
    alive, tokens = _blocks(visible, [key, value], start, blocks, size)
    relays = [group_means(x, alive)[:, None] for x in tokens]  # (B, 1, G, P, D)
    block = torch.arange(blocks, device=query.device)
    begin: Start = 0
    if n == 1:
        rows, number = query[:, None], (last_key(visible) - start) // size
        near, tokens = _blocks(visible, [key, value], start + number * size, 1, size)
        hidden, place = ~near[:, :, None], places(number, query.device)
    else:
        first = offset // size  # blocks of keys alone come before it
        begin, place = start + first * size - offset, block[None, first:]
        rows = grouped(laid(query, begin, (blocks - first) * size), size).transpose(1, 2)
        hidden, tokens = ~alive[:, first:, None], [x[:, :, first:] for x in tokens]
        if causal:
            hidden = hidden | hidden.new_ones(size, size).triu(1)
    silent = block >= place[..., None] if causal and n > 1 else block == place[..., None]
    mask = _mask(hidden, silent, alive, query.dtype if dropout or query.is_cuda else accumulate(query.dtype))
    own = [x.transpose(1, 2) for x in tokens]  # (B, Q, G, C, D)
    keys, values = (
        torch.cat([x, far.expand(-1, x.shape[1], -1, -1, -1)], 3) for x, far in zip(own, relays, strict=True)
    )
    if squash is None:
        out = batched(rows, keys, values, mask, scaling, dropout)
    else:
        squash = squash.each(lambda x: x.expand(*query.shape[:3], 1))
        if n == 1:
            squash = squash.each(lambda x: x[:, None])
        else:
            squash = squash.each(lambda x: grouped(laid(x, begin, (blocks - first) * size), size).transpose(1, 2))
        out = _squashed(rows, keys, values, mask, squash, scaling, dropout)
    out = ungrouped(out.transpose(1, 2))
    out = laid(out, -begin, n) if n > 1 else out
    return out if visible.keys is None else torch.where(visible.counts() > 0, out, 0)


def _blocks(visible: Visible, rows: list[Tensor], start: Start, count: int, size: int) -> tuple[Tensor, list[Tensor]]:
    """Blocks from a slot on: which tokens exist, (B or 1, P, C), and rows (B, G, P, C, D), zero where none does."""
    alive = grouped(existing(visible, start, count * size)[:, None, :, None], size)[:, 0, ..., 0]
    cut = [grouped(laid(x, start, count * size), size) for x in rows]
    if visible.keys is not None:
        cut = [torch.where(alive[:, None, :, :, None], x, 0) for x in cut]
    return alive, cut


def _mask(hidden: Tensor, silent: Tensor, alive: Tensor, dtype: torch.dtype) -> Tensor:
    """Added to scores, (B or 1, Q, R or 1, C + P): 0 for a token, log count for a relay.

    What is hidden gets a finite score so low that its weight is exactly 0; rows that see nothing come out finite.
    """
    lowest, counts = torch.finfo(dtype).min / 2, alive.sum(-1)
    logs = counts.clamp_min(1).to(dtype).log()[:, None].masked_fill(silent | (counts == 0)[:, None], lowest)
    near = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, lowest)
    batch, rows = max(near.shape[0], logs.shape[0]), near.shape[2]
    return torch.cat([near.expand(batch, -1, -1, -1), logs[:, :, None].expand(batch, -1, rows, -1)], -1)


def _squashed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, squash: Squash, scaling: float, dropout: float
) -> Tensor:
    """Attention of blocks with bounded scores; holds their N (C + P) scores. The rows of `squash` are (B, Q, H, R, 1)."""
    wide, groups, mask = accumulate(query.dtype), key.shape[2], mask[:, :, None, None]
    centre, width, amplitude = (x.unflatten(2, (groups, -1)) for x in (squash.centre, squash.width, squash.amplitude))
    # What is no query has a width of 0; a head without a bound has an infinite one.
    width = width.clamp(1 / STRAIGHT, STRAIGHT)
    scores = query.to(wide).unflatten(2, (groups, -1)) @ key.to(wide).mT[:, :, :, None] * scaling - centre
    if squash.rescale:
        peak = scores.abs().masked_fill(mask < torch.finfo(mask.dtype).min / 4, 0).amax(-1, keepdim=True)
        scores = scores * torch.where(peak > width, width / torch.where(peak > width, peak, 1), 1)
    else:
        scores = amplitude.clamp(max=STRAIGHT) * torch.tanh(scores / width)
    weights = torch.dropout(torch.softmax(scores + mask, -1), dropout, True)
    return (weights.to(value.dtype) @ value[:, :, :, None]).flatten(2, 3)
