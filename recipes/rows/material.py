"""Texts for the rows: tokens of real reviews, for a real encoder."""

from __future__ import annotations

from functools import cache
from typing import Any

import pandas
import torch
from torch import Tensor

from data import checkpoint, table


def encoder(model: str) -> tuple[Any, Any]:
    """A stock encoder in eval mode, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    place, _ = checkpoint(model)
    return AutoModel.from_pretrained(place, attn_implementation="sdpa").eval(), AutoTokenizer.from_pretrained(place)


@cache
def _table() -> pandas.DataFrame:
    rows = table("reviews")
    assert rows is not None
    return rows.assign(words=rows["text"].str.split().str.len())


def reviews(tokenizer: Any, seed: int, count: int, length: int) -> dict[str, Tensor]:
    """`count` film reviews, drawn by `seed`, cut to their last `length` tokens, marks included; none is shorter."""
    rows = _table()
    texts = rows["text"][rows["words"] >= length].sample(count, random_state=seed)  # a word is a token or more
    documents = tokenizer(texts.tolist(), add_special_tokens=False, verbose=False)["input_ids"]
    kept = [[tokenizer.cls_token_id, *ids[2 - length :], tokenizer.sep_token_id] for ids in documents]
    return {"input_ids": torch.tensor(kept)}
