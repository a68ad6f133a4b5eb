"""The attention function that Transformers calls under each of our names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_fullpay.attend import attend
from hf_fullpay.backends import chosen
from hf_fullpay.core.shapes import check_shapes, split_mask
from hf_fullpay.core.visible import Visible
from hf_fullpay.core.warning import warn
from hf_fullpay.hf.hosts import is_flash, run_host, seen_by_flash
from hf_fullpay.payment.mixture import Budget
from hf_fullpay.plan import CARRIER, PRESETS, AttentionPlan
from hf_fullpay.reach.windows import LAYER
from hf_fullpay.reference import reference_attention

PLAN = "fullpay"  # where a config carries its plan
BINDING = "fullpay_layer"
STRENGTHS = "fullpay"
INPUT = "fullpay_input"  # the keyword that brings a gate the input of its layer
PAST = "fullpay_past"  # the keyword that brings a floor the cache of its layer; see `running`
ARGUMENTS = ("times", "delays", "global_attention_mask")  # of a model call, that some plans read
# What a model may ask of its attention and we do not compute.
REFUSED = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "a selection of keys",
    "block_indices": "a selection of key blocks",
}


@dataclass(eq=False)
class Layer:
    """What one attention module was told when its model was loaded.

    Args:
        name: the attention that the model had then.
        plan: the plan of this layer (the ordinary attention where the policy leaves it alone).
        index: number of the layer within its stack.
        total: number of layers in the stack.
        model: class name of the model, for messages.
        host: the attention of Transformers that computes the softmax part of all layers, if the plan names one.
        warned: lengths that a shortfall was told for, shared by all layers of the model.
        hook: what hands the cache to a floor; see `running`.
    """

    name: str
    plan: AttentionPlan
    index: int
    total: int
    model: str
    host: str | None = None
    warned: set[int] = field(default_factory=set)
    hook: RemovableHandle | None = None


def make_forward(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function for a registered name."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer: Layer | None = getattr(module, BINDING, None)
        if layer is None or layer.name != name:
            layer = unbound(module, name)
        _refuse_options(layer, kwargs)
        _warn_unread(layer, kwargs)
        # Under autocast a rotary model hands queries and keys in FP32 beside values in BF16; the values, straight out of
        # a linear layer, have the type that the output projection expects.
        query, key = query.to(value.dtype), key.to(value.dtype)
        check_shapes(query, key, value)
        _warn_shortfall(layer, query.shape[2], key.shape[2])
        arguments = arguments_of(
            layer, module, query, key, attention_mask, scaling=scaling, is_causal=is_causal,
            position_bias=position_bias, options=kwargs,
        ) | {"dropout": dropout}  # fmt: skip
        past = kwargs.pop(PAST, None)
        # Sums, means and the tanh must stay in FP32; what may run in BF16 has that type already.
        with torch.autocast(query.device.type, enabled=False):
            if _wants_weights(kwargs) or chosen() == "reference":
                if past is not None:
                    past.refuse_weights()
                output, weights = reference_attention(query, key, value, **arguments)
                return output.transpose(1, 2).contiguous(), weights if _wants_weights(kwargs) else None
            hosted = None
            if layer.host is not None:
                kwargs.pop(INPUT, None)
                kwargs |= {} if position_bias is None else {"position_bias": position_bias}
                hosted = run_host(
                    layer.host, module, query, key, value, attention_mask,
                    scaling=scaling, dropout=dropout, is_causal=is_causal, **kwargs,
                )  # fmt: skip
            past = None if past is None else past.sums(value, arguments["allowed"])
            output = attend(query, key, value, **arguments, hosted=hosted, past=past)
            return output.transpose(1, 2).contiguous(), None

    forward.__name__ = forward.__qualname__ = name
    return forward


def arguments_of(
    layer: Layer,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None,
    is_causal: bool | None,
    position_bias: Tensor | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """What a model's call of its attention means: the arguments of `attend`, but for tensors and dropout."""
    allowed, bias = _allowed(layer, module, query, key.shape[2], mask, is_causal, options)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    offered = {**options, LAYER: layer.index}
    return {
        "plan": layer.plan,
        "allowed": allowed,
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "bias": bias,
        "strengths": _strengths(layer, module, options.get(INPUT)),
        "given": {name: offered[name] for name in layer.plan.inputs if offered.get(name) is not None},
    }


def unbound(module: nn.Module, name: str) -> Layer:
    """A module whose name was changed behind our back (a raw config assignment), or that stands alone."""
    plan = plan_of(getattr(module, "config", None), name)
    if plan.layers != "all" or LAYER in plan.inputs or getattr(plan.scores, "is_per_layer", False):
        why = f"applies to layers {plan.layers!r} only" if plan.layers != "all" else "differs from layer to layer"
        raise ValueError(
            f"{type(module).__name__}: expected a module that knows its layer, since the plan of {name!r} {why}. Load "
            f"the model with attn_implementation={name!r}, or call model.set_attn_implementation({name!r})."
        )
    return Layer(name, plan, 0, 1, type(module).__name__, plan.host)


def plan_of(config: Any, name: str) -> AttentionPlan:
    """The plan in the config, if it carries one, else the preset of the name.

    Raises:
        ValueError: for a plan that cannot be read, or CARRIER without one.
    """
    written = getattr(config, PLAN, None)
    if written is None:
        if name == CARRIER:
            raise ValueError(
                f"attn_implementation={CARRIER!r}: expected a plan in config.{PLAN}, got none. This name stands for the "
                f"plan that a converted checkpoint carries; choose one of {sorted(PRESETS)}."
            )
        return PRESETS[name]
    plan = AttentionPlan.from_dict(written)
    if name != CARRIER and plan != PRESETS[name]:
        warn(f"config.{PLAN} carries a plan of its own, which runs instead of the preset {name!r}: {plan.describe()}.")
    return plan


def _refuse_options(layer: Layer, options: dict[str, Any]) -> None:
    """What a model may ask for and we do not compute; ignoring it would give wrong numbers."""
    for option, meaning in REFUSED.items():
        if options.get(option) is not None:
            raise ValueError(
                f"{layer.model}: expected an attention without {meaning}, got {option}. hf-fullpay does not implement "
                'it; load this model with attn_implementation="eager".'
            )


def _warn_unread(layer: Layer, options: dict[str, Any]) -> None:
    """What a user gives for another plan than the one that runs."""
    if not layer.plan.is_vanilla:
        for name in ARGUMENTS:
            if options.get(name) is not None and name not in layer.plan.inputs:
                warn(f"{layer.model}: {name} is not read by the plan that runs: {layer.plan.describe()}.")


def _allowed(
    layer: Layer,
    module: nn.Module,
    query: Tensor,
    n_keys: int,
    mask: Tensor | None,
    is_causal: bool | None,
    options: dict[str, Any],
) -> tuple[Visible, Tensor | None]:
    """The keys that the model allows, and the bias it adds, from whatever mask arrived; see `masks`."""
    if layer.host is not None and is_flash(layer.host) and (mask is None or mask.ndim == 2):
        return seen_by_flash(query, n_keys, mask, _is_causal(module, is_causal), options), None
    batch, _, queries, _ = query.shape
    keys = dense = bias = offset = None
    if mask is None:
        if queries > 1 and _is_causal(module, is_causal):
            offset = 0  # torch's convention, also with an empty static cache: query i sees keys j <= i
    elif mask.ndim == 0:
        offset = n_keys - queries
    elif mask.ndim in (2, 3):
        keys = mask if mask.ndim == 2 else mask[:, 0]
        offset = None if mask.ndim == 2 else n_keys - queries
        if keys.dtype != torch.bool or keys.shape[1] != n_keys or keys.shape[0] not in (1, batch):
            got = f"{keys.dtype} of shape {tuple(mask.shape)}"
            raise ValueError(f"attention_mask: expected bool of shape {(batch, n_keys)}, got {got}.")
        keys = keys.expand(batch, n_keys)
    else:
        dense, bias = split_mask(mask, query, n_keys)
    if (starts := options.get("cu_seq_lens_q")) is not None and queries == n_keys:
        # The rows of a batch count as laid end to end, as flash attention has it.
        places = torch.arange(batch * queries, device=query.device).view(batch, 1, queries)
        segment = torch.bucketize(places, starts.to(query.device)[1:], right=True)
        same = segment[..., :, None] == segment[..., None, :]
        dense = same if dense is None else dense & same
    if dense is not None:
        dense = dense.expand(dense.shape[0], dense.shape[1], queries, n_keys)
    return Visible(queries, n_keys, query.device, keys=keys, dense=dense, offset=offset), bias


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    """The call decides, then the module. Our mask function never leaves causality to this; some models pass no mask."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        warn(
            f"{type(module).__name__} says neither by argument nor by attribute whether it is causal, and came without "
            "a mask: every query sees every key."
        )
    return bool(is_causal)


def _strengths(layer: Layer, module: nn.Module, hidden_states: Tensor | None) -> dict[str, Tensor] | None:
    """Learned numbers, read by calling their module, so that offloading, FSDP and PEFT hooks see it; None where the plan
    that runs learns nothing."""
    strengths = getattr(module, STRENGTHS, None) if layer.plan.is_learnable else None
    if strengths is None:
        return None
    return strengths(hidden_states)


def pass_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of an attention module with a gate: hands its input on to the attention function, as a keyword,
    so that no state stays behind (threads, recomputation)."""
    if not hasattr(module, BINDING):
        return None  # the model runs another attention
    return args, kwargs | {INPUT: args[0] if args else kwargs["hidden_states"]}


def _warn_shortfall(layer: Layer, queries: int, n_keys: int) -> None:
    """Once per model and doubling of the length, for a floor that cannot be met over n keys is met even less over more:
    every new length of a batch would flood. A step of generation continues a prompt that was told already."""
    payment = layer.plan.payment
    if torch.compiler.is_compiling() or not isinstance(payment, Budget) or queries == 1 < n_keys:
        return
    if n_keys < 2 * max(layer.warned, default=0):
        return
    if shortfall := payment.shortfall(n_keys):
        layer.warned.add(n_keys)
        warn(f"{layer.model}: {shortfall}")


def _wants_weights(options: dict[str, Any]) -> bool:
    """Whether the caller records attention weights. GPT-2 and others swallow the argument, so the collector is asked."""
    if options.get("output_attentions"):
        return True
    from transformers.utils.output_capturing import _active_collector

    return "attentions" in (_active_collector.get() or {})
