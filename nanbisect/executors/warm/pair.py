"""A shim and its training process, forked from a server before their attempt is known.

Forking takes the longer the more a server holds; so it is done while nobody waits. Both then wait, the shim
for the request and its files, the training process for what the shim tells it. What they do from there on is
what they would do if they were forked for it. Where no request comes, both leave with the server, or when the
server wants a pair that knows of later imports. Python 3.9+, standard library and psutil.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Sequence

if TYPE_CHECKING:
    from nanbisect.executors import shim
    from nanbisect.executors.warm import child, preload, serial
else:
    shim = sys.modules["_nanbisect_shim"]
    child = sys.modules["_nanbisect_child"]
    preload = sys.modules["_nanbisect_preload"]
    serial = sys.modules["_nanbisect_serial"]

ORDER = ("life", "done", "log", "env", "echo")  # the files of a request
ROOM = 1 << 16


class Pair(NamedTuple):
    """The shim's process id, and where it takes its request. Its end of that socket closes when all is done."""

    shim: int
    ask: socket.socket

    def hand_over(self, request: bytes, fds: Sequence[int]) -> bool:
        """Give it an attempt; whether there was still somebody to take it."""
        try:
            socket.send_fds(self.ask, [request], list(fds))
        except OSError:
            self.ask.close()
            return False
        return True

    def dismiss(self) -> None:
        """It is not wanted. Returns when both have gone."""
        self.ask.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.shim, 0)


class Forked(NamedTuple):
    """What `fork` gives: the pair in the server, the job in the training process."""

    pair: Optional[Pair] = None
    job: Any = None


def fork(sockets: Sequence[socket.socket], fds: Sequence[int], *, reports: str) -> Forked:
    """Fork both. `sockets`, `fds`: what is the server's alone; `reports`: where a child tells of late imports."""
    ask, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # until there are handlers
    pid = os.fork()
    if pid == 0:
        for one in (ask, *sockets):
            one.close()
        for fd in fds:
            os.close(fd)
        return Forked(job=_shim(theirs, reports))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    theirs.close()
    return Forked(pair=Pair(pid, ask))


def _shim(ask: socket.socket, reports: str) -> Any:
    """Fork the training process, and be its shim to the end. Returns in the former only."""
    try:
        os.setsid()
        read, write = os.pipe()
        start, tell = os.pipe()
        control, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here, main = os.getpid(), os.fork()
        if main == 0:
            for fd in (read, tell, ask.detach(), control.detach()):
                os.close(fd)
            return _training(write, start, orders, reports, here)
        for fd in (write, start, orders.detach()):
            os.close(fd)
        data, files, _, _ = socket.recv_fds(ask, ROOM, len(ORDER))
        if data:
            attempt = {"started": (main, read), "control": control, "tell": tell}
            _attend(json.loads(data), dict(zip(ORDER, files)), ask, attempt)
        else:  # nobody wants it
            os.close(tell)
            os.waitpid(main, 0)
    except BaseException:  # noqa: BLE001 - a fork must never go on as the server
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _attend(request: Dict[str, Any], fds: Dict[str, int], ask: socket.socket, attempt: Dict[str, Any]) -> None:
    """One attempt, or several where the process stays."""
    child.mark(request["folder"])
    os.dup2(fds["log"], 2)
    os.dup2(fds.get("echo", fds["log"]), 1)
    with os.fdopen(fds["env"]) as file:
        environment = json.load(file)
    with open(request["spec"]) as file:
        spec = json.load(file)
    told = {**request, "argv": spec["argv"], "workdir": spec["workdir"], "environment": environment}
    with contextlib.suppress(OSError), os.fdopen(attempt["tell"], "w") as file:  # killed meanwhile: the shim will see
        json.dump(told, file)
    if request["keep"]:
        files = {"started": attempt["started"], "control": attempt["control"], "fds": fds, "mark": child.mark}
        serial.attend(spec, environment, **files)
        return
    attempt["control"].close()
    shim.attend(spec, fds["life"], environment, started=attempt["started"])
    ask.close()
    os.close(fds["done"])  # nobody need wait until this fork's memory is given back


def _training(output: int, start: int, orders: socket.socket, reports: str, parent: int) -> Any:
    """In the training process: everything up to its command. Returns the job, once there is one."""
    os.setsid()
    shim.dying_with(parent)()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)
    with os.fdopen(start) as file:
        data = file.read()
    if not data:
        os._exit(0)
    told = json.loads(data)
    child.mark(told["folder"])
    atexit.register(preload.report, os.path.join(reports, "modules-%d" % os.getpid()), set(sys.modules))
    job = child.Job(told["kind"], told["words"], told["argv"], told["workdir"], told["environment"])
    if told["keep"]:
        return job._replace(orders=orders)
    orders.close()
    return job
