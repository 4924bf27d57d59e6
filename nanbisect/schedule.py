"""Which attempt runs next, and how long the rest will take. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from nanbisect.matrix import Cell
from nanbisect.outcome import CellResult, Outcome, Status

ROUNDS = 12
PULL = 0.02
RECENT = 128  # trainings that the estimate looks at


@dataclass(frozen=True)
class Attempt:
    """An attempt to start. `index` counts a cell's seeds from 1: attempt k uses the first seed + k - 1."""

    cell: Cell
    index: int


def counted(attempts: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Attempts that ended by themselves; one killed from outside says nothing and is made again."""
    return tuple(attempt for attempt in attempts if attempt.status is not Status.KILLED)


def pending(
    results: Sequence[CellResult],
    *,
    seeds: Sequence[int],
    running: Collection[str] = (),
    given_up: Collection[str] = (),
    again: Collection[str] = (),
    wanted: Mapping[str, Collection[int]] | None = None,
) -> list[Attempt]:
    """Attempts still to make, in the order of `results`: each cell once with every one of `seeds`.

    `wanted` has, where a search says so, the indexes of those seeds that each cell is to be run with.
    `running` holds the ids of cells under way, `given_up` of those that somebody keeps killing, `again` of
    those to be tried once more although they ended unjudged. Without that they would end the same way.
    """
    todo = []
    left_out = {*running, *given_up}
    for result in results:
        if result.cell.id in left_out:
            continue
        done = counted(result.attempts)
        made = {outcome.seed for outcome in done if outcome.judged or result.cell.id not in again}
        chosen = range(1, len(seeds) + 1) if wanted is None else sorted(wanted.get(result.cell.id, ()))
        missing = [index for index in chosen if seeds[index - 1] not in made]
        if missing and (result.cell.id in again or _worth_it(done, seeds)):
            todo.append(Attempt(result.cell, missing[0]))
    return todo


def _worth_it(done: Sequence[Outcome], seeds: Sequence[int]) -> bool:
    """Whether the latest attempt with each seed was judged (a rerun may have judged what had failed before)."""
    latest = {outcome.seed: outcome for outcome in done if outcome.seed in seeds}
    return all(outcome.judged for outcome in latest.values())


def blocked_by(cell: Cell, blocked: Sequence[tuple[Mapping[str, str], str]]) -> str | None:
    """Why this machine can't run the cell, or None: some blocked combination is part of it."""
    for levels, reason in blocked:
        if levels and all(cell.levels.get(name) == level for name, level in levels.items()):
            return reason
    return None


Forecast = Callable[[Cell], float]
"""Predicts the seconds of one attempt of a cell."""


def in_turn(
    attempts: Sequence[Attempt], expected: Forecast, *, repeat: int, controls: Collection[str]
) -> list[Attempt]:
    """The order for several slots: the cells in `controls` as they are, then the longest first.

    A long cell that starts last would keep one slot busy while the others have nothing left to do. A cell
    counts with all its attempts that are missing of `repeat`, which follow one another. Among equals the
    order stays.
    """
    first = [attempt for attempt in attempts if attempt.cell.id in controls]
    rest = [attempt for attempt in attempts if attempt.cell.id not in controls]
    rest.sort(key=lambda attempt: -(repeat + 1 - attempt.index) * expected(attempt.cell))
    return first + rest


def time_left(
    results: Sequence[CellResult],
    *,
    seeds: Sequence[int],
    elapsed: Mapping[str, float],
    expected: Forecast | None,
    slots: int,
) -> float | None:
    """Seconds to the end of the run; None where nothing is foretold.

    `elapsed`: the seconds of cells under way; `slots`: how many may be under way together.
    """
    if expected is None:
        return None
    left = {}
    for result in results:
        done = counted(result.attempts)
        missing = len({*seeds} - {outcome.seed for outcome in done}) if _worth_it(done, seeds) else 0
        left[result.cell.id] = max(0.0, missing * expected(result.cell) - elapsed.get(result.cell.id, 0.0))
    return makespan(
        [seconds for cell, seconds in left.items() if cell in elapsed],
        [seconds for cell, seconds in left.items() if cell not in elapsed],
        slots=slots,
    )


def makespan(under_way: Sequence[float], waiting: Sequence[float], *, slots: int) -> float:
    """Seconds until all have ended, when each in `waiting`, longest first, takes the slot that is free first."""
    idle = max(0, max(1, slots) - len(under_way))
    ends = [*under_way, *[0.0] * idle]
    heapq.heapify(ends)
    for seconds in sorted(waiting, reverse=True):
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


def forecast(results: Sequence[CellResult], work: Mapping[str, float]) -> Forecast | None:
    """What the attempts so far foretell; None before any has ended.

    Loading is taken as the median so far. Training is so long for a cell as the product of what each of
    its levels has shown to cost (`level_costs`), times the share of its work that a cell gets through on
    average: failing cells stop early.
    """
    trainings = _trainings(results, work)
    if not trainings:
        return None
    load = median(training.load for training in trainings)
    share = fmean(training.share for training in trainings)
    costs = level_costs([(training.cell, training.whole) for training in trainings[-RECENT:]])
    return lambda cell: load + share * costs(cell)


@dataclass(frozen=True)
class Training:
    """How long an attempt trained: `whole` is scaled up to all of its work, of which it did `share`."""

    cell: Cell
    load: float
    whole: float
    share: float


def _trainings(results: Sequence[CellResult], work: Mapping[str, float]) -> list[Training]:
    found = []
    for result in results:
        micro = work.get(result.cell.id, 0.0)
        for outcome in counted(result.attempts):
            if outcome.train_seconds is not None and outcome.micro_batches and micro:
                share = min(1.0, outcome.micro_batches / micro)
                load = outcome.load_seconds or 0.0
                found.append(Training(result.cell, load, outcome.train_seconds / share, share))
            elif outcome.train_seconds is None and outcome.judged and outcome.seconds:
                found.append(Training(result.cell, 0.0, outcome.seconds, 1.0))  # a command tells no more
    return found


def level_costs(seconds: Sequence[tuple[Cell, float]]) -> Forecast:
    """Predicts a cell's seconds from cells seen: a common factor times one factor a level.

    Least squares on logarithms; the pull to 1, of a fiftieth of an observation a level, only settles what
    the cells seen leave open. Solved by going round the levels, which converges for such a sum.
    """
    logs = [math.log(max(value, 1e-6)) for _, value in seconds]
    common = fmean(logs)
    unexplained = [value - common for value in logs]
    seen: dict[tuple[str, str], list[int]] = {}  # level -> the places of its cells
    for place, (cell, _) in enumerate(seconds):
        for item in cell.levels.items():
            seen.setdefault(item, []).append(place)
    effects = dict.fromkeys(sorted(seen), 0.0)  # sorted: the same sums in every process
    for _ in range(ROUNDS):
        for level, effect in effects.items():
            places = seen[level]
            rest = sum(unexplained[place] for place in places) + effect * len(places)
            effects[level] = rest / (len(places) + PULL)
            for place in places:
                unexplained[place] += effect - effects[level]
    return lambda cell: math.exp(common + sum(effects.get(item, 0.0) for item in cell.levels.items()))
