"""Causes found in shared processes: nothing is proved by them alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanbisect.attribution import Standing, attribute
from nanbisect.confirm import contradicted, shared_only, to_make_again
from nanbisect.executors.base import Exit, Task, WarmStart
from nanbisect.executors.scripted import Scripted, ScriptedExecutor
from nanbisect.matrix import Cell, Factor, Matrix, expand
from nanbisect.outcome import KEPT, CellResult, Outcome, Site, Status
from nanbisect.run import Driver, Occasion, execute
from nanbisect.store import Store
from nanbisect.trainers.base import Launch
from tests import fakes

FACTORS = (Factor("a", ("0", "1")), Factor("b", ("0", "1", "2")), Factor("c", ("0", "1")))
SITE = Site(1, 0, 0, "backward", "nan", ("w",), loss=float("nan"))
FINITE = Outcome(Status.FINITE, "all finite")
NONFINITE = Outcome(Status.NONFINITE, "nan", site=SITE)


def both(levels: Mapping[str, str]) -> bool:
    return levels["a"] == "1" and levels["b"] == "2"


def ran(*own: int, fails: Callable[[Mapping[str, str]], bool] = both) -> list[CellResult]:
    """Every cell in a shared process; those in `own` by themselves, too."""
    results = []
    for cell in expand(Matrix("m", "sft", FACTORS)):
        outcome = NONFINITE if fails(cell.levels) else FINITE
        again = (replace(outcome, attempt=2, started="cold"),) if cell.number in own else ()
        results.append(CellResult(cell, (replace(outcome, started=KEPT), *again)))
    return results


def test_a_cause_is_proved_by_one_failing_cell_and_a_witness_for_each_part() -> None:
    """Until then it is supported, with a caution that names the cells; one after the other settles it."""
    done: list[int] = []
    while True:
        attribution = attribute(FACTORS, ran(*done))
        (cause,) = attribution.causes
        codes = [caution.code for caution in attribution.cautions]
        if not attribution.unconfirmed:
            break
        assert cause.standing is Standing.SUPPORTED and codes.count("kept_model") == 1
        assert to_make_again(attribution.unconfirmed, ran(*done))
        done.append(attribution.unconfirmed[0])
    assert cause.standing is Standing.PROVED and "kept_model" not in codes
    levels = {result.cell.number: result.cell.levels for result in ran()}
    assert [both(levels[number]) for number in done].count(True) == 1 and len(done) == 3


@given(st.sets(st.integers(1, 12)))
def test_nothing_is_proved_by_shared_processes_alone(own: set[int]) -> None:
    """Whichever cells were made by themselves: proved needs a failing one and a witness of each part among them."""
    results = ran(*own)
    (cause,) = attribute(FACTORS, results).causes
    mine = [result.cell.levels for result in results if result.cell.number in own]
    failing = any(map(both, mine))
    witnesses = [any((one["a"] == "1") is a and (one["b"] == "2") is not a for one in mine) for a in (True, False)]
    assert (cause.standing is Standing.PROVED) == (failing and all(witnesses))


def test_a_process_of_its_own_speaks_for_the_cell() -> None:
    """Also where it disagrees; another seed is another attempt; what was not judged says nothing."""
    cell, kept = Cell(1, {}), replace(NONFINITE, started=KEPT)
    own = replace(FINITE, started="warm")
    assert CellResult(cell, (kept, own)).status is Status.FINITE
    assert contradicted(CellResult(cell, (kept, own))) and not CellResult(cell, (kept, own)).disagree
    other = CellResult(cell, (kept, replace(own, seed=1)))
    assert other.status is Status.NONFINITE and other.disagree and not contradicted(other)
    failed = CellResult(cell, (kept, replace(own, status=Status.FAILED)))
    assert failed.status is Status.NONFINITE and shared_only(failed) and not contradicted(failed)
    assert not contradicted(CellResult(cell, (kept, replace(NONFINITE, started="cold"))))
    elsewhere = replace(NONFINITE, started="cold", site=replace(SITE, step=2))
    assert contradicted(CellResult(cell, (kept, elsewhere)))


# the driver -------------------------------------------------------------------------------------


class WarmTrainer(fakes.FakeTrainer):
    """Its cells may start warm."""

    def launch(self, matrix: Matrix, cell: Cell, *, seed: int, folder: Path) -> Launch:
        """A command that nobody runs."""
        return replace(
            super().launch(matrix, cell, seed=seed, folder=folder), warm=WarmStart("p", "module", (), ours=True)
        )


def go(folder: Path, end: Callable[[Mapping[str, str], bool], str], *, keep: bool = True) -> tuple[CellResult, ...]:
    """A run in which `end(levels, kept)` says how an attempt ends: finite, nonfinite, or a reason to end."""

    def script(task: Task) -> Scripted:
        levels = json.loads((task.folder / "cell.json").read_text())["levels"]
        kept = task.warm is not None and bool(task.warm.keep)
        how, started = end(levels, kept), KEPT if kept else "warm" if task.warm else "cold"
        if how in ("finite", "nonfinite"):
            files = fakes.finite_files() if how == "finite" else fakes.nonfinite_files()
            return Scripted(Exit("exited", code=0, started=started), files=files)
        if how == "crash":
            return Scripted(Exit("exited", signal=11, started=started))
        return Scripted(Exit("put_aside", signal=15, started=started), files=fakes.nonfinite_files())

    matrix = fakes.matrix_of(a=("0", "1"), b=("0", "1", "2"), c=("0", "1"))
    store = Store(folder) if folder.exists() else Store.create(folder, {})
    occasion = Occasion(environ={}, sleep=lambda seconds: None, keep=keep)
    driver = Driver(
        matrix, WarmTrainer(), ScriptedExecutor(script), store=store, machine=fakes.MACHINE, occasion=occasion
    )
    return execute(driver, lambda event: None)


def hows(results: tuple[CellResult, ...]) -> list[list[str]]:
    """How each cell's attempts started."""
    return [[attempt.started for attempt in result.attempts] for result in results]


def test_the_driver_confirms_what_it_found_and_no_more(tmp_path: Path) -> None:
    """Three cells again, cold; then the cause is proved."""
    results = go(tmp_path / "r", lambda levels, kept: "nonfinite" if both(levels) else "finite")
    assert sorted(hows(results)) == [[KEPT]] * 9 + [[KEPT, "cold"]] * 3
    (cause,) = attribute(FACTORS, results).causes
    assert cause.standing is Standing.PROVED


def test_where_a_cell_ends_otherwise_by_itself_all_are_made_again(tmp_path: Path) -> None:
    """A shared process that brings the NaN by itself is found out: it is no cause."""
    results = go(tmp_path / "r", lambda levels, kept: "nonfinite" if both(levels) and kept else "finite")
    assert hows(results) == [[KEPT, "cold"]] * 12
    assert {result.status for result in results} == {Status.FINITE}


@pytest.mark.parametrize("how", ["crash", "aside"])
def test_what_a_shared_process_could_not_judge_is_made_again_by_itself(tmp_path: Path, how: str) -> None:
    """A crash there may be the process's own fault; a value seen where the weights were no longer right counts not."""

    def end(levels: Mapping[str, str], kept: bool) -> str:
        return how if kept and levels["c"] == "1" else "finite"

    results = go(tmp_path / "r", end)
    assert hows(results) == [[KEPT], [KEPT, "cold"]] * 6
    assert {result.status for result in results} == {Status.FINITE}
    first = Status.KILLED if how == "aside" else Status.FAILED
    assert {result.attempts[0].status for result in results[1::2]} == {first}


def test_another_run_without_the_flag_confirms_too(tmp_path: Path) -> None:
    """What is on disk says how it was started."""
    folder, calls = tmp_path / "r", list[bool]()

    def end(levels: Mapping[str, str], kept: bool) -> str:
        calls.append(kept)
        if not kept and len(calls) == 13:
            raise KeyboardInterrupt
        return "nonfinite" if both(levels) else "finite"

    with pytest.raises(KeyboardInterrupt):
        go(folder, end)
    results = go(folder, end, keep=False)
    assert sum("cold" in row or "warm" in row for row in hows(results)) >= 3
    (cause,) = attribute(FACTORS, results).causes
    assert cause.standing is Standing.PROVED
