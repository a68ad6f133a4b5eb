"""Pictures as SVG text: a heat map with a cell a number, and lines over an axis. They need no script: every mark carries
its number as a title. Colours of text and lines come from the page's style sheet (page.css).

Lengths are in pixels of a picture as wide as a telephone shows it; wider ones are scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from hf_fullpay.diagnosis.ramp import Scale, colour
from hf_fullpay.diagnosis.report import shown

_Place = Callable[[float], float]
WIDTH = 300
_LEFT, _BOTTOM, _TOP, _RIGHT = 34, 30, 6, 6


def heat(rows: Sequence[Sequence[float]], scale: Scale, label: str, unit: str = "") -> str:
    """A cell for every layer and head; what is not a number is hatched.

    Args:
        rows: numbers by layer and head; layers may have different numbers of heads.
        scale: of the colours.
        label: what a screen reader says.
        unit: of the numbers.
    """
    columns = max((len(row) for row in rows), default=0)
    across = min(44.0, (WIDTH - _LEFT - _RIGHT) / max(columns, 1))
    down = min(22.0, max(7.0, across))
    gap = 1 if across > 6 else 0
    parts = []
    for layer, row in enumerate(rows):
        for head, number in enumerate(row):
            fill = f' fill="{colour(scale.share(number))}"' if math.isfinite(number) else ' class="none"'
            parts.append(
                f'<rect x="{_LEFT + head * across:.5g}" y="{_TOP + layer * down:.5g}" width="{across - gap:.4g}" '
                f'height="{down - gap:.4g}"{fill}><title>{_where(layer, head)}: {_number(number, unit)}</title></rect>'
            )
    parts += _axes(len(rows), columns, across, down)
    return _svg(_TOP + len(rows) * down + _BOTTOM, label, parts, columns)


def roles(found: dict[tuple[int, int], str]) -> str:
    """The role of every layer and head: a colour and its initials, and what they mean below."""
    names = sorted(set(found.values()), key=lambda name: (name == "none", name))
    columns = max((head for _, head in found), default=-1) + 1
    layers = max((layer for layer, _ in found), default=-1) + 1
    across = min(44.0, (WIDTH - _LEFT - _RIGHT) / max(columns, 1))
    down = min(22.0, across)
    parts = []
    for (layer, head), name in sorted(found.items()):
        x, y = _LEFT + head * across, _TOP + layer * down
        parts.append(
            f'<g style="{tint(names.index(name), len(names), name)}"><rect class="role" x="{x:.5g}" y="{y:.5g}" '
            f'width="{across - 1:.4g}" height="{down - 1:.4g}"><title>{_where(layer, head)}: {escape(name)}</title></rect>'
            + (_text(x + across / 2, y + down / 2 + 3.5, _initials(name), "middle") if across >= 16 else "")
            + "</g>"
        )
    parts += _axes(layers, columns, across, down)
    return _svg(_TOP + layers * down + _BOTTOM, "role of every head", parts, columns) + keys(names, _initials)


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    label: str,
    *,
    x_label: str = "",
    y_label: str = "",
    y_scale: Scale | None = None,
    log_x: bool = False,
    log_y: bool = False,
    band: tuple[Sequence[float], Sequence[float]] | None = None,
    limit: float | None = None,
    whole: bool = False,
) -> str:
    """A line for every series; a point that is not a number interrupts it.

    Args:
        x: positions on the axis.
        series: y by label, as long as x; see `stroke` for labels with a meaning.
        label: what a screen reader says.
        x_label, y_label: of the axes.
        y_scale: of the axis, for pictures side by side; by default what holds all numbers.
        log_x, log_y: whether the axis is logarithmic.
        band: least and largest y, shaded.
        limit: a line across.
        whole: whether x are numbers of layers, which have no half between them.
    """
    extra = [*(band or ((), ())), [limit] if limit is not None else []]
    across = Scale.of(x, log_x)
    up = y_scale or Scale.of([number for ys in (*series.values(), *extra) for number in ys], log_y)
    height, left = 150, 44
    width = WIDTH - left - 10

    def at_x(number: float) -> float:
        return left + width * (0.02 + 0.96 * across.share(number))

    def at_y(number: float) -> float:
        return _TOP + height * (0.96 - 0.92 * up.share(number))

    parts = []
    for tick in ticks(up):
        parts.append(f'<path class="grid" d="M{left} {at_y(tick):.4g}H{left + width}"/>')
        parts.append(_text(left - 5, at_y(tick) + 3.5, _short(tick), "end"))
    for tick in ticks(across, whole):
        parts.append(_text(at_x(tick), _TOP + height + 13, _short(tick), "middle"))
    parts.append(_text(left + width / 2, _TOP + height + 27, x_label, "middle"))
    parts.append(_turned(_TOP + height / 2, y_label))
    if band:
        kept = [(at_x(a), at_y(b), at_y(c)) for a, b, c in zip(x, *band, strict=True) if math.isfinite(b + c)]
        edge = [f"{a:.4g} {b:.4g}" for a, b, _ in kept] + [f"{a:.4g} {c:.4g}" for a, _, c in reversed(kept)]
        parts.append(f'<path class="band" d="M{"L".join(edge)}Z"/>' if kept else "")
    if limit is not None:
        parts.append(
            f'<path class="limit" d="M{left} {at_y(limit):.4g}h{width}"><title>limit {shown(limit)}</title></path>'
        )
    for index, (name, ys) in enumerate(series.items()):
        parts.append(
            f'<g style="{tint(index, len(series))}"><path class="{stroke(name)}" d="{_path(x, ys, at_x, at_y)}"/>'
        )
        for a, b in zip(x, ys, strict=False):
            if math.isfinite(a) and math.isfinite(b):
                title = escape(f"{name}, {x_label} {shown(a)}: {b:.6g}")
                parts.append(f'<circle cx="{at_x(a):.4g}" cy="{at_y(b):.4g}" r="2.2"><title>{title}</title></circle>')
        parts.append("</g>")
    return _svg(_TOP + height + 32, label, parts, len(x))


def legend(scale: Scale, unit: str = "", limit: float | None = None) -> str:
    """The ramp with its two ends, and a tick where a limit lies."""
    stops = ",".join(colour(step / 10) for step in range(11))
    low = ("≤ " if scale.log else "") + shown(scale.low)
    inside = limit is not None and scale.low <= limit <= scale.high and scale.low < scale.high
    tick = ""
    if limit is not None and inside:
        tick = f'<i style="left:{100 * scale.share(limit):.4g}%" title="limit {shown(limit)}"></i>'
    name = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    bar = f'<span class="bar" style="background:linear-gradient(90deg,{stops})">{tick}</span>'
    return f'<div class="ramp"><span>{low}</span>{bar}<span>{shown(scale.high)}</span>{name}</div>'


def keys(names: Sequence[str], initials: Callable[[str], str] | None = None) -> str:
    """What the lines of a picture mean, or its cells where they have initials; "" for a single line."""
    if len(names) < 2 and not initials:
        return ""
    marks = []
    for index, name in enumerate(names):
        mark = (
            f'<svg class="key" viewBox="0 0 22 6" aria-hidden="true"><path class="{stroke(name)}" d="M0 3H22"/></svg>'
        )
        mark = f"<b>{escape(initials(name))}</b>" if initials else mark
        marks.append(f'<li style="{tint(index, len(names), name)}">{mark}{escape(name)}</li>')
    return f'<ul class="keys">{"".join(marks)}</ul>'


def tint(index: int, many: int, name: str = "") -> str:
    """Colours of a line on light and on dark ground: six to tell apart, or the ramp; no role is grey."""
    if name == "none":
        return "--tint:var(--muted)"
    if many <= 6:
        return f"--tint:var(--line-{index})"
    share = index / (many - 1)
    return f"--on-light:{colour(0.8 * share)};--on-dark:{colour(0.3 + 0.7 * share)};--tint:var(--of-ramp)"


def stroke(name: str) -> str:
    """Lines of a model before a change are dashed, and those of uniform attention grey."""
    return "line" + " uniform" * name.startswith("uniform") + " dashed" * name.endswith("before")


def ticks(scale: Scale, whole: bool = False) -> list[float]:
    """Some four to six round numbers on an axis; powers of ten on a logarithmic one that holds two of them."""
    low, high = scale.low, scale.high
    if not (math.isfinite(high - low) and high - low > 1e-300):
        return [low]
    if scale.log:
        decades = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        step = math.ceil(len(decades) / 6)
        return [10.0**power for power in decades[::step]] if len(decades) > 1 else [low, high]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step_size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.8)
    step_size = max(1.0, round(step_size)) if whole else step_size
    first = math.ceil(low / step_size - 1e-9)
    return [place * step_size for place in range(first, math.floor(high / step_size + 1e-9) + 1)]


def _path(x: Sequence[float], ys: Sequence[float], at_x: _Place, at_y: _Place) -> str:
    drawn, pen = [], "M"
    for a, b in zip(x, ys, strict=False):
        if math.isfinite(a) and math.isfinite(b):
            drawn.append(f"{pen}{at_x(a):.4g} {at_y(b):.4g}")
            pen = "L"
        else:
            pen = "M"
    return "".join(drawn)


def _axes(layers: int, columns: int, across: float, down: float) -> list[str]:
    bottom = _TOP + layers * down
    parts = [
        _text(_LEFT - 5, _TOP + (layer + 0.5) * down + 3.5, str(layer), "end") for layer in _every(layers, down, 13)
    ]
    parts += [
        _text(_LEFT + (head + 0.5) * across, bottom + 12, str(head), "middle") for head in _every(columns, across, 20)
    ]
    return [
        *parts,
        _text(_LEFT + columns * across / 2, bottom + 25, "head", "middle"),
        _turned(_TOP + layers * down / 2, "layer"),
    ]


def _svg(height: float, label: str, parts: Sequence[str], columns: int) -> str:
    head = f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.4g}" role="img" tabindex="0" data-columns="{columns}"'
    return f'{head} aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}">{escape(text)}</text>'


def _turned(y: float, text: str) -> str:
    return f'<text transform="translate(9 {y:.4g}) rotate(-90)" text-anchor="middle">{escape(text)}</text>'


def _where(layer: int, head: int) -> str:
    return f"layer {layer}, head {head}"


def _initials(name: str) -> str:
    return "".join(part[0] for part in name.replace("+", " ").split())[:2].upper()


def _number(number: float, unit: str) -> str:
    return escape(f"{number:.6g} {unit}".rstrip())


def _short(number: float) -> str:
    if 1e3 <= abs(number) < 1e5:
        return f"{number:g}"
    return f"{number:.3g}".replace("e-0", "e-").replace("e+0", "e")


def _every(many: int, size: float, room: float) -> range:
    """Which labels have room: all of them, or every second, fifth, ..."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if step * size >= room or step == 1000)
    return range(0, many, step)
