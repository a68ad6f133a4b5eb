"""Attention sinks: single positions that most queries give much of their weight.

Source: Gu et al. 2025, "When Attention Sink Emerges in Language Models": share of heads in which the mean weight of the
first key exceeds 0.3, in texts of 64 tokens. Here any position of the first half counts, so that class tokens, separators
and encoders are covered.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hf_fullpay.diagnosis.inputs import Batch, cut, without_labels
from hf_fullpay.diagnosis.report import Findings
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.hf.unwrap import body_of, no_cache
from hf_fullpay.hf.watch import Seen, watch

LENGTH = 64
LEVEL = 0.3
KEPT = 32  # inputs that are looked at


def check_sinks(model: nn.Module, documents: list[Batch], settings: Settings) -> Findings:
    """The largest sink of every head, mean over inputs: `sink` [L][H]; and the share of heads over 0.3: `sink_heads`.

    Args:
        model: in eval mode.
        documents: single inputs without padding.
        settings: not used.
    """
    totals: dict[int, Tensor] = {}
    uniform: dict[int, Tensor] = {}
    body = body_of(model)
    lengths: set[int] = set()

    def see(seen: Seen) -> None:
        sums = even = rows = torch.zeros(())
        for start, stop in seen.tiles():
            tile = seen.rows(start, stop)
            sums = sums + tile.weights.sum(-2)
            even = even + (tile.paid / tile.paid.sum(-1, keepdim=True).clamp_min(1)).sum(-2)
            rows = rows + tile.paid.sum(-2)
        lengths.add(sums.shape[-1])
        half = max(1, sums.shape[-1] // 2)
        for found, sum_of in ((totals, sums), (uniform, even)):
            largest = (sum_of / rows.clamp_min(1))[..., :half].amax(-1)
            found[seen.index] = found.get(seen.index, 0) + largest.sum(0).double().cpu()

    long = [document for document in documents if _length(document) >= LENGTH]
    chosen = [cut(document, LENGTH) for document in long] or documents
    with watch(body, see):
        for document in chosen:
            body(**without_labels(document, body), **no_cache(body))
    found = Findings()
    found.values["sink"] = [(totals[index] / len(chosen)).tolist() for index in sorted(totals)]
    found.uniform["sink"] = [(uniform[index] / len(chosen)).tolist() for index in sorted(uniform)]
    heads = [number for row in found.values["sink"] for number in row if not math.isnan(number)]  # type: ignore[union-attr]
    found.values["sink_heads"] = sum(number > LEVEL for number in heads) / max(len(heads), 1)
    if lengths != {LENGTH}:
        shown = f"{min(lengths)} to {max(lengths)}" if len(lengths) > 1 else f"{min(lengths)}"
        found.notes.append(f"Sinks were measured over {shown} tokens, since no text of {LENGTH} was among the inputs.")
    return found


def _length(document: Batch) -> int:
    ids = document.get("input_ids")
    return 0 if ids is None or ids.ndim < 2 else ids.shape[1]
