"""Outcomes in, causes out. Pure: no clock, file, environment or randomness.

A combination of levels is *pure* when some judged cell that holds it failed and none was finite. The
minimal pure combinations are the prime implicants of the failures, with cells that were not judged as
don't-cares (Quine, "The problem of simplifying truth functions", 1952; "minimal failure-causing
schema" in combinatorial testing, Nie and Leung, 2011). `_primes` finds them all, `_choose` keeps those
that the failures need and asks what is known of each, `_merged` joins levels that act alike.

Sets of cells are integers used as bit sets: bit i stands for the i-th cell by number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import reduce
from itertools import combinations
from operator import or_

from nanbisect.matrix import Factor
from nanbisect.neutrality import Caution, Divergence, cell_cautions, divergences, listed
from nanbisect.outcome import CellResult, Status

__all__ = ["Attribution", "Cause", "Caution", "Divergence", "Finding", "Standing", "attribute"]


class Standing(str, Enum):
    """How much is known of a combination of levels that fails wherever it was judged."""

    PROVED = "proved"
    SUPPORTED = "supported"
    NOT_TOLD_APART = "not_told_apart"


class Finding(str, Enum):
    """What the judged cells say as a whole."""

    CAUSE = "cause"  # at least one proved or supported cause
    UNDECIDED = "undecided"  # some failed, but no combination may be called a cause
    NOTHING_FAILED = "nothing_failed"
    EVERYTHING_FAILED = "everything_failed"
    NOTHING_JUDGED = "nothing_judged"


@dataclass(frozen=True)
class Cause:
    """A minimal combination of levels; levels of one factor that act alike are merged.

    `matching` counts the matrix's cells that hold it, `failed` those that were non-finite, `untested`
    those not judged. `needed[factor][other level]` is what happened when only that part was changed:
    finite, nonfinite, mixed, a not-judged status, or not_run. `witnesses` are numbers of finite cells
    that lack exactly one part. `unseen[factor]` are levels never judged together with it.
    `alternatives` (only for not_told_apart) are combinations that explain the same failures, and
    `deciding` the numbers of the cells that would tell them apart.
    """

    levels: Mapping[str, tuple[str, ...]]
    standing: Standing
    matching: int
    failed: int
    untested: int
    needed: Mapping[str, Mapping[str, str]]
    witnesses: tuple[int, ...] = ()
    unseen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alternatives: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    deciding: tuple[int, ...] = ()


@dataclass(frozen=True)
class Attribution:
    """Everything the judged cells show."""

    finding: Finding
    causes: tuple[Cause, ...]
    neutral: tuple[str, ...]
    divergences: tuple[Divergence, ...]
    compared: int
    cautions: tuple[Caution, ...]


def attribute(
    factors: Sequence[Factor],
    results: Sequence[CellResult],
    *,
    neutral_settings: frozenset[str] = frozenset(),
) -> Attribution:
    """What the judged cells show; `results` has every cell of the matrix, in any order.

    `neutral_settings` are those that must not change the mathematics (see `neutrality`).
    """
    grid = _Grid.of(factors, results)
    sure, loose = _choose(grid, _primes(grid))
    causes, unlisted = _causes(grid, sure, loose)
    moved, compared = divergences(factors, grid.results, neutral_settings)
    return Attribution(
        finding=_finding(grid, causes),
        causes=causes,
        neutral=_neutral(grid, (*sure, *loose)),
        divergences=moved,
        compared=compared,
        cautions=(
            *cell_cautions(factors, grid.results, neutral_settings),
            *_never_seen(causes),
            *_more_combinations(unlisted),
        ),
    )


def _finding(grid: _Grid, causes: Sequence[Cause]) -> Finding:
    if not grid.judged:
        return Finding.NOTHING_JUDGED
    if not grid.failed:
        return Finding.NOTHING_FAILED
    if not grid.finite:
        return Finding.EVERYTHING_FAILED
    known = any(cause.standing is not Standing.NOT_TOLD_APART for cause in causes)
    return Finding.CAUSE if known else Finding.UNDECIDED


# Cells as bits


Parts = tuple[tuple[int, int], ...]
"""A combination: (a factor's position, the bits of its levels), by position."""


@dataclass(frozen=True)
class _Grid:
    """The matrix's cells as bit sets. `holds[f][l]` are those with factor f at its l-th level.

    `reach[f]` are the levels (bits) of factor f that can be judged for all we know: those that were
    judged in some cell, or never tried in any.
    """

    factors: tuple[Factor, ...]
    results: tuple[CellResult, ...]
    holds: tuple[tuple[int, ...], ...]
    every: int
    finite: int
    failed: int
    reach: tuple[int, ...]

    @classmethod
    def of(cls, factors: Sequence[Factor], results: Sequence[CellResult]) -> _Grid:
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
        return _union(cells for level, cells in enumerate(self.holds[position]) if levels >> level & 1)

    def matching(self, parts: Parts, without: int | None = None) -> int:
        """The cells that hold every part, but for the factor `without`."""
        cells = self.every
        for position, levels in parts:
            if position != without:
                cells &= self.at(position, levels)
        return cells

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


def _union(cells: Iterable[int]) -> int:
    return reduce(or_, cells, 0)


# Minimal pure combinations


@dataclass(frozen=True)
class _Combination:
    """A pure combination: its parts, the cells that hold it, those of them that failed.

    `narrower` has, for a combination that may be too broad, parts that would narrow it, each to one
    that explains the same failures (or, with its neighbour, the same failures).
    """

    parts: Parts
    matching: int
    failed: int
    narrower: Parts = ()

    @property
    def proved(self) -> bool:
        """Every matching cell was judged and failed. That it is minimal is how it was found."""
        return self.matching == self.failed


def _primes(grid: _Grid) -> list[_Combination]:
    """Every minimal pure combination, fewest parts first, then in matrix order; none if all cells agree."""
    if not grid.finite:
        return []
    minimal = [parts for parts in _pure(grid, (), grid.finite, grid.failed) if _is_minimal(grid, parts)]
    matching = [(parts, grid.matching(parts)) for parts in sorted(minimal, key=_order)]
    return [_Combination(parts, cells, cells & grid.failed) for parts, cells in matching]


def _order(parts: Parts) -> tuple[int, Parts]:
    return len(parts), parts


def _pure(grid: _Grid, parts: Parts, finite: int, failed: int) -> Iterator[Parts]:
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


def _is_minimal(grid: _Grid, parts: Parts) -> bool:
    """Whether a finite cell lacks only the part, for each part but the last (known from the search)."""
    return all(grid.finite & grid.matching(parts, without=position) for position, _ in parts[:-1])


# Which of them may be called a cause


def _choose(grid: _Grid, primes: Sequence[_Combination]) -> tuple[list[_Combination], list[_Combination]]:
    """(What may be called a cause, what competes for the failures that those leave).

    First, primes that alone explain some failure: such a one is its true cause or broader than that,
    never beside the point, and `_narrower` guards against broader. Then proved primes, which are true
    whatever the others are. Last, primes seen to fail with every pair of other levels.
    """
    once = _explained_once(primes)
    needed = [prime for prime in primes if prime.failed & once]
    sure = [prime for prime in (_graded(grid, prime, needed) for prime in needed) if not prime.narrower]
    for enough in (_proved, _seen_with_all_pairs):
        left, elsewhere = _left(grid, sure), _union(prime.matching for prime in sure)
        able = [prime for prime in primes if prime.failed & left and enough(grid, prime, elsewhere)]
        sure += _fewest(able, left)
    left = _left(grid, sure)
    return sure, [_graded(grid, prime, needed) for prime in primes if prime.failed & left]


def _left(grid: _Grid, causes: Iterable[_Combination]) -> int:
    """The failing cells that these do not explain."""
    return grid.failed & ~_union(cause.failed for cause in causes)


def _explained_once(primes: Iterable[_Combination]) -> int:
    """Failing cells that exactly one prime holds."""
    once = more = 0
    for prime in primes:
        more |= once & prime.failed
        once |= prime.failed
    return once & ~more


def _fewest(candidates: Sequence[_Combination], left: int) -> list[_Combination]:
    """Few candidates that together explain what they can of `left`: greedily the largest share, then the
    first listed (fewest parts, matrix order); without those that later picks make redundant."""
    chosen: list[_Combination] = []
    goal = left & _union(candidate.failed for candidate in candidates)
    while left & goal:
        best = max(candidates, key=lambda candidate: (candidate.failed & left).bit_count())
        chosen.append(best)
        left &= ~best.failed
    for candidate in tuple(chosen):
        rest = [other for other in chosen if other is not candidate]
        if not goal & ~_union(other.failed for other in rest):
            chosen = rest
    return chosen


def _graded(grid: _Grid, prime: _Combination, needed: Sequence[_Combination]) -> _Combination:
    """The prime, with what would narrow it; nothing does if it is proved or supported."""
    if prime.proved:
        return prime
    return replace(prime, narrower=_narrower(grid, prime, _union(o.matching for o in needed if o is not prime)))


def _narrower(grid: _Grid, prime: _Combination, elsewhere: int) -> Parts:
    """What a prime must still rule out before it is supported; `elsewhere` are other causes' cells.

    Only failures that no other cause explains speak for it. First, it must have been seen to fail with
    every level of every other factor: then no single narrower combination explains them. Then most of
    its cells must have failed, or every pair of other levels must have been seen with it. What this is
    worth is simulated in the tests.
    """
    own, claimed = prime.failed & ~elsewhere, prime.matching & ~elsewhere
    others = _others(grid, prime.parts)
    seen = {position: _held(grid, position, own) for position in others}
    lacking = [
        (position, seen[position])
        for position in others
        if grid.reach[position] & _held(grid, position, claimed) & ~seen[position]
    ]
    if not lacking and 2 * own.bit_count() <= (claimed & grid.reachable).bit_count():
        lacking = [(position, seen[position] & ~level) for position, level in _unseen_pair(grid, own, claimed, others)]
    return tuple((position, levels) for position, levels in lacking if levels)


def _proved(grid: _Grid, prime: _Combination, elsewhere: int) -> bool:
    return prime.proved


def _seen_with_all_pairs(grid: _Grid, prime: _Combination, elsewhere: int) -> bool:
    """Whether a prime failed with every pair of levels of other factors, outside of the cells `elsewhere`.

    Then it is no broader than the truth, unless three or more other causes share its failures: were it
    finite in a cell y, each of at most two causes would need some level that y lacks, and the pair of
    levels that y has there would never have failed with it. It needs no failure of its own; among many
    cells, some broad combination of many parts competes for every single one.
    """
    others = _others(grid, prime.parts)
    own, claimed = prime.failed & ~elsewhere, prime.matching & ~elsewhere
    return len(others) > 1 and not _unseen_pair(grid, own, claimed, others)


def _others(grid: _Grid, parts: Parts) -> list[int]:
    """The positions of the factors that a combination says nothing of."""
    inside = {position for position, _ in parts}
    return [position for position in range(len(grid.factors)) if position not in inside]


def _held(grid: _Grid, position: int, cells: int) -> int:
    """The levels (bits) of a factor that some of these cells hold."""
    return _union(1 << level for level, holds in enumerate(grid.holds[position]) if cells & holds)


def _unseen_pair(grid: _Grid, own: int, claimed: int, others: Sequence[int]) -> Parts:
    """The first two levels of two factors that meet in a `claimed` cell within reach, but in no `own` one."""
    levels = [
        (position, 1 << level, holds)
        for position in others
        for level, holds in enumerate(grid.holds[position])
        if grid.reach[position] >> level & 1
    ]
    for (one, low, these), (two, high, those) in combinations(levels, 2):
        if one != two and claimed & these & those and not own & these & those:
            return (one, low), (two, high)
    return ()


# Causes


LISTED = 12
"""So many combinations that are not told apart are listed, and as alternatives of each."""


def _causes(grid: _Grid, sure: Sequence[_Combination], loose: Sequence[_Combination]) -> tuple[tuple[Cause, ...], int]:
    """The causes for the reader, surest first, and how many combinations are left out of the list."""
    known = sorted(_merged(grid, sure), key=lambda box: (not box.proved, *_rank(box)))
    left = _left(grid, known)
    rivals = sorted(_merged(grid, loose), key=lambda box: _rank(box, left))
    chosen = _listed(rivals, left)
    causes = [_cause(grid, box, Standing.PROVED if box.proved else Standing.SUPPORTED) for box in known]
    named = {box.parts for box in chosen}
    for box in chosen:
        others = [other for other in rivals if other is not box and other.failed & box.failed & left][:LISTED]
        named |= {other.parts for other in others}
        causes.append(_undecided(grid, box, others))
    return tuple(causes), len(rivals) - len(named)


def _rank(box: _Combination, left: int = -1) -> tuple[int, int, Parts]:
    """Explains most of what is left first, then fewest parts, then matrix order."""
    return -(box.failed & left).bit_count(), *_order(box.parts)


def _merged(grid: _Grid, primes: Iterable[_Combination]) -> list[_Combination]:
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


def _merged_at(position: int, boxes: Sequence[_Combination]) -> list[_Combination]:
    """Those merged that agree but for the factor at this position."""
    found: dict[object, _Combination] = {}
    for box in boxes:
        mine = dict(box.parts).get(position)
        rest = tuple(part for part in box.parts if part[0] != position)
        key = (rest, box.narrower, mine is None)
        other = found.get(key)
        if mine is None or other is None:
            found[key] = box
            continue
        levels = mine | dict(other.parts)[position]
        found[key] = _Combination(
            parts=tuple(sorted((*rest, (position, levels)))),
            matching=box.matching | other.matching,
            failed=box.failed | other.failed,
            narrower=box.narrower,
        )
    return list(found.values())


def _listed(rivals: Sequence[_Combination], left: int) -> list[_Combination]:
    """The rivals to list on their own, at most `LISTED` beside those that explain every failure once.

    One that explains only a part of what another explains is an alternative of that other.
    """
    cover = _fewest(rivals, left)
    rest = [
        box
        for box in rivals
        if box not in cover and not any(_explains_less(box.failed & left, other.failed & left) for other in cover)
    ]
    chosen = [*cover, *rest[: max(0, LISTED - len(cover))]]
    return [box for box in rivals if box in chosen]


def _explains_less(these: int, those: int) -> bool:
    """Whether `these` cells are a proper part of `those`."""
    return these != those and not these & ~those


def _cause(grid: _Grid, box: _Combination, standing: Standing) -> Cause:
    """The combination with its evidence."""
    witnesses = _union(grid.finite & grid.matching(box.parts, without=position) for position, _ in box.parts)
    return Cause(
        levels=grid.named(box.parts),
        standing=standing,
        matching=box.matching.bit_count(),
        failed=box.failed.bit_count(),
        untested=(box.matching & ~grid.judged).bit_count(),
        needed={grid.factors[position].name: _needed(grid, box, position) for position, _ in box.parts},
        witnesses=grid.numbers(witnesses),
        unseen=_unseen(grid, box),
    )


def _undecided(grid: _Grid, box: _Combination, others: Sequence[_Combination]) -> Cause:
    """A combination that may not be called a cause, with what explains the same and the cells that decide.

    Those are the unjudged cells in which it and its rivals, or it and its narrower forms, differ; cells
    within reach, if there are any.
    """
    sets = [box.matching, *(other.matching for other in others)]
    once = more = 0
    for cells in sets:
        more |= once & cells
        once |= cells
    differ = once & ~more if others else 0
    differ |= box.matching & _union(~grid.at(position, levels) for position, levels in box.narrower)
    unjudged = (differ & ~grid.judged) or (box.matching & ~grid.judged)
    narrower = [tuple(sorted((*box.parts, part))) for part in box.narrower]
    return replace(
        _cause(grid, box, Standing.NOT_TOLD_APART),
        alternatives=tuple(grid.named(parts) for parts in (*narrower, *(other.parts for other in others))),
        deciding=grid.numbers(unjudged & grid.reachable or unjudged),
    )


def _needed(grid: _Grid, box: _Combination, position: int) -> dict[str, str]:
    """What happened at each other level of one factor, everything else of the combination kept."""
    kept = grid.matching(box.parts, without=position)
    levels = dict(box.parts)[position]
    return {
        name: _happened(grid, kept & holds)
        for level, (name, holds) in enumerate(zip(grid.factors[position].levels, grid.holds[position], strict=True))
        if not levels >> level & 1
    }


def _happened(grid: _Grid, cells: int) -> str:
    """finite, nonfinite, mixed, the most common other status, or not_run."""
    finite, failed = cells & grid.finite, cells & grid.failed
    if finite and failed:
        return "mixed"
    if finite or failed:
        return Status.FINITE.value if finite else Status.NONFINITE.value
    statuses: Counter[str] = Counter(result.status.value for result in grid.chosen(cells) if result.status)
    return statuses.most_common(1)[0][0] if statuses else "not_run"


def _unseen(grid: _Grid, box: _Combination) -> dict[str, tuple[str, ...]]:
    """Levels of other factors that the matrix puts together with the combination, but no judged cell does."""
    found = {}
    for position in _others(grid, box.parts):
        levels = _held(grid, position, box.matching) & ~_held(grid, position, box.matching & grid.judged)
        if levels:
            found[grid.factors[position].name] = grid.level_names(position, levels)
    return found


# Factors that made no difference, and cautions about the causes


def _neutral(grid: _Grid, boxes: Iterable[_Combination]) -> tuple[str, ...]:
    """Factors in no combination whose change alone never changed a judgement, of a failure at least once."""
    if not (grid.finite and grid.failed):
        return ()
    involved = {position for box in boxes for position, _ in (*box.parts, *box.narrower)}
    rows = [
        (tuple(result.cell.levels[factor.name] for factor in grid.factors), result.status)
        for result in grid.chosen(grid.judged)
    ]
    return tuple(
        factor.name
        for position, factor in enumerate(grid.factors)
        if position not in involved and _made_no_difference(rows, position)
    )


def _made_no_difference(rows: Sequence[tuple[tuple[str, ...], Status | None]], position: int) -> bool:
    """Whether judged cells that differ only in this factor agree, and at least two of them failed."""
    failures: Counter[tuple[str, ...]] = Counter()
    finite: set[tuple[str, ...]] = set()
    for levels, status in rows:
        rest = levels[:position] + levels[position + 1 :]
        if status is Status.NONFINITE:
            failures[rest] += 1
        else:
            finite.add(rest)
    return failures.keys().isdisjoint(finite) and max(failures.values(), default=0) > 1


def _never_seen(causes: Iterable[Cause]) -> Iterator[Caution]:
    """A cause is known only where it was seen."""
    for cause in causes:
        if cause.standing is not Standing.NOT_TOLD_APART and cause.unseen:
            levels = listed([f"{name}={level}" for name, levels in cause.unseen.items() for level in levels])
            yield Caution(
                "never_seen",
                f"{_words(cause.levels)} was never judged together with {levels}.",
                "There it may act otherwise; judge one such cell if you train that way.",
            )


def _words(levels: Mapping[str, tuple[str, ...]]) -> str:
    """`attention=eager and batch_size=2 or 8`."""
    return " and ".join(f"{name}={' or '.join(values)}" for name, values in levels.items())


def _more_combinations(unlisted: int) -> Iterator[Caution]:
    """The list of what can't be told apart is cut."""
    if unlisted:
        yield Caution(
            "more_combinations",
            f"{unlisted} further combinations explain the same failures and are not listed.",
            "Too few cells were judged to tell them apart: run more of the matrix.",
        )
