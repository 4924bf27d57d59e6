"""What the probe sees of forward and backward: roots, leaves, losses. Gradients are seen by `arrivals`."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from typing import Any, NamedTuple, Sequence

import torch

from . import inputs, numbers
from .arrivals import Arrivals
from .batches import Batches, Forward
from .graph import Walk
from .handles import Handles
from .journal import rank, world
from .keeping import Keeper
from .ledger import Ledger
from .limits import Limits
from .names import Names, dropout_active, sharded_paths, smallest_holder, unsaved
from .partial import reason
from .steps import Steps
from .stopping import Stopper
from .unhanded import Unhanded
from .window import Clock, Loss, Window

SEARCHES = 3  # walks over all objects alive, to find a module that training never calls
TINY = 1 << 10  # scaled losses remembered at most
TEXT = 200  # characters of an error's message
LOSSES = 16  # kept of one forward
UNTRACED = contextlib.nullcontext()


class Root(NamedTuple):
    """A module that training calls by itself, and the modules inside it."""

    reference: weakref.ref[torch.nn.Module]
    parts: weakref.WeakSet[torch.nn.Module]


class Observer:
    """Takes what the patches see. One a process."""

    def __init__(self, journal: Ledger, limits: Limits) -> None:
        self.journal = journal
        self.clock = Clock()
        self.handles = Handles()
        self.names = Names(self.handles)
        self.batches = Batches()
        self.keeper = Keeper(limits, journal, self.names)
        self.steps = Steps(journal, self.names, self.clock, self.batches, self.keeper)
        self.stopper = Stopper(limits, journal)
        self.arrivals = Arrivals(self.steps, self.handles, self.clock)
        self._begin()
        self.trace_if_wanted()

    def _begin(self) -> None:
        self.roots: dict[int, Root] = {}
        self.called: dict[int, Root] = {}  # since the last backward
        self.scaled: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self.checked = False
        self.finished = 0  # the process that wrote its last line
        self.searches = 0
        self.unhanded = Unhanded()
        self.threads: set[int] = set()  # that called a model
        self.settled = False  # all leaves have their names from one module
        self.sharded: dict[int, str] = {}

    def forked(self) -> None:
        """This is a child now: what the parent saw stays the parent's."""
        self._begin()
        self.names = self.steps.names = Names(self.handles)
        self.clock.restart()
        self.batches = self.steps.batches = Batches()
        self.journal.begin()
        self.keeper = self.steps.keeper = Keeper(self.stopper.limits, self.journal, self.names)
        self.stopper.tries = 0
        self.steps.reset()
        self.trace_if_wanted()

    def forget(self) -> None:
        """Another training begins in this process: what the last one did is no part of it."""
        self.forked()
        self.steps.frees_gradients = False
        self.arrivals.held.clear()
        self.journal.pid = None  # it gets a file of its own

    def follow(self, folder: str, limits: Limits) -> None:
        """Take orders as if the probe had been installed here and now."""
        self.journal.folder, self.journal.every_line = folder, limits.every_line
        self.stopper.limits = limits
        self.keeper = self.steps.keeper = Keeper(limits, self.journal, self.names)
        self.clock.restart()
        self.journal.armed()
        self.trace_if_wanted()

    def trace_if_wanted(self) -> None:
        """Get ready to trace one step; what it takes is imported only then."""
        if self.steps.trace is not None:
            self.steps.trace.abandon()
        self.steps.trace = self.arrivals.noted = None
        if self.stopper.limits.trace:
            from .tracing import Tracing

            self.steps.trace = trace = Tracing(self, self.stopper.limits.trace)
            self.arrivals.noted, self.steps.told.heard = trace.note, trace.hear

    def doing(self, what: str | None) -> None:
        """Clipping or an optimizer is at work from now on, or neither."""
        if self.steps.trace is not None:
            self.steps.trace.places.doing = what

    def traced(self) -> contextlib.AbstractContextManager[Any]:
        """Within it operations of this thread are traced, if they are at all."""
        trace = self.steps.trace
        return UNTRACED if trace is None else trace.on_this_thread()

    @property
    def window(self) -> Window:
        """The step under way."""
        return self.steps.window

    @property
    def found(self) -> bool:
        """Whether a non-finite value has surfaced."""
        return self.steps.events > 0

    def finish(self) -> None:
        """The process ends: write what is left."""
        if self.finished == os.getpid():
            return
        self.finished = os.getpid()
        self.leaving()
        self.steps.ended = True
        self.steps.end("exit")
        self.keeper.finish()
        count, contents, wanted = self.steps.count, self.steps.contents, self.stopper.limits.steps
        self.clock.take()
        self.journal.exit(
            steps=count.steps, backwards=count.backwards, events=self.steps.events,
            short=wanted if self.stopper.short(count) else 0, unfinished=self.steps.unfinished,
            unseen_since=contents.whole_step if contents.unseen else None,
            seconds=self.steps.seconds(), probe_seconds=self.clock.taken,
        )  # fmt: skip

    # forward -----------------------------------------------------------------------------------

    def stop_if_due(self) -> None:
        """Raises SystemExit when the driver wants no further step. Called before a training forward."""
        steps = self.steps
        why = self.stopper.why(steps.count, steps.window.micro + 1, steps.events)
        if why is not None and not steps.window.stepping:
            self.stopper.stop(why, steps.count, steps.window.micro + 1)

    def forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A training forward of a root module is about to start.

        A script may go on with parts of the model that it has just called (heads, embeddings): these work
        on what came of the batch, not on another one, and there may be dozens of them.
        """
        if any(p.requires_grad for p in module.parameters()):
            if not self._known(module):
                self._new_root(module)
            if self.keeper.on:
                self._give_back(module)
            if not any(module in root.parts for root in self.called.values()):
                self.called[id(module)] = self.roots[id(module)]
                found, marked = inputs.tensors([args, kwargs]) or {}, not self.batches.waiting
                self._called(Forward(type(module).__name__, found, key=id(module), marked=marked))
                if self.steps.trace is not None:
                    self.steps.trace.forward(module, found)

    def _give_back(self, module: torch.nn.Module) -> None:
        """The values of a capsule. Raises SystemExit where it can't be played back."""
        self.keeper.prepare(module)
        if self.keeper.refused:
            self.keeper.finish()
            self.stopper.stop("replay", self.steps.count, self.window.micro + 1)

    def _called(self, forward: Forward) -> None:
        waiting = self._waiting()
        if waiting is not None and waiting.key == forward.key:
            self.unhanded.look(waiting)
        self.threads.add(threading.get_ident())
        if self.keeper.on:
            self.keeper.forward(forward, stepping=self.window.stepping)
        self.steps.forward(forward)

    def _waiting(self) -> Forward | None:
        """The last forward, if its backward has not come."""
        forwards = self.window.forwards
        return forwards[-1] if forwards and forwards[-1].micro is None else None

    def asked(self, loss: torch.Tensor) -> None:
        """The script (not the probe) looks at a number that it could call backward on."""
        waiting = None if self.clock.nested else self._waiting()
        ends = numbers.ends(loss) if waiting is not None and len(waiting.seen) < LOSSES else None
        if waiting is not None and ends is not None:
            waiting.seen.append(ends)
            self._note_loss(loss)

    def _note_loss(self, loss: torch.Tensor | None) -> None:
        """A loss that may never be handed to backward."""
        if self.steps.trace is not None and loss is not None:
            self.steps.trace.note("loss", loss, self.window.micro + 1)

    def leaving(self) -> None:
        """The script is about to end the process or a thread, for a reason of its own: what it holds is still there."""
        waiting = self._waiting()
        if waiting is not None:
            self.unhanded.look(waiting, last=True)

    def died(self, error: str) -> None:
        """An error ends a thread, and nobody else hears of it."""
        if threading.get_ident() in self.threads:
            self.leaving()
            self.journal.write("died", thread=threading.current_thread().name, error=error)

    def learn(self, module: torch.nn.Module) -> None:
        """A loop hands over its whole model before the first step."""
        if not self._known(module):
            self._new_root(module)

    def _known(self, module: torch.nn.Module) -> bool:
        root = self.roots.get(id(module))
        return root is not None and root.reference() is module

    def _new_root(self, module: torch.nn.Module, *, rename: bool = False) -> None:
        parts = weakref.WeakSet(part for part in module.modules() if part is not module)
        self.roots[id(module)] = Root(weakref.ref(module), parts)
        self.keeper.roots.append(weakref.ref(module))
        parameters, buffers = self.names.learn(module, rename=rename)
        self.sharded.update(sharded_paths(module))
        self._describe(module)
        why = reason(module)
        if why is not None:
            self.journal.write("partial", reason=why)
        self.steps.contents.loaded(self.window, parameters, buffers, unsaved(module))

    def _describe(self, module: torch.nn.Module) -> None:
        parameters = list(module.parameters())
        dtypes: dict[str, int] = {}
        for parameter in parameters:
            key = str(parameter.dtype).replace("torch.", "")
            dtypes[key] = dtypes.get(key, 0) + 1
        sized = [parameter for parameter in parameters if not torch.nn.parameter.is_lazy(parameter)]
        self.journal.write(
            "root",
            module=type(module).__name__,
            parameters=len(parameters),
            elements=sum(parameter.numel() for parameter in sized),
            dtypes=dtypes,
            device=str(parameters[0].device),
            dropout=dropout_active(module),
            tied=[[name, *others] for name, others in self.names.tied.items()],
        )

    def _gradients_gone(self) -> bool:
        """Whether no leaf of this step that a module holds has a gradient any more (FSDP's unsharded leaves lose
        theirs anyway); the first one that has one answers."""
        gone = False
        for handle in list(self.window.leaves.values()):
            leaf = handle()
            if leaf is not None and self.names.named(leaf):
                if leaf.grad is not None:
                    return False
                gone = True
        return gone

    def returned(self, module: torch.nn.Module, output: Any) -> None:
        """A root's forward is over: keep the loss that it (or a loss function) returned, and how to know it again."""
        forward = self.window.forwards[-1] if self.window.forwards else None
        if forward is None:
            return
        loss = inputs.own_loss(output)
        if loss is not None and len(forward.losses) < LOSSES:
            forward.losses.append(loss)
            self._note_loss(inputs.loss_of(output))
        if id(module) == forward.key:
            forward.result = inputs.results(output)

    def gathered(self, module: torch.nn.Module) -> None:
        """A module of FSDP2's has worked, and still has its whole parameters."""
        self.names.gather(self.sharded[id(module)], module)

    def end_without_step(self) -> None:
        """Gradients that are gone at the next forward: dropped by the script, or freed as they arrived."""
        window = self.window
        if not window.leaves or window.stepping or self.steps.frees_gradients:
            return
        if self._gradients_gone():
            self.steps.end("backward_only" if window.consumed else "dropped")

    # backward ----------------------------------------------------------------------------------

    def backward(self, roots: Sequence[Any], nested: bool, create_graph: bool = False) -> list[Any]:
        """A backward call is about to run: hook its leaves, note its loss, kernels and tied weights.

        Returns the handles of hooks that `leave` removes.
        """
        if nested:
            self.window.nested += 1
        else:
            self._self_check(roots)
            self.steps.begin_backward()
            self.called = {}
        walk = Walk(roots)
        if not nested:
            self.steps.claim(walk)
        kernels = self.window.kernels
        for name, count in walk.kernels.items():
            kernels[name] = kernels.get(name, 0) + count
        self.window.add_casts(walk.casts)
        leaves = list(walk.leaves.values())
        new = [leaf for leaf in leaves if self.arrivals.hook(leaf)]
        if not nested:
            self._note_losses([root for root in roots if isinstance(root, torch.Tensor)])
            if new or not self.settled:
                self.settled = self._learn_by_search([leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)])
        hooks = [hook for leaf in leaves for hook in self.arrivals.hook_uses(leaf, walk)]
        if self.steps.trace is not None:
            self.steps.trace.backward(walk, list(roots), nested=nested, create_graph=create_graph)
        return hooks

    def raised(self, error: Exception) -> None:
        """The outermost backward raised: a script may swallow that, and the NaN with it."""
        kind = type(error).__name__
        self.steps.backward_raised("backward raised %s: %s" % (kind, " ".join(str(error).split())[:TEXT]))

    def leave(self, hooks: Sequence[Any] | None, nested: bool) -> None:
        """The backward call is over (or has raised)."""
        for handle in hooks or ():
            handle.remove()
        if self.steps.trace is not None:
            self.steps.trace.after_backward(nested=nested)
        if nested:
            return
        self.arrivals.held.clear()
        self.steps.contents.look_at_buffers(self.window)
        if self.window.stepped_inside:
            self.steps.end("step")
        else:
            self.window.consumed = self._gradients_gone()

    def _learn_by_search(self, leaves: list[torch.Tensor]) -> bool:
        """Training may call only parts of the model: find the module that holds all leaves, a few times at most.

        Whether that is settled, for as long as no other leaf comes.
        """
        if self.names.in_one(leaves) or self.searches == SEARCHES:
            return True
        self.searches += 1
        module = smallest_holder(leaves)
        if module is not None and not self._known(module):
            self._new_root(module, rename=True)
        return False

    def scaled_by(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        """A GradScaler scaled losses: keep what they were before."""
        if not scaler.is_enabled():
            return
        self.steps.scaler = weakref.ref(scaler)
        single = isinstance(outputs, torch.Tensor)
        pairs = zip([outputs] if single else outputs, [scaled] if single else scaled)
        self.scaled = {key: kept for key, kept in self.scaled.items() if kept[0]() is not None}
        for before, after in pairs:
            if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and len(self.scaled) < TINY:
                ends = numbers.ends(before)
                if ends is not None:
                    self.scaled[id(after)] = (weakref.ref(after), ends)

    def _note_losses(self, roots: list[torch.Tensor]) -> None:
        for root in roots:
            handed = numbers.ends(root) if root.numel() == 1 and root.requires_grad else None
            if handed is not None:
                reference, unscaled = self.scaled.get(id(root), (None, None))
                known = unscaled if reference is not None and reference() is root else None
                self.window.losses.append(Loss(self.window.micro, handed, known))

    def _self_check(self, roots: Sequence[Any]) -> None:
        """Plant a NaN once, through the same backward, hook and reading as real gradients.

        Nothing is saved for backward (the script may watch saved tensors), and anomaly mode would raise.
        """
        if self.checked or not roots:
            return
        self.checked = True
        device = next((root.device for root in roots if isinstance(root, torch.Tensor)), torch.device("cpu"))
        kept, self.steps.window = self.window, Window(1)
        try:
            with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
                scratch = torch.ones(2, device=device, requires_grad=True)
                torch.autograd.backward(scratch.clone(), torch.tensor([1.0, math.nan], device=device))
            values = numbers.read([flag.ends for flag in self.window.flags])
        finally:
            self.steps.window = kept
        seen = any(numbers.kind(low, high) == "nan" for low, high in values)
        self.journal.write("self_check", seen=seen, device=str(device), rank=rank(), world=world())
