"""Reach: which keys a query sees."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_fullpay.core.visible import Visible
from hf_fullpay.reach.band import Band
from hf_fullpay.reach.blocks import Blocks
from hf_fullpay.reach.chunks import Chunks
from hf_fullpay.reach.full import Full
from hf_fullpay.reach.window_global import WindowGlobal
from hf_fullpay.reach.windows import Windows

Reach = Full | Band | Blocks | Chunks | WindowGlobal | Windows
__all__ = ["Band", "Blocks", "Chunks", "Full", "Reach", "WindowGlobal", "Windows", "restricted"]


def restricted(reach: Reach, allowed: Visible, given: Mapping[str, Any] | None, query: Tensor) -> Visible:
    """Keys within reach, out of those that the mask allows, whatever a reach reads besides."""
    if isinstance(reach, WindowGlobal | Windows):
        return reach.restrict(allowed, given, query.shape[0])
    return reach.restrict(allowed)
