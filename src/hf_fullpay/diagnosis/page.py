"""A report as one page that opens from disk: no network, no fonts, and everything but the enlarging of pictures works
without scripts. The look is in page.css, the script in page.js; both are put into the page.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from hf_fullpay.core.errors import wrong
from hf_fullpay.diagnosis import figures
from hf_fullpay.diagnosis.figures import Sides
from hf_fullpay.diagnosis.measures import CHECKS, MEASURES
from hf_fullpay.diagnosis.report import Report

_NUMBERS = {"value", "uniform", "limit", "before", "after", "change"}
_SECTIONS = {
    "Weights": ("weights", "promise", "entropy"),
    "Reach": ("reach", "range", "positions", "leak"),
    "Scores": ("scores",),
    "Sinks and spikes": ("sinks", "spikes", "finite"),
    "Heads": ("heads",),
}


def document(sides: Sides, columns: Sequence[str], cells: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """The whole page of one report, or of two side by side.

    Args:
        sides: the report under "", or two reports by name.
        columns, cells: of the table of verdicts.
        notes: what could not be measured or compared.
    """
    sections = {"verdicts": ("Verdicts", verdicts(columns, cells))}
    named = [check for checks in _SECTIONS.values() for check in checks]
    for title, checks in (_SECTIONS | {"Other": tuple(check for check in CHECKS if check not in named)}).items():
        of_section = (measure for measure in MEASURES.values() if measure.check in checks)
        cards = "".join(figures.measure_card(measure, sides) for measure in of_section)
        if cards:
            sections[title.split()[0].lower()] = (title, f'<div class="cards">{cards}</div>')
    for kind, title, card in (
        ("curves", "Curves", figures.curve_card),
        ("tables", "Tables", figures.table_card),
        ("heatmaps", "Pictures", figures.heatmap_card),
    ):
        names = dict.fromkeys(name for report in sides.values() for name in getattr(report.findings, kind))
        if names:
            found = "".join(card(name, sides) for name in names)
            sections[kind] = (title, f'<div class="cards">{found}</div>')
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        sections["notes"] = ("Notes", f'<ul class="notes">{items}</ul>')
    models = " against ".join(dict.fromkeys(report.model for report in sides.values()))
    return Template(_part("page.html")).substitute(
        title=escape(models),
        style=_part("page.css"),
        script=_part("page.js"),
        heads="".join(_head(side, report) for side, report in sides.items()),
        links="".join(f'<a href="#{key}">{escape(title)}</a>' for key, (title, _) in sections.items()),
        body="".join(
            f'<section id="{key}" aria-labelledby="h-{key}"><h2 id="h-{key}">{escape(title)}</h2>{body}</section>'
            for key, (title, body) in sections.items()
        ),
    )


def fragment(sides: Sides, columns: Sequence[str], cells: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """For notebooks: verdicts and heat maps, with a style that touches nothing around it."""
    cards = "".join(figures.measure_card(measure, sides, numbers=False) for measure in MEASURES.values())
    folded = f'<details><summary>Layers and heads</summary><div class="cards">{cards}</div></details>' if cards else ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<div class="fullpay notebook"><style>{_part("page.css")}</style>'
        + "".join(f"<p><b>{escape(f'{side}: ' if side else '')}{escape(r.title)}</b></p>" for side, r in sides.items())
        + verdicts(columns, cells) + folded + (f'<ul class="notes">{items}</ul>' if items else "") + "</div>"
    )  # fmt: skip


def verdicts(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """The table of all measures, with what each of them says."""
    if not cells:
        return "<p>Nothing was measured.</p>"
    about = {measure.label: measure.about for measure in MEASURES.values()}
    head = "".join(f'<th scope="col" class="{_kind(column)}">{escape(column)}</th>' for column in columns)
    rows, before = [], ""
    for row in cells:
        parts = [f"<td>{'' if row[0] == before else escape(row[0])}</td>"]
        parts.append(f'<th scope="row">{escape(row[1])}<small>{escape(about.get(row[1], ""))}</small></th>')
        parts += [_cell(column, cell) for column, cell in zip(columns[2:], row[2:], strict=True)]
        kind = "" if row[0] == before else "first"
        rows.append(f'<tr class="{kind}">{"".join(parts)}</tr>')
        before = row[0]
    table = f'<table class="verdicts"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="scroll" tabindex="0" role="region" aria-label="verdicts">{table}</div>'


def save(folder: str | Path, html: str, json: str, markdown: str) -> Path:
    """Write the three files and return the page's path.

    Raises:
        ValueError: if the folder is a file or cannot be written.
    """
    folder = writable(folder)
    try:
        for name, text in (("index.html", html), ("report.json", json), ("report.md", markdown)):
            # Half a character, as a cut text may end with, becomes a reference instead of an error.
            (folder / name).write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise wrong("save", "a folder that can be written", str(folder), f"{error.strerror}.") from error
    return folder / "index.html"


def writable(folder: str | Path) -> Path:
    """A folder that files can be written to; made if it is not there.

    Raises:
        ValueError: if it is a file or cannot be written.
    """
    folder = Path(folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise wrong("save", "a folder, or one to be made", str(folder), "There is a file of that name.")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise wrong("save", "a folder that can be written", str(folder), f"{error.strerror}.") from error


def _head(side: str, report: Report) -> str:
    failed = sum(line.passed is False for line in report.lines)
    kept = sum(line.passed is True for line in report.lines)
    facts = "".join(f"<div><dt>{escape(str(k))}</dt><dd>{escape(_fact(v))}</dd></div>" for k, v in report.data.items())
    over = f'<p class="side">{escape(side)}</p>' if side else ""
    verdict = f'<span class="badge fail">{failed} failed</span>' if failed else ""
    return (
        f'<div class="head">{over}<h1>{escape(report.model)}</h1>'
        f"<p>{escape(report.attention)} <span>{escape(report.plan)}</span></p>"
        f'<p>{verdict}<span class="badge pass">{kept} passed</span></p><dl>{facts}</dl></div>'
    )


def _fact(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _cell(column: str, cell: str) -> str:
    if column.startswith("verdict"):
        kind, mark = {"pass": ("pass", "✓ "), "FAIL": ("fail", "✕ ")}.get(cell, ("", ""))
        badge = f'<span class="badge {kind}">{mark}{cell}</span>' if cell else ""
        return f'<td data-name="{column}">{badge}</td>'
    if column == "change":
        kind = "good" if cell.endswith("better") else "bad" if cell.endswith("worse") else ""
        return f'<td class="n {kind}" data-name="{column}">{escape(cell)}</td>'
    return f'<td class="{_kind(column)}" data-name="{column}">{escape(cell)}</td>'


def _kind(column: str) -> str:
    return "n" if column in _NUMBERS else ""


def _part(name: str) -> str:
    return resources.files("hf_fullpay.diagnosis").joinpath(name).read_text(encoding="utf-8")
