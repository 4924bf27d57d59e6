"""The benchmark itself, at toy size: it runs, nothing that it compares trains otherwise, and the probe's clock runs."""

from __future__ import annotations

import pytest

from tests.bench import overhead, trace

pytestmark = pytest.mark.training


def test_the_trainings_are_the_same_and_the_probe_times_itself() -> None:
    """A row each with its numbers; only a training under the probe has a share of its clock."""
    variants = (overhead.PLAIN, overhead.WATCH)
    rows = overhead.measure(overhead.Work(tokens=16, toy=True), 20, variants)
    overhead.check(rows)
    plain, watched = rows
    assert len(plain.bits) == 2 * (overhead.WARM_UP + 20)  # a loss and a norm of every step
    assert len(set(plain.bits[::2])) > 1
    assert plain.share is None
    assert watched.share is not None
    assert 0 < watched.share < 1
    assert plain.ratios == (1.0, 1.0, 1.0)
    lines = overhead.table(16, rows)
    assert [line.split(" | ")[0] for line in lines] == ["| plain", "| nanbisect watch"]
    assert {line.count("|") for line in (*lines, *overhead.HEAD)} == {7}


def test_a_training_that_computes_something_else_is_no_row() -> None:
    """Bits that differ are an error, not a row."""
    row = overhead.Row(overhead.PLAIN, 1.0, (1.0, 1.0, 1.0), None, 1, ("00", "01"))
    with pytest.raises(RuntimeError, match="plain again"):
        overhead.check([row, row._replace(variant=overhead.VARIANTS[1], bits=("00", "02"))])


def test_a_traced_step_trains_the_same() -> None:
    """Every step of it is traced (the training says so itself), and it computes what the plain one computes."""
    rows = overhead.measure(overhead.Work(tokens=16, toy=True), 3, (overhead.PLAIN, trace.TRACED))
    overhead.check(rows)
    assert rows[1].share is not None
