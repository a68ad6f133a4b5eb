"""The table of gpu_cases.py, measured or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_cases import contenders, groups

NOTHING = "not measured"


def gpu(results: Any, table: Callable[[list[str], list[list[str]]], str]) -> str:
    """A row for each contender and causality, a column for each shape and direction."""
    found = {_key(row): row for row in results["rows"]} if results else {}
    columns = list(dict.fromkeys((group.shape.label, group.direction) for group in groups()))
    lines: dict[tuple[str, str, bool], dict[tuple[str, str], str]] = {}
    for group in groups():
        for contender in contenders(None, group.is_causal, group.shape.decode):
            line = lines.setdefault((contender.name, contender.backend, group.is_causal), {})
            place = group.shape.label, group.direction
            row = found.get((contender.name, contender.backend, group.is_causal, *place), {})
            line[place] = cell(row, contender.reason)
    head = ["name", "backend", "mask", *(f"{shape}, {direction}" for shape, direction in columns)]
    body = [
        [f"`{name}`", backend, "causal" if is_causal else "full", *(line.get(column, "") for column in columns)]
        for (name, backend, is_causal), line in lines.items()
    ]
    return _about(results) + "\n\n" + table(head, body)


def cell(row: dict[str, Any], known_reason: str) -> str:
    """Ratio, TFLOP/s and share of the limit, or why there are none."""
    reason = row.get("reason") or known_reason
    if reason:
        return f"not available: {reason.replace('|', '/')}"
    if not row:
        return NOTHING
    parts = ["-" if row["ratio"] is None else f"{row['ratio']:.2f}"]
    parts += [] if row["tflops"] is None else [f"{row['tflops']:.0f} TFLOP/s"]
    parts += [] if row["share"] is None else [f"{row['share']:.0%}"]
    return ", ".join(parts)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["name"], row["backend"], row["is_causal"], row["shape"], row["direction"]


def _about(results: Any) -> str:
    if results is None:
        command = "python benchmarks/run.py --device cuda --json benchmarks/results/gpu.json"
        return f"No CUDA device was at hand: not measured yet. `{command}`."
    where, best = results["provenance"], {}
    for row in results["rows"]:
        if row.get("best_sdpa"):
            place = f"{row['shape']} {'causal' if row['is_causal'] else 'full'} {row['direction']}"
            best[place] = f"{place}: {row['best_sdpa']}"
    return (
        "Time as a multiple of the fastest SDPA backend of the same shape, causality and direction; useful TFLOP/s; share "
        f"of the device's measured limit. BF16, {where['device']}, torch {where['torch']}, {where['date']}, "
        f"`{where['command'].strip()}`.\n\nFastest SDPA backend: {'; '.join(best.values())}."
    )
