"""Bounded scores: an order-preserving compression of every row around its centre.

Over the n_i visible keys of query i, with centre m_i, temperature tau_i and B_i = bound / tau_i:

    preserve   z = B_i * tanh((s - m_i) / B_i)               slope 1 at the centre: a checkpoint keeps its behaviour there
    sharpen    z = B_i * tanh((s - m_i) / bound)             slope 1 / tau_i: the source's literal reading, for training anew
    rescale    z = min(1, B_i / max_j |s_ij - m_i|) * (s - m_i)     keeps the matrix rank of the scores exactly

and softmax is taken of z. The compressed score f = tau_i * z never exceeds `bound`.

Promise: |z| <= B_i; the order of scores is kept (strictly while |s - m| < 9 widths in FP32, beyond it ties appear); so
every visible key gets at least exp(-2B) / (exp(-2B) + n - 1) and none more than exp(2B) / (exp(2B) + n - 1).
Softmax ignores a shift: the centre matters only through the tanh.
n_i counts the keys that the row sees, never the padded length. Cost: one tanh per score, and the scores exist in
tiles only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hf_fullpay.core.errors import check_choice, check_count, check_number, wrong
from hf_fullpay.core.numbers import PerHead, PerLayer, freeze, is_per_layer, largest

SMALLEST = 1e-6  # of bound and temperature: beyond it FP32 arithmetic has nothing left


@dataclass(frozen=True)
class Bounded:
    """Scores compressed to at most `bound` (times tau) around the centre of their row.

    Args:
        bound: limit of the compressed score, one number, one per head, or a table with a row of heads for each layer;
            None or infinity for no limit.
        centre: "mean" (linear in N), "median" (lower median, exact) or "none".
        temperature: tau, a positive number, or "auto" for 1 / sqrt(n_i).
        slope: "preserve" (z = B tanh((s - m) / B), B = bound / tau: slope 1 at the centre), "sharpen" (B tanh((s - m) /
            bound): slope 1 / tau, for training anew) or "rescale" (the row shrunk until its largest |s - m| is B).
    """

    bound: PerHead | PerLayer | None = 2.0
    centre: str = "mean"
    temperature: float | str = "auto"
    slope: str = "preserve"
    kind: ClassVar[str] = "bounded"
    inputs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", freeze(self.bound))
        object.__setattr__(self, "temperature", freeze(self.temperature))
        if self.bound is not None:
            self._check_bound()
        check_choice("Bounded(centre=...)", self.centre, ("mean", "median", "none"))
        check_choice("Bounded(slope=...)", self.slope, ("preserve", "sharpen", "rescale"))
        if self.slope == "sharpen" and math.isinf(self._widest):
            raise wrong("Bounded(bound=...)", 'a finite bound with slope="sharpen"', self.bound)
        if self.temperature != "auto":
            if isinstance(self.temperature, str):
                raise wrong("Bounded(temperature=...)", 'a number in (0, inf] or "auto"', self.temperature)
            check_number("Bounded(temperature=...)", self.temperature, low=SMALLEST, high=1 / SMALLEST)

    def _check_bound(self) -> None:
        rows = self.bound if is_per_layer(self.bound) else (self.bound,)
        for row in rows:  # type: ignore[union-attr]
            check_number("Bounded(bound=...)", row, low=SMALLEST, finite=False, per_head=True)
        if len(lengths := {len(row) for row in rows if isinstance(row, tuple)}) > 1:  # type: ignore[union-attr]
            raise wrong("Bounded(bound=...)", "as many heads in every layer", sorted(lengths))

    @property
    def limit(self) -> PerHead:
        """The bound of a layer, infinity when there is none.

        Raises:
            ValueError: for a table, of which one layer alone cannot tell its row.
        """
        if self.is_per_layer:
            raise wrong(
                "Bounded(bound=...)", "one number or one per head for a single layer", "a table",
                "A layer's own plan is plan.for_layers(number of layers)[layer].",
            )  # fmt: skip
        return math.inf if self.bound is None else self.bound  # type: ignore[return-value]

    @property
    def _widest(self) -> float:
        return math.inf if self.bound is None else largest(self.bound)

    @property
    def is_per_layer(self) -> bool:
        """Whether every layer has a bound of its own."""
        return is_per_layer(self.bound)

    def for_layer(self, layer: int, total: int) -> Bounded:
        """What one of `total` layers runs: its own row of a table.

        Raises:
            ValueError: if the table is for another number of layers.
        """
        if not self.is_per_layer:
            return self
        table: PerLayer = self.bound  # type: ignore[assignment]
        if len(table) != total:
            raise wrong("Bounded(bound=...)", f"a row for each of the {total} layers", f"{len(table)} rows")
        return replace(self, bound=table[layer])

    def certificate(self, n: int) -> tuple[float, float]:
        """Least and largest weight that any of n visible keys can get, whatever the scores.

        The widest head, of all layers, decides. Without a bound this is (0, 1).
        """
        check_count("certificate(n)", n)
        width = self._widest / temperature_of(self.temperature, float(n))
        if n == 1:
            return 1.0, 1.0
        # Written with exp(-2B) alone, which cannot overflow.
        small = math.exp(-2 * width)
        return small / (small + n - 1), 1 / (1 + (n - 1) * small)


def temperature_of(temperature: float | str, n: float) -> float:
    """tau for a row of n visible keys."""
    return 1 / math.sqrt(max(n, 1.0)) if isinstance(temperature, str) else float(temperature)


def width_and_amplitude(
    bound: Tensor | float, temperature: float | str, slope: str, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """C_i and A_i of z = A_i * tanh((s - m_i) / C_i).

    Args:
        bound: number, or (1, H, 1, 1).
        temperature: tau or "auto".
        slope: "preserve", "sharpen" or "rescale" (then C_i is the limit of |z|).
        counts: n_i of shape (B or 1, H or 1, N or 1, 1).

    Returns:
        Two tensors that broadcast against (B, H, N, 1).
    """
    inverse_tau = (
        counts.clamp_min(1).sqrt() if isinstance(temperature, str) else torch.full_like(counts, 1 / temperature)
    )
    amplitude = inverse_tau * bound
    width = torch.ones_like(inverse_tau) * bound if slope == "sharpen" else amplitude
    return width, amplitude


def bounded_scores(
    scores: Tensor, visible: Tensor, *, bound: Tensor | float, centre: str, temperature: float | str, slope: str
) -> Tensor:
    """Reference: the compressed scores z, dense.

    Args:
        scores: (B, H, N, M), FP64 or FP32, scaling and bias included.
        visible: (B or 1, H or 1, N, M) bool.
        bound: number, or (1, H, 1, 1).
        centre, temperature, slope: as in `Bounded`.

    Returns:
        (B, H, N, M); entries at hidden keys have no meaning.
    """
    counts = visible.sum(-1, keepdim=True).to(scores.dtype)
    centred = scores - centre_of(scores, visible, centre)
    width, amplitude = width_and_amplitude(bound, temperature, slope, counts)
    if slope == "rescale":
        span = centred.abs().masked_fill(~visible, 0).amax(-1, keepdim=True)
        limit = width.masked_fill(width.isinf(), 1)  # a head without a bound shrinks nothing, and divides no infinity
        return centred * torch.where(span > width, limit / span.clamp_min(torch.finfo(scores.dtype).tiny), 1)
    unlimited = width.isinf()  # a head without a bound: z = s - m
    finite = width.masked_fill(unlimited, 1)
    compressed = amplitude.masked_fill(unlimited, 1) * torch.tanh(centred / finite)
    return torch.where(unlimited, centred, compressed)


def centre_of(scores: Tensor, visible: Tensor, centre: str) -> Tensor:
    """m_i over the visible keys of every row, (B, H, N, 1); arguments as in `bounded_scores`."""
    counts = visible.sum(-1, keepdim=True)
    if centre == "mean":
        return scores.masked_fill(~visible, 0).sum(-1, keepdim=True) / counts.clamp_min(1)
    if centre == "median":
        ordered = scores.masked_fill(~visible, torch.inf).sort(-1).values
        lower = ((counts - 1) // 2).clamp_min(0).expand(*scores.shape[:-1], 1)
        return ordered.gather(-1, lower).masked_fill(counts == 0, 0)
    return torch.zeros_like(scores[..., :1])
