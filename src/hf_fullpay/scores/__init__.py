"""Scores: how logits are made from queries and keys."""

from hf_fullpay.scores.bounded import Bounded
from hf_fullpay.scores.dynamic_scale import DynamicScale
from hf_fullpay.scores.plain import Plain

Scores = Plain | Bounded | DynamicScale
__all__ = ["Bounded", "DynamicScale", "Plain", "Scores"]
