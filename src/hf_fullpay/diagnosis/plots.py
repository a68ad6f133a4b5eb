"""Single pictures of a report with matplotlib, for papers and slides: PNG or SVG."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hf_fullpay.core.errors import wrong
from hf_fullpay.diagnosis.figures import by_head, mean_by_layer
from hf_fullpay.diagnosis.measures import MEASURES, Measure
from hf_fullpay.diagnosis.ramp import Scale
from hf_fullpay.diagnosis.report import Curve, Heatmap, Report, Values, flat, rows_of


def pictures(report: Report) -> list[str]:
    """The names that `plot` knows: measures of layers or heads, curves and heat maps."""
    measures = [name for name, values in report.values.items() if name in MEASURES and _drawn(values)]
    return list(dict.fromkeys([*measures, *report.findings.curves, *report.findings.heatmaps]))


def plot(report: Report, name: str, path: str | Path | None = None) -> Any:
    """One picture of a report.

    Args:
        report: what was measured.
        name: a measure (a heat map where every head has a number, else a line over layers), a curve or a heat map.
        path: file to write as well; .png or .svg.

    Returns:
        The matplotlib Figure.

    Raises:
        ValueError: for a name without a picture, listing those there are, or for another kind of file.
        ImportError: without matplotlib.
    """
    if name not in pictures(report):
        raise wrong("name", f"one of {', '.join(pictures(report)) or '(this report has no pictures)'}", name)
    if path is not None and Path(path).suffix.lower() not in (".png", ".svg"):
        raise wrong("path", "a file that ends in .png or .svg", str(path))
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot: expected matplotlib, got none. Try: pip install 'hf-fullpay[diagnose]'.") from error
    figure = Figure(layout="constrained")
    if name in report.findings.heatmaps:
        _panels(figure, report.findings.heatmaps[name])
    elif name in report.findings.curves:
        _curve(figure, report.findings.curves[name])
    else:
        _measure(figure, report, MEASURES[name])
    if path is not None:
        figure.savefig(path, dpi=160)
    return figure


def _measure(figure: Any, report: Report, measure: Measure) -> None:
    values = report.values[measure.name]
    axes = figure.subplots()
    axes.set_title(_literal(f"{measure.title}\n{report.model}"), fontsize=10)
    axes.set_ylabel("layer" if by_head(values) else _literal(measure.label))
    axes.set_xlabel("head" if by_head(values) else "layer")
    if by_head(values):
        image = _image(axes, rows_of(values), Scale.of(flat(values)))
        figure.colorbar(image, ax=axes, label=_literal(measure.unit))
        return
    ys = mean_by_layer(values, 0)
    axes.plot(ys, marker="o", markersize=3)
    if measure.name in report.findings.uniform:
        axes.plot(mean_by_layer(report.findings.uniform[measure.name], len(ys)), "--", label="uniform")
    if measure.name in report.limits:
        axes.axhline(report.limits[measure.name], linestyle=":", color="tab:red", label="limit")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _curve(figure: Any, curve: Curve) -> None:
    axes = figure.subplots()
    for name, ys in curve.series.items():
        axes.plot(curve.x, ys, marker="o", markersize=2.5, label=_literal(name))
    axes.set(
        title=_literal(curve.title), xlabel=_literal(curve.x_label), ylabel=_literal(curve.y_label),
        xscale="log" if curve.log_x else "linear", yscale="log" if curve.log_y else "linear",
    )  # fmt: skip
    if len(curve.series) > 1:
        axes.legend(fontsize=7)


def _panels(figure: Any, found: Heatmap) -> None:
    columns = max(1, math.ceil(math.sqrt(len(found.panels))))
    rows = max(1, math.ceil(len(found.panels) / columns))
    figure.set_size_inches(max(6.4, 1.1 * columns), max(4.8, 1.2 * rows))
    scale = Scale.of((number for panel in found.panels.values() for number in flat(panel)), found.log)
    grid = figure.subplots(rows, columns, squeeze=False)
    image = None
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, (name, panel) in zip(grid.flat, found.panels.items(), strict=False):
        image = _image(axes, panel, scale)
        axes.set_title(_literal(name), fontsize=6)
    figure.suptitle(_literal(found.title))
    figure.supxlabel(_literal(found.x_label))
    figure.supylabel(_literal(found.y_label))
    if image is not None:
        figure.colorbar(image, ax=grid, label=_literal(found.unit))


def _image(axes: Any, rows: list[list[float]], scale: Scale) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    width = max((len(row) for row in rows), default=0)
    full = [[*row, *[math.nan] * (width - len(row))] for row in rows] if width else [[math.nan]]
    # Hatched where there is no number: the image is transparent there.
    axes.patch.set(hatch="////", edgecolor="0.8", facecolor="white")
    norm = (LogNorm if scale.log else Normalize)(scale.low, scale.high, clip=True)
    return axes.imshow(full, norm=norm, aspect="auto", interpolation="nearest")


def _drawn(values: Values) -> bool:
    return isinstance(values, list) and any(True for _ in flat(values))


def _literal(text: str) -> str:
    """Text that is no formula to matplotlib."""
    return text.replace("$", r"\$")
