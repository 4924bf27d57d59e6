"""The trace of one training step: which operation turned finite values into a NaN or an Inf, and where.

NANBISECT_TRACE=<n> traces step n from its first forward until it is judged; `replay` (of a saved step)
means step 1. It looks at every operation of forward, backward, recompute and optimizer, walks back from
what failed, and writes one `origin` event. It changes nothing that the training computes.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

import torch
from torch.nn.modules import module as modules
from torch.utils import _python_dispatch

from . import trace_axes as axes
from . import trace_loaded as loaded
from . import trace_loss as loss
from . import trace_operations as operations
from . import trace_tell as tell
from . import trace_way as way
from .events import Place as Surfacing
from .journal import rank
from .trace_book import Book
from .trace_eagerly import Eagerly, Refused
from .trace_failed import Failures, Heard, Targets
from .trace_mode import Mode
from .trace_places import Places
from .trace_records import Known
from .window import Entry, Window

if TYPE_CHECKING:
    from .graph import Walk
    from .observer import Observer

ALSO = 16  # births of the same kind that are listed


class Tracing:
    """Begins and ends the trace of one step. One a process."""

    def __init__(self, observer: Observer, step: int) -> None:
        self.observer, self.step = observer, step
        self.begun = self.over = self.told = False
        self.plain: Optional[float] = None
        self.failures = Failures()
        self.graphs: Dict[int, tell.Graph] = {}
        self.loaded: List[loaded.Loaded] = []
        self.eagerly = Eagerly()
        self.hooks: List[Any] = []
        self.book, self.places = Book(), Places()
        self.mode = Mode(self.book, self.places, observer.clock, self._failed)

    # what the probe sees --------------------------------------------------------------------------

    def hear(self, window: Window, place: Surfacing, bad: List[Entry]) -> None:
        """A non-finite event is about to be written."""
        if place.phase == "load" or (self.begun and window.step == self.step):
            self.failures.heard.append(Heard(place, bad))

    def forward(self, module: torch.nn.Module, found: Dict[str, torch.Tensor]) -> None:
        """A training forward of a root starts (everything that the probe does before it is done)."""
        self._tried(self._forward, module, found)

    def _tried(self, work: Callable[..., None], *args: Any) -> None:
        """An error of ours ends the trace, and it is written why nothing was found."""
        if self.over:
            return
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001 - the training must go on
            self._failed(error)

    def _forward(self, module: torch.nn.Module, found: Dict[str, torch.Tensor]) -> None:
        self.places.doing = None
        if not self.begun and self.observer.window.step == self.step:
            self._begin(module)
        elif self.begun and self.failures.first is not None:
            self.finish(self.observer.window, "judged")
        if self.begun and not self.over:
            self.mode.micro = self.observer.window.micro + 1
            self.book.sizes = axes.sizes(found)
            self._know(found)

    def _begin(self, module: torch.nn.Module) -> None:
        self.began, self.begun = time.perf_counter(), True
        try:
            roots = [root for root in self._roots() if root is not None]
            self.eagerly.begin(part for root in roots for part in root.modules())
        except Refused as refused:
            self._write({"found": False, "reason": str(refused)})
            return
        self.loaded = loaded.loaded(self.observer.names)
        self.mode.watched = {each.key: None for each in self.loaded if each.key is not None}
        self.places.begin()
        self.places.enter(module, None)
        self.hooks = [
            modules.register_module_forward_pre_hook(self.places.enter),
            modules.register_module_forward_hook(self.places.leave, always_call=True),
        ]
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def _roots(self) -> List[Any]:
        return [root.reference() for root in self.observer.roots.values()]

    def _know(self, batch: Dict[str, torch.Tensor]) -> None:
        """Names of what was there before the step."""
        names, table = self.observer.names, self.book.named
        for what, pairs in (
            ("batch", list(batch.items())),
            ("parameter", names.live(names.parameters)),
            ("buffer", names.buffers_now()),
        ):
            for name, tensor in pairs:
                key = operations.storage(tensor)
                if key is not None:
                    table[key] = Known(what, name)

    def backward(self, walk: Walk, roots: List[Any], *, nested: bool, create_graph: bool) -> None:
        """A backward call is about to run."""
        if not self.begun or self.over:
            return
        if not nested:
            micro = self.observer.window.micro
            self.graphs[micro] = tell.Graph(loss.addends(roots), loss.uses(walk))
            for root in roots:
                if isinstance(root, torch.Tensor):
                    self.note("loss", root, micro)
        self.places.enter_backward(nested=nested, create_graph=create_graph)

    def after_backward(self, *, nested: bool) -> None:
        """It is over."""
        if self.begun and not self.over:
            self.places.leave_backward(nested=nested)

    def note(self, what: str, tensor: torch.Tensor, micro: int, leaf: Optional[torch.Tensor] = None) -> None:
        """Remember which record made this loss or gradient bad, before anything is done to it."""
        if not self.begun or self.over:
            return
        key = id(tensor if leaf is None else leaf)
        self.mode.then(self.failures.note(self.book, what, micro, tensor, key))

    def on_this_thread(self) -> Any:
        """A context in which this thread's operations are seen (a backward may be called from another thread)."""
        if not self.begun or self.over or self.mode in _python_dispatch._get_current_dispatch_mode_stack():
            return contextlib.nullcontext()
        return self.mode

    def abandon(self) -> None:
        """This process is a fork, or takes other orders: what was under way is not its own."""
        self.over = self.mode.done = True

    # the end --------------------------------------------------------------------------------------

    def ended(self, window: Window, how: str, seconds: Optional[float]) -> None:
        """A step of the probe's is over; `seconds` that it took, where it had a backward."""
        self._tried(self._ended, window, how, seconds)

    def _ended(self, window: Window, how: str, seconds: Optional[float]) -> None:
        if self.begun and (window.seen or self.failures.heard or how == "exit"):
            self.finish(window, how)
        elif how == "exit" and self.observer.journal.pid == os.getpid():
            reason = "step %d was not reached: the training ended in step %d" % (self.step, window.step)
            self._write({"found": False, "reason": reason})
        elif seconds is not None:
            self.plain = seconds

    def finish(self, window: Window, how: str) -> None:
        """Stop looking, walk back from what failed, write it."""
        seconds = time.perf_counter() - self.began
        if self.mode.done:  # it gave up
            return
        self.mode.flush()
        self._stop()
        load, heard = self.failures.load, self.failures.first
        if heard is not None:
            fields = self._found(window, heard)
        elif load is not None:
            fields = self._only_loaded(load)
        else:
            fields = {"found": False, "reason": self._nothing(how)}
        self._write({**fields, "seconds": seconds})

    def _only_loaded(self, heard: Heard) -> Dict[str, Any]:
        """Something was bad before the first step, and nothing that this step computed: its first use, if any."""
        names = [entry["name"] for entry in heard.bad]
        bad = [each for each in self.loaded if each.fields["name"] in names]
        place = {"phase": "load", "value": heard.place.value, "name": names[0], "micro_batch": 0}
        if not bad:
            return {"found": False, "reason": "%s was bad after loading" % names[0], "surfaced": place}
        used = self.mode.watched.get(bad[0].key) if bad[0].key is not None else None
        origin = self._teller().loaded(bad[0].fields, used)
        link = {key: origin[key] for key in tell.LINK}
        return {"found": True, "reason": None, "surfaced": place, "micro_batch": 0, "origin": origin, "chain": [link],
                "chain_length": 1, "nan_at": 0 if link["kind"] == "nan" else None}  # fmt: skip

    def _nothing(self, how: str) -> str:
        absorbed = "; a GradScaler skipped it" if how == "scaler_skip" else ""
        return "nothing non-finite surfaced in step %d%s" % (self.step, absorbed)

    def _stop(self) -> None:
        self.over = self.mode.done = True
        for hook in self.hooks:
            hook.remove()
        if _python_dispatch._get_current_dispatch_mode() is self.mode:
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call] # else it stays, and only passes on
        self.eagerly.end()

    def _failed(self, error: Exception) -> None:
        """Called by the mode, too."""
        if self.told:
            return
        self._stop()
        self.observer.journal.write("probe_error", where="trace", error=repr(error))
        self._write({"found": False, "reason": "the trace failed: %r" % error})

    def _found(self, window: Window, heard: Heard) -> Dict[str, Any]:
        place = heard.place
        teller = self._teller()
        names, contents = self.observer.names, self.observer.steps.contents
        targets = Targets(self.book, names, contents, self.failures.notes).of(window, heard)
        target, others = way.first(self.book, targets) if targets else (None, [])
        found = None if target is None else way.back(self.book, target)
        name = heard.bad[0]["name"] if heard.bad else None
        surfaced = {"phase": place.phase, "value": place.value, "name": name, "micro_batch": place.micro}
        fields: Dict[str, Any] = {"surfaced": surfaced, "micro_batch": place.micro}
        if found is None:
            reason = "what was non-finite came from no operation that was seen"
            fields.update(found=False, reason=reason)
        else:
            fields.update(found=True, reason=None, origin=teller.origin(found), **teller.chain(found))
            fields.update(also=[teller.link(birth) for birth in others[:ALSO]], also_count=len(others))
        graph = self.graphs.get(place.micro, tell.Graph([], {}))
        fields["addends"] = tell.addends(teller, graph, found if place.phase != "loss" else None)
        fields["use"] = self._use(teller, graph, heard, found)
        return fields

    def _use(self, teller: tell.Teller, graph: tell.Graph, heard: Heard, found: Optional[way.Way]) -> Any:
        for entry in heard.bad[:1]:
            for name, tensor in self.observer.names.live(self.observer.names.parameters):
                if name == entry["name"] and id(tensor) in graph.uses:
                    return tell.use(teller, graph.uses[id(tensor)], entry["uses"], found)
        return None

    def _teller(self) -> tell.Teller:
        paths = tell.Paths(self.observer.names, self._roots(), self.places.modules)
        names = self.observer.names
        leaves = {id(tensor): name for name, tensor in names.live(names.parameters)}
        return tell.Teller(self.book, self.places, paths, leaves)

    def _write(self, fields: Dict[str, Any]) -> None:
        self.over = self.told = True
        teller = self._teller()
        for each in self.loaded:
            used = self.mode.watched.get(each.key) if each.key is not None else None
            each.fields["first_use"] = tell.first_use(teller, used)
        whole: Dict[str, Any] = {
            "step": self.step, "micro_batch": None, "rank": rank(), "surfaced": None, "origin": None,
            **tell.NOTHING, "kernels": tell.kernels(teller, self.mode), "use": None, "addends": [],
            "loaded": [each.fields for each in self.loaded], "operations": self.places.count,
            "seconds": None, "plain_seconds": self.plain, "traced_in_eager": self.eagerly.compiled, **fields,
        }  # fmt: skip
        self.observer.journal.write("origin", **whole)
        self._forget()

    def _forget(self) -> None:
        """Hold nothing of the user's any longer."""
        self.book = self.mode.book = Book()
        self.failures, self.graphs, self.loaded = Failures(), {}, []
        places, self.places = self.places, Places()
        self.mode.places = self.places
        self.places.count = places.count
