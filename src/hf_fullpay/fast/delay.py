"""Softmax attention with a delay bias, in tiles of query rows that are recomputed in backward.

    s_ij = scaling * q_i . k_j + bias_ij - beta_h * |t_i - t_j - delay_ij|        w_i = softmax of s_i over the visible keys

Neither pass holds more than a tile of scores or of lags: peak memory is linear in the numbers of queries and keys, but
for the delays, where they are given, and their gradient.

Dimensions: B batch, H query heads, G key/value heads (G divides H), N queries, M keys, D and Dv widths; b, n, m are a
tile's part of B, N, M.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_fullpay.core.numbers import accumulate
from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.operator import Dropout, names_of, register

TILE_ELEMENTS = {"cpu": 1 << 18}  # scores in a tile: 1 MiB in FP32, about the second-level cache of a core
LARGE_TILE = 1 << 24  # on other devices, which need wide work
MIN_ROWS = 16

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor beta, Tensor query_times, Tensor key_times, "
    "Tensor? delays, Tensor? seed, Tensor? keys, Tensor? dense, SymInt? offset, SymInt? window, float scaling, "
    "float dropout"
)
_DIFFERENTIABLE = names_of(_INPUTS)[:8]


def delayed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Visible,
    scaling: float,
    beta: Tensor,
    query_times: Tensor,
    key_times: Tensor,
    delays: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention by the module's formula. A query that sees no key gets zeros. Not twice differentiable.

    Args:
        query: (B, H, N, D).
        key: (B, G, M, D).
        value: (B, G, M, Dv).
        visible: the keys that each query sees.
        scaling: factor of q . k.
        beta: (1, H, 1, 1).
        query_times: (B or 1, N), FP32 or FP64.
        key_times: (B or 1, M).
        delays: (B or 1, N, M).
        bias: added to the scores, broadcastable to (B, H, N, M).
        dropout: probability of dropping a weight.

    Returns:
        (B, H, N, Dv) in the dtype of `query`. All floating inputs get gradients.
    """
    return torch.ops.hf_fullpay.delay_forward(
        query, key, value, bias, beta, query_times, key_times, delays,
        torch.randint(2**62, ()) if dropout > 0 else None,
        visible.keys, visible.dense, visible.offset, visible.window, scaling, dropout,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Tile:
    """n queries of b batch entries, and m keys among which are all that they see."""

    batch: slice
    rows: slice
    columns: slice
    mask: Tensor | None  # (b or 1, H or 1, n or 1, m)

    def part(self, tensor: Tensor, *dims: int) -> Tensor:
        """The tile's part of a tensor whose dimensions of one are broadcast; `dims` name batch, rows and columns."""
        at = [slice(None)] * tensor.ndim
        for dim, one in zip(dims, (self.batch, self.rows, self.columns), strict=False):
            if dim >= 0 and tensor.shape[dim] > 1:
                at[dim] = one
        return tensor[tuple(at)]


class _Pass:
    """What the forward and the backward pass share."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.query, self.key, self.value, self.bias, self.beta = inputs[:5]
        self.query_times, self.key_times, self.delays = inputs[5:8]
        seed, keys, dense, offset, window, self.scaling, dropout = inputs[8:]
        self.visible = Visible(self.query.shape[2], self.key.shape[2], self.query.device, keys, dense, offset, window)
        self.dtype, self.work = self.query.dtype, accumulate(self.query.dtype)
        if keys is not None:
            # Whatever is in padding, even NaN, must not enter a product.
            self.key, self.value = (x.masked_fill(~keys[:, None, :, None], 0.0) for x in (self.key, self.value))
        self.dropout = Dropout(seed, dropout, self.query.device)

    def tiles(self) -> Iterator[_Tile]:
        """The tiles in which any key is seen."""
        batch, heads, queries, _ = self.query.shape
        reached = min(self.visible.n_keys, (self.visible.window or self.visible.n_keys) + MIN_ROWS)
        room = TILE_ELEMENTS.get(self.query.device.type, LARGE_TILE) // max(heads * reached, 1)
        rows = min(max(room, MIN_ROWS), queries)
        batches = max(room // max(rows, 1), 1)
        for b in range(0, batch, batches):
            at = slice(b, min(b + batches, batch))
            keys, dense = (
                x if x is None or x.shape[0] == 1 else x[at] for x in (self.visible.keys, self.visible.dense)
            )
            visible = replace(self.visible, keys=keys, dense=dense)
            for start in range(0, queries, rows):
                stop = min(start + rows, queries)
                low, high = visible.columns(start, stop)
                if low < high:
                    yield _Tile(at, slice(start, stop), slice(low, high), visible.tile(start, stop, low, high))

    def stack(self, tensor: Tensor) -> Tensor:
        """(b, H, n, x) to (b, G, H // G * n, x): heads that share a key head follow one another."""
        return tensor.reshape(tensor.shape[0], self.key.shape[1], -1, tensor.shape[-1])

    def lag(self, tile: _Tile) -> Tensor:
        """t_i - t_j - delay_ij of a tile, (b or 1, 1, n, m)."""
        queries, keys = tile.part(self.query_times, 0, 1), tile.part(self.key_times, 0, -1, 1)
        lag = queries[:, :, None] - keys[:, None, :]
        if self.delays is not None:
            lag = lag - tile.part(self.delays, 0, 1, 2)
        return lag.to(self.work)[:, None]

    def product(self, left: Tensor, right: Tensor, shape: Sequence[int]) -> Tensor:
        """Matrix product as (b, H, n, x). FP16 must not overflow to infinity: hidden pairs would turn into NaN."""
        product = left @ right
        return (product.clamp_(-65504.0, 65504.0) if self.dtype == torch.float16 else product).reshape(*shape, -1)

    def weights(self, tile: _Tile, query: Tensor, key: Tensor, lag: Tensor) -> Tensor:
        """Softmax weights of a tile, (b, H, n, m)."""
        scores = self.product(self.stack(query), key.mT, query.shape[:3]).to(self.work).mul_(self.scaling)
        if self.bias is not None:
            scores.add_(tile.part(self.bias, 0, 2, 3))
        scores.sub_(self.beta * lag.abs())
        if tile.mask is None:
            return torch.softmax(scores, -1)
        weights = torch.softmax(scores.masked_fill_(~tile.mask, -math.inf), -1)
        return weights.masked_fill_(~tile.mask.any(-1, keepdim=True), 0.0)


def _forward(*inputs: Any) -> Tensor:
    this, out = _Pass(inputs), _output(*inputs)
    for tile in this.tiles():
        query, key, value = (x[tile.batch] for x in (this.query, this.key, this.value))
        query, key, value = query[:, :, tile.rows], key[:, :, tile.columns], value[:, :, tile.columns]
        weights = this.weights(tile, query, key, this.lag(tile))
        if (factors := this.dropout.factors(weights)) is not None:
            weights.mul_(factors)
        out[tile.batch, :, tile.rows] = (this.stack(weights.to(this.dtype)) @ value).reshape(*query.shape[:3], -1)
    return out


def _backward(d_out: Tensor, needs: list[bool], *inputs: Any) -> list[Tensor]:
    """Gradients of the differentiable inputs, empty where not needed."""
    this = _Pass(inputs)
    wide = dict.fromkeys(("key", "value", "bias"), this.work)  # summed over tiles
    grads = {
        name: torch.zeros_like(x, dtype=wide.get(name, x.dtype)) if need else d_out.new_empty(0)
        for name, x, need in zip(_DIFFERENTIABLE, inputs, needs, strict=False)
    }
    need = dict(zip(_DIFFERENTIABLE, needs, strict=True))
    for tile in this.tiles():
        query, key, value = (x[tile.batch] for x in (this.query, this.key, this.value))
        query, key, value = query[:, :, tile.rows], key[:, :, tile.columns], value[:, :, tile.columns]
        lag = this.lag(tile)
        weights = this.weights(tile, query, key, lag)
        factors = this.dropout.factors(weights)
        d_rows = this.stack(d_out[tile.batch, :, tile.rows])
        d_paid = this.product(d_rows, value.mT, query.shape[:3]).to(this.work)
        if need["value"]:
            paid = weights if factors is None else weights * factors
            grads["value"][tile.batch, :, tile.columns] += this.stack(paid.to(this.dtype)).mT @ d_rows
        d_scores = torch._softmax_backward_data(
            d_paid if factors is None else d_paid.mul_(factors), weights, -1, this.work
        )
        if need["query"]:
            d_query = (this.stack(d_scores.to(this.dtype)) @ key).reshape(query.shape)
            grads["query"][tile.batch, :, tile.rows] = d_query * this.scaling
        if need["key"]:
            scaled = this.stack((query * this.scaling).to(this.dtype))
            grads["key"][tile.batch, :, tile.columns] += this.stack(d_scores.to(this.dtype)).mT @ scaled
        if need["bias"]:
            part = tile.part(grads["bias"], 0, 2, 3)
            part += d_scores.sum_to_size(part.shape)
        if need["beta"]:
            grads["beta"] -= (d_scores * lag.abs()).sum((0, 2, 3), keepdim=True)
        if need["query_times"] or need["key_times"] or need["delays"]:
            _of_lag(grads, need, tile, -((d_scores * this.beta).sum(1) * lag.sign()[:, 0]))
    return [grad.to(x.dtype) if need[name] else grad for (name, grad), x in zip(grads.items(), inputs, strict=False)]


def _of_lag(grads: dict[str, Tensor], need: dict[str, bool], tile: _Tile, d_lag: Tensor) -> None:
    """From the lags (b, n, m) to the times and delays."""
    if need["query_times"]:
        part = tile.part(grads["query_times"], 0, 1)
        part += d_lag.sum(2).sum_to_size(part.shape)
    if need["key_times"]:
        part = tile.part(grads["key_times"], 0, -1, 1)
        part -= d_lag.sum(1).sum_to_size(part.shape)
    if need["delays"]:
        part = tile.part(grads["delays"], 0, 1, 2)
        part -= d_lag.sum_to_size(part.shape)


def _output(*inputs: Any) -> Tensor:
    """Zeros for the output, which lies as (B, N, H, Dv), like SDPA's."""
    query, _, value = inputs[:3]
    batch, heads, queries, _ = query.shape
    return query.new_zeros(batch, queries, heads, value.shape[-1]).transpose(1, 2)


register("delay", _INPUTS, differentiable=len(_DIFFERENTIABLE), forward=_forward, fake=_output, backward=_backward)
