"""The book of one traced step: what every operation gave out, and for the bad ones what they took in.

Nothing is held but numbers (and for the moment of an operation its tensors): memory is known by the number
of its storage. Of a bad storage, the number is kept from being used again as long as the book is open.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import trace_axes as axes
from . import trace_operations as operations
from . import trace_ranges as ranges
from .trace_describe import Seen
from .trace_judge import Judge
from .trace_operations import floating
from .trace_records import (
    INTENDED,
    Call,
    Frame,
    Known,
    Record,
    Taken,
)
from .window import Ends

KEPT = 20000  # frames: a step of many micro-batches has many
RECORDS = 100000  # a step that is bad from end to end
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
        self.judge = Judge(self.records)
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
        elif whole and ranges.finite(ends):
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
        self.judge.judge(record, call, bad=worst is not None)
        self.records.append(record)
        if worst is not None and record.birth and self.details > 0 and record.label != INTENDED:
            self.details -= 1
            Seen(call, kinds, before, self.name_of).describe(record, self.sizes)
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

    def name_of(self, tensor: torch.Tensor) -> Optional[str]:
        """Of a parameter, buffer or batch tensor."""
        key = operations.storage(tensor)
        named = None if key is None else self.named.get(key)
        return None if named is None else named.name


def _worst(taken: List[Taken]) -> str:
    return "nan" if any(each.kind == "nan" for each in taken) else taken[0].kind


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
