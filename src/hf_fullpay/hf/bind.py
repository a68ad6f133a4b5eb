"""Tell every attention module of a model its plan, and refuse models that we cannot serve.

Transformers accepts any registered name for any model, also for one whose attention never asks the registry: it would
run its own attention in silence. So a model is looked through when it is built or given one of our names.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_fullpay.core.warning import warn
from hf_fullpay.hf.forward import BINDING, CARRIER, Layer, plan_of
from hf_fullpay.hf.grid import OTHERS, attach_grid, gridless
from hf_fullpay.hf.hosts import check_host
from hf_fullpay.hf.running import pass_past, takes_past
from hf_fullpay.hf.swin import attach_swin, is_swin
from hf_fullpay.plan import PRESETS, AttentionPlan
from hf_fullpay.reach import Full
from hf_fullpay.reach.window_global import MASK as NAMED
from hf_fullpay.reach.windows import GRID

ADVICE = 'Load it with attn_implementation="sdpa" or "eager", or choose a model whose attention can be exchanged.'

# Cross-attention by the names of modules and classes: few say it by an attribute.
_CROSS = r"(?i)cross|encoder_attn|enc_?dec_?attention"


def bind(model: PreTrainedModel) -> None:
    """Give the attention modules of `model` their layer's plan. Parts with a config of their own bind themselves, and
    modules that were told already, by an inner model, keep what they were told.

    Args:
        model: a built model whose config carries one of our names.

    Raises:
        ValueError: naming the model, the reason and what to do, if the plan cannot be honoured.
    """
    _tell(model)
    if any(GRID in layer.plan.inputs for _, _, layer in layers_of(model)):
        attach_grid(model)


def _tell(model: PreTrainedModel) -> None:
    name, label = model.config._attn_implementation, type(model).__name__
    parts = _parts(model)
    modules = [(path, module) for path, module in parts if routes(module)]
    _refuse_foreign(label, parts, bool(modules), model)
    unbound = [(path, module) for path, module in modules if not hasattr(module, BINDING)]
    if not unbound:
        return
    plan = plan_of(model.config, name)
    indices = _layer_indices(model, [path for path, _ in unbound])
    total = max(indices) + 1
    if plan.gate and not holds_strengths(model):
        raise ValueError(
            f"{label}: expected a plan without gate=True, which has learned weights and no place for them in a stock "
            "class. Use hf_fullpay.convert(model, plan)."
        )
    if plan.host is not None:
        check_host(model, plan.host)
    plans, warned = plan.for_layers(total), set[int]()
    if not plan.is_vanilla and all(one.is_vanilla for one in plans):
        warn(f"{label}: layers={plan.layers!r} chooses none of its {total} layers, so all pay ordinary attention.")
    for (path, module), index in zip(unbound, indices, strict=True):
        _refuse_needs(label, path, module, plans[index])
        _check_heads(label, module, model.config, plans[index])
        layer = Layer(name, plans[index], index, total, label, plan.host, warned)
        setattr(module, BINDING, layer)
        if takes_past(module, layer.plan):
            layer.hook = module.register_forward_pre_hook(pass_past, with_kwargs=True)
        if is_swin(module):
            attach_swin(module)


def refuse_class(model: PreTrainedModel, name: str) -> None:
    """Refuse a class whose source never asks the registry, before its layers are built (they would fail obscurely)."""
    source = _source_of_module(type(model).__module__)
    if source and re.search(r"^class \w*Attention\w*\(", source, re.MULTILINE) and "get_interface(" not in source:
        raise ValueError(
            f"{type(model).__name__}: its attention does not go through Transformers' attention interface, so "
            f"attn_implementation={name!r} would have no effect. {ADVICE}"
        )


def routes(module: nn.Module) -> bool:
    """Whether a module's forward asks the registry for its attention function."""
    kind: Any = type(module)
    return _asks_registry(kind)


@cache
def _asks_registry(kind: Any) -> bool:
    try:
        return "get_interface(" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False


def unbind(model: nn.Module) -> None:
    """Forget what modules were told; they are ordinary again."""
    for module in model.modules():
        layer: Layer | None = module.__dict__.pop(BINDING, None)
        module.__dict__.pop(OTHERS, None)
        if layer is not None and layer.hook is not None:
            layer.hook.remove()


def holds_strengths(module: nn.Module) -> bool:
    """Whether a module belongs to a converted model, which has a place for learned numbers."""
    return getattr(type(getattr(module, "config", None)), "holds_strengths", False)


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Layer]]:
    """Path, module and layer of every attention module that is bound."""
    for path, module in model.named_modules():
        if (layer := getattr(module, BINDING, None)) is not None:
            yield path, module, layer


def _parts(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Modules under `model` that share its config: not those of sub-models, which have a name of their own."""
    found: list[tuple[str, nn.Module]] = []
    foreign: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(foreign) and foreign:
            continue
        if isinstance(module, PreTrainedModel) and module.config is not model.config:
            foreign += (path + ".",)
            continue
        found.append((path, module))
    return found


def _refuse_foreign(label: str, parts: list[tuple[str, nn.Module]], some: bool, model: PreTrainedModel) -> None:
    """Refuse attention modules that do not route: they would quietly keep their own attention."""
    routed = {path for path, module in parts if routes(module)}
    for path, module in parts:
        if "Attention" not in type(module).__name__ or path in routed:
            continue
        near = any(other.startswith(path + ".") or path.startswith(other + ".") for other in routed)
        projections = sum(1 for child in module.children() if getattr(child, "weight", None) is not None)
        if not near and projections >= 2:
            raise ValueError(
                f"{label}: {type(module).__name__} at {path!r} does not go through Transformers' attention interface, "
                f"so attn_implementation={model.config._attn_implementation!r} would have no effect there. {ADVICE}"
            )
    if not some and not any(isinstance(module, PreTrainedModel) for module in list(model.modules())[1:]):
        raise ValueError(
            f"{label}: expected attention modules that go through Transformers' attention interface, found none, so "
            f"attn_implementation={model.config._attn_implementation!r} would have no effect. {ADVICE}"
        )


def _refuse_needs(label: str, path: str, module: nn.Module, plan: AttentionPlan) -> None:
    """Refuse what a module needs and we do not compute, or a plan that makes no sense for it."""
    config = getattr(module, "config", None)
    needs = {
        "soft-capped scores": getattr(config, "attn_logit_softcapping", None) is not None,
        "attention sinks": isinstance(getattr(module, "sinks", None), nn.Parameter),
    }
    for need, has in needs.items():
        if has:
            raise ValueError(
                f"{label}: {type(module).__name__} needs {need}, which hf-fullpay does not implement. {ADVICE}"
            )
    cross = getattr(module, "is_cross_attention", False) or re.search(_CROSS, f"{path}.{type(module).__name__}")
    causal = bool(getattr(module, "is_causal", False))
    image = getattr(config, "patch_size", None) is not None
    reason = plan.misfit(cross=bool(cross), causal=causal, image=image)
    if not reason and is_swin(module) and not isinstance(plan.reach, Full):
        reason = "a Swin has windows of its own"
    if not reason and GRID in plan.inputs:
        reason = gridless(module)
    own_window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    if not reason and NAMED in plan.inputs and own_window is not None:
        reason = "a model with a sliding window of its own hides global tokens outside it"
    if reason:
        raise ValueError(
            f"{label}: {reason} ({type(module).__name__} at {path!r}). Every plan with reach=Full() and no delays fits, for "
            "example the preset 'fullpay' or 'bounded'."
        )


def _check_heads(label: str, module: nn.Module, config: Any, plan: AttentionPlan) -> None:
    """Refuse options per head that do not fit."""
    # An encoder-decoder may have another number of heads in each stack: its modules know.
    owners = ((module, "num_heads"), (module, "num_attention_heads"), (config, "num_attention_heads"))
    heads = next((found for owner, name in owners if isinstance(found := getattr(owner, name, None), int)), None)
    for part in (plan.reach, plan.scores, plan.payment):
        for option, value in vars(part).items():
            per_head = _is_per_head(value) and option not in plan.inputs  # times are floats too
            if heads is not None and per_head and len(value) != heads:
                raise ValueError(f"{label}: {option}: expected one number or one per head ({heads}), got {len(value)}.")


def _is_per_head(value: Any) -> bool:
    """Numbers per head are tuples of floats; positions of tokens are integers."""
    return isinstance(value, tuple) and any(isinstance(entry, float) for entry in value)


def _layer_indices(model: nn.Module, paths: list[str]) -> list[int]:
    """Number of the layer of each path: the place of its block (block 3 of 12) among those that hold attention."""
    blocks = [block_of(model, path) for path in paths]
    order = {block: index for index, block in enumerate(dict.fromkeys(blocks))}
    return [order[block] for block in blocks]


def block_of(model: nn.Module, path: str) -> str:
    """Path cut after its last number, but for lists of unlike parts inside a block (self-attention, cross-attention,
    feed-forward of a T5 block)."""
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    for place in reversed(numbers[1:]):
        siblings = model.get_submodule(".".join(parts[:place])).children()
        if len({type(sibling) for sibling in siblings}) == 1:
            return ".".join(parts[: place + 1])
    return ".".join(parts[: numbers[0] + 1]) if numbers else path


@cache
def _source_of_module(name: str) -> str:
    try:
        return inspect.getsource(sys.modules[name])
    except (OSError, TypeError, KeyError):
        return ""


def is_ours(name: object) -> bool:
    """Whether an attention implementation is one of our names."""
    return isinstance(name, str) and (name in PRESETS or name == CARRIER)
