"""Two reports beside one another: of a model before and after a conversion or a training, or of two models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fullpay.core.errors import wrong
from hf_fullpay.diagnosis import markdown, page
from hf_fullpay.diagnosis.measures import Measure
from hf_fullpay.diagnosis.report import Line, Report, for_json, printed, rich_table, rows_of, shown

COLUMNS = ("check", "measure", "before", "after", "change", "limit", "verdict before", "verdict after")


@dataclass(frozen=True)
class Change:
    """One line of a comparison.

    Attributes:
        before, after: the lines of the two reports.
    """

    before: Line
    after: Line

    @property
    def measure(self) -> Measure:
        """What is compared."""
        return self.before.measure

    @property
    def change(self) -> float:
        """After minus before; NaN where one of them is."""
        return self.after.value - self.before.value

    @property
    def improved(self) -> bool | None:
        """Whether the number moved to its better side; None where it has none, or did not move."""
        if self.measure.better is None or not abs(self.change) > 0:
            return None
        return (self.change < 0) == (self.measure.better == "low")

    @property
    def in_words(self) -> str:
        """The change, and what share of before it is: "+1.2 (+50 %), better"."""
        if not math.isfinite(self.change) or not self.change:
            return shown(self.change)
        part = self.change / abs(self.before.value) if self.before.value else math.inf
        share = f" ({part:+.0%})".replace("%", " %") if abs(part) < 100 else ""  # of next to nothing it says nothing
        way = {True: ", better", False: ", worse", None: ""}[self.improved]
        return f"{'+' if self.change > 0 else ''}{shown(self.change)}{share}{way}"


@dataclass
class Comparison:
    """Two reports; what only one of them has is said in `notes`."""

    before: Report
    after: Report

    @property
    def lines(self) -> list[Change]:
        """One line for every measure that both reports have."""
        after = {line.measure.name: line for line in self.after.lines}
        return [Change(line, after[line.measure.name]) for line in self.before.lines if line.measure.name in after]

    @property
    def notes(self) -> list[str]:
        """What is not compared, and the notes of both reports."""
        notes = []
        for side, ours, theirs in (("before", self.before, self.after), ("after", self.after, self.before)):
            alone = [line.measure.title for line in ours.lines if line.measure.name not in theirs.values]
            if alone:
                notes.append(f"Measured only {side}: {', '.join(alone)}.")
        shapes = [_shape(report) for report in (self.before, self.after)]
        if shapes[0] != shapes[1]:
            notes.append(
                f"The models differ: {shapes[0]} before, {shapes[1]} after. Every number is over all that its model has."
            )
        for side, report in self.sides.items():
            notes += [f"{side}: {note}" for note in report.findings.notes]
        return notes

    @property
    def sides(self) -> dict[str, Report]:
        """The two reports by name."""
        return {"before": self.before, "after": self.after}

    @property
    def title(self) -> str:
        """Both titles in one line."""
        return f"before: {self.before.title}; after: {self.after.title}"

    def cells(self) -> Iterator[list[str]]:
        """The lines as words: check, measure, before, after, change, limit, verdict before, verdict after."""
        for line in self.lines:
            before, after = line.before.words(), line.after.words()
            limit = before[4] if before[4] == after[4] else f"{before[4] or 'none'}, {after[4] or 'none'}"
            yield [before[0], before[1], before[2], after[2], line.in_words, limit, before[5], after[5]]

    def rows(self) -> list[dict[str, Any]]:
        """The lines as plain numbers: measure, before, after, change, improved, before_passed, after_passed."""
        return [
            {
                "measure": line.measure.name, "before": line.before.value, "after": line.after.value,
                "change": line.change, "improved": line.improved,
                "before_passed": line.before.passed, "after_passed": line.after.passed,
            }
            for line in self.lines
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """JSON form: both reports, and the lines spelt out."""
        sides = {side: report.to_dict() for side, report in self.sides.items()}
        return for_json({**sides, "lines": self.rows(), "notes": self.notes})

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def to_pandas(self) -> Any:
        """A DataFrame with a row for every measure that both reports have."""
        import pandas

        return pandas.DataFrame(self.rows())

    def to_markdown(self) -> str:
        """The lines as a Markdown table."""
        return markdown.document(self.title, [markdown.table(COLUMNS, self.cells())], self.notes)

    def save(self, folder: str | Path) -> Path:
        """Write index.html (a page with both reports side by side), report.json and report.md.

        Returns:
            The page.

        Raises:
            ValueError: if the folder is a file or cannot be written.
        """
        made = page.document(self.sides, COLUMNS, list(self.cells()), self.notes)
        return page.save(folder, made, self.to_json(), self.to_markdown())

    def _repr_html_(self) -> str:
        return page.fragment(self.sides, COLUMNS, list(self.cells()), self.notes)

    def __rich__(self) -> Any:
        # A terminal is narrow: the check and the limit are left to the page.
        kept = [place for place, name in enumerate(COLUMNS) if name not in ("check", "limit")]
        cells = ([row[place] for place in kept] for row in self.cells())
        return rich_table(self.title, [COLUMNS[place] for place in kept], cells, self.notes)

    def __str__(self) -> str:
        return printed(self)


def compare(before: Report, after: Report) -> Comparison:
    """Compare two reports. They may be of models with different layers, heads and measures: what both have is compared.

    Raises:
        ValueError: for anything but two reports.
    """
    for side, report in (("before", before), ("after", after)):
        if not isinstance(report, Report):
            raise wrong(side, "a Report (see hf_fullpay.diagnose and Report.load)", report)
    return Comparison(before, after)


def _shape(report: Report) -> str:
    heads = sorted({len(row) for values in report.values.values() for row in rows_of(values)} - {0, 1}) or [1]
    return f"{len(report.layers)} layers of {' or '.join(map(str, heads))} heads"
