"""Rows worth looking at in a grid too large to enumerate, and a climb from the best of them.

Rows that hold something of which nothing is known; crossovers of failing cells that are still open with
finite ones; rows that verify a claim. All levels that do not matter are drawn, always the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from nanbisect.search.index import Pool
from nanbisect.search.reading import Reading
from nanbisect.search.space import holds
from nanbisect.search.values import Choice, Combination, Row
from nanbisect.search.verify import needs

EACH = 48
"""So many rows of each kind."""
CLIMB = 12
"""So many times the rows around the best one are looked at."""


def candidates(reading: Reading, strength: tuple[int, int]) -> Pool:
    """The rows to choose from, given what is open."""
    view = reading.view
    draw = np.random.default_rng(len(view.evidence.cells) + 1000 * len(view.taken))
    rows = [
        *_taking(_covering(reading, strength[0], draw)),
        *_crossing(reading, draw),
        *(row for claim in view.claims for row in _taking(_verifying(reading, claim, strength[1], draw))),
    ]
    return pool_of(reading, rows, fair=True)


def pool_of(reading: Reading, rows: Iterable[Row], *, fair: bool) -> Pool:
    """These rows but those that can't be run, each once."""
    kept = [row for row in dict.fromkeys(rows) if reading.view.evidence.space.runnable(row)]
    return Pool(reading.view.index, np.array(kept, np.int16).reshape(-1, len(reading.view.index.sizes)), fair=fair)


def climb(choice: Choice, reading: Reading, best: Callable[[Pool], Choice | None]) -> Choice:
    """The best row near a choice: again and again, all that differ in one level."""
    for _ in range(CLIMB):
        row, sizes = choice.row, reading.view.index.sizes
        near = [(*row[:f], at, *row[f + 1 :]) for f, size in enumerate(sizes) for at in range(size)]
        better = best(pool_of(reading, near, fair=False))
        if better is None or better.row == row:
            break
        choice = better
    return choice


def _taking(rows: Iterator[Row | None]) -> Iterator[Row]:
    return itertools.islice((row for row in rows if row is not None), EACH)


def _drawn(reading: Reading, draw: np.random.Generator) -> Row:
    return tuple(int(at) for at in draw.integers(reading.view.index.sizes))


def _spread(numbers: Sequence[int], draw: np.random.Generator) -> list[int]:
    return [int(number) for number in draw.permutation(np.asarray(numbers))]


def _covering(reading: Reading, t: int, draw: np.random.Generator) -> Iterator[Row | None]:
    """Rows without a claim that hold something of which nothing is known, small combinations first."""
    view = reading.view
    open_ = view.unsettled(t) & ~view.hidden
    barred = [*view.claims, *view.rules]
    for size in range(1, t + 1):
        for number in _spread(np.flatnonzero(open_ & (view.index.size == size)).tolist(), draw):
            yield _completed(reading, view.index.combination(number), barred, draw)


def _completed(
    reading: Reading, combination: Combination, barred: Sequence[Combination], draw: np.random.Generator
) -> Row | None:
    """A row with it that has not ended unjudged."""
    view = reading.view
    ended = [tuple(enumerate(row)) for row in (*view.evidence.unjudged, *view.taken) if holds(row, combination)]
    return view.evidence.space.completion(combination, [*barred, *ended], _drawn(reading, draw))


def _crossing(reading: Reading, draw: np.random.Generator) -> Iterator[Row]:
    """Each open failing cell, crossed with finite cells and with drawn ones."""
    clean, sizes = reading.view.evidence.clean(), reading.view.index.sizes
    for suspicion in reading.open:
        others = draw.integers(sizes, size=(2 * EACH, len(sizes)))
        if clean:
            others[::2] = [clean[at % len(clean)] for at in range(EACH)]
        keep = draw.random(others.shape) < draw.choice([0.25, 0.5, 0.75], size=(len(others), 1))
        yield from map(tuple, np.where(keep, suspicion.cell, others).tolist())


def _verifying(reading: Reading, claim: Combination, u: int, draw: np.random.Generator) -> Iterator[Row | None]:
    """Rows with the claim and levels never seen failing with it; those with another claim last."""
    view = reading.view
    if u == 0 or len(claim) == len(view.index.sizes):
        return
    others = [other for other in view.claims if other != claim]
    for size in range(1, u + 1):
        own, loose = needs(view, claim, size)
        for need, barred in ((own, others), (loose, ())):
            for number in _spread(np.flatnonzero(need & ~view.hidden).tolist(), draw):
                both = tuple(sorted((*claim, *view.index.combination(number))))
                yield _completed(reading, both, [*barred, *view.rules], draw)
