"""Several cells at once: who gets which slot, in which order, what becomes of a GPU that is taken or faulty."""

from __future__ import annotations

import heapq
import json
import math
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanbisect import app as application
from nanbisect.errors import ExecutorError
from nanbisect.events import CellEnded, CellStarted, Event, RunEnded, SlotNoted
from nanbisect.executors.base import Exit, Task
from nanbisect.executors.local import LocalExecutor
from nanbisect.executors.scripted import Clock, Scripted, ScriptedExecutor
from nanbisect.matrix import Cell, Matrix, expand
from nanbisect.matrix_file import NO_OVERRIDES, read_matrix
from nanbisect.outcome import CellResult, Status
from nanbisect.run import Driver, Machine, Occasion, execute, run_json
from nanbisect.slots import Gpu, Holder, Wish, share_out
from nanbisect.store import Store
from nanbisect.trainers.base import Launch
from nanbisect.trainers.registry import TRAINERS, VOCABULARIES
from tests import fakes

FOUR = Machine({"device": "cuda"}, (), ("0", "1", "2", "3"))
MATRIX = fakes.matrix_of(a=("0", "1"), b=("0", "1", "2"), c=("0", "1"))
GIB = 1 << 30

Levels = Mapping[str, str]


def levels_of(task: Task) -> dict[str, str]:
    """The cell of a scripted attempt."""
    found: dict[str, str] = json.loads((task.folder / "cell.json").read_text())["levels"]
    return found


def scripted(task: Task, seconds: float, *, usable: bool = True, gib: float = 0.5) -> Scripted:
    """A finite attempt that says how long it took and its peak of memory; with `usable`, that its model was called."""
    if usable:
        root = {
            "kind": "root", "time": 1.0, "module": "M", "parameters": 1, "elements": 1, "dtypes": {}, "device": "cpu",
            "dropout": False, "tied": [],
        }  # fmt: skip
        (task.folder / "events.0.1.jsonl").write_text(fakes.lines(fakes.AWAKE, root))
    entries = [json.loads(line) for line in fakes.finite_files()["trainer.jsonl"].splitlines()]
    last = len(entries) - 1
    told = [{**entry, "at": 0.1 + (seconds - 0.1) * place / last} for place, entry in enumerate(entries)]
    memory = {"host": 1000, "device": int(gib * GIB)}
    steps = [fakes.step_event(step, memory=memory) for step in (1, 2)]
    files = {
        **fakes.finite_files(),
        "events.0.1.jsonl": fakes.lines(fakes.AWAKE, fakes.CHECKED, *steps, fakes.EXIT),
        "trainer.jsonl": "".join(json.dumps(entry) + "\n" for entry in told),
    }
    return Scripted(seconds=seconds, files=files)


class Unsynced(Store):
    """Writes without waiting for the disk: these tests make thousands of outcomes."""

    def _write(self, name: str | Path, text: str) -> None:
        (self.folder / name).write_text(text)


@dataclass
class Run:
    """A driver on a clock that only polls and sleeps move, and what it said."""

    driver: Driver
    executor: ScriptedExecutor
    events: list[Event]

    def go(self) -> tuple[CellResult, ...]:
        """To the end."""
        return execute(self.driver, self.events.append)

    @property
    def notes(self) -> list[str]:
        """What was said of slots."""
        return [event.text for event in self.events if isinstance(event, SlotNoted)]


def run_of(
    folder: Path,
    script: Callable[[Task], Scripted],
    *,
    matrix: Matrix = MATRIX,
    machine: Machine = FOUR,
    tick: float = 0.1,
    **occasion: Any,
) -> Run:
    """A run with scripted attempts."""
    clock = Clock()
    executor = ScriptedExecutor(script, clock=clock, tick=tick)
    store = Unsynced(folder) if folder.exists() else Unsynced.create(folder, {})
    when = Occasion(**{"environ": {}, "sleep": clock.sleep, "clock": clock, **occasion})
    driver = Driver(matrix, fakes.FakeTrainer(), executor, store=store, machine=machine, occasion=when)
    return Run(driver, executor, [])


# who gets which --------------------------------------------------------------------------------


@given(
    slots=st.integers(1, 6),
    cells=st.lists(st.tuples(st.integers(1, 6), st.floats(0.1, 9.0)), min_size=1, max_size=30),
)
def test_each_has_all_its_slots_or_none_and_nobody_is_overtaken(slots: int, cells: list[tuple[int, float]]) -> None:
    """Whatever the widths: no slot twice, everyone comes to an end, a wide cell is not starved by narrow ones."""
    names = [str(index) for index in range(slots)]
    waiting = [(place, min(width, slots), seconds) for place, (width, seconds) in enumerate(cells)]
    free, running, started, now = list(names), list[tuple[float, int, tuple[str, ...]]](), list[int](), 0.0
    while waiting or running:
        given_ = share_out([Wish(width) for _, width, _ in waiting], free)
        for (place, width, seconds), taken in zip(list(waiting), given_, strict=True):
            if taken:
                assert len(set(taken)) == width and set(taken) <= set(free)
                free = [slot for slot in free if slot not in taken]
                heapq.heappush(running, (now + seconds, place, taken))
                started.append(place)
        waiting = [item for item in waiting if item[0] not in started]
        assert running, "half-served cells wait for each other"
        now, _, back = heapq.heappop(running)
        free = [name for name in names if name in {*free, *back}]
    assert started == sorted(started)


def test_who_waits_keeps_back_only_what_it_could_use() -> None:
    """A cell that must not go to GPU 0 leaves it to the next one."""
    wishes = [Wish(2, frozenset({"0"})), Wish(1), Wish(1)]
    assert share_out(wishes, ["0", "1"]) == [(), ("0",), ()]
    assert share_out(wishes, ["0", "1", "2"]) == [("1", "2"), ("0",), ()]


@pytest.mark.parametrize(("width", "sets"), [(1, "0 1 2 3"), (2, "0,1 2,3"), (None, "0,1,2,3")])
def test_a_cell_sees_its_own_gpus_and_no_others(tmp_path: Path, width: int | None, sets: str) -> None:
    """One, two and all GPUs a cell: as many cells at once as fit, no GPU twice."""
    run = run_of(tmp_path / "r", lambda task: scripted(task, 2.0), matrix=replace(MATRIX, gpus_per_cell=width))
    results = run.go()
    assert all(result.status is Status.FINITE for result in results)
    assert {task.env["CUDA_VISIBLE_DEVICES"] for task in run.executor.starts} == set(sets.split())
    assert run.executor.most_at_once == len(sets.split())
    assert set(run.executor.slots.values()) == {1}


SPEEDS = st.lists(st.floats(0.4, 2.5), min_size=10, max_size=10)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(speeds=SPEEDS, width=st.sampled_from([1, 2]))
def test_uneven_cells_keep_all_slots_busy(
    tmp_path_factory: pytest.TempPathFactory, speeds: list[float], width: int
) -> None:
    """Within a tenth of what four slots can do at best, whatever the levels cost; nothing is known beforehand."""
    matrix = fakes.matrix_of(a=("0", "1"), b=("0", "1", "2"), c=("0", "1"), d=("0", "1", "2"))
    pace = dict(zip(((f.name, level) for f in matrix.factors for level in f.levels), speeds, strict=True))

    def seconds(cell: Levels) -> float:
        return 1 + 10 * math.prod(pace[item] for item in cell.items())

    run = run_of(
        tmp_path_factory.mktemp("m") / "r",
        lambda task: scripted(task, seconds(levels_of(task))),
        matrix=replace(matrix, gpus_per_cell=width),
        tick=0.02,
    )
    run.go()
    each = [seconds(cell.levels) for cell in expand(matrix)]
    at_once = 4 // width
    assert run.executor.most_at_once == at_once
    assert run.executor.clock.now <= 1.1 * max(sum(each) / at_once, max(each))
    first = [levels_of(task) for task in run.executor.starts[:2]]
    assert first == [dict.fromkeys("abcd", "0"), {"a": "1", "b": "2", "c": "1", "d": "2"}]


def test_one_slot_keeps_the_order_of_the_plan(tmp_path: Path) -> None:
    """However long the cells are; on two the longest come first."""
    machine = replace(FOUR, slots=("0",))

    def script(task: Task) -> Scripted:
        return scripted(task, 1.0 + int(levels_of(task)["b"]))

    alone = run_of(tmp_path / "one", script, machine=machine)
    alone.go()
    order = [levels_of(task) for task in alone.executor.starts]
    cells = [dict(cell.levels) for cell in expand(MATRIX)]
    assert order == [cells[0], cells[-1], *cells[1:-1]]
    two = run_of(tmp_path / "two", script, machine=replace(FOUR, slots=("0", "1")))
    two.go()
    assert [levels_of(task)["b"] for task in two.executor.starts[-2:]] == ["0", "0"]


def test_the_others_start_when_the_first_cell_calls_its_model(tmp_path: Path) -> None:
    """Not before: a model that can't be used is found by one cell. And not much later: slots would stand idle."""
    early = run_of(tmp_path / "early", lambda task: scripted(task, 30.0))
    early.go()
    assert early.executor.clock.now < 3.4 * 30
    late = run_of(tmp_path / "late", lambda task: scripted(task, 30.0, usable=False))
    late.go()
    assert 4 * 30 <= late.executor.clock.now < 4.4 * 30


def test_the_time_left_is_that_of_the_slots(tmp_path: Path) -> None:
    """Two GPUs a cell are two cells at once; the last cells can't be shared out."""
    run = run_of(tmp_path / "r", lambda task: scripted(task, 10.0), matrix=replace(MATRIX, gpus_per_cell=2))
    left: list[tuple[float, float | None]] = []
    execute(
        run.driver,
        lambda event: left.append((run.executor.clock.now, event.left)) if isinstance(event, CellEnded) else None,
    )
    end = run.executor.clock.now
    assert all(told is not None and told == pytest.approx(end - now, abs=3.0) for now, told in left)


# a GPU that somebody has -----------------------------------------------------------------------


class Cards:
    """What is free on the GPUs, and who holds the rest; a test changes it."""

    def __init__(self, **free: float) -> None:
        self.free = {name.removeprefix("gpu"): size for name, size in free.items()}
        self.looks = 0

    def __call__(self, slots: Sequence[str]) -> Mapping[str, Gpu]:
        """As `GpuMemory`; a holder has what is missing of 80 GiB."""
        self.looks += 1
        sizes = {slot: self.free.get(slot, 80.0) for slot in slots}
        return {
            slot: Gpu(80 * GIB, int(size * GIB), (Holder(4711, "ollama", int((80 - size) * GIB)),))
            for slot, size in sizes.items()
        }


def test_a_taken_gpu_is_left_alone_and_named(tmp_path: Path) -> None:
    """The other three do the work; after a while it is put aside with a caution that says who has it."""
    cards = Cards(gpu1=10.0)
    run = run_of(tmp_path / "r", lambda task: scripted(task, 30.0, gib=20), look=cards, patience=60.0)
    results = run.go()
    assert all(result.status is Status.FINITE for result in results)
    assert {task.slot for task in run.executor.starts} == {("0",), ("2",), ("3",)}
    assert ["left to whoever has it" in note for note in run.notes] == [True, False]
    assert "ollama (process 4711, 70.0 GiB)" in run.notes[1]
    (note,) = run.driver.store.notes()
    assert note.code == "gpu_taken" and "GPU 1 was put aside" in note.text


def test_a_gpu_that_is_given_back_is_used(tmp_path: Path) -> None:
    """Nothing is put aside that was only busy for a while."""
    cards = Cards(gpu1=10.0)
    clock = Clock()

    def look(slots: Sequence[str]) -> Mapping[str, Gpu]:
        if clock.now > 20:
            cards.free = {}
        return cards(slots)

    run = run_of(tmp_path / "r", lambda task: scripted(task, 9.0, gib=20), look=look, sleep=clock.sleep, clock=clock)
    run.executor.clock = clock
    run.go()
    assert ("1",) in {task.slot for task in run.executor.starts}
    assert run.driver.store.notes() == () and len(run.notes) == 1


def test_the_peak_of_finished_cells_says_how_much_is_needed(tmp_path: Path) -> None:
    """Half of a card before anything is known; then as much as the largest cell had."""
    cards = Cards(gpu0=10.0, gpu1=60.0)
    run = run_of(tmp_path / "r", lambda task: scripted(task, 5.0), machine=replace(FOUR, slots=("0", "1")), look=cards)
    run.go()
    slots = [task.slot for task in run.executor.starts]
    assert slots[0] == ("1",)
    assert ("0",) in slots


def test_when_all_are_taken_the_run_says_by_whom_and_ends(tmp_path: Path) -> None:
    """It waits, but not for ever; what has ended is kept and --resume goes on."""
    cards = Cards()

    def script(task: Task) -> Scripted:
        cards.free = {"0": 5, "1": 5}  # from now on somebody has them
        return scripted(task, 5.0, gib=20)

    two = replace(FOUR, slots=("0", "1"))
    run = run_of(tmp_path / "r", script, machine=two, look=cards, patience=60.0)
    with pytest.raises(ExecutorError, match=r"0 of 2 GPUs are left(.|\n)*ollama \(process 4711(.|\n)*--resume"):
        run.go()
    assert run.events[-1] == RunEnded(str(tmp_path / "r"), interrupted=True)
    assert 60 <= run.executor.clock.now < 120
    assert 1 <= sum(result.status is Status.FINITE for result in run.driver.results()) <= 2
    again = run_of(tmp_path / "r", lambda task: scripted(task, 5.0), machine=two, look=Cards())
    assert all(result.status is Status.FINITE for result in again.go())


def test_a_run_that_ends_since_all_are_taken_still_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has ended is in the report, and why no more came."""
    (tmp_path / "train.py").write_text("")
    text = "trainer: command\ncommand: [python, train.py]\nflags: {x: ['{value}']}\nfactors: {x: [1, 2]}\n"
    (tmp_path / "m.yaml").write_text(text)
    monkeypatch.setattr("nanbisect.run.check_machine", lambda *_: replace(FOUR, slots=("0",)))
    occasion = Occasion(look=Cards(gpu0=5.0), patience=0.0)
    with pytest.raises(ExecutorError, match="0 of 1 GPUs are left"):
        application.run(tmp_path / "m.yaml", NO_OVERRIDES, occasion, out=tmp_path / "r", resume=False, reports=tmp_path)
    report = (tmp_path / "r" / "report.md").read_text()
    assert "GPU 0 was put aside" in report and "not run" in report
    assert (tmp_path / "r" / "result.json").is_file()


def test_a_cell_that_takes_all_does_not_make_do_with_less(tmp_path: Path) -> None:
    """Fewer GPUs would be another experiment."""
    every = replace(MATRIX, gpus_per_cell=None)
    run = run_of(tmp_path / "r", lambda task: scripted(task, 5.0), matrix=every, look=Cards(gpu3=1.0), patience=30.0)
    with pytest.raises(ExecutorError, match="3 of 4 GPUs are left, and a cell takes 4"):
        run.go()
    assert run.executor.starts == []


def test_an_interrupt_ends_the_wait_for_a_gpu(tmp_path: Path) -> None:
    """Nothing runs then, and nothing is left."""

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    run = run_of(tmp_path / "r", lambda task: scripted(task, 5.0), look=Cards(gpu0=1.0), sleep=sleep)
    run.driver.pool.slots = ("0",)
    run.driver.pool.free = ["0"]
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert run.events[-1] == RunEnded(str(tmp_path / "r"), interrupted=True)
    assert run.executor.starts == []


def test_a_gpu_is_not_asked_about_at_every_turn(tmp_path: Path) -> None:
    """A look takes a while; cells of half a second would wait for it longer than they run."""
    cards = Cards()
    run = run_of(tmp_path / "r", lambda task: scripted(task, 0.5), machine=replace(FOUR, slots=("0",)), look=cards)
    run.go()
    assert len(run.executor.starts) == 12
    assert cards.looks <= 5


def test_a_cell_again_waits_for_a_gpu_with_memory(tmp_path: Path) -> None:
    """`rerun` takes the first that has enough, not simply the first."""
    run_of(tmp_path / "r", lambda task: scripted(task, 5.0, gib=20)).go()
    run = run_of(tmp_path / "r", lambda task: scripted(task, 5.0), look=Cards(gpu0=19))
    (outcome,) = run.driver.single.again(expand(MATRIX)[3], seeds=[0], listener=run.events.append)
    assert outcome.status is Status.FINITE
    assert [event.slot for event in run.events if isinstance(event, CellStarted)] == ["1"]


# a GPU at fault --------------------------------------------------------------------------------

BROKEN = [Exit("exited", code=1), Exit("exited", signal=9, oom_kill=True), Exit("timed_out"), Exit("exited", signal=9)]


def on_faulty(faulty: set[str], hopeless: Callable[[Levels], bool], end: Exit) -> Callable[[Task], Scripted]:
    """Attempts that fail, and fast, on some GPUs; and cells that fail everywhere."""

    def script(task: Task) -> Scripted:
        if faulty.intersection(task.slot) or hopeless(levels_of(task)):
            return Scripted(exit=end, seconds=0.5)
        return scripted(task, 5.0)

    return script


@pytest.mark.parametrize("end", BROKEN, ids=["failed", "oom", "timed_out", "killed"])
def test_a_faulty_gpu_is_put_aside_and_its_cells_are_made_again(tmp_path: Path, end: Exit) -> None:
    """It would fail every cell, and fastest of all; the report says so."""
    run = run_of(tmp_path / "r", on_faulty({"1"}, lambda levels: False, end))
    results = run.go()
    assert all(result.status is Status.FINITE for result in results)
    failed = [task for task in run.executor.starts if task.slot == ("1",)]
    assert 2 <= len(failed) <= 3
    (note,) = run.driver.store.notes()
    assert note.code == "gpu_failing" and note.text.startswith("GPU 1 was put aside: a=")
    assert {outcome.seed for result in results for outcome in result.attempts} == {0}


def test_a_faulty_first_gpu_does_not_take_the_controls_with_it(tmp_path: Path) -> None:
    """The very first cell fails there; the second goes elsewhere, and then the baseline is made again."""
    matrix = fakes.matrix_of(a=("0", "1"), b=("0", "1"))
    run = run_of(tmp_path / "r", on_faulty({"0"}, lambda levels: False, BROKEN[0]), matrix=matrix)
    results = run.go()
    assert all(result.status is Status.FINITE for result in results)
    assert [task.slot for task in run.executor.starts[:2]] == [("0",), ("1",)]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    faulty=st.sets(st.sampled_from("0123"), max_size=3),
    level=st.sampled_from(["a=1", "b=1", "b=2", "c=0", "none"]),
    end=st.sampled_from(BROKEN),
    width=st.sampled_from([1, 1, 2]),
    repeat=st.sampled_from([1, 2]),
)
def test_what_could_be_judged_is_judged_and_no_gpu_is_blamed_for_a_cell(
    tmp_path_factory: pytest.TempPathFactory, faulty: set[str], level: str, end: Exit, width: int, repeat: int
) -> None:
    """Cells that fail everywhere are not the GPU's fault; GPUs that fail every cell are not the cells'."""

    def hopeless(levels: Levels) -> bool:
        name, _, value = level.partition("=")
        return levels.get(name) == value

    matrix = replace(MATRIX, gpus_per_cell=width, repeat=repeat)
    run = run_of(tmp_path_factory.mktemp("f") / "r", on_faulty(faulty, hopeless, end), matrix=matrix)
    results = run.go()
    aside = set(run.driver.pool.aside)
    if width == 1:
        assert aside <= faulty
    anything = any(outcome.judged for result in results for outcome in result.attempts)
    good = [pair for pair in ("0,1", "2,3") if faulty.isdisjoint(pair.split(","))] if width == 2 else {*"0123"} - faulty
    for result in results:
        judged = sum(outcome.judged for outcome in result.attempts)
        assert judged == (repeat if good and anything and not hopeless(result.cell.levels) else 0), (result, aside)
        assert len(result.attempts) <= 2 * repeat + (2 if end is BROKEN[3] else 0)  # a killed one is tried again anyway
    assert set(run.executor.slots.values()) == {1}


def test_one_gpu_is_never_at_fault(tmp_path: Path) -> None:
    """There is no other place to try; and slots of a CPU are all the same machine."""
    for machine in (replace(FOUR, slots=("0",)), Machine({"device": "cpu"}, (), ("cpu0", "cpu1"))):
        script = on_faulty({"0", "cpu1"}, lambda levels: False, BROKEN[0])
        run = run_of(tmp_path / machine.slots[0], script, machine=machine)
        run.go()
        assert len(run.executor.starts) == 12
        assert run.driver.store.notes() == ()


def test_a_gpu_put_aside_is_a_caution_of_the_report(tmp_path: Path) -> None:
    """On the page and in the result, with advice."""
    script = on_faulty({"1"}, lambda levels: False, BROKEN[0])
    run = run_of(tmp_path / "r", script, matrix=replace(MATRIX, trainer="sft"))
    run.driver.store.write_run(run_json(run.driver.matrix, fakes.FakeTrainer(), FOUR, Occasion()))
    run.go()
    page = application.report(str(tmp_path / "r"), "md", redact=True, reports=tmp_path)
    assert "GPU 1 was put aside" in page and "nvidia-smi" in page
    data = json.loads(application.report(str(tmp_path / "r"), "json", redact=True, reports=tmp_path))
    assert "gpu_failing" in [caution["code"] for caution in data["cautions"]]


# ports -----------------------------------------------------------------------------------------

LAUNCHER = """
import json, pathlib, socket, sys
holder = socket.socket()
try:
    holder.bind(("127.0.0.1", int(sys.argv[1])))
except OSError as error:
    raise SystemExit(f"DistNetworkError: code: -98, name: EADDRINUSE, message: {error}")
for name, text in json.loads(sys.argv[2]).items():
    pathlib.Path(name).write_text(text)
"""


class Launcher(fakes.FakeTrainer):
    """Starts a process that listens on the next of these ports."""

    def __init__(self, *given: int) -> None:
        self.ports = list(given)

    def launch(self, matrix: Matrix, cell: Cell, *, seed: int, folder: Path) -> Launch:
        """A real process without torch."""
        port = self.ports.pop(0) if len(self.ports) > 1 else self.ports[0]
        argv = (sys.executable, "-S", "-c", LAUNCHER, str(port), json.dumps(fakes.finite_files()))
        return Launch(argv, str(folder))


def real(matrix: Matrix, trainer: Any, folder: Path, *, machine: Machine = FOUR, usable: bool = False) -> Run:
    """A run with real processes; `usable`: nobody waits for the first cell."""
    executor = LocalExecutor()
    driver = Driver(matrix, trainer, executor, store=Store.create(folder, {}), machine=machine, occasion=Occasion())
    driver.attempts.usable = usable
    return Run(driver, executor, [])  # type: ignore[arg-type]  # the executor is closed by the test


def test_a_taken_port_is_tried_once_more_with_another(tmp_path: Path) -> None:
    """And said so; when that one is taken, too, the cell has failed."""
    matrix = fakes.matrix_of(a=("0", "1"))
    with socket.socket() as holder, socket.socket() as free:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        free.bind(("127.0.0.1", 0))
        taken, other = holder.getsockname()[1], free.getsockname()[1]
        free.close()
        run = real(matrix, Launcher(taken, other, taken, taken), tmp_path / "r")
        first, second = run.go()
        run.driver.executor.close()
    assert [outcome.status for outcome in first.attempts] == [Status.FAILED, Status.FINITE]
    assert [outcome.status for outcome in second.attempts] == [Status.FAILED, Status.FAILED]
    assert [note.code for note in first.attempts[0].doubts] == ["port_taken"]
    assert {outcome.seed for outcome in (*first.attempts, *second.attempts)} == {0}
    assert run.driver.store.notes() == ()


# real processes --------------------------------------------------------------------------------

QUICK = """
import json, pathlib, sys, time
time.sleep(float(sys.argv[1]))
for name, text in json.loads(sys.argv[2]).items():
    pathlib.Path(name).write_text(text)
"""


class Uneven(fakes.FakeTrainer):
    """Real processes of uneven length, without torch."""

    def launch(self, matrix: Matrix, cell: Cell, *, seed: int, folder: Path) -> Launch:
        """Sleeps, and leaves a finished attempt's files."""
        seconds = 0.15 * (1 + int(cell.levels["a"])) * (1 + int(cell.levels["b"]))
        files = {name: text for name, text in fakes.finite_files().items() if name != "trainer.jsonl"}
        return Launch((sys.executable, "-S", "-c", QUICK, str(seconds), json.dumps(files)), str(folder))


def test_four_slots_are_busy_with_real_processes(tmp_path: Path) -> None:
    """Within a tenth of the bound, by the times for which cells really had their slots: `--jobs 4` on a CPU."""
    matrix = fakes.matrix_of(a=("0", "1", "2"), b=("0", "1", "2"), c=("0", "1", "2"))
    machine = Machine({"device": "cpu"}, (), tuple(f"cpu{index}" for index in range(4)))
    run = real(matrix, Uneven(), tmp_path / "r", machine=machine, usable=True)
    had: dict[str, list[float]] = {}
    most = 0

    def listener(event: Event) -> None:
        nonlocal most
        if isinstance(event, CellStarted | CellEnded):
            had.setdefault(event.cell.id, []).append(run.driver.occasion.clock())
            most = max(most, sum(len(times) == 1 for times in had.values()))

    results = execute(run.driver, listener)
    run.driver.executor.close()
    assert all(result.status is Status.FINITE for result in results)
    assert most == 4
    each = [end - began for began, end in had.values()]
    took = max(end for _, end in had.values()) - min(began for began, _ in had.values())
    assert took <= 1.1 * max(sum(each) / 4, max(each)) + 0.5  # half a second to start what begins


TRAINING = """
import json, os, sys, time
began = time.time()
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    time.sleep(float(sys.argv[2]))
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with open(os.path.join(sys.argv[3], "seen.json"), "w") as file:
    json.dump([os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"], began, time.time()], file)
"""


@pytest.mark.training
@pytest.mark.parametrize(("width", "sets", "waits"), [(1, "0 1 2 3", "0.1, 0.2, 0.4, 0.8"), ("all", "0,1,2,3", "0, 1")])
def test_real_trainings_have_their_own_slots(tmp_path: Path, width: int | str, sets: str, waits: str) -> None:
    """On a machine that pretends to have four GPUs: what each saw and when, told by itself."""
    (tmp_path / "train.py").write_text(TRAINING)
    text = f"""\
name: uneven
trainer: command
command: [{sys.executable}, train.py, "{{steps}}", "{{wait}}", "{{cell_dir}}"]
steps: 2
gpus_per_cell: {width}
env: {{OMP_NUM_THREADS: "1"}}
factors: {{wait: [{waits}]}}
"""
    matrix = read_matrix(text, source="m", folder=str(tmp_path), vocabularies=VOCABULARIES)
    run = real(matrix, TRAINERS["command"], tmp_path / "r", usable=True)
    results = run.go()
    run.driver.executor.close()
    assert all(result.status is Status.FINITE for result in results), [r.outcome for r in results]
    seen = [json.loads(path.read_text()) for path in (tmp_path / "r").rglob("seen.json")]
    assert {names for names, *_ in seen} == set(sets.split())
    assert {threads for _, threads, *_ in seen} == {"1"}
    for names, _, began, _ in seen:
        meanwhile = [other for other, _, start, end in seen if start <= began < end]
        slots = [slot for other in meanwhile for slot in other.split(",")]
        assert len(slots) == len(set(slots)), (names, meanwhile)


RANKS = """
import os, pathlib, sys, time
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
told = ["RANK", str(accelerator.process_index), str(accelerator.num_processes), os.environ["MASTER_PORT"],
        os.environ["CUDA_VISIBLE_DEVICES"], torch.distributed.get_backend()]
sys.stdout.write(" ".join(told) + "\\n")
pathlib.Path("here-" + sys.argv[1]).touch()
deadline = time.monotonic() + 100
while not all(os.path.exists("here-" + cell) for cell in "12"):
    if time.monotonic() > deadline:
        raise SystemExit("the other cell never came")
    time.sleep(0.05)
for step in range(3):
    accelerator.backward(model(torch.randn(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.training
def test_two_cells_of_two_processes_have_their_own_ports_and_gpus(tmp_path: Path) -> None:
    """`accelerate launch` over gloo, four pretended GPUs: each cell trains only while the other is there, too."""
    (tmp_path / "train.py").write_text(RANKS)
    launch = f'{sys.executable}, -m, accelerate.commands.launch, --multi_gpu, --num_processes, "{{gpus}}"'
    text = f"""\
name: ranks
trainer: command
command: [{launch}, --main_process_port, "{{port}}", train.py, "{{n}}"]
steps: 2
gpus_per_cell: 2
env: {{ACCELERATE_USE_CPU: "true", OMP_NUM_THREADS: "1"}}
factors: {{n: [1, 2]}}
"""
    matrix = read_matrix(text, source="m", folder=str(tmp_path), vocabularies=VOCABULARIES)
    run = real(matrix, TRAINERS["command"], tmp_path / "r", usable=True)
    results = run.go()
    run.driver.executor.close()
    assert all(result.status is Status.FINITE for result in results), [r.outcome for r in results]
    told = [
        sorted(line.split()[1:] for line in path.read_text().splitlines() if line.startswith("RANK "))
        for path in (tmp_path / "r").rglob("log.txt")
    ]
    assert [[rank for rank, *_ in lines] for lines in told] == [["0", "1"], ["0", "1"]]
    (port, gpus), (other_port, other_gpus) = [(lines[0][2], lines[0][3]) for lines in told]
    for lines in told:
        assert [line[1:] for line in lines] == [["2", lines[0][2], lines[0][3], "gloo"]] * 2
    assert port != other_port
    assert {gpus, other_gpus} == {"0,1", "2,3"}
