"""What the tests of probe checks share: the checks, a model's state, and attentions that break a promise."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_fullpay.diagnosis.gradients import check_reach
from hf_fullpay.diagnosis.importance import check_heads
from hf_fullpay.diagnosis.leaks import check_leak
from hf_fullpay.diagnosis.positions import check_positions
from hf_fullpay.diagnosis.settings import Settings

CHECKS = (check_reach, check_heads, check_leak, check_positions)
SHORT = Settings(near=1, far=4, queries=3)  # for texts of nine tokens


@torch.no_grad()
def run(check: Any, model: nn.Module, *batches: dict[str, Any], settings: Settings = SHORT) -> Any:
    """A check as `diagnose` calls it: gradients off outside."""
    return check(model, list(batches), settings)


def hooks(model: nn.Module) -> int:
    """Number of hooks of all modules."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@contextmanager
def left_as_it_was(model: nn.Module):
    """Asserts that hooks, mode, gradients, parameters and Transformers' own functions are the same afterwards."""
    parameters = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    before = hooks(model), [module.training for module in model.modules()], AttentionInterface.get_interface
    yield
    after = hooks(model), [module.training for module in model.modules()], AttentionInterface.get_interface
    assert before == after
    for name, parameter in model.named_parameters():
        held, needed = parameters[name]
        assert parameter.grad is None
        assert parameter.requires_grad == needed
        assert torch.equal(parameter, held)


@contextmanager
def attention_named(name: str, function: Any):
    """An attention of our own making, with the mask of SDPA, inside the context."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    try:
        yield name
    finally:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


def flat(values: Any) -> list[float]:
    """All numbers of a value."""
    return [number for entry in values for number in flat(entry)] if isinstance(values, list) else [values]


def close(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two findings say the same, number by number."""
    if one.values.keys() != other.values.keys():
        return False
    pairs = [
        (a, b) for name in one.values for a, b in zip(flat(one.values[name]), flat(other.values[name]), strict=True)
    ]
    return all(math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (a != a and b != b) for a, b in pairs)
