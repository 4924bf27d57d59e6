"""Which samples, positions and channels the bad elements of a tensor belong to, where its shape tells.

The batch handed to the root gives the sizes to look for: (samples, positions[, channels]). A size that
could mean two things means the first of these. What the shape does not tell stays None.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch

LISTED = 32  # samples, and positions of each
LARGE = 1 << 26  # elements of a tensor whose bad rows are still asked for


class Sizes(NamedTuple):
    """Of a batch; None where unknown."""

    samples: Optional[int] = None
    positions: Optional[int] = None
    channels: Optional[int] = None


class Axes(NamedTuple):
    """Dimension of each; `each`: where the first dimension holds several rows a sample, how many."""

    sample: Optional[int] = None
    position: Optional[int] = None
    channel: Optional[int] = None
    each: int = 1
    flat: int = 0  # where the first dimension is samples times positions: positions


def sizes(found: Mapping[str, torch.Tensor]) -> Sizes:
    """Sizes of a batch by its tensors: token ids tell best, then any tensor of whole numbers, then any other."""
    wide = {name: tensor for name, tensor in found.items() if tensor.dim() > 1}
    whole = [name for name, tensor in wide.items() if not tensor.is_floating_point()]
    if not wide:
        flat = [tensor for tensor in found.values() if tensor.dim() == 1]
        return Sizes(flat[0].shape[0]) if flat else Sizes()
    name = "input_ids" if "input_ids" in wide else (whole or list(wide))[0]
    shape, floating = wide[name].shape, wide[name].is_floating_point()
    if len(shape) == 2:
        return Sizes(shape[0], None if floating else shape[1])
    return Sizes(shape[0], shape[1], None if floating or len(shape) > 3 else shape[2])


def axes(shape: Tuple[int, ...], known: Sizes) -> Axes:
    """What the dimensions of a tensor are."""
    samples, positions = known.samples, known.positions
    if not shape or samples is None:
        return Axes()
    first = shape[0]
    if first == samples:
        place = _position(shape, positions)
        return Axes(0, place, _channel(shape, place, known.channels))
    if first % samples == 0 and len(shape) == 3 and positions is not None and shape[1] == positions:
        return Axes(0, 1, None, first // samples)
    for length in (positions, None if positions is None else positions - 1):  # labels are shifted by one
        if length and first == samples * length:
            return Axes(0, None, _channel(shape, 0, known.channels), 1, length)
    return Axes()


def _position(shape: Tuple[int, ...], positions: Optional[int]) -> Optional[int]:
    if positions is None:
        return None
    order = (2, 1, 3) if len(shape) == 4 else tuple(range(1, len(shape)))
    return next((place for place in order if shape[place] == positions), None)


def _channel(shape: Tuple[int, ...], position: Optional[int], channels: Optional[int]) -> Optional[int]:
    if channels is None or channels < 2 or len(shape) > 3:
        return None
    last = len(shape) - 1
    return last if last not in (0, position) and shape[last] == channels else None


def place_of(index: List[int], shape: Tuple[int, ...], known: Sizes) -> Dict[str, Optional[int]]:
    """sample, position and channel of one element."""
    found = axes(shape, known)
    sample = None if found.sample is None else index[0] // (found.flat or found.each)
    position = index[0] % found.flat if found.flat else None if found.position is None else index[found.position]
    return {"sample": sample, "position": position, "channel": None if found.channel is None else index[found.channel]}


def rows(tensor: torch.Tensor, known: Sizes) -> Optional[List[Dict[str, Any]]]:
    """sample, positions and count of the bad elements; None where the shape tells nothing. Reads the host."""
    shape = tuple(tensor.shape)
    found = axes(shape, known)
    if found.sample is None or tensor.numel() > LARGE:
        return None
    bad, others = ~torch.isfinite(tensor), _others(shape, found)
    counts = bad.sum(dim=others) if others else bad.long()  # by row, or by row and position
    if found.flat:
        counts = counts.view(-1, found.flat)
    elif found.each > 1:
        counts = counts.view(counts.shape[0] // found.each, found.each, -1).sum(1)
    table = counts.reshape(counts.shape[0], -1)
    known_positions = bool(found.flat) or found.position is not None
    return [_row(sample, row, known_positions) for sample, row in enumerate(table.tolist()) if any(row)][:LISTED]


def _others(shape: Tuple[int, ...], found: Axes) -> Tuple[int, ...]:
    return tuple(place for place in range(len(shape)) if place not in (0, found.position))


def _row(sample: int, row: List[int], known: bool) -> Dict[str, Any]:
    positions = [place for place, count in enumerate(row) if count]
    return {"sample": sample, "positions": positions[:LISTED] if known else None, "count": sum(row)}
