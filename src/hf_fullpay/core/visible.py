"""Which keys a query sees, held as compactly as the case allows.

Dimensions: B batch, H query heads, N queries, M keys.

A visible set is the intersection of up to four parts. The first three need no N x M memory:

    keys    (B, M) bool            key padding, the same for every query
    offset  int                    causality: query i sees keys j <= i + offset
    window  int, with an offset    band: query i also needs j > i + offset - window
    dense   (B|1, H|1, N, M) bool  anything else
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Visible:
    """The keys that each of N queries may see among M keys.

    Args:
        n_queries: N.
        n_keys: M.
        device: where masks are built.
        keys: (B, M) bool, True for keys that exist; None when none is hidden by padding.
        dense: (B or 1, H or 1, N, M) bool, True for visible pairs; None when no such pattern applies.
        offset: causality, query i sees keys j <= i + offset; None for no causality.
        window: band, query i sees only keys j > i + offset - window; needs an offset.
    """

    n_queries: int
    n_keys: int
    device: torch.device
    keys: Tensor | None = None
    dense: Tensor | None = None
    offset: int | None = None
    window: int | None = None

    def columns(self, start: int, stop: int) -> tuple[int, int]:
        """Range of keys outside which no query of rows start..stop-1 sees anything."""
        if self.offset is None:
            return 0, self.n_keys
        high = min(max(stop + self.offset, 0), self.n_keys)
        low = 0 if self.window is None else min(max(start + self.offset - self.window + 1, 0), high)
        return low, high

    def tile(self, start: int, stop: int, low: int = 0, high: int | None = None) -> Tensor | None:
        """Mask of queries start..stop-1 and keys low..high-1.

        Returns:
            Bool of shape (B or 1, H or 1, rows, columns), rows being 1 where all rows are alike; None when all is visible.
        """
        high = self.n_keys if high is None else high
        mask = None if self.dense is None else self.dense[:, :, start:stop, low:high]
        if self.keys is not None:
            padding = self.keys[:, None, None, low:high]
            mask = padding if mask is None else mask & padding
        if self.offset is not None:
            # Skip the triangle when no row of the tile cuts through it.
            cuts_high = high - 1 > start + self.offset
            cuts_low = self.window is not None and low <= stop - 1 + self.offset - self.window
            if cuts_high or cuts_low:
                query = torch.arange(start, stop, device=self.device)[:, None] + self.offset
                key = torch.arange(low, high, device=self.device)[None, :]
                triangle = key <= query
                if self.window is not None:
                    triangle &= key > query - self.window
                mask = triangle[None, None] if mask is None else mask & triangle
        return mask

    def to_dense(self) -> Tensor:
        """The whole mask, (B or 1, H or 1, N, M) bool. Costs N x M."""
        mask = self.tile(0, self.n_queries)
        if mask is None:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        return mask.expand(mask.shape[0], mask.shape[1], self.n_queries, self.n_keys)

    def counts(self) -> Tensor:
        """Number of visible keys per query, float32 of shape (B or 1, H or 1, N or 1, 1). Linear in N unless dense."""
        if self.dense is not None:
            return self.to_dense().sum(-1, keepdim=True, dtype=torch.float32)
        if self.offset is None:
            if self.keys is None:
                # A product, since a length given to torch.full would be a constant of an exported program.
                return torch.ones(1, 1, 1, 1, device=self.device) * self.n_keys
            return self.keys.sum(-1, dtype=torch.float32)[:, None, None, None]
        last = torch.arange(self.n_queries, device=self.device) + self.offset
        stop = (last + 1).clamp(0, self.n_keys)
        begin = torch.zeros_like(stop) if self.window is None else (last + 1 - self.window).clamp(0, self.n_keys)
        if self.keys is None:
            return (stop - begin).float()[None, None, :, None]
        seen = torch.nn.functional.pad(self.keys.cumsum(-1), (1, 0))
        return (seen[:, stop] - seen[:, begin]).float()[:, None, :, None]

    def within(self, window: int) -> Visible:
        """This set cut to a band: query at position p sees only p - window < j <= p.

        The position of query i is key slot i when there are as many queries as keys. With a cache (fewer queries than
        keys) a query stands at the last key that it sees, which is its own slot in a causal model.
        """
        if self.dense is not None and self.n_queries != self.n_keys:
            slots = torch.arange(self.n_keys, device=self.device)
            mask = self.to_dense()
            last = torch.where(mask, slots, -1).amax(-1, keepdim=True)
            return replace(self, keys=None, offset=None, window=None, dense=mask & (slots > last - window))
        if self.offset is None and self.n_queries != self.n_keys:
            if self.n_queries != 1:
                raise ValueError(
                    f"band: expected as many queries as keys or a causal mask that places them, got {self.n_queries} "
                    f"queries and {self.n_keys} keys without one. A band has no meaning in cross-attention."
                )
            if self.keys is None:
                return replace(self, offset=self.n_keys - 1, window=window)
            slots = torch.arange(self.n_keys, device=self.device)
            last = torch.where(self.keys, slots, -1).amax(-1, keepdim=True)
            return replace(self, keys=self.keys & (slots > last - window))
        narrow = window if self.window is None else min(window, self.window)
        return replace(self, offset=self.offset or 0, window=narrow)
