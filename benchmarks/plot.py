"""Time against length: one panel a direction, one line a preset, drawn from the committed table of ratios.

The picture carries the digest of the numbers it was drawn from, so that a stale one is found without comparing drawings.
Mid-grey words on no background can be read on a light and on a dark page.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

INK = "#808080"
COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#17a2b8", "#e377c2", "#b8860b", "#5f9ea0", "#7f7fff")
DTYPE = "fp32"
Points = dict[tuple[str, bool, str], list[tuple[int, float]]]


def points(rows: list[dict[str, Any]], names: list[str]) -> Points:
    """(n, ratio) by preset, causality and direction."""
    found: Points = {}
    for row in rows:
        if row["name"] in names and row["dtype"] == DTYPE and row.get("ratio") is not None:
            key = row["name"], row["is_causal"], row["direction"]
            found.setdefault(key, []).append((row["n"], row["ratio"]))
    return {key: sorted(places) for key, places in found.items()}


def digest(data: Points) -> str:
    """Of the numbers."""
    plain = [[*key, places] for key, places in sorted(data.items())]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def is_stale(path: Path, data: Points) -> bool:
    """Whether the picture was drawn from other numbers, or not at all."""
    drawn = re.search(r"data-sha256:(\w+)", path.read_text()) if path.exists() else None
    return drawn is None or drawn[1] != digest(data)


def draw(path: Path, data: Points) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = {
        "svg.hashsalt": "fullpay", "svg.fonttype": "none", "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK,
        "xtick.color": INK, "ytick.color": INK, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    names = list(dict.fromkeys(name for name, _, _ in data))
    directions = list(dict.fromkeys(direction for _, _, direction in data))
    lengths = sorted({n for places in data.values() for n, _ in places})
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(1, len(directions), figsize=(8.5, 3.6), sharey=True, squeeze=False)
        for axis, direction in zip(axes[0], directions, strict=True):
            for name, is_causal, way in data:
                if way == direction:
                    axis.plot(
                        *zip(*data[name, is_causal, way], strict=True), "--" if is_causal else "-", marker="o",
                        markersize=3, linewidth=1.5, color=COLOURS[names.index(name) % len(COLOURS)],
                        label=f"{name}, {'causal' if is_causal else 'full'}",
                    )  # fmt: skip
            axis.axhline(1, color=INK, linewidth=0.8, linestyle=":")
            axis.set(xscale="log", yscale="log", xlabel="length n", title=direction.replace("+", " and "))
            axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
            axis.set_yticks([0.1, 0.25, 0.5, 1, 2, 4], ["0.1", "0.25", "0.5", "1", "2", "4"])
            axis.minorticks_off()
        axes[0][0].set_ylabel("time / SDPA")
        legend = {
            label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            legend.values(), legend.keys(), loc="center left", bbox_to_anchor=(0.72, 0.5), frameon=False, fontsize=8
        )
        figure.subplots_adjust(left=0.08, right=0.71, bottom=0.15, top=0.9, wspace=0.08)
        about = {"Description": f"data-sha256:{digest(data)}", "Date": None, "Title": "Time of every preset over SDPA"}
        figure.savefig(path, format="svg", transparent=True, metadata=about)
        pyplot.close(figure)
