"""One cell again, as it was or with other settings, and compared with what it showed before."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from nanbisect import console as show
from nanbisect import machine as machines
from nanbisect import schedule, tracing
from nanbisect.cells import Cells
from nanbisect.changes import narrowed, with_changes
from nanbisect.events import CellStarted, Event, Listener
from nanbisect.executors.local import LocalExecutor
from nanbisect.gpus import GpuMemory
from nanbisect.machine import Occasion
from nanbisect.matrix import Cell, Matrix
from nanbisect.origins import Traced
from nanbisect.outcome import CellResult, Outcome
from nanbisect.picking import pick_cell
from nanbisect.report.origins import plain_lines
from nanbisect.reporting import NOT_JUDGED, exit_code, write
from nanbisect.run import Driver
from nanbisect.store import Store, find_run
from nanbisect.trainers.registry import TRAINERS


def rerun(
    name: str, cell_name: str, *, repeat: int, changes: tuple[str, ...], reports: Path, trace: bool = False
) -> int:
    """`nanbisect rerun`: one cell again, with its output. Returns the exit code.

    With `trace` a cell that has failed before is not made again first: the traced attempt is the repetition.
    """
    store = Store.open(find_run(name, reports))
    matrix, machine, before = machines.from_run_json(store.run())
    cell = cell_of(store, matrix, cell_name)
    trainer, console = TRAINERS[matrix.trainer], show.console_for()
    executor = LocalExecutor(echo=True, warm=trace and not before.cold)  # a trace takes more than one attempt
    earlier = CellResult(cell, schedule.counted(store.outcomes(cell)))
    told = next((change.partition("=")[2] for change in changes if change.startswith("seed=")), None)
    changed, variant = with_changes(matrix, cell, changes)
    occasion = replace(before, environ=dict(os.environ), look=GpuMemory(os.environ))
    machine = replace(machine, slots=machines.slots_of(machine.environment, occasion, matrix.env))
    driver = Driver(changed, trainer, executor, store=store, machine=machine, occasion=occasion)
    target = variant or cell
    seeds = _seeds(earlier, driver, repeat, told)
    console.print(f"run {store}, cell {cell.number}", style="dim", highlight=False, soft_wrap=True)
    for name in machines.changed_inputs(store.run(), trainer, matrix):
        console.print(f"caution: the {name} is not what it was when this run began", style="yellow", soft_wrap=True)
    if variant is not None or schedule.blocked_by(cell, machine.blocked):
        console.print(show.LOOKING, style="dim")
        if lacks := _lacking(narrowed(changed, target), target, occasion):
            console.print(f"{_what(cell, changes)}: {lacks}", style="yellow", highlight=False, soft_wrap=True)
            return NOT_JUDGED
    known = trace and variant is None and tracing.failure_of(driver, cell) is not None
    outcomes: tuple[Outcome, ...] = ()
    listener = _heading(console, changed)
    try:
        with store.lock():
            if not known:
                outcomes = driver.single.again(target, seeds=seeds, listener=listener, variant=variant is not None)
            traced = _traced(driver, target, listener, variant=variant is not None) if trace else None
    finally:
        executor.close()
    if traced is not None:
        console.print(compared(earlier, traced.outcome, cell, changes), markup=False, highlight=False, soft_wrap=True)
        for line in traced_lines(traced):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        outcomes = outcomes or (traced.outcome,)
    for outcome in outcomes if not known else ():
        console.print(compared(earlier, outcome, cell, changes), markup=False, highlight=False, soft_wrap=True)
    if variant is None:
        write(store, Console(quiet=True))
    return exit_code([CellResult(target, outcomes)])


def cell_of(store: Store, matrix: Matrix, name: str) -> Cell:
    """A cell by its number or a part of its id. Cells too many to be listed: any by number, those run by a part."""
    cells = Cells(matrix)
    numbered = cells.numbered(int(name)) if name.isdecimal() and not cells.listed else None
    return numbered or pick_cell(cells.every if cells.listed else store.cells(cells), name)


def _traced(driver: Driver, cell: Cell, listener: Listener, *, variant: bool) -> Traced | None:
    """The trace of a cell's failing attempt; None where it has none."""
    failure = tracing.failure_of(driver, cell, variant=variant)
    return tracing.trace(driver, failure, listener) if failure else None


def traced_lines(traced: Traced) -> tuple[str, ...]:
    """What a trace found, for a terminal."""
    notes = (traced.note.text,) if traced.note else ()
    return (*(plain_lines(traced.origin, traced.outcome) if traced.origin else ()), *notes)


def _lacking(alone: Matrix, cell: Cell, occasion: Occasion) -> str | None:
    """Why this machine can't run that cell, or None. Looks anew: what was missing may be installed by now."""
    executor = LocalExecutor()
    try:
        machine = machines.check_machine(alone, TRAINERS[alone.trainer], executor, occasion)
    finally:
        executor.close()
    reason = schedule.blocked_by(cell, machine.blocked)
    return None if reason is None else f"not on this machine: {reason}"


def _seeds(earlier: CellResult, driver: Driver, repeat: int, told: str | None) -> list[int]:
    """The seed of the attempt repeated (or the one told by `--with seed=N`), then the ones after it."""
    first = earlier.outcome.seed if earlier.outcome else driver.attempts.seed(1)
    first = int(told) if told is not None else first
    return [first + index for index in range(repeat)]


def _heading(console: Console, matrix: Matrix) -> Listener:
    def listener(event: Event) -> None:
        line = show.Plain(console, matrix)
        if isinstance(event, CellStarted):
            console.print(f"cell {event.cell.number}: {event.cell.id}", markup=False, highlight=False, soft_wrap=True)
        else:
            line(event)

    return listener


def _what(cell: Cell, changes: tuple[str, ...]) -> str:
    """`cell 4 with lr=1e-2`."""
    return f"cell {cell.number}" + (f" with {' '.join(changes)}" if changes else "")


def compared(earlier: CellResult, outcome: Outcome, cell: Cell, changes: tuple[str, ...]) -> str:
    """Whether an attempt ended as the one it repeats, and at the same place."""
    before, what = earlier.outcome, _what(cell, changes)
    if before is None:
        return f"{what}: {outcome.status.value} ({outcome.reason}); it had not been run before"
    if before.status is not outcome.status:
        now = f"{outcome.status.value} now ({outcome.reason})"
        return f"{what}: ended otherwise: {now}, {before.status.value} before ({before.reason})"
    if outcome.site is None:
        return f"{what}: ended the same way: {outcome.status.value} ({outcome.reason})"
    where = (
        "at the same place" if outcome.site.same_place(before.site) else f"at another place (before: {before.reason})"
    )
    return f"{what}: ended the same way, {where}: {outcome.reason}"
