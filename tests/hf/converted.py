"""Every FullPay class, as a tiny stock model with inputs, and plans that learn something."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from families import inputs, randomise, tiny
from hf_fullpay import MODELS, AttentionPlan, Band, Blocks, Bounded, Chunks, Clamp, DynamicScale, Mixture
from hf_fullpay.hf.models import stock_of
from hf_fullpay.hf.strengths import Strengths

LEARNABLE = {
    "budget": AttentionPlan(payment=Mixture(floor=None, budget=0.2, learnable=True)),
    "budget of a clamp": AttentionPlan(payment=Clamp(floor=None, budget=0.2, learnable=True)),
    "signed budget": AttentionPlan(payment=Mixture(floor=None, budget=-0.1, signed=True, learnable=True)),
    "budget per head": AttentionPlan(payment=Mixture(floor=None, budget=[0.1, 0.2, 0.3, 0.4], learnable=True)),
    "alpha": AttentionPlan(scores=DynamicScale(alpha=0.5), payment=Mixture(budget=0.1)),
    "exchange": AttentionPlan(Chunks(4, 1, exchange=0.3)),
    "budget of relays": AttentionPlan(Blocks(4), payment=Mixture(floor=None, budget=0.2, learnable=True)),
    "gate": AttentionPlan(scores=Bounded(bound=1.0), gate=True),
    "all": AttentionPlan(Band(4), DynamicScale(), Mixture(floor=None, budget=0.2, learnable=True), gate=True),
}


def family_of(name: str) -> str:
    return next(family for family in ("bert", "vit", "gpt2", "llama") if name.lower().startswith(f"fullpay{family}"))


def stock(name: str, **changes: Any) -> PreTrainedModel:
    """The peaky stock model behind a FullPay class, in eval mode."""
    family = family_of(name)
    config = tiny(family, **{"encoder_stride": 8} if family == "vit" else {"pad_token_id": 0}, **changes).config
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return randomise(stock_of(MODELS[name])(config)).eval()


def given_to(name: str) -> dict[str, Any]:
    """Inputs that the class accepts."""
    given = inputs(family_of(name))
    return {key: value[None] for key, value in given.items()} if "MultipleChoice" in name else given


def learn(model: PreTrainedModel) -> PreTrainedModel:
    """Pretend that training moved every learned number."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in learned(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def learned(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The learned numbers of a model by name."""
    owners = [(path, module) for path, module in model.named_modules() if isinstance(module, Strengths)]
    return {f"{path}.{name}": p for path, module in owners for name, p in module.named_parameters()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Same names, same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
