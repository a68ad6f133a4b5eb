"""How time grows with length: the exponent e of time ~ n ** e, by a line through the logarithms.

Attention over all keys has 2 in the limit, a band 1; at short lengths what is linear in n, and what is fixed, lowers it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from cases import DIRECTIONS, Candidate, inputs, sdpa
from timing import Stopwatch, interleaved

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK = (512, 1024, 2048)
HEADS = 1  # one, so that the longest takes seconds


def slope(lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """Least squares of log seconds on log length."""
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(s) for s in seconds]).slope


def growth(candidate: Candidate, dtype: str, lengths: Sequence[int], device: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each direction: exponents of the candidate, and of SDPA of the same causality in the same rounds."""
    watch, rows = Stopwatch(device), []
    runs = {"ours": candidate.run, "sdpa": sdpa(candidate.is_causal)}
    for direction in DIRECTIONS:
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for n in lengths:
            leaves = inputs(n, dtype, device, 1, HEADS)
            probe = torch.randn_like(leaves[0])
            steps = {name: step(run, leaves, probe, direction) for name, run in runs.items()}
            for name, times in interleaved(steps, rounds, watch).items():
                seconds[name].append(statistics.median(times))
        row = {"name": candidate.name, "is_causal": candidate.is_causal, "dtype": dtype, "direction": direction}
        row |= {"lengths": list(lengths), "heads": HEADS}
        for name, times in seconds.items():
            prefix = "" if name == "ours" else "sdpa_"
            row[f"{prefix}exponent"] = round(slope(lengths, times), 3)
            row[f"{prefix}seconds"] = [round(x, 5) for x in times]
        rows.append(row)
    return rows


def step(run: Any, leaves: list[torch.Tensor], probe: torch.Tensor, direction: str) -> Any:
    """The call that is timed: forward without gradients, or forward and backward."""

    still = [leaf.detach() for leaf in leaves]

    def forward() -> None:
        with torch.no_grad():
            run(*still)

    def both() -> None:
        torch.autograd.grad(run(*leaves), leaves, probe)

    return forward if direction == "forward" else both
