"""Which attention kernels and softmaxes really ran, in forward, recompute and backward."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Optional, Tuple

import torch

from . import trace_operations as operations
from .trace_operations import About
from .trace_places import Place

KINDS = (  # part of an operation's name -> kernel, the first that fits
    ("flash_attention_for_cpu", "flash_cpu"),
    ("fused_attention_overrideable", "overrideable"),
    ("cudnn_attention", "cudnn"),
    ("efficient_attention", "efficient"),
    ("flash_attention", "flash"),
    ("_safe_softmax", "math"),
    ("softmax", "eager softmax"),
)
HEADS_FIRST = re.compile(r"scaled_dot_product|flex_attention")  # [..., heads, length, size]; others have length first
MASKS = ("attn_mask", "attn_bias")
MOST = 256  # different calls kept

Key = Tuple[Any, ...]


class Kernels:
    """Equal calls counted together; numbers of masked rows stay on the device until they are asked for."""

    def __init__(self) -> None:
        self.calls: Dict[Key, Dict[str, Any]] = {}
        self.rows: Dict[Key, List[Any]] = {}

    def add(self, about: About, place: Place, args: Any, kwargs: Any) -> None:
        """One call is about to run."""
        found: Dict[str, torch.Tensor] = {}
        for name, value in operations.inputs(about, args, kwargs):
            found.setdefault(name, value)
        tensors = list(found.values())
        if not tensors or tensors[0].dim() < 3:
            return
        softmax = "softmax" in about.name
        query, key = tensors[0], tensors[0] if softmax else tensors[min(1, len(tensors) - 1)]
        if "backward" in about.name and not softmax:
            query = found.get("query", query)
            key = found.get("key", key)
        at = -2 if softmax or HEADS_FIRST.search(about.name) else -3
        lengths = (query.shape[at], query.shape[-1] if softmax else key.shape[at])
        same = (about.name, place.phase, lengths, query.dtype)
        if same not in self.calls:
            if len(self.calls) >= MOST:
                return
            self.calls[same] = {"place": place, "calls": 0}
        self.calls[same]["calls"] += 1
        masked = None if "backward" in about.name else _masked(found, query, softmax=softmax)
        self.rows.setdefault(same, []).append(masked)

    def told(self) -> List[Tuple[Place, Dict[str, Any]]]:
        """(place of the first call, KERNEL of the schema but for module and source). Reads the host."""
        lines = []
        for key, call in self.calls.items():
            name, phase, (queries, keys), dtype = key
            rows = [each if each is None or isinstance(each, int) else int(each) for each in self.rows[key]]
            known = [each for each in rows if each is not None]
            fields = {
                "kernel": next((kind for part, kind in KINDS if part in name), name), "operation": name,
                "phase": "forward" if phase in ("bare", "loss") else phase, "calls": call["calls"],
                "queries": queries, "keys": keys, "modulo": [[n % 64, n % 128] for n in (queries, keys)],
                "masked_rows": sum(known) if known else None, "dtype": str(dtype).replace("torch.", ""),
            }  # fmt: skip
            lines.append((call["place"], fields))
        return lines


def _masked(found: Dict[str, torch.Tensor], query: torch.Tensor, *, softmax: bool) -> Optional[Any]:
    """How many rows hold nothing but -Inf, or the smallest number of their dtype; a mask's own rows, not those of
    the heads that it is spread over. A call without a mask has none that it knows of."""
    scores = query if softmax else next((found[name] for name in MASKS if name in found), None)
    if scores is None:
        return 0
    if scores.dtype is torch.bool:
        masked = ~scores.any(-1)
    elif scores.is_floating_point() and scores.shape[-1]:
        masked = scores.amax(-1) <= torch.finfo(scores.dtype).min
    else:
        return None
    if not softmax:
        for place, stride in enumerate(scores.stride()[:-1]):
            if stride == 0 and masked.shape[place] > 1:
                masked = masked.narrow(place, 0, 1)
    total = masked.sum()
    return int(total) if total.is_cpu else total
