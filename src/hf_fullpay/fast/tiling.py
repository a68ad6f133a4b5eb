"""How queries and keys are cut into tiles of scores that stay in a core's cache.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D head width; b, h, n, m are a tile's part of
B, H, N, M. In matrix products a tile is (pairs, rows, m): a pair is a batch entry and a key head, and its rows are the
n queries of each of the H // G query heads that share the key head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from hf_fullpay.core.numbers import accumulate
from hf_fullpay.core.visible import Visible

TILE_ELEMENTS = 1 << 18  # scores in a tile: 1 MiB in fp32, about the second-level cache of a core
MIN_ROWS = 32  # fewer rows make slow matrix products, however many keys there are
MAX_WIDTHS = 8  # of causal tiles in low precision, where oneDNN keeps half a megabyte for each shape of a product


def part_of(tensor: Tensor, *at: slice) -> Tensor:
    """Part of a tensor whose dimensions of one are broadcast."""
    return tensor[tuple(slice(None) if size == 1 else one for size, one in zip(tensor.shape, at, strict=False))]


@dataclass(frozen=True, eq=False)
class Block:
    """Pairs that are worked on together, with all their queries and keys."""

    batch: slice  # of B
    groups: slice  # of G
    heads: slice  # of H
    key: Tensor  # (pairs, D, M); the products are fastest with the width first
    value: Tensor  # (pairs, Dv, M)
    visible: Visible


@dataclass(frozen=True, eq=False)
class Strip:
    """n rows of queries, m keys among which are all that they see, and which these are."""

    rows: slice  # of N
    columns: slice  # of M
    limits: list[tuple[slice, Tensor]]  # some of the m columns, and +inf at their visible, -inf at their hidden pairs
    seen: Tensor  # number of visible keys, (b|1, h|1, n|1, 1)
    blind: Tensor | None  # queries that see no key, None if there are none


@dataclass(frozen=True, eq=False)
class Tile:
    """A strip of a block."""

    at: tuple[slice, slice, slice]  # of B, H, N
    shape: tuple[int, int, int, int]  # b, h, n, m
    strip: Strip
    key: Tensor  # (pairs, D, m)
    value: Tensor  # (pairs, Dv, m)

    def part(self, tensor: Tensor) -> Tensor:
        """The tile's part of a tensor that broadcasts to (B, H, N, M or 1)."""
        return part_of(tensor, *self.at, self.strip.columns)

    def stack(self, tensor: Tensor) -> Tensor:
        """(b, h, n, x) to (pairs, rows, x)."""
        return tensor.reshape(self.key.shape[0], -1, tensor.shape[-1])

    def combine(self, left: Tensor, rows: Tensor) -> Tensor:
        """Product of (pairs, rows, m) with the transposed (pairs, x, m), as (b, h, n, x)."""
        return torch.bmm(left, rows.transpose(1, 2)).transpose(1, 2).reshape(*self.shape[:3], -1)

    def hide(self, scores: Tensor, to: float) -> Tensor:
        """Set hidden pairs, in place, to -inf, to +inf, or to 0 where no score is negative."""
        for columns, limit in self.strip.limits:
            part = scores[..., columns]
            if to > 0:
                torch.maximum(part, -limit, out=part)
            else:
                torch.minimum(part, limit if to == -math.inf else limit.clamp(min=to), out=part)
        return scores


class Tiling:
    """Walks through the tiles of a call, always in the same order.

    Args:
        query: (B, H, N, D).
        key: (B, G, M, D).
        value: (B, G, M, Dv).
        visible: the keys that each query sees.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> None:
        self.query, self.key, self.value, self.visible = query, key, value, visible
        self.dtype, self.work = query.dtype, accumulate(query.dtype)
        self._common: list[Strip] | None = None

    def blocks(self) -> Iterator[Block]:
        """As many pairs at a time as fill a tile: key heads of one batch entry, or all of several entries."""
        batch, groups = self.key.shape[:2]
        rows, columns = self.tile_size()
        share = self.query.shape[1] // groups
        pairs = max(TILE_ELEMENTS // max(share * rows * columns, 1), 1)
        batches, pairs = max(pairs // groups, 1), min(pairs, groups)
        for b in range(0, batch, batches):
            for g in range(0, groups, pairs):
                at = slice(b, min(b + batches, batch)), slice(g, min(g + pairs, groups))
                heads = slice(at[1].start * share, at[1].stop * share)
                key, value, keys, dense = self.key[at], self.value[at], self.visible.keys, self.visible.dense
                if keys is not None:
                    # Whatever is in padding, even infinity, must not enter a product.
                    keys = part_of(keys, at[0])
                    key, value = (x.masked_fill(~keys[:, None, :, None], 0.0) for x in (key, value))
                dense = None if dense is None else part_of(dense, at[0], heads)
                key, value = (x.flatten(0, 1).transpose(1, 2).contiguous() for x in (key, value))
                yield Block(*at, heads, key, value, replace(self.visible, keys=keys, dense=dense))

    def tile_size(self) -> tuple[int, int]:
        """Queries of a head in a tile, and about how many keys these see."""
        queries, keys, window = self.visible.n_queries, self.visible.n_keys, self.visible.window
        share = self.query.shape[1] // self.key.shape[1]
        rows = max(TILE_ELEMENTS // max(share * min(keys, window or keys), 1), MIN_ROWS)
        if window is not None:
            rows = min(rows, max(window, MIN_ROWS))  # in a band, more rows bring mostly hidden pairs
            keys = min(keys, window + rows)
        tiles = max(math.ceil(queries / rows), 1)
        return max(math.ceil(queries / tiles), 1), keys

    def tiles(self, block: Block) -> Iterator[Tile]:
        """The tiles of a block in which any key is seen."""
        for strip in self.strips(block.visible):
            at, columns = (block.batch, block.heads, strip.rows), strip.columns
            shape = (*self.query[at].shape[:3], columns.stop - columns.start)
            yield Tile(at, shape, strip, block.key[..., columns], block.value[..., columns])

    def strips(self, visible: Visible) -> list[Strip]:
        """The strips of a block in which any key is seen."""
        if visible.keys is not None or visible.dense is not None:
            return list(self._strips(visible))
        if self._common is None:  # all blocks see the same
            self._common = list(self._strips(visible))
        return self._common

    def _strips(self, visible: Visible) -> Iterator[Strip]:
        rows = self.tile_size()[0]
        for start in range(0, visible.n_queries, rows):
            stop = min(start + rows, visible.n_queries)
            low, high = visible.columns(start, stop)
            if low == high:
                continue
            if visible.offset is not None and visible.window is None and self.dtype != self.work:
                grain = math.ceil(visible.n_keys / MAX_WIDTHS)
                high = min(math.ceil(high / grain) * grain, visible.n_keys)
            # Masks are slow: cut the columns such that only those at the edges of a triangle or band get one.
            cuts = {low, high}
            if visible.offset is not None:
                edges = [start + visible.offset + 1]
                if visible.window is not None:
                    edges.append(stop + visible.offset - visible.window)
                cuts |= {min(max(edge, low), high) for edge in edges}
            limits, seen = [], torch.zeros(1, 1, 1, 1, dtype=self.work, device=self.query.device)
            for left, right in pairwise(sorted(cuts)):
                mask = visible.tile(start, stop, left, right)
                if mask is None:
                    seen = seen + (right - left)
                else:
                    seen = seen + mask.sum(-1, keepdim=True)
                    limit = torch.full(mask.shape, -math.inf, dtype=self.work, device=mask.device)
                    limits.append((slice(left - low, right - low), limit.masked_fill_(mask, math.inf)))
            blind = seen == 0
            yield Strip(slice(start, stop), slice(low, high), limits, seen, blind if limits and blind.any() else None)


def lower_median(y: Tensor, tile: Tile) -> Tensor:
    """Lower median of the visible scores of each row, 0 in rows without any."""
    # Hidden scores count as +inf. So that one order statistic serves all rows, although their medians have different
    # ranks, rows get as many scores of -inf as their rank lacks.
    rank = (tile.strip.seen.clamp(min=1.0) - 1.0).div(2.0, rounding_mode="floor")
    last = int(rank.max())
    lacking = last - rank
    y = tile.hide(y.clone(), math.inf)
    if lacking.any():
        places = torch.arange(int(lacking.max()), device=y.device)
        front = torch.where(places < lacking, -math.inf, math.inf).to(y.dtype)
        y = torch.cat([front.expand(*y.shape[:3], -1), y], -1)
    if y.device.type == "cpu" and y.dtype == torch.float32:
        ordered = y.numpy()
        ordered.partition(last, axis=-1)  # in place, as y is a copy
        median = torch.from_numpy(ordered[..., last, None])
    else:
        median = y.kthvalue(last + 1, -1, keepdim=True).values
    return median if tile.strip.blind is None else median.masked_fill(tile.strip.blind, 0.0)
