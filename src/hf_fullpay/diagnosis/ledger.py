"""The worst number of every promise, by layer and head, as the checks find it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor


class Ledger:
    """What was found so far.

    Attributes:
        worst: numbers (H,) by promise and layer.
        block: where a hidden state first left a block with NaN or infinity; "" for nowhere.
        notes: what was not checked, and why.
        is_ordinary: whether every layer runs ordinary attention.
    """

    def __init__(self) -> None:
        self.worst: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self.block, self.block_index = "", -1
        self.notes: list[str] = []
        self.is_ordinary = True

    def highest(self, name: str, layer: int, values: Tensor) -> None:
        """Numbers (H,) of which small ones are good."""
        self._add(name, layer, values, torch.maximum)

    def lowest(self, name: str, layer: int, values: Tensor) -> None:
        """Numbers (H,) of which large ones are good."""
        self._add(name, layer, values, torch.minimum)

    def _add(self, name: str, layer: int, values: Tensor, worse: Callable[[Tensor, Tensor], Tensor]) -> None:
        values, known = values.detach().double().cpu(), self.worst[name].get(layer)
        self.worst[name][layer] = values if known is None else worse(values, known)

    def broken_block(self, index: int) -> None:
        """A block whose output is not finite."""
        if not self.block or index < self.block_index:
            self.block, self.block_index = f"output of layer {index}, no one head", index

    @property
    def is_finite(self) -> bool:
        """Whether neither NaN nor infinity was met."""
        return not self.block and not any(values.any() for values in self.worst["finite"].values())

    def block_first(self, layer: int | None) -> bool:
        """Whether it left a block before an attention (of that layer) had it."""
        return bool(self.block) and (layer is None or self.block_index < layer)
