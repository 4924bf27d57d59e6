"""The next cells, for each strategy: controls and repeats first, then what the strategy asks for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from nanbisect.search import words
from nanbisect.search.account import account_of
from nanbisect.search.candidates import candidates, climb
from nanbisect.search.choose import choose
from nanbisect.search.evidence import Evidence
from nanbisect.search.index import MOST, Pool
from nanbisect.search.path import first_cause
from nanbisect.search.reading import Reading, read
from nanbisect.search.values import Account, Choice, Kind, Row, Step, Strategy
from nanbisect.search.view import View

Cost = Callable[[Row], float]


def next_step(evidence: Evidence, *, free: int = 1, running: Collection[Row] = (), cost: Cost | None = None) -> Step:
    """Up to `free` cells to start, and the account."""
    choices = next_choices(evidence, free=free, running=running, cost=cost)
    return Step(tuple(choices), not choices and not running, account_now(evidence))


def next_choices(
    evidence: Evidence, *, free: int = 1, running: Collection[Row] = (), cost: Cost | None = None
) -> list[Choice]:
    """The cells to start, without the account. Chosen one after another, each taking those before as running."""
    budget, chosen = evidence.plan.budget, list[Choice]()
    left = free if budget is None else min(free, budget - evidence.spent - len(running))
    while len(chosen) < left:
        choice = _next(evidence, [*running, *(choice.row for choice in chosen)], cost)
        if choice is None:
            break
        chosen.append(choice)
    return chosen


def account_now(evidence: Evidence) -> Account:
    """What the evidence shows."""
    view = View(evidence, Pool.empty(evidence.index))
    if evidence.plan.strategy is Strategy.FIRST_CAUSE:
        cause = first_cause(evidence)
        if isinstance(cause, tuple) and cause:
            view.claim(cause)
        return account_of(view, view.unexplained())
    reading = _read(evidence, (), None)
    for claim in shortened(reading.view):
        view.claim(claim)
    return account_of(view, reading.unsettled, reading.vague)


def shortened(view: View) -> list[tuple[tuple[int, int], ...]]:
    """The claims, each without the parts that the other claims make needless: a=1 for a=1,b=0 and a=1,b=1."""
    claims, space = list(view.claims), view.evidence.space
    for claim in view.claims:
        for part in claim:
            shorter = tuple(other for other in claim if other != part)
            if shorter and space.completion(shorter, [*space.exclude, *claims]) is None:
                return shortened(_with(view, [shorter, *claims]))
    return claims


def _with(view: View, claims: Sequence[tuple[tuple[int, int], ...]]) -> View:
    return View(view.evidence, view.pool, claims=claims)


def _next(evidence: Evidence, taken: Sequence[Row], cost: Cost | None) -> Choice | None:
    if evidence.plan.strategy is Strategy.GRID:
        return _repeat(evidence, taken) or _grid(evidence, taken)
    if evidence.plan.strategy is Strategy.FIRST_CAUSE:
        choice = first_cause(evidence)
        return choice if isinstance(choice, Choice) and choice.row not in taken else None
    return _control(evidence, taken) or _repeat(evidence, taken) or _adaptive(evidence, taken, cost)


def _control(evidence: Evidence, taken: Sequence[Row]) -> Choice | None:
    """The baseline; and as long as nothing failed, the cell with the last level of every factor."""
    space = evidence.space
    last = space.completion((), space.rules, like=tuple(size - 1 for size in space.sizes))
    wanted = [(space.baseline, words.BASELINE), *([(last, words.LIKELIEST)] if last and not evidence.failing else [])]
    for row, why in wanted:
        if row not in evidence.cells and row not in taken and space.runnable(row):
            return Choice(row, 1, Kind.CONTROL, why)
    return None


def _repeat(evidence: Evidence, taken: Sequence[Row]) -> Choice | None:
    """The attempts that every cell is to have in any case."""
    wanted = evidence.plan.repeats
    for row, ends in evidence.cells.items():
        had = ends.ok + ends.bad
        if had < wanted and not ends.err and row not in taken:
            return Choice(row, evidence.next_seed(row), Kind.REPEAT, f"attempt {had + 1} of {wanted}")
    return None


def _grid(evidence: Evidence, taken: Sequence[Row]) -> Choice | None:
    rows = itertools.product(*(range(size) for size in evidence.space.sizes))
    todo = (row for row in rows if row not in evidence.cells and row not in taken and evidence.space.runnable(row))
    return next((Choice(row, 1, Kind.GRID, "next in the grid") for row in todo), None)


def _adaptive(evidence: Evidence, taken: Sequence[Row], cost: Cost | None) -> Choice | None:
    """Of a small grid, from all rows; of a large one, from candidates, and from there to the best near it."""
    reading = _read(evidence, taken, cost)
    choice = choose(reading, evidence.plan.strength)
    if choice is None or evidence.space.product <= MOST:
        return choice
    return climb(choice, reading, lambda pool: choose(_reread(evidence, pool, taken, cost), evidence.plan.strength))


def _read(evidence: Evidence, taken: Collection[Row], cost: Cost | None) -> Reading:
    if evidence.space.product <= MOST:
        return _reread(evidence, evidence.pool, taken, cost)
    first = _reread(evidence, Pool.empty(evidence.index), taken, cost)
    return _reread(evidence, candidates(first, evidence.plan.strength), taken, cost)


def _reread(evidence: Evidence, pool: Pool, taken: Collection[Row], cost: Cost | None) -> Reading:
    return read(View(evidence, pool, taken=taken, cost=cost))
