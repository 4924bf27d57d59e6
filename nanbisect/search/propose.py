"""The door: which cells to run next, and what is known so far. What needs numpy is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from nanbisect.search.space import Space
from nanbisect.search.values import Account, Plan, Row, Step, Trial

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
    from nanbisect.search.steps import next_step

    return next_step(Evidence.of(space, trials, plan), free=free, running=running, cost=cost)


def account(space: Space, trials: Sequence[Trial], plan: Plan) -> Account:
    """What these trials show."""
    from nanbisect.search.evidence import Evidence
    from nanbisect.search.steps import account_now

    return account_now(Evidence.of(space, trials, plan))
