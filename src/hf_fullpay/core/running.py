"""Sum and number of the visible values up to some key, carried from step to step of a text.

The mean over everything before a query then costs O(Dv) for a new token, whatever the length of the text.
Dimensions: B batch, G key/value heads, N new keys, M keys, Dv width of value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE = 256  # keys summed at once on the CPU, where torch writes an FP64 copy of what it sums: it should stay in cache


@dataclass(frozen=True, eq=False)
class RunningSum:
    """A running sum; never changed in place, so that copies of a cache may share it.

    Args:
        total: (B, G, N, Dv), sums over the keys up to each of N; FP64, or FP32 on devices without it, since thousands
            of additions must not add up their rounding.
        count: (B or 1, 1, N, 1), numbers of those keys, in the same type.
    """

    total: Tensor
    count: Tensor

    @classmethod
    def over(cls, value: Tensor, keys: Tensor | None) -> RunningSum:
        """The sum over all keys at once (N = 1).

        Args:
            value: (B, G, M, Dv); what lies under hidden keys does not matter, NaN included.
            keys: (B, M) bool, True for visible keys; None for all.
        """
        total = cls.of_nothing(value)
        size = _PIECE if value.device.type == "cpu" else value.shape[2]
        for start in range(0, value.shape[2], size):
            piece = None if keys is None else keys[:, start : start + size]
            if piece is not None and bool(piece.all()):
                piece = None  # hiding costs more than summing
            shown, ones = _shown(value[:, :, start : start + size], piece)
            part = shown.sum(2, keepdim=True, dtype=_wide(value)), ones.sum(2, keepdim=True)
            total = cls(total.total + part[0], total.count + part[1])
        return total

    @classmethod
    def of_nothing(cls, value: Tensor) -> RunningSum:
        """The sum before any key, for values like these."""
        zeros = torch.zeros(value.shape[0], value.shape[1], 1, value.shape[3], dtype=_wide(value), device=value.device)
        return cls(zeros, zeros[:1, :1, :, :1])

    def then(self, value: Tensor, keys: Tensor | None) -> RunningSum:
        """The sums at each of N new keys; value (B, G, N, Dv) and keys (B, N) as in `over`. Needs the last sum only."""
        last = self.last
        if keys is None and value.shape[2] == 1:  # the common step of decoding, in as few operations as possible
            return RunningSum(last.total + value, last.count + 1)
        shown, ones = _shown(value, keys)
        return RunningSum(last.total + shown.cumsum(2, dtype=last.total.dtype), last.count + ones.cumsum(2))

    def without(self, value: Tensor, keys: Tensor | None) -> RunningSum:
        """The sum before the given keys were added."""
        gone = RunningSum.over(value, keys)
        return RunningSum(self.total - gone.total, self.count - gone.count)

    @property
    def last(self) -> RunningSum:
        """The sum at the last key."""
        if self.total.shape[2] == 1:
            return self
        return RunningSum(self.total[:, :, -1:].clone(), self.count[:, :, -1:].clone())  # not a view of all of them

    @property
    def mean(self) -> Tensor:
        """(B, G, N, Dv), zero where nothing is visible; FP32 or FP64."""
        return self.total / self.count.clamp(min=1)

    def rows(self, change: Callable[[Tensor], Tensor]) -> RunningSum:
        """With the batch dimension reordered, repeated or cut."""
        return RunningSum(change(self.total), change(self.count) if self.count.shape[0] > 1 else self.count)


def _wide(value: Tensor) -> torch.dtype:
    return torch.float64 if value.device.type in ("cpu", "cuda") else torch.float32


def _shown(value: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values with hidden ones zeroed, and a one for every visible key, (B or 1, 1, N, 1)."""
    if keys is None:
        return value, torch.ones(1, 1, value.shape[2], 1, dtype=_wide(value), device=value.device)
    here = keys[:, None, :, None]
    return torch.where(here, value, 0.0), here.to(_wide(value))
