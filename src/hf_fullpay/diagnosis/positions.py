"""How a model tells positions apart: distances of hidden states when every token is the same.

Hidden states of all-zero embeddings hold positions and nothing else. Where a model turns queries and keys or adds to
scores instead, hidden states know no position, and the weights say what distance does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_fullpay.diagnosis.distances import ByDistance
from hf_fullpay.diagnosis.inputs import Batch
from hf_fullpay.diagnosis.report import Curve, Findings, Heatmap
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.diagnosis.states import States, is_cross, record
from hf_fullpay.diagnosis.texts import longest, reads_images, texts_of
from hf_fullpay.hf.unwrap import body_of
from hf_fullpay.hf.watch import Seen, watch

SHOWN = 64  # rows and columns of the picture
RANKED = 512  # positions whose distances are compared


def check_positions(model: nn.Module, batches: list[Batch], settings: Settings) -> Findings:
    """`position_decay`, the rank correlation (Spearman) of |i - j| with the distance of the hidden states of positions i
    and j, at the first layer's input and at the last layer's output, and the heatmap "positions"; or, where positions do
    not reach the hidden states, the curve "position_weights" of every layer's mean weight by distance.

    Args:
        model: in eval mode; left as it was.
        batches: keyword arguments of the model; the row with most tokens says how many positions to look at.
        settings: not used.
    """
    found, model = Findings(), body_of(model)
    (inputs,) = longest(model, batches, 1)
    with same_tokens(model, inputs, torch.zeros_like) as given:
        states = record(model, given)
    first, last = states.inputs[states.stack.start], states.outputs[-1]
    slots = max(texts_of(inputs, last.shape[1], last.device), key=len)
    found.notes += states.elsewhere
    if len(slots) < 3:
        found.notes.append(f"Positions were left out: {len(slots)} of them have no distances to compare.")
        return found
    if reads_images(inputs):
        found.notes.append("Positions of an image count patches in the order of rows.")
    chosen, shown = _even(slots, RANKED), _even(slots, SHOWN)
    places = torch.arange(0, len(slots), math.ceil(len(slots) / RANKED), device=slots.device)
    pairs = torch.triu_indices(len(chosen), len(chosen), 1, device=slots.device)
    apart = places[pairs[1]] - places[pairs[0]]
    decay = [rank_correlation(apart, distances(hidden[0, chosen])[pairs[0], pairs[1]]) for hidden in (first, last)]
    if math.isnan(decay[0]):
        found.notes.append(
            "Positions do not reach the hidden states of this model, all distances are 0 (it turns queries and keys, adds "
            "to scores, or knows no positions): the curve shows weights by distance, every token being the same."
        )
        found.curves["position_weights"] = _weights(model, inputs, slots, states)
        return found
    found.values["position_decay"] = decay
    step = math.ceil(len(slots) / SHOWN)
    label = "position" if step == 1 else f"position, in steps of {step}"
    found.heatmaps["positions"] = Heatmap(
        "Distance of positions, all-zero embeddings", label, label,
        {
            "first layer's input": distances(first[0, shown]).tolist(),
            "last layer's output": distances(last[0, shown]).tolist(),
        },
        unit="distance of hidden states",
    )  # fmt: skip
    return found


@contextmanager
def same_tokens(model: nn.Module, inputs: Batch, fill: Callable[[Tensor], Tensor]) -> Iterator[Batch]:
    """Exchange the input embeddings inside the context.

    Args:
        model: the model.
        inputs: its keyword arguments, one row.
        fill: makes other embeddings (1, N, width) of the model's.

    Yields:
        the keyword arguments to call the model with.
    """
    if "inputs_embeds" in inputs:
        yield inputs | {"inputs_embeds": fill(inputs["inputs_embeds"])}
        return

    def exchange(module: nn.Module, args: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> object:
        return fill(output) if isinstance(output, Tensor) else (fill(output[0]), *output[1:])

    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    hook = embeddings.register_forward_hook(exchange)
    try:
        yield inputs
    finally:
        hook.remove()


def distances(states: Tensor) -> Tensor:
    """Distances of states (n, width): (n, n), FP32. Zero where they are equal but for rounding in their own type."""
    wide = states.float()
    found = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist")
    rounding = 16 * torch.finfo(states.dtype).eps * wide.norm(dim=-1).max()
    return found if found.max() > rounding else torch.zeros_like(found)


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's rank correlation of two lists, equal numbers sharing their mean rank; NaN where all are equal."""
    ranks = torch.stack([_ranks(one), _ranks(other)])
    ranks = ranks - ranks.mean(1, keepdim=True)
    norms = ranks.norm(dim=1)
    return float(ranks[0] @ ranks[1] / norms.prod()) if norms.all() else math.nan


def _ranks(numbers: Tensor) -> Tensor:
    _, place, counts = numbers.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place].double()


def _even(slots: Tensor, most: int) -> Tensor:
    """At most so many slots, by even steps."""
    return slots[:: math.ceil(len(slots) / most)]


def _weights(model: nn.Module, inputs: Batch, slots: Tensor, states: States) -> Curve:
    """Mean weight by distance in every layer, mean over heads, when every token is the mean of the text's."""
    found, flat = ByDistance(), ByDistance()

    def mean(embeddings: Tensor) -> Tensor:
        known = slots.max() < embeddings.shape[1]
        return (embeddings[:, slots] if known else embeddings).mean(1, keepdim=True).expand_as(embeddings)

    def see(seen: Seen) -> None:
        if is_cross(seen) or states.layers[seen.index] not in states.stack:
            return
        for start, stop in seen.tiles():
            own = slots[(slots >= start) & (slots < stop)]
            rows = seen.rows(start, stop)
            paid = rows.paid.any(1)[0][own - start][:, slots]
            apart = (own[:, None] - slots).abs()[paid]
            weights = rows.weights.mean(1)[0][own - start][:, slots]
            found.add(f"layer {seen.index}", weights[paid], apart)
            if states.layers[seen.index] == states.stack.start:
                flat.add("uniform", (1 / paid.sum(1, keepdim=True)).expand_as(paid)[paid], apart)

    with same_tokens(model, inputs, mean) as given, watch(model, see):
        record(model, given)
    at, lines = found.lines()
    return Curve(
        "Weight by distance, every token the same", "distance (tokens)", "mean weight", at, lines | flat.lines()[1],
        log_x=True, log_y=True,
    )  # fmt: skip
