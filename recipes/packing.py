"""Several documents in a row of a batch, none of which sees another.

Transformers keeps documents apart where positions start again at 0, but only without a mask (an all-ones mask counts as
one) and without a cache: with either they mix, in silence, under every attention. So rows come without a mask, padding is
one more document whose tokens are not predicted, the cache is switched off, and `refuse_mixing` looks before training.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # a token that is not predicted
Document = list[int]


def pack(lengths: list[int], size: int) -> list[list[int]]:
    """Numbers of the documents in every row: the longest first, each into the row that it fills best.

    Args:
        lengths: tokens of every document, at most `size`.
        size: tokens of a row.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room and row, sorted
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(free, (lengths[number], -1))
        room, row = free.pop(place) if place < len(free) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if room > lengths[number]:
            insort(free, (room - lengths[number], row))
    return rows


def targets(row: list[Document]) -> int:
    """Predicted tokens of a row: all but the first of each document, which nothing precedes."""
    return sum(len(document) - 1 for document in row)


def batch_of(rows: list[list[Document]], pad: int) -> dict[str, Tensor]:
    """Arguments of a model call, (B, N) each, N being the length of the longest row.

    Args:
        rows: documents of every row.
        pad: token that fills up.
    """
    longest = max(sum(map(len, row)) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "position_ids": [], "labels": []}
    for row in rows:
        filler = [pad] * (longest - sum(map(len, row)))
        batch["input_ids"].append([token for document in [*row, filler] for token in document])
        batch["position_ids"].append([place for document in [*row, filler] for place in range(len(document))])
        labels = [label for document in row for label in (IGNORED, *document[1:])]
        batch["labels"].append(labels + [IGNORED] * len(filler))
    return {name: torch.tensor(values) for name, values in batch.items()}


@contextmanager
def without_cache(model: Any) -> Iterator[None]:
    """A model whose calls make no cache."""
    usual = model.config.use_cache
    model.config.use_cache = False
    try:
        yield
    finally:
        model.config.use_cache = usual


def refuse_mixing(model: Any) -> None:
    """Look whether a model keeps packed documents apart, as it stands, with its attention and mode.

    Raises:
        ValueError: if what a document is told depends, however little, on the one before it in the row.
    """
    first, second = 9, 7
    embed = model.get_input_embeddings()
    ids = torch.arange(first + second, device=embed.weight.device)[None] % embed.num_embeddings
    inputs = embed(ids).detach().requires_grad_()
    positions = torch.cat([torch.arange(first), torch.arange(second)]).to(ids.device)[None]
    logits = model(inputs_embeds=inputs, position_ids=positions).logits
    (gradient,) = torch.autograd.grad(logits[:, first:].float().square().sum(), inputs)
    if gradient[:, :first].any():
        raise ValueError(
            f"--packing: expected a model that keeps documents of a row apart, got {type(model).__name__} with "
            f"attention {model.config._attn_implementation!r}, which mixes them. Add --no-packing."
        )
