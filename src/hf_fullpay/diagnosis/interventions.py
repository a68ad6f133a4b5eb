"""Promises that show when something is changed that must not matter: the future, padding, other documents, company.

The output of every attention call is compared before and after, so a leak has a layer and a head. Documents of a batch
have the same shape in both runs, which therefore round alike; only "alone" compares different shapes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_fullpay.diagnosis.inputs import Batch, documents_of, real_tokens, without_labels
from hf_fullpay.diagnosis.ledger import Ledger
from hf_fullpay.hf.unwrap import no_cache
from hf_fullpay.hf.watch import Seen, watch

MAIN = ("input_ids", "inputs_embeds", "pixel_values")


def check_interventions(model: nn.Module, batch: Batch, ledger: Ledger) -> None:
    """Run the model on the batch and on changed ones."""
    main = next((name for name in MAIN if name in batch), None)
    if main is None or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        note = "Not checked: future, padding and batch mates, for this kind of model or input."
        ledger.notes += [note] if note not in ledger.notes else []
        return
    given, real = batch[main], real_tokens(batch)
    outputs, causal = _outputs(model, batch)
    others = given.flatten()[torch.randperm(given.numel(), generator=torch.Generator().manual_seed(0)).to(given.device)]
    others = others.view(given.shape)
    is_text = main != "pixel_values"
    tokens = given.shape[1] if is_text else 0

    def compare(name: str, changed: Tensor, same: Tensor | None) -> None:
        """`same` says which documents (B,) or tokens (B, N) must give the same."""
        again, _ = _outputs(model, {**batch, main: changed})
        for layer, before in outputs.items():
            chosen = same if same is not None and same.shape == before.shape[: same.ndim] else None
            if chosen is not None and chosen.any():
                ledger.highest(name, layer, _apart(before[chosen], again[layer][chosen]))

    if is_text and causal and tokens > 1:
        later = torch.arange(tokens, device=given.device) >= tokens // 2
        before = ~later.expand(given.shape[:2]) & (torch.ones_like(later) if real is None else real)
        compare("causal", _where(later[None], others, given), before)
    if is_text and real is not None and not real.all():
        compare("padding", _where(~real, others, given), real)
        _check_alone(model, batch, outputs, real, ledger)
    if given.shape[0] > 1:
        first = torch.arange(given.shape[0], device=given.device) == 0
        # A padded row has no promise to keep.
        same = first if real is None else first[:, None] & real
        compare("batch mates", _where(~first, others, given), same)


def _check_alone(model: nn.Module, batch: Batch, outputs: dict[int, Tensor], real: Tensor, ledger: Ledger) -> None:
    """Documents padded on the right, whose tokens keep their places when the padding goes."""
    for number, document in enumerate(documents_of(batch)):
        kept = real[number]
        if kept.all() or not kept[0] or bool((kept[1:] & ~kept[:-1]).any()):
            continue
        alone, _ = _outputs(model, document)
        for layer, before in outputs.items():
            if before.shape[:2] == real.shape:
                ledger.highest("alone", layer, _apart(before[number, kept], alone[layer][0]))


def _outputs(model: nn.Module, batch: Batch) -> tuple[dict[int, Tensor], bool]:
    """Output (B, N, H, Dv) of every attention call, and whether all of them are causal."""
    found: dict[int, Tensor] = {}
    causal: list[bool] = []

    def see(seen: Seen) -> None:
        found[seen.index] = seen.output.detach().clone()
        causal.append(_is_causal(seen))

    torch.manual_seed(0)  # some models draw masks in eval mode too; `as_found` puts the random state back
    with watch(model, see):
        model(**without_labels(batch, model), **no_cache(model))
    return found, all(causal)


def _is_causal(seen: Seen) -> bool:
    """What the module says of itself counts too: its mask may have got lost."""
    says: Callable[[object], bool] = lambda owner: getattr(owner, "is_causal", None) is True  # noqa: E731
    config = getattr(seen.module, "config", None)
    return seen.is_causal or (says(seen.module) and getattr(config, "is_causal", True) is not False)


def _where(condition: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Condition over the first dimensions."""
    return torch.where(condition.view(*condition.shape, *(1,) * (old.ndim - condition.ndim)), new, old)


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Largest distance over the largest number, by head; (..., H, Dv)."""
    distance = (one.float() - other.float()).abs().amax(-1)
    return distance.flatten(0, -2).amax(0) / one.float().abs().max().clamp_min(1e-30)
