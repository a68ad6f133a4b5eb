"""Caches for a band: k keys in memory, however long the text.

A band of k tokens never looks further back than k - 1 keys, so Transformers' sliding-window cache layers hold all that it
needs. A floor over everything (`pay="visible"`) also needs the sum and number of all values ever seen, which our own layer
keeps beside its window: O(d) memory and time a token.

Dimensions: B batch, G key/value heads, N new keys, M keys, W keys kept, Dv width of value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_fullpay.core.errors import wrong
from hf_fullpay.core.running import RunningSum
from hf_fullpay.core.visible import Visible
from hf_fullpay.hf.forward import BINDING, Layer
from hf_fullpay.payment import Mixture
from hf_fullpay.reach import Band

INSTEAD = "Leave the cache out: generate() then keeps all keys, which is right for any plan."


def sliding_cache(model: PreTrainedModel) -> Cache:
    """A cache that holds as many keys as the band of the model sees, for `generate(..., cache=...)` or the model's call.

    Tokens and logits are those without a cache, to rounding. Whether a token is padding is settled when it is fed; what
    `attention_mask` says later about tokens that have left the window changes nothing. Make a new one, or call its
    `reset()`, for every text.

    Args:
        model: a decoder that runs a plan whose reach is a `Band` in every layer, such as "band_causal" or
            "fullpay_band".

    Returns:
        A Transformers `Cache` of sliding-window layers, W = size - 1 keys each once a step has been made. Where the
        floor goes to everything visible, they keep the sum and number of all values besides.

    Raises:
        ValueError: if some layer sees further than a band, or the model is no decoder, naming why and what to use.
    """
    layers = _layers(model)
    size = max(max(layer.plan.reach.size for layer in layers), 2)  # type: ignore[union-attr]
    own = DynamicCache(config=model.config)
    if len(own.layers) != len(layers) or any(own.is_linear) or any(own.is_dummy):
        raise wrong(
            "sliding_cache(model)", f"one attention layer under our name for each of {len(own.layers)} cache layers",
            f"{type(model).__name__} with {len(layers)}", INSTEAD,
        )  # fmt: skip
    pays_all = [isinstance(layer.plan.payment, Mixture) and layer.plan.payment.pay == "visible" for layer in layers]
    if any(pays_all) and any(own.is_sliding):
        raise wrong(
            "sliding_cache(model)", 'a model without a sliding window of its own, or pay="reach"',
            f"{type(model).__name__}, whose window would cut what the floor goes to", INSTEAD,
        )  # fmt: skip
    return Cache(layers=[(FloorLayer if all_ else DynamicSlidingWindowLayer)(size) for all_ in pays_all])


def _layers(model: PreTrainedModel) -> list[Layer]:
    """The layers of a decoder, all of them with a band."""
    if not isinstance(model, PreTrainedModel):
        raise wrong("sliding_cache(model)", "a Transformers model", model)
    label = type(model).__name__
    found = [(module, layer) for module in model.modules() if (layer := getattr(module, BINDING, None)) is not None]
    if not found:
        hint = 'Load it with attn_implementation="band_causal" or "fullpay_band".'
        raise wrong("sliding_cache(model)", "a model that runs one of our attentions", label, hint)
    if model.config.is_encoder_decoder or not all(getattr(module, "is_causal", False) for module, _ in found):
        raise wrong("sliding_cache(model)", "a decoder", f"{label}, which is none, or not only", INSTEAD)
    for _, layer in found:
        if not isinstance(layer.plan.reach, Band):
            got = f"{layer.plan.describe()} in layer {layer.index} of {label}, which sees every key"
            raise wrong("sliding_cache(model)", "a plan with reach=Band(...) in every layer", got, INSTEAD)
    return [layer for _, layer in found]


class FloorLayer(DynamicSlidingWindowLayer):
    """A sliding-window layer that keeps the sum and number of all visible values ever fed.

    The attention function tells it which tokens are padding, by calling `sums` after every `update`.

    Args:
        sliding_window: k, the number of keys that a query sees, itself included.
    """

    def __init__(self, sliding_window: int, **kwargs: Any) -> None:
        super().__init__(sliding_window, **kwargs)
        self._forget()

    def _forget(self) -> None:
        self.fed: RunningSum | None = None
        self.summed = 0  # tokens in the sum, padding included
        self.shown: Tensor | None = None  # (B, W) bool, which stored tokens are no padding: for `crop`

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As upstream: stores N new keys and values; returns those of the window and of the new tokens.

        Raises:
            RuntimeError: if earlier tokens went past the attention that sums them.
            ValueError: for another number of rows than before.
        """
        if self.fed is not None and self.fed.total.shape[0] != key_states.shape[0]:
            hint = "Start with a new cache, or call its batch_select_indices()."
            raise wrong("sliding_cache", f"{self.fed.total.shape[0]} rows as before", key_states.shape[0], hint)
        if self.summed != self.cumulative_length:
            raise RuntimeError(
                f"sliding_cache: expected all {self.cumulative_length} cached tokens to have gone through the attention "
                f"that it was made for, got {self.summed}. Was the attention of the model changed? Start with a new "
                "cache."
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def sums(self, value: Tensor, allowed: Visible) -> RunningSum:
        """Sums up to each of N queries, over all tokens ever fed.

        Args:
            value: (B, G, M, Dv), what `update` returned.
            allowed: N queries and M keys: causality and padding, nothing else.

        Raises:
            ValueError: for any other pattern, since what it hides among keys that are gone cannot be known.
        """
        queries = allowed.n_queries
        keys = _padding(allowed).expand(value.shape[0], -1)
        if queries > value.shape[2] or self.summed + queries != self.cumulative_length:
            raise wrong(
                "sliding_cache", f"{self.cumulative_length - self.summed} queries, one for each new key", queries
            )
        sums = (self.fed or RunningSum.of_nothing(value)).then(value[:, :, -queries:], keys[:, -queries:])
        self.fed, self.summed = sums.last, self.cumulative_length
        shown = keys[:, -queries:] if self.shown is None else torch.cat([self.shown, keys[:, -queries:]], 1)
        self.shown = self._cut(shown)
        return sums

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, given as a negative number, as upstream: once the window is full only those that
        were fed since `activate_past_recording`.

        Raises:
            ValueError: where the tokens that would then belong to the window are gone.
        """
        removed, before = abs(tokens_to_remove), self.cumulative_length
        stored = 0 if self.values is None else self.values.shape[2]
        if self.record_past and stored - removed < min(before - removed, self.sliding_window - 1):
            raise wrong("crop", f"at most {stored - self.sliding_window + 1} tokens to take back", removed)
        values, shown = self.values, self.shown
        super().crop(tokens_to_remove)
        removed = before - self.cumulative_length
        if removed and self.fed is not None and values is not None and shown is not None:
            self.fed = self.fed.without(values[:, :, -removed:], shown[:, -removed:])
            self.summed = self.cumulative_length
            shown = shown[:, :-removed]
        self.shown = None if shown is None else self._cut(shown)

    def _cut(self, shown: Tensor) -> Tensor:
        stored = 0 if self.values is None else self.values.shape[2]
        return shown[:, shown.shape[1] - stored :].clone()

    def reset(self) -> None:
        super().reset()
        self._forget()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._change_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._change_rows(lambda rows: rows[indices, ...])

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.fed is not None and self.shown is not None:
            self.fed, self.shown = self.fed.rows(change), change(self.shown)


def _padding(allowed: Visible) -> Tensor:
    """(B or 1, M) bool, which keys exist, out of a set that is causality and padding."""
    queries, n_keys = allowed.n_queries, allowed.n_keys
    full = torch.ones(1, n_keys, dtype=torch.bool, device=allowed.device)
    causal = queries == 1 if allowed.offset is None else allowed.offset == n_keys - queries
    if allowed.dense is None and causal:
        return full if allowed.keys is None else allowed.keys
    # The last query sees every key that exists.
    pairs = allowed.to_dense()
    last = pairs[:, 0, -1]
    wanted = Visible(queries, n_keys, allowed.device, keys=last, offset=n_keys - queries).to_dense()
    if not torch.equal(pairs, wanted.expand_as(pairs)):
        raise wrong(
            "attention_mask", "padding alone beside a cache of sliding_cache(), whose floor goes to all tokens before",
            "another pattern of pairs", 'Leave the cache out, or use a plan with pay="reach".',
        )  # fmt: skip
    return last
