"""Decoding with a cache: the floor's mean from a running sum kept beside the cache, O(d) a token instead of O(M d).

The sum lives on the layer of the cache and dies with it; no module and no global remembers anything, so that caches can
be used in turns. A hook hands the cache to the attention function, which sees values alone. Whatever changes a cache
(crop, reordering for beams, repeating, selecting, offloading, a copy) puts another tensor in the place of the values:
then the sum is taken anew, once. A step of several queries, a gradient, a mask of pairs, a static or quantised cache
and a compiled model take the mean as without a cache.

Dimensions: B batch, G key/value heads, M keys, Dv width of value.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from hf_fullpay.core.running import RunningSum
from hf_fullpay.core.visible import Visible
from hf_fullpay.hf.forward import BINDING, PAST
from hf_fullpay.hf.sliding import FloorLayer
from hf_fullpay.payment import Mixture
from hf_fullpay.plan import AttentionPlan
from hf_fullpay.reach import Full

KEPT = "fullpay_kept"  # the attribute of a cache layer


@dataclass(frozen=True, eq=False)
class Kept:
    """What lies beside the values of a cache layer.

    Args:
        sums: over all their visible keys.
        padding: (B, M) bool, which those were; None for all.
        length: M.
        values: the tensor that was summed, (B, G, M, Dv).
        version: of that tensor, which counts changes in place.
    """

    sums: RunningSum
    padding: Tensor | None
    length: int
    values: weakref.ref[Tensor] | None
    version: int | None

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self.sums, self.padding, self.length, None, None)  # a copy of a cache has other tensors

    def fits(self, layer: DynamicLayer) -> bool:
        """Whether the layer still holds what was summed."""
        values = layer.values
        if values is None or self.values is None:
            return False
        return self.values() is values and self.version == _version(values)

    def continues(self, length: int, keys: Tensor | None) -> bool:
        """Whether keys of that length are those that were summed and one more, with the same padding."""
        if length != self.length + 1:
            return False
        if keys is None or self.padding is None:
            return self.padding is None and (keys is None or bool(keys[:, :-1].all()))
        return torch.equal(self.padding, keys[:, :-1])


@dataclass(frozen=True, eq=False)
class Past:
    """The cache of one call of an attention module, as the hook hands it on.

    Args:
        cache: the cache of its own tokens.
        index: number of the module's layer in it.
        kept: the sum over what the cache held before the call, if there is one.
    """

    cache: Cache
    index: int
    kept: Kept | None

    def sums(self, value: Tensor, allowed: Visible) -> RunningSum | None:
        """Sums of all visible values up to each query, kept for the next call; None where they have to be computed.

        Args:
            value: (B, G, M, Dv), what the cache gave.
            allowed: the keys that the model allows.
        """
        layer = self._layer()
        if isinstance(layer, FloorLayer):
            return layer.sums(value, allowed)
        if not isinstance(layer, DynamicLayer) or layer.values is not value or not _is_plain_step(value, allowed):
            return None
        keys = allowed.keys
        if self.kept is not None and self.kept.continues(value.shape[2], keys):
            sums = self.kept.sums.then(value[:, :, -1:], None if keys is None else keys[:, -1:])
        else:
            sums = RunningSum.over(value, keys)
        padding = None if keys is None else keys.clone()  # a user may write into the mask
        setattr(layer, KEPT, Kept(sums, padding, value.shape[2], weakref.ref(value), _version(value)))
        return sums

    def refuse_weights(self) -> None:
        """Weights of keys that are gone cannot be shown."""
        if isinstance(self._layer(), FloorLayer):
            raise ValueError(
                "output_attentions: expected a cache that holds all keys, got one of sliding_cache(), which pays its "
                "floor to keys that are gone. Leave out the cache."
            )

    def _layer(self) -> Any:
        return self.cache.layers[self.index] if self.index < len(self.cache.layers) else None


def takes_past(module: nn.Module, plan: AttentionPlan) -> bool:
    """Whether a module can use its cache: its floor goes to all that is visible, and it hands keywords on."""
    payment = plan.payment
    if not isinstance(payment, Mixture) or payment.is_neutral:
        return False
    parameters = inspect.signature(type(module).forward).parameters.values()
    keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return keywords and (payment.pay == "visible" or isinstance(plan.reach, Full))


def pass_past(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of an attention module: hands its cache on to the attention function, as a keyword."""
    if not hasattr(module, BINDING) or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    cache, index = kwargs.get("cache"), getattr(module, "layer_idx", None)
    if cache is None:
        cache = kwargs.get("past_key_values")  # the name before Transformers 5.24
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache) or not isinstance(index, int):
        return None
    # Asked now: the call is about to put another tensor in the place of the values.
    layer = cache.layers[index] if index < len(cache.layers) else None
    kept = getattr(layer, KEPT, None)
    return args, kwargs | {PAST: Past(cache, index, kept if kept is not None and kept.fits(layer) else None)}


def _is_plain_step(value: Tensor, allowed: Visible) -> bool:
    """One query that sees all keys but for padding, and no gradient through the values."""
    sees_all = allowed.dense is None and allowed.window is None and allowed.offset in (None, allowed.n_keys - 1)
    return allowed.n_queries == 1 and sees_all and not (torch.is_grad_enabled() and value.requires_grad)


def _version(values: Tensor) -> int | None:
    return None if values.is_inference() else values._version
