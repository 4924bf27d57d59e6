"""One cause, and nothing else: from the all-safe cell, restore one factor after another until it fails; then isolate.

The last level of a factor is the one to restore; where a cell ends unjudged, the level before it is tried.
"""

from __future__ import annotations

from nanbisect.search.evidence import Evidence
from nanbisect.search.values import Choice, Combination, Kind, Row


class _Wanted(Exception):
    def __init__(self, row: Row, why: str) -> None:
        super().__init__(why)
        self.row, self.why = row, why


def first_cause(evidence: Evidence) -> Choice | Combination | None:
    """The next cell to run; or the cause; or None if there is none on this path.

    An empty combination is the cause if the all-safe cell itself fails.
    """
    try:
        return _walk(evidence)
    except _Wanted as wanted:
        return Choice(wanted.row, evidence.next_seed(wanted.row), Kind.PATH, wanted.why)


def _walk(evidence: Evidence) -> Combination | None:
    row = evidence.space.baseline
    failed = _ask(evidence, row, "the all-safe cell")
    if failed is not False:
        return () if failed else None
    for f in range(len(row)):
        for at in reversed(range(1, evidence.space.sizes[f])):
            longer = (*row[:f], at, *row[f + 1 :])
            failed = _ask(evidence, longer, f"restores {evidence.space.words(((f, at),))}")
            if failed:
                return _isolated(evidence, longer, f)
            if failed is False:
                row = longer
                break
    return None


def _isolated(evidence: Evidence, row: Row, last: int) -> Combination:
    """Which of the levels restored before are needed, too: each is made safe again, if it then still fails."""
    for f in range(last):
        if row[f]:
            safer = (*row[:f], 0, *row[f + 1 :])
            why = f"tells whether {evidence.space.words(((f, row[f]),))} is needed"
            row = safer if _ask(evidence, safer, why) else row
    return tuple((f, at) for f, at in enumerate(row) if at)


def _ask(evidence: Evidence, row: Row, why: str) -> bool | None:
    """Whether the cell fails; None if it can't be judged."""
    ends = evidence.cells.get(row)
    if not evidence.space.runnable(row) or (ends and ends.err and not (ends.ok or ends.bad)):
        return None
    if ends is None or (not ends.bad and ends.ok < evidence.exposures):
        raise _Wanted(row, why)
    return bool(ends.bad)
