"""The way back: from what failed to the birth of its badness, and what stands beside that way."""

from __future__ import annotations

import math
from typing import List, NamedTuple, Optional, Tuple

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
    twin, finite = None, None
    if birth.place.phase == "recompute":
        twin = _twin(book, birth)
        finite = None if twin is not None else _was_finite(book, birth)
    if twin is not None:
        rest = [record for record in links if record.number >= birth.number]
        links, birth = [*_parents(book, twin), *rest], book.records[twin.root]
    hidden = _hidden(book, birth)
    place = links.index(birth)
    after = links[place + 1] if place + 1 < len(links) else None
    if hidden and after is not None and after.place.phase in ("backward", "recompute"):
        links = [*links[: place + 1], hidden[0], *links[place + 1 :]]
    return Way(links, birth, hidden, finite)


def _parents(book: Book, record: Record) -> List[Record]:
    found = [record]
    while record.chosen is not None and record.chosen.record is not None:
        record = book.records[record.chosen.record]
        found.append(record)
    return found[::-1]


def _same(frame: Frame, record: Record) -> bool:
    place = record.place
    return (frame.operation, frame.place.module, frame.place.line) == (record.operation, place.module, place.line)


def _twin(book: Book, record: Record) -> Optional[Record]:
    """The record of the same operation in forward, with the same outputs."""
    for other in reversed(book.records[: record.number]):
        ran = other.place.phase not in ("recompute", "backward") and other.micro == record.micro
        alike = other.frame >= 0 and (other.kind, other.shapes) == (record.kind, record.shapes)
        if ran and alike and other.label != MASKING and _same(book.frames[other.frame], record):
            return other
    return None


def _was_finite(book: Book, record: Record) -> Optional[bool]:
    """Whether the same operation gave finite values in forward; None where it did not run there."""
    for frame in reversed(book.frames[: max(record.frame, 0)]):
        if frame.place.phase not in ("recompute", "backward") and _same(frame, record):
            return math.isfinite(frame.absmax)
    return None


def _hidden(book: Book, birth: Record) -> List[Record]:
    """Operations of forward that took the badness in and gave finite values out."""
    found = [
        record
        for record in book.records[birth.number + 1 :]
        if record.label == MASKING and record.root == birth.number and record.kind == birth.kind
        and record.place.phase not in ("backward", "recompute")
    ]  # fmt: skip
    return found[:HIDING]


def jumps(book: Book, birth: Record) -> List[Tuple[Frame, float, float]]:
    """(operation, absmax of its largest input, of its output) where that grew, on the way to the birth."""
    found: List[Tuple[Frame, float, float]] = []
    number = birth.frame
    for _ in range(STEPS):
        frame = book.frames[number] if number >= 0 else None
        if frame is None or not frame.parents:
            break
        finite = [each for each in frame.parents if math.isfinite(book.frames[each].absmax)]
        if not finite:
            break
        largest = max(finite, key=lambda each: book.frames[each].absmax)
        low, high = book.frames[largest].absmax, frame.absmax
        if math.isfinite(high) and high >= JUMP * low > 0:
            found.append((frame, low, high))
        number = largest
    return found[::-1]


def before(book: Book, birth: Record) -> List[Frame]:
    """The last operations before the birth, whatever they worked on."""
    at = birth.frame if birth.frame >= 0 else len(book.frames)
    return book.frames[max(0, at - BEFORE) : at]
