"""How much of the space of combinations is known: for each combination of few levels, what became of it.

Sets of cells are integers used as bit sets, as in `combinations`: the count stays quick for any matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import combinations, product
from operator import and_, or_

from nanbisect.attribution import Cause, Standing
from nanbisect.matrix import Factor
from nanbisect.outcome import CellResult, Status
from nanbisect.report.inputs import holds

MOST_FACTORS = 3
FATES = ("refuted", "explained", "untestable", "pending")


def completeness(factors: Sequence[Factor], results: Sequence[CellResult], causes: Sequence[Cause]) -> dict[str, int]:
    """Combinations of one to three levels (of different factors, in some cell of the matrix) by fate.

    Refuted: one of its cells is finite, so it can't bring the NaN by itself. Explained: all its judged
    cells failed and hold a known cause, or a known cause is part of it. Untestable: every one of its
    cells was tried and none could be judged. Pending: the rest.
    """
    finite = _bits(result.status is Status.FINITE for result in results)
    failed = _bits(result.status is Status.NONFINITE for result in results)
    tried = _bits(result.status is not None for result in results)
    known = [cause.levels for cause in causes if cause.standing is not Standing.NOT_TOLD_APART]
    explained = reduce(or_, (_bits(holds(r.cell, levels) for r in results) for levels in known), 0)

    def fate(cells: int) -> str:
        judged = cells & (finite | failed)
        if cells & finite:
            return "refuted"
        if not cells & ~explained or (judged and not judged & ~explained):
            return "explained"
        return "untestable" if not judged and not cells & ~tried else "pending"

    most = min(MOST_FACTORS, len(factors))
    counts = Counter(fate(cells) for cells in _matching(factors, results, most) if cells)
    return {**{name: counts[name] for name in FATES}, "up_to_factors": most}


def _matching(factors: Sequence[Factor], results: Sequence[CellResult], most: int) -> Iterator[int]:
    """The cells that hold each combination of up to `most` levels."""
    held = [
        [_bits(result.cell.levels[factor.name] == level for result in results) for level in factor.levels]
        for factor in factors
    ]
    for size in range(1, most + 1):
        for chosen in combinations(held, size):
            for cells in product(*chosen):
                yield reduce(and_, cells)


def _bits(flags: Iterator[bool]) -> int:
    """The first flag is bit 0. By text, since setting bits one by one is quadratic."""
    return int("0" + "".join("1" if flag else "0" for flag in flags)[::-1], 2)
