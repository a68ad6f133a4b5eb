"""Blocks with relays: a query sees its own block exactly, and every other block through one relay.

    relay of block p:  kbar_p, vbar_p = means over its n_p existing tokens
    w_i = softmax over { scaling * q_i . k_j : j in the block of i } and { scaling * q_i . kbar_p + log n_p : other p }

Blocks are counted from the first key that exists, in each row of the batch. Causal: the own block up to i, and relays of
blocks that ended before it. One joint softmax: the parts are attention calls
of their own, merged by their lse, and the merged lse and output make each part's backward pass exact.

Dimensions: B batch, H query heads, G key/value heads, N queries and keys, P blocks, D and Dv widths.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .align import aligned
from .checks import check_tensors, precision_of
from .compiled import uncompiled
from .launch import Call, Segments, run_delta, run_forward, run_keys, run_queries


@uncompiled
def relay_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    size: int,
    causal: bool = False,
    keys: Tensor | None = None,
    precision: str | None = None,
) -> Tensor:
    """Attention by the module's formula; differentiable once in query, key and value. A blind query gets zeros.

    Args:
        query: (B, H, N, D).
        key: (B, G, N, D).
        value: (B, G, N, Dv).
        scaling: positive factor of q . k.
        size: tokens of a block.
        causal: whether a query sees only what came before it.
        keys: (B, N) bool, True for keys that exist.
        precision: of products of FP32 tensors, "ieee" or "tf32"; None follows torch.get_float32_matmul_precision().

    Returns:
        (B, H, N, Dv) in the dtype of query.
    """
    check_tensors(query, key, value, keys)
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"key: expected as many keys as queries, {query.shape[2]}, got {key.shape[2]}.")
    if not scaling > 0:
        raise ValueError(f"scaling: expected a positive number, got {scaling}.")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size: expected a positive integer, got {size!r}.")
    tokens, columns = query.shape[2], value.shape[3]
    query, key, value = aligned(query), aligned(key), aligned(value)
    size = min(size, max(tokens, 1))
    early = None
    if keys is not None and tokens:  # rows laid out so that the first key begins a block
        early = -keys.to(torch.uint8).argmax(-1) % size
        query, key, value = (_laid(x, -early, tokens + size - 1) for x in (query, key, value))
        keys = _laid(keys[:, None, :, None], -early, tokens + size - 1)[:, 0, :, 0]
    alive = torch.ones(1, tokens, dtype=torch.bool, device=key.device) if keys is None else keys
    counts = _blocks(alive, 1, size).sum(-1)  # (B or 1, P)
    relay_key, relay_value = (_relays(x, alive, counts, size) for x in (key, value))
    options = {
        "scaling": float(scaling), "size": size, "causal": causal, "keys": keys, "precision": precision_of(precision),
    }  # fmt: skip
    out = _Relays.apply(query, key, value, relay_key, relay_value, counts, options)
    return (out if early is None else _laid(out, early, tokens))[..., :columns]


def _laid(x: Tensor, start: Tensor, length: int) -> Tensor:
    """Slots start .. start + length - 1 of (B, *, N, width), zeros where there are none; start is (B,)."""
    slot = (start[:, None] + torch.arange(length, device=x.device))[:, None, :, None]
    index = slot.clamp(0, x.shape[2] - 1).expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index).masked_fill((slot < 0) | (slot >= x.shape[2]), 0)


def _blocks(x: Tensor, dim: int, size: int) -> Tensor:
    """Cut a dimension into blocks, the last one filled with zeros."""
    missing = -x.shape[dim] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing))
    return x.unflatten(dim, (-1, size))


def _relays(x: Tensor, alive: Tensor, counts: Tensor, size: int) -> Tensor:
    """Means of blocks, (B, G, P, width): sums in fp32."""
    x = torch.where(alive[:, None, :, None], x, 0.0)
    return (_blocks(x, 2, size).sum(3, dtype=torch.float32) / counts.clamp(min=1)[:, None, :, None]).to(x.dtype)


def _parts(query: Tensor, key: Tensor, value: Tensor, relay_key: Tensor, relay_value: Tensor, counts: Tensor,
           options: dict[str, Any]) -> list[Call]:  # fmt: skip
    """The own block, relays before it, and relays after it."""
    size, tokens, relays = options["size"], query.shape[2], relay_key.shape[2]
    token = torch.arange(tokens, device=query.device, dtype=torch.int32)
    relay = torch.arange(relays, device=query.device, dtype=torch.int32)
    block = token // size
    own = Segments(block * size, (block + 1) * size, block * size, (block + 1) * size)
    keys, same = options["keys"], {"scaling": options["scaling"], "precision": options["precision"]}
    alive = None if keys is None else keys.contiguous().view(torch.uint8)
    offset = 0 if options["causal"] else None
    parts = [Call(query, key, value, keys=alive, segments=own, offset=offset, **same)]
    pairs = (*query.shape[:3], relays)
    exist = (counts > 0).expand(query.shape[0], -1).contiguous().view(torch.uint8)
    bias = counts.clamp(min=1).log()[:, None, None, :].expand(pairs)
    nothing, all_tokens = torch.zeros_like(relay), torch.full_like(relay, tokens)
    before = Segments(torch.zeros_like(block), block, (relay + 1) * size, all_tokens)
    after = Segments(block + 1, torch.full_like(block, relays), nothing, relay * size)
    for segments in [before] if options["causal"] else [before, after]:
        parts.append(Call(query, relay_key, relay_value, keys=exist, bias=bias, segments=segments, **same))
    return parts


class _Relays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, options = inputs
        outs, sizes = zip(*(run_forward(part) for part in _parts(*tensors, options)), strict=True)
        sizes = torch.stack([size.masked_fill(size == math.inf, -math.inf) for size in sizes])
        peak = sizes.amax(0)
        weights = torch.exp2(sizes - peak.masked_fill(peak == -math.inf, 0.0))
        total = weights.sum(0)
        lse = torch.where(total > 0, peak + total.log2(), math.inf)
        weights = weights / total.masked_fill(total == 0, 1.0)
        out = sum(part * weight[..., None] for part, weight in zip(outs, weights, strict=True)).to(outs[0].dtype)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        d_out = aligned(d_out)
        own, *relays = _parts(*tensors, ctx.options)
        delta, _ = run_delta(own, d_out, out, None)
        d_query = sum(run_queries(part, d_out, lse, delta, {"query"})["query"] for part in (own, *relays))
        d_key, d_value = run_keys(own, d_out, lse, delta)
        d_relays = [run_keys(part, d_out, lse, delta) for part in relays]
        return d_query, d_key, d_value, *(sum(grads) for grads in zip(*d_relays, strict=True)), None, None
