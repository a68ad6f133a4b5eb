"""A plan on the Triton kernels of kernels/: which calls and row numbers it becomes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from cases import Call
from hf_fullpay import AttentionPlan, Bounded, Clamp, Mixture, Softmax
from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.mean import blend
from hf_fullpay.payment.clamp import floor_of
from hf_fullpay.payment.mixture import share
from hf_fullpay.scores.bounded import width_and_amplitude

if importlib.util.find_spec("fullpay_kernels") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parent.parent / "kernels" / "torch-ext"))


def cannot_run(plan: AttentionPlan) -> str:
    """Why the kernels do not serve a plan; an empty string if they do."""
    if plan.reach.kind == "blocks":
        simple = plan.scores.kind in ("plain", "dynamic_scale") and isinstance(plan.payment, Softmax | Mixture)
        return "" if simple else "relays take plain scores and a mixture only"
    if plan.reach.kind not in ("full", "band"):
        return f"no kernel for {plan.reach.kind}"
    if isinstance(plan.scores, Bounded):
        return "rescaled rows have no kernel" if plan.scores.slope == "rescale" else ""
    return "" if plan.scores.kind in ("plain", "dynamic_scale") else f"no kernel for {plan.scores.kind}"


def cannot_decode(plan: AttentionPlan) -> str:
    """The same for one query over a cache."""
    if plan.reach.kind == "blocks" or isinstance(plan.payment, Clamp):
        return "no decoding kernel"
    return cannot_run(plan)


def triton_call(plan: AttentionPlan, is_causal: bool, decode: bool = False) -> Call:
    """The plan as calls of the kernels; causal queries are the last ones.

    Raises:
        ImportError: without Triton.
    """
    import fullpay_kernels as kernels

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries, n_keys, scaling = query.shape[2], key.shape[2], query.shape[-1] ** -0.5
        offset = n_keys - queries if is_causal else None
        allowed = Visible(queries, n_keys, query.device, offset=offset)
        ranges: dict[str, Any] = {} if offset is None else {"offset": offset}
        options: dict[str, Any] = {}
        if isinstance(plan.payment, Mixture):
            options["share"] = share(plan.payment.floor, plan.payment.budget, allowed.counts())
            options["mean"] = kernels.visible_mean(value, n_queries=queries, **ranges)
        if plan.reach.kind == "blocks":
            out = kernels.relay_attention(query, key, value, scaling=scaling, size=plan.reach.size, causal=is_causal)
            return blend(out, options["mean"], options["share"]) if options else out
        visible = plan.reach.restrict(allowed)
        if visible.window is not None:
            ranges = {"offset": visible.offset, "window": visible.window}
            if isinstance(plan.payment, Mixture) and plan.payment.pay == "reach":
                options["share"] = share(plan.payment.floor, plan.payment.budget, visible.counts())
                options["mean"] = kernels.visible_mean(value, n_queries=queries, **ranges)
        if isinstance(plan.scores, Bounded):
            options |= _bounded(kernels, plan.scores, query, key, visible, ranges, scaling)
        if isinstance(plan.payment, Clamp):
            options["clamp_floor"] = floor_of(plan.payment.floor, plan.payment.budget, visible.counts())
        call = kernels.decode_attention if decode else kernels.attention
        return call(query, key, value, scaling=scaling, **ranges, **options)

    return run


def _bounded(
    kernels: Any, scores: Bounded, query: Tensor, key: Tensor, visible: Visible, ranges: dict[str, Any], scaling: float
) -> dict[str, Tensor]:
    """Centre, width and amplitude of every row."""
    width, amplitude = width_and_amplitude(scores.limit, scores.temperature, scores.slope, visible.counts())
    found = {"width": width, "amplitude": amplitude}
    if scores.centre == "mean":
        mean = kernels.visible_mean(key.float(), n_queries=query.shape[2], **ranges)
        found["centre"] = (query.float() * mean).sum(-1, keepdim=True) * scaling
    elif scores.centre == "median":
        found["centre"] = kernels.lower_median(query, key, scaling=scaling, **ranges)
    return found
