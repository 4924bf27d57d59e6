"""What goes into the search and what comes out of it: plan, trials, choices, account.

Rows and combinations are given by positions, as `space` has them: a row has the position of its level for
every factor, a combination is a tuple of (factor's position, level's position) in order of factors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from nanbisect.outcome import Status

Row = tuple[int, ...]
Combination = tuple[tuple[int, int], ...]


class Strategy(str, Enum):
    """How the cells to run are chosen."""

    GRID = "grid"
    ADAPTIVE = "adaptive"
    FIRST_CAUSE = "first-cause"


class Kind(str, Enum):
    """What a choice is for."""

    CONTROL = "control"
    COVER = "cover"
    ISOLATE = "isolate"
    VERIFY = "verify"
    REPEAT = "repeat"
    PATH = "path"  # a step of first-cause
    GRID = "grid"


@dataclass(frozen=True)
class Plan:
    """What is asked of the search.

    `strength` is (t, u): causes of up to t factors are looked for, and every cause must have failed with
    every combination of levels of u other factors. `budget` is the most attempts to make, imported ones not
    counted. `repeats` of every cell are made in any case. `flaky` says that cells may fail now and then
    (None: as soon as one cell has ended both ways); then every failure is taken to show in a share of at
    least `p_min` of its attempts, and a cause is missed with a probability of at most `alpha`.
    """

    strategy: Strategy = Strategy.ADAPTIVE
    strength: tuple[int, int] = (3, 2)
    budget: int | None = None
    repeats: int = 1
    flaky: bool | None = None
    p_min: float = 0.5
    alpha: float = 0.05

    @property
    def exposures(self) -> int:
        """So many finite attempts refute a combination that may fail now and then."""
        return 1 if self.p_min >= 1 else math.ceil(math.log(self.alpha) / math.log(1 - self.p_min) - 1e-9)


@dataclass(frozen=True)
class Trial:
    """One attempt that ended by itself. `seed` counts from 1; `imported`: it was made before this run."""

    row: Row
    status: Status
    seed: int = 1
    imported: bool = False


@dataclass(frozen=True)
class Choice:
    """A cell to run next, with which seed (1: the first), what for, and why in words."""

    row: Row
    seed: int
    kind: Kind
    why: str


@dataclass(frozen=True)
class Known:
    """A combination that the search holds for a cause, with its witnesses.

    Of `matching` cells of the matrix that hold it, `failed` were non-finite and `unjudged` ended without a
    judgement. `witnesses[i]` are finite cells that lack only part i: without them that part isn't known to be
    needed. It failed with every combination of levels of `checked` other factors that could be tried;
    `untestable` are those (of up to u levels) that could not. `unseen` are single levels never judged with it.
    `told_apart` is False if no cell is left that could tell it from others that explain the same failures.
    """

    levels: Combination
    matching: int
    failed: int
    unjudged: int
    witnesses: tuple[tuple[Row, ...], ...]
    checked: int
    untestable: tuple[Combination, ...] = ()
    unseen: Combination = ()
    told_apart: bool = True

    @property
    def minimal(self) -> bool:
        """Whether every part is known to be needed."""
        return all(self.witnesses)

    @property
    def exhaustive(self) -> bool:
        """Whether every cell that holds it failed."""
        return self.failed == self.matching


@dataclass(frozen=True)
class Account:
    """What has been shown, and what has not. True at any time, also when a budget ends the search early.

    The four counts are of all combinations of up to `up_to` factors that some cell of the matrix holds:
    refuted by finite attempts, explained by a cause, untestable (its cells ended unjudged), pending.
    `samples` are some of those that are untestable or pending. `open` are failing cells that no cause
    explains yet. `conditions` say in words what the claim rests on; `claims` what may be said now.
    `flaky` with `bound`: the largest share of failing attempts that the combinations called refuted may still
    have, at 95 % (Clopper-Pearson, for the fewest finite attempts among them).
    """

    strategy: Strategy
    up_to: int
    checked: int
    refuted: int
    explained: int
    untestable: int
    pending: int
    causes: tuple[Known, ...]
    open: tuple[Row, ...] = ()
    samples: tuple[Combination, ...] = ()
    attempts: int = 0
    cells: int = 0
    of_cells: int = 0
    flaky: bool = False
    exposures: int = 1
    bound: float | None = None
    claims: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all causes of up to `up_to` factors are found: nothing is pending, untestable or open."""
        return not (self.pending or self.untestable or self.open)

    @property
    def verified(self) -> bool:
        """Whether no cause is too broad, if there are at most `checked` causes in all: more are not known, and all
        that are known were checked."""
        checked = all(c.checked >= self.checked and not c.untestable and c.told_apart for c in self.causes)
        return checked and self.distinct <= self.checked and not self.open

    @property
    def distinct(self) -> int:
        """The number of causes, levels of one factor that act alike counted once."""
        return distinct([cause.levels for cause in self.causes])


Box = frozenset[tuple[int, frozenset[int]]]


def distinct(combinations: Sequence[Combination]) -> int:
    """How many there are, levels of one factor that act alike counted once."""
    return _distinct([frozenset((f, frozenset([at])) for f, at in combination) for combination in combinations])


def _distinct(boxes: list[Box]) -> int:
    """How many are left when boxes that differ in one factor are joined, again and again."""
    for one, other in itertools.combinations(boxes, 2):
        differ = one ^ other
        if len(differ) == 2 and len({f for f, _ in differ}) == 1:
            ((f, _), *_) = differ
            joined = (one & other) | {(f, frozenset[int]().union(*(levels for _, levels in differ)))}
            return _distinct([*(box for box in boxes if box not in (one, other)), joined])
    return len(boxes)


def highest_share(finite: int, alpha: float = 0.05) -> float:
    """The largest share of failing attempts that `finite` attempts, all finite, leave possible (Clopper-Pearson,
    one-sided): 1 - alpha ** (1 / n)."""
    return 1.0 if not finite else 1 - alpha ** (1 / finite)


@dataclass(frozen=True)
class Step:
    """The cells to run next. None and `done`: nothing is left to run, or the budget is spent.

    None and not `done`: what is running has to end first.
    """

    choices: tuple[Choice, ...]
    done: bool
    account: Account
