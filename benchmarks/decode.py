"""Time one-token steps of attention with a cache against SDPA; correctness first.

    python benchmarks/decode.py                   # 1,024, 4,096 and 16,384 keys; FP32 and BF16
    python benchmarks/decode.py --quick           # 16,384 keys, few rounds
    python benchmarks/decode.py --json FILE

A row is {name, dtype, n, shape, padded, ratio, iqr, seconds, sdpa_seconds, least, backend}: the median and the
interquartile range of time / SDPA time over interleaved rounds, and the ratio of the fastest ones. Timed is what the
attention of a layer takes in a step, its bookkeeping included (the hook that looks at the cache and the running sum); the
cache's own copying, the same for all, is left out, and so is the first step after a prompt, which sums all values once.
The bar is 1.10 at 16,384 keys. A step is checked against float64 before it is timed; on a red check no speed is printed
and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hugepages import TUNABLES, restart

if __name__ == "__main__":
    restart()

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from cases import DTYPES
from hf_fullpay import PRESETS, FullPayWarning, Mixture, attention
from hf_fullpay.hf.forward import BINDING, PAST, Layer, make_forward
from hf_fullpay.hf.running import KEPT, pass_past
from provenance import provenance
from timing import Stopwatch, interleaved, ratios

SHAPES = {"12 heads": (12, 12), "32 heads, 8 groups": (32, 8)}  # query heads, key/value heads; batch 1, width 64
LENGTHS = (1024, 4096, 16384)
BURST = {1024: 40, 4096: 20, 16384: 5}  # steps a round, so that a round is well above the clock


def main() -> int:
    """Run, print the table, write the JSON."""
    options = _arguments()
    warnings.simplefilter("ignore", FullPayWarning)
    torch.set_num_threads(options.threads)
    rows, red = [], 0
    for name in options.names:
        for heads in SHAPES:
            for dtype in options.dtypes:
                for n in options.lengths:
                    for padded in (False, True):
                        with torch.no_grad():
                            step = Step.of(name, SHAPES[heads], dtype, n, padded, options.device)
                            if wrong := check(step):
                                print(f"RED {name} {heads} {dtype} n={n} padded={padded}: {wrong}")
                                red += 1
                                continue
                            rows.append(measure(step, options))
                        print(line(rows[-1]), flush=True)
    if options.json:
        origin = provenance(options.device, threads=options.threads, malloc=TUNABLES, rounds=options.rounds)
        options.json.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n")
    return 1 if red else 0


def line(row: dict[str, Any]) -> str:
    """A row for the eye."""
    low, high = row["iqr"]
    _, heads, groups, n, _ = row["shape"]
    where = f"{row['name']:<16} {row['dtype']} n={n:<5} {heads}/{groups} heads {'padded' if row['padded'] else '':<6}"
    return f"{where} {row['ratio']:.2f} x SDPA  (iqr {low:.2f} to {high:.2f}, fastest {row['least']:.2f})"


@dataclass(eq=False)
class Step:
    """The last token of a text of n, before it is fed: everything that a layer of a model has at hand then."""

    name: str
    dtype: str
    padded: bool
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    module: nn.Module
    cache: DynamicCache
    before: tuple[Tensor, Any]  # the values that the cache held, and the sum beside them

    @classmethod
    def of(cls, name: str, heads: tuple[int, int], dtype: str, n: int, padded: bool, device: str) -> Step:
        """Random tensors, behind a cache that was filled up to the last token but one."""
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(1, *shape, 64, generator=generator).to(device, DTYPES[dtype])  # noqa: E731
        query, key, value = draw(heads[0], 1), draw(heads[1], n), draw(heads[1], n)
        mask = (torch.arange(n, device=device) >= 100)[None] if padded else None
        module = nn.Module()
        module.layer_idx = 0
        setattr(module, BINDING, Layer(name, PRESETS[name], 0, 1, "benchmark"))
        step = cls(name, dtype, padded, query, key, value, mask, module, DynamicCache(), (value, None))
        # The token before the last, as a step of its own, leaves its sum beside the cache.
        step.cache.update(key[:, :, :-1], value[:, :, :-1], 0)
        layer = step.cache.layers[0]
        step._attend(layer.keys, layer.values, None if mask is None else mask[:, :-1])
        step.before = (layer.values, getattr(layer, KEPT))
        return step

    def ours(self) -> Tensor:
        """What the hook and the attention function do; the cache grows by plain assignment."""
        layer = self.cache.layers[0]
        layer.values, kept = self.before
        setattr(layer, KEPT, kept)
        return self._attend(self.key, self.value, self.mask)

    def _attend(self, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        _, kwargs = pass_past(self.module, (), {"cache": self.cache})
        self.cache.layers[0].values = value
        return FORWARDS[self.name](self.module, self.query, key, value, mask, **{PAST: kwargs[PAST]})[0]

    def sdpa(self) -> Tensor:
        """What it is compared with."""
        mask = None if self.mask is None else self.mask[:, None, None]
        grouped = {"enable_gqa": True} if self.query.shape[1] != self.key.shape[1] else {}
        out = F.scaled_dot_product_attention(self.query, self.key, self.value, mask, **grouped)
        return out.transpose(1, 2).contiguous()


FORWARDS = {name: make_forward(name) for name in PRESETS}


def check(step: Step) -> str:
    """What is wrong with a step; an empty string if nothing is."""
    exact = [tensor.double() for tensor in (step.query, step.key, step.value)]
    truth = attention(*exact, plan=PRESETS[step.name], visible=step.mask, return_weights=True)[0].transpose(1, 2)
    softmax = F.scaled_dot_product_attention(
        *(tensor.repeat_interleave(step.query.shape[1] // tensor.shape[1], 1) for tensor in exact),
        None if step.mask is None else step.mask[:, None, None],
    ).transpose(1, 2)
    error = (step.ours().double() - truth).abs().max().item()
    rounding = torch.finfo(DTYPES[step.dtype]).eps * truth.abs().max().item()
    allowed = 2 * (step.sdpa().double() - softmax).abs().max().item() + rounding
    if not error <= allowed:
        return f"errs {error:.2e}, allowed {allowed:.2e}"
    kept = getattr(step.cache.layers[0], KEPT)
    if kept is step.before[1] or not kept.continues(
        step.key.shape[2] + 1, None if step.mask is None else _longer(step)
    ):
        return "the running sum was not carried on"
    return ""


def _longer(step: Step) -> Tensor:
    return torch.cat([step.mask, step.mask[:, -1:]], 1)


def measure(step: Step, options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    runs, n = {"ours": step.ours, "sdpa": step.sdpa}, step.key.shape[2]
    burst = BURST.get(n, 5)

    def several(run: Callable[[], Tensor]) -> Callable[[], None]:
        def steps() -> None:
            for _ in range(burst):
                run()

        return steps

    times = interleaved({key: several(run) for key, run in runs.items()}, options.rounds, Stopwatch(options.device))
    ratio, iqr = ratios(times["ours"], times["sdpa"])
    return {
        "name": step.name, "dtype": step.dtype, "n": n, "padded": step.padded,
        "shape": [1, step.query.shape[1], step.key.shape[1], n, 64],
        "ratio": ratio, "iqr": iqr,
        "least": round(min(times["ours"]) / min(times["sdpa"]), 3),
        "seconds": round(statistics.median(times["ours"]) / burst, 7),
        "sdpa_seconds": round(statistics.median(times["sdpa"]) / burst, 7),
        "backend": "torch-" + options.device,
    }  # fmt: skip


def _arguments() -> argparse.Namespace:
    paying = [name for name, plan in PRESETS.items() if isinstance(plan.payment, Mixture)]
    parser = argparse.ArgumentParser(description="Time one-token steps with a cache against SDPA.")
    parser.add_argument("--quick", action="store_true", help="16,384 keys, few rounds")
    parser.add_argument("--names", nargs="*", choices=paying, default=["fullpay"], help="presets (fullpay)")
    parser.add_argument("--dtypes", nargs="*", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--lengths", nargs="*", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="write rows and provenance")
    options = parser.parse_args()
    options.lengths = options.lengths or (LENGTHS[-1:] if options.quick else LENGTHS)
    options.rounds = options.rounds or (7 if options.quick else 25)
    return options


if __name__ == "__main__":
    sys.exit(main())
