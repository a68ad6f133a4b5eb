"""Runs of a recipe side by side: mean and standard error over seeds, and differences to one attention, paired by seed.

    python recipes/compare.py runs/lm/*-[0-9] --figures loss perplexity bits_per_byte --against sdpa --out results.json

Reads the results.json of every run. Runs must differ in attention and seed alone, and have the same seeds under every
attention. The standard error is that of the mean over seeds; of a paired difference, that of the mean difference.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from settings import refusing


def mean_and_error(numbers: list[float]) -> dict[str, float | None]:
    """Mean, and its standard error where there is more than one number."""
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return {"mean": statistics.mean(numbers), "error": error}


def paired(ours: list[float], theirs: list[float]) -> dict[str, float | None]:
    """Mean of the differences of what belongs together, and its standard error."""
    return mean_and_error([a - b for a, b in zip(ours, theirs, strict=True)])


def figure(result: dict[str, Any], name: str) -> float:
    """A number of a result; "all.accuracy" is the accuracy inside all."""
    found: Any = result
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"--figures: expected names of numbers, got {name!r}, which is {found!r}.")
    return float(found)


def read(folder: Path) -> dict[str, Any]:
    """The results of one run."""
    try:
        found = json.loads((folder / "results.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"expected the folder of a finished run, got {folder}: {error}") from error
    if missing := {"attention", "values", "provenance"} - found.keys():
        raise ValueError(f"{folder}/results.json: expected it as a recipe writes it; missing {sorted(missing)}.")
    return found


def compare(results: list[dict[str, Any]], figures: list[str], against: str) -> dict[str, Any]:
    """Rows of the table, and where they come from.

    Args:
        results: what runs wrote, in any order.
        figures: names of numbers in them.
        against: attention that the others are compared with.

    Raises:
        ValueError: for runs that cannot be compared.
    """
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    shared = None
    for result in results:
        values = dict(result["values"])
        setting = dict(result.get("setting") or {})
        setting.pop("parameters", None)  # some attentions have learned numbers
        seed, same = values.pop("seed"), {"values": values, "setting": setting}
        if shared not in (None, same):
            raise ValueError(f"expected runs that differ in attention and seed alone, got {shared} and {same}.")
        shared = same
        if seed in runs.setdefault(result["attention"], {}):
            raise ValueError(f"expected one run for every seed, got two of {result['attention']} with seed {seed}.")
        runs[result["attention"]][seed] = result
    if against not in runs:
        raise ValueError(f"--against: expected one of {sorted(runs)}, got {against!r}.")
    seeds = sorted(runs[against])
    if uneven := {name: sorted(found) for name, found in runs.items() if sorted(found) != seeds}:
        raise ValueError(f"expected the seeds {seeds} of {against} under every attention, got {uneven}.")
    numbers = {name: {f: [figure(found[s], f) for s in seeds] for f in figures} for name, found in runs.items()}
    rows = [
        {
            "attention": name,
            "figures": {f: mean_and_error(found[f]) | {"by_seed": found[f]} for f in figures},
            "difference": {f: paired(found[f], numbers[against][f]) for f in figures} if name != against else None,
        }
        for name, found in numbers.items()
    ]
    origins = [result["provenance"] for result in results]
    return {
        "provenance": {
            "commands": [origin["command"] for origin in origins],
            "commits": sorted({origin["commit"] for origin in origins}),
            **{name: origins[0][name] for name in ("versions", "device", "threads")},
            "cpu_seconds": sum(result.get("cpu_seconds", 0) for result in results),
        },
        **(shared or {}),
        "seeds": seeds,
        "against": against,
        "rows": rows,
    }


def line(row: dict[str, Any], names: list[str]) -> str:
    """A row for people: the mean, and the paired difference with its standard error."""
    words = [f"{row['attention']:<16}"]
    for name in names:
        text = f"{name} {row['figures'][name]['mean']:.4f}"
        if row["difference"] and row["difference"][name]["error"] is not None:
            text += " ({mean:+.4f} +- {error:.4f})".format(**row["difference"][name])
        words.append(text)
    return "  ".join(words)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="--out of a finished run")
    parser.add_argument("--figures", nargs="+", required=True, metavar="NAME", help='numbers, such as "all.accuracy"')
    parser.add_argument("--against", default="sdpa", metavar="NAME", help="attention to compare with (sdpa)")
    parser.add_argument("--note", metavar="TEXT", help="what a reader of the table must know; kept in it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the table")
    options = parser.parse_args(arguments)
    with refusing(parser):
        result = compare([read(folder) for folder in options.runs], options.figures, options.against)
        if options.note:
            result["note"] = options.note
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=2) + "\n")
    for row in result["rows"]:
        print(line(row, options.figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
