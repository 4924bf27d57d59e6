"""Every command as one plain function with keyword arguments, usable from Python."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from nanbisect import console as show
from nanbisect import run as driving
from nanbisect import schedule, starting, tracing, watch_trace
from nanbisect import watch as watching
from nanbisect.again import cell_of, rerun
from nanbisect.cells import Cells
from nanbisect.choosing import SearchFlags
from nanbisect.environment.checkup import Checkup, examine, examine_matrix
from nanbisect.errors import ExecutorError, NanbisectError, StoreError, UsageError
from nanbisect.events import Listener, TraceEnded
from nanbisect.executors.local import LocalExecutor
from nanbisect.gpus import GpuMemory
from nanbisect.matrix import Cell, Matrix, excluded, expand, run_order
from nanbisect.matrix_file import NO_OVERRIDES, Overrides, read_matrix
from nanbisect.matrix_schema import json_schema
from nanbisect.outcome import CellResult, jsonable
from nanbisect.report.examples import resume as resume_command
from nanbisect.report.markdown import to_markdown
from nanbisect.report.model import RunInputs, build
from nanbisect.report.redact import Redactor
from nanbisect.report.result import cell_to_result, to_result
from nanbisect.reporting import exit_code, inputs_of, redactor, write
from nanbisect.resuming import same_machine, to_resume
from nanbisect.run import Driver, Occasion
from nanbisect.search.propose import propose
from nanbisect.search.space import Space
from nanbisect.search.values import Plan, Strategy
from nanbisect.store import Store, atomic_write, explained, find_run
from nanbisect.tables import to_csv
from nanbisect.trainers.registry import TRAINERS, VOCABULARIES

__all__ = [
    "doctor",
    "init",
    "load",
    "occasion",
    "overrides",
    "plan",
    "report",
    "rerun",
    "run",
    "schema",
    "show_checkup",
    "watch",
]

ANY = SearchFlags()
SHOWN_CHOICES = 12
NOT_USABLE = 1


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
        store = to_resume(matrix, out, reports) if resume else None
        if store is None and out is not None:
            Store.require_free(out)  # said before the machine is looked at
        plan, spend = flags.plan(matrix, store.search() if store else None)
        occasion = replace(occasion, plan=plan, spend=spend, finish=flags.finish)
        console.print(show.LOOKING, style="dim")
        machine = driving.check_machine(matrix, trainer, executor, occasion)
        if store is not None:
            same_machine(store, machine.environment)
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
            write(store, console)
            if isinstance(error, KeyboardInterrupt):
                again = resume_command(inputs_of(store))
                console.print(f"stopped; go on with: {again}", style="yellow", soft_wrap=True)
            raise
    finally:
        executor.close()
    write(store, console)
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


def _to_trace(inputs: RunInputs) -> tuple[int, ...]:
    """Numbers of failing cells, one a cause."""
    return tuple(pair.failing.number for pair in build(inputs).pairs)


def _trace_causes(driver: Driver, listener: Listener) -> None:
    """One failing cell of every cause, if it was not traced before. The report is on the disk by then."""
    write(driver.store, Console(quiet=True))
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
