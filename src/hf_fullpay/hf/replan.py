"""Other numbers for the plan of a live model: how a bound or a floor is brought in while the model trains."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch import nn

from hf_fullpay.core.errors import wrong
from hf_fullpay.hf.bind import layers_of
from hf_fullpay.hf.checkpoints import FullPayModelMixin
from hf_fullpay.hf.forward import CARRIER, PLAN
from hf_fullpay.hf.unwrap import unwrapped
from hf_fullpay.plan import AttentionPlan

NUMBERS = ("bound", "temperature", "floor", "budget", "max_scale", "alpha", "beta")  # of which nothing else depends


def replan(model: nn.Module, plan: AttentionPlan) -> None:
    """From the next forward pass on the layers run `plan`, which differs from theirs in numbers alone; a checkpoint saved
    from now on carries it.

    Weights, optimiser and what wraps the model (DDP, FSDP, adapters) are not touched, so this can be called between two
    steps. A compiled model is refused: its graphs hold the old numbers.

    Args:
        model: a converted model, also as Accelerate prepared it.
        plan: its plan with another bound, temperature, floor, budget, max_scale, alpha or beta.

    Raises:
        ValueError: for a model that is stock or compiled, or a plan that differs in more, or learns: what is learned is an
            offset from the plan's numbers. The model is then left as it was.
    """
    found = unwrapped(model)
    if not isinstance(found, FullPayModelMixin):
        raise wrong("replan(model)", "a converted model", type(found).__name__)
    inner: Any = found
    # accelerate compiles a model in a wrapper, Module.compile in place.
    if hasattr(model, "_orig_mod") or any(part._compiled_call_impl is not None for part in model.modules()):
        raise wrong("replan(model)", "a model that is not compiled", type(model).__name__)
    config: Any = inner.config
    old = AttentionPlan.from_dict(getattr(config, PLAN))
    if plan.is_learnable or old.is_learnable or _numberless(plan) != _numberless(old):
        raise wrong(
            "replan(plan)", f"a plan that learns nothing and differs from {old.describe()!r} in numbers alone",
            plan.describe(), "For another kind of attention convert the model again.",
        )  # fmt: skip
    layers = [layer for _, _, layer in layers_of(inner)]
    plans = [plan.for_layers(layer.total)[layer.index] for layer in layers]
    if config._attn_implementation != CARRIER:
        inner.set_attn_implementation(CARRIER)  # the preset's name would no longer be true
        layers = [layer for _, _, layer in layers_of(inner)]
    for layer, own in zip(layers, plans, strict=True):
        layer.plan = own
    setattr(config, PLAN, plan.to_dict())


def _numberless(plan: AttentionPlan) -> AttentionPlan:
    """What is left of a plan without its numbers."""
    parts = {}
    for name in ("reach", "scores", "payment"):
        part = getattr(plan, name)
        usual = {f.name: f.default for f in fields(part) if f.name in NUMBERS}
        parts[name] = replace(part, **usual)
    return replace(plan, **parts)
