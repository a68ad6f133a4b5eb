"""Softmax attention with squashed scores on PyTorch's FlexAttention, compiled into one fused kernel.

    z_ij = amplitude_i * tanh((scaling * q_i . k_j - centre_i) / width_i)      or scaling * q_i . k_j

The block mask is computed from causality and window alone, (N / 128)^2 numbers, so that blocks out of reach are skipped;
padding and dense masks are read pair by pair inside the blocks that remain.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.squash import STRAIGHT

BLOCK = 128  # FlexAttention's own default
KINDS_OF_CALL = 64  # that may be compiled: by default torch stops at 8


def flexible_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Visible,
    scaling: float,
    centre: Tensor | None = None,
    width: Tensor | None = None,
    amplitude: Tensor | None = None,
) -> Tensor:
    """Attention by the module's formula; a query that sees no key gives zeros.

    Args:
        query: (B, H, N, D).
        key: (B, G, M, D).
        value: (B, G, M, Dv).
        visible: the keys that each query sees.
        scaling: factor of q . k.
        centre, width, amplitude: broadcastable to (B, H, N, 1), FP32; width and amplitude come together, and a width may
            be infinite.

    Returns:
        (B, H, N, Dv) in the dtype of query.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: after too many kinds of call, where FlexAttention left to itself would
            compute N x M scores in silence.
    """
    shape = (*query.shape[:3], 1)
    score = None
    if width is not None and amplitude is not None:
        infinite = width.isinf()  # there tanh(x / STRAIGHT) * STRAIGHT == x
        rate, amplitude = 1.0 / width.masked_fill(infinite, STRAIGHT), amplitude.masked_fill(infinite, STRAIGHT)
        centre = torch.zeros_like(rate) if centre is None else centre
        score = _squash(*(x.expand(shape)[..., 0].float().contiguous() for x in (rate, amplitude, centre)))
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled(query.device.type)
    with torch._dynamo.config.patch(recompile_limit=KINDS_OF_CALL):
        out = attend(
            query, key, value, score_mod=score, block_mask=_block_mask(visible), scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    return torch.where(visible.counts() > 0, out, 0.0)


@cache
def has_compiler() -> bool:
    """Whether inductor finds a C++ compiler."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False


@cache
def _compiled(device: str) -> Any:
    # With fullgraph, running out of recompilations raises; without, it would fall back to N x M scores. With lengths as
    # variables, the C++ code of torch 2.13 for a CPU does not compile: there, every length is a kind of call.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False if device == "cpu" else None)


def _squash(rate: Tensor, amplitude: Tensor, centre: Tensor) -> Callable[..., Tensor]:
    """Score function that reads the numbers of its row."""

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return amplitude[b, h, i] * torch.tanh((score - centre[b, h, i]) * rate[b, h, i])

    return score


def _block_mask(visible: Visible) -> BlockMask | None:
    """Blocks within causality and window, and the function that decides about pairs inside them."""
    pattern = (visible.n_queries, visible.n_keys, visible.offset, visible.window, visible.device)
    keys, dense = visible.keys, visible.dense
    if keys is None and dense is None:
        if visible.offset is None:
            return None
        return (_pattern if torch.compiler.is_compiling() else _kept_pattern)(*pattern)
    inside = _pairs(visible.offset, visible.window)

    def pairs(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = inside(b, h, i, j)
        if keys is not None:
            seen = seen & keys[b, j]
        if dense is not None:
            seen = seen & dense[b if dense.shape[0] > 1 else 0, h if dense.shape[1] > 1 else 0, i, j]
        return seen

    return _blocks(*pattern, pairs, whole=False)


def _pairs(offset: int | None, window: int | None) -> Callable[..., Tensor]:
    def pairs(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j >= 0
        if offset is not None:
            seen = seen & (j <= i + offset)
            if window is not None:
                seen = seen & (j > i + offset - window)
        return seen

    return pairs


def _pattern(queries: int, keys: int, offset: int | None, window: int | None, device: torch.device) -> BlockMask:
    """The block mask of causality and window alone."""
    return _blocks(queries, keys, offset, window, device, _pairs(offset, window), whole=True)


_kept_pattern = lru_cache(maxsize=32)(_pattern)  # building one takes as long as attention over a thousand tokens


def _blocks(
    queries: int,
    keys: int,
    offset: int | None,
    window: int | None,
    device: torch.device,
    pairs: Callable[..., Tensor],
    *,
    whole: bool,
) -> BlockMask:
    """Blocks that hold visible pairs; with `whole`, those that hold no other are not looked at pair by pair."""
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    first = torch.arange(rows, device=device)[:, None] * BLOCK
    left = torch.arange(columns, device=device)[None] * BLOCK
    some = torch.ones(rows, columns, dtype=torch.bool, device=device)
    every = some & whole
    if offset is not None:
        some = left <= first + BLOCK - 1 + offset
        every = every & (left + BLOCK - 1 <= first + offset)
        if window is not None:
            some = some & (left + BLOCK - 1 > first + offset - window)
            every = every & (left > first + BLOCK - 1 + offset - window)
    # A block that reaches past the end is decided pair by pair.
    every = every & (first + BLOCK <= queries) & (left + BLOCK <= keys)
    partial, full = (_listed(blocks) for blocks in (some & ~every, every))
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=pairs, seq_lengths=(queries, keys))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen blocks in every row, and the chosen first, each (1, 1, rows[, columns]) int32."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
