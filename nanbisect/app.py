"""Every command as one plain function with keyword arguments, usable from Python."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from nanbisect import console as show
from nanbisect import run as driving
from nanbisect import schedule, starting, tracing, watch_trace
from nanbisect import watch as watching
from nanbisect.attribution import attribute
from nanbisect.cells import Cells
from nanbisect.changes import narrowed, with_changes
from nanbisect.choosing import Blocked, SearchFlags, is_search, kept_of, summary_of
from nanbisect.environment.checkup import Checkup, examine, examine_matrix
from nanbisect.errors import ExecutorError, NanbisectError, StoreError, UsageError
from nanbisect.events import CellStarted, Event, TraceEnded
from nanbisect.evidence import STOPPED
from nanbisect.executors.local import LocalExecutor
from nanbisect.gpus import GpuMemory
from nanbisect.matrix import Cell, Matrix, excluded, expand, run_order
from nanbisect.matrix_command import settings_of
from nanbisect.matrix_file import NO_OVERRIDES, Overrides, matrix_to_json, read_matrix
from nanbisect.matrix_schema import json_schema
from nanbisect.origins import Traced
from nanbisect.outcome import CellResult, Outcome, Status, jsonable
from nanbisect.report.examples import resume as resume_command
from nanbisect.report.markdown import to_markdown
from nanbisect.report.model import Report, RunInputs, build
from nanbisect.report.origins import plain_lines
from nanbisect.report.redact import Redactor
from nanbisect.report.result import cell_to_result, to_result
from nanbisect.run import Driver, Occasion
from nanbisect.search.propose import propose
from nanbisect.search.space import Space
from nanbisect.search.values import Plan, Strategy
from nanbisect.store import Store, atomic_write, explained, find_run
from nanbisect.tables import to_csv
from nanbisect.trainers.registry import TRAINERS, VOCABULARIES

ANY = SearchFlags()
NOT_JUDGED, FOUND = 3, 1
SHOWN_CHOICES = 12
NOT_USABLE = 1
LOOKING = "looking at this machine, and at what is to be trained"


def run(
    path: Path,
    overrides: Overrides,
    occasion: Occasion,
    flags: SearchFlags = ANY,
    *,
    out: Path | None,
    resume: bool,
    reports: Path,
) -> int:
    """`nanbisect run`: the cells, then the report. Returns the exit code."""
    matrix = load(path, overrides)
    flags.plan(matrix)  # a flag that can't be is said before anything is looked at
    _may_keep(matrix, occasion)
    trainer, executor, console = TRAINERS[matrix.trainer], LocalExecutor(warm=not occasion.cold), show.console_for()
    try:
        store = _to_resume(matrix, out, reports) if resume else None
        if store is None and out is not None:
            Store.require_free(out)  # said before the machine is looked at
        plan, spend = flags.plan(matrix, store.search() if store else None)
        occasion = replace(occasion, plan=plan, spend=spend, finish=flags.finish)
        console.print(LOOKING, style="dim")
        machine = driving.check_machine(matrix, trainer, executor, occasion)
        if store is not None:
            _same_machine(store, machine.environment)
        if store is None:
            store = Store.create(
                out or driving.default_folder(matrix, reports), driving.run_json(matrix, trainer, machine, occasion)
            )
        driver = Driver(matrix, trainer, executor, store=store, machine=machine, occasion=occasion)
        try:
            with show.watching(console, matrix) as listener:
                results = driving.execute(driver, listener)
                if occasion.trace:
                    _trace_causes(driver, listener)
        except (KeyboardInterrupt, ExecutorError) as error:
            _write(store, console)
            if isinstance(error, KeyboardInterrupt):
                again = resume_command(inputs_of(store))
                console.print(f"stopped; go on with: {again}", style="yellow", soft_wrap=True)
            raise
    finally:
        executor.close()
    _write(store, console)
    return exit_code(results, known=driver.known())


def plan(path: Path, overrides: Overrides, occasion: Occasion, flags: SearchFlags = ANY) -> None:
    """`nanbisect plan`: what would run, in which order, and what can't."""
    matrix = load(path, overrides)
    plan, _ = flags.plan(matrix)
    executor, console = LocalExecutor(), show.console_for()
    try:
        machine = driving.check_machine(matrix, TRAINERS[matrix.trainer], executor, occasion)
    finally:
        executor.close()
    cells = Cells(matrix)
    total, able = cells.count(), cells.count(without=[levels for levels, _ in machine.blocked])
    console.print(
        f"{matrix.name}: {total:,} cells ({matrix.combinations - total:,} excluded), {able:,} can run here on "
        f"{machine.environment.get('device')}",
        highlight=False,
    )
    searched = plan.strategy is not Strategy.GRID
    for part in _first_choices(matrix, plan, machine) if searched else _whole_grid(matrix, machine):
        console.print(part)
    for levels, reason in machine.blocked:
        if any(matrix.factor(name) for name in levels):
            text = " ".join(f"{name}={level}" for name, level in levels.items())
            console.print(f"can't run here: {text}: {reason}", style="yellow", highlight=False, soft_wrap=True)


def _whole_grid(matrix: Matrix, machine: driving.Machine) -> Iterator[RenderableType]:
    cells = expand(matrix)
    reasons = {cell.id: reason for cell in cells if (reason := schedule.blocked_by(cell, machine.blocked))}
    order = run_order(matrix, cells, lambda cell: cell.id not in reasons)
    return show.plan_tables(matrix, order, reasons, tuple(excluded(matrix)))


def _first_choices(matrix: Matrix, plan: Plan, machine: driving.Machine) -> Iterator[RenderableType]:
    """What the search would run first, if nothing of it were known yet; what follows depends on how these end."""
    space, cells = Space.of(matrix, [levels for levels, _ in machine.blocked]), Cells(matrix)
    choices = propose(space, (), plan, free=SHOWN_CHOICES).choices
    return show.search_tables(matrix, plan, [(cells.cell(space.levels(c.row)), c.why) for c in choices])


def init(name: str | None, *, out: Path | None, force: bool) -> None:
    """`nanbisect init`: a first matrix for a preset, or what there is."""
    if name is None and (force or out is not None):
        raise UsageError("nothing to write: no preset was named\ntry: nanbisect init, which lists them")
    text = starting.listing() if name is None else starting.begin(name, out=out, force=force)
    show.console_for().print(text, markup=False, highlight=False, soft_wrap=True)


def schema() -> str:
    """`nanbisect plan --schema`: the JSON Schema of a matrix file for the built-in trainer."""
    return json.dumps(json_schema(VOCABULARIES["sft"]), indent=1)


def rerun(
    name: str, cell_name: str, *, repeat: int, changes: tuple[str, ...], reports: Path, trace: bool = False
) -> int:
    """`nanbisect rerun`: one cell again, with its output. Returns the exit code.

    With `trace` a cell that has failed before is not made again first: the traced attempt is the repetition.
    """
    store = Store.open(find_run(name, reports))
    matrix, machine, before = driving.from_run_json(store.run())
    cell = cell_of(store, matrix, cell_name)
    trainer, console = TRAINERS[matrix.trainer], show.console_for()
    executor = LocalExecutor(echo=True, warm=trace and not before.cold)  # a trace takes more than one attempt
    earlier = CellResult(cell, schedule.counted(store.outcomes(cell)))
    told = next((change.partition("=")[2] for change in changes if change.startswith("seed=")), None)
    changed, variant = with_changes(matrix, cell, changes)
    occasion = replace(before, environ=dict(os.environ), look=GpuMemory(os.environ))
    machine = replace(machine, slots=driving.slots_of(machine.environment, occasion, matrix.env))
    driver = Driver(changed, trainer, executor, store=store, machine=machine, occasion=occasion)
    target = variant or cell
    seeds = _seeds(earlier, driver, repeat, told)
    console.print(f"run {store}, cell {cell.number}", style="dim", highlight=False, soft_wrap=True)
    for name in driving.changed_inputs(store.run(), trainer, matrix):
        console.print(f"caution: the {name} is not what it was when this run began", style="yellow", soft_wrap=True)
    if variant is not None or schedule.blocked_by(cell, machine.blocked):
        console.print(LOOKING, style="dim")
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
        _write(store, Console(quiet=True))
    return exit_code([CellResult(target, outcomes)])


def cell_of(store: Store, matrix: Matrix, name: str) -> Cell:
    """A cell by its number or a part of its id. Cells too many to be listed: any by number, those run by a part."""
    cells = Cells(matrix)
    numbered = cells.numbered(int(name)) if name.isdecimal() and not cells.listed else None
    return numbered or driving.pick_cell(cells.every if cells.listed else store.cells(cells), name)


def _traced(driver: Driver, cell: Cell, listener: driving.Listener, *, variant: bool) -> Traced | None:
    """The trace of a cell's failing attempt; None where it has none."""
    failure = tracing.failure_of(driver, cell, variant=variant)
    return tracing.trace(driver, failure, listener) if failure else None


def traced_lines(traced: Traced) -> tuple[str, ...]:
    """What a trace found, for a terminal."""
    notes = (traced.note.text,) if traced.note else ()
    return (*(plain_lines(traced.origin, traced.outcome) if traced.origin else ()), *notes)


def _to_trace(inputs: RunInputs) -> tuple[int, ...]:
    """Numbers of failing cells, one a cause."""
    return tuple(pair.failing.number for pair in build(inputs).pairs)


def _trace_causes(driver: Driver, listener: driving.Listener) -> None:
    """One failing cell of every cause, if it was not traced before. The report is on the disk by then."""
    _write(driver.store, Console(quiet=True))
    with driver.store.lock():
        for number in _to_trace(inputs_of(driver.store)):
            failure = tracing.failure_of(driver, cell_of(driver.store, driver.matrix, str(number)))
            if failure is None or failure.outcome.origin is not None:
                continue
            try:
                tracing.trace(driver, failure, listener)
            except NanbisectError as error:  # the verdict stands without it
                listener(TraceEnded(failure.cell, f"the trace could not be made: {error}"))


def report(name: str, format_: str, *, redact: bool, reports: Path) -> str:
    """`nanbisect report`: one rendering, built from the files of the run."""
    store = Store.open(find_run(name, reports))
    inputs, hide = inputs_of(store), redactor(store) if redact else Redactor.none()
    if format_ == "json":
        return json.dumps(hide.redact_json(jsonable(to_result(inputs))), indent=1, allow_nan=False) + "\n"
    if format_ == "csv":
        return hide.redact(to_csv(inputs.results))
    return to_markdown(build(inputs), hide)


def watch(
    command: tuple[str, ...], *, steps: int | None, stop: bool, json_file: Path | None, trace: bool = False
) -> int:
    """`nanbisect watch`: one command under the probe. Returns the command's own exit code.

    Raises UsageError before the command is started if the JSON can't be written: it may run for days.
    With `trace` the command may be started once more, and an interruption of that ends only the trace.
    """
    if json_file is not None:
        _writable(json_file)
    console = show.console_for(sys.stderr)

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if not trace:
        watched = watching.watch(command, steps=steps, stop=stop, environ=dict(os.environ))
        told = watching.diagnosis(watched, command)
    else:
        told = ()
        watched = watch_trace.watch(command, steps=steps, stop=stop, environ=dict(os.environ), tell=tell)
    for line in told:
        tell(line)
    if json_file is not None:
        try:
            _write_cell(json_file, CellResult(Cell(1, {}), (watched.outcome,)))
        except StoreError as error:  # what was seen is told, and the exit code stays the command's own
            console.print(f"nanbisect: {error}", markup=False, highlight=False, soft_wrap=True)
    return watched.code if watched.code >= 0 else 128 - watched.code


def doctor(path: Path | None, *, python: str | None, as_json: bool, reports: Path) -> int:
    """`nanbisect doctor`: what this machine can run, and for which levels of a matrix. Returns the exit code."""
    matrix = load(path, NO_OVERRIDES) if path else None
    executor, occasion, console = LocalExecutor(), Occasion(), show.console_for()
    if not as_json:
        console.print("trying what this machine can run", style="dim")
    try:
        if matrix is None:
            checkup = examine(python, executor, occasion, runs=reports)
        else:
            trainer = TRAINERS[matrix.trainer]
            checkup = examine_matrix(matrix, trainer, python, executor, occasion, runs=reports)
    finally:
        executor.close()
    if as_json:
        sys.stdout.write(json.dumps(jsonable(checkup.to_json()), indent=1, allow_nan=False) + "\n")
    else:
        show_checkup(console, checkup)
    return 0 if checkup.usable else NOT_USABLE


def show_checkup(console: Console, checkup: Checkup) -> None:
    """The doctor's answer; single lines are left whole, so that a command can be copied."""
    for part in show.doctor_parts(checkup):
        console.print(part, highlight=False, soft_wrap=isinstance(part, Text))


def _writable(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--json {path}: there is no folder {folder}\ntry: a file in a folder that is there")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--json {path} can't be written\ntry: a file in a folder of yours")


def _write_cell(path: Path, result: CellResult) -> None:
    with explained(path):
        atomic_write(path, json.dumps(jsonable(cell_to_result(result)), indent=1, allow_nan=False) + "\n")


# pieces ----------------------------------------------------------------------------------------


def load(path: Path, overrides: Overrides) -> Matrix:
    """Read a matrix file. Raises UsageError when it can't be read, MatrixError for what is in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start})\ntry: iconv -t utf-8") from error
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror}\ntry: the path of a matrix file; `nanbisect init` writes one"
        ) from error
    return read_matrix(
        text, source=str(path), folder=str(path.parent.resolve()), vocabularies=VOCABULARIES, overrides=overrides
    )


def overrides(
    model: str | None,
    data: str | None,
    sets: tuple[str, ...],
    factors: tuple[str, ...],
    *,
    seed: int | None = None,
    **others: Any,
) -> Overrides:
    """The flags of a command line laid over the matrix. Paths given there are relative to here."""
    if seed is not None:
        sets = (*sets, f"seed={seed}")
    return Overrides(model=_model(model), data=_data(data), settings=sets, factors=factors, **others)


def _model(model: str | None) -> str | None:
    if model is None:
        return None
    path = Path(model).expanduser()
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    return str(path.resolve()) if path.exists() or looks_like_path else model


def _data(data: str | None) -> str | None:
    """A file or folder as a whole path; a name that a trainer knows (`trl-lib/Capybara`) as it is."""
    if data is None:
        return None
    path = Path(data).expanduser()
    name = not path.suffix and not data.startswith((".", "/", "~")) and not path.exists()
    return data if name else str(path.resolve())


def occasion(arguments: tuple[str, ...], path: Path, **told: Any) -> Occasion:
    """What belongs to this execution and not to the experiment; `told` are fields of `Occasion`."""
    return Occasion(arguments=arguments, matrix_path=str(path), look=GpuMemory(os.environ), **told)


def _may_keep(matrix: Matrix, occasion: Occasion) -> None:
    """Raises UsageError where no process can keep a model."""
    if occasion.keep and occasion.cold:
        raise UsageError("--keep-model and --cold exclude each other\ntry: one of them")
    if occasion.keep and sys.platform != "linux":
        raise UsageError(
            "--keep-model needs Linux, where a process can be forked with what it has imported\ntry: without it"
        )
    if occasion.keep and matrix.trainer != "sft":
        raise UsageError(
            f"--keep-model is of the built-in trainer, and this matrix has trainer {matrix.trainer}\n"
            "try: without it; cells of a command start warm by themselves"
        )


def exit_code(results: Sequence[CellResult], *, known: bool = True) -> int:
    """0 all judged and finite, 1 non-finite found, 3 something was not judged (1 wins over 3).

    `known`: a search that did not need every cell came to its end, with nothing left that it could not judge.
    """
    statuses = {result.status for result in results}
    if Status.NONFINITE in statuses:
        return FOUND
    return 0 if statuses == {Status.FINITE} and known else NOT_JUDGED


def inputs_of(store: Store) -> RunInputs:
    """Everything a report needs, read from the run's files."""
    data = store.run()
    matrix, machine, occasion = driving.from_run_json(data)
    cells = Cells(matrix)
    kept = kept_of(store.search(), cells)
    begun = store.cells(cells) if is_search(kept) else cells.every
    results = tuple(CellResult(cell, _ended(store.outcomes(cell))) for cell in begun)
    vocabulary = VOCABULARIES[matrix.trainer]
    vocabulary = replace(vocabulary, settings=settings_of(vocabulary, matrix.command, matrix.flags))
    neutral = frozenset(name for name, setting in vocabulary.settings.items() if setting.neutral)
    search = summary_of(matrix, machine.blocked, results, store.order(), kept) if is_search(kept) else None
    searched = search.searched(cells.count) if search else None
    results = (*_control(cells, begun, machine.blocked), *results)
    return RunInputs(
        matrix=matrix,
        results=results,
        attribution=attribute(matrix.factors, results, neutral_settings=neutral, searched=searched),
        environment=machine.environment,
        folder=store.folder.name,
        command=occasion.arguments,
        matrix_path=occasion.matrix_path,
        interrupted=not kept["ended"] if kept else any(result.status is None for result in results),
        excluded=matrix.combinations - cells.count(),
        notes=store.notes(),
        vocabulary=vocabulary,
        search=search,
        ended=kept.get("ended") or "",
    )


def _control(cells: Cells, begun: Sequence[Cell], blocked: Blocked) -> Iterator[CellResult]:
    """The baseline, where a search has not begun it: not run yet, or nothing that this machine can run."""
    levels = cells.matrix.baseline
    if cells.has(levels) and not any(cell.levels == levels for cell in begun):
        control = cells.cell(levels)
        reason = schedule.blocked_by(control, blocked)
        yield CellResult(control, (Outcome(Status.UNSUPPORTED, reason),) if reason else ())


def _ended(attempts: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Attempts that nanbisect stopped itself are no way for a cell to end: it counts as not run yet."""
    return tuple(outcome for outcome in attempts if outcome.reason != STOPPED["cancelled"])


def _write(store: Store, console: Console) -> Report:
    """Write the three renderings and show the report."""
    inputs = inputs_of(store)
    report = build(inputs)
    store.write_report(
        markdown=to_markdown(report, redactor(store)), csv=to_csv(inputs.results), result=to_result(inputs)
    )
    show.show_report(console, report)
    console.print(f"\nreport: {store}/report.md", style="dim", highlight=False, soft_wrap=True)
    return report


def redactor(store: Store) -> Redactor:
    """Names and paths of this machine, to be kept out of what is published."""
    paths = {
        str(store.folder.resolve()): "<run>",
        str(store.folder): "<run>",
        str(Path.cwd()): ".",
        sys.prefix: "<python>",
    }
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    return Redactor(home=str(Path.home()), user=user, host=socket.gethostname(), paths=paths)


def _to_resume(matrix: Matrix, out: Path | None, reports: Path) -> Store:
    """The run to go on with. Raises StoreError when there is none, or when its matrix was another one."""
    folder = out or _latest_of(matrix, reports)
    store = Store.open(folder)
    kept, now = store.run()["matrix"], matrix_to_json(matrix)
    changed = sorted(name for name in kept if kept[name] != now.get(name) and name not in ("timeout", "folder"))
    if changed:
        raise StoreError(
            f"{folder} was run with another matrix: {', '.join(changed)} changed\n"
            "try: a new run, or the matrix and flags of that run (its run.json has them)"
        )
    edited = driving.changed_inputs(store.run(), TRAINERS[matrix.trainer], matrix)
    if edited:
        raise StoreError(
            f"{folder} was run with another {', '.join(edited)}: cells must be of one experiment\ntry: a new run"
        )
    return store


def _same_machine(store: Store, now: Mapping[str, Any]) -> None:
    """Cells of one run must come from one kind of machine. Raises StoreError."""
    before = store.run()["environment"]
    moved = [name for name in ("device", "torch", "gpus", "packages") if before.get(name) != now.get(name)]
    if moved:
        raise StoreError(
            f"{store} was run with another {', '.join(moved)} ({', '.join(str(before.get(name)) for name in moved)}): "
            "cells must be of one experiment\ntry: a new run, or the machine and environment of that run"
        )


def _latest_of(matrix: Matrix, reports: Path) -> Path:
    name = re.compile(rf"^{re.escape(matrix.name)}-\d{{8}}-\d{{6}}(-\d+)?$")
    runs = (
        sorted(path for path in reports.glob(f"{matrix.name}-*") if name.match(path.name)) if reports.is_dir() else []
    )
    if not runs:
        raise StoreError(f"there is no run of {matrix.name} below {reports} to go on with\ntry: --out with its folder")
    return runs[-1]


def _lacking(alone: Matrix, cell: Cell, occasion: Occasion) -> str | None:
    """Why this machine can't run that cell, or None. Looks anew: what was missing may be installed by now."""
    executor = LocalExecutor()
    try:
        machine = driving.check_machine(alone, TRAINERS[alone.trainer], executor, occasion)
    finally:
        executor.close()
    reason = schedule.blocked_by(cell, machine.blocked)
    return None if reason is None else f"not on this machine: {reason}"


def _seeds(earlier: CellResult, driver: Driver, repeat: int, told: str | None) -> list[int]:
    """The seed of the attempt repeated (or the one told by `--with seed=N`), then the ones after it."""
    first = earlier.outcome.seed if earlier.outcome else driver.attempts.seed(1)
    first = int(told) if told is not None else first
    return [first + index for index in range(repeat)]


def _heading(console: Console, matrix: Matrix) -> Any:
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
