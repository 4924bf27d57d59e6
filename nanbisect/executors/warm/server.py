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

import contextlib  # noqa: E402
import gc  # noqa: E402
import importlib.machinery  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import select  # noqa: E402
import socket  # noqa: E402
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple  # noqa: E402

PLAN = "NANBISECT_WARM"
AGAIN = "NANBISECT_WARM_AGAIN"  # how often this server has started itself afresh, and its shims
TRIES = 8
TICK = 0.5


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
    """The server's state. `plan`: kind, words, modules, scripts, psutil, folder, skip, learn, careful."""

    def __init__(self, driver: socket.socket, plan: Dict[str, Any], *, again: int, shims: List[int]) -> None:
        self.driver = driver
        self.plan = plan
        self.again = again
        self.prepared: Set[Tuple[str, ...]] = set()
        self.begun = False  # whether some attempt has
        self.ready: Any = None  # a pair that waits for an attempt
        self.asks: List[socket.socket] = []  # of the pairs at work
        self.late = list(preload.LATE)
        self.start = dict(os.environ)
        self.shims: Set[int] = set(shims)  # they outlive a fresh start
        self.shim = self._load_shim()
        load(os.path.join(HERE, "serial.py"), "serial")
        self.pair = load(os.path.join(HERE, "pair.py"), "pair")  # which needs all of them

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
        careful = self.plan["careful"]
        with preload.uncollected():
            self._bring(scripts, careful=careful)
        why = self._unfit()
        if why is not None and not careful and preload.threads():
            self._again({**self.start, PLAN: json.dumps({**self.plan, "careful": True})})
        return why

    def _bring(self, scripts: Sequence[str], *, careful: bool) -> None:
        """Import what is wanted. With `careful`, threads are looked for after each library."""
        for module, names in preload.wanted(self.plan["modules"], scripts):
            root = preload.root_of(module)
            if root not in self.plan["skip"]:
                preload.bring(module, names)
                if careful and preload.threads() and root != "torch":  # do without this library
                    skip = [*self.plan["skip"], root]
                    self._again({**self.start, PLAN: json.dumps({**self.plan, "skip": skip})})

    def _again(self, env: Dict[str, str]) -> None:
        """Start afresh in another environment, at most a few times."""
        if self.again < TRIES:
            fd = self.driver.fileno()
            os.set_inheritable(fd, True)
            argv = [sys.executable, os.path.abspath(__file__), str(fd)]
            os.execve(sys.executable, argv, {**env, AGAIN: ",".join(map(str, [self.again + 1, *self.shims]))})

    def _learn(self) -> None:
        """Import what children had to import late. Where that forbids a fork: start afresh, and learn no more."""
        names = [name for name in self._reported() if name not in sys.modules]
        if not names or not self.plan["learn"]:
            return
        self._drop()
        with preload.uncollected():
            for name in names:
                preload.bring(name, [])
        gc.freeze()
        if self._unfit() is not None:
            self._again({**self.start, PLAN: json.dumps({**self.plan, "learn": False})})

    def _reported(self) -> List[str]:
        late, self.late = (self.late, []) if self.begun else ([], self.late)
        return [*late, *preload.reported(self.plan["folder"])]

    def _unfit(self) -> Optional[str]:
        """What forbids a fork of this process."""
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return "torch can't be imported"
        bad = preload.forked(torch.cuda._is_in_bad_fork)
        threads = preload.others()
        if threads:
            return "an import started a thread (%s)" % ", ".join(threads)
        if torch.cuda.is_initialized() or bad:
            return "an import touched CUDA, and such a process can't be forked"
        return None

    # attempts ----------------------------------------------------------------------------------

    def serve(self) -> Any:
        """Answer the driver until it is gone. Returns in a child only: the job to run."""
        self.shim.prctl(self.shim.PR_SET_CHILD_SUBREAPER, 1)
        gc.collect()
        gc.freeze()  # what is here is shared by all children: no collection need touch it
        while True:
            ready, _, _ = select.select([self.driver, *self.asks], [], [], 0 if self.begun and self.late else TICK)
            self._reap()
            self._learn()
            ended = [ask for ask in self.asks if ask in ready]
            for ask in ended:
                self.asks.remove(ask)
                ask.close()
            job = self._answer() if self.driver in ready else self._fork() if ended else None
            if job is not None:
                return job

    def _answer(self) -> Any:
        """Take a request. Returns None in the server, the job in a child."""
        data, fds, _, _ = socket.recv_fds(self.driver, self.pair.ROOM, len(self.pair.ORDER))
        if not data:
            self._drop()
            os._exit(0)
        request = json.loads(data)
        self._prepare(request["prepare"])
        while True:
            job = self._fork(fds)
            if job is not None:
                return job
            ready, self.ready = self.ready, None
            if ready.hand_over(data, fds):
                break  # else somebody has killed it
        self.asks.append(ready.ask)
        self.begun = True
        for fd in fds:
            os.close(fd)
        self.driver.send(json.dumps({"pid": ready.shim, "folder": request["folder"]}).encode())
        return None

    def _fork(self, fds: Sequence[int] = ()) -> Any:
        """See to it that a pair is ready, one without these files. Returns None in the server, the job in a child."""
        if self.ready is None:
            self.ready, job = self.pair.fork([self.driver, *self.asks], fds, reports=self.plan["folder"])
            if job is not None:
                return job
            self.shims.add(self.ready.shim)
        return None

    def _drop(self) -> None:
        """A pair that knows less than this process does, or that nobody wants any more, leaves."""
        if self.ready is not None:
            self.ready.dismiss()
            self.shims.discard(self.ready.shim)
            self.ready = None

    def _prepare(self, asked: Optional[List[str]]) -> None:
        """Let the trainer make ready what all children share, once; leave if that forbids a fork."""
        if asked is None or tuple(asked) in self.prepared:
            return
        self._drop()
        self.prepared.add(tuple(asked))
        importlib.import_module(asked[0]).prepare(asked[1])
        why = self._unfit()
        if why is not None:
            self.driver.send(json.dumps({"unfit": why}).encode())
            os._exit(0)

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
        for pid in _children() - self.shims:
            with contextlib.suppress(psutil.Error):
                orphan = psutil.Process(pid)
                for process in [*orphan.children(recursive=True), orphan]:
                    with contextlib.suppress(psutil.Error):
                        process.kill()


def _children() -> Set[int]:
    """Of this process, which has one thread. Their parents are not asked: a node has thousands of processes."""
    own = str(os.getpid())
    try:
        with open(os.path.join("/proc/self/task", own, "children")) as file:
            return set(map(int, file.read().split()))
    except OSError:  # a kernel without it
        return {process.pid for process in sys.modules["_nanbisect_shim"].psutil.Process().children()}


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
