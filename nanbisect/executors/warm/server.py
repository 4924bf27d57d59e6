"""Imports what the training needs, once, then forks a shim and a training process for every attempt.

    python server.py FD        (the plan is in NANBISECT_WARM, the driver at the other end of FD)

Runs in the training's own interpreter, started by path. It has one thread, touches no device and starts no
maths threads; where an import breaks that, it says so and leaves, and attempts start cold. Its children
belong to themselves: they live on when it dies. It is a subreaper, so that what a killed shim leaves
behind comes here and is ended. Python 3.9+, standard library and psutil.
"""

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == HERE:
    del sys.path[0]  # first of all, lest this folder's names shadow the user's

import atexit  # noqa: E402
import contextlib  # noqa: E402
import gc  # noqa: E402
import importlib.machinery  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import traceback  # noqa: E402
from typing import Any, Dict, List, Optional, Set, Tuple  # noqa: E402

PLAN = "NANBISECT_WARM"
AGAIN = "NANBISECT_WARM_AGAIN"  # how often this server has started itself afresh, and its shims
TRIES = 8
TICK = 0.5
ORDER = ("life", "done", "log", "env", "echo")


def load(path: str, name: str) -> Any:
    """A module of ours under a private name, so that no name of the user's is shadowed."""
    spec = importlib.util.spec_from_file_location("_nanbisect_" + name, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


preload = load(os.path.join(HERE, "preload.py"), "preload")
launcher = load(os.path.join(HERE, "launcher.py"), "launcher")
child = load(os.path.join(HERE, "child.py"), "child")


class Server:
    """The server's state. `plan`: kind, words, modules, scripts, psutil, folder, skip, learn."""

    def __init__(self, driver: socket.socket, plan: Dict[str, Any], *, again: int, shims: List[int]) -> None:
        self.driver = driver
        self.plan = plan
        self.again = again
        self.prepared: Set[Tuple[str, ...]] = set()
        self.start = dict(os.environ)
        self.shims: Set[int] = set(shims)  # they outlive a fresh start
        self.shim = self._load_shim()

    def _load_shim(self) -> Any:
        """The shim's module; psutil may have to come from nanbisect's own environment, and then goes unseen."""
        own = importlib.util.find_spec("psutil") is not None
        if not own:
            sys.path.append(self.plan["psutil"])
        try:
            return load(os.path.join(os.path.dirname(HERE), "shim.py"), "shim")
        finally:
            if not own:
                sys.path.remove(self.plan["psutil"])
                for name in [name for name in sys.modules if name.partition(".")[0] == "psutil"]:
                    del sys.modules[name]

    # before the first attempt ------------------------------------------------------------------

    def prepare(self) -> Optional[str]:
        """Import everything; why no attempt can start here, or None."""
        scripts = list(self.plan["scripts"])
        if self.plan["kind"] == "accelerate":
            started = launcher.ask(self.plan["words"])
            if started is None:
                return "accelerate launch starts more than one process of Python here"
            if child.differs(started.env, self.start):
                self._again({**started.env, PLAN: json.dumps(self.plan)})
            scripts.append(started.words[0])
        elif self.plan["kind"] == "script":
            scripts.append(self.plan["words"][0])
        else:
            scripts += preload.files_of(self.plan["words"][0])
        for module, names in preload.wanted(self.plan["modules"], scripts):
            root = preload.root_of(module)
            if root not in self.plan["skip"]:
                preload.bring(module, names)
                if preload.threads() and root != "torch":  # do without this library
                    skip = [*self.plan["skip"], root]
                    self._again({**self.start, PLAN: json.dumps({**self.plan, "skip": skip})})
        return self._unfit()

    def _again(self, env: Dict[str, str]) -> None:
        """Start afresh in another environment, at most a few times."""
        if self.again < TRIES:
            fd = self.driver.fileno()
            os.set_inheritable(fd, True)
            argv = [sys.executable, os.path.abspath(__file__), str(fd)]
            os.execve(sys.executable, argv, {**env, AGAIN: ",".join(map(str, [self.again + 1, *self.shims]))})

    def _learn(self) -> None:
        """Import what children had to import late. Where that forbids a fork: start afresh, and learn no more."""
        names = [name for name in preload.reported(self.plan["folder"]) if name not in sys.modules]
        if not names or not self.plan["learn"]:
            return
        for name in names:
            preload.bring(name, [])
        if self._unfit() is not None:
            self._again({**self.start, PLAN: json.dumps({**self.plan, "learn": False})})

    def _unfit(self) -> Optional[str]:
        """What forbids a fork of this process."""
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return "torch can't be imported"
        threads = preload.threads()
        if threads:
            return "an import started a thread (%s)" % ", ".join(threads)
        if torch.cuda.is_initialized() or self._forks_are_bad(torch):
            return "an import touched CUDA, and such a process can't be forked"
        return None

    @staticmethod
    def _forks_are_bad(torch: Any) -> bool:
        pid = os.fork()
        if pid == 0:
            os._exit(int(bool(torch.cuda._is_in_bad_fork())))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0

    # attempts ----------------------------------------------------------------------------------

    def serve(self) -> Any:
        """Answer the driver until it is gone. Returns in a child only: the job to run."""
        self.shim.prctl(self.shim.PR_SET_CHILD_SUBREAPER, 1)
        gc.collect()
        gc.freeze()  # what is here is shared by all children: no collection need touch it
        while True:
            ready, _, _ = select.select([self.driver], [], [], TICK)
            self._reap()
            self._learn()
            if ready:
                data, fds, _, _ = socket.recv_fds(self.driver, 1 << 16, len(ORDER))
                if not data:
                    os._exit(0)
                job = self._attempt(json.loads(data), dict(zip(ORDER, fds)))
                if job is not None:
                    return job

    def _attempt(self, request: Dict[str, Any], fds: Dict[str, int]) -> Any:
        """Fork the shim. Returns None in the server, the job in the training process, never in the shim."""
        self._prepare(request["prepare"])
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # until there are handlers
        pid = os.fork()
        if pid == 0:
            self.driver.close()
            return self._as_shim(request, fds)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self.shims.add(pid)
        for fd in fds.values():
            os.close(fd)
        self.driver.send(json.dumps({"pid": pid, "folder": request["folder"]}).encode())
        return None

    def _prepare(self, asked: Optional[List[str]]) -> None:
        """Let the trainer make ready what all children share, once; leave if that forbids a fork."""
        if asked is None or tuple(asked) in self.prepared:
            return
        self.prepared.add(tuple(asked))
        importlib.import_module(asked[0]).prepare(asked[1])
        why = self._unfit()
        if why is not None:
            self.driver.send(json.dumps({"unfit": why}).encode())
            os._exit(0)

    def _as_shim(self, request: Dict[str, Any], fds: Dict[str, int]) -> Any:
        """In the fork: fork the training process, and be its shim to the end."""
        try:
            os.setsid()
            child.mark(request["folder"])
            os.dup2(fds["log"], 2)
            os.dup2(fds.get("echo", fds["log"]), 1)
            with os.fdopen(fds["env"]) as file:
                environment = json.load(file)
            with open(request["spec"]) as file:
                spec = json.load(file)
            read, write = os.pipe()
            keeps = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if request["keep"] else None
            shim, main = os.getpid(), os.fork()
            if main == 0:
                theirs = [write, read, *fds.values(), *([keeps[0].detach()] if keeps else [])]
                job = self._as_training(spec, request, environment, theirs, shim)
                return job._replace(orders=keeps[1]) if keeps else job
            os.close(write)
            if keeps is None:
                self.shim.attend(spec, fds["life"], environment, started=(main, read))
            else:
                keeps[1].close()
                files = {"started": (main, read), "fds": fds, "control": keeps[0], "mark": child.mark}
                load(os.path.join(HERE, "serial.py"), "serial").attend(spec, environment, **files)
        except BaseException:  # noqa: BLE001 - a fork must never go on as the server
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _as_training(
        self, spec: Dict[str, Any], request: Dict[str, Any], environment: Dict[str, str], fds: List[int], shim: int
    ) -> Any:
        os.setsid()
        self.shim.dying_with(shim)()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(fds[0], 1)
        os.dup2(fds[0], 2)
        path = os.path.join(self.plan["folder"], "modules-%d" % os.getpid())
        atexit.register(preload.report, path, set(sys.modules))
        for fd in {null, *fds}:
            with contextlib.suppress(OSError):  # the environment's is closed
                os.close(fd)
        return child.Job(request["kind"], request["words"], spec["argv"], spec["workdir"], environment)

    def _reap(self) -> None:
        """Collect the dead; end what a killed shim left behind."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            self.shims.discard(pid)
        psutil = self.shim.psutil
        for orphan in psutil.Process().children():
            if orphan.pid not in self.shims:
                for process in [*orphan.children(recursive=True), orphan]:
                    with contextlib.suppress(psutil.Error):
                        process.kill()


def main() -> Any:
    """The server's life; returns (the job, what the server started with) in a child."""
    plan = json.loads(os.environ.pop(PLAN))
    again, *shims = [int(number) for number in os.environ.pop(AGAIN, "0").split(",")]
    driver = socket.socket(fileno=int(sys.argv[1]))
    server = Server(driver, plan, again=again, shims=shims)
    why = server.prepare()
    driver.send(json.dumps({"unfit": why} if why else {"ready": os.getpid()}).encode())
    if why:
        sys.exit(0)
    return server.serve(), server.start


def become(job: Any, start: Dict[str, str]) -> None:
    """Run the job; a command that this fork can't stand for is started as it is."""
    child.settle(job, start)
    words, module = list(job.words), job.kind == "module"
    if job.kind == "accelerate":
        for name in start.keys() - job.env.keys():  # what the launcher's own imports set, once
            os.environ[name] = start[name]
        started = launcher.ask(words)
        if started is None or child.differs(started.env, start):
            child.cold(job)
        os.environ.clear()
        os.environ.update(started.env)
        module, words = started.words[0] == "-m", started.words
        words = words[1:] if module else words
    child.run(words, module=module)


if __name__ == "__main__":
    become(*main())
