"""What failed in the traced step, and the records that made it bad: from there the walk back starts."""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Optional

import torch

from . import trace_operations as operations
from .contents import Contents
from .events import Place
from .names import UNKNOWN, Names
from .ownership import state_of
from .trace_book import Book
from .trace_records import Record
from .window import Entry, Window


class Heard(NamedTuple):
    """A non-finite event of the traced step."""

    place: Place
    bad: List[Entry]


class Note(NamedTuple):
    """What was handed to backward, or arrived: loss or gradient, and the record that made it bad."""

    what: str
    micro: int
    key: int  # id of the loss, or of the leaf
    record: int


class Failures:
    """What was heard of, and what was noted before anything could be done to it."""

    def __init__(self) -> None:
        self.heard: List[Heard] = []
        self.notes: List[Note] = []

    @property
    def load(self) -> Optional[Heard]:
        """What was bad after loading."""
        return next((each for each in self.heard if each.place.phase == "load"), None)

    @property
    def first(self) -> Optional[Heard]:
        """What surfaced first in the step itself; not what is bad since loading, and looked at again."""
        found = next((each for each in self.heard if each.place.phase != "load"), None)
        return None if found is not None and self.load is not None and _left(found, self.load) else found

    def note(self, book: Book, what: str, micro: int, tensor: torch.Tensor, key: int) -> Callable[[], None]:
        """Remembers, when it is called, which record made this loss or gradient bad."""
        storage = operations.storage(tensor)

        def remember() -> None:
            mark = None if storage is None else book.bad.get(storage)
            if mark is not None:
                self.notes.append(Note(what, micro, key, int(mark.value)))

        return remember


class Targets:
    """Finds the records of what failed."""

    def __init__(self, book: Book, names: Names, contents: Contents, notes: List[Note]) -> None:
        self.book, self.names, self.contents, self.notes = book, names, contents, notes

    def of(self, window: Window, heard: Heard) -> List[Record]:
        """Records of what failed, the first first."""
        place = heard.place
        if place.phase == "loss":
            return self._losses(place.micro)[:1]
        if place.phase == "backward":
            return self._gradients(place.micro, heard.bad[0]["name"] if heard.bad else UNKNOWN)
        if place.phase == "clip" and isinstance(window.norm, torch.Tensor):
            return self._of([window.norm])
        return self._of(self._named(heard, place.phase))

    def _losses(self, micro: int) -> List[Record]:
        """Of this micro-batch, the last that was handed over or looked at."""
        notes = [note for note in reversed(self.notes) if note.what == "loss"]
        notes.sort(key=lambda note: note.micro != micro)
        return [self.book.records[note.record] for note in notes]

    def _gradients(self, micro: int, name: str) -> List[Record]:
        """Of this micro-batch, in order of arrival, the named one first."""
        keys = {id(tensor) for known, tensor in self.names.live(self.names.parameters) if known == name}
        notes = [note for note in self.notes if note.what == "gradient" and note.micro == micro]
        notes.sort(key=lambda note: note.key not in keys)
        return [self.book.records[note.record] for note in notes]

    def _named(self, heard: Heard, phase: str) -> List[torch.Tensor]:
        names = self.names
        if phase == "reduce":
            pairs = names.gradients()
        else:
            optimizers = self.contents.optimizers
            pairs = [*names.live(names.parameters), *names.buffers_now(), *state_of(optimizers, names)]
        wanted = {entry["name"] for entry in heard.bad}
        return [tensor for name, tensor in pairs if name in wanted or (phase == "reduce" and not wanted)]

    def _of(self, tensors: List[torch.Tensor]) -> List[Record]:
        """The record of the one whose badness is the oldest."""
        keys = [operations.storage(tensor) for tensor in tensors]
        marks = [self.book.bad[key] for key in keys if key is not None and key in self.book.bad]
        records = [self.book.records[mark.value] for mark in marks]
        return sorted(records, key=lambda record: record.root)[:1]


def _left(heard: Heard, load: Heard) -> bool:
    """Whether an event after the step shows only what was bad before it."""
    names = {entry["name"] for entry in load.bad}
    return heard.place.phase == "optimizer" and all(entry["name"] in names for entry in heard.bad)
