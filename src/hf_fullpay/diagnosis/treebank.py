"""Sentences with gold dependency trees, out of a CoNLL-U file.

Words are the syntactic words of the tree. Where a surface token holds several of them (line "1-2", as "don't" does), each
gets its part of the token if their forms spell it, and otherwise the whole token; empty nodes ("1.1") belong to the
enhanced graph and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hf_fullpay.core.errors import wrong

ROOT = -1
COLUMNS = 10


@dataclass(frozen=True)
class Sentence:
    """One tree.

    Attributes:
        text: the sentence as it is written.
        words: first and last character + 1 of every word in the text.
        governors: index of every word's governor, or ROOT.
        relations: label of the edge to it, subtype included ("nmod:poss").
    """

    text: str
    words: list[tuple[int, int]]
    governors: list[int]
    relations: list[str]


def read_treebank(path: str | Path) -> list[Sentence]:
    """All sentences of a CoNLL-U file.

    Raises:
        ValueError: for another format, with the number of the line.
        OSError: for a file that cannot be read.

    Source: the CoNLL-U format of Universal Dependencies.
    """
    sentences, lines = [], []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                lines.append((number, line.rstrip("\r\n")))
            elif lines:
                sentences += _sentence(path, lines)
                lines = []
    sentences += _sentence(path, lines)
    if not sentences:
        raise ValueError(f"{path}: expected sentences in CoNLL-U, got none.")
    return sentences


def _sentence(path: str | Path, lines: list[tuple[int, str]]) -> list[Sentence]:
    """The tree of some lines; none where they are comments only."""
    text, inside = "", 0  # inside: words of the surface token that are still to come
    words: list[tuple[int, int]] = []
    forms: list[str] = []
    edges: list[tuple[int, str, int]] = []
    for number, line in lines:
        if line.startswith("#"):
            continue
        cells = line.split("\t")
        where = f"{path}, line {number}"
        if len(cells) != COLUMNS:
            raise wrong(where, f"{COLUMNS} columns split by tabs", line[:60])
        if "." in cells[0]:
            continue
        if "-" in cells[0]:
            first, last = (_integer(where, part) for part in cells[0].split("-", 1))
            surface = (len(text), len(text) + len(cells[1]))
            inside, forms = last - first + 1, []
            text += cells[1] + _space(cells)
            continue
        if _integer(where, cells[0]) != len(edges) + 1:
            raise wrong(where, f"word {len(edges) + 1}", cells[0])
        edges.append((_integer(where, cells[6]) - 1, cells[7], number))
        if not inside:
            words.append((len(text), len(text) + len(cells[1])))
            text += cells[1] + _space(cells)
            continue
        forms.append(cells[1])
        inside -= 1
        if not inside:
            words += _parts(text, surface, forms)
    if not edges:
        return []
    for governor, _, number in edges:
        if not ROOT <= governor < len(edges):
            raise wrong(f"{path}, line {number}", f"a head among the {len(edges)} words", governor + 1)
    if len(words) != len(edges):
        raise wrong(f"{path}, line {lines[-1][0]}", "all words of the token", len(edges))
    return [Sentence(text.rstrip(), words, [edge[0] for edge in edges], [edge[1] for edge in edges])]


def _parts(text: str, surface: tuple[int, int], forms: list[str]) -> list[tuple[int, int]]:
    """Where the words of a surface token are."""
    start, stop = surface
    if "".join(forms).lower() != text[start:stop].lower():
        return [surface] * len(forms)
    found = []
    for form in forms:
        found.append((start, start + len(form)))
        start += len(form)
    return found


def _space(cells: list[str]) -> str:
    return "" if "SpaceAfter=No" in cells[9].split("|") else " "


def _integer(where: str, text: str) -> int:
    if not text.isdecimal():
        raise wrong(where, "an integer", text)
    return int(text)
