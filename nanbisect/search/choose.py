"""The next cell: cover, isolate, verify, in phases of growing strength.

Each phase (t, u): a failing cell that no claim explains is isolated; every claim is verified with
combinations of u other levels; then combinations of up to t factors are covered by cells that hold no claim.
"""

from __future__ import annotations

import numpy as np

from nanbisect.search import words
from nanbisect.search.index import Floats, Pool
from nanbisect.search.reading import Reading
from nanbisect.search.suspicion import Suspicion, information
from nanbisect.search.values import Choice, Kind, Row
from nanbisect.search.verify import needs, verifying_row
from nanbisect.search.view import View

HALF = 0.5
"""While a cell is under way that tells this share of what the best one would, that one can wait."""
PHASES = ((1, 0), (2, 1), (3, 1), (3, 2))


def phases(strength: tuple[int, int]) -> list[tuple[int, int]]:
    """Those up to the strength asked for, which is the last."""
    t, u = strength
    before = [phase for phase in PHASES if phase[0] <= t and phase[1] <= u and phase != strength]
    return [*before, strength]


def choose(reading: Reading, strength: tuple[int, int]) -> Choice | None:
    """The next cell, or None: nothing is left to run, but for what waits for cells under way."""
    if reading.view.evidence.failing and not reading.view.evidence.finite:
        return _contrast(reading.view, min(2, strength[0]))
    for suspicion in reading.open:
        choice = _isolate(reading.view, suspicion)
        if choice:
            return choice
    for cell, row in reading.wanted:
        if row not in reading.view.taken:
            return _choice(reading.view, row, Kind.ISOLATE, words.halves(cell, reading.view))
    for t, u in phases(strength):
        choice = _verify(reading.view, u) or _cover(reading.view, t)
        if choice:
            return choice
    return None


def _choice(view: View, row: Row, kind: Kind, why: str) -> Choice:
    if row in view.evidence.cells:
        why = words.repeats(view, row, why)
    return Choice(row, view.evidence.next_seed(row), kind, why)


def _contrast(view: View, t: int) -> Choice | None:
    """As long as every judged cell failed there is nothing to isolate: the row with most levels and pairs (up to `t`
    of them) that were not seen failing. None once all were: nothing here makes a difference."""
    unseen = (view.index.size <= t) & (view.evidence.bad == 0) & ~view.evidence.untestable() & ~view.hidden
    gain = view.pool.sum(unseen)
    best = view.pick(np.where(view.free, gain * (1 - view.risk), -1))
    return None if best is None else _choice(view, view.pool.row(best), Kind.COVER, words.FINITE_WANTED)


def _isolate(view: View, suspicion: Suspicion) -> Choice | None:
    """The row that tells most about the cause of one failing cell, and is of further use: with the likeliest cause,
    a failure verifies it; without, a finite end covers."""
    told = information(view, suspicion)
    if _under_way(view, suspicion) > HALF * told.max(initial=0):
        return None
    best, _ = suspicion.best(view.index)
    verified = view.pool.sum(needs(view, best, view.evidence.plan.strength[1])[0])
    covered = view.pool.sum(view.unsettled(3) & ~view.hidden)
    use = np.where(view.pool.holding(best), _share(verified), _share(covered))
    at = view.pick(np.where(told >= 0, told * (1 - view.risk) * (1 + use), -1))
    if at is None:
        return None
    row = view.pool.row(at)
    return _choice(view, row, Kind.ISOLATE, words.tells_apart(view, suspicion, row))


def _under_way(view: View, suspicion: Suspicion) -> float:
    """The most that a cell under way will tell about the cause."""
    if not view.taken:
        return 0.0
    rows = Pool(view.index, np.array(list(view.taken), np.int16))
    return float(information(View(view.evidence, rows, claims=view.claims), suspicion).max())


def _share(gain: Floats) -> Floats:
    """Of the largest gain, 0 to 1."""
    share: Floats = gain / (1 + gain.max(initial=0))
    return share


def _verify(view: View, u: int) -> Choice | None:
    for claim in view.claims:
        best = verifying_row(view, claim, u)
        if best is not None:
            row = view.pool.row(best)
            return _choice(view, row, Kind.VERIFY, words.verifies(view, claim, row))
    return None


def _cover(view: View, t: int) -> Choice | None:
    """The row without a claim that holds most combinations of which nothing is known (where failures come and go:
    each counts by the exposures that it lacks)."""
    open_ = view.unsettled(t) & ~view.hidden
    lacking = np.maximum(1, view.evidence.exposures - view.evidence.ok)
    gain = view.pool.sum(open_ * lacking)
    score = gain
    if t < 3:
        later = view.pool.sum(~view.covered & ~view.refuted & ~view.hidden)
        score = gain + 0.5 * _share(later)
    rows = view.free & ~view.claimed & (gain > 0)
    if view.evidence.flaky:
        score = score / (1 + 0.05 * view.evidence.attempts(view.pool))
    best = view.pick(np.where(rows, score * (1 - view.risk), -1))
    if best is None:
        return None
    row = view.pool.row(best)
    return _choice(view, row, Kind.COVER, words.covers(view, row, open_))
