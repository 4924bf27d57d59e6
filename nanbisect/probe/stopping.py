"""Ending the training: when, and how.

`SystemExit(0)` is raised at the next training forward, not where the count is reached: the script has
then logged its last step. All ranks of a data-parallel run count the same steps, so they stop at the same
place. An event is seen by each rank for itself: a NaN that went through a reduction shows on every rank
in the same step, so all stop at the same forward. Ranks that saw nothing wait for a peer that is gone;
asking them would take communication that the training did not ask for, so they are left to the launcher,
or to whoever started the run (the `stopped` line says that it may end them).
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Callable

from .journal import Journal
from .limits import Limits

TRIES = 3  # raised so often; a script that swallows it is then ended without its consent


class Count:
    """Steps and backward calls of this process. `accumulation`: backward calls of the first step or skip.

    `absorbed`: those of steps that a GradScaler skipped. They end by themselves: its scale falls until a step is taken,
    or down to 1, where a skip is an event.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.backwards = 0
        self.absorbed = 0
        self.accumulation = 0

    def ended(self, how: str, backwards: int) -> None:
        """A step has ended with so many backward calls in it."""
        self.backwards += backwards
        self.absorbed += backwards if how == "scaler_skip" else 0
        self.steps += how in ("step", "backward_only")
        if not self.accumulation and how != "exit":
            self.accumulation = backwards


class Stopper:
    """Stops the training of one process. `finish` writes whatever has not been written."""

    def __init__(self, limits: Limits, journal: Journal) -> None:
        self.limits = limits
        self.journal = journal
        self.finish: Callable[[], Any] = int
        self.tries = 0

    def why(self, count: Count, under_way: int, events: int) -> str | None:
        """event, steps or backwards; None to go on. `under_way`: backward calls of the step that has not ended."""
        limits = self.limits
        if limits.at_event and events:
            return "event"
        if limits.steps and count.steps >= limits.steps:
            return "steps"
        done = count.backwards + under_way
        if limits.backwards:
            return "backwards" if done >= limits.backwards else None
        allowed = limits.steps * count.accumulation
        return "backwards" if allowed and done - count.absorbed >= allowed else None

    def short(self, count: Count) -> bool:
        """Whether a training that ends now was to go further."""
        wanted = self.limits.steps
        done = count.backwards - count.absorbed
        return bool(wanted) and count.steps < wanted and done < wanted * max(1, count.accumulation)

    def stop(self, why: str, count: Count, under_way: int) -> None:
        """Raise SystemExit, or end the process where that was swallowed or would only end a thread."""
        self.tries += 1
        main = threading.current_thread() is threading.main_thread()
        forced = self.tries > TRIES or not main
        if self.tries == 1 or forced:
            backwards = count.backwards + under_way
            self._say(why=why, steps=count.steps, backwards=backwards, tries=self.tries, forced=forced)
        if not forced:
            raise SystemExit(0)
        self.finish()
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        os._exit(0)

    def _say(self, **fields: Any) -> None:
        try:
            self.journal.write("stopped", **fields)
        except OSError:  # a full disk: stop all the same
            return


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except (OSError, ValueError, AttributeError):  # closed, or none at all
        return
