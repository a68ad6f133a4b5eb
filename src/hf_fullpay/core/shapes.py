"""Checks of the tensors of one attention call.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D and Dv widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN = (
    -1e4
)  # an additive mask at or below this hides the key: half-precision minima and the -10000 of old code included
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless query (B, H, N, D), key (B, G, M, D) and value (B, G, M, Dv) fit together and G divides H."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.ndim != 4:
            got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name}: expected a tensor (batch, heads, length, width), got {got}.")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: expected a floating-point tensor (FP32, BF16, FP16, FP64), got {tensor.dtype}.")
    batch, heads, _, width = query.shape
    groups, keys = key.shape[1:3]
    if key.shape[0] != batch or key.shape[3] != width:
        raise ValueError(f"key: expected batch {batch} and width {width} as in query, got {tuple(key.shape)}.")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value: expected {(batch, groups, keys)} and a width, as in key, got {tuple(value.shape)}.")
    if groups == 0 or heads % groups:
        raise ValueError(f"key: expected a number of heads that divides the {heads} query heads, got {groups}.")
    if query.dtype != key.dtype or query.dtype != value.dtype:
        raise ValueError(f"expected one dtype, got query {query.dtype}, key {key.dtype}, value {value.dtype}.")
    if query.device != key.device or query.device != value.device:
        raise ValueError(f"expected one device, got query {query.device}, key {key.device}, value {value.device}.")


def check_tokens(owner: str, tokens: Tensor, width: int) -> None:
    """Raise unless tokens are floating, (B, N, width): a width of one would broadcast in silence."""
    if not isinstance(tokens, Tensor) or tokens.ndim != 3 or tokens.shape[2] != width or tokens.dtype not in DTYPES:
        got = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"{owner}: expected floating tokens (batch, tokens, {width}), got {got}.")


def split_mask(mask: Tensor, query: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
    """Visible pairs and additive bias of a four-dimensional mask.

    Args:
        mask: broadcastable to (B, H, N, M). Bool: True is visible. Floating: added to the scores, and a key is hidden
            where it is -10000 or less.
        query: (B, H, N, D).
        n_keys: M.

    Returns:
        Bool mask, and the bias (zero where hidden) or None for a bool mask.

    Raises:
        ValueError: for another type or a shape that does not broadcast.
    """
    full = (query.shape[0], query.shape[1], query.shape[2], n_keys)
    if mask.ndim != 4 or any(have not in (1, want) for have, want in zip(mask.shape, full, strict=True)):
        raise ValueError(f"mask: expected a shape that broadcasts to (B, H, N, M) = {full}, got {tuple(mask.shape)}.")
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise ValueError(f"mask: expected bool (True is visible) or floating (added to the scores), got {mask.dtype}.")
    hidden = mask <= HIDDEN
    return ~hidden, mask.masked_fill(hidden, 0)


def repeat_groups(tensor: Tensor, heads: int) -> Tensor:
    """(B, G, M, D) -> (B, H, M, D): every key head serves H // G query heads in a row."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)
