"""Softmax attention with transformed scores and a clamp floor, in tiles of query rows that are recomputed in backward.

    x_ij = scaling * q_i . k_j + bias_ij - centre_i         centre: given, none, or the row's lower median
    z_ij = amplitude_i * tanh(x_ij / width_i)               or g_i * x_ij, g_i = min(1, width_i / max_j |x_ij|), or x_ij
    w_ij = softmax of z_ij over the visible keys
    p_ij = max(a_i * w_ij, floor_i)                         a_i such that the row sums to one; w_ij without a floor

Neither pass holds more than a few tiles, so peak memory is linear in the number of queries and keys.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D head width. In one tile: b, h, n, m are its
parts of B, H, N, M, and "stacked" is (pairs, rows, ...), where a pair is a batch entry with a key head, and its rows
are the n queries of each of the H // G query heads that share the key head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hf_fullpay.core.visible import Visible

TILE_ELEMENTS = 1 << 18  # scores in one tile: 1 MiB in fp32, about a core's second-level cache
MIN_ROWS = 32  # with fewer rows the matrix products are slow, however many keys there are
SIGMOID_AMPLITUDE = 8.0  # largest amplitude at which tanh may be taken from a sigmoid, see _Pass.__post_init__

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? centre, Tensor? width, Tensor? amplitude, "
    "Tensor? floor, Tensor? seed, Tensor? keys, Tensor? dense, SymInt? offset, SymInt? window, float scaling, "
    "float dropout, bool median, bool rescale"
)
_DIFFERENTIABLE = ("query", "key", "value", "bias", "centre", "width", "amplitude", "floor")


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Visible,
    scaling: float,
    bias: Tensor | None = None,
    centre: Tensor | None = None,
    median: bool = False,
    width: Tensor | None = None,
    amplitude: Tensor | None = None,
    rescale: bool = False,
    floor: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of the module's formulas. Rows that see no key give zeros; the second derivative is not available.

    Args:
        query: (B, H, N, D).
        key: (B, G, M, D), G dividing H; query head h uses key head h // (H // G).
        value: (B, G, M, Dv).
        visible: the keys that each query sees.
        scaling: factor of q . k.
        bias: added to the scores, broadcastable to (B, H, N, M).
        centre: (B, H, N) or (B, H, N, 1), subtracted from the scores.
        median: subtract the lower median of the row's visible scores instead.
        width: of the tanh, or the largest |x| with `rescale`; broadcastable to (B, H, N, 1), may be infinite.
        amplitude: of the tanh, broadcastable to (B, H, N, 1); goes with `width`.
        rescale: shrink rows whose largest |x| exceeds `width` instead of the tanh.
        floor: smallest payment to a visible key, broadcastable to (B, H, N, 1), at most 1 / (number of visible keys).
        dropout: probability of dropping a weight, or with a floor the part of a weight that exceeds the floor.

    Returns:
        (B, H, N, Dv) in the dtype of `query`.
    """
    if median and centre is not None:
        raise ValueError("centre: expected None with median=True, got a tensor.")
    if rescale and width is None:
        raise ValueError("width: expected a tensor with rescale=True, got None.")
    if not rescale and (width is None) != (amplitude is None):
        raise ValueError("width, amplitude: expected both or neither, got one of them.")
    work = torch.promote_types(query.dtype, torch.float32)
    if centre is not None and centre.dim() == 3:
        centre = centre.unsqueeze(-1)
    amplitude = None if rescale else amplitude
    rows = [row if row is None else _four(row).to(work) for row in (centre, width, amplitude, floor)]
    seed = torch.randint(2**62, ()) if dropout > 0 else None
    out, _, _ = torch.ops.hf_fullpay.tiles_forward(
        query, key, value, bias if bias is None else _four(bias), *rows, seed, visible.keys, visible.dense,
        visible.offset, visible.window, scaling, dropout, median, rescale,
    )  # fmt: skip
    return out


def _four(tensor: Tensor) -> Tensor:
    """Leading dimensions of one, up to four dimensions."""
    return tensor[(None,) * (4 - tensor.dim())]


def _part(tensor: Tensor, *at: slice) -> Tensor:
    """A tile's part of a tensor that may be broadcast."""
    return tensor[tuple(slice(None) if size == 1 else one for size, one in zip(tensor.shape, at, strict=False))]


@dataclass(frozen=True, eq=False)
class _Block:
    """The pairs that are worked on together, with all their keys, and all queries."""

    batch: slice  # of B
    groups: slice  # of G
    heads: slice  # of H
    key: Tensor  # (pairs, D, M); width first, as the matrix products are fastest that way
    value: Tensor  # (pairs, Dv, M)
    visible: Visible  # of these batch entries and heads


@dataclass(frozen=True, eq=False)
class _Tile:
    """A block's n queries and the m keys among which are all that they see."""

    at: tuple[slice, slice, slice]  # of B, H, N
    shape: tuple[int, int, int, int]  # b, h, n, m
    columns: slice  # of M
    key: Tensor  # (pairs, D, m)
    value: Tensor  # (pairs, Dv, m)
    limits: list[tuple[slice, Tensor]]  # columns of the tile, and +inf at their visible and -inf at their hidden pairs
    seen: Tensor  # number of visible keys, (b|1, h|1, n|1, 1)
    blind: Tensor | None  # rows that see no key; None when there are none

    def part(self, tensor: Tensor) -> Tensor:
        """The tile's part of a tensor that broadcasts to (B, H, N, M or 1)."""
        return _part(tensor, *self.at, self.columns)

    def stack(self, tensor: Tensor) -> Tensor:
        """(b, h, n, x) to (pairs, rows, x)."""
        return tensor.reshape(self.key.shape[0], -1, tensor.shape[-1])

    def unstack(self, tensor: Tensor) -> Tensor:
        """(pairs, rows, x) to (b, h, n, x)."""
        return tensor.reshape(*self.shape[:3], tensor.shape[-1])

    def hide(self, scores: Tensor, to: float) -> Tensor:
        """Set hidden pairs to -inf, to +inf, or to 0 where none is negative, in place."""
        for columns, limit in self.limits:
            part = scores[..., columns]
            if to > 0:
                torch.maximum(part, -limit, out=part)
            else:
                torch.minimum(part, limit.clamp(min=to), out=part)
        return scores


class _Pass:
    """One forward or backward pass; takes the operators' arguments."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, centre: Tensor | None,
        width: Tensor | None, amplitude: Tensor | None, floor: Tensor | None, seed: Tensor | None,
        keys: Tensor | None, dense: Tensor | None, offset: int | None, window: int | None, scaling: float,
        dropout: float, median: bool, rescale: bool, needs: Sequence[bool] = (False,) * len(_DIFFERENTIABLE),
    ) -> None:  # fmt: skip
        self.query, self.key, self.value, self.bias, self.centre = query, key, value, bias, centre
        self.width, self.amplitude, self.floor = width, amplitude, floor
        self.visible = Visible(query.shape[2], key.shape[2], query.device, keys, dense, offset, window)
        self.scaling, self.dropout, self.median, self.rescale = scaling, dropout, median, rescale
        self.needs = dict(zip(_DIFFERENTIABLE, needs, strict=True))
        self.backwards = any(needs)
        self.work = torch.promote_types(query.dtype, torch.float32)
        # From here on y = rate * (scores - centre), and z = gain * squash(y).
        self.rate = self.gain = torch.ones(1, 1, 1, 1, dtype=self.work, device=query.device)
        self.straight: Tensor | None = None  # rows of infinite width, whose scores stay as they are
        self.stretch = 1.0
        if width is not None and amplitude is not None:
            infinite = width.isinf()
            if infinite.any():
                self.straight = infinite
                width, amplitude = width.masked_fill(infinite, 1.0), torch.where(infinite, 1.0, amplitude)
            elif (amplitude.abs() <= SIGMOID_AMPLITUDE).all():
                self.stretch = 2.0
            self.rate, self.gain = self.stretch / width, self.stretch * amplitude
        # Both passes visit the tiles in the same order, hence draw the same numbers.
        self.generator = None if seed is None else torch.Generator(query.device).manual_seed(int(seed))

    def blocks(self) -> Iterator[_Block]:
        """As many pairs at a time as fill a tile; always one batch entry, or all key heads of several."""
        batch, groups = self.key.shape[:2]
        rows, columns = self.tile_size()
        share = self.query.shape[1] // max(groups, 1)
        pairs = max(TILE_ELEMENTS // max(share * rows * columns, 1), 1)
        batches, pairs = max(pairs // max(groups, 1), 1), min(pairs, groups)
        for b in range(0, batch, batches):
            for g in range(0, groups, pairs):
                at = slice(b, min(b + batches, batch)), slice(g, min(g + pairs, groups))
                heads = slice(at[1].start * share, at[1].stop * share)
                key, value, keys, dense = self.key[at], self.value[at], self.visible.keys, self.visible.dense
                if keys is not None:
                    # Whatever padding slots hold, even an infinity, must not reach a product.
                    keys = _part(keys, at[0])
                    key, value = (x.masked_fill(~keys[:, None, :, None], 0.0) for x in (key, value))
                dense = None if dense is None else _part(dense, at[0], heads)
                yield _Block(
                    *at, heads, *(x.flatten(0, 1).transpose(1, 2).contiguous() for x in (key, value)),
                    replace(self.visible, keys=keys, dense=dense),
                )  # fmt: skip

    def tile_size(self) -> tuple[int, int]:
        """Queries of a head, and about how many keys, in one tile."""
        queries, keys, window = self.visible.n_queries, self.visible.n_keys, self.visible.window
        span = keys if window is None else min(window, keys)
        rows = max(TILE_ELEMENTS * self.key.shape[1] // max(self.query.shape[1] * span, 1), MIN_ROWS)
        if window is not None:
            rows = min(rows, max(window, MIN_ROWS))  # more rows would see mostly hidden keys
            span = min(window + rows, keys)
        rows = min(rows, max(queries, 1))
        return -(-queries // -(-queries // rows)) if queries else 1, span

    def tiles(self, block: _Block) -> Iterator[_Tile]:
        """The tiles of a block that see any key."""
        visible, step = block.visible, self.tile_size()[0]
        for start in range(0, visible.n_queries, step):
            stop = min(start + step, visible.n_queries)
            low, high = visible.columns(start, stop)
            if low == high:
                continue
            # Masks are slow: cut the columns so that the diagonals of causality and band get narrow masks of their own.
            cuts = {low, high}
            if visible.offset is not None:
                edges = [start + visible.offset + 1]
                edges += [] if visible.window is None else [stop + visible.offset - visible.window]
                cuts |= {min(max(edge, low), high) for edge in edges}
            limits, seen = [], torch.zeros(1, 1, 1, 1, dtype=self.work, device=self.query.device)
            for left, right in pairwise(sorted(cuts)):
                mask = visible.tile(start, stop, left, right)
                if mask is None:
                    seen = seen + (right - left)
                    continue
                seen = seen + mask.sum(-1, keepdim=True)
                limit = torch.full(mask.shape, -math.inf, dtype=self.work, device=mask.device)
                limits.append((slice(left - low, right - low), limit.masked_fill_(mask, math.inf)))
            blind = seen == 0
            columns = slice(low, high)
            at = block.batch, block.heads, slice(start, stop)
            yield _Tile(
                at, (*self.query[at].shape[:3], high - low), columns, block.key[..., columns],
                block.value[..., columns], limits, seen, blind if blind.any() else None,
            )  # fmt: skip

    def scores(self, tile: _Tile, found: Tensor) -> Tensor:
        """Scores before the squash, (b, h, n, m); a median that is looked for is written to `found`."""
        query, rate = self.query[tile.at], tile.part(self.rate)
        shift = None if self.centre is None else tile.part(self.centre) * rate
        if self.median and self.backwards:
            shift = found[tile.at]
        if query.dtype == self.work:
            rows = tile.stack(query * (self.scaling * rate))
            if shift is None:
                y = torch.bmm(rows, tile.key)
            else:
                y = torch.baddbmm(tile.stack(-shift.expand(*tile.shape[:3], 1)), rows, tile.key)
            y = y.view(tile.shape)
        else:
            # Scaled and centred after the product, as factors would be rounded to the low precision.
            y = torch.bmm(tile.stack(query), tile.key).view(tile.shape) * (self.scaling * rate)
            y = y if shift is None else y.sub_(shift)
        if self.bias is not None:
            y.addcmul_(tile.part(self.bias).to(self.work), rate)
        if self.median and not self.backwards:
            found[tile.at] = _lower_median(y, tile)
            y.sub_(found[tile.at])
        return y

    def weights(self, tile: _Tile, found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores y (in backward, and only where their use is foreseen), squashed scores, and softmax weights."""
        y = squashed = self.scores(tile, found)
        if self.rescale and self.width is not None:
            peak = tile.hide(y.abs(), 0.0).amax(-1, keepdim=True)
            z = y * (tile.part(self.width) / peak).clamp(max=1.0)
        elif self.amplitude is not None:
            squash = torch.tanh if self.stretch == 1.0 else torch.sigmoid
            overwrite = self.straight is None and not self.needs["width"] and not (self.median and self.backwards)
            squashed = squash(y, out=y if overwrite else None)
            z = torch.mul(squashed, tile.part(self.gain), out=None if self.backwards else squashed)
            if self.straight is not None:
                z = torch.where(tile.part(self.straight), y, z)
        else:
            z = y
        weights = torch.softmax(tile.hide(z, -math.inf), -1)
        if tile.blind is not None:
            weights.masked_fill_(tile.blind, 0.0)
        return y, squashed, weights

    def draw(self, like: Tensor) -> Tensor | None:
        """Factors of the dropout: 0, or 1 / (1 - dropout)."""
        if self.generator is None:
            return None
        keep = 1.0 - self.dropout
        return torch.empty_like(like).bernoulli_(keep, generator=self.generator).div_(keep)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, medians in units of y, and the factors a of the clamp; the latter two empty where not used."""
        out, found, solved = _outputs(self.query, self.value, self.median, self.floor, torch.zeros)
        for block in self.blocks():
            for tile in self.tiles(block):
                paid = self.weights(tile, found)[2]
                if self.floor is None:
                    factors = self.draw(paid)
                    paid = paid if factors is None else paid.mul_(factors)
                else:
                    floor = tile.part(self.floor)
                    solved[tile.at] = scale = _solve(paid, floor, tile.seen)
                    above, _ = _above(paid, floor, scale)
                    paid = _pay(above, floor, self.draw(above), tile)
                product = torch.bmm(tile.value, tile.stack(paid.to(out.dtype)).transpose(1, 2))
                out[tile.at] = tile.unstack(product.transpose(1, 2))
        return out, found, solved

    def backward(self, grad: Tensor, found: Tensor, solved: Tensor) -> list[Tensor]:
        """Gradients of the differentiable inputs; empty ones where not needed."""
        grads = self.gradients()
        for block in self.blocks():
            d_key, d_value = (torch.zeros(x.shape, dtype=self.work, device=x.device) for x in (block.key, block.value))
            for tile in self.tiles(block):
                self.backward_tile(tile, grad, found, solved, grads, d_key, d_value)
            for name, total in (("key", d_key), ("value", d_value)):
                if self.needs[name]:
                    target = grads[name][block.batch, block.groups]
                    target.copy_(total.transpose(1, 2).view(target.shape))
        return grads

    def gradients(self) -> dict[str, Tensor]:
        """Zeros for every differentiable input, those of row tensors still in full length."""
        return {
            name: torch.zeros(*self.query.shape[:3], 1, dtype=self.work, device=self.query.device)
            if needed and name in _ROWS
            else torch.zeros_like(getattr(self, name), dtype=self.work if name == "bias" else None)
            if needed
            else self.query.new_empty(0)
            for name, needed in self.needs.items()
        }

    def backward_tile(
        self, tile: _Tile, grad: Tensor, saved: tuple[Tensor, Tensor], grads: dict[str, Tensor], totals: dict[str, Tensor]
    ) -> None:
        """Add one tile's part to the gradients; those of keys and values to `totals`, (pairs, D or Dv, M)."""
        found, solved = saved
        y, squashed, weights = self.weights(tile, found)
        d_out = tile.stack(grad[tile.at])
        d_paid = torch.bmm(d_out, tile.value).view(tile.shape).to(self.work)
        if self.floor is None:
            factors = self.draw(weights)
            paid = weights if factors is None else weights * factors
            d_paid = d_paid if factors is None else d_paid.mul_(factors)
            d_z = torch._softmax_backward_data(d_paid, weights, -1, self.work)
        else:
            floor, scale = tile.part(self.floor), solved[tile.at]
            above, kept = _above(weights, floor, scale)
            factors = self.draw(above)
            paid = _pay(above, floor, factors, tile)
            clamped = tile.seen - kept
            rest = 1.0 - floor * clamped

