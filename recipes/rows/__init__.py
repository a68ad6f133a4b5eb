"""Rows of the evidence: one for each figure of the sources, by what it takes to measure it."""

from rows.arithmetic import F7
from rows.bounds import B4, B5, B6, B7
from rows.depth import E12, F9
from rows.elsewhere import E7, E10, E13, E14, F8
from rows.leak import E1
from rows.list_operations import LISTOPS
from rows.long_texts import F6
from rows.memory import E3, E11
from rows.rates import B8
from rows.row import NOT_MEASURED, Row, Verdict
from rows.weights import F3, F4, F5

ROWS: dict[str, Row] = {
    row.name: row
    for row in (F3, F4, F5, F6, F7, F8, F9, LISTOPS, B4, B5, B6, B7, B8, E1, E3, E7, E10, E11, E12, E13, E14)
}
__all__ = ["NOT_MEASURED", "ROWS", "Row", "Verdict"]
