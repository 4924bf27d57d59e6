"""Is there a NaN or an Inf in this tensor? On the device, in one pass, with nothing that can overflow.

`aminmax` tells NaN, +Inf and -Inf apart: a NaN makes both ends NaN, an Inf shows at its own end.
Sums and norms overflow near the top of a dtype's range and would report healthy gradients.
"""

from __future__ import annotations

import math

import torch

CHUNK = 1 << 22  # elements looked at together when counting: no temporary as large as a parameter


def local(tensor):
    """This rank's dense floating-point part of a gradient, or None if there is nothing to look at."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.is_floating_point() and tensor.numel() else None


def ends(tensor):
    """Smallest and largest element as a float32 tensor of shape (2,) on the tensor's device, or None."""
    tensor = local(tensor)
    if tensor is None:
        return None
    try:
        low, high = torch.aminmax(tensor)
    except (RuntimeError, NotImplementedError):  # fp16 on CPU in torch 2.1, float8 everywhere
        low, high = torch.aminmax(tensor.float())
    return torch.stack((low, high)).float()


def read(pairs):
    """Bring many `ends` to the host in one transfer a device: a list of (low, high), in order."""
    values = [None] * len(pairs)
    places = {}
    for index, pair in enumerate(pairs):
        places.setdefault(pair.device, []).append(index)
    for indices in places.values():
        for index, ends_ in zip(indices, torch.stack([pairs[index] for index in indices]).tolist()):
            values[index] = tuple(ends_)
    return values


def kind(low, high):
    """nan, +inf, -inf, or None if both ends are finite."""
    if math.isnan(low) or math.isnan(high):
        return "nan"
    if high == math.inf:
        return "+inf"
    return "-inf" if low == -math.inf else None


def counts(tensor):
    """Exact counts of NaN, +Inf and -Inf, and the number of elements. Reads the host: for flagged tensors only."""
    tensor = local(tensor)
    if tensor is None:
        return {"nan": 0, "posinf": 0, "neginf": 0, "numel": 0}
    total = torch.zeros(3, dtype=torch.long, device=tensor.device)
    for part in tensor.reshape(-1).split(CHUNK):
        total += torch.stack((part.isnan().sum(), part.isposinf().sum(), part.isneginf().sum()))
    nan, posinf, neginf = total.tolist()
    return {"nan": nan, "posinf": posinf, "neginf": neginf, "numel": tensor.numel()}
