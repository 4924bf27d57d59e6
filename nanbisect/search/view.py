"""The evidence in the light of what is held for a cause, and of what is under way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property

import numpy as np

from nanbisect.search.evidence import Evidence
from nanbisect.search.index import Bools, Floats, Ints, Pool
from nanbisect.search.space import holds, within
from nanbisect.search.values import Combination, Row

ABOUT, COMPARED = 0.8, 64
"""Rows with this share of the best score are about as good; the costs of so many are compared."""


class View:
    """`claims` are the combinations held for causes, `taken` the rows that are running or chosen already,
    `cost` the seconds that a row is expected to take."""

    def __init__(
        self,
        evidence: Evidence,
        pool: Pool,
        *,
        claims: Sequence[Combination] = (),
        taken: Collection[Row] = (),
        cost: Callable[[Row], float] | None = None,
    ) -> None:
        self.evidence, self.index, self.pool, self.taken, self.cost = evidence, evidence.index, pool, taken, cost
        self.claims: list[Combination] = []
        self.covered = np.zeros(self.index.total, bool)
        self.claimed = np.zeros(len(pool.rows), bool)
        for claim in claims:
            self.claim(claim)

    def claim(self, combination: Combination) -> None:
        """One more combination is held for a cause; those that hold it are no claims of their own."""
        if any(within(claim, combination) for claim in self.claims):
            return
        self.claims = [*(claim for claim in self.claims if not within(combination, claim)), combination]
        self.covered |= self.index.holding(combination)
        self.claimed |= self.pool.holding(combination)
        self.__dict__.pop("refuted", None)

    def explained(self, row: Row) -> bool:
        """Whether the row holds a claim."""
        return any(holds(row, claim) for claim in self.claims)

    def unexplained(self) -> list[Row]:
        """Failing cells that hold no claim, in the order in which they failed."""
        return [row for row in self.evidence.failing if not self.explained(row)]

    @cached_property
    def refuted(self) -> Bools:
        """The combinations that finite attempts rule out."""
        evidence = self.evidence
        if not evidence.flaky:
            return evidence.ok > 0
        alone = np.zeros(self.index.total, np.int32)
        for row in self.unexplained():
            alone[evidence.numbers[row]] += 1
        found: Bools = ((evidence.ok >= evidence.exposures) & (alone == 0)) | evidence.banned()
        return found

    @cached_property
    def free(self) -> Bools:
        """The rows that are worth another attempt and not under way."""
        free = self.evidence.worth(self.pool)
        for combination in self.barred:
            free &= ~self.pool.holding(combination)
        for row in self.taken:
            if row in self.pool.at:
                free[self.pool.at[row]] = False
        return free

    @cached_property
    def barred(self) -> list[Combination]:
        """See `Evidence.barred`."""
        return self.evidence.barred()

    @cached_property
    def rules(self) -> list[Combination]:
        """What no row to run may hold."""
        return [*self.evidence.space.rules, *self.barred]

    @cached_property
    def risk(self) -> Floats | float:
        """See `Evidence.risk`."""
        return self.evidence.risk(self.pool)

    @cached_property
    def hidden(self) -> Bools:
        """The combinations that a row under way may settle."""
        hidden = np.zeros(self.index.total, bool)
        for row in self.taken:
            hidden[self.index.numbers(row)] = True
        return hidden

    def pick(self, score: Floats) -> int | None:
        """The row of the highest score above 0, of equals one that is always the same. With costs, the cheapest
        of those that are about as good."""
        if not len(score) or score.max() <= 0:
            return None
        score = score + 1e-6 * self.pool.tie
        best = int(np.argmax(score))
        cost = self.cost
        if cost is None:
            return best
        near = np.flatnonzero(score >= ABOUT * score[best])
        near = near[np.argsort(-score[near], kind="stable")][:COMPARED]
        return int(min(near, key=lambda i: cost(self.pool.row(int(i)))))

    def unsettled(self, up_to: int) -> Bools:
        """The combinations of up to so many factors of which nothing is known."""
        found: Bools = (self.index.size <= up_to) & ~self.covered & ~self.refuted & ~self.evidence.untestable()
        return found

    def numbers(self, row: Row) -> Ints:
        """The combinations that a tried row holds."""
        return self.evidence.numbers[row]
