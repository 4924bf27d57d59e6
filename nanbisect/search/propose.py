"""The door: which cells to run next, and what is known so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from nanbisect.outcome import Status
from nanbisect.search.space import Space
from nanbisect.search.values import Account, Choice, Kind, Plan, Row, Step, Strategy, Trial

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
    tried = {trial.row for trial in trials} | {*running}
    rows = itertools.product(*(range(size) for size in space.sizes))
    todo = itertools.islice((row for row in rows if row not in tried and space.runnable(row)), free)
    choices = tuple(Choice(row, 1, Kind.GRID, "next in the grid") for row in todo)
    return Step(choices, not choices and not running, account(space, trials, plan))


def account(space: Space, trials: Sequence[Trial], plan: Plan) -> Account:
    """What these trials show."""
    judged = [trial for trial in trials if trial.status.judged]
    finite = sum(trial.status is Status.FINITE for trial in judged)
    return Account(
        strategy=Strategy(plan.strategy),
        up_to=plan.strength[0],
        checked=plan.strength[1],
        refuted=finite,
        explained=0,
        untestable=0,
        pending=0,
        causes=(),
        attempts=len(trials),
        cells=len({trial.row for trial in trials}),
        of_cells=space.count(),
    )
