"""Which attempt runs next, in which slot, and how long the rest will take. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from nanbisect.matrix import Cell
from nanbisect.outcome import CellResult, Outcome, Status


@dataclass(frozen=True)
class Attempt:
    """An attempt to start. `index` counts a cell's attempts from 1, killed ones left out: it sets the seed."""

    cell: Cell
    index: int


def counted(attempts: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Attempts that ended by themselves; one killed from outside says nothing and is made again."""
    return tuple(attempt for attempt in attempts if attempt.status is not Status.KILLED)


def pending(results: Sequence[CellResult], *, repeat: int, running: Collection[str]) -> list[Attempt]:
    """Attempts still to make, in the order of `results`; `running` holds the ids of cells under way.

    A cell that ended unjudged is not tried again: it would end the same way.
    """
    todo = []
    for result in results:
        done = counted(result.attempts)
        if result.cell.id not in running and len(done) < repeat and all(outcome.judged for outcome in done):
            todo.append(Attempt(result.cell, len(done) + 1))
    return todo


def blocked_by(cell: Cell, blocked: Sequence[tuple[Mapping[str, str], str]]) -> str | None:
    """Why this machine can't run the cell, or None: some blocked combination is part of it."""
    for levels, reason in blocked:
        if levels and all(cell.levels.get(name) == level for name, level in levels.items()):
            return reason
    return None


def time_left(
    results: Sequence[CellResult],
    *,
    repeat: int,
    elapsed: Mapping[str, float],
    work: Mapping[str, Sequence[float]],
    slots: int,
) -> float | None:
    """Seconds to the end of the run; None before the first cell has ended.

    `work[cell id]` is what the cell has to do: (micro-batches, records). Loading is taken as the median
    so far. Training is fitted as so much a micro-batch plus so much a record over the cells that ran to
    their end; `elapsed` holds the seconds of cells under way.
    """
    done = [outcome for result in results for outcome in counted(result.attempts) if outcome.train_seconds is not None]
    if not done:
        return None
    load = median(outcome.load_seconds or 0.0 for outcome in done)
    per_micro, per_record = _rates(results, work)
    failing = _share_trained(results, work)
    total = 0.0
    for result in results:
        missing = max(0, repeat - len(counted(result.attempts)))
        if any(not outcome.judged for outcome in counted(result.attempts)):
            missing = 0
        micro, records = work.get(result.cell.id, (0.0, 0.0))
        one = load + failing * (micro * per_micro + records * per_record)
        total += max(0.0, missing * one - elapsed.get(result.cell.id, 0.0))
    return total / max(1, slots)


def _rates(results: Sequence[CellResult], work: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Seconds a micro-batch and seconds a record: least squares through the origin, neither negative."""
    rows = []
    for result in results:
        micro, records = work.get(result.cell.id, (0.0, 0.0))
        for outcome in counted(result.attempts):
            if outcome.train_seconds is not None and outcome.micro_batches and micro:
                share = outcome.micro_batches / micro
                rows.append((micro * share, records * share, outcome.train_seconds))
    mm, mr, rr, mt, rt = (sum(row[i] * row[k] for row in rows) for i, k in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2)))
    determinant = mm * rr - mr * mr
    if determinant <= 1e-9 * mm * rr:  # one batch size so far: the two can't be told apart
        return (mt / mm if mm else 0.0), 0.0
    micro_rate, record_rate = (mt * rr - rt * mr) / determinant, (rt * mm - mt * mr) / determinant
    if micro_rate < 0:
        return 0.0, rt / rr
    return (mt / mm, 0.0) if record_rate < 0 else (micro_rate, record_rate)


def _share_trained(results: Sequence[CellResult], work: Mapping[str, Sequence[float]]) -> float:
    """How much of its micro-batches a cell gets through on average: failing cells stop early."""
    shares = []
    for result in results:
        micro = work.get(result.cell.id, (0.0, 0.0))[0]
        shares += [
            min(1.0, outcome.micro_batches / micro) for outcome in counted(result.attempts) if micro and outcome.judged
        ]
    return fmean(shares) if shares else 1.0
