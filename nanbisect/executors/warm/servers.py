"""The driver's side of warm starts: which server an attempt belongs to, and what becomes of it there."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from nanbisect.errors import ExecutorError
from nanbisect.executors.base import MARKER, Task, WarmStart
from nanbisect.executors.warm.child import FREE_NAMES

SERVER = Path(__file__).with_name("server.py")
ROOM = 4096  # bytes of the marker that a fork writes its own folder over
MOST = 4  # servers at once: each holds its libraries in memory
Key = tuple[Any, ...]


def key_of(task: Task) -> Key:
    """What a server and its children must have in common: all but what is read when training starts."""
    warm = task.warm
    assert warm is not None
    env = {
        name: value for name, value in task.env.items() if name not in FREE_NAMES and not name.startswith("NANBISECT_")
    }
    script = warm.words[0] if warm.kind != "accelerate" else ""
    place = (str(task.workdir), warm.python, warm.kind, script)
    return (*place, warm.modules, warm.scripts, tuple(sorted(env.items())))


class Servers:
    """The servers of one run. `remarks` takes what a user should know, once each."""

    def __init__(self) -> None:
        self.servers: dict[Key, Server] = {}
        self.remarks: list[str] = []

    def server(self, task: Task) -> Server | None:
        """The server for an attempt, started if need be; None where it must start cold."""
        if task.warm is None or sys.platform != "linux":
            return None
        key = key_of(task)
        if key not in self.servers:
            if len(self.servers) >= MOST:
                return None
            self.servers[key] = Server(task, task.warm)
        server = self.servers[key]
        server.pump()
        return server if server.why is None else None

    def pump(self) -> None:
        """Take what the servers say."""
        for server in self.servers.values():
            server.pump()
            if server.why is not None and not server.told:
                server.told = True
                self.remarks.append(f"attempts start cold from here on: {server.why}")

    def close(self) -> None:
        """End the servers: each leaves when the driver's end of its socket is closed."""
        for server in self.servers.values():
            server.close()


class Server:
    """One server process. `why` says why it takes no attempts (any more); None while it does or may."""

    def __init__(self, task: Task, warm: WarmStart) -> None:
        self.why: str | None = None
        self.told = False
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self.folder = tempfile.TemporaryDirectory(prefix="nanbisect-warm-", ignore_cleanup_errors=True)
        self.born: dict[str, int] = {}
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        try:
            self.process = self._start(task, warm, theirs)
        except OSError as error:
            raise ExecutorError(f"can't start {warm.python}: {error}\ntry: --cold") from error
        finally:
            theirs.close()

    def _start(self, task: Task, warm: WarmStart, theirs: socket.socket) -> subprocess.Popen[bytes]:
        home = task.folder.resolve().parent / "warm"
        plan = {
            "kind": warm.kind,
            "words": list(warm.words),
            "modules": list(warm.modules),
            "scripts": list(warm.scripts),
            "psutil": str(Path(psutil.__file__).parent.parent),
            "folder": self.folder.name,
            "skip": [],
            "careful": False,  # look for threads after each library, to find the one that starts them
            "learn": True,
        }
        ours = {MARKER: str(home).ljust(ROOM, "/"), "NANBISECT_WARM": json.dumps(plan)}
        if "NANBISECT_PROBE" in task.env:
            ours["NANBISECT_PROBE"] = self.folder.name  # its own probe leaves a line there; nobody reads it
        return subprocess.Popen(
            [warm.python, str(SERVER), str(theirs.fileno())],
            cwd=task.workdir,
            env={**_without_ours(task.env), **ours},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def ask(self, task: Task, spec: Path, fds: Sequence[int]) -> bool:
        """Ask for an attempt; whether the request got on its way."""
        assert task.warm is not None
        folder = str(task.folder.resolve())
        warm = task.warm
        request = {
            "folder": folder,
            "spec": str(spec),
            "kind": warm.kind,
            "words": list(warm.words),
            "prepare": warm.prepare,
            "keep": bool(warm.keep),
        }
        self.born.pop(folder, None)
        try:
            socket.send_fds(self.socket, [json.dumps(request).encode()], list(fds))
        except OSError as error:
            self._gone(f"the process that starts them took no request ({error})")
            return False
        return True

    def pump(self) -> None:
        """Take what the server says: that it is ready, that it can't be, which shims it has started."""
        while self.why is None:
            try:
                data = self._receive()
            except BlockingIOError:
                return
            said: dict[str, Any] = json.loads(data) if data else {"unfit": self._last_words()}
            if "unfit" in said:
                self._gone(said["unfit"])
            elif "pid" in said:
                self.born[said["folder"]] = said["pid"]

    def _receive(self) -> bytes:
        """The next message; nothing when there is no more to come."""
        try:
            return self.socket.recv(1 << 16)
        except ConnectionResetError:  # it left without reading our requests; what it said before is still here
            return self.socket.recv(1 << 16)

    def _last_words(self) -> str:
        """How it ended, with the last line that it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        size = os.fstat(self.log.fileno()).st_size
        lines = os.pread(self.log.fileno(), 2000, max(0, size - 2000)).decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return f"the process that starts them {how}" + (f": {last}" if last and code != 0 else "")

    def _gone(self, why: str) -> None:
        self.why = why
        self.socket.close()

    def close(self) -> None:
        """Let it leave, and see to it."""
        self.socket.close()
        self.why = self.why or "the run is over"
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.folder.cleanup()


@dataclass
class PipedShim:
    """An attempt in a process that this one did not start: `done` ends when nothing of the attempt is left to run."""

    folder: Path
    done: int

    @property
    def pid(self) -> int | None:
        """Its shim's process id, once that is known."""
        raise NotImplementedError

    @property
    def gone(self) -> int:
        """What can be read when it has ended."""
        return self.done

    def ended(self) -> bool:
        """Whether it has gone, or was never started."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.done, 1) == b""
        return False

    def kill(self) -> None:
        """SIGKILL."""
        pid = self.pid
        if pid is not None and not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def forget(self) -> None:
        """It has ended."""
        os.close(self.done)


@dataclass
class WarmShim(PipedShim):
    """A shim that a server was asked to start."""

    server: Server

    @property
    def pid(self) -> int | None:
        """Its process id, once the server has said it."""
        self.server.pump()
        return self.server.born.get(str(self.folder))


def _without_ours(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith("NANBISECT_")}
