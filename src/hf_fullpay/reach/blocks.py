"""Blocks with relays: a query sees its own block exactly, and every other block through one relay.

    relay of block p for query i:  kbar, vbar = means over the n visible tokens of the block
    logit = scaling * q_i . kbar + log n,  in one joint softmax with the tokens of the own block

The score of a mean key is the mean of the scores, and a relay's value is the mean of its tokens' values, so this equals
softmax over all visible keys with the scores outside the own block replaced by their block's mean:

    z_ij = s_ij in the own block,  mean of s over the visible tokens of j's block elsewhere

That is the reference, and it gives every key an effective weight: an equal part of its relay's. A causal query sees of
later blocks nothing, and of earlier ones everything, so only relays of blocks that ended before it speak.

Blocks are counted in slots from the first key that the query sees: padding, packing and a cache move no border. A class
token in front is a token of the first block like any other.

Promise: every output depends on every visible input, its own block token by token; no relay tells of the future.
Cost: N (size + N / size) scores: of the products of full attention, 74, 87, 96, 98 % are saved at 512, 1k, 4k, 16k tokens
with blocks of 128, of causal attention's 49, 73, 92, 97 % (`Blocks.scores_saved`).
Memory: keys and values twice while N <= size^2, beyond it (N / size)^2 rows of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_fullpay.core.errors import check_count
from hf_fullpay.core.visible import Visible
from hf_fullpay.reach.band import LONGEST


@dataclass(frozen=True)
class Blocks:
    """Own block of `size` tokens exactly, every other block through its relay. A size over the length is full reach."""

    size: int = 128
    kind: ClassVar[str] = "blocks"
    inputs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_count("Blocks(size=...)", self.size, high=LONGEST)

    def restrict(self, allowed: Visible) -> Visible:
        """Keys within reach: all, since a relay stands for its tokens."""
        return allowed

    def misfit(self, *, cross: bool, causal: bool, image: bool) -> str | None:
        """Why this reach makes no sense for an attention module; arguments as in `Full.misfit`."""
        return (
            "blocks have no meaning in cross-attention, whose queries and keys are different sequences"
            if cross
            else None
        )

    def scores_saved(self, n: int, *, causal: bool = False) -> float:
        """Part of the products q . k of full attention over n tokens that is not computed (of n (n + 1) / 2 if causal,
        although blocks compute whole squares)."""
        blocks = -(-n // self.size)
        ours = blocks * min(self.size, n) * (min(self.size, n) + blocks)
        return 1 - ours / (n * (n + 1) / 2 if causal else n * n)


def relayed_scores(scores: Tensor, visible: Tensor, slots: Tensor, origin: Tensor, size: int) -> Tensor:
    """Reference: scores outside the own block replaced by the mean over the visible tokens of their block.

    Args:
        scores: (B, H, N, M).
        visible: (B or 1, H or 1, N, M) bool.
        slots: where queries stand, integers that broadcast against (B, H, N, 1).
        origin: slot from which blocks are counted, likewise.
        size: tokens of a block.

    Returns:
        (B, H, N, M); entries at hidden keys have no meaning.
    """
    keys = torch.arange(scores.shape[-1], device=scores.device)
    block = (keys - origin).div(size, rounding_mode="floor")
    own = block == (slots - origin).div(size, rounding_mode="floor")
    index = block.clamp_min(0).expand(scores.shape)  # what lies before the origin is hidden
    visible = visible.expand(scores.shape)
    empty = scores.new_zeros(*scores.shape[:-1], scores.shape[-1] // size + 1)
    sums = empty.scatter_add(-1, index, scores.masked_fill(~visible, 0))
    counts = empty.scatter_add(-1, index, visible.to(scores.dtype))
    return torch.where(own, scores, (sums / counts.clamp_min(1)).gather(-1, index))
