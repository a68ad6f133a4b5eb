"""The softmax part of a mixture on another attention of Transformers: Mixture(host="flash_attention_2").

The host gets the mask that its own mask function builds, and we read from that mask which keys are paid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from hf_fullpay.core.errors import wrong
from hf_fullpay.core.visible import Visible
from hf_fullpay.payment.mixture import NO_HOSTS
from hf_fullpay.plan import CARRIER, PRESETS


def check_host(model: PreTrainedModel, host: str) -> None:
    """Refuse a host that this installation or this model does not have.

    Raises:
        ValueError: for a name that is not registered with a mask function, or is ours.
        ImportError: from Transformers, naming the package that the host needs.
    """
    refused = {*PRESETS, CARRIER, *NO_HOSTS}
    known = sorted(name for name in AttentionMaskInterface() if name in AttentionInterface() and name not in refused)
    if host not in known:
        raise wrong("Mixture(host=...)", f"one of {known}", host)
    found = model.get_correct_attn_implementation(host)
    if found != host:
        raise wrong(
            "Mixture(host=...)", f"{host!r}, which {type(model).__name__} cannot have; it would get {found!r}", host
        )


def run_host(
    host: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """The host's attention, (B, H, N, Dv); arguments are those that the module gave us."""
    function = AttentionInterface()[host]
    return function(_Hosted(module, host), query, key, value, mask, **options)[0].transpose(1, 2)


class _Hosted:
    """The module as its host expects it: flash attention reads its own name from the module's config."""

    def __init__(self, module: nn.Module, host: str) -> None:
        self._module = module
        self.config = _Named(module.config, host)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Named:
    """A config that answers with the host's name."""

    def __init__(self, config: Any, host: str) -> None:
        self._config, self._attn_implementation = config, host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def is_flash(host: str) -> bool:
    """Whether a host has the conventions of flash attention: padding as (B, M), and causality from the last key."""
    return "flash" in host


def seen_by_flash(query: Tensor, n_keys: int, mask: Tensor | None, causal: bool, options: dict[str, Any]) -> Visible:
    """The keys that flash attention sees: causality is lower-right, and packing is read from cu_seq_lens or position_ids.

    Raises:
        ValueError: for a window without causality, or padding for another number of keys (a static cache).
    """
    batch, _, queries, _ = query.shape
    if mask is not None and mask.shape != (batch, n_keys):
        raise ValueError(
            f"attention_mask: expected {(batch, n_keys)}, got {tuple(mask.shape)}. A floor on a flash host does not go "
            "with a static cache; leave out Mixture(host=...)."
        )
    window = options.get("sliding_window")
    if window is not None and not causal:
        raise ValueError(
            "sliding_window: expected none in a bidirectional layer on a flash host, got "
            f"{window}. Leave out Mixture(host=...)."
        )
    keys = None if mask is None else mask.bool()
    dense = None if mask is not None else _packed(query, n_keys, options)
    offset = n_keys - queries if causal else None
    return Visible(queries, n_keys, query.device, keys=keys, dense=dense, offset=offset, window=window)


def _packed(query: Tensor, n_keys: int, options: dict[str, Any]) -> Tensor | None:
    """Pairs of the same sequence where sequences are packed, (1 or B, 1, N, N)."""
    batch, _, queries, _ = query.shape
    if queries != n_keys or queries == 1:
        return None
    if (starts := options.get("cu_seq_lens_q")) is not None:
        places = torch.arange(batch * queries, device=query.device).view(batch, 1, queries)
        segment = torch.bucketize(places, starts.to(query.device)[1:], right=True)
    elif (positions := options.get("position_ids")) is not None and positions.ndim == 2:
        starts = torch.nn.functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
        if not starts.any():
            return None
        segment = starts.cumsum(-1)[:, None]
    else:
        return None
    return (segment[..., :, None] == segment[..., None, :]).expand(-1, 1, queries, queries)
