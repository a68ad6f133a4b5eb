"""Running sums, extremes and samples of numbers that come a tile at a time, per head."""

from __future__ import annotations

import torch
from torch import Tensor


class Mean:
    """Mean over rows, per head."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.count: Tensor | float = 0.0

    def add(self, values: Tensor, live: Tensor) -> None:
        """Values (B or 1, H or 1, R) of rows, and which of them count, likewise."""
        values, live = torch.broadcast_tensors(values, live)
        self.total = self.total + values.masked_fill(~live, 0).sum((0, 2), dtype=torch.float64).cpu()
        self.count = self.count + live.sum((0, 2)).cpu()

    def result(self) -> list[float]:
        """By head; NaN for one without rows."""
        return (torch.as_tensor(self.total) / self.count).tolist()


class Extreme:
    """Largest (sign 1) or smallest (sign -1) value over rows, per head."""

    def __init__(self, sign: int) -> None:
        self.sign, self.value = sign, torch.tensor(-torch.inf)

    def add(self, values: Tensor, live: Tensor) -> None:
        """As in `Mean.add`. NaN stays."""
        values, live = torch.broadcast_tensors(values, live)
        signed = (self.sign * values).masked_fill(~live, -torch.inf).amax((0, 2)).float().cpu()
        self.value = torch.maximum(self.value, signed)

    def result(self) -> list[float]:
        """By head; NaN for one without rows."""
        return (self.sign * self.value.masked_fill(self.value == -torch.inf, torch.nan)).tolist()


class Sample:
    """An even sample of at most `capacity` values per head: every k-th, k doubled whenever it is full."""

    def __init__(self, capacity: int = 1 << 14) -> None:
        self.capacity, self.step, self.skip = capacity, 1, 0
        self.parts: list[Tensor] = []

    def add(self, values: Tensor) -> None:
        """Values (H, X); NaN for those that do not count."""
        self.parts.append(values[:, self.skip :: self.step].float().cpu())
        self.skip = (self.skip - values.shape[1]) % self.step
        while sum(part.shape[1] for part in self.parts) > self.capacity:
            self.parts = [torch.cat(self.parts, 1)[:, ::2]]
            self.step *= 2

    def quantiles(self, *shares: float) -> list[list[float]]:
        """For each share the quantile by head, over values that are not NaN."""
        return torch.cat(self.parts, 1).nanquantile(torch.tensor(shares), dim=1).tolist()
