"""The way back: from what failed to the birth of its badness, and what stands beside that way."""

from __future__ import annotations

import math
from typing import List, NamedTuple, Optional, Sequence, Tuple

from .trace_book import Book
from .trace_records import MASKING, Frame, Record

JUMP = 100.0  # absmax grew so many times
STEPS = 500  # frames looked at on the way to a birth
BEFORE = 20
HIDING = 4


class Way(NamedTuple):
    """`links`: records from the birth (intended Infs before it) to what failed."""

    links: List[Record]
    birth: Record
    hidden: List[Record]
    finite_before: Optional[bool]  # of a birth in recompute: whether forward was finite there


def back(book: Book, target: Record) -> Way:
    """From a bad record to its birth: NaN before Inf, an Inf that was put there last."""
    links = _parents(book, target)
    birth = book.records[target.root]
    twin = None if birth.twin is None else book.records[birth.twin]
    finite = _was_finite(book, birth) if twin is None and birth.place.phase == "recompute" else None
    if twin is not None:
        rest = [record for record in links if record.number >= birth.number]
        links, birth = [*_parents(book, twin), *rest], book.records[twin.root]
    place = next((at for at, record in enumerate(links) if _again(record)), 0)
    hidden = _hidden(book, birth) if place > links.index(birth) else []  # forward shows it to the end otherwise
    if hidden:
        links = [*links[:place], hidden[0], *links[place:]]
    return Way(links, birth, hidden, finite)


def first(book: Book, targets: Sequence[Record]) -> Tuple[Record, List[Record]]:
    """Of what failed, in its order, the one to explain, and births of the same kind that brought others.

    That is the first, unless the same line bore the same badness before (a layer that stands nearer to the input,
    whose gradients come later): then the first whose birth is the earliest of these.
    """
    births = [_forward(book, book.records[target.root]) for target in targets]
    same = {birth.number: birth for birth in births if _line(birth) == _line(births[0])}
    earliest = same[min(same)]
    chosen = targets[births.index(earliest)]
    return chosen, [birth for number, birth in sorted(same.items()) if birth is not earliest]


def _line(record: Record) -> Tuple[object, ...]:
    return record.operation, record.place.source, record.kind, record.label, record.place.phase


def _forward(book: Book, birth: Record) -> Record:
    return birth if birth.twin is None else book.records[book.records[birth.twin].root]


def _again(record: Record) -> bool:
    return record.place.phase in ("backward", "recompute")


def _parents(book: Book, record: Record) -> List[Record]:
    found = [record]
    while record.chosen is not None and record.chosen.record is not None:
        record = book.records[record.chosen.record]
        found.append(record)
    return found[::-1]


def _same(frame: Frame, record: Record) -> bool:
    place = record.place
    return (frame.operation, frame.place.owner, frame.place.line) == (record.operation, place.owner, place.line)


def _was_finite(book: Book, record: Record) -> Optional[bool]:
    """Whether the same operation gave finite values in forward; None where it did not run there."""
    for frame in reversed(book.frames[: max(record.frame - book.dropped, 0)]):
        if frame.place.phase not in ("recompute", "backward") and _same(frame, record):
            return math.isfinite(frame.absmax)
    return None


def _hidden(book: Book, birth: Record) -> List[Record]:
    """Operations of forward that took the badness in and gave finite values out."""
    found = [
        record
        for record in book.records[birth.number + 1 :]
        if record.label == MASKING and record.root == birth.number and record.kind == birth.kind and not _again(record)
    ]  # fmt: skip
    return found[:HIDING]


def jumps(book: Book, birth: Record) -> List[Tuple[Frame, float, float]]:
    """(operation, absmax of its largest input, of its output) where that grew, on the way to the birth."""
    found: List[Tuple[Frame, float, float]] = []
    frame = book.frame(birth.frame)
    for _ in range(STEPS):
        parents = [book.frame(each) for each in frame.parents] if frame is not None else []
        finite = [each for each in parents if each is not None and math.isfinite(each.absmax)]
        if frame is None or not finite:
            break
        largest = max(finite, key=lambda each: each.absmax)
        low, high = largest.absmax, frame.absmax
        if math.isfinite(high) and high >= JUMP * low > 0:
            found.append((frame, low, high))
        frame = largest
    return found[::-1]


def before(book: Book, birth: Record) -> List[Frame]:
    """The last operations before the birth, whatever they worked on."""
    at = birth.frame - book.dropped if birth.frame >= 0 else len(book.frames)
    return book.frames[max(0, at - BEFORE) : max(0, at)]
