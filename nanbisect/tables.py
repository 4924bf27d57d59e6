"""Outcomes as a table: one row a cell. As a pandas frame, and as CSV that a spreadsheet can open unharmed."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanbisect.outcome import CellResult, named

if TYPE_CHECKING:
    import pandas as pd

Value = str | int | float | None

FIXED = (
    "number", "status", "step", "micro_batch", "phase", "kind", "first_parameter", "loss_1", "grad_norm_1",
    "attempts", "seconds", "reason",
)  # fmt: skip
"""The columns beside the factors, which stand after `number`."""

_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
_UNENCODABLE = re.compile(r"[\x00\ud800-\udfff]")


def cells_frame(results: Sequence[CellResult]) -> pd.DataFrame:
    """A data frame of all cells, by number. What is unknown is missing; levels are text.

    A factor that is called like a fixed column gets the prefix `setting.`.
    """
    import pandas as pd

    return pd.DataFrame(_rows(results), columns=_columns(results))


def to_csv(results: Sequence[CellResult]) -> str:
    """The same as CSV. Unknown is empty, non-finite numbers are named.

    Spreadsheets run text that begins with = + - @ as a formula, so such text gets a leading quote.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = _columns(results)
    writer.writerow([_written(name) for name in columns])
    writer.writerows([_written(row.get(name)) for name in columns] for row in _rows(results))
    return text.getvalue()


def _columns(results: Sequence[CellResult]) -> list[str]:
    factors = dict.fromkeys(name for result in results for name in result.cell.levels)
    return [FIXED[0], *(_column(name) for name in factors), *FIXED[1:]]


def _column(factor: str) -> str:
    return f"setting.{factor}" if factor in FIXED else factor


def _rows(results: Sequence[CellResult]) -> list[dict[str, Value]]:
    return [_row(result) for result in sorted(results, key=lambda result: result.cell.number)]


def _row(result: CellResult) -> dict[str, Value]:
    outcome = result.outcome
    site = outcome.site if outcome else None
    return {
        "number": result.cell.number,
        **{_column(name): level for name, level in result.cell.levels.items()},
        "status": outcome.status.value if outcome else None,
        "step": site.step if site else None,
        "micro_batch": site.micro_batch if site else None,
        "phase": site.phase if site else None,
        "kind": site.kind if site else None,
        "first_parameter": site.parameters[0] if site and site.parameters else None,
        "loss_1": outcome.loss[0] if outcome and outcome.loss else None,
        "grad_norm_1": outcome.grad_norm[0] if outcome and outcome.grad_norm else None,
        "attempts": len(result.attempts),
        "seconds": round(sum(attempt.seconds for attempt in result.attempts), 3),
        "reason": outcome.reason if outcome else None,
    }


def _written(value: Value) -> str | int | float:
    if value is None:
        return ""
    if isinstance(value, float):
        return named(value)
    return _harmless(value) if isinstance(value, str) else value


def _harmless(text: str) -> str:
    """Text on one line that no spreadsheet takes for a formula; plain numbers stay as they are."""
    line = " ".join(_UNENCODABLE.sub("�", text).split())
    return f"'{line}" if line[:1] in ("=", "+", "-", "@") and not _NUMBER.fullmatch(line) else line
