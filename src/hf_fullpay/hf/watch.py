"""See every attention call of a model as it runs, whatever attention it runs: the tensors, what its mask means, and the
weights of some rows at a time, computed anew.

Transformers asks `AttentionInterface.get_interface` for the attention function in every call of every layer; while a
model is watched that method hands out the same function with a listener behind it. Models that are not watched get
theirs untouched. The weights are those of the reference under the plan of the layer (ordinary attention for the names
of Transformers), so `Seen.error` compares what they give with what the model computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from hf_fullpay.core.shapes import repeat_groups
from hf_fullpay.hf.bind import is_ours, routes
from hf_fullpay.hf.forward import BINDING, REFUSED, Layer, arguments_of, unbound
from hf_fullpay.hf.hosts import is_flash
from hf_fullpay.plan import AttentionPlan
from hf_fullpay.reference import Rows, reference_rows

TILE = 1 << 19  # weights of a tile
UNREAD = {name: meaning for name, meaning in REFUSED.items() if name not in ("softcap", "s_aux", "sinks")}
_PATCHING = threading.Lock()


@dataclass(eq=False)
class Seen:
    """One attention call.

    Attributes:
        index: number of the call within a forward pass of the model, from 0: a layer, also where layers share a module.
        path: of the module in the model.
        module: the attention module.
        name: the attention that it runs.
        query: (B, H, N, D), as the attention function got it.
        key, value: (B, G, M, D) and (B, G, M, Dv).
        output: (B, N, H, Dv), what it gave; part of the graph where gradients are on.
        arguments: what the call means, by the names of `attend`.
        softcap: limit of soft-capped scores, where the model has one.
        sinks: (H,) logits of attention sinks, which take a part of every row, where the model has them.
    """

    index: int
    path: str
    module: nn.Module
    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    arguments: dict[str, Any]
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plan(self) -> AttentionPlan:
        """The plan that this layer runs."""
        return self.arguments["plan"]

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a key behind its own place, where queries and keys are one sequence."""
        allowed = self.arguments["allowed"]
        if allowed.n_queries != allowed.n_keys or allowed.offset is not None:
            return allowed.offset is not None
        if allowed.dense is None:
            return allowed.n_keys == 1
        return not bool(torch.triu(allowed.dense.any(1), 1).any())

    def tiles(self, size: int = TILE) -> Iterator[tuple[int, int]]:
        """Ranges of queries whose weights, over all heads and the batch, are about `size` numbers."""
        batch, heads, queries = self.query.shape[:3]
        rows = max(1, size // max(1, batch * heads * self.key.shape[2]))
        for start in range(0, queries, rows):
            yield start, min(start + rows, queries)

    def rows(self, start: int, stop: int) -> Rows:
        """Weights of queries start..stop-1, without dropout; see `Rows`."""
        found = reference_rows(self._wide[0], self._wide[1], start=start, stop=stop, **self.arguments)
        if self.softcap is None and self.sinks is None:
            return found
        logits = found.scores
        if self.softcap is not None:
            bias = self.arguments["bias"]
            added = 0.0 if bias is None else (bias if bias.shape[2] == 1 else bias[:, :, start:stop]).to(logits.dtype)
            logits = torch.tanh((logits - added) / self.softcap) * self.softcap + added
        shown = logits.masked_fill(~found.visible, -torch.inf)
        if self.sinks is not None:
            extra = self.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*shown.shape[:-1], 1)
            weights = torch.softmax(torch.cat([shown, extra], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(shown, -1).nan_to_num(0.0) * found.visible.any(-1, keepdim=True)
        return replace(found, weights=weights, logits=logits)

    def error(self, start: int, stop: int, weights: Tensor) -> float:
        """Largest distance between what these rows of weights give and what the model computed, as a multiple of the
        largest output. Rows that see nothing are left out: attentions differ on them. NaN where a gate scales outputs.
        """
        if self.plan.gate:
            return float("nan")
        ours = weights.to(self._wide[2].dtype) @ self._wide[2]
        theirs = self.output[:, start:stop].transpose(1, 2).to(ours.dtype)
        some = weights.sum(-1, keepdim=True) > 0
        return float(((ours - theirs) * some).abs().max() / theirs.abs().max().clamp_min(1e-30))

    @cached_property
    def _wide(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of every head, in FP32 or FP64, made once."""
        kind = torch.promote_types(self.query.dtype, torch.float32)
        heads = self.query.shape[1]
        key, value = (repeat_groups(tensor.detach(), heads).to(kind) for tensor in (self.key, self.value))
        return self.query.detach().to(kind), key, value


def attention_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Path of every module that asks Transformers for its attention function.

    Raises:
        ValueError: for a model without one.
    """
    found = {module: path for path, module in model.named_modules() if routes(module)}
    if not found:
        raise ValueError(
            f"{type(model).__name__}: expected attention modules that go through Transformers' attention interface, "
            "found none, so nothing of its attention can be seen."
        )
    return found


@contextmanager
def watch(model: nn.Module, see: Callable[[Seen], Tensor | None]) -> Iterator[None]:
    """Call `see` with every attention call of `model` inside the context.

    Args:
        model: any Transformers model, not compiled.
        see: called after each attention call, in the order of layers, from within the model's forward. A tensor that it
            returns goes on in place of `seen.output`.

    Raises:
        ValueError: for a model whose attention does not route, at once; for a call that cannot be read, from within it.
    """
    paths, counter = attention_modules(model), [0]

    def restart(*_: Any) -> None:
        counter[0] = 0

    def listen(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def listening(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
            told = dict(options)  # the function may take things out
            result = function(module, query, key, value, *args, **options)
            if module in paths:
                index, counter[0] = counter[0], counter[0] + 1
                mask = args[0] if args else told.pop("attention_mask", None)
                changed = see(_read(index, paths[module], module, name, query, key, value, mask, told, result[0]))
                result = result if changed is None else (changed, *result[1:])
            return result

        return listening

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(restart).remove)
        with _PATCHING:
            original = AttentionInterface.get_interface

            def get_interface(self: AttentionInterface, attn_implementation: str, default: Any) -> Any:
                return listen(attn_implementation, original(self, attn_implementation, default))

            AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]
        stack.callback(setattr, AttentionInterface, "get_interface", original)
        yield


def _read(
    index: int, path: str, module: nn.Module, name: str, query: Tensor, key: Tensor, value: Tensor,
    mask: Any, options: dict[str, Any], output: Tensor,
) -> Seen:  # fmt: skip
    label = f"{type(module).__name__} at {path!r}"
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(
            f"{label}: expected a mask as a tensor, got {type(mask).__name__}. Load the model with "
            'attn_implementation="sdpa" to see its weights.'
        )
    if unread := [meaning for option, meaning in UNREAD.items() if options.get(option) is not None]:
        raise ValueError(f"{label}: expected an attention without {unread[0]}, which cannot be seen.")
    if is_ours(name):
        layer: Layer | None = getattr(module, BINDING, None)
        layer = unbound(module, name) if layer is None or layer.name != name else layer
    else:
        host = name if is_flash(name) else None
        layer = Layer(name, AttentionPlan(), index, index + 1, label, host)
    causal = options.pop("is_causal", None)
    if not is_ours(name) and causal is None:
        # SDPA takes a module that does not say for causal; eager attention knows no causality but the mask's.
        causal = name != "eager" and bool(getattr(module, "is_causal", True))
    elif name == "eager":
        causal = False
    query, key = query.to(value.dtype), key.to(value.dtype)
    with torch.no_grad():
        arguments = arguments_of(
            layer, module, query, key, mask, scaling=options.pop("scaling", None), is_causal=causal,
            position_bias=options.pop("position_bias", None), options=options,
        )  # fmt: skip
    sinks = options.get("s_aux", options.get("sinks"))
    if sinks is None and isinstance(getattr(module, "sinks", None), nn.Parameter):
        sinks = module.sinks
    return Seen(
        index, path, module, name, query, key, value, output, arguments, options.get("softcap"),
        None if sinks is None else sinks.detach(),
    )  # fmt: skip
