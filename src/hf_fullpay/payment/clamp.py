"""Clamp: the weights closest to softmax (in KL divergence) that give every visible key its floor.

    f_i = min(floor, budget_h / n_i)          or budget_h / n_i when no floor is set
    p_ij = max(a_i * w_ij, f_i),  a_i such that the row sums to one

Promise: p_ij >= f_i; rows sum to one; the order of keys is unchanged (keys at the floor are equal). Keys above the floor
keep their ratios, so strong preferences are less diluted than by the mixture at the same floor; but a key at the floor
sends no gradient to its score. Cost: a second pass over the scores of a row.
Dropout acts on what a key gets above its floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_fullpay.payment.mixture import Budget


@dataclass(frozen=True)
class Clamp(Budget):
    """Softmax lifted to a floor; see `Budget` for the options."""

    kind: ClassVar[str] = "clamp"


def floor_of(floor: float | None, budget: Tensor | float, counts: Tensor) -> Tensor:
    """f_i, broadcasting against (B, H, N, 1); arguments as in `mixture.share`."""
    given = budget / counts.clamp_min(1)
    return given if floor is None else torch.minimum(given, torch.full_like(given, floor))


def clamp_weights(weights: Tensor, visible: Tensor, least: Tensor) -> Tensor:
    """Reference: p = max(a w, f) with the exact a, by sorting every row.

    With the weights in descending order, the k largest stay free for exactly one k: the largest k for which the k-th
    weight, scaled by a_k = (1 - (n - k) f) / (sum of the k largest), still lies above f.

    Args:
        weights: w, (B, H, N, M).
        visible: (B or 1, H or 1, N, M) bool.
        least: f, broadcasting against (B, H, N, 1).
    """
    counts = visible.sum(-1, keepdim=True).to(weights.dtype)
    ordered = weights.detach().sort(-1, descending=True).values
    free = torch.arange(1, weights.shape[-1] + 1, device=weights.device)
    scale = (1 - (counts - free) * least.detach()) / ordered.cumsum(-1).clamp_min(torch.finfo(weights.dtype).tiny)
    is_free = (ordered * scale > least.detach()) & (free <= counts)
    k = (is_free * free).amax(-1, keepdim=True)
    threshold = ordered.gather(-1, (k - 1).clamp_min(0))
    above = visible & (weights.detach() >= threshold) & (k > 0)
    kept = torch.where(above, weights, 0)
    total = kept.sum(-1, keepdim=True)
    a = (1 - (counts - above.sum(-1, keepdim=True)) * least) / torch.where(total > 0, total, 1)
    return torch.where(above, a * weights, torch.where(visible, least, 0))
