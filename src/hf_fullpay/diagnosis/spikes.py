"""Extreme hidden states, and numbers that are not finite, at the output of every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_fullpay.diagnosis.report import Findings


class Spikes:
    """Checks "spikes" and "finite", fed with hidden states as they leave the blocks."""

    def __init__(self) -> None:
        self.largest: dict[int, float] = {}
        self.medians: dict[int, list[float]] = {}
        self.broken: dict[int, int] = {}

    def take(self, index: int, hidden: Tensor, real: Tensor | None) -> None:
        """Hidden states (B, N, width) after block `index`, and which tokens are no padding (B, N)."""
        hidden = hidden.detach()
        if real is not None and real.shape == hidden.shape[:2]:
            hidden = hidden[real]
        size = hidden.abs().float()
        finite = size.isfinite()
        self.broken[index] = self.broken.get(index, 0) + int((~finite).sum())
        self.largest[index] = max(self.largest.get(index, 0.0), float(size.amax()))
        self.medians.setdefault(index, []).append(float(size.flatten().median()))

    @property
    def broken_anywhere(self) -> bool:
        """Whether any number was not finite."""
        return any(self.broken.values())

    def findings(self, checks: Sequence[str]) -> Findings:
        """By block."""
        found = Findings()
        order = sorted(self.largest)
        if "spikes" in checks:
            found.values["spike"] = [self.largest[index] for index in order]
            found.values["spike_ratio"] = [
                self.largest[index] / max(torch.tensor(self.medians[index]).mean().item(), 1e-30) for index in order
            ]
        if "finite" in checks:
            found.values["nonfinite"] = [float(self.broken[index]) for index in order]
            if (first := next((index for index in order if self.broken[index]), None)) is not None:
                found.notes.append(
                    f"NaN or infinity first leaves layer {first}; what is said of it and of later layers means nothing."
                )
        return found
