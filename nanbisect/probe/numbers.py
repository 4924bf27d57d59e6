"""Is there a NaN or an Inf in this tensor? In one pass, with nothing that can report a healthy one.

`aminmax` tells NaN, +Inf and -Inf apart: a NaN makes both ends NaN, an Inf shows at its own end.
Sums overflow near the top of a dtype's range, but they never hide anything: whatever is added to a NaN
or an Inf, the result is not finite. On the CPU a sum takes three fifths of the time (it is as fast as
memory), so there the sum is asked first and the range only where the sum is not finite. On a device that
would be a second kernel or a wait, so there the range is taken at once and read later.
"""

from __future__ import annotations

import math
from typing import Iterable, Sequence

import torch

from .window import Ends, Entry, Range

CHUNK = 1 << 22  # elements looked at together when counting: no temporary as large as a parameter

SUMMED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PLAIN = (torch.Tensor, torch.nn.Parameter)

FINITE: Ends = (0.0, 0.0)  # stands for any range without NaN and Inf


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

    In the tensor's own dtype where that can be: a cast would be one more kernel, and a large healthy float64
    would become Inf.
    """
    part = local(tensor)
    if part is None:
        return None
    try:
        return torch.stack(torch.aminmax(part))
    except RuntimeError:  # fp16 on CPU in torch 2.1, float8 everywhere
        try:
            return _ends_in_parts(part)
        except NotImplementedError:  # a packed or quantised type that can't be looked at, nor hold a NaN
            return None


def summable(tensor: torch.Tensor) -> bool:
    """Whether this is a plain tensor on the CPU, with something in it, whose sum says whether that is finite."""
    if not (type(tensor) in PLAIN and tensor.is_cpu and tensor.dtype in SUMMED and tensor.layout is torch.strided):
        return False
    if tensor.requires_grad and torch.is_grad_enabled():  # only under create_graph: no node of ours in that graph
        return False
    return tensor.numel() > 0


def finite_sum(tensor: torch.Tensor) -> bool:
    """Whether the sum says that all is finite. False where it does not, or where it raised."""
    try:
        total = tensor.sum().item()
    except Exception:  # noqa: BLE001 - unguarded, inside the user's backward: to be looked at again, guarded
        return False
    return total - total == 0.0


def look(tensor: torch.Tensor) -> Range | None:
    """The tensor's range, or `FINITE` where that is known on the spot; None if there is nothing to look at."""
    return FINITE if summable(tensor) and finite_sum(tensor) else ends(tensor)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.reshape(-1), CHUNK)


def _ends_in_parts(tensor: torch.Tensor) -> torch.Tensor:
    pairs = [torch.stack(torch.aminmax(part.float())) for part in _parts(tensor)]
    return torch.stack(torch.aminmax(torch.stack(pairs)))


def read(ranges: Sequence[Range]) -> list[Ends]:
    """Bring many ranges to the host in one transfer a device and dtype: a list of (low, high), in order."""
    values: list[Ends] = [FINITE if isinstance(each, torch.Tensor) else each for each in ranges]
    waiting = [(index, each) for index, each in enumerate(ranges) if isinstance(each, torch.Tensor)]
    places: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    for index, pair in waiting:
        places.setdefault((pair.device, pair.dtype), []).append((index, pair))
    for place in places.values():
        found = torch.stack([pair for _, pair in place]).tolist()
        for (index, _), (low, high) in zip(place, found):
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
    looked = [(name, tensor, look(tensor)) for name, tensor in _doubtful(list(pairs))]
    known = [(name, tensor, found) for name, tensor, found in looked if found is not None]
    bad: list[Entry] = []
    for (name, tensor, _), (low, high) in zip(known, read([found for _, _, found in known])):
        value = kind(low, high)
        if value is not None:
            bad.append(entry(name, value, tensor if len(bad) < counted else None))
    return bad


def _doubtful(pairs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Those that have to be looked at one by one: none of the plain ones, if all their sums together are finite."""
    plain: list[tuple[str, torch.Tensor]] = []
    other: list[tuple[str, torch.Tensor]] = []
    for pair in pairs:
        (plain if summable(pair[1]) else other).append(pair)
    return other if plain and _finite_together([tensor for _, tensor in plain]) else pairs


def _finite_together(tensors: list[torch.Tensor]) -> bool:
    try:
        sums = [tensor.sum() for tensor in tensors]  # one after another: what stands between them is slow to fetch
        kinds = {each.dtype for each in sums}
        totals = [torch.stack([each for each in sums if each.dtype is kind]).double().sum() for kind in kinds]
        return all(math.isfinite(total.item()) for total in totals)
    except Exception:  # noqa: BLE001 - as in `finite_sum`
        return False


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
