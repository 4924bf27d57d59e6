"""Planted truths over grids of levels: which cells fail, which can't be judged. For the search's benchmark and tests.

A truth has one to three minimal causes of one to three levels each, none part of another; at most 60 % of its
cells fail. A cell that fails and one that is finite are given, both drawn at random, as somebody who asks has
them. The levels are then numbered so that the finite one is the baseline.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nanbisect.matrix import Factor
from nanbisect.outcome import Status
from nanbisect.search.space import Space, within
from nanbisect.search.values import Combination, Row

GRIDS = {"2x3x2x3": (2, 3, 2, 3), "2^4x3^4": (2,) * 4 + (3,) * 4, "3^8": (3,) * 8, "2^12": (2,) * 12}
Table = NDArray[np.bool_]


@lru_cache(maxsize=8)
def space_of(sizes: tuple[int, ...]) -> Space:
    """A grid whose factors are a, b, c, ... with levels 0, 1, 2, ..."""
    names = "abcdefghijklmnopqrstuvwxyz"
    return Space(tuple(Factor(names[f], tuple(str(at) for at in range(size))) for f, size in enumerate(sizes)))


@lru_cache(maxsize=8)
def rows_of(sizes: tuple[int, ...]) -> NDArray[np.int16]:
    """All rows of a grid, the first factor slowest."""
    return np.array(list(itertools.product(*(range(size) for size in sizes))), np.int16)


@lru_cache(maxsize=8)
def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(sizes[f + 1 :])) for f in range(len(sizes)))


def table(sizes: tuple[int, ...], combinations: Sequence[Combination]) -> Table:
    """Which cells hold any of these."""
    rows = rows_of(sizes)
    found = np.zeros(len(rows), bool)
    for combination in combinations:
        held = np.ones(len(rows), bool)
        for f, at in combination:
            held &= rows[:, f] == at
        found |= held
    return found


@dataclass
class Truth:
    """What fails, what can't be judged, and the failing cell given; the baseline is the finite one.

    A failure shows in a share `p` of attempts.
    """

    sizes: tuple[int, ...]
    causes: tuple[Combination, ...]
    fails: Table
    unjudged: Table
    failing: Row
    p: float = 1.0
    chance: random.Random = field(default_factory=random.Random)

    def at(self, row: Row) -> int:
        """A row's place in the tables."""
        return sum(at * stride for at, stride in zip(row, _strides(self.sizes), strict=True))

    def ends(self, row: Row) -> Status:
        """One attempt of a cell."""
        if self.unjudged[self.at(row)]:
            return Status.OUT_OF_MEMORY
        shows = self.fails[self.at(row)] and (self.p >= 1 or self.chance.random() < self.p)
        return Status.NONFINITE if shows else Status.FINITE

    @property
    def safe(self) -> Row:
        """The baseline."""
        return (0,) * len(self.sizes)

    def exact(self, found: Sequence[Combination]) -> bool:
        """Whether these predict every cell that can be judged."""
        return bool(((table(self.sizes, found) == self.fails) | self.unjudged).all())


def truth(
    sizes: tuple[int, ...],
    chance: random.Random,
    *,
    causes: Sequence[int] = (1, 2, 3),
    parts: Sequence[int] = (1, 2, 3),
    unjudged: float = 0.0,
    p: float = 1.0,
) -> Truth:
    """A random truth; `causes` and `parts` are the numbers to draw from, `unjudged` the share of such cells."""
    while True:
        drawn = [_combination(sizes, chance, chance.choice(parts)) for _ in range(chance.choice(causes))]
        if any(within(one, other) for one, other in itertools.permutations(drawn, 2)):
            continue
        memory = _out_of_memory(sizes, chance, unjudged)
        fails, masked = table(sizes, drawn), table(sizes, memory)
        clean = np.flatnonzero(~fails & ~masked)
        if fails.mean() > 0.6 or not len(clean) or not (fails & ~masked).any():
            continue
        safe = rows_of(sizes)[chance.choice(list(clean))].tolist()
        planted, memory = (_renumbered(sizes, some, safe) for some in (drawn, memory))
        fails, masked = table(sizes, planted), table(sizes, memory)
        failing = rows_of(sizes)[chance.choice(list(np.flatnonzero(fails & ~masked)))].tolist()
        return Truth(sizes, tuple(planted), fails, masked, tuple(failing), p, random.Random(chance.random()))


def _renumbered(sizes: tuple[int, ...], combinations: Sequence[Combination], safe: Row) -> list[Combination]:
    return [tuple((f, (at - safe[f]) % sizes[f]) for f, at in combination) for combination in combinations]


def _combination(sizes: tuple[int, ...], chance: random.Random, parts: int) -> Combination:
    return tuple((f, chance.randrange(sizes[f])) for f in sorted(chance.sample(range(len(sizes)), parts)))


def _out_of_memory(sizes: tuple[int, ...], chance: random.Random, share: float) -> list[Combination]:
    """Combinations of one to three levels that can't be judged, together about `share` of the cells."""
    rules: list[Combination] = []
    for _ in range(60 if share else 0):
        if rules and table(sizes, rules).mean() >= 0.8 * share:
            break
        more = [*rules, _combination(sizes, chance, chance.choices((1, 2, 3), (15, 55, 30))[0])]
        if table(sizes, more).mean() <= 1.3 * share:
            rules = more
    return rules
