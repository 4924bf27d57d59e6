"""Ranges of tensors while the step runs: on the host where that is free (CPU), else kept on the device."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from . import numbers
from .window import Ends, Range

Detail = Dict[str, Any]


LARGE = 1 << 14  # elements of a tensor of which a brief look asks only whether it is finite
ITEM: Any = torch.Tensor.__mro__[1].item  # type: ignore[attr-defined] # not the one that the probe has wrapped


def look(tensor: torch.Tensor, *, later: bool = False, brief: bool = False) -> Optional[Range]:
    """Smallest and largest element; None where there is nothing to look at.

    `later`: not read yet, on any device. `brief`: of a large one that is finite just that, which is faster to ask.
    """
    if later or not tensor.is_cpu:
        return unread(tensor)
    if type(tensor) in numbers.PLAIN and tensor.layout is torch.strided:
        if tensor.is_floating_point() and tensor.numel():
            if brief and tensor.numel() > LARGE and numbers.summable(tensor) and numbers.finite_sum(tensor):
                return numbers.FINITE
            try:
                low, high = torch.aminmax(tensor if tensor.is_contiguous() else dense(tensor))
            except RuntimeError:  # fp16 in torch 2.1, float8
                return at_once(tensor)
            return ITEM(low), ITEM(high)
        if not tensor.is_complex():
            return None
    return at_once(tensor)


def unread(tensor: torch.Tensor) -> Optional[torch.Tensor]:
    """Its range on its device; None for a type of somebody's own that can't be looked at."""
    try:
        return numbers.ends(tensor)
    except (RuntimeError, NotImplementedError, TypeError):
        if type(tensor) in numbers.PLAIN:
            raise
        return None


def at_once(tensor: torch.Tensor) -> Optional[Ends]:
    """The same, read now."""
    pair = unread(tensor)
    if pair is None:
        return None
    low, high = pair.tolist()
    return low, high


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in the order of memory: of a transposed tensor aminmax would make a copy."""
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda place: -strides[place]))


def finite(ends: Optional[Ends]) -> bool:
    """Whether it is finite, or nothing."""
    return ends is None or (ends[0] - ends[0] == 0.0 and ends[1] - ends[1] == 0.0)


def kind_of(ends: Optional[Ends]) -> Optional[str]:
    """nan, +inf, -inf, or None where it is finite or nothing."""
    return None if ends is None else numbers.kind(*ends)


def pieces(tensor: torch.Tensor) -> List[torch.Tensor]:
    """Flat parts in the order of elements: no temporary as large as a large tensor."""
    if tensor.is_contiguous():
        return list(torch.split(tensor.view(-1), numbers.CHUNK))
    if tensor.numel() <= numbers.CHUNK or tensor.dim() < 2:
        return [tensor.reshape(-1)]
    return [piece for row in tensor.unbind(0) for piece in pieces(row)]


def index_of(flat: int, shape: Sequence[int]) -> List[int]:
    """Place of an element by its number."""
    found: List[int] = []
    for size in reversed(list(shape)):
        found.append(flat % size)
        flat //= size
    return found[::-1]


def describe(name: Optional[str], tensor: torch.Tensor, *, before: bool = False) -> Detail:
    """TENSOR of the schema. Reads the host."""
    strided = tensor.layout is torch.strided
    detail: Detail = {
        "name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).replace("torch.", ""),
        "layout": str(tensor.layout).replace("torch.", ""), "strides": list(tensor.stride()) if strided else None,
        "contiguous": tensor.is_contiguous() if strided else False, "before": before, **_values(numbers.local(tensor)),
    }  # fmt: skip
    detail["numel"] = tensor.numel()
    if not tensor.is_floating_point() and not tensor.is_complex() and strided and tensor.numel():
        low, high = int(ITEM(tensor.min())), int(ITEM(tensor.max()))
        detail.update(min=low, max=high, absmax=max(abs(low), abs(high)))
    return detail


def _values(part: Optional[torch.Tensor]) -> Detail:
    if part is None:
        return {"min": None, "max": None, "absmax": None, "nan": 0, "posinf": 0, "neginf": 0, "first": None}
    low, high, counts, first, offset = math.inf, -math.inf, [0, 0, 0], None, 0
    for piece in pieces(part):
        piece = piece.float() if piece.element_size() == 1 else piece
        bad = ~torch.isfinite(piece)
        if bool(bad.any()):
            counts = [a + b for a, b in zip(counts, _counted(piece))]
            first = offset + int(bad.to(torch.uint8).argmax()) if first is None else first
            kept = piece[~bad]
        else:
            kept = piece
        if kept.numel():
            ends = numbers.ends(kept)
            pair: Tuple[float, float] = (0.0, 0.0) if ends is None else tuple(ends.tolist())
            low, high = min(low, pair[0]), max(high, pair[1])
        offset += piece.numel()
    some = low <= high
    return {
        "min": low if some else None, "max": high if some else None,
        "absmax": max(abs(low), abs(high)) if some else None,
        "nan": counts[0], "posinf": counts[1], "neginf": counts[2],
        "first": None if first is None else index_of(first, part.shape),
    }  # fmt: skip


def _counted(piece: torch.Tensor) -> List[int]:
    found = torch.stack((piece.isnan().sum(), piece.isposinf().sum(), piece.isneginf().sum())).tolist()
    return [int(each) for each in found]
