"""Parameters and buffers that were bad, or absurdly large, before the traced step."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional

import torch

from . import numbers
from . import trace_operations as operations
from . import trace_ranges as ranges
from .names import Names, unsaved

ABSURD = 1e6  # no trained weight is as large; memory that nothing filled often is
LOWEST = tuple(torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64))


class Loaded(NamedTuple):
    """One of them; `key`: its storage, by which its first use is known."""

    key: Optional[int]
    fields: Dict[str, Any]


def loaded(names: Names) -> List[Loaded]:
    """Those that are bad; a mask's -Inf and smallest numbers in a buffer are not."""
    pairs = [("parameter", name, tensor) for name, tensor in names.live(names.parameters)]
    pairs += [("buffer", name, tensor) for name, tensor in names.buffers_now()]
    looked = [(what, name, tensor, numbers.ends(tensor)) for what, name, tensor in pairs]
    known = [(what, name, tensor, found) for what, name, tensor, found in looked if found is not None]
    made = {key for module in names.modules for part in [module()] if part is not None for key in unsaved(part)}
    bad: List[Loaded] = []
    for (what, name, tensor, _), (low, high) in zip(known, numbers.read([found for *_, found in known])):
        value = numbers.kind(low, high)
        if what == "buffer" and (value == "-inf" or low in LOWEST):
            continue
        if value is None and max(abs(low), abs(high)) >= ABSURD:
            value = "absurd"
        if value is not None:
            bad.append(_entry(what, name, tensor, value, saved=id(tensor) not in made))
    return bad


def _entry(what: str, name: str, tensor: torch.Tensor, value: str, *, saved: bool) -> Loaded:
    detail = ranges.describe(name, tensor)
    kept = {key: detail[key] for key in ("absmax", "nan", "posinf", "neginf", "numel", "first")}
    fields = {"name": name, "what": what, "value": value, "saved": saved, **kept, "first_use": None}
    return Loaded(operations.storage(tensor), fields)
