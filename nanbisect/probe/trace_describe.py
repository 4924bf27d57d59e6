"""What a birth looked like: its inputs and outputs, seen at the moment that it ran."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import torch

from . import numbers
from . import trace_axes as axes
from . import trace_ranges as ranges
from .trace_operations import Named, floating
from .trace_records import Call, Record
from .window import Ends

MOST = 8  # inputs described; an optimizer hands hundreds of tensors over at once
OUTPUTS = 4


class Seen:
    """One call with the ranges of what it wrote; `name_of`: of parameters, buffers and batches."""

    def __init__(
        self, call: Call, kinds: List[Optional[str]], before: List[Optional[Ends]],
        name_of: Callable[[torch.Tensor], Optional[str]],
    ) -> None:  # fmt: skip
        self.call, self.kinds, self.name_of = call, kinds, name_of
        self.old = {id(tensor): ends for (_, tensor, _), ends in zip(call.before, before)}
        self.bad = next(place for place, kind in enumerate(kinds) if kind is not None)

    def describe(self, record: Record, sizes: axes.Sizes) -> None:
        """Fill in what the record says of it."""
        record.lines = self.call.lines
        record.inputs = [self._input(name, tensor) for name, tensor in self._inputs()]
        record.inputs += [ranges.describe(self.name_of(tensor) or name, tensor) for name, tensor in self.call.whole]
        record.inputs = record.inputs[:MOST]
        known = [(tensor, kind) for (_, tensor), kind in zip(self.call.outputs, self.kinds) if floating(tensor)]
        shown = known if len(known) < OUTPUTS else [pair for pair in known if pair[1] is not None]
        record.outputs = [ranges.describe(self.name_of(tensor), tensor) for tensor, _ in shown[:OUTPUTS]]
        tensor = self.call.outputs[self.bad][1]
        record.written = self.name_of(tensor)
        first = next((each["first"] for each in record.outputs if each["first"] is not None), None)
        if first is not None and len(first) == tensor.dim():
            record.spot = axes.place_of(first, tuple(tensor.shape), sizes)
            record.rows = axes.rows(tensor, sizes)

    def _inputs(self) -> Named:
        """Of arguments that are lists as long as that of the bad output, the tensors that belong to it."""
        groups: Dict[str, List[torch.Tensor]] = {}
        for name, tensor in self.call.inputs:
            groups.setdefault(name, []).append(tensor)
        name = self.call.outputs[self.bad][0]
        alike = [place for place, (other, _) in enumerate(self.call.outputs) if other == name]
        found: Named = []
        for argument, tensors in groups.items():
            together = len(tensors) == len(alike) > 1
            found += [(argument, each) for each in ([tensors[alike.index(self.bad)]] if together else tensors)]
        return found[:MOST]

    def _input(self, name: str, tensor: torch.Tensor) -> Dict[str, Any]:
        if id(tensor) not in self.old:
            return ranges.describe(self.name_of(tensor) or name, tensor)
        known = self.call.described.get(id(tensor))
        return known or _earlier(self.name_of(tensor) or name, tensor, self.old[id(tensor)])


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
