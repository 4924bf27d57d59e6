"""Other ways to find the cause of a failing cell, to be compared with: textbook strategies, written anew.

Each takes an `Oracle` (what a truth answers, with attempts counted) and returns the combinations it holds for
causes. All but the grid take one cause for granted, or causes that share no factor.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from nanbisect.outcome import Status
from nanbisect.search.space import holds
from nanbisect.search.values import Combination, Row
from tests.bench.planted import Truth, rows_of

Factors = list[int]


class Oracle:
    """Asks a truth, once a cell: at most `repeats` attempts, until one is not finite."""

    def __init__(self, truth: Truth, chance: random.Random, repeats: int = 1) -> None:
        self.truth, self.chance, self.repeats, self.spent = truth, chance, repeats, 0
        self.known: dict[Row, Status] = {}

    def ends(self, row: Row) -> Status:
        """How the cell ends."""
        if row not in self.known:
            for _ in range(self.repeats):
                self.spent += 1
                self.known[row] = self.truth.ends(row)
                if self.known[row] is not Status.FINITE:
                    break
        return self.known[row]

    def fails(self, row: Row) -> bool:
        """Whether the cell is seen failing."""
        return self.ends(row) is Status.NONFINITE

    def mixed(self, cell: Row, partner: Row, kept: Sequence[int]) -> bool:
        """Whether a cell still fails with all but the factors `kept` taken from a partner."""
        return self.fails(tuple(cell[f] if f in kept else partner[f] for f in range(len(cell))))

    def given(self) -> tuple[Row, Row, Factors]:
        """The failing cell, the finite one, and where they differ, in any order; both are asked."""
        cell, safe = self.truth.failing, self.truth.safe
        self.ends(cell)
        self.ends(safe)
        return cell, safe, self.differing(cell, safe)

    def differing(self, cell: Row, partner: Row) -> Factors:
        """Where two cells differ, in any order."""
        found = [f for f in range(len(cell)) if cell[f] != partner[f]]
        self.chance.shuffle(found)
        return found


Rival = Callable[[Oracle], list[Combination]]


def part(cell: Row, factors: Sequence[int]) -> list[Combination]:
    """The cell's levels of these factors, if there are any."""
    return [tuple((f, cell[f]) for f in sorted(factors))] if factors else []


def grid(oracle: Oracle) -> list[Combination]:
    """Every cell. What fails is what was seen failing."""
    rows = [tuple(row) for row in rows_of(oracle.truth.sizes).tolist()]
    return [tuple(enumerate(row)) for row in rows if oracle.fails(row)]


def from_failing(oracle: Oracle) -> list[Combination]:
    """One factor at a time made safe in the failing cell: those that mend it."""
    cell, safe, differ = oracle.given()
    mends = [f for f in differ if not oracle.mixed(cell, safe, [other for other in range(len(cell)) if other != f])]
    return part(cell, mends)


def from_safe(oracle: Oracle) -> list[Combination]:
    """One level at a time changed in the safe cell: those that make it fail."""
    _, safe, _ = oracle.given()
    changes = [(f, at) for f, size in enumerate(oracle.truth.sizes) for at in range(size) if at != safe[f]]
    return [((f, at),) for f, at in changes if oracle.fails((*safe[:f], at, *safe[f + 1 :]))]


def quickxplain(oracle: Oracle) -> list[Combination]:
    """Junker, "QUICKXPLAIN: preferred explanations and relaxations for over-constrained problems", 2004."""
    cell, safe, differ = oracle.given()

    def explain(background: Factors, changed: bool, left: Factors) -> Factors:
        if changed and oracle.mixed(cell, safe, background):
            return []
        if len(left) == 1:
            return left
        first, second = left[: len(left) // 2], left[len(left) // 2 :]
        later = explain(background + first, bool(first), second)
        return explain(background + later, bool(later), first) + later

    return part(cell, explain([], False, differ))


def ddmin(oracle: Oracle) -> list[Combination]:
    """Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002."""
    cell, safe, left = oracle.given()
    pieces = 2
    while len(left) >= 2:
        chunks = [chunk.tolist() for chunk in np.array_split(np.array(left), pieces) if len(chunk)]
        rests = [[f for f in left if f not in chunk] for chunk in chunks] if len(chunks) > 2 else []
        smaller = next((some for some in (*chunks, *rests) if oracle.mixed(cell, safe, some)), None)
        if smaller is None and pieces >= len(left):
            break
        if smaller is None:
            pieces = min(len(left), 2 * pieces)
        else:
            pieces, left = (2 if smaller in chunks else max(pieces - 1, 2)), smaller
    return part(cell, left)


def fic(oracle: Oracle) -> list[Combination]:
    """Zhang and Zhang, "Characterizing failure-causing parameter interactions by adaptive testing", 2011."""
    return list(_seeded(oracle, _one_by_one))


def fic_bs(oracle: Oracle) -> list[Combination]:
    """The same, by halves."""
    return list(_seeded(oracle, _by_halves))


Narrow = Callable[[Callable[[Factors], bool], Factors], Factors]


def _seeded(oracle: Oracle, narrow: Narrow) -> Iterator[Combination]:
    """FIC from the failing cell, with a partner that differs everywhere (a random one; the safe cell if none of four
    is finite)."""
    cell, sizes = oracle.truth.failing, oracle.truth.sizes
    oracle.ends(cell)
    for _ in range(4):
        partner = _unlike(cell, sizes, oracle.chance)
        if oracle.ends(partner) is Status.FINITE:
            break
    else:
        partner = oracle.truth.safe
        oracle.ends(partner)
    for factors in _fixed(oracle, cell, partner, narrow):
        yield from part(cell, factors)


def _unlike(cell: Row, sizes: Sequence[int], chance: random.Random) -> Row:
    return tuple((at + chance.randrange(1, size)) % size for at, size in zip(cell, sizes, strict=True))


def _fixed(oracle: Oracle, cell: Row, partner: Row, narrow: Narrow) -> Iterator[Factors]:
    """One set of factors after another that makes the cell fail, each without those before."""
    pool = oracle.differing(cell, partner)
    while pool and oracle.mixed(cell, partner, pool):
        fixed = narrow(lambda kept: oracle.mixed(cell, partner, kept), pool)
        if not fixed:
            return
        yield fixed
        pool = [f for f in pool if f not in fixed]


def _one_by_one(fails: Callable[[Factors], bool], pool: Factors) -> Factors:
    fixed: Factors = []
    left = list(pool)
    while left and not fails(fixed):
        f = left.pop(0)
        if not fails(fixed + left):
            fixed.append(f)
    return fixed


def _by_halves(fails: Callable[[Factors], bool], pool: Factors) -> Factors:
    fixed: Factors = []
    left = list(pool)
    while left and not fails(fixed):
        low, high = 0, len(left)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fails(fixed + left[middle:]) else (low, middle)
        fixed.append(left[high - 1])
        left = left[high:]
    return fixed


def pairs(oracle: Oracle) -> list[Combination]:
    """A pairwise covering array, then FIC_BS for every failing row that is not yet explained, each cause tried in one
    further cell; up to three partners."""
    sizes = oracle.truth.sizes
    rows = [oracle.truth.failing, oracle.truth.safe, *_covering(sizes, oracle.chance)]
    finite = [row for row in dict.fromkeys(rows) if oracle.ends(row) is Status.FINITE]
    found: list[Combination] = []
    for row in dict.fromkeys(rows):
        if oracle.fails(row) and not any(holds(row, cause) for cause in found):
            finite.sort(key=lambda other: -len(oracle.differing(row, other)))
            for partner in finite[:3]:
                causes = [cause for some in _fixed(oracle, row, partner, _by_halves) for cause in part(row, some)]
                good = [cause for cause in causes if _again(oracle, row, cause)]
                found += [cause for cause in good if cause not in found]
                if len(good) == len(causes):
                    break
    return found


def _again(oracle: Oracle, row: Row, cause: Combination) -> bool:
    """Whether a row that differs in everything else is not finite."""
    kept = dict(cause)
    other = tuple(kept.get(f, at) for f, at in enumerate(_unlike(row, oracle.truth.sizes, oracle.chance)))
    return oracle.ends(other) is not Status.FINITE


def _covering(sizes: tuple[int, ...], chance: random.Random) -> list[Row]:
    """Rows that together hold every pair of levels, greedily the one with most new pairs."""
    left: set[Combination] = {
        ((f, a), (g, b))
        for f, g in itertools.combinations(range(len(sizes)), 2)
        for a in range(sizes[f])
        for b in range(sizes[g])
    }
    rows: list[Row] = []
    while left:
        tries = [_greedy(sizes, left, chance) for _ in range(10)]
        rows.append(max(tries, key=lambda row: sum(holds(row, pair) for pair in left)))
        left = {pair for pair in left if not holds(rows[-1], pair)}
    return rows


def _greedy(sizes: tuple[int, ...], left: set[Combination], chance: random.Random) -> Row:
    """A row that begins with an uncovered pair; every further factor gets the level that makes most new pairs."""
    fixed = dict(chance.choice(sorted(left)))
    for f in chance.sample(range(len(sizes)), len(sizes)):
        if f not in fixed:
            gains = [sum(tuple(sorted((part_, (f, at)))) in left for part_ in fixed.items()) for at in range(sizes[f])]
            fixed[f] = chance.choice([at for at, gain in enumerate(gains) if gain == max(gains)])
    return tuple(fixed[f] for f in range(len(sizes)))


RIVALS: dict[str, Rival] = {
    "full grid": grid,
    "one factor at a time, from the failing cell": from_failing,
    "one factor at a time, from the safe cell": from_safe,
    "QuickXplain": quickxplain,
    "ddmin": ddmin,
    "FIC": fic,
    "FIC_BS": fic_bs,
    "pairwise array, then FIC_BS": pairs,
}
