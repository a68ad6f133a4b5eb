"""Scores: how logits are made from queries and keys."""

from hf_fullpay.scores.bounded import Bounded
from hf_fullpay.scores.delay import DelayBias
from hf_fullpay.scores.dynamic_scale import DynamicScale
from hf_fullpay.scores.plain import Plain

Scores = Plain | Bounded | DynamicScale | DelayBias
__all__ = ["Bounded", "DelayBias", "DynamicScale", "Plain", "Scores"]
