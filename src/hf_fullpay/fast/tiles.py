"""Softmax attention with transformed scores and a clamp floor, in tiles of query rows that are recomputed in backward.

    x_ij = scaling * q_i . k_j + bias_ij - centre_i     centre: none, given, or the row's lower median
    z_ij = amplitude_i * tanh(x_ij / width_i)           or min(1, width_i / max_j |x_ij|) * x_ij, or x_ij
    w_ij = softmax of z_ij over the visible keys
    p_ij = max(a_i * w_ij, floor_i)                     a_i such that the row sums to one; or w_ij, without a floor

Neither pass holds more than a few tiles of scores: peak memory is linear in the numbers of queries and keys.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D head width; b, h, n, m are a tile's part of
B, H, N, M. In matrix products a tile is (pairs, rows, m): a pair is a batch entry and a key head, and its rows are the
n queries of each of the H // G query heads that share the key head.
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

from hf_fullpay.core.numbers import accumulate
from hf_fullpay.core.visible import Visible

TILE_ELEMENTS = 1 << 18  # scores in a tile: 1 MiB in fp32, about the second-level cache of a core
MIN_ROWS = 32  # fewer rows make slow matrix products, however many keys there are
MAX_WIDTHS = 8  # of causal tiles in low precision, where oneDNN keeps half a megabyte for each shape of a product
# Largest amplitude at which a sigmoid is accurate enough in place of the tanh.
SIGMOID_AMPLITUDE = {torch.float64: 8.0, torch.float32: 8.0, torch.bfloat16: 1024.0, torch.float16: 1024.0}
# tanh(y) / y for |y| <= NEAR in powers of y * y: a Chebyshev fit in float64, off by 3e-9 at most.
NEAR = 0.625
NEAR_TANH = torch.tensor(
    [0.9999999961636132, -0.33333261641809997, 0.13331150161448432, -0.05372267934510682, 0.020595679962702847,
     -0.005664775357766299]
).unbind()  # fmt: skip
STRAIGHT = 2.0**60  # a width in place of infinity: tanh(x / width) * width == x

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? centre, Tensor? width, Tensor? amplitude, "
    "Tensor? floor, Tensor? seed, Tensor? keys, Tensor? dense, SymInt? offset, SymInt? window, float scaling, "
    "float dropout, bool median, bool rescale"
)
_NAMES = [entry.split()[1] for entry in _INPUTS.split(", ")]
_TENSORS = 11  # the first inputs
_DIFFERENTIABLE = _NAMES[:8]
_ROWS = _NAMES[4:8]  # of shapes that broadcast to (B, H, N, 1)


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
    """Attention by the module's formulas. A query that sees no key gets zeros. Not twice differentiable.

    Args:
        query: (B, H, N, D).
        key: (B, G, M, D), G dividing H; query head h uses key head h // (H // G).
        value: (B, G, M, Dv).
        visible: the keys that each query sees.
        scaling: factor of q . k.
        bias: added to the scores, broadcastable to (B, H, N, M).
        centre: subtracted from the scores, (B, H, N) or (B, H, N, 1).
        median: subtract the lower median of the row's visible scores instead.
        width: of the tanh, or the largest |x| with `rescale`; broadcastable to (B, H, N, 1), may be infinite.
        amplitude: of the tanh, broadcastable to (B, H, N, 1).
        rescale: instead of the tanh, shrink rows whose largest |x| exceeds `width`.
        floor: smallest weight of a visible key, broadcastable to (B, H, N, 1), at most 1 / (number of visible keys).
        dropout: probability of dropping a weight; with a floor, what exceeds the floor.

    Returns:
        (B, H, N, Dv) in the dtype of `query`.
    """
    if median and centre is not None:
        raise ValueError("centre: expected None with median=True, got a tensor.")
    if (width is None and rescale) or (not rescale and (width is None) != (amplitude is None)):
        raise ValueError("width: expected a tensor with `amplitude` or `rescale`, and only with one of them.")
    if centre is not None and centre.dim() == 3:
        centre = centre.unsqueeze(-1)
    work = accumulate(query.dtype)
    rows = [centre, width, None if rescale else amplitude, floor]
    bias, *rows = (x if x is None else x[(None,) * (4 - x.dim())] for x in (bias, *rows))
    out, _, _ = torch.ops.hf_fullpay.tiles_forward(
        query, key, value, bias, *(row if row is None else row.to(work) for row in rows),
        torch.randint(2**62, ()) if dropout > 0 else None,
        visible.keys, visible.dense, visible.offset, visible.window, scaling, dropout, median, rescale,
    )  # fmt: skip
    return out


def _part(tensor: Tensor, *at: slice) -> Tensor:
    """Part of a tensor whose dimensions of one are broadcast."""
    return tensor[tuple(slice(None) if size == 1 else one for size, one in zip(tensor.shape, at, strict=False))]


@dataclass(frozen=True, eq=False)
class _Block:
    """Pairs that are worked on together, with all their queries and keys."""

    batch: slice  # of B
    groups: slice  # of G
    heads: slice  # of H
    key: Tensor  # (pairs, D, M); the products are fastest with the width first
    value: Tensor  # (pairs, Dv, M)
    visible: Visible


@dataclass(frozen=True, eq=False)
class _Tile:
    """n queries of a block, and m keys among which are all that they see."""

    at: tuple[slice, slice, slice]  # of B, H, N
    columns: slice  # of M
    shape: tuple[int, int, int, int]  # b, h, n, m
    key: Tensor  # (pairs, D, m)
    value: Tensor  # (pairs, Dv, m)
    limits: list[tuple[slice, Tensor]]  # some of the m columns, and +inf at their visible, -inf at their hidden pairs
    seen: Tensor  # number of visible keys, (b|1, h|1, n|1, 1)
    blind: Tensor | None  # queries that see no key, None if there are none

    def part(self, tensor: Tensor) -> Tensor:
        """The tile's part of a tensor that broadcasts to (B, H, N, M or 1)."""
        return _part(tensor, *self.at, self.columns)

    def stack(self, tensor: Tensor) -> Tensor:
        """(b, h, n, x) to (pairs, rows, x)."""
        return tensor.reshape(self.key.shape[0], -1, tensor.shape[-1])

    def combine(self, left: Tensor, rows: Tensor) -> Tensor:
        """Product of (pairs, rows, m) with the transposed (pairs, x, m), as (b, h, n, x)."""
        return torch.bmm(left, rows.transpose(1, 2)).transpose(1, 2).reshape(*self.shape[:3], -1)

    def hide(self, scores: Tensor, to: float) -> Tensor:
        """Set hidden pairs, in place, to -inf, to +inf, or to 0 where no score is negative."""
        for columns, limit in self.limits:
            part = scores[..., columns]
            if to > 0:
                torch.maximum(part, -limit, out=part)
            else:
                torch.minimum(part, limit.clamp(min=to), out=part)
        return scores


class _Pass:
    """What the forward and the backward pass share."""

    def __init__(self, inputs: Sequence[Any], needs: Sequence[bool]) -> None:
        self.inputs = dict(zip(_NAMES, inputs, strict=True))
        self.query, self.key, self.value, self.bias, self.centre, self.width, self.amplitude, self.floor = inputs[:8]
        seed, keys, dense, offset, window, self.scaling, self.dropout, self.median, self.rescale = inputs[8:]
        self.visible = Visible(self.query.shape[2], self.key.shape[2], self.query.device, keys, dense, offset, window)
        self.needs = dict(zip(_DIFFERENTIABLE, needs, strict=True))
        self.backwards = any(needs)
        self.dtype = self.query.dtype
        self.work = accumulate(self.dtype)
        # Both passes visit the tiles in the same order, and so draw the same numbers.
        self.generator = None if seed is None else torch.Generator(self.query.device).manual_seed(int(seed))
        # y = rate * (scores - centre) is squashed to z = gain * tanh(y), or to z = gain * sigmoid(y) with twice the
        # rate and gain: softmax cannot tell them apart. The sigmoid is far faster, but less accurate near zero.
        self.rate = self.gain = torch.ones(1, 1, 1, 1, dtype=self.work, device=self.query.device)
        self.stretch = 1.0
        if self.amplitude is not None:
            infinite = self.width.isinf()
            amplitude = self.amplitude.masked_fill(infinite, STRAIGHT)
            self.stretch = 2.0 if (amplitude.abs() <= SIGMOID_AMPLITUDE[self.dtype]).all() else 1.0
            self.rate = self.stretch / self.width.masked_fill(infinite, STRAIGHT)
            self.gain = self.stretch * amplitude

    def blocks(self) -> Iterator[_Block]:
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
                    keys = _part(keys, at[0])
                    key, value = (x.masked_fill(~keys[:, None, :, None], 0.0) for x in (key, value))
                dense = None if dense is None else _part(dense, at[0], heads)
                key, value = (x.flatten(0, 1).transpose(1, 2).contiguous() for x in (key, value))
                yield _Block(*at, heads, key, value, replace(self.visible, keys=keys, dense=dense))

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

    def tiles(self, block: _Block) -> Iterator[_Tile]:
        """The tiles of a block in which any key is seen."""
        visible, rows = block.visible, self.tile_size()[0]
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
            limits, seen = [], torch.zeros_like(self.rate[:1, :1, :1])
            for left, right in pairwise(sorted(cuts)):
                mask = visible.tile(start, stop, left, right)
                if mask is None:
                    seen = seen + (right - left)
                else:
                    seen = seen + mask.sum(-1, keepdim=True)
                    limit = torch.full(mask.shape, -math.inf, dtype=self.work, device=mask.device)
                    limits.append((slice(left - low, right - low), limit.masked_fill_(mask, math.inf)))
            at, columns, blind = (block.batch, block.heads, slice(start, stop)), slice(low, high), seen == 0
            shape = (*self.query[at].shape[:3], high - low)
            key, value = block.key[..., columns], block.value[..., columns]
            yield _Tile(at, columns, shape, key, value, limits, seen, blind if limits and blind.any() else None)

    def scores(self, tile: _Tile, medians: Tensor) -> Tensor:
        """y of a tile; the medians of y are written in forward and read in backward."""
        query, rate = self.query[tile.at], tile.part(self.rate)
        shift = None if self.centre is None else tile.part(self.centre) * rate
        if self.median and self.backwards:
            shift = medians[tile.at]
        if self.dtype == self.work:
            rows = tile.stack(query * (self.scaling * rate))
            if shift is None:
                y = torch.bmm(rows, tile.key).view(tile.shape)
            else:
                shift = tile.stack(shift.expand(*tile.shape[:3], 1))
                y = torch.baddbmm(shift, rows, tile.key, beta=-1).view(tile.shape)
        else:
            # Factors and shift follow the product, as the low precision would round them.
            y = self.product(tile.stack(query), tile.key).view(tile.shape) * (self.scaling * rate)
            y = y if shift is None else y.sub_(shift)
        if self.bias is not None:
            y.addcmul_(tile.part(self.bias).to(self.work), rate)
        if self.median and not self.backwards:
            medians[tile.at] = _lower_median(y, tile)
            y.sub_(medians[tile.at])
        return y

    def weights(self, tile: _Tile, medians: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """y, squashed y and softmax weights; what backward does not use of the former two may be overwritten."""
        y = squashed = z = self.scores(tile, medians)
        if self.rescale:
            peak = tile.hide(y.abs(), 0.0).amax(-1, keepdim=True)
            z = y * (tile.part(self.width) / peak).clamp(max=1.0)
        elif self.amplitude is not None:
            keep = self.backwards and (self.median or self.needs["width"])
            squashed = (_tanh if self.stretch == 1.0 else torch.sigmoid)(y, out=None if keep else y)
            z = torch.mul(squashed, tile.part(self.gain), out=None if self.backwards else squashed)
        weights = torch.softmax(tile.hide(z, -math.inf), -1)
        return y, squashed, weights if tile.blind is None else weights.masked_fill_(tile.blind, 0.0)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Batched matrix product without infinities: at a hidden pair they would turn into NaN when multiplied by 0."""
        product = torch.bmm(left, right)
        return product.clamp_(-65504.0, 65504.0) if self.dtype == torch.float16 else product

    def factors(self, like: Tensor) -> Tensor | None:
        """Factors of the dropout: 0 or 1 / (1 - dropout)."""
        if self.generator is None:
            return None
        keep = 1.0 - self.dropout
        return torch.empty_like(like).bernoulli_(keep, generator=self.generator).div_(keep)


def _forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, medians of y, and the factors a of the clamp."""
    this = _Pass(inputs, [False] * len(_DIFFERENTIABLE))
    out, medians, scales = _outputs(*inputs)
    for block in this.blocks():
        for tile in this.tiles(block):
            _, _, paid = this.weights(tile, medians)
            factors = this.factors(paid)
            if this.floor is not None:
                floor = tile.part(this.floor)
                scales[tile.at], above = _solve(paid, floor, tile.seen)
                paid = _pay(above, floor, factors, tile)
            elif factors is not None:
                paid.mul_(factors)
            out[tile.at] = tile.combine(tile.value, tile.stack(paid.to(out.dtype)))
    return out, medians, scales


class _Backward(_Pass):
    """Gathers gradients, tile by tile."""

    def __init__(
        self, d_out: Tensor, medians: Tensor, scales: Tensor, needs: Sequence[bool], inputs: Sequence[Any]
    ) -> None:
        super().__init__(inputs, needs)
        self.d_out, self.medians, self.scales = d_out, medians, scales
        self.grads = {name: d_out.new_empty(0) for name in _DIFFERENTIABLE}
        for name in _DIFFERENTIABLE:
            if not self.needs[name]:
                continue
            if name in _ROWS:
                self.grads[name] = d_out.new_zeros((*d_out.shape[:3], 1), dtype=self.work)
            else:
                self.grads[name] = torch.zeros_like(self.inputs[name], dtype=self.work if name == "bias" else None)

    def run(self) -> list[Tensor]:
        """Gradients of the differentiable inputs, empty where not needed."""
        for block in self.blocks():
            d_key, d_value = (torch.zeros_like(x, dtype=self.work) for x in (block.key, block.value))
            for tile in self.tiles(block):
                y, squashed, weights = self.weights(tile, self.medians)
                d_z = self.pay(tile, weights, d_value[..., tile.columns])
                d_y = self.squash(tile, y, squashed, d_z)
                self.score(tile, d_y, d_key[..., tile.columns])
            for name, total in (("key", d_key), ("value", d_value)):
                if self.needs[name]:
                    part = self.grads[name][block.batch, block.groups]
                    part.copy_(total.transpose(1, 2).view(part.shape))
        for name in _DIFFERENTIABLE[3:]:
            if self.needs[name]:
                self.grads[name] = self.grads[name].sum_to_size(self.inputs[name].shape).to(self.inputs[name].dtype)
        return list(self.grads.values())

    def pay(self, tile: _Tile, weights: Tensor, d_value: Tensor) -> Tensor:
        """From the output to z, and to the values."""
        d_rows = tile.stack(self.d_out[tile.at])
        d_paid = self.product(d_rows, tile.value).view(tile.shape).to(self.work)
        factors = self.factors(weights)
        if self.floor is None:
            paid = weights if factors is None else weights * factors
            d_z = torch._softmax_backward_data(
                d_paid if factors is None else d_paid.mul_(factors), weights, -1, self.work
            )
        else:
            floor = tile.part(self.floor)
            above, kept = _above(weights, floor, self.scales[tile.at])
            paid = _pay(above, floor, factors, tile)
            d_above = d_paid if factors is None else d_paid * factors
            # The kept weights share what the floor of the clamped ones leaves.
            clamped = tile.seen - kept
            rest = 1.0 - floor * clamped
            mean = torch.where(rest > 0, (d_above * above).sum(-1, keepdim=True) / rest, 0.0)
            if self.needs["floor"]:
                d_kept = (d_above * (above > 0)).sum(-1, keepdim=True)
                for columns, limit in tile.limits:
                    d_paid[..., columns].masked_fill_(limit < 0, 0.0)
                self.grads["floor"][tile.at] = d_paid.sum(-1, keepdim=True) - d_kept - clamped * mean
            d_z = d_above.sub_(mean).mul_(above)
        if self.needs["value"]:
            _add_product(d_value, d_rows.transpose(1, 2), tile.stack(paid.to(self.dtype)))
        return d_z

    def squash(self, tile: _Tile, y: Tensor, squashed: Tensor, d_z: Tensor) -> Tensor:
        """From z to y / gain, and to width and amplitude."""
        if self.rescale:
            width = tile.part(self.width)
            peak, place = tile.hide(y.abs(), 0.0).max(-1, keepdim=True)
            peak.clamp_(min=torch.finfo(self.work).tiny)
            shrink = (width / peak).clamp(max=1.0)
            pull = (d_z * y).sum(-1, keepdim=True).mul_(width < peak) / peak
            if self.needs["width"]:
                self.grads["width"][tile.at] = pull
            d_y = (d_z * shrink).scatter_add_(-1, place, -pull * shrink * y.gather(-1, place).sign())
        elif self.amplitude is not None:
            derivative = torch.ops.aten.tanh_backward if self.stretch == 1.0 else torch.ops.aten.sigmoid_backward
            d_y = derivative(d_z, squashed)
            if self.needs["width"]:
                slope = -tile.part(self.gain) / tile.part(self.width)
                self.grads["width"][tile.at] = (d_y * y).sum(-1, keepdim=True) * slope
            if self.needs["amplitude"]:
                self.grads["amplitude"][tile.at] = (d_z * squashed).sum(-1, keepdim=True) * self.stretch
        else:
            d_y = d_z
        if self.median:
            chosen = tile.hide(y.abs(), math.inf).argmin(-1, keepdim=True)
            d_y.scatter_add_(-1, chosen, -d_y.sum(-1, keepdim=True))
        return d_y

    def score(self, tile: _Tile, d_y: Tensor, d_key: Tensor) -> None:
        """From y / gain to queries, keys, bias and centre."""
        slope = tile.part(self.rate) * tile.part(self.gain)
        query, factor, rows = self.query[tile.at], self.scaling * slope, tile.stack(d_y.to(self.dtype))
        if self.needs["query"]:
            self.grads["query"][tile.at] = tile.combine(tile.key, rows) * factor
        if self.needs["key"]:
            _add_product(d_key, tile.stack((query * factor).to(self.dtype)).transpose(1, 2), rows)
        if self.needs["bias"]:
            part = tile.part(self.grads["bias"])
            part.add_((d_y * slope).sum_to_size(part.shape))
        if self.needs["centre"]:
            self.grads["centre"][tile.at] = d_y.sum(-1, keepdim=True) * -slope


def _tanh(y: Tensor, out: Tensor | None = None) -> Tensor:
    """tanh in a third of the time that torch takes on a CPU, and within two roundings of it."""
    if y.device.type != "cpu":
        return torch.tanh(y, out=out)
    if y.dtype == torch.float32 and y.amax() <= NEAR and y.amin() >= -NEAR:
        square = y * y
        series = (square * NEAR_TANH[-1]).add_(NEAR_TANH[-2])
        for coefficient in NEAR_TANH[-3::-1]:
            torch.addcmul(coefficient, series, square, out=series)
        return torch.mul(series, y, out=out)
    # From 20 on the quotient rounds to 1, and later e would overflow.
    e = torch.mul(y, 2.0, out=out).clamp_(max=40.0).expm1_()
    return e.div_(e + 2.0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a batched matrix product to `total`, which may be of a wider dtype."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left, right))


def _lower_median(y: Tensor, tile: _Tile) -> Tensor:
    """Lower median of the visible scores of each row, 0 in rows without any."""
    # Hidden scores count as +inf. So that one order statistic serves all rows, although their medians have different
    # ranks, rows get as many scores of -inf as their rank lacks.
    rank = (tile.seen.clamp(min=1.0) - 1.0).div(2.0, rounding_mode="floor")
    last = int(rank.max())
    lacking = last - rank
    y = tile.hide(y.clone(), math.inf)
    if lacking.any():
        places = torch.arange(int(lacking.max()), device=y.device)
        front = torch.where(places < lacking, -math.inf, math.inf).to(y.dtype)
        y = torch.cat([front.expand(*y.shape[:3], -1), y], -1)
    if y.device.type == "cpu" and y.dtype == torch.float32:
        median = torch.from_numpy(np.partition(y.numpy(), last, axis=-1)[..., last, None])
    else:
        median = y.kthvalue(last + 1, -1, keepdim=True).values
    return median if tile.blind is None else median.masked_fill(tile.blind, 0.0)


def _above(weights: Tensor, floor: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """scale * weights where these exceed the floor, else 0; and how many do so in each row."""
    above = torch.gt(weights, floor / scale, out=torch.empty_like(weights))
    kept = above.sum(-1, keepdim=True)
    return above.mul_(weights).mul_(scale), kept


def _solve(weights: Tensor, floor: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The scale with which max(scale * weights, floor) sums to one, and what _above gives for it."""
    # A floor of 1 / seen, up to rounding, clamps all. Otherwise the scale falls from one and the set of clamped keys
    # grows, until it stays.
    level = floor * seen >= 1.0 - 4.0 * torch.finfo(weights.dtype).eps
    scale = torch.ones_like(weights[..., :1]).masked_fill_(level, 0.0)
    above, kept = _above(weights, floor, scale)
    while True:
        total, rest = above.sum(-1, keepdim=True), (1.0 - floor * (seen - kept)).clamp(min=0.0)
        scale = torch.where(total > 0, torch.minimum(scale, scale * rest / total), 0.0)
        before = kept
        above, kept = _above(weights, floor, scale)
        if torch.equal(before, kept):
            return scale, above


def _pay(above: Tensor, floor: Tensor, factors: Tensor | None, tile: _Tile) -> Tensor:
    """Weights after clamp and dropout."""
    paid = torch.maximum(above, floor)
    if factors is not None:
        paid.sub_(floor).mul_(factors).add_(floor)
    return tile.hide(paid, 0.0)


def _outputs(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros for what the forward pass returns, empty where not used; the output lies as (B, N, H, Dv), like SDPA's."""
    this = dict(zip(_NAMES, inputs, strict=True))
    batch, heads, queries, _ = this["query"].shape
    out = this["query"].new_zeros(batch, queries, heads, this["value"].shape[-1]).transpose(1, 2)
    work = accumulate(out.dtype)
    used = this["median"], this["floor"] is not None
    return out, *(out.new_zeros((batch, heads, queries, 1) if use else 0, dtype=work) for use in used)


def _backward(d_out: Tensor, medians: Tensor, scales: Tensor, needs: list[bool], *inputs: Any) -> list[Tensor]:
    return _Backward(d_out, medians, scales, needs, inputs).run()


def _fake_backward(d_out: Tensor, medians: Tensor, scales: Tensor, needs: list[bool], *inputs: Any) -> list[Tensor]:
    return [torch.empty_like(x) if need else d_out.new_empty(0) for x, need in zip(inputs, needs, strict=False)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output[1:])
    ctx.options = inputs[_TENSORS:]


def _differentiate(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, medians, scales = ctx.saved_tensors
    needs = ctx.needs_input_grad[: len(_DIFFERENTIABLE)]
    grads = torch.ops.hf_fullpay.tiles_backward(d_out, medians, scales, list(needs), *tensors, *ctx.options)
    grads = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return *grads, *[None] * (len(_NAMES) - len(grads))


tiles_forward = torch.library.custom_op(
    "hf_fullpay::tiles_forward", _forward, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor)"
)
tiles_forward.register_fake(_outputs)
tiles_forward.register_autograd(_differentiate, setup_context=_setup)
# Without a derivative of its own: asking for second derivatives raises.
tiles_backward = torch.library.custom_op(
    "hf_fullpay::tiles_backward", _backward, mutates_args=(),
    schema=f"(Tensor d_out, Tensor medians, Tensor scales, bool[] needs, {_INPUTS}) -> Tensor[]",
)  # fmt: skip
tiles_backward.register_fake(_fake_backward)
