"""Questions put to the gradients of a step, and their answers; `steps` decides what follows from them."""

from __future__ import annotations

import math
from typing import Any, Iterator, Sequence

import torch

from . import numbers
from .account import FIRST_BAD
from .batches import Forward, Lost
from .names import Names
from .ownership import owned
from .window import Bad, Ends, Entry, Flag, Loss, LossValue

NAMED = 4  # parameters named in a sentence


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


def lost_losses(lost: Sequence[Lost]) -> list[str | None]:
    """nan, +inf or -inf of the loss of each forward that got no backward; None where it is finite or unknown."""
    return _kinds([each.forward.seen + (each.forward.losses if each.sure else []) for each in lost])


def any_bad_loss(waiting: Sequence[Forward]) -> bool:
    """Whether a loss of a forward that waits for its backward is non-finite. Reads the host if there are losses."""
    return any(_kinds([each.seen + each.losses for each in waiting]))


def _kinds(ranges: Sequence[list[torch.Tensor]]) -> list[str | None]:
    ends = iter(numbers.read([pair for pairs in ranges for pair in pairs]))
    kinds = [[numbers.kind(*next(ends)) for _ in pairs] for pairs in ranges]
    return [next((kind for kind in found if kind is not None), None) for found in kinds]


def without_backward(kinds: Sequence[str | None]) -> tuple[str, dict[str, Any]]:
    """Text and values of batches whose forward came to nothing, by what their losses were."""
    count = "1 batch" if len(kinds) == 1 else "%d batches" % len(kinds)
    text = "%s had a forward and no backward" % count
    bad = [kind for kind in kinds if kind is not None]
    if not bad:
        return text, {}
    return "%s; the loss was %s" % (text, bad[0]), {"loss": bad[0]}


def without_gradients(names: Sequence[str]) -> str:
    """Parameters that should have got a gradient; the first ones by name."""
    count = "1 parameter that requires" if len(names) == 1 else "%d parameters that require" % len(names)
    more = ", ..." if len(names) > NAMED else ""
    return "%s a gradient had none at the first step: %s%s" % (count, ", ".join(names[:NAMED]), more)


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
