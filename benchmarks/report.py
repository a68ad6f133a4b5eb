"""Render the tables of the README, of GPU.md and of the recipes' evidence, and the plot, from the preset table and from
committed results.

    python benchmarks/report.py            # rewrite them
    python benchmarks/report.py --check    # exit status 1 when a table or the plot is stale

A table stands between `<!-- table:NAME, ... -->` and `<!-- end -->`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

from gpu_table import gpu
from hf_fullpay import PRESETS, AttentionPlan, Blocks
from hf_fullpay.backends import LACKS, lacks
from hf_fullpay.diagnosis import MEASURES
from peers import LEFT_OUT
from plot import draw, is_stale, points

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "GPU.md", ROOT / "recipes" / "EVIDENCE.md")
PLOT = RESULTS / "ratios.svg"


def main() -> int:
    """Rewrite or check the pages and the plot."""
    stale = []
    for page in PAGES:
        text = page.read_text()
        rendered = re.sub(
            r"(<!-- table:(\w+)[^>]*-->\n).*?(<!-- end -->)",
            lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}",
            text,
            flags=re.DOTALL,
        )
        stale += [page] if rendered != text else []
        if "--check" not in sys.argv:
            page.write_text(rendered)
    measured = _load("cpu.json")
    data = points(measured["rows"] if measured else [], list(PRESETS))
    if data and is_stale(PLOT, data):
        stale.append(PLOT)
        if "--check" not in sys.argv:
            draw(PLOT, data)
    if "--check" in sys.argv:
        print(*(f"stale: {path.relative_to(ROOT)}" for path in stale), sep="\n")
        return int(bool(stale))
    return 0


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def presets() -> str:
    """Name, plan, where it fits and promise over 512 keys."""
    rows = [
        [f"`{name}`", plan.describe(), _fits(plan), "; ".join(plan.promises(512)) or "none"]
        for name, plan in PRESETS.items()
    ]
    return table(["name", "what it does", "for", "promise over 512 visible keys"], rows)


def recipes() -> str:
    """Every recipe with the first line of what it says of itself."""
    scripts = sorted((ROOT / "recipes").glob("*.py"))
    told = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in scripts}
    # A recipe opens with its command; the other files are parts of recipes.
    rows = [
        [f"`recipes/{path.name}`", text.split("\n\n")[0].replace("\n", " ")]
        for path, text in told.items()
        if re.search(rf"(?m)^    \S.*recipes/{path.name}", text)
    ]
    return table(["recipe", "what it does"], rows)


def checks() -> str:
    """What `diagnose` measures, and the limits it asks by itself."""
    signs = {"low": "<=", "high": ">="}
    rows = [
        [
            "roles, by `head_roles`" if measure.check == "roles" else measure.check,
            f"`{measure.name}`",
            measure.about.replace("|", "\\|") + (f" ({measure.unit})" if measure.unit else ""),
            "" if measure.limit is None else f"{signs[str(measure.better)]} {measure.limit:g}",
        ]
        for measure in MEASURES.values()
    ]
    return table(["check", "measure", "what it is", "limit"], rows)


def _fits(plan: AttentionPlan) -> str:
    """The kinds of attention that a plan makes sense for."""
    kinds = {
        "encoders": {"cross": False, "causal": False, "image": False},
        "decoders": {"cross": False, "causal": True, "image": False},
        "images": {"cross": False, "causal": False, "image": True},
        "cross-attention": {"cross": True, "causal": False, "image": False},
    }
    found = [kind for kind, facts in kinds.items() if plan.misfit(**facts) is None]
    return "all" if len(found) == len(kinds) else ", ".join(found)


def saved() -> str:
    """Share of the products q . k that the blocks of the preset do not compute."""
    reach, lengths = PRESETS["fullpay_block"].reach, (512, 1024, 4096, 16384)
    assert isinstance(reach, Blocks)
    rows = [
        [word, *(f"{100 * reach.scores_saved(n, causal=word == 'causal'):.0f}%" for n in lengths)]
        for word in ("full", "causal")
    ]
    return table(["scores saved by `fullpay_block`", *(f"n = {n:,}" for n in lengths)], rows)


def backends() -> str:
    """What each backend is, serves and refuses."""
    computed = {
        "reference": "dense formulas, N x M memory", "torch": "PyTorch operations, linear memory",
        "sdpa": "one `scaled_dot_product_attention` and a mean", "flex": "FlexAttention, compiled at the first call",
        "triton": "the kernels of `fullpay_kernels`",
    }  # fmt: skip
    rows = []
    for name, words in computed.items():
        served = [f"`{preset}`" for preset, plan in PRESETS.items() if lacks(name, plan) is None]
        every = len(served) == len(PRESETS)
        rows.append([f"`{name}`", words, "all" if every else ", ".join(served), "; ".join(LACKS[name].values()) or "-"])
    return table(["backend", "computes with", "presets", "refuses, because"], rows)


def speed() -> str:
    """Median ratios to SDPA, forward and with backward, and the growth of peak memory."""
    results = _load("cpu.json")
    if results is None:
        return "Not measured yet: `python benchmarks/run.py --json benchmarks/results/cpu.json`."
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in results["rows"]:
        if row["name"] in PRESETS:
            found[row["name"], row["is_causal"], row["dtype"], row["n"], row["direction"]] = row
    lengths = sorted({key[3] for key in found})
    dtypes = list(dict.fromkeys(key[2] for key in found))
    rows = []
    for name, is_causal in dict.fromkeys((key[0], key[1]) for key in found):
        cells = [f"`{name}`", "causal" if is_causal else "full"]
        for dtype in dtypes:
            for n in lengths:
                both = [found.get((name, is_causal, dtype, n, way)) for way in ("forward", "forward+backward")]
                cells.append(" / ".join("-" if row is None else f"{row['ratio']:.2f}" for row in both))
        long = found.get((name, is_causal, "fp32", 2048, "forward"))
        cells.append("-" if long is None else f"{long['peak_mib']:.0f} / {long['sdpa_peak_mib']:.0f}")
        rows.append(cells)
    where = results["provenance"]
    head = ["name", "mask", *(f"{dtype}, n = {n:,}" for dtype in dtypes for n in lengths), "MiB at 2,048, ours / SDPA"]
    return (
        "Time as a multiple of SDPA of the same causality in the same run, forward / forward and backward, median of "
        f"{where['rounds']} interleaved rounds; batch 1 with 12 heads of width 64 (batch 8 up to n = 512); "
        f"{where['device']}, {where['threads']} thread, torch {where['torch']}, {where['date']}, "
        f"`{where['command'].strip()}`. Peak memory "
        "above the inputs, forward and backward, FP32.\n\n" + table(head, rows)
    )


def peers() -> str:
    """The same for what else one could run; a reason in place of numbers for what could not run."""
    results = _load("cpu.json")
    rows = [row for row in results["rows"] if row["name"] not in PRESETS] if results else []
    left_out = sorted({row["name"] for row in rows if row.get("reason") == LEFT_OUT})
    rows = [row for row in rows if row["name"] not in left_out]
    if not rows:
        return "Not measured yet: `python benchmarks/run.py --json benchmarks/results/cpu.json`."
    places = list(dict.fromkeys((row["dtype"], row["n"]) for row in rows))
    found = {(row["name"], row["is_causal"], row["dtype"], row["n"], row["direction"]): row for row in rows}
    lines, reasons = [], []
    for name, is_causal in dict.fromkeys((row["name"], row["is_causal"]) for row in rows):
        cells = [f"`{name}`", "causal" if is_causal else "full"]
        for place in places:
            both = [found.get((name, is_causal, *place, way), {}) for way in ("forward", "forward+backward")]
            numbers = [row.get("ratio") for row in both]
            cells.append(" / ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in numbers))
        lines.append(cells)
        mine = [row for key, row in found.items() if key[:2] == (name, is_causal) and row.get("reason")]
        reasons += [f"`{name}`, {row['direction']}: {row['reason']}" for row in mine]
    notes = "\n".join(f"- {reason}" for reason in dict.fromkeys(reasons))
    head = ["peer", "mask", *(f"{dtype}, n = {n:,}" for dtype, n in places)]
    aside = f"\n\nNot in this run: {', '.join(f'`{name}`' for name in left_out)}." if left_out else ""
    return table(head, lines) + (f"\n\nNot available (-):\n\n{notes}" if notes else "") + aside


def growth() -> str:
    """Exponents of time."""
    results = _load("growth.json")
    if results is None:
        return "Not measured yet: `python benchmarks/run.py --growth --json benchmarks/results/growth.json`."
    found = {(row["name"], row["is_causal"], row["direction"]): row for row in results["rows"]}
    lines = [
        [f"`{name}`", "causal" if is_causal else "full"]
        + [
            f"{row['exponent']:.2f} / {row['sdpa_exponent']:.2f}" if row else "-"
            for row in (found.get((name, is_causal, way)) for way in ("forward", "forward+backward"))
        ]
        for name, is_causal in dict.fromkeys(key[:2] for key in found)
    ]
    lengths, where = results["rows"][0]["lengths"], results["provenance"]
    return (
        f"Exponent e of time ~ n ** e from {lengths[0]:,} to {lengths[-1]:,} tokens, one head, FP32, "
        f"{where['device']}, {where['threads']} thread, torch {where['torch']}, {where['date']}.\n\n"
        + table(["name", "mask", "forward, ours / SDPA", "forward and backward, ours / SDPA"], lines)
    )


def decode() -> str:
    """One token over a cache."""
    results = _load("decode.json")
    if results is None:
        return "Not measured yet: `python benchmarks/decode.py --json benchmarks/results/decode.json`."
    found: dict[tuple[Any, ...], float] = {}
    for row in results["rows"]:
        _, heads, groups, n, _ = row["shape"]
        found[row["name"], heads, groups, row["dtype"], row["padded"], n] = row["ratio"]
    lengths = sorted({key[-1] for key in found})
    lines = [
        [f"`{name}`", f"{heads} / {groups}", dtype, "yes" if padded else "no"]
        + [f"{found[name, heads, groups, dtype, padded, n]:.2f}" for n in lengths]
        for name, heads, groups, dtype, padded in dict.fromkeys(key[:-1] for key in found)
    ]
    where = results["provenance"]
    return (
        "Time of one token's attention, bookkeeping included, as a multiple of SDPA's: batch 1, width 64, "
        f"{where['device']}, {where['threads']} thread, torch {where['torch']}, {where['date']}.\n\n"
        + table(["name", "heads / key heads", "dtype", "padding", *(f"{n:,} keys" for n in lengths)], lines)
    )


def gpu_page() -> str:
    """All that is to be measured on a GPU."""
    return gpu(_load("gpu.json"), table)


def memory() -> str:
    """Growth of peak memory from 2,048 to 8,192 tokens; 4 is linear."""
    results = _load("memory.json")
    if results is None:
        return "Not measured yet."
    found = {(row["name"], row["is_causal"], row["n"]): row["peak_mib"] for row in results["rows"]}
    rows = [
        [
            f"`{name}`",
            "causal" if causal else "full",
            f"{peak:.0f}",
            f"{found[name, causal, 8192]:.0f}",
            f"{found[name, causal, 8192] / peak:.1f}",
        ]
        for (name, causal, n), peak in found.items()
        if n == 2048
    ]
    return table(["name", "mask", "MiB at 2,048", "MiB at 8,192", "growth"], rows)


def demo() -> str:
    """The two fine-tunings side by side."""
    results = _load("demo.json")
    if results is None:
        return "Not measured yet: `make demo`."
    where = results.pop("provenance")
    lines = {
        "accuracy": ("accuracy", "{:.3f}"),
        "accuracy, reviews with a contrast": ("contrast", "{:.3f}"),
        "smallest weight of a visible key": ("least", "{:.1e}"),
        "coverage (mean over rows of the smallest weight x n; uniform: 1)": ("coverage", "{:.3f}"),
        "weights under a tenth of uniform": ("below_relative", "{:.0%}"),
        "entropy / log n": ("entropy_relative", "{:.2f}"),
        "gradient, 5 nearest tokens / tokens 100 and more away": ("gradient_near_over_far", "{:.1f}"),
        "training time, s": ("seconds", "{:.0f}"),
    }
    rows = [[label, *(form.format(results[name][key]) for name in results)] for label, (key, form) in lines.items()]
    error = (results["ordinary"]["accuracy"] * (1 - results["ordinary"]["accuracy"]) / where["test"]) ** 0.5
    return (
        f"all-MiniLM-L6-v2 fine-tuned on the last {where['length']} tokens of {where['train']:,} film reviews, judged on "
        f"{where['test']} held-out ones ({where['contrast']} of them say although or but near their end); one run each, "
        "standard error of an accuracy "
        f"{error:.3f}, so the accuracies do not differ unless by more than about {2 * 1.41 * error:.2f}. `make demo`, torch "
        f"{where['torch']}, transformers {where['transformers']}.\n\n" + table(["", *results], rows)
    )


def evidence() -> str:
    """A line for every figure of the sources."""
    return _evidence().short()


def evidence_page() -> str:
    """All that there is to know of each."""
    return _evidence().long()


def _evidence() -> Any:
    """The recipe that holds the evidence; scripts of recipes/ find each other by the path."""
    sys.path.append(str(ROOT / "recipes"))
    import evidence

    return evidence


def _load(name: str) -> Any:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


TABLES = {
    "backends": backends, "presets": presets, "saved": saved, "speed": speed, "peers": peers, "growth": growth,
    "decode": decode, "memory": memory, "demo": demo, "gpu": gpu_page, "checks": checks, "recipes": recipes,
    "evidence": evidence, "evidence_page": evidence_page,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
