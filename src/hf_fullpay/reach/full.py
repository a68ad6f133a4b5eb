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

    def restrict(self, allowed: Visible) -> Visible:
        """Keys within reach, out of those that the mask allows."""
        return allowed
