"""A local reach as a few batches of small, ordinary attentions: its queries cut into pieces, each with the keys it sees.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_fullpay.core.visible import Visible


@dataclass(frozen=True, eq=False)
class Piece:
    """Some queries, and keys among which are all that they see.

    Args:
        query: (b, H, n, D).
        key: (b, G, m, D).
        value: (b, G, m, Dv).
        visible: which of the m keys each of the n queries sees.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Visible


@dataclass(frozen=True, eq=False)
class Cut:
    """The pieces, and how to put together what is computed for each.

    Args:
        pieces: disjoint in their queries, which are all queries.
        join: from one tensor (b or 1, h, n or 1, x) for each piece to (B, h, N, x), for any h and x.
    """

    pieces: list[Piece]
    join: Callable[[list[Tensor]], Tensor]


def whole(query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Cut:
    """One piece: nothing is cut."""
    return Cut([Piece(query, key, value, visible)], lambda parts: parts[0])


def take(rows: Tensor, places: Tensor) -> Tensor:
    """Rows of (B, G, M, D) at places (B, n) that differ from one batch entry to the next: (B, G, n, D)."""
    index = places[:, None, :, None].expand(rows.shape[0], rows.shape[1], places.shape[1], rows.shape[3])
    return torch.gather(rows, 2, index)


def spread(part: Tensor, batch: int, rows: int) -> Tensor:
    """(b or 1, h, n or 1, x) to (batch, h, rows, x)."""
    return part.expand(batch, part.shape[1], rows, part.shape[3])
