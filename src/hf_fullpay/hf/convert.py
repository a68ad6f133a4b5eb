"""From a stock model to a FullPay one and back, with the same weights."""

from __future__ import annotations

import os
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from hf_fullpay.hf.checkpoints import FullPayModelMixin
from hf_fullpay.hf.forward import CARRIER, PLAN
from hf_fullpay.hf.models import MODELS, fullpay_of, stock_of
from hf_fullpay.hf.strengths import Strengths
from hf_fullpay.plan import PRESETS, AttentionPlan, resolve


def convert(
    model: PreTrainedModel | str | os.PathLike[str], plan: AttentionPlan | str, **loading: Any
) -> PreTrainedModel:
    """A model of the FullPay class that pays attention by `plan`.

    Args:
        model: a stock BERT, ViT, GPT-2 or Llama model (or a FullPay one, whose learned numbers are dropped), or a Hub id
            or folder, loaded as the class its config names.
        plan: an AttentionPlan, or the name of a preset. What it makes learnable becomes FP32 parameters, one number per
            head, in a module named `fullpay` under each attention module that uses them.
        loading: for a Hub id or folder, arguments of `from_pretrained` (dtype, revision, ...).

    Returns:
        The converted model, in the same mode, type and place. Its weights are those of `model`, shared and not copied.

    Raises:
        ValueError: for a family without a FullPay class, or a plan that makes no sense for the model.
    """
    plan = resolve(plan)
    stock = model if isinstance(model, PreTrainedModel) else _load(model, loading)
    if hasattr(stock, "peft_config"):
        raise ValueError(
            "convert: expected a model without adapters; merge or unload them first, or convert before PEFT."
        )
    kind = fullpay_of(type(stock))
    name = next((name for name, preset in PRESETS.items() if preset == plan), CARRIER)
    return _rebuild(stock, kind, name, {PLAN: plan.to_dict()})


def revert(model: PreTrainedModel) -> PreTrainedModel:
    """The stock model again, with the same weights and ordinary attention; learned numbers are left behind.

    Raises:
        ValueError: if `model` is no FullPay model.
    """
    if not isinstance(model, FullPayModelMixin):
        raise ValueError(f"revert: expected a FullPay model, got {type(model).__name__}.")
    return _rebuild(model, stock_of(type(model)), "sdpa", {})


def _load(path: str | os.PathLike[str], loading: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(
        path, **{k: v for k, v in loading.items() if k in ("revision", "token", "cache_dir")}
    )
    names = config.architectures or []
    kind = MODELS.get(names[0]) or getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise ValueError(
            f"convert: expected a config that names a model class under 'architectures', got {names} in {path}. Load the "
            "model with the Auto class of your task and pass it."
        )
    return kind.from_pretrained(path, **loading)


def _rebuild(model: PreTrainedModel, kind: type[Any], name: str, extra: dict[str, Any]) -> PreTrainedModel:
    """An instance of another class around the same parameters and buffers."""
    written = model.config.to_dict()
    for key in ("model_type", "attn_implementation", "architectures", "auto_map", PLAN):
        written.pop(key, None)
    config = kind.config_class.from_dict(written | extra)
    config._attn_implementation = name
    config._name_or_path = model.config._name_or_path
    config.architectures = [kind.__name__]
    with no_init_weights():
        built = kind(config)
    for path, module in built.named_modules():
        if isinstance(module, Strengths):
            module.initialize()
            module.to(model.device)
        else:
            _share(module, model.get_submodule(path))
    built.train(model.training)
    built.name_or_path = model.name_or_path
    if getattr(model, "generation_config", None) is not None:
        built.generation_config = model.generation_config
    if model.is_activation_checkpointing:
        built.activation_checkpointing_enable()
    return built


def _share(new: nn.Module, old: nn.Module) -> None:
    """Make a module hold the very parameters and buffers of another (its own learned numbers live in a child)."""
    new._parameters.update(old._parameters)
    new._buffers.update(old._buffers)
