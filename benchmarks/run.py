"""Time every preset against SDPA and its peers in the same run, with peak memory; correctness first.

    python benchmarks/run.py --json benchmarks/results/cpu.json       # lengths 128 to 4096; FP32 and BF16
    python benchmarks/run.py --quick                                  # one length, one type, few rounds
    python benchmarks/run.py --names fullpay bounded --lengths 2048 --no-peers
    python benchmarks/run.py --memory --lengths 2048 8192 --dtypes fp32 --json benchmarks/results/memory.json
    python benchmarks/run.py --growth --json benchmarks/results/growth.json   # exponents from 512 to 16,384
    python benchmarks/run.py --device cuda --json benchmarks/results/gpu.json # see gpu.py

A row is {name, dtype, is_causal, n, direction, ratio, iqr, peak_mib, backend}: the median and the interquartile range of
time / SDPA time of the same causality, over interleaved rounds. Peers are rows of the same form, named eager, sdpa_mask
(sdpa_mask:NAME for the mask of a preset's reach), flex:NAME and hf-attention-normalizers:softmax1; one that cannot run
has no numbers and a reason. Before a row is timed its result, and a preset's gradients, are compared with float64; on a red
check no speed is printed and the exit status is 1. Peak memory is that of a child process above the inputs, forward and
backward (forward alone for what has no gradients). Exit status 2: nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

# Memory-bound steps look up to 15 times slower without huge pages, and noisier; malloc reads this before Python starts.
TUNABLES = "glibc.malloc.hugetlb=1"
if __name__ == "__main__" and os.environ.get("GLIBC_TUNABLES") != TUNABLES:
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": TUNABLES})

import torch

from cases import DTYPES, SHAPES, presets
from checks import wrong_preset
from cpu import line, memory_row, rows_of
from gpu import run_gpu
from growth import LENGTHS, QUICK, growth
from hf_fullpay import PRESETS, FullPayWarning
from peaks import Peaks
from peers import peers
from provenance import provenance

QUICK_FLEX = ("band_causal",)  # each takes some seconds to compile, twice


def main() -> int:
    """Run, print the table, write the JSON."""
    options = _arguments()
    warnings.simplefilter("ignore", FullPayWarning)
    torch.set_num_threads(options.threads)
    if options.device == "cuda":
        if not torch.cuda.is_available():
            print("no CUDA device: not measured")
            return 2
        rows, red = run_gpu(options.names, "cuda", options.rounds)
    else:
        rows, red = _growth(options) if options.growth else _table(options)
    if options.json:
        details = {"threads": options.threads, "malloc": TUNABLES, "rounds": options.rounds}
        found = {"provenance": provenance(options.device, **details), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if red else 0


def _table(options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Ratios and peaks, or peaks alone."""
    rows, red = [], 0
    peaks = Peaks("cpu", options.threads)
    candidates = [(candidate, False) for candidate in presets(options.names)]
    if not (options.no_peers or options.memory):
        flexible = QUICK_FLEX if options.quick else options.flex
        candidates += [(candidate, True) for candidate in peers(options.names, "cpu", flexible)]
    for candidate, is_peer in candidates:
        for dtype in options.dtypes:
            for n in options.lengths:
                if options.memory:
                    found = [memory_row(candidate, dtype, n, peaks)]
                else:
                    found = rows_of(
                        candidate, dtype, n, is_peer=is_peer, device="cpu", rounds=options.rounds, peaks=peaks
                    )
                for row in found:
                    print(line(row), flush=True)
                    red += "red" in row
                    rows += [row] if "red" not in row else []
    peaks.close()
    return rows, red


def _growth(options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Exponents of time."""
    rows, red = [], 0
    for candidate in presets(options.names):
        for dtype in options.dtypes:
            if wrong := wrong_preset(candidate, dtype, "cpu"):
                print(f"RED {candidate.name} {dtype} causal={candidate.is_causal}: {wrong}")
                red += 1
                continue
            for row in growth(candidate, dtype, options.lengths, "cpu", options.rounds):
                rows.append(row)
                mask = "causal" if row["is_causal"] else "full"
                print(
                    f"{row['name']:<24} {dtype} {mask:<6} {row['direction']:<16} n ** {row['exponent']:.2f}  "
                    f"(SDPA {row['sdpa_exponent']:.2f})",
                    flush=True,
                )
    return rows, red


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time every preset against SDPA and its peers.")
    parser.add_argument("--quick", action="store_true", help="length 1024 in FP32, few rounds, little FlexAttention")
    parser.add_argument("--names", nargs="*", choices=sorted(PRESETS), help="presets (all)")
    parser.add_argument("--dtypes", nargs="*", choices=sorted(DTYPES))
    parser.add_argument("--lengths", nargs="*", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--no-peers", action="store_true", help="presets alone")
    parser.add_argument(
        "--flex", nargs="*", choices=sorted(PRESETS), help="presets that FlexAttention is timed for (all)"
    )
    parser.add_argument("--memory", action="store_true", help="peak memory alone, no times")
    parser.add_argument("--growth", action="store_true", help="exponents of time alone")
    parser.add_argument("--json", type=Path, help="write rows and provenance")
    options = parser.parse_args()
    short = options.quick or options.growth
    options.dtypes = options.dtypes or (["fp32"] if short else ["fp32", "bf16"])
    usual = (QUICK if options.quick else LENGTHS) if options.growth else [1024] if options.quick else list(SHAPES)
    options.lengths = options.lengths or list(usual)
    options.rounds = options.rounds or (20 if options.device == "cuda" else 3 if short else 9)
    return options


if __name__ == "__main__":
    sys.exit(main())
