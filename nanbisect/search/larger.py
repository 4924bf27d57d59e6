"""A cause of more factors than the index has: halving the difference of a failing and a finite cell.

FIC_BS (Zhang and Zhang, "Characterizing failure-causing parameter interactions by adaptive testing", 2011),
asked again from the start each time: what is known of a cell answers, what is not yet known is the next cell
to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanbisect.search.space import holds
from nanbisect.search.values import Combination, Row
from nanbisect.search.view import View

PARTNERS = 3


class Wanted(Exception):
    """A cell whose end has to be known first."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.row = row


def larger_cause(view: View, cell: Row) -> Combination:
    """The parts of a failing cell that make it fail, all other levels taken from a finite cell.

    Raises Wanted. The whole cell, if no finite cell helps.
    """
    clean = view.evidence.clean()
    clean.sort(key=lambda row: -sum(a != b for a, b in zip(row, cell, strict=True)))
    for partner in clean[:PARTNERS]:
        kept = _halve(cell, partner, lambda row: _fails(view, row))
        found = tuple((f, cell[f]) for f in sorted(kept))
        if found and not any(holds(row, found) for row in clean):
            return found
    return tuple(enumerate(cell))


def _fails(view: View, row: Row) -> bool:
    """Whether a cell fails; Wanted if it has to run (again) first. One that can't be judged, or run, counts as not."""
    ends = view.evidence.cells.get(row)
    if not view.evidence.space.runnable(row):
        return False
    if ends is None or not (ends.bad or ends.err or ends.ok >= view.evidence.exposures):
        raise Wanted(row)
    return bool(ends.bad)


def _halve(cell: Row, partner: Row, fails: Callable[[Row], bool]) -> list[int]:
    """The factors of `cell` that have to stay so that it fails, all others as in `partner`, which is finite."""
    fixed: list[int] = []
    left = [f for f in range(len(cell)) if cell[f] != partner[f]]
    while left and not fails(_mixed(cell, partner, fixed)):
        low, high = 0, len(left)  # without the first `low` it fails, without the first `high` it does not
        while high - low > 1:
            middle = (low + high) // 2
            if fails(_mixed(cell, partner, [*fixed, *left[middle:]])):
                low = middle
            else:
                high = middle
        fixed.append(left[high - 1])
        left = left[high:]
    return fixed


def _mixed(cell: Row, partner: Row, kept: Sequence[int]) -> Row:
    return tuple(cell[f] if f in kept else partner[f] for f in range(len(cell)))
