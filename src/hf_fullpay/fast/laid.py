"""Rows laid out anew, each batch entry from a slot of its own: so that blocks and chunks begin at the first real token.

Dimensions: B batch, T slots of a tensor, L slots of the layout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fullpay.core.numbers import accumulate
from hf_fullpay.core.visible import Visible

Start = int | Tensor  # slot at which a layout begins: one for all, or (B,) integers


def laid(rows: Tensor, start: Start, length: int) -> Tensor:
    """Slots start .. start + length - 1 of (B, *, T, D), zeros where there are none: (B, *, L, D)."""
    if not isinstance(start, Tensor):
        return F.pad(rows, (0, 0, -start, start + length - rows.shape[2]))
    slot = (start[:, None] + torch.arange(length, device=rows.device))[:, None, :, None]
    inside = (slot >= 0) & (slot < rows.shape[2])
    index = slot.clamp(0, rows.shape[2] - 1).expand(-1, rows.shape[1], -1, rows.shape[3])
    return torch.where(inside, rows.expand(start.shape[0], -1, -1, -1).gather(2, index), 0)


def existing(visible: Visible, start: Start, length: int) -> Tensor:
    """Which slots of a layout hold a key that exists, bool (B or 1, L)."""
    keys = visible.keys
    if keys is None:
        keys = torch.ones(1, visible.n_keys, dtype=torch.bool, device=visible.device)
    return laid(keys[:, None, :, None].to(torch.uint8), start, length)[:, 0, :, 0].bool()


def last_key(visible: Visible) -> Start:
    """Slot of a single query: where causality puts it, else at the last key that exists; at 0 if there is none."""
    if visible.offset is not None:
        return visible.offset
    if visible.keys is None:
        return visible.n_keys - 1
    return torch.where(visible.keys, torch.arange(visible.n_keys, device=visible.device), 0).amax(-1)


def first_key(visible: Visible) -> Start:
    """Slot of the first key that exists; 0 where there is none."""
    return 0 if visible.keys is None else visible.keys.to(torch.uint8).argmax(-1)


def group_means(rows: Tensor, alive: Tensor) -> Tensor:
    """Means over the existing rows of every group, the others being zero: (B, G, P, C, D) and (B or 1, P, C) give
    (B, G, P, D)."""
    # A power of two keeps half-precision sums in range and is exact in every dtype.
    power = 2.0 ** (rows.shape[3].bit_length() - 1)
    sums = rows.new_full((1, rows.shape[3]), 1 / power) @ rows
    counts = alive.sum(-1, dtype=accumulate(rows.dtype)).clamp_min(1)[:, None, :, None, None]
    return (sums * (power / counts)).squeeze(3).to(rows.dtype)
