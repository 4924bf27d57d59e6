"""The driver's side of kept processes: one a slot, which trains attempts of one kind one after another."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from nanbisect.executors.base import PIDS_FILE, Task
from nanbisect.executors.warm.servers import Key, PipedShim, Server, key_of

PATIENCE = 8.0  # seconds for a process to leave that was asked to; then it is killed


def keep_key(task: Task) -> Key | None:
    """What attempts of one kept process have in common; None for one that wants a process of its own."""
    return (*key_of(task), task.warm.keep) if task.warm is not None and task.warm.keep else None


class Keeper:
    """A process that stays, with its shim. `server` has forked it; without one nobody can start the next."""

    def __init__(self, key: Key, server: Server) -> None:
        self.key, self.server = key, server
        self.socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.folder: Path | None = None  # of the attempt that it took last

    def alive(self) -> bool:
        """Whether it may take another attempt."""
        if self.server.why is not None:
            return False
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def life(self) -> int:
        """A file that an attempt can be ended through."""
        return os.dup(self.socket.fileno())

    def ask(self, task: Task, spec: Path, fds: Sequence[int]) -> bool:
        """Hand over a further attempt; whether the request got on its way."""
        assert task.warm is not None
        self.folder = task.folder.resolve()
        request = {"folder": str(self.folder), "spec": str(spec), "words": list(task.warm.words)}
        try:
            socket.send_fds(self.socket, [json.dumps(request).encode()], list(fds))
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Let it leave, and wait until it has: what it holds of a GPU is free then."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        if not self._gone(PATIENCE) and (shim := shim_of(self.folder)) is not None:
            with contextlib.suppress(psutil.Error):
                psutil.Process(shim).kill()  # its main process dies with it
            self._gone(PATIENCE)
        self.socket.close()

    def _gone(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.socket], [], [], left)[0]:
                with contextlib.suppress(OSError):
                    if self.socket.recv(1 << 10):
                        continue
                return True
        return False


class Keepers:
    """The kept processes of one run, by slot."""

    def __init__(self) -> None:
        self.of_slot: dict[tuple[str, ...], Keeper] = {}

    def find(self, task: Task) -> Keeper | None:
        """The one that can take this attempt. One of another kind on the same slots leaves, for its memory's sake."""
        keeper = self.of_slot.get(task.slot)
        if keeper is None or (keeper.key == keep_key(task) and keeper.alive()):
            return keeper
        del self.of_slot[task.slot]
        keeper.end()
        return None

    def close(self) -> None:
        """End them all."""
        for keeper in self.of_slot.values():
            keeper.end()
        self.of_slot.clear()


class KeptShim(PipedShim):
    """A further attempt in a process that stays."""

    @property
    def pid(self) -> int | None:
        """Its shim's process id, once the attempt has begun."""
        return shim_of(self.folder)


def shim_of(folder: Path | None) -> int | None:
    """The shim that has begun an attempt; None before."""
    if folder is None:
        return None
    try:
        return int(json.loads((folder / PIDS_FILE).read_text(encoding="utf-8"))["shim"]["pid"])
    except (OSError, ValueError, KeyError):
        return None
