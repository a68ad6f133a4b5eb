"""Output gate: a head may close itself.

    out_h *= sigmoid(g_h(x))

A floor takes away a head's way to do nothing (attend to a sink whose value is small); the gate gives it back. g_h is
linear in the input of the attention layer and starts open (OPEN, a gate of 0.982).
Source: the head-wise output gate of "Gated Attention for Large Language Models" (Qiu et al., 2025), there initialised
at random, here open so that a converted checkpoint keeps its behaviour.
"""

from __future__ import annotations

import torch
from torch import Tensor

OPEN = 4.0


def gated(output: Tensor, logits: Tensor) -> Tensor:
    """Scale the output of every head and query.

    Args:
        output: (B, H, N, Dv).
        logits: (B, H, N, 1) in FP32 or FP64.

    Returns:
        (B, H, N, Dv) in the type of output.
    """
    return output * torch.sigmoid(logits).to(output.dtype)
