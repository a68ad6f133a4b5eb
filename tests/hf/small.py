"""Presets on tiny models, with a reach short enough to cut a sentence of nine tokens."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from families import CAUSAL, FAMILIES, build, shortened
from hf_fullpay import PRESETS, AttentionPlan, Mixture
from hf_fullpay.core.visible import Visible
from hf_fullpay.hf.bind import layers_of
from hf_fullpay.hf.forward import CARRIER
from hf_fullpay.reach import restricted

NEUTRAL = AttentionPlan(payment=Mixture(budget=0.0))


def misfit(family: str, name: str) -> str | None:
    """Why a preset makes no sense for a family, in the words of its reach."""
    return PRESETS[name].reach.misfit(cross=False, causal=family in CAUSAL, image=family == "vit")


EVERYWHERE = [(family, name) for family in FAMILIES for name in PRESETS if not misfit(family, name)]
ON_CAUSAL = [(family, name) for family, name in EVERYWHERE if family in CAUSAL]
ON_TEXT = [(family, name) for family, name in EVERYWHERE if family != "vit"]


def on(family: str) -> list[str]:
    """Presets that make sense for a family."""
    return [name for other, name in EVERYWHERE if other == family]


def home(name: str) -> str:
    """A family that a preset makes sense for: BERT where it can be."""
    return next(family for family in ("bert", *FAMILIES) if not misfit(family, name))


def short(name: str) -> AttentionPlan:
    """The plan of a preset, its reach cut to SHORT tokens (a window of two rows and columns for images)."""
    return replace(PRESETS[name], reach=shortened(PRESETS[name].reach))


def pairs_of(plan: AttentionPlan, pairs: Tensor, layer: int = 0) -> Tensor:
    """Which of the pairs (N, N) that a mask allows are within reach of a plan; images are those of the tiny ViT."""
    n = pairs.shape[-1]
    allowed = Visible(n, n, pairs.device, dense=pairs[(None,) * (4 - pairs.ndim)])
    query = torch.empty(allowed.to_dense().shape[0], 1, n, 1)
    return restricted(plan.reach, allowed, {"patch_grid": (4, 4), "layer_index": layer}, query).to_dense()


def load(family: str, attention: str | AttentionPlan, *, head: bool = False, **changes: Any) -> PreTrainedModel:
    """A peaky model under a preset (with its reach cut short) or under any plan, which a stock config can carry too."""
    plan = short(attention) if isinstance(attention, str) else attention
    if attention in PRESETS and plan == PRESETS[attention]:
        return build(family, attention, head=head, **changes)
    return build(family, CARRIER, head=head, fullpay=plan.to_dict(), **changes)


@torch.no_grad()
def states(model: PreTrainedModel, **given: Any) -> Tensor:
    """The last hidden states, or the logits of a model with a head."""
    return model(**given)[0]


def plans(model: PreTrainedModel) -> list[AttentionPlan]:
    """What the attention modules of a model were told, in order."""
    return [layer.plan for _, _, layer in layers_of(model)]


@dataclass
class Call:
    """What an attention function was given, and gave."""

    module: torch.nn.Module
    tensors: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    options: dict[str, Any]
    output: Tensor


@contextmanager
def watched(name: str):
    """Record the calls of an attention function."""
    stock, calls = AttentionInterface()[name], []

    def spy(module, query, key, value, attention_mask, **options):
        output, weights = stock(module, query, key, value, attention_mask, **options)
        calls.append(Call(module, (query, key, value), attention_mask, options, output))
        return output, weights

    AttentionInterface.register(name, spy)
    try:
        yield calls
    finally:
        AttentionInterface.register(name, stock)
