"""What runs next and how long the rest takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanbisect import schedule
from nanbisect.matrix import Cell, expand, run_order
from nanbisect.outcome import CellResult, Outcome, Status
from tests.fakes import matrix_of


def result(number: int, *statuses: Status, train: float = 4.0, micro: int = 4) -> CellResult:
    """A cell with attempts that took two seconds to load."""
    attempts = tuple(
        Outcome(
            status,
            "",
            attempt=k,
            seed=k - 1,
            seconds=2.0 + train,
            load_seconds=2.0,
            train_seconds=train,
            micro_batches=micro,
        )
        for k, status in enumerate(statuses, start=1)
    )
    return CellResult(Cell(number, {"n": str(number)}), attempts)


def test_a_killed_attempt_is_made_again_with_its_own_seed() -> None:
    """Killed from outside says nothing: the index, and so the seed, stays the same."""
    todo = schedule.pending([result(1, Status.KILLED)], seeds=[0])
    assert [(attempt.cell.number, attempt.index) for attempt in todo] == [(1, 1)]


@pytest.mark.parametrize(
    "status", [Status.UNSUPPORTED, Status.FAILED, Status.OUT_OF_MEMORY, Status.TIMED_OUT, Status.NO_TRAINING]
)
def test_a_cell_that_was_not_judged_is_not_tried_again(status: Status) -> None:
    """It would end the same way."""
    assert schedule.pending([result(1, status)], seeds=[0, 1, 2]) == []


def test_repeats_run_until_there_are_enough_and_running_cells_wait() -> None:
    """One attempt of a cell at a time."""
    results = [result(1, Status.FINITE), result(2), result(3, Status.FINITE, Status.NONFINITE)]
    todo = schedule.pending(results, seeds=[0, 1], running=(results[1].cell.id,))
    assert [(attempt.cell.number, attempt.index) for attempt in todo] == [(1, 2)]


def test_a_search_says_with_which_seeds_each_cell_is_run() -> None:
    """Those it wants and no others; a cell that it does not name not at all."""
    results = [result(1, Status.FINITE), result(2), result(3)]
    wanted = {results[0].cell.id: [1, 3], results[1].cell.id: [2]}
    todo = schedule.pending(results, seeds=[0, 1, 2], wanted=wanted)
    assert [(attempt.cell.number, attempt.index) for attempt in todo] == [(1, 3), (2, 2)]


def test_a_rerun_does_not_use_up_a_seed() -> None:
    """Attempts are missing by their seeds, not by their number; what a rerun judged is judged."""
    again = result(1, Status.FINITE, Status.FINITE)
    same = CellResult(again.cell, tuple(replace(attempt, seed=0) for attempt in again.attempts))
    assert [attempt.index for attempt in schedule.pending([same], seeds=[0, 1])] == [2]
    failed = CellResult(same.cell, (replace(same.attempts[0], status=Status.FAILED), same.attempts[1]))
    assert [attempt.index for attempt in schedule.pending([failed], seeds=[0, 1])] == [2]
    assert schedule.pending([failed], seeds=[0, 1], given_up=[failed.cell.id]) == []


def test_blocked_levels_block_the_cells_that_hold_them_all() -> None:
    """A combination blocks only where it is whole."""
    cell = Cell(1, {"attention": "flash", "precision": "fp32"})
    assert schedule.blocked_by(cell, [({"attention": "flash"}, "no GPU")]) == "no GPU"
    assert schedule.blocked_by(cell, [({"attention": "flash", "precision": "bf16"}, "no")]) is None
    assert schedule.blocked_by(cell, [({}, "nothing")]) is None


SPEEDS = st.lists(st.floats(0.3, 8.0), min_size=7, max_size=7)


@given(speeds=SPEEDS, load=st.floats(0.5, 60), base=st.floats(0.1, 30))
@example(speeds=[0.3125, 0.3125, 3.0, 1.0, 1.0, 6.0, 0.5], load=1.0, base=6.0)
def test_after_the_first_cells_the_estimate_is_within_two_times(speeds: list[float], load: float, base: float) -> None:
    """Once every level was seen, and half of the cells. Levels may differ in speed by an order of magnitude."""
    matrix = matrix_of(batch_size=("1", "2", "8"), attention=("sdpa", "eager"), precision=("bf16", "fp16"))
    pace = dict(zip(((f.name, level) for f in matrix.factors for level in f.levels), speeds, strict=True))
    cells = run_order(matrix, expand(matrix), lambda cell: True)
    seconds = {cell.id: base * math.prod(pace[item] for item in cell.levels.items()) for cell in cells}
    for known in range(len(cells) // 2, len(cells)):
        results = [
            CellResult(
                cell,
                (Outcome(Status.FINITE, "", load_seconds=load, train_seconds=seconds[cell.id], micro_batches=4),)
                if place < known
                else (),
            )
            for place, cell in enumerate(cells)
        ]
        left = sum(load + seconds[cell.id] for cell in cells[known:])
        told = time_left(results, dict.fromkeys(seconds, 4.0), elapsed={}, slots=1)
        spent = sum(load + seconds[cell.id] for cell in cells[:known])
        if {item for cell in cells[:known] for item in cell.levels.items()} != set(pace):
            continue
        assert told is not None
        assert 0.5 <= (spent + told) / (spent + left) <= 2.0


def time_left(
    results: list[CellResult], work: dict[str, float], *, elapsed: dict[str, float], slots: int
) -> float | None:
    """By what these results foretell."""
    expected = schedule.forecast(results, work)
    return schedule.time_left(results, seeds=[0], elapsed=elapsed, expected=expected, slots=slots)


def test_no_estimate_before_the_first_cell_has_ended() -> None:
    """A number out of nothing would be a guess."""
    assert time_left([result(1), result(2)], {}, elapsed={}, slots=1) is None


def test_slots_and_elapsed_time_shorten_the_rest() -> None:
    """What has passed is taken off; the last cell can't be shared out."""
    results = [result(1, Status.FINITE), result(2), result(3)]
    work = {r.cell.id: 4.0 for r in results}
    assert time_left(results, work, elapsed={}, slots=1) == pytest.approx(12.0)
    assert time_left(results, work, elapsed={"n=2": 4.0}, slots=2) == pytest.approx(6.0)


def test_the_controls_come_first_then_the_longest() -> None:
    """A cell counts with all that is missing of its repeats; equals stay as they are."""
    cells = [Cell(number, {"n": str(number)}) for number in range(1, 6)]
    attempts = [schedule.Attempt(cell, 2 if cell.number == 5 else 1) for cell in cells]
    seconds = {1: 1.0, 2: 1.0, 3: 5.0, 4: 5.0, 5: 6.0}
    ordered = schedule.in_turn(
        attempts, lambda cell: seconds[cell.number], repeat=2, controls={cells[0].id, cells[1].id}
    )
    assert [attempt.cell.number for attempt in ordered] == [1, 2, 3, 4, 5]
    once = [schedule.Attempt(cell, 1) for cell in cells]
    ordered = schedule.in_turn(once, lambda cell: seconds[cell.number], repeat=1, controls={cells[1].id})
    assert [attempt.cell.number for attempt in ordered] == [2, 5, 3, 4, 1]


@given(
    under_way=st.lists(st.floats(0, 50), max_size=4),
    waiting=st.lists(st.floats(0, 50), max_size=12),
    slots=st.integers(1, 5),
)
def test_the_makespan_lies_between_its_bounds(under_way: list[float], waiting: list[float], slots: int) -> None:
    """Never shorter than the longest or than all slots busy; on one slot the sum."""
    under_way = under_way[:slots]
    told = schedule.makespan(under_way, waiting, slots=slots)
    everything = [*under_way, *waiting]
    longest, total = max(everything, default=0.0), sum(everything)
    assert max(longest, total / slots) - 1e-9 <= told <= total / slots + longest + 1e-9
    if slots == 1:
        assert told == pytest.approx(total)


def test_a_command_that_tells_only_how_long_it_took_is_foretold() -> None:
    """Its load and training are one time; before, there was no estimate for commands at all."""
    known = CellResult(Cell(1, {"n": "1"}), (Outcome(Status.FINITE, "", seconds=8.0),))
    left = time_left([known, result(2)], {"n=1": 4.0, "n=2": 4.0}, elapsed={}, slots=1)
    assert left == pytest.approx(8.0)
    unjudged = CellResult(Cell(1, {"n": "1"}), (Outcome(Status.FAILED, "", seconds=8.0),))
    assert time_left([unjudged, result(2)], {}, elapsed={}, slots=1) is None
