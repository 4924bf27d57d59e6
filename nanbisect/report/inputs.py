"""What a report is made from, and the views of its cells that several sentences share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nanbisect.attribution import Attribution, Caution
from nanbisect.matrix import Cell, Matrix, Vocabulary
from nanbisect.neutrality import run_cautions
from nanbisect.outcome import CellResult, Note, Status
from nanbisect.report.search import SearchSummary

NOT_RUN = "not_run"
"""The word for cells without an outcome, beside the statuses."""


@dataclass(frozen=True)
class RunInputs:
    """A run as values. `results` has every cell of the matrix, or where a `search` chose them those that it
    chose; `folder` is the name of the run's folder.

    `environment` may hold device, python, torch, cuda, packages {name: version}, gpus [{name, memory}],
    cpu, system, nanbisect. `command` is the user's argv, `matrix_path` the matrix file as the user gave
    it, `excluded` the number of combinations that the matrix takes out, `notes` what was noted of the whole run,
    `ended` why not every cell was run, as a clause.
    `vocabulary` is the trainer's, with the settings that the matrix's own command and flags make.
    """

    matrix: Matrix
    results: tuple[CellResult, ...]
    attribution: Attribution
    environment: Mapping[str, Any]
    folder: str
    command: tuple[str, ...]
    matrix_path: str
    interrupted: bool = False
    excluded: int = 0
    notes: tuple[Note, ...] = ()
    vocabulary: Vocabulary = field(default_factory=lambda: Vocabulary(settings={}))
    search: SearchSummary | None = None
    ended: str = ""

    @property
    def total(self) -> int:
        """The number of cells of the matrix."""
        return self.search.account.of_cells if self.search else len(self.results)

    @cached_property
    def cautions(self) -> tuple[Caution, ...]:
        """Every doubt: what the cells say, then what was noted of the whole run."""
        blocked = self.search.cautions() if self.search else ()
        return (*self.attribution.cautions, *blocked, *run_cautions(self.notes))

    @cached_property
    def ordered(self) -> tuple[CellResult, ...]:
        """All cells by number."""
        return tuple(sorted(self.results, key=lambda result: result.cell.number))

    @cached_property
    def finite(self) -> tuple[CellResult, ...]:
        """Cells judged finite."""
        return self.of(Status.FINITE)

    @cached_property
    def failing(self) -> tuple[CellResult, ...]:
        """Cells judged non-finite."""
        return self.of(Status.NONFINITE)

    @property
    def judged(self) -> int:
        """How many cells say anything about the NaN."""
        return len(self.finite) + len(self.failing)

    @property
    def baseline(self) -> CellResult | None:
        """The cell of all first levels; None if the matrix excludes it."""
        return next((result for result in self.results if result.cell.levels == self.matrix.baseline), None)

    @property
    def device(self) -> str:
        """Where it ran, as far as known."""
        return str(self.environment.get("device") or self.matrix.device)

    def of(self, status: Status | None) -> tuple[CellResult, ...]:
        """The cells of one status (None: not run), by number."""
        return tuple(result for result in self.ordered if result.status is status)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Cells by status, of those statuses that occur; `not_run` last."""
        found = Counter(result.status for result in self.results)
        counts = {status.value: found[status] for status in Status if found[status]}
        return {**counts, **({NOT_RUN: found[None]} if found[None] else {})}


def holds(cell: Cell, levels: Mapping[str, Sequence[str]]) -> bool:
    """Whether a cell matches a combination of levels."""
    return all(cell.levels.get(name) in values for name, values in levels.items())
