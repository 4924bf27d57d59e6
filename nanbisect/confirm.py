"""Which cells must be judged in a process of their own before a cause found in shared ones is proved. Pure.

With `--keep-model` cells follow one another in one process that keeps its loaded model. Weights, buffers
and random numbers are restored and checked, yet a process that has trained is not a fresh one. So of each
cause one failing cell, and for each of its parts one finite cell that lacks only that part, is made again
by itself; if one of them ends otherwise, so is every cell that was judged in a shared process only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from nanbisect.outcome import KEPT, CellResult, Outcome, Status

Levels = Mapping[str, tuple[str, ...]]


def shared_only(result: CellResult) -> bool:
    """Whether all that judged a cell shared a process with others."""
    judged = [attempt for attempt in result.counting if attempt.judged]
    return bool(judged) and all(attempt.started == KEPT for attempt in judged)


def contradicted(result: CellResult) -> bool:
    """Whether a process of its own ended otherwise than a shared one, with the same seed."""
    ends = {(attempt.seed, attempt.started == KEPT): attempt for attempt in result.attempts if attempt.judged}
    pairs = [(ends[seed, True], ends[seed, False]) for seed, kept in ends if kept and (seed, False) in ends]
    return any(kept.status is not own.status or not _same_place(kept, own) for kept, own in pairs)


def _same_place(kept: Outcome, own: Outcome) -> bool:
    return kept.site is None or kept.site.same_place(own.site)


def open_cells(levels: Levels, results: Sequence[CellResult]) -> tuple[CellResult, ...]:
    """What must be made again by itself before these levels are proved: nothing where no cell shared a process."""
    failing = [r for r in results if _lacks(levels, r) == [] and r.status is Status.NONFINITE]
    if not failing or not any(map(shared_only, results)):
        return ()
    first = min(failing, key=lambda result: (shared_only(result), result.cell.number))
    chosen = [first, *_witnesses(levels, first, results)]
    return tuple(result for result in chosen if shared_only(result))


def _witnesses(levels: Levels, failing: CellResult, results: Sequence[CellResult]) -> Iterator[CellResult]:
    """For each part the finite cell that lacks only it: one that is settled, else the nearest to the failing one."""
    for name in levels:
        finite = [r for r in results if r.status is Status.FINITE and _lacks(levels, r) == [name]]
        if finite:
            yield min(finite, key=_far_from(failing))


def _far_from(failing: CellResult) -> Callable[[CellResult], tuple[bool, int, int]]:
    def far(result: CellResult) -> tuple[bool, int, int]:
        other = failing.cell.levels
        differs = sum(level != other.get(name) for name, level in result.cell.levels.items())
        return shared_only(result), differs, result.cell.number

    return far


def _lacks(levels: Levels, result: CellResult) -> list[str]:
    """The parts of a combination that a cell does not hold."""
    return [name for name, values in levels.items() if result.cell.levels.get(name) not in values]


def to_make_again(unconfirmed: Collection[int], results: Sequence[CellResult]) -> frozenset[str]:
    """Ids of cells to make in processes of their own: those that causes wait for (by number), or all of them."""
    all_of_them = any(map(contradicted, results))
    shared = [result.cell for result in results if shared_only(result)]
    return frozenset(cell.id for cell in shared if all_of_them or cell.number in unconfirmed)
