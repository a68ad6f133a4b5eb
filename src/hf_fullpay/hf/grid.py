"""Where the patches of an image lie: read off pixel_values by the model that embeds them, handed on as a keyword.

Attention modules see a row of tokens. The patch grid travels with the call as an argument, like any keyword that a user
adds to a model's call, so no state stays behind: threads, recomputation and compiled graphs each have their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_fullpay.hf.hooks import hook_once
from hf_fullpay.reach.windows import GRID

OTHERS = "fullpay_other_tokens"  # attribute: how many tokens a model puts before its patches
PIXELS = "pixel_values"
# Parameters that become tokens of their own before the patches, by the last part of their names.
_TOKENS = ("cls_token", "class_embedding", "distillation_token", "register_tokens")


def pass_grid(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a model that embeds images: adds `patch_grid`, (rows, columns, other tokens), to the call."""
    others = getattr(model, OTHERS, None)
    pixels = kwargs.get(PIXELS, args[0] if args else None)
    if others is None or not isinstance(pixels, Tensor) or pixels.ndim != 4:
        return None
    if (given := kwargs.get(GRID)) is not None:  # how many other tokens there are is known: have it checked
        return (args, kwargs | {GRID: (*given, others)}) if isinstance(given, Sequence) and len(given) == 2 else None
    config: Any = model.config
    high, wide = config.patch_size if isinstance(config.patch_size, Sequence) else (config.patch_size,) * 2
    grid = (pixels.shape[-2] // high, pixels.shape[-1] // wide, others)
    return args, kwargs | {GRID: grid}


def attach_grid(model: PreTrainedModel) -> None:
    """Let the innermost model that takes pixels tell its layers the grid. Calling it again changes nothing."""
    if not _takes_pixels(model) or any(_takes_pixels(inner) for inner in list(model.modules())[1:]):
        return
    tokens = {path: p for path, p in model.named_parameters() if path.rpartition(".")[2] in _TOKENS}
    setattr(model, OTHERS, sum(p.shape[-2] if p.ndim == 3 else 1 for p in tokens.values()))
    hook_once(model, pass_grid)


def gridless(module: nn.Module) -> str | None:
    """Why the tokens of an attention module are no patches in order, as far as its class and config tell."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "mask_ratio", None) is not None:
        return "windows need the patches of an image in order, and a masked autoencoder shuffles and drops them"
    if any(getattr(config, name, None) is not None for name in ("tubelet_size", "num_frames")):
        return "windows need the patches of one image, not those of a video"
    if not _hands_on(module):
        return "windows need the patch grid, and this attention module does not hand on the arguments of a call"
    return None


def _takes_pixels(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel) and PIXELS in inspect.signature(type(model).forward).parameters


def _hands_on(module: nn.Module) -> bool:
    """Whether the keywords of its call reach the attention function."""
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return True
    return "**kwargs" in source.rpartition("get_interface(")[2]
