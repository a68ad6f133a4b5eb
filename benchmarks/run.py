"""Time every preset against SDPA in the same run, with peak memory; correctness first.

    python benchmarks/run.py                      # the committed table: lengths 512, 2048, 4096; FP32 and BF16
    python benchmarks/run.py --quick              # one length, few rounds
    python benchmarks/run.py --json results.json --names fullpay bounded --lengths 2048
    python benchmarks/run.py --memory --lengths 2048 8192      # peak memory alone

A row is {name, dtype, is_causal, n, direction, ratio, iqr, peak_mib, sdpa_peak_mib, backend}: the median and the
interquartile range of time / SDPA time of the same causality, over interleaved rounds, CPU time of one thread (wall time
on CUDA). Before a row is timed, its result and gradients are compared with float64: at most twice what plain SDPA errs
in that type plus one unit of rounding of the largest value; on a red check no speed is printed and the exit status is 1.
Peak memory is measured in a child process, above the inputs, forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

# Memory-bound steps look up to 15 times slower without huge pages, and noisier; malloc reads this before Python starts.
TUNABLES = "glibc.malloc.hugetlb=1"
if __name__ == "__main__" and os.environ.get("GLIBC_TUNABLES") != TUNABLES:
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": TUNABLES})

import torch
import torch.nn.functional as F
from torch import Tensor

import hf_fullpay
from hf_fullpay import PRESETS, AttentionPlan, Band, FullPayWarning, attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = {512: (8, 12), 2048: (1, 12), 4096: (1, 12)}  # batch, heads by length; width 64


def main() -> int:
    """Run, print the table, write the JSON."""
    options = _arguments()
    warnings.simplefilter("ignore", FullPayWarning)
    torch.set_num_threads(options.threads)
    if options.peak:
        print(json.dumps(peak_of(*options.peak, device=options.device)))
        return 0
    rows, red = [], 0
    for name, is_causal in cases(options.names):
        for dtype in options.dtypes:
            for n in options.lengths:
                if wrong := check(name, is_causal, dtype, options.device):
                    print(f"RED {name} {dtype} causal={is_causal}: {wrong}")
                    red += 1
                    continue
                for row in measure(name, is_causal, dtype, n, options):
                    rows.append(row)
                    print(line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"provenance": provenance(options), "rows": rows}, indent=1) + "\n")
    return 1 if red else 0


def line(row: dict[str, Any]) -> str:
    """A row for the eye."""
    where = f"{row['name']:<16} {row['dtype']} n={row['n']:<5} {'causal' if row['is_causal'] else 'full':<6}"
    memory = f"peak {row['peak_mib']:.0f} MiB, SDPA {row['sdpa_peak_mib']:.0f}"
    if "ratio" not in row:
        return f"{where} {memory}"
    low, high = row["iqr"]
    return f"{where} {row['direction']:<16} {row['ratio']:.2f} x SDPA  (iqr {low:.2f} to {high:.2f}, {memory})"


def cases(names: list[str] | None) -> list[tuple[str, bool]]:
    """Presets, full and causal; a band is causal by itself."""
    chosen = names or list(PRESETS)
    return [
        (name, is_causal)
        for name in chosen
        for is_causal in (False, True)
        if is_causal or not isinstance(PRESETS[name].reach, Band)
    ]


def inputs(n: int, dtype: str, device: str, batch: int, heads: int, width: int = 64) -> list[Tensor]:
    """query, key, value that want gradients."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(batch, heads, n, width, generator=generator).to(device, DTYPES[dtype])  # noqa: E731
    return [draw().requires_grad_() for _ in range(3)]


def ours(plan: AttentionPlan, is_causal: bool) -> Any:
    """The call that is timed."""
    return lambda q, k, v: attention(q, k, v, plan=plan, is_causal=is_causal)


def sdpa(is_causal: bool) -> Any:
    """What it is compared with."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def with_gradients(run: Any, leaves: list[Tensor], probe: Tensor) -> list[Tensor]:
    output = run(*leaves)
    return [output, *torch.autograd.grad((output * probe).sum(), leaves)]


def check(name: str, is_causal: bool, dtype: str, device: str) -> str:
    """What is wrong with a preset in this type on an odd length; an empty string if nothing is."""
    leaves = inputs(321, dtype, device, 1, 2)
    exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    probe = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1)).to(device, DTYPES[dtype])
    plan = PRESETS[name]
    reference = lambda *t: attention(*t, plan=plan, is_causal=is_causal, return_weights=True)[0]  # noqa: E731
    truth = with_gradients(reference, exact, probe.double().cpu())
    found = with_gradients(ours(plan, is_causal), leaves, probe)
    plain_truth = with_gradients(sdpa(is_causal), exact, probe.double().cpu())
    plain = with_gradients(sdpa(is_causal), leaves, probe)
    for label, want, got, plain_want, plain_got in zip(
        ("output", "d query", "d key", "d value"), truth, found, plain_truth, plain, strict=True
    ):
        error = (got.double().cpu() - want).abs().max().item()
        rounding = torch.finfo(DTYPES[dtype]).eps * want.abs().max().item()
        allowed = 2 * (plain_got.double().cpu() - plain_want).abs().max().item() + rounding
        if not error <= allowed:
            return f"{label} errs {error:.2e}, allowed {allowed:.2e}"
    return ""


def measure(name: str, is_causal: bool, dtype: str, n: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for the forward, one for forward and backward."""
    batch, heads = SHAPES.get(n, (1, 12))
    row = {"name": name, "dtype": dtype, "is_causal": is_causal, "n": n, "shape": [batch, heads, n, 64]}
    leaves = inputs(n, dtype, options.device, batch, heads)
    probe = torch.randn_like(leaves[0])
    runs = {"ours": ours(PRESETS[name], is_causal), "sdpa": sdpa(is_causal)}
    peaks = {
        key: child_peak(options, name if key == "ours" else "sdpa", is_causal, dtype, n, batch, heads) for key in runs
    }
    rows: list[dict[str, Any]] = []
    if options.memory:
        return [row | {"peak_mib": peaks["ours"], "sdpa_peak_mib": peaks["sdpa"]}]
    for direction in ("forward", "forward+backward"):
        times: dict[str, list[float]] = {key: [] for key in runs}
        for round_ in range(options.rounds + 2):
            for key, run in runs.items():
                start = clock(options)
                if direction == "forward":
                    with torch.no_grad():
                        run(*leaves)
                else:
                    torch.autograd.grad(run(*leaves), leaves, probe)
                spent = clock(options) - start
                if round_ >= 2:  # two rounds warm up
                    times[key].append(spent)
        ratios = [a / b for a, b in zip(times["ours"], times["sdpa"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            row
            | {
                "direction": direction,
                "ratio": round(middle, 3),
                "iqr": [round(low, 3), round(high, 3)],
                "seconds": round(statistics.median(times["ours"]), 5),
                "sdpa_seconds": round(statistics.median(times["sdpa"]), 5),
                "peak_mib": peaks["ours"],
                "sdpa_peak_mib": peaks["sdpa"],
                "backend": "torch-" + options.device,
            }
        )
    return rows


def clock(options: argparse.Namespace) -> float:
    if options.device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def child_peak(
    options: argparse.Namespace, name: str, is_causal: bool, dtype: str, n: int, batch: int, heads: int
) -> float:
    """Peak of forward and backward above the inputs, in MiB, in a process of its own."""
    command = [
        sys.executable, __file__, "--device", options.device, "--threads", str(options.threads),
        "--peak", name, str(int(is_causal)), dtype, str(n), str(batch), str(heads),
    ]  # fmt: skip
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def peak_of(name: str, is_causal: str, dtype: str, n: str, batch: str, heads: str, *, device: str) -> float:
    causal = bool(int(is_causal))
    run = sdpa(causal) if name == "sdpa" else ours(PRESETS[name], causal)
    # Threads, autograd and code pages come up first, on a small input.
    small = inputs(160, dtype, device, 1, 1)
    torch.autograd.grad(run(*small).sum(), small)
    leaves = inputs(int(n), dtype, device, int(batch), int(heads))
    probe = torch.randn_like(leaves[0])
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(run(*leaves), leaves, probe)
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    # The high-water mark of the drawing of inputs must not hide what the call needs.
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water()
    torch.autograd.grad(run(*leaves), leaves, probe)
    return round((_high_water() - before) / 1024, 1)


def _high_water() -> int:
    """Peak resident memory in KiB since the mark was last cleared."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    """Where the numbers come from."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    dirty = bool(
        subprocess.run(["git", "status", "--porcelain", "src"], capture_output=True, text=True, check=False).stdout
    )
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "command": "python benchmarks/run.py " + " ".join(sys.argv[1:]), "commit": commit, "changed": dirty,
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else f"{model}, {os.cpu_count()} cores",
        "threads": options.threads, "malloc": TUNABLES, "rounds": options.rounds, "version": hf_fullpay.__version__,
    }  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time every preset against SDPA.")
    parser.add_argument("--quick", action="store_true", help="length 2048, few rounds")
    parser.add_argument("--names", nargs="*", choices=sorted(PRESETS), help="presets (all)")
    parser.add_argument("--dtypes", nargs="*", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--lengths", nargs="*", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--memory", action="store_true", help="peak memory alone, no times")
    parser.add_argument("--json", type=Path, help="write rows and provenance")
    parser.add_argument("--peak", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.lengths = options.lengths or ([2048] if options.quick else list(SHAPES))
    options.rounds = options.rounds or (5 if options.quick else 9)
    return options


if __name__ == "__main__":
    sys.exit(main())
