"""Swin's mask, read exactly: -100 means hidden there, and it is added to a learned bias before we see the sum.

Whether -100 hides a key depends on the scores, and a payment with a floor would pay patches from the opposite edge of the
image. So the mask is told apart before the bias joins it: what Swin subtracts 100 from becomes a number that we, like
everyone, read as hidden. The bias keeps its gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_fullpay.core.shapes import HIDDEN
from hf_fullpay.hf.forward import BINDING
from hf_fullpay.hf.hooks import hook_once

MASK = "attention_mask"


def is_swin(module: nn.Module) -> bool:
    """Whether an attention module is a Swin's."""
    return type(module).__name__ == "SwinAttention"


def hide(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of Swin's attention: its mask (windows, S, S) of 0 and -100, with -100 turned into hidden."""
    mask = kwargs.get(MASK, args[1] if len(args) > 1 else None)
    if not hasattr(module, BINDING) or not isinstance(mask, Tensor):
        return None
    return args[:1], kwargs | {MASK: mask.masked_fill(mask < 0, 3 * HIDDEN)}


def attach_swin(module: nn.Module) -> None:
    """Calling it again changes nothing."""
    hook_once(module, hide)
