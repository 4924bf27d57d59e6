"""Which lines are written: all of a short run, few of a long one, and always those around an event.

In a run without a known end (`nanbisect watch`) steps are written up to the 50th, then every 100th, and
from the step before an event to two steps after it. Repairs are written so often a kind, and counted.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from typing import Any, Deque, Dict, Mapping

from .journal import Journal

FIRST = 50  # steps written in full
EVERY = 100  # then one in so many
AFTER = 2  # steps written after an event
REPAIRS = 50  # lines of one kind of repair in a long run
ROOTS = 50  # modules described
ERROR = 200  # characters of an error
HELD = 256  # lines kept in memory, in case that an event follows

Fields = Dict[str, Any]


class Ledger(Journal):
    """A journal that leaves lines out. `counts`: kind of repair -> times."""

    def __init__(self, folder: str, versions: Mapping[str, Any], *, every_line: bool = True) -> None:
        super().__init__(folder, versions)
        self.every_line = every_line
        self.begin()

    def begin(self) -> None:
        """Nothing written yet (a fork starts afresh, and so does another training)."""
        self.errors = 0  # of the probe's own
        self.counts: Counter[str] = Counter()
        self.roots = 0
        self.until = 0
        self.held: Deque[tuple[str, Fields]] = deque(maxlen=HELD)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event, or keep it back, or leave it out."""
        if kind in ("step", "batch") and not self._wanted(kind, fields["step"]):
            self.held.append((kind, {"time": time.time(), **fields}))
        elif kind == "nonfinite":
            self._release(fields["step"], fields["since"])
            super().write(kind, **fields)
        elif not self._too_many(kind, fields):
            super().write(kind, **fields)

    def exit(self, **fields: Any) -> None:
        """The last line, if there is a file at all; before it the error that ended the script, if one did."""
        if self.pid == os.getpid():
            error = getattr(sys, "last_value", None)
            if error is not None:
                super().write("raised", error=repr(error)[:ERROR])
            super().write("exit", repairs=dict(self.counts), **fields)

    def _wanted(self, kind: str, step: int) -> bool:
        return self.every_line or step <= max(FIRST, self.until) or (kind == "step" and step % EVERY == 0)

    def _release(self, step: int, since: int | None) -> None:
        """Write what was kept back of this step and the one before, and of all in which it may have arisen."""
        first = step - 1 if since is None else min(since + 1, step - 1)
        held, self.until = list(self.held), step + AFTER
        self.held.clear()
        for kind, fields in held:
            if fields["step"] >= first:
                super().write(kind, **fields)

    def _too_many(self, kind: str, fields: Fields) -> bool:
        if kind == "root":
            self.roots += 1
            return self.roots > ROOTS
        if kind != "repair":
            return False
        self.counts[fields["code"]] += 1
        return not self.every_line and self.counts[fields["code"]] > REPAIRS
