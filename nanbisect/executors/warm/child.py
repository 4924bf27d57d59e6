"""Turns a fork of the server into the process that a cold start would give, and runs the command in it.

Python 3.9+, standard library only.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import random
import runpy
import signal
import socket
import sys
from types import ModuleType, TracebackType
from typing import Any, Dict, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Type

PROBE = "_nanbisect_probe"
MARKER = "NANBISECT_ATTEMPT"
FREE = ("NANBISECT_", "ACCELERATE_")
FREE_NAMES = frozenset(("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT"))
"""Variables that may differ between a server and its children: read when training starts, not at import."""


class Job(NamedTuple):
    """What a child has to run. `kind`: script, module or accelerate; `words` follow the interpreter.

    `argv` is the command as it is started cold, in case that this fork can't stand for it. `orders`: where
    further attempts come from, if this process is to stay.
    """

    kind: str
    words: List[str]
    argv: List[str]
    workdir: str
    env: Dict[str, str]
    orders: Optional[socket.socket] = None


class Orders:
    """A process that stays: it says how an attempt ended, and hears of the next one. `first`: the environment then."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.first = dict(os.environ)

    def ended(self, code: int) -> None:
        """The attempt has ended, with this exit code, and the process can take another."""
        self.control.send(json.dumps({"code": code}).encode())

    def put_aside(self, why: str) -> None:
        """This process is no longer what it must be, and the attempt is none. Its shim ends it."""
        self.control.send(json.dumps({"aside": why}).encode())

    def next(self) -> Optional[List[str]]:
        """Arguments of the next attempt, once its environment and folder are set; None when there is none."""
        data = self.control.recv(1 << 16)
        if not data:
            return None
        order = json.loads(data)
        mark(order["folder"])
        os.environ.clear()
        os.environ.update({**self.first, **order["env"]})
        words: List[str] = order["words"]
        return words[1:]


orders: Optional[Orders] = None
"""Set in a process that stays."""


def mark(folder: str) -> None:
    """Write the attempt's folder over the marker that this process was started with.

    What others see of a process's environment is the memory it got at its start; a fork that changes
    `os.environ` still shows its parent's. The server's marker is padded for this.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end: fields 50 and 51 of proc(5)
    import ctypes

    memory = ctypes.string_at(start, end - start)
    at = memory.find(MARKER.encode() + b"=")
    size = memory.find(b"\0", at) - at - len(MARKER) - 1
    value = folder.encode("utf-8", "surrogateescape")
    if at < 0 or len(value) > size or (at and memory[at - 1]):
        raise OSError("no room for the marker")
    ctypes.memmove(start + at + len(MARKER) + 1, value + b"/" * (size - len(value)), size)


def settle(job: Job, server: Mapping[str, str]) -> None:
    """Environment, folder, signals and random state as in a new process.

    `server` is what the server was started with: what its imports added to it, they would have added here.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the driver runs in the background of a shell
    added = {name: value for name, value in os.environ.items() if name not in server}
    os.environ.clear()
    os.environ.update({**added, **job.env})
    try:
        os.chdir(job.workdir)
    except OSError as error:
        sys.stderr.write("nanbisect: can't start %r in %s: %s\n" % (job.argv[0], job.workdir, error))
        os._exit(126)
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    importlib.invalidate_caches()
    if job.orders is not None:
        global orders
        orders = Orders(job.orders)


def differs(env: Mapping[str, str], server: Mapping[str, str]) -> List[str]:
    """Names of variables that a library may have read in the server, and that are otherwise here."""
    names = {name for name in (*env, *server) if env.get(name) != server.get(name)}
    return sorted(name for name in names if name not in FREE_NAMES and not name.startswith(FREE))


def cold(job: Job) -> NoReturn:
    """Become the command itself, as if there had been no server."""
    try:
        os.execvpe(job.argv[0], job.argv, job.env)
    except OSError as error:
        sys.stderr.write("nanbisect: can't start %r in %s: %s\n" % (job.argv[0], job.workdir, error))
        os._exit(127)


def move_probe() -> None:
    """The probe was installed with torch, in the server; from here on it writes this attempt's events."""
    probe: Any = sys.modules.get(PROBE)
    folder = os.environ.get("NANBISECT_PROBE")
    if probe is not None and folder:
        probe.moved(folder)


def run(words: Sequence[str], *, module: bool) -> None:
    """Run `python words` or `python -m words` as `__main__`. Raises what it raises: the interpreter tells."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    sys.excepthook = _without_our_frames
    sys.orig_argv = [sys.executable, *(["-m"] if module else []), *words]
    if module:
        sys.argv = ["-m", *words[1:]]
        _first_on_path(os.getcwd())
        move_probe()
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]  # what `python -m` calls
    else:
        sys.argv = list(words)
        _first_on_path(os.path.dirname(os.path.realpath(words[0])))
        move_probe()
        _run_script(words[0], main)


def _first_on_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _run_script(script: str, main: ModuleType) -> None:
    path = os.path.join(os.getcwd(), script)
    try:
        with open(script, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(
            "%s: can't open file %r: [Errno %s] %s\n" % (sys.executable, path, error.errno, error.strerror)
        )
        sys.exit(2)
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _without_our_frames(kind: Type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
    """As Python prints it, less the frames of this folder and of runpy above the command's own."""
    here = os.path.dirname(os.path.abspath(__file__))
    while trace is not None and trace.tb_next is not None:
        name = trace.tb_frame.f_code.co_filename
        if os.path.dirname(os.path.abspath(name)) != here:
            break
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
