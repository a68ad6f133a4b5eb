"""Random blocks that are the same on every device, in every call and at every length, since they are computed.

A generator would draw other numbers for another length, so that padding or a cache would change what a query sees. Here
a draw is a hash of (seed, own block, number of the draw), scaled to the blocks that there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = (1 << 32) - 1


def drawn_blocks(own: Tensor, total: Tensor, many: int, seed: int) -> Tensor:
    """Blocks that the queries of a block see besides its neighbours: the same for the same arguments, all different.

    Args:
        own: number of the block, int64 of any shape (negative before the first token).
        total: number of blocks out of which to draw, broadcastable to `own`.
        many: how many to draw.
        seed: any non-negative integer.

    Returns:
        Int64 of shape (*own.shape, many); -1 where there are fewer blocks than asked for. The block itself and those
        before and after it are never drawn.
    """
    low, high = (own - 1).clamp(min=0), torch.minimum(own + 1, total - 1)
    near = (high - low + 1).clamp(min=0)
    others = (total - near).clamp(min=0)[..., None]
    # One draw out of each of `many` equal parts of the others, so that none is drawn twice.
    number = torch.arange(many, device=own.device)
    begin, end = number * others // many, (number + 1) * others // many
    chance = _hash(_hash(own[..., None] + seed * 7919 + 1) + number)
    block = begin + (chance * (end - begin) >> 32)
    block = torch.where(block >= low[..., None], block + near[..., None], block)
    return torch.where(end > begin, block, -1)


def _hash(number: Tensor) -> Tensor:
    """A number below 2**32 in which every bit of the given one matters. The factors keep products below 2**63."""
    number = number & _WORD
    for factor in (0x2545F491, 0x5851F42D):
        number = ((number ^ (number >> 16)) * factor) & _WORD
    return number ^ (number >> 15)
