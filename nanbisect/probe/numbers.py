"""Is there a NaN or an Inf in this tensor? On the device, in one pass, with nothing that can overflow.

`aminmax` tells NaN, +Inf and -Inf apart: a NaN makes both ends NaN, an Inf shows at its own end.
Sums and norms overflow near the top of a dtype's range and would report healthy gradients.
"""

from __future__ import annotations

import math
from typing import Iterable, Sequence, Tuple

import torch

from .window import Entry

CHUNK = 1 << 22  # elements looked at together when counting: no temporary as large as a parameter

Ends = Tuple[float, float]


def local(tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's dense floating-point part of a tensor, or None if there is nothing to look at."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return None
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.is_floating_point() and tensor.numel() else None


def ends(tensor: torch.Tensor) -> torch.Tensor | None:
    """Smallest and largest element as a tensor of shape (2,) on the tensor's device, or None.

    float32, but float64 stays: a large healthy float64 would become Inf.
    """
    part = local(tensor)
    if part is None:
        return None
    try:
        pair = torch.stack(torch.aminmax(part))
    except RuntimeError:  # fp16 on CPU in torch 2.1, float8 everywhere
        try:
            pair = _ends_in_parts(part)
        except NotImplementedError:  # a packed or quantised type that can't be looked at, nor hold a NaN
            return None
    return pair if pair.dtype is torch.float64 else pair.float()


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.reshape(-1), CHUNK)


def _ends_in_parts(tensor: torch.Tensor) -> torch.Tensor:
    pairs = [torch.stack(torch.aminmax(part.float())) for part in _parts(tensor)]
    return torch.stack(torch.aminmax(torch.stack(pairs)))


def read(pairs: Sequence[torch.Tensor]) -> list[Ends]:
    """Bring many `ends` to the host in one transfer a device and dtype: a list of (low, high), in order."""
    values: list[Ends] = [(0.0, 0.0)] * len(pairs)
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, pair in enumerate(pairs):
        places.setdefault((pair.device, pair.dtype), []).append(index)
    for indices in places.values():
        found = torch.stack([pairs[index] for index in indices]).tolist()
        for index, (low, high) in zip(indices, found):
            values[index] = (low, high)
    return values


def kind(low: float, high: float) -> str | None:
    """nan, +inf, -inf, or None if both ends are finite."""
    if math.isnan(low) or math.isnan(high):
        return "nan"
    if high == math.inf:
        return "+inf"
    return "-inf" if low == -math.inf else None


def counts(tensor: torch.Tensor | None) -> dict[str, int | None]:
    """Exact counts of NaN, +Inf, -Inf, and of elements. Reads the host: for flagged tensors only. None: not counted."""
    part = None if tensor is None else local(tensor)
    if part is None:
        return {"nan": None, "posinf": None, "neginf": None, "numel": None}
    total = torch.zeros(3, dtype=torch.long, device=part.device)
    for piece in _parts(part):
        piece = piece.float() if piece.element_size() == 1 else piece  # float8 has no isposinf
        total += torch.stack((piece.isnan().sum(), piece.isposinf().sum(), piece.isneginf().sum()))
    nan, posinf, neginf = total.tolist()
    return {"nan": nan, "posinf": posinf, "neginf": neginf, "numel": part.numel()}


def bad_of(pairs: Iterable[tuple[str, torch.Tensor]], counted: int = 16) -> list[Entry]:
    """Non-finite ones of (name, tensor) pairs; the first `counted` with counts. One transfer for all."""
    flags = [(name, tensor, ends(tensor)) for name, tensor in pairs]
    known = [(name, tensor, pair) for name, tensor, pair in flags if pair is not None]
    bad: list[Entry] = []
    for (name, tensor, _), (low, high) in zip(known, read([pair for _, _, pair in known])):
        value = kind(low, high)
        if value is not None:
            bad.append(entry(name, value, tensor if len(bad) < counted else None))
    return bad


def entry(name: str, value: str, tensor: torch.Tensor | None, *, micro: int = 0, uses: Sequence[str] = ()) -> Entry:
    """One tensor as events list it; without a tensor the counts are None."""
    return {"name": name, "value": value, "micro_batch": micro, "uses": list(uses), **counts(tensor)}


def norms(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """L2 norm of each tensor, in float32 (float64 for float64)."""
    parts = [(name, local(tensor)) for name, tensor in pairs]
    known = [(name, part) for name, part in parts if part is not None]
    wide = [torch.float64 if part.dtype is torch.float64 else torch.float32 for _, part in known]
    found = [torch.linalg.vector_norm(part, dtype=dtype) for (_, part), dtype in zip(known, wide)]
    return {name: float(norm) for (name, _), norm in zip(known, found)}
