"""Words and mentions as a tokenizer cuts them: which pieces belong to which, and the attention between them.

From a span the attention is the mean over its pieces, to a span the sum (Clark et al. 2019): weights of a word to all
others still sum to what the row gives to words.

Dimensions: B texts of one length, N pieces, S spans, H heads, R rows of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_fullpay.core.errors import wrong
from hf_fullpay.reference import Rows

NOBODY = -1
BATCH = 1 << 16  # pairs of pieces, over the texts of a batch


@dataclass(frozen=True)
class Pieces:
    """A tokenized text.

    Attributes:
        ids: of its pieces.
        marks: which of them are class, separator or start tokens.
        owners: index of the span that a piece belongs to, or NOBODY.
        spans: their number.
    """

    ids: list[int]
    marks: list[bool]
    owners: list[int]
    spans: int


def cut(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]] = ()) -> Pieces:
    """Tokenize a text, and give every piece to the span with which it shares most characters, the earlier one in doubt.

    Raises:
        ValueError: for a tokenizer that does not tell where its pieces are.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise wrong("tokenizer", "a fast one, which tells where its pieces are in the text", type(tokenizer).__name__)
    told = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    of_character = [NOBODY] * len(text)
    for index, (start, stop) in enumerate(spans):
        for place in range(start, stop):
            if of_character[place] == NOBODY:
                of_character[place] = index
    owners = []
    for (start, stop), mark in zip(told["offset_mapping"], told["special_tokens_mask"], strict=True):
        inside = [owner for owner in of_character[start:stop] if owner != NOBODY and not mark]
        owners.append(max(dict.fromkeys(inside), key=inside.count) if inside else NOBODY)
    return Pieces(list(told["input_ids"]), [bool(mark) for mark in told["special_tokens_mask"]], owners, len(spans))


def by_length(texts: Sequence[Pieces]) -> Iterator[list[int]]:
    """Indices of texts of equal length, so that none is padded: many models have no padding token."""
    lengths: dict[int, list[int]] = {}
    for index, pieces in enumerate(texts):
        lengths.setdefault(len(pieces.ids), []).append(index)
    for length, indices in sorted(lengths.items()):
        size = max(1, BATCH // length**2)
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


class Between:
    """Weights between the spans of some texts, gathered from tiles of rows.

    Attributes:
        weights: (B, H, S, S), from a span to a span.
        visible: (B, 1 or H, S, S), whether any piece of the one may see any of the other; never where a span has none.
    """

    def __init__(self, texts: Sequence[Pieces], device: torch.device) -> None:
        spans = max(pieces.spans for pieces in texts)
        owners = torch.tensor([pieces.owners for pieces in texts], device=device)
        self._belongs = owners[:, None, :] == torch.arange(spans, device=device)[:, None]  # (B, S, N)
        self.weights = self.visible = torch.zeros((), device=device)

    def add(self, rows: Rows, start: int, stop: int) -> None:
        """Take in the rows of queries start..stop-1."""
        to = self._belongs.to(rows.weights.dtype)[:, None]
        rise = to / to.sum(-1, keepdim=True).clamp_min(1)
        part = rise[..., start:stop]
        self.weights = self.weights + part @ rows.weights @ to.mT
        self.visible = (self.visible > 0) | (part @ rows.paid.to(to.dtype) @ to.mT > 0)
