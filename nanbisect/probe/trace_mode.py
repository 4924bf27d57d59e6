"""The dispatch mode: sees every operation of the step, and hands its ranges to the book.

On the CPU a range is read at once. On a device it is kept there, with the tensors of the last few
operations, and read for many at a time: before too many wait, before they hold too much memory, and
before one of them is overwritten. So there is no wait for the device at every operation.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import numbers
from . import trace_operations as operations
from . import trace_ranges as ranges
from .phase import CUDA, capturing
from .trace_book import Book
from .trace_kernels import Kernels
from .trace_operations import floating
from .trace_places import Places
from .trace_records import FRAMES, Call
from .window import Clock, Ends, Range

WAITING = 64  # operations read at once
HELD = 32 << 20  # bytes of tensors that wait for it

Waiting = Tuple[Optional[Call], Any]  # with its ranges; or None and something to do at that place


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every operation on unchanged. An error of ours ends the trace, not the training."""

    def __init__(self, book: Book, places: Places, clock: Clock, failed: Callable[[Exception], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.book, self.places, self.clock, self.failed = book, places, clock, failed
        self.kernels = Kernels()
        self.done = False
        self.cuda = bool(CUDA.is_initialized())
        self.later = False  # keep all ranges back, as on a device (for tests)
        self.micro = 0
        self.watched: Dict[int, Any] = {}  # storage -> place of its first use
        self.waiting: List[Waiting] = []
        self.held: Set[int] = set()
        self.bytes = 0

    supports_higher_order_operators = True  # such an operator (flex_attention) is one operation here

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: every operation would pay for it, and compiled code is told to run eagerly anyway."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.done or self.clock.working or (self.cuda and capturing()):  # the probe's own work, a CUDA graph
            return function(*args, **kwargs)
        call = None
        try:
            call = self._before(function, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the training must go on
            self.give_up(error)
        result = function(*args, **kwargs)
        if call is not None:
            try:
                self._after(call, result)
            except Exception as error:  # noqa: BLE001
                self.give_up(error)
        return result

    def give_up(self, error: Exception) -> None:
        """From now on only pass on."""
        self.done = True
        self.waiting, self.held = [], set()
        self.failed(error)

    def _before(self, function: Any, args: Any, kwargs: Any) -> Optional[Call]:
        about = operations.about(function)
        place = self.places.find(about.name)
        if about.loss and place.phase == "forward":
            place = place._replace(phase="loss")
        if about.view:
            return None
        call = Call(about, place, self.places.count, self.micro)
        for pair in operations.inputs(about, args, kwargs):
            (call.inputs if floating(pair[1]) else call.whole).append(pair)
        if self.watched:
            self._watch(call)
        if about.written:
            self._look_before(call, operations.written(about, args, kwargs))
        if about.kernel:
            self.kernels.add(about, place, args, kwargs)
        call.forced = operations.infinite_scalar(args, kwargs)
        return call

    def _watch(self, call: Call) -> None:
        for _, tensor in call.inputs:
            key = operations.storage(tensor)
            if key in self.watched and self.watched[key] is None:
                self.watched[key] = (call.about.name, call.place, call.count)

    def _look_before(self, call: Call, written: operations.Named) -> None:
        if self.held and any(operations.storage(tensor) in self.held for _, tensor in written):
            self.flush()
        if call.about.empty or call.about.shared:
            call.outputs = written
            return
        for name, tensor in written:
            found = self._range_before(tensor) if floating(tensor) else None
            call.before.append((name, tensor, found))
            if isinstance(found, tuple) and ranges.kind_of(found) is not None and self.book.details > 0:
                call.described[id(tensor)] = ranges.describe(self.book.name_of(tensor) or name, tensor, before=True)
        call.outputs = written

    def _range_before(self, tensor: torch.Tensor) -> Optional[Range]:
        """Of a tensor that is about to be written: what its last operation left, else it is looked at."""
        key = operations.storage(tensor)
        known = None if key is None else self.book.whole.get(key)
        if known is not None and not self.waiting:
            return known
        return ranges.look(tensor, later=self.later, brief=True)

    def _after(self, call: Call, result: Any) -> None:
        known = {id(tensor) for _, tensor in call.outputs}
        returned = operations.outputs(result)
        call.outputs = [pair for pair in returned if id(pair[1]) not in known] + call.outputs
        if call.about.empty or call.about.shared:
            found: List[Any] = [None] * len(call.outputs)
        else:
            found = [ranges.look(tensor, later=self.later) for _, tensor in call.outputs]
            if all(each is None for each in found):  # no number that could be bad
                return
        before = [each for _, _, each in call.before]
        if not self.waiting and all(each is None or type(each) is tuple for each in (*found, *before)):
            if not all(map(ranges.finite, found)):
                call.lines = self.places.lines(sys._getframe(1), FRAMES)
            self.book.take(call, found, before)
            return
        call.lines = self.places.lines(sys._getframe(1), FRAMES)
        self._keep(call, found)

    def _keep(self, call: Call, found: List[Any]) -> None:
        self.waiting.append((call, found))
        for _, tensor in (*call.inputs, *call.outputs):
            key = operations.storage(tensor)
            if key is not None and key not in self.held:
                self.held.add(key)
                self.bytes += tensor.numel() * tensor.element_size()
        if len(self.waiting) >= WAITING or self.bytes > HELD:
            self.flush()

    def then(self, work: Callable[[], None]) -> None:
        """Do this when all that ran so far is in the book: now, if nothing waits."""
        if self.waiting:
            self.waiting.append((None, work))
        else:
            work()

    def flush(self) -> None:
        """Read what waits, in one transfer, and hand it to the book in its order."""
        waiting, self.waiting, self.held, self.bytes = self.waiting, [], set(), 0
        if not waiting:
            return
        unread: List[Range] = []
        for call, found in waiting:
            if call is not None:
                unread += [each for each in (*found, *(pair[2] for pair in call.before)) if each is not None]
        values = iter(numbers.read(unread))

        def read(ranges_of: List[Any]) -> List[Optional[Ends]]:
            return [None if each is None else next(values) for each in ranges_of]

        for call, found in waiting:
            if call is None:
                found()
            else:
                self.book.take(call, read(found), read([pair[2] for pair in call.before]))
