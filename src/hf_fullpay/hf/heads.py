"""Run a model without some of its attention heads: what each gives is zero before the output projection mixes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_fullpay.core.errors import check_count, wrong
from hf_fullpay.hf.watch import Seen, attention_modules, watch


@contextmanager
def without_heads(model: nn.Module, heads: Mapping[int, Iterable[int]]) -> Iterator[None]:
    """Mask heads inside the context; gradients do not pass through them either.

    Args:
        model: any Transformers model whose attention routes, not compiled.
        heads: query heads to mask, by layer. A layer is the number of the attention call within a forward pass, from 0.

    Raises:
        ValueError: for a layer that the model does not have, at once; for such a head, from within its forward.

    Source: P. Michel, O. Levy, G. Neubig, "Are Sixteen Heads Really Better than One?", 2019 (mask xi_h = 0).
    """
    # A layer that is shared, as in ALBERT, is one module and many calls.
    layers = max(len(attention_modules(model)), getattr(getattr(model, "config", None), "num_hidden_layers", 0))
    masked = {layer: sorted(set(chosen)) for layer, chosen in heads.items()}
    for layer, chosen in masked.items():
        check_count("heads: layer", layer, low=0, high=layers - 1)
        for head in chosen:
            check_count(f"heads: head of layer {layer}", head, low=0)

    def silence(seen: Seen) -> Tensor | None:
        chosen = masked.get(seen.index)
        if not chosen:
            return None
        count = seen.output.shape[2]
        if chosen[-1] >= count:
            raise wrong(f"heads: head of layer {seen.index}", f"an integer of at most {count - 1}", chosen[-1])
        return seen.output.index_fill(2, torch.tensor(chosen, device=seen.output.device), 0.0)

    with watch(model, silence):
        yield
