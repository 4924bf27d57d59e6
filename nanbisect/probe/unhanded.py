"""Losses that a script computed, looked at and never handed to backward: it skipped the batch, or gave up.

A loss that a module returns is known anyway. One that the script computed itself is known when the script
asks whether it is a number, which it must before it can skip it: those questions go through here. What was
asked otherwise is looked for among the tensors alive, when a forward waits for its backward in vain: at the
next forward of that module, when an error ends a thread, when the process ends. Only a number that is a
function of something trained counts.
"""

from __future__ import annotations

import functools
import gc
from typing import Any, Callable

import torch

from . import numbers
from .batches import Forward
from .graph import Walk

QUESTIONS = ("isfinite", "isnan", "isinf")  # of torch, and methods of a tensor
READINGS = ("item", "tolist", "detach", "__float__")  # methods only
LOOKS = 20  # that found nothing, after which a script is taken to call its model several times a step as a habit


class Unhanded:
    """Looks for the loss of a forward that got no backward."""

    def __init__(self) -> None:
        self.left = LOOKS

    def look(self, forward: Forward, *, last: bool = False) -> None:
        """Give the forward the non-finite loss that is alive, if there is one. Goes through all objects."""
        if self.left or last:
            found = bad_loss()
            if found is None:
                self.left -= 1
            else:
                forward.seen.append(found)


def install_questions(asked: Callable[[torch.Tensor], Any], compiling: Callable[[], bool]) -> None:
    """Have `asked` hear of every number with a graph that the script looks at. Nothing is read and nothing changes."""

    def wrap(real: Any) -> Any:
        @functools.wraps(real)
        def question(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args else None
            if not compiling() and type(tensor) is torch.Tensor and is_loss(tensor):
                asked(tensor)
            return real(*args, **kwargs)

        return question

    for name in QUESTIONS:
        real = getattr(torch, name)
        setattr(torch, name, wrap(real))
        _still_builtin(getattr(torch, name), real)
    for name in (*QUESTIONS, *READINGS):
        setattr(torch.Tensor, name, wrap(getattr(torch.Tensor, name)))


def _still_builtin(ours: Any, real: Any) -> None:
    """TorchScript knows torch's functions by identity."""
    builtins: Any = torch.jit._builtins
    name = builtins._find_builtin(real)
    if name is not None:
        builtins._register_builtin(ours, name)


def is_loss(tensor: torch.Tensor) -> bool:
    """Whether it could be one: a single number that somebody could call backward on."""
    return tensor.grad_fn is not None and tensor.numel() == 1


def bad_loss() -> torch.Tensor | None:
    """Range of a number that is alive, non-finite and a function of some parameter. Reads the host."""
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and is_loss(thing):
            ends = numbers.ends(thing)
            if ends is not None and numbers.kind(*numbers.read([ends])[0]) is not None and _trains(thing):
                return ends
    return None


def _trains(loss: torch.Tensor) -> bool:
    """Whether a backward from here would reach a parameter."""
    return any(isinstance(leaf, torch.nn.Parameter) for leaf in Walk([loss]).leaves.values())
