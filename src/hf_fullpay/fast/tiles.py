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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_fullpay.core.visible import Visible

TILE_ELEMENTS = 1 << 18  # scores in one tile: 1 MiB in fp32, about a core's second-level cache
MIN_ROWS = 32  # with fewer rows the matrix products are slow, however many keys there are
SIGMOID_AMPLITUDE = 8.0  # largest amplitude at which tanh may be taken from a sigmoid, see _Pass.__post_init__

_INPUTS = {  # of the operators, with their types; the first eight are differentiable, three of them rows (B, H, N, 1)
    "query": "Tensor",
    "key": "Tensor",
    "value": "Tensor",
    "bias": "Tensor?",
    "centre": "Tensor?",
    "width": "Tensor?",
    "amplitude": "Tensor?",
    "floor": "Tensor?",
    "seed": "Tensor?",
    "keys": "Tensor?",
    "dense": "Tensor?",
    "offset": "SymInt?",
    "window": "SymInt?",
    "scaling": "float",
    "dropout": "float",
    "median": "bool",
    "rescale": "bool",
}
_DIFFERENTIABLE = tuple(_INPUTS)[:8]
_ROWS = _DIFFERENTIABLE[4:]
_TENSORS = 11  # how many inputs are tensors


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
    """One forward or backward pass."""

    def __init__(self, inputs: Sequence[Any], needs: Sequence[bool] = (False,) * len(_DIFFERENTIABLE)) -> None:
        self.inputs = dict(zip(_INPUTS, inputs, strict=True))
        self.query, self.key, self.value, self.bias, self.centre, width, amplitude, self.floor, seed, *rest = inputs
        keys, dense, offset, window, self.scaling, self.dropout, self.median, self.rescale = rest
        query, self.width, self.amplitude = self.query, width, amplitude
        self.visible = Visible(query.shape[2], self.key.shape[2], query.device, keys, dense, offset, window)
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

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Batched matrix product, widened."""
        product = torch.bmm(left, right)
        if product.dtype == torch.float16:
            product.clamp_(-65504.0, 65504.0)  # an infinity at a hidden pair would become NaN when multiplied by zero
        return product.to(self.work)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add a batched matrix product to `total`."""
        if total.dtype == left.dtype:
            total.baddbmm_(left, right)
        else:
            total.add_(torch.bmm(left, right))

    def draw(self, like: Tensor) -> Tensor | None:
        """Factors of the dropout, 0 or 1 / (1 - dropout); None without dropout."""
        if self.generator is None:
            return None
        keep = 1.0 - self.dropout
        return torch.empty_like(like).bernoulli_(keep, generator=self.generator).div_(keep)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, medians in units of y, and the clamp's factors a; the latter two empty where not used."""
        out, found, solved = _outputs(self.query, self.value, self.median, self.floor)
        for block in self.blocks():
            for tile in self.tiles(block):
                weights = self.weights(tile, found)[2]
                if self.floor is None:
                    factors = self.draw(weights)
                    paid = weights if factors is None else weights.mul_(factors)
                else:
                    floor = tile.part(self.floor)
                    solved[tile.at], above = _solve(weights, floor, tile.seen)
                    paid = _pay(above, floor, self.draw(above), tile)
                rows = torch.bmm(tile.value, tile.stack(paid.to(out.dtype)).transpose(1, 2))
                out[tile.at] = tile.unstack(rows.transpose(1, 2))
        return out, found, solved

    def backward(self, d_out: Tensor, found: Tensor, solved: Tensor) -> list[Tensor]:
        """Gradients of the differentiable inputs; empty ones where not needed."""
        grads = {name: self.zeros(name) for name in _DIFFERENTIABLE}
        for block in self.blocks():
            totals = {"key": torch.zeros_like(block.key, dtype=self.work)}
            totals["value"] = torch.zeros_like(block.value, dtype=self.work)
            for tile in self.tiles(block):
                d_y, slope = self.score_gradient(tile, d_out, found, solved, grads, totals["value"])
                self.spread(tile, d_y, slope, grads, totals["key"])
            for name, total in totals.items():
                if self.needs[name]:
                    part = grads[name][block.batch, block.groups]
                    part.copy_(total.transpose(1, 2).view(part.shape))
        for name in _ROWS:
            if self.needs[name]:
                grads[name] = grads[name].sum_to_size(self.inputs[name].shape)
        if self.needs["bias"]:
            grads["bias"] = grads["bias"].to(self.inputs["bias"].dtype)
        return list(grads.values())

    def zeros(self, name: str) -> Tensor:
        """Where a gradient is gathered: row tensors in full length."""
        if not self.needs[name]:
            return self.query.new_empty(0)
        if name in _ROWS:
            return self.query.new_zeros((*self.query.shape[:3], 1), dtype=self.work)
        return torch.zeros_like(self.inputs[name], dtype=self.work if name == "bias" else None)

    def score_gradient(
        self, tile: _Tile, d_out: Tensor, found: Tensor, solved: Tensor, grads: dict[str, Tensor], d_value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradient of the tile's scores as a pair (d, slope) of factors; the gradients of values and rows on the way."""
        y, squashed, weights = self.weights(tile, found)
        d_rows = tile.stack(d_out[tile.at])
        d_paid = self.product(d_rows, tile.value).view(tile.shape)
        factors = self.draw(weights)
        if self.floor is None:
            paid = weights if factors is None else weights * factors
            d_paid = d_paid if factors is None else d_paid.mul_(factors)
            d_z = torch._softmax_backward_data(d_paid, weights, -1, self.work)
        else:
            floor = tile.part(self.floor)
            above, kept = _above(weights, floor, solved[tile.at])
            paid = _pay(above, floor, factors, tile)
            d_above = d_paid if factors is None else d_paid * factors
            clamped = tile.seen - kept
            rest = 1.0 - floor * clamped
            mean = torch.where(rest > 0, (d_above * above).sum(-1, keepdim=True) / rest, 0.0)
            if self.needs["floor"]:
                d_kept = (d_above * (above > 0)).sum(-1, keepdim=True)
                for columns, limit in tile.limits:
                    d_paid[..., columns].masked_fill_(limit < 0, 0.0)
                grads["floor"][tile.at] = d_paid.sum(-1, keepdim=True) - d_kept - clamped * mean
            d_z = d_above.sub_(mean).mul_(above)
        if self.needs["value"]:
            rows = tile.stack(paid.to(d_out.dtype))
            self.add_product(d_value[..., tile.columns], d_rows.transpose(1, 2), rows)

        rate, gain = tile.part(self.rate), tile.part(self.gain)
        if self.rescale:
            d_y = self.rescale_gradient(tile, y, d_z, grads)
        elif self.amplitude is not None:
            d_y = (torch.ops.aten.tanh_backward if self.stretch == 1.0 else torch.ops.aten.sigmoid_backward)(d_z, squashed)
            if self.straight is not None:
                d_y = torch.where(tile.part(self.straight), d_z, d_y)
            if self.needs["width"]:
                grads["width"][tile.at] = (d_y * y).sum(-1, keepdim=True) * (-gain / tile.part(self.width))
            if self.needs["amplitude"]:
                d_amplitude = (d_z * squashed).sum(-1, keepdim=True) * self.stretch
                if self.straight is not None:
                    d_amplitude.masked_fill_(tile.part(self.straight), 0.0)
                grads["amplitude"][tile.at] = d_amplitude
        else:
            d_y = d_z
        if self.median:
            chosen = tile.hide(y.abs(), math.inf).argmin(-1, keepdim=True)
            d_y.scatter_add_(-1, chosen, -d_y.sum(-1, keepdim=True))
        return d_y, rate * gain

    def rescale_gradient(self, tile: _Tile, y: Tensor, d_z: Tensor, grads: dict[str, Tensor]) -> Tensor:
        """Gradient of the scores through z = min(1, width / max |y|) * y."""
        width = tile.part(self.inputs["width"])
        peak, place = tile.hide(y.abs(), 0.0).max(-1, keepdim=True)
        peak.clamp_(min=torch.finfo(self.work).tiny)
        shrink = (width / peak).clamp(max=1.0)
        pull = (d_z * y).sum(-1, keepdim=True).mul_(width < peak) / peak
        if self.needs["width"]:
            grads["width"][tile.at] = pull
        return (d_z * shrink).scatter_add_(-1, place, -pull * shrink * y.gather(-1, place).sign())

    def spread(self, tile: _Tile, d_y: Tensor, slope: Tensor, grads: dict[str, Tensor], d_key: Tensor) -> None:
        """From the gradient slope * d_y of a tile's scores to those of centre, bias, queries and keys."""
        if self.needs["centre"]:
            grads["centre"][tile.at] = -slope * d_y.sum(-1, keepdim=True)
        if self.needs["bias"]:
            part = tile.part(grads["bias"])
            part.add_((d_y * slope).sum_to_size(part.shape))
        query = self.query[tile.at]
        rows, factor = tile.stack(d_y.to(query.dtype)), self.scaling * slope
        if self.needs["query"]:
            product = torch.bmm(tile.key, rows.transpose(1, 2))
            grads["query"][tile.at] = tile.unstack(product.transpose(1, 2)) * factor
        if self.needs["key"]:
            scaled = tile.stack((query * factor).to(query.dtype))
            self.add_product(d_key[..., tile.columns], scaled.transpose(1, 2), rows)


def _lower_median(y: Tensor, tile: _Tile) -> Tensor:
    """Lower median of every row's visible scores, 0 in rows without any."""
    # Hidden scores become +inf. Rows then differ in the rank of their median: in front of the shorter rows as many
    # -inf are put as make up for it, so that one order statistic serves all rows.
    rank = (tile.seen.clamp(min=1.0) - 1.0).div(2.0, rounding_mode="floor")
    last = int(rank.max())
    low = last - rank
    y = tile.hide(y.clone(), math.inf)
    most = int(low.max())
    if most:
        front = torch.where(torch.arange(most, device=y.device) < low, -math.inf, math.inf).to(y.dtype)
        y = torch.cat([front.expand(*y.shape[:3], most), y], -1)
    if y.device.type == "cpu" and y.dtype == torch.float32:
        median = torch.from_numpy(np.partition(y.numpy(), last, axis=-1)[..., last, None])
    else:
        median = y.kthvalue(last + 1, -1, keepdim=True).values
    return median if tile.blind is None else median.masked_fill(tile.blind, 0.0)


def _above(weights: Tensor, floor: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled weights where they exceed the floor, else 0; and their number in each row."""
    above = torch.gt(weights, floor / scale, out=torch.empty_like(weights))
    kept = above.sum(-1, keepdim=True)
    return above.mul_(weights).mul_(scale), kept


def _solve(weights: Tensor, floor: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The factor a with sum_j max(a * weights_j, floor) = 1, and what _above gives for it."""
    # Starting from a = 1, the set of clamped weights only grows, and a only falls. Rows whose floor is 1 / seen, up to
    # rounding, are clamped throughout.
    full = floor * seen >= 1.0 - 8.0 * torch.finfo(weights.dtype).eps
    scale = torch.where(full, 0.0, torch.ones_like(weights[..., :1]))
    above, kept = _above(weights, floor, scale)
    while True:
        total = above.sum(-1, keepdim=True)
        rest = (1.0 - floor * (seen - kept)).clamp(min=0.0)
        scale = torch.where(total > 0, torch.minimum(scale, scale * rest / total), 0.0)
        before = kept
        above, kept = _above(weights, floor, scale)
        if torch.equal(before, kept):
            return scale, above


def _pay(above: Tensor, floor: Tensor, factors: Tensor | None, tile: _Tile) -> Tensor:
    """Payments of the clamp; dropout acts on what exceeds the floor."""
    paid = torch.maximum(above, floor)
    if factors is not None:
        paid.sub_(floor).mul_(factors).add_(floor)
    return tile.hide(paid, 0.0)


def _outputs(query: Tensor, value: Tensor, median: bool, floor: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros for the results of the forward operator. The output lies as (B, N, H, Dv), as that of SDPA."""
    batch, heads, queries, _ = query.shape
    work = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros(batch, queries, heads, value.shape[-1]).transpose(1, 2)
    rows = (batch, heads, queries, 1)
    return out, query.new_zeros(rows if median else 0, dtype=work), query.new_zeros(rows if floor is not None else 0, dtype=work)


def _forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _Pass(inputs).forward()


def _backward(d_out: Tensor, found: Tensor, solved: Tensor, needs: list[bool], *inputs: Any) -> list[Tensor]:
    return _Pass(inputs, needs).backward(d_out, found, solved)


def _fake_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    named = dict(zip(_INPUTS, inputs, strict=True))
    return _outputs(named["query"], named["value"], named["median"], named["floor"])


def _fake_backward(d_out: Tensor, found: Tensor, solved: Tensor, needs: list[bool], *inputs: Any) -> list[Tensor]:
    return [torch.empty_like(x) if need else d_out.new_empty(0) for x, need in zip(inputs, needs, strict=False)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output[1:])
    ctx.rest = inputs[_TENSORS:]


def _gradient(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, found, solved = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[: len(_DIFFERENTIABLE)])
    grads = torch.ops.hf_fullpay.tiles_backward(d_out, found, solved, needs, *tensors, *ctx.rest)
    padding = [None] * (len(_INPUTS) - len(needs))
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *padding


_SCHEMA = ", ".join(f"{kind} {name}" for name, kind in _INPUTS.items())
_tiles_forward = torch.library.custom_op(
    "hf_fullpay::tiles_forward", _forward, mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
_tiles_forward.register_fake(_fake_forward)
_tiles_forward.register_autograd(_gradient, setup_context=_setup)
_tiles_backward = torch.library.custom_op(
    "hf_fullpay::tiles_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor found, Tensor solved, bool[] needs, {_SCHEMA}) -> Tensor[]",
)
_tiles_backward.register_fake(_fake_backward)
