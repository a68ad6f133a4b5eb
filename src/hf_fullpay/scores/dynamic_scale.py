"""Dynamic scale: a learned, bounded gain per head.

    s'_ij = s_ij * sigmoid(alpha_h) * max_scale

Promise: order and matrix rank of the scores are kept exactly, and the gain lies in (0, max_scale). It bounds the gain,
not the scores. Cost: one multiplication of the query; alpha is one FP32 number per head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_fullpay.core.errors import check_flag, check_number, wrong
from hf_fullpay.core.numbers import PerHead, freeze


@dataclass(frozen=True)
class DynamicScale:
    """Scores times sigmoid(alpha) * max_scale.

    Args:
        max_scale: upper limit of the gain.
        alpha: where the gain starts, one number or one per head; None starts at a gain of exactly 1.
        learnable: whether `convert` makes alpha a parameter.
    """

    max_scale: float = 2.0
    alpha: PerHead | None = None
    learnable: bool = True
    kind: ClassVar[str] = "dynamic_scale"
    inputs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for option in ("max_scale", "alpha"):
            object.__setattr__(self, option, freeze(getattr(self, option)))
        check_number("DynamicScale(max_scale=...)", self.max_scale, low=0, open_low=True)
        if self.alpha is None:
            if self.max_scale <= 1:
                raise wrong(
                    "DynamicScale(max_scale=...)", "more than 1 when alpha is None", self.max_scale,
                    "A gain of 1 is the start; give alpha to start elsewhere.",
                )  # fmt: skip
        else:
            check_number("DynamicScale(alpha=...)", self.alpha, per_head=True)
        check_flag("DynamicScale(learnable=...)", self.learnable)

    def start(self) -> PerHead:
        """alpha at the start."""
        return -math.log(self.max_scale - 1) if self.alpha is None else self.alpha


def dynamic_gain(alpha: Tensor | float, max_scale: float) -> Tensor | float:
    """sigmoid(alpha) * max_scale, in the type of alpha (FP32 or FP64)."""
    if isinstance(alpha, Tensor):
        return torch.sigmoid(alpha) * max_scale
    return max_scale / (1 + math.exp(-alpha)) if alpha > -700 else 0.0
