"""The largest numbers in a model: logits as its softmax sees them, and hidden states, apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.hf.blocks import watch_blocks
from hf_fullpay.hf.unwrap import body_of, no_cache
from hf_fullpay.hf.watch import Seen, watch


@torch.no_grad()
def extremes(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, Any]:
    """By layer, and of all layers, over all tokens that are no padding.

    Returns:
        logit: largest distance of a logit from the mean of its row, after a bound. (Softmax ignores a shift, so a row's
            own level says nothing.)
        score: the same before a bound.
        hidden: largest hidden state that leaves a block.
    """
    body, real = body_of(model), [torch.ones(1, 1, dtype=torch.bool)]
    found: dict[str, dict[int, float]] = {name: defaultdict(float) for name in ("logit", "score", "hidden")}

    def see(seen: Seen) -> None:
        for start, stop in seen.tiles():
            rows = seen.rows(start, stop)
            live = rows.visible & real[0][:, None, start:stop, None]
            counts = rows.visible.sum(-1, keepdim=True).clamp_min(1)
            for name, values in (("logit", rows.logits), ("score", rows.scores)):
                mean = values.masked_fill(~rows.visible, 0).sum(-1, keepdim=True) / counts
                largest = float((values - mean).abs().masked_fill(~live, 0).max())
                found[name][seen.index] = max(found[name][seen.index], largest)

    def leave(index: int, hidden: Tensor) -> None:
        found["hidden"][index] = max(
            found["hidden"][index], float(hidden[real[0].expand(hidden.shape[:2])].abs().max())
        )

    was_training = model.training
    model.eval()
    device = next(body.parameters()).device
    with watch(body, see), watch_blocks(body, leave=leave):
        for batch in batches:
            given = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
            tokens = given.get("input_ids", next(iter(given.values()))).shape[:2]
            real[0] = given.get("attention_mask", torch.ones(tokens, device=device)).bool()
            body(**given, **no_cache(body))
    model.train(was_training)
    largest = {name: max(values.values()) for name, values in found.items()}
    by_layer = {str(layer): {name: found[name][layer] for name in found} for layer in sorted(found["logit"])}
    return largest | {"layers": by_layer}
