"""One cell's attempts, one after another, while nothing else of the run is under way: for `rerun` and traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from nanbisect import schedule
from nanbisect.attempts import Attempts, Running, interruptible
from nanbisect.events import CellEnded, Listener
from nanbisect.executors.base import Exit
from nanbisect.matrix import Cell, Matrix
from nanbisect.outcome import Outcome


class Single:
    """Single attempts of a run."""

    def __init__(self, attempts: Attempts) -> None:
        self.attempts = attempts

    def again(
        self, cell: Cell, *, seeds: Sequence[int], listener: Listener, variant: bool = False
    ) -> tuple[Outcome, ...]:
        """Further attempts of a cell with these seeds. `variant`: the matrix does not have it."""
        attempts = self.attempts
        attempts.tell, attempts.variant = listener, variant
        attempts.order.update(attempts.store.order())
        outcomes = []
        with interruptible():
            for index, seed in enumerate(seeds, start=1):
                attempt = schedule.Attempt(cell, index)
                entry, ended = self._run(attempt, partial(attempts.start, attempt, seed=seed))
                outcome = attempts.judge(entry, ended)
                attempts.store.write_outcome(entry.folder, outcome)
                listener(CellEnded(cell, outcome, index, len(seeds), None))
                outcomes.append(outcome)
        return tuple(outcomes)

    def aside(
        self, cell: Cell, *, seed: int, env: Mapping[str, str], matrix: Matrix | None = None
    ) -> tuple[Path, Exit]:
        """An attempt that counts for nothing, with variables of its own for the probe; its folder, and how it ended."""
        attempts = self.attempts
        folder, attempt = attempts.store.new_trace(cell), schedule.Attempt(cell, 1)
        attempts.store.write_about(folder, cell, seed=seed, order=0, why="a trace")
        start = partial(
            attempts.start_aside, attempt, seed=seed, folder=folder, env=env, matrix=matrix or attempts.matrix
        )
        with interruptible():
            return folder, self._run(attempt, start)[1]

    def judge_aside(self, cell: Cell, folder: Path, *, seed: int, ended: Exit) -> Outcome:
        """The outcome of such an attempt."""
        return self.attempts.judge_folder(cell, folder, number=1, seed=seed, ended=ended)

    def _run(self, attempt: schedule.Attempt, start: Callable[[tuple[str, ...]], None]) -> tuple[Running, Exit]:
        """An attempt from its start, on the slots that it gets, to its end."""
        try:
            start(self._slots_for(attempt))
            while not (ended := list(self.attempts.poll())):
                self.attempts.rest()
        except BaseException:
            self.attempts.stop()
            raise
        return ended[0]

    def _slots_for(self, attempt: schedule.Attempt) -> tuple[str, ...]:
        """The first that have memory for it."""
        pool = self.attempts.pool
        while not (placed := list(pool.place([(attempt, attempt.cell.id)]))):
            pool.require()
            self.attempts.rest()
        return placed[0][1]
