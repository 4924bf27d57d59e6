"""The label of a bad operation, and which of its bad inputs the walk back takes."""

from __future__ import annotations

from typing import List, Optional, Tuple

from .trace_records import (
    FROM_INF,
    INF,
    INTENDED,
    MASKING,
    ORIGIN,
    REDUCED,
    SPREAD,
    UNWRITTEN,
    Call,
    Record,
    Taken,
)

MASKS = ("buffer", "batch")  # where a mask may come from


class Judge:
    """Judges records in their order; `records`: all so far."""

    def __init__(self, records: List[Record]) -> None:
        self.records = records

    def judge(self, record: Record, call: Call, *, bad: bool) -> None:
        """Label, root and the rest. `bad`: whether it gave a bad value out."""
        self._choose(record)
        self._find_root(record, call)
        chosen = record.chosen
        record.meant = chosen is not None and self._meant(chosen)
        if record.kind == "nan" and chosen is not None and chosen.how in MASKS and not call.about.kernel:
            record.meant = False
        record.intended = bad and record.kind in INF and (self._put(call) if chosen is None else self._meant(chosen))
        record.label = self._label(record) if bad else MASKING
        if record.root == record.number and record.place.phase == "recompute":
            record.twin = self._twin(record)

    def _choose(self, record: Record) -> None:
        nans = [each for each in record.taken if each.kind == "nan"]
        pool = nans or record.taken
        record.chosen = min(pool, key=lambda each: self._order(each, record.number)) if pool else None

    def _find_root(self, record: Record, call: Call) -> None:
        if record.chosen is not None and record.chosen.record is not None:
            parent = self.records[record.chosen.record]
            put = parent.intended and record.kind == "nan"  # an Inf that was put there is no birth of a NaN
            if not put or self._blamed(parent, call):
                record.root = parent.root

    def _put(self, call: Call) -> bool:
        return call.about.constant or call.forced

    def _label(self, record: Record) -> str:
        chosen = record.chosen
        if chosen is None:
            return INTENDED if record.intended else ORIGIN
        if chosen.how in ("unwritten", "reduced") and (record.kind != "nan" or chosen.kind == "nan"):
            return UNWRITTEN if chosen.how == "unwritten" else REDUCED
        return FROM_INF if record.kind == "nan" and chosen.kind != "nan" else SPREAD

    def _twin(self, record: Record) -> Optional[int]:
        """Number of the record of the same operation in forward, with the same outputs."""

        def alike(of: Record) -> Tuple[object, ...]:
            return of.operation, of.place.owner, of.place.line, of.kind, of.shapes, of.micro, of.label

        for other in reversed(self.records):
            if other.place.phase not in ("recompute", "backward") and alike(other) == alike(record):
                return other.number
        return None

    def _blamed(self, parent: Record, call: Call) -> bool:
        """Whether an Inf of the batch or of a buffer is to blame for a NaN: a softmax takes it for a mask."""
        root = self.records[parent.root]
        if call.about.kernel or root.chosen is None or root.chosen.how not in MASKS:
            return False
        root.intended = root.meant = False
        return True

    def _meant(self, taken: Taken) -> bool:
        """Whether an Inf was put there: a constant from before, a mask in a buffer."""
        if taken.kind == "nan":
            return False
        if taken.record is not None:
            return self.records[taken.record].intended
        return taken.how == "unknown" or (taken.how in MASKS and taken.kind == "-inf")

    def _order(self, taken: Taken, number: int) -> Tuple[bool, int]:
        """NaN of any kind, or an Inf that nobody meant, before an Inf that was put there; then the oldest."""
        if taken.record is not None:
            root = self.records[self.records[taken.record].root]
            return self._meant(taken), root.number if root.twin is None else root.twin
        return self._meant(taken), -1 if taken.how in ("parameter", "buffer", "batch") else number
