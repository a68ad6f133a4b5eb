"""Windows reach: square windows on the patch grid of an image, shifted in every other layer.

    visible(i, j)  iff  patches i and j lie in the same window, or i or j is no patch

Windows begin every `size` rows and columns, at the first patch or, shifted, `shift` patches later; what is left at the
edges makes smaller windows, so patches from opposite edges never meet. Along an axis that fits into one window nothing is
shifted. Tokens before the patches (class, distillation and register tokens) see all and are seen by all.

Promise: the output of a patch, and its gradient, depend on no patch outside its window. Cost: N x (size^2 + other tokens)
scores.
Source: Liu et al. 2021, Swin Transformer. There a grid that does not divide is padded with patches that take part in
attention, here with ones that nobody sees; there one short axis stops the shift along both; and there windows have a
learned bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_fullpay.core.errors import check_count, wrong
from hf_fullpay.core.visible import Visible

GRID, LAYER = "patch_grid", "layer_index"
ALTERNATE = "alternate"
LARGEST = 1024  # of a window, in patches


@dataclass(frozen=True)
class Windows:
    """Windows on a grid of patches.

    Args:
        size: rows and columns of a window.
        shift: by how many patches windows are shifted, in every layer; "alternate" for size // 2 in every other layer,
            beginning with the second of its stack.

    A model's call brings what is read besides: `patch_grid`, (rows, columns) of the patches, which follow the other
    tokens (all tokens before the last rows * columns), or (rows, columns, others) to have the number of others checked;
    and `layer_index`, 0 if not given. Under Transformers both are found by themselves.
    """

    size: int = 7
    shift: int | str = ALTERNATE
    kind: ClassVar[str] = "windows"
    inputs: ClassVar[tuple[str, ...]] = (GRID, LAYER)

    def __post_init__(self) -> None:
        check_count("Windows(size=...)", self.size, high=LARGEST)
        if isinstance(self.shift, str):
            if self.shift != ALTERNATE:
                raise wrong("Windows(shift=...)", f"{ALTERNATE!r} or an integer from 0 to size - 1", self.shift)
        else:
            check_count("Windows(shift=...)", self.shift, low=0)
            if self.shift >= self.size:
                raise wrong("Windows(shift=...)", f"less than the size of a window, {self.size}", self.shift)

    @property
    def sees(self) -> str:
        """What a query sees, for promises."""
        return f"a window of {self.size} x {self.size} patches and the other tokens, and each of these sees all"

    def misfit(self, *, cross: bool, causal: bool, image: bool) -> str | None:
        """Why this reach makes no sense for an attention module; arguments as in `Full.misfit`."""
        if cross:
            return "windows have no meaning in cross-attention, whose queries and keys are different sequences"
        if causal:
            return "windows on a grid have no meaning in a decoder, whose tokens come one after another"
        if not image:
            return "windows need the patches of an image, which lie on a grid; text does not: WindowGlobal(...) is for text"
        return None

    def layout(self, allowed: Visible, given: Mapping[str, Any] | None) -> Layout:
        """Where the patches of a call lie.

        Raises:
            ValueError: for a grid that is missing or does not fit the tokens, and where there is no grid.
        """
        if allowed.offset is not None or allowed.n_queries != allowed.n_keys:
            raise ValueError(
                "windows: expected the patches of an image as queries and as keys, without causality, got "
                f"{allowed.n_queries} queries, {allowed.n_keys} keys{'' if allowed.offset is None else ', causal'}."
            )
        grid, layer = (given or {}).get(GRID), (given or {}).get(LAYER, 0)
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise wrong(LAYER, "an integer from 0 on", layer)
        if not isinstance(grid, Sequence) or len(grid) not in (2, 3):
            raise wrong(GRID, "(rows, columns) or (rows, columns, other tokens)", grid, _HOW)
        rows, columns, *rest = grid
        check_count(GRID, rows)
        check_count(GRID, columns)
        for count in rest:
            check_count(f"{GRID} (other tokens)", count, low=0)
        others = rest[0] if rest else allowed.n_queries - rows * columns
        if others < 0 or others + rows * columns != allowed.n_queries:
            tokens = f"{others} other tokens and " if rest else ""
            raise ValueError(
                f"{GRID}: expected {tokens}{rows} x {columns} patches to be the {allowed.n_queries} tokens, got "
                f"{rows * columns + max(others, 0)}. The patches of this model do not lie on that grid."
            )
        shift = self.shift if isinstance(self.shift, int) else layer % 2 * (self.size // 2)
        return Layout(others, Axis.of(rows, self.size, shift), Axis.of(columns, self.size, shift))

    def restrict(self, allowed: Visible, given: Mapping[str, Any] | None = None, batch: int = 1) -> Visible:
        """Keys within reach, out of those that the mask allows, pair by pair: N x M, the reference.

        Raises:
            ValueError: as `layout`.
        """
        layout = self.layout(allowed, given)
        window = (
            layout.rows.windows(allowed.device)[:, None] * 2**20 + layout.columns.windows(allowed.device)
        ).flatten()
        same = torch.nn.functional.pad(window[:, None] == window, (layout.others, 0, layout.others, 0), value=True)
        return Visible(allowed.n_queries, allowed.n_keys, allowed.device, dense=allowed.to_dense() & same)


_HOW = (
    "Under Transformers it is read off pixel_values and travels as an argument of the call: models whose layers do not pass "
    "such arguments on cannot run windows. On plain tensors say given={'patch_grid': (rows, columns)}."
)


@dataclass(frozen=True)
class Axis:
    """Windows along rows or columns: `length` patches, windows of `size` that begin at `shift`."""

    length: int
    size: int
    shift: int

    @classmethod
    def of(cls, length: int, size: int, shift: int) -> Axis:
        """One window, and no shift, where the axis fits into it."""
        return cls(length, length, 0) if length <= size else cls(length, size, shift)

    def windows(self, device: torch.device) -> Tensor:
        """Number of the window of each patch."""
        return (torch.arange(self.length, device=device) + self.size - self.shift) // self.size


@dataclass(frozen=True)
class Layout:
    """Tokens of a call: `others` first, then the patches, row by row."""

    others: int
    rows: Axis
    columns: Axis
