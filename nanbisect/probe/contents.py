"""What a model and its optimizers hold: looked at after loading, and after each step.

Parameters in training are looked at after every step. What else there is may be several times as large:
the optimizers' state, and frozen parameters (which nothing should change). In a run whose end the driver
knows (a cell) that is looked at after every step too; in one that may last for days after the first few,
then after every twentieth, whenever something else was non-finite, and at the end. An event that may have
arisen before the step after which it was found says since when nobody had looked.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from . import numbers
from .events import Events, Place
from .journal import shared
from .names import Names, Pairs
from .ownership import owned, state_of
from .window import BufferFlag, Entry, Window

FIRST = 4  # steps of a long run after each of which all is looked at,
EVERY = 20  # and then one in so many


class Contents:
    """Judges parameters, buffers and optimizer state."""

    def __init__(self, names: Names, events: Events) -> None:
        self.names = names
        self.events = events
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.excused: dict[str, str] = {}  # buffers with a non-finite value that is no event by itself, and its kind
        self.known = 0  # optimizers met, those included that are gone
        self.moved_step = 0  # step in which an optimizer moved last
        self.whole_step = 0  # step after which all was looked at last
        self.more = True  # whether there was more than parameters in training
        self.unseen = False  # whether that may have changed since

    def met(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer is about to move; whether for the first time."""
        if optimizer in self.optimizers:
            return False
        self.optimizers.add(optimizer)
        self.known, self.more = self.known + 1, True
        return True

    # loading -----------------------------------------------------------------------------------

    def loaded(self, window: Window, parameters: Pairs, buffers: Pairs, unsaved: set[int]) -> None:
        """Values before the first step. `unsaved`: ids of buffers that no checkpoint holds.

        An Inf in a buffer is usually an intended mask. A NaN in an unsaved one is usually memory that loading
        left as it was, for code that makes the values anew: where it is used, a loss or gradient shows it.
        """
        bad = numbers.bad_of(parameters)
        made = {name for name, tensor in buffers if id(tensor) in unsaved}
        for entry in numbers.bad_of(buffers):
            if entry["value"] == "nan" and entry["name"] not in made:
                bad.append(entry)
            else:
                self._excuse(window, entry["name"], entry["value"], "after loading")
        if bad:
            self.events.nonfinite(window, Place("load", bad[0]["value"]), bad, len(parameters) + len(buffers))

    def _excuse(self, window: Window, name: str, value: str, when: str) -> None:
        if name not in self.excused:
            self.excused[name] = value
            if value == "nan":
                text = "buffer %s, which no checkpoint holds, was NaN %s (memory that nothing filled?)" % (name, when)
                self.events.repair(window, "nan_buffer", text, [name])
            else:
                text = "buffer %s holds %s %s" % (name, value, when)
                self.events.repair(window, "infinite_buffer", text, [name])

    # buffers -----------------------------------------------------------------------------------

    def look_at_buffers(self, window: Window) -> None:
        """After a micro-batch's backward: the forward may have poisoned a buffer. It is judged with the step."""
        for name, tensor in self.names.buffers_now():
            found = numbers.look(tensor)
            if found is not None:
                handle = self.names.handles.of(tensor)
                window.buffers.append(BufferFlag(window.micro_batch, name, handle, found))

    def judge_buffers(self, window: Window) -> None:
        """A NaN is an event, and +Inf in what was finite; -Inf is how masks are written, wherever they are built."""
        flags, window.buffers = window.buffers, []
        bad: list[Entry] = []
        for flag, (low, high) in zip(flags, numbers.read([flag.ends for flag in flags])):
            value = numbers.kind(low, high)
            if value is None or flag.name in [entry["name"] for entry in bad]:
                continue
            known = self.excused.get(flag.name)
            if value == "-inf" or known == "nan" or (value == "+inf" and known is not None):
                self._excuse(window, flag.name, value, "in training")
            else:
                bad.append(numbers.entry(flag.name, value, flag.handle(), micro=flag.micro))
        if bad:
            place = Place("forward", bad[0]["value"], bad[0]["micro_batch"], window.number)
            self.events.nonfinite(window, place, bad, len(flags))

    # parameters and state ----------------------------------------------------------------------

    def judge_moved(self, window: Window, optimizer: torch.optim.Optimizer | None) -> None:
        """An optimizer has moved: parameters in training now, the rest if it is due or anything was bad."""
        self.moved_step = window.number
        pairs = [(name, each) for name, each in self.names.live(self.names.parameters) if each.requires_grad]
        if not window.seen:  # a second optimizer of the same step
            pairs = [(self.names.name(parameter), parameter) for parameter in owned(optimizer)]
        bad = numbers.bad_of(pairs)
        rest, since = self._rest(due=bool(bad or window.bad or window.surfaced))
        found = bad + numbers.bad_of(rest)
        if found:  # a parameter in training is bad since this step: it was looked at after the one before
            self._tell(window, found, len(pairs) + len(rest), None if bad else since)

    def judge_left(self, window: Window) -> None:
        """The training ends: look at what may have changed since all was looked at, unless it is gone."""
        if self.unseen and len(self.optimizers) == self.known:
            rest, since = self._rest(due=True)
            bad = numbers.bad_of(rest)
            if bad:
                self._tell(window, bad, len(rest), since)

    def _rest(self, *, due: bool) -> tuple[Pairs, int | None]:
        """All but parameters in training, if that is due; and when it was looked at before, if steps are between."""
        step, before = self.moved_step, self.whole_step
        if not (due or self.events.journal.every_line or step <= FIRST or step % EVERY == 0):
            self.unseen = self.more
            return [], None
        frozen = [(name, each) for name, each in self.names.live(self.names.parameters) if not each.requires_grad]
        rest = frozen + state_of(self.optimizers, self.names)
        since = before if self.unseen and before < step - 1 else None
        self.unseen, self.more, self.whole_step = False, bool(rest), step
        return rest, since

    def _tell(self, window: Window, bad: list[Entry], of: int, since: int | None) -> None:
        for entry in bad:
            entry["micro_batch"] = window.micro_batch
        phase = "optimizer"
        if shared() and not window.all_bad():
            reduced = numbers.bad_of(self.names.gradients())
            phase, bad = ("reduce", reduced) if reduced else (phase, bad)
        place = Place(phase, bad[0]["value"], window.micro_batch, self.moved_step, since)
        self.events.nonfinite(window, place, bad, of)
