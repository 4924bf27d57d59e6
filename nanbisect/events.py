"""What a run tells its listener, as it happens. The console renders these; a test collects them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanbisect.matrix import Cell
from nanbisect.outcome import Outcome


@dataclass(frozen=True)
class RunStarted:
    """The run folder exists; `cells` will be run in this order, `kept` were finished before."""

    folder: str
    cells: tuple[Cell, ...]
    kept: int


@dataclass(frozen=True)
class CellStarted:
    """An attempt began in a slot ("cpu" or a GPU's index)."""

    cell: Cell
    attempt: int
    slot: str


@dataclass(frozen=True)
class CellEnded:
    """An attempt ended and its outcome is on disk. `left` is the estimated time to the end, in seconds."""

    cell: Cell
    outcome: Outcome
    done: int
    total: int
    left: float | None


@dataclass(frozen=True)
class LevelBlocked:
    """This machine can't run these levels, so cells that hold them all are not started."""

    levels: Mapping[str, str]
    reason: str


@dataclass(frozen=True)
class SlotNoted:
    """A GPU is not used for now, because somebody else has it, or was put aside for good."""

    slot: str
    text: str


@dataclass(frozen=True)
class StartNoted:
    """Attempts start otherwise than they could, or once more by themselves, which costs time."""

    text: str


@dataclass(frozen=True)
class RunEnded:
    """All cells ended, or the run was interrupted."""

    folder: str
    interrupted: bool


Event = RunStarted | CellStarted | CellEnded | LevelBlocked | SlotNoted | StartNoted | RunEnded
