"""Warm starts: the same process as a cold one, and nothing left whoever dies. Linux only, as they are.

Most of it runs with a stub in torch's place: what is tested is processes, not tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nanbisect.errors import ExecutorError
from nanbisect.executors.base import LOG_FILE, PIDS_FILE, Exit, Handle, Task, WarmStart, child_environment
from nanbisect.executors.local import LocalExecutor, sweep
from nanbisect.executors.scripted import Scripted, ScriptedExecutor
from nanbisect.executors.warm import servers
from nanbisect.executors.warm.servers import key_of
from nanbisect.machine import Occasion, check_machine, slot_environment
from nanbisect.matrix import expand
from nanbisect.matrix_file import read_matrix
from nanbisect.trainers.base import probe_environment
from nanbisect.trainers.registry import TRAINERS, VOCABULARIES
from nanbisect.trainers.warm_start import warm_start
from tests.commands import ROOT
from tests.test_executors import GRANDCHILD, lives, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="attempts start warm on Linux only")

TORCH = """
class cuda:
    is_initialized = staticmethod(lambda: False)
    _is_in_bad_fork = staticmethod(lambda: False)
class default_generator:
    seed = staticmethod(lambda: None)
"""
WHO = """
import gc, json, os, signal, sys, threading
import torch
names = [one for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)]
print(json.dumps({
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "executable": sys.executable,
    "prefix": sys.prefix,
    "flags": str(sys.flags),
    "finders": [str(getattr(one, "__name__", type(one).__name__)) for one in sys.meta_path],
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "loader": type(__loader__).__name__,
    "spec": getattr(__spec__, "name", None),
    "globals": sorted(globals()),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "cwd": os.getcwd(),
    "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "signals": {one.name: str(signal.getsignal(one)) for one in names},
    "fds": sorted(os.readlink("/proc/self/fd/" + fd).partition(":")[0] for fd in os.listdir("/proc/self/fd")[:-1]),
    "leads": os.getsid(0) == os.getpid(),
    "unbuffered": sys.stdout.write_through,
    "thread": threading.current_thread().name,
    "threads": THREADS,
    "collector": [gc.isenabled(), gc.get_threshold()],
    "env": dict(os.environ),
}))
if "fail" in sys.argv:
    raise ValueError("as asked")
"""


class Place:
    """A folder with a working folder below it, and the attempts made in it."""

    def __init__(self, folder: Path, *, stub: bool) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir()
        self.env = {"PYTHONPATH": ""}
        if stub:
            (folder / "stub" / "torch").mkdir(parents=True)
            (folder / "stub" / "torch" / "__init__.py").write_text(TORCH)
            self.env = {"PYTHONPATH": str(folder / "stub")}
        self.count = 0

    def task(self, *words: str, timeout: float = 60, probe: bool = False, env: dict[str, str] | None = None) -> Task:
        """An attempt that runs `python words`."""
        self.count += 1
        folder = self.folder / "run" / "cell" / f"attempt-{self.count}"
        folder.mkdir(parents=True)
        added = {**self.env, **(env or {})}
        added |= probe_environment(folder, added) if probe else {}
        whole = child_environment(os.environ, set=added)
        argv = (sys.executable, *words)
        warm = warm_start(argv, workdir=self.work, env=whole)
        assert warm is not None
        return Task(argv, whole, self.work, folder, timeout, (), warm)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """With a stub for torch."""
    return Place(tmp_path, stub=True)


@contextlib.contextmanager
def started(warm: bool = True, grace: float = 1.0) -> Iterator[LocalExecutor]:
    """An executor that is closed at the end."""
    executor = LocalExecutor(warm=warm, grace=grace)
    try:
        yield executor
    finally:
        executor.close()


def finish(executor: LocalExecutor, handle: Handle) -> Exit:
    """The end of an attempt."""
    ended = until(lambda: executor.poll(handle), 60)
    assert isinstance(ended, Exit)
    return ended


def pids(task: Task) -> dict[str, int]:
    """The shim's and the main process's ids, once they are written."""
    path = task.folder / PIDS_FILE
    until(path.exists)
    data = json.loads(path.read_text())
    return {name: int(data[name]["pid"]) for name in ("shim", "main")}


def server_of(executor: LocalExecutor) -> int:
    """The process id of the one server."""
    (server,) = executor._servers.servers.values()
    return server.process.pid


def told(task: Task) -> dict[str, Any]:
    """What WHO has printed."""
    lines = [line for line in (task.folder / LOG_FILE).read_text().splitlines() if line.startswith('{"argv"')]
    data: dict[str, Any] = json.loads(lines[0])
    data["env"] = {name: value for name, value in data["env"].items() if not name.startswith("NANBISECT_")}
    return data


# the same process ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "real"),
    [
        (("who.py", "a b", "fail"), False),
        (("-m", "who", "x"), False),
        (("-u", "sub/who.py"), False),
        (("who.py", "a b", "fail"), True),
    ],
)
def test_a_warm_process_is_as_a_cold_one(tmp_path: Path, words: tuple[str, ...], real: bool) -> None:
    """Arguments, path, main module, environment, signals, files, session, exit code, traceback."""
    place = Place(tmp_path, stub=not real)
    threads = "[torch.get_num_threads(), torch.get_num_interop_threads()]" if real else "0"
    (place.work / "sub").mkdir()
    for name in ("who.py", "sub/who.py"):
        (place.work / name).write_text(WHO.replace("THREADS", threads))
    ends, logs, said = [], [], []
    for warm in (False, True):
        with started(warm) as executor:
            task = place.task(*words, probe=real)
            ends.append(finish(executor, executor.start(task)).code)
            assert not executor.remarks()
            logs.append((task.folder / LOG_FILE).read_text().splitlines()[1:])
            said.append(told(task))
            assert warm == bool(executor._servers.servers)
            if real:
                (line,) = (task.folder / "armed.jsonl").read_text().splitlines()
                assert json.loads(line)["pid"] == pids(task)["main"]
    words_of_python = ["-u"] if "-u" in words else []
    assert said[0].pop("orig_argv") == [sys.executable, *words_of_python, *said[1].pop("orig_argv")[1:]]
    if words_of_python:
        assert said[0].pop("flags") and said[1].pop("flags")
    assert said[0] == said[1]
    assert ends[0] == ends[1] == ("fail" in words)
    assert logs[0] == logs[1]


def test_a_driver_in_the_background_of_a_shell_ignores_ctrl_c_and_its_trainings_do_not(tmp_path: Path) -> None:
    """`nanbisect run ... &` of a script starts with SIGINT ignored; what it trains does as ever, warm and cold."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        test_a_warm_process_is_as_a_cold_one(tmp_path, ("who.py", "x"), real=False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_accelerate_launch_sets_what_the_launcher_sets(tmp_path: Path) -> None:
    """One process: the launcher's own words and environment; several: the launcher itself, cold."""
    place = Place(tmp_path, stub=False)
    (place.work / "who.py").write_text(WHO.replace("THREADS", "torch.get_num_threads()"))
    one = (
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--mixed_precision",
        "bf16",
        "--num_cpu_threads_per_process",
        "2",
    )
    said = []
    for warm in (False, True):
        with started(warm) as executor:
            task = place.task(*one, "who.py", "--x", env={"ACCELERATE_LOG_LEVEL": "error"})
            assert finish(executor, executor.start(task)).code == 0
            assert not executor.remarks()
            said.append(told(task))
            for name in ("leads", "fds"):  # the launcher's child shares its session and pipe
                said[-1].pop(name)
    assert said[0] == said[1]
    assert said[1]["env"]["ACCELERATE_MIXED_PRECISION"] == "bf16" and said[1]["threads"] == 2


def test_a_launch_of_several_processes_starts_cold(tmp_path: Path) -> None:
    """The server can't stand for it, says so, and the attempt is made as it is."""
    place = Place(tmp_path, stub=False)
    (place.work / "who.py").write_text("import os; os.write(1, b'rank %s\\n' % os.environ['RANK'].encode())")
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        port = str(probing.getsockname()[1])
    two = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", port)
    with started() as executor:
        task = place.task(*two, "who.py", env={"ACCELERATE_USE_CPU": "true"})
        assert finish(executor, executor.start(task)).code == 0
        (remark,) = executor.remarks()
    assert "more than one process" in remark
    log = (task.folder / LOG_FILE).read_text()
    assert "rank 0" in log and "rank 1" in log


@pytest.mark.parametrize(
    "argv",
    [
        ("torchrun", "train.py"),
        ("python", "-m", "torch.distributed.run", "train.py"),
        ("python", "-O", "train.py"),
        ("python", "-c", "pass"),
        ("python", "folder"),
        ("python",),
        ("bash", "train.sh"),
        ("trl", "sft"),
        ("accelerate", "env"),
    ],
)
def test_other_commands_start_as_they_are(argv: tuple[str, ...], tmp_path: Path) -> None:
    """Launchers of several processes, interpreters with options, programs that are not Python."""
    assert warm_start(argv, workdir=tmp_path, env={"PATH": str(Path(sys.executable).parent)}) is None


# servers ---------------------------------------------------------------------------------------


def test_attempts_of_one_environment_share_a_server_and_others_do_not(place: Place) -> None:
    """A variable that a library may read at import makes another server; a GPU's index does not."""
    (place.work / "train.py").write_text("import os, torch; print(os.getppid(), os.environ.get('X'))")
    with started() as executor:
        for env in ({}, {"CUDA_VISIBLE_DEVICES": "1"}, {"X": "1"}):
            assert finish(executor, executor.start(place.task("train.py", env=env))).code == 0
            assert not executor.remarks()
        assert len(executor._servers.servers) == 2
        for number in range(servers.MOST + 1):
            task = place.task("train.py", env={"X": str(number)})
            assert finish(executor, executor.start(task)).code == 0
            assert str(number) in (task.folder / LOG_FILE).read_text()
        assert len(executor._servers.servers) == servers.MOST


def test_the_script_runs_in_the_child_only_and_libraries_once(place: Place) -> None:
    """Known libraries at the top of the script are imported by the server, the user's modules are not."""
    say = "import os; os.write(1, b'%s %d\\n' % (__name__.encode(), os.getpid()))"
    for name in ("tqdm", "helper"):
        (place.work / f"{name}.py").write_text(say)
    (place.work / "train.py").write_text("import tqdm\nimport helper\ndef f():\n    import numpy\n" + say)
    place.env["PYTHONPATH"] += f":{place.work}"
    with started() as executor:
        for _ in range(2):
            task = place.task("train.py")
            assert finish(executor, executor.start(task)).code == 0
            words = (task.folder / LOG_FILE).read_text().split()
            assert words[::2] == ["helper", "__main__"] and len(set(words[1::2])) == 1


def test_a_library_imported_late_is_there_for_the_next_child(place: Place) -> None:
    """The server learns what its children import of the known libraries."""
    (place.folder / "stub" / "datasets.py").write_text("import os; os.write(1, b'imported\\n')")
    (place.work / "train.py").write_text("import torch\ndef f():\n    import datasets\nf()")
    logs = []
    with started() as executor:
        for _ in range(3):
            task = place.task("train.py")
            assert finish(executor, executor.start(task)).code == 0
            logs.append((task.folder / LOG_FILE).read_text())
            time.sleep(1.0)  # not waited for: the next one may come too early, which costs time and nothing else
    assert logs[0] == "imported\n" and logs[-1] == ""


def test_what_a_library_sets_for_the_collector_stays(place: Place) -> None:
    """Warm as cold, although the server's imports are not interrupted by collections."""
    (place.folder / "stub" / "datasets.py").write_text("import gc\ngc.set_threshold(5, 6, 7)\n")
    (place.work / "train.py").write_text("import datasets, gc, torch\nprint(gc.get_threshold())")
    for warm in (False, True):
        with started(warm) as executor:
            task = place.task("train.py")
            ended = finish(executor, executor.start(task))
            assert (ended.code, ended.started) == (0, "warm" if warm else "cold")
            assert (task.folder / LOG_FILE).read_text() == "(5, 6, 7)\n"


def test_a_library_that_starts_a_thread_is_left_to_the_children(place: Place) -> None:
    """A process with threads can't be forked: the server starts afresh without that library."""
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (place.folder / "stub" / "datasets.py").write_text(thread)
    (place.work / "train.py").write_text("import torch, datasets, threading; print(threading.active_count())")
    with started() as executor:
        task = place.task("train.py")
        assert finish(executor, executor.start(task)).code == 0
        assert not executor.remarks() and executor._servers.servers
        assert (task.folder / LOG_FILE).read_text() == "2\n"


@pytest.mark.parametrize(
    ("torch", "why"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n", "thread"),
        ("cuda.is_initialized = staticmethod(lambda: True)\n", "CUDA"),
        ("cuda._is_in_bad_fork = staticmethod(lambda: True)\n", "CUDA"),
        ("raise ImportError('libcudart.so')\n", "can't be imported"),
        (
            "import os\nos.path.basename(__import__('sys').argv[0]) == 'server.py' and os._exit(9)\n",
            "ended with code 9",
        ),
        (
            "import os\nos.path.basename(__import__('sys').argv[0]) == 'server.py' and os.kill(os.getpid(), 9)\n",
            "signal 9",
        ),
    ],
)
def test_an_unfit_server_says_why_and_the_attempt_starts_cold(place: Place, torch: str, why: str) -> None:
    """Once; the attempts that had been asked for are made cold."""
    with (place.folder / "stub" / "torch" / "__init__.py").open("a") as file:
        file.write(torch)
    (place.work / "train.py").write_text("import os; print('trained')")
    with started() as executor:
        for _ in range(2):
            task = place.task("train.py")
            assert finish(executor, executor.start(task)).code == 0
            assert (task.folder / LOG_FILE).read_text() == "trained\n"
        (remark,) = executor.remarks()
    assert "start cold" in remark and why in remark


# ends ------------------------------------------------------------------------------------------


def test_stop_and_timeout_end_everything(place: Place) -> None:
    """As a cold attempt: every descendant, also one in a session of its own."""
    (place.work / "train.py").write_text(GRANDCHILD + "import time; time.sleep(60)")
    with started() as executor:
        for timeout, why in ((60.0, "cancelled"), (3.0, "timed_out")):
            (place.work / "grandchild.pid").unlink(missing_ok=True)
            task = place.task("train.py", timeout=timeout)
            handle = executor.start(task)
            until((place.work / "grandchild.pid").exists)
            grandchild, main = int((place.work / "grandchild.pid").read_text()), pids(task)["main"]
            if why == "cancelled":
                executor.stop(handle)
            assert finish(executor, handle).why == why
            assert not lives(grandchild) and not lives(main)


def test_the_end_of_the_server_ends_no_attempt_and_the_next_starts_cold(place: Place) -> None:
    """kill -9 of the server: its child goes on to its own end."""
    (place.work / "train.py").write_text(
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('done')"
    )
    with started() as executor:
        task = place.task("train.py")
        handle = executor.start(task)
        pids(task)
        os.kill(server_of(executor), signal.SIGKILL)
        until(
            lambda: (
                not executor._servers.servers
                or any(s.why for s in executor._servers.servers.values())
                or executor.poll(handle)
            )
        )
        (place.work / "go").touch()
        assert finish(executor, handle).code == 0
        again = place.task("train.py")
        assert finish(executor, executor.start(again)).code == 0
        assert "signal 9" in executor.remarks()[0]
    assert [(one.folder / LOG_FILE).read_text() for one in (task, again)] == ["done\n", "done\n"]


def test_a_server_killed_while_it_imports_costs_nothing_but_time(place: Place) -> None:
    """The attempt that waited for it is made cold."""
    with (place.folder / "stub" / "torch" / "__init__.py").open("a") as file:
        file.write("import sys, time\nsys.argv[0].endswith('server.py') and time.sleep(60)\n")
    (place.work / "train.py").write_text("import torch; print('trained')")
    with started() as executor:
        task = place.task("train.py")
        handle = executor.start(task)
        os.kill(server_of(executor), signal.SIGKILL)
        assert finish(executor, handle).code == 0
    assert (task.folder / LOG_FILE).read_text() == "trained\n"


def test_a_killed_shim_takes_all_with_it(place: Place) -> None:
    """The training dies with it; what is left comes to the server, or is found by the marker."""
    (place.work / "train.py").write_text(GRANDCHILD + "import time; time.sleep(60)")
    with started() as executor:
        task = place.task("train.py")
        handle = executor.start(task)
        until((place.work / "grandchild.pid").exists)
        grandchild, ours = int((place.work / "grandchild.pid").read_text()), pids(task)
        os.kill(ours["shim"], signal.SIGKILL)
        assert finish(executor, handle).why == "lost"
        until(lambda: not lives(grandchild) and not lives(ours["main"]))
        assert finish(executor, executor.start(place.task("-m", "who"))).code == 1  # others go on


def waiting_pair(executor: LocalExecutor, after: Task) -> list[int]:
    """The shim and the training process that wait for an attempt, when that one has ended."""

    def others() -> list[int]:
        below = psutil.Process(server_of(executor)).children(recursive=True)
        return [process.pid for process in below if process.pid not in pids(after).values() and lives(process.pid)]

    until(lambda: len(others()) == 2)
    return others()


def test_the_next_pair_is_forked_while_nobody_waits(place: Place) -> None:
    """It takes the next attempt, and closing ends it."""
    (place.work / "train.py").write_text("import torch")
    with started() as executor:
        first, second = place.task("train.py"), place.task("train.py")
        assert finish(executor, executor.start(first)).code == 0
        waiting = waiting_pair(executor, first)
        assert finish(executor, executor.start(second)).code == 0
        assert list(pids(second).values()) == waiting
        waiting = waiting_pair(executor, second)
    assert not any(map(lives, waiting))


@pytest.mark.parametrize("killed", [1, 2])
def test_a_killed_pair_that_waited_costs_nothing(place: Place, killed: int) -> None:
    """Another is forked, and the attempt starts warm all the same."""
    (place.work / "train.py").write_text("import torch; print('trained')")
    with started() as executor:
        first, task = place.task("train.py"), place.task("train.py")
        assert finish(executor, executor.start(first)).code == 0
        waiting = waiting_pair(executor, first)
        for pid in waiting[:killed]:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(lives, waiting)))
        ended = finish(executor, executor.start(task))
        assert (ended.code, ended.started) == (0, "warm") and not executor.remarks()
    assert (task.folder / LOG_FILE).read_text() == "trained\n"


def test_waiting_ends_with_an_attempt(place: Place) -> None:
    """Warm or cold: nobody sleeps on when an attempt has ended, nor much longer than asked."""
    (place.work / "train.py").write_text("import torch, os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    for warm in (True, False):
        (place.work / "go").unlink(missing_ok=True)
        with started(warm) as executor:
            handle = executor.start(place.task("train.py"))
            executor.wait([handle], 0.01)
            assert executor.poll(handle) is None
            (place.work / "go").touch()
            began = time.monotonic()
            executor.wait([handle], 60)
            ended = executor.poll(handle)
            assert ended is not None and ended.code == 0 and time.monotonic() - began < 50
            executor.wait([handle], 60)
            assert time.monotonic() - began < 50


def test_server_and_shim_killed_together_leave_nothing(place: Place) -> None:
    """Then only the marker in the memory of the forks tells whose they were."""
    (place.work / "train.py").write_text(GRANDCHILD + "import time; time.sleep(60)")
    with started() as executor:
        task = place.task("train.py")
        handle = executor.start(task)
        until((place.work / "grandchild.pid").exists)
        grandchild, ours = int((place.work / "grandchild.pid").read_text()), pids(task)
        assert psutil.Process(grandchild).environ()["NANBISECT_ATTEMPT"].rstrip("/") == str(task.folder)
        for pid in (server_of(executor), ours["shim"]):
            os.kill(pid, signal.SIGKILL)
        assert finish(executor, handle).why == "lost"
        assert not lives(grandchild) and not lives(ours["main"])


def test_what_a_dead_driver_left_is_swept(place: Place) -> None:
    """The server carries the run's marker, its children their own attempt's."""
    (place.work / "train.py").write_text("import time; time.sleep(60)")
    with started() as executor:
        task = place.task("train.py")
        handle = executor.start(task)
        ours, server = pids(task), server_of(executor)
        assert sweep(place.folder / "elsewhere") == 0
        assert sweep(place.folder / "run") == 3
        assert not any(map(lives, (server, *ours.values())))
        assert finish(executor, handle).why == "lost"


def test_closing_ends_server_and_attempt(place: Place) -> None:
    """Nothing of a run is left."""
    (place.work / "train.py").write_text("import time; time.sleep(60)")
    with started() as executor:
        task = place.task("train.py")
        executor.start(task)
        ours, server = pids(task), server_of(executor)
    assert not any(map(lives, (server, *ours.values())))


def test_a_warm_start_for_another_python_and_its_words() -> None:
    """The words that follow the interpreter, whatever stood before them."""
    env = {"PATH": str(Path(sys.executable).parent)}
    found = warm_start(("python", "-u", "train.py", "--x"), workdir=Path.cwd(), env=env)
    assert found == WarmStart("python", "script", ("train.py", "--x"))


class Taking(ScriptedExecutor):
    """Starts nothing: says what it was asked for."""

    def start(self, task: Task) -> Handle:
        """Keep it."""
        self.starts.append(task)
        raise ExecutorError("as asked")


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_the_check_and_the_cells_have_one_server(tmp_path: Path, jobs: int) -> None:
    """Several at once get fewer threads each, which a library may read when it is imported: so does the check."""
    demo = ROOT / "matrices" / "demo.yaml"
    matrix = read_matrix(demo.read_text(), source=str(demo), folder=str(demo.parent), vocabularies=VOCABULARIES)
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    occasion, trainer, executor = Occasion(environ=environ, jobs=jobs), TRAINERS["sft"], Taking(lambda task: Scripted())
    with pytest.raises(ExecutorError, match="as asked"):
        check_machine(matrix, trainer, executor, occasion)
    launch = trainer.launch(matrix, expand(matrix)[0], seed=0, folder=tmp_path)
    slots = (f"cpu{jobs - 1}",)
    env = child_environment(environ, set={**launch.env, **slot_environment(slots, occasion, launch.env)})
    cell = Task(launch.argv, env, Path(launch.workdir), tmp_path, None, slots, launch.warm)
    assert key_of(executor.starts[0]) == key_of(cell)
