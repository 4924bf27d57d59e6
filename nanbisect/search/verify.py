"""Is a cause broader than the truth? It must have failed with every combination of levels of u other factors.

Were it finite in some cell y, each of at most u other causes lacks some level there; with those levels of y
it can't fail for another reason, so this combination would never be seen failing.
"""

from __future__ import annotations

import numpy as np

from nanbisect.search.index import Bools, Ints
from nanbisect.search.space import holds
from nanbisect.search.values import Combination
from nanbisect.search.view import View

ERRORS = 2
"""After so many cells with it that ended unjudged, a combination of other levels counts as untestable."""


def needs(view: View, claim: Combination, u: int) -> tuple[Bools, Bools]:
    """(The combinations of u other levels that have still to be seen failing with the claim; the same, if cells
    that hold another claim count as well). Untestable ones are left out of both."""
    left = view.index.among(claim) & (view.index.size == min(u, len(view.index.sizes) - len(claim)))
    others = [other for other in view.claims if other != claim]
    shared = []
    for row in view.evidence.failing:
        if holds(row, claim):
            if any(holds(row, other) for other in others):
                shared.append(row)
            else:
                left[view.numbers(row)] = False
    left &= errors_with(view, claim) < ERRORS
    loose = left.copy()
    for row in shared:
        loose[view.numbers(row)] = False
    return left, loose


def errors_with(view: View, claim: Combination) -> Ints:
    """In how many cells that ended unjudged each combination met the claim."""
    errors = np.zeros(view.index.total, np.int32)
    for row in view.evidence.unjudged:
        if holds(row, claim):
            errors[view.numbers(row)] += 1
    return errors


def verifying_row(view: View, claim: Combination, u: int) -> int | None:
    """The row of the pool that meets most needs of a claim; None if none is left that can.

    Rows with no other claim first: there a failure has no other reason. Where only rows with another are
    left, a failure counts, and a finite end still refutes.
    """
    if u == 0 or len(claim) == len(view.index.sizes):
        return None
    own, loose = needs(view, claim, u)
    if not own.any():
        return None
    holding = view.pool.holding(claim) & view.free & ~_failed(view)
    for need, rows in ((own, holding & ~_elsewhere(view, claim)), (loose, holding)):
        gain = view.pool.sum(need & ~view.hidden)
        if (rows & (gain > 0)).any():
            score = gain * (1 - view.risk)
            return view.pick(np.where(rows & (gain > 0), score, -1))
    return None


def _failed(view: View) -> Bools:
    """The rows that failed already."""
    failed = np.zeros(len(view.pool.rows), bool)
    for row in view.evidence.failing:
        if row in view.pool.at:
            failed[view.pool.at[row]] = True
    return failed


def _elsewhere(view: View, claim: Combination) -> Bools:
    """The rows that hold another claim."""
    found = np.zeros(len(view.pool.rows), bool)
    for other in view.claims:
        if other != claim:
            found |= view.pool.holding(other)
    return found
