"""What attention does: measurements on any model that runs under one of our names or under eager attention."""

from hf_fullpay.diagnosis.gradients import gradient_reach
from hf_fullpay.diagnosis.weights import WeightStatistics, weight_statistics

__all__ = ["WeightStatistics", "gradient_reach", "weight_statistics"]
