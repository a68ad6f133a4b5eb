"""Band reach: a query sees itself and the size - 1 positions before it, and nothing after it.

    visible(i, j)  iff  i - size < j <= i

size counts the token itself: key i - size + 1 is visible, key i - size is not. Distances are counted in slots of the
sequence, so padding on either side and a cache change nothing.

Promise: the output of a query, and its gradient, depend on no key outside the band: by construction, since those keys
are never multiplied with. Cost: N x size scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_fullpay.core.errors import check_count
from hf_fullpay.core.visible import Visible

LONGEST = 2**31 - 1  # of a band, block, chunk or window: an index of torch


@dataclass(frozen=True)
class Band:
    """Sliding causal window of `size` tokens, the token itself included."""

    size: int = 128
    kind: ClassVar[str] = "band"
    inputs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_count("Band(size=...)", self.size, high=LONGEST)

    @property
    def sees(self) -> str:
        """What a query sees, for promises."""
        return f"a token and the {self.size - 1} before it"

    def restrict(self, allowed: Visible) -> Visible:
        """Keys within reach, out of those that the mask allows."""
        return allowed.within(self.size)

    def misfit(self, *, cross: bool, causal: bool, image: bool) -> str | None:
        """Why this reach makes no sense for an attention module; arguments as in `Full.misfit`."""
        return (
            "a band has no meaning in cross-attention, whose queries and keys are different sequences"
            if cross
            else None
        )
