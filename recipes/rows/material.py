"""Texts for the rows: tokens of real reviews, for a real encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from data import checkpoint, table


def encoder(model: str) -> tuple[Any, Any]:
    """A stock encoder in eval mode, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    place, _ = checkpoint(model)
    return AutoModel.from_pretrained(place, attn_implementation="sdpa").eval(), AutoTokenizer.from_pretrained(place)


def reviews(tokenizer: Any, seed: int, count: int, length: int) -> dict[str, Tensor]:
    """`count` film reviews, drawn by `seed`, cut to their last `length` tokens, marks included; none is shorter."""
    rows = table("reviews")
    assert rows is not None
    texts = rows["text"][rows["text"].str.split().str.len() >= length].sample(4 * count, random_state=seed)
    documents = tokenizer(texts.tolist(), add_special_tokens=False, verbose=False)["input_ids"]
    kept = [[tokenizer.cls_token_id, *ids[2 - length :], tokenizer.sep_token_id] for ids in documents]
    return {"input_ids": torch.tensor([ids for ids in kept if len(ids) == length][:count])}
