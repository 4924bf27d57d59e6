"""Writes non-finite events and silent repairs, in the form that `schema` gives; events are counted and bounded."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

from .account import FIRST_BAD
from .journal import rank
from .ledger import Ledger
from .window import Entry, Window

EVENTS = 4  # non-finite events written; the first is the one that counts


class Place(NamedTuple):
    """Where a non-finite value surfaced, and its kind. `step`: another than the window's.

    `since`: the last step after which the same was looked at and finite, if steps between were not looked at.
    `backward`: false for a loss that the script did not hand to backward.
    """

    phase: str
    value: str
    micro: int = 0
    step: int | None = None
    since: int | None = None
    backward: bool = True


class Events:
    """What this process has to tell. `count`: non-finite events so far, written or not."""

    def __init__(self, journal: Ledger) -> None:
        self.journal = journal
        self.count = 0
        self.heard: Callable[[Window, Place, list[Entry]], None] | None = None  # the trace's

    def nonfinite(self, window: Window, place: Place, bad: list[Entry], of: int) -> None:
        """A non-finite value has surfaced: `bad` of so many tensors looked at."""
        if self.heard is not None:
            self.heard(window, place, bad)
        self.count += 1
        if self.count > EVENTS:
            return
        self.journal.write(
            "nonfinite",
            step=window.step if place.step is None else place.step, since=place.since, micro_batch=place.micro,
            rank=rank(), phase=place.phase, value=place.value,
            tensors=bad[:FIRST_BAD], bad=len(bad), of=of, scale=window.scale, backward=place.backward,
        )  # fmt: skip

    def repair(
        self, window: Window, code: str, text: str, tensors: Sequence[str] = (), *,
        values: Mapping[str, Any] | None = None, step: int | None = None,
    ) -> None:  # fmt: skip
        """Something was repaired without a word; `values`: numbers that show it."""
        listed, number = list(tensors[:FIRST_BAD]), window.number if step is None else step
        self.journal.write("repair", step=number, code=code, text=text, tensors=listed, values=dict(values or {}))
