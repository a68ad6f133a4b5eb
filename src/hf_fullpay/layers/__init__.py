"""Layers around attention: positions, feed-forward, channel attention, pattern matching. Small modules, torch alone."""

from hf_fullpay.layers.channel_attention import SqueezeExcite
from hf_fullpay.layers.feed_forward import FEED_FORWARDS, GELUFeedForward, SwiGLUFeedForward
from hf_fullpay.layers.pattern_match import PatternMatch
from hf_fullpay.layers.positions import Learned, Rotary, Sinusoidal

__all__ = [
    "FEED_FORWARDS",
    "GELUFeedForward",
    "Learned",
    "PatternMatch",
    "Rotary",
    "Sinusoidal",
    "SqueezeExcite",
    "SwiGLUFeedForward",
]
