"""The executors, with real short processes, and the scripted one.

What is waited for has a deadline; nothing sleeps for a fixed time and hopes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nanbisect.errors import ExecutorError
from nanbisect.executors import shim
from nanbisect.executors.base import (
    EXIT_FILE,
    LOG_FILE,
    MARKER,
    PIDS_FILE,
    SPEC_FILE,
    Executor,
    Exit,
    Handle,
    Task,
    child_environment,
    read_exit,
)
from nanbisect.executors.local import SHIM, LocalExecutor, sweep
from nanbisect.executors.scripted import Clock, Scripted, ScriptedExecutor

PYTHON = (sys.executable, "-I", "-S", "-c")
DEADLINE = 15.0

GRANDCHILD = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open("grandchild.tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename("grandchild.tmp", "grandchild.pid")
        time.sleep(60)
    os._exit(0)
os.wait()
while not os.path.exists("grandchild.pid"):
    time.sleep(0.01)
print("ready", flush=True)
"""
"""A grandchild in a session of its own, as torch elastic starts its workers; its parent is gone."""


def until(condition: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    """The first true value of `condition`; fails when there is none in time."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def lives(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait(executor: Executor, handle: Handle) -> Exit:
    """Polls until the attempt has ended."""
    exit = until(lambda: executor.poll(handle))
    assert isinstance(exit, Exit)
    return exit


def pid_in(path: Path) -> int:
    """The process id that a file holds, as soon as it does."""
    return int(until(lambda: path.exists() and path.read_text()))


def pids_of(folder: Path) -> tuple[int, int]:
    """Process ids of an attempt's shim and main process, as soon as they are known."""
    until((folder / PIDS_FILE).exists)
    pids = json.loads((folder / PIDS_FILE).read_text())
    return pids["shim"]["pid"], pids["main"]["pid"]


def ready(folder: Path) -> None:
    """Waits until the attempt has printed that it is ready."""
    until(lambda: "ready" in log_of(folder))


def log_of(folder: Path) -> str:
    """The attempt's log so far."""
    path = folder / LOG_FILE
    return path.read_text() if path.exists() else ""


@pytest.fixture
def executor() -> Iterator[LocalExecutor]:
    """An executor with a short grace."""
    with contextlib.closing(LocalExecutor(grace=0.4)) as executor:
        yield executor


def script(folder: Path, code: str, **changes: Any) -> Task:
    """A task that runs Python code in its own folder."""
    values: dict[str, Any] = {
        "argv": (*PYTHON, code),
        "env": {"PATH": os.environ["PATH"]},
        "workdir": folder,
        "folder": folder,
        "slot": ("cpu",),
    }
    return Task(**{**values, **changes})


# How a main process ends


def test_normal_exit(executor: LocalExecutor, tmp_path: Path) -> None:
    handle = executor.start(script(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)"))
    exit = wait(executor, handle)
    assert (exit.why, exit.code, exit.signal, exit.oom_kill, exit.stragglers) == ("exited", 0, None, False, 0)
    assert 0 < exit.seconds < DEADLINE
    assert sorted(log_of(tmp_path).split()) == ["err", "out"]
    assert read_exit(tmp_path) == exit == executor.poll(handle)
    assert sorted(path.name for path in tmp_path.iterdir()) == [EXIT_FILE, LOG_FILE, PIDS_FILE, SPEC_FILE]
    executor.stop(handle)  # harmless
    assert executor.poll(handle) == exit


def test_exit_status_and_signal_are_told_apart(executor: LocalExecutor, tmp_path: Path) -> None:
    ends = {"code": "raise SystemExit(9)", "signal": "import os; os.kill(os.getpid(), 9)"}
    handles = {}
    for name, code in ends.items():
        (tmp_path / name).mkdir()
        handles[name] = executor.start(script(tmp_path / name, code))
    failed, killed = (wait(executor, handles[name]) for name in ends)
    assert (failed.why, failed.code, failed.signal) == ("exited", 9, None)
    assert (killed.why, killed.code, killed.signal) == ("exited", None, signal.SIGKILL)
    assert not killed.oom_kill


def test_timeout(executor: LocalExecutor, tmp_path: Path) -> None:
    exit = wait(executor, executor.start(script(tmp_path, "import time; time.sleep(60)", timeout=0.3)))
    assert (exit.why, exit.code, exit.signal) == ("timed_out", None, signal.SIGTERM)
    assert 0.3 <= exit.seconds < DEADLINE


def test_stop(executor: LocalExecutor, tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"
        "print('ready', flush=True); time.sleep(60)"
    )
    handle = executor.start(script(tmp_path, code))
    ready(tmp_path)
    assert executor.poll(handle) is None
    executor.stop(handle)
    exit = wait(executor, handle)
    assert (exit.why, exit.code) == ("cancelled", 0)  # the code lies, `why` does not


def test_stop_before_the_shim_is_awake(executor: LocalExecutor, tmp_path: Path) -> None:
    handle = executor.start(script(tmp_path, "print('started')"))
    executor.stop(handle)
    assert wait(executor, handle).why == "cancelled"


def test_stop_of_a_process_that_ignores_term(executor: LocalExecutor, tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);print('ready', flush=True); time.sleep(60)"
    )
    handle = executor.start(script(tmp_path, code))
    ready(tmp_path)
    executor.stop(handle)
    exit = wait(executor, handle)
    assert (exit.why, exit.signal, exit.oom_kill) == ("cancelled", signal.SIGKILL, False)
    assert exit.seconds >= 0.4


def test_interrupt_is_ignored_by_the_shim_but_not_by_the_training(executor: LocalExecutor, tmp_path: Path) -> None:
    code = "print('ready', flush=True); import time; time.sleep(60)"
    handle = executor.start(script(tmp_path, code))
    ready(tmp_path)
    shim_pid, main = pids_of(tmp_path)
    os.kill(shim_pid, signal.SIGINT)
    os.kill(main, signal.SIGINT)
    exit = wait(executor, handle)
    assert exit.why == "exited"
    assert "KeyboardInterrupt" in log_of(tmp_path)


@pytest.mark.parametrize(("program", "code"), [("no-such-program", 127), ("{folder}", 126)])
def test_command_that_cannot_start(executor: LocalExecutor, tmp_path: Path, program: str, code: int) -> None:
    argv = (program.format(folder=tmp_path),)
    exit = wait(executor, executor.start(script(tmp_path, "", argv=argv)))
    assert (exit.why, exit.code) == ("exited", code)
    assert argv[0] in log_of(tmp_path)


def test_workdir_that_does_not_exist(executor: LocalExecutor, tmp_path: Path) -> None:
    exit = wait(executor, executor.start(script(tmp_path, "", workdir=tmp_path / "gone")))
    assert (exit.why, exit.code) == ("exited", 127)
    assert str(tmp_path / "gone") in log_of(tmp_path)


def test_machine_that_refuses(executor: LocalExecutor, tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match="can't start a process"):
        executor.start(script(tmp_path / "no-such-folder", ""))


# What a main process starts with


def test_child_starts_clean(executor: LocalExecutor, tmp_path: Path) -> None:
    code = (
        "import json, os, signal, sys; print(json.dumps({'env': dict(os.environ), 'in': sys.stdin.read(),"
        "'leader': os.getsid(0) == os.getpid(), 'fds': sorted(int(fd) for fd in os.listdir('/proc/self/fd')),"
        "'blocked': len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),"
        "'int': signal.getsignal(signal.SIGINT) is signal.default_int_handler}))"
    )
    wait(executor, executor.start(script(tmp_path, code, env={"NAME": "value", "LC_ALL": "C.UTF-8"})))
    seen = json.loads(log_of(tmp_path))
    assert seen["env"] == {"NAME": "value", "LC_ALL": "C.UTF-8", MARKER: str(tmp_path.resolve())}
    assert (seen["in"], seen["leader"], seen["blocked"], seen["int"]) == ("", True, 0, True)
    assert seen["fds"] == [0, 1, 2, 3]  # 3 is the listing itself: no life pipe, no wakeup pipe


def test_no_token_in_the_folder(executor: LocalExecutor, tmp_path: Path) -> None:
    wait(executor, executor.start(script(tmp_path, "", env={"HF_TOKEN": "hf_secret"})))
    assert all("hf_secret" not in path.read_text() for path in tmp_path.iterdir())


def test_child_environment() -> None:
    leaks = {"ACCELERATE_MIXED_PRECISION": "bf16", "TORCHELASTIC_RUN_ID": "1", "FSDP_VERSION": "2"}
    ranks = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"]
    ranks += ["MASTER_ADDR", "MASTER_PORT", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"]
    base = {**leaks, **dict.fromkeys(ranks, "1"), MARKER: "/old", "PATH": "/bin", "HF_HOME": "/hf", "X": "1"}
    env = child_environment(base, set={"X": "2", "MASTER_PORT": "0"})
    assert env == {
        "PATH": "/bin",
        "HF_HOME": "/hf",
        "PYTHONUNBUFFERED": "1",
        "WANDB_MODE": "disabled",
        "X": "2",
        "MASTER_PORT": "0",
    }
    assert child_environment({"WANDB_MODE": "offline"}, set={})["WANDB_MODE"] == "offline"


# Nothing is left behind


def test_grandchild_in_its_own_session_is_gone_after_stop(executor: LocalExecutor, tmp_path: Path) -> None:
    handle = executor.start(script(tmp_path, GRANDCHILD + "time.sleep(60)"))
    ready(tmp_path)
    grandchild = pid_in(tmp_path / "grandchild.pid")
    assert os.getsid(grandchild) != pids_of(tmp_path)[1]
    executor.stop(handle)
    assert wait(executor, handle).why == "cancelled"
    assert not lives(grandchild)


def test_stragglers_after_a_normal_exit(executor: LocalExecutor, tmp_path: Path) -> None:
    exit = wait(executor, executor.start(script(tmp_path, GRANDCHILD)))
    assert (exit.why, exit.code, exit.stragglers) == ("exited", 0, 1)
    assert not lives(pid_in(tmp_path / "grandchild.pid"))


def test_descendants_that_leave_by_themselves_are_no_stragglers(executor: LocalExecutor, tmp_path: Path) -> None:
    code = "import os, time; os.fork() or (time.sleep(0.05), print('late'))"
    exit = wait(executor, executor.start(script(tmp_path, code)))
    assert (exit.code, exit.stragglers, log_of(tmp_path)) == (0, 0, "late\n")


def test_close_stops_everything(tmp_path: Path) -> None:
    executor = LocalExecutor(grace=0.4)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    handles = [executor.start(script(tmp_path / name, GRANDCHILD + "time.sleep(60)")) for name in "ab"]
    ready(tmp_path / "a")
    ready(tmp_path / "b")
    executor.close()
    assert [wait(executor, handle).why for handle in handles] == ["cancelled", "cancelled"]
    assert not any(lives(pid_in(tmp_path / name / "grandchild.pid")) for name in "ab")


DRIVER = """
import sys, time
from pathlib import Path
from nanbisect.executors.base import Task
from nanbisect.executors.local import LocalExecutor
executor = LocalExecutor(grace=0.4)
for name in ("a", "b"):
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    executor.start(Task((sys.executable, "-I", "-S", "-c", sys.argv[2]), {}, folder, folder))
time.sleep(60)
"""


@contextlib.contextmanager
def driver(run: Path, code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A driver in a process of its own with two attempts, both ready."""
    root = Path(__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(run), code], cwd=root)
    try:
        ready(run / "a")
        ready(run / "b")
        yield process
    finally:
        process.kill()
        process.wait()
        sweep(run)


def test_kill_of_the_driver(tmp_path: Path) -> None:
    with driver(tmp_path, GRANDCHILD + "time.sleep(60)") as process:
        pids = [pid for name in "ab" for pid in pids_of(tmp_path / name)]
        pids += [pid_in(tmp_path / name / "grandchild.pid") for name in "ab"]
        assert all(lives(pid) for pid in pids)
        process.kill()
        process.wait()
        until(lambda: not any(lives(pid) for pid in pids), seconds=6)
        exits = [read_exit(tmp_path / name) for name in "ab"]
    assert [exit and exit.why for exit in exits] == ["driver_died", "driver_died"]


def test_kill_of_the_shim(executor: LocalExecutor, tmp_path: Path) -> None:
    (tmp_path / EXIT_FILE).write_text(json.dumps(Exit("exited", code=0).to_json()))  # of an earlier start
    handle = executor.start(script(tmp_path, GRANDCHILD + "time.sleep(60)"))
    ready(tmp_path)
    shim_pid, main = pids_of(tmp_path)
    os.kill(shim_pid, signal.SIGKILL)
    exit = wait(executor, handle)
    assert (exit.why, exit.code, exit.signal) == ("lost", None, None)
    assert exit.seconds > 0
    assert not lives(main)
    assert not lives(pid_in(tmp_path / "grandchild.pid"))


def test_torn_exit_is_lost(executor: LocalExecutor, tmp_path: Path) -> None:
    handle = executor.start(script(tmp_path, "print('ready', flush=True); import time; time.sleep(60)"))
    ready(tmp_path)
    (tmp_path / EXIT_FILE).write_text('{"schema": 1, "why": "exi')
    os.kill(pids_of(tmp_path)[0], signal.SIGKILL)
    assert wait(executor, handle).why == "lost"


def test_kill_of_driver_and_shim(tmp_path: Path) -> None:
    with driver(tmp_path, GRANDCHILD + "time.sleep(60)") as process:
        shims, mains = zip(*(pids_of(tmp_path / name) for name in "ab"), strict=True)
        grandchildren = [pid_in(tmp_path / name / "grandchild.pid") for name in "ab"]
        for pid in shims:
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        until(lambda: not any(lives(pid) for pid in mains))
        assert all(lives(pid) for pid in grandchildren)
        assert sweep(tmp_path / "a") == 1
        assert [lives(pid) for pid in grandchildren] == [False, True]
        assert LocalExecutor().recover(tmp_path) == 1
        assert not any(lives(pid) for pid in grandchildren)
        assert sweep(tmp_path) == 0


def test_sweep_matches_whole_path_components(tmp_path: Path) -> None:
    env = {**os.environ, MARKER: str(tmp_path / "attempt-10")}
    other = subprocess.Popen(["sleep", "60"], env=env)
    try:
        until(lambda: psutil.Process(other.pid).environ().get(MARKER))
        assert sweep(tmp_path / "attempt-1") == 0
        assert lives(other.pid)
        assert sweep(tmp_path) == 1
        assert not lives(other.pid)
    finally:
        other.kill()
        other.wait()


# The log


def test_log_is_complete_when_a_process_is_killed(executor: LocalExecutor, tmp_path: Path) -> None:
    code = "import os; [os.write(1, b'%07d\\n' % n) for n in range(40000)]; os.kill(os.getpid(), 9)"
    exit = wait(executor, executor.start(script(tmp_path, code)))
    assert exit.signal == signal.SIGKILL
    assert log_of(tmp_path).split() == [f"{n:07d}" for n in range(40000)]


def test_log_is_complete_when_told_to_stop(executor: LocalExecutor, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "def stop(*_):\n    os.write(1, b'x' * 200000 + b'end')\n    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, stop); print('ready', flush=True); time.sleep(60)"
    )
    handle = executor.start(script(tmp_path, code))
    ready(tmp_path)
    executor.stop(handle)
    assert (wait(executor, handle).code, log_of(tmp_path)[-4:]) == (3, "xend")


def test_log_keeps_both_ends_within_its_limit(tmp_path: Path) -> None:
    code = "[print(f'{n:07d}') for n in range(100000)]"
    with contextlib.closing(LocalExecutor(log_limit=2**17)) as executor:
        exit = wait(executor, executor.start(script(tmp_path, code)))
    assert exit.code == 0
    lines = log_of(tmp_path).splitlines()
    assert (tmp_path / LOG_FILE).stat().st_size <= 2**17
    assert (lines[0], lines[-1]) == ("0000000", "0099999")
    (note,) = (line for line in lines if "left out" in line)
    cut = lines.index(note)
    kept = sum(len(line) + 1 for line in lines if line != note) - 1  # the note brings its own line break
    assert f" {100000 * 8 - kept} bytes " in note
    assert [int(line) for line in lines[cut + 1 :]] == list(range(100000 - len(lines) + cut + 1, 100000))


@pytest.mark.parametrize("size", [100, 1000, 30000])
def test_log_counts_what_it_left_out(tmp_path: Path, size: int) -> None:
    log = shim.Log(tmp_path / LOG_FILE, 2000)
    for letter in b"abcdefgh":
        log.write(bytes([letter]) * size)
    text = (tmp_path / LOG_FILE).read_text()
    os.close(log.fd)
    assert len(text) <= 2000
    assert len(text.replace(log.note.decode(), "")) + log.left_out == 8 * size
    assert (text[0], text[-1]) == ("a", "h")


ECHO = """
import contextlib, sys, time
from pathlib import Path
from nanbisect.executors.base import Task
from nanbisect.executors.local import LocalExecutor
folder = Path(sys.argv[1])
with contextlib.closing(LocalExecutor(echo=True)) as executor:
    argv = (sys.executable, "-I", "-S", "-c", sys.argv[2])
    handle = executor.start(Task(argv, {}, folder, folder, timeout=15.0))
    while executor.poll(handle) is None:
        time.sleep(0.02)
"""


def test_echo_shows_output_live_and_whole(tmp_path: Path) -> None:
    code = (
        "import os, time; print('first', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "os.write(1, b'y' * 300000 + b'last'); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", ECHO, str(tmp_path), code]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"  # while the process waits for `go`
        (tmp_path / "go").touch()
        assert process.stdout.read() == b"y" * 300000 + b"last"
    assert log_of(tmp_path) == "first\n" + "y" * 300000 + "last"


@pytest.mark.parametrize("reader", ["slow", "gone"])
def test_echo_never_waits_for_its_reader(tmp_path: Path, reader: str) -> None:
    code = "import os, time\nwhile True: os.write(1, b'z' * 1000)"
    read, write = os.pipe()
    process = start_shim(tmp_path, code, stdout=write, echo=True, timeout=0.5)
    os.close(write)
    if reader == "gone":
        os.close(read)
    until(lambda: process.poll() is not None)
    exit = read_exit(tmp_path)
    assert exit is not None
    assert (exit.why, exit.signal) == ("timed_out", signal.SIGTERM)
    if reader == "slow":
        os.close(read)
        assert (tmp_path / LOG_FILE).stat().st_size < 2**20  # the process was held back, not the memory filled


# The kernel's OOM killer


def start_shim(folder: Path, code: str, *, stdout: int, **changes: Any) -> subprocess.Popen[bytes]:
    """A shim by its contract alone: no driver, a specification, the environment on standard input."""
    paths = {"log": LOG_FILE, "exit": EXIT_FILE, "pids": PIDS_FILE}
    spec: dict[str, Any] = {
        "argv": [*PYTHON, code],
        "workdir": str(folder),
        "timeout": 20.0,
        "grace": 0.4,
        "echo": False,
        "log_limit": 2**26,
        **{name: str(folder / file) for name, file in paths.items()},
        **changes,
    }
    (folder / SPEC_FILE).write_text(json.dumps(spec))
    command = [sys.executable, str(SHIM), str(folder / SPEC_FILE), "-1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(b"{}")
    process.stdin.close()
    return process


def fake_root(folder: Path, cgroup: str, **counters: str) -> Path:
    """A root with `/proc/vmstat`, `/proc/self/cgroup`, and counters by their path below `/sys/fs/cgroup`."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/vmstat").write_text("nr_free_pages 12\noom_kill 3\n")
    (folder / "proc/self/cgroup").write_text(cgroup)
    for path, text in counters.items():
        file = folder / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


EVENTS = "low 0\nhigh 0\nmax 5\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("cgroup", "path", "text"),
    [
        ("0::/user.slice/job\n", "user.slice/job/memory.events", EVENTS),
        ("0::/\n", "memory.events", EVENTS),
        ("0::/../../host\n", "memory.events", EVENTS),
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control", CONTROL),
        ("11:cpu,memory:/docker/abc\n", "memory/memory.oom_control", CONTROL),
    ],
)
def test_oom_counters(tmp_path: Path, cgroup: str, path: str, text: str) -> None:
    root = fake_root(tmp_path, cgroup, **{path: text.format(7)})
    assert sorted(shim.oom_kills(root).values()) == [3, 7]


def test_oom_counters_that_are_not_there(tmp_path: Path) -> None:
    assert shim.oom_kills(tmp_path) == {}
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 12\n\n")
    assert shim.oom_kills(tmp_path) == {}


@pytest.mark.parametrize(
    ("end", "counted"),
    [
        ("os.kill(os.getpid(), 9)", True),
        ("os._exit(137)", True),
        ("os._exit(1)", False),
        ("time.sleep(60)", False),  # the shim's own KILL
    ],
)
def test_oom_kill_counts_only_with_a_kill_by_someone_else(tmp_path: Path, end: str, counted: bool) -> None:
    root = fake_root(tmp_path / "root", "0::/\n")
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open({str(root / 'proc/vmstat')!r}, 'w').write('oom_kill 4'); {end}"
    )
    timeout = 1.0 if "sleep" in end else 20.0
    process = start_shim(tmp_path, code, stdout=subprocess.DEVNULL, root=str(root), timeout=timeout)
    until(lambda: process.poll() is not None)
    exit = read_exit(tmp_path)
    assert exit is not None
    assert exit.oom_kill is counted


# Values


def test_exit_round_trips_and_refuses_what_it_is_not() -> None:
    exit = Exit("exited", code=3, seconds=1.5, oom_kill=True, stragglers=2)
    assert Exit.from_json(json.loads(json.dumps(exit.to_json()))) == exit
    good = exit.to_json()
    for bad in ({**good, "schema": 2}, {**good, "why": "died"}, {**good, "extra": 1}, {"schema": 1}):
        with pytest.raises(ValueError, match=r"exit|end"):
            Exit.from_json(bad)


def test_read_exit_of_nothing_and_of_nonsense(tmp_path: Path) -> None:
    assert read_exit(tmp_path) is None
    for text in ("", "[]", '{"schema": 1'):
        (tmp_path / EXIT_FILE).write_text(text)
        assert read_exit(tmp_path) is None


# The scripted executor


def run_all(executor: ScriptedExecutor, tasks: list[Task], *, jobs: int) -> list[Exit]:
    """The simplest driver there is: `jobs` at once, in order."""
    waiting, running, exits = list(tasks), list[Handle](), list[Exit]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(executor.start(waiting.pop(0)))
        for handle in list(running):
            if exit := executor.poll(handle):
                running.remove(handle)
                exits.append(exit)
    return exits


def test_scripted_executor_plays_and_records(tmp_path: Path) -> None:
    def play(task: Task) -> Scripted:
        code = int(task.argv[-1])
        return Scripted(Exit("exited", code=code), seconds=5, files={"probe/outcome.json": f"{code}"})

    tasks = []
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        tasks.append(script(folder, "", argv=("train", str(number)), slot=(str(number % 2),)))
    clock = Clock()
    executor = ScriptedExecutor(play, clock=clock)
    exits = run_all(executor, tasks, jobs=2)
    assert sorted(exit.code or 0 for exit in exits) == list(range(6))
    assert executor.starts == tasks
    assert (executor.most_at_once, executor.slots) == (2, {"0": 1, "1": 1})
    assert clock() >= 15
    assert (tmp_path / "3/probe/outcome.json").read_text() == "3"
    assert read_exit(tmp_path / "3") in exits


def test_scripted_timeout_stop_and_loss(tmp_path: Path) -> None:
    exits: dict[str, Exit | None] = {"slow": None, "stopped": None, "lost": Exit("lost")}
    executor = ScriptedExecutor(
        lambda task: Scripted(exits[task.argv[0]] or Exit("exited", code=0), seconds=9, files={"done": ""})
    )
    handles = {}
    for name in exits:
        (tmp_path / name).mkdir()
        timeout = 2.0 if name == "slow" else None
        handles[name] = executor.start(script(tmp_path / name, "", argv=(name,), timeout=timeout))
    assert executor.poll(handles["stopped"]) is None
    executor.stop(handles["stopped"])
    assert [wait_scripted(executor, handle).why for handle in handles.values()] == [
        "timed_out",
        "cancelled",
        "lost",
    ]
    assert [(tmp_path / name / "done").exists() for name in exits] == [False, False, True]
    assert [(read_exit(tmp_path / name) is not None) for name in exits] == [True, True, False]
    executor.close()


def wait_scripted(executor: ScriptedExecutor, handle: Handle) -> Exit:
    """Polls without sleeping: the clock moves by itself."""
    while (exit := executor.poll(handle)) is None:
        pass
    return exit
