"""Questions put to the gradients of a step, and their answers; `steps` decides what follows from them."""

from __future__ import annotations

import math
from typing import Any, Iterator, Sequence

import torch

from . import numbers
from .account import FIRST_BAD
from .batches import Forward
from .names import Names
from .ownership import owned
from .window import Bad, Ends, Entry, Flag, Loss, LossValue


def bad_gradients(flags: Sequence[Flag], values: Sequence[Ends], before: Sequence[Bad], names: Names) -> list[Bad]:
    """Distinct tensors with a non-finite gradient, in order of arrival, each at its first micro-batch."""
    known = {id(bad.handle) for bad in before}
    uses: dict[tuple[int, int], list[str]] = {}
    fresh: list[Bad] = []
    for flag, (low, high) in zip(flags, values):
        value, tensor = numbers.kind(low, high), flag.handle()
        if value is None or tensor is None or id(flag.handle) in known:
            continue
        key = (flag.micro, id(flag.handle))
        if flag.use is not None:
            uses.setdefault(key, []).append(flag.use)
            continue
        known.add(id(flag.handle))
        grad = tensor.grad if len(fresh) < FIRST_BAD else None
        entry = numbers.entry(names.name(tensor), value, grad, micro=flag.micro, uses=uses.get(key, ()))
        fresh.append(Bad(flag.handle, entry))
    return fresh


def loss_value(loss: Loss, handed: Ends, value: Ends) -> LossValue:
    """A loss on the host."""
    return LossValue(loss.micro, handed[0], None if loss.unscaled is None else value[0], numbers.kind(*value))


def still(bad: Bad) -> bool:
    """Whether the gradient is there and still non-finite. Reads the host: for flagged gradients only."""
    tensor = bad.handle()
    grad = None if tensor is None else tensor.grad
    return grad is not None and bool(numbers.bad_of([("", grad)], counted=0))


def census(names: Names) -> dict[str, Any]:
    """What a script sees that looks through `named_parameters()` for the first bad gradient."""
    pairs = names.gradients()
    bad = numbers.bad_of(pairs, counted=1)
    first: Entry = bad[0] if bad else {"name": None, "nan": 0, "posinf": 0, "neginf": 0, "numel": 0}
    count = first["nan"] + first["posinf"] + first["neginf"]
    whole = {"parameters_bad": len(bad), "parameters": len(pairs)}
    return {"first": first["name"], "bad": count, "numel": first["numel"], **whole}


def host_norm(norm: Any) -> float | None:
    """A norm on the host; of a sharded one the whole."""
    if isinstance(norm, torch.Tensor) and hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    return None if norm is None else float(norm)


def came_from_others(norm: float, names: Names) -> bool:
    """All gradients of this rank arrived finite: then a NaN norm came by reduction, and so did an Inf that
    is in a gradient (a norm may overflow by itself; clipping makes an Inf gradient NaN, and others 0)."""
    return math.isnan(norm) or bool(numbers.bad_of(names.gradients(), counted=0))


def without_backward(lost: Sequence[Forward]) -> tuple[str, dict[str, Any]]:
    """Text and values of batches whose forward came to nothing. Reads the host."""
    ends = numbers.read([forward.loss for forward in lost if forward.loss is not None])
    kinds = [kind for kind in (numbers.kind(*pair) for pair in ends) if kind is not None]
    text = "%d batches had a forward and no backward of their own" % len(lost)
    if not kinds:
        return text, {}
    return "%s; the loss that the module returned was %s" % (text, kinds[0]), {"loss": kinds[0]}


def repaired(bad: Sequence[Bad], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, list[str]]]:
    """(code, text, names) of bad gradients of this optimizer that are gone, or finite again."""
    moved = {id(parameter) for parameter in owned(optimizer)}
    mine = [(item.entry["name"], item.handle()) for item in bad if id(item.handle()) in moved]
    live = [(name, tensor.grad) for name, tensor in mine if tensor is not None]
    dropped = [name for name, grad in live if grad is None]
    if dropped:
        text = "%d non-finite gradients were set to None before the optimizer" % len(dropped)
        yield "gradients_set_to_none", text, dropped
    kept = [(name, grad) for name, grad in live if grad is not None]
    finite = [name for name, grad in kept if not numbers.bad_of([(name, grad)], counted=0)]
    if finite:
        text = "%d gradients arrived non-finite and were finite again at the optimizer" % len(finite)
        yield "gradients_repaired", text, finite
