"""One process an attempt: runs the training command, and leaves nothing of it behind.

    python shim.py SPEC.json LIFE_FD < ENVIRONMENT.json

Started by path; stdlib and psutil only, nothing of nanbisect, so that it is there in 0.1 s. LIFE_FD is the
read end of a pipe whose write end only the driver holds: a byte asks for the end, its end of file is the
driver's death (-1: no driver to watch). The spec holds argv, workdir, timeout, grace, echo, log_limit and
the paths log, exit and pids. The environment comes on standard input, because it holds tokens and a run
folder gets shared. A warm start (see `warm`) forks the shim instead, with the main process under way.

How it keeps its promise:
- It is a child subreaper (Linux), so a descendant in a session of its own (torch elastic's workers are)
  becomes its child when the parents die, and "I have no child left" is exact. killpg would miss those.
- TERM, timeout or the driver's death: TERM to every descendant, a grace, KILL until none is left. What
  outlives a main process that ended by itself goes the same way.
- The main process dies with the shim (PR_SET_PDEATHSIG). That signal is sent when the parent *thread*
  ends, so the shim has one thread only, and never waits for anything but its one `select`.
- All output goes through a pipe: only so can log.txt be limited and the output be shown as it comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

SCHEMA = 1
CHUNK = 65536
TICK = 0.05
SETTLE = 0.5
"""Seconds that descendants get to leave by themselves once the main process has (multiprocessing's
resource tracker does, and ignores TERM)."""
GIVE_UP = 60.0
"""Seconds of KILL after which a process is taken to be stuck in the kernel, so that the run can go on."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Shim:
    """One attempt from start to exit.json. `status` is the main process's exit code, -N for signal N."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        life: int,
        environment: Mapping[str, str],
        started: tuple[int, int] | None = None,
    ) -> None:
        self.spec = spec
        self.environment = environment
        self.started = started
        self.life = os.dup(life) if life >= 0 else None  # dup: a small number, as select wants it
        self.log = Log(Path(spec["log"]), spec["log_limit"])
        self.echo = Echo(sys.stdout.fileno() if spec["echo"] else None)
        self.output: int | None = None
        self.main: int | None = None
        self.status: int | None = None
        self.how = "cold" if started is None else "warm"
        self.also: dict[int, Callable[[], None]] = {}  # what else to listen to, and who takes what comes
        self.asked: str | None = None
        self.began = time.monotonic()
        self.ended: float | None = None
        self.told: set[psutil.Process] = set()
        self.stragglers: set[psutil.Process] = set()
        self.sent_kill = False
        self.wakeup = self._listen()  # last: a held back TERM arrives here

    def run(self) -> None:
        """Start, wait for the end or a reason to end it, clean up, tell."""
        root = Path(self.spec.get("root", "/"))
        kills = oom_kills(root)
        if self.asked is None:
            self._start()
        self._wait()
        why = self.asked or "exited"  # both in the same moment: the reading that is never a verdict
        self.end_all()
        self._drain()
        struck = any(count > kills.get(name, count) for name, count in oom_kills(root).items())
        self._write_exit(why, oom_kill=struck and self._was_killed())

    # The main process

    def _start(self) -> None:
        if self.started is not None:
            self._adopt(*self.started)
            return
        argv, workdir = self.spec["argv"], self.spec["workdir"]
        self.output, write = os.pipe()
        os.set_blocking(self.output, False)
        try:
            process = subprocess.Popen(
                argv,
                cwd=workdir,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                start_new_session=True,
                preexec_fn=dying_with(os.getpid()),
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            self.status = 127 if missing else 126
            self._keep(f"nanbisect: can't start {argv[0]!r} in {workdir}: {error}\n".encode())
        else:
            process.returncode = 0  # told nothing: the shim itself reaps all its children
            self._note(process.pid)
        finally:
            os.close(write)

    def _adopt(self, main: int, output: int) -> None:
        """A warm start: the main process is a fork that runs already."""
        self.output = output
        os.set_blocking(output, False)
        self._note(main)
        self._reap()  # it may have ended before anybody listened

    def _note(self, main: int) -> None:
        self.main = main
        pids = {"shim": _identity(os.getpid()), "main": _identity(main)}
        write_json(Path(self.spec["pids"]), {"schema": SCHEMA, "started": self.how, **pids})

    def _wait(self) -> None:
        """Until the main process ended or someone asked for its end."""
        timeout = self.spec["timeout"]
        deadline = math.inf if timeout is None else self.began + timeout
        while self.main is not None and self.status is None and self.asked is None and not self.over():
            left = deadline - time.monotonic()
            if left <= 0:
                self._ask("timed_out")
            self._turn(min(left, 60))
            self._reap()

    def over(self) -> bool:
        """Whether the attempt has ended although its main process lives."""
        return False

    def code(self) -> int | None:
        """How the attempt ended: an exit status, or -N for signal N."""
        return self.status

    def _reap(self) -> bool:
        """Collects the dead and says whether any child is left; with a subreaper: any descendant."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self.main and self.status is None:
                    self.status = os.waitstatus_to_exitcode(status)
                    self.ended = time.monotonic()
        return False

    def _was_killed(self) -> bool:
        """Whether somebody else sent the main process SIGKILL; a shell in between says 137."""
        return self.status in (-signal.SIGKILL, 128 + signal.SIGKILL) and not self.sent_kill

    # Ending

    def _ask(self, why: str) -> None:
        self.asked = self.asked or why

    def end_all(self) -> None:
        """TERM to every descendant, a grace, then KILL until none is left."""
        if self.status is not None:
            self._pump(SETTLE)
        kill_at = time.monotonic() + self.spec["grace"]
        while self._reap() and time.monotonic() < kill_at + GIVE_UP:
            self._send(signal.SIGTERM if time.monotonic() < kill_at else signal.SIGKILL)
            self._pump(TICK)
        if self._reap():
            self._keep(b"nanbisect: some processes of this attempt can't be ended, not even by SIGKILL\n")

    def _send(self, number: signal.Signals) -> None:
        for process in descendants():
            if number == signal.SIGTERM and process in self.told:
                continue
            self.told.add(process)
            if self.status is not None:
                self.stragglers.add(process)
            elif number == signal.SIGKILL:
                self.sent_kill = True
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    # Output, signals and the driver

    def _listen(self) -> int:
        """Installs the signal handlers. Returns what becomes readable when a signal came.

        Handlers, not SIG_IGN, for what is ignored: exec resets a handler, so the training process starts
        with the default. Ctrl-C is the driver's to decide.
        """
        wakeup, write = os.pipe()
        os.set_blocking(wakeup, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self._ask("cancelled"))
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the driver blocked TERM until there is a handler
        return wakeup

    def _turn(self, seconds: float) -> None:
        """Waits for output, a signal or the driver's death, at most so long, and takes what came."""
        output = None if self.echo.full else self.output
        reads = [fd for fd in (self.wakeup, self.life, output, *self.also) if fd is not None]
        ready, writable, _ = select.select(reads, self.echo.waiting, [], max(seconds, 0.0))
        if self.wakeup in ready:
            os.read(self.wakeup, CHUNK)
        if self.life is not None and self.life in ready:  # a byte is the driver's wish, the end its death
            self._ask("cancelled" if os.read(self.life, CHUNK) else "driver_died")
            os.close(self.life)
            self.life = None
        if output in ready:
            self._read()
        for fd in [fd for fd in self.also if fd in ready]:
            self.also[fd]()
        if writable:
            self.echo.push()

    def _pump(self, seconds: float) -> None:
        """Turns for so long, or until no child is left."""
        end = time.monotonic() + seconds
        while self._reap() and (left := end - time.monotonic()) > 0:
            self._turn(left)

    def _read(self) -> bool:
        """Takes one chunk of output; whether there was any."""
        if self.output is None:
            return False
        try:
            data = os.read(self.output, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            os.close(self.output)
            self.output = None
        self._keep(data)
        return bool(data)

    def _keep(self, data: bytes) -> None:
        self.log.write(data)
        self.echo.take(data)

    def _drain(self) -> None:
        """Takes what the dead left in the pipe. Not until its end of file: someone may have it open still."""
        end = time.monotonic() + 2
        while self._read() and time.monotonic() < end:
            pass
        while self.echo.waiting and time.monotonic() < end:
            self._turn(TICK)

    def _write_exit(self, why: str, *, oom_kill: bool) -> None:
        status = self.code()
        record = {
            "schema": SCHEMA,
            "why": why,
            "started": self.how,
            "code": status if status is not None and status >= 0 else None,
            "signal": -status if status is not None and status < 0 else None,
            "seconds": round((self.ended or time.monotonic()) - self.began, 3),
            "oom_kill": oom_kill,
            "stragglers": len(self.stragglers),
        }
        write_json(Path(self.spec["exit"]), record)


class Log:
    """log.txt: all the output while it fits; else its first half, a note, and its latest part.

    Both ends matter: the start says what ran, the end why it died. Tail and note together take between a
    quarter and a half of the limit. A full disk costs output, never the attempt.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self.limit = limit
        self.note = b""
        self.left_out = 0

    def write(self, data: bytes) -> None:
        """Appends, and cuts when the limit is passed."""
        with contextlib.suppress(OSError):
            _write_all(self.fd, data)
            size = os.fstat(self.fd).st_size
            if size > self.limit:
                self._cut(size)

    def _cut(self, size: int) -> None:
        head, quarter = self.limit // 2, self.limit // 4
        after_note = head + len(self.note)
        tail = os.pread(self.fd, quarter, max(size - quarter, after_note))
        tail = tail[tail.find(b"\n", 0, 4096) + 1 :]
        self.left_out += size - after_note - len(tail)
        note = f"[nanbisect left out {self.left_out} bytes here: the limit of this log is {self.limit}]"
        self.note = f"\n{note}\n".encode()
        os.ftruncate(self.fd, head)
        _write_all(self.fd, self.note + tail)


class Echo:
    """A copy of the output for someone who watches. A slow or vanished reader never blocks the shim.

    `fd` is shared with the driver, so it can't be made non-blocking; a write of at most PIPE_BUF bytes to
    what select calls writable does not block.
    """

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self.pending = bytearray()

    @property
    def waiting(self) -> list[int]:
        """What to wait for until more can be written."""
        return [self.fd] if self.fd is not None and self.pending else []

    @property
    def full(self) -> bool:
        """Whether to read no more until the reader has caught up."""
        return len(self.pending) >= CHUNK

    def take(self, data: bytes) -> None:
        """Queues a chunk."""
        if self.fd is not None:
            self.pending += data

    def push(self) -> None:
        """Writes a piece of the queue; forgets the reader when it is gone."""
        if self.fd is None:
            return
        try:
            written = os.write(self.fd, self.pending[: select.PIPE_BUF])
            del self.pending[:written]
        except OSError:
            self.fd = None
            self.pending.clear()


def descendants() -> Iterator[psutil.Process]:
    """All living descendants of this process."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def prctl(option: int, value: int) -> None:
    """Linux's prctl; nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, *(ctypes.c_ulong(number) for number in (value, 0, 0, 0)))


def dying_with(parent: int) -> Callable[[], None]:
    """What the main process does before exec so that the kernel ends it with the shim."""

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the shim died before the line above
            os.kill(os.getpid(), signal.SIGKILL)

    return arrange


def oom_kills(root: Path = Path("/")) -> dict[str, int]:
    """How often the OOM killer struck: the machine's counter and the cgroup's, where there is one."""
    counts = {}
    for path in (root / "proc/vmstat", *_cgroup_counters(root)):
        with contextlib.suppress(OSError, ValueError):
            rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
            counts.update({str(path): int(row[1]) for row in rows if row[:1] == ["oom_kill"]})
    return counts


def _cgroup_counters(root: Path) -> Iterator[Path]:
    """memory.events (v2) and memory.oom_control (v1) of this process's cgroup.

    In a container the path may be the host's and the mount show only the container's own group: so the
    mount's root, too.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for base in (mount, mount / "unified"):
                yield base / path.lstrip("/") / "memory.events"
                yield base / "memory.events"
        elif "memory" in controllers.split(","):
            yield mount / "memory" / path.lstrip("/") / "memory.oom_control"
            yield mount / "memory" / "memory.oom_control"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes so that a reader, or a crash at any moment, sees the whole file or none."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _identity(pid: int) -> dict[str, float]:
    """A process id alone may be another process tomorrow."""
    return {"pid": pid, "created": psutil.Process(pid).create_time()}


def attend(
    spec: Mapping[str, Any], life: int, environment: Mapping[str, str], started: tuple[int, int] | None = None
) -> None:
    """Runs the attempt, and ends its processes whatever happens. `started`: (pid, output) of a warm start."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    shim = Shim(spec, life, environment, started)
    try:
        shim.run()
    except BaseException:
        shim.end_all()
        raise


def main(argv: list[str]) -> None:
    """Reads the arguments and attends to the attempt."""
    attend(json.loads(Path(argv[1]).read_text(encoding="utf-8")), int(argv[2]), json.load(sys.stdin))


if __name__ == "__main__":
    main(sys.argv)
