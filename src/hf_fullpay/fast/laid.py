"""Rows laid out anew, each batch entry from a slot of its own: so that blocks and chunks begin at the first real token.

Dimensions: B batch, T slots of a tensor, L slots of the layout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fullpay.core.numbers import accumulate
from hf_fullpay.core.places import origins
from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.host import sdpa

Start = int | Tensor  # slot at which a layout begins: one for all, or (B,) integers


def places(start: Start, device: torch.device) -> Tensor:
    """Integers of shape (B or 1, 1). A sum, since a length given to torch.tensor would be a constant of a traced program."""
    return (start if isinstance(start, Tensor) else torch.zeros(1, dtype=torch.long, device=device) + start)[:, None]


def laid(rows: Tensor, start: Start, length: int) -> Tensor:
    """Slots start .. start + length - 1 of (B, *, T, D), zeros where there are none: (B, *, L, D)."""
    if not isinstance(start, Tensor):
        return F.pad(rows, (0, 0, -start, start + length - rows.shape[2]))
    slot = (start[:, None] + torch.arange(length, device=rows.device))[:, None, :, None]
    inside = (slot >= 0) & (slot < rows.shape[2])
    index = slot.clamp(0, rows.shape[2] - 1).expand(-1, rows.shape[1], -1, rows.shape[3])
    return torch.where(inside, rows.expand(start.shape[0], -1, -1, -1).gather(2, index), 0)


def grouped(rows: Tensor, size: int) -> Tensor:
    """(B, *, P * C, D) -> (B, *, P, C, D)."""
    if torch.compiler.is_exporting():  # views of symbolic sizes would put conditions on the length
        return rows.unfold(2, size, size).transpose(3, 4)
    return rows.unflatten(2, (-1, size))


def ungrouped(groups: Tensor) -> Tensor:
    """The inverse of `grouped`."""
    if torch.compiler.is_exporting():
        place = torch.arange(groups.shape[2] * groups.shape[3], device=groups.device)
        return groups[:, :, place // groups.shape[3], place % groups.shape[3]]
    return groups.flatten(2, 3)


def batched(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, dropout: float) -> Tensor:
    """Attention of groups side by side: query (B, Q, H, R, D), key and value (B, Q, G, K, D), mask (B or 1, Q, R or 1, K)
    give (B, Q, H, R, Dv)."""
    mask = mask.expand(query.shape[0], -1, -1, -1)[:, :, None]
    if torch.compiler.is_exporting():
        return sdpa(query, key, value, mask, scaling, dropout)
    flat = [x.flatten(0, 1) for x in (query, key, value, mask)]
    return sdpa(flat[0], flat[1], flat[2], flat[3], scaling, dropout).unflatten(0, query.shape[:2])


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
    return 0 if visible.keys is None else origins(visible.keys)[:, 0]


def group_means(rows: Tensor, alive: Tensor) -> Tensor:
    """Means over the existing rows of every group, the others being zero: (B, G, P, C, D) and (B or 1, P, C) give
    (B, G, P, D)."""
    wide = accumulate(rows.dtype)
    return (rows.sum(3, dtype=wide) / alive.sum(-1, dtype=wide).clamp_min(1)[:, None, :, None]).to(rows.dtype)
