"""Every combination of few levels has a number; what is counted of combinations is an array over these numbers.

A `Pool` is a list of rows to choose from, with the numbers of the combinations that each row holds: then "how
many open combinations would this row cover" is one look-up and one sum. Up to `MOST` rows, the pool is the
whole grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from nanbisect.search.space import Space
from nanbisect.search.values import Combination, Row

MOST = 20_000
"""Larger grids are never enumerated."""

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class Index:
    """Numbers for the combinations of up to `order` levels: `size[n]` and `level[n, factor]` (-1: any) say which."""

    def __init__(self, sizes: tuple[int, ...], order: int) -> None:
        self.sizes, self.order = sizes, min(order, len(sizes))
        self.subsets = [s for n in range(1, self.order + 1) for s in itertools.combinations(range(len(sizes)), n)]
        self.first, self.strides = self._numbering()
        self.total = int(self.first[-1]) + math.prod(sizes[f] for f in self.subsets[-1])
        self.level = np.full((self.total, len(sizes)), -1, np.int16)
        for start, subset in zip(self.first, self.subsets, strict=True):
            table = np.array(list(itertools.product(*(range(sizes[f]) for f in subset))), np.int16)
            self.level[start : start + len(table), list(subset)] = table
        self.size = (self.level >= 0).sum(1).astype(np.int16)
        self.of_size = np.bincount(self.size, minlength=self.order + 1)
        self._holding: dict[Combination, Bools] = {}
        self._parts: dict[int, list[int]] = {}
        self._column = {subset: at for at, subset in enumerate(self.subsets)}
        self._among: dict[Combination, Bools] = {}

    def _numbering(self) -> tuple[Ints, Ints]:
        """The first number of every set of factors, and what a level adds to the number within it."""
        first, start = np.zeros(len(self.subsets), np.int32), 0
        strides = np.zeros((len(self.sizes), len(self.subsets)), np.int32)
        for column, subset in enumerate(self.subsets):
            first[column], stride = start, 1
            for f in reversed(subset):
                strides[f, column], stride = stride, stride * self.sizes[f]
            start += stride
        return first, strides

    def numbers(self, rows: NDArray[np.int16] | Sequence[Row] | Row) -> Ints:
        """The numbers of all combinations that a row, or each of many rows, holds."""
        return np.asarray(rows, np.int32) @ self.strides + self.first

    def number(self, combination: Combination) -> int:
        """The number of one combination of at most `order` levels."""
        column = self._column[tuple(f for f, _ in combination)]
        return int(self.first[column] + sum(self.strides[f, column] * at for f, at in combination))

    def combination(self, number: int) -> Combination:
        """The inverse of `number`."""
        return tuple((f, int(at)) for f, at in enumerate(self.level[number]) if at >= 0)

    def parts(self, number: int) -> list[int]:
        """The numbers of a combination and of all its parts."""
        if number not in self._parts:
            whole = self.combination(number)
            smaller = (c for n in range(1, len(whole) + 1) for c in itertools.combinations(whole, n))
            self._parts[number] = [self.number(part) for part in smaller]
        return self._parts[number]

    def holding(self, combination: Combination) -> Bools:
        """The combinations that `combination` is a part of."""
        if combination not in self._holding:
            found = np.ones(self.total, bool)
            for f, at in combination:
                found &= self.level[:, f] == at
            self._holding[combination] = found
        return self._holding[combination]

    def among(self, combination: Combination) -> Bools:
        """The combinations of levels of factors that `combination` says nothing of."""
        if combination not in self._among:
            found: Bools = np.all(self.level[:, [f for f, _ in combination]] < 0, axis=1)
            self._among[combination] = found
        return self._among[combination]


class Pool:
    """Rows to choose from; `runnable` tells which of them may be run at all. If it is `fair`, it stands for the grid:
    what none of its rows can tell, no row can."""

    def __init__(
        self, index: Index, rows: NDArray[np.int16], runnable: Bools | None = None, *, fair: bool = True
    ) -> None:
        self.index, self.rows, self.fair = index, rows, fair
        self.runnable = np.ones(len(rows), bool) if runnable is None else runnable
        self.at = {tuple(row): i for i, row in enumerate(rows.tolist())}
        self.tie = np.random.default_rng(0).random(len(rows)).astype(np.float32)  # always the same
        self._holding: dict[Combination, Bools] = {}

    @classmethod
    def empty(cls, index: Index) -> Pool:
        """No rows."""
        return cls(index, np.empty((0, len(index.sizes)), np.int16), fair=False)

    @cached_property
    def numbers(self) -> Ints:
        """The combinations that each row holds."""
        return self.index.numbers(self.rows)

    def sum(self, weights: NDArray[np.generic]) -> Floats:
        """The sum of the weights of all combinations that a row holds, for every row."""
        found: Floats = weights.astype(np.float32).take(self.numbers).sum(1)
        return found

    def holding(self, combination: Combination) -> Bools:
        """The rows that hold it."""
        if combination not in self._holding:
            self._holding[combination] = _holding(self.rows, combination)
        return self._holding[combination]

    def row(self, i: int) -> Row:
        """One row as a tuple."""
        return tuple(int(at) for at in self.rows[i])


class Grid(Pool):
    """All rows of a grid, so that sums over combinations fall apart: a row is two half rows, one for the first
    half of the factors and one for the rest, and a combination is a part in each half."""

    def __init__(self, index: Index, runnable: Bools) -> None:
        sizes, cut = index.sizes, len(index.sizes) // 2
        super().__init__(index, _product(sizes), runnable)
        self.left = _Half(index, range(cut), _product(sizes[:cut]))
        self.right = _Half(index, range(cut, len(sizes)), _product(sizes[cut:]))
        self.joint = {
            (i, j): np.array(
                [[index.number((*a, *b)) for b in self.right.parts[j]] for a in self.left.parts[i]], np.int32
            )
            for i in range(1, index.order)
            for j in range(1, index.order - i + 1)
            if self.left.parts[i] and self.right.parts[j]
        }

    def sum(self, weights: NDArray[np.generic]) -> Floats:
        """As in any pool, by a few small matrix products."""
        w = weights.astype(np.float32)
        found: Floats = self.left.sum(w)[:, None] + self.right.sum(w)[None, :]
        for (i, j), numbers in self.joint.items():
            found += self.left.holds[i] @ w.take(numbers) @ self.right.holds[j].T
        return found.ravel()


class _Half:
    """Half rows, the combinations of each size within these factors, and which half rows hold which."""

    def __init__(self, index: Index, factors: range, rows: NDArray[np.int16]) -> None:
        inside = np.flatnonzero((index.level[:, [f for f in range(len(index.sizes)) if f not in factors]] < 0).all(1))
        self.alone = inside.astype(np.int32)
        self.parts: dict[int, list[Combination]] = {}
        self.holds: dict[int, Floats] = {}
        for size in range(1, index.order + 1):
            self.parts[size] = [index.combination(int(n)) for n in inside if index.size[n] == size]
            shifted = [tuple((f - factors.start, at) for f, at in part) for part in self.parts[size]]
            columns = [_holding(rows, part) for part in shifted]
            self.holds[size] = np.array(columns, np.float32).reshape(len(columns), len(rows)).T
        self.all = np.concatenate([self.holds[size] for size in self.holds], axis=1)

    def sum(self, weights: Floats) -> Floats:
        """Of the combinations within this half alone."""
        return self.all @ weights.take(self.alone)


def _product(sizes: Sequence[int]) -> NDArray[np.int16]:
    """All rows, the first factor slowest."""
    return np.array(list(itertools.product(*(range(size) for size in sizes))), np.int16).reshape(-1, len(sizes))


def _holding(rows: NDArray[np.int16], combination: Combination) -> Bools:
    found = np.ones(len(rows), bool)
    for f, at in combination:
        found &= rows[:, f] == at
    return found


@lru_cache(maxsize=8)
def index_of(sizes: tuple[int, ...], order: int) -> Index:
    """The index, built once."""
    return Index(sizes, order)


SMALL = 256
"""Up to so many rows, a look-up is quicker than the products of `Grid`."""


@lru_cache(maxsize=8)
def whole(space: Space, order: int) -> Pool:
    """All rows of a grid that is small enough."""
    index, rows = index_of(space.sizes, order), _product(space.sizes)
    runnable = np.ones(len(rows), bool)
    for rule in space.rules:
        runnable &= ~_holding(rows, rule)
    return Pool(index, rows, runnable) if len(rows) <= SMALL else Grid(index, runnable)
