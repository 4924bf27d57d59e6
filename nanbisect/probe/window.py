"""Records of the step under way (window): everything from one optimizer step to the next."""

from __future__ import annotations

import threading
import time
from typing import Any, Dict, NamedTuple, Tuple, Union

import torch

from .handles import Handle

Ends = Tuple[float, float]  # smallest and largest element
Range = Union[torch.Tensor, Ends]  # on its device, not read yet; or on the host
Entry = Dict[str, Any]  # one tensor in an event: name, value, micro_batch, uses, nan, posinf, neginf, numel


class Flag(NamedTuple):
    """The range of a gradient that arrived; `use` for one use of a tied weight."""

    micro: int
    handle: Handle
    use: str | None
    ends: Range


class Loss(NamedTuple):
    """What was handed to backward, and the same before a GradScaler where that is known; on the device."""

    micro: int
    handed: torch.Tensor
    unscaled: torch.Tensor | None


class LossValue(NamedTuple):
    """A loss on the host. `kind`: nan, +inf, -inf of the unscaled value where it is known, else of the handed one."""

    micro: int
    handed: float
    unscaled: float | None
    kind: str | None


class Bad(NamedTuple):
    """A gradient that arrived non-finite."""

    handle: Handle
    entry: Entry


class Surfaced(NamedTuple):
    """Where a non-finite value surfaced, before it is written (or absorbed by a GradScaler)."""

    phase: str
    value: str
    micro: int
    bad: list[Bad]


class BufferFlag(NamedTuple):
    """A buffer's range after a micro-batch's backward."""

    micro: int
    name: str
    handle: Handle
    ends: Range


class Window:
    """The step under way. `carried` and `deferred` may come from the step before: evidence on other optimizers."""

    def __init__(self, step: int, carried: list[Bad] | None = None, deferred: Surfaced | None = None) -> None:
        self.step = step
        self.carried: list[Bad] = carried or []
        self.deferred = deferred  # an event that a GradScaler may absorb
        self.flags: list[Flag] = []  # not read yet
        self.fine = 0  # gradients that were found finite as they arrived, not counted yet
        self.losses: list[Loss] = []  # not read yet
        self.micro = -1
        self.nested = 0
        self.recomputed = 0
        self.kernels: dict[str, int] = {}
        self.casts: int | None = 0  # None: somebody's own node may hide them
        self.leaves: dict[int, Handle] = {}
        self.forwards: list[Any] = []  # batches.Forward, not paired yet
        self.gradients = 0
        self.bad: list[Bad] = []
        self.loss_values: list[LossValue] = []
        self.surfaced = False  # a loss or gradient of this step is written as non-finite
        self.stepping = False  # an optimizer is at work: forwards are its closure's
        self.stepped_inside = False  # an optimizer stepped in a hook, during backward
        self.consumed = False  # gradients were freed as they arrived
        self.buffers: list[BufferFlag] = []  # after each micro-batch, not read yet
        self.norm: Any = None
        self.clip: dict[str, Any] | None = None
        self.after_clip: dict[str, Any] | None = None
        self.norms: dict[str, float] | None = None
        self.scale: float | None = None
        self.began = time.perf_counter()

    def add_casts(self, casts: int | None) -> None:
        """Casts in one more graph."""
        self.casts = None if casts is None or self.casts is None else self.casts + casts

    @property
    def seen(self) -> bool:
        """Whether a backward ran, or a gradient arrived, since the step before."""
        return self.micro >= 0 or bool(self.leaves)

    @property
    def number(self) -> int:
        """The step that work outside a step belongs to: the one before, if no backward was seen since."""
        return self.step if self.seen else max(1, self.step - 1)

    @property
    def micro_batch(self) -> int:
        """The micro-batch under way, from 0."""
        return max(self.micro, 0)

    def all_bad(self) -> list[Bad]:
        """Bad gradients of this step and those carried over, each tensor once."""
        return list({id(bad.handle): bad for bad in self.carried + self.bad}.values())

    def take(self) -> tuple[list[Flag], list[Loss], int]:
        """What has not been read yet, and how many need no reading; it is taken once."""
        taken = self.flags, self.losses, self.fine
        self.flags, self.losses, self.fine = [], [], 0
        return taken


class Clock:
    """The probe's own seconds: work inside work counts once, on each thread (CUDA's backward has its own).

    It is the host's clock. Kernels that the probe starts on a device run later, beside or behind the training's
    own, and are not in it; where the probe reads from a device it waits for all that was started before, the
    training's own kernels included, and that wait is in it. On the CPU it is all there is, but for what Python
    needs to call a hook at all.
    """

    def __init__(self) -> None:
        self.local = threading.local()
        self.seconds = 0.0  # since the last take; hooks that run once a module or gradient add to it by themselves
        self.taken = 0.0  # by all takes

    def __enter__(self) -> None:
        depth = getattr(self.local, "depth", 0)
        if depth == 0:
            self.local.since = time.perf_counter()
        self.local.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        self.local.depth -= 1
        if self.local.depth == 0:
            self.seconds += time.perf_counter() - self.local.since

    @property
    def working(self) -> bool:
        """Whether this thread is at the probe's own work."""
        return bool(getattr(self.local, "depth", 0))

    @property
    def nested(self) -> bool:
        """Whether the work of now runs inside other work of the probe."""
        return getattr(self.local, "depth", 0) > 1

    def restart(self) -> None:
        """Nothing counted so far (a forked child's training is its own)."""
        self.take()
        self.taken = 0.0

    def take(self) -> float:
        """Seconds since the last take, the running work included."""
        now = time.perf_counter()
        seconds, self.seconds = self.seconds, 0.0
        if getattr(self.local, "depth", 0):
            seconds += now - self.local.since
            self.local.since = now
        self.taken += seconds
        return seconds
