"""Overlapping chunks with a gated exchange of summaries (LIA).

    chunks of `size` tokens start every size - overlap tokens, at the first key that the query sees
    local_i  = mean over the chunks that hold token i of softmax attention inside the chunk
    far_i    = softmax attention over the chunk summaries (mean key, mean value of a chunk's visible tokens)
    out_i    = (1 - g) * local_i + g * far_i,  g per head

Causal: inside a chunk up to i, and summaries of chunks that ended before i. A query before the end of the first chunk has
no summary to read and pays only local attention (g counts as 0 there); one whose own chunk holds nothing that it sees, a
pad, reads only summaries. A mask of pairs counts as causal where no query sees a later key.
Chunks are counted in slots from the first visible key: padding, packing and a cache move no border.

Promise: every output depends on every visible input (0 < g < 1); no summary tells of the future; weights sum to one.
Cost: N size^2 / (size - overlap) + N^2 / (size - overlap) scores. Memory: linear in N for what attention needs, and where
it is causal one mask of N^2 / (size - overlap) bytes, shared by all heads.
Source: local attention with information exchange, there with g from the input; here one learned number per head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_fullpay.core.errors import check_count, check_flag, check_number, wrong
from hf_fullpay.core.numbers import PerHead, freeze, largest, smallest
from hf_fullpay.core.visible import Visible
from hf_fullpay.reach.band import LONGEST


@dataclass(frozen=True)
class Chunks:
    """Chunks of `size` tokens, each `overlap` tokens into the one before, that exchange summaries.

    Args:
        size: tokens of a chunk. Over the length of the sequence plus `overlap` there is one chunk.
        overlap: tokens that a chunk shares with the one before it, less than size.
        exchange: g, the part of an output that comes from the summaries, one number or one per head.
        learnable: whether `convert` makes g a parameter, which starts at `exchange`.
    """

    size: int = 128
    overlap: int = 32
    exchange: PerHead = 0.1
    learnable: bool = True
    kind: ClassVar[str] = "chunks"
    inputs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "exchange", freeze(self.exchange))
        check_count("Chunks(size=...)", self.size, high=LONGEST)
        check_count("Chunks(overlap=...)", self.overlap, low=0, high=LONGEST)
        if self.overlap >= self.size:
            raise wrong("Chunks(overlap=...)", f"less than the size of {self.size}", self.overlap)
        check_number("Chunks(exchange=...)", self.exchange, low=0, high=1, per_head=True)
        check_flag("Chunks(learnable=...)", self.learnable)
        if self.learnable and not self.mixes:
            raise wrong(
                "Chunks(exchange=...)", "a start inside (0, 1) for a learnable exchange", self.exchange,
                "A sigmoid never reaches its ends; say learnable=False for a constant.",
            )  # fmt: skip

    @property
    def stride(self) -> int:
        """Tokens from the start of a chunk to the start of the next."""
        return self.size - self.overlap

    @property
    def mixes(self) -> bool:
        """Whether every head has a part from its chunks and a part from the summaries."""
        return smallest(self.exchange) > 0 and largest(self.exchange) < 1

    def restrict(self, allowed: Visible) -> Visible:
        """Keys within reach: all, near ones themselves and far ones in summaries."""
        return allowed

    def misfit(self, *, cross: bool, causal: bool, image: bool) -> str | None:
        """Why this reach makes no sense for an attention module; arguments as in `Full.misfit`."""
        return (
            "chunks have no meaning in cross-attention, whose queries and keys are different sequences"
            if cross
            else None
        )


def chunk_weights(
    scores: Tensor,
    visible: Tensor,
    slots: Tensor,
    origin: Tensor,
    causal: Tensor,
    *,
    size: int,
    stride: int,
    exchange: Tensor | float,
    softmax: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Reference: the effective weight of every key, a summary's divided equally among its chunk's visible tokens.

    Args:
        scores: (B, H, N, M).
        visible: (B or 1, H or 1, N, M) bool.
        slots: where queries stand, integers that broadcast against (B, H, N, 1).
        origin: slot of the first visible key, likewise.
        causal: whether summaries must have ended before the query, bool, likewise.
        size, stride: tokens of a chunk, and between starts.
        exchange: g, a number or (1, H, 1, 1).
        softmax: weights from scores and a mask, all zeros where nothing is visible.
    """
    key, query = torch.arange(scores.shape[-1], device=scores.device) - origin, slots - origin
    local, holding, logits, shares = torch.zeros_like(scores), torch.zeros_like(scores[..., :1]), [], []
    for start in range(0, scores.shape[-1], stride):
        inside = visible & (key >= start) & (key < start + size)
        some = inside.any(-1, keepdim=True)
        holds = some & (query >= start) & (query < start + size)
        local = local + softmax(scores, inside & holds)
        holding = holding + holds
        shares.append(inside / inside.sum(-1, keepdim=True).clamp_min(1).to(scores.dtype))
        ended = some & (~causal | (query >= start + size))
        logits.append((scores * shares[-1]).sum(-1, keepdim=True).masked_fill(~ended, -torch.inf))
    summaries = torch.cat(logits, -1)
    among = softmax(summaries, summaries > -torch.inf)
    far = sum(among[..., chunk, None] * share for chunk, share in enumerate(shares))
    has_local, has_far = holding > 0, (summaries > -torch.inf).any(-1, keepdim=True)
    g = torch.where(has_far & has_local, exchange, has_far.to(scores.dtype))
    return (1 - g) * local / holding.clamp_min(1) + g * far
