"""Softmax: the ordinary payment, w_i = softmax of the scores over the visible keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Softmax:
    """Ordinary softmax; no promise."""

    kind: ClassVar[str] = "softmax"

    def least(self, n: int) -> float:
        """Weight promised to every one of n visible keys."""
        return 0.0


def softmax_weights(scores: Tensor, visible: Tensor) -> Tensor:
    """Reference: softmax over the visible keys; a row without any is all zeros, with zero gradients.

    Args:
        scores: (B, H, N, M).
        visible: (B or 1, H or 1, N, M) bool.
    """
    some = visible.any(-1, keepdim=True)
    # A row that sees nothing gets equal scores instead of -inf, which would be NaN, and is zeroed afterwards.
    weights = torch.softmax(scores.masked_fill(~visible & some, -torch.inf).masked_fill(~some, 0), dim=-1)
    return torch.where(some, weights, 0)
