"""A shim for several attempts, one after another, in one training process that stays (`--keep-model`).

Each attempt has its own folder, log, timeout and exit.json, as with a shim of its own. The process says when
an attempt has ended and lives on; the driver then hands over the next one through the same socket that
tells of the driver's death. Whatever else happens (an end that nobody announced, a timeout, a process left
behind) ends the process as always, and with it this shim. Python 3.9+, standard library and psutil.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanbisect.executors import shim
else:
    shim = sys.modules["_nanbisect_shim"]

NEXT = ("done", "log", "env")  # what comes with each further attempt
ROOM = 1 << 16
OURS = "NANBISECT_"


class SerialShim(shim.Shim):
    """`control` leads to the training process, `done` is closed when an attempt has ended."""

    def __init__(
        self, spec: Mapping[str, Any], environment: Mapping[str, str], *,
        started: tuple[int, int], fds: Mapping[str, int], control: socket.socket, mark: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(spec, fds["life"], environment, started)
        self.how = "kept"
        self.driver = socket.socket(fileno=fds["life"])
        self.done = fds["done"]
        self.control = control
        self.mark = mark
        self.said: dict[str, Any] = {}
        self.order: tuple[dict[str, Any], list[int]] | None = None
        self.gone = False
        self.also[control.fileno()] = self._hear

    def run(self) -> None:
        """Attempt after attempt, while the process stays and the driver has more."""
        self._start()
        while self._attempt() and self._next():
            pass
        self.end_all()

    def over(self) -> bool:
        """Whether the process has told how the attempt ended."""
        return bool(self.said)

    def code(self) -> int | None:
        """What it told, or how it ended itself."""
        told: int | None = self.said.get("code")
        return self.status if told is None else told

    def _attempt(self) -> bool:
        """Wait for the end of one attempt, and write it down. Whether the process can take another."""
        kills = shim.oom_kills()
        self._wait()
        told = bool(self.said) and self.asked is None
        aside = told and "aside" in self.said
        why = "put_aside" if aside else self.asked or "exited"
        strays = {process for process in shim.descendants() if process.pid != self.main} if told else set()
        stays = told and not aside and not strays and self.status is None
        if not stays:
            self.end_all()
        if told:
            self.stragglers = strays
        self._drain()
        struck = any(count > kills.get(name, count) for name, count in shim.oom_kills().items())
        self._write_exit(why, oom_kill=struck and self._was_killed())
        if not stays:
            self._say_no_more()
        os.close(self.done)
        return stays

    def _say_no_more(self) -> None:
        """Close the driver's socket before it hears of the end, lest it hand over another attempt."""
        self.driver.close()
        if self.life is not None:
            os.close(self.life)
            self.life = None

    def _hear(self) -> None:
        """The process says how the attempt ended; nothing when it has gone, which `_reap` will tell."""
        data = self.control.recv(ROOM)
        if data:
            self.said = json.loads(data)
        else:
            del self.also[self.control.fileno()]

    def _next(self) -> bool:
        """Wait for the next attempt and begin it. False when none will come, or the process has ended."""
        self.said = {}
        life, self.life = self.life, None  # an order comes with files, which `_turn` would lose
        self.also[self.driver.fileno()] = self._take_order
        self.order, self.gone = None, False
        while self.order is None and not self.gone:
            self._turn(60)
            self._reap()
            self.gone = self.gone or self.status is not None or self.asked is not None or self.over()
        del self.also[self.driver.fileno()]
        self.life = life
        return self.order is not None and self._begin(*self.order)

    def _take_order(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.driver, ROOM, len(NEXT))
        if data[:1] == b"{":
            self.order = json.loads(data), list(fds)
        else:  # the wish to end an attempt that has ended already, or the driver's own end
            self.gone = True

    def _begin(self, order: dict[str, Any], fds: list[int]) -> bool:
        """Take up the next attempt; its id is written before the process hears of it."""
        files = dict(zip(NEXT, fds))  # noqa: B905 - Python 3.9
        os.dup2(files["log"], 2)
        os.close(files["log"])
        with os.fdopen(files["env"]) as file:
            self.environment = json.load(file)
        self.spec = json.loads(Path(order["spec"]).read_text(encoding="utf-8"))
        os.close(self.log.fd)
        self.log = shim.Log(Path(self.spec["log"]), self.spec["log_limit"])
        self.done = files["done"]
        self.began, self.ended = time.monotonic(), None
        self.mark(order["folder"])
        main = self.main
        if main is None:
            return False
        self._note(main)
        env = {name: value for name, value in self.environment.items() if name.startswith(OURS)}
        with contextlib.suppress(OSError):  # it has just ended; `_wait` sees how
            self.control.send(json.dumps({"words": order["words"], "env": env, "folder": order["folder"]}).encode())
        return True


def attend(spec: Mapping[str, Any], environment: Mapping[str, str], **given: Any) -> None:
    """Run the attempts, and end their process whatever happens."""
    shim.prctl(shim.PR_SET_CHILD_SUBREAPER, 1)
    serial = SerialShim(spec, environment, **given)
    try:
        serial.run()
    except BaseException:
        serial.end_all()
        raise
