"""The report: what was measured, as plain numbers, with a verdict beside every limit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from hf_fullpay.diagnosis.measures import MEASURES, Measure

Values = float | list[Any]  # of the model, of layers [L], or of layers and heads [L][H]; NaN where there is none
COLUMNS = ("check", "measure", "value", "uniform", "limit", "verdict", "worst")


@dataclass(frozen=True)
class Curve:
    """Lines over one axis.

    Args:
        title, x_label, y_label: for pictures.
        x: positions on the axis.
        series: y by label, as long as x.
        log_x, log_y: whether the axis is logarithmic.
    """

    title: str
    x_label: str
    y_label: str
    x: list[float]
    series: dict[str, list[float]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Heatmap:
    """Small pictures on one scale.

    Args:
        title, x_label, y_label: for pictures.
        panels: rows of numbers by label ("layer 0, head 3").
        unit: what a number is.
        log: whether the scale is logarithmic.
    """

    title: str
    x_label: str
    y_label: str
    panels: dict[str, list[list[float]]]
    unit: str = ""
    log: bool = False


@dataclass(frozen=True)
class Table:
    """A table of words and numbers, such as head roles."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


@dataclass
class Findings:
    """What one check found; a report is made of all checks' findings.

    Args:
        values: by the names of `MEASURES`.
        uniform: the same number for uniform attention, where that means something.
        curves, heatmaps, tables: by name.
        notes: sentences about what could not be measured, and why.
    """

    values: dict[str, Values] = field(default_factory=dict)
    uniform: dict[str, Values] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    heatmaps: dict[str, Heatmap] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Take over what another check found."""
        for name in ("values", "uniform", "curves", "heatmaps", "tables"):
            getattr(self, name).update(getattr(other, name))
        self.notes += other.notes


@dataclass(frozen=True)
class Line:
    """One line of the report's table.

    Attributes:
        measure: what.
        value: layers and heads in one number.
        uniform: the same for uniform attention, or None.
        limit: the line to keep, or None.
        passed: whether it is kept; None without a limit, and where uniform attention itself does not keep it.
        worst: the layer and head farthest to the wrong side, in words; "" where there is one number only.
    """

    measure: Measure
    value: float
    uniform: float | None
    limit: float | None
    passed: bool | None
    worst: str

    def words(self) -> list[str]:
        """By `COLUMNS`."""
        sign = {"low": "<=", "high": ">="}.get(self.measure.better or "", "")
        return [
            self.measure.check, self.measure.label, shown(self.value),
            "" if self.uniform is None else shown(self.uniform),
            "" if self.limit is None else f"{sign} {shown(self.limit)}".strip(),
            verdict(self), self.worst,
        ]  # fmt: skip


@dataclass
class Report:
    """What `diagnose` found out about a model.

    Args:
        model: class name, and the path or Hub id where known.
        attention: name of the attention that it ran.
        plan: what that is, in words.
        layers: label of every attention layer, in the order of calls.
        data: what it was measured on and how: documents, tokens, longest, dtype, device, seconds, version.
        findings: the numbers.
        limits: the line of every measure that has one.
    """

    model: str
    attention: str
    plan: str
    layers: list[str]
    data: dict[str, Any]
    findings: Findings
    limits: dict[str, float]

    @property
    def values(self) -> dict[str, Values]:
        """By measure: a number, a list by layer, or a list by layer of lists by head."""
        return self.findings.values

    @property
    def lines(self) -> list[Line]:
        """One line per measure, in the order of `MEASURES`."""
        return [self._line(measure) for name, measure in MEASURES.items() if name in self.values]

    @property
    def passed(self) -> bool:
        """Whether every limit is kept."""
        return all(line.passed is not False for line in self.lines)

    def _line(self, measure: Measure) -> Line:
        values = self.values[measure.name]
        value = headline(values, measure.headline)
        limit = self.limits.get(measure.name)
        known = self.findings.uniform.get(measure.name)
        uniform = None if known is None else headline(known, measure.headline)
        # Where not even uniform attention keeps a limit (a floor of 0.01 over 500 keys), no attention can.
        judged = limit is not None and (uniform is None or measure.keeps(uniform, limit))
        passed = measure.keeps(value, limit) if judged and limit is not None else None
        return Line(measure, value, uniform, limit, passed, _worst(values, measure))

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the lines spelt out; `from_dict` is its inverse. NaN becomes None, infinity a word: a verdict
        that an infinite number broke stays broken."""
        lines = [asdict(line) | {"measure": line.measure.name} for line in self.lines]
        return for_json({**asdict(self), "passed": self.passed, "lines": lines})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """A report out of its JSON form.

        Raises:
            ValueError: for anything else.
        """
        try:
            parts = dict(data["findings"])
            for name, kind in (("curves", Curve), ("heatmaps", Heatmap), ("tables", Table)):
                parts[name] = {key: kind(**_numbers(value)) for key, value in parts[name].items()}
            parts["values"], parts["uniform"] = _numbers(parts["values"]), _numbers(parts["uniform"])
            names = ("model", "attention", "plan", "layers", "data", "limits")
            return cls(findings=Findings(**parts), **{name: data[name] for name in names})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"report: expected the JSON of a report, got something else: {error!r}.") from error

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report from report.json, or from the folder that holds it."""
        path = Path(path)
        return cls.from_dict(json.loads((path / "report.json" if path.is_dir() else path).read_text(encoding="utf-8")))

    def to_pandas(self) -> Any:
        """A DataFrame with a row for every layer and head, and a column for every measure that has one number for each.
        A measure by layer is repeated for its heads."""
        import pandas

        rows = []
        heads = max((len(row) for values in self.values.values() for row in rows_of(values)), default=1)
        for layer in range(len(self.layers)):
            for head in range(heads):
                cells = {name: _cell(values, layer, head) for name, values in self.values.items()}
                rows.append({"layer": layer, "head": head} | {k: v for k, v in cells.items() if v is not None})
        return pandas.DataFrame(rows)

    def to_markdown(self) -> str:
        """The lines and the tables as Markdown."""
        from hf_fullpay.diagnosis import markdown

        tables = [markdown.table(COLUMNS, self.cells())]
        for table in self.findings.tables.values():
            tables.append(markdown.table(table.columns, [[str(cell) for cell in row] for row in table.rows]))
        return markdown.document(self.title, tables, self.findings.notes)

    def save(self, folder: str | Path) -> Path:
        """Write index.html (one page with every picture, which opens from disk), report.json and report.md.

        Returns:
            The page.

        Raises:
            ValueError: if the folder is a file or cannot be written.
        """
        from hf_fullpay.diagnosis import page

        made = page.document({"": self}, COLUMNS, list(self.cells()), self.findings.notes)
        return page.save(folder, made, self.to_json(), self.to_markdown())

    def plot(self, name: str, path: str | Path | None = None) -> Any:
        """One picture, as a matplotlib Figure: see `hf_fullpay.diagnosis.plots.plot`."""
        from hf_fullpay.diagnosis.plots import plot

        return plot(self, name, path)

    @property
    def title(self) -> str:
        """Model, attention and data in one line."""
        of = self.data
        return f"{self.model}, {self.attention} ({self.plan}): {of.get('documents')} inputs, {of.get('tokens')} tokens"

    def cells(self) -> Iterator[list[str]]:
        """The lines as words, by `COLUMNS`."""
        return (line.words() for line in self.lines)

    def _repr_html_(self) -> str:
        from hf_fullpay.diagnosis import page

        return page.fragment({"": self}, COLUMNS, list(self.cells()), self.findings.notes)

    def __rich__(self) -> Any:
        return rich_table(self.title, COLUMNS, self.cells(), self.findings.notes)

    def __str__(self) -> str:
        return printed(self)


def rich_table(title: str, columns: Sequence[str], cells: Iterable[Sequence[str]], notes: Sequence[str]) -> Any:
    """A table for terminals; verdicts in green and red."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(
        title=Text(title), caption=Text("\n".join(notes)), title_justify="left", caption_justify="left",
        box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for name in columns:
        numeric = name in ("value", "uniform", "limit", "before", "after", "change")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=name == "measure")
    for row in cells:
        table.add_row(*(Text(cell, style={"pass": "green", "FAIL": "bold red"}.get(cell, "")) for cell in row))
    return table


def printed(table: Any) -> str:
    """What rich prints, without colours."""
    from rich.console import Console

    text = StringIO()
    Console(file=text, width=132, color_system=None, legacy_windows=False).print(table)
    return text.getvalue().rstrip()


def headline(values: Values, how: str) -> float:
    """One number of many: their mean, least or largest. NaN (a head that does not exist) is left out of it."""
    numbers = [number for number in flat(values) if not math.isnan(number)]
    if not numbers:
        return math.nan
    return {"mean": sum(numbers) / len(numbers), "min": min(numbers), "max": max(numbers)}[how]


def verdict(line: Line) -> str:
    """A word for the outcome of a line."""
    if line.passed is None:
        return "" if line.limit is None else "out of reach"
    return "pass" if line.passed else "FAIL"


def shown(number: float) -> str:
    """Three digits that a reader takes in at once."""
    if math.isnan(number) or math.isinf(number) or (number == int(number) and abs(number) < 1e4):
        return f"{number:g}"
    if 1e3 <= abs(number) < 1e4:
        return f"{number:.0f}"
    return f"{number:.3g}" if 1e-3 <= abs(number) < 1e3 else f"{number:.1e}"


def _worst(values: Values, measure: Measure) -> str:
    """Where the number farthest to the wrong side is; nothing is wrong with a measure that has no better side."""
    if not isinstance(values, list) or measure.better is None:
        return ""
    sign = -1 if measure.better == "high" else 1
    found = [
        (sign * number, layer, head)
        for layer, row in enumerate(rows_of(values))
        for head, number in enumerate(row)
        if not math.isnan(number)
    ]
    if not found:
        return ""
    number, layer, head = max(found, key=lambda entry: entry[0])
    where = f"layer {layer}, head {head}" if isinstance(values[layer], list) else f"layer {layer}"
    return f"{shown(sign * number)} in {where}"


def rows_of(values: Values) -> list[list[float]]:
    """Numbers by layer and head; one a layer counts as one head, and one number for all as no layer."""
    if not isinstance(values, list):
        return []
    return [row if isinstance(row, list) else [row] for row in values]


def _cell(values: Values, layer: int, head: int) -> float | None:
    if not isinstance(values, list) or layer >= len(values):
        return None
    row = values[layer]
    return row if not isinstance(row, list) else row[head] if head < len(row) else math.nan


def flat(values: Any) -> Iterator[float]:
    """All numbers of nested lists."""
    if isinstance(values, Sequence):
        for value in values:
            yield from flat(value)
    else:
        yield float(values)


def for_json(value: Any) -> Any:
    """For JSON, which knows neither NaN nor infinity: None, and the words "Infinity" and "-Infinity"."""
    if isinstance(value, Mapping):
        return {str(key): for_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(entry) for entry in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _numbers(value: Any) -> Any:
    """The other way."""
    if isinstance(value, Mapping):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return {None: math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value, value)
