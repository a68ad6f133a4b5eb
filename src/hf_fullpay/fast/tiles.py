"""Softmax attention with transformed scores and a clamp floor, in tiles of query rows that are recomputed in backward.

    x_ij = scaling * q_i . k_j + bias_ij - centre_i     centre: none, given, or the row's lower median
    z_ij = amplitude_i * tanh(x_ij / width_i)           or min(1, width_i / max_j |x_ij|) * x_ij, or x_ij
    w_ij = softmax of z_ij over the visible keys
    p_ij = max(a_i * w_ij, floor_i)                     a_i such that the row sums to one; or w_ij, without a floor

Neither pass holds more than a few tiles of scores: peak memory is linear in the numbers of queries and keys.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D head width; a tile is (b, h, n, m), see `tiling`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_fullpay.core.numbers import accumulate
from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.operator import Dropout, names_of, register
from hf_fullpay.fast.squash import SIGMOID_AMPLITUDE, STRAIGHT, tanh
from hf_fullpay.fast.tiling import Tile, Tiling, lower_median

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? centre, Tensor? width, Tensor? amplitude, "
    "Tensor? floor, Tensor? seed, Tensor? keys, Tensor? dense, SymInt? offset, SymInt? window, float scaling, "
    "float dropout, bool median, bool rescale"
)
_NAMES = names_of(_INPUTS)
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


class _Pass(Tiling):
    """What the forward and the backward pass share."""

    def __init__(self, inputs: Sequence[Any], needs: Sequence[bool]) -> None:
        self.inputs = dict(zip(_NAMES, inputs, strict=True))
        query, key, value, self.bias, self.centre, self.width, self.amplitude, self.floor = inputs[:8]
        seed, keys, dense, offset, window, self.scaling, dropout, self.median, self.rescale = inputs[8:]
        visible = Visible(query.shape[2], key.shape[2], query.device, keys, dense, offset, window)
        super().__init__(query, key, value, visible)
        self.needs = dict(zip(_DIFFERENTIABLE, needs, strict=True))
        self.backwards = any(needs)
        self.dropout = Dropout(seed, dropout, query.device)
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
        # Per row, once for all tiles: small operations add up.
        self.factor = self.scaling * self.rate
        self.shift = None if self.centre is None else self.centre * self.rate

    def scores(self, tile: Tile, medians: Tensor) -> Tensor:
        """y of a tile; the medians of y are written in forward and read in backward."""
        query, factor = self.query[tile.at], tile.part(self.factor)
        shift = None if self.shift is None else tile.part(self.shift)
        if self.median and self.backwards:
            shift = medians[tile.at]
        if self.dtype == self.work:
            rows = tile.stack(query * factor)
            if shift is None:
                y = torch.bmm(rows, tile.key).view(tile.shape)
            else:
                shift = tile.stack(shift.expand(*tile.shape[:3], 1))
                y = torch.baddbmm(shift, rows, tile.key, beta=-1).view(tile.shape)
        else:
            # Factors and shift follow the product, as the low precision would round them.
            y = self.product(tile.stack(query), tile.key).view(tile.shape) * factor
            y = y if shift is None else y.sub_(shift)
        if self.bias is not None:
            y.addcmul_(tile.part(self.bias).to(self.work), tile.part(self.rate))
        if self.median and not self.backwards:
            medians[tile.at] = lower_median(y, tile)
            y.sub_(medians[tile.at])
        return y

    def weights(self, tile: Tile, medians: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """y, squashed y and softmax weights; what backward does not use of the former two may be overwritten."""
        y = squashed = z = self.scores(tile, medians)
        if self.rescale:
            peak = tile.hide(y.abs(), 0.0).amax(-1, keepdim=True)
            z = y * (tile.part(self.width) / peak).clamp(max=1.0)
        elif self.amplitude is not None:
            keep = self.backwards and (self.median or self.needs["width"])
            squashed = (tanh if self.stretch == 1.0 else torch.sigmoid)(y, out=None if keep else y)
            z = torch.mul(squashed, tile.part(self.gain), out=None if self.backwards else squashed)
        weights = torch.softmax(tile.hide(z, -math.inf), -1)
        return y, squashed, weights if tile.strip.blind is None else weights.masked_fill_(tile.strip.blind, 0.0)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Batched matrix product without infinities: at a hidden pair they would turn into NaN when multiplied by 0."""
        product = torch.bmm(left, right)
        return product.clamp_(-65504.0, 65504.0) if self.dtype == torch.float16 else product


def _forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, medians of y, and the factors a of the clamp."""
    this = _Pass(inputs, [False] * len(_DIFFERENTIABLE))
    out, medians, scales = _outputs(*inputs)
    for block in this.blocks():
        for tile in this.tiles(block):
            _, _, paid = this.weights(tile, medians)
            factors = this.dropout.factors(paid)
            if this.floor is not None:
                floor = tile.part(this.floor)
                scales[tile.at], above = _solve(paid, floor, tile.strip.seen)
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
        self.slope = self.rate * self.gain  # of z with respect to the scores, at y = 0
        self.factor_back = self.scaling * self.slope
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
                d_z = self.pay(tile, weights, d_value[..., tile.strip.columns])
                d_y = self.squash(tile, y, squashed, d_z)
                self.score(tile, d_y, d_key[..., tile.strip.columns])
            for name, total in (("key", d_key), ("value", d_value)):
                if self.needs[name]:
                    part = self.grads[name][block.batch, block.groups]
                    part.copy_(total.transpose(1, 2).view(part.shape))
        if self.needs["query"]:
            self.grads["query"].mul_(self.factor_back)
        if self.needs["centre"]:
            self.grads["centre"].mul_(-self.slope)
        for name in _DIFFERENTIABLE[3:]:
            if self.needs[name]:
                self.grads[name] = self.grads[name].sum_to_size(self.inputs[name].shape).to(self.inputs[name].dtype)
        return list(self.grads.values())

    def pay(self, tile: Tile, weights: Tensor, d_value: Tensor) -> Tensor:
        """From the output to z, and to the values."""
        d_rows = tile.stack(self.d_out[tile.at])
        d_paid = self.product(d_rows, tile.value).view(tile.shape).to(self.work)
        factors = self.dropout.factors(weights)
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
            clamped = tile.strip.seen - kept
            rest = 1.0 - floor * clamped
            mean = torch.where(rest > 0, (d_above * above).sum(-1, keepdim=True) / rest, 0.0)
            if self.needs["floor"]:
                d_kept = (d_above * (above > 0)).sum(-1, keepdim=True)
                for columns, limit in tile.strip.limits:
                    d_paid[..., columns].masked_fill_(limit < 0, 0.0)
                self.grads["floor"][tile.at] = d_paid.sum(-1, keepdim=True) - d_kept - clamped * mean
            d_z = d_above.sub_(mean).mul_(above)
        if self.needs["value"]:
            _add_product(d_value, d_rows.transpose(1, 2), tile.stack(paid.to(self.dtype)))
        return d_z

    def squash(self, tile: Tile, y: Tensor, squashed: Tensor, d_z: Tensor) -> Tensor:
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

    def score(self, tile: Tile, d_y: Tensor, d_key: Tensor) -> None:
        """From y / gain to queries, keys, bias and centre."""
        rows = tile.stack(d_y.to(self.dtype))
        if self.needs["query"]:
            self.grads["query"][tile.at] = tile.combine(tile.key, rows)
        if self.needs["key"]:
            query = (self.query[tile.at] * tile.part(self.factor_back)).to(self.dtype)
            _add_product(d_key, tile.stack(query).transpose(1, 2), rows)
        if self.needs["bias"]:
            part = tile.part(self.grads["bias"])
            part.add_((d_y * tile.part(self.slope)).sum_to_size(part.shape))
        if self.needs["centre"]:
            self.grads["centre"][tile.at] = d_y.sum(-1, keepdim=True)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a batched matrix product to `total`, which may be of a wider dtype."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left, right))


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


def _pay(above: Tensor, floor: Tensor, factors: Tensor | None, tile: Tile) -> Tensor:
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


register(
    "tiles", _INPUTS, differentiable=len(_DIFFERENTIABLE), forward=_forward, fake=_outputs, backward=_backward,
    kept=("medians", "scales"),
)  # fmt: skip
