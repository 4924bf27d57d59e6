"""Attempts as processes of this machine: one shim an attempt. Slots are `schedule`'s affair, not ours.

The driver does not become a subreaper, although that would hand it the orphans of a killed shim. It would
have to reap children it never started, with a `waitpid(-1)` that takes the exit status from every other
`subprocess` user in the process, and nanbisect is also a library in somebody's notebook. The shim is the
subreaper; should it be killed, `sweep` finds the orphans by the marker in their environment, which works
for a driver that died, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from nanbisect.errors import ExecutorError
from nanbisect.executors.base import (
    EXIT_FILE,
    LOG_FILE,
    MARKER,
    PIDS_FILE,
    SPEC_FILE,
    Exit,
    Handle,
    Task,
    read_exit,
    started_as,
)
from nanbisect.executors.warm.keepers import Keeper, Keepers, KeptShim, keep_key
from nanbisect.executors.warm.servers import Servers, WarmShim

SHIM = Path(__file__).with_name("shim.py")
LOG_LIMIT = 64 * 2**20
GRACE = 3.0


class _Shim(Protocol):
    """A shim's process, however it was started."""

    @property
    def pid(self) -> int | None: ...
    @property
    def gone(self) -> int | None: ...  # a descriptor that can be read when it has ended
    def ended(self) -> bool: ...
    def kill(self) -> None: ...
    def forget(self) -> None: ...


@dataclass
class _ColdShim:
    """A shim that this process has started itself."""

    process: subprocess.Popen[bytes]
    gone: int | None = None

    def __post_init__(self) -> None:
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # an old kernel, or none left
                self.gone = os.pidfd_open(self.process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def ended(self) -> bool:
        """Whether it has gone."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def forget(self) -> None:
        """It has ended."""
        if self.gone is not None:
            os.close(self.gone)


@dataclass
class _Attempt:
    """A shim with the end of its life pipe that this process holds."""

    task: Task
    folder: Path
    shim: _Shim
    life: int
    began: float
    exit: Exit | None = None


class LocalExecutor:
    """Runs attempts as processes of this machine.

    `echo` also shows their output on this process's standard output; `grace` is the time between TERM and
    KILL in seconds; `log_limit` the size of an attempt's log.txt in bytes. With `warm`, an attempt whose
    task allows it starts from a process that has imported its libraries (see `warm`), the others cold.
    """

    def __init__(
        self, *, echo: bool = False, grace: float = GRACE, log_limit: int = LOG_LIMIT, warm: bool = False
    ) -> None:
        self.echo = echo
        self.grace = grace
        self.log_limit = log_limit
        self.warm = warm
        self._servers = Servers()
        self._keepers = Keepers()
        self._attempts: dict[Handle, _Attempt] = {}

    def start(self, task: Task) -> Handle:
        """Starts a shim, which starts the command. Raises ExecutorError when the machine refuses."""
        folder = task.folder.resolve()
        try:
            (folder / EXIT_FILE).unlink(missing_ok=True)
            (folder / SPEC_FILE).write_text(json.dumps(self._spec(task, folder)), encoding="utf-8")
            attempt = self._kept(task, folder) or (self._warm(task, folder) if self.warm else None)
            attempt = attempt or self._cold(task, folder)
        except OSError as error:
            raise ExecutorError(
                f"can't start a process for {folder}: {error}. "
                "Free memory, disk or processes, or run fewer attempts at once (--jobs)."
            ) from error
        pid = attempt.shim.pid
        handle = Handle(task, f"process {pid}" if pid else "a process started warm")
        self._attempts[handle] = attempt
        return handle

    def poll(self, handle: Handle) -> Exit | None:
        """None while the shim lives. A shim that left no exit was killed: then its orphans are ended here.

        A warm start that never began, because its server could not or died, is made again cold.
        """
        attempt = self._attempts[handle]
        self._servers.pump()
        if attempt.exit is None and attempt.shim.ended():
            os.close(attempt.life)
            exit, began = read_exit(attempt.folder), attempt.shim.pid is not None
            attempt.shim.forget()
            if exit is None and not began:
                self._attempts[handle] = self._cold(attempt.task, attempt.folder)
                return None
            if exit is None or sys.platform != "linux":  # without a subreaper only the marker finds them all
                sweep(attempt.folder)
            seconds, how = round(time.monotonic() - attempt.began, 3), started_as(attempt.folder)
            attempt.exit = exit or Exit("lost", seconds=seconds, started=how)
        return attempt.exit

    def wait(self, handles: Sequence[Handle], seconds: float) -> None:
        """Sleeps until the shim of one has gone; where nothing tells of that, all the time."""
        poll = select.poll()
        for handle in handles:
            attempt = self._attempts[handle]
            if attempt.exit is not None:
                return
            if attempt.shim.gone is not None:
                poll.register(attempt.shim.gone, select.POLLIN)
        poll.poll(seconds * 1000)

    def stop(self, handle: Handle) -> None:
        """Asks the shim, which ends all and then itself within the grace and a little."""
        attempt = self._attempts[handle]
        if attempt.exit is None:
            with contextlib.suppress(OSError):  # it has gone
                os.write(attempt.life, b".")

    def remarks(self) -> list[str]:
        """What a user should know of how attempts start; each once."""
        said, self._servers.remarks = self._servers.remarks, []
        return said

    def recover(self, run: Path) -> int:
        """Ends what a dead driver left behind below a run folder. Returns how many processes."""
        return sweep(run)

    def describe(self) -> str:
        """Where attempts run."""
        return "processes on this machine"

    def close(self) -> None:
        """Stops all attempts, waits, and kills those that don't."""
        for handle in self._attempts:
            self.stop(handle)
        deadline = time.monotonic() + self.grace + 5
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.02)
        for handle in self._running():
            self._attempts[handle].shim.kill()
            while self.poll(handle) is None:
                time.sleep(0.02)
        self._keepers.close()
        self._servers.close()

    def _running(self) -> list[Handle]:
        return [handle for handle in self._attempts if self.poll(handle) is None]

    def _spec(self, task: Task, folder: Path) -> dict[str, Any]:
        return {
            "argv": list(task.argv),
            "workdir": str(task.workdir.resolve()),
            "timeout": task.timeout,
            "grace": self.grace,
            "echo": self.echo,
            "log_limit": self.log_limit,
            "log": str(folder / LOG_FILE),
            "exit": str(folder / EXIT_FILE),
            "pids": str(folder / PIDS_FILE),
        }

    def _cold(self, task: Task, folder: Path) -> _Attempt:
        """The shim, in this process's environment (it needs our psutil) and a session of its own."""
        read, life = os.pipe()  # neither is inherited, unless by name: so no shim holds another's life open
        try:
            with (folder / LOG_FILE).open("ab") as log, _written(task, folder) as environment, _holding_signals():
                process = subprocess.Popen(
                    [sys.executable, str(SHIM), str(folder / SPEC_FILE), str(read)],
                    env={**os.environ, MARKER: str(folder)},
                    stdin=environment,
                    stdout=None if self.echo else subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=[read],
                    start_new_session=True,
                )
        except OSError:
            os.close(life)
            raise
        finally:
            os.close(read)
        return _Attempt(task, folder, _ColdShim(process), life, time.monotonic())

    def _warm(self, task: Task, folder: Path) -> _Attempt | None:
        """A shim that a server forks, with the training process; None where the attempt must start cold."""
        server, key = self._servers.server(task), keep_key(task)
        if server is None:
            return None
        keeper = Keeper(key, server) if key is not None else None
        read, life = (keeper.theirs.detach(), keeper.life()) if keeper else os.pipe()
        done, end = _done_pipe()
        try:
            with (folder / LOG_FILE).open("ab") as log, _written(task, folder) as environment:
                echo = [sys.stdout.fileno()] if self.echo else []
                sent = server.ask(task, folder / SPEC_FILE, [read, end, log.fileno(), environment.fileno(), *echo])
        finally:
            os.close(read)
            os.close(end)
        if not sent:
            os.close(life)
            os.close(done)
            return None
        if keeper is not None:
            keeper.folder = folder
            self._keepers.of_slot[task.slot] = keeper
        return _Attempt(task, folder, WarmShim(folder, done, server), life, time.monotonic())

    def _kept(self, task: Task, folder: Path) -> _Attempt | None:
        """A further attempt in the process that stays on its slot; None where there is none that can take it."""
        keeper = self._keepers.find(task)
        if keeper is None:
            return None
        (folder / PIDS_FILE).unlink(missing_ok=True)
        done, end = _done_pipe()
        try:
            with (folder / LOG_FILE).open("ab") as log, _written(task, folder) as environment:
                sent = keeper.ask(task, folder / SPEC_FILE, [end, log.fileno(), environment.fileno()])
        finally:
            os.close(end)
        if not sent:
            os.close(done)
            return None
        return _Attempt(task, folder, KeptShim(folder, done), keeper.life(), time.monotonic())


def _done_pipe() -> tuple[int, int]:
    """(what the driver looks at, what the shim closes at the end)."""
    done, end = os.pipe()
    os.set_blocking(done, False)
    return done, end


def _written(task: Task, folder: Path) -> IO[str]:
    """The child's environment, in an unnamed file: no token touches the run folder, none fills a pipe."""
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the caller closes it
    json.dump({**task.env, MARKER: str(folder)}, file)
    file.seek(0)
    return file


@contextlib.contextmanager
def _holding_signals() -> Iterator[None]:
    """What is started inside starts with TERM and INT held back, until it has handlers and lets them in."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def sweep(folder: Path, *, timeout: float = 10.0) -> int:
    """Kills every process of this user that belongs to the attempt in `folder`, or to any attempt below it.

    Returns how many, once they are gone (or after `timeout` seconds: some are stuck in the kernel). Not for
    a folder whose driver lives. A process that wiped its environment and lost its parents isn't found.
    """
    killed: set[psutil.Process] = set()
    end = time.monotonic() + timeout
    while found := _marked(folder.resolve()):  # again, since they may fork meanwhile
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        killed |= found
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return len(killed)


def _marked(folder: Path) -> set[psutil.Process]:
    """The living processes with the marker, and their descendants; never this process or its ancestors."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real == os.getuid() and _belongs(process, folder):
                found |= {process, *process.children(recursive=True)}
    this = psutil.Process()
    return {process for process in found - {this, *this.parents()} if _lives(process)}


def _belongs(process: psutil.Process, folder: Path) -> bool:
    marker = process.environ().get(MARKER)
    return marker is not None and Path(marker).is_relative_to(folder)


def _lives(process: psutil.Process) -> bool:
    """A zombie holds nothing but its number, and in a container nobody may ever collect it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
