"""Windows on a grid in pieces: a batch of windows, the other tokens among the keys of each; and the other tokens by
themselves, over all keys. Time and memory grow with N.

Dimensions: B batch, H query heads, G key/value heads, N tokens, D width; P windows, S patches of a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.cut import Cut, Piece, spread


@dataclass(frozen=True)
class Grid:
    """Rows and columns of patches, of a window, and by how much windows are shifted (both as (rows, columns))."""

    patches: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]

    @property
    def counts(self) -> tuple[int, int]:
        """Windows along rows and columns, the last ones filled up."""
        return -(-self.patches[0] // self.window[0]), -(-self.patches[1] // self.window[1])

    def windows(self, patches: Tensor) -> Tensor:
        """(B, G, rows * columns, D) -> (B * P, G, S, D). Shifted, the last windows hold what is left at both edges."""
        (rows, columns), (high, wide) = self.counts, self.window
        fill = [
            count * size - length for count, size, length in zip(self.counts, self.window, self.patches, strict=True)
        ]
        grid = F.pad(patches.unflatten(2, self.patches), (0, 0, 0, fill[1], 0, fill[0]))
        grid = grid.roll((-self.shift[0], -self.shift[1]), (2, 3)) if any(self.shift) else grid
        grid = grid.unflatten(3, (columns, wide)).unflatten(2, (rows, high))
        return grid.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(0, 2)

    def patches_of(self, windows: Tensor, batch: int) -> Tensor:
        """Inverse of `windows`."""
        (rows, columns), (high, wide) = self.counts, self.window
        grid = windows.unflatten(2, (high, wide)).unflatten(0, (batch, rows, columns)).permute(0, 3, 1, 4, 2, 5, 6)
        grid = grid.flatten(4, 5).flatten(2, 3)
        grid = grid.roll(self.shift, (2, 3)) if any(self.shift) else grid
        return grid[:, :, : self.patches[0], : self.patches[1]].flatten(2, 3)


def grid_cut(query: Tensor, key: Tensor, value: Tensor, *, allowed: Visible, grid: Grid, others: int) -> Cut:
    """Pieces in which every patch sees its window and the other tokens, and these see all.

    Args:
        query: (B, H, N, D), the patches last.
        key: (B, G, N, D).
        value: (B, G, N, Dv).
        allowed: the model's mask: nothing, or key padding.
        grid: of the patches.
        others: number of the other tokens.
    """
    batch, device = query.shape[0], query.device

    def windows(rows: Tensor) -> Tensor:
        return grid.windows(rows[:, :, others:])

    def with_others(rows: Tensor) -> Tensor:
        inside = windows(rows)
        if others == 0:
            return inside
        each = rows[:, None, :, :others].expand(-1, inside.shape[0] // batch, -1, -1, -1)
        return torch.cat([inside, each.flatten(0, 1)], 2)

    # Patches that meet in a window only because it holds both edges of the image carry different marks; fillings none.
    rows, columns = (torch.arange(length, device=device) for length in grid.patches)
    mark = 1 + (rows < grid.shift[0])[:, None] * 2 + (columns < grid.shift[1])
    mark = grid.windows(mark.flatten()[None, None, :, None])
    mask = (mark == mark.mT) & (mark > 0)
    mask = F.pad(mask, (0, others), value=True).repeat(batch, 1, 1, 1)
    if allowed.keys is not None:
        mask = mask & with_others(allowed.keys[:, None, :, None]).mT
    keys, values = with_others(key), with_others(value)
    inside = Piece(windows(query), keys, values, Visible(mask.shape[2], mask.shape[3], device, dense=mask))
    if others == 0:
        return Cut([inside], lambda found: grid.patches_of(found[0], batch))
    outside = Piece(query[:, :, :others], key, value, Visible(others, allowed.n_keys, device, keys=allowed.keys))

    def join(found: list[Tensor]) -> Tensor:
        return torch.cat([spread(found[1], batch, others), grid.patches_of(found[0], batch)], 2)

    return Cut([inside, outside], join)
