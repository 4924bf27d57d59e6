"""What a matrix's trainer tried -> whether each level can run here, and why not. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanbisect.cells import Cells
from nanbisect.environment.row import Row
from nanbisect.machine import Looked
from nanbisect.matrix import Matrix

UNTRIED = {True: "nothing to try; memory depends on the model", False: "only the command itself shows it"}


@dataclass(frozen=True)
class Level:
    """A level of a factor, or of a fixed setting. `runs`: it was tried, and did or did not; None: not tried."""

    setting: str
    level: str
    factor: bool
    runs: bool | None
    why: str = ""


@dataclass(frozen=True)
class Levels:
    """A matrix on this machine. `runnable` cells; None when no level could be tried, for that `reason`."""

    name: str
    trainer: str
    cells: int
    runnable: int | None
    reason: str
    levels: tuple[Level, ...] = ()


def levels_of(matrix: Matrix, looked: Looked | None, rows: Sequence[Row]) -> Levels:
    """Every level of the factors, and the fixed ones that can't run. `looked` is None where torch is missing."""
    reason = _untried(looked)
    cells = Cells(matrix).count()
    if looked is None or reason:
        return Levels(matrix.name, matrix.trainer, cells, None, reason)
    blocked = {(line["setting"], line["level"]): str(line["reason"]) for line in looked.of("level")}
    tried = {(line["setting"], line["level"]) for line in looked.of("tried")}
    doubts = {
        level: f"{row.name}: {row.means or row.found}" for row in rows if row.state != "ok" for level in row.levels
    }
    fixed = [Level(name, level, False, False, why) for (name, level), why in blocked.items() if not matrix.factor(name)]
    levels = []
    for setting, level in ((factor.name, level) for factor in matrix.factors for level in factor.levels):
        why = blocked.get((setting, level))
        doubt = "" if matrix.trainer == "command" else doubts.get(f"{setting}={level}", "")
        runs = False if why else (True if (setting, level) in tried else None)
        note = why or doubt or ("" if runs else UNTRIED[matrix.trainer == "sft"])
        levels.append(Level(setting, level, True, runs, note))
    return Levels(matrix.name, matrix.trainer, cells, _runnable(matrix, blocked, fixed), "", (*levels, *fixed))


def _runnable(matrix: Matrix, blocked: Mapping[tuple[str, str], str], fixed: Sequence[Level]) -> int:
    """Cells without a level that can't run; a fixed one is part of all."""
    return 0 if fixed else Cells(matrix).count(without=[{setting: level} for setting, level in blocked])


def _untried(looked: Looked | None) -> str:
    """Why no level could be tried, or nothing."""
    if looked is None:
        return "its levels can't be tried without torch"
    end = looked.end
    if end is not None and end["how"] == "done":
        return ""
    last = looked.tail[-1] if looked.tail else "it left no message"
    return str(end["text"]) if end is not None and "text" in end else f"the process that tries its levels ended: {last}"
