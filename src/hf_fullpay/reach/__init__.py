"""Reach: which keys a query sees."""

from hf_fullpay.reach.band import Band
from hf_fullpay.reach.blocks import Blocks
from hf_fullpay.reach.chunks import Chunks
from hf_fullpay.reach.full import Full

Reach = Full | Band | Blocks | Chunks
__all__ = ["Band", "Blocks", "Chunks", "Full", "Reach"]
