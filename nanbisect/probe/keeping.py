"""What the probe keeps of a step for a capsule, or gives back from one: the one thing that its hooks know of both.

Without NANBISECT_CAPSULE and NANBISECT_REPLAY `on` is false, and nothing here is called.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, List

import torch

from . import numbers
from .batches import Forward
from .capsule import Recorder
from .journal import Journal, shared
from .limits import Limits
from .names import Names
from .replay import Player

AFTER = "it surfaced when the step was over and the parameters had moved"


class Keeper:
    """A recorder, a player, or neither. One a process."""

    def __init__(self, limits: Limits, journal: Journal, names: Names) -> None:
        self.limits, self.journal, self.names = limits, journal, names
        self.recorder = Recorder(limits.capsule, names) if limits.capsule else None
        self.player = Player(limits.replay, journal.write) if limits.replay else None
        self.on = self.recorder is not None or self.player is not None
        self.roots: List[Any] = []  # weak references, in the order in which they were met

    @property
    def refused(self) -> bool:
        """Whether a capsule can't be played back: the training is to end."""
        return self.player is not None and self.player.refused is not None

    def serve(self, iterator: Any, batch: Any) -> Any:
        """A loader gives a batch; returns what the script gets."""
        if self.player is not None:
            batch = self.player.serve(iterator, batch)
        if self.recorder is not None:
            self.recorder.serve(iterator, batch)
        return batch

    def prepare(self, module: torch.nn.Module) -> None:
        """Before anything of a training forward."""
        if self.player is not None:
            self.player.prepare(module, [reference() for reference in self.roots])

    def forward(self, forward: Forward, *, stepping: bool) -> None:
        """A training forward of a root starts."""
        if self.player is not None:
            self.player.forward(forward)
        if self.recorder is not None:
            self.recorder.forward(forward, stepping=stepping)

    def made(self, scaler: Any) -> None:
        """A GradScaler was made."""
        for one in (self.recorder, self.player):
            if one is not None:
                one.scalers.append(weakref.ref(scaler))

    def stepping(self, optimizer: Any, *, first: bool) -> None:
        """An optimizer is about to move; whether for the first time."""
        if first and self.player is not None:
            self.player.stepping(optimizer)
        if first and self.recorder is not None:
            self.recorder.met(optimizer)

    def moved(self) -> None:
        """Parameters are no longer those of the step."""
        if self.recorder is not None:
            self.recorder.moved = True

    def event(self, step: int, micro: int) -> None:
        """A non-finite value has surfaced: write the capsule, if none was written or given up."""
        told = None
        if self.recorder is not None:
            told = self.recorder.event(step, micro, [reference() for reference in self.roots])
        if told is not None:
            self.journal.write("capsule", **told)

    def look(self, step: int, micro: int, norm: Any) -> None:
        """Before the parameters move: what came from another rank, or is in the norm alone, is no event yet."""
        if self.recorder is None or self.recorder.written or self.recorder.moved:
            return
        value = float(norm) if isinstance(norm, (int, float)) or _single(norm) else 0.0
        reduced = shared() and bool(numbers.bad_of(self.names.gradients(), counted=0))
        if reduced or not math.isfinite(value):
            self.event(step, micro)

    def next(self, step: int, events: int) -> None:
        """The step is over."""
        if self.player is not None:
            self.player.end()
        if self.recorder is None:
            return
        if events and not self.recorder.written:
            self.recorder.unfit = self.recorder.unfit or AFTER
            self.event(step, 0)
        self.recorder.begin()

    def finish(self) -> None:
        """The process ends."""
        if self.player is not None:
            self.player.end()


def _single(norm: Any) -> bool:
    return isinstance(norm, torch.Tensor) and norm.numel() == 1 and type(norm) is torch.Tensor
