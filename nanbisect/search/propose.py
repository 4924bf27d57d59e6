"""The door: which cells to run next, and what is known so far. What needs numpy is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from nanbisect.search.space import Space
from nanbisect.search.values import Account, Choice, Plan, Row, Step, Trial

if TYPE_CHECKING:
    from nanbisect.search.evidence import Evidence

Cost = Callable[[Row], float]
"""Seconds that a cell is expected to take."""


def propose(
    space: Space,
    trials: Sequence[Trial],
    plan: Plan,
    *,
    free: int = 1,
    running: Collection[Row] = (),
    cost: Cost | None = None,
) -> Step:
    """Up to `free` cells to start now. `trials` are all attempts that ended, oldest first, of any run of this
    matrix; `running` the cells under way, whose ends are taken as unknown."""
    from nanbisect.search.evidence import Evidence

    evidence = Evidence.of(space, trials, plan)
    return next_step(evidence, free=free, running=running, cost=cost)


def next_step(evidence: Evidence, *, free: int = 1, running: Collection[Row] = (), cost: Cost | None = None) -> Step:
    """The same, for evidence that is kept."""
    choices = choices_for(evidence, free=free, running=running, cost=cost)
    return Step(tuple(choices), not choices and not running, _account(evidence))


def choices_for(
    evidence: Evidence, *, free: int = 1, running: Collection[Row] = (), cost: Cost | None = None
) -> list[Choice]:
    """The cells to start, without the account."""
    from nanbisect.search.choose import choose
    from nanbisect.search.reading import read
    from nanbisect.search.view import View

    plan, chosen = evidence.plan, list[Choice]()
    left = free if plan.budget is None else min(free, plan.budget - evidence.spent - len(running))
    while len(chosen) < left:
        taken = [*running, *(choice.row for choice in chosen)]
        choice = choose(read(View(evidence, evidence.pool, (), taken)), plan.strength)
        if choice is None:
            break
        chosen.append(choice)
    return chosen


def account(space: Space, trials: Sequence[Trial], plan: Plan) -> Account:
    """What these trials show."""
    from nanbisect.search.evidence import Evidence

    return _account(Evidence.of(space, trials, plan))


def _account(evidence: Evidence) -> Account:
    """To do: the counts."""
    t, u = evidence.plan.strength
    return Account(evidence.plan.strategy, t, u, 0, 0, 0, 0, (), attempts=evidence.spent)
