"""Channel attention in a converted ViT: one module after the feed-forward of every layer.

The config says `channel_attention: true`, so a checkpoint holds the modules and `from_pretrained` makes room for them,
whatever attention it runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.vit.modeling_vit import ViTMLP

from hf_fullpay.layers import SqueezeExcite

CHANNELS = "channel_attention"  # in the config, and the name of the modules


def attach_channels(model: PreTrainedModel) -> None:
    """Give every feed-forward its channel attention, if the config asks for it."""
    config: Any = model.config
    if not getattr(config, CHANNELS, False):
        return
    for module in model.modules():
        if isinstance(module, ViTMLP) and not hasattr(module, CHANNELS):
            module.add_module(CHANNELS, SqueezeExcite(config.hidden_size))
            module.register_forward_hook(_after)


def initialize_channels(module: SqueezeExcite) -> None:
    """Fill what no checkpoint filled, and keep the model's own initialiser away from it."""
    module.initialize()
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def _after(feed_forward: nn.Module, _: Any, output: Tensor) -> Tensor:
    return getattr(feed_forward, CHANNELS)(output)
