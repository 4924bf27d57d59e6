"""A cell by what a user types, and the folder of a new run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from nanbisect.errors import UsageError
from nanbisect.matrix import Cell, Matrix


def pick_cell(cells: Sequence[Cell], text: str) -> Cell:
    """A cell by its number or by any unambiguous part of its id. Raises UsageError."""
    if text.isdigit():
        found = [cell for cell in cells if cell.number == int(text)]
        if not found:
            raise UsageError(f"there is no cell {text}: cells go from 1 to {len(cells)}")
        return found[0]
    parts = [part.strip() for part in text.split(",") if "=" in part]
    exact = [cell for cell in cells if cell.id == text]
    by_parts = [cell for cell in cells if parts and set(_pairs(text)) <= set(cell.levels.items())]
    found = exact or by_parts or [cell for cell in cells if text in cell.id]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(
            f"no cell matches {text!r}\ntry: its number in the table, or a part of its id such as {cells[0].id}"
        )
    shown = "\n".join(f"  {cell.number}: {cell.id}" for cell in found[:12])
    more = f"\n  and {len(found) - 12} more" if len(found) > 12 else ""
    raise UsageError(f"{len(found)} cells match {text!r}\n{shown}{more}\ntry: a longer part, or the number")


def _pairs(text: str) -> list[tuple[str, str]]:
    """`a=1,8,b=2` as [("a", "1,8"), ("b", "2")]: a level may hold commas."""
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        name, sign, level = part.partition("=")
        if sign:
            pairs.append((name.strip(), level))
        elif pairs:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{part}")
    return pairs


def default_folder(matrix: Matrix, reports: Path) -> Path:
    """`reports/<matrix>-<date>-<time>`, with a number if that is taken."""
    base = reports / f"{matrix.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder
