"""One call of the doctor: the facts, the rows, a matrix's levels, and the document that `--json` prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanbisect import machine as driving
from nanbisect.environment.facts import facts_of, interpreter, workspace
from nanbisect.environment.levels import Levels, levels_of
from nanbisect.environment.row import Row, device_of
from nanbisect.environment.rows import rows_of
from nanbisect.errors import UsageError
from nanbisect.executors.base import Executor
from nanbisect.matrix import Matrix
from nanbisect.run import Occasion
from nanbisect.trainers.base import Launch, Trainer

SCHEMA = 1


@dataclass(frozen=True)
class Checkup:
    """What was found in a Python and on this machine; of a matrix, too, where one was given."""

    python: str
    facts: Mapping[str, Any]
    rows: tuple[Row, ...]
    device: str
    matrix: Levels | None = None

    @property
    def lacking(self) -> tuple[Row, ...]:
        """The essential things that are missing: without them no cell runs."""
        return tuple(row for row in self.rows if row.essential and row.state == "missing")

    @property
    def usable(self) -> bool:
        """Whether cells can run here: of the matrix, if there is one."""
        return not self.lacking and (self.matrix is None or bool(self.matrix.runnable))

    def to_json(self) -> dict[str, Any]:
        """The document; see the package."""
        return {
            "schema": SCHEMA,
            "usable": self.usable,
            "device": self.device if all(row.name != "device" for row in self.lacking) else None,
            "python": self.python,
            "rows": [asdict(row) for row in self.rows],
            "matrix": asdict(self.matrix) if self.matrix else None,
            "facts": self.facts,
        }


def examine(word: str | None, executor: Executor, occasion: Occasion, *, runs: Path) -> Checkup:
    """This machine, and the Python of that name or our own. Raises UsageError."""
    python = sys.executable if word is None else interpreter(word, occasion.environ)
    facts = facts_of(python, executor, occasion, env={}, runs=runs)
    return Checkup(python, facts, rows_of(facts, own=_same(python, sys.executable)), device_of(facts))


def examine_matrix(
    matrix: Matrix, trainer: Trainer, word: str | None, executor: Executor, occasion: Occasion, *, runs: Path
) -> Checkup:
    """The same in the Python that trains the matrix's cells, and its levels. Raises UsageError."""
    told = None if word is None else interpreter(word, occasion.environ)
    with workspace() as folder:
        launch = _launch(matrix, trainer, folder, told)
        python = launch.argv[0]
        facts = facts_of(python, executor, occasion, env=matrix.env, runs=runs)
        rows = rows_of(facts, own=_same(python, sys.executable), device=matrix.device)
        torch = next(row for row in rows if row.name == "torch")
        looked = None if torch.state == "missing" else driving.look(launch, folder, executor, occasion)
    return Checkup(python, facts, rows, device_of(facts, matrix.device), levels_of(matrix, looked, rows))


def _launch(matrix: Matrix, trainer: Trainer, folder: Path, told: str | None) -> Launch:
    """The trial of the levels, in the Python that will train. Raises UsageError if that is another, or not known."""
    launch = trainer.levels(matrix, folder=folder, python=told)
    if launch is None:
        raise UsageError(
            f"the Python that {' '.join(matrix.command)!r} starts can't be told from here\n"
            "try: --python with the python of the environment it trains in"
        )
    if told and not _same(told, launch.argv[0]):
        raise UsageError(
            f"the cells of {matrix.name} train in {launch.argv[0]}, not in {told}\ntry: leave out --python"
        )
    return launch


def _same(one: str, other: str) -> bool:
    """Whether two paths are one interpreter of one environment: `python` and `python3` beside it are."""
    a, b = Path(one), Path(other)
    return a == b or (a.parent == b.parent and a.resolve() == b.resolve())
