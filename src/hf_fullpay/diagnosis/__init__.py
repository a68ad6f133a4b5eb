"""What attention does: checks, reports and pictures of any model whose attention goes through Transformers."""

from hf_fullpay.diagnosis.gradients import gradient_reach
from hf_fullpay.diagnosis.measures import CHECKS, MEASURES
from hf_fullpay.diagnosis.report import Curve, Findings, Heatmap, Report, Table
from hf_fullpay.diagnosis.run import diagnose
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.diagnosis.weights import WeightStatistics, weight_statistics

__all__ = [
    "CHECKS",
    "MEASURES",
    "Curve",
    "Findings",
    "Heatmap",
    "Report",
    "Settings",
    "Table",
    "WeightStatistics",
    "diagnose",
    "gradient_reach",
    "weight_statistics",
]
