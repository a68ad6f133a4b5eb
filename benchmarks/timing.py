"""How a call is timed: interleaved with what it is compared with, so that both see the same machine.

CPU: processor time of the process (with one thread, what the call itself took). CUDA: events on the stream, after a write
that empties the L2 cache and gives the host a start.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 2  # rounds that are not counted
FLUSH = 512 * 2**20  # bytes: several times the L2 cache of any device
Run = Callable[[], Any]


class Stopwatch:
    """Seconds that a call takes on a device."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.flush = torch.empty(FLUSH, dtype=torch.uint8, device=device) if self.cuda else None

    def __call__(self, run: Run) -> float:
        if self.flush is None:
            start = time.process_time()
            run()
            return time.process_time() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000


def interleaved(runs: dict[str, Run], rounds: int, watch: Stopwatch) -> dict[str, list[float]]:
    """Seconds of every run in every round, each round all runs in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + WARM_UP):
        for name, run in runs.items():
            spent = watch(run)
            if number >= WARM_UP:
                times[name].append(spent)
    return times


def ratios(times: list[float], base: list[float]) -> tuple[float, list[float]]:
    """Median and interquartile range of time / base, round by round."""
    found = [mine / its for mine, its in zip(times, base, strict=True)]
    if len(found) < 2:
        return round(found[0], 3), [round(found[0], 3)] * 2
    low, middle, high = statistics.quantiles(found, n=4)
    return round(middle, 3), [round(low, 3), round(high, 3)]
