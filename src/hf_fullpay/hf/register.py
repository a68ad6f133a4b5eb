"""Registration with Transformers: names, and the three public methods that we step into.

A name needs an attention function and a mask function; with the first alone, padding and packing would be ignored in
silence. And Transformers tells a plugin nothing when a model is built, so three public methods of PreTrainedModel are
wrapped, once, to check models that carry one of our names (others pass through untouched):

    get_correct_attn_implementation    before the layers exist: is this class able at all?
    post_init                          the model is built: give every layer its plan
    set_attn_implementation            the name has changed on a live model
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from hf_fullpay.core.errors import wrong
from hf_fullpay.hf.bind import bind, holds_strengths, is_ours, layers_of, refuse_class, unbind
from hf_fullpay.hf.forward import CARRIER, STRENGTHS, make_forward
from hf_fullpay.hf.masks import HOSTS, compact_mask
from hf_fullpay.plan import BUILT_IN, PRESETS, AttentionPlan, _presets

# Transformers reads meaning into these: it would look for a kernel or check the model for that backend.
MISREAD = ("flash", "sdpa", "flex_attention", "/", "|", "eager", ":")


def register(name: str, plan: AttentionPlan) -> None:
    """Make `attn_implementation=name` run a plan.

    Args:
        name: letters, digits and underscores. Calling again with a name of your own replaces its plan; models that
            are already loaded keep theirs.
        plan: what that name does.

    Raises:
        ValueError: for a name that Transformers would misread, that belongs to a preset or to Transformers, or for
            something that is no plan.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name) or any(word in name for word in MISREAD):
        raise wrong(
            "register(name=...)", "a word of letters, digits and underscores", name,
            f"Transformers reads a meaning into names with {', '.join(map(repr, MISREAD))}.",
        )  # fmt: skip
    if not isinstance(plan, AttentionPlan):
        raise wrong("register(plan=...)", "an AttentionPlan", plan)
    if name in BUILT_IN and plan != PRESETS[name]:
        raise wrong("register(name=...)", f"a name that is no preset ({', '.join(sorted(BUILT_IN))})", name)
    if name not in PRESETS and name in AttentionInterface():
        raise wrong("register(name=...)", "a name that Transformers does not use itself", name)
    _presets[name] = plan
    HOSTS.pop(name, None)
    if plan.host is not None:
        HOSTS[name] = plan.host
    _register_both(name)


def _register_both(name: str) -> None:
    AttentionInterface.register(name, make_forward(name))
    AttentionMaskInterface.register(name, compact_mask)


def register_presets() -> None:
    """Register every preset and step into PreTrainedModel. Calling it again changes nothing."""
    if hasattr(PreTrainedModel.post_init, "fullpay"):
        return
    for name, plan in PRESETS.items():
        register(name, plan)
    _register_both(CARRIER)
    _step_into("get_correct_attn_implementation", _get_correct_attn_implementation)
    _step_into("set_attn_implementation", _set_attn_implementation)
    _step_into("post_init", _post_init)


def _step_into(name: str, ours: Callable[..., Any]) -> None:
    stock = getattr(PreTrainedModel, name)

    @functools.wraps(stock)
    def method(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return ours(model, stock, *args, **kwargs)

    method.fullpay = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, name, method)


def _get_correct_attn_implementation(
    model: PreTrainedModel, stock: Any, requested_attention: str | None, *args: Any, **kwargs: Any
) -> str:
    if is_ours(requested_attention):
        refuse_class(model, str(requested_attention))
    return stock(model, requested_attention, *args, **kwargs)


def _post_init(model: PreTrainedModel, stock: Any) -> None:
    stock(model)
    if is_ours(model.config._attn_implementation):
        bind(model)


def _set_attn_implementation(
    model: PreTrainedModel, stock: Any, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = {id(part.config): (part.config, part.config._attn_implementation) for part in models}
    try:
        _check_keys(model, attn_implementation)
        if is_ours(attn_implementation):
            for part in models:
                refuse_class(part, str(attn_implementation))
        stock(model, attn_implementation, *args, **kwargs)
        unbind(model)
        # Innermost first, as when a model is built: a stack counts its own layers.
        for part in reversed(models):
            if is_ours(part.config._attn_implementation):
                bind(part)
        _refuse_lost_numbers(model)
    except Exception:
        # All or nothing: a refused model keeps running as it did.
        unbind(model)
        for config, name in before.values():
            config._attn_implementation_internal = name
        for part in reversed(models):
            if is_ours(part.config._attn_implementation):
                bind(part)
        raise


def _refuse_lost_numbers(model: PreTrainedModel) -> None:
    """A converted checkpoint that was loaded under another attention has left its learned numbers on disk."""
    for path, module, layer in layers_of(model):
        if holds_strengths(module) and layer.plan.is_learnable and getattr(module, STRENGTHS, None) is None:
            raise ValueError(
                f"{type(model).__name__}: expected learned numbers in {path!r}, got none, since the model was loaded under "
                "another attention. Load the checkpoint again without attn_implementation."
            )


def _check_keys(model: PreTrainedModel, names: str | dict[str, Any]) -> None:
    """Transformers ignores a misspelt part of a composite model in silence."""
    if isinstance(names, dict) and any(is_ours(name) for name in names.values()):
        known = {"", *model.config.sub_configs}
        if unknown := set(names) - known:
            raise wrong("attn_implementation", f"the parts {sorted(known)} of {type(model).__name__}", sorted(unknown))
