"""Checks on attention weights: floor, coverage, entropy, row sums. Hidden keys and padded rows are left out.

Dimensions: B batch, H heads, N queries, M keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightStatistics:
    """Numbers over all rows of a weight tensor; the same for uniform attention stands beside where it means something.

    Attributes:
        least: smallest weight of a visible key.
        coverage: mean over rows of n * (smallest weight); 1 for uniform attention, 0 where a key gets nothing.
        least_coverage: smallest such product.
        below: share of visible keys under the absolute threshold, and `below_uniform` the same for uniform attention.
        below_relative: share of visible keys under a tenth of the uniform weight 1 / n.
        entropy: mean entropy of a row in nats, and `entropy_relative` divided by log n (rows with n > 1).
        row_error: largest distance of a row's sum from one.
        rows: number of rows measured.
    """

    least: float
    coverage: float
    least_coverage: float
    below: float
    below_uniform: float
    below_relative: float
    entropy: float
    entropy_relative: float
    row_error: float
    rows: int


def weight_statistics(weights: Tensor, visible: Tensor, threshold: float = 0.01) -> WeightStatistics:
    """Measure weights.

    Args:
        weights: (B, H, N, M).
        visible: bool, broadcastable to weights; rows without any visible key are left out.
        threshold: absolute weight that counts as paid.

    Raises:
        ValueError: if no row sees any key.
    """
    weights = weights.detach().double()
    visible = visible.expand_as(weights)
    counts = visible.sum(-1)
    real = counts > 0
    if not real.any():
        raise ValueError("weight_statistics: expected at least one row with a visible key, got none.")
    weights, visible, n = weights[real], visible[real], counts[real].double()
    least = weights.masked_fill(~visible, torch.inf).amin(-1)
    # 0 * log 0 = 0, without the NaN.
    entropy = -(weights * weights.clamp_min(torch.finfo(weights.dtype).tiny).log()).sum(-1)
    below = ((weights < threshold) & visible).sum(-1) / n
    below_relative = ((weights < 0.1 / n[:, None]) & visible).sum(-1) / n
    several = n > 1
    relative = entropy[several] / n[several].log() if several.any() else torch.ones(1)
    return WeightStatistics(
        least=float(least.min()),
        coverage=float((least * n).mean()),
        least_coverage=float((least * n).min()),
        below=float(below.mean()),
        below_uniform=float((1 / n < threshold).double().mean()),
        below_relative=float(below_relative.mean()),
        entropy=float(entropy.mean()),
        entropy_relative=float(relative.mean()),
        row_error=float((weights.sum(-1) - 1).abs().max()),
        rows=int(real.sum()),
    )
