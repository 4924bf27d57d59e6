"""The exception tree, drawn once.

Every message says what happened, where, and what to try. Only `cli` turns an exception into an exit
code; nothing below prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class NanbisectError(Exception):
    """Anything nanbisect refuses, in words a user can act on."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a matrix file: where (line and column count from 1), what, and the mend."""

    path: str
    what: str
    mend: str = ""
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}, column {self.column}: " if self.line is not None else ""
        path = f"{self.path}: " if self.path else ""
        mend = f" ({self.mend})" if self.mend else ""
        return f"{where}{path}{self.what}{mend}"


class MatrixError(NanbisectError):
    """A matrix that can't be run; holds every problem found, not only the first."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]))


class UsageError(NanbisectError):
    """A command line, a model, data or a recipe that can't be used as given."""


class StoreError(NanbisectError):
    """A run folder that can't be read or written."""


class ExecutorError(NanbisectError):
    """The machine refused to start or stop a process."""
