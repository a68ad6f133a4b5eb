"""What attention does: checks, reports and pictures of any model whose attention goes through Transformers."""

from hf_fullpay.diagnosis.calibration import Calibration, calibrate
from hf_fullpay.diagnosis.compare import Comparison, compare
from hf_fullpay.diagnosis.gradients import gradient_reach
from hf_fullpay.diagnosis.measures import CHECKS, MEASURES
from hf_fullpay.diagnosis.report import Curve, Findings, Heatmap, Report, Table
from hf_fullpay.diagnosis.roles import RoleSettings, head_roles
from hf_fullpay.diagnosis.run import diagnose
from hf_fullpay.diagnosis.sensitivity import Sensitivity, sensitivity
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.diagnosis.suggest import suggest
from hf_fullpay.diagnosis.weights import WeightStatistics, weight_statistics

diagnose.compare = compare  # type: ignore[attr-defined]  # `hf_fullpay.diagnose.compare(before, after)`

__all__ = [
    "CHECKS",
    "MEASURES",
    "Calibration",
    "Comparison",
    "Curve",
    "Findings",
    "Heatmap",
    "Report",
    "RoleSettings",
    "Sensitivity",
    "Settings",
    "Table",
    "WeightStatistics",
    "calibrate",
    "compare",
    "diagnose",
    "gradient_reach",
    "head_roles",
    "sensitivity",
    "suggest",
    "weight_statistics",
]
