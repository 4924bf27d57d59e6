"""Drives a run: check, schedule, executor, store. Says what happens to a listener; prints nothing."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import nanbisect
from nanbisect import schedule
from nanbisect.errors import UsageError
from nanbisect.events import CellEnded, CellStarted, Event, LevelBlocked, RunEnded, RunStarted
from nanbisect.evidence import judge
from nanbisect.executors.base import Executor, Exit, Handle, Task, child_environment
from nanbisect.matrix import Cell, Matrix, expand, run_order
from nanbisect.matrix_file import matrix_from_json, matrix_to_json
from nanbisect.outcome import CellResult, Outcome, Status
from nanbisect.store import DIARY, Store, fingerprint, read_evidence, read_lines
from nanbisect.trainers.base import Trainer

Listener = Callable[[Event], None]
POLL = 0.05
CHECK_TIMEOUT = 900.0
MAY_END_OTHERWISE = (Status.FAILED, Status.TIMED_OUT, Status.OUT_OF_MEMORY)  # tried again by --resume, once
RETRIES = 1  # of an attempt that somebody killed, in one run; --resume tries again


@dataclass(frozen=True)
class Machine:
    """What the check found: `environment` for the report, levels this machine can't run, and its slots."""

    environment: Mapping[str, Any]
    blocked: tuple[tuple[Mapping[str, str], str], ...]
    slots: tuple[str, ...]


@dataclass(frozen=True)
class Occasion:
    """What belongs to this execution and not to the experiment: where, how many at once, as typed."""

    arguments: tuple[str, ...] = ()
    matrix_path: str = ""
    gpus: str | None = None
    jobs: int = 1
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    sleep: Callable[[float], None] = time.sleep


def check_machine(matrix: Matrix, trainer: Trainer, executor: Executor, occasion: Occasion) -> Machine:
    """Try this machine, the recipe and the data once. Raises UsageError for what can't be used."""
    with tempfile.TemporaryDirectory(prefix="nanbisect-check-") as name:
        folder = Path(name)
        launch = trainer.check(matrix, folder=folder)
        env = child_environment(occasion.environ, set=launch.env)
        handle = executor.start(Task(launch.argv, env, Path(launch.workdir), folder, CHECK_TIMEOUT))
        _wait(executor, handle)
        lines = read_lines(folder / DIARY)
        tail = read_evidence(folder).log_tail
    end = next((line for line in lines if line["kind"] == "end"), None)
    if end is None or end["how"] not in ("done", "bad_input", "unsupported"):
        said = f": {end['text']}" if end else ""
        raise UsageError(
            "\n".join([f"this machine could not be checked{said}", *tail, "try: the command above by hand"])
        )
    if end["how"] != "done":
        raise UsageError(end["text"])
    environment = {key: value for line in lines if line["kind"] == "environment" for key, value in line.items()}
    environment = {k: v for k, v in environment.items() if k not in ("kind", "at")}
    blocked = tuple(({line["setting"]: line["level"]}, line["reason"]) for line in lines if line["kind"] == "level")
    return Machine({**environment, "nanbisect": nanbisect.__version__}, blocked, slots_of(environment, occasion))


def slots_of(environment: Mapping[str, Any], occasion: Occasion) -> tuple[str, ...]:
    """One slot a GPU, inside the user's own CUDA_VISIBLE_DEVICES; on a CPU `jobs` of them."""
    if str(environment.get("device", "cpu")).startswith("cpu"):
        if occasion.gpus is not None:
            raise UsageError(f"--gpus {occasion.gpus}: this run is on the CPU\ntry: --jobs for cells at once on a CPU")
        return tuple(f"cpu{index}" for index in range(occasion.jobs))
    visible = [name for name in occasion.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    there = visible or [str(index) for index in range(len(environment.get("gpus", ())))]
    if occasion.gpus is None:
        return tuple(there)
    wanted = [name.strip() for name in occasion.gpus.split(",")]
    missing = [name for name in wanted if name not in there]
    if missing:
        raise UsageError(f"--gpus {occasion.gpus}: no GPU {', '.join(missing)}; there are {', '.join(there)}")
    return tuple(wanted)


def slot_environment(slot: str, occasion: Occasion) -> dict[str, str]:
    """What makes a slot's device, and nothing else, visible; several CPU slots share the cores."""
    if not slot.startswith("cpu"):
        return {"CUDA_VISIBLE_DEVICES": slot}
    share = max(1, (os.cpu_count() or 1) // occasion.jobs)
    threads = {"OMP_NUM_THREADS": str(share)} if occasion.jobs > 1 and "OMP_NUM_THREADS" not in occasion.environ else {}
    return {"CUDA_VISIBLE_DEVICES": "", **threads}


def run_json(matrix: Matrix, trainer: Trainer, machine: Machine, occasion: Occasion) -> dict[str, Any]:
    """What `run.json` records."""
    return {
        "matrix": matrix_to_json(matrix),
        "inputs": {name: fingerprint(path) for name, path in trainer.inputs(matrix).items()},
        "matrix_path": occasion.matrix_path,
        "arguments": list(occasion.arguments),
        "environment": machine.environment,
        "blocked": [[dict(levels), reason] for levels, reason in machine.blocked],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def changed_inputs(run: Mapping[str, Any], trainer: Trainer, matrix: Matrix) -> tuple[str, ...]:
    """Names of inputs that are not what they were when the run began."""
    now = {name: fingerprint(path) for name, path in trainer.inputs(matrix).items()}
    return tuple(name for name, mark in run.get("inputs", {}).items() if now.get(name) != mark)


def from_run_json(data: Mapping[str, Any]) -> tuple[Matrix, Machine, Occasion]:
    """The inverse of `run_json`; slots are not kept."""
    blocked = tuple((levels, reason) for levels, reason in data["blocked"])
    occasion = Occasion(arguments=tuple(data["arguments"]), matrix_path=data["matrix_path"])
    return matrix_from_json(data["matrix"]), Machine(data["environment"], blocked, ()), occasion


@dataclass
class Running:
    """An attempt under way."""

    attempt: schedule.Attempt
    number: int
    seed: int
    folder: Path
    slot: str
    handle: Handle
    began: float


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
        self.cells = expand(matrix)
        self.blocked = list(machine.blocked)
        self.running: list[Running] = []
        self.free = list(machine.slots)
        if self._slots_of_a_cell > len(self.free) > 0:
            raise UsageError(
                f"gpus_per_cell is {matrix.gpus_per_cell}, and there are {len(self.free)} GPUs\ntry: a smaller number"
            )
        self.trained = any(outcome.judged for result in self.results() for outcome in result.attempts)
        self.seeds = [self.seed(index) for index in range(1, matrix.repeat + 1)]
        self.killed: dict[str, int] = {}
        self.once_more: set[str] = set()
        self.work = trainer.work(matrix, self.cells)
        self.variant = False
        self.echo: Listener = lambda event: None

    # the whole matrix --------------------------------------------------------------------------

    def run(self, listener: Listener) -> tuple[CellResult, ...]:
        """Make every attempt that is missing. Ctrl-C and TERM stop cleanly, then raise KeyboardInterrupt."""
        self.echo = listener
        order = run_order(self.matrix, self.cells, lambda cell: schedule.blocked_by(cell, self.blocked) is None)
        self.executor.recover(self.store.folder)
        results = {cell.id: CellResult(cell, self._finished(cell)) for cell in order}
        self.once_more = {name for name, result in results.items() if result.status in MAY_END_OTHERWISE}
        listener(RunStarted(str(self.store), order, sum(self._done(result) for result in results.values())))
        for levels, reason in self.blocked:
            listener(LevelBlocked(levels, reason))
        with interruptible():
            try:
                self._loop(results)
            except BaseException:
                self._stop(results)
                listener(RunEnded(str(self.store), interrupted=True))
                raise
        listener(RunEnded(str(self.store), interrupted=False))
        return tuple(results[cell.id] for cell in self.cells)

    def results(self) -> tuple[CellResult, ...]:
        """What is on disk now, in the order of cell numbers."""
        return tuple(CellResult(cell, self.store.outcomes(cell)) for cell in self.cells)

    def _loop(self, results: dict[str, CellResult]) -> None:
        while True:
            for attempt in self._startable(results):
                reason = schedule.blocked_by(attempt.cell, self.blocked)
                if reason is not None:
                    self._keep_blocked(attempt, reason, results)
                elif len(self.free) >= self._slots_of_a_cell:
                    self._start(attempt)
                else:
                    break
            if not self.running and not self._startable(results):
                return
            for ended in self._poll():
                self._keep(ended, self._judge(ended), results)
            if self.running:
                self.occasion.sleep(POLL)

    def _startable(self, results: Mapping[str, CellResult]) -> list[schedule.Attempt]:
        """Attempts to make now. The first cell goes alone: it shows whether model and data can be used."""
        under_way = {entry.attempt.cell.id for entry in self.running}
        given_up = [name for name, times in self.killed.items() if times > RETRIES]
        attempts = schedule.pending(tuple(results.values()), seeds=self.seeds, running=under_way, given_up=given_up)
        if self.trained:
            return attempts
        return attempts[:1] if not self.running else []

    def _finished(self, cell: Cell) -> tuple[Outcome, ...]:
        """Outcomes on disk; an attempt without one is judged from what its dead driver left."""
        outcomes = []
        for folder in self.store.attempt_folders(cell):
            outcome = self.store.outcome(folder)
            if outcome is None:
                number = int(folder.name.partition("-")[2])
                seed = self.store.seed(folder)
                seed = self.seed(1) if seed is None else seed  # never started: killed, whatever its seed
                outcome = self._judge_folder(cell, folder, number=number, seed=seed, ended=None)
                self.store.write_outcome(folder, outcome)
            outcomes.append(outcome)
        return tuple(outcomes)

    def _done(self, result: CellResult) -> bool:
        given_up = self.killed.get(result.cell.id, 0) > RETRIES
        return given_up or not schedule.pending([result], seeds=self.seeds, again=self.once_more)

    # one attempt -------------------------------------------------------------------------------

    @property
    def _slots_of_a_cell(self) -> int:
        """A cell on a CPU has one slot; on GPUs as many as the matrix says, or all."""
        if self.machine.slots and self.machine.slots[0].startswith("cpu"):
            return 1
        return self.matrix.gpus_per_cell or max(1, len(self.machine.slots))

    def seed(self, index: int) -> int:
        """The seed of a cell's attempt `index`: the same in every cell."""
        return int(self.matrix.settings.get("seed", "0")) + index - 1

    def _start(self, attempt: schedule.Attempt, *, seed: int | None = None) -> None:
        number, folder = self.store.new_attempt(attempt.cell, variant=self.variant)
        seed = self.seed(attempt.index) if seed is None else seed
        self.store.write_seed(folder, seed)
        taken, self.free = self.free[: self._slots_of_a_cell], self.free[self._slots_of_a_cell :]
        slot = ",".join(taken)
        launch = self.trainer.launch(self.matrix, attempt.cell, seed=seed, folder=folder)
        offline = {"HF_HUB_OFFLINE": "1"} if launch.from_hub and self.trained else {}
        added = {**offline, **launch.env, **slot_environment(slot, self.occasion)}
        env = child_environment(self.occasion.environ, set=added)
        task = Task(launch.argv, env, Path(launch.workdir), folder, self.matrix.timeout, tuple(taken))
        try:
            handle = self.executor.start(task)
        except BaseException:
            self.free = taken + self.free
            raise
        self.running.append(Running(attempt, number, seed, folder, slot, handle, time.monotonic()))
        self.echo(CellStarted(attempt.cell, number, slot))

    def _poll(self) -> Iterator[tuple[Running, Exit]]:
        for entry in list(self.running):
            ended = self.executor.poll(entry.handle)
            if ended is not None:
                self.running.remove(entry)
                self.free += entry.slot.split(",")
                self.free.sort(key=self.machine.slots.index)
                yield entry, ended

    def _judge(self, ended: tuple[Running, Exit]) -> Outcome:
        entry, how = ended
        return self._judge_folder(entry.attempt.cell, entry.folder, number=entry.number, seed=entry.seed, ended=how)

    def _judge_folder(self, cell: Cell, folder: Path, *, number: int, seed: int, ended: Exit | None) -> Outcome:
        return judge(
            read_evidence(folder, ended),
            attempt=number,
            seed=seed,
            effect_of=lambda resolved: self.trainer.effect(self.matrix, cell, resolved),
        )

    def _keep(self, ended: tuple[Running, Exit], outcome: Outcome, results: dict[str, CellResult]) -> None:
        entry = ended[0]
        first = not any(result.attempts for result in results.values())
        if outcome.bad_input and first:
            what, _, mend = outcome.reason.partition("\ntry:")
            mend = mend or " mend what it names; nothing was kept of this run"
            raise BadFirstCell(f"{what} (in the first cell, {entry.attempt.cell.id})\ntry:{mend}")
        self.store.write_outcome(entry.folder, outcome)
        if outcome.blocked and entry.attempt.cell.levels.items() >= outcome.blocked.items():
            self.blocked.append((outcome.blocked, outcome.reason))
            self.echo(LevelBlocked(outcome.blocked, outcome.reason))
        self._tell(entry.attempt.cell, outcome, results)

    def _keep_blocked(self, attempt: schedule.Attempt, reason: str, results: dict[str, CellResult]) -> None:
        number, folder = self.store.new_attempt(attempt.cell)
        outcome = Outcome(Status.UNSUPPORTED, reason, attempt=number, seed=self.seed(attempt.index))
        self.store.write_outcome(folder, outcome)
        self._tell(attempt.cell, outcome, results)

    def _tell(self, cell: Cell, outcome: Outcome, results: dict[str, CellResult]) -> None:
        self.trained = self.trained or outcome.judged
        if outcome.status is Status.KILLED:
            self.killed[cell.id] = self.killed.get(cell.id, 0) + 1
        self.once_more.discard(cell.id)
        before = results[cell.id]
        results[cell.id] = replace(before, attempts=(*before.attempts, outcome))
        done = sum(self._done(result) for result in results.values())
        self.echo(CellEnded(cell, outcome, done, len(results), self._time_left(results)))

    def _time_left(self, results: Mapping[str, CellResult]) -> float | None:
        open_ = [result for result in results.values() if schedule.blocked_by(result.cell, self.blocked) is None]
        now = time.monotonic()
        return schedule.time_left(
            open_,
            seeds=self.seeds,
            elapsed={entry.attempt.cell.id: now - entry.began for entry in self.running},
            work=self.work,
            slots=len(self.machine.slots),
        )

    def _stop(self, results: dict[str, CellResult]) -> None:
        """Stop what runs, wait for it, keep what it showed."""
        for entry in self.running:
            self.executor.stop(entry.handle)
        while self.running:
            for ended in self._poll():
                self.store.write_outcome(ended[0].folder, self._judge(ended))
            self.occasion.sleep(POLL)

    # one cell again ----------------------------------------------------------------------------

    def again(
        self, cell: Cell, *, seeds: Sequence[int], listener: Listener, variant: bool = False
    ) -> tuple[Outcome, ...]:
        """Further attempts of one cell, one after another, with these seeds."""
        self.echo, self.variant = listener, variant
        self.free = self.free[: self._slots_of_a_cell]
        outcomes = []
        with interruptible():
            for index, seed in enumerate(seeds, start=1):
                self._start(schedule.Attempt(cell, index), seed=seed)
                try:
                    while not (ended := list(self._poll())):
                        self.occasion.sleep(POLL)
                except BaseException:
                    self._stop({})
                    raise
                outcome = self._judge(ended[0])
                self.store.write_outcome(ended[0][0].folder, outcome)
                listener(CellEnded(cell, outcome, index, len(seeds), None))
                outcomes.append(outcome)
        return tuple(outcomes)


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


@contextmanager
def interruptible() -> Iterator[None]:
    """TERM and HUP act like Ctrl-C, as far as this thread may say so."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    try:
        before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(executor: Executor, handle: Handle) -> Exit:
    try:
        while (ended := executor.poll(handle)) is None:
            time.sleep(POLL)
    except BaseException:
        executor.stop(handle)
        while executor.poll(handle) is None:
            time.sleep(POLL)
        raise
    return ended


def pick_cell(cells: Sequence[Cell], text: str) -> Cell:
    """A cell by its number or by any unambiguous part of its id. Raises UsageError."""
    if text.isdigit():
        found = [cell for cell in cells if cell.number == int(text)]
        if not found:
            raise UsageError(f"there is no cell {text}: cells go from 1 to {len(cells)}")
        return found[0]
    parts = [part.strip() for part in text.split(",") if "=" in part]
    exact = [cell for cell in cells if cell.id == text]
    by_parts = [cell for cell in cells if parts and set(_pairs(text)) <= set(cell.levels.items())]
    found = exact or by_parts or [cell for cell in cells if text in cell.id]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(
            f"no cell matches {text!r}\ntry: its number in the table, or a part of its id such as {cells[0].id}"
        )
    shown = "\n".join(f"  {cell.number}: {cell.id}" for cell in found[:12])
    more = f"\n  and {len(found) - 12} more" if len(found) > 12 else ""
    raise UsageError(f"{len(found)} cells match {text!r}\n{shown}{more}\ntry: a longer part, or the number")


def _pairs(text: str) -> list[tuple[str, str]]:
    """`a=1,8,b=2` as [("a", "1,8"), ("b", "2")]: a level may hold commas."""
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        name, sign, level = part.partition("=")
        if sign:
            pairs.append((name.strip(), level))
        elif pairs:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{part}")
    return pairs


def default_folder(matrix: Matrix, reports: Path) -> Path:
    """`reports/<matrix>-<date>-<time>`, with a number if that is taken."""
    base = reports / f"{matrix.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder
