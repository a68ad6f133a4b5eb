"""The single texts among what a model is diagnosed on: one row of a batch, and the slots of its tokens, padding left out
and packed texts apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.diagnosis.inputs import Batch, without_labels


def cut_rows(model: nn.Module, batches: list[Batch], count: int) -> Iterator[Batch]:
    """The batches, until they hold `count` rows."""
    for batch in batches:
        if count < 1:
            return
        rows = _rows(model, batch)
        yield _cut(batch, rows, 0, count)
        count -= rows


def longest(model: nn.Module, batches: list[Batch], count: int) -> list[Batch]:
    """The `count` rows with most tokens, each a batch of its own and without labels; the first ones where no length is
    known."""
    found = []
    for batch in batches:
        rows = _rows(model, batch)
        batch = without_labels(batch, model)
        found += [_cut(batch, rows, row, row + 1) for row in range(rows)]
    return sorted(found, key=_tokens, reverse=True)[:count]


def texts_of(inputs: Batch, slots: int, device: torch.device) -> list[Tensor]:
    """Slots of the tokens of every text of a single row, in order.

    Args:
        inputs: a batch of one row.
        slots: number of slots of the hidden states, in the decoder where there is one.
        device: where the answer goes.
    """
    places = torch.arange(slots, device=device)
    real = real_slots(inputs, slots)
    if real is not None:
        places = places[real[0].to(device)]
    numbers, starts = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
    if starts is not None and int(starts[-1]) == slots:
        text = torch.bucketize(places, starts.to(device), right=True)
    elif numbers is not None and numbers.shape == (1, slots) and not _decodes(inputs):
        text = (numbers[0].to(device)[places].diff(prepend=places.new_full((1,), -1)) < 1).cumsum(0)
    else:
        return [places]
    return list(places.split(text.unique_consecutive(return_counts=True)[1].tolist()))


def real_slots(inputs: Batch, slots: int, decoder: bool = True) -> Tensor | None:
    """Which of the slots are no padding, (B, slots) bool; None where nothing says so.

    Args:
        inputs: a batch.
        slots: number of slots of the hidden states.
        decoder: whether those are the decoder's, where there is one.
    """
    mask = inputs.get("decoder_attention_mask" if decoder and _decodes(inputs) else "attention_mask")
    return mask.bool() if mask is not None and mask.ndim == 2 and mask.shape[1] == slots else None


def reads_images(inputs: Batch) -> bool:
    """Whether a model reads pixels alone, so that tokens are patches in the order of rows."""
    return "pixel_values" in inputs and "input_ids" not in inputs


def _decodes(inputs: Batch) -> bool:
    return "decoder_input_ids" in inputs or "decoder_inputs_embeds" in inputs


def _rows(model: nn.Module, batch: Batch) -> int:
    main: Any = getattr(model, "main_input_name", "input_ids")
    first = batch.get(main, batch.get("inputs_embeds"))
    return (next(iter(batch.values())) if first is None else first).shape[0]


def _cut(batch: Batch, rows: int, start: int, stop: int) -> Batch:
    """Rows start..stop-1. What has no entry for every row (positions that all share) stays whole."""
    if rows == 1:
        return batch
    return {name: x[start:stop] if x.ndim and x.shape[0] == rows else x for name, x in batch.items()}


def _tokens(row: Batch) -> int:
    mask, ids = row.get("attention_mask"), row.get("input_ids", row.get("inputs_embeds"))
    if mask is not None and mask.ndim == 2:
        return int(mask.sum())
    return 0 if ids is None else ids.shape[1]
