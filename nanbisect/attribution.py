"""Outcomes in, causes out. Pure: no clock, file, environment or randomness.

`combinations` finds the minimal combinations of levels that explain the failures; here they get their
evidence, and what the cells say beside them is put together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from nanbisect.combinations import (
    Combination,
    Count,
    Grid,
    Parts,
    choose,
    factors_outside,
    fewest,
    find_primes,
    levels_held,
    merge,
    order,
    unexplained,
    union,
)
from nanbisect.confirm import open_cells
from nanbisect.matrix import Factor
from nanbisect.neutrality import Caution, Divergence, cell_cautions, cells_of, compare, listed
from nanbisect.outcome import CellResult, Outcome, Status

__all__ = [
    "Attribution",
    "Cause",
    "Caution",
    "Divergence",
    "Finding",
    "Isolated",
    "Searched",
    "Standing",
    "attribute",
    "strangers_of",
]


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
    `checked`, of one that a search found: it was seen to fail with all levels of every so many other factors.
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
    checked: int | None = None


@dataclass(frozen=True)
class Isolated:
    """A combination that a search holds for a cause: `minimal` if every part is known to be needed and nothing
    that is left to run would tell it from another; `checked` as a cause's."""

    levels: Mapping[str, str]
    minimal: bool
    checked: int


@dataclass(frozen=True)
class Searched:
    """What a search knows, when only the cells that it asked for were run: of the others nothing is a result."""

    isolated: tuple[Isolated, ...]
    count: Count


@dataclass(frozen=True)
class Attribution:
    """Everything the judged cells show.

    `compared` pairs of finite cells had to agree at step 1; `largest` is the largest relative difference
    seen among them, of "loss", "grad_norm" and "parameter". `strangers` are finite cells that refute nothing.
    `unconfirmed` are cells judged in shared processes only, for which a cause waits.
    """

    finding: Finding
    causes: tuple[Cause, ...]
    neutral: tuple[str, ...]
    divergences: tuple[Divergence, ...]
    compared: int
    cautions: tuple[Caution, ...]
    largest: Mapping[str, float] = field(default_factory=dict)
    strangers: tuple[int, ...] = ()
    unconfirmed: tuple[int, ...] = ()


def attribute(
    factors: Sequence[Factor],
    results: Sequence[CellResult],
    *,
    neutral_settings: frozenset[str] = frozenset(),
    searched: Searched | None = None,
) -> Attribution:
    """What the judged cells show; `results` has every cell of the matrix, in any order.

    `neutral_settings` are those that must not change the mathematics (see `neutrality`). With `searched` the
    results are the cells that a search ran, and the causes those that it has isolated.
    """
    refuting, strangers = _refuting(results)
    grid = Grid.of(factors, refuting, searched.count if searched else None)
    sure, loose = _found(grid, searched.isolated) if searched else choose(grid, find_primes(grid))
    causes, unlisted = _causes(grid, sure, loose)
    ordered = tuple(sorted(results, key=lambda result: result.cell.number))
    causes, waits = _confirmed(causes, sorted(refuting, key=lambda result: result.cell.number))
    comparison = compare(factors, ordered, neutral_settings)
    return Attribution(
        finding=_finding(grid, causes, strangers),
        causes=causes,
        neutral=_neutral(grid, (*sure, *loose), strangers),
        divergences=comparison.moved,
        compared=comparison.pairs,
        largest=comparison.largest,
        strangers=tuple(result.cell.number for result in strangers),
        unconfirmed=tuple(sorted({result.cell.number for _, cells in waits for result in cells})),
        cautions=(
            *cell_cautions(factors, ordered, neutral_settings),
            *_different_records(strangers, _on_records(ordered)),
            *_never_seen(causes),
            *_kept_model(waits),
            *_more_combinations(unlisted),
        ),
    )


def _found(grid: Grid, isolated: Sequence[Isolated]) -> tuple[list[Combination], list[Combination]]:
    """(What may be called a cause, what may not yet) of what a search has isolated.

    Every part must be known to be needed, and it must have been seen to fail with every level of every
    other factor at least: then no single narrower combination explains the same failures.
    """
    sure, loose = list[Combination](), list[Combination]()
    for one in (one for one in isolated if one.levels):  # the baseline that fails is no combination of levels
        at = {factor.name: (position, factor) for position, factor in enumerate(grid.factors)}
        parts = tuple(sorted((at[name][0], 1 << at[name][1].levels.index(level)) for name, level in one.levels.items()))
        matching = grid.matching(parts)
        box = Combination(parts, matching, matching & grid.failed, beyond=grid.beyond(parts), checked=one.checked)
        if not matching & grid.finite:
            known = one.minimal and (one.checked > 0 or box.proved)
            (sure if known else loose).append(box)
    return sure, loose


def strangers_of(results: Sequence[CellResult]) -> list[CellResult]:
    """The finite cells that refute nothing: training there never met the records of some failing cell."""
    return _refuting(results)[1]


def _refuting(results: Sequence[CellResult]) -> tuple[list[CellResult], list[CellResult]]:
    """The results for the search for causes, and the finite cells taken out of it.

    A finite cell that never met the records of some failing cell (as far as is known) refutes nothing:
    there it is as good as not judged.
    """
    spoken = [(result, result.outcome) for result in results]
    failing = _on_records(results)
    kept, strangers = [], []
    for result, outcome in spoken:
        finite = outcome is not None and outcome.status is Status.FINITE
        if outcome and finite and any(not _met(outcome, other) for other in failing):
            strangers.append(result)
            kept.append(CellResult(result.cell, (replace(outcome, status=Status.NO_TRAINING),)))
        else:
            kept.append(result)
    return kept, strangers


def _on_records(results: Sequence[CellResult]) -> list[Outcome]:
    """The failing outcomes in which records may matter: weights that are bad at load have met none."""
    outcomes = [result.outcome for result in results if result.outcome is not None]
    return [o for o in outcomes if o.status is Status.NONFINITE and not (o.site and o.site.phase == "load")]


SAME_RECORDS = "Give every cell the same records in the same order: no shuffling, or one seeded with `{seed}`."


def _met(finite: Outcome, failing: Outcome) -> bool:
    """Whether a finite cell trained on the records in which another failed. Where those are not known, one that went
    as far as it was asked to is taken to have met them."""
    if failing.suspects:
        return {*failing.suspects} <= {*finite.records}
    return not any(doubt.code == "fewer_steps" for doubt in finite.doubts)


def _surely_others(stranger: CellResult, failing: Sequence[Outcome]) -> bool:
    """Whether it is known all that a finite cell met, and that the records of some failing cell were not there."""
    outcome = stranger.outcome
    if outcome is None or not (outcome.records and outcome.all_records):
        return False
    return any(not {*other.suspects} <= {*outcome.records} for other in failing)


def _different_records(strangers: Sequence[CellResult], failing: Sequence[Outcome]) -> Iterator[Caution]:
    sure = [result for result in strangers if _surely_others(result, failing)]
    if sure:
        text = (
            f"Training in {cells_of(sure)} never met the records in which another cell failed: finite there "
            "refutes nothing, and the causes leave it out."
        )
        yield Caution("different_records", text, SAME_RECORDS)
    doubtful = [result for result in strangers if result not in sure]
    if doubtful:
        text = (
            f"Training in {cells_of(doubtful)} is not known to have met the records in which another cell failed, "
            "since the ids of some batches are missing: finite there refutes nothing, and the causes leave it out."
        )
        yield Caution("unknown_records", text, "Give each batch a field `record_id`: a list with one id a row.")


def _finding(grid: Grid, causes: Sequence[Cause], strangers: Sequence[CellResult]) -> Finding:
    if not grid.judged:
        return Finding.NOTHING_JUDGED
    if not grid.failed:
        return Finding.NOTHING_FAILED
    if not grid.finite:
        return Finding.UNDECIDED if strangers else Finding.EVERYTHING_FAILED
    known = any(cause.standing is not Standing.NOT_TOLD_APART for cause in causes)
    return Finding.CAUSE if known else Finding.UNDECIDED


# Causes


Waits = list[tuple[Cause, tuple[CellResult, ...]]]
"""Causes, each with the cells that must show the same in a process of their own."""


def _confirmed(causes: Sequence[Cause], results: Sequence[CellResult]) -> tuple[tuple[Cause, ...], Waits]:
    """The causes, none of them proved that cells in shared processes alone speak for; and what those wait for."""
    known = [cause for cause in causes if cause.standing is not Standing.NOT_TOLD_APART]
    waits = [(cause, cells) for cause in known if (cells := open_cells(cause.levels, results))]
    weak = [cause for cause, _ in waits]
    return tuple(replace(c, standing=Standing.SUPPORTED) if c in weak else c for c in causes), waits


def _kept_model(waits: Waits) -> Iterator[Caution]:
    for cause, cells in waits:
        text = (
            f"{_words(cause.levels)} was found in a process that trained one cell after another (--keep-model); "
            f"{cells_of(cells)} must show the same in a process of its own before it is proved."
        )
        yield Caution("kept_model", text, "Go on with --resume, which makes these cells by themselves.")


LISTED = 12
"""So many combinations that are not told apart are listed, and as alternatives of each."""


def _causes(grid: Grid, sure: Sequence[Combination], loose: Sequence[Combination]) -> tuple[tuple[Cause, ...], int]:
    """The causes for the reader, surest first, and how many combinations are left out of the list."""
    known = sorted(merge(grid, sure), key=lambda box: (not box.proved, *_rank(box)))
    left = unexplained(grid, known)
    rivals = sorted(merge(grid, loose), key=lambda box: _rank(box, left))
    chosen = _listed(rivals, left)
    causes = [_cause(grid, box, Standing.PROVED if box.proved else Standing.SUPPORTED) for box in known]
    named = {box.parts for box in chosen}
    for box in chosen:
        others = [other for other in rivals if other is not box and other.failed & box.failed & left][:LISTED]
        named |= {other.parts for other in others}
        causes.append(_undecided(grid, box, others))
    return tuple(causes), len(rivals) - len(named)


def _rank(box: Combination, left: int = -1) -> tuple[int, int, Parts]:
    """Explains most of what is left first, then fewest parts, then matrix order."""
    return -(box.failed & left).bit_count(), *order(box.parts)


def _listed(rivals: Sequence[Combination], left: int) -> list[Combination]:
    """The rivals to list on their own, at most `LISTED` beside those that explain every failure once.

    One that explains only a part of what another explains is an alternative of that other.
    """
    cover = fewest(rivals, left)
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


def _cause(grid: Grid, box: Combination, standing: Standing) -> Cause:
    """The combination with its evidence."""
    witnesses = union(grid.finite & grid.matching(box.parts, without=position) for position, _ in box.parts)
    return Cause(
        levels=grid.named(box.parts),
        standing=standing,
        matching=box.matching.bit_count() + box.beyond,
        failed=box.failed.bit_count(),
        untested=(box.matching & ~grid.judged).bit_count() + box.beyond,
        needed={grid.factors[position].name: _needed(grid, box, position) for position, _ in box.parts},
        witnesses=grid.numbers(witnesses),
        unseen=_unseen(grid, box),
        checked=box.checked,
    )


def _undecided(grid: Grid, box: Combination, others: Sequence[Combination]) -> Cause:
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
    differ |= box.matching & union(~grid.at(position, levels) for position, levels in box.narrower)
    unjudged = (differ & ~grid.judged) or (box.matching & ~grid.judged)
    narrower = [tuple(sorted((*box.parts, part))) for part in box.narrower]
    return replace(
        _cause(grid, box, Standing.NOT_TOLD_APART),
        alternatives=tuple(grid.named(parts) for parts in (*narrower, *(other.parts for other in others))),
        deciding=grid.numbers(unjudged & grid.reachable or unjudged),
    )


def _needed(grid: Grid, box: Combination, position: int) -> dict[str, str]:
    """What happened at each other level of one factor, everything else of the combination kept."""
    kept = grid.matching(box.parts, without=position)
    levels = dict(box.parts)[position]
    return {
        name: _happened(grid, kept & holds)
        for level, (name, holds) in enumerate(zip(grid.factors[position].levels, grid.holds[position], strict=True))
        if not levels >> level & 1
    }


def _happened(grid: Grid, cells: int) -> str:
    """finite, nonfinite, mixed, the most common other status, or not_run."""
    finite, failed = cells & grid.finite, cells & grid.failed
    if finite and failed:
        return "mixed"
    if finite or failed:
        return Status.FINITE.value if finite else Status.NONFINITE.value
    statuses: Counter[str] = Counter(result.status.value for result in grid.chosen(cells) if result.status)
    return statuses.most_common(1)[0][0] if statuses else "not_run"


def _unseen(grid: Grid, box: Combination) -> dict[str, tuple[str, ...]]:
    """Levels of other factors that the matrix puts together with the combination, but no judged cell does."""
    found = {}
    for position in factors_outside(grid, box.parts):
        there = levels_held(grid, position, box.matching) | _levels_beyond(grid, box, position)
        levels = there & ~levels_held(grid, position, box.matching & grid.judged)
        if levels:
            found[grid.factors[position].name] = grid.level_names(position, levels)
    return found


def _levels_beyond(grid: Grid, box: Combination, position: int) -> int:
    """The levels (bits) of a factor that the matrix puts together with the combination in cells without a result."""
    if grid.count is None:
        return 0
    levels = range(len(grid.factors[position].levels))
    return union(1 << level for level in levels if grid.beyond((*box.parts, (position, 1 << level))))


# Factors that made no difference, and cautions about the causes


def _neutral(grid: Grid, boxes: Iterable[Combination], strangers: Sequence[CellResult]) -> tuple[str, ...]:
    """Factors in no combination whose change alone never changed a judgement, of a failure at least once.

    A level that only `strangers` hold may act otherwise: those were finite, if on other records.
    """
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
        if position not in involved
        and {result.cell.levels[factor.name] for result in strangers} <= {levels[position] for levels, _ in rows}
        and _made_no_difference(rows, position)
    )


def _made_no_difference(rows: Sequence[tuple[tuple[str, ...], Status | None]], position: int) -> bool:
    """Whether judged cells that differ only in this factor agree, and each judged level has failed in such a pair."""
    failures: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    finite: set[tuple[str, ...]] = set()
    for levels, status in rows:
        rest = levels[:position] + levels[position + 1 :]
        if status is Status.NONFINITE:
            failures[rest].add(levels[position])
        else:
            finite.add(rest)
    paired = {level for levels in failures.values() if len(levels) > 1 for level in levels}
    return failures.keys().isdisjoint(finite) and paired == {levels[position] for levels, _ in rows}


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
