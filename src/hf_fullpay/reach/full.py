"""Full reach: a query sees every key that the model's mask allows.

Cost: N x M scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_fullpay.core.visible import Visible


@dataclass(frozen=True)
class Full:
    """Every key that the mask allows."""

    kind: ClassVar[str] = "full"
    inputs: ClassVar[tuple[str, ...]] = ()

    def restrict(self, allowed: Visible) -> Visible:
        """Keys within reach, out of those that the mask allows."""
        return allowed

    def misfit(self, *, cross: bool, causal: bool, image: bool) -> str | None:
        """Why this reach makes no sense for an attention module; None where it does.

        Args:
            cross: queries and keys are different sequences.
            causal: the module is part of a decoder.
            image: the tokens are patches of an image.
        """
        return None
