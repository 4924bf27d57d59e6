"""Drives a run: check, schedule, executor, store. Says what happens to a listener; prints nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from nanbisect import schedule
from nanbisect.attempts import Attempts, Running, interruptible
from nanbisect.attribution import Searched, attribute
from nanbisect.cells import Cells
from nanbisect.choosing import Search, costs, imported_of, is_search, search_json, summary_of, trials_of
from nanbisect.confirm import to_make_again
from nanbisect.errors import UsageError
from nanbisect.events import CellEnded, LevelBlocked, Listener, RunEnded, RunStarted, SlotNoted, StartNoted
from nanbisect.evidence import PORT_TAKEN
from nanbisect.executors.base import Executor
from nanbisect.machine import (
    Machine,
    Occasion,
    changed_inputs,
    check_machine,
    from_run_json,
    run_json,
    slot_environment,
    slots_of,
)
from nanbisect.matrix import Cell, Matrix, run_order
from nanbisect.outcome import KEPT, CellResult, Note, Outcome, Status
from nanbisect.picking import default_folder, pick_cell
from nanbisect.pool import Pool
from nanbisect.search.space import Space
from nanbisect.search.values import Choice, Kind, Strategy, Trial
from nanbisect.single import Single
from nanbisect.slots import Trial as SlotTrial
from nanbisect.store import Store
from nanbisect.trainers.base import Trainer

__all__ = [
    "BadFirstCell",
    "Driver",
    "Listener",
    "Machine",
    "Occasion",
    "changed_inputs",
    "check_machine",
    "default_folder",
    "execute",
    "from_run_json",
    "interruptible",
    "pick_cell",
    "run_json",
    "slot_environment",
    "slots_of",
]

MAY_END_OTHERWISE = (Status.FAILED, Status.TIMED_OUT, Status.OUT_OF_MEMORY)  # tried again by --resume, once
RETRIES = 1  # of an attempt that somebody killed, in one run; --resume tries again


class Driver:
    """One run: its cells and attempts, from the first to the last."""

    def __init__(
        self,
        matrix: Matrix,
        trainer: Trainer,
        executor: Executor,
        *,
        store: Store,
        machine: Machine,
        occasion: Occasion,
    ) -> None:
        self.matrix, self.trainer, self.executor = matrix, trainer, executor
        self.store, self.machine, self.occasion = store, machine, occasion
        self.cells = Cells(matrix)
        self.blocked = list(machine.blocked)
        known = [outcome for result in self.results() for outcome in result.attempts if outcome.judged]
        peak = max((outcome.memory_bytes or 0 for outcome in known), default=0)
        self.pool = Pool(machine, matrix.gpus_per_cell, occasion, peak=peak or None)
        self.pool.tell = self._slot_noted
        self.attempts = Attempts(matrix, trainer, executor, store=store, pool=self.pool, occasion=occasion)
        self.attempts.usable = bool(known)
        self.single = Single(self.attempts)
        self.seeds = [self.attempts.seed(index) for index in range(1, matrix.repeat + 1)]
        self.once_more: set[str] = set()
        self.other_port: set[str] = set()  # cells that were given a second port
        self.controls: frozenset[str] = frozenset()
        self.expected: schedule.Forecast | None = None
        self.work: dict[str, float] = {}
        self.search: Search | None = None
        self.wanted: dict[str, dict[int, str]] = {}  # cell's id -> the seeds that a search wants, by index: why
        self.began, self.ended = occasion.clock(), ""  # why it ended, where a search or a budget says so

    # the whole matrix --------------------------------------------------------------------------

    def run(self, listener: Listener) -> tuple[CellResult, ...]:
        """Make every attempt that is missing. Ctrl-C and TERM stop cleanly, then raise KeyboardInterrupt."""
        self.attempts.tell = listener
        self.executor.recover(self.store.folder)
        results = self._begin()
        self.work.update(self.trainer.work(self.matrix, [result.cell for result in results.values()]))
        self.expected = schedule.forecast(tuple(results.values()), self.work)
        self.once_more = {name for name, result in results.items() if result.status in MAY_END_OTHERWISE}
        listener(self._started(results))
        for levels, reason in self.blocked:
            listener(LevelBlocked(levels, reason))
        with interruptible():
            try:
                self._loop(results)
            except BaseException:
                self.attempts.stop()
                listener(RunEnded(str(self.store), interrupted=True))
                raise
        self._end(results)
        listener(RunEnded(str(self.store), interrupted=False, why=self.ended))
        return tuple(sorted(results.values(), key=lambda result: result.cell.number))

    def results(self) -> tuple[CellResult, ...]:
        """What is on disk now, in the order of cell numbers: of a grid every cell, else those that were begun."""
        grid = self.occasion.plan.strategy is Strategy.GRID and self.cells.listed
        cells = self.cells.every if grid else self.store.cells(self.cells)
        return tuple(CellResult(cell, self.store.outcomes(cell)) for cell in cells)

    def known(self) -> bool:
        """Whether what was not run is known all the same: a search came to its end with nothing left open."""
        last = self.search.last if self.search is not None else None
        return last.complete if last is not None else True

    def _begin(self) -> dict[str, CellResult]:
        """The cells known from the start, in their order, with what is on disk of them."""
        plan, kept = self.occasion.plan, self.store.search()
        if plan.strategy is Strategy.GRID:
            order = run_order(
                self.matrix, self.cells.every, lambda cell: schedule.blocked_by(cell, self.blocked) is None
            )
            first = 2 if order and order[0].levels == self.matrix.baseline else 1
            self.controls = frozenset(cell.id for cell in order[:first])
        else:
            order = self.store.cells(self.cells)
        results = {cell.id: CellResult(cell, self.attempts.finished(cell)) for cell in order}
        if plan.strategy is Strategy.GRID and plan.budget is None and self.occasion.spend is None:
            self.store.write_search(None)
            return results
        made = ((name, outcome.attempt) for name, result in results.items() for outcome in result.attempts)
        self.search = Search(self.matrix, plan, imported_of(kept, plan, made), self.occasion.spend)
        self.store.write_search(search_json(self.search, ended=None))
        if plan.strategy is Strategy.GRID:
            return results
        self.wanted = {name: dict.fromkeys(self._indexes(result), "") for name, result in results.items()}
        return dict(sorted(results.items(), key=lambda item: self._begun(item[1])))

    def _begun(self, result: CellResult) -> int:
        """When a cell was first started, in the order of starts."""
        return min(
            (self.attempts.order.get((result.cell.id, outcome.attempt), -1) for outcome in result.attempts), default=-1
        )

    def _indexes(self, result: CellResult) -> list[int]:
        """Which of the seeds a cell was run with."""
        return sorted(
            {index for o in schedule.counted(result.attempts) if (index := o.seed - self.attempts.seed(1) + 1) > 0}
        )

    def _started(self, results: Mapping[str, CellResult]) -> RunStarted:
        cells, plan = tuple(result.cell for result in results.values()), self.occasion.plan
        if plan.strategy is Strategy.GRID:
            return RunStarted(str(self.store), cells, self._done(results))
        said = plan.strategy.value
        said += f" {','.join(map(str, plan.strength))}" if plan.strategy is Strategy.ADAPTIVE else ""
        return RunStarted(str(self.store), cells, self._done(results), search=said, of=self.cells.count())

    def _end(self, results: dict[str, CellResult]) -> None:
        """Says and keeps why the run ended, where not simply every cell was run."""
        search = self.search
        if search is not None and search.plan.strategy is Strategy.GRID and not self._pending(results):
            self.store.write_search(None)  # the budget was enough for the whole grid
        elif search is not None:
            grid = search.plan.strategy is Strategy.GRID
            self.ended = search.cut_short if grid else search.conclude(*self._so_far(search, results))
            self.store.write_search(search_json(search, ended=self.ended))

    def _loop(self, results: dict[str, CellResult]) -> None:
        while True:
            waiting = self._start_some(results) if self.pool.has_room else True
            if not self.attempts.running:
                if not waiting:
                    if self._confirm(results):
                        continue
                    return
                self.pool.require()
            if not self._keep_ended(results):
                self.attempts.rest()

    def _confirm(self, results: Mapping[str, CellResult]) -> bool:
        """Whether cells that were judged in a shared process are to be made again, each by itself."""
        known = tuple(results.values())
        if not any(attempt.started == KEPT for result in known for attempt in result.attempts):
            return False
        found = attribute(self.matrix.factors, known, searched=self._searched(known))
        new = to_make_again(found.unconfirmed, known) - self.attempts.alone
        self.attempts.alone |= new
        if new:
            what = "1 cell is" if len(new) == 1 else f"{len(new)} cells are"
            self.attempts.tell(
                StartNoted(f"{what} made again, in a process of its own, before a cause counts as proved")
            )
        return bool(new)

    def _searched(self, results: tuple[CellResult, ...]) -> Searched | None:
        """What a search knows so far, for the attribution; None where the whole grid is run."""
        kept = self.store.search()
        if not is_search(kept):
            return None
        return summary_of(self.matrix, self.blocked, results, self.store.order(), kept).searched(self.cells.count)

    def _keep_ended(self, results: dict[str, CellResult]) -> bool:
        """Takes in what has ended; whether anything had, so that its slot need not wait."""
        some = False
        for entry, ended in self.attempts.poll():
            self._keep(entry, self.attempts.judge(entry, ended), results)
            some = True
        for text in self.executor.remarks():
            self.attempts.tell(StartNoted(text))
        return some

    def _start_some(self, results: dict[str, CellResult]) -> bool:
        """As many as there are slots for, in turn. Returns whether any wanted to."""
        if self.search is not None:
            self._choose(self.search, results)
        for attempt in self._startable(results):
            reason = schedule.blocked_by(attempt.cell, self.blocked)
            if reason is not None:
                self._keep_blocked(attempt, reason, results)
        attempts = self._startable(results)
        if attempts:
            last = not self.attempts.running and not self._pending(results)
            waiting = self._in_turn(attempts, last=last)
            for attempt, slots in self.pool.place([(attempt, attempt.cell.id) for attempt in waiting], last=last):
                self.attempts.start(attempt, slots, seed=self.attempts.seed(attempt.index), why=self._why(attempt))
        return bool(attempts)

    def _choose(self, search: Search, results: dict[str, CellResult]) -> None:
        """Ask the search for cells, as many as there are free slots that no other cell waits for."""
        search.look_at(self.occasion.clock() - self.began)
        if search.plan.strategy is Strategy.GRID or search.spent(results.values(), len(self.attempts.running)):
            return
        if self.attempts.running and not (self.attempts.usable or self.attempts.first_is_usable()):
            return
        waiting = [attempt.cell for attempt in self._pending(results)]
        free = (self.pool.at_once - len(self.attempts.running) if self.attempts.usable else 1) - len(waiting)
        if free <= 0:
            return
        space, trials = self._so_far(search, results)
        under_way = [space.row(cell.levels) for cell in (*waiting, *(entry.cell for entry in self.attempts.running))]
        for choice in search.ask(space, trials, running=under_way, free=free, cost=costs(space, self.expected)):
            self._want(self.cells.cell(space.levels(choice.row)), choice, results)
        if search.done and self.occasion.finish:
            self._finish_grid(search, results)

    def _so_far(self, search: Search, results: Mapping[str, CellResult]) -> tuple[Space, list[Trial]]:
        """The grid and the attempts, as the search wants them."""
        space = search.space(self.blocked)
        trials = trials_of(
            space,
            tuple(results.values()),
            self.attempts.order,
            first_seed=self.attempts.seed(1),
            imported=search.imported,
            given_up=self.pool.killed(RETRIES) - self.once_more,
        )
        return space, trials

    def _want(self, cell: Cell, choice: Choice, results: dict[str, CellResult]) -> None:
        """Take a cell in that the search has chosen, or one more seed of it."""
        self.wanted.setdefault(cell.id, {})[choice.seed] = choice.why
        results.setdefault(cell.id, CellResult(cell))
        self.work.update(self.trainer.work(self.matrix, [cell]))
        self.seeds += [self.attempts.seed(index) for index in range(len(self.seeds) + 1, choice.seed + 1)]

    def _finish_grid(self, search: Search, results: dict[str, CellResult]) -> None:
        """The cells that the search had no need of."""
        for cell in self.cells.every:
            row = search.space(()).row(cell.levels)
            for seed in range(1, self.matrix.repeat + 1):
                if seed not in self.wanted.get(cell.id, ()):
                    self._want(cell, Choice(row, seed, Kind.GRID, "the rest of the grid"), results)
        search.finished = True

    def _startable(self, results: Mapping[str, CellResult]) -> list[schedule.Attempt]:
        """Attempts to make now. The first cell goes alone until it has shown that model and data can be used."""
        if self.search is not None and self.search.spent(results.values(), len(self.attempts.running)):
            return []
        attempts = self._pending(results)
        if not attempts and not self.attempts.running:
            attempts = self._pending(results, last=True)
        if self.attempts.usable or self.attempts.first_is_usable():
            return attempts
        return attempts[:1] if not self.attempts.running else []

    def _pending(
        self, results: Mapping[str, CellResult], *, last: bool = False, running: Collection[str] | None = None
    ) -> list[schedule.Attempt]:
        """Attempts still to make. `last`: nothing else is left, so a GPU is doubted for a single failure."""
        if running is None:
            running = {entry.cell.id for entry in self.attempts.running}
        again = {*self.once_more, *self.pool.to_repeat(last=last)}
        return schedule.pending(
            [self._by_itself(result) for result in results.values()],
            seeds=self.seeds,
            running=running,
            given_up=self.pool.killed(RETRIES) - again,
            again=again,
            wanted=None if self.search is None or self.search.plan.strategy is Strategy.GRID else self.wanted,
        )

    def _by_itself(self, result: CellResult) -> CellResult:
        """Without what was made in a shared process, where the cell is to be made again."""
        if result.cell.id not in self.attempts.alone:
            return result
        return replace(result, attempts=tuple(one for one in result.attempts if one.started != KEPT))

    def _in_turn(self, attempts: Sequence[schedule.Attempt], *, last: bool) -> list[schedule.Attempt]:
        """On one slot as `plan` shows; on several what tells of a doubted GPU, the controls, then the longest."""
        if self.wanted:  # a search has its own order
            return list(attempts)
        if self.occasion.keep:  # another group takes another process
            attempts = sorted(attempts, key=lambda attempt: self._in_another_group(attempt.cell))
        if self.pool.at_once == 1 or self.expected is None:
            return list(attempts)
        again = self.pool.to_repeat(last=last)
        ordered = schedule.in_turn(attempts, self.expected, repeat=len(self.seeds), controls=self.controls)
        return sorted(ordered, key=lambda attempt: attempt.cell.id not in again)

    def _in_another_group(self, cell: Cell) -> bool:
        """Whether its turn comes when the process of now has no cell left; the controls come as they are."""
        return cell.id not in self.controls and self.attempts.group not in ("", self.trainer.keep(self.matrix, cell))

    def _done(self, results: Mapping[str, CellResult]) -> int:
        """How many cells have nothing left to do; those under way have."""
        return len(results) - len(self._pending(results, running=()))

    # one attempt -------------------------------------------------------------------------------

    def _why(self, attempt: schedule.Attempt) -> str:
        return self.wanted.get(attempt.cell.id, {}).get(attempt.index, "")

    def _keep(self, entry: Running, outcome: Outcome, results: dict[str, CellResult]) -> None:
        first = not any(result.attempts for result in results.values())
        if outcome.bad_input and first:
            what, _, mend = outcome.reason.partition("\ntry:")
            mend = mend or " mend what it names; nothing was kept of this run"
            raise BadFirstCell(f"{what} (in the first cell, {entry.cell.id})\ntry:{mend}")
        self.store.write_outcome(entry.folder, outcome)
        if outcome.blocked and entry.cell.levels.items() >= outcome.blocked.items():
            self.blocked.append((outcome.blocked, outcome.reason))
            self.attempts.tell(LevelBlocked(outcome.blocked, outcome.reason))
        self._learn(entry.cell, entry.slots, outcome)
        self._tell(entry.cell, outcome, results)
        if not self.occasion.cold and self.attempts.warm.due(entry.warm, outcome) and self._more_to_come(results):
            self.attempts.compare(entry, outcome)

    def _more_to_come(self, results: Mapping[str, CellResult]) -> bool:
        """Whether several attempts are left: those that wait, or whatever a search will ask for."""
        searching = self.search is not None and self.search.plan.strategy is not Strategy.GRID and not self.search.done
        return searching or len(self._pending(results)) > 1

    def _learn(self, cell: Cell, slots: tuple[str, ...], outcome: Outcome) -> None:
        """What an attempt says beyond its own end: of the inputs, of its GPU, and that a port was taken."""
        self.attempts.usable = self.attempts.usable or outcome.judged
        self.once_more.discard(cell.id)
        if outcome.started == KEPT and outcome.status in (*MAY_END_OTHERWISE, Status.KILLED):
            self.attempts.alone.add(cell.id)
        if PORT_TAKEN in (note.code for note in outcome.doubts) and cell.id not in self.other_port:
            self.other_port.add(cell.id)
            self.once_more.add(cell.id)
        else:
            self.pool.ended(SlotTrial((cell.id, outcome.seed), slots, outcome.status), outcome.memory_bytes)

    def _slot_noted(self, slot: str, note: Note) -> None:
        """Says what is to be said of a slot; what holds for good stays with the run."""
        if slot in self.pool.aside:
            self.store.add_note(note)
        self.attempts.tell(SlotNoted(slot, note.text))

    def _keep_blocked(self, attempt: schedule.Attempt, reason: str, results: dict[str, CellResult]) -> None:
        seed = self.attempts.seed(attempt.index)
        number, folder = self.attempts.new(attempt.cell, seed=seed, why=self._why(attempt))
        outcome = Outcome(Status.UNSUPPORTED, reason, attempt=number, seed=seed)
        self.store.write_outcome(folder, outcome)
        self._learn(attempt.cell, (), outcome)
        self._tell(attempt.cell, outcome, results)

    def _tell(self, cell: Cell, outcome: Outcome, results: dict[str, CellResult]) -> None:
        before = results[cell.id]
        results[cell.id] = replace(before, attempts=(*before.attempts, outcome))
        self.expected = schedule.forecast(tuple(results.values()), self.work)
        done = self._done(results)
        if self.search is not None:  # it says when it is enough
            self.attempts.tell(CellEnded(cell, outcome, done, None, None))
        else:
            self.attempts.tell(CellEnded(cell, outcome, done, len(results), self._time_left(results)))

    def _time_left(self, results: Mapping[str, CellResult]) -> float | None:
        open_ = [result for result in results.values() if schedule.blocked_by(result.cell, self.blocked) is None]
        now = self.occasion.clock()
        return schedule.time_left(
            open_,
            seeds=self.seeds,
            elapsed={entry.cell.id: now - entry.began for entry in self.attempts.running},
            expected=self.expected,
            slots=self.pool.at_once,
        )


class BadFirstCell(UsageError):
    """The first cell could not use the model, the data or the recipe: no other could."""


def execute(driver: Driver, listener: Listener) -> tuple[CellResult, ...]:
    """A whole run under the folder's lock. A first cell that can't begin leaves no folder behind."""
    with driver.store.lock():
        try:
            return driver.run(listener)
        except BadFirstCell:
            driver.store.discard()
            raise
