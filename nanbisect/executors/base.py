"""The executor protocol: start an attempt, poll it, stop it, say what it is. And the values in and out.

The driver never asks which executor it has. An executor knows nothing of cells, matrices or outcomes:
it gets a command and a folder, and tells how the main process of that command ended. What the command
found out is in the files it wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

SCHEMA = 1

LOG_FILE = "log.txt"
EXIT_FILE = "exit.json"
PIDS_FILE = "pids.json"
SPEC_FILE = "spec.json"

MARKER = "NANBISECT_ATTEMPT"
"""The variable that every process of an attempt carries; its value is the attempt's resolved folder."""

Why = Literal["exited", "timed_out", "cancelled", "driver_died", "lost", "put_aside"]
"""Why an attempt ended. Only `exited` means that its main process, or its share of a kept one, ended by itself.

`put_aside`: its kept process found that it no longer had what was loaded, so the attempt is none.
"""


@dataclass(frozen=True)
class WarmStart:
    """How a command may start from a process that has imported its libraries already.

    `python` is the interpreter as the command would find it, `words` what follows it: a script and its
    arguments, a module and its arguments, or the arguments of `accelerate launch`. `modules` are imported
    beforehand, and what the files in `scripts` import at their top as far as it is a known library.
    `prepare`: (module, argument), whose `prepare(argument)` is called before the fork, once a server. `ours`:
    all that is imported is known to bear it, so that nobody need compare. `keep`: attempts with the same text
    may follow one another in one process of a slot, which keeps its model; empty for a process of its own.
    """

    python: str
    kind: Literal["script", "module", "accelerate"]
    words: tuple[str, ...]
    modules: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    prepare: tuple[str, str] | None = None
    ours: bool = False
    keep: str = ""


@dataclass(frozen=True)
class Task:
    """One attempt to execute. `env` is the complete environment of the child, nothing is inherited.

    `folder` exists and is this attempt's alone. `timeout` is in seconds, None for no limit. `slot` names
    the slots given to the attempt ("cpu", or the indices of GPUs); who fills `env` makes them visible.
    `warm` says how the same command may start faster; None where it must start as it is.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: Path
    folder: Path
    timeout: float | None = None
    slot: tuple[str, ...] = ()
    warm: WarmStart | None = None


@dataclass(frozen=True)
class Exit:
    """How the main process of an attempt ended.

    `code` is the exit status, or `signal` the number of the signal that ended it; both are None when
    nobody saw the end. A code means little unless `why` is `exited`: a training that was told to stop may
    still exit with 0. `seconds` is the time of the main process. `oom_kill`: the kernel's OOM killer
    struck and the main process was killed. `stragglers` counts the descendants that had to be ended after
    the main process had ended. `started` is cold, warm, or kept (in a process that trained others before, or
    may have); empty where nobody told.
    """

    why: Why
    code: int | None = None
    signal: int | None = None
    seconds: float = 0.0
    oom_kill: bool = False
    stragglers: int = 0
    started: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Exit:
        """The inverse of `to_json`. Raises ValueError for another schema or a torn record."""
        values = dict(data)
        if values.pop("schema", None) != SCHEMA:
            raise ValueError(f"exit schema is not {SCHEMA}")
        if values.get("why") not in get_args(Why):
            raise ValueError(f"no such way to end: {values.get('why')!r}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"not an exit: {error}") from error


def read_exit(folder: Path) -> Exit | None:
    """The exit an attempt's folder holds; None when it is missing or torn."""
    try:
        data = json.loads((folder / EXIT_FILE).read_text(encoding="utf-8"))
        return Exit.from_json(data) if isinstance(data, dict) else None
    except (OSError, ValueError):
        return None


def started_as(folder: Path) -> str:
    """How an attempt was started, as its shim noted it then; empty for one that never was."""
    try:
        return str(json.loads((folder / PIDS_FILE).read_text(encoding="utf-8"))["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@dataclass(frozen=True, eq=False)
class Handle:
    """A started attempt. `name` is what a person would look for: a process id, a job number."""

    task: Task
    name: str


class Executor(Protocol):
    """Where attempts run. Not thread-safe: one driver thread calls it."""

    def start(self, task: Task) -> Handle:
        """Starts the attempt and returns at once. Raises ExecutorError when the machine refuses.

        A command that can't be started is not an error here: the attempt ends with code 127 or 126.
        """
        ...

    def poll(self, handle: Handle) -> Exit | None:
        """How the attempt ended, or None while anything of it may still run. Stays the same once told."""
        ...

    def wait(self, handles: Sequence[Handle], seconds: float) -> None:
        """Returns once one of these attempts may have ended, and after so many seconds at the latest."""
        ...

    def stop(self, handle: Handle) -> None:
        """Asks an attempt to stop, and returns at once; a later poll tells. Harmless when it has ended."""
        ...

    def recover(self, run: Path) -> int:
        """Ends what a dead driver left behind below a run folder. Returns how many processes or jobs."""
        ...

    def describe(self) -> str:
        """Where attempts run, for the log and the report."""
        ...

    def remarks(self) -> list[str]:
        """What a user should know of how attempts start, each once; harmless to their outcomes."""
        ...

    def close(self) -> None:
        """Stops everything and waits until it is gone."""
        ...


DROPPED_PREFIXES = (
    "ACCELERATE_",
    "FSDP_",
    "MEGATRON_LM_",
    "NANBISECT_",
    "OMPI_COMM_WORLD_",
    "MV2_COMM_WORLD_",
    "PARALLELISM_CONFIG_",
    "TORCHELASTIC_",
)
DROPPED = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "FORK_LAUNCHED"),
    )
)


def child_environment(base: Mapping[str, str], *, set: Mapping[str, str]) -> dict[str, str]:
    """The environment of a training process: the user's, less what changes training behind one's back.

    A leaked variable is a wrong verdict (ACCELERATE_MIXED_PRECISION turns `bf16=False` into bf16, see
    huggingface/trl#7321; the ranks of a launcher around nanbisect make a single process wait for peers).
    What is dropped is what accelerate 1.15 and torch elastic read. `set` has the last word.
    """
    kept = {
        name: value for name, value in base.items() if name not in DROPPED and not name.startswith(DROPPED_PREFIXES)
    }
    return {"WANDB_MODE": "disabled", **kept, "PYTHONUNBUFFERED": "1", **set}
