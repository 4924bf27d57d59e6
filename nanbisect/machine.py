"""The machine that a run has: what its check found, its slots, and what an attempt sees of them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nanbisect
from nanbisect.errors import UsageError
from nanbisect.evidence import Line
from nanbisect.executors.base import Executor, Exit, Handle, Task, child_environment
from nanbisect.matrix import Matrix
from nanbisect.matrix_file import matrix_from_json, matrix_to_json
from nanbisect.search.values import Plan, Strategy
from nanbisect.slots import Gpu, shortage
from nanbisect.store import DIARY, fingerprint, read_evidence, read_lines
from nanbisect.trainers.base import Launch, Trainer

POLL = 0.05
CHECK_TIMEOUT = 900.0
MOST = 64  # GPUs of a machine
GRID = Plan(Strategy.GRID)
PATIENCE = 300.0  # seconds that a GPU in somebody else's hands is waited for
VISIBLE, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"

Look = Callable[[Sequence[str]], Mapping[str, Gpu]]
"""Names of slots -> the memory of those GPUs of which something is known."""


def nobody_looks(slots: Sequence[str]) -> Mapping[str, Gpu]:
    """Nothing is known of any GPU."""
    return {}


@dataclass(frozen=True)
class Machine:
    """What the check found: `environment` for the report, levels this machine can't run, and its slots."""

    environment: Mapping[str, Any]
    blocked: tuple[tuple[Mapping[str, str], str], ...]
    slots: tuple[str, ...]

    @property
    def on_gpus(self) -> bool:
        """Whether a slot is a GPU. One of the CPU is only a place in the queue."""
        return bool(self.slots) and not self.slots[0].startswith("cpu")


@dataclass(frozen=True)
class Occasion:
    """What belongs to this execution and not to the experiment: where, how many at once, as typed.

    `look` tells what is free on GPUs, `patience` is how long one that somebody else holds is waited for, in
    seconds of `clock`. `cold`: every attempt starts a Python of its own; `check`: a user's command starts
    warm only after one cell has shown that it may. `keep`: cells share a process that keeps its loaded model.
    `trace`: a failing cell of every cause is traced at the end. `plan` says how the cells are chosen, `spend`
    for how many seconds of `clock` cells may be started (None: no limit), `finish` that the rest of the grid
    runs after the search.
    """

    arguments: tuple[str, ...] = ()
    matrix_path: str = ""
    gpus: str | None = None
    jobs: int = 1
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    look: Look = nobody_looks
    patience: float = PATIENCE
    cold: bool = False
    check: bool = True
    trace: bool = True
    keep: bool = False
    plan: Plan = GRID
    spend: float | None = None
    finish: bool = False


def check_machine(matrix: Matrix, trainer: Trainer, executor: Executor, occasion: Occasion) -> Machine:
    """Try this machine, the recipe and the data once. Raises UsageError for what can't be used."""
    with tempfile.TemporaryDirectory(prefix="nanbisect-check-") as name:
        looked = look(trainer.check(matrix, folder=Path(name)), Path(name), executor, occasion)
    end = looked.end
    if end is None or end["how"] not in ("done", "bad_input", "unsupported"):
        said = f": {end['text']}" if end else ""
        raise UsageError(
            "\n".join([f"this machine could not be checked{said}", *looked.tail, "try: the command above by hand"])
        )
    if end["how"] != "done":
        raise UsageError(end["text"])
    environment = {key: value for line in looked.of("environment") for key, value in line.items()}
    environment = {k: v for k, v in environment.items() if k not in ("kind", "at")}
    blocked = tuple(({line["setting"]: line["level"]}, line["reason"]) for line in looked.of("level"))
    slots = slots_of(environment, occasion, matrix.env)
    return Machine({**environment, "nanbisect": nanbisect.__version__}, blocked, slots)


@dataclass(frozen=True)
class Looked:
    """What a process that only looks around left: its lines, its end, and the end of its log."""

    lines: tuple[Line, ...]
    ended: Exit
    tail: tuple[str, ...]

    def of(self, kind: str) -> tuple[Line, ...]:
        """Its lines of that kind."""
        return tuple(line for line in self.lines if line["kind"] == kind)

    @property
    def end(self) -> Line | None:
        """How it says that it ended; None if it did not come to that."""
        return next(iter(self.of("end")), None)


def look(launch: Launch, folder: Path, executor: Executor, occasion: Occasion) -> Looked:
    """Run a process that looks around and writes its lines into the diary in `folder`, in the environment of a cell.

    With as many threads as a cell on the CPU gets, so that one server can start both.
    """
    added = {**launch.env, **first_device(occasion, launch.env), **threads(occasion, launch.env)}
    env = child_environment(occasion.environ, set=added)
    task = Task(launch.argv, env, Path(launch.workdir), folder, CHECK_TIMEOUT, warm=launch.warm)
    handle = executor.start(task)
    ended = wait(executor, handle)
    return Looked(tuple(read_lines(folder / DIARY)), ended, read_evidence(folder).log_tail)


def wait(executor: Executor, handle: Handle) -> Exit:
    """The end of an attempt that nothing else runs beside; stopped where the waiting is."""
    try:
        while (ended := executor.poll(handle)) is None:
            executor.wait([handle], POLL)
    except BaseException:
        executor.stop(handle)
        while executor.poll(handle) is None:
            executor.wait([handle], POLL)
        raise
    return ended


# slots ----------------------------------------------------------------------------------------


def slots_of(
    environment: Mapping[str, Any], occasion: Occasion, env: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """One slot a GPU, inside the user's own CUDA_VISIBLE_DEVICES; on a CPU `jobs` of them.

    `env` is what the matrix sets. `environment` tells how many GPUs torch saw under both: CUDA stops
    reading the list at the first word that is no GPU here.
    """
    if str(environment.get("device", "cpu")).startswith("cpu"):
        if occasion.gpus is not None:
            raise UsageError(f"--gpus {occasion.gpus}: this run is on the CPU\ntry: --jobs for cells at once on a CPU")
        return tuple(f"cpu{index}" for index in range(occasion.jobs))
    seen = len(environment.get("gpus", ()))
    visible = {**occasion.environ, **(env or {})}.get(VISIBLE, "")
    there = _words(visible)[: seen or None] or [str(index) for index in range(seen)]
    if occasion.gpus is None:
        return tuple(there)
    wanted = _words(occasion.gpus)
    missing = [name for name in wanted if name not in there]
    if missing or not wanted:
        raise UsageError(
            f"--gpus {occasion.gpus}: no GPU {', '.join(missing)}; there are {', '.join(there)}\n"
            f"try: --gpus {','.join(there)}"
        )
    return tuple(wanted)


def _words(text: str) -> list[str]:
    """`4, 6` as 4 and 6; a GPU named twice is one."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def first_device(occasion: Occasion, env: Mapping[str, str]) -> dict[str, str]:
    """The user's GPUs in such an order that a process which takes the first gets one with memory, if there is one.

    The check of a machine does. Which GPUs are visible stays the same; none where the user hides them all.
    """
    told = {**occasion.environ, **env}.get(VISIBLE)
    visible = [str(index) for index in range(MOST)] if told is None else _words(told)
    seen = occasion.look(visible)
    there = list(seen) if told is None else visible
    wanted = _words(occasion.gpus or "") or there
    short = {slot: slot in seen and shortage(seen[slot], None) is not None for slot in there}
    order = sorted(there, key=lambda slot: (slot not in wanted, short[slot]))
    return {VISIBLE: ",".join(order)} if order != there else {}


def slot_environment(slots: Sequence[str], occasion: Occasion, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """What makes these slots' devices, and nothing else, visible; several CPU slots share the cores.

    `env` is what the launch sets: the number of threads is the user's affair where they say it.
    """
    if not slots[0].startswith("cpu"):
        return {VISIBLE: ",".join(slots)}
    return {VISIBLE: "", **threads(occasion, env)}


def threads(occasion: Occasion, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """A share of the cores for each of several slots, unless the user or the launch says how many threads."""
    if occasion.jobs == 1 or THREADS in {**occasion.environ, **(env or {})}:
        return {}
    return {THREADS: str(max(1, cores() // occasion.jobs))}


def cores() -> int:
    """The cores that this process may use: a container or `taskset` leaves it fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# what is written down --------------------------------------------------------------------------


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
