"""What runs next and how long the rest takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanbisect import schedule
from nanbisect.matrix import Cell
from nanbisect.outcome import CellResult, Outcome, Status


def result(number: int, *statuses: Status, train: float = 4.0, micro: int = 4) -> CellResult:
    """A cell with attempts that took two seconds to load."""
    attempts = tuple(
        Outcome(status, "", attempt=k, seconds=2.0 + train, load_seconds=2.0, train_seconds=train, micro_batches=micro)
        for k, status in enumerate(statuses, start=1)
    )
    return CellResult(Cell(number, {"n": str(number)}), attempts)


def test_a_killed_attempt_is_made_again_with_its_own_seed() -> None:
    """Killed from outside says nothing: the index, and so the seed, stays the same."""
    todo = schedule.pending([result(1, Status.KILLED)], repeat=1, running=())
    assert [(attempt.cell.number, attempt.index) for attempt in todo] == [(1, 1)]


@pytest.mark.parametrize(
    "status", [Status.UNSUPPORTED, Status.FAILED, Status.OUT_OF_MEMORY, Status.TIMED_OUT, Status.NO_TRAINING]
)
def test_a_cell_that_was_not_judged_is_not_tried_again(status: Status) -> None:
    """It would end the same way."""
    assert schedule.pending([result(1, status)], repeat=3, running=()) == []


def test_repeats_run_until_there_are_enough_and_running_cells_wait() -> None:
    """One attempt of a cell at a time."""
    results = [result(1, Status.FINITE), result(2), result(3, Status.FINITE, Status.NONFINITE)]
    todo = schedule.pending(results, repeat=2, running=(results[1].cell.id,))
    assert [(attempt.cell.number, attempt.index) for attempt in todo] == [(1, 2)]


def test_blocked_levels_block_the_cells_that_hold_them_all() -> None:
    """A combination blocks only where it is whole."""
    cell = Cell(1, {"attention": "flash", "precision": "fp32"})
    assert schedule.blocked_by(cell, [({"attention": "flash"}, "no GPU")]) == "no GPU"
    assert schedule.blocked_by(cell, [({"attention": "flash", "precision": "bf16"}, "no")]) is None
    assert schedule.blocked_by(cell, [({}, "nothing")]) is None


@given(
    load=st.floats(0.1, 100),
    micro=st.floats(0.0, 5),
    record=st.floats(0.0, 5),
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=12),
    done=st.integers(2, 12),
)
def test_the_estimate_is_exact_for_cells_that_follow_the_model(
    load: float, micro: float, record: float, sizes: list[int], done: int
) -> None:
    """So much to load, so much a micro-batch, so much a record: then nothing is left to guess."""
    results, work, left = [], {}, 0.0
    varied = len({*sizes[:done]}) > 1
    for number, size in enumerate(sizes, start=1):
        cell = Cell(number, {"n": str(number)})
        work[cell.id] = (24 / size, 24.0)
        train = 24 / size * micro + 24 * record
        attempts: tuple[Outcome, ...] = ()
        if number <= done:
            attempts = (Outcome(Status.FINITE, "", load_seconds=load, train_seconds=train, micro_batches=24 // size),)
        else:
            left += load + train
        results.append(CellResult(cell, attempts))
    told = schedule.time_left(results, repeat=1, elapsed={}, work=work, slots=1)
    assert told is not None
    if varied:
        assert told == pytest.approx(left, rel=1e-6, abs=1e-6)
    else:
        assert told >= 0


def test_no_estimate_before_the_first_cell_has_ended() -> None:
    """A number out of nothing would be a guess."""
    assert schedule.time_left([result(1), result(2)], repeat=1, elapsed={}, work={}, slots=1) is None


def test_slots_and_elapsed_time_shorten_the_rest() -> None:
    """Two slots halve it; what has passed is taken off."""
    results = [result(1, Status.FINITE), result(2), result(3)]
    work = {r.cell.id: (4.0, 8.0) for r in results}
    assert schedule.time_left(results, repeat=1, elapsed={}, work=work, slots=1) == pytest.approx(12.0)
    assert schedule.time_left(results, repeat=1, elapsed={"n=2": 4.0}, work=work, slots=2) == pytest.approx(4.0)
