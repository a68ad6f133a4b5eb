"""Means by distance between two tokens, in bins that grow with the distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class ByDistance:
    """Means of numbers by distance, over everything that was added under a label."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}  # sums and counts (2, distances)

    def add(self, label: str, numbers: Tensor, distance: Tensor) -> None:
        """Numbers (k,) at distances (k,), which are integers of 0 and more."""
        if not len(distance):
            return
        held = self._held.get(label, torch.zeros(2, 0, dtype=torch.float64))
        size = max(int(distance.max()) + 1, held.shape[1])
        here = by_distance(torch.stack([numbers, torch.ones_like(numbers)]), distance, size)
        self._held[label] = torch.nn.functional.pad(held, (0, size - held.shape[1])) + here.cpu()

    def lines(self) -> tuple[list[float], dict[str, list[float]]]:
        """Distances from 1, two bins to an octave, and the means in them by label; NaN where nothing or zero is, for which
        logarithmic axes have no place."""
        size = max((held.shape[1] for held in self._held.values()), default=0)
        held = {name: torch.nn.functional.pad(held, (0, size - held.shape[1])) for name, held in self._held.items()}
        known = torch.arange(1, max(size, 1))
        bins = (2 * known.double().log2() + 1e-9).floor().long()
        insides = [known[bins == number] for number in bins.unique()]
        series = {}
        for name, (sums, counts) in held.items():
            means = [float(sums[inside].sum() / counts[inside].sum()) for inside in insides]
            series[name] = [mean if mean > 0 else math.nan for mean in means]
        return [round(math.exp(inside.double().log().mean()), 2) for inside in insides], series


def by_distance(numbers: Tensor, distance: Tensor, size: int) -> Tensor:
    """Sums of numbers (lines, k) by distance (k,): (lines, size), in FP64."""
    zeros = numbers.new_zeros(numbers.shape[0], size, dtype=torch.float64)
    return zeros.index_add_(1, distance, numbers.double())
