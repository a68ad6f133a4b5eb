"""The figures of a page: one card per measure, curve, picture and table, of one report or of two side by side.

Whatever a model or a data set named goes through `escape`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from hf_fullpay.diagnosis import svg
from hf_fullpay.diagnosis.measures import Measure
from hf_fullpay.diagnosis.ramp import Scale, png
from hf_fullpay.diagnosis.report import Curve, Heatmap, Line, Report, Table, Values, flat, rows_of, shown

Sides = dict[str, Report]  # {"": report}, or {"before": one, "after": the other}
_PLACE = re.compile(r"layer (\d+), head (\d+)")


def measure_card(measure: Measure, sides: Sides, numbers: bool = True) -> str:
    """Heat map and curve of a measure; "" where no side has more than one number."""
    values = {side: report.values[measure.name] for side, report in sides.items() if measure.name in report.values}
    values = {side: found for side, found in values.items() if isinstance(found, list) and any(_countable(found))}
    if not values:
        return ""
    limit = next((r.limits[measure.name] for r in sides.values() if measure.name in r.limits), None)
    of_heads = any(by_head(found) for found in values.values())
    uniform = {
        side: r.findings.uniform[measure.name] for side, r in sides.items() if measure.name in r.findings.uniform
    }
    pictures, ramp = {}, ""
    if of_heads:
        scale = Scale.of(number for found in values.values() for number in flat(found))
        ramp = svg.legend(scale, measure.unit, limit)
        pictures = {
            side: svg.heat(rows_of(found), scale, f"{measure.title} by layer and head {side}".strip(), measure.unit)
            + ramp
            for side, found in values.items()
        }
    if not of_heads or (numbers and (uniform or limit is not None)):
        pictures["by layer"] = _by_layer(measure, values, uniform, limit, of_heads)
    wide = of_heads and len(values) > 1
    parts = [_beside(pictures) if wide else "".join(pictures.values()), _READOUT]
    if numbers:
        parts.append(_numbers({side: _cells(found) for side, found in values.items()}))
    badges = "".join(_badge(side, line) for side, r in sides.items() for line in r.lines if line.measure is measure)
    return _card(measure.title, measure.about, parts, badges, wide)


def curve_card(name: str, sides: Sides) -> str:
    """Lines of a curve; two sides share the scale."""
    curves = {side: report.findings.curves[name] for side, report in sides.items() if name in report.findings.curves}
    first: Curve = next(iter(curves.values()))
    scale = Scale.of((n for curve in curves.values() for ys in curve.series.values() for n in ys), first.log_y)
    pictures = {
        side: svg.lines(
            curve.x, curve.series, f"{curve.title} {side}".strip(), x_label=curve.x_label, y_label=curve.y_label,
            y_scale=scale, log_x=curve.log_x, log_y=curve.log_y,
        ) + svg.keys(list(curve.series))
        for side, curve in curves.items()
    }  # fmt: skip
    tables = {side: _points(curve.x_label, curve.x, curve.series) for side, curve in curves.items()}
    return _card(first.title, "", [_beside(pictures), _READOUT, _numbers(tables)], wide=len(curves) > 1)


def heatmap_card(name: str, sides: Sides) -> str:
    """Small pictures on one scale, also over two sides. Panels of layers and heads stand in rows of a layer each."""
    maps = {side: r.findings.heatmaps[name] for side, r in sides.items() if name in r.findings.heatmaps}
    first: Heatmap = next(iter(maps.values()))
    scale = Scale.of((n for found in maps.values() for rows in found.panels.values() for n in flat(rows)), first.log)
    grids = {side: _panels(found, scale) for side, found in maps.items()}
    about = f"Down: {first.y_label}. Across: {first.x_label}. Choose a picture to enlarge it."
    return _card(first.title, about, [_beside(grids), svg.legend(scale, first.unit)], wide=True)


def table_card(name: str, sides: Sides) -> str:
    """A table, and the map of layers and heads where it gives each a role."""
    tables = {side: report.findings.tables[name] for side, report in sides.items() if name in report.findings.tables}
    first: Table = next(iter(tables.values()))
    maps = {side: _role_map(table) for side, table in tables.items()}
    bodies = {side: scrolled(table.columns, table.rows, table.title) for side, table in tables.items()}
    if maps.get(""):
        parts = [_beside({"by layer and head": maps[""], "numbers": bodies[""]})]
    else:
        parts = [_beside(maps) if any(maps.values()) else "", _beside(bodies)]
    return _card(first.title, "", [*parts, _READOUT], wide=True)


def scrolled(columns: Sequence[str], rows: Sequence[Sequence[Any]], label: str) -> str:
    """A table that scrolls inside its box, also by keyboard."""
    head = "".join(f'<th scope="col">{escape(str(column))}</th>' for column in columns)
    body = "".join("<tr>" + "".join(_td(cell) for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{table}</div>'


def by_head(values: Values) -> bool:
    """Whether there is a number for every layer and head."""
    return isinstance(values, list) and any(isinstance(row, list) for row in values)


def mean_by_layer(values: Values, layers: int) -> list[float]:
    """One number a layer: the mean over its heads, NaN where there is none; one number for all is repeated."""
    if not isinstance(values, list):
        return [values] * layers
    return [_mean(row) for row in rows_of(values)]


def _by_layer(
    measure: Measure, values: dict[str, Values], uniform: dict[str, Values], limit: float | None, heads: bool
) -> str:
    longest = max(len(found) for found in values.values() if isinstance(found, list))
    lines = {
        side or ("mean of the heads" if heads else measure.title): mean_by_layer(f, 0) for side, f in values.items()
    }
    alike = len({str(found) for found in uniform.values()}) == 1
    for side, found in list(uniform.items())[: 1 if alike else None]:
        lines["uniform" if alike else f"uniform {side}"] = mean_by_layer(found, longest)
    lines = {name: ys + [math.nan] * (longest - len(ys)) for name, ys in lines.items()}
    band = None
    if heads and len(values) == 1:
        kept = [[n for n in row if math.isfinite(n)] or [math.nan] for row in rows_of(next(iter(values.values())))]
        band = [min(row) for row in kept], [max(row) for row in kept]
    numbers = [n for ys in (*lines.values(), [limit or math.nan]) for n in ys if math.isfinite(n)]
    picture = svg.lines(
        list(range(longest)), lines, f"{measure.title} by layer", x_label="layer", y_label=measure.unit,
        band=band, limit=limit, log_y=limit != 0 and _wide(numbers), whole=True,
    )  # fmt: skip
    shade = '<p class="shade">Shaded: from the least head to the largest.</p>' if band else ""
    return picture + svg.keys(list(lines)) + shade


def _wide(numbers: list[float]) -> bool:
    """Whether numbers ask for a logarithmic axis."""
    return bool(numbers) and 0 < 200 * min(numbers) < max(numbers)


def _panels(found: Heatmap, scale: Scale) -> str:
    places = [_PLACE.fullmatch(label) for label in found.panels]
    heads = max((int(place[2]) + 1 for place in places if place), default=0) if all(places) else 0
    style = f' style="--columns:{heads}"' if 1 < heads <= 16 and len(places) > 4 else ""
    kind = "panels aligned" if style else "panels few" if len(places) <= 4 else "panels"
    items = "".join(_panel(label, rows, scale, found.unit) for label, rows in found.panels.items())
    title = escape(found.title)
    grid = f'<div class="{kind}"{style}>{items}</div>'
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">{grid}</div>'


def _panel(label: str, rows: list[list[float]], scale: Scale, unit: str) -> str:
    numbers = [number for number in flat(rows) if math.isfinite(number)]
    extent = f"{shown(min(numbers))} to {shown(max(numbers))} {unit}".rstrip() if numbers else "no numbers"
    name, source = escape(label), png(rows, scale)
    image = f'<img src="{source}" alt="" loading="eager">' if source else '<span class="none"></span>'
    short = _PLACE.fullmatch(label)
    caption = f"{short[1]}.{short[2]}" if short else name
    return f'<button type="button" title="{name}: {escape(extent)}">{image}<span>{caption}</span></button>'


def _role_map(table: Table) -> str:
    columns = [str(column).lower() for column in table.columns]
    if not {"layer", "head", "role"} <= set(columns):
        return ""
    layer, head, role = (columns.index(name) for name in ("layer", "head", "role"))
    roles: dict[tuple[int, int], str] = {}
    for row in table.rows:
        if not all(isinstance(row[place], int) for place in (layer, head)):
            return ""
        before = roles.get((row[layer], row[head]))
        roles[row[layer], row[head]] = f"{before} + {row[role]}" if before else str(row[role])
    return svg.roles(roles)


def _cells(values: Values) -> tuple[list[str], list[list[Any]]]:
    rows = rows_of(values)
    heads = max(len(row) for row in rows)
    names = [f"head {head}" for head in range(heads)] if by_head(values) else ["value"]
    return ["layer", *names], [[layer, *row, *[""] * (heads - len(row))] for layer, row in enumerate(rows)]


def _points(x_label: str, x: list[float], series: dict[str, list[float]]) -> tuple[list[str], list[list[Any]]]:
    return [x_label, *series], [
        [at, *(ys[i] if i < len(ys) else "" for ys in series.values())] for i, at in enumerate(x)
    ]


def _numbers(tables: dict[str, tuple[list[str], list[list[Any]]]]) -> str:
    bodies = (
        (f"<h4>{escape(side)}</h4>" if side else "") + scrolled(columns, rows, f"numbers {side}".strip())
        for side, (columns, rows) in tables.items()
    )
    return f'<details class="numbers"><summary>Numbers</summary>{"".join(bodies)}</details>'


def _td(cell: Any) -> str:
    if isinstance(cell, float):
        return f'<td class="n">{shown(cell)}</td>'
    return f'<td class="n">{cell}</td>' if isinstance(cell, int) else f"<td>{escape(str(cell))}</td>"


def _beside(pictures: dict[str, str]) -> str:
    """Two sides, each under its name."""
    if len(pictures) == 1 and "" in pictures:
        return pictures[""]
    sides = "".join(f"<div><h4>{escape(side)}</h4>{picture}</div>" for side, picture in pictures.items())
    return f'<div class="sides">{sides}</div>'


def _card(title: str, about: str, parts: Sequence[str], badges: str = "", wide: bool = False) -> str:
    about = f"<p>{escape(about)}</p>" if about else ""
    kind = "card wide" if wide else "card"
    caption = f"<figcaption><h3>{escape(title)}</h3>{badges}{about}</figcaption>"
    return f'<figure class="{kind}">{caption}{"".join(parts)}</figure>'


def _badge(side: str, line: Line) -> str:
    kind = {True: "pass", False: "fail", None: ""}[line.passed]
    name = f"{escape(side)} " if side else ""
    return f'<span class="badge {kind}">{name}{shown(line.value)}</span>'


def _countable(values: Values) -> Iterator[bool]:
    return (True for row in rows_of(values) for _ in row)


def _mean(numbers: Sequence[float]) -> float:
    kept = [number for number in numbers if not math.isnan(number)]
    return sum(kept) / len(kept) if kept else math.nan


_READOUT = '<output class="readout" aria-live="polite"></output>'
