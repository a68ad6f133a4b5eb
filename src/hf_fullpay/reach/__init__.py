"""Reach: which keys a query sees."""

from hf_fullpay.reach.band import Band
from hf_fullpay.reach.full import Full

Reach = Full | Band
__all__ = ["Band", "Full", "Reach"]
