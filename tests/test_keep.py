"""A process that trains several cells: the same numbers as a process each, and nothing of one cell in the next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nanbisect.app import load, overrides
from nanbisect.executors.base import PIDS_FILE, Exit, Handle, Task, WarmStart, child_environment
from nanbisect.executors.local import LocalExecutor
from nanbisect.matrix import Factor, Matrix
from nanbisect.outcome import CellResult, Status
from nanbisect.run import Driver, Machine, Occasion, execute
from nanbisect.store import Store, read_evidence, read_lines, whole
from nanbisect.trainers.base import probe_environment
from nanbisect.trainers.registry import TRAINERS
from nanbisect.trainers.sft.bases import Base, checksum, copyable, random_state, set_random_state
from nanbisect.trainers.sft.job import Job
from nanbisect.trainers.sft.view import Settings, plan_of
from tests.test_executors import lives, until
from tests.test_warm import TORCH
from tests.test_warm_training import outcomes, pids

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="attempts start warm on Linux only")
VARIES = ("time", "pid", "argv", "memory", "seconds", "probe_seconds")
DEMO = Path(__file__).parent.parent / "matrices" / "demo.yaml"


# training ---------------------------------------------------------------------------------------


@pytest.mark.training
def test_the_demo_in_one_process_is_the_demo(tmp_path: Path) -> None:
    """Losses, norms, sites and records, to the bit; a failing cell leaves nothing to the next."""
    factors = ("batch_size=1|2", "attention=sdpa|eager", "optimizer=adamw|none")
    fixed = ("channel_weights=1,8", "gradient_checkpointing=reentrant")
    matrix = load(DEMO, overrides(None, None, fixed, factors, steps=2))
    warm = outcomes(matrix, tmp_path / "warm", warm=True)
    kept = outcomes(matrix, tmp_path / "kept", warm=True, keep=True)
    assert {one["status"] for one in warm} == {"finite", "nonfinite"}
    assert kept == warm
    assert len(pids(tmp_path / "kept")) == 1 and len(pids(tmp_path / "warm")) == 8


RECIPE = """
import torch
HELD = []
def model(settings):
    torch.manual_seed(0)
    HELD.append(torch.nn.Linear(4, 1))
    return HELD[-1]
def records(settings):
    return [{"id": str(n)} for n in range(4)]
def collate(records, settings):
    return torch.ones(len(records), 4)
def losses(model, batch):
    LATE
    return {"only": (model(batch).square().sum(), len(batch))}
"""


def driven(folder: Path, late: str, **levels: str) -> tuple[CellResult, ...]:
    """A run with --keep-model of a recipe that does something in its losses."""
    (folder / "recipe.py").write_text(RECIPE.replace("LATE", late))
    factors = tuple(Factor(name, tuple(text.split("|"))) for name, text in levels.items())
    matrix = Matrix(
        "m",
        "sft",
        factors,
        recipe="recipe.py",
        steps=1,
        device="cpu",
        folder=str(folder),
        settings={"precision": "fp32"},
    )
    executor, store = LocalExecutor(warm=True), Store.create(folder / "run", {})
    machine, occasion = Machine({"device": "cpu"}, (), ("cpu0",)), Occasion(keep=True)
    try:
        driver = Driver(matrix, TRAINERS["sft"], executor, store=store, machine=machine, occasion=occasion)
        return execute(driver, lambda event: None)
    finally:
        executor.close()


LATE = """
    from pathlib import Path
    calls = Path("calls").stat().st_size if Path("calls").exists() else 0
    Path("calls").open("a").write("x")
    if calls == 0:
        HELD[0].bias.detach().add_(1)  # cell 1: seen at its end
    if calls == 2:
        HELD[0].bias.data.add_(1)  # the second in turn, cell 3: seen before cell 2 starts
"""


@pytest.mark.training
def test_a_process_whose_weights_changed_is_put_aside(tmp_path: Path) -> None:
    """Nothing counts that was seen there, and the cell starts cold; the next has another process."""
    results = driven(tmp_path, LATE, learning_rate="1|2|3")
    assert [[attempt.started for attempt in result.attempts] for result in results] == [
        ["kept", "cold"],
        ["kept", "cold"],
        ["kept"],
    ]
    for attempt in (results[0].attempts[0], results[1].attempts[0]):
        assert attempt.status is Status.KILLED and "as it was loaded" in attempt.reason
    assert all(result.status is Status.FINITE for result in results)


# models that can be copied ----------------------------------------------------------------------


class Tied(torch.nn.Module):
    """A tied weight, a buffer that no checkpoint has, a frozen parameter, a transposed one, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(3, 5).t(), requires_grad=False)
        self.register_buffer("table", torch.arange(5.0), persistent=False)


def base_of(model: torch.nn.Module, settings: Settings | None = None) -> Base:
    job = Job(recipe="r.py", settings={}, folder="", size=1)
    return Base(model, settings or Settings(job, plan_of(job)), random_state())


def test_a_copy_has_the_bits_and_the_alignment_and_nothing_else() -> None:
    """Tied weights stay tied; training the copy leaves the base as it was; a change of any bit is seen."""
    loaded: Any = Tied()
    loaded.embed.weight = torch.nn.Parameter(torch.randn(100)[3:35].view(8, 4))  # not aligned, as in a mapped file
    loaded.head.weight = loaded.embed.weight
    assert copyable(loaded)
    base = base_of(loaded)
    twin: Any = base.copy(torch.device("cpu"))
    assert checksum(twin) == checksum(loaded)
    assert twin.head.weight is twin.embed.weight is not loaded.embed.weight
    assert twin.turned.stride() == (1, 5) and not twin.turned.requires_grad
    assert twin.embed.weight.data_ptr() % 64 == loaded.embed.weight.data_ptr() % 64
    before = checksum(loaded)
    twin.head(twin.embed(torch.tensor([1]))).sum().backward()
    torch.optim.SGD([twin.embed.weight], lr=1.0).step()
    assert checksum(loaded) == before != checksum(twin) and not base.touched()
    for tensor, index in ((loaded.table, 4), (loaded.turned, (0, 0))):
        with torch.no_grad():
            tensor[index] = torch.nextafter(tensor[index], torch.tensor(9.0))
        assert checksum(loaded) != before and base.touched()
        before = checksum(loaded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_a_checksum_sees_what_and_where(dtype: torch.dtype) -> None:
    """Values, their order, the sign of zero, the bits of a NaN; across the chunks that it takes."""
    module = torch.nn.Module()
    module.register_buffer("b", torch.zeros((1 << 20) + 3, dtype=dtype))
    marks = {checksum(module)}
    buffer: Any = module.b
    for index in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 2):
        buffer[index] = 1
        marks.add(checksum(module))
        buffer[index] = 0
    if dtype.is_floating_point:
        for value in (-0.0, float("nan")):
            buffer[0] = value
            marks.add(checksum(module))
    assert len(marks) == (8 if dtype.is_floating_point else 6)


def _hooked(model: Any) -> None:
    model.head.register_forward_hook(lambda *_: None)


def _wrapped(model: Any) -> None:
    real = model.embed.forward
    model.embed.forward = lambda ids: real(ids)


def _closed(model: Any) -> None:
    model.scale = lambda x: x * model.turned


def _aliased(model: Any) -> None:
    model.other = torch.nn.Parameter(model.turned.data[1:], requires_grad=False)


def _grad_hook(model: Any) -> None:
    model.embed.weight.register_hook(lambda grad: grad)


@pytest.mark.parametrize("spoil", [_hooked, _wrapped, _closed, _aliased, _grad_hook])
def test_a_model_that_a_copy_would_share_is_loaded_again(spoil: Callable[[Any], None]) -> None:
    """A function that holds on to the loaded model would train it."""
    model = Tied()
    assert copyable(model)
    spoil(model)
    assert not copyable(model)


def test_a_base_serves_only_where_loading_would_give_it() -> None:
    """The settings that loading read, also those that the model read later; the random numbers if it drew any."""

    def settings(**changed: str) -> Settings:
        job = Job(recipe="r.py", settings=changed, folder="", size=1)
        return Settings(job, plan_of(job))

    own = settings()
    base = base_of(Tied(), own)
    now = base.before
    assert now == base.after
    own["attention"], own["batch_size"]
    torch.rand(1)
    other = random_state()
    assert other != now and base.serves(settings(learning_rate="1"), now, ())
    assert not base.serves(settings(attention="eager"), now, ())
    assert not base.serves(settings(), other, ())  # a user's model() may have seeded
    assert base.serves(settings(attention="eager"), other, ("attention",))
    assert not base.serves(settings(batch_size="2"), other, ("attention",))
    drew = Base(Tied(), own, other)
    assert drew.before != drew.after
    assert drew.serves(settings(), other, ()) and not drew.serves(settings(), random_state(), ())
    first = torch.rand(1)
    set_random_state(drew.after)
    assert torch.equal(torch.rand(1), first)


def test_a_model_that_holds_its_settings_is_known_by_what_it_reads_later() -> None:
    """A copy shares them with the base, so that what the training reads is known of the base."""
    job = Job(recipe="r.py", settings={}, folder="", size=1)
    own: Any = Settings(job, plan_of(job))
    model: Any = Tied()
    model.settings = own
    twin: Any = base_of(model, own).copy(torch.device("cpu"))
    assert twin.settings is own


TWICE = """
import os, sys, torch
probe, folders = sys.modules["_nanbisect_probe"], sys.argv[1:]
observer = probe._observer
def train(bad):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        loss = model(torch.ones(2, 4)).square().sum()
        (loss * float("nan") if bad else loss).backward()
        if bad and step:
            model[0].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
train(sys.argv[1] == "bad")
for number in range(30 if sys.argv[1] == "bad" else 0):
    observer.unhanded = None  # trouble of the probe's own
    observer.leaving = lambda: 1 / 0
    observer.stopper.finish() if not number else probe._end(1, 2, 3)
observer.__dict__.pop("leaving", None)
probe.finish()
os.environ["NANBISECT_PROBE"] = sys.argv[2]
probe.again(sys.argv[2])
train(False)
probe._end(1, 2, 3)
probe.finish()
"""


@pytest.mark.training
def test_the_probe_begins_another_training_as_if_it_had_seen_none(tmp_path: Path) -> None:
    """After a NaN, repairs and errors of its own: the same lines as after nothing of the kind."""
    found = []
    for first in ("bad", "good"):
        folders = [tmp_path / first / name for name in "ab"]
        for folder in folders:
            folder.mkdir(parents=True)
        env = {**os.environ, **probe_environment(folders[0], os.environ)}
        subprocess.run([sys.executable, "-c", "import torch\n" + TWICE, first, str(folders[1])], env=env, check=True)
        (path,) = folders[1].glob("events.*.jsonl")
        lines = read_lines(path)
        assert whole(lines) and read_evidence(folders[1]).armed
        found.append([{k: v for k, v in line.items() if k not in VARIES} for line in lines])
        before = [line["kind"] for line in read_lines(next(folders[0].glob("events.*.jsonl")))]
        assert (before.count("probe_error") == 20, "nonfinite" in before) == (first == "bad", first == "bad")
    assert found[0] == found[1]
    kinds = [line["kind"] for line in found[0]]
    assert kinds == ["awake", "root", "self_check", "batch", "step", "batch", "step", "probe_error", "exit"]


# processes --------------------------------------------------------------------------------------

KEEPS = """
import json, os, signal, sys, time
import torch
orders, words = sys.modules["_nanbisect_child"].orders, sys.argv[1:]
while words is not None:
    sys.stdout.write("%s in %s\\n" % (words[0], os.environ["NANBISECT_PROBE"]))
    sys.stdout.flush()
    if words[0] == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if words[0] == "wait":
        time.sleep(60)
    if words[0] == "child":
        os.fork() or time.sleep(60)
    if words[0] == "aside":
        orders.put_aside("as asked")
        time.sleep(60)
    if words[0] == "raise":
        raise SystemExit(3)
    orders.ended(0)
    words = orders.next()
"""


class Keeping:
    """Attempts in a stub's process."""

    def __init__(self, folder: Path, executor: LocalExecutor) -> None:
        self.folder, self.executor, self.count = folder, executor, 0

    def start(self, word: str, *, keep: str = "k", slot: str = "cpu0", timeout: float = 30) -> tuple[Handle, Path]:
        """One attempt."""
        self.count += 1
        attempt = self.folder / f"attempt-{self.count}"
        attempt.mkdir()
        env = child_environment(
            os.environ, set={"PYTHONPATH": str(self.folder / "stub"), "NANBISECT_PROBE": f"place {self.count}"}
        )
        words = (str(self.folder / "keeps.py"), word)
        warm = WarmStart(sys.executable, "script", words, keep=keep)
        task = Task((sys.executable, *words), env, self.folder, attempt, timeout, (slot,), warm)
        return self.executor.start(task), attempt

    def run(self, word: str, **given: Any) -> tuple[Exit, int, str]:
        """One attempt to its end: how, its process, its output."""
        handle, attempt = self.start(word, **given)
        ended = until(lambda: self.executor.poll(handle), 40)
        assert isinstance(ended, Exit)
        return ended, self.main(attempt), (attempt / "log.txt").read_text()

    @staticmethod
    def main(attempt: Path) -> int:
        """The training process, once it is known."""
        until((attempt / PIDS_FILE).exists)
        return int(json.loads((attempt / PIDS_FILE).read_text())["main"]["pid"])


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Keeping]:
    """With a stub for torch."""
    (tmp_path / "stub" / "torch").mkdir(parents=True)
    (tmp_path / "stub" / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "keeps.py").write_text(KEEPS)
    executor = LocalExecutor(warm=True, grace=1.0)
    try:
        yield Keeping(tmp_path, executor)
    finally:
        executor.close()


def test_attempts_follow_one_another_in_one_process(keeping: Keeping) -> None:
    """Each with its own folder, log, environment, exit and mark; nothing is left at the end."""
    seen = []
    for number in range(1, 4):
        ended, main, log = keeping.run("go")
        assert (ended.why, ended.code, ended.started, ended.stragglers) == ("exited", 0, "kept", 0)
        assert log == f"go in place {number}\n"
        marked = {psutil.Process(pid).environ()["NANBISECT_ATTEMPT"] for pid in (main, psutil.Process(main).ppid())}
        assert {Path(mark) for mark in marked} == {keeping.folder / f"attempt-{number}"}
        seen.append(main)
    assert len(set(seen)) == 1
    shim = psutil.Process(seen[0]).ppid()
    files = [psutil.Process(pid).num_fds() for pid in (shim, seen[0])]
    keeping.run("go")
    assert [psutil.Process(pid).num_fds() for pid in (shim, seen[0])] == files
    keeping.executor.close()
    assert not lives(seen[0]) and not lives(shim)


@pytest.mark.parametrize(
    ("word", "why", "code", "signal_", "stragglers"),
    [
        ("crash", "exited", None, signal.SIGSEGV, 0),
        ("raise", "exited", 3, None, 0),
        ("wait", "timed_out", None, signal.SIGTERM, 0),
        ("child", "exited", 0, None, 1),
        ("aside", "put_aside", None, signal.SIGTERM, 0),
    ],
)
def test_an_end_that_is_not_well_ends_the_process(
    keeping: Keeping, word: str, why: str, code: int | None, signal_: int | None, stragglers: int
) -> None:
    """As told by a shim of its own; the next attempt has another process."""
    _, first, _ = keeping.run("go")
    ended, main, _ = keeping.run(word, timeout=1.0 if word == "wait" else 30.0)
    assert main == first and not lives(main)
    assert (ended.why, ended.code, ended.signal, ended.stragglers) == (why, code, signal_, stragglers)
    assert ended.started == "kept"
    ended, main, _ = keeping.run("go")
    assert (ended.code, ended.started) == (0, "kept") and main != first


@pytest.mark.parametrize("victim", ["shim", "main", "server"])
def test_kill_of_any_process_costs_one_attempt_at_most(keeping: Keeping, victim: str) -> None:
    """During an attempt, and between two."""
    _, idle, _ = keeping.run("go")
    (server,) = keeping.executor._servers.servers.values()
    pids = {"shim": psutil.Process(idle).ppid(), "main": idle, "server": server.process.pid}
    if victim != "server":  # whose end leaves nobody to fork another
        os.kill(pids[victim], signal.SIGKILL)
        until(lambda: not lives(pids["main"]) and not lives(pids["shim"]))  # else the attempt that is lost is the next
        _, idle, _ = keeping.run("go")
        pids.update(shim=psutil.Process(idle).ppid(), main=idle)
    handle, attempt = keeping.start("wait")
    until(lambda: "wait" in (attempt / "log.txt").read_text())
    os.kill(pids[victim], signal.SIGKILL)
    if victim == "server":  # the attempt goes on
        time.sleep(0.2)
        assert lives(idle) and keeping.executor.poll(handle) is None
        keeping.executor.stop(handle)
    ended = until(lambda: keeping.executor.poll(handle), 20)
    assert isinstance(ended, Exit) and ended.started == "kept" and not lives(idle)
    assert ended.why == {"shim": "lost", "main": "exited", "server": "cancelled"}[victim]
    ended, other, _ = keeping.run("go")
    assert other != idle and ended.started == ("cold" if victim == "server" else "kept")


def test_a_slot_has_one_process_and_others_make_room(keeping: Keeping) -> None:
    """Another group, and an attempt of its own, end the process that kept its memory there; another slot does not."""
    _, first, _ = keeping.run("go")
    _, elsewhere, _ = keeping.run("go", slot="cpu1")
    assert lives(first) and first != elsewhere
    _, other, _ = keeping.run("go", keep="another")
    assert not lives(first) and lives(other) and lives(elsewhere)
    keeping.run("raise", keep="")
    assert not lives(other) and lives(elsewhere)


@contextmanager
def driver_of(code: str) -> Iterator[Any]:
    """A driver in a process of its own, that says a line."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        yield process


def test_the_driver_s_death_ends_an_idle_process(tmp_path: Path, keeping: Keeping) -> None:
    """Between two attempts there is no attempt to end, and still a process."""
    keeping.executor.close()
    here = Path(__file__).parent.parent
    code = f"""
import sys, time
sys.path.insert(0, {str(here)!r})
from pathlib import Path
from nanbisect.executors.local import LocalExecutor
from tests.test_keep import Keeping
keeping = Keeping(Path({str(tmp_path)!r}), LocalExecutor(warm=True))
print(keeping.run("go")[1], flush=True)
time.sleep(60)
"""
    with driver_of(code) as process:
        main = int(process.stdout.readline())
        shim = psutil.Process(main).ppid()
        assert lives(main)
        process.kill()
        until(lambda: not lives(main) and not lives(shim))
