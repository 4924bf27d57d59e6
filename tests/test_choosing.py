"""Runs whose cells a search chooses, with scripted attempts: what is run, what is said, and resuming."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanbisect import cells as all_cells
from nanbisect import console as show
from nanbisect import schedule
from nanbisect.again import cell_of
from nanbisect.attribution import Finding, Standing, attribute
from nanbisect.cells import Cells
from nanbisect.choosing import SearchFlags, budget_of, costs, strength_of
from nanbisect.errors import UsageError
from nanbisect.events import CellEnded, CellStarted, Event, RunEnded, RunStarted
from nanbisect.executors.base import Exit, Task, WarmStart
from nanbisect.executors.scripted import Scripted, ScriptedExecutor
from nanbisect.machine import run_json
from nanbisect.matrix import Cell, Matrix
from nanbisect.outcome import CellResult, Outcome, Status
from nanbisect.report.examples import next_steps
from nanbisect.report.inputs import RunInputs
from nanbisect.report.markdown import to_markdown
from nanbisect.report.model import build
from nanbisect.report.redact import Redactor
from nanbisect.report.result import to_result
from nanbisect.report.search import SearchSummary
from nanbisect.reporting import exit_code, inputs_of
from nanbisect.run import Driver, Machine, Occasion, execute
from nanbisect.search.propose import account, propose
from nanbisect.search.space import Space
from nanbisect.search.values import Plan, Strategy, Trial
from nanbisect.store import Store
from nanbisect.tables import to_csv
from nanbisect.trainers.base import Launch
from tests import fakes

NEVER = ("root cause", "safe to", "fixed")
DEMO = replace(
    fakes.matrix_of(
        gradient_checkpointing=("off", "on"),
        batch_size=("1", "2", "8"),
        channel_weights=("1,8", "1,32"),
        attention=("sdpa", "eager", "flash"),
    ),
    trainer="command",
    command=("train",),
)
LARGE = replace(
    fakes.matrix_of(**{f"f{index}": ("0", "1", "2") for index in range(11)}), trainer="command", command=("train",)
)
QUICK = Plan(strength=(2, 1))
NO_FLASH = replace(fakes.MACHINE, blocked=(({"attention": "flash"}, "not installed"),))
Levels = Mapping[str, str]


def demo_fails(levels: Levels) -> bool:
    """As in the demo: a pair, of which one part has two levels that act alike."""
    return levels["attention"] == "eager" and levels["batch_size"] != "1"


def large_fails(levels: Levels) -> bool:
    """A pair."""
    return levels["f1"] == "1" and levels["f5"] == "2"


def driver_for(
    folder: Path,
    fails: Callable[[Levels], bool] | ScriptedExecutor = demo_fails,
    *,
    matrix: Matrix = DEMO,
    machine: Machine = fakes.MACHINE,
    plan: Plan = QUICK,
    **told: Any,
) -> Driver:
    """A driver over a new or existing run folder, on the script's own clock."""
    executor = fails if isinstance(fails, ScriptedExecutor) else fakes.executor_for(fails)
    occasion = Occasion(
        environ={}, sleep=lambda seconds: None, clock=executor.clock, plan=plan,
        arguments=("nanbisect", "run", "m.yaml"), matrix_path="m.yaml", **told,
    )  # fmt: skip
    trainer = fakes.FakeTrainer()
    about = run_json(matrix, trainer, machine, occasion)
    store = Store(folder) if folder.exists() else Store.create(folder, about)
    return Driver(matrix, trainer, executor, store=store, machine=machine, occasion=occasion)


def go(driver: Driver, listener: Callable[[Event], None] = lambda event: None) -> tuple[CellResult, ...]:
    """The whole run."""
    return execute(driver, listener)


def read(folder: Path) -> RunInputs:
    """What a report of that folder is made of; every rendering of it can be made, and none says too much."""
    inputs = inputs_of(Store(folder))
    report = build(inputs)
    console = show.console_for()
    with console.capture() as shown:
        show.show_report(console, report)
    texts = (to_markdown(report, Redactor.none()), shown.get(), to_csv(inputs.results), json.dumps(_json(inputs)))
    assert not [(word, text) for text in texts for word in NEVER if word in text.lower()]
    return inputs


def _json(inputs: RunInputs) -> Any:
    return json.loads(json.dumps(to_result(inputs), allow_nan=False))


def causes(inputs: RunInputs) -> list[tuple[dict[str, tuple[str, ...]], str]]:
    """Levels and standing of what may be called a cause."""
    found = [cause for cause in inputs.attribution.causes if cause.standing is not Standing.NOT_TOLD_APART]
    return [(dict(cause.levels), cause.standing.value) for cause in found]


def test_the_demo_s_cause_from_at_most_sixteen_cells(tmp_path: Path) -> None:
    """The grid's cause, the baseline first, every reason told, and the account in result and report."""
    events: list[Event] = []
    driver = driver_for(tmp_path / "r", machine=NO_FLASH)
    results = go(driver, events.append)
    assert len(results) <= 16
    started = [event for event in events if isinstance(event, CellStarted)]
    assert all(event.why for event in started)
    assert started[0].cell.levels == DEMO.baseline
    assert all(event.cell.levels["attention"] != "flash" for event in started)
    assert isinstance(events[0], RunStarted)
    assert (events[0].search, events[0].of, events[0].cells) == ("adaptive 2,1", 36, ())
    inputs = read(tmp_path / "r")
    ((levels, standing),) = causes(inputs)
    assert levels == {"batch_size": ("2", "8"), "attention": ("eager",)}
    assert standing in ("supported", "proved")
    assert (inputs.total, inputs.interrupted, inputs.attribution.finding) == (36, False, Finding.CAUSE)
    known = _json(inputs)["completeness"]
    assert (known["pending"], known["up_to_factors"], known["cells"], known["of_cells"]) == (0, 2, len(results), 36)
    assert known["untestable"] > 0
    assert known["ended"] == driver.ended == "the search has tried all that it can at strength 2,1"
    assert any("12 of 36 cells can't run here: attention=flash" in caution.text for caution in inputs.cautions)
    assert exit_code(results, known=driver.known()) == 1
    assert "was not run" not in "".join(caution.text for caution in inputs.cautions)
    (*_, step) = next_steps(inputs, ())
    assert step.command == "nanbisect run m.yaml --finish-grid --resume --out reports/r"


def test_the_rest_of_the_grid_gives_what_the_grid_gives(tmp_path: Path) -> None:
    """The same attempts are not made again, and the cause is proved, as if no search had been."""
    chosen = go(driver_for(tmp_path / "r", machine=NO_FLASH))
    driver = driver_for(tmp_path / "r", machine=NO_FLASH, finish=True)
    finished = go(driver)
    assert len({*begun(driver)}) == 24 - len(chosen)
    grid = go(driver_for(tmp_path / "grid", machine=NO_FLASH, plan=Plan(Strategy.GRID)))
    assert [(result.cell, result.status) for result in finished] == [(result.cell, result.status) for result in grid]
    one, other = read(tmp_path / "r"), read(tmp_path / "grid")
    assert one.attribution.causes == other.attribution.causes
    assert causes(one)[0][1] == "proved"
    assert "then the rest of the grid was run" in driver.ended


class StopError(Exception):
    """Raised by a listener to end a driver where it stands."""


def stopping_after(number: int) -> Callable[[Event], None]:
    """A listener that ends the driver when so many cells have ended."""
    ended: list[Event] = []

    def listener(event: Event) -> None:
        if isinstance(event, CellEnded):
            ended.append(event)
            if len(ended) == number:
                raise StopError

    return listener


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stop=st.integers(1, 13), torn=st.booleans(), jobs=st.integers(1, 3))
def test_killed_anywhere_and_resumed_it_is_the_same_run(
    tmp_path_factory: pytest.TempPathFactory, stop: int, torn: bool, jobs: int
) -> None:
    """The same cause; on one slot the very same cells in the same order."""
    folder = tmp_path_factory.mktemp("stop")
    machine = Machine({"device": "cpu"}, (), tuple(f"cpu{index}" for index in range(jobs)))
    first = driver_for(folder / "r", machine=machine)
    with pytest.raises(StopError):
        go(first, stopping_after(stop))
    if torn:  # the driver died between the end of an attempt and its outcome
        newest = max((folder / "r").glob("cells/*/attempt-1/outcome.json"), key=lambda path: path.stat().st_mtime_ns)
        newest.unlink()
    assert read(folder / "r").interrupted
    second = driver_for(folder / "r", machine=machine)
    go(second)
    inputs = read(folder / "r")
    assert not inputs.interrupted
    assert [levels for levels, _ in causes(inputs)] == [{"batch_size": ("2", "8"), "attention": ("eager",)}]
    if jobs == 1:
        whole = driver_for(folder / "whole", machine=machine)
        go(whole)
        assert [*begun(first), *begun(second)] == begun(whole)
        assert first.attempts.order | second.attempts.order == whole.attempts.order
        assert causes(inputs) == causes(read(folder / "whole"))


def begun(driver: Driver) -> list[tuple[str, ...]]:
    """What the driver's executor was given to start."""
    assert isinstance(driver.executor, ScriptedExecutor)
    return [task.argv for task in driver.executor.starts]


def test_a_budget_of_attempts_counts_across_a_kill_and_not_what_was_there_before(tmp_path: Path) -> None:
    """The same plan goes on with what is left of it; another plan takes what is there for nothing."""
    plan = replace(QUICK, budget=6)
    with pytest.raises(StopError):
        go(driver_for(tmp_path / "r", plan=plan), stopping_after(4))
    driver = driver_for(tmp_path / "r", plan=plan)
    assert len(go(driver)) == 6
    assert driver.ended == "its budget of 6 attempts is used up"
    inputs = read(tmp_path / "r")
    assert not inputs.interrupted
    known = _json(inputs)["completeness"]
    assert known["pending"] > 0
    assert known["complete"] is False
    assert not causes(inputs)
    assert "Go on with the search" in next_steps(inputs, ())[-1].text
    more = driver_for(tmp_path / "r", plan=replace(QUICK, budget=5))
    assert len(go(more)) == 11
    assert len(go(driver_for(tmp_path / "r"))) < 36
    assert causes(read(tmp_path / "r"))[0][0] == {"batch_size": ("2", "8"), "attention": ("eager",)}


def test_a_budget_that_is_spent_without_a_failure_is_no_clean_bill(tmp_path: Path) -> None:
    """Exit code 3, not 0: combinations are pending. 0 is for a search that came to its end."""
    short = driver_for(tmp_path / "short", lambda levels: False, plan=replace(QUICK, budget=4))
    assert exit_code(go(short), known=short.known()) == 3
    assert "not reproduced" in build(read(tmp_path / "short")).verdict
    whole = driver_for(tmp_path / "whole", lambda levels: False)
    results = go(whole)
    assert len(results) < 36
    assert exit_code(results, known=whole.known()) == 0
    assert any("at least 3 factors" in text for text in build(read(tmp_path / "whole")).account)


@pytest.mark.parametrize("strategy", [Strategy.ADAPTIVE, Strategy.GRID])
def test_a_budget_of_time_starts_nothing_after_it(tmp_path: Path, strategy: Strategy) -> None:
    """What is under way ends; a cell takes a second, and some ticks of the clock."""
    plan = replace(QUICK, strategy=strategy)
    driver = driver_for(tmp_path / "r", plan=plan, spend=5.0)
    results = go(driver)
    assert 3 <= sum(result.status is not None for result in results) <= 6
    assert driver.ended == "its budget of 5 s is used up"
    inputs = read(tmp_path / "r")
    assert not inputs.interrupted
    if strategy is Strategy.GRID:
        assert "The run ended early, for its budget of 5 s is used up" in build(inputs).verdict
    again = driver_for(tmp_path / "r", plan=plan)
    assert len(go(again)) == (36 if strategy is Strategy.GRID else len(read(tmp_path / "r").results))
    assert causes(read(tmp_path / "r"))


def test_a_grid_can_have_a_budget_of_attempts(tmp_path: Path) -> None:
    """In the grid's own order; enough for all of it, it is the plain grid."""
    driver = driver_for(tmp_path / "r", plan=Plan(Strategy.GRID, budget=5))
    assert sum(result.status is not None for result in go(driver)) == 5
    assert driver.ended == "its budget of 5 attempts is used up"
    go(driver_for(tmp_path / "r", plan=Plan(Strategy.GRID, budget=31)))
    assert Store(tmp_path / "r").search() == {}
    assert not read(tmp_path / "r").ended


def test_a_grid_that_was_stopped_can_go_on_as_a_search(tmp_path: Path) -> None:
    """What was run counts, and costs nothing of the budget; it may go back to a grid, too."""
    with pytest.raises(StopError):
        go(driver_for(tmp_path / "r", plan=Plan(Strategy.GRID)), stopping_after(10))
    driver = driver_for(tmp_path / "r", plan=replace(QUICK, budget=12))
    results = go(driver)
    assert 10 < len(results) <= 22
    assert len(begun(driver)) == len(results) - 10
    assert causes(read(tmp_path / "r"))[0][0] == {"batch_size": ("2", "8"), "attention": ("eager",)}
    assert len(go(driver_for(tmp_path / "r", plan=Plan(Strategy.GRID)))) == 36
    assert read(tmp_path / "r").search is None


def test_an_older_run_without_notes_of_its_levels_can_go_on_as_a_search(tmp_path: Path) -> None:
    """Its folders have the names of its cells."""
    with pytest.raises(StopError):
        go(driver_for(tmp_path / "r", plan=Plan(Strategy.GRID)), stopping_after(10))
    for path in (tmp_path / "r").glob("cells/*/attempt-*/attempt.json"):
        path.write_text(json.dumps({"schema": 1, "seed": 0}))
    driver = driver_for(tmp_path / "r")
    assert len(driver.results()) == 10
    results = go(driver)
    assert len(begun(driver)) == len(results) - 10


def test_a_large_grid_is_never_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """177,147 cells: run, killed, resumed and reported in seconds, within its budget."""

    def listed(matrix: Matrix) -> Any:
        raise AssertionError("the cells were listed")

    monkeypatch.setattr(all_cells, "expand", listed)
    plan = Plan(strength=(2, 1), budget=60)
    began = time.perf_counter()
    with pytest.raises(StopError):
        go(driver_for(tmp_path / "r", large_fails, matrix=LARGE, plan=plan), stopping_after(10))
    results = go(driver_for(tmp_path / "r", large_fails, matrix=LARGE, plan=plan))
    assert len(results) <= 60
    inputs = read(tmp_path / "r")
    assert causes(inputs) == [({"f1": ("1",), "f5": ("2",)}, "supported")]
    assert (inputs.total, inputs.attribution.causes[0].matching) == (3**11, 3**9)
    assert f"of {3**9:,} matching cells failed" in to_markdown(build(inputs), Redactor.none())
    failing = next(result.cell for result in results if result.status is Status.NONFINITE)
    for name in (str(failing.number), failing.id):
        assert cell_of(Store(tmp_path / "r"), LARGE, name) == failing
    assert cell_of(Store(tmp_path / "r"), LARGE, "12345").number == 12345
    with pytest.raises(UsageError, match="no cell matches 'f1=9'"):
        cell_of(Store(tmp_path / "r"), LARGE, "f1=9")
    assert time.perf_counter() - began < 30


def test_a_large_run_that_died_at_its_birth_can_be_read_and_goes_on(tmp_path: Path) -> None:
    """It had not written how its cells are chosen."""
    driver_for(tmp_path / "r", large_fails, matrix=LARGE)
    inputs = read(tmp_path / "r")
    assert (inputs.attribution.finding, inputs.interrupted) == (Finding.NOTHING_JUDGED, True)
    assert len(go(driver_for(tmp_path / "r", large_fails, matrix=LARGE, plan=replace(QUICK, budget=3)))) == 3


def test_what_repeats_leave_possible_is_said(tmp_path: Path) -> None:
    """0 of 3 with its bound; one attempt a cell has none to speak of."""
    matrix = replace(fakes.matrix_of(a=("0", "1")), trainer="command", command=("train",), repeat=3)
    go(driver_for(tmp_path / "r", lambda levels: False, matrix=matrix, plan=Plan(Strategy.GRID)))
    assert "0 of 3 leaves up to 63 % of its attempts" in build(read(tmp_path / "r")).scope
    go(driver_for(tmp_path / "one", lambda levels: False, plan=replace(QUICK, budget=3)))
    assert "Clopper" not in build(read(tmp_path / "one")).scope


def test_several_slots_are_kept_busy_and_never_exceeded(tmp_path: Path) -> None:
    """The first cell goes alone; isolation waits for what it needs."""
    machine = Machine({"device": "cpu"}, (), ("cpu0", "cpu1", "cpu2"))
    driver = driver_for(tmp_path / "r", machine=machine, plan=Plan())
    results = go(driver)
    executor = driver.executor
    assert isinstance(executor, ScriptedExecutor)
    assert executor.most_at_once == 3
    assert max(executor.slots.values()) == 1
    assert len(results) < 36
    assert causes(read(tmp_path / "r"))[0][0] == {"batch_size": ("2", "8"), "attention": ("eager",)}


def test_levels_that_turn_out_not_to_run_are_left_out_from_then_on(tmp_path: Path) -> None:
    """The training process names them; no other cell with them is started."""

    def script(task: Task) -> Scripted:
        levels = json.loads((task.folder / "cell.json").read_text())["levels"]
        if levels["attention"] == "flash":
            text = fakes.diary(how="unsupported", text="not in this model", levels={"attention": "flash"})
            return Scripted(files={**fakes.finite_files(), "trainer.jsonl": text})
        return Scripted(files=fakes.nonfinite_files() if demo_fails(levels) else fakes.finite_files())

    driver = driver_for(tmp_path / "r", ScriptedExecutor(script))
    results = go(driver)
    assert sum(result.cell.levels["attention"] == "flash" for result in results) == 1
    inputs = read(tmp_path / "r")
    assert causes(inputs)[0][0] == {"batch_size": ("2", "8"), "attention": ("eager",)}
    assert _json(inputs)["completeness"]["untestable"] > 0


def test_cells_that_end_unjudged_are_no_evidence_and_end_the_search_all_the_same(tmp_path: Path) -> None:
    """One level always runs out of memory: it is listed as untestable, and never part of a cause."""
    ends = {"8": Exit("exited", signal=9, oom_kill=True)}
    driver = driver_for(tmp_path / "r", fakes.executor_for(demo_fails, ends=ends))
    go(driver)
    inputs = read(tmp_path / "r")
    assert causes(inputs)[0][0] == {"batch_size": ("2",), "attention": ("eager",)}
    assert _json(inputs)["completeness"]["untestable"] > 0
    assert _json(inputs)["completeness"]["pending"] == 0


def test_a_cell_that_ends_both_ways_gets_further_seeds(tmp_path: Path) -> None:
    """A failure that comes with every second seed: within a hard budget, with the share that may still hide."""

    def script(task: Task) -> Scripted:
        cell = json.loads((task.folder / "cell.json").read_text())
        fails = demo_fails(cell["levels"]) and (cell["seed"] + len(cell["levels"]["channel_weights"])) % 2
        return Scripted(files=fakes.nonfinite_files() if fails else fakes.finite_files())

    matrix = replace(DEMO, repeat=2)
    driver = driver_for(
        tmp_path / "r", ScriptedExecutor(script), matrix=matrix, plan=replace(QUICK, budget=160, repeats=2)
    )
    results = go(driver)
    seeds = {outcome.seed for result in results for outcome in result.attempts}
    assert len(seeds) > 2
    assert sum(len(result.attempts) for result in results) <= 160
    inputs = read(tmp_path / "r")
    known = _json(inputs)["completeness"]
    assert known["flaky"] is True
    assert known["bound"] is None or 0 < known["bound"] < 1
    assert any("Clopper-Pearson" in text for text in build(inputs).account) == (known["bound"] is not None)
    assert [levels for levels, _ in causes(inputs)] == [{"batch_size": ("2", "8"), "attention": ("eager",)}]


def test_the_first_cause_says_that_nothing_else_was_looked_for(tmp_path: Path) -> None:
    """From the safe cell on, a factor after another; the adaptive search goes on from there."""
    plan = Plan(Strategy.FIRST_CAUSE, strength=(2, 1))
    driver = driver_for(tmp_path / "r", plan=plan, machine=NO_FLASH)
    results = go(driver)
    assert len(results) < 10
    assert driver.ended == "a cause was found, and nothing else was looked for"
    inputs = read(tmp_path / "r")
    assert dict(inputs.attribution.causes[0].levels).keys() == {"batch_size", "attention"}
    assert any("nothing else" in text for text in build(inputs).account)
    assert "--strategy adaptive" in next_steps(inputs, ())[-1].command
    go(driver_for(tmp_path / "r", machine=NO_FLASH))
    assert causes(read(tmp_path / "r"))[0][0] == {"batch_size": ("2", "8"), "attention": ("eager",)}


def test_a_baseline_that_fails_is_said_and_is_no_combination(tmp_path: Path) -> None:
    """Everything fails: nothing to compare with."""
    for strategy in (Strategy.ADAPTIVE, Strategy.FIRST_CAUSE):
        go(driver_for(tmp_path / strategy.value, lambda levels: True, plan=Plan(strategy, budget=12)))
        inputs = read(tmp_path / strategy.value)
        assert inputs.attribution.finding is Finding.EVERYTHING_FAILED
        assert "The baseline itself" in build(inputs).verdict


def test_a_search_that_was_killed_before_its_first_cell_ended_reads_as_such(tmp_path: Path) -> None:
    """The control was not run, and nothing was judged."""
    executor = fakes.executor_for(demo_fails, seconds=50.0)

    def listener(event: Event) -> None:
        ended.append(event)
        if isinstance(event, CellStarted):
            raise KeyboardInterrupt

    ended: list[Event] = []
    with pytest.raises(KeyboardInterrupt):
        go(driver_for(tmp_path / "r", executor), listener)
    assert ended[-1] == RunEnded(str(tmp_path / "r"), interrupted=True)
    inputs = read(tmp_path / "r")
    assert inputs.attribution.finding is Finding.NOTHING_JUDGED
    assert "The search was interrupted." in build(inputs).verdict


# flags


def test_strength_and_budget_are_read_or_refused() -> None:
    """Numbers are attempts, times have a unit."""
    assert [strength_of(text) for text in (None, "2", "2,1", "1", "3,0")] == [(3, 2), (2, 1), (2, 1), (1, 0), (3, 0)]
    assert [budget_of(text) for text in (None, "60", "2h", "90s")] == [
        (None, None),
        (60, None),
        (None, 7200),
        (None, 90),
    ]
    for bad in ("4", "0,1", "two", "3,3", "3,2,1", ""):
        with pytest.raises(UsageError, match="--strength"):
            strength_of(bad)
    for bad in ("0", "-3", "2x", "soon", "1.5", ""):
        with pytest.raises(UsageError, match="--budget"):
            budget_of(bad)


def test_small_matrices_run_whole_and_large_ones_by_search() -> None:
    """Up to 64 cells the grid; the grid is refused where cells are not listed."""
    larger = fakes.matrix_of(**{f"f{index}": ("0", "1") for index in range(7)})
    assert SearchFlags().plan(DEMO)[0].strategy is Strategy.GRID
    assert SearchFlags(strength="2,1").plan(DEMO)[0] == QUICK
    assert SearchFlags().plan(larger)[0] == Plan()
    assert SearchFlags(strategy="grid").plan(larger)[0].strategy is Strategy.GRID
    assert SearchFlags(budget="2h").plan(replace(larger, exclude=({"f0": "1"},))) == (
        Plan(Strategy.GRID, strength=(3, 2)), 7200,
    )  # fmt: skip
    assert SearchFlags(strategy="adaptive").plan(fakes.matrix_of(a=("0", "1")))[0].strength == (1, 1)
    for flags in (
        SearchFlags(strategy="grid"),
        SearchFlags(strategy="adaptive", finish=True),
        SearchFlags(finish=True),
    ):
        with pytest.raises(UsageError, match="up to 20,000 combinations, and the matrix has 177,147"):
            flags.plan(LARGE)
    with pytest.raises(UsageError, match="--strength is for"):
        SearchFlags(strategy="grid", strength="2").plan(DEMO)


def test_a_run_goes_on_with_the_strategy_that_it_has(tmp_path: Path) -> None:
    """A grid as a grid, a search as that search; unless told otherwise."""
    larger = fakes.matrix_of(**{f"f{index}": ("0", "1") for index in range(7)})
    go(driver_for(tmp_path / "r", plan=replace(QUICK, budget=3)))
    kept = Store(tmp_path / "r").search()
    assert SearchFlags().plan(DEMO, kept)[0] == QUICK
    assert SearchFlags(budget="9").plan(DEMO, kept)[0] == replace(QUICK, budget=9)
    assert SearchFlags(strategy="grid").plan(DEMO, kept)[0].strategy is Strategy.GRID
    assert SearchFlags().plan(larger, {})[0].strategy is Strategy.GRID
    assert SearchFlags(strength="2").plan(larger, {})[0] == QUICK
    assert SearchFlags().plan(LARGE, {})[0] == Plan()


# what may be called a cause


def test_a_baseline_that_can_t_run_here_is_said_and_not_asked_for(tmp_path: Path) -> None:
    """As in a grid: it was not judged, for that reason."""
    machine = replace(fakes.MACHINE, blocked=(({"attention": "sdpa"}, "no such kernel"),))
    driver = driver_for(tmp_path / "r", machine=machine)
    results = go(driver)
    assert all(result.cell.levels["attention"] != "sdpa" for result in results)
    inputs = read(tmp_path / "r")
    said = {caution.code: caution.text for caution in inputs.cautions}
    assert "was not judged (unsupported)" in said["baseline_not_judged"]
    assert "not_run" not in said
    assert _json(inputs)["completeness"]["cells"] == len(results)


def planted(random: Random) -> list[dict[str, str]]:
    """One to three causes of one to three factors of `SHAPE`, none of them the baseline."""
    while True:
        found = []
        for _ in range(random.choice((1, 1, 2, 3))):
            factors = random.sample(SHAPE.factors, random.randint(1, 3))
            found.append({factor.name: random.choice(factor.levels) for factor in factors})
        if not holds_any(SHAPE.baseline, found):
            return found


def holds_any(levels: Levels, causes: list[dict[str, str]]) -> bool:
    """Whether a cell holds one of these."""
    return any(cause.items() <= levels.items() for cause in causes)


SHAPE = fakes.matrix_of(a=("0", "1"), b=("0", "1", "2"), c=("0", "1"), d=("0", "1", "2"))


def test_what_a_search_calls_a_cause_is_one_also_when_a_budget_ends_it() -> None:
    """Of 160 truths, each at a random budget, in half of them a tenth of the cells not to be judged: under 2 % of
    the causes are false, and none that is proved."""
    random, cells, space = Random(6), Cells(SHAPE), Space.of(SHAPE)
    wrong = named = 0
    for _ in range(160):
        truth, budget = planted(random), random.choice((8, 12, 16, 20, 36))
        share = random.choice((0, 0.1))
        lost = [cell.levels for cell in cells.every if random.random() < share]
        plan, trials = Plan(strength=random.choice(((2, 1), (3, 2)))), list[Trial]()
        while len(trials) < budget and (chosen := propose(space, trials, plan).choices):
            levels = space.levels(chosen[0].row)
            judged = Status.NONFINITE if holds_any(levels, truth) else Status.FINITE
            trials.append(Trial(chosen[0].row, Status.OUT_OF_MEMORY if levels in lost else judged))
        summary = SearchSummary(plan, account(space, trials, plan), space)
        results = [CellResult(cells.cell(space.levels(t.row)), (Outcome(t.status, ""),)) for t in trials]
        found = attribute(SHAPE.factors, results, searched=summary.searched(cells.count)).causes
        for cause in [one for one in found if one.standing is not Standing.NOT_TOLD_APART]:
            held = [c for c in cells.every if all(c.levels[n] in levels for n, levels in cause.levels.items())]
            false = not all(holds_any(cell.levels, truth) for cell in held)
            assert cause.matching == len(held)
            assert not (false and cause.standing is Standing.PROVED)
            wrong, named = wrong + false, named + 1
    assert named > 100
    assert wrong / named < 0.02


class WarmTrainer(fakes.FakeTrainer):
    """Whose command could start warm, as soon as one cell has shown that it may."""

    def launch(self, matrix: Matrix, cell: Cell, *, seed: int, folder: Path) -> Launch:
        """With a warm start."""
        return replace(
            super().launch(matrix, cell, seed=seed, folder=folder), warm=WarmStart("python", "script", ("train.py",))
        )


def test_a_command_may_start_warm_under_a_search_too(tmp_path: Path) -> None:
    """The first judged cell is run both ways, though nothing waits behind it yet; the others start warm."""
    driver = driver_for(tmp_path / "r")
    driver.trainer = driver.attempts.trainer = WarmTrainer()
    results = go(driver)
    assert isinstance(driver.executor, ScriptedExecutor)
    starts = driver.executor.starts
    assert len(starts) == len(results) + 1
    assert starts[0].argv == starts[1].argv
    assert starts[0].warm is None
    assert all(task.warm is not None for task in starts[1:])


def test_the_costs_that_a_search_hears_do_not_hang_on_the_order_of_sums() -> None:
    """Else a run that was killed and resumed would choose among equals otherwise."""
    cells, space, random = Cells(DEMO), Space.of(DEMO), Random(3)
    results = [
        CellResult(cell, (Outcome(Status.FINITE, "", train_seconds=random.random(), micro_batches=2),))
        for cell in random.sample(cells.every, 20)
    ]
    work = {result.cell.id: 2.0 for result in results}
    told = []
    for _ in range(3):
        random.shuffle(results)
        cost = costs(space, schedule.forecast(results, work))
        assert cost is not None
        told.append([cost(space.row(cell.levels)) for cell in cells.every])
    assert told[0] == told[1] == told[2]
    assert len({*told[0]}) > 10
