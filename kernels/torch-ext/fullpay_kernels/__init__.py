"""Attention kernels with a floor under every weight and bounded scores; see `attention`."""

from .api import attention, decode_attention, lower_median
from .mean import visible_mean
from .relays import relay_attention

__all__ = ["attention", "decode_attention", "lower_median", "relay_attention", "visible_mean"]
