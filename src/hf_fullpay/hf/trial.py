"""Try a plan in some layers of a live model, and give the model back exactly as it was.

Masks depend on the name of the attention, so the whole model changes to the name that carries a plan; each layer then
runs what it is told: the plan on trial, or what the model runs anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_fullpay.core.errors import wrong
from hf_fullpay.hf.bind import layers_of
from hf_fullpay.hf.forward import BINDING, CARRIER, PLAN, Layer
from hf_fullpay.hf.grid import OTHERS
from hf_fullpay.payment import Mixture
from hf_fullpay.plan import ALL, ORDINARY, AttentionPlan

_NAME = "_attn_implementation_internal"
_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


@dataclass(frozen=True, eq=False)
class Trial:
    """The layers of a model on trial.

    Attributes:
        layers: every attention module's layer, with the plan on trial and the plan that the model runs there.
    """

    layers: dict[Layer, tuple[AttentionPlan, AttentionPlan]]

    @property
    def total(self) -> int:
        """Number of layers, of the longest stack."""
        return max(layer.total for layer in self.layers)

    def run(self, numbers: Collection[int]) -> None:
        """From now on the layers of these numbers run the plan on trial, and the others what the model runs.

        Raises:
            ValueError: for a layer that the model does not have.
        """
        if beyond := sorted(number for number in numbers if not 0 <= number < self.total):
            raise wrong("layers", f"numbers from 0 to {self.total - 1}", beyond)
        for layer, (tried, own) in self.layers.items():
            layer.plan = tried if layer.index in numbers else own


@contextmanager
def trial(model: nn.Module, plan: AttentionPlan) -> Iterator[Trial]:
    """Inside the context no layer runs the plan until `Trial.run` says so; the others run what the model runs (computed
    by us, so that nothing but the plan differs). A learned number of the plan stands at its start, an output gate is left
    out (it starts open), and a host computes nothing: convert would start from the same outputs.

    Args:
        model: a Transformers model, stock or converted, not compiled.
        plan: the plan; its `layers` have no say here.

    Raises:
        ValueError: for a model that cannot run the plan, with the reason.
    """
    if not isinstance(model, PreTrainedModel):
        raise wrong("model", "a Transformers model", type(model).__name__)
    plan = replace(_at_start(plan), layers=ALL)
    own = {module: _hostless(layer.plan) for _, module, layer in layers_of(model)}
    restore = _remember(model)
    try:
        for config in _configs(model):
            setattr(config, PLAN, plan.to_dict())
        model.set_attn_implementation(CARRIER)
        bound = {layer: (layer.plan, own.get(module, ORDINARY)) for _, module, layer in layers_of(model)}
        if not bound:
            raise ValueError(f"{type(model).__name__}: expected a model whose attention can be exchanged, got none.")
        found = Trial(bound)
        found.run(())
        yield found
    finally:
        restore()


def _at_start(plan: AttentionPlan) -> AttentionPlan:
    """A plan that learns nothing, at the values from which learning would start."""
    parts = {name: getattr(plan, name) for name in ("reach", "scores", "payment")}
    still = {name: replace(part, learnable=False) for name, part in parts.items() if getattr(part, "learnable", False)}
    return _hostless(replace(plan, gate=False, **still))


def _hostless(plan: AttentionPlan) -> AttentionPlan:
    return replace(plan, payment=replace(plan.payment, host=None)) if isinstance(plan.payment, Mixture) else plan


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every config that a part of the model reads its attention from, once."""
    waiting: list[Any] = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _remember(model: PreTrainedModel) -> Callable[[], None]:
    """A function that puts back names, plans, what modules were told, and hooks."""
    owners: list[tuple[Any, tuple[str, str]]] = [(config, (_NAME, PLAN)) for config in _configs(model)]
    owners += [(module, (BINDING, OTHERS)) for module in model.modules()]
    values = [{name: vars(owner)[name] for name in names if name in vars(owner)} for owner, names in owners]
    tables = [getattr(module, name) for module in model.modules() for name in _HOOKS]
    hooks = [dict(table) for table in tables]

    def restore() -> None:
        for (owner, names), before in zip(owners, values, strict=True):
            for name in names:
                vars(owner).pop(name, None)
            vars(owner).update(before)
        for table, held in zip(tables, hooks, strict=True):
            # The same table, so that a handle still finds its hook in it.
            table.clear()
            table.update(held)

    return restore
