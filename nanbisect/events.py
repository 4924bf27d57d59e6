"""What a run tells its listener, as it happens. The console renders these; a test collects them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nanbisect.matrix import Cell
from nanbisect.outcome import Outcome


@dataclass(frozen=True)
class RunStarted:
    """The run folder exists; `cells` will be run in this order, `kept` were finished before.

    Where a search chooses the cells, as it says in `search`, `cells` has those chosen so far, of `of` in all.
    """

    folder: str
    cells: tuple[Cell, ...]
    kept: int
    search: str = ""
    of: int = 0


@dataclass(frozen=True)
class CellStarted:
    """An attempt began in a slot ("cpu" or a GPU's index); `why` a search chose it."""

    cell: Cell
    attempt: int
    slot: str
    why: str = ""


@dataclass(frozen=True)
class CellEnded:
    """An attempt ended and its outcome is on disk. `left` is the estimated time to the end, in seconds.

    `total` is None where a search says when it is enough.
    """

    cell: Cell
    outcome: Outcome
    done: int
    total: int | None
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
class TraceStarted:
    """A failing cell is run once more, with its failing step traced."""

    cell: Cell
    step: int


@dataclass(frozen=True)
class TraceEnded:
    """A trace has ended; `text` says what it found, or why it found nothing."""

    cell: Cell
    text: str


@dataclass(frozen=True)
class RunEnded:
    """All cells ended, or the run was interrupted. `why` is said where a search or a budget ended it."""

    folder: str
    interrupted: bool
    why: str = ""


Event = (
    RunStarted | CellStarted | CellEnded | LevelBlocked | SlotNoted | StartNoted | TraceStarted | TraceEnded | RunEnded
)
Listener = Callable[[Event], None]
