"""Pronouns with two candidates and a gold answer, out of a GAP file."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from hf_fullpay.core.errors import wrong

NAMES = ("Text", "Pronoun", "Pronoun-offset", "A", "A-offset", "A-coref", "B", "B-offset", "B-coref")
TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class Case:
    """One pronoun, of which exactly one candidate is the antecedent.

    Attributes:
        text: the passage.
        spans: first and last character + 1 of the pronoun and of the two candidates.
        answer: which candidate it is, 0 or 1.
    """

    text: str
    spans: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    answer: int


def read_gap(path: str | Path) -> list[Case]:
    """The cases in which exactly one candidate is right.

    Raises:
        ValueError: for another format, with the number of the line.
        OSError: for a file that cannot be read.

    Source: K. Webster et al., "Mind the GAP: A Balanced Corpus of Gendered Ambiguous Pronouns", 2018. Cases in which
    neither candidate is right are left out, as they have no answer to attend to.
    """
    cases = []
    with open(path, encoding="utf-8", newline="") as file:
        table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        if missing := [name for name in NAMES if name not in (table.fieldnames or ())]:
            raise ValueError(f"{path}: expected the columns of GAP, {missing} are missing.")
        for row in table:
            where = f"{path}, line {table.line_num}"
            pronoun, first, second = (_span(where, row, name) for name in ("Pronoun", "A", "B"))
            truth = [_truth(where, row[name]) for name in ("A-coref", "B-coref")]
            if sum(truth) == 1:
                cases.append(Case(row["Text"], (pronoun, first, second), truth.index(True)))
    if not cases:
        raise ValueError(f"{path}: expected cases with one right candidate, got none.")
    return cases


def _span(where: str, row: dict[str, str], name: str) -> tuple[int, int]:
    words, offset = row[name], row[f"{name}-offset"]
    if not words or not offset or not offset.isdecimal() or not row["Text"].startswith(words, int(offset)):
        raise wrong(where, f"{name} at its offset in the text", f"{words} at {offset}")
    return int(offset), int(offset) + len(words)


def _truth(where: str, text: str | None) -> bool:
    if (text or "").lower() not in TRUTH:
        raise wrong(where, "TRUE or FALSE", text)
    return TRUTH[(text or "").lower()]
