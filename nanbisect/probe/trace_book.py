"""The book of one traced step: what every operation gave out, and for the bad ones what they took in.

Nothing is held but numbers (and for the moment of an operation its tensors): memory is known by the number
of its storage. Of a bad storage, the number is kept from being used again as long as the book is open.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import numbers
from . import trace_axes as axes
from . import trace_operations as operations
from . import trace_ranges as ranges
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
    Frame,
    Known,
    Record,
    Taken,
)
from .window import Ends

KEPT = 20000  # frames: a step of many micro-batches has many
RECORDS = 100000  # a step that is bad from end to end
MASKS = ("buffer", "batch")  # where a mask may come from
DETAILS = 256  # records described in full


class Mark(NamedTuple):
    """What is known of a storage. `whole`: of all of it."""

    hold: StorageWeakRef
    value: Any
    whole: bool = True


Marks = Dict[int, Mark]


class Book:
    """Takes operations in their order, with the ranges of what they wrote."""

    def __init__(self) -> None:
        self.frames: List[Frame] = []  # the latest
        self.dropped = 0  # frames before these
        self.records: List[Record] = []
        self.made: Dict[int, int] = {}  # storage -> frame that wrote it last
        self.whole: Dict[int, Ends] = {}  # storage -> its range, where all of it was written and finite
        self.bad: Marks = {}  # storage -> number of the record
        self.unwritten: Marks = {}  # storage -> (operation, place)
        self.reduced: Marks = {}
        self.named: Dict[int, Known] = {}
        self.sizes = axes.Sizes()
        self.details = DETAILS

    def take(self, call: Call, found: List[Optional[Ends]], before: List[Optional[Ends]]) -> None:
        """One operation is over. `found`: ranges of its outputs; `before`: of what it has written, as that was."""
        about = call.about
        if about.shared or about.empty:
            keys = [operations.storage(tensor) for _, tensor in call.outputs]
            (self._share if about.shared else self._make)(call, keys)
            return
        taken_from = [operations.storage(tensor) for _, tensor in call.inputs]
        fine, record = all(map(ranges.finite, found)), None
        full = len(self.records) >= RECORDS
        if not full and (not fine or (self.bad and any(key in self.bad for key in taken_from))):
            kinds = [ranges.kind_of(ends) for ends in found]
            worst = "nan" if "nan" in kinds else next((kind for kind in kinds if kind is not None), None)
            record = self._record(call, taken_from, kinds, worst, before)
        number = self._frame(call, taken_from, found, record)
        for (_, tensor), ends in zip(call.outputs, found):
            if ends is not None:
                self._wrote(tensor, ends, number, record)

    def _wrote(self, tensor: torch.Tensor, ends: Ends, number: int, record: Optional[Record]) -> None:
        key, whole = operations.memory(tensor)
        if key is None:
            return
        self.made[key] = number
        self.whole.pop(key, None)
        if record is not None and not ranges.finite(ends):
            self.bad[key] = Mark(hold(tensor), record.number, whole)
        elif whole:
            self.whole[key] = ends
            self.bad.pop(key, None)
        if whole and (self.unwritten or self.reduced):
            self.unwritten.pop(key, None)
            self.reduced.pop(key, None)

    def _make(self, call: Call, keys: List[Optional[int]]) -> None:
        for (_, tensor), key in zip(call.outputs, keys):
            if key is not None:
                self.bad.pop(key, None)
                self.made.pop(key, None)
                self.whole.pop(key, None)
                self.unwritten[key] = Mark(hold(tensor), (call.about.name, call.place))

    def _share(self, call: Call, keys: List[Optional[int]]) -> None:
        """A collective: its result comes later, and from others. It is not looked at here."""
        tensors = [tensor for _, tensor in [*call.inputs, *call.outputs]]
        for tensor in tensors:
            key = operations.storage(tensor)
            if key is not None:
                self.reduced[key] = Mark(hold(tensor), (call.about.name, call.place))
                self.unwritten.pop(key, None)
                self.whole.pop(key, None)

    def _frame(
        self, call: Call, taken_from: List[Optional[int]], found: List[Optional[Ends]], record: Optional[Record]
    ) -> int:
        """The operation in short; its number."""
        number, made = self.dropped + len(self.frames), self.made
        if record is not None:
            record.frame = number
        parents = tuple([made[key] for key in taken_from if key in made])
        at = next(place for place, ends in enumerate(found) if ends is not None)
        ends = found[at] if len(found) == 1 else widest([each for each in found if each is not None])
        shape = tuple(call.outputs[at][1].shape)
        self.frames.append(Frame(call.about.name, call.place, shape, ends or (0.0, 0.0), parents, call.count))
        if len(self.frames) > 2 * KEPT:
            del self.frames[:KEPT]
            self.dropped += KEPT
        return number

    def frame(self, number: int) -> Optional[Frame]:
        """One of the latest; None for an older one."""
        at = number - self.dropped
        return self.frames[at] if 0 <= at < len(self.frames) else None

    # records -----------------------------------------------------------------------------------

    def _record(
        self, call: Call, keys: List[Optional[int]], kinds: List[Optional[str]],
        worst: Optional[str], before: List[Optional[Ends]],
    ) -> Optional[Record]:  # fmt: skip
        """The record of a bad operation, or of one that made bad values vanish; None where there is nothing to say."""
        if worst is None and (call.about.shaped or not any(floating(tensor) for _, tensor in call.outputs)):
            return None
        earlier = {id(tensor): ends for (_, tensor, _), ends in zip(call.before, before)}
        taken: List[Taken] = []
        if not call.about.shaped:
            for (_, tensor), key in zip(call.inputs, keys):
                if worst is not None or (key is not None and key in self.bad):
                    kind = self._kind(tensor, key, earlier)
                    if kind is not None:
                        taken.append(self._taken(kind, key))
        if worst is None and not taken:
            return None
        taken = self._shared(call, taken)
        record = Record(len(self.records), call, worst or _worst(taken), taken)
        record.shapes = tuple(tuple(tensor.shape) for (_, tensor), kind in zip(call.outputs, kinds) if kind is not None)
        self._judge(record, call, bad=worst is not None)
        self.records.append(record)
        if worst is not None and record.birth and self.details > 0 and record.label != INTENDED:
            self.details -= 1
            self._describe(record, call, kinds, before)
        return record

    def _kind(self, tensor: torch.Tensor, key: Optional[int], earlier: Dict[int, Optional[Ends]]) -> Optional[str]:
        if id(tensor) in earlier:
            return ranges.kind_of(earlier[id(tensor)])
        mark = None if key is None else self.bad.get(key)
        if mark is not None and mark.whole and operations.memory(tensor)[1]:
            return str(self.records[mark.value].kind)
        return ranges.kind_of(ranges.at_once(tensor))

    def _taken(self, kind: str, key: Optional[int]) -> Taken:
        if key is None:
            return Taken(kind, None, "unknown")
        if key in self.bad:
            return Taken(kind, self.bad[key].value)
        if key in self.reduced:
            return Taken(kind, None, "reduced", maker=self.reduced[key].value)
        if key in self.unwritten:
            return Taken(kind, None, "unwritten", maker=self.unwritten[key].value)
        named = self.named.get(key)
        return Taken(kind, None, "unknown") if named is None else Taken(kind, None, named.what, named.name)

    def _shared(self, call: Call, taken: List[Taken]) -> List[Taken]:
        """What comes from nowhere into a collective's memory is that collective's own work."""
        if not self.reduced or all(each.how != "unknown" for each in taken):
            return taken
        keys = [operations.storage(tensor) for _, tensor in call.outputs]
        maker = next((self.reduced[key].value for key in keys if key is not None and key in self.reduced), None)
        if maker is None:
            return taken
        return [each._replace(how="reduced", maker=maker) if each.how == "unknown" else each for each in taken]

    def _judge(self, record: Record, call: Call, *, bad: bool) -> None:
        """Its label, and which of its bad inputs the walk back takes."""
        nans = [each for each in record.taken if each.kind == "nan"]
        infs = [each for each in record.taken if each.kind != "nan"]
        pool = nans or infs
        record.chosen = min(pool, key=lambda each: self._order(each, record.number)) if pool else None
        if record.chosen is not None and record.chosen.record is not None:
            parent = self.records[record.chosen.record]
            meant = parent.intended and record.kind == "nan"
            if not meant or self._blamed(parent, call):  # what was put there is no birth
                record.root = parent.root
        if not bad:
            record.label = MASKING
        elif not pool:
            put = record.kind in INF and (call.about.constant or call.forced)
            record.label, record.intended = (INTENDED, True) if put else (ORIGIN, False)
        elif record.kind == "nan" and not nans:
            record.label = FROM_INF
        else:
            record.label = SPREAD
        chosen = record.chosen
        record.meant = chosen is not None and self._meant(chosen)
        if record.kind == "nan" and chosen is not None and chosen.how in MASKS and not call.about.kernel:
            record.meant = False
        if bad and chosen is not None:
            record.intended = record.kind in INF and self._meant(chosen)
            if chosen.how in ("unwritten", "reduced") and (record.kind != "nan" or chosen.kind == "nan"):
                record.label = UNWRITTEN if chosen.how == "unwritten" else REDUCED
        if record.root == record.number and record.place.phase == "recompute":
            record.twin = self._twin(record)

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

    def _describe(self, record: Record, call: Call, kinds: List[Optional[str]], before: List[Optional[Ends]]) -> None:
        """All about it that can be seen only now."""
        record.lines = call.lines
        old = {id(tensor): (name, ends) for (name, tensor, _), ends in zip(call.before, before)}
        for name, tensor in call.inputs:
            if not floating(tensor):
                continue
            if id(tensor) not in old:
                record.inputs.append(ranges.describe(self.name_of(tensor) or name, tensor))
                continue
            record.inputs.append(call.described.get(id(tensor)) or _earlier(name, tensor, old[id(tensor)][1]))
        for (_, tensor), kind in zip(call.outputs, kinds):
            if floating(tensor) and len(record.outputs) < 4 and (kind is not None or len(call.outputs) < 4):
                record.outputs.append(ranges.describe(self.name_of(tensor), tensor))
        record.written = next((each["name"] for each in record.outputs if each["name"] and each["first"]), None)
        index = next((place for place, kind in enumerate(kinds) if kind is not None), None)
        if index is not None:
            self._locate(record, call.outputs[index][1])

    def _locate(self, record: Record, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape)
        first = next((each["first"] for each in record.outputs if each["first"] is not None), None)
        if first is not None and len(first) == len(shape):
            record.spot = axes.place_of(first, shape, self.sizes)
            record.rows = axes.rows(tensor, self.sizes)

    def name_of(self, tensor: torch.Tensor) -> Optional[str]:
        """Of a parameter, buffer or batch tensor."""
        key = operations.storage(tensor)
        named = None if key is None else self.named.get(key)
        return None if named is None else named.name


def _worst(taken: List[Taken]) -> str:
    return "nan" if any(each.kind == "nan" for each in taken) else taken[0].kind


def _earlier(name: str, tensor: torch.Tensor, ends: Optional[Ends]) -> Dict[str, Any]:
    """Of a tensor that was overwritten since: shape and range, and counts where that was finite."""
    detail = ranges.describe(name, tensor.new_empty(tensor.shape, device="meta"), before=True)
    if ends is not None:
        fine = ranges.kind_of(ends) is None
        low, high = ends
        if ends is numbers.FINITE:
            detail.update(nan=0, posinf=0, neginf=0)
            return detail
        rest = {"nan": 0, "posinf": 0, "neginf": 0} if fine else {"nan": None, "posinf": None, "neginf": None}
        detail.update(rest, min=low if fine else None, max=high if fine else None)
        detail["absmax"] = max(abs(low), abs(high)) if fine else None
    return detail


def floating(tensor: torch.Tensor) -> bool:
    """Whether it can hold a bad value."""
    return tensor.is_floating_point() or tensor.is_complex()


def hold(tensor: torch.Tensor) -> StorageWeakRef:
    """Keeps a storage's number from being used again; its memory is free to go."""
    return StorageWeakRef(operations.held(tensor).untyped_storage())  # type: ignore[no-untyped-call]


def widest(found: List[Ends]) -> Ends:
    """Of several ranges; NaN wins."""
    low, high = found[0]
    for other in found[1:]:
        if math.isnan(other[0]) or math.isnan(low):
            return math.nan, math.nan
        low, high = min(low, other[0]), max(high, other[1])
    return low, high
