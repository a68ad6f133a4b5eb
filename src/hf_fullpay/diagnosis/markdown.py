"""Tables as Markdown, in which nothing that a model or data set named turns into markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

_MARKUP = re.compile(r"([\\`*_\[\]|~#])")


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _MARKUP.sub(r"\\\1", escape(" ".join(text.split()), quote=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = ["| " + " | ".join(plain(column) for column in columns) + " |", "| --- " * len(columns) + "|"]
    return lines + ["| " + " | ".join(plain(cell) for cell in row) + " |" for row in rows]


def document(title: str, tables: Sequence[list[str]], notes: Sequence[str]) -> str:
    """A title, tables and a paragraph a note."""
    return (
        "\n\n".join([f"**{plain(title)}**", *("\n".join(lines) for lines in tables), *(plain(note) for note in notes)])
        + "\n"
    )
