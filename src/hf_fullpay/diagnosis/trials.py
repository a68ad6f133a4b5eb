"""Random inputs for a model, made from its config: enough to see a promise break, without any data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_fullpay.core.errors import check_count
from hf_fullpay.diagnosis.inputs import Batch
from hf_fullpay.hf.bind import layers_of

USUAL = 64  # tokens of the longest text, where the reach is no longer
FEW = 7


def trials_of(model: nn.Module, length: int | None = None) -> list[Batch]:
    """Batches on the model's device: one token, a few tokens padded on either side, and many, one document cut short.

    Args:
        model: a model of texts or images.
        length: tokens of the longest text; None for 64, or a third more than the plan's reach.

    Raises:
        ValueError: for a model of another kind.
    """
    if length is not None:
        check_count("length", length)
    config: Any = getattr(model, "config", None)
    main, device = getattr(model, "main_input_name", None), next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    if main == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = size if isinstance(size, tuple | list) else (size, size)
        pixels = torch.randn(2, getattr(config, "num_channels", 3), height, width, generator=generator)
        return [{"pixel_values": pixels.to(device, next(model.parameters()).dtype)}]
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if main != "input_ids" or not hasattr(text, "vocab_size"):
        raise ValueError(
            f"{type(model).__name__}: expected inputs, since only token ids and images can be made up, and this model "
            f"wants {main}."
        )
    # Some models count positions from beyond the padding token.
    most = max(1, (getattr(text, "max_position_embeddings", None) or 4096) - 2)
    longest = min(length or _reach_of(model), most)
    pad = getattr(text, "pad_token_id", None)
    batches: list[Batch] = []
    for documents, tokens in ((2, 1), (3, min(FEW, longest)), (2, longest)):
        ids = torch.randint(0, text.vocab_size, (documents, tokens), generator=generator)
        ids[ids == pad] = (pad or 0) + 1 if (pad or 0) + 1 < text.vocab_size else 0
        mask = torch.ones_like(ids)
        if tokens > 2:
            mask[0, -(tokens // 3) :] = 0
        if documents > 2 and tokens > 2:
            mask[1, : tokens // 3] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = ids.clone()
        batches.append({name: tensor.to(device) for name, tensor in batch.items()})
    return batches


def _reach_of(model: nn.Module) -> int:
    sizes = [getattr(layer.plan.reach, "size", 0) for _, _, layer in layers_of(model)]
    return max(USUAL, max(sizes, default=0) * 4 // 3)
