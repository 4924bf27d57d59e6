"""The attempts of a run that are under way: how each is started, waited for, judged and stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from nanbisect import schedule
from nanbisect.events import CellStarted, Event, Listener, StartNoted
from nanbisect.executors.base import Executor, Exit, Handle, Task, WarmStart, child_environment
from nanbisect.judging import judge
from nanbisect.machine import POLL, Occasion, slot_environment, wait
from nanbisect.matrix import Cell, Matrix
from nanbisect.outcome import Outcome
from nanbisect.pool import Pool
from nanbisect.store import Store, read_evidence
from nanbisect.trainers.base import Launch, Trainer
from nanbisect.warm_check import WarmCheck


@dataclass
class Running:
    """An attempt under way."""

    attempt: schedule.Attempt
    number: int
    seed: int
    folder: Path
    slots: tuple[str, ...]
    handle: Handle
    began: float
    warm: WarmStart | None = None  # how it may have started

    @property
    def cell(self) -> Cell:
        """Its cell."""
        return self.attempt.cell


class Attempts:
    """Those of one run.

    `tell` hears of them. `order`: (cell's id, attempt) -> its place in the order of starts. `usable`: whether
    some cell has shown that the model and the data are. `alone`: cells to be judged in a process of their own,
    after a shared one. `group`: what the cell that was started last has loaded, where processes are shared.
    `variant`: the cells are not the matrix's own.
    """

    def __init__(
        self, matrix: Matrix, trainer: Trainer, executor: Executor, *, store: Store, pool: Pool, occasion: Occasion
    ) -> None:
        self.matrix, self.trainer, self.executor = matrix, trainer, executor
        self.store, self.pool, self.occasion = store, pool, occasion
        self.running: list[Running] = []
        self.order: dict[tuple[str, int], int] = {}
        self.usable = False
        self.alone: set[str] = set()
        self.group = ""
        self.variant = False
        self.warm = WarmCheck(wanted=occasion.check)
        self.tell: Listener = _nobody

    # before it runs ----------------------------------------------------------------------------

    def seed(self, index: int) -> int:
        """The seed of a cell's attempt `index`: the same in every cell."""
        return int(self.matrix.settings.get("seed", "0")) + index - 1

    def new(self, cell: Cell, *, seed: int, why: str) -> tuple[int, Path]:
        """The number and the folder of an attempt, with a note of what it is."""
        number, folder = self.store.new_attempt(cell, variant=self.variant)
        order = 1 + max(self.order.values(), default=0)
        self.store.write_about(folder, cell, seed=seed, order=order, why=why)
        if not self.variant:
            self.order[(cell.id, number)] = order
        return number, folder

    def start(self, attempt: schedule.Attempt, slots: tuple[str, ...], *, seed: int, why: str = "") -> None:
        """Start it on slots that it has."""
        cell = attempt.cell
        with self._on(slots):
            number, folder = self.new(cell, seed=seed, why=why)
            launch = self.trainer.launch(self.matrix, cell, seed=seed, folder=folder)
            task = replace(self._task(launch, folder, slots), warm=self._warm(cell, launch))
            self._begin(attempt, number, seed, task, launch.warm)
        self.tell(CellStarted(cell, number, ",".join(slots), why))

    def start_aside(
        self,
        attempt: schedule.Attempt,
        slots: tuple[str, ...],
        *,
        seed: int,
        folder: Path,
        env: Mapping[str, str],
        matrix: Matrix,
    ) -> None:
        """Start one that counts for nothing, with variables of its own, in a folder that is there."""
        with self._on(slots):
            launch = self.trainer.launch(matrix, attempt.cell, seed=seed, folder=folder)
            task = self._task(replace(launch, env={**launch.env, **env}), folder, slots)
            self._begin(attempt, 1, seed, replace(task, warm=self.warm.start(launch.warm)), None)

    @contextmanager
    def _on(self, slots: tuple[str, ...]) -> Iterator[None]:
        """What can't be started gives its slots back."""
        try:
            yield
        except BaseException:
            self.pool.release(slots)
            raise

    def _begin(self, attempt: schedule.Attempt, number: int, seed: int, task: Task, warm: WarmStart | None) -> None:
        handle = self.executor.start(task)
        now = self.occasion.clock()
        self.running.append(Running(attempt, number, seed, task.folder, task.slot, handle, now, warm))

    def _warm(self, cell: Cell, launch: Launch) -> WarmStart | None:
        """How an attempt may start; a cell that a shared process has failed, or must not decide alone, starts cold."""
        warm = None if cell.id in self.alone else self.warm.start(launch.warm)
        if warm is None or not self.occasion.keep or self.variant:
            return warm
        self.group = self.trainer.keep(self.matrix, cell)
        return replace(warm, keep=self.group)

    def _task(self, launch: Launch, folder: Path, slots: tuple[str, ...]) -> Task:
        offline = {"HF_HUB_OFFLINE": "1"} if launch.from_hub and self.usable else {}
        added = {**offline, **launch.env, **slot_environment(slots, self.occasion, launch.env)}
        env = child_environment(self.occasion.environ, set=added)
        return Task(launch.argv, env, Path(launch.workdir), folder, self.matrix.timeout, slots, launch.warm)

    # while it runs -----------------------------------------------------------------------------

    def rest(self) -> None:
        """A short sleep, cut short by an attempt that ends."""
        if self.running:
            self.executor.wait([entry.handle for entry in self.running], POLL)
        else:
            self.occasion.sleep(POLL)

    def poll(self) -> Iterator[tuple[Running, Exit]]:
        """Those that have ended, and how; their slots are free again."""
        for entry in list(self.running):
            ended = self.executor.poll(entry.handle)
            if ended is not None:
                self.running.remove(entry)
                self.pool.release(entry.slots)
                yield entry, ended

    def stop(self) -> None:
        """Stop what runs, wait for it, keep what it showed."""
        for entry in self.running:
            self.executor.stop(entry.handle)
        while self.running:
            for entry, ended in self.poll():
                self.store.write_outcome(entry.folder, self.judge(entry, ended))
            self.rest()

    def first_is_usable(self) -> bool:
        """Whether the cell under way has got as far as calling its model with a batch."""
        self.usable = any(read_evidence(entry.folder).events("root") for entry in self.running)
        return self.usable

    # when it has ended -------------------------------------------------------------------------

    def judge(self, entry: Running, ended: Exit) -> Outcome:
        """Its outcome."""
        return self.judge_folder(entry.cell, entry.folder, number=entry.number, seed=entry.seed, ended=ended)

    def judge_folder(self, cell: Cell, folder: Path, *, number: int, seed: int, ended: Exit | None) -> Outcome:
        """The outcome of an attempt by what it left. `ended`: None for one whose driver died."""
        effect_of = partial(self.trainer.effect, self.matrix, cell)
        return judge(read_evidence(folder, ended), attempt=number, seed=seed, effect_of=effect_of)

    def finished(self, cell: Cell) -> tuple[Outcome, ...]:
        """Outcomes on disk; an attempt without one is judged from what its dead driver left."""
        outcomes = []
        for folder in self.store.attempt_folders(cell):
            outcome, about = self.store.outcome(folder), self.store.about(folder)
            number = int(folder.name.partition("-")[2])
            self.order[(cell.id, number)] = about.get("order", -1)
            if outcome is None:
                seed = about.get("seed", self.seed(1))  # never started: killed, whatever its seed
                outcome = self.judge_folder(cell, folder, number=number, seed=seed, ended=None)
                self.store.write_outcome(folder, outcome)
            outcomes.append(outcome)
        return tuple(outcomes)

    def compare(self, entry: Running, cold: Outcome) -> None:
        """The same cell once more, warm, before others of the same command may start so."""
        folder = self.store.scratch()
        launch = self.trainer.launch(self.matrix, entry.cell, seed=entry.seed, folder=folder)
        ended = wait(self.executor, self.executor.start(self._task(launch, folder, entry.slots)))
        warm = self.judge_folder(entry.cell, folder, number=entry.number, seed=entry.seed, ended=ended)
        said = self.warm.settle(cold, warm)
        if said is not None:
            self.tell(StartNoted(said))


def _nobody(event: Event) -> None:
    """Hears nothing."""


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
