"""From a stock model to a FullPay one and back, with the same weights."""

from __future__ import annotations

import copy
import os
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from hf_fullpay.attend import warn
from hf_fullpay.core.errors import check_flag
from hf_fullpay.hf.channels import CHANNELS, initialize_channels
from hf_fullpay.hf.checkpoints import FullPayModelMixin
from hf_fullpay.hf.forward import CARRIER, PLAN, STRENGTHS
from hf_fullpay.hf.models import architecture, fullpay_of, stock_of
from hf_fullpay.hf.strengths import Strengths
from hf_fullpay.layers import SqueezeExcite
from hf_fullpay.plan import BUILT_IN, PRESETS, AttentionPlan, resolve


def convert(
    model: PreTrainedModel | str | os.PathLike[str],
    plan: AttentionPlan | str,
    *,
    channel_attention: bool = False,
    **loading: Any,
) -> PreTrainedModel:
    """A model of the FullPay class that pays attention by `plan`.

    Args:
        model: a stock BERT, ViT, GPT-2 or Llama model (or a FullPay one, whose learned numbers are dropped), or a Hub id
            or folder, loaded as the class its config names.
        plan: an AttentionPlan, or the name of a preset. What it makes learnable becomes FP32 parameters, one number per
            head, in a module named `fullpay` under each attention module that uses them.
        channel_attention: for a ViT, squeeze-and-excitation after the feed-forward of every layer (`SqueezeExcite`);
            it starts as the identity, and the checkpoint holds it. Those that `model` has already are kept, and left
            behind with a warning when this is False.
        loading: for a Hub id or folder, arguments of `from_pretrained` (dtype, revision, ...).

    Returns:
        The converted model, in the same mode, type and place. Its weights are those of `model`, shared and not copied.

    Raises:
        ValueError: for a family without a FullPay class, or a plan that makes no sense for the model.
    """
    plan = resolve(plan)
    if hasattr(model, "peft_config"):
        raise ValueError(
            "convert: expected a model without adapters; merge or unload them first, or convert before PEFT."
        )
    if not isinstance(model, PreTrainedModel | str | os.PathLike):
        raise ValueError(f"convert: expected a Transformers model, a Hub id or a folder, got {type(model).__name__}.")
    stock = model if isinstance(model, PreTrainedModel) else _load(model, loading)
    kind = fullpay_of(type(stock))
    check_flag("convert(channel_attention=...)", channel_attention)
    if channel_attention and not hasattr(kind.config_class, CHANNELS):
        raise ValueError(
            f"convert(channel_attention=True): expected a ViT, whose tokens are patches of an image, "
            f"got {type(stock).__name__}."
        )
    if not channel_attention:
        _warn_left("convert", stock)
    # A name of the user's own means nothing in another process; the plan itself is in the config.
    name = next((name for name in sorted(BUILT_IN) if PRESETS[name] == plan), CARRIER)
    extra = {PLAN: plan.to_dict()} | ({CHANNELS: True} if channel_attention else {})
    return _rebuild(stock, kind, name, extra)


def revert(model: PreTrainedModel) -> PreTrainedModel:
    """The stock model again, with the same weights and ordinary attention; learned numbers and channel attention are
    left behind (the latter with a warning, since a trained one changes what the model computes).

    Raises:
        ValueError: if `model` is no FullPay model, or one that stands on no stock class.
    """
    if not isinstance(model, FullPayModelMixin):
        raise ValueError(f"revert: expected a FullPay model, got {type(model).__name__}.")
    if stock_of(type(model)) is PreTrainedModel:
        raise ValueError(
            f"revert: expected a model with a stock class, got {type(model).__name__}, which has none. For ordinary "
            'attention: model.set_attn_implementation("sdpa").'
        )
    _warn_left("revert", model)
    return _rebuild(model, stock_of(type(model)), "sdpa", {})


def _warn_left(doing: str, model: PreTrainedModel) -> None:
    if getattr(model.config, CHANNELS, False):
        keep = " channel_attention=True keeps it." if doing == "convert" else ""
        warn(
            f"{doing}: the channel attention of {type(model).__name__} is left behind. If it was trained, the new model "
            f"computes something else.{keep}"
        )


def _load(path: str | os.PathLike[str], loading: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(
        path, **{k: v for k, v in loading.items() if k in ("revision", "token", "cache_dir")}
    )
    names = config.architectures or []
    kind = architecture(config)
    if kind is None:
        raise ValueError(
            f"convert: expected a config that names a model class under 'architectures', got {names} in {path}. Load the "
            "model with the Auto class of your task and pass it."
        )
    return kind.from_pretrained(path, **loading)


def _rebuild(model: PreTrainedModel, kind: type[Any], name: str, extra: dict[str, Any]) -> PreTrainedModel:
    """An instance of another class around the same parameters and buffers."""
    written = model.config.to_dict()
    for key in ("model_type", "attn_implementation", "architectures", "auto_map", PLAN, CHANNELS):
        written.pop(key, None)
    config = kind.config_class.from_dict(written | extra)
    config._attn_implementation = name
    config._name_or_path = model.config._name_or_path
    config.architectures = [kind.__name__]
    with no_init_weights():
        built = kind(config)
    _refuse_changed(model, built)
    for path, module in built.named_modules():
        if isinstance(module, Strengths):
            module.initialize()
            module.to(model.device)
        elif isinstance(module, SqueezeExcite):
            kept = dict(model.named_modules()).get(path)
            if kept is None:
                initialize_channels(module)
                module.to(model.device, model.dtype)
            else:
                for part, child in module.named_children():
                    _share(child, kept.get_submodule(part))
        elif _is_stock(path):
            _share(module, model.get_submodule(path))
    built.name_or_path = model.name_or_path
    if getattr(model, "generation_config", None) is not None:
        built.generation_config = copy.deepcopy(model.generation_config)
    return built


def _refuse_changed(model: PreTrainedModel, built: PreTrainedModel) -> None:
    """Refuse a model that is no longer what its config builds: what differs could not be carried over."""
    have = {path: _shape(module) for path, module in _without_strengths(model)}
    want = {path: _shape(module) for path, module in _without_strengths(built)}
    for path in sorted(have.keys() | want.keys(), key=len, reverse=True):
        if have.get(path) != want.get(path):
            raise ValueError(
                f"convert: expected {path!r} as the config of {type(model).__name__} builds it "
                f"({_told(want.get(path))}), got {_told(have.get(path))}. Convert before changing modules, quantising, "
                "pruning or adding adapters."
            )
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError("convert: expected a model in memory, got one that accelerate offloads. Convert it first.")


def _without_strengths(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Modules by path, without our own and without the classes of the models around the layers."""
    return [(path, module) for path, module in model.named_modules() if _is_stock(path)]


def _is_stock(path: str) -> bool:
    return {STRENGTHS, CHANNELS}.isdisjoint(path.split("."))


def _shape(module: nn.Module) -> tuple[str, frozenset[str], frozenset[str]]:
    """What a module is: its class (models count by what they stand on), its parameters, its children but for ours."""
    kind = type(module)
    name = stock_of(kind).__name__ if isinstance(module, FullPayModelMixin) else kind.__name__
    return name, frozenset(module._parameters), frozenset(module._modules) - {STRENGTHS, CHANNELS}


def _told(shape: tuple[str, frozenset[str], frozenset[str]] | None) -> str:
    return (
        "nothing" if shape is None else f"{shape[0]} with {', '.join(sorted(shape[1] | shape[2])) or 'nothing inside'}"
    )


def _share(new: nn.Module, old: nn.Module) -> None:
    """Make a module hold the very parameters and buffers of another, in its mode (learned numbers live in a child)."""
    new._parameters.update(old._parameters)
    new._buffers.update(old._buffers)
    new.training = old.training
    for name in ("gradient_checkpointing", "_gradient_checkpointing_func"):
        if name in vars(old):
            setattr(new, name, vars(old)[name])
