"""What a batch holds: its tensors by name, marks to know it again, record ids, padding, valid labels.

A mark is (shape, dtype, sum of the bits as integers): exact, the same on every device, in any order of
summation. Sums of tensors on a device stay there until the flags are read.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple, TypeVar, Union, cast

import torch

from . import numbers

RECORDS = ("id", "ids", "record_id", "record_ids", "idx", "uid")
IGNORED = -100
TENSORS = 16  # looked at in a batch
LISTED = 256  # ids or indices written
TEXT = 200  # characters of one id
LARGE = 1 << 20  # elements; of a larger tensor only a part is summed
BESIDE = ("attention_mask", "labels", "position_ids", "cache_position")  # tensors that are much the same in all records
SPREAD = 0x9E3779B97F4A7C1  # keeps two sums apart in one integer
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Work = TypeVar("Work", bound=Callable[..., Any])
Sum = Union[int, torch.Tensor]
Key = Tuple[Tuple[int, ...], torch.dtype]


class Mark(NamedTuple):
    """One tensor's content, in short."""

    key: Key
    total: Sum


def tolerant(work: Work) -> Work:
    """A batch may be anything: what can't be described is None, and no failure of the probe."""

    @functools.wraps(work)
    def attempt(*args: Any) -> Any:
        try:
            return work(*args)
        except Exception:  # noqa: BLE001 - classes of the user's own, tensors without these operations
            return None

    return cast(Work, attempt)


def named_tensors(batch: Any, name: str = "0", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of everything in a batch, two levels deep."""
    if isinstance(batch, torch.Tensor):
        yield name, batch
    elif depth < 3 and isinstance(batch, Mapping):
        for key, value in list(batch.items()):
            yield from named_tensors(value, str(key), depth + 1)
    elif depth < 3 and isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch[:TENSORS]):
            yield from named_tensors(value, str(index), depth + 1)


@tolerant
def tensors(batch: Any) -> dict[str, torch.Tensor] | None:
    """Tensors of a batch by name, a bounded number."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(batch):
        found.setdefault(name, tensor)
        if len(found) == TENSORS:
            break
    return found


@tolerant
def mark(tensor: torch.Tensor) -> Mark | None:
    """The mark of a dense tensor; None for one that has none."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    key = (tuple(tensor.shape), tensor.dtype)
    part = tensor.detach()
    while part.numel() > LARGE and part.dim() > 1:
        part = part[0]
    part = torch.view_as_real(part) if part.is_complex() else part[..., :LARGE] if part.dim() else part
    total = part.view(BITS[part.element_size()]).sum(dtype=torch.long)
    return Mark(key, int(total) if total.device.type == "cpu" else total)


def marks(found: Mapping[str, torch.Tensor]) -> list[Mark]:
    """Marks of many tensors."""
    return [each for each in map(mark, found.values()) if each is not None]


def read_sums(sums: Sequence[Sum]) -> list[int]:
    """Bring sums to the host, one transfer a device."""
    places: Dict[torch.device, List[int]] = {}
    for index, total in enumerate(sums):
        if isinstance(total, torch.Tensor):
            places.setdefault(total.device, []).append(index)
    values = [0 if isinstance(total, torch.Tensor) else total for total in sums]
    for indices in places.values():
        for index, value in zip(indices, torch.stack([torch.as_tensor(sums[i]) for i in indices]).tolist()):
            values[index] = value
    return values


def rows(found: Mapping[str, torch.Tensor]) -> int | None:
    """Length of the batch: the first dimension of its first tensor with two, else of any."""
    wide = [tensor for tensor in found.values() if tensor.dim() > 1] or [t for t in found.values() if t.dim() == 1]
    return wide[0].shape[0] if wide else None


@tolerant
def records(batch: Any, length: int | None) -> list[str] | None:
    """Record ids, from a field of that meaning: a list of texts or integers, or a 1-D integer tensor, one a row."""
    if not isinstance(batch, Mapping):
        return None
    for name in RECORDS:
        ids = _ids(batch[name]) if name in batch else None
        if ids and length in (None, len(ids)):
            return [str(each)[:TEXT] for each in ids]
    return None


def _ids(value: Any) -> list[Any] | None:
    if isinstance(value, torch.Tensor):
        whole = value.dim() == 1 and not value.is_floating_point() and value.dtype is not torch.bool
        return value.tolist() if whole and value.device.type == "cpu" else None
    if isinstance(value, (list, tuple)) and all(type(each) in (str, int) for each in value):
        return list(value)
    return None


@tolerant
def contents(found: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """One integer a row of the batch, on its device: the same for the same record in any batch.

    Neither zeros nor what attention_mask leaves out count, so padding changes nothing; nor does the order within a
    row. None for large tensors.
    """
    name, tensor = _main(found)
    if tensor is None or tensor.numel() > LARGE or not tensor.numel():
        return None
    mask, part = found.get("attention_mask"), tensor.detach()
    if name == "input_ids" and mask is not None and mask.shape == part.shape:
        part = part * mask.to(part.dtype)
    part = torch.view_as_real(part) if part.is_complex() else part
    bits = part.reshape(part.shape[0], -1).contiguous().view(BITS[part.element_size()]).long()
    return bits.sum(1) * SPREAD + (bits * bits).sum(1)


def _main(found: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor | None]:
    """The tensor that tells records apart: the token ids, else the first that has a row for each."""
    usable = {name: tensor for name, tensor in found.items() if tensor.layout is torch.strided and tensor.dim()}
    many = [name for name, tensor in usable.items() if tensor.shape[0] == rows(found) and name not in BESIDE]
    name = "input_ids" if "input_ids" in many else many[0] if many else ""
    return name, usable.get(name)


@tolerant
def padding(found: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Zeros of a 2-D attention mask, on its device."""
    mask = found.get("attention_mask")
    return None if mask is None or mask.dim() != 2 else (mask == 0).sum(dtype=torch.long)


@tolerant
def valid_labels(found: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Labels that are not ignored, on their device."""
    labels = found.get("labels")
    return None if labels is None or labels.is_floating_point() else (labels != IGNORED).sum(dtype=torch.long)


@tolerant
def loss_of(output: Any) -> torch.Tensor | None:
    """The loss that a module returns by itself: `loss`, or a plain number, alone or first of a tuple.

    A number that needs no gradient (a metric's) is no loss, nor is an output that has a shape.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss = output if named is None else named
    loss = loss[0] if isinstance(loss, tuple) and loss else loss
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return None
    return loss if loss.dim() == 0 or (named is not None and loss.numel() == 1) else None


@tolerant
def own_loss(output: Any) -> torch.Tensor | None:
    """The range of that loss."""
    loss = loss_of(output)
    return None if loss is None else numbers.ends(loss)


def results(output: Any) -> set[int]:
    """Sequence numbers of the nodes that made a module's output."""
    found = tensors(output) or {}
    return {tensor.grad_fn._sequence_nr() for tensor in found.values() if tensor.grad_fn is not None}


def call_arguments(args: Any) -> tuple[Any, Mapping[str, Any]]:
    """Arguments of the module call that runs this hook. torch gives a global hook no keyword arguments: they are
    read (never changed) in the frame of `Module._call_impl`, two or three frames up."""
    frame: Any = sys._getframe(1)
    for _ in range(8):
        frame = frame.f_back
        if frame is None:
            break
        if frame.f_code.co_name in ("inner", "_call_impl") and "kwargs" in frame.f_locals:
            found = frame.f_locals["kwargs"]
            return args, found if isinstance(found, Mapping) else {}
    return args, {}
