"""Whether a model is as it was."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from small import states


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that a look at it might change, but for its numbers."""
    return {
        "name": model.config._attn_implementation,
        "config": model.config.to_dict(),
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "told": [vars(module).get("fullpay_layer") for module in model.modules()],
        "hooks": [
            (dict(module._forward_pre_hooks), dict(module._forward_hooks), dict(module._forward_pre_hooks_with_kwargs))
            for module in model.modules()
        ],
        "modes": [module.training for module in model.modules()],
        "gradients": [(p.requires_grad, p.grad) for p in model.parameters()],
        "interface": AttentionInterface.get_interface,
    }


@contextmanager
def untouched(model: PreTrainedModel, given: dict[str, Any]):
    """What happens inside leaves the model as it was: outputs to the bit, name, plan, hooks, modes, random state."""
    first, before, seed = states(model.eval(), **given), snapshot(model), torch.random.get_rng_state()
    try:
        yield
    finally:
        assert snapshot(model) == before
        assert torch.equal(torch.random.get_rng_state(), seed)
        assert torch.equal(states(model, **given), first)
