"""The minimal combinations of levels that fail wherever they were judged. Pure.

A combination of levels is *pure* when some judged cell that holds it failed and none was finite. The
minimal pure combinations are the prime implicants of the failures, with cells that were not judged as
don't-cares (Quine, "The problem of simplifying truth functions", 1952; "minimal failure-causing
schema" in combinatorial testing, Nie and Leung, 2011). `find_primes` finds them all, `choose` keeps those
that the failures need and asks what is known of each, `merge` joins levels that act alike.

Sets of cells are integers used as bit sets: bit i stands for the i-th cell by number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from nanbisect.matrix import Factor
from nanbisect.outcome import CellResult, Status

# Cells as bits


Parts = tuple[tuple[int, int], ...]
"""A combination: (a factor's position, the bits of its levels), by position."""


Count = Callable[[Mapping[str, Sequence[str]]], int]


@dataclass(frozen=True)
class Grid:
    """The matrix's cells as bit sets. `holds[f][l]` are those with factor f at its l-th level.

    `reach[f]` are the levels (bits) of factor f that can be judged for all we know: those that were
    judged in some cell, or never tried in any. `count`, where `results` are only the cells that a search
    ran, says how many cells of the matrix hold a combination of levels by name.
    """

    factors: tuple[Factor, ...]
    results: tuple[CellResult, ...]
    holds: tuple[tuple[int, ...], ...]
    every: int
    finite: int
    failed: int
    reach: tuple[int, ...]
    count: Count | None = None

    @classmethod
    def of(cls, factors: Sequence[Factor], results: Sequence[CellResult], count: Count | None = None) -> Grid:
        """The grid of these results, sorted by cell number."""
        ordered = tuple(sorted(results, key=lambda result: result.cell.number))
        statuses = [result.status for result in ordered]
        levels = [[result.cell.levels[factor.name] for result in ordered] for factor in factors]
        holds = tuple(
            tuple(_bits(value == level for value in column) for level in factor.levels)
            for factor, column in zip(factors, levels, strict=True)
        )
        finite = _bits(status is Status.FINITE for status in statuses)
        failed = _bits(status is Status.NONFINITE for status in statuses)
        tried = _bits(status is not None for status in statuses)
        near = [[bool(cells & (finite | failed) or not cells & tried) for cells in group] for group in holds]
        return cls(
            factors=tuple(factors),
            results=ordered,
            holds=holds,
            every=(1 << len(ordered)) - 1,
            finite=finite,
            failed=failed,
            reach=tuple(_bits(flags) for flags in near),
            count=count,
        )

    @property
    def judged(self) -> int:
        """Cells that say anything about the NaN."""
        return self.finite | self.failed

    @property
    def reachable(self) -> int:
        """Cells all of whose levels can be judged for all we know."""
        return self.matching(tuple(enumerate(self.reach)))

    def at(self, position: int, levels: int) -> int:
        """The cells whose factor at `position` has one of `levels` (bits)."""
        return union(cells for level, cells in enumerate(self.holds[position]) if levels >> level & 1)

    def matching(self, parts: Parts, without: int | None = None) -> int:
        """The cells that hold every part, but for the factor `without`."""
        cells = self.every
        for position, levels in parts:
            if position != without:
                cells &= self.at(position, levels)
        return cells

    def beyond(self, parts: Parts) -> int:
        """How many cells of the matrix hold the combination that are not among the results."""
        return self.count(self.named(parts)) - self.matching(parts).bit_count() if self.count else 0

    def named(self, parts: Parts) -> dict[str, tuple[str, ...]]:
        """The combination by names, levels in matrix order."""
        return {self.factors[position].name: self.level_names(position, levels) for position, levels in parts}

    def level_names(self, position: int, levels: int) -> tuple[str, ...]:
        """The names of a factor's `levels` (bits)."""
        return tuple(name for level, name in enumerate(self.factors[position].levels) if levels >> level & 1)

    def chosen(self, cells: int) -> tuple[CellResult, ...]:
        """The results of these cells."""
        bits = zip(self.results, reversed(f"{cells:b}"), strict=False)
        return tuple(result for result, bit in bits if bit == "1")

    def numbers(self, cells: int) -> tuple[int, ...]:
        """The numbers of these cells."""
        return tuple(result.cell.number for result in self.chosen(cells))


def _bits(flags: Iterable[bool]) -> int:
    """The first flag is bit 0. By text, since setting bits one by one is quadratic."""
    return int("0" + "".join("1" if flag else "0" for flag in flags)[::-1], 2)


def union(cells: Iterable[int]) -> int:
    """The cells that are in any of these sets."""
    return reduce(or_, cells, 0)


# Minimal pure combinations


@dataclass(frozen=True)
class Combination:
    """A pure combination: its parts, the cells that hold it, those of them that failed.

    `narrower` has, for a combination that may be too broad, parts that would narrow it, each to one
    that explains the same failures (or, with its neighbour, the same failures). Of one that a search found,
    `beyond` counts the cells of the matrix that hold it and are not in the grid, and it was seen to fail with
    all levels of every `checked` other factors.
    """

    parts: Parts
    matching: int
    failed: int
    narrower: Parts = ()
    beyond: int = 0
    checked: int | None = None

    @property
    def proved(self) -> bool:
        """Every matching cell was judged and failed. That it is minimal is how it was found."""
        return self.matching == self.failed and not self.beyond


def find_primes(grid: Grid) -> list[Combination]:
    """Every minimal pure combination, fewest parts first, then in matrix order; none if all cells agree."""
    if not grid.finite:
        return []
    minimal = [parts for parts in _pure(grid, (), grid.finite, grid.failed) if _is_minimal(grid, parts)]
    matching = [(parts, grid.matching(parts)) for parts in sorted(minimal, key=order)]
    return [Combination(parts, cells, cells & grid.failed) for parts, cells in matching]


def order(parts: Parts) -> tuple[int, Parts]:
    """The key of: fewest parts first, then matrix order."""
    return len(parts), parts


def _pure(grid: Grid, parts: Parts, finite: int, failed: int) -> Iterator[Parts]:
    """Pure combinations that begin with `parts`, which cells of both kinds hold (`finite`, `failed`).

    Every proper part of a minimal one is held by cells of both kinds, so none is passed by; those
    found that are not minimal are for the caller to sort out.
    """
    for position in range(parts[-1][0] + 1 if parts else 0, len(grid.factors)):
        for level, holds in enumerate(grid.holds[position]):
            still_failed, still_finite = failed & holds, finite & holds
            longer = (*parts, (position, 1 << level))
            if still_failed and still_finite:
                yield from _pure(grid, longer, still_finite, still_failed)
            elif still_failed:
                yield longer


def _is_minimal(grid: Grid, parts: Parts) -> bool:
    """Whether a finite cell lacks only the part, for each part but the last (known from the search)."""
    return all(grid.finite & grid.matching(parts, without=position) for position, _ in parts[:-1])


# Which of them may be called a cause


def choose(grid: Grid, primes: Sequence[Combination]) -> tuple[list[Combination], list[Combination]]:
    """(What may be called a cause, what competes for the failures that those leave).

    First, primes that alone explain some failure: such a one is its true cause or broader than that,
    never beside the point, and `_narrower` guards against broader. Then proved primes, which are true
    whatever the others are. Last, primes seen to fail with every pair of other levels.
    """
    once = _explained_once(primes)
    needed = [prime for prime in primes if prime.failed & once]
    sure = [prime for prime in (_graded(grid, prime, needed) for prime in needed) if not prime.narrower]
    for enough in (_proved, _seen_with_all_pairs):
        left, elsewhere = unexplained(grid, sure), union(prime.matching for prime in sure)
        able = [prime for prime in primes if prime.failed & left and enough(grid, prime, elsewhere)]
        sure += fewest(able, left)
    left = unexplained(grid, sure)
    return sure, [_graded(grid, prime, needed) for prime in primes if prime.failed & left]


def unexplained(grid: Grid, causes: Iterable[Combination]) -> int:
    """The failing cells that these do not explain."""
    return grid.failed & ~union(cause.failed for cause in causes)


def _explained_once(primes: Iterable[Combination]) -> int:
    """Failing cells that exactly one prime holds."""
    once = more = 0
    for prime in primes:
        more |= once & prime.failed
        once |= prime.failed
    return once & ~more


def fewest(candidates: Sequence[Combination], left: int) -> list[Combination]:
    """Few candidates that together explain what they can of `left`: greedily the largest share, then the
    first listed (fewest parts, matrix order); without those that later picks make redundant."""
    chosen: list[Combination] = []
    goal = left & union(candidate.failed for candidate in candidates)
    while left & goal:
        best = max(candidates, key=lambda candidate: (candidate.failed & left).bit_count())
        chosen.append(best)
        left &= ~best.failed
    for candidate in tuple(chosen):
        rest = [other for other in chosen if other is not candidate]
        if not goal & ~union(other.failed for other in rest):
            chosen = rest
    return chosen


def _graded(grid: Grid, prime: Combination, needed: Sequence[Combination]) -> Combination:
    """The prime, with what would narrow it; nothing does if it is proved or supported."""
    if prime.proved:
        return prime
    return replace(prime, narrower=_narrower(grid, prime, union(o.matching for o in needed if o is not prime)))


def _narrower(grid: Grid, prime: Combination, elsewhere: int) -> Parts:
    """What a prime must still rule out before it is supported; `elsewhere` are other causes' cells.

    Only failures that no other cause explains speak for it. First, it must have been seen to fail with
    every level of every other factor: then no single narrower combination explains them. Then most of
    its cells must have failed, or every pair of other levels must have been seen with it. What this is
    worth is simulated in the tests.
    """
    own, claimed = prime.failed & ~elsewhere, prime.matching & ~elsewhere
    others = factors_outside(grid, prime.parts)
    seen = {position: levels_held(grid, position, own) for position in others}
    lacking = [
        (position, seen[position])
        for position in others
        if grid.reach[position] & levels_held(grid, position, claimed) & ~seen[position]
    ]
    if not lacking and 2 * own.bit_count() <= (claimed & grid.reachable).bit_count():
        lacking = [(position, seen[position] & ~level) for position, level in _unseen_pair(grid, own, claimed, others)]
    return tuple((position, levels) for position, levels in lacking if levels)


def _proved(grid: Grid, prime: Combination, elsewhere: int) -> bool:
    return prime.proved


def _seen_with_all_pairs(grid: Grid, prime: Combination, elsewhere: int) -> bool:
    """Whether a prime failed with every pair of levels of other factors, outside of the cells `elsewhere`.

    Then it is no broader than the truth, unless three or more other causes share its failures: were it
    finite in a cell y, each of at most two causes would need some level that y lacks, and the pair of
    levels that y has there would never have failed with it. It needs no failure of its own; among many
    cells, some broad combination of many parts competes for every single one.
    """
    others = factors_outside(grid, prime.parts)
    own, claimed = prime.failed & ~elsewhere, prime.matching & ~elsewhere
    return len(others) > 1 and not _unseen_pair(grid, own, claimed, others)


def factors_outside(grid: Grid, parts: Parts) -> list[int]:
    """The positions of the factors that a combination says nothing of."""
    inside = {position for position, _ in parts}
    return [position for position in range(len(grid.factors)) if position not in inside]


def levels_held(grid: Grid, position: int, cells: int) -> int:
    """The levels (bits) of a factor that some of these cells hold."""
    return union(1 << level for level, holds in enumerate(grid.holds[position]) if cells & holds)


def _unseen_pair(grid: Grid, own: int, claimed: int, others: Sequence[int]) -> Parts:
    """The first two levels of two factors that meet in a `claimed` cell within reach, but in no `own` one."""
    levels = [
        (position, 1 << level, holds)
        for position in others
        for level, holds in enumerate(grid.holds[position])
        if grid.reach[position] >> level & 1
    ]
    for (one, low, these), (two, high, those) in itertools.combinations(levels, 2):
        if one != two and claimed & these & those and not own & these & those:
            return (one, low), (two, high)
    return ()


# Levels that act alike


def merge(grid: Grid, primes: Iterable[Combination]) -> list[Combination]:
    """Combinations that agree in all factors but one as one, again and again: {eager} x {2, 8}.

    A merged part never has all judged levels of its factor: without that part the combination would
    still be pure, so its members were not minimal. What is too broad merges only with what is too
    broad in the same way.
    """
    boxes = list(primes)
    changed = True
    while changed:
        before = len(boxes)
        for position in range(len(grid.factors)):
            boxes = _merged_at(position, boxes)
        changed = len(boxes) < before
    return boxes


def _merged_at(position: int, boxes: Sequence[Combination]) -> list[Combination]:
    """Those merged that agree but for the factor at this position."""
    found: dict[object, Combination] = {}
    for box in boxes:
        mine = dict(box.parts).get(position)
        rest = tuple(part for part in box.parts if part[0] != position)
        key = (rest, box.narrower, mine is None, box.checked)
        other = found.get(key)
        if mine is None or other is None:
            found[key] = box
            continue
        levels = mine | dict(other.parts)[position]
        found[key] = Combination(
            parts=tuple(sorted((*rest, (position, levels)))),
            matching=box.matching | other.matching,
            failed=box.failed | other.failed,
            narrower=box.narrower,
            beyond=box.beyond + other.beyond,
            checked=box.checked,
        )
    return list(found.values())
