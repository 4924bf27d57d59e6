"""The compact grid: one mark a cell, so that the pattern of failures can be seen at a glance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanbisect.cells import MOST_LISTED
from nanbisect.matrix import Factor, Matrix, is_excluded
from nanbisect.outcome import CellResult, Status
from nanbisect.report.words import kind_of, one_line

WIDEST = 8
"""Columns of a grid, unless the last factor alone has more levels."""

MARKS = {
    Status.FINITE: ".",
    Status.UNSUPPORTED: "-",
    Status.OUT_OF_MEMORY: "oom",
    Status.FAILED: "fail",
    Status.TIMED_OUT: "time",
    Status.KILLED: "kill",
    Status.NO_TRAINING: "none",
}
NOT_RUN, EXCLUDED, UNKNOWN = " ", "x", "bad"

MEANINGS = {
    ".": "finite",
    "NaN": "NaN",
    "Inf": "Inf",
    UNKNOWN: "non-finite",
    "-": "unsupported",
    "oom": "out of memory",
    "fail": "failed",
    "time": "timed out",
    "kill": "killed",
    "none": "no training seen",
    NOT_RUN: "not run",
    EXCLUDED: "excluded by the matrix",
}


@dataclass(frozen=True)
class Grid:
    """Rows are combinations of the first factors, columns of the last; `marks[row][column]`.

    Labels hold the levels, titles the factors. `legend` has the marks that occur and must be explained.
    """

    row_title: str
    column_title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    marks: tuple[tuple[str, ...], ...]
    legend: Mapping[str, str]

    @property
    def cells(self) -> int:
        """The number of places, excluded ones included."""
        return len(self.rows) * len(self.columns)


def mark(result: CellResult) -> str:
    """One mark for a cell."""
    if result.status is None:
        return NOT_RUN
    if result.status is Status.NONFINITE:
        return kind_of(result) or UNKNOWN
    return MARKS[result.status]


def build_grid(matrix: Matrix, results: Sequence[CellResult]) -> Grid:
    """The grid of these cells. Rows without any cell are left out; of a matrix whose cells are not listed, all."""
    if matrix.combinations > MOST_LISTED:
        return Grid("", "", (), (), (), {})
    factors = matrix.factors
    split = _split(factors)
    row_factors, column_factors = factors[:split], factors[split:]
    marks = {tuple(result.cell.levels[f.name] for f in factors): mark(result) for result in results}
    columns = _combinations(column_factors)
    rows = [row for row in _combinations(row_factors) if any((*row, *column) in marks for column in columns)]
    shown = tuple(
        tuple(marks.get((*row, *column)) or _without_result(matrix, (*row, *column)) for column in columns)
        for row in rows
    )
    occurring = {mark for line in shown for mark in line}
    return Grid(
        row_title=_joined([factor.name for factor in row_factors]),
        column_title=_joined([factor.name for factor in column_factors]),
        rows=tuple(map(_joined, rows)),
        columns=tuple(map(_joined, columns)),
        marks=shown,
        legend={mark: text for mark, text in MEANINGS.items() if mark in occurring and mark != text},
    )


def _without_result(matrix: Matrix, levels: Sequence[str]) -> str:
    """The mark of a combination that the matrix excludes, or that a search did not choose."""
    names = [factor.name for factor in matrix.factors]
    return EXCLUDED if is_excluded(matrix, dict(zip(names, levels, strict=True))) else NOT_RUN


def _joined(words: Sequence[str]) -> str:
    return " / ".join(one_line(word) for word in words)


def _split(factors: Sequence[Factor]) -> int:
    """Where the column factors begin: as many of the last as fit, but never all of several."""
    split = len(factors) - 1
    while split > 1 and math.prod(len(factor.levels) for factor in factors[split - 1 :]) <= WIDEST:
        split -= 1
    return max(split, 0)


def _combinations(factors: Sequence[Factor]) -> tuple[tuple[str, ...], ...]:
    return tuple(itertools.product(*(factor.levels for factor in factors)))
