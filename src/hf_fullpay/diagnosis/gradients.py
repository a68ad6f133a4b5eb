"""Gradient reach: how much of a position's output depends on near and on far inputs, from every layer on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hf_fullpay.diagnosis.distances import ByDistance, by_distance
from hf_fullpay.diagnosis.inputs import Batch
from hf_fullpay.diagnosis.report import Curve, Findings
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.diagnosis.states import States, record
from hf_fullpay.diagnosis.texts import longest, reads_images, texts_of
from hf_fullpay.hf.unwrap import body_of

HELD = 0.9  # the part of the gradient whose range is asked for


def gradient_reach(
    run: Callable[[Tensor], Tensor],
    embeddings: Tensor,
    *,
    near: int = 5,
    far: int = 100,
    queries: int = 8,
    seed: int = 0,
) -> tuple[float, float]:
    """Mean gradient norm from outputs to near and to far inputs.

    For some query positions i the output is projected on a random direction, and the norm of the gradient with respect
    to every input embedding j <= i is taken: an estimate of |d out_i / d embedding_j|.

    Args:
        run: maps embeddings (1, N, D) to outputs (1, N, D').
        embeddings: (1, N, D), without padding.
        near: how many nearest positions (other than i itself) count as near.
        far: distance from which a position counts as far.
        queries: number of query positions, evenly spread over the later half, so that causal models see far keys too.
        seed: of the random directions.

    Returns:
        (near, far): mean norms. Their ratio near / far is the figure to report.

    Raises:
        ValueError: for a sequence too short to have far positions.
    """
    length = embeddings.shape[1]
    if length < far + near + 2:
        raise ValueError(f"gradient_reach: expected at least {far + near + 2} tokens for far={far}, got {length}.")
    leaf = embeddings.detach().clone().requires_grad_()
    output = run(leaf)
    generator = torch.Generator().manual_seed(seed)
    places, sums = torch.arange(length, device=leaf.device), torch.zeros(2, dtype=torch.float64)
    chosen = _queries(length, far, queries)
    for query in chosen:
        norms = gradient_norms(output, [leaf], query, generator, keep=query != chosen[-1])
        sums += _near_far(norms, query - places, near, far)[:, 0]
    near_mean, far_mean = (sums / len(chosen)).tolist()
    return near_mean, far_mean


@torch.enable_grad()
def gradient_norms(
    output: Tensor, sources: Sequence[Tensor], query: int, generator: torch.Generator, *, keep: bool
) -> Tensor:
    """Norms of the gradient of one output, projected on a random direction.

    Args:
        output: (1, N, D').
        sources: tensors (1, N, D) that it was computed from.
        query: slot of the output.
        generator: of the direction, on the CPU.
        keep: whether the graph is needed again.

    Returns:
        (sources, N), FP64; zero where the output does not depend on a source.
    """
    direction = torch.randn(output.shape[-1], generator=generator).to(output)
    found = torch.autograd.grad(output[0, query] @ direction, sources, retain_graph=keep, materialize_grads=True)
    return torch.stack([torch.linalg.vector_norm(gradient[0], dim=-1, dtype=torch.float64) for gradient in found])


def check_reach(model: nn.Module, batches: list[Batch], settings: Settings) -> Findings:
    """Gradient reach at the input of every layer: `near_over_far` and `gradient_range`, each by layer (layer 0 is end to
    end), and the curve "gradient".

    The last block's output at some positions is projected on a random direction, and the norm of its gradient is taken at
    every position of what goes into every block. Distances count both ways where later positions have any gradient.

    Args:
        model: in eval mode; left as it was.
        batches: keyword arguments of the model; the `settings.documents` rows with most tokens are used.
        settings: near, far, documents, queries, seed.
    """
    found, generator = Findings(), torch.Generator().manual_seed(settings.seed)
    reach: _Reach | None = None
    model = body_of(model)
    for inputs in longest(model, batches, settings.documents):
        states = record(model, inputs, graph=True)
        output, sources = states.outputs[-1], [states.inputs[block] for block in states.stack]
        texts = [
            slots for slots in texts_of(inputs, output.shape[1], output.device) if len(slots) >= 2 * settings.near + 2
        ]
        if not texts:
            continue
        reach = reach or _Reach(states, settings)
        reach.notes += states.elsewhere
        if reads_images(inputs):
            reach.notes.append("Gradient reach: distances in an image count patches in the order of rows.")
        for slots in texts:
            length = len(slots)
            far = max(settings.near + 1, min(settings.far, length // 2))
            if far < settings.far:
                reach.notes.append(f"Gradient reach: far begins at {far} tokens in a text of {length}.")
            chosen = _queries(length, far, settings.queries)
            for query in chosen:
                keep = slots is not texts[-1] or query != chosen[-1]
                norms = gradient_norms(output, sources, int(slots[query]), generator, keep=keep)
                reach.add(norms[:, slots], query, far)
    if reach is None:
        least = 2 * settings.near + 2
        found.notes.append(f"Gradient reach was left out: no text has the {least} tokens that it takes.")
        return found
    return reach.findings()


class _Reach:
    """Gradient norms by distance of many outputs; the last line is uniform attention, a norm of one everywhere."""

    def __init__(self, states: States, settings: Settings) -> None:
        self.states, self.near = states, settings.near
        self.labels = [f"input of layer {layer}" for layer in states.stack] + ["uniform"]
        self.near_far = torch.zeros(2, len(self.labels), dtype=torch.float64)
        self.ranges: list[Tensor] = []
        self.curve, self.notes = ByDistance(), list[str]()

    def add(self, norms: Tensor, query: int, far: int) -> None:
        """Norms (layers, n) in a text of n tokens."""
        norms = torch.cat([norms, torch.ones_like(norms[:1])])
        distance = query - torch.arange(norms.shape[1], device=norms.device)
        if norms[0, query + 1 :].any():
            distance = distance.abs()
        norms, distance = norms[:, distance >= 0], distance[distance >= 0]
        self.near_far += _near_far(norms, distance, self.near, far).cpu()
        held = by_distance(norms, distance, int(distance.max()) + 1).cumsum(1)
        beyond = (held < HELD * held[:, -1:]).sum(1).double()
        self.ranges.append(beyond.masked_fill(~(held[:, -1] > 0), math.nan).cpu())
        for label, line in zip(self.labels, norms, strict=True):
            self.curve.add(label, line, distance)

    def findings(self) -> Findings:
        """What `check_reach` gives."""
        near, far = self.near_far
        ratios, ranges = (near / far).tolist(), torch.stack(self.ranges).mean(0).tolist()
        distances, lines = self.curve.lines()
        relative = {label: [number / _first(line) for number in line] for label, line in lines.items()}
        return Findings(
            values={
                "near_over_far": self.states.by_layer(ratios[:-1]),
                "gradient_range": self.states.by_layer(ranges[:-1]),
            },
            uniform={"near_over_far": ratios[-1], "gradient_range": ranges[-1]},
            curves={
                "gradient": Curve(
                    "Gradient of an output, by distance", "distance (tokens)", "norm, relative to the nearest", distances,
                    relative, log_x=True, log_y=True,
                )
            },
            notes=list(dict.fromkeys(self.notes)),
        )  # fmt: skip


def _first(line: list[float]) -> float:
    """The nearest number there is."""
    return next((number for number in line if not math.isnan(number)), math.nan)


def _queries(length: int, far: int, count: int) -> list[int]:
    """Positions spread evenly over the later half, with something far before them."""
    spread = torch.linspace(min(max(length // 2, far + 1), length - 1), length - 1, count).long()
    return spread.unique().tolist()


def _near_far(norms: Tensor, distance: Tensor, near: int, far: int) -> Tensor:
    """Mean of norms (L, n) over near and over far positions: (2, L)."""
    close = (distance >= 1) & (distance <= near)
    return torch.stack([norms[:, close].mean(1), norms[:, distance >= far].mean(1)])
