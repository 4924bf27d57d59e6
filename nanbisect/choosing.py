"""The search of one run: what it is asked for, what it is told, and why it ended.

`search` thinks; here is what changes while a run goes on. What is kept of it in the run folder is enough to
go on after a kill as if nothing had happened: the plan, and which attempts were there before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nanbisect.attribution import strangers_of
from nanbisect.cells import MOST_LISTED, Cells
from nanbisect.errors import UsageError
from nanbisect.matrix import Cell, Matrix
from nanbisect.matrix_file import parse_duration
from nanbisect.outcome import CellResult, Status
from nanbisect.report.search import Barred, SearchSummary
from nanbisect.report.words import counted, duration
from nanbisect.schedule import Forecast
from nanbisect.schedule import counted as ended_by_themselves
from nanbisect.search.propose import account, propose
from nanbisect.search.space import Space
from nanbisect.search.values import Account, Choice, Plan, Row, Step, Strategy, Trial

SMALL = 64
"""Up to so many cells all of them run, unless told otherwise."""
UNITS = ("s", "m", "h")

Blocked = Sequence[tuple[Mapping[str, str], str]]
Order = Mapping[tuple[str, int], int]
"""(Cell's id, number of the attempt) -> its place in the order of starts."""


@dataclass(frozen=True)
class SearchFlags:
    """What the command line says of the choice of cells; None where it does not."""

    strategy: str | None = None
    strength: str | None = None
    budget: str | None = None
    finish: bool = False

    def plan(self, matrix: Matrix, before: Mapping[str, Any] | None = None) -> tuple[Plan, float | None]:
        """The plan, and for how many seconds cells may be started. Raises UsageError.

        `before` is what the folder of a run that goes on keeps of its search: as it was, it goes on, unless told
        otherwise.
        """
        strategy, strength = self._strategy(matrix), strength_of(self.strength)
        listed = matrix.combinations <= MOST_LISTED
        if before is not None and (before or listed) and (self.strategy, self.strength) == (None, None):
            kept = plan_from_json(before["plan"]) if before else Plan(Strategy.GRID)
            strategy, strength = kept.strategy, kept.strength
        attempts, seconds = budget_of(self.budget)
        most = len(matrix.factors)
        strength = (min(strength[0], most), min(strength[1], most))
        return Plan(strategy, strength, attempts, repeats=matrix.repeat), seconds

    def _strategy(self, matrix: Matrix) -> Strategy:
        strategy = Strategy(self.strategy) if self.strategy else None
        if strategy is Strategy.GRID and self.strength is not None:
            raise UsageError("--strength is for --strategy adaptive: the grid runs every cell\ntry: one of them")
        listed = matrix.combinations <= MOST_LISTED
        if not listed and (strategy is Strategy.GRID or self.finish):
            what = "--finish-grid" if self.finish else "--strategy grid"
            raise UsageError(
                f"{what} is for up to {MOST_LISTED:,} combinations, and the matrix has {matrix.combinations:,}\n"
                "try: --strategy adaptive, or fewer factors and levels"
            )
        small = listed and self.strength is None and Cells(matrix).count() <= SMALL
        return strategy or (Strategy.GRID if small else Strategy.ADAPTIVE)


def strength_of(text: str | None) -> tuple[int, int]:
    """`3,2` as (3, 2), `2` as (2, 1). Raises UsageError."""
    if text is None:
        return Plan().strength
    try:
        t, _, u = text.partition(",")
        strength = (int(t), int(u) if u else max(0, int(t) - 1))
    except ValueError:
        strength = (0, 0)
    if not (1 <= strength[0] <= 3 and 0 <= strength[1] <= 2):
        raise UsageError(
            f"--strength {text}: write T or T,U, with T from 1 to 3 and U from 0 to 2\n"
            "try: 3,2 (causes of up to 3 factors, each seen with every pair of other levels), or 2,1"
        )
    return strength


def budget_of(text: str | None) -> tuple[int | None, float | None]:
    """`60` as attempts, `2h` as seconds. Raises UsageError."""
    if text is None:
        return None, None
    if text.isdecimal() and int(text) > 0:
        return int(text), None
    try:
        return None, parse_duration(text if text[-1:] in UNITS else "")
    except ValueError:
        raise UsageError(
            f"--budget {text} is neither a number of attempts nor a time\ntry: 60, or 90m, or 2h30m"
        ) from None


def trials_of(
    space: Space,
    results: Sequence[CellResult],
    order: Order,
    *,
    first_seed: int,
    imported: Collection[tuple[str, int]] = (),
    given_up: Collection[str] = (),
) -> list[Trial]:
    """The attempts as the search wants them, in the order of their starts.

    A finite attempt that refutes nothing, for it trained on other records, is as good as not judged; a cell
    that somebody keeps killing, one that failed.
    """
    strangers = {result.cell.id for result in strangers_of(results)}
    found: list[tuple[tuple[int, int, int], Trial]] = []
    for result in results:
        row, name = space.row(result.cell.levels), result.cell.id
        for outcome in ended_by_themselves(result.attempts):
            key = (name, outcome.attempt)
            lost = name in strangers and outcome.status is Status.FINITE
            status = Status.NO_TRAINING if lost else outcome.status
            trial = Trial(row, status, outcome.seed - first_seed + 1, key in imported)
            found.append(((order.get(key, -1), result.cell.number, outcome.attempt), trial))
        if name in given_up:
            found.append(((len(order), result.cell.number, 0), Trial(row, Status.FAILED)))
    return [trial for _, trial in sorted(found, key=lambda item: item[0])]


@dataclass
class Search:
    """Asks for cells, once for every state of the run. `done`: nothing more is wanted, as `ended` says."""

    matrix: Matrix
    plan: Plan
    imported: frozenset[tuple[str, int]] = frozenset()
    spend: float | None = None
    done: bool = False
    finished: bool = False  # the rest of the grid is run after it
    out_of_time: bool = False
    last: Account | None = None
    spaces: dict[int, Space] = field(default_factory=dict)
    asked: object = None

    def space(self, blocked: Blocked) -> Space:
        """The grid, without what this machine can't run."""
        if len(blocked) not in self.spaces:
            self.spaces[len(blocked)] = Space.of(self.matrix, [levels for levels, _ in blocked])
        return self.spaces[len(blocked)]

    def ask(
        self,
        space: Space,
        trials: Sequence[Trial],
        *,
        running: Collection[Row],
        free: int,
        cost: Callable[[Row], float] | None,
    ) -> tuple[Choice, ...]:
        """The next cells; none if nothing has changed since it was last asked."""
        state = (len(trials), frozenset(running), len(space.blocked), free)
        if self.done or state == self.asked:
            return ()
        self.asked = state
        step: Step = propose(space, trials, self.plan, free=free, running=running, cost=cost)
        self.done, self.last = step.done, step.account
        return step.choices

    def look_at(self, seconds: float) -> None:
        """Takes in how long the run has gone on."""
        self.out_of_time = self.out_of_time or (self.spend is not None and seconds >= self.spend)

    def spent(self, results: Iterable[CellResult], running: int) -> bool:
        """Whether no further attempt may be started."""
        if self.out_of_time or self.plan.budget is None:
            return self.out_of_time
        made = {(result.cell.id, o.attempt) for result in results for o in ended_by_themselves(result.attempts)}
        return len(made - self.imported) + running >= self.plan.budget

    def conclude(self, space: Space, trials: Sequence[Trial]) -> str:
        """Takes the last account; returns why the run ended, as a clause."""
        self.last = account(space, trials, self.plan)
        if self.done or self.last.complete:
            why = why_done(self.plan, self.last)
            return f"{why}; then the rest of the grid was run" if self.finished else why
        return self.cut_short

    @property
    def cut_short(self) -> str:
        """The budget that ended it, as a clause."""
        if self.out_of_time and self.spend is not None:
            return f"its budget of {duration(self.spend)} is used up"
        if self.plan.budget is not None:
            return f"its budget of {counted(self.plan.budget, 'attempt')} is used up"
        return "nothing more could be run"


def why_done(plan: Plan, known: Account) -> str:
    """Why a search has nothing more to ask for, as a clause."""
    if plan.strategy is Strategy.FIRST_CAUSE:
        what = "a cause was found" if known.causes else "no cause was found on the way from the safe levels"
        return f"{what}, and nothing else was looked for"
    strength = ",".join(map(str, plan.strength))
    if known.complete and known.verified:
        return f"the search is complete at strength {strength}"
    return f"the search has tried all that it can at strength {strength}"


def search_json(search: Search, *, ended: str | None) -> dict[str, Any]:
    """What the run folder keeps of a search. `ended` is None while it goes on."""
    return {
        "plan": plan_json(search.plan),
        "spend": search.spend,
        "imported": sorted([cell, number] for cell, number in search.imported),
        "ended": ended,
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    return {**asdict(plan), "strategy": plan.strategy.value, "strength": list(plan.strength)}


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The inverse of `plan_json`."""
    t, u = data["strength"]
    return Plan(**{**data, "strategy": Strategy(data["strategy"]), "strength": (t, u)})


def imported_of(kept: Mapping[str, Any], plan: Plan, made: Iterable[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    """The attempts that were there before this search: those of the search that now goes on, or all of them."""
    if kept.get("plan") == plan_json(plan):
        return frozenset((cell, number) for cell, number in kept["imported"])
    return frozenset(made)


def kept_of(written: Mapping[str, Any], cells: Cells) -> Mapping[str, Any]:
    """What a run folder keeps of its search; of a run that died before it wrote that, what it would have written."""
    return written if written or cells.listed else search_json(Search(cells.matrix, Plan()), ended=None)


def is_search(kept: Mapping[str, Any]) -> bool:
    """Whether a search chose the cells of a run, by what its folder keeps; else all of them run, up to a budget."""
    return bool(kept) and plan_from_json(kept["plan"]).strategy is not Strategy.GRID


def summary_of(
    matrix: Matrix, blocked: Blocked, results: Sequence[CellResult], order: Order, kept: Mapping[str, Any]
) -> SearchSummary:
    """What the attempts of a run show, by the plan that its folder keeps."""
    plan, cells = plan_from_json(kept["plan"]), Cells(matrix)
    found = [(o.blocked, o.reason) for result in results for o in result.attempts if o.blocked]
    barred = {Cell(0, levels).id: (levels, reason) for levels, reason in (*blocked, *found)}
    space = Space.of(matrix, [levels for levels, _ in barred.values()])
    imported = frozenset((cell, number) for cell, number in kept["imported"])
    first = int(matrix.settings.get("seed", "0"))
    known = account(space, trials_of(space, results, order, first_seed=first, imported=imported), plan)
    tried = sum(result.status is not None for result in results)
    return SearchSummary(
        plan,
        known,
        space,
        ended=kept["ended"] or "",
        barred=tuple(Barred(levels, reason, _held(cells, levels)) for levels, reason in barred.values()),
        whole=cells.listed and tried == cells.count(),
    )


def _held(cells: Cells, levels: Mapping[str, str]) -> int:
    """How many cells hold these levels, of which some may be fixed settings."""
    return cells.count() - cells.count(without=[levels])


def costs(space: Space, expected: Forecast | None) -> Callable[[Row], float] | None:
    """Seconds that a row is expected to take; None before anything is known."""
    if expected is None:
        return None
    return lambda row: float(f"{expected(Cell(0, space.levels(row))):.3g}")  # no choice may hang on rounding
