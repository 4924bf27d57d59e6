"""Losses that a script computed, looked at and never handed to backward: it skipped the batch, or gave up.

A loss that a module returns is known anyway. One that the script computed itself is looked for among the
tensors alive, when a forward waits for its backward in vain: at the next forward of that module, when an
error ends a thread, when the process ends. Only a number that hangs on a parameter counts.
"""

from __future__ import annotations

import gc

import torch

from . import numbers
from .batches import Forward
from .graph import Walk

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
                forward.found = [found]


def bad_loss() -> torch.Tensor | None:
    """Range of a number that is alive, non-finite and a function of some parameter. Reads the host."""
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.grad_fn is not None and thing.numel() == 1:
            ends = numbers.ends(thing)
            if ends is not None and numbers.kind(*numbers.read([ends])[0]) is not None and _trains(thing):
                return ends
    return None


def _trains(loss: torch.Tensor) -> bool:
    """Whether a backward from here would reach a parameter."""
    return any(isinstance(leaf, torch.nn.Parameter) for leaf in Walk([loss]).leaves.values())
