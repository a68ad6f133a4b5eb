"""Rows that begin at multiples of 16 numbers, as the compiler must know them to be for wide loads.

Others would be loaded number by number, through registers: with a width of 100 or 200 every kernel spilled kilobytes. So
such tensors are copied once, linear in their size, and given zeros up to the next multiple of 16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

UNIT = 16  # numbers, and bytes of an address: what Triton asks about


def aligned(x: Tensor) -> Tensor:
    """(B, *, N, width) with a width that is a multiple of 16; the tensor itself where all is well."""
    if missing := -x.shape[-1] % UNIT:
        return F.pad(x, (0, missing))
    *strides, last = x.stride()
    if last == 1 and all(stride % UNIT == 0 for stride in strides) and x.data_ptr() % UNIT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
