"""What has been shown, and what has not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from nanbisect.search import words
from nanbisect.search.evidence import Evidence
from nanbisect.search.index import Bools, index_of
from nanbisect.search.space import Space, holds
from nanbisect.search.values import Account, Combination, Known, Row, Strategy, highest_share
from nanbisect.search.verify import ERRORS, errors_with, needs
from nanbisect.search.view import View

SAMPLES = 20


def account_of(view: View, unsettled: Sequence[Row], vague: Sequence[Combination] = ()) -> Account:
    """The account of a view with its claims; `unsettled` are the failing cells that they do not explain."""
    evidence, (t, u) = view.evidence, view.evidence.plan.strength
    fates, samples = _fates(view, t)
    known = tuple(_known(view, claim, u, claim not in vague) for claim in sorted(view.claims, key=_order))
    fewest = int(evidence.ok[(view.index.size <= t) & view.refuted].min(initial=1 << 30)) if fates["refuted"] else 0
    counted = Account(
        strategy=Strategy(evidence.plan.strategy),
        up_to=min(t, len(view.index.sizes)),
        checked=u,
        refuted=fates["refuted"],
        explained=fates["explained"],
        untestable=fates["untestable"],
        pending=fates["pending"],
        causes=known,
        open=tuple(unsettled),
        samples=samples,
        attempts=sum(ends.ok + ends.bad + ends.err for ends in evidence.cells.values()),
        cells=len(evidence.cells),
        of_cells=evidence.space.count(),
        flaky=evidence.flaky,
        exposures=evidence.exposures,
        bound=highest_share(fewest) if fewest and evidence.flaky else None,
    )
    return words.told(counted, evidence.plan, last=t >= len(view.index.sizes))


def _order(claim: Combination) -> tuple[int, Combination]:
    return len(claim), claim


@lru_cache(maxsize=8)
def _existing(space: Space, order: int) -> Bools:
    """The combinations that some cell of the matrix holds."""
    index = index_of(space.sizes, order)
    found = np.ones(index.total, bool)
    if space.exclude:
        for number in range(index.total):
            found[number] = space.completion(index.combination(number), space.exclude) is not None
    return found


def _fates(view: View, t: int) -> tuple[dict[str, int], tuple[Combination, ...]]:
    """How many combinations of up to t factors are refuted, explained, untestable, pending; some of the last two."""
    existing = _existing(view.evidence.space, view.index.order) & (view.index.size <= t)
    refuted = existing & view.refuted
    covered = existing & view.covered & ~refuted
    counts = {"refuted": int(refuted.sum()), "explained": int(covered.sum()), "untestable": 0, "pending": 0}
    samples: dict[str, list[Combination]] = {"untestable": [], "pending": [], "explained": []}
    hopeless = view.evidence.untestable()
    for number in np.flatnonzero(existing & ~refuted & ~covered):
        combination = view.index.combination(int(number))
        fate = _fate(view, combination, bool(hopeless[number]))
        counts[fate] += 1
        samples[fate].append(combination)
    return counts, (*samples["untestable"][:SAMPLES], *samples["pending"][:SAMPLES])


def _fate(view: View, combination: Combination, hopeless: bool) -> str:
    """Of a combination that is not refuted and holds no claim.

    Explained: every cell that holds it holds a claim. Untestable: those that do not ended unjudged, can't run,
    or are left alone.
    """
    space = view.evidence.space
    if view.claims and space.completion(combination, [*space.exclude, *view.claims]) is None:
        return "explained"
    if hopeless:
        return "untestable"
    ended = [tuple(enumerate(row)) for row in view.evidence.unjudged if holds(row, combination)]
    tried = space.blocked or view.barred or ended
    if tried and space.completion(combination, [*view.rules, *view.claims, *ended]) is None:
        return "untestable"
    return "pending"


def _known(view: View, claim: Combination, u: int, apart: bool) -> Known:
    """A claim with its witnesses."""
    evidence = view.evidence
    held = [(row, ends) for row, ends in evidence.cells.items() if holds(row, claim)]
    judged = [row for row, ends in held if ends.ok or ends.bad]
    index = view.index
    known = Known(
        levels=claim,
        matching=evidence.space.count(claim),
        failed=sum(ends.bad > 0 for _, ends in held),
        unjudged=sum(ends.err > 0 and not (ends.ok or ends.bad) for _, ends in held),
        witnesses=tuple(_witnesses(evidence, claim, part) for part in claim),
        checked=_checked(view, claim, u),
        untestable=tuple(index.combination(n) for n in _untestable(view, claim, u)),
        unseen=_unseen(view, claim, judged),
    )
    return replace(known, told_apart=apart or (known.exhaustive and known.minimal))


def _unseen(view: View, claim: Combination, judged: Sequence[Row]) -> Combination:
    """The levels of other factors that some cell of the matrix has with the claim, but none that was judged."""
    space, inside = view.evidence.space, {f for f, _ in claim}
    levels = ((f, at) for f, size in enumerate(view.index.sizes) if f not in inside for at in range(size))
    unseen = (level for level in levels if not any(row[level[0]] == level[1] for row in judged))
    return tuple(
        level for level in unseen if space.completion(tuple(sorted((*claim, level))), space.exclude) is not None
    )


def _witnesses(evidence: Evidence, claim: Combination, part: tuple[int, int]) -> tuple[Row, ...]:
    """Finite cells that lack only this part; where failures come and go, none unless together often enough."""
    rest = tuple(other for other in claim if other != part)
    rows = tuple(row for row in evidence.clean() if holds(row, rest))
    return rows if sum(evidence.cells[row].ok for row in rows) >= evidence.exposures else ()


def _checked(view: View, claim: Combination, u: int) -> int:
    """The largest number up to u of other levels of which every combination that could be was seen failing with it."""
    for size in range(u, 0, -1):
        if not any(_possible(view, claim, int(n)) for n in np.flatnonzero(needs(view, claim, size)[1])):
            return size
    return 0


def _possible(view: View, claim: Combination, number: int) -> bool:
    """Whether a cell that could be judged holds the claim and this."""
    space = view.evidence.space
    both = tuple(sorted((*claim, *view.index.combination(number))))
    ended = [tuple(enumerate(row)) for row in view.evidence.unjudged if holds(row, both)]
    return space.completion(both, [*view.rules, *ended]) is not None


def _untestable(view: View, claim: Combination, u: int) -> list[int]:
    """Combinations of up to u other levels that could not be judged together with the claim."""
    space, errors = view.evidence.space, errors_with(view, claim)
    if not (space.blocked or errors.any()):
        return []
    others = view.index.among(claim) & (view.index.size <= u) & ~_seen(view, claim)
    return [
        int(number)
        for number in np.flatnonzero(others & _existing_with(view, claim))
        if errors[number] >= ERRORS or not _possible(view, claim, int(number))
    ]


def _existing_with(view: View, claim: Combination) -> Bools:
    """What some cell of the matrix holds together with the claim."""
    found, space = np.ones(view.index.total, bool), view.evidence.space
    if space.exclude:
        for number in np.flatnonzero(view.index.among(claim)):
            both = tuple(sorted((*claim, *view.index.combination(int(number)))))
            found[number] = space.completion(both, space.exclude) is not None
    return found


def _seen(view: View, claim: Combination) -> Bools:
    """What was judged together with the claim."""
    seen = np.zeros(view.index.total, bool)
    for row, ends in view.evidence.cells.items():
        if (ends.ok or ends.bad) and holds(row, claim):
            seen[view.numbers(row)] = True
    return seen
