"""Where queries stand among the key slots, and where a row begins: what reaches made of blocks and chunks count from.

Places are counted from the first key that a query sees, so that padding, packing and a cache change nothing.

Dimensions: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_fullpay.core.visible import Visible


def query_slots(allowed: Visible) -> Tensor:
    """Key slot at which every query stands, integers of shape (B or 1, H or 1, N, 1).

    A causal set says it; with as many queries as keys it is the query's own number; otherwise (a cache) a query stands
    at the last key that it sees, which is its own slot in a causal model; -1 where it sees none.

    Raises:
        ValueError: for several queries over another number of keys without a causal mask.
    """
    rows = torch.arange(allowed.n_queries, device=allowed.device)[None, None, :, None]
    if allowed.dense is None and allowed.offset is not None:
        return rows + allowed.offset
    if allowed.n_queries == allowed.n_keys:
        return rows
    if allowed.dense is None and allowed.n_queries != 1:
        raise ValueError(
            f"blocks and chunks: expected as many queries as keys or a causal mask that places them, got "
            f"{allowed.n_queries} queries and {allowed.n_keys} keys without one. They have no meaning in cross-attention."
        )
    return torch.where(allowed.to_dense(), torch.arange(allowed.n_keys, device=allowed.device), -1).amax(-1, True)


def origins(visible: Tensor) -> Tensor:
    """Slot of the first visible key along the last dimension, which is kept with length 1; 0 where there is none."""
    return visible.to(torch.uint8).argmax(-1, keepdim=True)


def is_causal(allowed: Visible) -> Tensor:
    """Whether no query sees a key after its own slot, bool of shape (B or 1, H or 1, 1, 1)."""
    if allowed.dense is None:
        known = allowed.offset is not None or allowed.n_queries != allowed.n_keys
        return torch.full((1, 1, 1, 1), known, device=allowed.device)
    later = torch.arange(allowed.n_keys, device=allowed.device) > query_slots(allowed)
    return ~(allowed.to_dense() & later).any(-1, keepdim=True).any(-2, keepdim=True)


def one_row(allowed: Visible) -> Visible:
    """The same set with the mask of a single query, where it is no square, held as key padding."""
    if allowed.dense is None or allowed.n_queries != 1 or allowed.dense.shape[1] != 1 or allowed.n_keys == 1:
        return allowed
    return Visible(1, allowed.n_keys, allowed.device, keys=allowed.to_dense()[:, 0, 0])
