"""Driving a run with scripted attempts: order, slots, resume, blocking, interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanbisect.errors import UsageError
from nanbisect.events import CellEnded, Event, LevelBlocked, RunEnded, RunStarted
from nanbisect.executors.base import Exit, Task
from nanbisect.executors.scripted import Scripted, ScriptedExecutor
from nanbisect.matrix import Matrix, expand
from nanbisect.outcome import CellResult, Status
from nanbisect.run import BadFirstCell, Driver, Machine, Occasion, execute, pick_cell, slots_of
from nanbisect.store import Store
from tests import fakes

MATRIX = fakes.matrix_of(a=("0", "1"), b=("0", "1", "2"), c=("0", "1"))
OCCASION = Occasion(environ={}, sleep=lambda seconds: None)


def driver_for(
    folder: Path, executor: ScriptedExecutor, *, matrix: Matrix = MATRIX, machine: Machine = fakes.MACHINE
) -> Driver:
    """A driver over a new or existing run folder."""
    store = Store(folder) if folder.exists() else Store.create(folder, {})
    return Driver(matrix, fakes.FakeTrainer(), executor, store=store, machine=machine, occasion=OCCASION)


def go(driver: Driver, listener: Callable[[Event], None] = lambda event: None) -> tuple[CellResult, ...]:
    """The whole run."""
    return execute(driver, listener)


def both(levels: Any) -> bool:
    """A pair brings the NaN."""
    return bool(levels["a"] == "1" and levels["b"] == "2")


def test_every_cell_ends_and_the_order_is_baseline_likeliest_rest(tmp_path: Path) -> None:
    """The control first, then all last levels."""
    executor = fakes.executor_for(both)
    results = go(driver_for(tmp_path / "r", executor))
    assert [result.cell.number for result in results] == list(range(1, 13))
    assert {result.cell.number for result in results if result.status is Status.NONFINITE} == {11, 12}
    started = [json.loads((task.folder / "cell.json").read_text())["levels"] for task in executor.starts]
    assert list(started[0].values()) == ["0", "0", "0"]
    assert list(started[1].values()) == ["1", "2", "1"]
    assert len(started) == 12


def test_blocked_levels_are_not_started_and_say_why(tmp_path: Path) -> None:
    """Tried once per environment, not once a cell; the likeliest to fail is one that can run."""
    machine = replace(fakes.MACHINE, blocked=(({"b": "2"}, "no such kernel"),))
    executor = fakes.executor_for(both)
    events: list[Event] = []
    results = go(driver_for(tmp_path / "r", executor, machine=machine), events.append)
    assert len(executor.starts) == 8
    assert [result.outcome.reason for result in results if result.outcome and result.status is Status.UNSUPPORTED] == [
        "no such kernel"
    ] * 4
    assert [event.levels for event in events if isinstance(event, LevelBlocked)] == [{"b": "2"}]
    assert json.loads((executor.starts[1].folder / "cell.json").read_text())["levels"] == {"a": "1", "b": "1", "c": "1"}


def test_a_level_found_unsupported_by_a_cell_blocks_the_others(tmp_path: Path) -> None:
    """The training process names the levels; no other cell with them is started."""

    def script(task: Any) -> Scripted:
        levels = json.loads((task.folder / "cell.json").read_text())["levels"]
        if levels["b"] == "1":
            text = fakes.diary(how="unsupported", text="not in this model", levels={"b": "1"})
            return Scripted(files={**fakes.finite_files(), "trainer.jsonl": text})
        return Scripted(files=fakes.finite_files())

    executor = ScriptedExecutor(script)
    results = go(driver_for(tmp_path / "r", executor))
    assert sum("b=1" in task.argv[1] for task in executor.starts) == 1
    assert sum(result.status is Status.UNSUPPORTED for result in results) == 4


def test_slots_are_never_exceeded_and_each_cell_sees_its_own(tmp_path: Path) -> None:
    """Two GPUs, one cell each."""
    machine = Machine({"device": "cuda"}, (), ("0", "3"))
    executor = fakes.executor_for(both)
    go(driver_for(tmp_path / "r", executor, machine=machine))
    assert executor.most_at_once == 2
    assert executor.slots == {"0": 1, "3": 1}
    assert {task.env["CUDA_VISIBLE_DEVICES"] for task in executor.starts} == {"0", "3"}


def test_a_cell_of_several_gpus_takes_them_at_once(tmp_path: Path) -> None:
    """Four GPUs, two a cell: two cells at a time, each with its own pair; too few GPUs is an error."""
    machine = Machine({"device": "cuda"}, (), ("0", "1", "2", "3"))
    executor = fakes.executor_for(both)
    go(driver_for(tmp_path / "r", executor, matrix=replace(MATRIX, gpus_per_cell=2), machine=machine))
    assert executor.most_at_once == 2
    assert {task.env["CUDA_VISIBLE_DEVICES"] for task in executor.starts} == {"0,1", "2,3"}
    assert max(executor.slots.values()) == 1
    every = replace(MATRIX, gpus_per_cell=None)
    go(driver_for(tmp_path / "all", fakes.executor_for(both), matrix=every, machine=machine))
    with pytest.raises(UsageError, match="there are 4 GPUs"):
        driver_for(tmp_path / "few", executor, matrix=replace(MATRIX, gpus_per_cell=8), machine=machine)


def test_the_first_cell_goes_alone_until_one_was_judged(tmp_path: Path) -> None:
    """A model that can't be used is found once, not in every slot."""
    machine = Machine({"device": "cpu"}, (), ("cpu0", "cpu1", "cpu2"))
    text = fakes.diary(how="bad_input", text="no such model")
    executor = ScriptedExecutor(lambda task: Scripted(files={"trainer.jsonl": text}))
    with pytest.raises(BadFirstCell, match="no such model"):
        go(driver_for(tmp_path / "r", executor, machine=machine))
    assert len(executor.starts) == 1
    assert not (tmp_path / "r").exists()


def test_attempts_have_the_seeds_of_their_numbers(tmp_path: Path) -> None:
    """Attempt k uses seed + k - 1, the same in every cell."""
    matrix = replace(MATRIX, repeat=3, settings={"seed": "5"})
    executor = fakes.executor_for(both)
    results = go(driver_for(tmp_path / "r", executor, matrix=matrix))
    assert {tuple(outcome.seed for outcome in result.attempts) for result in results} == {(5, 6, 7)}


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (Exit("exited", code=1), Status.FAILED),
        (Exit("exited", signal=9, oom_kill=True), Status.OUT_OF_MEMORY),
        (Exit("timed_out"), Status.TIMED_OUT),
    ],
)
def test_cells_that_are_not_judged_do_not_stop_the_run(tmp_path: Path, end: Exit, status: Status) -> None:
    """They are named, and the rest goes on."""
    executor = fakes.executor_for(both, ends={"2": end})
    results = go(driver_for(tmp_path / "r", executor))
    assert [result.status for result in results].count(status) == 4
    assert [result.status for result in results].count(Status.FINITE) == 8


def test_resuming_tries_once_more_what_may_end_otherwise(tmp_path: Path) -> None:
    """Failed, timed out, out of memory: made again with its seed, and only once; an unsupported level is not."""
    ends = {"1": Exit("exited", code=1), "2": Exit("timed_out")}
    matrix = fakes.matrix_of(b=("0", "1", "2"), seedless=("x", "y"))
    go(driver_for(tmp_path / "r", fakes.executor_for(lambda levels: False, ends=ends), matrix=matrix))
    told: list[int] = []

    def listener(event: Event) -> None:
        if isinstance(event, RunStarted):
            told.append(event.kept)
        if isinstance(event, CellEnded):
            told.append(event.done)

    mended = fakes.executor_for(lambda levels: False, ends={"2": Exit("timed_out")})
    results = go(driver_for(tmp_path / "r", mended, matrix=matrix), listener)
    assert len(mended.starts) == 4
    assert told == [2, 3, 4, 5, 6]
    statuses = [[outcome.status for outcome in result.attempts] for result in results]
    assert statuses[2:4] == [[Status.FAILED, Status.FINITE]] * 2
    assert statuses[4:] == [[Status.TIMED_OUT, Status.TIMED_OUT]] * 2
    assert {outcome.seed for result in results for outcome in result.attempts} == {0}


def test_resuming_meets_a_level_that_is_blocked_by_now(tmp_path: Path) -> None:
    """What failed before and can't run any more is unsupported, and the run comes to its end."""
    matrix = fakes.matrix_of(b=("0", "1"))
    go(
        driver_for(
            tmp_path / "r", fakes.executor_for(lambda levels: False, ends={"1": Exit("exited", code=1)}), matrix=matrix
        )
    )
    machine = replace(fakes.MACHINE, blocked=(({"b": "1"}, "gone"),))
    results = go(driver_for(tmp_path / "r", fakes.executor_for(lambda levels: False), matrix=matrix, machine=machine))
    assert [outcome.status for outcome in results[1].attempts] == [Status.FAILED, Status.UNSUPPORTED]


class StopError(Exception):
    """Raised by a listener to end a driver where it stands."""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stop=st.integers(0, 11), torn=st.booleans(), killed=st.booleans())
def test_stopping_anywhere_and_resuming_gives_the_same(
    tmp_path_factory: pytest.TempPathFactory, stop: int, torn: bool, killed: bool
) -> None:
    """No finished cell is run again, none is lost; an attempt cut off is made again with its seed."""
    folder = tmp_path_factory.mktemp("stop") / "r"
    seen: list[str] = []

    def listener(event: Event) -> None:
        if isinstance(event, CellEnded):
            seen.append(event.cell.id)
            if len(seen) > stop:
                raise StopError

    first = fakes.executor_for(both)
    with pytest.raises(StopError):
        go(driver_for(folder, first), listener)
    if torn:  # the driver died between the end of an attempt and its outcome
        cell = next(cell for cell in expand(MATRIX) if cell.id == seen[-1])
        (Store(folder).attempt_folders(cell)[-1] / "outcome.json").unlink()
    if killed:  # and another was cut off in the middle
        cell = next(cell for cell in expand(MATRIX) if cell.id not in seen) if len(seen) < 12 else expand(MATRIX)[0]
        if cell.id not in seen:
            _, attempt = Store(folder).new_attempt(cell)
            (attempt / "armed.jsonl").write_text("{}\n")
    second = fakes.executor_for(both)
    resumed = go(driver_for(folder, second))
    whole = go(driver_for(folder.parent / "whole", fakes.executor_for(both)))
    assert [result.status for result in resumed] == [result.status for result in whole]
    assert {task.argv[1] for task in second.starts}.isdisjoint(seen)
    assert {result.outcome.seed for result in resumed if result.outcome} == {0}


def test_an_attempt_without_an_outcome_keeps_its_seed(tmp_path: Path) -> None:
    """A command never says its seed; its driver died between the end of attempt 2 and the outcome."""

    def script(task: Task) -> Scripted:
        levels = json.loads((task.folder / "cell.json").read_text())["levels"]
        files = fakes.nonfinite_files() if both(levels) else fakes.finite_files()
        del files["trainer.jsonl"]
        return Scripted(exit=Exit("exited", code=0, seconds=1.0), files=files)

    matrix = replace(MATRIX, repeat=2, settings={"seed": "5"})
    before = go(driver_for(tmp_path / "r", ScriptedExecutor(script), matrix=matrix))
    for path in (tmp_path / "r").glob("cells/*/attempt-2/outcome.json"):
        path.unlink()
    second = ScriptedExecutor(script)
    after = go(driver_for(tmp_path / "r", second, matrix=matrix))
    assert second.starts == []
    assert [result.status for result in after] == [result.status for result in before]
    assert {tuple(outcome.seed for outcome in result.attempts) for result in after} == {(5, 6)}


def test_an_interrupt_stops_what_runs_and_keeps_what_ended(tmp_path: Path) -> None:
    """The cell under way is killed, not judged; the listener hears it."""
    executor = fakes.executor_for(both, seconds=5.0)
    driver = driver_for(tmp_path / "r", executor)
    ended: list[Event] = []

    def listener(event: Event) -> None:
        if isinstance(event, RunEnded):
            ended.append(event)
        if isinstance(event, CellEnded) and event.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(driver, listener)
    assert ended == [RunEnded(str(tmp_path / "r"), interrupted=True)]
    assert sum(result.status is not None for result in driver.results()) == 3


def test_cells_are_picked_by_number_and_by_unambiguous_part() -> None:
    """Ambiguity lists the candidates."""
    matrix = fakes.matrix_of(attention=("sdpa", "eager"), channel_weights=("1,8", "1,32"), batch_size=("1", "8"))
    cells = expand(matrix)
    assert pick_cell(cells, "3").number == 3
    assert pick_cell(cells, "attention=eager,channel_weights=1,32,batch_size=8").number == 8
    assert pick_cell(cells, cells[4].id) == cells[4]
    with pytest.raises(UsageError, match="4 cells match 'attention=eager'"):
        pick_cell(cells, "attention=eager")
    with pytest.raises(UsageError, match="no cell matches 'flash'"):
        pick_cell(cells, "flash")
    with pytest.raises(UsageError, match="cells go from 1 to 8"):
        pick_cell(cells, "9")


def test_gpu_slots_stay_inside_what_the_user_sees() -> None:
    """--gpus picks from CUDA_VISIBLE_DEVICES; a GPU that is not there is an error."""
    gpus: dict[str, Any] = {"device": "cuda", "gpus": [{}, {}]}
    assert slots_of(gpus, replace(OCCASION, environ={"CUDA_VISIBLE_DEVICES": "4,6"})) == ("4", "6")
    assert slots_of(gpus, OCCASION) == ("0", "1")
    assert slots_of(gpus, replace(OCCASION, gpus="1")) == ("1",)
    with pytest.raises(UsageError, match="no GPU 7"):
        slots_of(gpus, replace(OCCASION, gpus="7"))
    assert slots_of({"device": "cpu"}, replace(OCCASION, jobs=2)) == ("cpu0", "cpu1")
