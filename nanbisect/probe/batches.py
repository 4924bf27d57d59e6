"""Which records a training forward worked on: batches served by data loaders, paired with forwards.

The last batch served is often the wrong one: Accelerate fetches one ahead and the Trainer a whole window.
So batches wait in a queue, and a forward takes the one whose content it shares (marks), the earliest of
equals; those before it were skipped or evaluated. Without any shared content the next in the queue is
taken if it has as many rows, and the line says that this is by order alone.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Deque, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from . import inputs
from .inputs import Mark, Sum

WAITING = 512  # batches that wait for a forward


class Served(NamedTuple):
    """A batch that a data loader gave to the script."""

    indices: list[int] | None
    records: list[str] | None
    rows: int | None
    marks: list[Mark]


Pair = Tuple[Optional[Served], Optional[str]]  # a batch, and how it was found
Line = Dict[str, Any]  # the fields of a `batch` event


class Forward:
    """A training forward of a root module. `micro`: its micro-batch, once a backward came.

    `result` tells the nodes that it returned from all others, so that a backward is known to go through it
    (`used`), or to pass it by (`passed`: that backward's micro-batch). Ranges of losses, in case that no backward
    comes: `losses` that a module returned, and those that the script was `seen` to look at, or to hold. `marked`: no
    loader tells which rows these are, so their content must.
    """

    def __init__(self, module: str, found: dict[str, torch.Tensor], *, key: int, marked: bool) -> None:
        self.module = module
        self.key = key  # tells modules of one class apart
        self.micro: int | None = None
        self.shapes = {name: list(tensor.shape) for name, tensor in found.items()}
        self.rows = inputs.rows(found)
        self.marks = inputs.marks(found)
        self.padding: Sum | None = inputs.padding(found)
        self.valid_labels: Sum | None = inputs.valid_labels(found)
        self.contents: torch.Tensor | None = inputs.contents(found) if marked else None
        self.result: set[int] = set()
        self.used = False
        self.passed: int | None = None
        self.losses: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []


Told = Tuple[Forward, List[Mark], bool]  # with its marks on the host, and whether it comes after one of its micro-batch


class Lost(NamedTuple):
    """A forward that got no backward, and its batch.

    `sure`: none will come, so the loss that it returned went no further. `told`: worth a word in any case.
    """

    forward: Forward
    line: Line
    sure: bool
    told: bool


class Batches:
    """Pairs served batches with forwards, in order."""

    def __init__(self) -> None:
        self.handed: weakref.WeakKeyDictionary[Any, Deque[Any]] = weakref.WeakKeyDictionary()
        self.waiting: Deque[Served] = deque(maxlen=WAITING)
        self.last: Served | None = None
        self.ordered = True  # one forward a micro-batch so far, where no content is shared

    # serving -----------------------------------------------------------------------------------

    def began(self, iterator: Any) -> None:
        """An iterator starts over."""
        self.handed[iterator] = deque()

    def asked(self, iterator: Any, indices: Any) -> None:
        """An iterator hands indices to its dataset (workers: long before the batch is served)."""
        self.handed.setdefault(iterator, deque()).append(indices)

    def served(self, iterator: Any, batch: Any) -> None:
        """An iterator gives a batch to the script."""
        queue = self.handed.get(iterator)
        handed = queue.popleft() if queue else None
        if getattr(iterator, "_in_order", True) is False and getattr(iterator, "_num_workers", 0) > 1:
            handed = None  # batches come as they are ready
        found = inputs.tensors(batch) or {}
        length = inputs.rows(found)
        self.waiting.append(Served(_indices(handed), inputs.records(batch, length), length, inputs.marks(found)))

    # pairing -----------------------------------------------------------------------------------

    def lines(self, forwards: list[Forward], step: int, *, ended: bool = False) -> tuple[list[Line], list[Lost]]:
        """`batch` events of forwards whose backward has come, and the forwards that had none.

        Reads the device once. Several forwards of one micro-batch make one line, the last that was paired.
        `ended`: no backward will come, so the last one waits in vain.
        """
        told = list(self._told(forwards))
        pairs = [self._match(marks, forward.rows, again) for forward, marks, again in told]
        lines: dict[int, Line] = {}
        for forward, (served, how) in zip(forwards, pairs):
            if forward.micro is not None and (served is not None or forward.micro not in lines):
                lines[forward.micro] = _line(step, forward, served, how)
        trained = [served for forward, (served, _) in zip(forwards, pairs) if forward.used]
        passed = [(forward, pair) for forward, pair in zip(forwards, pairs) if forward.passed is not None]
        lost = [Lost(one, _line(step, one, *pair), True, _new(pair[0], trained)) for one, pair in passed]
        lost += self._followed(told, pairs, step)
        if ended and forwards[-1].micro is None:
            lost.append(Lost(forwards[-1], _line(step, forwards[-1], *pairs[-1]), True, False))
        return list(lines.values()), lost

    def _followed(self, told: list[Told], pairs: list[Pair], step: int) -> Iterator[Lost]:
        """Where no backward tells: forwards after which the same module was called with something else.

        Sure where the batches were served; a script that hands on what no loader gave may need two forwards.
        """
        for index in range(len(told) - 1):
            (one, marks, _), (two, others, _) = told[index : index + 2]
            (first, how), (second, _) = pairs[index : index + 2]
            known = first is not None and second is not None
            other = first is not second if known else marks != others
            if other and _alike(one, two):
                yield Lost(one, _line(step, one, first, how), known, known)

    def _told(self, forwards: list[Forward]) -> Iterator[Told]:
        """Forwards with their marks on the host, and whether each comes after another of its micro-batch."""
        sums: list[Sum] = [mark.total for forward in forwards for mark in forward.marks]
        waiting: list[Sum] = [mark.total for served in self.waiting for mark in served.marks]
        facts = [fact for forward in forwards for fact in (forward.padding, forward.valid_labels)]
        values = iter(inputs.read_sums([*waiting, *sums, *(fact for fact in facts if fact is not None)]))
        self.waiting = deque((served._replace(marks=_read(served.marks, values)) for served in self.waiting), WAITING)
        marks = [_read(forward.marks, values) for forward in forwards]
        before: Forward | None = None
        for forward, own in zip(forwards, marks):
            forward.padding = None if forward.padding is None else next(values)
            forward.valid_labels = None if forward.valid_labels is None else next(values)
            yield forward, own, before is not None and before.micro == forward.micro
            before = forward

    def _match(self, marks: list[Mark], rows: int | None, again: bool) -> Pair:
        wanted = set(marks)
        scores = [len(wanted.intersection(served.marks)) for served in self.waiting]
        best = max(scores, default=0)
        if self.last is not None and len(wanted.intersection(self.last.marks)) > best:
            return self.last, "content"
        if not best:
            return self._next(rows, again)
        for _ in range(scores.index(best)):
            self.waiting.popleft()
        self.last = self.waiting.popleft()
        return self.last, "content"

    def _next(self, rows: int | None, again: bool) -> Pair:
        """By order alone; never again once a micro-batch had several forwards (parts of a model, a recurrent cell)."""
        self.ordered = self.ordered and not again
        if not self.ordered or not self.waiting or self.waiting[0].rows != rows:
            return None, None
        self.last = self.waiting.popleft()
        return self.last, "order"


def _alike(one: Forward, two: Forward) -> bool:
    """Whether two forwards are of one module, and of one micro-batch as far as is known."""
    same = (one.micro, one.module, one.key) == (two.micro, two.module, two.key)
    return same and not (one.used or two.used) and one.passed is None


def _new(served: Served | None, others: list[Served | None]) -> bool:
    return served is not None and all(served is not other for other in others)


def _read(marks: list[Mark], values: Iterator[int]) -> list[Mark]:
    return [Mark(mark.key, next(values)) for mark in marks]


def _line(step: int, forward: Forward, served: Served | None, how: str | None) -> Line:
    indices = None if served is None or served.indices is None else served.indices[: inputs.LISTED]
    ids = None if served is None or served.records is None else served.records[: inputs.LISTED]
    return {
        "step": step, "micro_batch": forward.micro, "module": forward.module, "matched": how,
        "indices": indices, "records": ids, "contents": _contents(forward) if ids is None and indices is None else None,
        "shapes": forward.shapes, "backward": True,
        "padding": forward.padding, "valid_labels": forward.valid_labels,
    }  # fmt: skip


def _contents(forward: Forward) -> list[str] | None:
    """Marks of the rows, where nothing better tells records apart. Reads the host."""
    if forward.contents is None:
        return None
    return ["%016x" % (each & 0xFFFFFFFFFFFFFFFF) for each in forward.contents[: inputs.LISTED].tolist()]


def _indices(handed: Any) -> list[int] | None:
    """Dataset indices of a batch; None for an iterable dataset, which has none."""
    many = handed if isinstance(handed, (list, tuple)) else [handed]
    return [int(each) for each in many] if all(_whole(each) for each in many) else None


def _whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_cuda)
