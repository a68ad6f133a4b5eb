"""What attention does: measurements on any model that runs under one of our names or under eager attention."""

from hf_fullpay.diagnosis.gradients import gradient_reach
from hf_fullpay.diagnosis.report import Findings
from hf_fullpay.diagnosis.roles import RoleSettings, head_roles
from hf_fullpay.diagnosis.weights import WeightStatistics, weight_statistics

__all__ = ["Findings", "RoleSettings", "WeightStatistics", "gradient_reach", "head_roles", "weight_statistics"]
