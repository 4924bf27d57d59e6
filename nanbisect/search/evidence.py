"""What the attempts so far show, counted for every combination of few levels and for every cell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from nanbisect.outcome import Status
from nanbisect.search.index import MOST, Bools, Floats, Index, Ints, Pool, index_of, whole
from nanbisect.search.space import Space
from nanbisect.search.values import Combination, Plan, Row, Trial

GIVE_UP = 2
"""A combination of which so many cells ended unjudged, and none judged, is untestable."""
LEAVE = 3
"""A level or pair of levels of which so many did is left alone, with all cells that hold it."""


class Ends:
    """How often a cell ended finite, non-finite and unjudged."""

    __slots__ = ("bad", "err", "ok")

    def __init__(self) -> None:
        self.ok = self.bad = self.err = 0


class Evidence:
    """Counts for every combination (`ok`, `bad`, `err`: arrays by its number) and cell. Grows by `add`.

    `p` is the share of attempts in which a failure shows at least; `exposures` finite attempts refute.
    """

    def __init__(self, space: Space, plan: Plan) -> None:
        self.space, self.plan = space, plan
        self.index: Index = index_of(space.sizes, max(3, *plan.strength))
        self.ok, self.bad, self.err = (np.zeros(self.index.total, np.int32) for _ in range(3))
        self.cells: dict[Row, Ends] = {}
        self.failing: list[Row] = []
        self.unjudged: list[Row] = []
        self.seeds: dict[Row, set[int]] = {}
        self.numbers: dict[Row, Ints] = {}
        self.flaky = bool(plan.flaky)
        self.spent = self.finite = 0
        self.pool = whole(space, self.index.order) if space.product <= MOST else Pool.empty(self.index)

    @classmethod
    def of(cls, space: Space, trials: Sequence[Trial], plan: Plan) -> Evidence:
        """All of these attempts."""
        evidence = cls(space, plan)
        for trial in trials:
            evidence.add(trial)
        return evidence

    def add(self, trial: Trial) -> None:
        """One more attempt."""
        ends = self.cells.setdefault(trial.row, Ends())
        self.seeds.setdefault(trial.row, set()).add(trial.seed)
        numbers = self.numbers.get(trial.row)
        if numbers is None:
            numbers = self.numbers[trial.row] = self.index.numbers(trial.row)
        self.spent += not trial.imported
        if trial.status is Status.FINITE:
            ends.ok += 1
            self.finite += 1
            self.ok[numbers] += 1
        elif trial.status is Status.NONFINITE:
            if not ends.bad:
                self.failing.append(trial.row)
            ends.bad += 1
            self.bad[numbers] += 1
        else:
            if not ends.err:
                self.unjudged.append(trial.row)
                self.err[numbers] += 1
            ends.err += 1
        if self.plan.flaky is None and ends.ok and ends.bad:
            self.flaky = True

    @property
    def p(self) -> float:
        """The share of attempts in which a failure shows at least."""
        return self.plan.p_min if self.flaky else 1.0

    @property
    def exposures(self) -> int:
        """So many finite attempts refute a combination."""
        return self.plan.exposures if self.flaky else 1

    @property
    def withdrawn(self) -> int:
        """So many finite attempts, without a failure, of a cell speak against all that the cell holds."""
        return self.exposures + (math.ceil(math.log(100) / -math.log(1 - self.p) - 1e-9) if self.p < 1 else 0)

    def untestable(self) -> Bools:
        """Combinations that were tried often enough and never judged."""
        found: Bools = (self.err >= GIVE_UP) & (self.ok + self.bad == 0)
        return found

    def barred(self) -> list[Combination]:
        """The levels and pairs that are left alone since no cell with them was ever judged; pairs of other levels."""
        found = (self.err >= LEAVE) & (self.ok + self.bad == 0) & (self.index.size <= 2)
        if not found.any():
            return []
        some = [self.index.combination(int(number)) for number in np.flatnonzero(found)]
        return [c for c in some if len(c) == 1 or not any((part,) in some for part in c)]

    def risk(self, pool: Pool) -> Floats | float:
        """The suspected chance that a row ends unjudged: of its pairs and levels, those that never did otherwise."""
        suspects = (self.err > 0) & (self.ok + self.bad == 0) & (self.index.size <= 2)
        if not suspects.any():
            return 0.0
        weight = np.zeros(self.index.total, np.float32)
        weight[suspects] = -np.log1p(-np.minimum(0.6, 0.2 * self.err[suspects]))
        risk: Floats = 1 - np.exp(-pool.sum(weight))
        return risk

    def worth(self, pool: Pool) -> Bools:
        """The rows that may still tell something: never run, or flaky and not yet seen often enough."""
        free = pool.runnable.copy()
        for row, ends in self.cells.items():
            if row in pool.at and (not self.flaky or ends.err or ends.ok + ends.bad > self.withdrawn):
                free[pool.at[row]] = False
        return free

    def attempts(self, pool: Pool) -> Floats:
        """How often each row was judged."""
        found = np.zeros(len(pool.rows), np.float32)
        for row, ends in self.cells.items():
            if row in pool.at:
                found[pool.at[row]] = ends.ok + ends.bad
        return found

    def next_seed(self, row: Row) -> int:
        """The seed to run a row with: the first it has not had. Where failures come and go, of those the one that
        was used least, since exposures are counted across cells."""
        had = self.seeds.get(row, set())
        if not self.flaky:
            return next(seed for seed in range(1, len(had) + 2) if seed not in had)
        used = Counter(seed for seeds in self.seeds.values() for seed in seeds)
        fresh = [seed for seed in range(1, self.withdrawn + len(had) + 2) if seed not in had]
        return min(fresh, key=lambda seed: (used[seed], seed))

    def banned(self) -> Bools:
        """Combinations that are part of something (a combination, a cell) that was finite time and again, and
        never failed: were they a cause, it would have."""
        found = np.zeros(self.index.total, bool)
        for number in np.flatnonzero((self.ok >= self.withdrawn) & (self.bad == 0)):
            found[self.index.parts(int(number))] = True
        for row, ends in self.cells.items():
            if ends.ok >= self.withdrawn and not ends.bad:
                found[self.numbers[row]] = True
        return found

    def clean(self) -> list[Row]:
        """Cells that ended finite, and never otherwise."""
        return [row for row, ends in self.cells.items() if ends.ok and not ends.bad]
