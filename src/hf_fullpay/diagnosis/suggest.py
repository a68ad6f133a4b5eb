"""From a model and some inputs to a plan: calibrated bounds, in the layers that bear them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_fullpay.diagnosis.calibration import calibrate
from hf_fullpay.diagnosis.losses import Loss
from hf_fullpay.diagnosis.sensitivity import sensitivity
from hf_fullpay.plan import AttentionPlan


def suggest(
    model: nn.Module, inputs: Any, *, plan: AttentionPlan | str = "bounded", reduction: float = 4.0,
    quantile: float = 0.999, budget: float = 0.05, loss: Loss = None, **options: Any,
) -> AttentionPlan:  # fmt: skip
    """A plan for `convert`: bounds per layer and head that make logits `reduction` times smaller, in the layers from the
    top down that together change the model within `budget`.

    Args:
        model, inputs, plan, reduction, quantile, options: as in `calibrate`.
        budget, loss: as in `sensitivity`.

    Raises:
        ValueError: as in both, and if no layer stays within the budget.
    """
    inputs = list(inputs) if isinstance(inputs, Iterator) else inputs  # gone through twice
    found = calibrate(model, inputs, plan=plan, reduction=reduction, quantile=quantile, **options)
    return sensitivity(model, inputs, found.plan(), loss=loss, budget=budget).suggestion()
