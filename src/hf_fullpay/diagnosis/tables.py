"""A result's table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

from hf_fullpay.diagnosis.report import Table, shown


def rich_table(table: Table, notes: Sequence[str] = ()) -> Any:
    """For rich's print: numbers to the right with three digits, notes under the table."""
    from rich.table import Table as RichTable
    from rich.text import Text

    found = RichTable(
        title=Text(table.title), caption=Text("\n".join(notes)), title_justify="left", caption_justify="left"
    )
    for column in table.columns:
        found.add_column(Text(column), justify="right")
    for row in table.rows:
        found.add_row(*(Text(_cell(value)) for value in row))
    return found


def as_text(renderable: Any, width: int = 132) -> str:
    """The same without colours."""
    from rich.console import Console

    text = StringIO()
    Console(file=text, width=width, color_system=None, legacy_windows=False).print(renderable)
    return text.getvalue().rstrip()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return shown(value) if isinstance(value, float) else str(value)
