"""The table of ratios: every preset and every peer against SDPA of the same causality, in one run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from cases import DIRECTIONS, SHAPES, WIDTH, Candidate, inputs, sdpa
from checks import wrong_output, wrong_preset
from growth import step
from peaks import Peaks
from timing import Stopwatch, interleaved, ratios


def rows_of(
    candidate: Candidate, dtype: str, n: int, *, is_peer: bool, device: str, rounds: int, peaks: Peaks
) -> Iterator[dict[str, Any]]:
    """A row for each direction; one with a reason and no number for what cannot run; one with "red" for what is wrong."""
    batch, heads = SHAPES.get(n, (1, 12))
    head = {
        "name": candidate.name, "dtype": dtype, "is_causal": candidate.is_causal, "n": n,
        "shape": [batch, heads, n, WIDTH], "backend": f"{candidate.backend}-{device}",
    }  # fmt: skip
    empty = {"ratio": None, "iqr": None, "peak_mib": None}
    if candidate.reason:
        yield from (head | empty | {"direction": way, "reason": candidate.reason} for way in DIRECTIONS)
        return
    leaves = inputs(n, dtype, device, batch, heads)
    try:
        wrong = wrong_output(candidate, leaves) if is_peer else wrong_preset(candidate, dtype, device)
    except Exception as error:
        if not is_peer:
            raise
        # A compiler that fails can fail in any way; whatever it says is the reason that the row gives.
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        yield from (head | empty | {"direction": way, "reason": reason} for way in DIRECTIONS)
        return
    if wrong:
        yield head | {"red": wrong}
        return
    place = dtype, n, batch, heads
    mine, its = (peaks(name, candidate.is_causal, *place) for name in (candidate.name, "sdpa"))
    probe = torch.randn_like(leaves[0])
    watch = Stopwatch(device)
    for direction in DIRECTIONS:
        row = head | {"direction": direction}
        if direction != "forward" and not candidate.has_backward:
            yield row | empty | {"reason": f"no gradients on {device}"}
            continue
        runs = {"ours": candidate.run, "sdpa": sdpa(candidate.is_causal)}
        times = interleaved({name: step(run, leaves, probe, direction) for name, run in runs.items()}, rounds, watch)
        ratio, iqr = ratios(times["ours"], times["sdpa"])
        seconds = {name: round(statistics.median(found), 5) for name, found in times.items()}
        yield row | {
            "ratio": ratio, "iqr": iqr, "seconds": seconds["ours"], "sdpa_seconds": seconds["sdpa"],
            "peak_mib": mine, "sdpa_peak_mib": its,
        }  # fmt: skip


def memory_row(candidate: Candidate, dtype: str, n: int, peaks: Peaks) -> dict[str, Any]:
    """Peak memory alone."""
    batch, heads = SHAPES.get(n, (1, 12))
    mine, its = (peaks(name, candidate.is_causal, dtype, n, batch, heads) for name in (candidate.name, "sdpa"))
    head = {"name": candidate.name, "dtype": dtype, "is_causal": candidate.is_causal, "n": n}
    return head | {"shape": [batch, heads, n, WIDTH], "peak_mib": mine, "sdpa_peak_mib": its}


def line(row: dict[str, Any]) -> str:
    """A row for the eye."""
    where = f"{row['name']:<24} {row['dtype']} n={row['n']:<5} {'causal' if row['is_causal'] else 'full':<6}"
    if "red" in row:
        return f"RED {where} {row['red']}"
    if row.get("reason"):
        return f"{where} {row['direction']:<16} not available: {row['reason']}"
    memory = f"peak {row['peak_mib']:.0f} MiB, SDPA {row['sdpa_peak_mib']:.0f}"
    if "ratio" not in row:
        return f"{where} {memory}"
    low, high = row["iqr"]
    return f"{where} {row['direction']:<16} {row['ratio']:.2f} x SDPA  (iqr {low:.2f} to {high:.2f}, {memory})"
