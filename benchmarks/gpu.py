"""The table of a GPU: our torch operators and kernels, and their peers, against the best of SDPA's backends.

A group is one shape, causality and direction; all its contenders run in the same rounds, each after a write that empties
the L2 cache, timed by events. A row is {name, backend, shape, dtype, is_causal, direction, ratio, iqr, seconds, tflops,
share, best_sdpa, peak_mib}: time / time of the fastest SDPA backend, which every row names; useful operations a second;
the share of what the device can do (limits.py). What cannot run has a reason in place of numbers. Each contender is first
compared with float64, output and gradients, on an odd length of the same width; a wrong one is not timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cases import Call, Candidate, inputs, truth_of, under
from checks import wrong_preset
from gpu_cases import PLAIN, SHAPES, Contender, Group, Shape, contenders, groups, plan_of
from growth import step
from limits import flops, pairs, share, traffic
from timing import Stopwatch, interleaved, ratios

DTYPE = "bf16"
BACKENDS = {
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION, "sdpa:math": SDPBackend.MATH,
}  # fmt: skip


def run_gpu(
    names: Sequence[str] | None, device: str, rounds: int, shapes: Sequence[Shape] = SHAPES
) -> tuple[list[dict[str, Any]], int]:
    """All rows, and how many contenders were wrong."""
    rows: list[dict[str, Any]] = []
    red: set[tuple[Any, ...]] = set()
    checked: dict[Any, str] = {}
    for group in groups(shapes):
        for row in group_rows(group, names, device, rounds, checked):
            print(line(row), flush=True)
            if "red" in row:
                red.add((row["name"], row["backend"], row["shape"], row["is_causal"]))
            else:
                rows.append(row)
    return rows, len(red)


def group_rows(
    group: Group, names: Sequence[str] | None, device: str, rounds: int, checked: dict[Any, str]
) -> list[dict[str, Any]]:
    """The rows of one group; `checked` keeps what was found wrong or right already."""
    shape, backward = group.shape, group.direction != "forward"
    leaves = _leaves(shape, device)
    probe = torch.randn_like(leaves[0])
    steps: dict[Contender, Callable[[], None]] = {}
    peaks: dict[Contender, float | None] = {}
    rows = []
    for contender in contenders(names, group.is_causal, shape.decode):
        head = {
            "name": contender.name, "backend": contender.backend, "shape": shape.label, "dtype": DTYPE,
            "is_causal": group.is_causal, "direction": group.direction,
        }  # fmt: skip
        reason, wrong = contender.reason, ""
        if not reason:
            try:
                candidate = candidate_of(contender, group.is_causal, shape.decode)
                once = contender, group.is_causal, shape.width, shape.decode
                if once not in checked:
                    checked[once] = wrong_preset(candidate, DTYPE, device, shape.width, last_query=shape.decode)
                wrong = checked[once]
                if not wrong:
                    trial = step(candidate.run, leaves, probe, group.direction)
                    peaks[contender] = _peak(trial, device)
            except Exception as error:  # whatever keeps it from running is what its row says
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        rows.append((contender, head | ({"reason": reason} if reason else {"red": wrong} if wrong else {})))
        if not (reason or wrong):
            steps[contender] = trial
    times = interleaved(steps, rounds, Stopwatch(device))
    return [
        row if "reason" in row or "red" in row else row | _numbers(contender, group, times, peaks, device, backward)
        for contender, row in rows
    ]


def _numbers(
    contender: Contender, group: Group, times: dict[Contender, list[float]], peaks: dict[Contender, float | None],
    device: str, backward: bool,
) -> dict[str, Any]:  # fmt: skip
    medians = {one: statistics.median(found) for one, found in times.items()}
    best = min((one for one in times if one.backend in BACKENDS), key=medians.__getitem__, default=None)
    found: dict[str, Any] = {"seconds": medians[contender], "peak_mib": peaks[contender], "ratio": None, "iqr": None}
    found["best_sdpa"] = best and best.backend
    if best is not None:
        found["ratio"], found["iqr"] = ratios(times[contender], times[best])
    shape = group.shape
    visible = pairs(plan_of(contender.name), shape.queries, shape.keys, group.is_causal)
    found |= {"tflops": None, "share": None}
    if visible is not None:
        useful = flops(shape.whole, visible, backward)
        moved = traffic(shape.whole, shape.queries, backward)
        name = torch.cuda.get_device_name() if device == "cuda" else device
        found["tflops"] = round(useful / medians[contender] / 1e12, 1)
        part = share(name, useful, moved, medians[contender])
        found["share"] = part and round(part, 3)
    return found


def _leaves(shape: Shape, device: str) -> list[Tensor]:
    leaves = inputs(shape.keys, DTYPE, device, shape.batch, shape.heads, shape.width)
    if shape.decode:
        leaves[0] = leaves[0].detach()[:, :, -1:].contiguous().requires_grad_()
    return leaves


def _peak(run: Callable[[], None], device: str) -> float | None:
    """MiB above the inputs of a second call; the first compiles."""
    run()
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def candidate_of(contender: Contender, is_causal: bool, decode: bool) -> Candidate:
    """What a contender runs. Raises what keeps it from running."""
    plan = plan_of(contender.name)
    where = "lower_right" if decode and is_causal else is_causal
    if contender.backend in BACKENDS:
        run = _sdpa(BACKENDS[contender.backend], is_causal and not decode)
    elif contender.backend in ("torch", "triton", "flex"):
        run = under(contender.backend, plan, where)
    elif contender.backend == "flash_window":
        run = _flash_window(plan.reach.size)
    else:
        run = _flash_attn(plan.reach.size)
    truth = None if contender.name == PLAIN else truth_of(plan, where)
    return Candidate(contender.name, is_causal and not decode, run, truth, has_backward=not decode)


def _sdpa(backend: SDPBackend, is_causal: bool) -> Call:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    return run


def _flash_window(size: int) -> Call:
    """FlashAttention's sliding window, which torch carries without a public function."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = [x.transpose(1, 2) for x in (query, key, value)]
        n = key.shape[2]
        out = torch.ops.aten._flash_attention_forward(
            *rows, None, None, n, n, 0.0, True, False, window_size_left=size - 1, window_size_right=0
        )[0]
        return out.transpose(1, 2)

    return run


def _flash_attn(size: int) -> Call:
    from flash_attn import flash_attn_func

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = [x.transpose(1, 2) for x in (query, key, value)]
        return flash_attn_func(*rows, causal=True, window_size=(size - 1, 0)).transpose(1, 2)

    return run


def line(row: dict[str, Any]) -> str:
    """A row for the eye."""
    mask = "causal" if row["is_causal"] else "full"
    where = f"{row['name']:<16} {row['backend']:<14} {row['shape']:<30} {mask:<6} {row['direction']:<16}"
    if "red" in row:
        return f"RED {where} {row['red']}"
    if "reason" in row:
        return f"{where} not available: {row['reason']}"
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f} x {row['best_sdpa']}"
    speed = "" if row["tflops"] is None else f", {row['tflops']:.0f} TFLOP/s"
    part = "" if row["share"] is None else f", {row['share']:.0%} of the limit"
    return f"{where} {row['seconds'] * 1e3:.3f} ms, {ratio}{speed}{part}"
