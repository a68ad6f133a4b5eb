"""The mask function of our attention names: as compact as the case allows.

Transformers asks it for a mask once per forward and hands the answer to every layer untouched. The number of
dimensions says what it is, so that a layer never has to guess whether it is causal:

    None          every query sees every key
    0-D  True     causal, nothing padded, the queries are the last of the keys
    2-D  (B, M)   key padding, no causality
    3-D  (B, 1, M)  causal with key padding, the queries are the last of the keys
    4-D  (B, 1, N, M)  anything else, or a user's own mask
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from hf_fullpay.hf.forward import PLAN

HOSTS: dict[str, str] = {}  # of the registered names whose plans have one


def compact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Mask for one forward, in the form that the module describes. The parameters are those of Transformers
    (q_offset is an int, or a tensor with a static cache)."""
    if (host := _host(kwargs.get("config"))) is not None:
        return AttentionMaskInterface()[host](
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device, **kwargs,
        )  # fmt: skip
    if attention_mask is not None:
        _check_padding(attention_mask, q_length + q_offset, kv_length + kv_offset)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        if _hides_nothing(padding):
            padding = None
    plain = local_size is None or kv_length < local_size
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip and plain:
        return padding
    causal = mask_function is causal_mask_function and allow_is_causal_skip and plain
    if causal and isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length:
        if q_length == 1 < kv_length:
            return padding  # the newest token sees everything that exists
        return torch.ones((), dtype=torch.bool, device=device) if padding is None else padding[:, None]
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device=device, **kwargs,
    )  # fmt: skip


def _host(config: Any) -> str | None:
    """The host of the plan that a model runs, if it has one. Read from plain dicts: torch.compile traces this."""
    if config is None:
        return None
    written = getattr(config, PLAN, None)
    return HOSTS.get(config._attn_implementation) if written is None else written["payment"].get("host")


def _check_padding(mask: Tensor, tokens: int | Tensor, slots: int) -> None:
    """Refuse what Transformers would take in silence: three dimensions, and padding for another number of tokens."""
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask: expected (batch, tokens), or (batch, heads, queries, keys), got shape {tuple(mask.shape)}."
        )
    if torch.compiler.is_compiling() or mask.shape[1] == slots:
        return
    # A static cache has slots that no token fills yet; how many are filled is a tensor.
    if mask.shape[1] > slots or mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask: expected an entry for each of the {int(tokens)} tokens, cached ones included, "
            f"got shape {tuple(mask.shape)}."
        )


def _hides_nothing(padding: Tensor) -> bool:
    """True for an all-ones mask. While tracing the values are unknown, and reading them would break the graph."""
    return not torch.compiler.is_compiling() and not torch.jit.is_tracing() and bool(padding.all())
