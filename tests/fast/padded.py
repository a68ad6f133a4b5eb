"""Padding that the tests of the fast paths share."""

import torch
from torch import Tensor

B = 2


def padding(kind: str, m: int) -> Tensor | None:
    """Key padding whose second sequence is all hidden."""
    if kind == "none":
        return None
    keys = torch.ones(B, m, dtype=torch.bool)
    keys[0, : m // 3] = kind == "right"
    keys[0, m - m // 3 :] = kind == "left"
    keys[1] = False
    return keys
